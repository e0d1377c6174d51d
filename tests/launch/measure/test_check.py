"""run=check against the job itself, and that it leaves nothing behind."""

import json
import re
from pathlib import Path

import pytest
import torch
from lightning import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from attnkit.launch.config.compose import Composer
from attnkit.launch.decide import Request, decide
from attnkit.launch.modes import check as checking
from attnkit.launch.modes.check import Stopwatch, check
from attnkit.launch.run import Run

VIT = ("task=vit", "model.depth=2", "model.dim=24", "trainer=cpu", "trainer.max_epochs=3")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(checking, "ENOUGH", 0.1)
    monkeypatch.setitem(checking.MOST, "train", 5)


def figures_of(*argv):
    return check(decide(Request.read(Composer(None), ["run=check", *argv])))


def files(*folders):
    return {path: path.stat().st_mtime_ns for f in folders for path in [f, *f.rglob("*")]}


def test_the_figures_are_those_of_the_job(attnkit):
    """Everything that no clock decides; the rest is in docs/benchmarks.md."""
    found = figures_of(*VIT, "data.batch_size=200")
    assert attnkit(*VIT, "data.batch_size=200", "run_dir=run").code == 0
    results = json.loads(Path("run/results.json").read_text())
    assert found["parameters"] == results["parameters"]
    assert found["multiply_adds"] == results["multiply_adds"]
    assert found["epochs"] * found["batches"] == results["steps"]
    assert found["trainable_parameters"] == results["parameters"]


def test_the_time_of_a_job_of_minutes_is_known():
    argv = [word for word in VIT if not word.startswith("trainer.max_epochs")]
    found = figures_of(*argv, "trainer.minutes=7", "data.batch_size=200")
    assert found["epochs"] * found["epoch_seconds"] == pytest.approx(420, rel=0.05)
    assert 400 < found["seconds"] < 2 * 420  # its start too, which takes as long as others let it


def test_multiply_adds_of_a_dense_model_are_torchs(flash_is_counted):
    """By the module's example, and, without one, by a step of training."""
    config = decide(Request.read(Composer(None), list(VIT))).runs[0]
    run = Run(config)
    run.make_data()
    module = run.make_module().eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(*[torch.zeros_like(module.example_input_array)])
    expected = counter.get_total_flops() // 2
    assert expected > 0
    assert figures_of(*VIT)["multiply_adds"] == expected
    assert figures_of(*VIT, "callbacks.steps.cost=false")["multiply_adds"] == expected


def test_nothing_is_left_behind_in_a_folder_that_can_not_be_written(tmp_path, monkeypatch, attnkit):
    here, temporary, home = (tmp_path / name for name in ("read_only", "tmp", "home"))
    for folder in (here, temporary, home):
        folder.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    elsewhere = tmp_path / "elsewhere"
    here.chmod(0o555)
    before = files(here, home, tmp_path)
    done = attnkit("run=check", *VIT, f"callbacks.curves.path={elsewhere}/curves.png")
    after = files(here, home, tmp_path)
    here.chmod(0o755)
    assert done.code == 0, done.err
    assert before.keys() == after.keys()
    assert not list(temporary.iterdir())


def test_the_table(attnkit):
    done = attnkit("run=check", *VIT, "seeds=2", "trainer.max_epochs=5", "trainer.limit_batches=3")
    assert done.code == 0, done.err
    rows = dict(re.findall(r"│ (.*?) +│ (.*?) +│", done.out))
    assert rows["epochs × batches"] == "5 × 3, 2 runs"
    assert rows["kernel of model.blocks.1.attention"] == "flash"
    assert rows["parameters"] == rows["trained parameters"]
    assert "share that is trained" not in rows
    assert re.fullmatch(r"[\d,]+ MiB of the process", rows["peak memory"])
    assert re.fullmatch(r"[\d.]+ s|\d+ min \d\d s", rows["time of the whole job"])
    assert not list(Path().iterdir())


def test_what_is_trained_and_what_that_saves(attnkit):
    done = attnkit("run=check", *VIT, "finetune=lora", "finetune.rank=2", "data.batch_size=100")
    assert done.code == 0, done.err
    rows = dict(re.findall(r"│ (.*?) +│ (.*?) +│", done.out))
    whole = int(rows["parameters"].replace(",", ""))
    head, change = 24 * 10 + 10, 2 * 2 * (24 + 3 * 24 + 24 + 24)
    assert rows["trained parameters"] == str(head + change)
    expected = f"{(head + change) / whole:.2%} of {whole:,}, finetune=lora"
    assert rows["share that is trained"] == expected
    assert "blocks.*.attention.in_proj (LoRA)  384" in done.out
    assert "head  240" in done.out
    found = rows["memory of a step beside the weights"]
    part, all_of_it = map(
        int, re.fullmatch(r"(\d+) MiB; (\d+) MiB with finetune=full", found).groups()
    )
    assert 0 < part < 0.8 * all_of_it


