"""Sanity checks of a map: dependence on class and weights, and agreement with other maps."""

from __future__ import annotations

import torch

from attnkit.interpret.trust.agreement import kendall, leave_one_out, spearman, with_random_weights
from attnkit.interpret.trust.case import Case, Values
from attnkit.interpret.trust.places import Maps
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


def score_weights(case: Case, *, cascading: bool) -> None:
    """Whether the map depends on what the model has learned."""
    target = case.question.target
    if case.method is None or target is None:
        return
    stages: list[tuple[str, Values]] = []
    of_random: dict[str, Maps] = {}
    for name, model in with_random_weights(
        case.question.model, case.generator, cascading=cascading
    ):
        of_random = {"map": case.map_of(model, target), "centre": case.maps["centre"]}
        if "input_gradient" in case.maps:
            of_random["input_gradient"] = case.gradient_of(model, target)
        found = {key: spearman(case.maps[key], other) for key, other in of_random.items()}
        stages.append((name, found))
    for name, found in stages[:-1]:
        case.add(f"similarity, random up to {name}", found)
    score = case.add(RANDOM_WEIGHTS, stages[-1][1], random=0.0)
    word = (
        "survives random weights" if score.map >= SURVIVING else "does not survive random weights"
    )
    case.result.verdicts["weights"] = (word,)
    if (case.maps["map"] < 0).any():
        sizes = {key: spearman(case.maps[key].abs(), o.abs()) for key, o in of_random.items()}
        case.add("similarity of sizes, all weights random", sizes, random=0.0)
    if case.question.batch > 1:
        maps = {key: case.maps[key] for key in of_random}
        others = {key: spearman(map, map.roll(1, dims=0)) for key, map in maps.items()}
        case.add("similarity, another image", others, random=0.0)


def score_agreement(case: Case, *, leaving_one_out: bool) -> None:
    """Whether the map ranks patches as others do that are made of the model's answers."""
    maps = {key: map for key, map in case.maps.items() if key != "oracle"}
    references: dict[str, Maps] = {}
    if "input_gradient" in maps:
        references["input gradient"] = maps["input_gradient"]
    if leaving_one_out:
        kind, answer = next(iter(case.removals.items()))
        references[f"leaving one out ({kind})"] = leave_one_out(
            case.question, answer, case.grid, case.batch_size
        )
    for name, reference in references.items():
        for function in (spearman, kendall):
            found = {
                key: function(map, reference) for key, map in maps.items() if map is not reference
            }
            case.add(f"{function.__name__}, {name}", found, random=0.0)


def score_localisation(case: Case) -> None:
    """Whether the map points to the object."""
    if case.masks is None:
        return
    masks, chance = case.masks, area(case.masks).mean()
    hits = {key: pointing(map, masks) for key, map in case.maps.items()}
    case.add("pointing", hits, random=float(chance))
    over = {key: mass(map, masks) / chance for key, map in case.maps.items()}
    case.add("mass over chance", over, random=1.0)
