"""The attention implementations of a machine, each with the lines of a program that call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from attnkit.checks.cases import DEFINED, HEAD, PACKED, Case
from attnkit.core.kernels.choose import PLACES
from attnkit.core.normalizers import Softmax

Lines = Callable[[Case], str | None]


@dataclass(frozen=True)
class Attention:
    """One attention implementation, and how a program calls it.

    Args:
        name: name in the report.
        lines: function from a case to the lines that compute `output` from `query`, `key`, `value`,
            `bias`, `scale`, `allowed` and `dropout_p`; None if it has no argument that the case
            needs.
        imports: lines that come before.
        defined: the lines that compute `expected`.
        is_same: whether queries, keys and values are one tensor.
        is_top_left: whether its causal mask is aligned at the first query and key, not at the last.
        is_ours: whether it is attnkit's: it then refuses by `UnsupportedError`, and gives 0 to a
            query that may look nowhere, which others do not promise.
        kernel: the name for `backend=`, if it has one.
        is_slow: whether it runs only a few of the cases.
        may_refuse: whether it may refuse even a plain attention, as a forced kernel may.
        dtypes: the dtypes that it takes.
    """

    name: str
    lines: Lines
    imports: str = ""
    defined: str = DEFINED
    is_same: bool = False
    is_top_left: bool = False
    is_ours: bool = False
    kernel: str = ""
    is_slow: bool = False
    may_refuse: bool = True
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16", "float64")

    def program(self, case: Case) -> str | None:
        """Return the program of a case, up to `output`; None if the attention cannot run it."""
        lines = self.lines(case)
        is_missing = case.device == "mps" and case.dtype == "float64"
        if lines is None or is_missing or case.dtype not in self.dtypes:
            return None
        tensors = case.tensors(is_same=self.is_same, is_top_left=self.is_top_left)
        if case.is_rewritten:
            lines = f"allowed.logical_not_()\n{lines}\nallowed.logical_not_()\n{lines}"
        return f"{HEAD}{self.imports}\n{tensors}{lines}\n"


def attentions(device: str) -> Iterator[Attention]:
    """Yield the attention implementations of this installation for a device."""
    for name, place in PLACES.items():
        if place.normalizer is Softmax or name == "reference":
            lines = _attend(f'backend="{name}"')
            yield Attention(
                f"attnkit {name}",
                lines,
                "import attnkit\n",
                is_ours=True,
                kernel=name,
                is_slow=name == "flex" and device == "cuda",  # compiled anew for each case
            )
    yield Attention("attnkit auto", _attend(""), "import attnkit\n", is_ours=True, may_refuse=False)
    kinds = {"FLASH_ATTENTION": "flash", "EFFICIENT_ATTENTION": "efficient", "MATH": "math"}
    if device == "cuda":
        kinds["CUDNN_ATTENTION"] = "cudnn"
    for kind, name in kinds.items():
        imports = "from torch.nn.attention import SDPBackend, sdpa_kernel\n"
        lines = _sdpa(f"with sdpa_kernel(SDPBackend.{kind}):\n    ")
        yield Attention(f"torch sdpa ({name})", lines, imports, is_top_left=True)
    yield Attention("torch sdpa", _sdpa(""), is_top_left=True, may_refuse=False)
    for mode in ("train", "eval"):
        yield Attention(
            f"nn.MultiheadAttention ({mode})", _multihead(f"{mode}()"), may_refuse=False
        )
    lines = _multihead("eval()", "with torch.no_grad():\n    ")
    yield Attention("nn.MultiheadAttention (fast path)", lines, is_same=True)
    flex = "from torch.nn.attention.flex_attention import create_block_mask, flex_attention\n"
    yield Attention("torch flex", _flex, flex, is_slow=True)
    if device == "cuda" and find_spec("torch.nn.attention.varlen"):
        varlen = "from torch.nn.attention.varlen import varlen_attn\n"
        yield Attention("torch varlen", _varlen, varlen, dtypes=("bfloat16", "float16"))
    if find_spec("torch_geometric"):
        for layer, defined in _PYG.items():
            imports = f"from torch_geometric.nn import {layer}\n"
            yield Attention(f"PyG {layer}", _pyg(layer), imports, defined)


_MASKS = {
    "none": "None",
    "causal": 'attnkit.Causal(align="bottom_right")',
    "padding": "attnkit.Padding(allowed[:, 0, 0])",
    "causal padding": 'attnkit.Causal(align="bottom_right") & attnkit.Padding(allowed[:, 0, -1])',
    "dense": "allowed",
    "dense heads": "allowed",
    "window": 'attnkit.Window(8, 8, align="bottom_right")',
    "packed": "attnkit.Packed(torch.tensor({lengths}), torch.tensor({key_lengths}))",
    "edges": "attnkit.Edges(allowed[0, 0].nonzero().T.flip(0), {queries}, {keys})",
}


def _attend(backend: str) -> Lines:
    def lines(case: Case) -> str:
        starts = range(0, max(case.queries, case.keys), PACKED)
        parts = [
            [min(max(number - start, 0), PACKED) for start in starts]
            for number in (case.queries, case.keys)
        ]
        mask = _MASKS[case.mask].format(
            lengths=parts[0], key_lengths=parts[1], queries=case.queries, keys=case.keys
        )
        given = ["mask=mask, bias=bias, scale=scale, dropout_p=dropout_p", backend]
        options = ", ".join(filter(None, given))
        return f"mask = {mask}\noutput = attnkit.attend(query, key, value, {options})"

    return lines


def _sdpa(within: str) -> Lines:
    def lines(case: Case) -> str:
        if case.bias and case.mask != "none":
            mask = "attn_mask=bias.masked_fill(~allowed, -torch.inf)"
        elif case.bias:
            mask = "attn_mask=bias"
        else:
            kinds = {"none": "", "causal": "is_causal=True"}
            mask = kinds.get(case.mask, "attn_mask=allowed")
        options = [mask, "scale=scale, dropout_p=dropout_p"]
        options.append("enable_gqa=True" if case.is_grouped else "")
        given = ", ".join(filter(None, options))
        return f"{within}output = F.scaled_dot_product_attention(query, key, value, {given})"

    return lines


def _multihead(mode: str, within: str = "") -> Lines:
    """Return the lines for `nn.MultiheadAttention` with identity projections."""

    def lines(case: Case) -> str | None:
        if case.is_grouped or case.scale is not None or case.dim != case.value_dim:
            return None
        if within and case.queries != case.keys:
            return None
        if case.dropout_p and not mode.startswith("train"):
            return None
        heads, dim = case.heads, case.heads * case.dim
        masks = {"none": "", "padding": ", key_padding_mask=~allowed[:, 0, 0]"}
        per_head = f".expand({case.batch}, {heads}, -1, -1).flatten(0, 1)"
        if case.bias and case.mask != "none":
            mask = f", attn_mask=bias.masked_fill(~allowed, -torch.inf){per_head}"
        elif case.bias:
            mask = f", attn_mask=bias.expand(-1, -1, {case.queries}, -1){per_head}"
        else:
            is_shared = case.mask in ("causal", "window", "packed", "edges")
            of_all = (
                ", attn_mask=~allowed[0, 0]" if is_shared else f", attn_mask=~allowed{per_head}"
            )
            mask = masks.get(case.mask, of_all)
        return f"""\
