"""Conversion of timm's, torchvision's and torch's attention to adapters of the shared block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from attnkit.core.masks.base import Mask
from attnkit.core.multihead import MultiHeadAttention
from attnkit.core.normalizers import Normalizer, learned_normalizer
from attnkit.core.scores.kinds import Score
from attnkit.core.scores.learned import learned_score
from attnkit.interop import from_torch
from attnkit.interop.conversion import has_hooks, joined, refuse
from attnkit.surgery import adapters, relative, towers
from attnkit.surgery.timm_forwards import FORWARDS, MIXING, OVER_CHANNELS, HeadAttention, Kept

_APART = (
    ("q_proj", "k_proj", "v_proj"),
    ("wq", "wk", "wv"),
    ("qk", "v"),
    ("q", "kv"),
    ("q", "k", "v"),
)
"""The names that networks give to projections in several modules."""
Block = TypeVar("Block", MultiHeadAttention, HeadAttention)
ScoreChange = str | Score | Callable[[int, int], nn.Module]


@dataclass(frozen=True)
class Changes:
    """The user's changes to the network's attention; None: unchanged."""

    mask: Mask | None = None
    score: ScoreChange | None = None
    normalizer: str | Normalizer | None = None
    backend: str = "auto"


def convert(module: nn.Module, changes: Changes) -> adapters.Adapter:
    """Return an adapter that can replace the module, with the module's own parameters.

    Raises:
        ValueError: the class is unknown here, or the module has what the block does not have.
    """
    if not is_known(module):
        name = _class_of(module).replace(":", ".")
        raise ValueError(f"{name} is not a class that is known here{towers.instead(module)}")
    refuse(module, {"hooks": any(map(has_hooks, module.modules()))})
    with torch.enable_grad():  # so that joined parameters know whether they are frozen
        adapter = _CONVERTERS.get(_class_of(module), _kept)(module, changes)
    theirs = set(module.modules())  # these keep their modes
    for part in adapter.modules():
        if part not in theirs:
            part.training = module.training
    return adapter


def is_known(module: nn.Module) -> bool:
    return _class_of(module) in _CONVERTERS.keys() | FORWARDS.keys()


def _class_of(module: nn.Module) -> str:
    return f"{type(module).__module__}:{type(module).__qualname__}"


def _block(
    module: Any,
    changes: Changes,
    *,
    weight: nn.Parameter | None = None,
    bias: nn.Parameter | None,
    dropout_p: float,
    score: nn.Module | None = None,
    norms_output: bool = True,
) -> MultiHeadAttention:
    """Return the block with the parameters of a module with a `proj` and a fused `qkv`, or with the
    `weight` of one. A `norm` of the module is refused unless `norms_output` is False: it then does
    not normalize the output."""
    proj, heads = module.proj, module.num_heads
    num_kv_heads = getattr(module, "num_kv_heads", heads)
    weight = module.qkv.weight if weight is None else weight
    head_dim = len(weight) // (heads + 2 * num_kv_heads)
    gate = getattr(module, "gate", None)
    linear = (getattr(module, name, None) for name in ("qkv", "gate", *chain(*_APART)))
    refuse(
        module,
        {
            "projections that are not plain nn.Linear": {type(proj), *map(type, linear)}
            - {nn.Linear, type(None)}
            != set(),
            "outputs that are not as wide as inputs": weight.shape[1] != proj.out_features,
            "a scale other than 1/√head_dim": getattr(module, "scale", head_dim**-0.5)
            != head_dim**-0.5,
            "a norm before the output projection": norms_output
            and not isinstance(getattr(module, "norm", nn.Identity()), nn.Identity),
        },
    )
    block = MultiHeadAttention(
        proj.out_features,
        heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        bias=bias is not None,
        dropout_p=dropout_p,
    ).to(weight)
    block.in_proj.weight = weight
    block.in_proj.register_parameter("bias", bias)
    block.out_proj, block.gate_proj = proj, gate
    block.query_norm = getattr(module, "q_norm", block.query_norm)
    block.key_norm = getattr(module, "k_norm", block.key_norm)
    if score is not None:
        block.score = score
    return changed(block, changes)


def changed(block: Block, changes: Changes, like: Tensor | None = None) -> Block:
    """Change the block's score, normalizer and backend, where requested, and return it; `like` is a
    parameter whose dtype and device the new ones get; None: the block's own."""
    if like is None:
        like = next(block.parameters())
    score: Any = changes.score
    if score is not None:
        if isinstance(score, nn.Module):
            raise TypeError(
                f"score: expected a name, a Score or a class such as attnkit.learned_scores."
                f"CosineScore, got the module {type(score).__name__} itself, which layers would "
                "share"
            )
        sizes = block.num_heads, block.head_dim
        is_factory = callable(score) and not isinstance(score, Score)
        score = learned_score(score(*sizes) if is_factory else score, *sizes)
        block.score = score.to(like)
    if changes.normalizer is not None:
        normalizer = learned_normalizer(changes.normalizer, block.num_heads, block.key_dim)
        block.normalizer = normalizer.to(like)
    block.backend = changes.backend
    return block


