"""The result of `attnkit.trust`: scores beside those of baselines, as a table and in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, NamedTuple

from torch import Tensor

from attnkit.interpret.console import text_table
from attnkit.interpret.quantity import Quantity
from attnkit.interpret.trust.removal import REMOVALS

SENSITIVE = 0.1
"""Least class sensitivity of a map that is called class-specific."""
SURVIVING = 0.5
"""Least similarity to the map of random weights of a map that survives random weights."""
CLASS_SENSITIVITY = "class sensitivity"
RANDOM_WEIGHTS = "similarity, all weights random"
VERDICTS = {
    "random": ("better than random", "no better than random"),
    "centre": ("better than centre", "no better than centre"),
    "input_gradient": ("better than input gradient", "no better than input gradient"),
    "class": ("class-specific", "not class-specific"),
    "weights": ("survives random weights", "does not survive random weights"),
}
"""All possible verdicts by topic: the positive one, then the negative one."""


def verdict(about: str, is_so: bool) -> str:
    """Return the positive or negative verdict about a topic of `VERDICTS`."""
    return VERDICTS[about][0 if is_so else 1]


@dataclass(frozen=True)
class Score:
    """A score of the map and of the baselines; None if a baseline has none.

    within: two standard errors; 19 in 20 random maps are this close to `random`.
    """

    name: str
    map: float
    random: float | None = None
    within: float | None = None
    centre: float | None = None
    input_gradient: float | None = None
    oracle: float | None = None


class Fall(NamedTuple):
    """The target's mean probability, or the chosen quantity, without a share of the patches.

    share: share of the patches that is removed.
    whole, without, random: the mean with all patches, without the top-ranked patches, and without
        random ones.
    low, high: `random` ± two standard errors over the random orders.
    """

    share: float
    whole: float
    without: float
    random: float
    low: float
    high: float
    num_orders: int
    symbol: str = "p"

    @classmethod
    def at(
        cls,
        share: float,
        removed: Annotated[Tensor, "points"],
        curves: Mapping[str, Annotated[Tensor, "orders batch points"]],
        symbol: str = "p",
    ) -> Fall:
        """Return the fall at the point of `Trust.curves` that is nearest to `share`."""
        point = 1 + int((removed[1:-1] - share).abs().argmin())
        random = curves["random"][..., point].mean(dim=1)
        middle, error = float(random.mean()), float(random.std() / len(random) ** 0.5)
        whole, without = (float(curves["map"][0, :, at].mean()) for at in (0, point))
        low, high = middle - 2 * error, middle + 2 * error
        return cls(float(removed[point]), whole, without, middle, low, high, len(random), symbol)

    def sentence(self, removal: str, num_images: int) -> str:
        """Return what a prediction loses without top-ranked or random patches, as a sentence."""
        percent = f"{100 * self.share:.0f} %"
        whole, without = f"{self.whole:.2f}", f"{self.without:.2f}"
        goes = "goes" if whole == without else "falls" if self.without < self.whole else "rises"
        p = self.symbol if num_images == 1 else f"the mean {self.symbol} of {num_images} images"
        return (
            f"Without the {percent} of patches that this map ranks first ({REMOVALS[removal]}), "
            f"{p} {goes} from {whole} to {without}; without a random {percent}, to "
            f"{self.random:.2f} ({self.low:.2f} to {self.high:.2f}, {self.num_orders} orders)."
        )


@dataclass(eq=False, repr=False)
class Trust:
    """Measures of how far to trust a map: `print(repr(trust))` prints a table, `print(trust)`
    sentences.

    scores: scores of the map, beside those of random maps, of a Gaussian about the middle, of the
        size of the input gradient, and, with masks, of the masks themselves.
    verdicts: verdicts of `VERDICTS` for each kind of removal, for "class" and for "weights".
    falls: what is lost without a fifth of the patches, by kind of removal.
    gaps: the perturbation gap of each image in probability, by kind of removal.
    curves: the target's probability at the shares `removed`, by kind of removal and by map, for
        two orders, most-first and least-first; "random" has one curve for every random order.
    unavailable: reason by the name of each measurement that was not possible.
    num_forwards: number of forwards for each image.
    quantity: the quantity of the target that was measured.
    """

    num_images: int
    removed: Annotated[Tensor, "points"]
    scores: list[Score] = field(default_factory=list)
    verdicts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    falls: dict[str, Fall] = field(default_factory=dict)
    gaps: dict[str, Annotated[Tensor, "batch"]] = field(default_factory=dict)
    curves: dict[str, dict[str, Annotated[Tensor, "_ batch points"]]] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    num_forwards: float = 0.0
    quantity: Quantity | None = None

    @property
    def symbol(self) -> str:
        """The symbol of the quantity in sentences and at axes."""
        return "p" if self.quantity is None else self.quantity.symbol

    def __getitem__(self, name: str) -> Score:
        """Return a score by its name."""
        for score in self.scores:
            if score.name == name:
                return score
        names = ", ".join(repr(score.name) for score in self.scores)
        raise KeyError(f"{name!r} is not one of the scores {names}")

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Return the table as numbers by score and map, without missing ones."""
        return {
            score.name: {
                name: value
                for name, value in asdict(score).items()
                if name != "name" and value is not None
            }
            for score in self.scores
        }

    def __str__(self) -> str:
        sentences = [
            self.falls[removal].sentence(removal, self.num_images)
            for removal in list(self.falls)[:1]
        ]
        said = {name: words for name, words in self.verdicts.items() if name in REMOVALS}
        for words in dict.fromkeys(said.values()):
            kinds = " and ".join(REMOVALS[name] for name in said if said[name] == words)
            sentences.append(f"{kinds.capitalize()}: {', '.join(words)}.")
        if len({words[0] for words in said.values()}) > 1:
            sentences.append("The kinds of removal disagree.")
        of_map = [
            f"{word} ({self[name].map:.2f})"
            for about, name in (("class", CLASS_SENSITIVITY), ("weights", RANDOM_WEIGHTS))
            for word in self.verdicts.get(about, ())
        ]
        if of_map:
            survives = verdict("weights", True) in self.verdicts.get("weights", ())
            sentences.append(f"The map: {', '.join(of_map)}{', which is bad' * survives}.")
        if self.quantity is not None and not self.quantity.is_usual:
            sentences.append(f"{self.symbol} is {self.quantity.meaning}.")
        for name, reason in self.unavailable.items():
            sentences.append(f"Not available: {REMOVALS.get(name, name)}; {reason}.")
        return " ".join(sentences)

    def __repr__(self) -> str:
        rows = [["", "map", "random", "centre", "input gradient", "oracle"]]
        for one in self.scores:
            within = f" ± {one.within:.3f}" if one.within else ""
            others = (one.centre, one.input_gradient, one.oracle)
            numbers = _number(one.map), _number(one.random) + within, *map(_number, others)
            rows.append([one.name, *numbers])
        filled = [n for n, column in enumerate(zip(*rows, strict=True)) if any(column[1:])]
        table = text_table([row[n] for n in filled] for row in rows)
        images = f"{self.num_images} image{'s' * (self.num_images > 1)}"
        return f"{table}\n{images}, {self.num_forwards:.0f} forwards each"


def _number(value: float | None) -> str:
    return "" if value is None else f"{round(value, 3) + 0.0:.3f}"