def test_a_task_of_ones_own_and_no_end(mine, hers):
    """Neither an example nor an end: said, not guessed."""
    before = files(hers)
    done = mine("run=check", "trainer.max_epochs=-1", "trainer=cpu_ddp")
    assert done.code == 0, done.err
    said = " ".join(re.findall(r"not known +│ (.*?) +│", done.out))
    assert "the time: neither trainer.max_epochs nor max_steps ends it" in said
    assert "the time that 2 processes wait for each other" in said
    assert "no attention ran" in done.out
    assert "multiply-adds of a sample" in done.out
    assert before.keys() == files(hers).keys()


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ("-m seed=0,1", 2, "run=check: not with -m; one configuration at a time"),
        ("resume={folder}", 2, "run=check: not together with resume, which trains"),
        ("ckpt={file}", 2, "has no effect in run=check; only in run=test, predict, "),
        ("data.batch_size=0", 2, "batch_size"),
        ("model.num_heads=7", 2, "num_heads"),
        ("trainer=gpu", 2, "trainer: "),
    ],
)
def test_wrong_input(attnkit, tmp_path, argv, code, message):
    (tmp_path / "file").write_text("")
    given = argv.format(folder=tmp_path, file=tmp_path / "file").split()
    done = attnkit("run=check", "task=vit", *given)
    if "gpu" in argv and torch.cuda.is_available():
        return
    assert done.code == code
    assert message in done.err
    assert len(done.err.strip().splitlines()) <= 3
    assert not list(Path().iterdir())


class Clocked(LightningModule):
    """On whose clock a step takes 2 s, an epoch's end 7, a batch of validation 3, of a test 5."""

    def __init__(self, now, compiles=0):
        super().__init__()
        self.now, self.net, self.compiles = now, torch.nn.Linear(1, 1), compiles

    def training_step(self, batch, index):
        self.now[0] += 2 + self.compiles * (self.global_step == 0)
        return self.net(batch[0]).sum()

    def on_train_epoch_end(self):
        self.now[0] += 7

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.now[0] += 3

    def test_step(self, batch, index):
        self.now[0] += 5

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(
    ("batches", "compiles"), [(3, 0), (100, 0), (1, 60)], ids=["short", "cut", "compiled"]
)
@pytest.mark.parametrize(
    "given",
    [
        {"max_epochs": 6},
        {"max_epochs": 6, "check_val_every_n_epoch": 2},
        {"max_epochs": 6, "val_check_interval": 0.25, "limit_val_batches": 2},
        {"max_epochs": 1},
        {"max_epochs": -1, "max_steps": 300, "limit_train_batches": 0.5, "min_epochs": 3},
    ],
    ids=str,
)
def test_the_time_is_that_of_the_whole(monkeypatch, batches, compiles, given):
    if batches <= 3 and ("val_check_interval" in given or "max_steps" in given):
        pytest.skip("a part of so few batches is none")
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def seconds(watched=True, **arguments):
        now[0] = 0.0
        module = Clocked(now, compiles)
        loaders = [DataLoader(TensorDataset(torch.ones(n, 1))) for n in (batches, 9, 12)]
        trainer = Trainer(
            **arguments, accelerator="cpu", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            num_sanity_val_steps=0,
        )  # fmt: skip
        trainer.fit_loop.min_epochs = 0
        watch = Stopwatch(trainer, given) if watched else None
        trainer.callbacks.extend([watch] if watch else [])
        trainer.fit(module, *loaders[:2])
        trainer.test(module, loaders[2], verbose=False)
        return now[0], watch

    whole, _ = seconds(watched=False, **given)
    part, watch = seconds(**{**given, "val_check_interval": 1.0, "check_val_every_n_epoch": 1})
    assert watch.seconds(part) == pytest.approx(whole)
    assert part < whole or given["max_epochs"] == 1


def test_other_processes_share_the_batches():
    """Half for each of two, rounded up; of several loaders of training the longest counts."""
    loaders = [DataLoader(TensorDataset(torch.ones(n, 1))) for n in (7, 3, 4)]
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0.5,
    )  # fmt: skip
    watch = Stopwatch(trainer, {}, world=2)
    trainer.callbacks.append(watch)
    trainer.fit(Clocked([0.0]), loaders[0], loaders[1:])
    assert watch.batches("train") == 4
    assert watch.batches("val") == 2  # of 1 and 2
    assert watch.batches("test") == 0


def test_what_is_compiled_afterwards_is_compiled(attnkit):
    """Two recorders of kernels that were not nested would leave torch.compile switched off."""
    small = ("model.dim=16", "model.depth=1", "model.num_heads=1")
    assert attnkit("run=check", "task=vit", *small).code == 0
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(torch.nn.Linear(3, 5), backend=backend)(torch.ones(2, 3))
    assert len(compiled) == 1
