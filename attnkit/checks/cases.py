"""Test cases as programs: tensors, a mask, and the definition of the expected output.

A program is text that is executed as it is and printed with a finding, so that a user who copies it
runs exactly what was run here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

HEAD = """\
import torch
from torch.nn import functional as F
"""

DEFINITION = """\

def definition(query, key, value, allowed, bias=0.0, scale=None):
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale) + bias
    weights = scores.masked_fill(~allowed, -1e300).softmax(dim=-1)
    return weights.masked_fill(~allowed, 0.0) @ value  # where a query may look nowhere: 0

"""
"""The definition of attention, in torch; its inputs are float64."""

DEFINED = """\
inputs = {name: t for name, t in {"query": query, "key": key, "value": value, "bias": bias}.items()
          if t is not None}
exact = {name: t.detach().cpu().double().requires_grad_() for name, t in inputs.items()}
expected = definition(**exact, allowed=allowed.cpu(), scale=scale)
"""
"""The lines that compute `expected`; an attention with another score has its own."""

COMPARED = """\
towards = torch.randn(expected.shape, dtype=torch.float64)
right = torch.autograd.grad((expected * towards).sum(), exact.values(), materialize_grads=True)
got = None
if query.requires_grad and output.requires_grad:
    got = torch.autograd.grad(output, inputs.values(), towards.to(output), materialize_grads=True)
"""

PRINTED = """\
print("output:", (output.cpu() - expected).abs().max().item(), "off, expected 0")
for name, was, should in zip(inputs, got or (), right):
    print(f"gradient of {name}:", (was.cpu() - should).abs().max().item(), "off, expected 0")
