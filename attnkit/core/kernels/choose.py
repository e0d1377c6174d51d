"""The choice of a kernel: the kernels in order of preference, and the explanation of the choice.

Findings in the ledger of this machine take precedence over the order (kernels/ledger.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Annotated

import torch
from torch import Tensor

from attnkit.core.inputs import Inputs, check_inputs
from attnkit.core.kernels import ledger
from attnkit.core.kernels.base import Backend
from attnkit.core.masks.base import Mask
from attnkit.core.masks.edges import Edges
from attnkit.core.masks.kept import has_values
from attnkit.core.masks.plan import BlockCounts, QueryBlocks
from attnkit.core.normalizers import DeltaRule, Hard, Linear, Normalizer, Softmax
from attnkit.core.operators.precision import EXACT

PLANNED = 64  # queries, and keys, of the blocks that an explanation counts


class UnsupportedError(ValueError):
    """Raised if the requested backend cannot compute an attention; the message has every reason."""


@dataclass(eq=False)
class Place:
    """The import path of a kernel, and the inputs for which its module is loaded.

    Args:
        home: module and class, relative to this package.
        mask: the type of mask without which "auto" never takes the kernel; None: it needs no mask.
        normalizer: the type of normalizer that the kernel computes.
        kernel: the kernel once it is loaded.
    """

    home: str
    mask: type[Mask] | None = None
    normalizer: type[Normalizer] = Softmax
    kernel: Backend | None = None

    def may_serve(self, inputs: Inputs) -> bool:
        """Return whether "auto" may take the kernel, so that its module has to be loaded."""
        is_masked = self.mask is None or isinstance(inputs.mask, self.mask)
        if not is_masked and self.mask is Mask:
            is_masked = bool(EXACT.get())  # an exact kernel is among these, also without a mask
        return is_masked and isinstance(inputs.normalizer, self.normalizer)


PLACES = {
    "edges_triton": Place("edges.triton.TritonEdgesKernel", mask=Edges),
    "edges_numba": Place("edges.numba.NumbaEdgesKernel", mask=Edges),
    "edges": Place("edges.edges.EdgesKernel", mask=Edges),
    "varlen": Place("varlen.VarlenKernel", mask=Mask),
    "block_sparse": Place("block_sparse.BlockSparse", mask=Mask),
    "flex": Place("flex.Flex", mask=Mask),
    "cudnn": Place("sdpa.Cudnn"),
    "flash": Place("sdpa.Flash"),
    "efficient": Place("sdpa.Efficient"),
    "linear": Place("linear.LinearKernel", normalizer=Linear),
    "delta_rule": Place("linear.DeltaRuleKernel", normalizer=DeltaRule),
    "blockwise": Place("reference.Blockwise"),
    "hard": Place("hard.HardKernel", normalizer=Hard),
    "math": Place("sdpa.Math"),
    "reference": Place("reference.Reference", normalizer=Normalizer),
}
"""The kernels in order of preference; those that read a mask's own structure come first."""

BACKENDS: tuple[Backend, ...]
"""The kernels in the order of `PLACES`. Reading this loads all of them."""


def __getattr__(name: str) -> tuple[Backend, ...]:
    if name != "BACKENDS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return tuple(map(_kernel, PLACES))


def _kernel(name: str) -> Backend:
    _load(name)
    kernel = PLACES[name].kernel
    assert kernel is not None
    return kernel


@torch.compiler.assume_constant_result  # runs while torch.compile traces, but is not traced
def _load(name: str) -> None:
    place = PLACES[name]
    if place.kernel is None:
        module, _, kind = place.home.rpartition(".")
        place.kernel = getattr(import_module(f"{__package__}.{module}"), kind)()


def named_backend(name: str) -> Backend | None:
    """Return the backend of that name, None for "auto"; raise ValueError for an unknown name."""
    if name == "auto":
        return None
    if name not in PLACES:
        raise ValueError(f"backend: expected 'auto' or one of {', '.join(PLACES)}, got {name!r}")
    return _kernel(name)


def choose_backend(inputs: Inputs, name: str = "auto") -> Backend:
    """Return the named backend, whatever the ledger says; for "auto" the first that supports the
    inputs, pays and is not wrong by the ledger, or one that the ledger knows to be faster.

    Raises:
        UnsupportedError: the named backend, or every backend, does not support the inputs.
        ValueError: the name is unknown.
    """
    backend = named_backend(name)
    if backend is None:
        wrong, timed = ledger.about(inputs)
        backend = _first(inputs, wrong)
        if backend is None:
            raise UnsupportedError(_why_none(inputs, wrong))
        for faster in () if timed is None else timed.faster_than(backend.name):
            if faster in PLACES and faster not in wrong and _kernel(faster).serves(inputs):
                return _kernel(faster)
        return backend
    if not backend.serves(inputs):
        reasons = backend.unsupported_reasons(inputs)
        raise UnsupportedError(
            f"backend={name!r} cannot serve this attention: {'; '.join(reasons)}"
        )
    return backend


