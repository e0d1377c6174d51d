"""`attnkit.trust` measures how far to trust a map, from any method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Annotated

import torch
from torch import Tensor, nn
from torchmetrics.functional import spearman_corrcoef

from attnkit.interpret.methods.gradients import centre, input_gradient
from attnkit.interpret.methods.question import Classes, MapFunction, Question, looking
from attnkit.interpret.quantity import Of
from attnkit.interpret.trust.curves import (
    FRACTIONS,
    FULL_FRACTIONS,
    Values,
    answers,
    both_orders,
    check_map,
    check_orders,
    gaps_of,
    of_images,
    removal_ranks,
    removed_counts,
    shares,
)
from attnkit.interpret.trust.removal import (
    REMOVALS,
    Grid,
    Maps,
    available,
    on_grid,
    removal_grid,
)
from attnkit.interpret.trust.result import (
    CLASS_SENSITIVITY,
    RANDOM_WEIGHTS,
    SENSITIVE,
    SURVIVING,
    Fall,
    Score,
    Trust,
    verdict,
)
from attnkit.metrics.maps import area, check_maps, covered, mass, pointing

SAID_SHARE = 0.2
"""A sentence reports the loss at the point of the curves that is nearest to this share."""
ENOUGH_IMAGES = 10
"""From this number on, two maps are compared by the variance of their difference over images."""

Maker = Callable[[nn.Module, Annotated[Tensor, "batch", int]], Maps]
"""A function from a model and a class for each image to a map on the grid of removed places."""


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

    - **gap**: patches are removed, the highest-ranked or the lowest-ranked first. The gap is
      ∫ y_least(s) ds − ∫ y_most(s) ds over the removed share s, by the trapezoidal rule with both
      ends, where y is the target's probability (or the quantity `of`) or its logit
      (`attnkit.metrics.PerturbationGap`). Ties are random. Random maps have the gap 0 ± two
      standard errors σ/√images, where σ² is the mean square of the gaps of random orders, half of
      which are the other half reversed. A map with a larger gap is better than random. It is better
      than centre or input gradient if the difference is more than two standard errors over the
      images, or, with fewer than 10 images, more than √2 times the limit of random maps.
    - **class sensitivity**: 1 − Spearman's ρ of the maps of the two most likely classes; 0 for a
      map that cannot depend on the class. Class-specific means at least 0.1. Needs `method`.
    - **similarity, all weights random**: ρ of the map and that of the model with shuffled weights
      (after Adebayo et al., Sanity checks for saliency maps, 2018). From 0.5 on, the map survives
      random weights. ρ with the map of the next image is given for comparison. Needs `method`.
    - **pointing, mass over chance**: `attnkit.metrics.PointingGame` and
      `AttributionMass(over_chance=True)`, beside chance (`random`). Needs `masks`.

    Args:
        model: a model that returns logits [batch, classes] of images.
        inputs: images as the model takes them.
        target: one class for all images, or one for each; None: the predicted class.
        map: larger = matters more; of any size: it is averaged over a patch, or the nearest value
            is taken.
        method: the function (model, images, classes) -> map that made the map.
        masks: True = the object that the map should find.
        removals: kinds of removal. "mask" hides the patches' tokens from all attention; it is
            `unavailable` if hidden patches still have an effect. "mean" gives them the mean colour
            of the inputs. "blur" blurs them, with σ a side of a patch.
        fractions: the removed shares, in addition to 0 and 1; None: 0.2 and 0.5, or seven if full.
        orders: number of random orders, even.
        seed: seed of random orders, ties and shuffled weights.
        full: whether to remove seven shares instead of two, if `fractions` is None.
        grid: rows and columns of the patches; None: those of the model's patch_size, or of the map
            if the model has none.
        batch_size: perturbed images in a forward. Each kind of removal needs, for each image,
            fractions · (orders + 6) + 2 of them: about 30.
        of: the quantity of the target to measure in addition to its logit, as in `attnkit.explain`.

    Raises:
        TypeError, ValueError: an argument has a wrong type, shape or value; no kind of removal is
            available for this model.
    """
    check_orders(orders)
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
    generator = torch.Generator().manual_seed(seed)
    with looking(model), _counted(model) as images_seen:
        with torch.no_grad():
            question.ask()
        assert question.logits is not None
        assert question.target is not None
        images, grid = question.images.detach(), removal_grid(question, map)
        counts = removed_counts(fractions, grid[0] * grid[1])
        if len(counts) < 3:
            raise ValueError(
                f"fractions: expected one that is some and not all of {counts[-1]} patches, "
                f"got {list(fractions)}"
            )
        removed = shares(counts).to(images.device, torch.float32)
        result = Trust(question.batch, removed, quantity=question.quantity)

        # the map and the baselines
        makers = _makers(question, method, grid)
        maps = {"map": on_grid(map.detach().to(images.device), grid)}
        maps["centre"] = makers["centre"](model, question.target)
        try:
            maps["input_gradient"] = makers["input_gradient"](model, question.target)
        except RuntimeError as error:
            if not str(error).startswith("model: "):
                raise  # other errors, such as out of memory
            del makers["input_gradient"]
            result.unavailable["input gradient"] = str(error).partition(";")[0]
        if masks is not None:
            masks = masks.to(images.device)
            maps["oracle"] = covered(masks, maps["map"])
        by_lot = torch.rand(orders // 2, question.batch, *grid, generator=generator)

        # the loss while patches are removed, highest-ranked or lowest-ranked first
        ways, unavailable = available(removals, question, grid)
        result.unavailable |= unavailable
        ranks = {name: both_orders(removal_ranks(one, generator)) for name, one in maps.items()}
        lots = [both_orders(removal_ranks(one, generator)) for one in by_lot.to(images.device)]
        ranks["random"] = torch.cat(lots)
        every, sizes = torch.cat([*ranks.values()]), [len(one) for one in ranks.values()]
        for kind, way in ways.items():
            said, without = f"removing patches, {REMOVALS[kind]}", of_images(question, way)
            found = answers(question, without, every, counts, batch_size, said)
            logits, curves = (dict(zip(ranks, one.split(sizes), strict=True)) for one in found[:2])
            gaps, within = gaps_of(curves, removed)
            _add(result, f"gap in {result.symbol}, {REMOVALS[kind]}", gaps, within)
            _add(result, f"gap in logit, {REMOVALS[kind]}", *gaps_of(logits, removed))
            result.curves[kind], result.gaps[kind] = curves, gaps["map"]
            result.verdicts[kind] = _verdicts(gaps, within)
            result.falls[kind] = Fall.at(SAID_SHARE, removed, curves, result.symbol)

        if method is not None and question.logits.shape[1] > 1:  # does the map know the class?
            both = question.logits.topk(2, dim=1).indices.unbind(1)
            differ = {
                name: 1 - spearman(*(make(model, classes) for classes in both))
                for name, make in makers.items()
            }
            score = _add(result, CLASS_SENSITIVITY, differ, random=1.0)
            result.verdicts["class"] = (verdict("class", score.map >= SENSITIVE),)

        if method is not None:  # does the map know what was learned?
            shuffled = with_random_weights(model, generator)
            alike = {
                name: spearman(maps[name], make(shuffled, question.target))
                for name, make in makers.items()
            }
            score = _add(result, RANDOM_WEIGHTS, alike)
            result.verdicts["weights"] = (verdict("weights", score.map >= SURVIVING),)
            if question.batch > 1:
                alike = {name: spearman(maps[name], maps[name].roll(1, dims=0)) for name in makers}
                _add(result, "similarity, another image", alike)

        if masks is not None:  # does the map point to the object?
            chance = area(masks).mean()
            hits = {name: pointing(one, masks) for name, one in maps.items()}
            _add(result, "pointing", hits, random=float(chance))
            over = {name: mass(one, masks) / chance for name, one in maps.items()}
            _add(result, "mass over chance", over, random=1.0)
    result.num_forwards = sum(images_seen) / question.batch
    return result


def _makers(question: Question, method: MapFunction | None, grid: Grid) -> dict[str, Maker]:
    """Return the method and the baselines, each as a function of a model and classes."""
    images, middle = question.images.detach(), on_grid(centre(question), grid)

    def gradient(model: nn.Module, classes: Tensor) -> Maps:
        asked = Question(model, images, classes, grid=question.grid)
        return on_grid(input_gradient(asked), grid)

    makers: dict[str, Maker] = {"centre": lambda *_: middle, "input_gradient": gradient}
    if method is None:
        return makers

    def made(model: nn.Module, classes: Tensor) -> Maps:
        map = method(model, images, classes)
        check_map(map, question, "method")
        return on_grid(map.detach().to(images.device), grid)

    return {"map": made} | makers


def _add(
    result: Trust, name: str, values: Values, within: float | None = None, random: float = 0.0
) -> Score:
    """Add a score: each map's mean over the images, and the expected score of random maps."""
    means = {key: float(value.mean()) for key, value in values.items()}
    result.scores.append(Score(name, **means, random=random, within=within))
    return result.scores[-1]


def _verdicts(gaps: Values, within: float) -> tuple[str, ...]:
    """Return the verdicts on the map compared with random maps and the baselines."""
    words = [verdict("random", float(gaps["map"].mean()) > within)]
    for name in ("centre", "input_gradient"):
        if name in gaps:
            more = gaps["map"] - gaps[name]
            least = within * 2**0.5
            if len(more) >= ENOUGH_IMAGES:
                least = 2 * float(more.std()) / len(more) ** 0.5
            words.append(verdict(name, float(more.mean()) > least))
    return tuple(words)


def pooled(trusts: Sequence[Trust]) -> Trust:
    """Pool the scores and verdicts of images that were judged one by one, as if they were a batch.

    Scores are means. The errors of random maps are independent and give σ/√images as in `trust`.
    Curves and falls are left out, since their shares differ from grid to grid.
    """
    first, count = trusts[0], len(trusts)
    if count == 1:
        return first
    result = Trust(sum(one.num_images for one in trusts), first.removed, quantity=first.quantity)
    result.num_forwards = sum(one.num_forwards for one in trusts) / count
    for name in [score.name for score in first.scores]:
        each = [score for one in trusts for score in one.scores if score.name == name]
        if len(each) < count:
            continue
        values = {
            whose: torch.tensor([getattr(score, whose) for score in each], dtype=torch.float64)
            for whose in ("map", "centre", "input_gradient", "oracle")
            if all(getattr(score, whose) is not None for score in each)
        }
        errors = [score.within for score in each if score.within is not None]
        within = sum(error**2 for error in errors) ** 0.5 / count if errors else None
        random = sum(score.random or 0.0 for score in each) / count
        score = _add(result, name, values, within, random)
        kind = next((k for k in first.gaps if name == f"gap in {first.symbol}, {REMOVALS[k]}"), "")
        if kind and within is not None:
            result.gaps[kind], result.verdicts[kind] = values["map"], _verdicts(values, within)
        if name == CLASS_SENSITIVITY:
            result.verdicts["class"] = (verdict("class", score.map >= SENSITIVE),)
        if name == RANDOM_WEIGHTS:
            result.verdicts["weights"] = (verdict("weights", score.map >= SURVIVING),)
    return result


def spearman(maps: Maps, others: Maps) -> Annotated[Tensor, "batch"]:
    """Return Spearman's ρ of each image: 1 for equal maps, 0 for a constant map and another."""
    # torchmetrics adds an epsilon to the denominator, so equal maps would not give exactly 1
    return torch.stack(
        [
            one.new_ones(())
            if torch.equal(one, other)
            else spearman_corrcoef(one, other).nan_to_num()
            for one, other in zip(maps.float().flatten(1), others.float().flatten(1), strict=True)
        ]
    )


@torch.no_grad()
def with_random_weights(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """Return a copy of the model with shuffled weights.

    The entries of each parameter are permuted, which keeps their distribution.
    """
    copy = deepcopy(getattr(model, "_orig_mod", model))
    own = [module for module in copy.modules() if any(True for _ in module.parameters(False))]
    for module in reversed(own):
        for parameter in module.parameters(recurse=False):
            flat = parameter.detach().flatten()
            drawn = torch.randperm(len(flat), generator=generator).to(flat.device)
            parameter.copy_(flat[drawn].view_as(parameter))
    return copy


@contextmanager
def _counted(model: nn.Module) -> Iterator[list[int]]:
    """Count the images in each forward of the model within the block."""
    counts: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda _, args: counts.append(len(args[0]) if args else 0)
    )
    try:
        yield counts
    finally:
        handle.remove()
