"""The captioning task: its module, its command, and the pages of where it looked."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from task_support import quiet
from torch.utils.data import DataLoader

from attnkit.launch.main import main
from attnkit.metrics import BLEU, CIDErD
from attnkit.models.captioning.captioner import Captioner
from attnkit.models.captioning.generate import Sentences
from attnkit.models.captioning.image_encoders import CNNEncoder
from attnkit.models.captioning.transformer_decoder import TransformerDecoder
from attnkit.tasks.captioning import (
    CaptionPredictData,
    ImageCaptioning,
    ObjectLooks,
    ScenesData,
    WordLooks,
    is_right,
)

SMALL = (
    "task=captioning", "trainer=cpu", "encoder.dim=16", "encoder.stages=[[8],[8],[16]]",
    "decoder.dim=16",
    "decoder.num_heads=2", "data.num_train=24", "data.num_val=6", "data.num_test=6",
    "data.image_size=24", "data.batch_size=5", "callbacks.curves=null", "logger.tensorboard=null",
)  # fmt: skip


@pytest.fixture(scope="module")
def data():
    data = ScenesData(num_train=24, num_val=6, num_test=6, image_size=24, batch_size=5)
    data.setup()
    return data


@pytest.fixture
def module(data):
    torch.manual_seed(0)
    facts = data.describe()
    model = Captioner(
        CNNEncoder(24, dim=16, stages=[[8], [8], [16]]),
        TransformerDecoder(
            facts["vocabulary_size"], facts["max_words"], dim=16, depth=1, num_heads=2
        ),
    )
    names = ("vocabulary", "max_words", "image_size", "mean", "std")
    return ImageCaptioning(model, **{name: facts[name] for name in names})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("captioning") / "run"
    assert main([*SMALL, "trainer.max_epochs=1", f"run_dir={folder}"]) == 0
    return folder


def _batches(images, module):
    data = CaptionPredictData(images, image_size=module.image_size)
    data.setup()
    return list(data.predict_dataloader())


def test_metrics_are_those_of_all_sentences(module, data):
    trainer = quiet()
    (results, compositional) = trainer.test(module, datamodule=data, verbose=False)
    results = {**results, **compositional}
    for split, prefix in (("test", "test"), ("compositional", "test/compositional")):
        images, references, scenes = [], [], []
        for batch in data.test_dataloader()[split]:
            images.append(batch["image"])
            references += batch["references"]
            scenes += batch["scene"]
        said = module.caption(torch.cat(images))
        for name, metric in (
            ("bleu1", BLEU(1, "words")),
            ("cider_d", CIDErD(tokenizer="words")),
        ):
            metric.update(said, references)
            assert results[f"{prefix}/{name}"] == pytest.approx(float(metric.compute()), abs=1e-6)
        right = [is_right(text, scene) for text, scene in zip(said, scenes, strict=True)]
        assert results[f"{prefix}/right"] == pytest.approx(np.mean(right), abs=1e-6)


def test_sentences_are_no_longer_than_those_of_training(module, data):
    """Of `max_words` one is START; a place after the last of training was never learned."""
    images = next(iter(data.val_dataloader()))["image"]
    decoder = module.model.decoder
    with torch.no_grad():  # one word is the likeliest at every step, and not END
        decoder.norm.bias.copy_(decoder.embedding.weight[9] * 1000)
    said = module.caption(images)
    assert {len(text.split()) for text in said} == {data.max_words - 1}


def test_a_table_of_where_words_look(module, data, tmp_path, monkeypatch):
    """Of sentences that are said, here the first reference of each scene, in two uneven batches."""
    weights = {}

    def say(images, *, return_weights, **decoding):
        assert return_weights
        (batch,) = [b for b in batches if b["image"].shape == images.shape
                    and torch.equal(b["image"], images)]  # fmt: skip
        words = batch["words"][:, 1:]
        weights[id(batch)] = torch.rand(len(words), 1, 2, words.shape[1], 36).softmax(-1)
        return Sentences(words, torch.zeros(len(words)), weights[id(batch)])

    batches = [b for loader in data.test_dataloader().values() for b in loader]
    monkeypatch.setattr(module, "_say", say)
    trainer = quiet(callbacks=[WordLooks(tmp_path)])
    results = trainer.test(module, datamodule=data, verbose=False)
    with (tmp_path / "looks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 2
    for split, prefix, found, part in (
        ("test", "test", results[0], batches[:2]),
        ("compositional", "test/compositional", results[1], batches[2:]),
    ):
        metric = ObjectLooks(1, 2)
        for batch in part:
            said = batch["words"][:, 1:], weights[id(batch)], batch["masks"], batch["scene"]
            metric.update(*said, (6, 6), module.tokenizer)
        looks = metric.compute()
        assert [row["test"] for row in rows].count(split) == len(looks)
        for look, row in zip(looks, (row for row in rows if row["test"] == split), strict=True):
            assert float(row["share"]) == pytest.approx(look.share, rel=1e-5)
            assert int(row["num_words"]) == look.num_words > 6  # of 12: not every word is known
        for words in ("noun", "colour"):
            best = max(look.ratio for look in looks if look.words == words)
            assert found[f"{prefix}/looks_{words}"] == pytest.approx(best, rel=1e-5)
    assert not module.return_weights


def test_without_masks_there_is_no_table_and_it_is_said(module, data, tmp_path):
    batch = next(iter(data.test_dataloader()["test"]))
    del batch["masks"]
    trainer = quiet(callbacks=[WordLooks(tmp_path)])
    with pytest.warns(UserWarning, match=r"no masks of what words name; no looks\.csv"):
        trainer.test(module, DataLoader([batch], batch_size=None), verbose=False)
    assert not (tmp_path / "looks.csv").exists()


def test_what_is_drawn_is_drawn_again(module, data):
    batch = next(iter(data.val_dataloader()))
    module.decoding |= {"method": "sample", "temperature": 2.0}
    first = module.predict_step(batch, 0)["caption"]
    torch.rand(7)
    assert module.predict_step(batch, 0)["caption"] == first
    assert module.predict_step(batch, 1)["caption"] != first
    torch.manual_seed(1)
    assert module.predict_step(batch, 0)["caption"] != first


def test_the_validation_loss_is_exact_over_uneven_batches(module, data):
    trainer = quiet()
    (results,) = trainer.validate(module, datamodule=data, verbose=False)
    batches = list(data.val_dataloader())
    assert [len(batch["words"]) for batch in batches] == [5, 1]
    images = module.normalized(torch.cat([batch["image"] for batch in batches]))
    words = torch.cat([batch["words"] for batch in batches])
    with torch.no_grad():
        loss = module.eval().model.loss(images, words)["cross_entropy"]
    assert results["val/loss"] == pytest.approx(float(loss), abs=1e-5)


def test_shares_of_right_sentences(module, data, monkeypatch):
    """Of each three sentences one is right, one in all but a size, one of another scene."""
    said, right, all_right = [], [], []
    for split in ("test", "compositional"):
        for batch in data.test_dataloader()[split]:
            texts = []
            for number, (references, scene) in enumerate(
                zip(batch["references"], batch["scene"], strict=True)
            ):
                text = references[0]
                if number % 3 == 1:
                    sizes = {"small": "huge", "little": "huge", "tiny": "huge"}
                    sizes |= {"large": "tiny", "big": "tiny", "huge": "tiny"}
                    text = " ".join(sizes.get(word, word) for word in text.split())
                elif number % 3 == 2:
                    text = "a small red square left of a small red square"
                assert is_right(text, scene) == (number % 3 < 2)
                texts.append(text)
                right.append((split, number % 3 < 2))
                all_right.append((split, number % 3 == 0))
            said.append(texts)
    batches = iter(said)
    monkeypatch.setattr(module, "_say", lambda images, **_: None)
    monkeypatch.setattr(module, "_texts", lambda said: next(batches))
    trainer = quiet()
    results, compositional = trainer.test(module, datamodule=data, verbose=False)
    results = {**results, **compositional}
    for split, prefix in (("test", "test"), ("compositional", "test/compositional")):
        for name, shares in (("right", right), ("all_right", all_right)):
            expected = np.mean([share for where, share in shares if where == split])
            assert 0 < expected < 1
            assert results[f"{prefix}/{name}"] == pytest.approx(expected, abs=1e-6)


def test_predict_and_the_layer_of_each_word(trained, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    images = tmp_path / "images"
    images.mkdir()
    for number in range(3):
        Image.new("RGB", (31, 29), (80 * number, 90, 100)).save(images / f"{number}.png")
    (images / "broken.png").write_text("no image")
    layer = ("explain.trust=none", "explain.layer=-1")
    for run, *words in (("predict",), ("explain", *layer)):
        code = main([f"run={run}", f"ckpt={trained}", f"images={images}", f"run_dir={run}", *words])
        assert code == 0, capfd.readouterr().err
    with Path("predict/predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [Path(row["path"]).name for row in rows] == ["0.png", "1.png", "2.png"]
    assert all(float(row["log_probability"]) < 0 for row in rows)
    assert not Path("predict/layers.png").exists()
    arrays = np.load("explain/maps.npz")
    for row, words, weights in zip(rows, arrays["words"], arrays["layer_words"], strict=True):
        said = [word for word in words if word not in ("", "<end>")]
        assert " ".join(said) == row["caption"]
        sums = weights.sum((-2, -1))
        np.testing.assert_allclose(sums[: len(said)], 1, rtol=1e-4)
    module = ImageCaptioning.load_from_checkpoint(trained / "checkpoints" / "best.ckpt")
    (batch,) = _batches(images, module)
    with torch.no_grad():
        alone = module.model.generate(
            module.normalized(batch["image"][2:3]),
            max_words=module.max_words - 1,
            return_weights=True,
        ).weights[0]
    last = alone[-1].mean(0).unflatten(-1, (6, 6))
    np.testing.assert_allclose(arrays["layer_words"][2, : len(last)], last, atol=1e-5)
    with Image.open("explain/layers.png") as page:
        assert min(page.size) > 200


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["run=predict", "ckpt={ckpt}"], "run=predict: needs images=PATH"),
        (["run=explain", "images=."], "run=explain: needs ckpt=PATH"),
        ([*SMALL, "encoder.dim=20", "decoder.memory_dim=16"], "reads a memory of 16 channels"),
        ([*SMALL, "decoder.positions=rotaty"], "decoder.positions"),
        (["task=vit", "encoder=cnn"], "takes no argument 'encoder'"),
    ],
)
def test_wrong_settings(trained, tmp_path, monkeypatch, capfd, command, message):
    monkeypatch.chdir(tmp_path)
    assert main([part.format(ckpt=trained) for part in command]) == 2
    error = capfd.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) <= 3
    assert not list(tmp_path.iterdir())
