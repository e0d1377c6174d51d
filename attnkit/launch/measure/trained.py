"""What is trained of a model, and the memory that it saves against training all of it."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from attnkit.finetune.low_rank import merged
from attnkit.finetune.record import finetuned

MOST = 6  # groups that are named
MIB = 2**20


def trained_rows(module: LightningModule) -> Iterator[tuple[str, str]]:
    """Of a model that is trained in part: how, its share, and its groups of names."""
    total = sum(p.numel() for p in module.parameters())
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    if trained == total:
        return
    found = finetuned(module)
    method = f", finetune={found[2].method}" if found else ""
    yield "share that is trained", f"{trained / total:.2%} of {total:,}{method}"
    groups: Counter[str] = Counter()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            groups[_group(name)] += parameter.numel()
    named = [f"{name}  {count:,}" for name, count in groups.most_common(MOST)]
    if len(groups) > MOST:
        rest = sum(count for _, count in groups.most_common()[MOST:])
        named.append(f"{len(groups) - MOST} more  {rest:,}")
    yield "trained", "\n".join(named)


def memory_rows(
    module: LightningModule, optimizers: list[Optimizer], step: Callable[[], Any]
) -> Iterator[tuple[str, str]]:
    """What is kept for the backward, and gradients and optimizer state, against full training.

    Args:
        module: trained in part.
        optimizers: its optimizers, after a step.
        step: what computes a loss.
    """
    parameters = list(module.parameters())
    if all(parameter.requires_grad for parameter in parameters):
        return
    own, kept = _size(p for p in parameters if p.requires_grad), _kept(module, step)
    state = sum(_size(filter(_is_array, s.values())) for o in optimizers for s in o.state.values())
    each = 1 + state / max(1, own)  # of a parameter: gradient and state
    with merged(module), _all_trained(module):
        whole = _size(module.parameters()) * each + _kept(module, step)
    part = own * each + kept
    yield (
        "memory of a step beside the weights",
        f"{part / MIB:,.0f} MiB; {whole / MIB:,.0f} MiB with finetune=full",
    )


def _group(name: str) -> str:
    """The layers that a parameter is in, alike in all blocks."""
    name = re.sub(r"\.\d+(?=\.|$)", ".*", name.removeprefix("model."))
    layer, _, last = name.rpartition(".")
    if last.startswith("lora_"):
        return f"{layer} (LoRA)"
    return f"{layer or name} (bias)" if last == "bias" and layer else layer or name


def _kept(module: nn.Module, step: Callable[[], Any]) -> int:
    """Bytes of tensors that a step keeps for its backward, beside the weights and their sums."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in module.parameters()}
    sizes: dict[int, int] = {}
    alive = []

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # so that no other takes its place
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        step()
    return sum(sizes.values())


@contextmanager
def _all_trained(module: nn.Module) -> Iterator[None]:
    before = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    module.requires_grad_(True)
    try:
        yield
    finally:
        for parameter, was in before:
            parameter.requires_grad_(was)


def _is_array(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0  # not a count of steps


def _size(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
