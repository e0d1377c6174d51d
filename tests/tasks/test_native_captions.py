"""Captions of files that keep their own sizes: `task=captioning encoder=vit data.native=true`."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image

from attnkit import Captioner, TransformerDecoder, ViTEncoder
from attnkit.lightning.resume import checkpoints
from attnkit.tasks.captioning import CaptionCsvData, ImageCaptioning

TOKENS = 300


@pytest.fixture
def table(tmp_path):
    """41 pictures with sides of 5 to 46 pixels, each with two captions."""
    rng = np.random.default_rng(0)
    rows = [("image", "caption")]
    for number in range(41):
        pixels = rng.integers(90, 130, (*rng.integers(5, 47, 2), 3))
        colour = ("red", "green", "blue")[number % 3]
        pixels[..., number % 3] += 120
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / f"{number:02}.png")
        rows += [(f"{number:02}.png", text) for text in (f"a {colour} box", f"all is {colour}")]
    with open(tmp_path / "captions.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    return tmp_path / "captions.csv"


def ready(table, **options):
    options = {"native": True, "max_tokens": TOKENS, "patch_size": 5, "num_workers": 0, **options}
    data = CaptionCsvData(table, val_fraction=0.3, test_fraction=0.1, min_count=1, **options)
    data.setup()
    return data


def test_every_epoch_has_each_image_once_with_one_of_its_captions(table):
    data = ready(table)
    train, sizes = data.sets["train"], data.sets["train"].sizes
    loader, drawn = data.train_dataloader(), []
    for epoch in range(4):
        loader.sampler.set_epoch(epoch)
        batches = list(loader)
        assert len(batches) == len(loader) > 2
        for batch in batches:
            patches = [image.shape[1] * image.shape[2] // 25 for image in batch["image"]]
            assert sum(patches) <= TOKENS
            assert len(patches) == len(batch["words"]) == len(batch["references"])
        paths = [path for batch in batches for path in batch["path"]]
        assert sorted(paths) == sorted(train.others["path"])
        words = {path: row.tolist() for batch in batches
                 for path, row in zip(batch["path"], batch["words"], strict=True)}  # fmt: skip
        for path, row in words.items():
            captions = train.captions[train.others["path"].index(path)]
            assert data.tokenizer.decode(row) in captions
        drawn.append([words[path] for path in sorted(words)])
    assert drawn[0] != drawn[1]
    loader.sampler.start = 2
    rest = list(loader)
    assert [batch["path"] for batch in rest] == [batch["path"] for batch in batches[2:]]
    assert all(torch.equal(a["words"], b["words"]) for a, b in zip(rest, batches[2:], strict=True))
    shapes = {image.shape for batch in data.val_dataloader() for image in batch["image"]}
    assert len(shapes) > 5
    assert int(sizes.max()) <= data.max_image_tokens


@pytest.mark.parametrize("decoding", [{}, {"method": "beam", "num_beams": 3}])
def test_a_batch_is_captioned_as_its_images_alone(table, decoding):
    data = ready(table)
    facts = data.describe()
    native, patch, size = (facts.pop(key) for key in ("native", "patch_size", "vocabulary_size"))
    torch.manual_seed(0)
    encoder = ViTEncoder(
        data.image_size, patch_size=patch, dim=24, depth=2, num_heads=3, native=native
    )
    decoder = TransformerDecoder(size, data.max_words - 1, dim=24, depth=2, num_heads=3)
    module = ImageCaptioning(Captioner(encoder, decoder), **facts, **decoding).eval()
    for parameter in module.model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    batch = next(iter(data.val_dataloader()))
    together = module.predict_step(batch, 0)
    assert len(set(together["caption"])) > 1
    for number, image in enumerate(batch["image"]):
        alone = module.predict_step({"image": image[None]}, 0)
        assert together["caption"][number] == alone["caption"][0]
        probability = alone["log_probability"][0]
        assert together["log_probability"][number] == pytest.approx(probability, rel=1e-5)
    explained = module.explained(batch)
    assert explained.has_sizes
    one = explained.alone(2)
    assert one.inputs.shape[1:] == batch["image"][2].shape
    assert one.names == [batch["path"][2]]


COMMON = [
    "task=captioning", "encoder=vit", "data=caption_csv", "data.native=true",
    f"data.max_tokens={TOKENS}", "data.patch_size=5", "trainer.accelerator=cpu",
    "data.num_workers=0", "encoder.dim=24", "encoder.depth=2", "decoder.dim=24", "decoder.depth=2",
    "trainer.max_epochs=2", "scheduler=constant",
]  # fmt: skip


def test_commands_train_go_on_predict_and_explain(table, tmp_path_factory, capfd):
    from attnkit.launch.main import main

    out = tmp_path_factory.mktemp("runs")
    common = [*COMMON, f"data.table={table}"]
    assert main([*common, f"run_dir={out}/whole"]) in (0, None)
    text = capfd.readouterr()
    assert "images of their own sizes" in text.out + text.err
    results = json.loads((out / "whole" / "results.json").read_text())
    assert {"test/cider", "test/bleu4"} <= set(results)

    assert main([*common, f"run_dir={out}/parts", "trainer.max_steps=3"]) in (0, None)
    assert main([f"resume={out}/parts", "trainer.max_steps=-1"]) in (0, None)
    whole, parts = (
        checkpoints.load(str(out / name / "checkpoints" / "last.ckpt"))
        for name in ("whole", "parts")
    )
    assert whole["global_step"] == parts["global_step"] > 6
    for name, value in whole["state_dict"].items():
        assert torch.equal(value, parts["state_dict"][name]), name

    predict = ["run=predict", f"ckpt={out}/whole", f"images={table.parent}", f"run_dir={out}/p"]
    assert main(predict) in (0, None)
    assert len((out / "p" / "predictions.csv").read_text().splitlines()) == 42
    explain = ["run=explain", f"ckpt={out}/whole", "explain.num_images=2", f"run_dir={out}/seen"]
    capfd.readouterr()
    assert main(explain) in (0, None)
    assert "each has its own grid" in capfd.readouterr().out
    maps = np.load(out / "seen" / "maps.npz")
    shapes = {maps[f"map_relevance_{place}"].shape[1:] for place in range(2)}
    assert len(shapes) == 2
    scores = (out / "seen" / "scores.csv").read_text().splitlines()
    assert len(scores) == 1 + sum(len(maps[f"words_{place}"]) for place in range(2))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["encoder=cnn"], "data.native: CNNEncoder takes images of one size alone; expected enc"),
        (["encoder.native=false"], "data.native: ViT takes images of one size alone"),
        (["encoder.patch_size=4", "data.image_size=40"], "of 4 × 4; data.patch_size=4"),
        (["data.patch_size=16"], "a side is below the patch of 16"),
        (["data.max_image_tokens=200"], f"at most half of max_tokens={TOKENS}, got 200"),
        (["data.native=false"], f"max_tokens: needs native=True, got {TOKENS}"),
        (["data.crop_pct=0.9"], "crop_pct: not with native=True, got 0.9"),
    ],
)
def test_what_does_not_fit_is_refused(table, tmp_path, capfd, words, message):
    from attnkit.launch.main import main

    common = [*COMMON, f"data.table={table}", f"run_dir={tmp_path}/never"]
    if words == ["encoder=cnn"]:
        common = [word for word in common if not word.startswith("encoder")]
    assert main([*common, *words]) == 2
    assert message in capfd.readouterr().err
