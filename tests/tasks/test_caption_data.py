"""Captioned files of every format, what is wrong with them, and what batches hold."""

import json
import os
import re

import numpy as np
import pytest
import torch
from lightning import LightningModule
from PIL import Image
from task_support import quiet

from attnkit.lightning import UserError
from attnkit.tasks.captioning import (
    CaptionCsvData,
    CaptionPredictData,
    CaptionSet,
    CocoCaptionsData,
    KarpathyData,
    ScenesData,
    WordTokenizer,
)
from attnkit.tasks.image_classification import FileImages, MemoryImages

COUNT = 12


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def root(tmp_path):
    random = np.random.default_rng(0)
    (tmp_path / "images" / "sub").mkdir(parents=True)
    for number in range(COUNT):
        pixels = random.integers(0, 256, (11, 13, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / name_of(number))
    return tmp_path


def name_of(number):
    return f"sub/{number:02}.png" if number % 2 else f"{number:02}.png"


def captions_of(number, count=3):
    return [f"A dog {'very ' * n}number{number}." for n in range(count)]


def coco(numbers=range(COUNT)):
    return {
        "info": {},
        "images": [{"id": 100 + n, "file_name": name_of(n)} for n in numbers],
        "annotations": [
            {"id": n, "image_id": 100 + n, "caption": text}
            for n in reversed(numbers)
            for text in captions_of(n)
        ],
    }


def karpathy():
    splits = ["train"] * 6 + ["restval"] * 2 + ["val"] * 2 + ["test"] * 2
    return {
        "dataset": "flickr8k",
        "images": [
            {
                "filename": name_of(n).rpartition("/")[2],
                **({"filepath": "sub"} if n % 2 else {}),
                "split": splits[n],
                "sentences": [{"raw": text, "tokens": text.split()} for text in captions_of(n)],
            }
            for n in range(COUNT)
        ],
    }


def csv_lines(extra=""):
    rows = [f'{name_of(n)},"{text}"{extra}' for n in range(COUNT) for text in captions_of(n)]
    return ["image,caption", *rows]


def write(path, content):
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, errors="surrogateescape")
    return path


def make_coco(root, plain=None, **options):
    file = write(root / "captions.json", plain or coco())
    return CocoCaptionsData(file, root / "images", **{"min_count": 1, **options})


def make_karpathy(root, plain=None, **options):
    file = write(root / "dataset.json", plain or karpathy())
    return KarpathyData(file, root / "images", **{"min_count": 1, **options})


def make_csv(root, lines=None, **options):
    file = write(root / "captions.csv", "\n".join(lines or csv_lines()))
    return CaptionCsvData(file, root / "images", **{"min_count": 1, **options})


MAKERS = {"coco": make_coco, "karpathy": make_karpathy, "csv": make_csv}


def ready(data):
    data.prepare_data()
    data.setup("fit")
    return data


@pytest.mark.parametrize("form", MAKERS)
@pytest.mark.parametrize("memory_gb", [None, 0])
def test_every_format_gives_the_same_images_and_captions(root, form, memory_gb):
    options = {} if form == "karpathy" else {"val_fraction": 0.17, "test_fraction": 0.17}
    before = sorted((str(p), p.stat().st_mtime_ns) for p in root.rglob("*"))
    data = MAKERS[form](root, image_size=8, memory_gb=memory_gb, num_workers=0, **options)
    ready(data)
    assert {split: len(s) for split, s in data.sets.items()} == {"train": 8, "val": 2, "test": 2}
    kind = MemoryImages if memory_gb is None else FileImages
    assert all(isinstance(images.images, kind) for images in data.sets.values())
    found = {}
    for images in data.sets.values():
        batch = images.__getitems__(range(len(images)))
        for path, references, image in zip(
            batch["path"], batch["references"], batch["image"], strict=True
        ):
            found[os.path.relpath(path, root / "images")] = references
            with Image.open(path) as file:
                centre = torch.from_numpy(np.array(file)).permute(2, 0, 1).float()[:, :, 1:12]
            assert (image.float().mean((1, 2)) - centre.mean((1, 2))).abs().max() < 9
    assert found == {name_of(n): captions_of(n) for n in range(COUNT)}
    written = {str(p) for p in root.rglob("*")} - {path for path, _ in before}
    assert {os.path.basename(p) for p in written} <= {
        "captions.json",
        "dataset.json",
        "captions.csv",
    }
    assert all(os.stat(path).st_mtime_ns == time for path, time in before if path != str(root))


