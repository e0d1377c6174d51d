"""Checkpoints that are written atomically, verified when read, and cannot run code.

The file is Lightning's own: a zip archive of torch's, which `torch.load` and `load_from_checkpoint`
read. Its digest is the archive's comment, at the very end: "attnkit sha256 " and the SHA-256, in
hexadecimal, of the file before the comment was added.
"""

import hashlib
import io
import math
import os
import re
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.serialization import get_unsafe_globals_in_checkpoint

from attnkit.lightning.errors import RunError, UserError, first_line
from attnkit.lightning.files import refuse_url, replacing

_LABEL = b"attnkit sha256 "
_COMMENT = len(_LABEL) + 64
_MARK = "attnkit_digest"  # in a checkpoint that has a digest, in case that is lost
_BLOCK = 2**20


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or would run code when loaded."""


def save(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint completely or not at all; an earlier file stays until it is written.

    Raises:
        UserError: it holds objects that are not plain data, so that it could not be read safely.
        RunError: the disk is full, the folder can't be written to, …
    """
    try:
        with replacing(path) as file:
            writer = _Digesting(file)
            try:
                torch.save({**checkpoint, _MARK: "sha256"}, cast("IO[bytes]", writer))
            except RuntimeError as error:  # torch's error lacks the reason
                raise writer.error or error from None
            file.seek(0)
            if unsafe := get_unsafe_globals_in_checkpoint(file):
                raise UserError(
                    f"{path}: can't be saved: {_objects(unsafe)} in {_where(checkpoint)}: only "
                    "tensors and\n  plain data are read back without running code"
                )
            file.seek(-2, os.SEEK_END)  # the last field of a zip archive: its comment's length
            file.write(_COMMENT.to_bytes(2, "little"))
            file.write(_LABEL + writer.sha256.hexdigest().encode())
    except OSError as error:
        reason = error.strerror or str(error)
        intact = "; the one before is intact" if os.path.exists(path) else ""
        raise RunError(f"{path}: can't be written: {reason}{intact}") from error


def load(
    path: str | os.PathLike[str],
    map_location: Callable[..., Any] | torch.device | str | dict[str, str] | None = "cpu",
    *,
    mmap: bool = False,
) -> dict[str, Any]:
    """Read a checkpoint after verifying that it is intact; only tensors and plain data are read.

    A checkpoint of attnkit must have its digest; others must be torch archives with right
    checksums.

    Args:
        path: a local file.
        map_location: as in `torch.load`.
        mmap: whether tensors stay on the disk until they are used.

    Raises:
        CheckpointError: names the file and what is wrong with it.
    """
    with _opened(path) as file:
        try:
            digest = _check(file)
            file.seek(0)
            source: Any = os.fspath(path) if mmap else file
            checkpoint = torch.load(source, map_location, weights_only=True, mmap=mmap)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        except Exception as error:  # torch, zipfile and pickle may raise any error
            raise CheckpointError(f"{path}: no intact checkpoint: {_reason(error)}") from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise CheckpointError(f"{path}: not a checkpoint: it has no state_dict")
    if _MARK in checkpoint and digest is None:
        raise CheckpointError(f"{path}: no intact checkpoint: its digest is missing")
    for key in ("hyper_parameters", "hparams", "module_arguments"):  # Lightning reads all three
        given = checkpoint.get(key) or {}
        if not isinstance(given, dict):
            raise CheckpointError(f"{path}: {key}: expected a mapping, got {type(given).__name__}")
        if "_instantiator" in given:
            raise CheckpointError(f"{path}: {key}: _instantiator: only its class builds a module")
    return checkpoint


class Newest(NamedTuple):
    """The result of `newest_intact`."""

    path: Path | None
    why: str
    """The step, and the number of checkpoints of which it is the newest, in words."""
    broken: list[CheckpointError]
    """The errors of checkpoints that may be newer."""


def newest_intact(folder: str | os.PathLike[str]) -> Newest:
    """Return the intact `*.ckpt` of a folder that was saved after the most steps.

    The files' times are wrong in a copy of the folder, and after a clock was set back. Of equal
    steps it is `last.ckpt`, from which a training continues exactly where it stopped; one of the
    best validation takes its epoch for finished.
    """
    broken: list[CheckpointError] = []
    steps = {path: _step(path) for path in Path(folder).glob("*.ckpt")}
    order = {path: (steps[path], path.stem == "last", path.stat().st_mtime_ns) for path in steps}
    for path in sorted(order, key=order.__getitem__, reverse=True):
        try:
            load(path, mmap=True)
        except CheckpointError as error:
            broken.append(error)
            continue
        many = f", the furthest of {len(steps)} checkpoints" if len(steps) > 1 else ""
        return Newest(path, f"step {steps[path]}{many}", broken)
    return Newest(None, "", broken)


