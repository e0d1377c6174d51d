"""Checkpoint files: whole or not there, intact or refused, plain data only."""

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from attnkit.lightning import CheckpointError, RunError, SafeCheckpoints, UserError
from attnkit.lightning import VerifiedCheckpointIO as IO
from attnkit.lightning.files import replacing
from attnkit.lightning.resume.checkpoints import (
    check_writable,
    load,
    newest_intact,
    save,
)
from attnkit.lightning.resume.checkpoints import loaded as loaded_or_said


@pytest.fixture
def checkpoint():
    return {
        "state_dict": {"weight": torch.arange(257.0), "bias": torch.ones(3, dtype=torch.bfloat16)},
        "hyper_parameters": {"dim": 7, "names": ["a", "b"], "rate": 1e-3, "none": None},
    }


def equal(first, second):
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[k], second[k]) for k in first)
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


def loaded(path):
    found = load(path)
    found.pop("attnkit_digest", None)
    return found


def mutations(data, count):
    """The bytes of a file, damaged in `count` ways."""
    draw = random.Random(0)
    for _ in range(count):
        at, length = draw.randrange(len(data)), draw.randrange(1, 60)
        before, part, after = data[:at], data[at : at + length], data[at + length :]
        flipped = bytes([data[at] ^ 1 << draw.randrange(8)]) + part[1:]
        yield draw.choice(
            [
                ("bit", before + flipped + after),
                ("bytes", before + draw.randbytes(len(part)) + after),
                ("zeros", before + bytes(len(part)) + after),
                ("cut", before),
                ("head", data[length:]),
                ("more", data + draw.randbytes(draw.choice((1, 60, 5000)))),
                ("out", before + after),
                ("twice", before + part + part + after),
            ]
        )


def test_comes_back_for_us_and_for_torch(tmp_path, checkpoint):
    save(checkpoint, tmp_path / "new" / "a.ckpt")
    assert equal(loaded(tmp_path / "new" / "a.ckpt"), checkpoint)
    plain = torch.load(tmp_path / "new" / "a.ckpt", weights_only=True)
    assert equal(plain["state_dict"], checkpoint["state_dict"])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.ckpt"]
    torch.save(checkpoint, tmp_path / "plain.ckpt")
    assert equal(load(tmp_path / "plain.ckpt"), checkpoint)


@pytest.mark.parametrize("count", [300, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ours", [True, False], ids=["ours", "lightning"])
def test_damaged_files_have_one_error_and_are_never_loaded_wrong(tmp_path, checkpoint, ours, count):
    path = tmp_path / "a.ckpt"
    save(checkpoint, path) if ours else torch.save(checkpoint, path)
    messages = []
    for kind, data in mutations(path.read_bytes(), count):
        path.write_bytes(data)
        try:
            assert equal(loaded(path), checkpoint), kind
        except CheckpointError as error:
            messages.append(str(error))
    assert all(str(path) in message and "\n" not in message for message in messages)
    # what may load is damage to bytes that mean nothing: an archive's dates, its padding
    assert len(messages) > (0.97 if ours else 0.4) * count


def test_without_the_digest_it_is_refused(tmp_path, checkpoint):
    path = tmp_path / "a.ckpt"
    save(checkpoint, path)
    data = bytearray(path.read_bytes()[:-79])
    data[-2:] = b"\0\0"
    path.write_bytes(data)
    torch.load(path, weights_only=True)  # a good archive otherwise
    with pytest.raises(CheckpointError, match="its digest is missing"):
        load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "no intact checkpoint"),
        (b"hello", "no intact checkpoint"),
        ({"weight": torch.ones(3)}, "not a checkpoint: it has no state_dict"),
        ([1, 2], "not a checkpoint"),
        ("https://host/a.ckpt", "is a URL, expected a local path"),
        ("s3://b/a", "is a URL, expected a local path"),
        ("file:///a", "is a URL, expected a local path"),
    ],
    ids=str,
)
def test_what_is_no_checkpoint(tmp_path, content, message):
    path = content if isinstance(content, str) else tmp_path / "a.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, dict | list):
        torch.save(content, path)
    for read in (load, IO().load_checkpoint):
        with pytest.raises(CheckpointError, match=message):
            read(path)


def test_code_is_neither_saved_nor_loaded(tmp_path, checkpoint):
    save(checkpoint, tmp_path / "a.ckpt")
    with pytest.raises(UserError, match=r"pathlib.*Path in 'callbacks'"):
        save({**checkpoint, "callbacks": {"x": Path("here")}}, tmp_path / "a.ckpt")
    assert equal(loaded(tmp_path / "a.ckpt"), checkpoint)
    torch.save({**checkpoint, "x": Path("here")}, tmp_path / "b.ckpt")
    with pytest.raises(CheckpointError, match="it holds more than tensors and plain data"):
        load(tmp_path / "b.ckpt")
    with pytest.raises(UserError, match="weights_only=False would run code"):
        IO().load_checkpoint(tmp_path / "a.ckpt", weights_only=False)


