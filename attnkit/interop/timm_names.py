"""The names of timm's Vision Transformer parameters in attnkit's `ViT`."""

from collections.abc import Mapping

from torch import Tensor

from attnkit.interop.carry import State, renamed

_FROM_TIMM = {
    "patch_embed.proj.": "patch_embed.",
    "cls_token": "class_token",
    "reg_token": "registers",
    "norm_pre.": "embed_norm.",
    "fc_norm.": "pooled_norm.",
    ".norm1.": ".attention_norm.",
    ".attn.qkv.": ".attention.in_proj.",
    ".attn.q_norm.": ".attention.query_norm.",
    ".attn.k_norm.": ".attention.key_norm.",
    ".attn.proj.": ".attention.out_proj.",
    ".ls1.": ".attention_scale.",
    ".norm2.": ".mlp_norm.",
    ".ls2.": ".mlp_scale.",
    "attn_pool.latent": "pool.query",
    "attn_pool.proj.": "pool.attention.out_proj.",
    "attn_pool.norm.": "pool.norm.",
    "attn_pool.mlp.": "pool.mlp.",
}


def named_as_ours(theirs: Mapping[str, Tensor], *, prefix_has_positions: bool) -> State:
    """Return a state dict of timm's `VisionTransformer` as one of `ViT`, for the same images.

    Args:
        theirs: timm's state dict.
        prefix_has_positions: whether the class token and registers have positions too, as with
            timm's `no_embed_class=False`.
    """
    state = renamed(theirs, _FROM_TIMM)
    if "pos_embed" in state:
        # the position of a prefix token is added to that token alone, so it becomes part of it
        positions = state.pop("pos_embed")
        for name in ("class_token", "registers"):
            if name in state and prefix_has_positions:
                count = state[name].shape[1]
                state[name] = state[name] + positions[:, :count]
                positions = positions[:, count:]
        state["position_table"] = positions
    if "pool.query" in state:
        for kind in ("weight", "bias"):
            query, memory = (state.pop(f"attn_pool.{part}.{kind}") for part in ("q", "kv"))
            parts = zip(("query", "key", "value"), (query, *memory.chunk(2)), strict=True)
            state |= {f"pool.attention.{name}_proj.{kind}": part for name, part in parts}
    return state
