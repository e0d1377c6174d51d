"""`attnkit.trust`: how far to trust a map, whoever made it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import torch
from torch import Tensor, nn

from attnkit.core.arguments import at_least
from attnkit.interpret.methods.question import Classes, Question, looking
from attnkit.interpret.quantity import Of
from attnkit.interpret.trust.case import (
    Case,
    MapFunction,
    score_classes,
    score_localisation,
    score_weights,
)
from attnkit.interpret.trust.curves import FRACTIONS, FULL_FRACTIONS, check_map
from attnkit.interpret.trust.gaps import score_gaps
from attnkit.interpret.trust.places import Grid
from attnkit.interpret.trust.result import Trust
from attnkit.metrics.localisation import check_maps


def trust(
    model: nn.Module,
    inputs: Annotated[Tensor, "batch channels height width"],
    target: Classes,
    map: Annotated[Tensor, "batch map_height map_width"],
    *,
    method: MapFunction | None = None,
    masks: Annotated[Tensor, "batch mask_height mask_width", bool] | None = None,
    removals: Sequence[str] = ("mask", "mean"),
    fractions: Sequence[float] | None = None,
    orders: int = 8,
    seed: int = 0,
    full: bool = False,
    grid: Grid | None = None,
    batch_size: int = 64,
    of: Of = "probability",
) -> Trust:
    """Score a map of a model against random maps, a centred map and the input gradient.

        trust = attnkit.trust(model, images, None, map)
        print(trust)          # two or three sentences
        trust                 # the table

    - **gap**: patches are removed, the highest-ranked first, or the lowest-ranked first.
      ∫ y_least(s) ds − ∫ y_most(s) ds over the share s removed, by trapezia with both ends, y the
      target's probability, or what `of` names, or its logit (`attnkit.metrics.PerturbationGap`).
      Ties are random. A random map's is 0 ± two standard errors σ/√images, σ² the mean square of
      the gaps of random orders, half of which are the other half reversed. A larger gap is better
      than random. Better
      than centre or input gradient means a difference of more than two standard errors over the
      images, or, with fewer than 10 images, of more than √2 times the limit of random maps.
    - **class sensitivity**: 1 − Spearman's ρ of the maps of the two most likely classes; 0 for
      what cannot depend on the class. Class-specific from 0.1 on. Needs `method`.
    - **similarity, all weights random**: ρ of the map and that of the model with shuffled
      weights (after Adebayo et al., Sanity checks for saliency maps, 2018); it survives them from
      0.5 on. For comparison, ρ with the map of the next image. Needs `method`.
    - **pointing, mass over chance**: with `masks`, `attnkit.metrics.PointingGame`, and
      `AttributionMass(over_chance=True)`; `random` is chance.

    full=True removes seven shares instead of two.

    Args:
        model: returns logits [batch, classes] of images.
        inputs: images, as the model takes them.
        target: a class for all images, or one for each; None: the class that is predicted.
        map: larger = matters more; of any size: its mean over a patch, or the nearest value.
        method: a function (model, images, classes) -> map, that made the map.
        masks: True = the object that is to be found.
        removals: "mask": the patches' tokens are hidden from all attention, if nothing of them is
            then left (`unavailable` says where it is); "mean": they get the mean colour of the
            inputs; "blur": they are blurred, σ a side of a patch.
        fractions: the shares removed, beside 0 and 1; None: 0.2 and 0.5, with full seven.
        orders: random orders, an even number.
        seed: of random orders, ties and shuffled weights.
        full: whether to remove seven shares, where `fractions` are not given.
        grid: rows and columns of the patches; None: of the model's patch_size, or of the map if it
            has none.
        batch_size: perturbed images in a forward. For each kind of removal these are, for each
            image, fractions · (orders + 6) + 2: about 30.
        of: what of the target is measured beside its logit, as of `attnkit.explain`.

    Raises:
        TypeError, ValueError: an argument has a wrong type, shape or value; no kind of removal is
            available for this model.
    """
    at_least(2, orders=orders)
    if orders % 2:
        raise ValueError(f"orders: expected an even number, half of them reversed, got {orders}")
    if isinstance(removals, str) or not removals:
        raise ValueError(f"removals: expected kinds of removal in a list, got {removals!r}")
    if method is not None and not callable(method):
        raise TypeError(f"method: expected a function, got {type(method).__name__}")
    question = Question(model, inputs, target, grid=grid, of=of)
    check_map(map, question)
    if masks is not None:
        check_maps(map, masks)
    if fractions is None:
        fractions = FULL_FRACTIONS if full else FRACTIONS
    with looking(model), _counted(model) as images_seen:
        with torch.no_grad():
            question.ask()
        case = Case(
            question,
            map,
            method=method,
            masks=masks,
            removals=removals,
            orders=orders,
            seed=seed,
            batch_size=batch_size,
        )
        score_gaps(case, fractions)
        score_classes(case)
        score_weights(case)
        score_localisation(case)
    case.result.num_forwards = sum(images_seen) / question.batch
    return case.result


@contextmanager
def _counted(model: nn.Module) -> Iterator[list[int]]:
    """How many images went through the model in each forward of the block."""
    counts: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda _, args: counts.append(len(args[0]) if args else 0)
    )
    try:
        yield counts
    finally:
        handle.remove()