def test_karpathys_splits(root):
    data = ready(make_karpathy(root))
    assert data.sets["val"].others["id"] == ["08.png", "09.png"]
    assert data.sets["test"].captions == [captions_of(10), captions_of(11)]
    # Of tokens alone, too.
    plain = karpathy()
    for image in plain["images"]:
        for sentence in image["sentences"]:
            sentence["tokens"] = sentence.pop("raw").strip(".").split()
    tokens = ready(make_karpathy(root, plain))
    assert tokens.sets["val"].captions[0][1] == "A dog very number8"
    assert tokens.describe()["vocabulary"] == data.describe()["vocabulary"]


def test_coco_in_three_files(root):
    val = write(root / "val.json", coco(range(8, 10)))
    test = write(root / "test.json", coco(range(10, 12)))
    data = make_coco(root, coco(range(8)), val_annotations=val, test_annotations=test)
    ready(data)
    assert data.sets["val"].others["id"] == ["108", "109"]
    assert [len(images) for images in data.sets.values()] == [8, 2, 2]
    with pytest.raises(ValueError, match="val_images: needs val_annotations"):
        make_coco(root, val_images=root)
    with pytest.raises(ValueError, match="val_annotations: no such file"):
        make_coco(root, val_annotations=root / "no.json")


def test_a_column_of_splits(root):
    splits = ["train"] * 8 + ["validation"] * 2 + ["Test"] * 2
    lines = ["caption;split;more;image"]
    lines += [f"{c};{splits[n]};;{name_of(n)}" for n in range(COUNT) for c in captions_of(n)]
    options = {"split_column": "split", "delimiter": ";"}
    data = ready(make_csv(root, lines, **options))
    assert data.sets["val"].others["id"] == [name_of(8), name_of(9)]
    assert data.sets["test"].captions == [captions_of(10), captions_of(11)]
    with pytest.raises(UserError, match=r"line 2: expected a split train, val or test, got 'odd'"):
        ready(make_csv(root, [lines[0], f"a;odd;;{name_of(0)}"], **options))
    both = [lines[0], f"a;train;;{name_of(0)}", f"a;test;;{name_of(0)}"]
    with pytest.raises(
        UserError, match=r"line 3: 00\.png is in test here, but was in train before"
    ):
        ready(make_csv(root, both, **options))


def test_images_are_beside_the_table_unless_told(root):
    table = write(root / "images" / "captions.csv", "\n".join(csv_lines()))
    data = ready(CaptionCsvData(table, min_count=1))
    assert sum(map(len, data.sets.values())) == COUNT


def changed(plain, path, value):
    """The same plain data with another value at `path`; None removes the key."""
    item = plain
    for key in path[:-1]:
        item = item[key]
    if value is None:
        del item[path[-1]]
    else:
        item[path[-1]] = value
    return plain


