"""Measures of how far to trust the maps of words, for all words of all sentences at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from attnkit.interpret.methods.question import looking
from attnkit.interpret.methods.words import Sentences
from attnkit.interpret.quantity import Quantity
from attnkit.interpret.trust.curves import (
    FRACTIONS,
    FULL_FRACTIONS,
    answers_without,
    both_orders,
    check_orders,
    removal_ranks,
    removed_at,
    removed_counts,
    shares,
)
from attnkit.metrics.maps import perturbation_gap

ORDERS = 64
"""Number of random orders, half of which are the others reversed."""
SHARE_BELOW = 0.95
"""A map is better than random if its gap is larger than that of this share of random maps."""


class WordScore(NamedTuple):
    """The scores of one word's map; p is the word's probability given the words before it.

    gap: gap in p, as in `attnkit.trust`; removed regions get the mean colour of the image.
    within: the gap below which those of 19 in 20 random maps are.
    probability: p with the whole image.
    first: row and column of the region that the map ranks first.
    without: p without that region.
    without_random: p without a random region, the mean over all regions.
    without_each: p without each single region.
    """

    gap: float
    within: float
    probability: float
    first: tuple[int, int]
    without: float
    without_random: float
    without_each: Annotated[Tensor, "map_height map_width"]

    @property
    def is_better(self) -> bool:
        """Whether the map is better than a random one."""
        return self.gap > self.within


@dataclass(eq=False, repr=False)
class WordTrust:
    """Measures of how far to trust the maps of words.

    scores: for each image, the scores of the words of its sentence.
    num_forwards: number of forwards for each image.
    quantity: the quantity of each word that was measured.
    """

    scores: list[list[WordScore]]
    num_forwards: int
    quantity: Quantity

    def __str__(self) -> str:
        lines = []
        for number, words in enumerate(self.scores):
            better = sum(word.is_better for word in words)
            gap = sum(word.gap for word in words) / max(1, len(words))
            lines.append(
                f"image {number}: {better} of {len(words)} words have a map better than random; "
                f"mean gap in {self.quantity.symbol} {gap:.3f}"
            )
        return "\n".join([*lines, f"({self.num_forwards} forward passes per image)"])


def trust_words(
    sentences: Sentences,
    maps: Annotated[Tensor, "batch words map_height map_width"],
    *,
    fractions: Sequence[float] | None = None,
    full: bool = False,
    orders: int = ORDERS,
    seed: int = 0,
    batch_size: int = 64,
) -> WordTrust:
    """Score the map of every word by what the word's probability loses without regions.

    One forward gives the probabilities of all words of a sentence, so random orders and the image
    without each region are computed once for all words:

        2 + regions + fractions · (orders + 2 · words)      forwards per image

    Curves also have a point without a single region. A word's map is better than random if its gap
    is larger than that of 19 in 20 random orders. Two standard errors would not work for a single
    image: if a word depends on one region only, random gaps are uniformly distributed, and no map's
    gap is larger than 1.8 of their standard deviations.

    Removed regions get the mean colour of their image. They are not hidden from attention, since
    the number of keys does not always tell regions from previous words; `Explanation.trust` of one
    word hides them if possible.

    Args:
        sentences: the captioner, the images and their sentences.
        maps: a map for each word; larger = matters more.
        fractions, seed, batch_size: as in `attnkit.trust`.
        full: whether to use seven fractions instead of two, if `fractions` is None.
        orders: number of random orders, even.

    Raises:
        ValueError: maps of other words, fractions that remove nothing or all, an odd number of
            orders.
    """
    check_orders(orders)
    if maps.shape[:2] != sentences.said.shape:
        raise ValueError(
            f"maps: expected [batch, words, …] = {list(sentences.said.shape)}, got "
            f"{list(maps.shape)}"
        )
    (batch, words), grid = maps.shape[:2], (maps.shape[2], maps.shape[3])
    places = grid[0] * grid[1]
    counts = word_counts(fractions or (FULL_FRACTIONS if full else FRACTIONS), places)
    if len(counts) < 4:
        raise ValueError(
            f"fractions: expected one that is more than one and not all of {places} regions, "
            f"got {list(fractions or ())}"
        )
    generator = torch.Generator().manual_seed(seed)
    by_lot = torch.rand(orders // 2 * batch, *grid, generator=generator)
    lots = removal_ranks(by_lot, generator).unflatten(0, (-1, batch))
    ranks = removal_ranks(maps.detach().cpu().flatten(0, 1), generator)
    ranks = ranks.unflatten(0, (batch, words)).transpose(0, 1)
    both = both_orders(torch.cat([lots, ranks]))  # [2, orders, batch, places]
    each = torch.eye(places, dtype=torch.bool)[:, None].expand(-1, batch, -1)
    steps = torch.cat([each, removed_at(both.flatten(0, 1), counts)])
    with looking(sentences.captioner):
        sentences.prepare()
        images = sentences.images.detach()
        colour = images.mean(dim=(2, 3), keepdim=True)
        without = partial(sentences.without, grid=grid, colour=colour)
        removed = steps.to(images.device)
        _, found, _ = answers_without(sentences, without, removed, batch_size, "trust of words")
    alone, of_orders = found.cpu().split([places, len(steps) - places])
    # [orders, batch, words, points]
    most, least = of_orders.unflatten(0, (2, -1, len(counts))).movedim(2, -1)
    every = perturbation_gap(most, least, shares(counts))
    gaps = every[: len(lots)]
    within = torch.cat([gaps, -gaps]).quantile(SHARE_BELOW, dim=0)
    # each word's own probability without the regions that its own map ranks first
    own = every[len(lots) :].diagonal(dim1=0, dim2=2)
    first = (ranks == 0).int().argmax(dim=-1)
    scores = [
        [
            WordScore(
                gap=float(own[image, word]),
                within=float(within[image, word]),
                probability=float(most[0, image, word, 0]),
                first=divmod(int(first[word, image]), grid[1]),
                without=float(alone[first[word, image], image, word]),
                without_random=float(alone[:, image, word].mean()),
                without_each=alone[:, image, word].unflatten(0, grid),
            )
            for word in range(words)
            if sentences.is_word[image, word]
        ]
        for image in range(batch)
    ]
    assert sentences.quantity is not None
    forwards = 2 + places + 2 * (len(counts) - 3) * (len(lots) + words)
    return WordTrust(scores, forwards, sentences.quantity)


def word_counts(fractions: Sequence[float], places: int) -> list[int]:
    """Return the number of removed regions at each point: none, one, those of fractions, all."""
    return sorted({*removed_counts(fractions, places), 1})
