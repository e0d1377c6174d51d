"""`attnkit.run`: the same run from Python as from the command line, in this process."""

import logging
import os
import random
import signal
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import attnkit as toolkit
from attnkit.launch import folder as folders
from attnkit.lightning.errors import UserError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
LOGGERS = ("", "attnkit", "attnkit.run", "lightning", "lightning.pytorch")


def numbers(results):
    """What depends on the run alone, and not on the machine."""
    of_run = ("train/loss", "val/", "test/", "epochs", "steps", "parameters", "num_seeds")
    return {name: value for name, value in results.items() if name.startswith(of_run)}


def config_of(folder):
    return folders.relocate(folders.load_config(folder), folder, Path("run"))


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


def test_it_is_the_run_of_the_command_line(mine, hers):
    assert mine("trainer.max_epochs=3", "module.lr=0.1", "run_dir=typed").code == 0
    for name in ("one", "two"):
        run = toolkit.run(
            "task=mine", config_dir=hers, trainer={"max_epochs": 3}, module={"lr": 0.1},
            run_dir=Path(name),
        )  # fmt: skip
        typed = folders.load_results(Path("typed"))
        assert set(run.results) == set(typed)
        assert numbers(run.results) == pytest.approx(numbers(typed), abs=1e-6)
        assert files(run.folder) == files("typed")
        assert run.folder == Path(name).resolve()
        assert config_of(run.folder) == config_of(Path("typed").resolve())
        best = torch.load(run.folder / "checkpoints" / "best.ckpt", weights_only=True)
        for key, value in run.module.state_dict().items():
            assert torch.equal(value, best["state_dict"][key])
        assert len(run.data.set) == 53
        assert run.trainer.current_epoch == 3


def test_values_are_what_they_are(hers):
    given = {
        "text": "a b=c,d ${x} 'y' \\ ???", "number": "1", "path": Path("p q"), "none": None,
        "flag": True, "small": 1e-7, "list": [1, [2.5, "true"], None], "empty": {}, "of": {"n": -3},
        "pairs": [{"one": 1, "two": "2"}], "point": ".5", "dot": "./x", "numpy": np.float64(1e-3),
        "whole": np.int64(3), "torch": torch.tensor(2.5),
    }  # fmt: skip
    run = toolkit.run("task=mine", config_dir=hers, vars=given, trainer={"max_epochs": 1})
    plain = {"path": "p q", "numpy": 1e-3, "whole": 3, "torch": 2.5}
    assert run.config["vars"] == {**given, **plain}
    assert type(run.config["vars"]["numpy"]) is float
    assert run.folder.parent == Path("outputs/mine").resolve()


def test_what_is_wrong_is_said_as_on_the_command_line(mine, hers):
    for typed, values in (
        ("trainer.max_epoch=3", {"trainer": {"max_epoch": 3}}),
        ("module.width=wide", {"module": {"width": "wide"}}),
        ("ckpt=nowhere", {"ckpt": "nowhere"}),
        ("run=tain", {"run": "tain"}),
        ("data.samples=1", {"data": {"samples": 1}}),
    ):
        said = mine(typed).err.removeprefix("attnkit: ").strip()
        with pytest.raises(UserError) as error:
            toolkit.run("task=mine", config_dir=hers, **values)
        assert str(error.value) == said
    with pytest.raises(UserError, match=r"trainer.callbacks: .* None, got object"):
        toolkit.run("task=mine", config_dir=hers, trainer={"callbacks": object()})
    with pytest.raises(UserError, match="run=check: expected a run that leaves a folder"):
        toolkit.run("task=mine", "run=check", config_dir=hers)
    assert os.listdir(".") == []


def test_the_process_is_afterwards_as_it_was(hers):
    random.seed(3)
    np.random.seed(5)
    torch.manual_seed(7)
    threads = torch.get_num_threads()
    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    for seed, module in ((3, random.seed), (5, np.random.seed), (7, torch.manual_seed)):
        module(seed)

    def state():
        loggers = [logging.getLogger(name) for name in LOGGERS]
        return (
            [(one.level, one.propagate, one.handlers[:]) for one in loggers],
            [handler.level for one in loggers for handler in one.handlers],
            [signal.getsignal(number) for number in SIGNALS],
            torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark,
            dict(os.environ), sys.path[:], torch.get_num_threads(), os.getcwd(),
            warnings.showwarning, warnings.filters[:],
        )  # fmt: skip

    before = state()
    toolkit.run("task=mine", config_dir=hers, run_dir="one", trainer={"deterministic": True})
    with pytest.raises(RuntimeError, match="fails on purpose"):
        toolkit.run("task=mine", config_dir=hers, module={"fail_at": 1}, run_dir="two")
    assert folders.load_state(Path("two"))["state"] == folders.FAILED
    assert state() == before
    assert threads == torch.get_num_threads()
    assert drawn == (random.random(), float(np.random.rand()), float(torch.rand(())))


