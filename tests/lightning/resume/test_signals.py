"""Signals in a plain Trainer: the step ends, a checkpoint is there, the exit code is right."""

import os
import resource
import signal
import subprocess
import sys
import time

import pytest
import torch
from lightning import Callback
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from attnkit.lightning import EMA, SafeCheckpoints, SaveOnSignal, StoppedBySignal
from attnkit.lightning.resume.checkpoints import load
from attnkit.lightning.resume.signals import outlast_signals

SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 143}


class Sending(Callback):
    """Sends a signal to this process in the named hook of a given call."""

    def __init__(self, signum, hook, call=0, times=1):
        self.signum, self.left, self.times = signum, call, times
        setattr(self, hook, self.send)

    def send(self, *args, **kwargs):
        for _ in range(self.times if self.left == 0 else 0):
            os.kill(os.getpid(), self.signum)
        self.left -= 1


@pytest.fixture
def stopped(small_net, loader, make_trainer, tmp_path):
    """Train with a signal sent; the trainer, its module and the exception."""

    def run(sending, **options):
        callbacks = [SafeCheckpoints(), SaveOnSignal(tmp_path / "last.ckpt"), sending]
        trainer = make_trainer(
            callbacks=callbacks + options.pop("callbacks", []),
            enable_checkpointing=True,
            num_sanity_val_steps=0,
            **options,
        )
        module = small_net()
        with pytest.raises(StoppedBySignal) as error:
            trainer.fit(module, loader, loader)
        return trainer, module, error.value

    return run


@pytest.mark.parametrize(
    ("signum", "accumulate"),
    [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGUSR1, 1), (signal.SIGTERM, 2)],
)
def test_the_step_ends_and_is_saved(stopped, tmp_path, signum, accumulate):
    reached = []
    before = signal.signal(signum, lambda *args: reached.append(signum))
    sending = Sending(signum, "on_train_batch_start", call=2)
    trainer, module, error = stopped(sending, accumulate_grad_batches=accumulate)
    assert error.code == SIGNALS[signum]
    assert trainer.global_step == {1: 3, 2: 2}[accumulate]
    checkpoint = load(tmp_path / "last.ckpt")
    assert checkpoint["global_step"] == trainer.global_step
    assert torch.equal(checkpoint["state_dict"]["head.weight"], module.head.weight)
    os.kill(os.getpid(), signum)
    signal.signal(signum, before)
    assert reached == [signum]  # by the handler before, and only what came after the run


