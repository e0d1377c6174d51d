"""What a scene is: two things, each with four attributes, and how one lies to the other."""

from random import Random
from typing import TypedDict, TypeVar

SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross", "heart")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
KINDS = (*SHAPES, *DIGITS)
COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink")
SIZES = ("small", "large")
TEXTURES = ("plain", "striped", "dotted")
ATTRIBUTES = ("kind", "colour", "size", "texture")

# Of the first thing to the second; the other three names say the same from the second's side.
RELATIONS = ("left of", "above", "inside")
INVERSE = {"left of": "right of", "above": "below", "inside": "around"}
INVERSE.update({inverse: relation for relation, inverse in INVERSE.items()})

CONTAINERS = ("circle", "square", "diamond")  # with room for another thing
DIGIT_SHARE = 0.3
INSIDE_SHARE = 0.25

# One colour of each kind, which training never shows: 17 of 136 pairs. Every kind and every colour
# is seen in other pairs.
HELD_OUT = frozenset(
    (kind, COLOURS[(3 * number + 1) % len(COLOURS)]) for number, kind in enumerate(KINDS)
)

Item = TypeVar("Item")


class Thing(TypedDict):
    """A thing, by the names above; None stands for what a caption leaves unsaid."""

    kind: str | None
    colour: str | None
    size: str | None
    texture: str | None


class Scene(TypedDict):
    """Two things, the first of which is `relation` (one of RELATIONS) the second."""

    objects: list[Thing]
    relation: str


def draw_scene(random: Random, *, compositional: bool = False) -> Scene:
    """A random scene: without a pair of HELD_OUT, or, `compositional`, with one or two.

    The two things differ in kind or colour, so that naming both tells them apart. Digits are plain.
    What is inside is small and of another colour than what is around it, which is large and plain,
    and drawn with a pale middle.
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
    """One of the items. Of `Random`, only `random()` is the same in every version of Python."""
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