class VerifiedCheckpointIO(TorchCheckpointIO):
    """Writes Lightning's checkpoint files whole or not at all, and verifies them when read.

    >>> trainer = Trainer(plugins=[VerifiedCheckpointIO()])
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        if storage_options is not None:
            raise TypeError("storage_options: not used by VerifiedCheckpointIO")
        save(checkpoint, path)

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        if weights_only is False:
            raise UserError(f"{path}: weights_only=False would run code that the file holds")
        return load(path, map_location)


class SafeCheckpoints(Callback):
    """Gives any Trainer `VerifiedCheckpointIO`, and checks at the start what would fail at the end.

    `fit` refuses a folder of a `ModelCheckpoint` that cannot be written to, and hyper-parameters
    that are not plain data, with which no checkpoint could be read back. A run that is resumed in a
    folder that was moved or copied finds its best checkpoint there.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = VerifiedCheckpointIO()
        if stage != "fit" or not trainer.is_global_zero:
            return
        for name, value in pl_module.hparams.items():
            if unsafe := _unsafe({name: value}):
                raise UserError(
                    f"hyper-parameter {name}: {_objects(unsafe)} can't be read back from a "
                    f'checkpoint; leave it out: save_hyperparameters(ignore=["{name}"])'
                )
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
                check_writable(callback.dirpath)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        states = checkpoint.get("callbacks", {})
        for callback in trainer.checkpoint_callbacks:
            state = states.get(callback.state_key) or {}
            old, new = state.get("dirpath"), getattr(callback, "dirpath", None)
            if old and new and old != str(new):
                moved = _moved(state, old, str(new))
                if os.path.isfile(moved.get("best_model_path", "")) or not os.path.isdir(old):
                    states[callback.state_key] = moved


def _step(path: Path) -> float:
    """Return the steps of a checkpoint; inf if it is unreadable, for which `load` has the error."""
    try:
        found = dict(torch.load(path, "cpu", weights_only=True, mmap=True))
        return int(found.get("global_step", -1))
    except Exception:
        return math.inf


def check_writable(folder: str | os.PathLike[str]) -> None:
    """Raise UserError if no file can be made in the folder, which is created if needed."""
    try:
        probe = Path(folder) / f".probe.{os.getpid()}"
        with replacing(probe) as file:
            file.write(b"x")
        probe.unlink()
    except OSError as error:
        raise UserError(f"{folder}: can't be written to: {error.strerror}") from error


class _Digesting(io.RawIOBase):
    """A writer that passes data on to a file and computes their digest."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self.file = file
        self.sha256 = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _moved(value: Any, old: str, new: str) -> Any:
    """Return the value with every path in the old folder moved to the new one."""
    if isinstance(value, dict):
        return {_moved(k, old, new): _moved(v, old, new) for k, v in value.items()}
    if isinstance(value, str) and (value == old or value.startswith(old + os.sep)):
        return new + value[len(old) :]
    return value


def _opened(path: str | os.PathLike[str]) -> IO[bytes]:
    refuse_url(path, "checkpoint", CheckpointError)
    try:
        return open(path, "rb")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error


def _check(file: IO[bytes]) -> str | None:
    """Return the verified digest; None without one, if the archive's checksums hold."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _COMMENT))
    comment = file.read()
    if comment.startswith(_LABEL):
        found = _digest(file, size - _COMMENT)
        if comment[len(_LABEL) :] != found.encode():
            raise CheckpointError("no intact checkpoint: its content is not what was saved")
        return found
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        if bad := archive.testzip():
            raise CheckpointError(f"no intact checkpoint: {bad} is damaged")
    return None


def _digest(file: IO[bytes], size: int) -> str:
    """Return SHA-256 of the first `size` bytes, with a 0 for the length of the comment."""
    sha256 = hashlib.sha256()
    file.seek(0)
    left = size - 2
    while left > 0 and (block := file.read(min(_BLOCK, left))):
        sha256.update(block)
        left -= len(block)
    sha256.update(b"\0\0")
    return sha256.hexdigest()


def _unsafe(value: Any) -> list[str]:
    """Return the classes and functions in a value that `weights_only` refuses to read."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:
        return [f"{type(error).__name__}: {_reason(error)}"]
    buffer.seek(0)
    return get_unsafe_globals_in_checkpoint(buffer)


def _where(checkpoint: dict[str, Any]) -> str:
    found = [key for key, value in checkpoint.items() if _unsafe({key: value})]
    return ", ".join(map(repr, found)) or "it"


def _objects(unsafe: list[str]) -> str:
    return ", ".join(sorted(unsafe)[:3])


def _reason(error: BaseException) -> str:
    text = str(error)  # torch 2.11 to 2.14 name the refused object only here
    if found := re.search(r"Unsupported \w+:? *[^\n]*?(?= was not an allowed|\. |\n|$)", text):
        return f"it holds more than tensors and plain data ({found[0][:200]})"
    return first_line(error).partition(". ")[0][:200]


def loaded(
    load: Callable[[], Any], ckpt: object, wrong: tuple[type[Exception], ...] = (KeyError,)
) -> Any:
    """Call a function that loads a checkpoint; raise `UserError` if it does not fit.

    Args:
        wrong: further errors that the function raises at a checkpoint of another kind.
    """
    try:
        return load()
    except RuntimeError as error:
        *_, (raised_in, _) = traceback.walk_tb(error.__traceback__)
        if raised_in.f_code is not torch.nn.Module.load_state_dict.__code__:
            raise
        lines = [line.strip() for line in str(error).splitlines()[1:] if line.strip()]
        raise UserError(f"ckpt: {ckpt} does not fit the model\n  {lines[0][:300]}") from error
    except wrong as error:
        problem = first_line(error, named=True)
        raise UserError(f"ckpt: {ckpt} is not a checkpoint of this task: {problem}") from error
