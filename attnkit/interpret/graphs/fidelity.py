"""Fidelity of edges over how many of them are taken, beside random edges."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from attnkit.core.arguments import at_least
from attnkit.interpret.graphs.question import GraphQuestion, Index
from attnkit.interpret.methods.question import looking
from attnkit.interpret.quantity import Of, Quantity
from attnkit.interpret.trust.curves import answers_without

DEFAULT_KS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class EdgeFidelity:
    """What a model predicts without the k edges that rank first, and with these alone.

    rows: a dictionary for each k:

        k: how many edges.
        plus: p − p without them; of the class's probability, or the quantity that was asked for.
            Of a probability 1 at most; below 0, p rises.
        minus: p − p with them alone.
        plus_prediction, minus_prediction: the same of whether the prediction is the class: 1 where
            it no longer is.
        random_plus, random_minus: `plus` and `minus` of random edges, the mean over the draws, and
            `random_plus_low`, `random_plus_high`, `random_minus_low`, `random_minus_high`, the
            least and the largest.

    probability: p, with all edges.
    target: the class.
    num_draws: of random edges.
    verdict: "better than random", "no better than random" or "worse than random": whether the mean
        of `plus` − `minus` over k is above, among or below those of the draws.
    quantity: what p is.
    """

    rows: list[dict[str, float]]
    probability: float
    target: int
    num_draws: int
    verdict: str
    quantity: Quantity

    def __str__(self) -> str:
        row = self.rows[len(self.rows) // 2]
        k, p = int(row["k"]), self.probability
        name = f"{self.quantity.symbol}({self.target})"
        edges = "the edge that ranks" if k == 1 else f"the {k} edges that rank"
        alone = "it" if k == 1 else "them"
        drawn = "one random edge" if k == 1 else f"{k} random edges"
        words = [
            f"Without {edges} first, {name} goes from {p:.2f} to {p - row['plus']:.2f}; "
            f"without {drawn}, to {p - row['random_plus']:.2f} ({self.num_draws} draws: "
            f"{p - row['random_plus_high']:.2f} to {p - row['random_plus_low']:.2f}).",
            f"With {alone} alone, {name} is {p - row['minus']:.2f}; with {drawn} alone, "
            f"{p - row['random_minus']:.2f}.",
            f"Over {', '.join(str(int(row['k'])) for row in self.rows)} edges: {self.verdict}.",
        ]
        if not self.quantity.is_usual:
            words.append(f"{self.quantity.symbol} is {self.quantity.meaning}.")
        return " ".join(words)


def edge_fidelity(
    model: nn.Module,
    inputs: Any,
    scores: Annotated[Tensor, "edges"],
    index: Index = None,
    target: int | None = None,
    *,
    ks: Sequence[int] | None = None,
    num_draws: int = 20,
    num_hops: int | None = None,
    seed: int = 0,
    of: Of = "probability",
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
        index: the node, or a pair of nodes, of a model that takes `pairs`; None: the model gives
            one row for a graph.
        target: the class; None: the predicted one. A label is that of GraphFramEx's "phenomenon".
        ks: how many edges; None: 1, 2, 4, 8 and 16, as far as there are more.
        num_draws: random orders of the same edges.
        num_hops: in how many steps edges reach the node; None: the model is asked.
        seed: of the draws.
        of: what of the class is measured, as of `attnkit.explain`.

    Raises:
        ValueError, TypeError: an argument that is wrong.
    """
    question = GraphQuestion(model, inputs, index, target, num_hops, of=of)
    with looking(model):
        question.prepare()
        return fidelity_of(question, scores, ks, num_draws, seed)


def fidelity_of(
    question: GraphQuestion,
    scores: Tensor,
    ks: Sequence[int] | None = None,
    num_draws: int = 20,
    seed: int = 0,
) -> EdgeFidelity:
    """As `edge_fidelity`, of a question that is prepared."""
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
    generator = torch.Generator().manual_seed(seed)
    orders = [scores[places].argsort(descending=True, stable=True).cpu()]
    orders += [torch.randperm(len(places), generator=generator) for _ in range(num_draws)]
    ranks = torch.stack(orders).argsort(dim=1).to(places.device)
    first = [ranks < k for k in ks]
    # nothing; for each k those that rank first; for each k all others
    removed = torch.cat([torch.zeros_like(first[0][:1]), *first, *(~one for one in first)])
    found = answers_without(question, question.without, removed[:, None], len(removed), "fidelity")
    _, values, is_class = found[..., 0]
    lost = (values[0] - values[1:]).unflatten(0, (2, len(ks), len(orders)))
    changed = (is_class[0] - is_class[1:]).abs().unflatten(0, lost.shape)[..., 0]
    rows = []
    for place, k in enumerate(ks):
        row = {"k": float(k)}
        for kind, name in enumerate(("plus", "minus")):
            drawn = lost[kind, place, 1:]
            row[name] = float(lost[kind, place, 0])
            row[f"{name}_prediction"] = float(changed[kind, place])
            row[f"random_{name}"] = float(drawn.mean())
            row[f"random_{name}_low"] = float(drawn.min())
            row[f"random_{name}_high"] = float(drawn.max())
        rows.append(row)
    ours, *others = (lost[0] - lost[1]).mean(dim=0).tolist()
    verdict = "no better than random"
    if ours > max(others):
        verdict = "better than random"
    elif ours < min(others):
        verdict = "worse than random"
    assert question.target is not None
    assert question.quantity is not None
    target = int(question.target)
    return EdgeFidelity(rows, float(values[0]), target, num_draws, verdict, question.quantity)
