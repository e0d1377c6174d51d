"""How alike maps rank the places of an image: of two classes, two models, two methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torchmetrics.functional import kendall_rank_corrcoef, spearman_corrcoef

from attnkit.interpret.methods.question import Question
from attnkit.interpret.trust.curves import answers_without
from attnkit.interpret.trust.places import Maps
from attnkit.interpret.trust.removal import Answer

MapFunction = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""A map of a model, images and a class for each."""
MAX_STAGES = 8


def spearman(maps: Maps, others: Maps) -> Annotated[Tensor, "batch"]:
    """Spearman's ρ of each image. Of equal maps 1, and of a constant one with another 0."""
    return _of_each(spearman_corrcoef, maps, others)


def kendall(maps: Maps, others: Maps) -> Annotated[Tensor, "batch"]:
    """Kendall's τ-b of each image, as `spearman`."""
    return _of_each(kendall_rank_corrcoef, maps, others)


def _of_each(function: Callable[..., Any], maps: Tensor, others: Tensor) -> Tensor:
    # exact, where the function adds something to a denominator
    return torch.stack(
        [
            one.new_ones(()) if torch.equal(one, other) else function(one, other).nan_to_num()
            for one, other in zip(maps.float().flatten(1), others.float().flatten(1), strict=True)
        ]
    )


def leave_one_out(
    question: Question, answer: Answer, grid: tuple[int, int], batch_size: int
) -> Maps:
    """What the logit loses without each place alone: as many forwards as there are places."""
    places = grid[0] * grid[1]
    each = torch.eye(places, dtype=torch.bool, device=question.images.device)
    removed = torch.cat([torch.zeros_like(each[:1]), each])[:, None].expand(-1, question.batch, -1)
    logit, _ = answers_without(question, answer, removed, batch_size, "leaving one out")
    return (logit[0] - logit[1:]).T.unflatten(1, grid)


def with_random_weights(
    model: nn.Module, generator: torch.Generator, *, cascading: bool
) -> Iterator[tuple[str, nn.Module]]:
    """Copies of the model with shuffled weights, and the name of the last shuffled module.

    The entries of each parameter change places, so that their sizes stay what they were in all.
    Modules take turns from the one that was registered last, usually the head; cascading, there
    is a copy at up to `MAX_STAGES` stages of this, the last with all of them.
    """
    copy = deepcopy(getattr(model, "_orig_mod", model))
    own = [(name, m) for name, m in copy.named_modules() if any(True for _ in m.parameters(False))]
    stages = min(MAX_STAGES, len(own)) if cascading else 1
    stops = {1 + (len(own) - 1) * stage // max(1, stages - 1) for stage in range(stages)}
    stops = stops if cascading else {len(own)}
    for number, (name, module) in enumerate(reversed(own), start=1):
        for parameter in module.parameters(recurse=False):
            flat = parameter.detach().flatten()
            drawn = torch.randperm(len(flat), generator=generator).to(flat.device)
            with torch.no_grad():
                parameter.copy_(flat[drawn].view_as(parameter))
        if number in stops:
            yield name, copy
