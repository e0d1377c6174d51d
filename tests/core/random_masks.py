"""Random masks, and compositions of them."""

from random import Random

import torch

from attnkit import Blocks, Causal, Dense, Packed, Padding, Window, Window2d

ALIGN = ("top_left", "bottom_right")


def random_sizes(draw: Random, most: int = 59) -> tuple[int, int, int, int]:
    """Items, query heads, queries and keys."""
    return 2, draw.choice([2, 3, 4]), draw.randint(1, most), draw.randint(1, most)


def random_mask(draw: Random, depth: int, sizes: tuple[int, int, int, int]):
    """A mask for these sizes, of masks combined by `&`, `|` and `~` to at most this depth."""
    while True:
        mask = _composition(draw, depth, sizes)
        try:
            mask.check(*sizes)
        except ValueError:  # ambiguous in one of the sequences of Packed
            continue
        return mask


def random_grid(draw: Random) -> Window2d:
    return Window2d(
        *(draw.randint(1, 13), draw.randint(1, 23)),
        *(draw.randint(0, 3), draw.randint(0, 4)),
        num_prefix_tokens=draw.choice([0, 0, 1, 3]),
    )


def _composition(draw, depth, sizes):
    if depth == 0 or draw.random() < 0.2:
        return _simple(draw, *sizes)
    a, b = (_composition(draw, depth - 1, sizes) for _ in range(2))
    return draw.choice([lambda: a & b, lambda: a | b, lambda: ~a])()


def _simple(draw, items, heads, queries, keys):
    def booleans(share, *shape):
        numbers = torch.tensor([draw.random() for _ in range(torch.Size(shape).numel())])
        return (numbers < share).view(shape)

    def lengths(total, count):
        cuts = sorted(draw.randint(0, total) for _ in range(count - 1))
        ends = torch.tensor([0, *cuts, total])
        return ends.diff()

    def packed():
        count = draw.randint(1, 4)
        return Packed(lengths(queries, count), lengths(keys, count))

    def blocks(*leading):
        rows, columns = draw.choice([(7, 5), (16, 16), (4, 8)])
        grid = booleans(0.4, *leading, -(-queries // rows), -(-keys // columns))
        return Blocks(grid, (rows, columns))

    def dense():
        some = [draw.choice([1, size]) for size in (items, heads, queries, keys)]
        return Dense(booleans(0.9, *some))

    return draw.choice(
        [
            lambda: Causal(draw.choice(ALIGN)),
            lambda: Window(
                draw.choice([None, 0, 3, 17]), draw.choice([None, 0, 5, 11]), draw.choice(ALIGN)
            ),
            lambda: Padding(torch.tensor([draw.randint(0, keys) for _ in range(items)])),
            lambda: Padding(booleans(0.7, items, keys)),
            packed,
            blocks,
            lambda: blocks(heads),
            dense,
        ]
    )()
