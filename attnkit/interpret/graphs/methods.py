"""What gives each edge of a graph a number."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attnkit.core.capture.calls import EdgeCall
from attnkit.core.capture.layers import Layers
from attnkit.interpret.graphs.question import GraphQuestion


class EdgeMap(NamedTuple):
    """edges: [edges]. loops: what the self-loops that layers added got, together."""

    edges: Tensor
    loops: Tensor


def attention(question: GraphQuestion, layers: Layers) -> EdgeMap:
    """Weights, the mean over heads, of the last layer or over the layers asked for; those of edges
    that cannot reach the node from their layer on are 0."""
    names = [call.layer for call in question.calls()[0]]
    calls, _ = question.calls(-1 if layers is None else layers)
    maps = []
    for call in calls:
        weights = call.weights.float().mean(dim=1)
        steps_before = len(names) - 1 - names.index(call.layer)
        if question.num_hops == len(names):
            near = question.reached(steps_before, max(call.num_nodes))
            weights = weights * near[call.edge_index[1]]
        maps.append(_split(question, weights))
    return EdgeMap(*(torch.stack(parts).mean(dim=0) for parts in zip(*maps, strict=True)))


def relevance(question: GraphQuestion, layers: Layers) -> EdgeMap:
    """Σ over layers of mean over heads of (∂y/∂α · α)⁺ (Chefer et al., Generic Attention-model
    Explainability, 2021, equation 5)."""
    parts, _ = _gradient_times_attention(question, layers)
    total = [_split(question, part.clamp(min=0).mean(dim=1)) for part in parts]
    return EdgeMap(*(torch.stack(part).sum(dim=0) for part in zip(*total, strict=True)))


def input_gradient(question: GraphQuestion, layers: Layers) -> EdgeMap:
    """|∂y/∂m_e| of a factor m_e = 1 on the messages along an edge, in all layers at once: the sum
    over layers and heads of ∂y/∂α · α."""
    parts, _ = _gradient_times_attention(question, layers)
    total = [_split(question, part.sum(dim=1)) for part in parts]
    sums = EdgeMap(*(torch.stack(part).sum(dim=0) for part in zip(*total, strict=True)))
    return EdgeMap(sums.edges.abs(), sums.loops.abs())


def removal_gradient(question: GraphQuestion, layers: Layers) -> EdgeMap:
    """|Σ over layers and heads of ⟨∂y/∂o, o − o₋ₑ⟩|, o what a node receives and o₋ₑ the same
    without the edge, attention being over those that are left. In ∂y/∂α, with the sums over the
    other edges into the same node:

        ⟨∂y/∂o, o − o₋ₑ⟩ = αₑ (∂y/∂αₑ − Σ αⱼ ∂y/∂αⱼ / Σ αⱼ)

    It is what `occlusion` measures, to first order, in one backward; and unlike ∂y/∂α · α it does
    not change if a number is added to all that a node can receive."""
    total = []
    for part, call in zip(*_gradient_times_attention(question, layers), strict=True):
        part, weights = part.double(), call.weights.double()  # a difference of sums: α may be 1
        target = call.edge_index[1]
        nothing = part.new_zeros(max(call.num_nodes), part.shape[1])
        others = nothing.index_add(0, target, part)[target] - part
        rest = nothing.index_add(0, target, weights)[target] - weights
        mean = torch.where(rest > 0, others / rest.where(rest > 0, 1.0), 0.0)
        total.append(_split(question, (part - weights * mean).sum(dim=1).to(call.weights.dtype)))
    sums = EdgeMap(*(torch.stack(part).sum(dim=0) for part in zip(*total, strict=True)))
    return EdgeMap(sums.edges.abs(), sums.loops.abs())


@torch.no_grad()
def occlusion(question: GraphQuestion, layers: Layers) -> EdgeMap:
    """What y loses without the edge, for each that can reach the node; signed."""
    whole = question.ask()[question.target or 0]
    lost = whole.new_zeros(question.num_edges)
    keep = torch.ones_like(question.candidates)
    for edge in question.candidates.nonzero()[:, 0].tolist():
        keep[edge] = False
        lost[edge] = whole - question.ask(keep)[question.target or 0]
        keep[edge] = True
    return EdgeMap(lost, lost.new_zeros(()))


def random(question: GraphQuestion, layers: Layers, seed: int = 0) -> EdgeMap:
    """Uniform numbers for the edges that can reach the node."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(question.num_edges, generator=generator).to(question.candidates.device)
    return EdgeMap(drawn * question.candidates, drawn.new_zeros(()))


class EdgeMethod(NamedTuple):
    function: Callable[..., EdgeMap]
    has_target: bool = True
    has_layers: bool = True
    is_signed: bool = False
    options: tuple[str, ...] = ()


EDGE_METHODS = {
    "attention": EdgeMethod(attention, has_target=False),
    "relevance": EdgeMethod(relevance),
    "input_gradient": EdgeMethod(input_gradient),
    "removal_gradient": EdgeMethod(removal_gradient),
    "occlusion": EdgeMethod(occlusion, has_layers=False, is_signed=True),
    "random": EdgeMethod(random, has_target=False, has_layers=False, options=("seed",)),
}


def _gradient_times_attention(
    question: GraphQuestion, layers: Layers
) -> tuple[list[Tensor], list[EdgeCall]]:
    """∂y/∂α · α of each call, [edges and loops, heads]; and the calls."""
    calls, y = question.calls(layers, graph=True)
    seen = [call.seen_in for call in calls]
    if not y.requires_grad or not all(tensor.requires_grad for tensor in seen):
        raise RuntimeError(
            f"model: {type(question.model).__name__} stops the gradient; remove the torch.no_grad "
            "or .detach() in it, or take method='occlusion', which needs none"
        )
    gradients = torch.autograd.grad(y, seen, allow_unused=True)
    parts = [
        torch.zeros_like(call.weights)
        if gradient is None
        else (call.weight_gradient(gradient) * call.weights).detach()
        for call, gradient in zip(calls, gradients, strict=True)
    ]
    return parts, calls


def _split(question: GraphQuestion, values: Tensor) -> EdgeMap:
    return EdgeMap(values[: question.num_edges], values[question.num_edges :].sum())
