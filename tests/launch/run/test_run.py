"""Runs from the command line: what they leave, how they go on, how they repeat."""

import csv
import json
import shlex
import shutil
import subprocess
import sys
import warnings
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from rich.console import Console

from attnkit.launch import console as report
from attnkit.launch import folder as folders
from attnkit.launch.console import tables


def results_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def metrics_of(folder: Path) -> list[dict]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def epochs_of(folder: Path) -> list[int]:
    return [int(row["epoch"]) for row in metrics_of(folder) if row["val/loss"]]


def test_run_folder(attnkit, hers):
    done = attnkit("--config-dir", hers, "task=full")
    assert done.code == 0, done.err
    assert [p.name for p in Path.cwd().iterdir()] == ["outputs"]
    (folder,) = (Path.cwd() / "outputs" / "mine").iterdir()
    for name in (
        "run.log",
        "learning_curves.png",
        "checkpoints/last.ckpt",
        "checkpoints/best.ckpt",
    ):
        assert (folder / name).stat().st_size > 0, name
    assert list(folder.glob("tensorboard/events*"))
    assert epochs_of(folder) == [1, 2]

    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["run_dir"] == str(folder)
    assert config["module"]["width"] == 11
    assert config["callbacks"]["checkpoint"]["dirpath"] == f"{folder}/checkpoints"

    results = results_of(folder)
    assert all(isinstance(v, int | float) for v in results.values())
    assert {"test/loss", "val/loss_best", "seconds", "epochs"} <= set(results)
    # the best epoch and the last are told apart, and one run has no deviation
    by_epoch = [float(row["val/loss"]) for row in metrics_of(folder) if row["val/loss"]]
    assert results["val/loss_best"] == pytest.approx(min(by_epoch))
    assert results["val/loss_last"] == results["val/loss"] == pytest.approx(by_epoch[-1])
    assert results["best_epoch"] == 1 + by_epoch.index(min(by_epoch))
    assert not [name for name in results if name.endswith("_std")]
    assert (results["num_seeds"], results["epochs"], results["steps"]) == (1, 2, 10)
    assert results["parameters"] == 5 * 11 + 11 + 11 * 3 + 3

    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["epoch"] == 1
    assert set(checkpoint["state_dict"]) == {
        "net.0.weight",
        "net.0.bias",
        "net.2.weight",
        "net.2.bias",
    }
    for text in (str(folder), f"{results['test/loss']:.4f}"):
        assert text in done.out
    assert "litlogger" not in done.out + done.err


def test_same_seed_same_result(mine):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        assert mine(f"run_dir={name}", f"seed={seed}").code == 0
    a, b, c = (results_of(Path(name))["test/loss"] for name in "abc")
    assert a == b
    assert a != c


def test_test_gives_what_training_reported(mine):
    assert mine("run_dir=trained", "trainer.max_epochs=3").code == 0
    done = mine("run=test", "ckpt=trained", "run_dir=tested", "data.batch_size=7")
    assert done.code == 0, done.err
    before, after = results_of(Path("trained")), results_of(Path("tested"))
    # The mean over batches of unequal size depends on the batch size: hers, not ours.
    assert after["test/loss"] == pytest.approx(before["test/loss"], rel=0.02)
    config = yaml.safe_load(Path("tested/config.yaml").read_text())
    assert (config["run"], config["data"]["batch_size"]) == ("test", 7)
    assert config["ckpt"] == str(Path("trained/checkpoints/best.ckpt").absolute())
    assert not Path("tested/checkpoints").exists()


@pytest.mark.slow
def test_splits(attnkit, graph_files, tmp_path):
    """Each fixed split of the data is a run; what is lost is repeated and nothing else."""
    np.savez(tmp_path / "minesweeper.npz", **graph_files.heterophilous_arrays())
    command = (
        "task=graph", "data=heterophilous", f"data.root={tmp_path}", "model.hidden_channels=16",
        "splits=all", "run_dir=all", "trainer.max_epochs=1", "trainer=cpu",
    )  # fmt: skip
    done = attnkit(*command)
    assert done.code == 0, done.err
    parts = [results_of(Path(f"all/split_{i}"))["test/auroc"] for i in range(10)]
    results = results_of(Path("all"))
    assert len(set(parts)) > 5
    assert results["num_seeds"] == 10
    assert results["test/auroc"] == pytest.approx(sum(parts) / 10)
    assert folders.load_config(Path("all/split_3"))["data"]["split"] == 3
    shutil.rmtree("all/split_3/checkpoints")
    Path("all/split_3/results.json").unlink()
    Path("all/results.json").unlink()
    kept = Path("all/split_4/results.json").stat().st_mtime_ns
    assert attnkit("resume=all").code == 0
    assert results_of(Path("all"))["test/auroc"] == pytest.approx(results["test/auroc"])
    assert Path("all/split_4/results.json").stat().st_mtime_ns == kept


