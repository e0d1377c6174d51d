"""Scenes: what they are, that captions mean them, that masks show them, and what is held out."""

import re
from random import Random

import numpy as np
import pytest
import torch

from attnkit.tasks.captioning import (
    EVERYTHING,
    HELD_OUT,
    ScenesData,
    captions_of,
    draw_scene,
    is_right,
    parse_caption,
    words_of,
    words_of_objects,
)
from attnkit.tasks.captioning import data as captioning_data
from attnkit.tasks.captioning.data import compose
from attnkit.tasks.captioning.grammar import RELATION_OF
from attnkit.tasks.images.scenes import (
    COLOURS,
    CONTAINERS,
    DIGITS,
    KINDS,
    RELATIONS,
    RGB,
    SIZES,
    TEXTURES,
    draw,
)
from attnkit.tasks.images.scenes import (
    handwriting as handwriting_of,
)

VALUES = {"kind": KINDS, "colour": COLOURS, "size": SIZES, "texture": TEXTURES}
SEVEN = {"kind": "seven", "colour": "red", "size": "small", "texture": "plain"}
SQUARE = {"kind": "square", "colour": "blue", "size": "large", "texture": "striped"}
SCENE = {"objects": [SEVEN, SQUARE], "relation": "left of"}


def scenes(count, seed=1, **options):
    random = Random(seed)
    return [draw_scene(random, **options) for _ in range(count)]


@pytest.fixture(scope="module")
def data():
    data = ScenesData(num_train=300, num_val=31, num_test=37, batch_size=7)
    data.setup()
    return data


@pytest.mark.parametrize("compositional", [False, True])
def test_every_caption_means_its_scene(compositional):
    random = Random(3)
    for scene in scenes(500, compositional=compositional):
        captions = captions_of(scene, random)
        assert len(set(captions)) == 5
        for caption in captions:
            assert parse_caption(caption) == scene, caption
            assert is_right(caption, scene, EVERYTHING)


def test_every_skeleton_is_written_and_the_table_is_unambiguous():
    random = Random(5)
    noun_phrase = re.compile(rf"\ba (\w+ )*?({'|'.join([*KINDS, 'disc', 'rhombus', 'plus'])})\b")
    written = set()
    for scene in scenes(600):
        for caption in captions_of(scene, random):
            skeleton = noun_phrase.sub("X", caption, count=1)
            written.add(noun_phrase.sub("Y", skeleton, count=1))
    assert written == set(RELATION_OF)
    assert len(RELATION_OF) == 124


@pytest.mark.parametrize("attribute", VALUES)
@pytest.mark.parametrize("number", [0, 1])
def test_a_changed_attribute_is_found(attribute, number):
    random = Random(7)
    for scene in scenes(60):
        other = {**scene, "objects": [dict(thing) for thing in scene["objects"]]}
        thing = other["objects"][number]
        thing[attribute] = next(v for v in VALUES[attribute] if v != thing[attribute])
        for caption in captions_of(other, random):
            assert not is_right(caption, scene, EVERYTHING)
            judged = attribute in ("kind", "colour")
            assert is_right(caption, scene) == (not judged)


def test_a_changed_relation_is_found():
    random = Random(7)
    for scene in scenes(60):
        turned = {**scene, "objects": scene["objects"][::-1]}
        others = [{**scene, "relation": r} for r in RELATIONS if r != scene["relation"]]
        for other in (turned, *others):
            assert not any(is_right(caption, scene) for caption in captions_of(other, random))
            assert all(is_right(c, scene, ("kind", "colour")) for c in captions_of(other, random))


@pytest.mark.parametrize(
    "caption",
    [
        "a small red seven left of a large striped blue square",
        "A small red seven is to the left of a large, striped blue square.",
        "to the right of a little red handwritten seven is a big blue striped square",
        "a large blue striped square on the right of a tiny plain red seven",
        "huge striped blue square with a small red seven to its left",
        "a small red seven on the left and a large blue stripy square on the right",
    ],
)
def test_sentences_that_mean_the_same(caption):
    assert parse_caption(caption) == SCENE
    assert is_right(caption, SCENE, EVERYTHING)


