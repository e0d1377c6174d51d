"""Plans: what masks answer for blocks of queries, against what they say of each query and key."""

from random import Random

import numpy as np
import pytest
import torch
from random_masks import random_grid, random_mask, random_sizes

import attnkit
from attnkit import Blocks, Causal, Dense, Packed, Padding, Window, Window2d
from attnkit.core.masks import Mask, Plan, QueryBlocks

CPU = torch.device("cpu")
NONE, SOME, ALL = 0, 1, 2


def table(plan: Plan, num_keys: int) -> np.ndarray:
    """The answers for each key, [items, heads, blocks, keys]."""
    answers = np.zeros((*plan.shape, num_keys), int)
    for row, runs in zip(answers.reshape(-1, num_keys), plan.simplified().rows(), strict=True):
        for start, end, kind in runs:
            row[start:end] = kind
    return answers


def truth(mask: Mask, blocks: QueryBlocks, num_queries: int, num_keys: int) -> np.ndarray:
    allowed = mask.dense(num_queries, num_keys, CPU).expand(-1, -1, num_queries, num_keys).numpy()
    rows = [
        np.where(part.all(2), ALL, np.where(part.any(2), SOME, NONE))
        for start, stop in zip(blocks.start, blocks.stop, strict=True)
        for part in [allowed[:, :, start:stop]]
    ]
    return np.stack(rows, axis=2)


def of_size(size, num_queries, num_keys):
    return QueryBlocks.of_size(size, num_queries, num_keys)


def agree(mask: Mask, size: int, num_queries: int, num_keys: int) -> np.ndarray:
    """Assert that what a plan promises is true. For which keys it promises less than it could."""
    blocks = of_size(size, num_queries, num_keys)
    answers = table(mask.plan(blocks), num_keys)
    answers, true = np.broadcast_arrays(answers, truth(mask, blocks, num_queries, num_keys))
    assert (answers[answers != SOME] == true[answers != SOME]).all()
    return (answers == SOME) & (true != SOME)


def test_what_compositions_promise_is_true():
    loose = []
    for seed in range(200):
        draw = Random(seed)
        sizes = random_sizes(draw)
        size = draw.choice([1, 3, 8, 64])
        loose.append(agree(random_mask(draw, 3, sizes), size, *sizes[2:]).mean())
        grid = random_grid(draw)
        agree(grid, size, grid.num_tokens, grid.num_tokens)
    assert np.mean(loose) < 0.2  # most is promised


@pytest.mark.parametrize(
    "mask",
    [
        Causal("top_left"),
        Causal("bottom_right"),
        Window(5, 3, "bottom_right"),
        Window(None, 2, "top_left"),
        Window(3, None, "bottom_right"),
        Padding(torch.tensor([0, 7, 31])),
        Padding(torch.rand(3, 31, generator=torch.manual_seed(0)) > 0.5),
        Blocks(torch.rand(2, 6, 7, generator=torch.manual_seed(0)) > 0.5, (8, 5)),
    ],
    ids=str,
)
def test_single_masks_are_known_exactly(mask):
    assert not agree(mask, 8, 43, 31).any()


def test_packed_sequences_are_known_where_a_block_lies_in_one():
    mask = Packed([16, 0, 8, 24], [5, 3, 0, 2])
    assert not agree(mask, 8, 48, 10).any()
    assert not agree(Packed([16, 8, 24]) & Causal(), 8, 48, 48).any()


def test_a_dense_mask_is_known_in_blocks_of_64_keys():
    allowed = torch.zeros(1, 1, 96, 200, dtype=torch.bool)
    allowed[:, :, :32, :64] = allowed[:, :, 32:64, 128:] = True
    allowed[:, :, 64:, 130] = True
    answers = table(Dense(allowed).plan(of_size(32, 96, 200)), 200)[0, 0]
    assert (answers[0] == [ALL] * 64 + [NONE] * 136).all()
    assert (answers[1] == [NONE] * 128 + [ALL] * 72).all()
    assert (answers[2] == [NONE] * 128 + [SOME] * 64 + [NONE] * 8).all()


