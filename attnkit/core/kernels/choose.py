"""The kernels: what each can do, in which order they are preferred, and how they are run."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from torch import Tensor

from attnkit.core.check import check_inputs
from attnkit.core.inputs import Inputs
from attnkit.core.kernels.base import Backend
from attnkit.core.kernels.block_sparse import BlockSparse
from attnkit.core.kernels.blockwise import Blockwise
from attnkit.core.kernels.delta_rule import DeltaRuleKernel
from attnkit.core.kernels.edges.edges import EdgesKernel
from attnkit.core.kernels.edges.numba import NumbaEdgesKernel
from attnkit.core.kernels.edges.triton import TritonEdgesKernel
from attnkit.core.kernels.flex import Flex
from attnkit.core.kernels.hard import HardKernel
from attnkit.core.kernels.linear import LinearKernel
from attnkit.core.kernels.reference import Reference
from attnkit.core.kernels.sdpa import Cudnn, Efficient, Flash, Math
from attnkit.core.kernels.varlen import VarlenKernel
from attnkit.core.masks.base import Mask
from attnkit.core.masks.kept import has_values
from attnkit.core.masks.plan import BlockCounts, QueryBlocks

PLANNED = 64  # queries and keys of the blocks that an explanation counts


class UnsupportedError(ValueError):
    """The requested backend cannot compute this attention; the message gives every reason."""


BACKENDS: tuple[Backend, ...] = (
    TritonEdgesKernel(),
    NumbaEdgesKernel(),
    EdgesKernel(),
    VarlenKernel(),
    BlockSparse(),
    Flex(),
    Cudnn(),
    Flash(),
    Efficient(),
    LinearKernel(),
    DeltaRuleKernel(),
    Blockwise(),
    HardKernel(),
    Math(),
    Reference(),
)
"""The kernels in order of preference; those that read a mask's own structure come first."""

_WITHOUT_MASK = tuple(backend for backend in BACKENDS if not backend.needs_mask)
_BY_NAME = {backend.name: backend for backend in BACKENDS}


def named_backend(name: str) -> Backend | None:
    """The backend of that name, None for "auto"; ValueError lists the names there are."""
    if name == "auto":
        return None
    if name not in _BY_NAME:
        raise ValueError(f"backend: expected 'auto' or one of {', '.join(_BY_NAME)}, got {name!r}")
    return _BY_NAME[name]


def choose_backend(inputs: Inputs, name: str = "auto") -> Backend:
    """The named backend, or the first that can serve the inputs and pays.

    UnsupportedError if a named one cannot, with every reason; ValueError for an unknown name.
    """
    backend = named_backend(name)
    if backend is None:
        for backend in _WITHOUT_MASK if inputs.mask is None else BACKENDS:
            if backend.serves(inputs) and backend.pays(inputs):
                return backend
        why = dict.fromkeys(reason for b in BACKENDS for reason in b.unsupported_reasons(inputs))
        raise UnsupportedError(f"no backend can serve this attention: {'; '.join(why)}")
    if not backend.serves(inputs):
        reasons = backend.unsupported_reasons(inputs)
        raise UnsupportedError(
            f"backend={name!r} cannot serve this attention: {'; '.join(reasons)}"
        )
    return backend


@dataclass(frozen=True)
class Explanation:
    """Per backend, in order of preference, why it cannot serve; `str()` is a table."""

    reasons: dict[str, list[str]]
    chosen: str | None
    """The backend that `backend="auto"` takes: the first that can and pays at these sizes. None:
    no backend can, and `attend` raises UnsupportedError."""
    count: Callable[[], BlockCounts] | None = None

    @property
    def blocks(self) -> BlockCounts | None:
        """How many blocks of PLANNED queries × PLANNED keys the mask fills, touches and leaves
        empty, for each batch item and head that it tells apart. It is counted when it is asked, for
        which a mask on a GPU is read. None without a mask, or where it has no values."""
        return None if self.count is None else self.count()

    def __str__(self) -> str:
        width = max(map(len, self.reasons))
        lines = [] if self.chosen else ["no backend can serve this attention"]
        for name, reasons in self.reasons.items():
            verdict = "; ".join(reasons) or ("chosen" if name == self.chosen else "can")
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
    """Tell which kernels can serve `attend(query, key, value, **options)`, and why others cannot.

    Takes all options of `attend` except `backend`, and computes nothing.

        print(attnkit.explain_backends(query, key, value, mask=attnkit.Causal(), dropout_p=0.1))
    """
    inputs = check_inputs(query, key, value, **options)
    reasons = {kernel.name: list(kernel.unsupported_reasons(inputs)) for kernel in BACKENDS}
    try:
        chosen = choose_backend(inputs).name
    except UnsupportedError:
        chosen = None
    count = None
    if inputs.mask is not None and has_values(inputs.query.device):
        count = partial(_count, inputs.mask, inputs.num_queries, inputs.num_keys)
    return Explanation(reasons, chosen, count)


def _count(mask: Mask, num_queries: int, num_keys: int) -> BlockCounts:
    blocks = QueryBlocks.of_size(PLANNED, num_queries, num_keys)
    return mask.plan(blocks).simplified().count(PLANNED)