# Where something is wrong, with what, and what is said; an item of a list can be left out.
MISTAKES = {
    "coco": [
        (["images"], None, "captions.json: expected a list 'images', got nothing"),
        (["annotations"], {"a": 1}, "expected a list 'annotations', got {'a': 1}"),
        (["images", 3], 7, r"images\[3\]: expected an object, got 7"),
        (["images", 3, "id"], None, r"images\[3\]: expected 'id', a number or text, got nothing"),
        (["images", 3, "id"], 101, r"images\[3\]: the id 101 is also the id of another image"),
        (["images", 3, "file_name"], 5, r"images\[3\]: expected 'file_name', text, got 5"),
        (["images", 3, "file_name"], "x.png", r"images\[3\]: no such image: .*images/x.png"),
        (["annotations", 4, "image_id"], 7, r"annotations\[4\]: no image has the id 7"),
        (["annotations", 4, "caption"], None, r"annotations\[4\]: expected 'caption', text, got"),
        (["annotations", 4, "caption"], " ", r"annotations\[4\]: an empty caption of image 110"),
        (["annotations", 4, "caption"], "?!", r"\[4\]: a caption without words \('\?!'\) of image"),
    ],
    "karpathy": [
        (["images", 3], "03.png", r"images\[3\]: expected an object, got '03.png'"),
        (["images", 3, "filename"], None, r"images\[3\]: expected 'filename', text, got nothing"),
        (["images", 3, "filename"], "x.png", r"images\[3\]: no such image: .*images/sub/x.png"),
        (["images", 3, "split"], "dev", r"\[3\] \(03.png\): .*restval, val, test, got 'dev'"),
        (["images", 3, "sentences"], None, r"images\[3\]: expected a list 'sentences', got noth"),
        (["images", 3, "sentences"], [], r"images\[3\]: no caption of 03.png"),
        (["images", 3, "sentences", 1], {}, r"images\[3\], sentences\[1\]: expected 'raw', text"),
        (["images", 3, "sentences", 1, "raw"], "\n", r"images\[3\]: an empty caption of 03.png"),
        (["images", 3, "sentences", 1, "raw"], "…", r"images\[3\]: a caption without words \('…'"),
    ],
}


@pytest.mark.parametrize(
    ("form", "path", "value", "message"),
    [(form, *mistake) for form, mistakes in MISTAKES.items() for mistake in mistakes],
)
def test_what_is_wrong_with_an_item_is_named_or_left_out(root, form, path, value, message):
    make, plain = {"coco": (make_coco, coco), "karpathy": (make_karpathy, karpathy)}[form]
    whole = captions_in(ready(make(root, plain())))
    with pytest.raises(UserError, match=message) as error:
        ready(make(root, changed(plain(), path, value)))
    assert str(error.value).count("\n") < 3
    if len(path) > 1:
        left = captions_in(ready(make(root, changed(plain(), path, value), skip_corrupt=True)))
        assert len(left) < len(whole)
        assert set(left) <= set(whole)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("00.png,", "line 6: an empty caption of 00.png"),
        ("00.png,👍 !", r"line 6: a caption without words \('👍 !'\) of 00.png"),
        ('00.png,"a dog', "line 6: a quote opens that does not close in this line"),
        ('00.png,"a dog\nruns"', "line 6: a quote opens that does not close in this line"),
        ('"00.png,a dog', "line 6: a quote opens"),
        (",a dog", "line 6: no image"),
        ("x.png,a dog", "line 6: no such image: .*images/x.png"),
        # not the rest of its caption, whose lines are no rows
        (
            '00.png,"a dog\nruns, and, runs\nfast"',
            r"line 6: a quote opens.*\nand 2 more; data.skip",
        ),
    ],
)
def test_what_is_wrong_with_a_row_is_named_or_left_out(root, row, message):
    """With the row alone: the lines after an open quote are read."""
    lines = csv_lines()
    whole = captions_in(ready(make_csv(root, lines)))
    lines.insert(5, row)
    with pytest.raises(UserError, match=message):
        ready(make_csv(root, lines))
    assert captions_in(ready(make_csv(root, lines, skip_corrupt=True))) == whole


