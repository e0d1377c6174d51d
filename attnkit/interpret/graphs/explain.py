"""Explanations of graphs, which `attnkit.explain` gives for a model that is called with edges."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnkit.core.capture.layers import Layers
from attnkit.interpret.graphs.explanation import GraphExplanation
from attnkit.interpret.graphs.methods import EDGE_METHODS, EdgeMap, EdgeMethod
from attnkit.interpret.graphs.question import GraphQuestion
from attnkit.interpret.methods.question import looking, probabilities


def explain_graph(
    model: nn.Module,
    inputs: Any,
    index: int | None = None,
    target: Any = None,
    method: Any = "relevance",
    *,
    layers: Layers = None,
    num_hops: int | None = None,
    **options: Any,
) -> GraphExplanation:
    """As `attnkit.explain`, of a model that is called with (x, edge_index, …).

    Raises:
        TypeError, ValueError, RuntimeError: as `attnkit.explain`.
    """
    question = GraphQuestion(model, inputs, index, target, num_hops)
    if isinstance(method, Tensor):
        known = EdgeMethod(partial(_given, method), has_layers=False)
        name = "given"
    elif isinstance(method, str) and method in EDGE_METHODS:
        known, name = EDGE_METHODS[method], method
    else:
        raise ValueError(
            f"method: expected one of {', '.join(EDGE_METHODS)} for a graph, or numbers [edges], "
            f"got {method!r}"
        )
    if target is not None and not known.has_target:
        knowing = ", ".join(other for other, one in EDGE_METHODS.items() if one.has_target)
        raise ValueError(
            f"target: {name!r} gives the same for every class; leave it out, or take one of "
            f"{knowing}"
        )
    if layers is not None and not known.has_layers:
        raise ValueError(f"layers: {name!r} does not use attention layers; leave it out")
    for option in options:
        if option not in known.options:
            raise TypeError(f"{option}: {name!r} has no such option for a graph")
    with looking(model):
        with torch.no_grad():
            question.ask()
        found = known.function(question, layers, **options)
    assert question.logits is not None
    assert question.target is not None
    sizes = float(found.edges.abs().sum() + found.loops.abs())
    return GraphExplanation(
        method=name,
        edges=found.edges.detach(),
        edge_index=question.edge_index,
        candidates=question.candidates,
        share=float(found.loops.abs()) / sizes if sizes else 0.0,
        index=question.index,
        target=question.target,
        predicted=int(question.logits.argmax()),
        logit=float(question.logits[question.target]),
        probability=float(probabilities(question.logits)[question.target]),
        question=question,
        notes=question.notes,
        is_signed=bool((found.edges < 0).any()) or known.is_signed,
    )


def _given(scores: Tensor, question: GraphQuestion, layers: Layers) -> EdgeMap:
    """Check numbers that were made elsewhere."""
    if list(scores.shape) != [question.num_edges] or not scores.is_floating_point():
        raise ValueError(
            f"method: expected floating-point numbers [edges] = [{question.num_edges}], got "
            f"{list(scores.shape)}, {scores.dtype}"
        )
    scores = scores.detach().to(question.edge_index.device)
    return EdgeMap(scores, scores.new_zeros(()))
