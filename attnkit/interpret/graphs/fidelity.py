"""Fidelity of edges over how many of them are taken, beside random edges."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from attnkit.core.arguments import at_least
from attnkit.interpret.graphs.question import GraphQuestion
from attnkit.interpret.graphs.scores import characterization, unfaithfulness
from attnkit.interpret.methods.question import looking, probabilities

DEFAULT_KS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class EdgeFidelity:
    """What a model predicts without the k edges that rank first, and with these alone.

    rows: a dictionary for each k:

        k: how many edges.
        plus: p − p without them; of the class's probability. 1 at most; below 0, p rises.
        minus: p − p with them alone.
        plus_prediction, minus_prediction: the same of whether the prediction is the class: 1 where
            it no longer is.
        characterization: of `plus_prediction` and `minus_prediction`.
        unfaithfulness: of the probabilities with them alone.
        random_plus, random_minus: `plus` and `minus` of random edges, the mean over the draws, and
            `random_plus_low`, `random_plus_high`, `random_minus_low`, `random_minus_high`, the
            least and the largest.

    probability: p, with all edges.
    target: the class.
    num_draws: of random edges.
    verdict: "better than random", "no better than random" or "worse than random": whether the mean
        of `plus` − `minus` over k is above, among or below those of the draws.
    """

    rows: list[dict[str, float]]
    probability: float
    target: int
    num_draws: int
    verdict: str

    def __str__(self) -> str:
        row = self.rows[len(self.rows) // 2]
        k, p = int(row["k"]), self.probability
        edges = "the edge that ranks" if k == 1 else f"the {k} edges that rank"
        alone = "it" if k == 1 else "them"
        drawn = "one random edge" if k == 1 else f"{k} random edges"
        words = [
            f"Without {edges} first, p({self.target}) goes from {p:.2f} to {p - row['plus']:.2f}; "
            f"without {drawn}, to {p - row['random_plus']:.2f} ({self.num_draws} draws: "
            f"{p - row['random_plus_high']:.2f} to {p - row['random_plus_low']:.2f}).",
            f"With {alone} alone, p({self.target}) is {p - row['minus']:.2f}; with {drawn} alone, "
            f"{p - row['random_minus']:.2f}.",
            f"Over {', '.join(str(int(row['k'])) for row in self.rows)} edges: {self.verdict}.",
        ]
        return " ".join(words)


def edge_fidelity(
    model: nn.Module,
    inputs: Any,
    scores: Annotated[Tensor, "edges"],
    index: int | None = None,
    target: int | None = None,
    *,
    ks: Sequence[int] | None = None,
    num_draws: int = 20,
    num_hops: int | None = None,
    seed: int = 0,
) -> EdgeFidelity:
    """Fidelity: how much a prediction needs the top-ranked edges, and how far they suffice.

    Of the edges that can reach the node, the k with the largest scores are chosen, ties in their
    order. Fidelity₊ removes these, fidelity₋ all others (Amara et al., GraphFramEx, 2022). Removed
    edges leave the graph, so that attention and means are over the others. GraphFramEx measures the
    prediction or |p − p'|; this measures p − p', since edges without which p rises are not needed.
    torch_geometric's `fidelity` instead multiplies messages by the scores, so that masked edges
    still count in the softmax.

    Args:
        model: any graph model that returns logits of nodes, or one row of a graph; with attention
            or without.
        inputs: (x, edge_index, …) or a dictionary; arguments whose names begin with `edge` are
            thinned with the edges.
        scores: of the edges, in their order, from whatever method.
        index: the node; None: the model gives one row for a graph.
        target: the class; None: the predicted one. A label is that of GraphFramEx's "phenomenon".
        ks: how many edges; None: 1, 2, 4, 8 and 16, as far as there are more.
        num_draws: random orders of the same edges.
        num_hops: in how many steps edges reach the node; None: counted in the model.
        seed: of the draws.

    Raises:
        ValueError, TypeError: an argument that is wrong.
    """
    question = GraphQuestion(model, inputs, index, target, num_hops)
    with looking(model), torch.no_grad():
        return fidelity_of(question, scores, ks, num_draws, seed)


def fidelity_of(
    question: GraphQuestion,
    scores: Tensor,
    ks: Sequence[int] | None = None,
    num_draws: int = 20,
    seed: int = 0,
) -> EdgeFidelity:
    """As `edge_fidelity`, of a question that is open."""
    at_least(2, num_draws=num_draws)
    at_least(0, seed=seed)
    if not isinstance(scores, Tensor) or list(scores.shape) != [question.num_edges]:
        got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"scores: expected [edges] = [{question.num_edges}], got {got}")
    places = question.candidates.nonzero()[:, 0]
    if len(places) < 2:
        raise ValueError(
            f"index: {len(places)} edges reach the node, expected 2 or more to choose from"
        )
    if ks is None:
        ks = [k for k in DEFAULT_KS if k < len(places)]
    elif not len(ks) or min(ks) < 1 or max(ks) >= len(places):
        raise ValueError(
            f"ks: expected 1 to {len(places) - 1}, fewer than reach the node, got {ks}"
        )
    whole = probabilities(question.ask())
    generator = torch.Generator().manual_seed(seed)
    orders = [places[scores[places].argsort(descending=True, stable=True)]]
    for _ in range(num_draws):
        orders.append(places[torch.randperm(len(places), generator=generator).to(places.device)])
    rows, drawn = [], []
    for k in ks:
        plus, minus = (
            torch.stack([_without(question, order[:k], alone) for order in orders])
            for alone in (False, True)
        )
        row, of_draws = _row(whole, plus, minus, question.target or 0)
        rows.append({"k": float(k), **row})
        drawn.append(of_draws)
    ours = sum(row["plus"] - row["minus"] for row in rows) / len(rows)
    others = torch.stack(drawn).mean(dim=0)
    verdict = "no better than random"
    if ours > float(others.max()):
        verdict = "better than random"
    elif ours < float(others.min()):
        verdict = "worse than random"
    target = question.target or 0
    return EdgeFidelity(rows, float(whole[target]), target, num_draws, verdict)


def _without(question: GraphQuestion, edges: Tensor, alone: bool) -> Tensor:
    """Probabilities [classes] without some edges, or with these alone."""
    keep = torch.ones_like(question.candidates)
    keep[edges] = False
    return probabilities(question.ask(~keep if alone else keep))


def _row(
    whole: Tensor, plus: Tensor, minus: Tensor, target: int
) -> tuple[dict[str, float], Tensor]:
    """Of the order asked for, the first, and of the draws, the others; and `plus` − `minus` of each
    draw."""
    p = whole[target]
    is_target = float(whole.argmax() == target)
    found = {"plus": plus, "minus": minus}
    row = {name: float(p - part[0, target]) for name, part in found.items()}
    lost = {
        name: abs(is_target - float(part[0].argmax() == target)) for name, part in found.items()
    }
    row |= {f"{name}_prediction": value for name, value in lost.items()}
    lost_plus, lost_minus = torch.tensor(lost["plus"]), torch.tensor(lost["minus"])
    row["characterization"] = float(characterization(lost_plus, lost_minus))
    row["unfaithfulness"] = float(unfaithfulness(whole, minus[0]))
    for name, part in found.items():
        values = p - part[1:, target]
        row[f"random_{name}"] = float(values.mean())
        row[f"random_{name}_low"] = float(values.min())
        row[f"random_{name}_high"] = float(values.max())
    return row, minus[1:, target] - plus[1:, target]
