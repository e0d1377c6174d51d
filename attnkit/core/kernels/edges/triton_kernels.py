"""The Triton kernels of attention over edges; the only file that imports Triton.

One program computes some heads of a batch item for one chunk of a node's edges, as tiles [edges,
heads, channels]. The heads of a node are contiguous in memory, so that a warp reads its row at
once, and the sums over edges stay in registers. The score s_e of edge e from source j to target i,
and the gradients, are

    s_e = Σ_c factor_c · match_c(q_i, k_j)      match = q · k, factor = scale; or
                                                match = activation(q + k), factor = vector
    p_e = exp(s_e − lse_i),   d s_e = p_e (keep_e g_i · v_j − delta_i),   delta_i = g_i · output_i

A table is (pointer, batch, head, node): a pointer and the strides of [batch, heads, nodes,
channels], with contiguous channels. Everything is computed in float32.
"""

import triton
import triton.language as tl


@triton.jit
def _places(table, batch, heads):
    """Return the addresses of the channels of each head, for node 0, [heads]."""
    # in 64 bits: nodes × heads × channels need not fit in 32
    place = table.pointer + batch.to(tl.int64) * table.batch
    return place + heads.to(tl.int64) * table.head


@triton.jit
def _is_channel(DIM: tl.constexpr):
    """Return which columns of a tile are channels; all if their number is a power of two."""
    columns = tl.arange(0, triton.next_power_of_2(DIM))
    if triton.next_power_of_2(DIM) == DIM:
        return columns >= 0
    else:
        return columns < DIM


@triton.jit
def _row(table, batch, heads, node, DIM: tl.constexpr):
    """Load one node's channels, [heads, columns], with zeros after DIM."""
    columns = tl.arange(0, triton.next_power_of_2(DIM))
    places = (_places(table, batch, heads) + node.to(tl.int64) * table.node)[:, None]
    wanted = _is_channel(DIM)[None, :]
    return tl.load(places + columns[None, :], wanted, other=0.0).to(tl.float32)


@triton.jit
def _numbers(table, batch, heads, nodes, is_edge, other):
    """Load a number of each edge's node, from a table of one channel, [edges, heads]."""
    places = _places(table, batch, heads)[None, :] + (nodes.to(tl.int64) * table.node)[:, None]
    return tl.load(places, is_edge[:, None], other=other)


@triton.jit
def _rows(table, batch, heads, nodes, is_edge, DIM: tl.constexpr):
    """Load the channels of each edge's node, [edges, heads, columns]; zeros if there is no edge."""
    columns = tl.arange(0, triton.next_power_of_2(DIM))[None, None, :]
    node = (nodes.to(tl.int64) * table.node)[:, None, None]
    places = _places(table, batch, heads)[None, :, None] + node + columns
    wanted = is_edge[:, None, None] & _is_channel(DIM)[None, None, :]
    return tl.load(places, wanted, other=0.0).to(tl.float32)


@triton.jit
def _store(table, batch, heads, node, row, DIM: tl.constexpr):
    """Store the channels [heads, columns] of a node."""
    columns = tl.arange(0, triton.next_power_of_2(DIM))
    places = (_places(table, batch, heads) + node.to(tl.int64) * table.node)[:, None]
    tl.store(places + columns[None, :], row, _is_channel(DIM)[None, :])


@triton.jit
def _store_sums(sums, batch, heads, node, slot, row, DIM: tl.constexpr):
    """Store the channels [heads, columns] of a node, or of its part that has this slot."""
    if slot < 0:
        _store(sums.whole, batch, heads, node, row, DIM)
    else:
        _store(sums.parts, batch, heads, slot, row, DIM)


@triton.jit
def _factor(tables, numbers, batch, heads, SCORE: tl.constexpr, DIM: tl.constexpr):
    """Return the factor of the score, [heads, columns], or [1, 1] if it is the same for all."""
    if SCORE == "dot":
        return tl.full((1, 1), numbers.scale, tl.float32)
    else:
        return _row(tables.vector, batch, heads, tl.zeros((), tl.int32), DIM)


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
    """Compute the derivative of the match, by query if `other` is key, by key if it is query."""
    if SCORE == "dot":
        return other
    elif SCORE == "tanh":
        tanh = _match(query, key, numbers, SCORE)
        return 1 - tanh * tanh
    else:
        return tl.where(query + key > 0, 1.0, numbers.slope)


@triton.jit
def _keep(places, batch, heads, numbers):
    """Return the factors of dropout, [edges, heads]. They are drawn from a counter, which is the
    edge's place in the order of targets, batch item and head, so that all kernels draw the same."""
    if numbers.seed is None:
        return tl.full((1, 1), 1.0, tl.float32)
    else:
        zero = places.to(tl.uint32)[:, None] * 0 + heads.to(tl.uint32)[None, :] * 0
        place, head = zero + places.to(tl.uint32)[:, None], zero + heads.to(tl.uint32)[None, :]
        item = zero + batch.to(tl.uint32)
        bits, _, _, _ = tl.philox(tl.load(numbers.seed), place, item, head, zero)
        kept = tl.uint_to_uniform_float(bits) >= numbers.dropout_p
        return tl.where(kept, 1 / (1 - numbers.dropout_p), 0.0)


