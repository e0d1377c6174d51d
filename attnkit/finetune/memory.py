"""The trained parameters of a network, and the memory of a step beside the weights."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from attnkit.finetune.lora_linear import merged


def trained_layers(network: nn.Module) -> Counter[str]:
    """Return the number of trained parameters by layer; similar layers are counted together.

    Layers in a list share one name, such as `blocks.*.attention.in_proj`. LoRA's matrices and
    biases have entries of their own.
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
    """Return bytes of activations, gradients and optimizer state: now, and if all were trained.

    Args:
        network: a network that is trained in part.
        optimizers: its optimizers, after a step.
        step: function that computes a loss.
    """
    parameters = list(network.parameters())
    own, kept = _size(p for p in parameters if p.requires_grad), _kept(network, step)
    states = [value for o in optimizers for state in o.state.values() for value in state.values()]
    arrays = [value for value in states if isinstance(value, Tensor) and value.ndim > 0]
    of_each = 1 + _size(arrays) / max(1, own)  # gradient and state per byte
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
    """Return the bytes of tensors that a step keeps for its backward, beside the weights."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in network.parameters()}
    sizes: dict[int, int] = {}
    alive = []

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # so that no other takes its address
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        step()
    return sum(sizes.values())


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
