"""Insertion of attention into a network, and its removal."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from attnkit import layers
from attnkit.core.names import nearest
from attnkit.core.operators.multiply_adds import count_multiply_adds
from attnkit.core.running import undisturbed
from attnkit.surgery.hooks import (
    AttendInput,
    AttendOutput,
    Guard,
    attach,
    detach_all,
    hooks_of,
    keep_apart,
)
from attnkit.surgery.places import Place, find_places

FEATURE_ATTENTION: dict[str, Callable[..., nn.Module]] = {
    "se": layers.SqueezeExcitation,
    "eca": layers.EfficientChannelAttention,
    "cbam": layers.CBAM,
    "bam": layers.BAM,
    "scse": layers.SCSE,
    "coordinate": layers.CoordinateAttention,
    "spatial": layers.SpatialAttention,
    "window": partial(layers.SpatialAttention, pattern="window"),
    "axial": partial(layers.SpatialAttention, pattern="axial"),
    "criss_cross": partial(layers.SpatialAttention, pattern="criss_cross"),
    "channel": layers.ChannelAttention,
    "xca": layers.CrossCovarianceAttention,
    "transposed": layers.TransposedAttention,
    "context": layers.ContextAttention,
    "danet": layers.DualAttention,
}


def make_feature_attention(
    attention: str | Callable[..., nn.Module], channels: int, **options: Any
) -> nn.Module:
    """Create attention over maps [batch, channels, height, width] that returns the same shape.

    Args:
        attention: a name of `FEATURE_ATTENTION`, a class, or any function from `channels` and
            options to a module.
        channels: channels of the maps.
        options: keyword arguments of the class; with a name, they override those it stands for.

    Raises:
        ValueError: an unknown name; the error lists the names and the nearest.
        TypeError: an option that the class does not have, or an `attention` of another type.
    """
    if isinstance(attention, str):
        attention = _named(attention)
    if isinstance(attention, nn.Module):
        raise TypeError(
            "attention: expected a name, a class or a function from channels to a module, got the "
            f"module {type(attention).__name__} itself; every place needs one of its own"
        )
    if not callable(attention):
        raise TypeError(
            "attention: expected a name, a class or a function from channels to a module, "
            f"got {attention!r}"
        )
    _check_options(attention, channels, options)
    made = attention(channels, **options)
    if not isinstance(made, nn.Module):
        raise TypeError(
            f"attention: expected a module from {_name_of(attention)}({channels}), "
            f"got {type(made).__name__}"
        )
    return made


def _named(name: str) -> Callable[..., nn.Module]:
    if name in FEATURE_ATTENTION:
        return FEATURE_ATTENTION[name]
    hint = nearest(name, FEATURE_ATTENTION)
    raise ValueError(
        f"attention: expected one of {', '.join(FEATURE_ATTENTION)}, got {name!r}{hint}"
    )


def _check_options(attention: Callable[..., Any], channels: int, options: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(attention)
    except (TypeError, ValueError):  # some built-in callables have none
        return
    try:
        signature.bind(channels, **options)
    except TypeError as error:
        known = [
            name
            for name, parameter in list(signature.parameters.items())[1:]
            if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        takes = f"takes {', '.join(known)}" if known else "takes no options"
        raise TypeError(f"{_name_of(attention)}: {error}; it {takes}") from None


def _name_of(attention: Callable[..., Any]) -> str:
    function = attention.func if isinstance(attention, partial) else attention
    return getattr(function, "__name__", type(function).__name__)


class IdentityStart(nn.Module):
    """y = x + γ (attention(x) − x), γ a number that begins at 0 and is learned.

    At first the output is exactly x, so that a pretrained network is unchanged and uses the
    attention as far as it helps (as ReZero, Bachlechner et al. 2021, which adds γ f(x); here γ =
    1 is the attention alone). γ has a gradient from the first step on, the attention from the
    second.
    """

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.gamma = nn.Parameter(torch.empty(1))  # one dimension: FSDP cannot shard scalars
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set γ to 0."""
        nn.init.zeros_(self.gamma)

    def forward(self, maps: Tensor) -> Tensor:
        """Return maps [batch, channels, height, width] of the same shape."""
        return maps + self.gamma.to(maps.dtype) * (self.attention(maps) - maps)


