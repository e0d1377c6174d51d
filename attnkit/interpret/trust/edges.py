"""Fidelity of the top-ranked edges, compared with random edges."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from attnkit.core.arguments import at_least
from attnkit.interpret.methods.graph_question import GraphQuestion, Index
from attnkit.interpret.methods.question import looking
from attnkit.interpret.quantity import Of, Quantity
from attnkit.interpret.trust.curves import answers_without

DEFAULT_KS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class EdgeFidelity:
    """A model's predictions without the k top-ranked edges, and with only these.

    rows: a dictionary for each k:

        k: number of edges.
        plus: p minus p without these edges, for the class's probability or the chosen quantity. A
            probability loses 1 at most; a negative number means that p rises.
        minus: p minus p with only these edges.
        plus_prediction, minus_prediction: 1 if the model then no longer predicts the class, or, for
            a class that it did not predict with all edges, if it then does; else 0.
        random_plus, random_minus: `plus` and `minus` of random edges, the mean over the draws, and
            `random_plus_low`, `random_plus_high`, `random_minus_low`, `random_minus_high`, their
            minimum and maximum.

    probability: p with all edges.
    target: the class.
    num_draws: number of draws of random edges.
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
    """Measure how much a prediction needs the top-ranked edges, and how far they suffice.

    Of the edges that can reach the node, the k with the largest scores are chosen; ties keep their
    order. Fidelity₊ removes these, fidelity₋ all others (Amara et al., GraphFramEx, 2022). Removed
    edges leave the graph, so attention and means run over the remaining ones. GraphFramEx measures
    the prediction or |p − p'|; this function measures p − p', since an edge is not needed if p
    rises without it. torch_geometric's `fidelity` multiplies messages by the scores instead, so
    that masked edges still count in the softmax.

    Args:
        model: any graph model, with or without attention, that returns logits of nodes or one row
            for the graph.
        inputs: (x, edge_index, …) or a dictionary; arguments whose names begin with `edge` lose
            the rows of removed edges.
        scores: scores of the edges in their order, from any method.
        index: the node; or a pair of nodes, for a model that takes `pairs`; None: the model returns
            one row for the graph.
        target: the class; None: the predicted one. A true label measures GraphFramEx's
            "phenomenon".
        ks: numbers of edges; None: those of 1, 2, 4, 8 and 16 that are less than all.
        num_draws: number of random orders of the same edges.
        num_hops: number of steps in which edges reach the node; None: found from the model.
        seed: seed of the draws.
        of: the quantity to measure, as in `attnkit.explain`.

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
    """Compute `edge_fidelity` for a question that is already prepared."""
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
    # removed sets: none; for each k the top-ranked edges; for each k all others
    removed = torch.cat([torch.zeros_like(first[0][:1]), *first, *(~one for one in first)])
    found = answers_without(question, question.without, removed[:, None], 1, "removing edges")
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