@pytest.mark.parametrize(
    ("line", "content", "message"),
    [
        (0, "image,text", "captions.csv has no column 'caption', only image, text"),
        (5, "00.png,a \udcff", "is not a CSV file in UTF-8"),
    ],
)
def test_what_is_no_table_of_captions(root, line, content, message):
    lines = csv_lines()
    lines[line] = content
    with pytest.raises(UserError, match=message):
        ready(make_csv(root, lines))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("00.png", "expected 2 columns, got 1; a row is one line"),
        ("00.png,a dog, a cat", "expected 2 columns, got 3; a value that holds ',' belongs in"),
    ],
)
def test_a_broken_row_is_named_and_several_are_refused(root, row, message, capfd):
    """One is left out, as of a public table that has one; it takes no other row with it."""
    lines = csv_lines()
    whole = captions_in(ready(make_csv(root, lines)))
    lines[5] = row
    assert len(captions_in(ready(make_csv(root, lines)))) == len(whole) - 1
    assert f"captions.csv, line 6: {message}" in capfd.readouterr().err
    lines[8] = row
    with pytest.raises(UserError, match=rf"line 6: {message}.*\nand 1 more; data.skip_corrupt"):
        ready(make_csv(root, lines))
    assert len(captions_in(ready(make_csv(root, lines, skip_corrupt=True)))) == len(whole) - 2


def captions_in(data):
    return [c for images in data.sets.values() for each in images.captions for c in each]


def test_names_of_columns_may_have_spaces_around_them(root):
    lines = ["name| number| comment", *(f"{name_of(n)}| 0| A dog" for n in range(COUNT))]
    for column in ("comment", " comment"):
        options = {"image_column": "name", "caption_column": column, "delimiter": "|"}
        assert len(captions_in(ready(make_csv(root, lines, **options)))) == COUNT
    twice = ["image,caption,caption ", *(f"{name_of(n)},A dog,b" for n in range(COUNT))]
    assert captions_in(ready(make_csv(root, twice)))[0] == "A dog"
    with pytest.raises(UserError, match="several columns ' caption'"):
        ready(make_csv(root, twice, caption_column=" caption"))


def test_captions_that_are_cut_are_said(root):
    data = ready(make_csv(root, csv_lines(), max_words=5))
    assert any(re.search(r"^  \d+ of \d+ training captions are longer and lose", line)
               for line in data.summary())  # fmt: skip
    data = ready(make_csv(root, csv_lines(), val_fraction=0.2))
    assert not any("lose their end" in line for line in data.summary())
    assert not any("val is one image" in line for line in data.summary())
    data = ready(make_csv(root, csv_lines(), val_fraction=0.05))
    assert "  val is one image: of one image CIDEr is always 0" in data.summary()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"images": [', "is not JSON: .*line 1, column 13"),
        ("[]", "holds a list"),
        (b"\xff\xfe\x00", "cannot be read: .*utf-8"),
        ("[" * 100_000, "cannot be read|is not JSON"),
    ],
)
@pytest.mark.parametrize("make", [CocoCaptionsData, KarpathyData])
def test_what_is_no_json(root, make, content, message):
    file = root / "broken.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as error:
        ready(make(file, root / "images"))
    assert "broken.json" in str(error.value)
    assert "expected" in str(error.value)


def test_files_that_cannot_be_decoded_are_named(root):
    (root / "images" / name_of(3)).write_bytes(b"no image")
    with pytest.raises(UserError, match=r"sub/03.png \(not an image\)"):
        ready(make_csv(root))
    data = ready(make_csv(root, skip_corrupt=True))
    assert sum(map(len, data.sets.values())) == COUNT - 1
    for images in data.sets.values():
        for captions, name in zip(images.captions, images.others["id"], strict=True):
            assert captions == captions_of(int(re.findall(r"\d+", name)[0]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda r: CocoCaptionsData(None, r), "annotations: expected a file, got nothing"),
        (lambda r: CocoCaptionsData(r / "no.json", r), "annotations: no such file: .*no.json"),
        (lambda r: KarpathyData(r / "captions.json", r / "no"), "images: no such folder: .*no"),
        (lambda r: CaptionCsvData(r), "table: no such file"),
        (lambda r: make_csv(r, delimiter=";;"), "delimiter: expected one character, got ';;'"),
        (lambda r: make_csv(r, memory_gb=-1), "memory_gb: expected at least 0, got -1"),
        (lambda r: make_csv(r, batch_size=0), "batch_size: expected at least 1, got 0"),
        (lambda r: make_csv(r, max_words=2), "max_words: expected at least 3, got 2"),
        (lambda r: make_csv(r, min_count=0), "min_count: expected at least 1, got 0"),
        (lambda r: make_csv(r, tokenizer="x"), "tokenizer: expected 'words' or 'bpe', got 'x'"),
        (lambda r: make_csv(r, bpe_size=300), "bpe_size: needs tokenizer=bpe"),
        (lambda r: make_csv(r, val_fraction=1), "val_fraction, test_fraction: expected above 0"),
    ],
)
def test_bad_arguments(root, make, message):
    write(root / "captions.json", coco())
    with pytest.raises(ValueError, match=message):
        make(root)


