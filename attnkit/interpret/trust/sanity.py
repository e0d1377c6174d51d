"""Sanity checks of a map: whether it depends on the class and on the weights, and what it finds."""

from __future__ import annotations

import torch

from attnkit.interpret.trust.agreement import spearman, with_random_weights
from attnkit.interpret.trust.case import Case
from attnkit.interpret.trust.result import CLASS_SENSITIVITY, RANDOM_WEIGHTS, SENSITIVE, SURVIVING
from attnkit.metrics.localisation import area, mass, pointing


def score_classes(case: Case) -> None:
    """Whether the map depends on the class."""
    logits, model = case.question.logits, case.question.model
    assert logits is not None
    if case.method is None or logits.shape[1] < 2:
        return
    both = logits.topk(2, dim=1).indices.unbind(1)
    found = {"map": 1 - spearman(*(case.map_of(model, classes) for classes in both))}
    found["centre"] = torch.zeros(len(logits))
    if "input_gradient" in case.maps:
        of_both = [case.gradient_of(model, classes) for classes in both]
        found["input_gradient"] = 1 - spearman(*of_both)
    score = case.add(CLASS_SENSITIVITY, found, random=1.0)
    word = "class-specific" if score.map >= SENSITIVE else "not class-specific"
    case.result.verdicts["class"] = (word,)


def score_weights(case: Case) -> None:
    """Whether the map depends on what the model has learned."""
    target = case.question.target
    if case.method is None or target is None:
        return
    model = with_random_weights(case.question.model, case.generator)
    of_random = {"map": case.map_of(model, target), "centre": case.maps["centre"]}
    if "input_gradient" in case.maps:
        of_random["input_gradient"] = case.gradient_of(model, target)
    found = {key: spearman(case.maps[key], other) for key, other in of_random.items()}
    score = case.add(RANDOM_WEIGHTS, found, random=0.0)
    word = (
        "survives random weights" if score.map >= SURVIVING else "does not survive random weights"
    )
    case.result.verdicts["weights"] = (word,)
    if case.question.batch > 1:
        others = {key: spearman(case.maps[key], case.maps[key].roll(1, dims=0)) for key in found}
        case.add("similarity, another image", others, random=0.0)


def score_localisation(case: Case) -> None:
    """Whether the map points to the object."""
    if case.masks is None:
        return
    masks, chance = case.masks, area(case.masks).mean()
    hits = {key: pointing(map, masks) for key, map in case.maps.items()}
    case.add("pointing", hits, random=float(chance))
    over = {key: mass(map, masks) / chance for key, map in case.maps.items()}
    case.add("mass over chance", over, random=1.0)
