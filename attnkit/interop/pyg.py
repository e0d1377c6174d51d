"""Weights of PyTorch Geometric's attention layers, alone or in a model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from attnkit.interop.conversion import State, has_hooks, joined, loaded, refuse, state_of
from attnkit.layers.graph.attention import GraphAttention
from attnkit.layers.graph.rgat import RGATAttention
from attnkit.layers.graph.typed_attention import HANAttention, HGTAttention

if TYPE_CHECKING:
    from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv


@torch.enable_grad()  # so that joined parameters know whether they are frozen
def from_pyg(module: nn.Module) -> Any:
    """Convert PyG's layer to attnkit's, with equal outputs and gradients; or every such layer in a
    copy of a model.

        model = interop.from_pyg(torch_geometric.nn.GAT(1433, 64, 2, 7, heads=8))

    All options are converted except `mod` of `RGATConv`. Differences: weights are those before
    dropout; edge features are required with an `edge_dim` and refused without one (PyG's `GATConv`
    then ignores them, and `TransformerConv` adds them to the values as they are); parameters that a
    layer keeps and does not use, as `TransformerConv` does without `root_weight`, are left out.

    Args:
        module: `TransformerConv`, `GATv2Conv` or `GATConv`, or for typed graphs `HGTConv`,
            `HANConv` or `RGATConv`; or a model with some of them, in which subclasses of these,
            which may compute anything, stay as they are.

    Raises:
        TypeError: the module is neither.
        ValueError: a layer has parts that attnkit's lacks; all are named. Or some of the parameters
            that become one are frozen and others are not.
    """
    from torch_geometric.nn import (
        GATConv,
        GATv2Conv,
        HANConv,
        HGTConv,
        RGATConv,
        TransformerConv,
    )

    carry: dict[type, Callable] = {
        TransformerConv: _from_transformer,
        GATv2Conv: _from_gatv2,
        GATConv: _from_gat,
        HGTConv: from_hgt,
        HANConv: from_han,
        RGATConv: from_rgat,
    }

    def carried(conv: Any) -> nn.Module:
        _check(conv)
        layer, state = carry[type(conv)](conv)
        return loaded(layer, state, conv)

    if type(module) in carry:
        return carried(module)
    parts = module.modules() if isinstance(module, nn.Module) else ()
    layers = [part for part in parts if type(part) in carry]
    if not layers:
        names = ", ".join(f"torch_geometric.nn.{known.__name__}" for known in carry)
        raise TypeError(
            f"module: expected {names} itself or a model with one, got {type(module).__name__}"
        )
    # deepcopy takes the given modules for the copies of the layers
    return copy.deepcopy(module, {id(layer): carried(layer) for layer in layers})


def _check(conv: Any) -> None:
    hooks = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    stages = [f"_{name}_forward_{when}" for name in hooks for when in ("hooks", "pre_hooks")]
    refuse(
        conv,
        {
            "lazy channels (-1) that no input has set yet": any(map(is_lazy, conv.parameters())),
            f"aggr={conv.aggr!r}": conv.aggr not in ("add", "sum"),
            f"flow={conv.flow!r}": conv.flow != "source_to_target",
            f"node_dim={conv.node_dim}": conv.node_dim != 0,
            "hooks": any(map(has_hooks, conv.modules()))
            or any(getattr(conv, stage) for stage in stages),
            "masks of an explainer": bool(conv.explain),
        },
    )


def _options(conv: Any) -> dict[str, Any]:
    """Return the options that all three classes have."""
    return {
        "out_channels": conv.out_channels,
        "heads": conv.heads,
        "concat": conv.concat,
        "edge_dim": None if conv.lin_edge is None else conv.lin_edge.in_channels,
        "dropout_p": conv.dropout,
    }


def _loop_options(conv: Any) -> dict[str, Any]:
    """Return the options that GATConv and GATv2Conv have."""
    options = {"add_self_loops": conv.add_self_loops, "negative_slope": conv.negative_slope}
    if conv.add_self_loops and conv.lin_edge is not None:
        options["fill_value"] = conv.fill_value
    return options | {"residual": conv.res is not None, "out_bias": conv.bias is not None}


def _from_transformer(conv: TransformerConv) -> tuple[GraphAttention, State]:
    linears = {"query": conv.lin_query, "key": conv.lin_key, "value": conv.lin_value}
    bias = conv.lin_key.bias is not None
    layer = GraphAttention(
        (conv.lin_key.in_channels, conv.lin_query.in_channels),
        **_options(conv),
        residual=conv.root_weight,
        gate=conv.beta,
        bias=bias,
        out_bias=bias and conv.root_weight,
    )
    state: State = {}
    for name, linear in linears.items():
        state |= state_of(linear, f"projections.node_proj.{name}_proj.")
    if conv.root_weight:
        state |= state_of(conv.lin_skip, "residual_proj.")
    if conv.beta:
        state |= state_of(conv.lin_beta, "gate_proj.")
    return layer, state | _edges(conv)


def _from_gatv2(conv: GATv2Conv) -> tuple[GraphAttention, State]:
    layer = GraphAttention(
        (conv.lin_l.in_channels, conv.lin_r.in_channels),
        score="gatv2",
        share_weights=conv.share_weights,
        bias=conv.lin_l.bias is not None,
        **_options(conv),
        **_loop_options(conv),
    )
    state = {"projections.score.vector": conv.att[0]}
    state |= state_of(conv.lin_l, "projections.key_proj.")
    if not conv.share_weights:
        state |= state_of(conv.lin_r, "projections.query_proj.")
    return layer, state | _output(conv) | _edges(conv)


def _from_gat(conv: GATConv) -> tuple[GraphAttention, State]:
    is_pair = conv.lin is None
    source, target = (conv.lin_src, conv.lin_dst) if is_pair else (conv.lin, conv.lin)
    layer = GraphAttention(
        (source.in_channels, target.in_channels) if is_pair else source.in_channels,
        score="gat",
        **_options(conv),
        **_loop_options(conv),
    )
    state = {"projections.query_vector": conv.att_dst[0], "projections.key_vector": conv.att_src[0]}
    state |= state_of(source, "projections.value_proj.")
    if is_pair:
        state |= state_of(target, "projections.target_proj.")
    if conv.lin_edge is not None:
        state["projections.edge_vector"] = conv.att_edge[0]
    return layer, state | _output(conv) | _edges(conv)


def _edges(conv: Any) -> State:
    return {} if conv.lin_edge is None else state_of(conv.lin_edge, "projections.edge_proj.")


def _output(conv: Any) -> State:
    """Return the residual of GATConv and GATv2Conv, and their bias, which is also that of ours."""
    state: State = {} if conv.res is None else state_of(conv.res, "residual_proj.")
    if conv.bias is not None:
        state["out_bias" if conv.res is None else "residual_proj.bias"] = conv.bias
    return state


if TYPE_CHECKING:
    from torch_geometric.nn import HANConv, HGTConv, RGATConv


def from_hgt(conv: HGTConv) -> tuple[HGTAttention, State]:
    metadata = conv.node_types, conv.edge_types
    sizes = {name: conv.kqv_lin.lins[name].weight.shape[1] for name in conv.node_types}
    layer = HGTAttention(sizes, conv.out_channels, metadata, conv.heads)
    state: State = {"skip": joined(*[conv.skip[name] for name in conv.node_types])}
    for i, name in enumerate(conv.node_types):
        lin = conv.kqv_lin.lins[name]
        for kind, tensor in (("weight", lin.weight), ("bias", lin.bias)):
            key, query, value = tensor.chunk(3)
            state[f"in_proj.layers.{i}.{kind}"] = torch.cat([query, key, value])
        state |= state_of(conv.out_lin.lins[name], f"out_proj.layers.{i}.")
    for name, by_head in (("key_weight", conv.k_rel), ("value_weight", conv.v_rel)):
        state[name] = by_head.weight.unflatten(0, (conv.heads, -1)).transpose(0, 1)
    state["prior"] = joined(*[conv.p_rel["__".join(key)] for key in conv.edge_types])
    return layer, state


def from_han(conv: HANConv) -> tuple[HANAttention, State]:
    node_types, edge_types = conv.metadata
    sizes = {name: conv.proj[name].weight.shape[1] for name in node_types}
    layer = HANAttention(
        sizes,
        conv.out_channels,
        conv.metadata,
        conv.heads,
        negative_slope=conv.negative_slope,
        dropout_p=conv.dropout,
    )
    state: State = {"type_query": conv.q[0]} | state_of(conv.k_lin, "type_proj.")
    for i, name in enumerate(node_types):
        state |= state_of(conv.proj[name], f"in_proj.layers.{i}.")
    for name, vectors in (("key_vector", conv.lin_src), ("query_vector", conv.lin_dst)):
        state[name] = joined(*[vectors["__".join(key)] for key in edge_types])
    return layer, state


def from_rgat(conv: RGATConv) -> tuple[RGATAttention, State]:
    refuse(conv, {f"mod={conv.mod!r}": conv.mod is not None})
    is_additive = conv.attention_mode == "additive-self-attention"
    layer = RGATAttention(
        conv.in_channels,
        conv.out_channels,
        conv.num_relations,
        num_bases=conv.num_bases,
        num_blocks=conv.num_blocks,
        attention_mechanism=conv.attention_mechanism,
        attention_mode=conv.attention_mode,
        heads=conv.heads,
        dim=conv.dim,
        concat=conv.concat,
        negative_slope=conv.negative_slope if is_additive else 0.2,
        dropout_p=conv.dropout,
        edge_dim=conv.edge_dim,
        bias=conv.bias is not None,
    )
    state: State = {"query_weight": conv.q, "key_weight": conv.k}
    if conv.num_bases is not None:
        state |= {"coefficients": conv.att, "bases": conv.basis}
    else:
        state["weight" if conv.num_blocks is None else "blocks"] = conv.weight
    if conv.bias is not None:
        state["bias"] = conv.bias
    if conv.lin_edge is not None:
        state |= {"edge_weight": conv.e} | state_of(conv.lin_edge, "edge_proj.")
    return layer, state
