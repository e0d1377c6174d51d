"""Adapters: files of the trained parameters alone, and loading them into the base network."""

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from attnkit.finetune.lora_linear import lora
from attnkit.finetune.methods import bitfit, finetuned, full, head_only, last_blocks

METHODS: dict[str, Callable[..., nn.Module]] = {
    "full": full,
    "head": head_only,
    "last_blocks": last_blocks,
    "lora": lora,
    "bitfit": bitfit,
}
_FORMAT = "attnkit.adapter.1"


def save_adapter(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Write the trained tensors of a fine-tuned network, and its method, to a safetensors file.

    They are LoRA's matrices and the head, or what another method trained, with the buffers of those
    modules. The file does not contain the base network: `load_adapter` needs the network as it was
    before.

    Args:
        model: a network to which `lora` or another method was applied, or a module that holds one.
        path: path of the file, created or replaced.

    Raises:
        ValueError: the network is not fine-tuned, or none of its tensors is trained.
    """
    from safetensors.torch import save

    _, network, record = _found(model, "save_adapter")
    tensors = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in _trained(network).items()
    }
    if not tensors:
        raise ValueError(f"save_adapter: nothing of {type(network).__name__} is trained")
    about = {"method": record.method, "network": type(network).__name__, **record.options}
    data = save(tensors, {"format": _FORMAT, "finetune": json.dumps(about)})
    path = Path(path)
    path.write_bytes(data)
    return path


def load_adapter(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Load what `save_adapter` wrote into the base network, in place.

    Args:
        model: the network with the weights of the base; the method and options of the file are
            applied to it, unless they are already. A module that holds a fine-tuned one will do.
        path: path of the file. Nothing in it is run.

    Returns:
        The model itself.

    Raises:
        ValueError: the file does not exist, is not an adapter, or is for another network or method.
    """
    tensors, about = _read(path)
    method, network_name = about.pop("method"), about.pop("network", "another network")
    is_new = finetuned(model) is None
    outline = _outline(model) if is_new else model  # so that a refused file changes nothing
    if is_new:
        try:
            METHODS[method](outline, **about)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: made for another network: {error}") from error
    _, network, record = _found(outline, "load_adapter")
    if record.method != method:
        raise ValueError(f"{path}: made by {method}, but the network is set for {record.method}")
    own = _trained(network)
    for name in (*own, *tensors):
        if name not in tensors or name not in own or own[name].shape != tensors[name].shape:
            here, there = (_shape(side.get(name)) for side in (own, tensors))
            raise ValueError(
                f"{path}: made for another network, {network_name}: {name} is {there} in the file, "
                f"{here} here"
            )
    if is_new:
        METHODS[method](model, **about)
    own = _trained(_found(model, "load_adapter")[1])
    for name, tensor in tensors.items():
        own[name].data.copy_(tensor)
    return model


def _outline(model: nn.Module) -> nn.Module:
    """Return a copy without memory: its tensors are on the meta device."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(model, memo)


def _found(model: nn.Module, function: str) -> Any:
    found = finetuned(model)
    if found is None:
        raise ValueError(
            f"{function}: {type(model).__name__} is not fine-tuned; call lora(…) first"
        )
    return found


def _trained(network: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters by name, and the buffers of modules that have some."""
    tensors: dict[str, Tensor] = {}
    for prefix, module in network.named_modules():
        own = {name: p for name, p in module.named_parameters(recurse=False) if p.requires_grad}
        kept = {} if not own else dict(module.named_buffers(recurse=False))
        for name, tensor in {**own, **kept}.items():
            if name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}".lstrip(".")] = tensor
    return tensors


def _shape(tensor: Tensor | None) -> str:
    return "not there" if tensor is None else str(list(tensor.shape))


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ValueError(f"{path}: no adapter: save_adapter did not write it")
            about = json.loads(metadata["finetune"])
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
        reason = "no such file" if not Path(path).exists() else "no safetensors file"
        raise ValueError(f"{path}: no adapter: {reason}") from error
    if not isinstance(about, dict) or about.get("method") not in METHODS:
        raise ValueError(f"{path}: no adapter: it names no method of attnkit.finetune")
    return tensors, about
