"""Scenes: two things, each with four attributes, and their spatial relation."""

from random import Random
from typing import TypedDict, TypeVar

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
