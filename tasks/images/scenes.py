"""Scenes of two things in a relation: what they hold, and how they are drawn with their masks."""

import math
from functools import lru_cache
from random import Random
from typing import NamedTuple, TypedDict, TypeVar

import numpy as np
import torch
from PIL import Image, ImageDraw

from attnkit.lightning.resume.sampler import stratified_split

SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross", "heart")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
KINDS = (*SHAPES, *DIGITS)
COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink")
SIZES = ("small", "large")
TEXTURES = ("plain", "striped", "dotted")
ATTRIBUTES = ("kind", "colour", "size", "texture")

# The relation of the first thing to the second; INVERSE names it from the second's side.
RELATIONS = ("left of", "above", "inside")
INVERSE = {"left of": "right of", "above": "below", "inside": "around"}
INVERSE.update({inverse: relation for relation, inverse in INVERSE.items()})

CONTAINERS = ("circle", "square", "diamond")  # shapes that can hold another thing
DIGIT_SHARE = 0.3
INSIDE_SHARE = 0.25

# One colour of each kind that training never shows: 17 of 136 pairs. Every kind and every colour
# occurs in other pairs.
HELD_OUT = frozenset(
    (kind, COLOURS[(3 * number + 1) % len(COLOURS)]) for number, kind in enumerate(KINDS)
)

Item = TypeVar("Item")


class Thing(TypedDict):
    """A thing, described by the names above; None: the caption does not mention the attribute."""

    kind: str | None
    colour: str | None
    size: str | None
    texture: str | None


class Scene(TypedDict):
    """Two things and the relation of the first to the second, one of RELATIONS."""

    objects: list[Thing]
    relation: str


def draw_scene(random: Random, *, compositional: bool = False) -> Scene:
    """Return a random scene without a pair of HELD_OUT, or, if `compositional`, with one or two.

    The two things differ in kind or colour, so that naming both tells them apart. Digits are plain.
    A thing inside another is small and has another colour; the outer one is large and plain, and
    drawn with a pale middle.
    """
    while True:
        scene = _any_scene(random)
        first, second = scene["objects"]
        pairs = [(thing["kind"], thing["colour"]) for thing in (first, second)]
        clear = pairs[0] != pairs[1]
        if scene["relation"] == "inside":
            clear = first["colour"] != second["colour"]
        if clear and compositional == any(pair in HELD_OUT for pair in pairs):
            return scene


def choose(random: Random, items: tuple[Item, ...]) -> Item:
    """Return a random item. Only `Random.random()` gives the same numbers in every Python."""
    return items[int(random.random() * len(items))]


def _any_scene(random: Random) -> Scene:
    if random.random() < INSIDE_SHARE:
        inner, outer = _any_thing(random), _any_thing(random)
        outer["kind"] = choose(random, CONTAINERS)
        inner["size"], outer["size"], outer["texture"] = "small", "large", "plain"
        return {"objects": [inner, outer], "relation": "inside"}
    things = [_any_thing(random), _any_thing(random)]
    return {"objects": things, "relation": choose(random, ("left of", "above"))}


def _any_thing(random: Random) -> Thing:
    digit = random.random() < DIGIT_SHARE
    return {
        "kind": choose(random, DIGITS if digit else SHAPES),
        "colour": choose(random, COLOURS),
        "size": choose(random, SIZES),
        "texture": "plain" if digit else choose(random, TEXTURES),
    }


RGB = {
    "red": (214, 40, 40),
    "orange": (250, 130, 20),
    "yellow": (240, 205, 30),
    "green": (40, 160, 60),
    "cyan": (40, 200, 210),
    "blue": (40, 85, 220),
    "purple": (125, 50, 175),
    "pink": (250, 120, 185),
}
# Lengths are shares of the side of the image.
_DIAMETER = {"small": (0.29, 0.33), "large": (0.41, 0.46)}
_CONTAINER_DIAMETER = (0.68, 0.76)
_BORDER = 0.1  # share of a container's diameter
_PALE = 0.2  # strength of a container's colour inside its border
_MARGIN = 0.02
_GAP = 0.04
_COLOUR_JITTER = 10
_ANGLES = (-10, -5, 0, 5, 10)  # degrees
_OVERSAMPLING = 4
_DIGIT_FRACTIONS = [0.1, 0.2]  # shares of the handwritten digits in val and in both test splits
# Digits are 8 × 8; half a pixel around them keeps their strokes from ending at an edge.
_DIGIT_BOX = (0.5, 0.5, 9.5, 9.5)
_LUMA = (0.299, 0.587, 0.114)