def test_splits_are_counted_without_warnings(attnkit, tmp_path, recwarn):
    """The run of each split gives them, in one line each."""
    graph = {"x": np.eye(9), "y": np.arange(9) % 3, "edge_index": np.zeros((2, 4), int)}
    splits = (np.arange(18).reshape(9, 2) + 1) // 2 % 3
    masks = {f"{name}_mask": splits == i for i, name in enumerate(("train", "val", "test"))}
    np.savez(tmp_path / "graph.npz", **graph, **masks)
    root = f"data.root={tmp_path}/graph.npz"
    done = attnkit("task=graph", "data=graph_files", root, "splits=5")
    assert (done.code, done.err) == (2, "attnkit: splits=5: the data has 2\n")
    assert not [seen for seen in recwarn if "given again" in str(seen.message)]


def test_seeds(mine):
    done = mine("seeds=3", "seed=5", "run_dir=all", "trainer.max_epochs=1")
    assert done.code == 0, done.err
    parts = [results_of(Path(f"all/seed_{seed}"))["test/loss"] for seed in (5, 6, 7)]
    results = results_of(Path("all"))
    assert len(set(parts)) == 3
    assert results["num_seeds"] == 3
    assert results["test/loss"] == pytest.approx(sum(parts) / 3)
    spread = torch.tensor(parts, dtype=torch.float64).std().item()
    assert results["test/loss_std"] == pytest.approx(spread, rel=1e-5)
    assert [p.name for p in Path("all").glob("checkpoints")] == []

    # The second seed was lost: it alone is repeated, and gives what it gave.
    (Path("all/results.json")).unlink()
    shutil.rmtree("all/seed_6/checkpoints")
    Path("all/seed_6/results.json").unlink()
    kept = Path("all/seed_5/results.json").stat().st_mtime_ns
    assert mine("resume=all").code == 0
    assert results_of(Path("all"))["test/loss"] == pytest.approx(results["test/loss"])
    assert Path("all/seed_5/results.json").stat().st_mtime_ns == kept


def test_resume_goes_on_in_the_same_folder(mine):
    assert mine("trainer.max_epochs=2").code == 0
    (folder,) = Path("outputs/mine").iterdir()
    finished = mine("resume=latest")
    assert finished.code == 0
    assert f"finished already: {folder.absolute()}" in finished.out

    done = mine("resume=latest", "trainer.max_epochs=4")
    assert done.code == 0, done.err
    assert list(Path("outputs/mine").iterdir()) == [folder]
    assert epochs_of(folder) == [1, 2, 3, 4]  # Lightning's own logger would have lost two
    assert results_of(folder)["epochs"] == 4
    assert yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["max_epochs"] == 4
    assert "changed: trainer.max_epochs=4" in (folder / "run.log").read_text()


def test_resume_of_a_run_that_died(mine):
    assert mine("run_dir=run", "trainer.max_epochs=2", "module.fail_at=1").code == 1
    assert "num_seeds" not in folders.load_results(Path("run"))
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    config["module"]["fail_at"] = None  # the cause is removed
    Path("run/config.yaml").write_text(yaml.safe_dump(config))
    Path("run").rename("moved")
    assert mine("resume=moved").code == 0
    assert epochs_of(Path("moved")) == [1, 2]
    assert not Path("run").exists()


def test_resume_refuses_another_model(mine, refused):
    assert mine("run_dir=run", "trainer.max_epochs=1").code == 0
    before = Path("run/config.yaml").read_text()
    for change in ("module.width=7", "data.batch_size=3", "model=vit_tiny", "precision=64"):
        refused(f"{change}: can't be changed when a run is resumed", "resume=run", change, by=mine)
    assert "no such key; did you mean max_epochs?" in mine("resume=run", "trainer.max_epohs=3").err
    assert Path("run/config.yaml").read_text() == before


def test_crash_is_told_in_three_lines(mine):
    done = mine("run_dir=run", "module.fail_at=0")
    assert done.code == 1
    lines = done.err.strip().splitlines()
    assert lines[-3:][0] == "attnkit: RuntimeError: this module fails on purpose"
    assert "mine_of_the_tests.py" in lines[-2]