def test_resumed_and_tested_and_several_seeds(hers):
    run = toolkit.run("task=mine", config_dir=hers, run_dir="one")
    again = toolkit.run(resume=run.folder, config_dir=hers)  # which is over
    assert again.results == run.results
    for key, value in run.module.state_dict().items():
        assert torch.equal(value, again.module.state_dict()[key])
    longer = toolkit.run(resume="one", config_dir=hers, trainer={"max_epochs": 4})
    assert longer.results["epochs"] == 4
    tested = toolkit.run("run=test", ckpt=run.folder, config_dir=hers)
    assert tested.results["test/loss"] == pytest.approx(longer.results["test/loss"], abs=1e-6)
    several = toolkit.run("task=mine", config_dir=hers, seeds=2, run_dir="both")
    assert several.folder == Path("both").resolve()
    assert several.results["num_seeds"] == 2
    assert several.results["test/loss_std"] > 0
    assert several.config["seed"] == 1
    for folder in ("both", "both/seed_0"):  # which was stopped, while the other is over
        folders.save_state(Path(folder), folders.STOPPED)
    resumed = toolkit.run(resume="both", config_dir=hers)
    assert resumed.config["seed"] == 1
    for key, value in several.module.state_dict().items():
        assert torch.equal(value, resumed.module.state_dict()[key])


def test_the_best_weights_where_nothing_is_tested(hers, tmp_path):
    folder = tmp_path / "untested"
    folder.mkdir()
    text = (hers / "mine_of_the_tests.py").read_text()
    untested = "\n\nData.test_dataloader = LightningDataModule.test_dataloader\n"
    (folder / "mine_of_the_tests.py").write_text(text + untested)
    (folder / "task").mkdir()
    (folder / "task" / "mine.yaml").write_text((hers / "task" / "mine.yaml").read_text())
    run = toolkit.run("task=mine", config_dir=folder, run_dir="one", module={"lr": 9.0})
    assert not any(name.startswith("test/") for name in run.results)
    best = torch.load(run.folder / "checkpoints" / "best.ckpt", weights_only=True)
    assert best["epoch"] == 0  # of two, since the loss grows
    for key, value in run.module.state_dict().items():
        assert torch.equal(value, best["state_dict"][key])


def test_explained():
    run = toolkit.run(
        "task=vit", "model.depth=1", "model.dim=16", "model.num_heads=2", run_dir="one",
        trainer={"max_epochs": 1, "limit_batches": 2}, callbacks={"curves": None},
    )  # fmt: skip
    seen = run.explain(num_images=3, method="relevance")
    assert seen.map.shape == (3, 4, 4)
    assert seen.model is run.module
    again = toolkit.run(resume="one").explain(num_images=3, method="relevance")
    torch.testing.assert_close(seen.map, again.map)
    torch.testing.assert_close(seen.images, again.images)


def test_a_sweep_is_its_table(mine, hers, found):
    rows = toolkit.sweep(
        "task=mine", "module.lr=0.1,0.01", config_dir=hers, trainer={"max_epochs": 1}
    )
    assert mine("-m", "module.lr=0.1,0.01", "trainer.max_epochs=1", "run_dir=typed").code == 0
    typed = found.rows("typed")
    assert [row.keys() for row in rows] == [row.keys() for row in typed]
    for ours, theirs in zip(rows, typed, strict=True):
        assert (str(ours["module.lr"]), ours["state"]) == (theirs["module.lr"], "done")
        assert ours["val/loss_best"] == pytest.approx(float(theirs["val/loss_best"]), abs=1e-6)
    (folder,) = Path("outputs/mine").iterdir()
    assert folder.name.startswith("sweep_")
    again = toolkit.sweep(resume=folder, config_dir=hers)
    assert [row["trial"] for row in again] == [row["trial"] for row in rows]
    failed = toolkit.sweep("task=mine", "module.fail_at=null,0", config_dir=hers, run_dir="failed")
    assert [row["state"] for row in failed] == ["done", "failed"]
    with pytest.raises(UserError, match=r"module\.widht"):
        toolkit.sweep("task=mine", "module.lr=1,2", config_dir=hers, module={"widht": 3})
