"""Tables of image files: columns, splits, groups, wrong rows, several labels and numbers."""

import csv
import json
import re

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score, f1_score, r2_score
from task_support import quiet

import attnkit
from attnkit.launch.main import main
from attnkit.lightning import EMA, UserError, ValueReport
from attnkit.lightning.resume.sampler import grouped_split
from attnkit.tasks.image_classification import ImageClassification, ImageCsvData, ImageValues
from attnkit.tasks.image_classification.values import best_threshold

COUNT = 60
KINDS = {"odd": (1, 3, 5, 7, 9), "large": (5, 6, 7, 8, 9), "loop": (0, 6, 8, 9)}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A folder of digits; `label`, `kinds`, `ink`, `writer` and 0 or 1 of each, by file."""
    root = tmp_path_factory.mktemp("digits")
    found = load_digits()
    for number, image in enumerate(found.images[:COUNT]):
        Image.fromarray((image * 15.9).astype("uint8")).save(root / f"{number}.png")
    return root


def rows():
    found = load_digits()
    for number, digit in enumerate(found.target[:COUNT].tolist()):
        has = {kind: int(digit in of) for kind, of in KINDS.items()}
        yield {
            "path": f"{number}.png",
            "label": digit,
            "kinds": "|".join(kind for kind in has if has[kind]),
            "ink": 1000 + found.images[number].sum(),
            "writer": f"w{number // 4}",
            **has,
        }


def table(folder, columns, *, mark=",", named=None, changed=None, bom=False):
    """A table with these columns; `named` gives some another header, `changed` other lines."""
    lines = [mark.join((named or {}).get(column, column) for column in columns)]
    lines += [mark.join(str(row[column]) for column in columns) for row in rows()]
    for number, line in (changed or {}).items():
        lines[number - 1] = line
    path = folder / "table.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8-sig" if bom else "utf-8")
    return path


def ready(path, images, **options):
    data = ImageCsvData(path, images, **{"val_fraction": 0.2, "test_fraction": 0.2, **options})
    data.setup("fit")
    return data


def counts(data):
    return [len(images) for images in data.sets.values()]


@pytest.mark.parametrize(
    ("mark", "named", "bom"),
    [(",", {}, False), (";", {"path": "Filename", "label": "Class"}, True), ("\t", {}, False)],
)
def test_columns_are_found_by_their_names(digits, tmp_path, mark, named, bom):
    path = table(tmp_path, ["label", "ink", "path"], mark=mark, named=named, bom=bom)
    data = ready(path, digits)
    assert data.class_names == [str(n) for n in range(10)]
    assert sum(counts(data)) == COUNT
    assert all((images.labels.bincount(minlength=10) > 0).all() for images in data.sets.values())
    image = data.sets["train"].fetch(torch.tensor([0]))[0, 0]
    label = int(data.sets["train"].labels[0])
    pixels = [np.asarray(Image.open(digits / f"{n}.png")) for n in range(COUNT)]
    (number,) = (n for n, p in enumerate(pixels) if np.array_equal(p, image.numpy()))
    assert label == load_digits().target[number]


def test_paths_start_from_the_table_and_quotes_hold_a_comma(digits):
    path = table(digits, ["path", "label"], changed={3: '"1.png","a, b"', 4: '2.png,"a, b"'})
    data = ready(path, None, test_fraction=0.1, val_fraction=0.1)
    assert "a, b" in data.class_names


def test_splits_and_groups_of_the_table(digits, tmp_path):
    path = table(tmp_path, ["path", "label", "writer"], named={"writer": "group"})
    lines = path.read_text().splitlines()
    names = ["Training"] * 44 + ["dev"] * 8 + ["eval"] * 8
    split = ["split", *names]
    path.write_text("\n".join(f"{a},{b}" for a, b in zip(lines, split, strict=True)))
    assert counts(ready(path, digits)) == [44, 8, 8]
    split[2] = "dev"  # w0, of which the others are trained on
    path.write_text("\n".join(f"{a},{b}" for a, b in zip(lines, split, strict=True)))
    with pytest.raises(UserError, match=r"1 of 15 groups are in several splits: w0 \(train, val\)"):
        ready(path, digits)
    assert counts(ready(path, digits, group_column="")) == [43, 9, 8]
    assert len(ready(path, digits, split_column="").sets["train"]) < 44


@pytest.mark.parametrize(
    ("target", "column"), [("classes", "label"), ("labels", "kinds"), ("numbers", "ink")]
)
def test_a_group_is_never_on_both_sides(digits, tmp_path, target, column):
    """Nor are equal files, which join two groups."""
    (digits / "twin.png").write_bytes((digits / "0.png").read_bytes())
    first = next(iter(rows()))
    path = table(tmp_path, ["path", column, "writer"])
    path.write_text(path.read_text() + f"twin.png,{first[column]},w14\n")
    options = {"label_column": column, "group_column": "writer", "target": target}
    data = ready(path, digits, **options, seed=3)
    group = {f"{n}.png": f"w{n // 4}" for n in range(COUNT)}
    pixels = {(digits / name).read_bytes(): name for name in group}
    sides = {}
    for split, images in data.sets.items():
        for row in range(len(images)):
            found = images.fetch(torch.tensor([row]))[0, 0].numpy()
            name = next(
                n for n in pixels.values() if (np.asarray(Image.open(digits / n)) == found).all()
            )
            sides.setdefault(group[name], set()).add(split)
    assert all(len(splits) == 1 for splits in sides.values())
    assert sides["w0"] == sides["w14"]
    assert min(counts(data)) >= 8
    again = ready(path, digits, **options, seed=3)
    assert all(torch.equal(data.sets[s].labels, again.sets[s].labels) for s in data.sets)


def test_whole_groups_share_out_what_they_hold():
    generator = torch.Generator().manual_seed(0)
    groups = torch.randint(101, (997,), generator=generator)
    strata = torch.nn.functional.one_hot(groups % 5)
    parts = grouped_split(groups, strata, [0.1, 0.2], 0)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(997))
    kinds = [set(groups[part].tolist()) for part in parts]
    assert not kinds[0] & kinds[1] | kinds[0] & kinds[2] | kinds[1] & kinds[2]
    for part, share in zip(parts, (0.7, 0.1, 0.2), strict=True):
        held = strata[part].sum(dim=0) / strata.sum(dim=0)
        assert (held - share).abs().max() < 0.04
    few = grouped_split(torch.tensor([5, 5, 7, 9]), torch.ones(4, 1), [0.1, 0.1], 0)
    assert sorted(map(len, few)) == [1, 1, 2]
    one = grouped_split(torch.tensor([5, 5]), torch.ones(2, 1), [0.1, 0.1], 0)
    assert [len(part) for part in one] == [2, 0, 0]


@pytest.mark.parametrize(
    ("target", "column", "line", "message"),
    [
        ("classes", "label", "none.png,3", "line 7: no such image: .*none.png"),
        ("classes", "label", "5.png,", "line 7: no label"),
        ("classes", "label", ",3", "line 7: no path"),
        ("classes", "label", "5.png,3,4", "line 7: expected 2 columns, got 3; a value that holds"),
        ("classes", "label", '5.png,"3', "line 7: a quote opens that does not close"),
        ("classes", "label", "4.png,7", "line 7: .*4.png has another label, .* in line 6"),
        ("numbers", "ink", "5.png,dark", "line 7: expected a number in ink, got 'dark'"),
        ("numbers", "ink", "5.png,nan", "line 7: expected a number in ink, got 'nan'"),
        ("labels", ["odd", "loop"], "5.png,0,2", "line 7: expected 0 or 1 in loop, got '2'"),
    ],
)
def test_wrong_rows_are_named_by_line(digits, tmp_path, target, column, line, message, capfd):
    columns = [column] if isinstance(column, str) else column
    path = table(tmp_path, ["path", *columns], changed={7: line})
    options = {"target": target, "label_column": column}
    with pytest.raises(UserError, match=rf"1 row is wrong of 60, such as\n.*{message}") as error:
        ready(path, digits, **options)
    assert str(error.value).count("\n") == 2
    data = ready(path, digits, **options, skip_corrupt=True)
    assert sum(counts(data)) == COUNT - 1
    assert re.search(f"left out: .*{message}", capfd.readouterr().err)


def test_of_many_wrong_rows_ten_are_named(digits, tmp_path, capfd):
    path = table(tmp_path, ["path", "label"], changed={n: f"{n}.png," for n in range(10, 22)})
    with pytest.raises(UserError, match="12 rows are wrong of 60, such as"):
        ready(path, digits)
    said = capfd.readouterr().err
    assert said.count("wrong: ") == 11
    assert "line 19: no label" in said
    assert "… and 2 more" in said
    lines = path.read_text().splitlines()
    path.write_text("\n".join(f"{line},{'tset' if n == 4 else 'train'}" if n else f"{line},split"
                              for n, line in enumerate(lines[:9])))  # fmt: skip
    with pytest.raises(UserError, match="line 5: expected a split train, val or test, got 'tset'"):
        ready(path, digits)


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (["label", "ink"], {}, "data.path_column: .* has no column called path, file, filename"),
        (["path", "ink", "odd"], {}, "data.label_column: .* has no column called label, class"),
        (["path", "ink"], {"label_column": "inc"}, "has no column 'inc', only path, ink"),
        (["path", "ink", "odd"], {"label_column": ["ink", "odd"]}, "data.target=labels learns"),
    ],
)
def test_what_columns_must_be_there(digits, tmp_path, columns, options, message):
    with pytest.raises(UserError, match=message):
        ready(table(tmp_path, columns), digits, **options)


def test_names_and_columns_of_labels_say_the_same(digits, tmp_path):
    names = ready(table(tmp_path, ["path", "kinds"]), digits, target="labels")
    columns = ready(table(tmp_path, ["path", "ink", *sorted(KINDS)]), digits, target="labels")
    assert names.class_names == columns.class_names == sorted(KINDS)
    for split in names.sets:
        assert torch.equal(names.sets[split].labels, columns.sets[split].labels)
    assert names.train_labels.dtype == torch.float32
    facts = names.describe()
    assert (facts["target"], facts["num_outputs"], facts["num_classes"]) == ("labels", 3, 3)
    unknown = table(tmp_path, ["path", *sorted(KINDS)], changed={4: "2.png,,0,1"})
    labels = torch.cat(
        [images.labels for images in ready(unknown, digits, target="labels").sets.values()]
    )
    assert labels.isnan().sum() == 1


def test_a_list_of_one_column_holds_0_and_1(digits, tmp_path):
    path = table(tmp_path, ["path", "odd", "large"], changed={4: "2.png,,0"})
    found = {}
    for columns in (["odd"], ["odd", "large"]):
        data = ready(path, digits, target="labels", label_column=columns)
        assert data.class_names == columns
        found[len(columns)] = torch.cat([images.labels[:, 0] for images in data.sets.values()])
    assert found[1].isnan().sum() == 1
    assert found[1].nansum() == found[2].nansum() > 20
    one = ready(path, digits, label_column=["odd"], skip_corrupt=True)
    assert one.class_names == ["0", "1"]


def module_for(data, kind=ImageValues):
    facts = data.describe()
    known = {name: facts[name] for name in ("image_size", "in_channels", "num_classes")}
    model = attnkit.ViT(**known, patch_size=2, dim=12, depth=1, num_heads=3)
    taken = ("mean", "std", "class_names", "image_size", "in_channels")
    more = ("target", "num_outputs") if kind is ImageValues else ("num_classes",)
    return kind(model, **{name: facts[name] for name in (*taken, *more)})


def test_a_module_learns_what_the_data_hold(digits, tmp_path):
    data = ImageCsvData(table(tmp_path, ["path", "kinds"]), digits, target="labels")
    data.setup("fit")
    module = module_for(data, ImageClassification)
    with pytest.raises(UserError, match="learns classes; level=image_values learns labels"):
        quiet(tmp_path, max_steps=1).fit(module, datamodule=data)


def test_scores_of_labels_are_scikit_learns(digits, tmp_path):
    data = ready(table(tmp_path, ["path", "kinds"]), digits, target="labels", val_fraction=0.3)
    module = module_for(data)
    trainer = quiet(tmp_path, max_epochs=2, callbacks=[ValueReport(tmp_path / "report")])
    trainer.fit(module, datamodule=data)
    val = data.sets["val"]
    with torch.no_grad():
        scores = module.eval()(val.fetch(torch.arange(len(val)))).sigmoid()
    thresholds = module.thresholds.clone()
    for n in range(3):
        best = f1_score(val.labels[:, n], scores[:, n] >= thresholds[n])
        others = [f1_score(val.labels[:, n], scores[:, n] >= one) for one in scores[:, n]]
        assert best == pytest.approx(max(others))
    (found,) = trainer.test(module, datamodule=data, verbose=False)
    assert torch.equal(module.thresholds, thresholds)
    outputs, truth = module.test_values
    chosen = outputs.sigmoid() >= thresholds
    f1 = f1_score(truth, chosen, average=None, zero_division=0)
    assert found["test/f1"] == pytest.approx(f1.mean())
    with (tmp_path / "report" / "per_label.csv").open() as file:
        written = list(csv.DictReader(file))
    for n, row in enumerate(written):
        assert row["label"] == data.class_names[n]
        assert float(row["f1"]) == pytest.approx(f1[n])
        assert int(row["support"]) == truth[:, n].sum()
        expected = average_precision_score(truth[:, n], outputs[:, n])
        assert float(row["average_precision"]) == pytest.approx(expected, rel=1e-5)
    assert Image.open(tmp_path / "report" / "per_label.png").width > 300
    said = module.classify(val.fetch(torch.arange(5)))
    for row, names in enumerate(said["labels"]):
        assert names == [
            n for n, c in zip(data.class_names, scores[row] >= thresholds, strict=True) if c
        ]


def test_thresholds_are_those_of_the_averaged_weights(digits, tmp_path):
    """Which are validated and are in the best checkpoint; later steps do not change them."""
    data = ready(table(tmp_path, ["path", "kinds"]), digits, target="labels", val_fraction=0.3)
    module = module_for(data)
    saved = [
        ModelCheckpoint(tmp_path, monitor="val/loss", filename="best"),
        ModelCheckpoint(
            tmp_path, every_n_train_steps=1, filename="last", enable_version_counter=False
        ),
    ]
    options = {"max_epochs": 3, "check_val_every_n_epoch": 2, "callbacks": [EMA(0.9), *saved]}
    quiet(tmp_path, enable_checkpointing=True, **options).fit(module, datamodule=data)
    val = data.sets["val"]
    for name in ("best", "last"):
        state = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"]
        assert torch.equal(state["thresholds"], module.thresholds)
        if name == "best":
            module.load_state_dict(state)
            with torch.no_grad():
                scores = module.eval()(val.fetch(torch.arange(len(val)))).sigmoid()
            expected = [best_threshold(s, t) for s, t in zip(scores.T, val.labels.T, strict=True)]
            assert state["thresholds"].tolist() == pytest.approx(expected, abs=1e-5)


def test_thresholds():
    scores = torch.tensor([0.1, 0.4, 0.35, 0.8])
    assert best_threshold(scores, torch.tensor([0.0, 0, 1, 1])) == pytest.approx((0.35 + 0.1) / 2)
    assert best_threshold(scores, torch.tensor([0.0, 0, torch.nan, 1])) == pytest.approx(0.6)
    assert best_threshold(scores, torch.tensor([1.0, 1, torch.nan, 1])) == 0.5


def test_numbers_are_in_their_units(digits, tmp_path):
    """Also ones whose mean is far from 0."""
    path = table(tmp_path, ["path", "ink"])
    data = ready(path, digits, target="numbers")
    module = module_for(data)
    trainer = quiet(tmp_path, max_epochs=1, callbacks=[ValueReport(tmp_path)])
    trainer.fit(module, datamodule=data)
    known = data.train_labels
    assert float(module.target_mean) == pytest.approx(float(known.mean()))
    assert float(module.target_deviation) == pytest.approx(
        float(known.std(unbiased=False)), rel=1e-4
    )
    (found,) = trainer.test(module, datamodule=data, verbose=False)
    outputs, truth = module.test_values
    assert found["test/mae"] == pytest.approx(float((outputs - truth).abs().mean()), rel=1e-5)
    assert found["test/r2"] == pytest.approx(r2_score(truth.numpy(), outputs.numpy()), rel=1e-5)
    assert Image.open(tmp_path / "predicted.png").width > 300
    r2 = module.metrics()["r2"]
    r2.update(outputs[:1], truth[:1])
    assert r2.compute().isnan()
    assert module.classify(data.sets["val"].fetch(torch.arange(2))).keys() == {"ink"}
    (twice,) = quiet(tmp_path).predict(module, data.test_dataloader())[:1]
    assert twice["truth"] == truth[:, 0].tolist()


def test_a_run_of_labels_is_predicted_explained_and_exported(digits, tmp_path, capfd):
    """The command of the documentation, its checkpoint, and what is made of it."""
    path = table(tmp_path, ["path", "kinds", "writer"])
    run, small = tmp_path / "run", ["model.dim=12", "model.depth=1", "trainer=cpu"]
    common = [f"data.table={path}", f"data.images={digits}", "data.label_column=kinds"]
    words = ["task=vit", "level=image_values", *common, "data.group_column=writer"]
    assert main([*words, *small, "trainer.max_epochs=2", f"run_dir={run}"]) == 0
    kept = torch.load(run / "checkpoints/best.ckpt", weights_only=True)["state_dict"]["thresholds"]
    assert not torch.equal(kept, torch.full((3,), 0.5))
    assert (run / "per_label.csv").is_file()
    assert main(["run=test", f"ckpt={run}", f"run_dir={tmp_path / 'again'}"]) == 0
    results = [json.loads((at / "results.json").read_text()) for at in (run, tmp_path / "again")]
    for name in ("test/f1", "test/average_precision", "test/loss"):
        assert results[0][name] == pytest.approx(results[1][name], abs=1e-6)

    assert (
        main(["run=predict", f"ckpt={run}", f"images={digits}", f"run_dir={tmp_path / 'p'}"]) == 0
    )
    with (tmp_path / "p" / "predictions.csv").open() as file:
        for row in csv.DictReader(file):
            likely = [n for n, t in zip(sorted(KINDS), kept.tolist(), strict=True)
                      if float(row[f"p({n})"]) >= t]  # fmt: skip
            assert row["labels"] == "; ".join(likely)
    words = ["run=explain", f"ckpt={run}", "explain.target=loop", "explain.num_images=2"]
    assert main([*words, "explain.trust=none", f"run_dir={tmp_path / 'e'}"]) == 0
    assert "loop" in (tmp_path / "e" / "explain.html").read_text()
    words = ["run=export", f"ckpt={run}", "export.formats=[safetensors]"]
    assert main([*words, f"run_dir={tmp_path / 'x'}"]) == 0
    said = json.loads((tmp_path / "x/export/config.json").read_text())
    assert list(said["thresholds"].values()) == pytest.approx(kept.tolist())
    capfd.readouterr()
    assert main(["task=vit", "data=image_csv", *common, "data.target=labels", *small]) == 2
    assert "level=image_values learns labels" in capfd.readouterr().err
