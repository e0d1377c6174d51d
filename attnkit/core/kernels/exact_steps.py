"""The steps of sequences that are computed as if each were alone, for `attnkit.exact`.

A step's bits depend on how many queries and keys it has. `block_steps` cuts what is packed or
padded wherever a block of queries ends, here each sequence is cut as it would be by itself.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.core.inputs import Inputs
from attnkit.core.kernels.base import with_channels
from attnkit.core.kernels.block_steps import Lane, Task, lanes_of
from attnkit.core.masks.base import And, Mask
from attnkit.core.masks.edges import Edges
from attnkit.core.masks.kept import has_values
from attnkit.core.masks.sequences import Causal, Packed, Padding, Window
from attnkit.core.operators.precision import wide

EVERYWHERE = Window(None, None, "top_left")
ALIGNED = 64  # bytes: vectors of processors are no longer


def mask_reasons(inputs: Inputs) -> Iterator[str]:
    """Why the mask cannot be computed so that the bits of an item are its own."""
    if inputs.mask is None or not has_values(inputs.query.device):
        return
    cuts, inside = _taken_apart(inputs.mask)
    kinds = {type(leaf) for part in inside for leaf in _leaves(part)}
    if Edges in kinds:
        yield "cannot compute each node of Edges by itself"
    if len(cuts) > 1:
        yield "needs one Packed or one Padding, got several"
    elif cuts and not kinds <= {Causal, Window}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds - {Causal, Window}))
        yield f"needs Causal or Window beside Packed and Padding, got {names}"
    elif kinds & {Packed, Padding}:
        yield "needs Packed and Padding by themselves or in '&', got them in '|' or '~'"
    elif any(part.leading[0] > 1 for part in inside):
        yield "needs a mask that is the same for all items; Padding and Packed may differ"
    for cut in cuts:
        if not isinstance(cut, Padding):
            continue
        if inside and inputs.num_queries != inputs.num_keys:
            yield "needs as many queries as keys for Causal or Window beside Padding"
        if cut.lengths.dtype == torch.bool and (_starts(cut.lengths).sum(1) > 1).any():
            yield "needs the real keys of an item beside each other, got padding between them"


def _starts(real: Tensor) -> Tensor:
    """Where runs of real keys begin."""
    return real & ~F.pad(real, (1, 0))[:, :-1]


def _leaves(mask: Mask) -> Iterator[Mask]:
    parts = getattr(mask, "masks", None)
    if parts is None:
        yield mask
    for part in parts or ():
        yield from _leaves(part)


def _taken_apart(mask: Mask) -> tuple[list[Packed | Padding], list[Mask]]:
    """What says which sequences there are, and the masks within them."""
    cuts = [part for part in mask.parts if isinstance(part, Packed | Padding)]
    return cuts, [part for part in mask.parts if part not in cuts]


def exact_lanes(mask: Mask, num_queries: int, num_keys: int, width: int) -> list[Lane]:
    """`lanes_of` the mask, each of its sequences with the steps that it has alone."""
    cuts, parts = _taken_apart(mask)
    if not cuts:
        return lanes_of(mask, num_queries, num_keys, width)
    inside = And(tuple(parts)) if len(parts) > 1 else parts[0] if parts else EVERYWHERE

    @cache
    def alone(mask: Mask, num_queries: int, num_keys: int) -> tuple[Task, ...]:
        if not (num_queries and num_keys):
            return ()
        (lane,) = lanes_of(mask, num_queries, num_keys, width)
        return lane.tasks

    def placed(query: int, key: int, size: int, num_read: int) -> Iterator[Task]:
        """The tasks of a sequence whose first query and key are these."""
        for task in alone(inside, size, num_read):
            yield _moved(task, query, key, num_keys, num_read - size)

    (cut,) = cuts
    if isinstance(cut, Packed):
        tasks: list[Task] = []
        query = key = 0
        for size, num_read in zip(*cut.known_lengths, strict=True):
            tasks += placed(query, key, size, num_read)
            query, key = query + size, key + num_read
        return [Lane(None, None, tuple(tasks))]
    lanes = []
    for item, (first, end) in enumerate(_real(cut, num_keys)):
        if num_queries != num_keys:
            lanes.append(Lane(item, None, tuple(placed(0, first, num_queries, end - first))))
            continue
        tasks = [*placed(first, first, end - first, end - first)]
        for start, stop in ((0, first), (end, num_queries)):  # queries that are padding
            for task in alone(EVERYWHERE, stop - start, end - first):
                task = _moved(task, start, first, num_keys, None)
                if parts:  # these read the mask itself
                    steps = [replace(step, is_masked=True) for step in task.steps]
                    task = replace(task, steps=tuple(steps))
                tasks.append(task)
        lanes.append(Lane(item, None, tuple(tasks)))
    return lanes


def _real(padding: Padding, num_keys: int) -> Iterator[tuple[int, int]]:
    """The first of each item's keys that is not padding, and the first behind these."""
    for length in padding.lengths.tolist():
        if isinstance(length, list):
            first = length.index(True) if True in length else 0
            yield first, first + sum(length)
        else:
            yield 0, min(max(length, 0), num_keys)


def _moved(task: Task, query: int, key: int, num_keys: int, name: int | None) -> Task:
    """The task so many queries and keys further. Its steps are alike with those of the same name;
    with no others if there is none."""
    assert isinstance(task.queries, slice)
    steps = [
        replace(
            step,
            runs=tuple((first + key, size) for first, size in step.runs),
            likeness=None if name is None or step.likeness is None else (*step.likeness, name),
        )
        for step in task.steps
    ]
    queries = slice(task.queries.start + query, task.queries.stop + query)
    return Task(queries, slice(0, num_keys), tuple(steps))


def laid_out(tensor: Tensor) -> Tensor:
    """The numbers [batch, heads, tokens, channels] one after the other, in the precision that sums
    are computed in, each token at an address that a vector may have: what matrix products do at
    other addresses, and of other strides, may end in other bits."""
    dtype = wide(tensor.dtype)
    at_once = ALIGNED // dtype.itemsize
    tensor = with_channels(tensor.to(dtype), -(-tensor.shape[3] // at_once) * at_once)
    _, heads, tokens, channels = tensor.shape
    in_order = heads * tokens * channels, tokens * channels, channels, 1
    if tensor.stride() == in_order and tensor.data_ptr() % ALIGNED == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