def test_the_newest_intact_one(tmp_path, checkpoint):
    """The one of most steps, and of one step that of the last, whatever the times."""
    assert newest_intact(tmp_path) == (None, "", [])
    for age, (name, step) in enumerate([("last", 12), ("same", 12), ("best", 9), ("odd", 8)]):
        save({**checkpoint, "global_step": step}, tmp_path / f"{name}.ckpt")
        os.utime(tmp_path / f"{name}.ckpt", (10**9 + age, 10**9 + age))
    foreign = {key: value for key, value in checkpoint.items() if key != "global_step"}
    save(foreign, tmp_path / "foreign.ckpt")
    last = tmp_path / "last.ckpt"
    assert newest_intact(tmp_path) == (last, "step 12, the furthest of 5 checkpoints", [])
    last.write_bytes(last.read_bytes()[:-200])
    path, why, (error,) = newest_intact(tmp_path)
    assert (path, why) == (tmp_path / "same.ckpt", "step 12, the furthest of 5 checkpoints")
    assert str(last) in str(error)


def test_trainer_saves_tests_and_goes_on_with_them(small_net, loader, make_trainer, tmp_path):
    best = ModelCheckpoint(tmp_path / "c", monitor="val/loss", filename="best")
    options = {"callbacks": [SafeCheckpoints(), best], "enable_checkpointing": True}
    trainer = make_trainer(**options)
    trainer.fit(small_net(), loader, loader)
    load(best.best_model_path)
    trainer.test(small_net(), loader, ckpt_path="best", verbose=False)
    module = small_net.load_from_checkpoint(best.best_model_path, weights_only=True)
    assert torch.isfinite(module.head.weight).all()
    data = bytearray(Path(best.best_model_path).read_bytes())
    data[5000] ^= 1
    Path(best.best_model_path).write_bytes(data)
    with pytest.raises(CheckpointError, match="not what was saved"):
        make_trainer(**options).fit(small_net(), loader, loader, ckpt_path=best.best_model_path)


@pytest.mark.parametrize("how", ["moved", "copied"])
def test_a_moved_or_copied_folder_keeps_its_best(small_net, loader, make_trainer, tmp_path, how):
    class Worse(small_net):
        def validation_step(self, batch, batch_idx):
            self.log("val/loss", float(self.current_epoch))

    def fit(folder, epochs, resume=None):
        best = ModelCheckpoint(folder, monitor="val/loss", filename="{epoch}")
        last = ModelCheckpoint(folder, filename="last")
        trainer = make_trainer(
            callbacks=[SafeCheckpoints(), best, last], enable_checkpointing=True, max_epochs=epochs
        )
        trainer.fit(Worse(), loader, loader, ckpt_path=resume, weights_only=True)
        return best.best_model_path

    fit(tmp_path / "old", 2)
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    if how == "moved":
        shutil.rmtree(tmp_path / "old")
    best = fit(tmp_path / "new", 3, tmp_path / "new" / "last.ckpt")
    assert best == str(tmp_path / "new" / "epoch=0.ckpt")
    assert (tmp_path / "old").exists() == (how == "copied")


def test_only_torchs_own_error_says_that_weights_do_not_fit():
    wanted = torch.nn.Linear(2, 3)
    with pytest.raises(UserError, match=r"^ckpt: a\.ckpt does not fit the model\n  size"):
        loaded_or_said(lambda: wanted.load_state_dict(torch.nn.Linear(2, 2).state_dict()), "a.ckpt")

    class Other:
        def load_state_dict(self, state):
            raise RuntimeError("a state of another version")

    with pytest.raises(RuntimeError, match="a state of another version"):
        loaded_or_said(lambda: Other().load_state_dict({}), "a.ckpt")


def test_code_in_hyper_parameters_or_in_a_callbacks_state_is_named(
    small_net, loader, make_trainer, tmp_path
):
    class Hers(small_net):
        def __init__(self, where):
            super().__init__()
            self.save_hyperparameters()

    class Named(Callback):
        def state_dict(self):
            return {"where": Path("here")}

    def fit(net, *callbacks):
        callbacks = [SafeCheckpoints(), ModelCheckpoint(tmp_path), *callbacks]
        trainer = make_trainer(callbacks=callbacks, enable_checkpointing=True, max_epochs=1)
        trainer.fit(net, loader)

    with pytest.raises(UserError, match=r'hyper-parameter where: .*ignore=\["where"\]'):
        fit(Hers(Path("here")))
    with pytest.raises(UserError, match=r"Path in 'callbacks'"):
        fit(Hers("here"), Named())
    assert not list(tmp_path.glob("*.ckpt"))
    fit(Hers("here"))