@dataclass(frozen=True)
class InsertedAttention:
    """One inserted module: its name in the network, where it acts, and its cost for an image."""

    name: str
    place: str
    channels: int
    height: int
    width: int
    parameters: int
    multiply_adds: int


@dataclass(frozen=True)
class Insertion:
    """The result of an insertion; `str()` is a table."""

    inserted: tuple[InsertedAttention, ...]

    @property
    def parameters(self) -> int:
        """The number of added parameters."""
        return sum(row.parameters for row in self.inserted)

    @property
    def multiply_adds(self) -> int:
        """The number of multiply-adds added for one image of the dry run's size."""
        return sum(row.multiply_adds for row in self.inserted)

    def __iter__(self) -> Iterator[InsertedAttention]:
        return iter(self.inserted)

    def __len__(self) -> int:
        return len(self.inserted)

    def __str__(self) -> str:
        header = ("module", "place", "channels", "map", "parameters", "multiply-adds")
        rows = [
            (
                row.name,
                row.place,
                f"{row.channels}",
                f"{row.height} × {row.width}",
                f"{row.parameters:,}",
                f"{row.multiply_adds:,}",
            )
            for row in self.inserted
        ]
        total = (f"{len(self)} modules", "", "", "", f"{self.parameters:,}")
        lines = [header, *rows, (*total, f"{self.multiply_adds:,}")]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if index < 2 else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )


def insert_attention(
    model: nn.Module,
    attention: str | Callable[..., nn.Module],
    where: str = "blocks",
    *,
    start_as_identity: bool = False,
    example: Annotated[Tensor, "batch channels height width"] | None = None,
    **options: Any,
) -> Insertion:
    """Insert attention over feature maps into a network, in place.

        report = attnkit.insert_attention(timm.create_model("resnet50"), "cbam")
        print(report)

    The network's modules keep their names, so that its state dicts load as before (with
    `strict=False`, since the attention's own entries are new). The attention becomes a child
    `attention` of the block, or of the module after which it acts (`attention_2`, … if that name is
    taken), and is called by a hook; copies, pickles and torch.compile work. Insert
    before the optimiser is made, before `torch.compile` and after `convert_sync_batchnorm`.

    | where      | attention acts                                                                |
    |------------|-------------------------------------------------------------------------------|
    | `"blocks"` | wherever a branch is added to its input, on the last map of the branch,       |
    |            | before a layer scale, stochastic depth and the addition                       |
    | `"stages"` | after the last block of each height × width, if no other path goes on there   |
    | a glob     | after each module of a matching name (`*` matches dots too) that gives a map  |

    Branches and stages are found by a dry run, in any network whose modules return maps
    [batch, channels, height, width], or [batch, height, width, channels], which are transposed for
    the attention. A block is a module in which the path from input to output divides and joins
    again (residual, inception, dense, …), or one of the same class or with another number in its
    name; in a network without any, a module that holds several with weights, or the last layer of
    the size. In an `nn.Sequential` without residual blocks, `"blocks"` are the children with a
    convolution inside and those that follow up to the next that changes the map's shape, such as a
    norm and an activation. If timm's `reparameterize_model` makes one layer of a module, as in
    MobileOne, attention goes after the module and not on its branches, and remains when it is
    merged. A change that would drop attention, such as merging a branch that a glob named, raises.

    The dry run is in evaluation mode; modes, buffers and random state are then as they were. For
    `"blocks"` and `"stages"` it takes the memory of a training step.

    Args:
        model: the network.
        attention: a name, a class, or any function from the number of channels to a module that
            returns maps of its input's shape; called once for each place.
        where: "blocks", "stages" or a glob over the names of `model.named_modules()`.
        start_as_identity: whether each module begins as x + γ (attention(x) − x) with γ = 0, a
            learned number: the network's output is exactly what it was before fine-tuning.
            Attention that begins as the identity by itself, as `SpatialAttention`, stays as it is.
        example: a batch for the dry run; None: one image of zeros, of the size that the model or
            its `pretrained_cfg` names, else 224 × 224, with the channels of its first convolution,
            else those of its `pretrained_cfg`, else 3.
        options: keyword arguments of the attention.

    Returns:
        A row for each inserted module, in the order in which they run, with its parameters and the
        multiply-adds it adds to an image (see `count_multiply_adds`), and the totals.

    Raises:
        ValueError: an unknown name or glob, with those near it; no block or stage; a module that
            runs several times in one pass; a place that has attention already; a map whose channels
            cannot be told from its height and width; an attention that changes the map's shape; a
            dry run that failed. The network is then unchanged.
        TypeError: options that the attention does not take.
    """
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise ValueError("model: is compiled; insert attention first, then compile")
    if "channels" in options:
        raise TypeError("channels: is found by the dry run for each place; leave it out")
    places = find_places(model, where, example)
    names = {id(module): name for name, module in model.named_modules()}
    for place in places:
        for hook in hooks_of(place.module):
            if isinstance(hook, AttendInput) == place.is_input:
                raise ValueError(
                    f"model: there is attention {place} already, {hook.name!r} of "
                    f"{names[id(hook.owner)] or 'the model'}; remove_attention takes it out"
                )
    made = [_make(place, attention, options, start_as_identity) for place in places]
    rows = []
    for place, (module, multiply_adds) in zip(places, made, strict=True):
        name = _insert(place, module)
        keep_apart(model, place.name)
        _, channels, height, width = place.map.shape
        full_name = f"{place.owner_name}.{name}" if place.owner_name else name
        parameters = sum(parameter.numel() for parameter in module.parameters())
        rows.append(
            InsertedAttention(
                full_name, str(place), channels, height, width, parameters, multiply_adds
            )
        )
    return Insertion(tuple(rows))