class Picture(NamedTuple):
    """A picture, uint8 [3, side, side], and masks of the visible pixels of its two things, bool
    [2, side, side]."""

    image: np.ndarray
    masks: np.ndarray


def draw(scene: Scene, side: int, digits: dict[str, np.ndarray], random: Random) -> Picture:
    """Compose a scene. Places, exact sizes, shades, angles and the handwriting are random.

    Args:
        scene: what to draw.
        side: side of the picture in pixels.
        digits: maps the name of a digit to images, uint8 [images, 8, 8]; one of them is drawn.
        random: source of randomness; only `random.random()` is called.
    """
    canvas = _background(side, random)
    masks = np.zeros((2, side, side), dtype=bool)
    boxes = _places(scene, side, random)
    for number in (1, 0):  # the inner thing is drawn last
        thing, (left, top, diameter) = scene["objects"][number], boxes[number]
        cover, angle = _cover(thing, diameter, digits, random)
        area = np.s_[top : top + diameter, left : left + diameter]
        paint = cover[..., None] * (_painted(thing, diameter, random) - canvas[area])
        if number and scene["relation"] == "inside":
            paint *= _hollow(str(thing["kind"]), diameter, angle)[..., None]
        canvas[area] += paint
        seen = cover >= 0.5
        masks[:, top : top + diameter, left : left + diameter] &= ~seen
        masks[number][area] = seen
    image = np.rint(canvas).clip(0, 255).astype(np.uint8)
    return Picture(np.ascontiguousarray(image.transpose(2, 0, 1)), masks)


def _background(side: int, random: Random) -> np.ndarray:
    """Return a light background that is brighter on one side."""
    shade = 222 + 20 * random.random() + 8 * (_numbers(random, 3) - 0.5)
    across, down = 24 * (_numbers(random, 2) - 0.5)
    ramp = np.linspace(-0.5, 0.5, side)
    return shade + (across * ramp + down * ramp[:, None])[..., None]


def _places(scene: Scene, side: int, random: Random) -> list[tuple[int, int, int]]:
    """Return (left, top, diameter) in pixels of the squares that hold the two things."""
    ranges = [_DIAMETER[str(thing["size"])] for thing in scene["objects"]]
    first, second = (_between(random, *limits) for limits in ranges)
    if scene["relation"] == "inside":
        second = _between(random, *_CONTAINER_DIAMETER)
        x, y = (_between(random, second / 2 + _MARGIN, 1 - _MARGIN - second / 2) for _ in "xy")
        centres = [(x, y), (x, y)]
    else:
        # Along the axis of the relation each thing stays on its side of a line near the middle;
        # across it the two are at most half as far apart.
        low, high = _MARGIN + first + _GAP / 2, 1 - _MARGIN - second - _GAP / 2
        line = _between(random, max(low, 0.46), min(high, 0.54))
        start = _between(random, _MARGIN + first / 2, line - _GAP / 2 - first / 2)
        end = _between(random, line + _GAP / 2 + second / 2, 1 - _MARGIN - second / 2)
        across = _between(random, first / 2 + _MARGIN, 1 - _MARGIN - first / 2)
        other = across + (random.random() - 0.5) * (end - start)
        other = min(max(other, second / 2 + _MARGIN), 1 - _MARGIN - second / 2)
        centres = [(start, across), (end, other)]
        if scene["relation"] == "above":
            centres = [(x, y) for y, x in centres]
    places = []
    for (x, y), diameter in zip(centres, (first, second), strict=True):
        pixels = max(3, round(diameter * side))
        corner = [min(max(0, round(c * side - pixels / 2)), side - pixels) for c in (x, y)]
        places.append((corner[0], corner[1], pixels))
    return places


def _cover(
    thing: Thing, diameter: int, digits: dict[str, np.ndarray], random: Random
) -> tuple[np.ndarray, int]:
    """Return the share of each pixel that a thing covers, [diameter, diameter], and its angle."""
    kind = str(thing["kind"])
    if kind not in DIGITS:
        angle = choose(random, _ANGLES)
        return _shape(kind, diameter, angle), angle
    images = digits[kind]
    ink = np.pad(images[int(random.random() * len(images))], 1)
    size = (diameter, diameter)
    grown = Image.fromarray(ink).resize(size, Image.Resampling.BICUBIC, _DIGIT_BOX)
    # Enlarged ink fades over a whole pixel of the small image; this sharpens the strokes.
    return ((np.asarray(grown) - 80.0) / 70).clip(0, 1), 0


def _hollow(kind: str, diameter: int, angle: int) -> np.ndarray:
    """Return the strength of a container's colour: 1 on its border, `_PALE` inside."""
    border = max(1, round(_BORDER * diameter))
    strength = np.ones((diameter, diameter))
    room = np.s_[border : diameter - border, border : diameter - border]
    strength[room] -= (1 - _PALE) * _shape(kind, diameter - 2 * border, angle)
    return strength


