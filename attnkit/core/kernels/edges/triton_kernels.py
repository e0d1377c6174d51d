"""The Triton kernels of attention over edges; the only file that imports Triton.

One program computes one lane, a head of a batch item, of one chunk of a node's edges. Lanes come
first in the grid, so that the heads of a node, which stand side by side in memory, are read
together. Score and gradients, where s_e is the score of edge e from source j to target i:

    s_e = Σ_c factor_c · match_c(q_i, k_j)      match = q · k, factor = scale; or
                                                match = activation(q + k), factor = vector
    p_e = exp(s_e − lse_i),   d s_e = p_e (keep_e g_i · v_j − delta_i),   delta_i = g_i · output_i

Tables come as (pointer, batch, head, node): a pointer and the strides of [batch, heads, nodes,
channels], the channels side by side. All is computed in float32.
"""

import triton
import triton.language as tl


@triton.jit
def _place(table, batch, head, node):
    """Where the channels of a node begin; of several nodes if there are several."""
    # in 64 bits: nodes × heads × channels need not fit in 32
    place = table.pointer + batch.to(tl.int64) * table.batch + head.to(tl.int64) * table.head
    return place + node.to(tl.int64) * table.node


@triton.jit
def _row(table, batch, head, node, DIM: tl.constexpr):
    """One node's channels, [1, columns], with zeros after DIM."""
    columns = tl.arange(0, triton.next_power_of_2(DIM))
    place = _place(table, batch, head, node)
    return tl.load(place + columns, columns < DIM, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _rows(table, batch, head, nodes, is_edge, DIM: tl.constexpr):
    """The channels of each edge's node, [edges, columns], with zeros where there is no edge."""
    columns = tl.arange(0, triton.next_power_of_2(DIM))
    places = _place(table, batch, head, nodes)[:, None] + columns[None, :]
    wanted = is_edge[:, None] & (columns < DIM)[None, :]
    return tl.load(places, wanted, other=0.0).to(tl.float32)


@triton.jit
def _store(table, batch, head, node, row, DIM: tl.constexpr):
    """The channels [columns] of a node."""
    columns = tl.arange(0, triton.next_power_of_2(DIM))
    tl.store(_place(table, batch, head, node) + columns, row, columns < DIM)


@triton.jit
def _store_sums(sums, batch, head, node, slot, row, DIM: tl.constexpr):
    """The channels [columns] of a node, or of the part of it that has a slot."""
    if slot < 0:
        _store(sums.whole, batch, head, node, row, DIM)
    else:
        _store(sums.parts, batch, head, slot, row, DIM)


@triton.jit
def _factor(tables, numbers, batch, head, SCORE: tl.constexpr, DIM: tl.constexpr):
    if SCORE == "dot":
        return tl.full((1, triton.next_power_of_2(DIM)), numbers.scale, tl.float32)
    else:
        return _row(tables.vector, batch, head, tl.zeros((), tl.int32), DIM)


@triton.jit
def _match(query, key, numbers, SCORE: tl.constexpr):
    if SCORE == "dot":
        return query * key
    elif SCORE == "tanh":
        return 2 * tl.sigmoid(2 * (query + key)) - 1
    else:
        both = query + key
        return tl.where(both > 0, both, numbers.slope * both)


@triton.jit
def _match_gradient(query, key, other, numbers, SCORE: tl.constexpr):
    """Of the match, towards query if `other` is key, towards key if it is query."""
    if SCORE == "dot":
        return other
    elif SCORE == "tanh":
        tanh = _match(query, key, numbers, SCORE)
        return 1 - tanh * tanh
    else:
        return tl.where(query + key > 0, 1.0, numbers.slope)


@triton.jit
def _keep(places, batch, head, numbers):
    """What dropout multiplies the weights of edges by, drawn from a counter: the place of the edge
    in the order of targets, batch item and head. So every kernel draws the same."""
    if numbers.seed is None:
        return tl.full(places.shape, 1.0, tl.float32)
    else:
        place = places.to(tl.uint32)
        zero = place * 0
        item, head = zero + batch.to(tl.uint32), zero + head.to(tl.uint32)
        bits, _, _, _ = tl.philox(tl.load(numbers.seed), place, item, head, zero)
        kept = tl.uint_to_uniform_float(bits) >= numbers.dropout_p
        return tl.where(kept, 1 / (1 - numbers.dropout_p), 0.0)


@triton.jit
def _chunk(chunks, num_heads, num_lanes):
    """Which batch item and head, and which edges of which node, this program computes."""
    lane, chunk = tl.program_id(0) % num_lanes, tl.program_id(0) // num_lanes
    node, slot = tl.load(chunks.node + chunk), tl.load(chunks.slot + chunk)
    start, stop = tl.load(chunks.start + chunk), tl.load(chunks.stop + chunk)
    return lane // num_heads, lane % num_heads, node, slot, start, stop


@triton.jit
def forward_kernel(
    tables,
    source,
    chunks,
    output,
    lse,
    numbers,
    SCORE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """output_i = Σ_e p_e keep_e v_j and lse_i = log Σ_e exp s_e, in one pass over the edges."""
    batch, head, node, slot, start, stop = _chunk(chunks, numbers.num_heads, numbers.num_lanes)
    kv_head = head // numbers.groups
    q = _row(tables.query, batch, head, node, DIM)
    factor = _factor(tables, numbers, batch, head, SCORE, DIM)
    largest = -float("inf")
    total = 0.0
    sums = tl.zeros((triton.next_power_of_2(VALUE_DIM),), tl.float32)
    for first in range(start, stop, BLOCK):
        places = first + tl.arange(0, BLOCK)
        is_edge = places < stop
        nodes = tl.load(source + places, is_edge, other=0)
        k = _rows(tables.key, batch, kv_head, nodes, is_edge, DIM)
        v = _rows(tables.value, batch, kv_head, nodes, is_edge, VALUE_DIM)
        score = tl.sum(factor * _match(q, k, numbers, SCORE), axis=1)
        score = tl.where(is_edge, score, -float("inf"))
        larger = tl.maximum(largest, tl.max(score, axis=0))
        weight = tl.exp(score - larger)
        decay = tl.exp(largest - larger)
        total = total * decay + tl.sum(weight, axis=0)
        kept = weight * _keep(places, batch, head, numbers)
        sums = sums * decay + tl.sum(kept[:, None] * v, axis=0)
        largest = larger
    total = tl.maximum(total, 1.0)  # the largest score alone counts 1, unless there are no edges
    _store_sums(output, batch, head, node, slot, sums / total, VALUE_DIM)
    _store_sums(lse, batch, head, node, slot, largest + tl.log(total), 1)


@triton.jit
def target_gradients_kernel(
    tables,
    source,
    chunks,
    output,
    lse,
    gradient,
    delta,
    query_gradient,
    vector_parts,
    numbers,
    SCORE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """delta_i; d q_i = factor Σ_e d s_e ∂match/∂q; of each chunk Σ_e d s_e match, for d vector."""
    batch, head, node, slot, start, stop = _chunk(chunks, numbers.num_heads, numbers.num_lanes)
    kv_head = head // numbers.groups
    q = _row(tables.query, batch, head, node, DIM)
    g = _row(gradient, batch, head, node, VALUE_DIM)
    factor = _factor(tables, numbers, batch, head, SCORE, DIM)
    logarithm = tl.load(_place(lse, batch, head, node))
    shift = tl.sum(g * _row(output, batch, head, node, VALUE_DIM))
    tl.store(_place(delta, batch, head, node), shift)  # every chunk of the node stores the same
    query_sums = tl.zeros((triton.next_power_of_2(DIM),), tl.float32)
    vector_sums = query_sums
    for first in range(start, stop, BLOCK):
        places = first + tl.arange(0, BLOCK)
        is_edge = places < stop
        nodes = tl.load(source + places, is_edge, other=0)
        k = _rows(tables.key, batch, kv_head, nodes, is_edge, DIM)
        v = _rows(tables.value, batch, kv_head, nodes, is_edge, VALUE_DIM)
        match = _match(q, k, numbers, SCORE)
        score = tl.sum(factor * match, axis=1)
        weight = tl.where(is_edge, tl.exp(score - logarithm), 0.0)
        keep = _keep(places, batch, head, numbers)
        slope = (weight * (keep * tl.sum(g * v, axis=1) - shift))[:, None]  # d score
        query_sums += tl.sum(slope * _match_gradient(q, k, k, numbers, SCORE), axis=0)
        if vector_parts is not None:
            vector_sums += tl.sum(slope * match, axis=0)
    query_row = tl.sum(factor, axis=0) * query_sums
    _store_sums(query_gradient, batch, head, node, slot, query_row, DIM)
    if vector_parts is not None:
        _store(vector_parts, batch, head, tl.program_id(0) // numbers.num_lanes, vector_sums, DIM)


@triton.jit
def source_gradients_kernel(
    tables,
    target,
    places_by_source,
    chunks,
    lse,
    gradient,
    delta,
    key_gradient,
    value_gradient,
    numbers,
    SCORE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """d k_j = factor Σ_e d s_e ∂match/∂k and d v_j = Σ_e p_e keep_e g_i, over the edges in the
    order of their sources. Query heads that share a key head are read one after the other."""
    num_kv_heads = numbers.num_heads // numbers.groups
    num_kv_lanes = numbers.num_lanes // numbers.groups
    batch, kv_head, node, slot, start, stop = _chunk(chunks, num_kv_heads, num_kv_lanes)
    k = _row(tables.key, batch, kv_head, node, DIM)
    v = _row(tables.value, batch, kv_head, node, VALUE_DIM)
    key_row = tl.zeros((triton.next_power_of_2(DIM),), tl.float32)
    value_row = tl.zeros((triton.next_power_of_2(VALUE_DIM),), tl.float32)
    for member in range(numbers.groups):
        head = kv_head * numbers.groups + member
        factor = _factor(tables, numbers, batch, head, SCORE, DIM)
        key_sums = tl.zeros((triton.next_power_of_2(DIM),), tl.float32)
        for first in range(start, stop, BLOCK):
            order = first + tl.arange(0, BLOCK)
            is_edge = order < stop
            nodes = tl.load(target + order, is_edge, other=0)
            places = tl.load(places_by_source + order, is_edge, other=0)
            q = _rows(tables.query, batch, head, nodes, is_edge, DIM)
            g = _rows(gradient, batch, head, nodes, is_edge, VALUE_DIM)
            logarithm = tl.load(_place(lse, batch, head, nodes), is_edge, other=0.0)
            shift = tl.load(_place(delta, batch, head, nodes), is_edge, other=0.0)
            score = tl.sum(factor * _match(q, k, numbers, SCORE), axis=1)
            weight = tl.where(is_edge, tl.exp(score - logarithm), 0.0)
            keep = _keep(places, batch, head, numbers)
            value_row += tl.sum((keep * weight)[:, None] * g, axis=0)
            slope = (weight * (keep * tl.sum(g * v, axis=1) - shift))[:, None]  # d score
            key_sums += tl.sum(slope * _match_gradient(q, k, q, numbers, SCORE), axis=0)
        key_row += tl.sum(factor, axis=0) * key_sums
    _store_sums(key_gradient, batch, kv_head, node, slot, key_row, DIM)
    _store_sums(value_gradient, batch, kv_head, node, slot, value_row, VALUE_DIM)


@triton.jit
def _split(split, num_heads, num_lanes):
    """Which batch item and head of which node this program puts together, and from which slots."""
    lane, index = tl.program_id(0) % num_lanes, tl.program_id(0) // num_lanes
    node, first = tl.load(split.node + index), tl.load(split.first + index)
    return lane // num_heads, lane % num_heads, node, first, tl.load(split.last + index)


@triton.jit
def merge_kernel(output, lse, split, num_heads, num_lanes, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """The output of a node from those of its chunks: a softmax again, of lse over the chunks."""
    batch, head, node, first_slot, last_slot = _split(split, num_heads, num_lanes)
    largest = -float("inf")
    total = 0.0
    sums = tl.zeros((triton.next_power_of_2(DIM),), tl.float32)
    for first in range(first_slot, last_slot, BLOCK):
        slots = first + tl.arange(0, BLOCK)
        is_slot = slots < last_slot
        rows = _rows(output.parts, batch, head, slots, is_slot, DIM)
        score = tl.load(_place(lse.parts, batch, head, slots), is_slot, other=-float("inf"))
        larger = tl.maximum(largest, tl.max(score, axis=0))
        weight = tl.exp(score - larger)
        decay = tl.exp(largest - larger)
        total = total * decay + tl.sum(weight, axis=0)
        sums = sums * decay + tl.sum(weight[:, None] * rows, axis=0)
        largest = larger
    _store(output.whole, batch, head, node, sums / total, DIM)
    _store(lse.whole, batch, head, node, largest + tl.log(total), 1)


@triton.jit
def sum_kernel(sums, split, num_heads, num_lanes, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient of a node from those of its chunks, always added in the same order."""
    batch, head, node, first_slot, last_slot = _split(split, num_heads, num_lanes)
    row = tl.zeros((triton.next_power_of_2(DIM),), tl.float32)
    for first in range(first_slot, last_slot, BLOCK):
        slots = first + tl.arange(0, BLOCK)
        row += tl.sum(_rows(sums.parts, batch, head, slots, slots < last_slot, DIM), axis=0)
    _store(sums.whole, batch, head, node, row, DIM)