def test_ctrl_c_says_how_to_go_on(mine, hers):
    done = mine("run_dir=run", "module.interrupt_at=1", "seeds=2")
    assert done.code == 130
    assert f"to go on: attnkit resume={Path('run').absolute()} --config-dir {hers}" in done.err
    assert epochs_of(Path("run/seed_0")) == [1]
    assert not Path("run/seed_1/checkpoints").exists()

    done = mine("-m", "module.interrupt_at=0,null", "run_dir=sweep")
    assert done.code == 130
    assert not Path("sweep/1_module.interrupt_at=null").exists()


def test_new_arguments_and_short_keys(mine):
    done = mine(
        "run_dir=run", "module.lr=0.2", "trainer.limit_batches=2", "trainer.deterministic=true",
        "trainer.accumulate_grad_batches=2", "precision=bf16-mixed", "vars.anything=3",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert results_of(Path("run"))["steps"] == 2
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert config["trainer"]["deterministic"] is True


def test_sweep(mine, hers):
    done = mine("-m", "module.lr=0.3,0.001", "module.fail_at=null,0", "run_dir=sweep")
    assert done.code == 1  # two of the trials fail
    names = sorted(p.name for p in Path("sweep").iterdir() if p.is_dir())
    assert names == [
        "0_module.lr=0.3,module.fail_at=null", "1_module.lr=0.3,module.fail_at=0",
        "2_module.lr=0.001,module.fail_at=null", "3_module.lr=0.001,module.fail_at=0",
    ]  # fmt: skip
    with Path("sweep/table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["trial"] for row in rows] == ["0", "2", "1", "3"]
    each = [line.split("  ") for line in done.out.splitlines() if line.startswith("trial ")]
    assert [parts[1:2] + parts[-1:] for parts in each] == [
        ["module.lr=0.3 module.fail_at=null", "done"], ["module.lr=0.3 module.fail_at=0", "failed"],
        ["module.lr=0.001 module.fail_at=null", "done"],
        ["module.lr=0.001 module.fail_at=0", "failed"],
    ]  # fmt: skip
    assert each[0][2].startswith("val/loss_best ")
    assert each[0][3].endswith("s")
    assert "┃ metric" not in done.out  # its tables are in the trial's folder
    assert "┃ metric" in (Path("sweep") / names[0] / "output.log").read_text()
    assert "┃ metric" in (Path("sweep") / names[0] / "run.log").read_text()
    assert [row["rank"] for row in rows] == ["1", "2", "", ""]
    assert float(rows[0]["val/loss_best"]) < float(rows[1]["val/loss_best"])
    assert "fails on purpose" in rows[3]["error"]
    assert results_of(Path("sweep") / names[0])["test/loss"] == float(rows[0]["test/loss"])
    assert "fails on purpose" in (Path("sweep") / names[1] / "error.txt").read_text()
    page = Path("sweep/report.md").read_text()
    assert "```bash\nattnkit task=mine module.lr=0.3 " in page
    assert f" --config-dir {hers}\n```" in page
    assert Path("sweep/parameters.png").read_bytes().startswith(b"\x89PNG")
    assert "](parameters.png)" in page


def test_sweep_checks_every_trial_first(mine, refused):
    done = refused(
        "module.lr: expected float, got 'small'", "-m", "module.lr=0.3,0.1,small", by=mine
    )
    assert "module.lr=small" in done.err.splitlines()[-1]
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.slow
def test_installed_command_from_any_folder(hers):
    """The console script, a relative --config-dir, and cwd without her module."""
    command = [Path(sys.executable).with_name("attnkit"), "--config-dir", f"../../{hers.name}"]
    folder = hers.parent / "deep" / "er"
    folder.mkdir(parents=True)
    command += ["task=mine", "trainer.max_epochs=1", "run_dir=out"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "num_seeds" in results_of(folder / "out")
    assert [p.name for p in folder.iterdir()] == ["out"]
    assert "Tip" not in done.stderr


def test_a_task_without_images_predicts_its_data(mine, attnkit, refused, hers):
    assert mine("run_dir=run").code == 0
    predict = ("--config-dir", hers, "run=predict", "ckpt=run")
    done = attnkit(*predict, "run_dir=told")
    assert done.code == 0, done.err
    lines = Path("told/predictions.csv").read_text().split()
    assert lines[0] == "kind"
    assert len(lines) == 1 + 53
    assert set(lines[1:]) <= {"0", "1", "2"}

    done = attnkit(*predict, "images=run")
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert "images=run: this task predicts its own data; leave it out" in done.err
    refused(
        "run=predict: mine_of_the_tests.Unpredictable has no predict_dataloader",
        *predict,
        "data._target_=mine_of_the_tests.Unpredictable",
    )


def test_paths_are_quoted_where_they_must_be():
    assert folders.as_override("resume", Path("/a/b-1_2.c")) == "resume=/a/b-1_2.c"
    for path in ("/a/0_attention=none", "/it's here/{x}", '/a "b"/c'):
        (word,) = shlex.split(folders.as_override("resume", Path(path)))
        assert OverridesParser.create().parse_override(word).value() == path


@pytest.mark.parametrize(
    ("file", "shown"), [("/x/site-packages/lib.py", False), ("/x/hers.py", True)]
)
@pytest.mark.parametrize("category", [FutureWarning, DeprecationWarning, UserWarning])
def test_deprecations_are_shown_if_they_are_her_own(tmp_path, capfd, file, shown, category):
    """Those of libraries nobody here can act on."""
    report.quiet()
    with report.logging_to(tmp_path), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn_explicit("this way is deprecated", category, file, 7)
    log = tmp_path / "run.log"
    said = log.read_text() if log.exists() else ""
    assert (f"{category.__name__} {Path(file).name}:7: this way" in said) is shown
    assert ("this way is deprecated" in capfd.readouterr().out) is shown


def test_the_command_to_go_on_works_when_pasted(attnkit, hers):
    """Whatever permitted the code of the run: a folder with a space in its name, and allow=."""
    own = Path("her own/task")
    own.mkdir(parents=True)
    shutil.copy(hers / "task" / "mine.yaml", own)
    shutil.copy(hers / "mine_of_the_tests.py", ".")
    permission = ("--config-dir", "her own", "allow=[mine_of_the_tests]")
    done = attnkit(*permission, "task=mine", "run_dir=a run", "module.interrupt_at=1")
    assert done.code == 130
    (command,) = [
        line.partition("to go on: ")[2] for line in done.err.splitlines() if "go on" in line
    ]
    words = shlex.split(command)
    assert words[0] == "attnkit"
    assert "mine_of_the_tests" in attnkit(*[w for w in words[1:] if "allow" not in w]).err
    again = attnkit(*words[1:])
    assert again.code == 130, again.err  # it goes on to where it is interrupted, and is again
    config = yaml.safe_load(Path("a run/config.yaml").read_text())
    config["module"]["interrupt_at"] = None
    Path("a run/config.yaml").write_text(yaml.safe_dump(config))
    assert attnkit(*words[1:]).code == 0
    assert epochs_of(Path("a run")) == [1, 2]


# --- tables at the end of a run -------------------------------------------------------------------


RESULTS = {
    "test/accuracy": 0.951, "test/top5_accuracy": 1.0, "val/accuracy_best": 0.94,
    "val/accuracy_last": 0.93, "val/accuracy": 0.93, "train/loss": 0.7425, "best_epoch": 12.0,
    "train/samples_per_second": 85_000.0, "step_seconds": 0.0491, "parameters": 9768.0,
    "kernels/layers.0/edges": 3.0,
}  # fmt: skip


def lines(results):
    console = Console(file=StringIO(), width=80)
    for table in tables("graph · train", results):
        console.print(table)
    text = console.file.getvalue()
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()], text


def test_a_row_for_each_metric_and_a_column_for_each_stage():
    cells, text = lines({**RESULTS, "num_seeds": 1})
    assert ["accuracy", "0.9510", "0.9400", "0.9300"] in cells
    assert ["top5_accuracy", "1.0000", "", ""] in cells
    assert ["train/loss", "0.7425"] in cells
    assert ["train/samples_per_second", "85 k/s"] in cells
    assert ["step_seconds", "49.1 ms"] in cells
    assert ["parameters", "9,768"] in cells
    assert ["attention kernels", "edges"] in cells
    assert "of the best epoch" in text


def test_several_seeds_have_a_spread():
    spread = {"test/accuracy_std": 0.0123, "num_seeds": 5}
    cells, text = lines({**RESULTS, **spread})
    assert ["accuracy", "0.9510 ± 0.0123", "0.9400", "0.9300"] in cells
    assert ["num_seeds", "5"] in cells
    assert max(map(len, text.splitlines())) <= 80


def test_no_metrics_no_table_of_them():
    cells, text = lines({"step/seconds": 0.05, "num_seeds": 1})
    assert [row for row in cells if row] == [["step/seconds", "50.0 ms"]]
    assert text.startswith("graph · train")