@pytest.mark.parametrize(
    ("hook", "call"),
    [
        ("on_train_batch_start", 4),  # the last of the epoch
        ("on_validation_batch_start", 2),
        ("on_validation_end", 0),
        ("on_train_epoch_end", 0),
    ],
)
def test_around_validation_it_waits_for_the_end_of_the_epoch(
    stopped, small_net, loader, make_trainer, tmp_path, hook, call
):
    trainer, _, _ = stopped(Sending(signal.SIGTERM, hook, call))
    assert trainer.global_step == 5
    assert load(tmp_path / "last.ckpt")["loops"]["fit_loop"]["epoch_progress"]["current"] == {
        "ready": 1, "started": 1, "processed": 1, "completed": 0,
    }  # fmt: skip
    # nothing of the epoch is done again, neither steps nor validation
    counted = {"val": 0}

    class Counting(Callback):
        def on_validation_start(self, *args):
            counted["val"] += 1

    again = make_trainer(callbacks=[Counting()], num_sanity_val_steps=0)
    again.fit(small_net(), loader, loader, ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert again.global_step == 10
    assert counted["val"] == 1


@pytest.mark.parametrize(("hook", "call"), [("on_train_epoch_end", 1), ("on_train_end", 0)])
def test_after_the_last_epoch_it_stops_as_well(stopped, tmp_path, hook, call):
    trainer, _, error = stopped(Sending(signal.SIGTERM, hook, call=call))
    assert trainer.global_step == 10
    assert error.code == 143
    assert load(tmp_path / "last.ckpt")["global_step"] == 10


@pytest.mark.parametrize(("echo", "step"), [(0.0, 2), (1.0, 3)])
def test_a_second_signal_stops_at_once_and_two_in_a_moment_are_one(
    stopped, tmp_path, monkeypatch, echo, step
):
    monkeypatch.setattr("attnkit.lightning.resume.stop_signals.ECHO", echo)
    trainer, _, _ = stopped(Sending(signal.SIGTERM, "on_train_batch_start", call=2, times=2))
    assert trainer.global_step == step
    assert (tmp_path / "last.ckpt").exists() == (step == 3)


def test_the_average_is_put_back_and_saved(stopped, tmp_path):
    sending = Sending(signal.SIGTERM, "on_validation_batch_start", call=2)
    _, module, _ = stopped(sending, callbacks=[EMA(0.5)])
    checkpoint = load(tmp_path / "last.ckpt")
    assert torch.equal(checkpoint["current_model_state"]["head.weight"], module.head.weight)
    assert not torch.equal(checkpoint["state_dict"]["head.weight"], module.head.weight)


@pytest.mark.parametrize("signum", SIGNALS)
def test_it_reaches_workers_too_which_go_on_and_end_with_it(
    small_net, digits, make_trainer, tmp_path, signum, monkeypatch
):
    """Terminals and batch systems tell every process, and the last step may still need batches.

    One of the workers is late: the signal comes before its `worker_init_fn`.
    """
    begun, sent, workers = tmp_path / "begun", tmp_path / "sent", []

    def wait_for(path):
        while not path.exists():
            time.sleep(0.01)

    def late():
        if sys._getframe(1).f_locals["worker_id"] == 1:
            begun.touch()
            wait_for(sent)

    monkeypatch.setattr(signal_handling, "_set_worker_signal_handlers", late)
    options = {"num_workers": 2, "persistent_workers": True}
    loader = DataLoader(digits, 11, worker_init_fn=outlast_signals, **options)

    class ToAll(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 0:
                wait_for(begun)
                workers.extend(w.pid for w in loader._iterator._workers)
                for pid in [*workers, os.getpid()]:
                    os.kill(pid, signum)
                sent.touch()

    trainer = make_trainer(
        callbacks=[SafeCheckpoints(), SaveOnSignal(tmp_path / "last.ckpt"), ToAll()],
        enable_checkpointing=True,
        accumulate_grad_batches=5,
    )
    with pytest.raises(StoppedBySignal):
        trainer.fit(small_net(), loader, DataLoader(digits, 11))
    assert trainer.fit_loop.total_batch_idx == 4
    assert load(tmp_path / "last.ckpt")["global_step"] == 1
    assert workers
    loader._iterator = None
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_a_worker_that_hangs_does_not_keep_the_process(tmp_path):
    """Forked while Python's own locks were held, it never gets to run a handler."""
    script = tmp_path / "hanging.py"
    script.write_text(HANGING)
    done = subprocess.run([sys.executable, script, tmp_path], timeout=60, check=False)
    assert done.returncode == 143


HANGING = """
import ctypes, multiprocessing, os, signal, sys
import torch
from lightning import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling
from attnkit.lightning import SaveOnSignal, StoppedBySignal

def hang():
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    while True:  # locked a second time: waits in C for ever, where no handler runs
        libc.pthread_mutex_lock(mutex)

class Module(LightningModule):
    def training_step(self, batch, batch_idx):
        multiprocessing.get_context("fork").Process(target=hang, daemon=True).start()
        os.kill(os.getpid(), signal.SIGTERM)
    def configure_optimizers(self):
        return None

trainer = Trainer(callbacks=[SaveOnSignal(sys.argv[1] + "/last.ckpt")], accelerator="cpu",
                  logger=False, enable_progress_bar=False, max_epochs=1)
try:
    trainer.fit(Module(), DataLoader(torch.zeros(9, 1)))
except StoppedBySignal as error:
    sys.exit(error.code)
"""


class Large(Dataset):
    """Its worker may not write files as large as its batches, as where /dev/shm is full."""

    def __len__(self):
        return 3

    def __getitem__(self, i):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
        return torch.zeros(2**16 if i else 3)


def test_a_batch_that_cannot_be_sent_is_an_error():
    loader = DataLoader(Large(), None, num_workers=1, worker_init_fn=outlast_signals, timeout=20)
    batches = iter(loader)
    assert next(batches).shape == (3,)
    with pytest.raises(RuntimeError, match=r"</torch_.*> to the right size"):
        next(batches)
