"""LoRA: low-rank changes of frozen weights, and merging them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnkit.core.arguments import share
from attnkit.finetune import lora_linear
from attnkit.finetune.lora_linear import LoRALinear
from attnkit.finetune.methods import check_rates, whole_number
from attnkit.finetune.order import head_of
from attnkit.finetune.record import (
    FineTuned,
    check_new,
    is_below,
    keep_batch_norms_in_evaluation,
    note,
    train_only,
)
from attnkit.finetune.targets import find_targets


def lora(
    model: nn.Module,
    rank: int = 8,
    *,
    alpha: float = 16.0,
    dropout: float = 0.0,
    targets: str | Sequence[str] = "attention",
    qkv: str = "qkv",
    train_head: bool = True,
    layer_decay: float | None = None,
    head_lr: float | None = None,
    head: str | None = None,
) -> nn.Module:
    """Train low-rank changes of frozen linear layers, W + (alpha / rank) · B·A, and the head.

    Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021. A begins random and B zero,
    so that the network's outputs are unchanged at first. A layer that holds queries, keys and
    values in one matrix has one A, as in Hugging Face's peft; loralib has one for each of them.

    Every `torch.nn.Linear` whose weight no other layer shares can be adapted, in timm's networks,
    attnkit's and others. Dropout stays as in full training; batch norms keep their running
    statistics. Evaluation uses the sum of both weights; `merge` turns the layers into plain ones.

    Args:
        model: the network, changed in place.
        rank: rank of B·A in each layer.
        alpha: the change is scaled by alpha / rank.
        dropout: dropout of the input of A, in training. With it a step takes longer, since the
            change is no matrix that could be added to W.
        targets: the layers: "attention", the projections of attention; "mlp"; "all", or globs of
            module names ("*.qkv", ["blocks.*.attn.proj", "*.fc1"]). The head is never adapted.
        qkv: which of queries, keys and values are adapted, "qv" for instance, in layers that hold
            all three and in those that hold one.
        train_head: whether the whole head is trained.
        layer_decay, head_lr, head: as in `full`.

    Returns:
        The model itself.

    Raises:
        ValueError: the model is fine-tuned already or has no such layers; a number is out of range.
    """
    check_new(model)
    whole_number(rank=rank)
    for name, value in {"alpha": alpha, "dropout": dropout}.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name}: expected a number, got {value!r}")
    if not 0 < alpha < float("inf"):
        raise ValueError(f"alpha: expected a positive number, got {alpha}")
    share(dropout=dropout)
    check_rates(layer_decay, head_lr)
    found = head_of(model, head)
    layers = find_targets(model, targets, found, qkv)
    for name, (layer, _) in layers.items():
        if rank > min(layer.weight.shape):
            wide = f"{layer.in_features} to {layer.out_features}"
            raise ValueError(f"rank: {rank} is more than {name} has, a layer of {wide} channels")
    train_only(model, lambda name: train_head and is_below(name, found))
    for layer, rows in layers.values():
        LoRALinear.adapt(layer, rank, alpha / rank, float(dropout), rows)
    keep_batch_norms_in_evaluation(model)
    options = {
        "rank": rank,
        "alpha": alpha,
        "dropout": dropout,
        "targets": targets if isinstance(targets, str) else list(targets),
        "qkv": qkv,
        "train_head": train_head,
        "head": head,
    }
    note(model, FineTuned("lora", found, options, layer_decay, head_lr))
    return model


def merge(model: nn.Module) -> nn.Module:
    """Turn every adapted layer into a plain one with the weight W + (alpha / rank) · B·A, in place.

    The outputs equal those in evaluation, up to rounding. The `state_dict()` has the keys of the
    base network again. `unmerge` restores the adapted layers exactly; until then they are kept
    aside.

    Raises:
        ValueError: there is nothing to merge.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, LoRALinear)]
    if not layers:
        raise ValueError(f"merge: {type(model).__name__} has no layer of LoRA's")
    for layer in layers:
        layer.merge()
    return model


def unmerge(model: nn.Module) -> nn.Module:
    """Undo `merge`, in place and exactly.

    Raises:
        ValueError: nothing is merged.
    """
    layers = [layer for layer in model.modules() if lora_linear.is_merged(layer)]
    if not layers:
        raise ValueError(f"unmerge: {type(model).__name__} has no merged layer")
    for layer in layers:
        lora_linear.unmerge(layer)
    return model


def merge_state_dict(
    state: Mapping[str, Tensor], *, rank: int = 8, alpha: float = 16.0, qkv: str = "qkv", **_: Any
) -> dict[str, Tensor]:
    """Return the state dict of a network with LoRA's changes merged into the weights.

    Args:
        state: `state_dict()` of a network to which `lora` was applied; others stay as they are.
        rank, alpha, qkv: as given to `lora`, whose other arguments are not needed.

    Raises:
        ValueError: the state dict was made with other values.
    """
    found = {name: tensor for name, tensor in state.items() if ".lora_" not in f".{name}"}
    for name in (name for name in state if name.endswith("lora_A")):
        layer = name.removesuffix("lora_A")
        weight, down, up = state[f"{layer}weight"], state[name], state[f"{layer}lora_B"]
        if (
            len(up) < len(weight)
            and len(weight) % 3 == 0
            and len(up) == len(weight) // 3 * len(qkv)
        ):
            parts = iter(up.split(len(weight) // 3))
            empty = torch.zeros_like(up[: len(weight) // 3])
            up = torch.cat([next(parts) if letter in qkv else empty for letter in "qkv"])
        if len(down) != rank or len(up) != len(weight):
            raise ValueError(
                f"{name}: its change is {list(up.shape)} · {list(down.shape)}, which "
                f"is not of rank {rank} in {qkv} of {list(weight.shape)}"
            )
        found[f"{layer}weight"] = torch.addmm(weight, up, down, alpha=alpha / rank)
    return found


@contextmanager
def merged(model: nn.Module) -> Iterator[nn.Module]:
    """Return a context in which the LoRA layers of a network, if it has any, are merged."""
    has_any = any(isinstance(layer, LoRALinear) for layer in model.modules())
    if has_any:
        merge(model)
    try:
        yield model
    finally:
        if has_any:
            unmerge(model)
