"""A map, those it is held against, and what is found of them: whether the map depends on the class
and on the weights, and whether it points to the object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from attnkit.interpret.methods.controls import centre
from attnkit.interpret.methods.gradients import input_gradient
from attnkit.interpret.methods.question import Question
from attnkit.interpret.trust.agreement import spearman, with_random_weights
from attnkit.interpret.trust.curves import Without, check_map, of_images
from attnkit.interpret.trust.places import Maps, on_grid, removal_grid
from attnkit.interpret.trust.removal import NotAvailableError, removal
from attnkit.interpret.trust.result import (
    CLASS_SENSITIVITY,
    RANDOM_WEIGHTS,
    SENSITIVE,
    SURVIVING,
    Score,
    Trust,
)
from attnkit.metrics.localisation import area, covered, mass, pointing

MapFunction = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""A map of a model, images and a class for each."""
Values = dict[str, Annotated[Tensor, "batch"]]
"""A number for each image, of "map", "centre", "input_gradient" and "oracle", as far as known."""


class Case:
    """What `attnkit.trust` was asked, with all maps on the grid of what is removed.

    Attributes:
        question: the model, in evaluation, the images and their classes.
        grid: rows and columns of what is removed.
        maps: "map", "centre", "input_gradient" if the model has one, "oracle" if there are masks.
        random: [orders / 2, batch, rows, columns].
        removals: those that are available; the result says why others are not.
        result: the scores so far.
    """

    def __init__(
        self,
        question: Question,
        map: Tensor,
        *,
        method: MapFunction | None,
        masks: Tensor | None,
        removals: Sequence[str],
        orders: int,
        seed: int,
        batch_size: int,
    ) -> None:
        self.question, self.method, self.batch_size = question, method, batch_size
        self.generator = torch.Generator().manual_seed(seed)
        self.grid = removal_grid(question, map)
        assert question.quantity is not None
        self.result = Trust(question.batch, torch.empty(0), quantity=question.quantity)
        self.maps: dict[str, Maps] = {
            "map": self.on_grid(map),
            "centre": self.on_grid(centre(question)),
        }
        try:
            self.maps["input_gradient"] = self.on_grid(input_gradient(question))
        except RuntimeError as error:
            if not str(error).startswith("model: "):
                raise  # no memory, for one
            self.result.unavailable["input gradient"] = str(error).partition(";")[0]
        self.masks = None if masks is None else masks.to(question.images.device)
        if self.masks is not None:
            self.maps["oracle"] = covered(self.masks, self.maps["map"])
        shape = orders // 2, question.batch, *self.grid
        self.random = torch.rand(shape, generator=self.generator).to(question.images.device)
        self.removals: dict[str, Without] = {}
        for name in removals:
            try:
                self.removals[name] = of_images(question, removal(name, question, self.grid))
            except NotAvailableError as error:
                self.result.unavailable[name] = str(error)
        if not self.removals:
            name, reason = next((name, self.result.unavailable[name]) for name in removals)
            raise NotAvailableError(f"removals: {name!r} is not available; {reason}; take 'mean'")

    def on_grid(self, map: Tensor) -> Maps:
        """A map of any size as the others are."""
        return on_grid(map.detach().to(self.question.images.device), self.grid)

    def map_of(self, model: nn.Module, classes: Annotated[Tensor, "batch", int]) -> Maps:
        """What the method says of a model and of other classes."""
        assert self.method is not None
        map = self.method(model, self.question.images.detach(), classes)
        check_map(map, self.question, "method")
        return self.on_grid(map)

    def gradient_of(self, model: nn.Module, classes: Annotated[Tensor, "batch", int]) -> Maps:
        """The size of the input gradient of a model and of other classes."""
        return self.on_grid(input_gradient(Question(model, self.question.images, classes)))

    def add(self, name: str, values: Values, **others: Any) -> Score:
        """A score: the means over the images."""
        means = {key: float(value.mean()) for key, value in values.items()}
        self.result.scores.append(Score(name, **means, **others))
        return self.result.scores[-1]


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
