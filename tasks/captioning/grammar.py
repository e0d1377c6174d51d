"""The grammar of the scenes' captions: it writes captions and parses them.

A caption is a skeleton, such as "there is X to the left of Y", in which X and Y are noun phrases,
such as "a small striped red square". Writing and parsing use the same table of skeletons.
"""

from collections.abc import Collection, Iterator
from random import Random
from typing import Any, NamedTuple, cast

from attnkit.tasks.captioning.tokenizer import words_of
from attnkit.tasks.images.scenes import (
    ATTRIBUTES,
    COLOURS,
    DIGITS,
    INVERSE,
    KINDS,
    RELATIONS,
    SIZES,
    TEXTURES,
    Scene,
    Thing,
    choose,
)

CAPTIONS = 5
OBJECTS_COLOURS_RELATION = ("kind", "colour", "relation")
EVERYTHING = (*ATTRIBUTES, "relation")

_OTHER_WORDS = {
    "circle": ("disc",),
    "diamond": ("rhombus",),
    "cross": ("plus",),
    "cyan": ("turquoise",),
    "purple": ("violet",),
    "small": ("little", "tiny"),
    "large": ("big", "huge"),
    "striped": ("stripy",),
    "dotted": ("spotted",),
}
_OTHER_WORD_SHARE = 0.3
_FILLER = "handwritten"  # may stand before a digit
_ARTICLES = ("a", "an")

# Maps a word to (attribute, value). "plain" can be parsed, but is never written.
_MEANING = {
    word: (attribute, name)
    for attribute, names in zip(ATTRIBUTES, (KINDS, COLOURS, SIZES, TEXTURES), strict=True)
    for name in names
    for word in (name, *_OTHER_WORDS.get(name, ()))
}

# X is the thing named first, Y the second. The key is the relation of X to Y.
_PHRASES = {
    "left of": ("left of", "to the left of", "on the left of"),
    "right of": ("right of", "to the right of", "on the right of"),
    "above": ("above", "over", "higher than"),
    "below": ("below", "under", "beneath"),
    "inside": ("inside", "within"),
    "around": ("around", "surrounding"),
}
_FRAMES = (
    "X {} Y",
    "X is {} Y",
    "there is X {} Y",
    "the picture shows X {} Y",
    "an image of X {} Y",
)
_TURNED_FRAMES = ("{} X is Y", "{} X there is Y")
_OWN = {
    "left of": ("X with Y to its right", "X on the left and Y on the right"),
    "right of": ("X with Y to its left", "X on the right and Y on the left"),
    "above": ("X with Y below it", "X at the top and Y at the bottom"),
    "below": ("X with Y above it", "X at the bottom and Y at the top"),
    "inside": ("X with Y around it", "X surrounded by Y"),
    "around": ("X with Y inside it", "X contains Y"),
}


def _skeletons() -> Iterator[tuple[str, str]]:
    for relation, phrases in _PHRASES.items():
        for phrase in phrases:
            yield from ((frame.format(phrase), relation) for frame in _FRAMES)
            yield from ((frame.format(phrase), INVERSE[relation]) for frame in _TURNED_FRAMES)
    for relation, skeletons in _OWN.items():
        yield from ((skeleton, relation) for skeleton in skeletons)


RELATION_OF = dict(_skeletons())
_SKELETONS_OF = {
    relation: tuple(s for s, other in RELATION_OF.items() if other == relation)
    for relation in INVERSE
}


def captions_of(scene: Scene, random: Random, count: int = CAPTIONS) -> list[str]:
    """Return `count` different captions, each of the whole scene; "plain" is not mentioned."""
    found: dict[str, None] = {}
    while len(found) < count:
        relation, things = scene["relation"], scene["objects"]
        if random.random() < 0.5:
            relation, things = INVERSE[relation], things[::-1]
        skeleton = choose(random, _SKELETONS_OF[relation])
        phrases = dict(zip("XY", (_noun_phrase(thing, random) for thing in things), strict=True))
        found[" ".join(phrases.get(word, word) for word in skeleton.split())] = None
    return list(found)


def parse_caption(text: str) -> Scene | None:
    """Return the scene that a caption describes, or None if the grammar does not produce it.

    The order of the two things does not matter: "A right of B" is read as "B left of A". A texture
    that is not mentioned is plain; a colour or size that is not mentioned is None.
    """
    read = _read(text)
    return None if read is None else read.scene