def test_what_is_unsaid_is_not_right():
    caption = "a small red seven left of a striped square"
    said = parse_caption(caption)
    assert said["objects"][1] == {**SQUARE, "colour": None, "size": None}
    assert not is_right(caption, SCENE)
    assert is_right(caption, SCENE, ("kind", "texture", "relation"))
    assert is_right("a red seven left of a striped blue square", SCENE)
    assert not is_right("a small red seven left of a large blue square", SCENE, EVERYTHING)


@pytest.mark.parametrize(
    "caption",
    [
        "",
        "a small red seven",
        "a small red seven left of",
        "a small red seven a large blue square",
        "a small red red seven left of a large blue square",
        "a small red left of a large blue square",
        "a small red seven left of a large blue square above a pink star",
        "a handwritten square left of a red seven",
        "a dog left of a red seven",
        "left left of a red seven of a blue square",
    ],
)
def test_other_sentences_mean_nothing(caption):
    assert parse_caption(caption) is None
    assert not is_right(caption, SCENE)
    assert words_of_objects(caption) == []


def test_words_name_their_objects():
    caption = "To the right of a little red handwritten seven, there is a big blue striped square."
    words = words_of(caption)
    named = [(words[place], number) for place, number in words_of_objects(caption)]
    assert named == [("red", 0), ("seven", 0), ("blue", 1), ("square", 1)]
    turned = "a big blue striped square right of a little red seven"
    assert words_of_objects(turned) == [(2, 1), (4, 1), (9, 0), (10, 0)]
    # The objects are the scene's, in whatever order a caption has them, right or wrong.
    wrong = "a big blue square left of a small green seven"
    assert words_of_objects(wrong) == [(2, 0), (3, 0), (8, 1), (9, 1)]
    assert words_of_objects(wrong, SCENE) == [(2, 1), (3, 1)]


def test_held_out_pairs_are_of_everything():
    assert {kind for kind, _ in HELD_OUT} == set(KINDS)
    assert {colour for _, colour in HELD_OUT} == set(COLOURS)
    assert len(HELD_OUT) == len(KINDS)


def test_only_the_compositional_test_has_held_out_pairs(data):
    found = {"train": set(), "val": set(), "test": set()}
    for caption in (c for captions in data.sets["train"].captions for c in captions):
        found["train"].update(pairs_of(parse_caption(caption)))
    for split in ("val", "test"):
        for scene in data.sets[split].others["scene"]:
            found[split].update(pairs_of(scene))
    assert not any(pairs & HELD_OUT for pairs in found.values())
    seen = found["train"]
    assert {kind for kind, _ in seen} == set(KINDS)
    assert {colour for _, colour in seen} == set(COLOURS)
    for scene in data.sets["compositional"].others["scene"]:
        assert pairs_of(scene) & HELD_OUT


def pairs_of(scene):
    return {(thing["kind"], thing["colour"]) for thing in scene["objects"]}


def test_handwriting_of_the_tests_is_not_trained_on(data, monkeypatch):
    parts = [
        {image.tobytes() for images in digits.values() for image in images}
        for digits in handwriting_of(data.seed)
    ]
    assert sum(len(part) for part in parts) == 1797
    assert not parts[0] & parts[1]
    assert not parts[0] & parts[2]
    assert not parts[1] & parts[2]
    used = {}

    def recording(split, count, side, digits, seed):
        used[split] = {image.tobytes() for images in digits.values() for image in images}
        assert list(digits) == list(DIGITS)
        return compose(split, 1, side, digits, seed)

    monkeypatch.setattr(captioning_data, "compose", recording)
    ScenesData().setup()
    expected = ("train", "val", "test", "compositional")
    assert used == dict(zip(expected, (*parts, parts[2]), strict=True))


@pytest.mark.parametrize("side", [48, 97])
def test_masks_and_places(side):
    random = Random(13)
    handwriting = handwriting_of(0)[0]
    for scene in scenes(200, compositional=True):
        picture = draw(scene, side, handwriting, random)
        assert picture.image.shape == (3, side, side)
        first, second = picture.masks
        assert not (first & second).any()
        (left, top, right, bottom), other = box(first), box(second)
        relation = scene["relation"]
        if relation == "left of":
            assert right < other[0]
        elif relation == "above":
            assert bottom < other[1]
        else:
            assert scene["objects"][1]["kind"] in CONTAINERS
            assert other[0] < left
            assert other[1] < top
            assert right < other[2]
            assert bottom < other[3]


