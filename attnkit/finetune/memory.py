"""What is trained of a network, and the memory that a step takes beside the weights."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from attnkit.finetune.low_rank import merged


def trained_layers(network: nn.Module) -> Counter[str]:
    """How many parameters are trained, by the name of their layer; alike layers are counted once.

    The name of a layer in a list is that of all in it: `blocks.*.attention.in_proj`. Those of LoRA
    and biases are told from the rest.
    """
    layers: Counter[str] = Counter()
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            layers[_layer(name)] += parameter.numel()
    return layers


def _layer(name: str) -> str:
    name = re.sub(r"\.\d+(?=\.|$)", ".*", name.removeprefix("model."))
    layer, _, last = name.rpartition(".")
    if last.startswith("lora_"):
        return f"{layer} (LoRA)"
    return f"{layer or name} (bias)" if last == "bias" and layer else layer or name


def memory_of_step(
    network: nn.Module, optimizers: Iterable[Optimizer], step: Callable[[], Any]
) -> tuple[float, float]:
    """Bytes of activations, gradients and optimizer state: as it is trained, and if all of it were.

    Args:
        network: trained in part.
        optimizers: its optimizers, after a step.
        step: computes a loss.
    """
    parameters = list(network.parameters())
    own, kept = _size(p for p in parameters if p.requires_grad), _kept(network, step)
    states = [value for o in optimizers for state in o.state.values() for value in state.values()]
    arrays = [value for value in states if isinstance(value, Tensor) and value.ndim > 0]
    of_each = 1 + _size(arrays) / max(1, own)  # of a parameter: gradient and state
    with merged(network):
        whole = list(network.parameters())
        before = [parameter.requires_grad for parameter in whole]
        network.requires_grad_(True)
        try:
            all_trained = _size(whole) * of_each + _kept(network, step)
        finally:
            for parameter, was in zip(whole, before, strict=True):
                parameter.requires_grad_(was)
    return own * of_each + kept, all_trained


def _kept(network: nn.Module, step: Callable[[], Any]) -> int:
    """Bytes of tensors that a step keeps for its backward, beside the weights and their sums."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in network.parameters()}
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


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
