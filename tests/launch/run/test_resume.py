"""Shipped tasks, stopped at a step and resumed from the command line."""

import csv
import signal
from pathlib import Path

import pytest
import torch

from attnkit.lightning.resume.checkpoints import load

# Everything that draws random numbers is on; 24 batches, 12 steps.
COMMON = [
    "callbacks=ema", "callbacks.ema.decay=0.9", "callbacks.curves=null", "trainer.max_epochs=4",
    "trainer.limit_batches=6", "trainer.accumulate_grad_batches=2",
]  # fmt: skip
JOB = [
    *COMMON,
    "task=vit", "model.dim=24", "model.depth=1", "model.num_heads=2", "model.dropout_p=0.2",
    "model.patch_dropout=0.2", "module.mixup=0.4", "module.cutmix=0.4", "data.batch_size=16",
    "callbacks.classes=null",
]  # fmt: skip
CAPTIONS = [
    *COMMON, "task=captioning", "encoder.dim=16", "encoder.stages=[[8],[8],[16]]",
    "decoder=lstm_hard", "decoder.dim=16", "decoder.dropout_p=0.2", "module.method=sample",
    "data.image_size=24", "data.num_train=48", "data.num_val=6", "data.num_test=6",
    "data.batch_size=4", "logger.tensorboard=null",
]  # fmt: skip


def saved(folder):
    checkpoint = load(Path(folder) / "checkpoints" / "last.ckpt")
    keys = ("state_dict", "current_model_state", "averaging_state")
    return {f"{key}.{k}": v for key in keys for k, v in checkpoint[key].items()}


def rows(folder):
    with (Path(folder) / "metrics.csv").open(newline="") as file:
        return [
            {k: v for k, v in row.items() if k != "train/samples_per_second"}
            for row in csv.DictReader(file)
        ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tmp_path_factory.mktemp("whole")


@pytest.mark.parametrize("trainer", ["cpu", pytest.param("cpu_ddp", marks=pytest.mark.slow)])
def test_stopped_and_resumed_is_the_same(attnkit, hers, whole, trainer):
    _check_resumed(attnkit, hers, [*JOB, f"trainer={trainer}"], 14, whole / trainer)


@pytest.mark.slow
def test_captioning_stopped_and_resumed_is_the_same(attnkit, hers, whole):
    """With hard attention, which draws a position for each word, and sentences that are drawn."""
    _check_resumed(attnkit, hers, [*CAPTIONS, "trainer=cpu"], 14, whole / "captions")


def _check_resumed(attnkit, hers, job, stop, reference):
    if not reference.exists():
        done = attnkit(*job, f"run_dir={reference}")
        assert done.code == 0, done.err
    stopper = ["+callbacks.killer._target_=mine_of_the_tests.StopAt"]
    stopper += [f"+callbacks.killer.batch={stop}"]
    done = attnkit("--config-dir", hers, *job, *stopper, "run_dir=here")
    assert done.code == 143, done.err
    assert f"attnkit resume={Path('here').absolute()}" in done.err
    assert (
        not (Path("here") / "results.json").exists()
        or "num_seeds" not in (Path("here") / "results.json").read_text()
    )
    done = attnkit("--config-dir", hers, "resume=here")
    assert done.code == 0, done.err
    expected, found = saved(reference), saved("here")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert rows("here") == rows(reference)


@pytest.mark.slow
def test_the_default_job_killed_after_its_first_epoch_ends_as_if_it_were_not(start, hers):
    """Nothing is smaller than it is shipped but the number of epochs; each part in a process of its
    own, since the computing of one may depend on what was computed in it before."""
    job = ["task=vit", "trainer.max_epochs=3"]
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    killer = ["+callbacks.killer._target_=mine_of_the_tests.KillAt", "+callbacks.killer.epoch=1"]
    whole = start(*job, "run_dir=whole", **no_gpu).done(900)
    assert whole.code == 0, whole.err
    killed = start("--config-dir", hers, *job, *killer, "run_dir=here", **no_gpu).done(900)
    assert killed.code == -signal.SIGKILL, killed.err
    assert load(Path("here/checkpoints/last.ckpt"))["epoch"] == 0
    resumed = start("resume=here", "callbacks.killer=null", **no_gpu).done(900)
    assert resumed.code == 0, resumed.err
    expected, found = (load(Path(run, "checkpoints", "last.ckpt")) for run in ("whole", "here"))
    assert expected["global_step"] == found["global_step"]
    pairs = expected["state_dict"], found["state_dict"]
    assert pairs[0].keys() == pairs[1].keys()
    assert [
        name for name, tensor in pairs[0].items() if not torch.equal(tensor, pairs[1][name])
    ] == []
    assert rows("whole") == rows("here")


def test_a_broken_newest_checkpoint_is_named_and_the_one_before_used(attnkit, refused, hers):
    stopper = ["+callbacks.killer._target_=mine_of_the_tests.StopAt", "+callbacks.killer.batch=14"]
    done = attnkit("--config-dir", hers, *JOB, "trainer=cpu", *stopper, "run_dir=here")
    assert done.code == 143, done.err
    last = Path("here/checkpoints/last.ckpt")
    data = bytearray(last.read_bytes())
    data[len(data) // 2] ^= 1
    last.write_bytes(data)
    done = attnkit("--config-dir", hers, "resume=here", "callbacks.killer=null")
    assert done.code == 0, done.err
    text = Path("here/run.log").read_text()
    assert f"{last.absolute()}: no intact checkpoint" in text
    assert f"going on from {Path('here/checkpoints/best.ckpt').absolute()}" in text
    assert load(last)["global_step"] == 12

    for path in Path("here/checkpoints").iterdir():
        path.write_bytes(b"")
    refused("no intact checkpoint", "--config-dir", hers, "resume=here", "trainer.max_epochs=5")