def box(mask):
    rows, columns = np.nonzero(mask)
    return columns.min(), rows.min(), columns.max(), rows.max()


def test_masks_have_the_colour_that_captions_name(data):
    wrong = checked = 0
    for number, scene in enumerate(data.sets["test"].others["scene"]):
        image = data.sets["test"].images.fetch(torch.tensor([number]))[0].permute(1, 2, 0)
        for thing, mask in zip(
            scene["objects"], data.sets["test"].others["masks"][number], strict=True
        ):
            assert mask.sum() >= 15
            if thing["texture"] == "plain":
                # What holds another thing has its colour on its border alone.
                pixels = image[mask].double()
                strength = pixels.amax(1) - pixels.amin(1)
                mean = pixels[strength.topk(len(pixels) // 5).indices].mean(0)
                distance = {c: (mean - torch.tensor(RGB[c])).norm() for c in COLOURS}
                checked += 1
                wrong += min(distance, key=distance.get) != thing["colour"]
    assert checked > 20
    assert wrong == 0


def test_sizes_can_be_told():
    random, handwriting = Random(17), handwriting_of(0)[0]
    sides = {size: [] for size in SIZES}
    for scene in scenes(200):
        masks = draw(scene, 48, handwriting, random).masks
        for thing, mask in zip(scene["objects"], masks, strict=True):
            if thing["kind"] not in DIGITS:
                left, top, right, bottom = box(mask)
                sides[thing["size"]].append(max(right - left, bottom - top))
    assert max(sides["small"]) < min(sides["large"])


def test_the_seed_decides_everything(data):
    again = ScenesData(num_train=300, num_val=31, num_test=37)
    other = ScenesData(num_train=300, num_val=31, num_test=37, seed=1)
    again.setup()
    other.setup()
    for split in data.sets:
        assert data.sets[split].captions == again.sets[split].captions
        assert torch.equal(data.sets[split].images.images, again.sets[split].images.images)
        assert data.sets[split].captions != other.sets[split].captions
    firsts = [images.captions[0] for images in data.sets.values()]
    assert all(firsts.count(captions) == 1 for captions in firsts)
    assert data.describe() == again.describe()


def test_scenes_are_the_same_on_every_machine():
    """Written down once, as `random()` is the same in every version of Python."""
    random = Random("0 train")
    scene = draw_scene(random)
    first = "a large turquoise star with a large violet striped plus below it"
    assert captions_of(scene, random)[0] == first


def test_a_batch_of_the_tests(data):
    loaders = data.test_dataloader()
    assert list(loaders) == ["test", "compositional"]
    for name, loader in loaders.items():
        batch = next(iter(loader))
        assert set(batch) == {"image", "words", "references", "id", "scene", "masks"}
        assert batch["image"].shape == (7, 3, 48, 48)
        assert batch["image"].dtype == torch.uint8
        assert batch["masks"].shape == (7, 2, 48, 48)
        assert batch["masks"].dtype == torch.bool
        assert batch["id"][2] == f"{name}/2"
        for scene, references, words in zip(
            batch["scene"], batch["references"], batch["words"].tolist(), strict=True
        ):
            assert len(references) == 5
            assert is_right(data.tokenizer.decode(words), scene, EVERYTHING)
            assert data.tokenizer.decode(words) == references[0]
    assert set(next(iter(data.train_dataloader()))) == {"image", "words", "references"}
    assert set(next(iter(data.val_dataloader()))) >= {"scene", "masks"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_train": 0}, "num_train: expected at least 1, got 0"),
        ({"num_test": -1}, "num_test: expected at least 1, got -1"),
        ({"image_size": 16}, "image_size: expected at least 24, got 16"),
        ({"val_fraction": 0.1}, "val_fraction: scenes are generated, not split"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ScenesData(**options)