attention = torch.nn.MultiheadAttention({dim}, {heads}, dropout_p, batch_first=True, **kind)
attention.in_proj_weight.data = torch.eye({dim}, **kind).repeat(3, 1)
attention.out_proj.weight.data = torch.eye({dim}, **kind)
given = [tensor.transpose(1, 2).flatten(2) for tensor in (query, key, value)]
given = given[:1] * 3 if query is key is value else given  # the fast path asks for one object
{within}merged, _ = attention.{mode}(*given, need_weights=False{mask})
output = merged.unflatten(2, ({heads}, -1)).transpose(1, 2)"""

    return lines


def _flex(case: Case) -> str | None:
    if case.dropout_p:
        return None
    shape = f"{case.batch}, {case.heads}, {case.queries}, {case.keys}"
    call = "flex_attention" if case.device == "cpu" else "torch.compile(flex_attention)"
    detached = ".detach()" if case.device == "cpu" else ""  # it has no gradient on the CPU
    lines = mask = score = ""
    if case.mask != "none":
        lines = f"allowed_all = allowed.expand({shape})\n"
        mask = (
            "block_mask=create_block_mask(lambda b, h, i, j: allowed_all[b, h, i, j], "
            f'{shape}, device="{case.device}"), '
        )
    if case.bias:
        lines += f"bias_all = bias{detached}.expand({shape})\n"
        score = "score_mod=lambda score, b, h, i, j: score + bias_all[b, h, i, j], "
    grouped = ", enable_gqa=True" if case.is_grouped else ""
    given = ", ".join(name + detached for name in ("query", "key", "value"))
    return f"{lines}output = {call}({given}, {score}{mask}scale=scale{grouped})"


def _varlen(case: Case) -> str | None:
    has_more = case.bias or case.is_grouped or case.dropout_p or case.scale is not None
    if has_more or case.mask not in ("none", "causal"):
        return None
    ends = (f"torch.arange({case.batch + 1}).int().cuda() * {n}" for n in (case.queries, case.keys))
    window = ", window_size=(-1, 0)" if case.mask == "causal" else ""
    return f"""\
flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
output = varlen_attn(*flat, {", ".join(ends)}, {case.queries}, {case.keys}{window})
output = output.unflatten(0, ({case.batch}, -1)).transpose(1, 2)"""


_MADE = {
    "TransformerConv": """\
layer = TransformerConv(({keys_in}, {queries_in}), {dim}, {heads}, root_weight=False, bias=False)
layer = layer.to(**kind)
layer.lin_query.weight.data = torch.eye({queries_in}, **kind)
layer.lin_key.weight.data, layer.lin_value.weight.data = torch.eye({keys_in}, **kind).chunk(2)
sources = torch.cat([key[0].transpose(0, 1).flatten(1), value[0].transpose(0, 1).flatten(1)], 1)
""",
    "GATv2Conv": """\
layer = GATv2Conv({queries_in}, {dim}, {heads}, add_self_loops=False, bias=False).to(**kind)
layer.lin_l.weight.data = layer.lin_r.weight.data = torch.eye({queries_in}, **kind)
layer.lin_l.bias = layer.lin_r.bias = None
sources, vector = value[0].transpose(0, 1).flatten(1), layer.att.detach()[0].cpu().double()
""",
    "GATConv": """\
layer = GATConv(({queries_in}, {queries_in}), {dim}, {heads}, add_self_loops=False, bias=False)
layer = layer.to(**kind)
layer.lin_src.weight.data = layer.lin_dst.weight.data = torch.eye({queries_in}, **kind)
sources = value[0].transpose(0, 1).flatten(1)
to, of = (a.detach()[0, :, None].cpu().double() for a in (layer.att_dst, layer.att_src))
""",
}
_SCORED = """\
inputs = {"query": query, "value": value}
exact = {name: t.detach().cpu().double().requires_grad_() for name, t in inputs.items()}
scores = SCORES
expected = definition(0 * exact["query"], 0 * exact["value"], exact["value"], allowed.cpu(), scores)
"""
_PYG = {
    "TransformerConv": DEFINED,
    "GATv2Conv": _SCORED.replace(
        "SCORES",
        "F.leaky_relu(exact['query'][:, :, :, None] + exact['value'][:, :, None], 0.2)\n"
        "scores = (scores * vector[:, None, None]).sum(dim=-1)",
    ),
    "GATConv": _SCORED.replace(
        "SCORES",
        "(exact['query'] * to).sum(-1, True) + (exact['value'] * of).sum(-1)[:, :, None]\n"
        "scores = F.leaky_relu(scores, 0.2)",
    ),
}


def _pyg(layer: str) -> Lines:
    """Return the lines for a convolution from keys to queries with identity projections."""

    def lines(case: Case) -> str | None:
        is_plain = not case.bias and case.scale is None and not case.is_grouped
        if case.mask != "edges" or not is_plain or case.batch > 1 or case.dim != case.value_dim:
            return None
        width = case.heads * case.dim
        keys_in = 2 * width if layer == "TransformerConv" else width
        made = _MADE[layer].format(
            keys_in=keys_in, queries_in=width, dim=case.dim, heads=case.heads
        )
        return f"""\
{made}layer.dropout = dropout_p
targets = query[0].transpose(0, 1).flatten(1)
output = layer((sources, targets), allowed[0, 0].nonzero().T.flip(0))
output = output.unflatten(1, ({case.heads}, -1)).transpose(0, 1)[None]"""

    return lines


def devices() -> tuple[str, ...]:
    """Return the device types of this machine."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return ("cpu", *(device for device, is_there in there.items() if is_there))