def test_an_error_while_writing_leaves_the_file_before(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before")

    def interrupted():
        with replacing(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("nameless", [True, False])
def test_what_a_killed_process_left_is_removed_and_a_living_ones_is_not(
    tmp_path, monkeypatch, nameless
):
    """Also on file systems without nameless files."""
    if not nameless:
        monkeypatch.setattr("attnkit.core.operators.files._without_name", lambda folder: None)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name in (f".a.{dead.pid}", f".a.{os.getppid()}", ".a.txt"):
        (tmp_path / name).write_text("")
    with replacing(tmp_path / "a") as file:
        file.write(b"whole")
    assert {p.name for p in tmp_path.iterdir()} == {"a", f".a.{os.getppid()}", ".a.txt"}
    assert (tmp_path / "a").read_bytes() == b"whole"


@contextmanager
def small_disk(folder, kilobytes):
    """A file system of that size; skips the test where none can be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        pytest.skip("needs to mount a file system")
    if done.returncode:
        pytest.skip("needs to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("kilobytes", [0, 8, 16, 32])
def test_a_full_disk_leaves_the_one_before(tmp_path, checkpoint, kilobytes):
    big = {**checkpoint, "optimizer_states": [torch.zeros(100_000)]}
    with small_disk(tmp_path / "disk", 64 + kilobytes) as disk:
        save(checkpoint, disk / "a.ckpt")
        with pytest.raises(RunError) as error:
            save(big, disk / "a.ckpt")
        assert str(disk / "a.ckpt") in str(error.value)
        assert "No space left on device" in str(error.value)
        assert len(str(error.value).splitlines()) == 1
        assert equal(loaded(disk / "a.ckpt"), checkpoint)
        assert [path.name for path in disk.iterdir()] == ["a.ckpt"]


def test_the_temporary_folder_does_not_matter(tmp_path, checkpoint, monkeypatch):
    """Lightning's own saves pass through it; here it is full, and on another file system."""
    with small_disk(tmp_path / "disk", 16) as disk:
        with suppress(OSError):
            (disk / "filler").write_bytes(bytes(2**20))
        monkeypatch.setenv("TMPDIR", str(disk))
        monkeypatch.setattr(tempfile, "tempdir", None)
        for number in range(10):
            save({**checkpoint, "number": number}, tmp_path / "a.ckpt")
            assert loaded(tmp_path / "a.ckpt")["number"] == number


def _try_to_write(folder, said):
    """As an ordinary user; to root nothing is read-only."""
    os.chmod(folder, 0o555)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    for _ in range(10):
        for attempt in (
            lambda: save({"state_dict": {"weight": torch.zeros(3)}}, f"{folder}/a.ckpt"),
            lambda: check_writable(folder),
        ):
            try:
                attempt()
            except (RunError, UserError) as error:
                said.put((type(error).__name__, str(error)))
        assert load(f"{folder}/a.ckpt")["state_dict"]["weight"].sum() == 3
    said.put(None)


def test_a_read_only_folder_as_an_ordinary_user():
    with tempfile.TemporaryDirectory() as folder:
        save({"state_dict": {"weight": torch.ones(3)}}, f"{folder}/a.ckpt")
        forked = multiprocessing.get_context("fork")
        said = forked.SimpleQueue()
        process = forked.Process(target=_try_to_write, args=(folder, said))
        process.start()
        process.join(timeout=60)
        assert process.exitcode == 0
        path, found = f"{folder}/a.ckpt", list(iter(said.get, None))
    assert found == 10 * [
        ("RunError", f"{path}: can't be written: Permission denied; the one before is intact"),
        ("UserError", f"{folder}: can't be written to: Permission denied"),
    ]


SAVING = """
import sys, torch
from attnkit.lightning.resume.checkpoints import save
step = 0
weight = torch.arange(1_000_000.0)
print("ready", flush=True)
while True:
    step += 1
    print("begin", flush=True)
    save({"state_dict": {"weight": weight + step}, "global_step": step}, sys.argv[1])
    print(step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, 50])
def test_killed_at_any_moment(tmp_path, kills):
    """The newest of two saves is there and whole, and nothing else."""
    draw, path, lost = random.Random(0), tmp_path / "last.ckpt", 0
    for kill in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVING, path], stdout=subprocess.PIPE, text=True
        )
        done = 0
        saves = draw.randrange(2, 8)
        for line in process.stdout:
            done = int(line) if line.strip().isdigit() else done
            # from a save on, and 2 of 5 times right in the middle of one
            if done >= saves and (kill % 5 > 1 or line == "begin\n"):
                break
        time.sleep(draw.random() * 0.03)
        process.send_signal(signal.SIGKILL)
        rest = process.communicate()[0].split()
        done = max([done, *(int(word) for word in rest if word.isdigit())])
        found = load(path)
        assert found["global_step"] in (done, done + 1)
        assert torch.equal(
            found["state_dict"]["weight"], torch.arange(1_000_000.0) + found["global_step"]
        )
        # killed between naming and renaming it, the new file is whole; the next save removes it
        names = {p.name for p in tmp_path.iterdir()} - {"last.ckpt"}
        assert names <= {f".last.ckpt.{process.pid}"}
        assert all(load(tmp_path / name)["global_step"] >= done for name in names)
        save({"state_dict": {}}, path)
        assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]
        lost += found["global_step"] < done
    assert lost == 0
