"""Export of a trained module: safe weights, and programs for `torch.export` or ONNX.

An exported program needs neither attnkit nor Python's source: `torch.export.load` runs the first,
onnxruntime and others the second. Only named sizes stay open; the rest is fixed.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from attnkit.core.contexts import shared
from attnkit.finetune.adapter import save_adapter
from attnkit.finetune.lora_linear import merged
from attnkit.finetune.methods import finetuned
from attnkit.lightning.errors import UserError, first_line
from attnkit.lightning.exported import CONFIG, WEIGHTS, load, write_config, write_weights
from attnkit.lightning.resume.checkpoints import CheckpointError

ONNX_EXTRA = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-5  # largest difference of outputs, over their largest magnitude or 1

Shape = tuple[int | str, ...]
ADAPTER = "adapter.safetensors"
Format = Literal["safetensors", "torch_export", "onnx"]


@dataclass(frozen=True)
class Program:
    """A network to export, and the description of its inputs.

    network: takes the inputs by position and returns one tensor.
    sample: draws valid inputs of given sizes. It takes the sizes named in `inputs` as keywords and
        returns random tensors by name, in the order of the network's arguments.
    inputs: shape of each input; a string names a size that stays open ("batch").
    output: name and shape of the output.
    about: meaning of each input and of the output, in words.
    """

    network: nn.Module
    sample: Callable[..., Mapping[str, Tensor]]
    inputs: Mapping[str, Shape]
    output: tuple[str, Shape]
    about: Mapping[str, str]

    @property
    def sizes(self) -> list[str]:
        """The names of the sizes that stay open."""
        named = [size for shape in self.inputs.values() for size in shape if isinstance(size, str)]
        return list(dict.fromkeys(named))

    def draw(self, *sizes: int) -> tuple[Tensor, ...]:
        """Return inputs of these sizes, in the order of `sizes`; the same at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return tuple(self.sample(**dict(zip(self.sizes, sizes, strict=True))).values())

    def describe(self) -> dict[str, Any]:
        """Return dtype, shape and meaning of each input and of the output as plain data."""
        drawn = dict(zip(self.inputs, self.draw(*self._traced()), strict=True))
        inputs = {
            name: {
                "dtype": str(drawn[name].dtype).removeprefix("torch."),
                "shape": list(shape),
                "about": self.about[name],
            }
            for name, shape in self.inputs.items()
        }
        name, shape = self.output
        output = {"dtype": "float32", "shape": list(shape), "about": self.about[name]}
        return {"inputs": inputs, "outputs": {name: output}}

    def trace(self) -> ExportedProgram:
        """Return the network as a graph of torch's own operators."""
        dims = {size: Dim(size) for size in self.sizes}
        dynamic = tuple(
            {place: dims[size] for place, size in enumerate(shape) if isinstance(size, str)}
            for shape in self.inputs.values()
        )
        with torch.no_grad(), _quiet():
            inputs = self.draw(*self._traced())
            return torch.export.export(
                _Positional(self.network), inputs, dynamic_shapes=(dynamic,), strict=False
            )

    def difference(self, run: Callable[..., Tensor]) -> float:
        """Return the largest difference of another form's outputs, over their largest magnitude or
        1, at several sizes; raise ValueError if it is more than `TOLERANCE`."""
        largest = 0.0
        for number in (1, 3, 5):
            inputs = self.draw(*(number + 6 * place for place, _ in enumerate(self.sizes)))
            with torch.no_grad(), _quiet():
                wanted, found = self.network(*inputs), run(*inputs)
            if found.shape != wanted.shape:
                raise ValueError(
                    f"its output is {list(found.shape)}, expected {list(wanted.shape)}"
                )
            apart = float((found - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))
            if not apart <= TOLERANCE:  # true for NaN, too
                raise ValueError(f"its outputs differ by {apart:.1e} from the network's")
            largest = max(largest, apart)
        return largest

    def _traced(self) -> list[int]:
        # no size is 0 or 1, which torch.export takes for constants, and no two are equal
        return [2 + 3 * place for place, _ in enumerate(self.sizes)]


def write_torch_export(program: Program, exported: ExportedProgram, path: Path) -> float:
    """Write a program for `torch.export.load`; return its largest difference from the network."""
    with _quiet():
        torch.export.save(exported, path)
        reloaded = torch.export.load(path).module()
    return program.difference(reloaded)


def check_onnx() -> None:
    """Raise UserError if the extra `onnx` is not installed."""
    if missing := [name for name in ONNX_EXTRA if find_spec(name) is None]:
        needs = f"needs {', '.join(missing)}: not installed\n  pip install 'attnkit[onnx]'"
        raise UserError(needs, key="onnx")


def write_onnx(program: Program, exported: ExportedProgram, path: Path) -> float:
    """Write a program for ONNX; return its largest difference from the network in onnxruntime."""
    import onnxruntime

    with torch.no_grad(), _quiet():
        made = torch.onnx.export(
            exported,
            input_names=list(program.inputs),
            output_names=[program.output[0]],
            dynamo=True,
            verbose=False,
        )
        assert made is not None
        made.save(path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(*inputs: Tensor) -> Tensor:
        given = zip(program.inputs, inputs, strict=True)
        (output,) = session.run(None, {key: tensor.numpy() for key, tensor in given})
        return torch.from_numpy(output)

    return program.difference(run)


class _Positional(nn.Module):
    """A network that takes its inputs as one list, whatever its arguments are called."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.network(*inputs)


def _quiet() -> contextlib.AbstractContextManager[None]:
    """Return a context that mutes exporters, which print their steps; failures raise anyway."""
    return shared("exporters", _muted)


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        printed = io.StringIO()
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


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