def test_too_little_to_learn_from(root):
    with pytest.raises(UserError, match=r"data\.min_count: no word occurs 500 times"):
        ready(make_csv(root, min_count=500))
    with pytest.raises(UserError, match="data: 2 training images are too few to take a val split"):
        ready(make_csv(root, csv_lines()[:7]))
    plain = karpathy()
    for image in plain["images"]:
        image["split"] = "val"
    with pytest.raises(UserError, match="data: no train split, only val"):
        ready(make_karpathy(root, plain))


def test_what_a_model_is_told(root):
    facts = ready(make_karpathy(root, max_words=5)).describe()
    json.dumps(facts)
    assert facts["image_size"] == 10  # of 11 pixels, whole patches of 2
    assert facts["in_channels"] == 3
    assert facts["max_words"] == 5
    assert facts["vocabulary_size"] == 4 + 3 + 8  # a dog very, and a word of each image
    assert facts["vocabulary"]["words"][:2] == ["a", "dog"]
    assert len(facts["mean"]) == len(facts["std"]) == 3
    assert ready(make_karpathy(root)).describe()["max_words"] == 2 + 5
    with pytest.raises(RuntimeError, match=r"call setup\(\) before"):
        make_karpathy(root).describe()


def test_byte_pairs(root):
    pytest.importorskip("tokenizers")
    data = ready(make_karpathy(root, tokenizer="bpe", bpe_size=280, min_count=2))
    assert data.describe()["vocabulary"]["tokenizer"] == "bpe"
    assert 260 < data.describe()["vocabulary_size"] <= 280
    batch = next(iter(data.val_dataloader()))
    texts = [data.tokenizer.decode(words) for words in batch["words"]]
    assert texts == [captions_of(n)[0].lower() for n in (8, 9)]


def drawn(data, epoch, start=0):
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    loader.sampler.start = start
    return [words for batch in loader for words in batch["words"].tolist()]


def test_captions_are_drawn_by_seed_and_epoch_alone(root):
    data = ready(make_csv(root, batch_size=3, num_workers=0, val_fraction=0.1))
    first = drawn(data, 0)
    assert drawn(data, 0) == first
    assert sorted(drawn(data, 1)) != sorted(first)
    # Resumed in the middle: the same captions come.
    assert drawn(data, 0, start=4) == first[4:]
    other = ready(make_csv(root, batch_size=5, num_workers=2))
    assert drawn(other, 0) == first
    data.seed, data.sets["train"].seed = 1, 1
    assert sorted(drawn(data, 0)) != sorted(first)


def test_every_caption_is_drawn_equally_often(root):
    data = ready(make_csv(root))
    train = data.sets["train"]
    counts = torch.zeros(3)
    for epoch in range(300):
        counts += torch.tensor([train._which(epoch, n) for n in range(len(train))]).bincount(
            minlength=3
        )
    assert counts.sum() == 300 * len(train)
    assert (counts / counts.sum() - 1 / 3).abs().max() < 0.03


