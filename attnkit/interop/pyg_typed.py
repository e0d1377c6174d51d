"""Weights of PyTorch Geometric's attention layers for heterogeneous graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnkit.interop.carry import State, joined, refuse, state_of
from attnkit.layers.graph.rgat import RGATAttention
from attnkit.layers.graph.typed_attention import HANAttention, HGTAttention

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