def _joined(*parts: Tensor) -> nn.Parameter:
    whole = joined(*parts)
    return nn.Parameter(whole.detach(), requires_grad=whole.requires_grad)


def _zeros(size: int, like: Tensor) -> Tensor:
    """Return zeros, frozen or not as `like` is."""
    return like.new_zeros(size, requires_grad=like.requires_grad)


def _whole_bias(module: Any) -> nn.Parameter | None:
    """Return the bias of a qkv projection whose keys have none, with 0 for them: a bias of keys
    never changes the weights of a dot product."""
    if module.q_bias is None:
        return None
    return _joined(module.q_bias, _zeros(len(module.q_bias), module.q_bias), module.v_bias)


def _apart(module: Any) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Return weight and bias of projections in several modules, joined as those of one."""
    names = next(names for names in _APART if all(hasattr(module, name) for name in names))
    parts = [getattr(module, name) for name in names]
    refuse(module, {"queries without a projection": isinstance(parts[0], nn.Identity)})
    biases = [p.bias for p in parts]
    given = next((bias for bias in biases if bias is not None), None)
    weight = _joined(*(linear.weight for linear in parts))
    if given is None:
        return weight, None
    filled = (_zeros(len(p.weight), given) if p.bias is None else p.bias for p in parts)
    return weight, _joined(*filled)


def _from_timm(module: Any, changes: Changes) -> adapters.Adapter:
    block = _block(module, changes, bias=module.qkv.bias, dropout_p=module.attn_drop.p)
    return adapters.Tokens(block, module.proj_drop, mask=changes.mask)


def _from_rotary(module: Any, changes: Changes) -> adapters.Adapter:
    weight, bias = None, None
    if module.qkv is None:
        weight, bias = _apart(module)
    else:
        bias = _whole_bias(module) if hasattr(module, "q_bias") else module.qkv.bias
    dropout_p = module.attn_drop.p
    return adapters.TokensWithRotary(
        _block(module, changes, weight=weight, bias=bias, dropout_p=dropout_p),
        module.proj_drop,
        num_prefix_tokens=module.num_prefix_tokens,
        rotate_half=getattr(module, "rotate_half", False),
        mask=changes.mask,
    )


def _from_apart(module: Any, changes: Changes) -> MultiHeadAttention:
    weight, bias = _apart(module)
    dim = module.proj.in_features
    refuse(module, {"keys that are not as wide as values": len(weight) != 3 * dim})
    dropout = getattr(module, "attn_drop", None)
    return _block(
        module,
        changes,
        weight=weight,
        bias=bias,
        dropout_p=0.0 if dropout is None else dropout.p,
        norms_output=False,
    )


def _from_davit(module: Any, changes: Changes) -> adapters.Adapter:
    block = _block(module, changes, bias=module.qkv.bias, dropout_p=0.0)
    return adapters.Tokens(block, nn.Identity(), mask=changes.mask)


def _from_tnt(module: Any, changes: Changes) -> adapters.Adapter:
    return adapters.Tokens(_from_apart(module, changes), module.proj_drop, mask=changes.mask)


def _from_first(module: Any, changes: Changes) -> adapters.Adapter:
    return adapters.FirstToken(_from_apart(module, changes), module.proj_drop, mask=changes.mask)


def _kept(module: Any, changes: Changes) -> adapters.Adapter:
    """Convert a module whose class keeps its forward, which then calls attnkit's attention."""
    forward = FORWARDS[_class_of(module)]
    num_heads = 1  # for one head, or heads that attend one after the other
    if not hasattr(module, "qkvs"):
        num_heads = _first(module, ("num_heads", "heads", "groups"), 1)
    head_dim = _first(module, ("head_dim", "dim_head", "key_dim"), None)
    if head_dim is None and hasattr(module, "scale"):
        head_dim = round(module.scale**-2)
    elif head_dim is None:
        head_dim = module.proj.out_features // num_heads
    like = next(module.parameters())
    block = changed(HeadAttention(num_heads, head_dim), changes, like)
    dropout = getattr(module, "attn_drop", None)
    learned = block.score.parameters() if isinstance(block.score, nn.Module) else ()
    refuse(
        module,
        {
            "a mask in attention over channels": forward in OVER_CHANNELS
            and changes.mask is not None,
            "a score with weights for head_dim in attention over channels, which are as wide as "
            "there are tokens": forward in OVER_CHANNELS
            and any(parameter.numel() > num_heads for parameter in learned),
            "a normalizer that reads tokens": isinstance(block.normalizer, nn.Module),
            "another mask or score where heads mix weights": forward in MIXING
            and (changes.mask, changes.score) != (None, None),
            "dropout of mixed weights": forward in MIXING and dropout is not None and dropout.p > 0,
        },
    )
    return Kept(block, module, forward, changes.mask)


def _first(module: nn.Module, names: Iterable[str], default: Any) -> Any:
    """Return the first of these attributes that exists."""
    return next((getattr(module, name) for name in names if hasattr(module, name)), default)


def _table(module: Any) -> relative.TableBias:
    return relative.TableBias(
        module.relative_position_bias_table, module.relative_position_index, module
    )