def test_validation_takes_the_first_caption(root):
    data = ready(make_karpathy(root, max_words=9))
    batch = next(iter(data.val_dataloader()))
    assert [data.tokenizer.decode(words) for words in batch["words"]] == ["a dog <unknown>"] * 2
    assert batch["words"].shape == (2, 9)
    assert batch["references"] == [captions_of(8), captions_of(9)]


class Captioner(LightningModule):
    """A module that was made for a size and a vocabulary, and keeps the batches that it gets."""

    def __init__(self, **made_for):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.batches = {}
        for name, value in made_for.items():
            setattr(self, name, value)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.batches.setdefault(dataloader_idx, []).append(batch)

    def predict_step(self, batch, batch_idx):
        return batch


def test_a_trained_module_keeps_its_words_and_size(root, tmp_path):
    vocabulary = WordTokenizer(["number10", "dog"]).to_dict()
    module = Captioner(vocabulary=vocabulary, image_size=9, max_words=4)
    data = make_karpathy(root)
    quiet(tmp_path).test(module, datamodule=data, verbose=False)
    (batch,) = module.batches[0]
    assert batch["image"].shape == (2, 3, 9, 9)
    assert batch["words"].tolist() == [[1, 3, 5, 2], [1, 3, 5, 2]]
    with pytest.raises(UserError, match=r"data\.image_size: got 12, but the module was made for 9"):
        quiet(tmp_path).test(module, datamodule=make_karpathy(root, image_size=12), verbose=False)


def test_scenes_are_tested_twice(tmp_path):
    data = ScenesData(num_train=9, num_val=3, num_test=5, batch_size=4)
    module = Captioner()
    trainer = quiet(tmp_path)
    trainer.test(module, datamodule=data, verbose=False)
    assert list(trainer.test_dataloaders) == ["test", "compositional"]
    ids = {n: [i for batch in found for i in batch["id"]] for n, found in module.batches.items()}
    assert ids[0] == [f"test/{n}" for n in range(5)]
    assert ids[1] == [f"compositional/{n}" for n in range(5)]


def test_images_to_predict(root, tmp_path, capfd):
    (root / "images" / "broken.png").write_bytes(b"")
    data = CaptionPredictData(root / "images", image_size=8, batch_size=5)
    batches = quiet(tmp_path).predict(Captioner(), datamodule=data)
    assert {len(batch) for batch in batches} == {2}
    paths = [path for batch in batches for path in batch["path"]]
    assert len(paths) == COUNT
    assert "left out" in capfd.readouterr().err
    assert all(batch["image"].shape[1:] == (3, 8, 8) for batch in batches)
    one = CaptionPredictData(root / "images" / name_of(3), image_size=8)
    one.setup()
    batch = next(iter(one.predict_dataloader()))
    assert batch["path"] == [str(root / "images" / name_of(3))]


def test_a_set_checks_its_parts():
    images = MemoryImages(torch.zeros((2, 3, 5, 5), dtype=torch.uint8), [0, 0])
    with pytest.raises(ValueError, match="captions: expected 2 of them, got 1"):
        CaptionSet(images, [["a"]])
    with pytest.raises(ValueError, match="captions: image 1 has none"):
        CaptionSet(images, [["a"], []])
    with pytest.raises(ValueError, match="masks: expected 2 of them, got 3"):
        CaptionSet(images, [["a"], ["b"]], {"masks": torch.zeros(3)})


def test_any_integer_names_an_image(root):
    """As torch's RandomSampler gives ints, and other samplers NumPy's or tensors."""
    data = make_karpathy(root)
    data.setup()
    train = data.sets["train"]
    wanted = train.__getitems__([2, 0])
    for numbers in (np.array([2, 0]), torch.tensor([2, 0])):
        found = train.__getitems__(list(numbers))
        assert found["references"] == wanted["references"]
        assert torch.equal(found["words"], wanted["words"])
        assert torch.equal(found["image"], wanted["image"])
    drawn = train.__getitems__([(3, np.int64(2)), (3, 0)])
    assert torch.equal(drawn["words"], train.__getitems__([(3, 2), (3, 0)])["words"])