def test_scattered_padding_is_known_in_blocks_of_64_keys():
    """A run for each change would take longer than the attention, and flash then computes it."""
    real = torch.rand(2, 2048, generator=torch.manual_seed(0)) < 0.7
    real[:, :64], real[1, 64:128] = True, False
    mask = Padding(real)
    answers = table(mask.plan(of_size(64, 128, 2048)), 2048)
    for item, second in ((0, SOME), (1, NONE)):
        expected = [ALL] * 64 + [second] * 64 + [SOME] * (2048 - 128)
        assert (answers[item, 0] == expected).all()
    query = torch.empty(2, 4, 2048, 64)
    assert attnkit.explain_backends(query, query, query, mask=mask).chosen == "flash"
    some = torch.arange(2048).expand(2, -1) < 500
    assert (
        attnkit.explain_backends(query, query, query, mask=Padding(some)).chosen == "block_sparse"
    )


def test_a_mask_of_ones_own_is_read_within_its_band():
    class Odd(Mask):
        def allows(self, batch, head, query, key, num_queries, num_keys):
            return ((query + key) % 2 == 1) & ((query - key).abs() <= 3)

        def band(self, num_queries, num_keys):
            return -3, 3

    answers = table(Odd().plan(of_size(4, 16, 16)), 16)[0, 0]
    assert [row.tolist() for row in np.nonzero(answers[1])] == [[*range(1, 11)]]
    assert answers.max() == SOME
    agree(Odd() & Causal(), 4, 16, 16)
    agree(~Odd() | Window(2, 2), 4, 16, 16)


def test_a_grid_reads_the_rows_it_may_reach():
    answers = table(Window2d(8, 8, 1, 1, 1).plan(of_size(8, 65, 65)), 65)[0, 0]
    assert (answers[0] != NONE).all()  # with the prefix, which sees everything
    assert np.flatnonzero(answers[3]).tolist() == [0, *range(1 + 8, 1 + 5 * 8)]


def counts(mask, num_queries, num_keys, size=64):
    blocks = of_size(size, num_queries, num_keys)
    found = mask.plan(blocks).simplified().count(size)
    return found.full, found.partial, found.skipped


def test_blocks_are_counted():
    assert counts(Causal(), 256, 256) == (6, 4, 6)
    assert counts(Window(64, 64), 256, 256) == (4, 6, 6)
    assert counts(Packed([128, 128]), 256, 256) == (8, 0, 8)
    assert counts(Padding(torch.tensor([256, 100])), 256, 256) == (16 + 4, 4, 8)
    assert counts(Causal() & Padding(torch.tensor([100])), 256, 256) == (3, 4, 9)
    assert counts(Causal() | Packed([128, 128]), 256, 256) == (12, 0, 4)
    assert counts(~Causal(), 256, 256) == (6, 4, 6)
    assert counts(Window(None, None), 100, 70) == (4, 0, 0)  # the last blocks are cut
    real = torch.tensor([[True, False] * 64 + [False] * 64 + [True] * 64])
    assert counts(Padding(real), 64, 256) == (1, 2, 1)


def test_explanations_say_what_a_mask_costs():
    query = torch.empty(2, 3, 256, 8)
    explanation = attnkit.explain_backends(query, query, query, mask=Causal())
    assert explanation.blocks.share == 10 / 16
    line = "blocks of 64 × 64: 6 full, 4 partial, 6 skipped, 0.625 of the dense cost"
    assert str(explanation).endswith(line)
    assert attnkit.explain_backends(query, query, query).blocks is None


@pytest.mark.parametrize("seed", range(10))
def test_blocks_and_counts_are_of_the_answers(seed):
    draw = Random(seed)
    for _ in range(20):
        sizes = random_sizes(draw)
        num_queries, num_keys = sizes[2:]
        plan = random_mask(draw, 2, sizes).plan(of_size(8, num_queries, num_keys)).simplified()
        answers, size = table(plan, num_keys), draw.choice([3, 8, 16])
        columns = [answers[..., start : start + size] for start in range(0, num_keys, size)]
        full = np.stack([(column == ALL).all(-1) for column in columns], axis=-1)
        seen = np.stack([(column != NONE).any(-1) for column in columns], axis=-1)
        row, column, is_full = plan.blocks(size)
        assert (np.stack([row, column]) == seen.reshape(-1, seen.shape[-1]).nonzero()).all()
        assert (is_full == full[seen]).all()
        found = plan.count(size)
        assert (found.full, found.partial) == (full.sum(), (seen & ~full).sum())
        assert found.skipped == (~seen).sum()


def test_a_million_tokens_take_little_memory():
    packed = Packed(torch.full((1000,), 1000))
    blocks = of_size(64, 10**6, 10**6)
    for mask in (packed & Causal(), packed | Window(9, 9), Causal() & ~Window(100, 100)):
        plan = mask.plan(blocks).simplified()
        assert plan.ends.nbytes + plan.kinds.nbytes < 10**6
