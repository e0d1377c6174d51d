"""Methods that give each edge of a graph a number.

Each method returns [edges + 1]; the last number is the sum over self-loops that layers added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnkit.core.capture.calls import EdgeCall
from attnkit.interpret.console import shown
from attnkit.interpret.methods.gradients import drawn

if TYPE_CHECKING:
    from attnkit.interpret.methods.graph_question import GraphQuestion


def attention(question: GraphQuestion) -> Tensor:
    """Return the attention weights, the mean over heads, of the last layer or the chosen layers.

    The weights of edges that cannot reach the node from their layer on are 0.
    """
    names = [call.layer for call in question.calls()[0]]
    calls, _ = question.calls(-1 if question.layers is None else question.layers)
    maps = []
    for call in calls:
        weights = call.weights.float().mean(dim=1)
        steps_before = len(names) - 1 - names.index(call.layer)
        if question.num_hops == len(names):
            near = question.reached(steps_before, max(call.num_nodes))
            weights = weights * near[call.edge_index[1]]
        maps.append(weights)
    return _sum(question, maps) / len(maps)


def relevance(question: GraphQuestion) -> Tensor:
    """Σ over layers of mean over heads of (∂y/∂α · α)⁺ (Chefer et al., Generic Attention-model
    Explainability, 2021, equation 5)."""
    parts, _ = _gradient_times_attention(question)
    return _sum(question, [part.clamp(min=0).mean(dim=1) for part in parts])


def input_gradient(question: GraphQuestion) -> Tensor:
    """Return |∂y/∂m_e| for a factor m_e = 1 on the messages along an edge, in all layers at once,
    which is the absolute sum over layers and heads of ∂y/∂α · α."""
    parts, _ = _gradient_times_attention(question)
    return _sum(question, [part.sum(dim=1) for part in parts]).abs()


def removal_gradient(question: GraphQuestion) -> Tensor:
    """Return |Σ over layers and heads of ⟨∂y/∂o, o − o₋ₑ⟩|, where o is what a node receives and o₋ₑ
    what it receives without the edge, with attention over the remaining edges. With sums over the
    other edges into the same node:

        ⟨∂y/∂o, o − o₋ₑ⟩ = αₑ (∂y/∂αₑ − Σ αⱼ ∂y/∂αⱼ / Σ αⱼ)

    This is the first order of `occlusion`, in one backward. Unlike ∂y/∂α · α it does not change if
    a constant is added to all values that a node can receive."""
    lost = []
    for part, call in zip(*_gradient_times_attention(question), strict=True):
        # float64, since differences of sums cancel if α is close to 1
        part, weights = part.double(), call.weights.double()
        target = call.edge_index[1]
        nothing = part.new_zeros(max(call.num_nodes), part.shape[1])
        others = nothing.index_add(0, target, part)[target] - part
        rest = nothing.index_add(0, target, weights)[target] - weights
        mean = torch.where(rest > 0, others / rest.where(rest > 0, 1.0), 0.0)
        lost.append((part - weights * mean).sum(dim=1).to(call.weights.dtype))
    return _sum(question, lost).abs()


@torch.no_grad()
def occlusion(question: GraphQuestion) -> Tensor:
    """Return what y loses without each edge that can reach the node; signed."""
    whole = question.y()
    lost = whole.new_zeros(question.num_edges + 1)
    keep = torch.ones_like(question.candidates)
    for edge in shown(question.candidates.nonzero()[:, 0].split(1), "occlusion"):
        keep[edge] = False
        lost[edge] = whole - question.y(keep)
        keep[edge] = True
    return lost


def random(question: GraphQuestion, *, seed: int = 0) -> Tensor:
    """Return uniform random numbers for the edges that can reach the node, 0 for others."""
    numbers = drawn([question.num_edges], seed).to(question.candidates.device)
    return torch.nn.functional.pad(numbers * question.candidates, (0, 1))


def _gradient_times_attention(question: GraphQuestion) -> tuple[list[Tensor], list[EdgeCall]]:
    """Return ∂y/∂α · α of each call, [edges and loops, heads], and the calls."""
    calls, y = question.calls(question.layers, graph=True)
    seen = [call.seen_in for call in calls]
    gradients = question.gradients(y, seen, may_miss=True)
    parts = [
        (call.weight_gradient(gradient) * call.weights).detach()
        for call, gradient in zip(calls, gradients, strict=True)
    ]
    return parts, calls


def _sum(question: GraphQuestion, parts: list[Tensor]) -> Tensor:
    """Sum the values [edges and loops] of all calls, whose loops may differ, to [edges + 1]."""
    edges = torch.stack([part[: question.num_edges] for part in parts]).sum(dim=0)
    loops = torch.stack([part[question.num_edges :].sum() for part in parts]).sum()
    return torch.cat([edges, loops[None]])
