"""FlexAttention's block masks against torch's own, and what they cost."""

from random import Random

import pytest
import torch
from random_masks import random_mask

from attnkit import Causal, Packed, Window, Window2d
from attnkit.core.kernels import flex
from attnkit.core.kernels.flex import block_mask


def as_dense(num_blocks, indices):
    """Which blocks are named, [items, heads, rows, columns]; more than there are here."""
    named = torch.arange(indices.shape[-1]) < num_blocks[..., None]
    dense = torch.zeros(*indices.shape[:-1], 6, dtype=torch.long)
    return dense.scatter_add_(-1, indices.long(), named.long()).bool()


@pytest.mark.parametrize("seed", range(12))
def test_block_masks_have_the_blocks_of_torch(seed, monkeypatch):
    """`create_block_mask` looks at each query and key; the blocks are equal, and so are theirs by
    keys, which the backward reads."""
    from torch.nn.attention.flex_attention import create_block_mask

    monkeypatch.setattr(flex, "BLOCKS_AT_ONCE", 7)
    monkeypatch.setattr(flex, "LISTED", 1)
    draw = Random(seed)
    for _ in range(3):
        sizes = 2, 3, draw.randint(100, 700), draw.randint(100, 700)
        mask = random_mask(draw, draw.randint(0, 3), sizes)
        if draw.random() < 0.2:
            mask = Window2d(draw.randint(5, 30), draw.randint(5, 30), 2, 3, draw.choice([0, 2]))
            sizes = 2, 3, mask.num_tokens, mask.num_tokens
        actual = block_mask(mask, torch.empty(*sizes[:3], 16), sizes[3])

        def allows(b, h, q, k, mask=mask, sizes=sizes):
            return mask.allows(b, h, q, k, *sizes[2:])

        told_apart = [n if part > 1 else None for n, part in zip(sizes, mask.leading, strict=False)]
        expected = create_block_mask(allows, *told_apart, *sizes[2:], device="cpu")
        for side in ("kv", "full_kv", "q", "full_q"):
            names = f"{side}_num_blocks", f"{side}_indices"
            ours, theirs = (
                as_dense(*(getattr(blocks, name) for name in names))
                for blocks in (actual, expected)
            )
            assert torch.equal(ours, theirs), (side, mask)
        assert actual.seq_lengths == expected.seq_lengths
        assert actual.BLOCK_SIZE == expected.BLOCK_SIZE


def test_block_masks_are_made_for_many_tokens():
    """At 100,000 tokens queries × keys are 10 GB of booleans; at a million, blocks × blocks are 244
    MB of numbers for each of four tables."""
    for tokens, mask, most in (
        (100_000, Window(300, 300) & Causal(), 4),
        (100_000, Packed([1000] * 100), 17),
        (10**6, Window(300, 300), 7),
        (10**6, Window(20_000, 0), 158),
    ):
        blocks = block_mask(mask, torch.empty(1, 1, tokens, 1), tokens)
        assert (blocks.kv_num_blocks + blocks.full_kv_num_blocks).max() <= most
        assert blocks.kv_indices.shape == blocks.full_kv_indices.shape  # as one kernel takes it
        assert max(blocks.kv_indices.shape[-1], blocks.q_indices.shape[-1]) <= 256


def test_block_masks_leave_empty_blocks_out():
    query = torch.empty(1, 1, 1024, 16)
    blocks = block_mask(Window(100, 100), query, 1024)
    expected = (torch.arange(8)[:, None] - torch.arange(8)).abs() <= 1
    assert torch.equal(blocks.to_dense()[0, 0].bool(), expected)
    assert block_mask(Window(100, 100), query, 1024) is blocks
    both = [block_mask(Window(100, None) & Causal(), query, 1024) for _ in range(2)]
    assert both[0] is both[1]
    lengths = torch.tensor([512, 512])
    halves = block_mask(Packed(lengths), query, 1024).to_dense()[0, 0].bool()
    assert torch.equal(halves, (torch.arange(8)[:, None] // 4 == torch.arange(8) // 4))
    lengths.copy_(torch.tensor([1024, 0]))  # what it says is not kept
    assert block_mask(Packed(lengths), query, 1024).to_dense().all()
