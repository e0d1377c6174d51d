"""Multi-head attention: project, split into heads, attend, merge."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, get_args

import torch
from torch import Tensor, nn

from attnkit.core.arguments import at_least, choice, divides, in_a_line, not_nested, share
from attnkit.core.attend import attend
from attnkit.core.cache import KeyValueCache
from attnkit.core.kernels.choose import named_backend
from attnkit.core.masks.base import Mask
from attnkit.core.normalizers import LearnedDeltaRule, Normalizer, Softmax, learned_normalizer
from attnkit.core.operators.precision import no_autocast
from attnkit.core.scores.kinds import Score
from attnkit.core.scores.learned import learned_score
from attnkit.core.weights import Indices, attention_weights


def reset_linear(layer: nn.Linear) -> None:
    """Initialize the layer with a Xavier-uniform matrix and a bias of 0."""
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def matrix_of(layer: nn.Module, rows: Tensor) -> Tensor:
    """Return the matrix [in, out] by which a layer without bias multiplies rows [rows, in].

    It is the layer's output for the unit vectors, not its weight, so that a hook, an adapter or
    another layer in its place is included; these must be linear, too.
    """
    dtype = next(layer.parameters(), rows).dtype
    with no_autocast(rows):
        return layer(torch.eye(rows.shape[-1], dtype=dtype, device=rows.device))


class Projections(nn.Module):
    """Base class of `MultiHeadAttention`, which documents the arguments: projects tokens to
    queries, keys and values as heads [batch, heads, tokens, head_dim], values with `value_head_dim`
    channels.

    Tokens may lack the batch, as the nodes of a graph do; then the heads lack it, too.

    By default there is one fused layer, `in_proj`. With `key_dim` or `value_dim`, for keys and
    values of other tokens, there are `query_proj`, `key_proj` and `value_proj`. With `qk_norm`
    queries and keys are layer-normalized per head. The layers are always called as modules, with
    all tokens, so that hooks, adapters and replacements see everything that they compute.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool = True,
        qk_norm: bool = False,
        norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        if norm_eps is not None and not qk_norm:
            raise ValueError(f"norm_eps: only qk_norm=True has one, got {norm_eps} without it")
        at_least(1, dim=dim, num_heads=num_heads, head_dim=head_dim, value_head_dim=value_head_dim)
        if head_dim is None:
            divides("num_heads", num_heads, dim=dim)
            head_dim = dim // num_heads
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        divides("num_kv_heads", num_kv_heads, num_heads=num_heads)
        self.dim = dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.value_head_dim = value_head_dim
        self.key_dim = dim if key_dim is None else key_dim
        self.value_dim = self.key_dim if value_dim is None else value_dim
        self.sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * value_head_dim]
        self.is_fused = key_dim is None and value_dim is None
        if self.is_fused:
            self.in_proj = nn.Linear(dim, sum(self.sizes), bias=bias)
        else:
            self.query_proj = nn.Linear(dim, self.sizes[0], bias=bias)
            self.key_proj = nn.Linear(self.key_dim, self.sizes[1], bias=bias)
            self.value_proj = nn.Linear(self.value_dim, self.sizes[2], bias=bias)
        eps = 1e-6 if norm_eps is None else norm_eps
        self.query_norm = nn.LayerNorm(head_dim, eps=eps) if qk_norm else nn.Identity()
        self.key_norm = nn.LayerNorm(head_dim, eps=eps) if qk_norm else nn.Identity()

    def reset_parameters(self) -> None:
        """Initialize each projection Xavier-uniform, as torch's module does; biases 0."""
        for name, module in self.named_children():
            if isinstance(module, nn.Linear):
                sizes = self.sizes if name == "in_proj" else [module.out_features]
                for weight in module.weight.split(sizes):
                    nn.init.xavier_uniform_(weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as heads."""
        if not (self.is_fused and query is key is value):
            return self.project_query(query), *self.project_memory(key, value)
        q, k, v = self._parts(query)
        return self._query_heads(q), self._key_heads(k), self._split(v, self.num_kv_heads)

    def project_query(self, query: Tensor) -> Tensor:
        """Return the queries only."""
        return self._query_heads(self._parts(query)[0] if self.is_fused else self.query_proj(query))

    def project_memory(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values only."""
        if self.is_fused:
            _, k, v = self._parts(key)
            v = v if value is key else self._parts(value)[2]
        else:
            k, v = self.key_proj(key), self.value_proj(value)
        return self._key_heads(k), self._split(v, self.num_kv_heads)

    def _parts(self, tokens: Tensor) -> Sequence[Tensor]:
        """Return the fused layer's channels of queries, keys and values.

        They are split along the last dimension, whose backward is one concatenation, in the layout
        that the matrix product reads fastest.
        """
        return self.in_proj(tokens).split(self.sizes, dim=-1)

    def _query_heads(self, q: Tensor) -> Tensor:
        return self.query_norm(self._split(q, self.num_heads))

    def _key_heads(self, k: Tensor) -> Tensor:
        return self.key_norm(self._split(k, self.num_kv_heads))

    def _split(self, projected: Tensor, heads: int) -> Tensor:
        """Return [tokens, heads · channels] as [heads, tokens, channels]."""
        return projected.unflatten(-1, (heads, -1)).transpose(-3, -2)


OutputGate = Literal["elementwise", "head"]

Positions = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function (query, key) -> (query, key) that encodes the positions of tokens, such as
`Rotary1d`."""


class MultiHeadAttention(Projections):
    """Multi-head attention (Vaswani et al., Attention Is All You Need, 2017).

        output = [head_1 … head_H] W_out,   head_h = attend(x W_q,h, y W_k,h, z W_v,h)

    Self-attention is `block(x)`, cross-attention `block(x, y)`. By default one fused projection
    gives queries, keys and values, so `block(x, y)` computes all three for x and for y. A block
    made for cross-attention is given `key_dim`: it has three separate projections and computes only
    what it needs. With fewer key/value heads than heads it is grouped-query attention (Ainslie et
    al. 2023). With `qk_norm` queries and keys are layer-normalized per head before the product
    (Dehghani et al. 2023). With `gate` each head is multiplied by sigmoid(x W_g) before W_out (Qiu
    et al., Gated Attention, 2025).

    Decoding step by step gives the same output as all tokens at once:

        cache = block.new_cache(batch=2, max_tokens=256)
        for token in tokens.split(1, dim=1):
            output = block(token, cache=cache)    # appends its key and value, reads all
        memory = block.remember(encoded)          # for cross-attention: projected once
        output = block(token, memory)

    Differences from torch's module: the batch always comes first; in a mask, True = may look; only
    the output is returned, always a tensor; a query that may look nowhere gets 0 before the output
    projection; training and evaluation use the same kernel.

    Args:
        dim: channels of the queries' input and of the output.
        num_heads: query heads.
        num_kv_heads: key/value heads, a divisor of `num_heads`; None: `num_heads`.
        head_dim: channels of a head; None: dim / num_heads.
        value_head_dim: channels of a head's values; None: `head_dim`.
        key_dim: channels of the keys' input; queries, keys and values then have separate
            projections. None: `dim`, with one fused projection.
        value_dim: channels of the values' input, also with separate projections; None: `key_dim`.
        bias: whether the input projections add a bias.
        out_bias: whether the output projection adds a bias.
        qk_norm: whether to normalize queries and keys.
        norm_eps: the epsilon of that normalization; None: 1e-6.
        score: a name: "scaled_dot", "dot", or, with parameters per head that the block learns,
            "general", "additive", "cosine" and "gaussian"; a `Score` without tensors, for a
            softcap; or a module whose `forward()` returns a `Score`, such as those of
            `attnkit.learned_scores`; the module becomes a submodule.
        normalizer: a name: "softmax", "hard", "linear", or "delta_rule", whose β the block learns;
            a `Normalizer`; or a module that maps the keys' tokens to a `Normalizer`. In evaluation
            "hard" takes the best key.
        gate: "elementwise": a gate for each channel; "head": a gate for each head; None: no gate.
        sink: whether to learn a sink for each head, as in `attend`, initially 0.
        dropout_p: the share of weights dropped in training; none in evaluation.
        backend: the kernel, as in `attend`.

    Raises:
        ValueError: sizes that do not divide or are not positive.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool = True,
        out_bias: bool = True,
        qk_norm: bool = False,
        norm_eps: float | None = None,
        score: str | Score | nn.Module = "scaled_dot",
        normalizer: str | Normalizer | nn.Module = "softmax",
        gate: OutputGate | None = None,
        sink: bool = False,
        dropout_p: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            key_dim=key_dim,
            value_dim=value_dim,
            bias=bias,
            qk_norm=qk_norm,
            norm_eps=norm_eps,
        )
        share(dropout_p=dropout_p)
        choice((*get_args(OutputGate), None), gate=gate)
        named_backend(backend)
        self.dropout_p = dropout_p
        self.backend = backend
        self.score = learned_score(score, num_heads, self.head_dim)
        self.normalizer = learned_normalizer(normalizer, num_heads, self.key_dim)
        self.gate_proj: nn.Linear | None = None
        if gate is not None:
            gates = num_heads if gate == "head" else num_heads * self.value_head_dim
            self.gate_proj = nn.Linear(dim, gates, bias=bias)
        self.out_proj = nn.Linear(num_heads * self.value_head_dim, dim, bias=out_bias)
        if not isinstance(sink, bool):
            raise TypeError(f"sink: expected True or False, got {in_a_line(sink)}")
        if (
            sink
            and isinstance(self.normalizer, Normalizer | LearnedDeltaRule)
            and not isinstance(self.normalizer, Softmax)
        ):
            raise ValueError(f"sink: expected softmax, to whose sums it is added, got {normalizer}")
        self.sink = nn.Parameter(torch.empty(num_heads)) if sink else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize each projection Xavier-uniform, as torch's module does; biases and sinks 0."""
        super().reset_parameters()
        if self.sink is not None:
            nn.init.zeros_(self.sink)

    def forward(
        self,
        query: Annotated[Tensor, "batch queries dim"],
        key: Annotated[Tensor, "batch keys key_dim"] | KeyValueCache | None = None,
        value: Annotated[Tensor, "batch keys value_dim"] | None = None,
        *,
        mask: Mask | Annotated[Tensor, "#batch #heads #queries #keys", bool] | None = None,
        bias: Annotated[Tensor, "#batch #heads #queries #keys"] | None = None,
        positions: Positions | None = None,
        cache: KeyValueCache | None = None,
    ) -> Annotated[Tensor, "batch queries dim"]:
        """Attend from the tokens of `query` to those of `key`.

        Args:
            query: the tokens that attend.
            key: the tokens attended to, or the cache that `remember` returned; None: `query`, which
                is self-attention.
            value: the tokens whose values are averaged; None: `key`.
            mask, bias: as in `attend`, over the new queries and all keys, cached ones included.
            positions: a function applied to the projected queries and keys,
                [batch, heads, tokens, head_dim], before keys go into the cache.
            cache: for self-attention only. The keys and values of these tokens are appended, and
                all cached ones are read. Several tokens at once need
                `mask=Causal("bottom_right")` to be causal.
        """
        heads, options = self._prepare(query, key, value, positions, cache, is_new=True)
        output = attend(
            *heads,
            **options,
            mask=mask,
            bias=bias,
            dropout_p=self.dropout_p if self.training else 0.0,
            backend=self.backend,
        )
        output = output.transpose(1, 2)
        if self.gate_proj is not None:
            output = output * self.gate_proj(query).sigmoid().unflatten(-1, (self.num_heads, -1))
        output = self.out_proj(output.flatten(2))
        if cache is not None:
            cache.num_tokens += query.shape[1]
        return output

    def attention_weights(
        self,
        query: Annotated[Tensor, "batch queries dim"],
        key: Annotated[Tensor, "batch keys key_dim"] | KeyValueCache | None = None,
        value: Annotated[Tensor, "batch keys value_dim"] | None = None,
        *,
        mask: Mask | Annotated[Tensor, "#batch #heads #queries #keys", bool] | None = None,
        bias: Annotated[Tensor, "#batch #heads #queries #keys"] | None = None,
        positions: Positions | None = None,
        cache: KeyValueCache | None = None,
        rows: Indices = None,
        heads: Indices = None,
    ) -> Annotated[Tensor, "batch chosen_heads rows keys"]:
        """Return the weights that `forward` uses on the same arguments, before dropout.

        With a cache these are the weights of the last step that `forward` took; nothing is written
        to the cache. Rows and heads are as in `attnkit.attention_weights`.
        """
        projected, options = self._prepare(query, key, value, positions, cache, is_new=False)
        return attention_weights(
            *projected[:2], **options, mask=mask, bias=bias, rows=rows, heads=heads
        )

    def new_cache(
        self,
        batch: int,
        max_tokens: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> KeyValueCache:
        """Return an empty cache for `forward(…, cache=)`, by default with the dtype and device of
        the parameters, or the dtype of autocast."""
        # a quantized layer has no floating-point parameters and computes in torch's default dtype
        floats = (p for p in self.out_proj.parameters() if p.is_floating_point())
        weight = next(floats, torch.empty(0))
        device = weight.device if device is None else torch.device(device)
        if dtype is None:
            autocast = torch.is_autocast_enabled(device.type)
            dtype = torch.get_autocast_dtype(device.type) if autocast else weight.dtype
        return KeyValueCache(
            batch,
            self.num_kv_heads,
            max_tokens,
            self.head_dim,
            self.value_head_dim,
            dtype=dtype,
            device=device,
        )

    def remember(
        self,
        key: Annotated[Tensor, "batch keys key_dim"],
        value: Annotated[Tensor, "batch keys value_dim"] | None = None,
    ) -> KeyValueCache:
        """Project the keys and values of a memory that many steps will read: `block(x,
        block.remember(y))` equals `block(x, y)`."""
        key, value = self.project_memory(key, key if value is None else value)
        # contiguous for each head, which makes the reads of every step faster
        return KeyValueCache.of(key.contiguous(), value.contiguous())

    def _prepare(
        self,
        query: Tensor,
        key: Tensor | KeyValueCache | None,
        value: Tensor | None,
        positions: Positions | None,
        cache: KeyValueCache | None,
        *,
        is_new: bool,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
        """Return query, key and value as heads, and the options score, normalizer and sink."""
        if query.is_nested:
            not_nested(query=query)
        if key is None and value is not None:
            raise ValueError("value: given without key")
        if cache is not None and key is not None:
            raise ValueError("cache: keeps the keys of self-attention, but a key was given")
        if isinstance(key, KeyValueCache) and (value is not None or positions is not None):
            name = "positions" if value is None else "value"
            raise ValueError(f"{name}: not together with remembered keys and values")
        if isinstance(key, KeyValueCache):
            heads = self.project_query(query), key.key, key.value
        else:
            key = query if key is None else key
            heads = self.project(query, key, key if value is None else value)
        if positions is not None:
            heads = *positions(*heads[:2]), heads[2]
        if cache is not None:
            if is_new:
                # under autocast a norm or positions may have given float32
                autocast = torch.is_autocast_enabled(query.device.type)
                kept = (t.to(cache.key.dtype) if autocast else t for t in heads[1:])
                heads = heads[0], *cache.write(*kept)  # `forward` counts them once it has succeeded
            else:
                heads = heads[0], cache.key, cache.value
        tokens = None if cache is not None or isinstance(key, KeyValueCache) else key
        score = self.score() if isinstance(self.score, nn.Module) else self.score
        options = {"score": score, "normalizer": self._normalizer_now(tokens), "sink": self.sink}
        return heads, options

    def _normalizer_now(self, tokens: Tensor | None) -> Normalizer:
        """Return the normalizer for the keys of these tokens, which are None with a cache."""
        normalizer = self.normalizer
        if isinstance(normalizer, nn.Module):
            if tokens is None:
                raise ValueError(
                    "cache: keeps keys and values, but the normalizer reads the tokens; decode "
                    "fast weights by attnkit.delta_rule and its state"
                )
            normalizer = normalizer(tokens)
        return normalizer if self.training else normalizer.evaluated()
