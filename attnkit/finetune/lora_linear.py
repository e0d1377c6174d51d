"""LoRA: low-rank changes of frozen weights, and merging them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from attnkit.core.arguments import share
from attnkit.core.operators.sparse import linear
from attnkit.finetune.layers import find_targets, head_of, is_below
from attnkit.finetune.methods import (
    FineTuned,
    check_new,
    check_rates,
    keep_batch_norms_in_evaluation,
    note,
    train_only,
    whole_number,
)


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
    layers = [layer for layer in model.modules() if "_apart" in layer.__dict__]
    if not layers:
        raise ValueError(f"unmerge: {type(model).__name__} has no merged layer")
    for layer in layers:
        LoRALinear.unmerge(layer)
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


class LoRALinear(nn.Linear):
    """A frozen linear layer that learns a change of rank r (Hu et al., LoRA, 2021).

        y = x Wᵀ + b + scale · drop(x) Aᵀ Bᵀ

    `adapt` turns an existing layer into one, and `merge` turns it into a plain one again; it stays
    the same object, and `weight` and `bias` stay in its `state_dict()`. The attribute `weight` is
    W + scale · B·A, with a gradient for A and B, so that code which reads a layer's weight instead
    of calling the layer is right as well.

    Without dropout, batches are multiplied by this sum, which costs one product instead of three;
    backward never computes the gradient of W. For few rows, three products are used.

    lora_A: [rank, in_features]
    lora_B: [rows, rank], for the adapted rows of W
    lora_scale, lora_dropout: numbers
    lora_rows: the adapted rows, as pairs of start and end; None: all
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float
    lora_dropout: float
    lora_rows: Sequence[tuple[int, int]] | None
    _plain: type[nn.Linear]

    @staticmethod
    def adapt(
        layer: nn.Linear,
        rank: int,
        scale: float,
        dropout: float = 0.0,
        rows: Sequence[tuple[int, int]] | None = None,
    ) -> "LoRALinear":
        """Turn a linear layer into this class, in place; A is initialized as in torch, B zero."""
        weight = layer.weight
        weight.requires_grad_(False)
        if layer.bias is not None:
            layer.bias.requires_grad_(False)
        num_rows = len(weight) if rows is None else sum(end - start for start, end in rows)
        adapted: Any = layer
        adapted._plain = type(layer)
        adapted.__class__ = LoRALinear
        adapted.lora_A = nn.Parameter(weight.new_empty(rank, layer.in_features))
        adapted.lora_B = nn.Parameter(weight.new_zeros(num_rows, rank))
        nn.init.kaiming_uniform_(adapted.lora_A, a=math.sqrt(5))
        adapted.lora_scale, adapted.lora_dropout, adapted.lora_rows = scale, dropout, rows
        return adapted

    def reset_parameters(self) -> None:
        """Initialize W, b and A as torch's linear layer does, and B zero."""
        for matrix in (self.frozen_weight, self.lora_A):
            nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))
        if self.bias is not None:
            bound = self.in_features**-0.5
            nn.init.uniform_(self.bias, -bound, bound)
        nn.init.zeros_(self.lora_B)

    @property
    def weight(self) -> Any:
        """W + scale · B·A."""
        base = self._parameters["weight"]
        assert base is not None
        return _merged(base, self.lora_A, self._full_b(), self.lora_scale)

    @weight.setter
    def weight(self, value: Any) -> None:
        self._parameters["weight"] = value

    @property
    def frozen_weight(self) -> Tensor:
        """The frozen weight W alone."""
        base = self._parameters["weight"]
        assert base is not None
        return base

    def forward(self, input: Tensor) -> Tensor:
        if input.layout != torch.strided:
            return linear(input, self.weight, self.bias)
        base, full_b = self.frozen_weight, self._full_b()
        drops = self.training and self.lora_dropout > 0
        if not drops and _is_one_product(input, base):
            if not torch.is_grad_enabled():
                return F.linear(input, self.weight, self.bias)
            return _LowRank.apply(input, base, self.bias, self.lora_A, full_b, self.lora_scale)
        low = F.dropout(input, self.lora_dropout) if drops else input
        change = F.linear(F.linear(low, self.lora_A), full_b)
        return F.linear(input, base, self.bias) + self.lora_scale * change

    def merge(self) -> None:
        """Become a plain layer with the same outputs; `unmerge` restores this layer."""
        merged = nn.Parameter(self.weight.detach(), self.frozen_weight.requires_grad)
        kept = {"weight": self._parameters["weight"]}
        for name in ("lora_A", "lora_B"):
            kept[name] = self._parameters.pop(name)
        self._parameters["weight"] = merged
        self.__class__ = self._plain  # type: ignore[assignment]
        self._apart = kept

    @staticmethod
    def unmerge(layer: nn.Module) -> None:
        """Undo `merge`, exactly."""
        kept = layer.__dict__.pop("_apart")
        layer.__class__ = LoRALinear
        layer._parameters.update(kept)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={len(self.lora_A)}, scale={self.lora_scale:g}"

    def _full_b(self) -> Tensor:
        """Return B with a row of zeros for each row of W that is not adapted."""
        if self.lora_rows is None:
            return self.lora_B
        pieces, at, done = [], 0, 0
        for start, end in self.lora_rows:
            pieces += [self.lora_B.new_zeros(start - at, self.lora_B.shape[1])]
            pieces += [self.lora_B[done : done + end - start]]
            at, done = end, done + end - start
        pieces += [self.lora_B.new_zeros(self.out_features - at, self.lora_B.shape[1])]
        return torch.cat(pieces)


def _merged(base: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    return torch.addmm(base, up, down, alpha=scale)


def _is_one_product(tokens: Tensor, base: Tensor) -> bool:
    """Whether W + s·B·A is computed: not in low precision, which would round a change away."""
    num_rows = tokens.numel() // max(1, tokens.shape[-1])
    return (
        tokens.dtype == base.dtype
        and tokens.dtype in (torch.float32, torch.float64)
        and num_rows * sum(base.shape) >= base.numel()  # otherwise the sum costs most
        and not torch.is_autocast_enabled(tokens.device.type)
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


class _LowRank(torch.autograd.Function):
    """x (W + s·B·A)ᵀ + b, with gradients for x, b, A and B, and none for W."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        base: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(tokens, base, down, up)
        ctx.scale = scale
        return F.linear(tokens, _merged(base, down, up, scale), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        tokens, base, down, up = ctx.saved_tensors
        needs_tokens, _, needs_bias, needs_down, needs_up, _ = ctx.needs_input_grad
        rows = gradient.reshape(-1, len(base))
        inputs = tokens.reshape(len(rows), -1)
        of_tokens = of_bias = of_down = of_up = None
        if needs_tokens:
            of_tokens = gradient @ _merged(base, down, up, ctx.scale)
        if needs_bias:
            of_bias = rows.sum(dim=0)
        if needs_down:
            of_down = (rows @ (ctx.scale * up)).mT @ inputs
        if needs_up:
            of_up = rows.mT @ (inputs @ (ctx.scale * down).mT)
        return of_tokens, None, of_bias, of_down, of_up, None
