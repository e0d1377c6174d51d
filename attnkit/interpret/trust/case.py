"""A map, those it is held against, and what was found of them so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from attnkit.interpret.methods.controls import centre
from attnkit.interpret.methods.gradients import input_gradient
from attnkit.interpret.methods.question import Question
from attnkit.interpret.trust.curves import Without, check_map, of_images
from attnkit.interpret.trust.places import Maps, on_grid, removal_grid
from attnkit.interpret.trust.removal import NotAvailableError, removal
from attnkit.interpret.trust.result import Score, Trust
from attnkit.metrics.localisation import covered

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
