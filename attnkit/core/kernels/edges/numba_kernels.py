"""The kernels for edges on a CPU, which numba compiles for the given sizes.

A kernel computes the edges of some nodes, for some lanes one after the other. A lane is a head of a
batch item. No tensor of edges is kept between forward and backward, which computes the weights
again from two numbers of each target.

Tables are float32, and the edges are in the order of their targets. The rows of the nodes at the
other ends of edges are read in random order; they are prefetched `AHEAD` edges in advance.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from numba import float32, njit

from attnkit.core.kernels.edges.numba_vectors import (
    exp,
    fetch,
    integer,
    kept,
    leaky_slope,
    length,
    load,
    load_like,
    number,
    plus,
    plus_times,
    set_number,
    slopes_of_signs,
    store,
    store_signs,
    times,
    total,
    zeros,
)
from attnkit.core.operators.sorting import compiled

CHUNK = 64  # edges that are computed at once; the last target may exceed them
AHEAD = 16
LINE = 64  # bytes of a cache line
LANE_SEED = 0x1E3779B97F4A7C15  # odd and without a pattern, so that lanes have different hashes


class Table(NamedTuple):
    """The address of row 0 of lane 0, and the bytes to the next lane and to the next row."""

    start: int
    lane: int
    row: int


class Graph(NamedTuple):
    """Addresses of `Adjacency`'s tensors, the last edge, the largest number of edges computed at
    once, and whether tables are too large for the cache."""

    offsets: int
    source: int
    by_source: int
    source_offsets: int
    target_by_source: int
    last: int
    at_once: int
    is_large: bool


class Given(NamedTuple):
    """The inputs of attention; an absent table has the address 0.

    vector: a row for each lane, not used by the scaled dot product; features: a row of 8 ·
    num_blocks numbers for each edge; edge_query: an equally wide row for each target; edge_key: a
    row of head_dim numbers for each feature; bias: a number for each edge. Dropout keeps edges
    whose hash is below `threshold` and multiplies them by `keep_scale`, which is 1 without dropout.
    """

    query: Table
    key: Table
    value: Table
    vector: Table
    features: Table
    edge_query: Table
    edge_key: Table
    bias: Table
    num_blocks: int
    scale: float
    negative_slope: float
    first_lane: int
    seed: int
    threshold: int
    keep_scale: float


class Results(NamedTuple):
    """Tables with the output of each target, the weighted sum of features, and two numbers of its
    softmax: the largest score and 1 / Σ exp(score − largest)."""

    output: Table
    sums: Table
    softmax: Table


class Gradients(NamedTuple):
    """Tables of the gradients of outputs and sums, and of those that the backward writes; it adds
    to those of vector, edge_key and features.

    The kernel by_target writes two tables for by_source. pairs: for each edge the weight after
    dropout and the gradient of the score, or of the key itself if that is one number; signs: for
    each edge bits that say where the argument of an additive score is positive.
    """

    output: Table
    sums: Table
    pairs: Table
    signs: Table
    query: Table
    key: Table
    value: Table
    vector: Table
    features: Table
    edge_query: Table
    edge_key: Table
    bias: Table


@njit(nogil=True, forceinline=True)
def _at(table, lane, row):
    return table.start + lane * table.lane + row * table.row


@njit(nogil=True, forceinline=True)
def _fetch_source(graph, edge, table, row, num_bytes):
    """Prefetch the row of the source of a later edge."""
    if graph.is_large:
        coming = integer(graph.source, min(edge + AHEAD, graph.last))
        _fetch_row(table + coming * row, num_bytes)


@njit(nogil=True, forceinline=True)
def _fetch_row(address, num_bytes):
    for line in range(0, num_bytes, LINE):
        fetch(address + line)


@njit(nogil=True, forceinline=True)
def _product(first, second, num_blocks):
    """Compute the scalar product of two rows of 8 · num_blocks numbers."""
    found = zeros(8)
    for block in range(num_blocks):
        found = plus_times(found, load(first + 32 * block, 8), load(second + 32 * block, 8))
    return total(found)


@njit(nogil=True, forceinline=True)
def _add_row(row, other, factor, num_blocks):
    """Add factor · other to row."""
    for block in range(num_blocks):
        place = row + 32 * block
        store(place, plus_times(load(place, 8), load(other + 32 * block, 8), factor))


@njit(nogil=True, forceinline=True)
def _clear_row(row, num_blocks):
    for block in range(num_blocks):
        store(row + 32 * block, zeros(8))


@njit(nogil=True, forceinline=True)
def _dot_score(given, row, key, edge_query, feature):
    """Compute scale · (query · key + edge_query · feature)."""
    score = total(times(row, load_like(key, row)))
    if given.edge_query.start:
        score += _product(edge_query, feature, given.num_blocks)
    return given.scale * score


@njit(nogil=True, forceinline=True)
def _argument(given, row, key, edge_key, feature):
    """Compute the argument of LeakyReLU, query + key + Σ_f feature_f · edge_key_f."""
    found = plus(row, load_like(key, row))
    if given.edge_key.start:
        if length(row) == 1:
            return plus(found, _product(edge_key, feature, given.num_blocks))
        for place in range(8 * given.num_blocks):
            weights = load_like(edge_key + place * given.edge_key.row, row)
            found = plus_times(found, weights, number(feature, place))
    return found


@njit(nogil=True, forceinline=True)
def _additive_score(given, argument, vector):
    """Compute vector · LeakyReLU(argument)."""
    active = times(argument, leaky_slope(argument, given.negative_slope))
    return total(times(active, vector))


@njit(nogil=True, forceinline=True)
def _add_products(rows, feature, active, given):
    """Add feature_f · active to each row f."""
    if length(active) == 1:
        _add_row(rows, feature, total(active), given.num_blocks)
    else:
        for place in range(8 * given.num_blocks):
            row = rows + place * given.edge_key.row
            store(row, plus_times(load_like(row, active), active, number(feature, place)))


@njit(nogil=True, forceinline=True)
def _add_totals(row, edge_key, active, given):
    """Add edge_key_f · active to each number f of the row."""
    if length(active) == 1:
        _add_row(row, edge_key, total(active), given.num_blocks)
    else:
        for place in range(8 * given.num_blocks):
            weights = load_like(edge_key + place * given.edge_key.row, active)
            set_number(row, place, number(row, place) + total(times(active, weights)))


@njit(nogil=True, forceinline=True)
def _following(graph, target, last):
    """Return the end of the targets that are computed at once: the first with CHUNK edges or more
    together, or all that are left."""
    begin = integer(graph.offsets, target)
    while target < last and integer(graph.offsets, target) - begin < CHUNK:
        target += 1
    return target


@njit(nogil=True, forceinline=True)
def _exponentiate(given, lane, begin, count, weights, masks):
    """Replace `count` weights by exp(weight), and write the factors of dropout to masks."""
    seed = given.seed + (given.first_lane + lane) * LANE_SEED
    for place in range(0, count, 8):
        weight = exp(load(weights + 4 * place, 8))
        store(weights + 4 * place, weight)
        if given.keep_scale != 1:
            mask = kept(begin + place, seed, given.threshold, weight)
            store(masks + 4 * place, times(mask, given.keep_scale))


def _copy(source, written, num_numbers, first, last, first_lane, last_lane):
    for lane in range(first_lane, last_lane):
        for row in range(first, last):
            old, new = _at(source, lane, row), _at(written, lane, row)
            for place in range(num_numbers):
                set_number(new, place, number(old, place))


Kernels = tuple[Callable[..., None], Callable[..., None], Callable[..., None]]


@cache
def kernels(is_dot: bool, head_dim: int, value_dim: int) -> Kernels:
    """Return the kernels forward, by_target and by_source; the last two are the backward, in the
    order of targets and then of sources.

    Each takes the graph, the inputs, further tables, memory for 3 + head_dim numbers of each edge
    that is computed at once and for the numbers of the features, the number of the part of the
    work, and the ranges of nodes and lanes, whose ends are exclusive.
    """
    row_bytes, value_bytes = 4 * head_dim, 4 * value_dim

    def forward(graph, given, results, scratch, part, first, last, first_lane, last_lane):
        weights, masks, sums = scratch, scratch + 4 * graph.at_once, scratch + 8 * graph.at_once
        for lane in range(first_lane, last_lane):
            key, value = _at(given.key, lane, 0), _at(given.value, lane, 0)
            vector = load(_at(given.vector, lane, 0), head_dim)
            edge_key, bias = _at(given.edge_key, lane, 0), _at(given.bias, lane, 0)
            target = first
            while target < last:
                begin, following = integer(graph.offsets, target), _following(graph, target, last)
                count = integer(graph.offsets, following) - begin
                for node in range(target, following):
                    row = load(_at(given.query, lane, node), head_dim)
                    edge_query = _at(given.edge_query, lane, node)
                    start, stop = integer(graph.offsets, node), integer(graph.offsets, node + 1)
                    largest = float32(-math.inf)
                    for edge in range(start, stop):
                        _fetch_source(graph, edge, key, given.key.row, row_bytes)
                        if value != key:  # otherwise one table is both
                            _fetch_source(graph, edge, value, given.value.row, value_bytes)
                        other = key + integer(graph.source, edge) * given.key.row
                        feature = _at(given.features, 0, edge)
                        if is_dot:
                            score = _dot_score(given, row, other, edge_query, feature)
                        else:
                            argument = _argument(given, row, other, edge_key, feature)
                            score = _additive_score(given, argument, vector)
                        if given.bias.start:
                            score += number(bias, edge)
                        set_number(weights, edge - begin, score)
                        largest = score if score > largest else largest
                    if largest == -math.inf:
                        largest = float32(0)
                    set_number(_at(results.softmax, lane, node), 0, largest)
                    for place in range(start - begin, stop - begin):
                        set_number(weights, place, number(weights, place) - largest)
                _exponentiate(given, lane, begin, count, weights, masks)
                for node in range(target, following):
                    if results.sums.start:
                        _clear_row(sums, given.num_blocks)
                    start, stop = integer(graph.offsets, node), integer(graph.offsets, node + 1)
                    output, exponentials = zeros(value_dim), float32(0)
                    for edge in range(start, stop):
                        weight = number(weights, edge - begin)
                        exponentials += weight
                        if given.keep_scale != 1:
                            weight *= number(masks, edge - begin)
                        other = value + integer(graph.source, edge) * given.value.row
                        output = plus_times(output, load(other, value_dim), weight)
                        if results.sums.start:
                            feature = _at(given.features, 0, edge)
                            _add_row(sums, feature, weight, given.num_blocks)
                    # a target without edges gets 0
                    inverse = float32(1) / exponentials if exponentials != 0 else float32(0)
                    set_number(_at(results.softmax, lane, node), 1, inverse)
                    store(_at(results.output, lane, node), times(output, inverse))
                    if results.sums.start:
                        mean = _at(results.sums, lane, node)
                        _clear_row(mean, given.num_blocks)
                        _add_row(mean, sums, inverse, given.num_blocks)
                target = following

    def by_target(
        graph, given, results, gradients, scratch, part, first, last, first_lane, last_lane
    ):
        weights, masks, slopes = scratch, scratch + 4 * graph.at_once, scratch + 8 * graph.at_once
        arguments = scratch + 12 * graph.at_once
        for lane in range(first_lane, last_lane):
            key, value = _at(given.key, lane, 0), _at(given.value, lane, 0)
            vector = load(_at(given.vector, lane, 0), head_dim)
            edge_key, bias = _at(given.edge_key, lane, 0), _at(given.bias, lane, 0)
            bias_gradient, pairs = _at(gradients.bias, lane, 0), _at(gradients.pairs, lane, 0)
            vector_gradient = load(_at(gradients.vector, lane, part), head_dim)
            edge_key_gradient = _at(gradients.edge_key, lane, part)
            target = first
            while target < last:
                begin, following = integer(graph.offsets, target), _following(graph, target, last)
                count = integer(graph.offsets, following) - begin
                for node in range(target, following):
                    row = load(_at(given.query, lane, node), head_dim)
                    edge_query = _at(given.edge_query, lane, node)
                    gradient = load(_at(gradients.output, lane, node), value_dim)
                    sums_gradient = _at(gradients.sums, lane, node)
                    shift = number(_at(results.softmax, lane, node), 0)
                    start, stop = integer(graph.offsets, node), integer(graph.offsets, node + 1)
                    for edge in range(start, stop):
                        _fetch_source(graph, edge, key, given.key.row, row_bytes)
                        if value != key:  # otherwise one table is both
                            _fetch_source(graph, edge, value, given.value.row, value_bytes)
                        source = integer(graph.source, edge)
                        other = key + source * given.key.row
                        feature = _at(given.features, 0, edge)
                        if is_dot:
                            score = _dot_score(given, row, other, edge_query, feature)
                        else:
                            argument = _argument(given, row, other, edge_key, feature)
                            store(arguments + (edge - begin) * row_bytes, argument)
                            score = _additive_score(given, argument, vector)
                        if given.bias.start:
                            score += number(bias, edge)
                        set_number(weights, edge - begin, score - shift)
                        other = value + source * given.value.row
                        slope = total(times(gradient, load(other, value_dim)))
                        if gradients.sums.start:
                            slope += _product(sums_gradient, feature, given.num_blocks)
                        set_number(slopes, edge - begin, slope)
                _exponentiate(given, lane, begin, count, weights, masks)
                for node in range(target, following):
                    row = load(_at(given.query, lane, node), head_dim)
                    row_gradient = zeros(head_dim)
                    edge_query = _at(given.edge_query, lane, node)
                    edge_query_gradient = _at(gradients.edge_query, lane, node)
                    if given.edge_query.start:
                        _clear_row(edge_query_gradient, given.num_blocks)
                    gradient = load(_at(gradients.output, lane, node), value_dim)
                    mean = total(times(gradient, load(_at(results.output, lane, node), value_dim)))
                    sums_gradient = _at(gradients.sums, lane, node)
                    if gradients.sums.start:
                        sums = _at(results.sums, lane, node)
                        mean += _product(sums_gradient, sums, given.num_blocks)
                    inverse = number(_at(results.softmax, lane, node), 1)
                    start, stop = integer(graph.offsets, node), integer(graph.offsets, node + 1)
                    for edge in range(start, stop):
                        used = weight = inverse * number(weights, edge - begin)
                        slope = number(slopes, edge - begin)
                        if given.keep_scale != 1:
                            mask = number(masks, edge - begin)
                            used, slope = weight * mask, slope * mask
                        slope = weight * (slope - mean)
                        other = key + integer(graph.source, edge) * given.key.row
                        feature = _at(given.features, 0, edge)
                        feature_gradient = _at(gradients.features, 0, edge)
                        if gradients.bias.start:
                            set_number(bias_gradient, edge, slope)
                        if gradients.features.start and gradients.sums.start:
                            _add_row(feature_gradient, sums_gradient, used, given.num_blocks)
                        if is_dot:
                            slope *= given.scale
                            row_gradient = plus_times(row_gradient, load_like(other, row), slope)
                            if given.edge_query.start:
                                _add_row(edge_query_gradient, feature, slope, given.num_blocks)
                                if gradients.features.start:
                                    _add_row(feature_gradient, edge_query, slope, given.num_blocks)
                        else:
                            argument = load_like(arguments + (edge - begin) * row_bytes, row)
                            active = times(leaky_slope(argument, given.negative_slope), slope)
                            vector_gradient = plus_times(vector_gradient, active, argument)
                            active = times(active, vector)
                            row_gradient = plus(row_gradient, active)
                            if head_dim == 1:
                                slope = total(active)
                            else:
                                store_signs(_at(gradients.signs, lane, edge), argument)
                            if gradients.edge_key.start:
                                _add_products(edge_key_gradient, feature, active, given)
                            if gradients.features.start and given.edge_key.start:
                                _add_totals(feature_gradient, edge_key, active, given)
                        set_number(pairs, 2 * edge, used)
                        set_number(pairs, 2 * edge + 1, slope)
                    store(_at(gradients.query, lane, node), row_gradient)
                target = following
            store(_at(gradients.vector, lane, part), vector_gradient)

    def by_source(graph, given, gradients, scratch, part, first, last, first_lane, last_lane):
        for lane in range(first_lane, last_lane):
            query, gradient = _at(given.query, lane, 0), _at(gradients.output, lane, 0)
            vector = load(_at(given.vector, lane, 0), head_dim)
            pairs, signs = _at(gradients.pairs, lane, 0), _at(gradients.signs, lane, 0)
            for source in range(first, last):
                start = integer(graph.source_offsets, source)
                stop = integer(graph.source_offsets, source + 1)
                row_gradient, value_gradient = zeros(head_dim), zeros(value_dim)
                for place in range(start, stop):
                    if graph.is_large:
                        ahead = min(place + AHEAD, graph.last)
                        coming = integer(graph.target_by_source, ahead)
                        _fetch_row(gradient + coming * gradients.output.row, value_bytes)
                        coming_edge = integer(graph.by_source, ahead)
                        fetch(pairs + 8 * coming_edge)
                        if is_dot:
                            _fetch_row(query + coming * given.query.row, row_bytes)
                        elif head_dim > 1:
                            fetch(signs + coming_edge * gradients.signs.row)
                    edge = integer(graph.by_source, place)
                    target = integer(graph.target_by_source, place)
                    weight, slope = number(pairs, 2 * edge), number(pairs, 2 * edge + 1)
                    other = load(gradient + target * gradients.output.row, value_dim)
                    value_gradient = plus_times(value_gradient, other, weight)
                    if is_dot:
                        other = load(query + target * given.query.row, head_dim)
                        row_gradient = plus_times(row_gradient, other, slope)
                    elif head_dim == 1:
                        row_gradient = plus(row_gradient, slope)
                    else:
                        sign = signs + edge * gradients.signs.row
                        active = slopes_of_signs(sign, given.negative_slope, row_gradient)
                        row_gradient = plus_times(row_gradient, active, slope)
                store(_at(gradients.value, lane, source), value_gradient)
                if not is_dot and head_dim > 1:
                    row_gradient = times(row_gradient, vector)
                store(_at(gradients.key, lane, source), row_gradient)

    return compiled(forward), compiled(by_target), compiled(by_source)


@cache
def copy() -> Callable[..., None]:
    """Return the kernel that copies rows from a table to another, for ranges of rows and lanes.

    torch is not used for this: its threads spin for a while after the copy, on the cores that the
    next tasks need.
    """
    return compiled(_copy)
