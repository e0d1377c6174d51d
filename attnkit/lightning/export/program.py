"""A network with described inputs as an exported and compared program: `torch.export` or ONNX.

An exported program needs neither attnkit nor Python's source: `torch.export.load` runs the one,
onnxruntime and others the other. Only sizes that are named stay open; the rest is fixed.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from attnkit.core.contexts import shared
from attnkit.lightning.errors import UserError

ONNX_EXTRA = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-5  # of an exported program's outputs, over their largest magnitude or 1

Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class Program:
    """A network to export, and the description of its inputs.

    network: called with the inputs by position, gives one tensor.
    sample: what draws inputs of given sizes, called with those that are named in `inputs` as
        keywords: random tensors that are valid, by name in the order of the network's arguments.
    inputs: shape of each input; a string names a size that stays open ("batch").
    output: name and shape of the output.
    about: what each input and the output is, in words.
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
        """Inputs of these sizes, in the order of `sizes`; the same at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return tuple(self.sample(**dict(zip(self.sizes, sizes, strict=True))).values())

    def describe(self) -> dict[str, Any]:
        """As plain data: dtype, shape and meaning of each input and of the output."""
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
        """The network as a graph of torch's own operators."""
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
        """The largest difference of another form's outputs, over their largest magnitude or 1, at
        several sizes; an error if it is more than `TOLERANCE`."""
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
            if not apart <= TOLERANCE:  # a NaN is not
                raise ValueError(f"its outputs differ by {apart:.1e} from the network's")
            largest = max(largest, apart)
        return largest

    def _traced(self) -> list[int]:
        # none is 0 or 1, which torch.export takes for constants, and no two are equal
        return [2 + 3 * place for place, _ in enumerate(self.sizes)]


def write_torch_export(program: Program, exported: ExportedProgram, path: Path) -> float:
    """Write a program for `torch.export.load`; its largest difference from the network."""
    with _quiet():
        torch.export.save(exported, path)
        reloaded = torch.export.load(path).module()
    return program.difference(reloaded)


def check_onnx() -> None:
    """UserError if the extra `onnx` is not installed."""
    if missing := [name for name in ONNX_EXTRA if find_spec(name) is None]:
        needs = f"needs {', '.join(missing)}: not installed\n  pip install 'attnkit[onnx]'"
        raise UserError(needs, key="onnx")


def write_onnx(program: Program, exported: ExportedProgram, path: Path) -> float:
    """Write a program in ONNX's form; its largest difference from the network in onnxruntime."""
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
    """So that every network's inputs are seen as one list, whatever its arguments are called."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.network(*inputs)


def _quiet() -> contextlib.AbstractContextManager[None]:
    """Exporters print their steps and log their insides; what fails raises anyway."""
    return shared("exporters", _muted)


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        said = io.StringIO()
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