def _painted(thing: Thing, diameter: int, random: Random) -> np.ndarray:
    """Return the colour of each pixel of a thing, float [diameter, diameter, 3]."""
    colour = np.array(RGB[str(thing["colour"])]) + _COLOUR_JITTER * (2 * _numbers(random, 3) - 1)
    if thing["texture"] == "plain":
        return np.broadcast_to(colour, (diameter, diameter, 3))
    light = float(colour @ _LUMA) < 120
    second = colour + 0.5 * (255 - colour) if light else 0.4 * colour
    share = _texture(str(thing["texture"]), diameter, choose(random, (0, 45, 90, 135)))
    return colour + share[..., None] * (second - colour)


@lru_cache(maxsize=4096)
def _shape(kind: str, diameter: int, angle: int) -> np.ndarray:
    large = _OVERSAMPLING * diameter
    image = Image.new("L", (large, large))
    # Corners are rounded to pixels, so that rounding errors of a cosine change nothing.
    points = [
        (round((large - 1) / 2 * (1 + x)), round((large - 1) / 2 * (1 + y)))
        for x, y in _turned(_outline(kind), angle)
    ]
    ImageDraw.Draw(image).polygon(points, fill=255)
    return np.asarray(image.reduce(_OVERSAMPLING)) / 255.0


@lru_cache(maxsize=4096)
def _texture(name: str, diameter: int, angle: int) -> np.ndarray:
    """Return the share of the second colour in each pixel."""
    large = _OVERSAMPLING * diameter
    places = (np.arange(large) + 0.5) / large - 0.5
    x, y = np.meshgrid(places, places)
    if name == "striped":
        turn = math.radians(angle)
        second = ((x * math.cos(turn) + y * math.sin(turn)) * 3.5) % 1 < 0.45
    else:
        second = ((x * 3.5) % 1 - 0.5) ** 2 + ((y * 3.5) % 1 - 0.5) ** 2 < 0.3**2
    shape = (diameter, _OVERSAMPLING, diameter, _OVERSAMPLING)
    return second.reshape(shape).mean(axis=(1, 3))


def _outline(kind: str) -> list[tuple[float, float]]:
    """Return the corners of a shape in [-1, 1]², y downwards."""
    if kind == "circle":
        return [_polar(1, 360 * n / 64) for n in range(64)]
    if kind == "square":
        return [(-0.82, -0.82), (0.82, -0.82), (0.82, 0.82), (-0.82, 0.82)]
    if kind == "triangle":
        return [(0, -0.9), (0.95, 0.8), (-0.95, 0.8)]
    if kind == "diamond":
        return [(0, -1), (0.85, 0), (0, 1), (-0.85, 0)]
    if kind == "star":
        return [_polar((1, 0.42)[n % 2], 36 * n - 90) for n in range(10)]
    if kind == "cross":
        arm = 0.3
        quarter = [(-arm, -0.95), (arm, -0.95), (arm, -arm)]
        return [point for turn in range(4) for point in _turned(quarter, 90 * turn)]
    if kind == "heart":
        turns = (2 * math.pi * n / 64 for n in range(64))
        return [
            (
                math.sin(t) ** 3,
                -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t))
                / 17
                - 0.12,
            )
            for t in turns
        ]
    raise ValueError(f"kind: no such shape: {kind!r}")


def _polar(radius: float, degrees: float) -> tuple[float, float]:
    return radius * math.cos(math.radians(degrees)), radius * math.sin(math.radians(degrees))


def _turned(points: list[tuple[float, float]], degrees: float) -> list[tuple[float, float]]:
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return [(x * cos - y * sin, x * sin + y * cos) for x, y in points]


def _between(random: Random, low: float, high: float) -> float:
    return low + (high - low) * random.random()


def _numbers(random: Random, count: int) -> np.ndarray:
    return np.array([random.random() for _ in range(count)])


def handwriting(seed: int) -> list[dict[str, np.ndarray]]:
    """Return for train, val and test the images of each digit by name, uint8 [images, 8, 8]."""
    from sklearn.datasets import load_digits  # takes half a second, which only this data needs

    found = load_digits()
    images = np.rint(found.images * (255 / 16)).astype(np.uint8)  # 17 grey values, 0 to 16
    parts = stratified_split(torch.from_numpy(found.target), _DIGIT_FRACTIONS, seed)
    return [
        {name: images[part][found.target[part] == number] for number, name in enumerate(DIGITS)}
        for part in (rows.numpy() for rows in parts)
    ]