@triton.jit
def _program(num_heads, num_batches, HEADS: tl.constexpr):
    """Return the batch item, the heads and the number of the chunk that this program computes."""
    num_blocks = num_heads // HEADS
    lane, rest = tl.program_id(0) % (num_batches * num_blocks), tl.program_id(0)
    heads = (lane % num_blocks) * HEADS + tl.arange(0, HEADS)
    return lane // num_blocks, heads, rest // (num_batches * num_blocks)


@triton.jit
def _chunk(chunks, index):
    """Return a chunk's node, the slot of its sums, and its range of edges."""
    node, slot = tl.load(chunks.node + index), tl.load(chunks.slot + index)
    return node, slot, tl.load(chunks.start + index), tl.load(chunks.stop + index)


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
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute output_i = Σ_e p_e keep_e v_j and lse_i = log Σ_e exp s_e in one pass over edges."""
    batch, heads, index = _program(numbers.num_heads, numbers.num_batches, HEADS)
    node, slot, start, stop = _chunk(chunks, index)
    kv_heads = heads // numbers.groups
    q = _row(tables.query, batch, heads, node, DIM)[None]
    factor = _factor(tables, numbers, batch, heads, SCORE, DIM)[None]
    largest = tl.full((HEADS,), -float("inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    sums = tl.zeros((HEADS, triton.next_power_of_2(VALUE_DIM)), tl.float32)
    for first in range(start, stop, BLOCK):
        places = first + tl.arange(0, BLOCK)
        is_edge = places < stop
        nodes = tl.load(source + places, is_edge, other=0)
        k = _rows(tables.key, batch, kv_heads, nodes, is_edge, DIM)
        v = _rows(tables.value, batch, kv_heads, nodes, is_edge, VALUE_DIM)
        score = tl.sum(factor * _match(q, k, numbers, SCORE), axis=2)
        score = tl.where(is_edge[:, None], score, -float("inf"))
        larger = tl.maximum(largest, tl.max(score, axis=0))
        weight = tl.exp(score - larger[None, :])
        decay = tl.exp(largest - larger)
        total = total * decay + tl.sum(weight, axis=0)
        kept = weight * _keep(places, batch, heads, numbers)
        sums = sums * decay[:, None] + tl.sum(kept[:, :, None] * v, axis=0)
        largest = larger
    total = tl.maximum(total, 1.0)  # it is at least 1, for the largest score, if there are edges
    _store_sums(output, batch, heads, node, slot, sums / total[:, None], VALUE_DIM)
    _store_sums(lse, batch, heads, node, slot, (largest + tl.log(total))[:, None], 1)


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
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute delta_i, d q_i = factor Σ_e d s_e ∂match/∂q, and each chunk's part of d vector, Σ_e
    d s_e match."""
    batch, heads, index = _program(numbers.num_heads, numbers.num_batches, HEADS)
    node, slot, start, stop = _chunk(chunks, index)
    kv_heads = heads // numbers.groups
    q = _row(tables.query, batch, heads, node, DIM)[None]
    g = _row(gradient, batch, heads, node, VALUE_DIM)
    factor = _factor(tables, numbers, batch, heads, SCORE, DIM)
    logarithm = tl.sum(_row(lse, batch, heads, node, 1), axis=1)[None, :]
    shift = tl.sum(g * _row(output, batch, heads, node, VALUE_DIM), axis=1)
    _store(delta, batch, heads, node, shift[:, None], 1)  # each chunk of the node stores the same
    query_sums = tl.zeros((HEADS, triton.next_power_of_2(DIM)), tl.float32)
    vector_sums = query_sums
    for first in range(start, stop, BLOCK):
        places = first + tl.arange(0, BLOCK)
        is_edge = places < stop
        nodes = tl.load(source + places, is_edge, other=0)
        k = _rows(tables.key, batch, kv_heads, nodes, is_edge, DIM)
        v = _rows(tables.value, batch, kv_heads, nodes, is_edge, VALUE_DIM)
        match = _match(q, k, numbers, SCORE)
        score = tl.sum(factor[None] * match, axis=2)
        weight = tl.where(is_edge[:, None], tl.exp(score - logarithm), 0.0)
        keep = _keep(places, batch, heads, numbers)
        slope = weight * (keep * tl.sum(g[None] * v, axis=2) - shift[None, :])  # d score
        query_sums += tl.sum(slope[:, :, None] * _match_gradient(q, k, k, numbers, SCORE), axis=0)
        if vector_parts is not None:
            vector_sums += tl.sum(slope[:, :, None] * match, axis=0)
    _store_sums(query_gradient, batch, heads, node, slot, factor * query_sums, DIM)
    if vector_parts is not None:
        _store(vector_parts, batch, heads, index, vector_sums, DIM)


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
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute d k_j = factor Σ_e d s_e ∂match/∂k and d v_j = Σ_e p_e keep_e g_i over the edges in
    the order of their sources. Query heads that share a key head are read one after the other."""
    num_kv_heads = numbers.num_heads // numbers.groups
    batch, kv_heads, index = _program(num_kv_heads, numbers.num_batches, HEADS)
    node, slot, start, stop = _chunk(chunks, index)
    k = _row(tables.key, batch, kv_heads, node, DIM)[None]
    v = _row(tables.value, batch, kv_heads, node, VALUE_DIM)[None]
    key_row = tl.zeros((HEADS, triton.next_power_of_2(DIM)), tl.float32)
    value_row = tl.zeros((HEADS, triton.next_power_of_2(VALUE_DIM)), tl.float32)
    for member in range(numbers.groups):
        heads = kv_heads * numbers.groups + member
        factor = _factor(tables, numbers, batch, heads, SCORE, DIM)
        key_sums = tl.zeros((HEADS, triton.next_power_of_2(DIM)), tl.float32)
        for first in range(start, stop, BLOCK):
            order = first + tl.arange(0, BLOCK)
            is_edge = order < stop
            nodes = tl.load(target + order, is_edge, other=0)
            q = _rows(tables.query, batch, heads, nodes, is_edge, DIM)
            g = _rows(gradient, batch, heads, nodes, is_edge, VALUE_DIM)
            logarithm = _numbers(lse, batch, heads, nodes, is_edge, 0.0)
            shift = _numbers(delta, batch, heads, nodes, is_edge, 0.0)
            score = tl.sum(factor[None] * _match(q, k, numbers, SCORE), axis=2)
            weight = tl.where(is_edge[:, None], tl.exp(score - logarithm), 0.0)
            if numbers.seed is None:
                kept = weight
                slope = weight * (tl.sum(g * v, axis=2) - shift)  # d score
            else:
                places = tl.load(places_by_source + order, is_edge, other=0)
                keep = _keep(places, batch, heads, numbers)
                kept = weight * keep
                slope = weight * (keep * tl.sum(g * v, axis=2) - shift)
            value_row += tl.sum(kept[:, :, None] * g, axis=0)
            key_sums += tl.sum(slope[:, :, None] * _match_gradient(q, k, q, numbers, SCORE), axis=0)
        key_row += factor * key_sums
    _store_sums(key_gradient, batch, kv_heads, node, slot, key_row, DIM)
    _store_sums(value_gradient, batch, kv_heads, node, slot, value_row, VALUE_DIM)


@triton.jit
def _split(split, index):
    """Return the node that this program merges, and the range of its slots."""
    first, last = tl.load(split.first + index), tl.load(split.last + index)
    return tl.load(split.node + index), first, last


@triton.jit
def merge_kernel(
    output, lse, split, num_heads, num_batches, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute the output of a node from those of its chunks, by a softmax of their lse."""
    batch, heads, index = _program(num_heads, num_batches, 1)
    node, first_slot, last_slot = _split(split, index)
    largest = tl.full((1,), -float("inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    sums = tl.zeros((1, triton.next_power_of_2(DIM)), tl.float32)
    for first in range(first_slot, last_slot, BLOCK):
        slots = first + tl.arange(0, BLOCK)
        is_slot = slots < last_slot
        rows = _rows(output.parts, batch, heads, slots, is_slot, DIM)
        score = _numbers(lse.parts, batch, heads, slots, is_slot, -float("inf"))
        larger = tl.maximum(largest, tl.max(score, axis=0))
        weight = tl.exp(score - larger[None, :])
        decay = tl.exp(largest - larger)
        total = total * decay + tl.sum(weight, axis=0)
        sums = sums * decay[:, None] + tl.sum(weight[:, :, None] * rows, axis=0)
        largest = larger
    _store(output.whole, batch, heads, node, sums / total[:, None], DIM)
    _store(lse.whole, batch, heads, node, (largest + tl.log(total))[:, None], 1)


@triton.jit
def sum_kernel(sums, split, num_heads, num_batches, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the gradient of a node from those of its chunks, always added in the same order."""
    batch, heads, index = _program(num_heads, num_batches, 1)
    node, first_slot, last_slot = _split(split, index)
    row = tl.zeros((1, triton.next_power_of_2(DIM)), tl.float32)
    for first in range(first_slot, last_slot, BLOCK):
        slots = first + tl.arange(0, BLOCK)
        row += tl.sum(_rows(sums.parts, batch, heads, slots, slots < last_slot, DIM), axis=0)
    _store(sums.whole, batch, heads, node, row, DIM)