def remove_attention(model: nn.Module) -> list[str]:
    """Remove everything that `insert_attention` inserted, which restores the network.

    Returns:
        The names of the modules that were removed.

    Raises:
        ValueError: the network has no inserted attention.
    """
    names = {module: name for name, module in model.named_modules()}
    removed = []
    for owner, name in detach_all(model):
        delattr(owner, name)
        removed.append(f"{names[owner]}.{name}" if names.get(owner) else name)
    if not removed:
        raise ValueError(f"model: {type(model).__name__} has no inserted attention")
    return removed


def _make(
    place: Place,
    attention: str | Callable[..., nn.Module],
    options: dict[str, Any],
    start_as_identity: bool,
) -> tuple[nn.Module, int]:
    """Return the attention of a place, on the device of its map, and its multiply-adds."""
    module = make_feature_attention(attention, place.map.shape[1], **options)
    if start_as_identity and not _is_identity(module, place):
        module = IdentityStart(module)
    module.to(device=place.map.device, dtype=place.map.dtype).train(place.owner.training)
    image, outputs = place.map.zeros(), []
    handle = module.register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        multiply_adds = count_multiply_adds(module, image)
    finally:
        handle.remove()
    (output,) = outputs
    if not isinstance(output, Tensor) or output.shape != image.shape:
        given = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"attention: expected maps of the shape they came in, {list(image.shape)} {place}, "
            f"got {given}"
        )
    return module, multiply_adds


def _is_identity(module: nn.Module, place: Place) -> bool:
    """Whether a module begins as the identity by itself: with a zero γ of its own, another zero γ
    would leave both without a gradient."""
    _, channels, height, width = place.map.shape
    maps = torch.randn(1, channels, height, width, generator=torch.Generator().manual_seed(0))
    with undisturbed(module):
        output = module(maps)
    return isinstance(output, Tensor) and torch.equal(output, maps)


def _insert(place: Place, module: nn.Module) -> str:
    name, number = "attention", 1
    while hasattr(place.owner, name):
        number += 1
        name = f"attention_{number}"
    place.owner.add_module(name, module)
    kind = AttendInput if place.is_input else AttendOutput
    attach(place.module, kind(place.owner, name, channels_last=place.map.channels_last))
    children = {id(child): child_name for child_name, child in place.owner.named_children()}
    if id(place.module) in children:
        place.owner.register_forward_pre_hook(Guard(children[id(place.module)], name))
    return name
