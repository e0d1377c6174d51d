"""The shapes in the signatures of public functions and modules: they are there, and they are true.

A shape is the second item of `Annotated[Tensor, "batch heads queries head_dim"]`. A name is one
number in the arguments and the result of a call; `_` is any number; `#name` is that number or 1, or
lacks in front, as in broadcasting; `*name` is any number of dimensions. Numbers are floating-point
unless `int` or `bool` follows.
"""

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache, cached_property
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor, nn

import attnkit
from attnkit import layers, learned_scores, masks, models, normalizers, positions, scores
from attnkit.core.inputs import Inputs, check_inputs
from attnkit.core.kernels.hard import Draw
from attnkit.core.positions.relative import Rotation
from attnkit.launch.run import Run
from attnkit.models.captioning.generate import Sentences

Sizes = dict[str, Any]

NAMES = """
batch=2 heads=6 kv_heads=3 queries=5 keys=7 head_dim=22 value_dim=13 key_dim=27 dot_dim=22 dim=24
tokens=16 bands=11 patches=15 rows=4 chosen_heads=8 key_head_dim=26 items=10 sequences=9
query_blocks=3 key_blocks=4 channels=18 height=12 width=20 head_channels=9 classes=31
nodes=19 targets=19 sources=29 edges=23 edge_dim=17 pairs=37 position_dim=30
source_channels=8 target_channels=10 in_channels=18 out_channels=78
pixels=288 positions=15 memory_dim=28 words=32 vocabulary_size=33 layers=1 hypotheses=2 returned=3
map_height=3 map_width=5 mask_height=21 mask_width=25 points=41 places=15 orders=2
"""
SIZES: Sizes = {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", NAMES)}
"""Every name of a dimension, and how large it is in the examples below."""

SCRIPTED = "compiled by torch.jit.script, which knows no annotation but Tensor"
WITHOUT_SHAPES = {
    "Mask.allows": "indices of any shapes that broadcast",
    "Packed.within": "as Mask.allows",
    "Mask.to": "any tensors",
    "capture_attention": "the weights of modules of every kind",
    "capture_gates": "the gates of modules of every kind",
    "record_logits": "the heads of modules of every kind",
    "Projections.project": "between the parts of a block, of tokens in a batch or without",
    "Projections.project_query": "as Projections.project",
    "Projections.project_memory": "as Projections.project",
    "_OverChannels.project": "as Projections.project",
    "Gate.gate": SCRIPTED,
    "Gate.forward": SCRIPTED,
    "GatedSum.gate": SCRIPTED,
    "GatedSum.forward": SCRIPTED,
    "_GridPositions.positions": SCRIPTED,
    "_GridPositions.forward": SCRIPTED,
    "PatchEmbedding.forward": SCRIPTED,
    "ResNet.forward": SCRIPTED,
}


# --- the checker ----------------------------------------------------------------------------------


def fits(value: Any, hint: Any, sizes: Sizes) -> bool:
    """Whether the value is what its annotation says; sizes that were not known are then."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return isinstance(value, Tensor) and tensor_fits(value, sizes, *hint.__metadata__)
    if origin in (Union, UnionType):
        return any(fits(value, argument, sizes) for argument in arguments)
    if hint is Any or isinstance(value, Tensor):
        return hint in (Any, Tensor)
    if isinstance(hint, type) and not isinstance(value, (float, int) if hint is float else hint):
        return False
    items: list[tuple[Any, Any]] = []
    if origin is tuple and Ellipsis not in arguments:
        if not isinstance(value, tuple) or len(value) != len(arguments):
            return False
        items = list(zip(value, arguments, strict=True))
    elif any(tensors_of(hint)):
        each = value.values() if isinstance(value, dict) else value
        of_item = [argument for argument in arguments if argument is not Ellipsis][-1]
        items = [(item, of_item) for item in each]
    elif is_dataclass(value):
        hints = get_type_hints(type(value), include_extras=True)
        items = [(getattr(value, field.name), hints[field.name]) for field in fields(value)]
    return all(fits(item, of_item, sizes) for item, of_item in items)


def tensor_fits(tensor: Tensor, sizes: Sizes, shape: str, kind: type = float) -> bool:
    is_float, is_bool = tensor.is_floating_point(), tensor.dtype == torch.bool
    names, given = shape.split(), list(tensor.shape)
    while len(names) > len(given) and names[0].startswith("#"):
        names.pop(0)
    for place, name in enumerate(names):
        if name.startswith("*"):
            count = len(given) - len(names) + 1
            if sizes.setdefault(name, given[place : place + count]) != given[place : place + count]:
                return False
            names[place : place + 1] = [name[1:]] if count == 1 else ["_"] * count
    return (
        kind is (float if is_float else bool if is_bool else int)
        and len(names) == len(given)
        and all(
            name == "_"
            or (name.startswith("#") and size == 1)
            or size == eval(name.removeprefix("#"), {}, sizes)  # queries, 2, height*width
            for name, size in zip(names, given, strict=True)
        )
    )


def tensors_of(hint: Any) -> Iterator[Any]:
    """The tensors in an annotation, with their shapes; not those of functions that it takes."""
    if hint is Tensor or get_origin(hint) is Annotated:
        yield hint
    elif get_origin(hint) is not Callable:
        for argument in get_args(hint):
            yield from tensors_of(argument)


def is_bare(hint: Any) -> bool:
    return Tensor in tensors_of(hint)


# --- what is public -------------------------------------------------------------------------------


def definitions(owner: type, name: str) -> dict[str, Any]:
    """The functions that define a method or property, by their names, the one that runs first."""
    found = {}
    for base in owner.__mro__:
        member = vars(base).get(name)
        if member is None or not base.__module__.startswith("attnkit"):
            continue
        if isinstance(member, property | cached_property):
            member = member.fget if isinstance(member, property) else member.func
        member = getattr(member, "__func__", member)
        if inspect.isfunction(member):
            found[f"{base.__qualname__}.{name}"] = member
    return found


def hints_of(functions: list[Any]) -> dict[str, Any]:
    """The annotations of the first; where it gives no shape, that of what it overrides."""
    typed_only = {"Inputs": Inputs, "Run": Run}  # where importing them would make a circle
    hints = [
        get_type_hints(function, None, typed_only, include_extras=True) for function in functions
    ]
    return {
        name: next((h[name] for h in hints if name in h and not is_bare(h[name])), hint)
        for name, hint in hints[0].items()
    }


def public() -> dict[str, dict[str, Any]]:
    """The annotations of every public function, method, property and dataclass, by its name."""
    found: dict[str, Any] = {"Draw": Draw, "Rotation": Rotation, "Sentences": Sentences}
    for table in (attnkit, layers, models, masks, scores, normalizers, positions, learned_scores):
        names = getattr(table, "__all__", None) or [n for n in vars(table) if n[0] != "_"]
        found |= {name: getattr(table, name) for name in names}
    signatures = {}
    for value in found.values():
        if not getattr(value, "__module__", "").startswith("attnkit"):
            continue
        if inspect.isfunction(value):
            function = inspect.unwrap(value)
            if function.__qualname__ not in WITHOUT_SHAPES:
                signatures[function.__qualname__] = hints_of([function])
        elif isinstance(value, type):
            if is_dataclass(value):
                signatures[value.__qualname__] = get_type_hints(value, include_extras=True)
            for name in dir(value):
                is_own = not is_dataclass(value) and name in ("__init__", "__call__")
                functions = definitions(value, name) if is_own or name[0] != "_" else {}
                if functions and not WITHOUT_SHAPES.keys() & functions:
                    signatures[next(iter(functions))] = hints_of([*functions.values()])
    return signatures


# --- examples -------------------------------------------------------------------------------------


def called(function: Any, *args: Any, but: Sizes | None = None, **kwargs: Any) -> set[str]:
    """Call it, hold arguments and result against the annotations; the names of what was held.

    but: sizes that are others than in SIZES.
    """
    functions: dict[str, Any] = {}
    if isinstance(function, type):
        if is_dataclass(function):
            hints = get_type_hints(function, include_extras=True)
        else:
            functions = definitions(function, "__init__")
    elif inspect.ismethod(function):
        owner = function.__self__
        owner = owner if isinstance(owner, type) else type(owner)
        functions = definitions(owner, function.__name__)
    else:
        functions = {function.__qualname__: inspect.unwrap(function)}
    if functions:
        hints = hints_of([*functions.values()])
    sizes = SIZES | (but or {})
    bound = inspect.signature(function).bind(*args, **kwargs).arguments
    result = function(*args, **kwargs)
    hints["return"] = function if isinstance(function, type) else hints.get("return", Any)
    for name, value in [*bound.items(), ("return", result)]:
        hint = hints.get(name, Any)
        known = {n: sizes[n] for n in re.findall(r"\w+", str(hint)) if n in sizes}
        given = list(value.shape) if isinstance(value, Tensor) else value
        where = f"{function.__qualname__}, {name}"
        assert fits(value, hint, sizes), f"{where}: expected {hint} of {known}, got {given}"
    return {*functions} | {type(value).__qualname__ for value in (result, *bound.values())}


def shape(names: str) -> list[int]:
    return [SIZES[name] if name in SIZES else int(name) for name in names.split()]


def floats(names: str) -> Tensor:
    return torch.rand(shape(names))


def trues(names: str) -> Tensor:
    return torch.ones(shape(names), dtype=torch.bool)


def integers(names: str, *, below: str) -> Tensor:
    return torch.randint(0, SIZES[below], shape(names))


QUERY, KEY = "batch heads queries head_dim", "batch kv_heads keys head_dim"
VALUE, SCORES = "batch kv_heads keys value_dim", "batch heads queries keys"
CHOSEN = {"rows": torch.tensor([0, 3, 1, 1]), "heads": torch.tensor([5, 1, 1, 0, 2, 3, 4, 5])}
THE_ONE = {"rows": torch.zeros(4).long(), "heads": torch.zeros(8).long()}


def attention():
    query, key, value = floats(QUERY), floats(KEY), floats(VALUE)
    for options in (
        {"mask": trues("batch heads queries keys"), "bias": floats("heads 1 keys")},
        {"mask": attnkit.Padding(trues("batch keys")), "bias": floats("batch heads queries 1")},
    ):
        yield called(attnkit.attend, query, key, value, **options)
        yield called(attnkit.attention_weights, query, key, **options, **CHOSEN)
        yield called(attnkit.explain_backends, query, key, value, **options)
    edges = attnkit.Edges(integers("2 edges", below="queries"), 19, 29)
    weights = floats("heads head_dim edge_dim"), floats("heads value_dim edge_dim")
    carried = attnkit.EdgeFeatures(floats("edges edge_dim"), *weights, floats("1 edges"))
    nodes = floats("heads targets head_dim"), floats("kv_heads sources head_dim")
    yield called(attnkit.edge_weights, *nodes, edges, edge_features=carried)
    yield called(attnkit.edge_weights, *(each.expand(2, -1, -1, -1) for each in nodes), edges)
    of_nodes = {"queries": 19, "keys": 29}
    values = floats("kv_heads sources value_dim")
    options = {"mask": edges, "edge_features": carried, "but": of_nodes}
    yield called(attnkit.attend, *nodes, values, **options)
    key, value = floats("batch kv_heads tokens head_dim"), floats("batch kv_heads tokens value_dim")
    written = floats("batch heads tokens"), floats("batch heads head_dim value_dim")
    query = floats("batch heads tokens head_dim")
    yield called(attnkit.delta_rule, query, key, value, *written)
    cache = attnkit.KeyValueCache(2, 3, 16, 22, 13)
    yield called(cache.write, key, value)
    yield called(cache.append, key, value)
    yield called(cache.select, integers("items", below="batch"))
    yield called(attnkit.KeyValueCache.of, key, value)
    yield called(attnkit.KeyValueCache.key.fget, cache)
    yield called(attnkit.KeyValueCache.value.fget, cache)
    options = {"head_dim": 22, "num_kv_heads": 3, "key_dim": 27, "value_dim": 13}
    block = attnkit.MultiHeadAttention(24, 6, **options)
    tokens = floats("batch queries dim"), floats("batch keys key_dim"), floats(VALUE)[:, 0]
    options = {"mask": trues(SCORES), "bias": floats(SCORES)}
    yield called(block.forward, *tokens, **options)
    yield called(block.attention_weights, *tokens, **options, **CHOSEN)
    yield called(block.remember, *tokens[1:])
    with attnkit.record_draws() as draws:
        hard = attnkit.Hard("score_function")
        attnkit.attend(floats(QUERY), floats(KEY), floats(VALUE), normalizer=hard)
    yield called(Draw, *vars(draws[0]).values())
    samples = floats("batch queries dim"), floats("batch keys dim"), floats("batch keys value_dim")
    regression = attnkit.NadarayaWatson()
    yield called(regression.forward, *samples, mask=trues("batch 1 queries keys"))
    yield called(regression.forward, *(each[0] for each in samples), mask=trues("queries keys"))
    yield called(attnkit.NadarayaWatson.bandwidth.fget, regression)
    other = nn.ModuleList([nn.MultiheadAttention(22, 2)])
    yield called(attnkit.replace_attention, other, mask=trues(SCORES))


def masks_():
    chosen = integers("items", below="batch"), CHOSEN["heads"], CHOSEN["rows"]
    edge_index = integers("2 edges", below="queries")
    edges, packed = attnkit.Edges(edge_index, 5, 7), attnkit.Packed(*torch.ones(2, 9).int())
    for kind, *arguments in (
        (attnkit.Causal, "top_left"),
        (attnkit.Padding, integers("batch", below="keys")),
        (attnkit.Padding, trues("batch keys")),
        (attnkit.Dense, trues("batch heads queries keys")),
        (attnkit.Dense, trues("1 keys")),
        (attnkit.Edges, edge_index, 5, 7),
        (attnkit.Packed, torch.tensor([1, 2, 0, 2, 0]), torch.tensor([1, 0, 4, 2, 0])),
        (attnkit.Blocks, trues("heads query_blocks key_blocks"), 2),
        (attnkit.Blocks, trues("query_blocks key_blocks"), 2),
    ):
        yield called(kind, *arguments, but={"sequences": 5})
        mask = kind(*arguments)
        for each in (mask, ~mask, mask & mask, mask | mask):
            yield called(each.dense, 5, 7, torch.device("cpu"))
            yield called(each.select, *chosen, 5, 7)
    yield called(attnkit.Packed.both_lengths.fget, packed)
    yield called(attnkit.Edges.without_loops.fget, edges)
    yield called(masks.as_mask, trues("batch heads queries keys"))


def scores_and_normalizers():
    query, key, of_scores = floats(QUERY), floats("batch heads keys head_dim"), floats(SCORES)
    yield called(scores.as_score, "scaled_dot", floats("1"))
    yield called(attnkit.General, floats("heads head_dim key_head_dim"))
    for kind, *arguments in (
        (attnkit.ScaledDot,),
        (attnkit.ScaledDot, floats("heads")),
        (attnkit.General, floats("head_dim head_dim")),
        (attnkit.Cosine, floats("heads")),
        (attnkit.Gaussian, floats("heads")),
        (attnkit.Gaussian, floats("")),
        (attnkit.Additive, floats("heads head_dim")),
        (attnkit.Additive, floats("head_dim")),
    ):
        score = kind(*arguments, softcap=2.0)
        but = {"key_head_dim": 22, "dot_dim": score.dot_dim(22) or 0}
        yield called(kind, *arguments, but=but)
        for method in (score.check, score.scores, score.definition, score.uncapped):
            yield called(method, query, key, but={"kv_heads": 6})
        if score.dot_dim(22):
            but["dot_dim"] += kind is attnkit.Gaussian  # for its softcap
            yield called(score.as_dot, query, floats(KEY), trues("batch 1 keys 1"), but=but)
        yield called(score.cap, of_scores)
        yield called(score.select, CHOSEN["heads"], but=but | {"heads": 8})
    heads = query, key, floats("batch heads keys value_dim")
    but = {"queries": 7, "kv_heads": 6}
    beta = floats("batch heads keys")
    rule, as_many = attnkit.DeltaRule(beta), floats("batch heads keys head_dim")
    last = check_inputs(as_many, *heads[1:], mask=attnkit.Causal(), normalizer=rule)
    yield called(attnkit.DeltaRule, beta)
    yield called(rule.weights, last, trues("keys keys"), but=but)
    yield called(rule.written, last, but=but)
    for normalizer in (attnkit.Softmax(), attnkit.Hard(), attnkit.Linear(), rule):
        yield called(normalizer.select, CHOSEN["heads"], but={"heads": 8})
        inputs = check_inputs(*heads)
        for names in (SCORES, "batch 1 1 keys") if normalizer is not rule else ():
            yield called(normalizer.weights, inputs, trues(names), but={"kv_heads": 6})
    yield called(attnkit.Linear().features, floats("batch heads tokens head_dim"))
    yield called(rule.features, floats("batch heads tokens head_dim"))
    options = {"but": {"kv_heads": 6}}
    yield called(normalizers.masked_scores, inputs, trues(SCORES), **options)
    yield called(normalizers.softmax, of_scores, but={"rows": 6})
    yield called(normalizers.LearnedDeltaRule(6, 27).forward, floats("batch keys key_dim"))


def positions_():
    yield called(attnkit.ALiBi(6).forward, 5, 7)
    yield called(attnkit.RelativeBias1d(6, 3).forward, 5, 7)
    yield called(attnkit.RelativeBias2d(6, 3, 5, num_prefix_tokens=1).forward)
    yield called(attnkit.sincos_1d, 15, 24)
    yield called(attnkit.sincos_2d, (3, 5), 24)
    yield called(attnkit.LearnedPositions1d(20, 24).forward, floats("batch tokens dim"))
    line, grid = attnkit.Rotary1d(22, 7), attnkit.Rotary2d(24, (1, 7))
    yield called(line.forward, floats("batch heads keys head_dim"), floats(KEY), but={"queries": 7})
    query, key = floats("batch heads keys dim"), floats("batch kv_heads keys dim")
    yield called(grid.forward, query, key, but={"queries": 7, "head_dim": 24})
    yield called(line.rotation_at, integers("batch tokens", below="keys"))
    yield called(grid.rotation, integers("batch patches", below="keys"))
    tables = [*[floats("batch 1 keys bands")] * 2, *[floats("batch 1 queries bands")] * 2]
    yield called(Rotation, *tables)
    yield called(Rotation(*tables).__call__, floats(QUERY), floats(KEY))
    yield called(Rotation(*tables).queries_at, integers("rows", below="keys"))


def maps():
    x = floats("batch channels height width")
    for kind in (attnkit.SpatialAttention, attnkit.DualAttention, attnkit.CBAM, attnkit.SCSE):
        yield called(kind(18).forward, x)
    yield called(attnkit.Combined(nn.Conv2d(18, 3, 2), nn.ReLU()).forward, x)
    for layer, size in (
        (attnkit.ChannelAttention(18), 18),
        (attnkit.CrossCovarianceAttention(18, num_heads=2), 9),
        (attnkit.TransposedAttention(18, num_heads=2), 9),
        (attnkit.ContextAttention(18, reduction=4), 0),
    ):
        yield called(layer.forward, x)
        yield called(layer.attention_weights, x, **THE_ONE, but={"head_channels": size})
    yield called(attnkit.insert_attention, models.ResNet(18, 31), "se", example=x)


def tokens():
    images, x = floats("batch channels height width"), floats("batch tokens dim")
    yield called(layers.TransformerBlock(24, 2).forward, x, query_tokens=5)
    yield called(attnkit.AttentionPool(24, 2).forward, x, trues("batch tokens"))
    yield called(attnkit.AttentionPool(24, 2, num_queries=5).forward, x)
    options = {"image_size": (12, 20), "patch_size": 4, "in_channels": 18, "num_classes": 31}
    vit = attnkit.ViT(**options, dim=24, depth=1, num_heads=2)
    for method in (vit.forward, vit.features, vit.tokens):
        yield called(method, images)
    yield called(vit.layers, images, [0])
    yield called(models.PackedImages, floats("patches pixels"), [(3, 5)])
    yield called(models.PackedImages.of, [floats("channels height width")], (4, 4))


def graphs():
    x, edge_index = floats("nodes channels"), integers("2 edges", below="nodes")
    graph = edge_index, floats("edges edge_dim")
    options = {"edge_dim": 17, "add_self_loops": True, "fill_value": floats("edge_dim")}
    yield called(attnkit.GraphAttention, 18, 13, **options)
    layer = attnkit.GraphAttention(18, 13, 6, edge_dim=17)
    yield called(layer.forward, x, *graph)
    yield called(layer.check, x, *graph)
    yield called(layer.attention_weights, x, *graph, **CHOSEN)
    batch = floats("batch nodes channels")
    yield called(layer.forward, batch, *graph)
    yield called(layer.attention_weights, batch, *graph, **CHOSEN)
    pair = floats("sources source_channels"), floats("targets target_channels")
    plain = edge_index, floats("edges")
    layer = attnkit.GraphAttention((8, 10), 13, 6, edge_dim=1)
    yield called(layer.forward, pair, *plain)
    yield called(layer.attention_weights, pair, *plain, **CHOSEN)
    inner = attnkit.GraphAttention(18, 18, edge_dim=17)
    block = layers.GraphBlock(18, inner, nn.Identity())
    yield called(block.forward, x, attnkit.Edges(edge_index, 19), graph[1])
    relations = torch.arange(23) % 5
    layer = attnkit.RGATAttention(18, 13, 5, heads=6, edge_dim=17)
    yield called(layer.forward, x, edge_index, relations, graph[1])
    yield called(layer.attention_weights, x, edge_index, relations, graph[1], **CHOSEN)
    cites, writes = ("paper", "cites", "paper"), ("author", "writes", "paper")
    metadata = ["paper", "author"], [cites, writes]
    nodes = {"paper": floats("nodes channels"), "author": floats("sources channels")}
    of_types = {cites: edge_index[:, :20], writes: edge_index[:, 20:]}
    for kind in (attnkit.HGTAttention, attnkit.HANAttention):
        layer = kind(18, 78, metadata, 6)
        yield called(layer.forward, nodes, of_types)
        yield called(layer.attention_weights, nodes, of_types, **CHOSEN)
    typed = attnkit.TypedEdges(edge_index, 19, relations, 5)
    yield called(attnkit.TypedEdges, edge_index, 19, relations, 5)
    yield called(typed.summed, floats("heads nodes channels"), "across-relation")
    typed = attnkit.TypedEdges(of_types, {"paper": 19, "author": 29})
    yield called(typed.of_sources, cites, nodes["paper"])
    yield called(typed.by_type, floats("edges heads"))
    wanted = torch.randperm(99)[: SIZES["targets"]]
    yield called(layers.ReceptiveField.of, edge_index, 99, wanted, 2)
    field = layers.ReceptiveField.of(edge_index, 19, torch.tensor([3, 5]), 2)
    yield called(layers.ReceptiveField, field.nodes, field.edges, field.kept)
    yield called(field.rows, x)
    yield called(layers.SparseDropout().forward, x.to_sparse_csr())
    yield called(layers.SparseLinear(18, 78).forward, x.to_sparse_csr())
    yield called(attnkit.GAT(18, 16, 31, edge_dim=17).forward, x, *graph, but={"rows": 19})
    for model in (attnkit.SGFormer(18, 16, 31), attnkit.Polynormer(18, 16, 31)):
        yield called(model.forward, x, edge_index, batch=torch.zeros(19).long(), but={"rows": 19})
    inputs, labels = (x, *graph), torch.arange(19) % 31
    model = attnkit.GAT(18, 16, 31, edge_dim=17)
    yield called(attnkit.diagnose_attention, model, inputs, labels=labels)
    node = int(edge_index[1].mode().values)
    yield called(attnkit.edge_fidelity, model, inputs, floats("edges"), node)
    seen = attnkit.explain(model, inputs, index=node)
    for name in ("share", "edges", "edge_index", "candidates"):
        yield called(getattr(attnkit.Explanation, name).fget, seen)
    model = attnkit.GraphTransformer(18, 16, 31, edge_dim=17, position_dim=30, readout="edge")
    options = {"batch": torch.zeros(19).long(), "positions": floats("nodes position_dim")}
    options["pairs"] = integers("2 pairs", below="nodes")
    yield called(model.forward, x, *graph, **options, but={"rows": 37})


def captioning():
    images, size = floats("batch channels height width"), (12, 20)
    of_images = {"image_size": size, "in_channels": 18}
    cnn = {**of_images, "stages": ((4,), (6,), (8,))}
    for encoder in (
        attnkit.CNNEncoder(**cnn, dim=24),
        attnkit.ViTEncoder(**of_images, patch_size=4, dim=24, depth=1),
    ):
        yield called(encoder.check, images)
        yield called(encoder.grid_of, images)
        yield called(encoder.forward, images)
    large = {"height": 96, "width": 160}
    encoder = attnkit.TimmEncoder("test_resnet", (96, 160), 18, dim=24)
    yield called(encoder.forward, torch.rand(2, 18, 96, 160), but=large)
    memory, there = floats("batch positions memory_dim"), trues("batch positions")
    words = integers("batch words", below="vocabulary_size")
    sizes, of_memory = (33, 40), {"dim": 24, "memory_dim": 28}
    for decoder, heads in (
        (attnkit.TransformerDecoder(*sizes, num_heads=6, depth=1, **of_memory), 6),
        (attnkit.RecurrentDecoder(*sizes, doubly_stochastic=1.0, **of_memory), 1),
        (attnkit.HardRecurrentDecoder(*sizes, **of_memory), 1),
    ):
        decoder.eval()
        yield called(decoder.forward, memory, words, there)
        yield called(decoder.word_weights, memory, words, there, but={"heads": heads})
        yield called(decoder.loss, memory, words, there)
        logits, said = floats("batch words vocabulary_size"), words[:, [0, *range(32)]]
        yield called(decoder.word_losses, logits, said)
        yield called(decoder.check, memory, words, there)
        yield called(decoder.start, memory, there)
        yield called(decoder.step, words[:, 0], decoder.start(memory, there))
        for options in ({"memory_mask": there}, {"num_return": 3, "method": "beam"}):
            options["return_weights"] = True
            said = attnkit.generate(decoder, memory, **options).words.shape[-1]
            but = {"words": said, "heads": heads}
            yield called(attnkit.generate, decoder, memory, **options, but=but)
        captioner = attnkit.Captioner(attnkit.CNNEncoder(**cnn, dim=28), decoder)
        yield called(captioner.grid_of, images)
        yield called(captioner.encode, images)
        yield called(captioner.forward, images, words)
        yield called(captioner.loss, images, words)
        said = captioner.generate(images).words.shape[1]
        yield called(captioner.generate, images, but={"words": said})


def interpret():
    options = {"image_size": (12, 20), "patch_size": 4, "in_channels": 18, "num_classes": 31}
    vit = attnkit.ViT(**options, dim=24, depth=1, num_heads=2)
    images, classes = floats("batch channels height width"), integers("batch", below="classes")
    yield called(attnkit.explain, vit, images, classes)
    seen = attnkit.explain(vit, images)
    for name in ("share", "map", "tokens", "words", "images"):
        yield called(getattr(attnkit.Explanation, name).fget, seen)
    map = floats("batch map_height map_width")
    yield called(attnkit.explain, vit, images, classes, map)
    yield called(attnkit.perturbation_curves, vit, images, classes, map, but={"points": 4})
    masks = torch.ones(shape("batch mask_height mask_width"), dtype=torch.bool)
    yield called(attnkit.trust, vit, images, classes, map, masks=masks, but={"points": 4})


EXAMPLES = {
    "attention": attention,
    "masks": masks_,
    "scores and normalizers": scores_and_normalizers,
    "positions": positions_,
    "maps": maps,
    "tokens": tokens,
    "graphs": graphs,
    "captioning": captioning,
    "interpret": interpret,
}


@cache
@torch.no_grad()
def shown_by(name: str) -> set[str]:
    """What the examples of that name held against its annotations."""
    return set().union(*EXAMPLES[name]())


@pytest.mark.parametrize("name", EXAMPLES)
def test_arguments_and_results_have_the_shapes_that_signatures_say(name):
    assert shown_by(name)


def test_every_signature_with_shapes_has_an_example():
    shown = set().union(*map(shown_by, EXAMPLES))
    wanted = {
        name for name, hints in public().items() if any(map(any, map(tensors_of, hints.values())))
    }
    assert len(wanted) > 60
    assert sorted(wanted - shown) == []


def test_no_public_signature_has_a_tensor_without_a_shape():
    bare = {
        f"{name}, {argument}"
        for name, hints in public().items()
        for argument, hint in hints.items()
        if is_bare(hint)
    }
    assert sorted(bare) == []


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch.jit.script ends with Python 3.13")
def test_signatures_are_without_shapes_for_torchscript_where_it_compiles_them():
    gates = attnkit.SqueezeExcitation, attnkit.EfficientChannelAttention, attnkit.GatedSum
    grids = attnkit.LearnedPositions2d, attnkit.FactorizedPositions2d
    for module in (
        *(kind(18) for kind in gates),
        *(kind((3, 5), 24) for kind in grids),
        layers.PatchEmbedding((4, 4), 18, 24),
        models.ResNet(18, 31),
    ):
        torch.jit.script(module)


def test_dimensions_have_the_same_names_everywhere(repository):
    names = set()
    for path in (repository / "attnkit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Annotated":
                names |= {*re.findall(r"[a-z]\w*", ast.literal_eval(node.slice.elts[1]))}
    assert names == {*SIZES}


def weigh(
    query: Annotated[Tensor, "*batch queries dim"],
    key: Annotated[Tensor, "*batch keys dim"],
    mask: Annotated[Tensor, "#batch #queries #keys", bool] | None = None,
) -> tuple[Annotated[Tensor, "*batch queries keys"], Annotated[Tensor, "rows", int]]:
    return query @ key.mT, torch.arange(4)


ONES = torch.ones
RIGHT = (ONES(2, 5, 24), ONES(2, 7, 24)), (ONES(5, 24), ONES(7, 24), ONES(1, 7).bool())
WRONG = {
    "another size": (ONES(2, 5, 23), ONES(2, 7, 23)),
    "another batch": (ONES(2, 5, 24), ONES(1, 7, 24)),
    "a dimension too few": (ONES(2, 5, 24), ONES(7, 24)),
    "swapped": (ONES(2, 7, 24), ONES(2, 5, 24)),
    "integers": (ONES(2, 5, 24).int(), ONES(2, 7, 24).int()),
    "not to be broadcast": (*RIGHT[0], ONES(2, 5).bool()),
    "too large to be broadcast": (*RIGHT[0], ONES(1, 2, 5, 7).bool()),
    "no booleans": (*RIGHT[0], ONES(5, 7)),
    "no tensor": (*RIGHT[0], True),
}


@pytest.mark.parametrize("arguments", RIGHT)
def test_the_checker_passes_what_fits(arguments):
    assert "weigh" in called(weigh, *arguments)


@pytest.mark.parametrize("case", WRONG)
def test_the_checker_fails_on_what_does_not_fit(case):
    with pytest.raises(AssertionError, match=r"weigh, (query|key|mask): expected"):
        called(weigh, *WRONG[case])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("*batch keys queries", "rows"),
        ("*batch queries", "rows"),
        ("*batch queries keys words", "rows"),
        ("*batch queries keys", "keys"),
        ("*batch queries keys", "rows+1"),
    ],
)
def test_the_checker_fails_on_a_wrong_result(first, second, monkeypatch):
    wrong = tuple[Annotated[Tensor, first], Annotated[Tensor, second, int]]
    monkeypatch.setitem(weigh.__annotations__, "return", wrong)
    with pytest.raises(AssertionError, match="weigh, return: expected"):
        called(weigh, *RIGHT[0])