def _first(inputs: Inputs, wrong: Sequence[str]) -> Backend | None:
    """Return the first kernel in order of preference that supports the inputs, pays and is not
    among the wrong ones."""
    for name, place in PLACES.items():
        if name not in wrong and place.may_serve(inputs):
            backend = _kernel(name)
            if backend.serves(inputs) and backend.pays(inputs):
                return backend
    return None


def _why_none(inputs: Inputs, wrong: Sequence[str]) -> str:
    found, where = _reasons(inputs), ""
    if EXACT.get():  # all other kernels have the same reason: they are not exact
        places = {name: PLACES[name] for name in found if _kernel(name).is_exact}
        of_others = None if isinstance(inputs.mask, Edges) else Edges
        found = {n: found[n] for n, place in places.items() if place.mask is not of_others}
        where = " inside attnkit.exact()"
    why = [reason for reasons in found.values() for reason in reasons]
    why += [f"{name} was found wrong here (attnkit doctor)" for name in wrong]
    return f"no backend can serve this attention{where}: {'; '.join(dict.fromkeys(why))}"


@dataclass(frozen=True)
class Explanation:
    """The reasons why backends cannot compute an attention, as a table by `str()`."""

    reasons: dict[str, list[str]]
    """For each backend, in order of preference, the reasons against it; empty if there are none."""
    chosen: str | None
    """The backend that `backend="auto"` takes: the first that can and pays at these sizes, unless
    the ledger knows better. None: no backend can, and `attend` raises UnsupportedError."""
    count: Callable[[], BlockCounts] | None = None
    remarks: dict[str, str] = field(default_factory=dict)
    """Findings of `attnkit doctor` on this machine: backends that "auto" skips because they were
    wrong, and the one that it takes because it was measured fastest."""

    @property
    def blocks(self) -> BlockCounts | None:
        """The numbers of blocks of PLANNED queries × PLANNED keys that the mask fills, touches and
        leaves empty, for each batch item and head if they differ. They are counted on access, which
        reads a mask on a GPU. None without a mask, or while it has no values."""
        return None if self.count is None else self.count()

    def __str__(self) -> str:
        width = max(map(len, self.reasons))
        lines = [] if self.chosen else ["no backend can serve this attention"]
        for name, reasons in self.reasons.items():
            notes = ["chosen"] if name == self.chosen else []
            notes += [self.remarks[name]] if name in self.remarks else []
            verdict = "; ".join(reasons) or ": ".join(notes) or "can"
            lines.append(f"{name:<{width}}  {verdict}")
        blocks = self.blocks
        if blocks is not None:
            lines.append(f"the mask in blocks of {PLANNED} × {PLANNED}: {blocks}")
        return "\n".join(lines)


def explain_backends(
    query: Annotated[Tensor, "batch heads queries head_dim"],
    key: Annotated[Tensor, "batch kv_heads keys head_dim"],
    value: Annotated[Tensor, "batch kv_heads keys value_dim"],
    **options,
) -> Explanation:
    """Explain which kernels can compute `attend(query, key, value, **options)`, and why others
    cannot.

    It takes all options of `attend` except `backend`, and computes no attention.

        print(attnkit.explain_backends(query, key, value, mask=attnkit.Causal(), dropout_p=0.1))
    """
    inputs = check_inputs(query, key, value, **options)
    reasons = _reasons(inputs)
    try:
        chosen = choose_backend(inputs).name
    except UnsupportedError:
        chosen = None
    wrong = ledger.known_of(inputs.query.device).wrong(ledger.kind_of(inputs))
    remarks = {name: str(finding) for name, finding in wrong.items()}
    first, (_, timed) = _first(inputs, tuple(wrong)), ledger.about(inputs)
    if chosen and timed and first and first.name != chosen:
        remarks[chosen] = timed.fastest(chosen, first.name)
    mask, count = inputs.mask, None
    if mask is not None and has_values(inputs.query.device):
        blocks = QueryBlocks.of_size(PLANNED, inputs.num_queries, inputs.num_keys)
        count = lambda: mask.plan(blocks).simplified().count(PLANNED)  # noqa: E731
    return Explanation(reasons, chosen, count, remarks)


def _reasons(inputs: Inputs) -> dict[str, list[str]]:
    return {name: list(_kernel(name).unsupported_reasons(inputs)) for name in PLACES}