"""

LAYOUTS = {
    "contiguous": "torch.randn({batch}, {heads}, {tokens}, {dim}, **kind)",
    "heads last": "torch.randn({batch}, {tokens}, {heads}, {dim}, **kind).transpose(1, 2)",
    "channels apart": "torch.randn({batch}, {heads}, {dim}, {tokens}, **kind).transpose(2, 3)",
    "every other": "torch.randn({batch}, {heads}, 2 * {tokens}, {dim}, **kind)[:, :, ::2]",
    "expanded": "torch.randn(1, {heads}, {tokens}, {dim}, **kind).expand({batch}, -1, -1, -1)",
}
"""Memory layouts of queries, keys and values."""

PACKED = 40  # tokens of each packed sequence
_ROWS, _COLUMNS = "torch.arange({queries})[:, None]", "torch.arange({keys})"
MASKS = {
    "none": "torch.ones(1, 1, {queries}, {keys}, dtype=torch.bool)",
    "causal": "torch.ones(1, 1, {queries}, {keys}, dtype=torch.bool).tril({offset})",
    "padding": f"({_COLUMNS} < torch.tensor({{lengths}})[:, None])[:, None, None]",
    "causal padding": "torch.ones({queries}, {keys}, dtype=torch.bool).tril({offset})"
    f" & ({_COLUMNS} < torch.tensor({{lengths}})[:, None])[:, None, None]",
    "dense": "torch.rand({batch}, 1, {queries}, {keys}) < 0.5",
    "dense heads": "torch.rand({batch}, {heads}, {queries}, {keys}) < 0.5",
    "window": f"(({_ROWS} + {{offset}} - {_COLUMNS}).abs() <= 8)[None, None]",
    "packed": f"({_ROWS} // {PACKED} == {_COLUMNS} // {PACKED})[None, None]",
    "edges": "torch.rand(1, 1, {queries}, {keys}) < 0.2",
}
"""Masks by name, True = may look."""

_SMALLER = (1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192, 256, 257)


@dataclass(frozen=True)
class Case:
    """One attention to compute.

    Args:
        mask: a key of `MASKS`.
        lengths: how much is padding: "some" tokens, "dead": all tokens of one item, or "all" tokens
            of all items.
        bias: the dimension over which the bias varies, "keys", "heads", "items" or "full"; "": no
            bias.
        layout: a key of `LAYOUTS`.
        around: the value that all scores are close to: at −100 sums of exponentials are below
            1e-38, at 100 above 1e38.
        is_rewritten: whether the mask's tensor is used in a call and then written to.
        trains: whether gradients are computed.
    """

    mask: str = "none"
    lengths: str = "some"
    queries: int = 64
    keys: int = 64
    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    dim: int = 16
    value_dim: int = 16
    bias: str = ""
    scale: float | None = None
    dropout_p: float = 0.0
    layout: str = "contiguous"
    around: int = 0
    is_rewritten: bool = False
    trains: bool = True
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def is_grouped(self) -> bool:
        return self.heads != self.kv_heads

    def __str__(self) -> str:
        """Return the shape, and all fields that differ from `Case()`."""
        shape = f"{self.batch} × {self.heads} × {self.queries} × {self.dim}"
        said = [f"{shape} {self.dtype} on {self.device}"]
        for field in fields(self)[:-2]:
            value = getattr(self, field.name)
            is_shape = field.name in ("batch", "heads", "queries", "dim")
            usual = {"keys": self.queries, "kv_heads": self.heads, "value_dim": self.dim}
            if not is_shape and value != usual.get(field.name, field.default):
                said.append(f"{field.name}={value}")
        return ", ".join(said)

    def tensors(self, *, is_same: bool, is_top_left: bool) -> str:
        """Return the lines that define `query`, `key`, `value`, `bias`, `scale`, `dropout_p` and
        `allowed`.

        Args:
            is_same: query, key and value are one tensor.
            is_top_left: query i sees the keys up to i; else the last query sees the last key.
        """
        query = LAYOUTS[self.layout].format(
            batch=self.batch, heads=self.heads, tokens=self.queries, dim=self.dim
        )
        key, value = (
            LAYOUTS[self.layout].format(
                batch=self.batch, heads=self.kv_heads, tokens=self.keys, dim=dim
            )
            for dim in (self.dim, self.value_dim)
        )
        depth = round((abs(self.around) / self.dim**0.5) ** 0.5, 2)  # dim · depth² / √dim
        sign = "+" if self.around > 0 else "-"
        bias = {
            "": "None",
            "keys": f"torch.randn(1, 1, 1, {self.keys}, **kind)",
            "heads": f"torch.randn(1, {self.heads}, {self.queries}, {self.keys}, **kind)",
            "items": f"torch.randn({self.batch}, 1, {self.queries}, {self.keys}, **kind)",
            "full": f"torch.randn({self.batch}, {self.heads}, {self.queries}, {self.keys}, **kind)",
        }[self.bias]
        lengths = [max(1, self.keys - 3 * item) for item in range(self.batch)]
        if self.lengths != "some":
            lengths = [0] * self.batch if self.lengths == "all" else [*lengths[:-1], 0]
        allowed = MASKS[self.mask].format(
            batch=self.batch,
            heads=self.heads,
            queries=self.queries,
            keys=self.keys,
            lengths=lengths if self.batch < 100 else f"[{self.keys}] * {self.batch}",
            offset=0 if is_top_left else self.keys - self.queries,
        )
        lines = [
            "torch.manual_seed(0)",
            f'kind = {{"dtype": torch.{self.dtype}, "device": "{self.device}"}}',
            f"query = {query}",
            f"key = {'query' if is_same else key}",
            f"value = {'query' if is_same else value}",
            f"query, key = query + {depth}, key {sign} {depth}" if self.around else "",
            f"bias, scale, dropout_p = {bias}, {self.scale}, {self.dropout_p}",
            "for tensor in (query, key, value, *(() if bias is None else (bias,))):",
            f"    tensor.requires_grad_({self.trains})",
            f'allowed = ({allowed}).to("{self.device}")',
        ]
        return "\n".join(line for line in lines if line) + "\n"

    def smaller(self) -> Iterator[Case]:
        """Yield cases that are simpler in one respect, the simplest first."""
        plain = Case()
        for name in ("layout", "bias", "scale", "around", "is_rewritten", "lengths", "mask"):
            if getattr(self, name) != getattr(plain, name):
                yield replace(self, **{name: getattr(plain, name)})
        for heads, kv_heads in ((1, 1), (2, 1), (2, 2), (4, 2)):
            if heads * kv_heads < self.heads * self.kv_heads:
                yield replace(self, heads=heads, kv_heads=kv_heads)
        yield from (replace(self, batch=number) for number in (1, 2, 3) if number < self.batch)
        for number in _SMALLER:
            if number < max(self.queries, self.keys):
                less = min(number, self.queries), min(number, self.keys)
                yield replace(self, queries=less[0], keys=less[1])
            if self.queries != self.keys and number < self.queries:
                yield replace(self, queries=number)
        for number in (1, 4, 8):
            if number < max(self.dim, self.value_dim):
                dims = min(number, self.dim), min(number, self.value_dim)
                yield replace(self, dim=dims[0], value_dim=dims[1])


def cases(*, quick: bool) -> Iterator[Case]:
    """Yield cases that trigger publicly reported bugs, in float32 on the CPU.

    They have lengths just below and above blocks of 64 and 128, and with a remainder of 64 (pytorch
    196678); scores so low or high that exponentials vanish or overflow; head dimensions that are
    not multiples of vector units; grouped heads; permuted or shared memory; more items than the
    65,535 rows of a CUDA grid; rows that see nothing; a mask for each head; a bias for all; a mask
    that is written to; and no gradients.
    """
    lengths = (1, 63, 64, 65, 127, 128, 192, 257)
    for mask in ("none", "causal"):
        yield from (Case(mask, queries=n, keys=n) for n in lengths)
        yield from (Case(mask, queries=n, keys=n, around=-100) for n in (64, 192))
        yield from (Case(mask, dim=n, value_dim=n) for n in (64, 80, 128))
        yield Case(mask, around=100)
        yield Case(mask, queries=7, keys=1100)
    for mask in ("none", "causal", "padding", "dense", "window", "packed"):
        yield Case(mask, queries=65, keys=65, trains=False)
    for mask in ("padding", "causal padding", "dense", "dense heads", "window", "packed", "edges"):
        yield from (Case(mask, queries=n, keys=n) for n in ((65, 192) if quick else lengths))
    yield from (Case("edges", queries=n, batch=1) for n in (64, 40))
    yield Case("padding", around=-100)
    yield from (Case("padding", lengths=which, batch=3) for which in ("dead", "all"))
    for mask in ("none", "causal", "dense"):
        yield from (Case(mask, queries=q, keys=k) for q, k in ((5, 70), (70, 5), (1, 130)))
        yield Case(mask, heads=4)
        yield from (Case(mask, layout=layout) for layout in LAYOUTS if layout != "contiguous")
        yield from (Case(mask, dim=n, value_dim=m) for n, m in ((1, 1), (7, 7), (33, 33), (16, 24)))
    yield from (Case(bias=bias) for bias in ("keys", "heads", "items", "full"))
    yield from (Case(mask, bias="full") for mask in ("causal", "padding"))
    yield Case("dense", is_rewritten=True)
    yield Case("padding", is_rewritten=True)
    yield Case(scale=0.7)
    yield Case(batch=65_537, heads=1, kv_heads=1, queries=2, keys=2, dim=4, value_dim=4)
    yield from (Case(mask, batch=9, queries=33, keys=33) for mask in ("none", "causal"))
    if not quick:
        for mask in MASKS:
            yield Case(mask, queries=600, keys=600, dim=64, value_dim=64)
            yield Case(mask, queries=1100, keys=1100, batch=1)
            for layout in LAYOUTS:
                yield Case(mask, queries=129, keys=129, heads=6, kv_heads=3, layout=layout)
                yield Case(mask, queries=40, keys=129, heads=6, kv_heads=6, layout=layout)
