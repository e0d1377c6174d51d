"""Export of a trained module: safe weights, and programs that need no attnkit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

import torch
from lightning import LightningModule

from attnkit.finetune.adapter import save_adapter
from attnkit.finetune.lora_linear import merged
from attnkit.finetune.record import finetuned
from attnkit.lightning.errors import UserError, first_line
from attnkit.lightning.export.exported import CONFIG, WEIGHTS, load, write_config, write_weights
from attnkit.lightning.export.program import Program, check_onnx, write_onnx, write_torch_export
from attnkit.lightning.resume.checkpoints import CheckpointError

ADAPTER = "adapter.safetensors"
Format = Literal["safetensors", "torch_export", "onnx"]
_WRITERS: dict[str, tuple[str, Callable[..., float]]] = {
    "torch_export": (".pt2", write_torch_export),
    "onnx": (".onnx", write_onnx),
}


@dataclass
class Written:
    """The result of an export."""

    files: list[Path] = field(default_factory=list)
    differences: dict[str, float] = field(default_factory=dict)
    """For the file of each program, the largest difference of its outputs from the module's, over
    the largest of these or 1."""
    left_out: dict[str, str] = field(default_factory=dict)
    """For each format that was left out, the reason in a line."""


class Export:
    """Writes a trained module to a folder.

        weights.safetensors, config.json   for `attnkit.load`
        adapter.safetensors                for `attnkit.finetune.load_adapter`, if the model was
                                           fine-tuned in part
        model.pt2                          for `torch.export.load`
        model.onnx                         for onnxruntime and others; needs the extra `onnx`

    The programs are those of the module's method `programs()`, each with its named sizes (the
    batch, the nodes of a graph) left open. Files are read again and compared with the module:
    weights exactly, programs to 1e-5. The module is written as it is in evaluation, on the CPU, in
    the precision of its weights; LoRA's changes are merged into them. A module that its
    hyper-parameters do not build again, as after `insert_attention`, gives programs alone, unless
    "safetensors" is requested.

    Args:
        folder: output folder, created if it does not exist.
        formats: "safetensors", "torch_export", "onnx"; a format that the module does not allow is
            an error. None: all that it allows; `left_out` gives the reasons for the others.

    >>> Export("exported")(module).left_out
    {}
    """

    def __init__(self, folder: str | Path, formats: Sequence[Format] | None = None) -> None:
        for name in formats or ():
            if name not in get_args(Format):
                known = ", ".join(get_args(Format))
                raise ValueError(f"formats: expected some of {known}, got {name!r}")
        self.folder = Path(folder)
        self.formats = formats

    def __call__(self, module: LightningModule) -> Written:
        """Write the module, which is left in evaluation mode, and return the result.

        Raises:
            UserError: the folder is not empty, the module cannot be built again from its
                hyper-parameters and gives no program, or a requested format cannot be written. The
                folder is then as it was.
        """
        module.eval()
        written = Written()
        made = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        if any(not path.name.startswith(".") for path in self.folder.iterdir()):
            raise UserError(f"{self.folder} is not empty", key="export")
        try:
            with TemporaryDirectory(dir=self.folder, prefix=".") as beside:
                self._write(module, Path(beside), written)
                # config.json last: without it the folder is not an export.
                written.files = [path.replace(self.folder / path.name) for path in written.files]
        except BaseException:
            if made:
                self.folder.rmdir()
            raise
        return written

    def _write(self, module: LightningModule, folder: Path, written: Written) -> None:
        if (found := finetuned(module)) is not None and found[2].method != "full":
            written.files.append(save_adapter(module, folder / ADAPTER))
        with merged(module):
            self._write_module(module, folder, written)

    def _write_module(self, module: LightningModule, folder: Path, written: Written) -> None:
        described = self._write_programs(module, folder, written)
        facts: Mapping[str, Any] = {**getattr(module, "facts", dict)(), "programs": described}
        try:
            digest = write_weights(module, folder / WEIGHTS)
            write_config(module, folder / CONFIG, digest, **facts)
            _check_again(module, folder)
            written.files.append(folder / WEIGHTS)
        except UserError as error:
            # A program does not need a configuration that builds the network again.
            if not described or "safetensors" in (self.formats or ()):
                raise
            (folder / WEIGHTS).unlink(missing_ok=True)
            write_config(None, folder / CONFIG, **facts)
            written.left_out["safetensors"] = error.message.partition("\n")[0]
        written.files.append(folder / CONFIG)

    def _write_programs(
        self, module: LightningModule, folder: Path, written: Written
    ) -> dict[str, Any]:
        wanted = [name for name in _WRITERS if self.formats is None or name in self.formats]
        programs: Mapping[str, Program] = getattr(module, "programs", dict)() if wanted else {}
        described: dict[str, Any] = {}
        traced: dict[str, Any] = {}
        for kind in wanted:
            suffix, write = _WRITERS[kind]
            paths = {name: folder / f"{name}{suffix}" for name in programs}
            differences = {}
            try:
                if not programs:
                    raise UserError(f"{type(module).__name__} has no method programs()")
                if kind == "onnx":
                    check_onnx()  # before the network is traced, which takes long
                for name, program in programs.items():
                    if name not in traced:
                        traced[name] = program.trace()
                    differences[paths[name].name] = write(program, traced[name], paths[name])
            except Exception as error:  # exporters may raise any error
                for path in paths.values():
                    path.unlink(missing_ok=True)
                self._leave_out(kind, error, written)
                continue
            written.files += paths.values()
            written.differences.update(differences)
            for name, program in programs.items():
                node = described.setdefault(name, {"files": {}, **program.describe()})
                node["files"][kind] = paths[name].name
        return described

    def _leave_out(self, kind: str, error: Exception, written: Written) -> None:
        cause = error.message if isinstance(error, UserError) else _cause(error)
        if self.formats is not None:
            raise UserError(f"{kind}: {cause}", key="export") from error
        written.left_out[kind] = " ".join(cause.split())


def _check_again(module: LightningModule, folder: Path) -> None:
    """Load the export and compare: a class that ignores arguments would give another module."""
    try:
        again = load(folder).state_dict()
    except CheckpointError as error:
        message = f"{type(module).__name__} can't be built again: {error.message}"
        raise UserError(message, key="export") from error
    for name, tensor in module.state_dict().items():
        if not torch.equal(again[name], tensor.cpu().to(again[name].dtype)):
            raise UserError(f"{name} differs when the export is loaded again", key="export")


def _cause(error: Exception) -> str:
    """Return the innermost error that has a message, in a line."""
    cause = error
    while cause.__cause__ is not None and str(cause.__cause__).strip():
        cause = cause.__cause__  # type: ignore[assignment]
    return first_line(cause, named=True)
