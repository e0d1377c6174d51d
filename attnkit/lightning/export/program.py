"""A network with described inputs as an exported and compared program: `torch.export` or ONNX.

An exported program needs neither attnkit nor Python's source: `torch.export.load` runs the first,
onnxruntime and others the second. Only named sizes stay open; the rest is fixed.
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
TOLERANCE = 1e-5  # largest difference of outputs, over their largest magnitude or 1

Shape = tuple[int | str, ...]


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
