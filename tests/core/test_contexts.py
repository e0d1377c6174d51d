"""Blocks that change the process: whichever ends first, torch compiles as before at the end."""

from contextlib import ExitStack
from itertools import permutations

import pytest
import torch

from attnkit.core.contexts import compiled, uncompiled


def is_compiled():
    torch._dynamo.reset()  # of one function's code it makes eight programs
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    return bool(calls)


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("begun", [(0, 1, 2), (1, 0, 2)])
def test_blocks_of_several_threads_end_in_any_order(begun, order):
    """A thread that runs one program compiled may outlast the block of another, or precede it."""
    blocks = [ExitStack() for _ in range(3)]
    is_open = [False, False, False]

    def is_right():
        return is_compiled() == (is_open[1] or not (is_open[0] or is_open[2]))

    for number in begun:
        blocks[number].enter_context(compiled() if number == 1 else uncompiled())
        is_open[number] = True
        assert is_right()
    for number in order:
        blocks[number].close()
        is_open[number] = False
        assert is_right()