def _from_beit(module: Any, changes: Changes) -> adapters.Adapter:
    own = None
    if module.relative_position_bias_table is not None:
        own = _table(module)
    block = _block(module, changes, bias=_whole_bias(module), dropout_p=module.attn_drop.p)
    return adapters.TokensWithBias(
        block, module.proj_drop, own, adds_shared=True, mask=changes.mask
    )


def _from_relative(module: Any, changes: Changes) -> adapters.Adapter:
    own = None if module.rel_pos is None else relative.GivenBias(module.rel_pos)
    block = _block(module, changes, bias=module.qkv.bias, dropout_p=module.attn_drop.p)
    return adapters.TokensWithBias(
        block, module.proj_drop, own, adds_shared=False, mask=changes.mask
    )


def _from_swin(module: Any, changes: Changes) -> adapters.Adapter:
    own = _table(module)
    block = _block(module, changes, bias=module.qkv.bias, dropout_p=module.attn_drop.p)
    return adapters.Windows(block, module.proj_drop, own, changes.mask)


def _from_swin_v2(module: Any, changes: Changes) -> adapters.Adapter:
    own = relative.CoordinateBias(
        module.cpb_mlp, module.relative_coords_table, module.relative_position_index, module
    )
    block = _block(
        module,
        changes,
        bias=_whole_bias(module),
        dropout_p=module.attn_drop.p,
        score=relative.ClampedCosine(module.logit_scale),
    )
    return adapters.Windows(block, module.proj_drop, own, changes.mask)


def _square(module: Any) -> Tensor:
    """Return torchvision's flat index as [tokens, tokens]."""
    tokens = module.window_size[0] * module.window_size[1]
    return module.relative_position_index.view(tokens, tokens)


def _from_torchvision_swin(module: Any, changes: Changes) -> adapters.Adapter:
    own = relative.TableBias(module.relative_position_bias_table, _square(module))
    block = _block(module, changes, bias=module.qkv.bias, dropout_p=module.attention_dropout)
    return _map_windows(module, block, own, changes)


def _from_torchvision_swin_v2(module: Any, changes: Changes) -> adapters.Adapter:
    own = relative.CoordinateBias(module.cpb_mlp, module.relative_coords_table, _square(module))
    bias = module.qkv.bias
    if bias is not None:
        query, key, value = bias.chunk(3)
        bias = _joined(query, _zeros(len(key), key), value)  # as in each forward of torchvision's
    block = _block(
        module,
        changes,
        bias=bias,
        dropout_p=module.attention_dropout,
        score=relative.ClampedCosine(module.logit_scale),
    )
    return _map_windows(module, block, own, changes)


def _map_windows(
    module: Any, block: MultiHeadAttention, bias: nn.Module, changes: Changes
) -> adapters.Adapter:
    return adapters.MapWindows(
        block,
        nn.Dropout(module.dropout),
        bias,
        window=tuple(module.window_size),
        shift=tuple(module.shift_size),
        mask=changes.mask,
    )


def _from_torch(module: Any, changes: Changes) -> adapters.Adapter:
    block = from_torch(module)
    if block.is_fused:  # the parameters themselves, and not copies
        block.in_proj.weight, block.in_proj.bias = module.in_proj_weight, module.in_proj_bias
        block.out_proj.weight, block.out_proj.bias = module.out_proj.weight, module.out_proj.bias
    return adapters.QueryKeyValue(
        changed(block, changes),
        nn.Identity(),
        batch_first=module.batch_first,
        mask=changes.mask,
    )


_CONVERTERS: dict[str, Callable[[Any, Changes], adapters.Adapter]] = {
    "timm.layers.attention:Attention": _from_timm,
    "timm.layers.attention:AttentionRope": _from_rotary,
    "timm.models.eva:EvaAttention": _from_rotary,
    "timm.models.convit:MHSA": _from_timm,
    "timm.models.metaformer:Attention": _from_timm,
    "timm.models.davit:WindowAttention": _from_davit,
    "timm.models.tnt:Attention": _from_tnt,
    "timm.models.volo:ClassAttention": _from_first,
    "timm.models.crossvit:CrossAttention": _from_first,
    "timm.models.beit:Attention": _from_beit,
    "timm.models.vision_transformer_relpos:RelPosAttention": _from_relative,
    "timm.models.swin_transformer:WindowAttention": _from_swin,
    "timm.models.swin_transformer_v2:WindowAttention": _from_swin_v2,
    "torch.nn.modules.activation:MultiheadAttention": _from_torch,
    "torchvision.models.swin_transformer:ShiftedWindowAttention": _from_torchvision_swin,
    "torchvision.models.swin_transformer:ShiftedWindowAttentionV2": _from_torchvision_swin_v2,
    "transformers.models.swinv2.modeling_swinv2:Swinv2Attention": partial(
        towers.from_swin_v2, _from_apart
    ),
    "transformers.models.data2vec.modeling_data2vec_vision:Data2VecVisionAttention": partial(
        towers.from_data2vec, _from_apart
    ),
}