def is_right(caption: str, scene: Scene, of: Collection[str] = OBJECTS_COLOURS_RELATION) -> bool:
    """Return True if a caption mentions the attributes in `of` of a scene, all correctly.

    Args:
        caption: any text. False is returned for a text outside the grammar.
        scene: an item of a batch's `scene`.
        of: some of "kind", "colour", "size", "texture", "relation" (`EVERYTHING` is all of them).
            Without "relation", the two things may be named in either role.
    """
    parsed = parse_caption(caption)
    if parsed is None or ("relation" in of and parsed["relation"] != scene["relation"]):
        return False
    names = [name for name in ATTRIBUTES if name in of]
    things = parsed["objects"]
    orders = [things] if "relation" in of else [things, things[::-1]]
    shown = [_get(thing, *names) for thing in scene["objects"]]
    return any([_get(thing, *names) for thing in order] == shown for order in orders)


def words_of_objects(caption: str, scene: Scene | None = None) -> list[tuple[int, int]]:
    """Return which words name which object: sorted pairs (index of the word, index of the object).

    Only nouns and colours name an object. The index of a word counts `words_of(caption)`, so word i
    is at place i + 1 of a batch's `words`, after the start. Without a scene, objects are those of
    `parse_caption`, which for a caption of a scene are the scene's. With a scene, they are its
    objects of that kind and colour; words that name none of them are left out.
    """
    read = _read(caption)
    if read is None:
        return []
    pairs = []
    shown = [_get(thing, "kind", "colour") for thing in (scene or read.scene)["objects"]]
    for number, (thing, places) in enumerate(zip(read.scene["objects"], read.places, strict=True)):
        named = _get(thing, "kind", "colour")
        if scene is None or named in shown:
            found = number if scene is None else shown.index(named)
            pairs += [(places[name], found) for name in ("kind", "colour") if name in places]
    return sorted(pairs)


def attribute_of(word: str) -> str | None:
    """Return the attribute that a word describes ("kind", "colour", "size", "texture") or None."""
    return _MEANING.get(word, (None, None))[0]


class _Read(NamedTuple):
    scene: Scene
    places: list[dict[str, int]]  # per object: maps an attribute to the index of its word


def _read(text: str) -> _Read | None:
    words = words_of(text)
    skeleton: list[str] = []
    things: list[Thing] = []
    places: list[dict[str, int]] = []
    start = 0
    while start < len(words):
        found = _read_noun_phrase(words, start)
        if found is None:
            skeleton.append(words[start])
            start += 1
        elif len(things) == 2:
            return None
        else:
            thing, place, start = found
            skeleton.append("XY"[len(things)])
            things.append(thing)
            places.append(place)
    relation = RELATION_OF.get(" ".join(skeleton))
    if relation is None:
        return None
    if relation not in RELATIONS:
        relation, things, places = INVERSE[relation], things[::-1], places[::-1]
    return _Read({"objects": things, "relation": relation}, places)


def _read_noun_phrase(words: list[str], start: int) -> tuple[Thing, dict[str, int], int] | None:
    """Return the thing that the noun phrase at `start` names, its words' places, and its end."""
    thing = Thing(kind=None, colour=None, size=None, texture=None)
    places: dict[str, int] = {}
    filled = False
    first = start + 1 if words[start] in _ARTICLES else start
    for place in range(first, len(words)):
        word = words[place]
        if word == _FILLER:
            filled = True
            continue
        attribute, value = _MEANING.get(word, ("", ""))
        if not attribute or attribute in places:
            return None
        cast("dict[str, str]", thing)[attribute] = value
        places[attribute] = place
        if attribute == "kind":
            if filled and value not in DIGITS:
                return None
            thing["texture"] = thing["texture"] or "plain"
            return thing, places, place + 1
    return None


def _noun_phrase(thing: Thing, random: Random) -> str:
    texture = [] if thing["texture"] == "plain" else [_word(thing["texture"], random)]
    colour = [_word(thing["colour"], random)]
    described = texture + colour if random.random() < 0.5 else colour + texture
    words = [_word(thing["size"], random), *described]
    if thing["kind"] in DIGITS and random.random() < _OTHER_WORD_SHARE:
        words.append(_FILLER)
    words.append(_word(thing["kind"], random))
    # No word of a size begins with a vowel.
    return " ".join(["a", *words])


def _word(name: Any, random: Random) -> str:
    others = _OTHER_WORDS.get(name, ())
    return choose(random, others) if others and random.random() < _OTHER_WORD_SHARE else name


def _get(thing: Thing, *names: str) -> list[Any]:
    return [cast("dict[str, Any]", thing)[name] for name in names]
