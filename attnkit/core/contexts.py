"""What a `with` block changes: for the code inside it alone, or, where it must be, for the process.

Lists and hooks of a process are seen by every thread and asyncio task. What a block opens is
therefore kept in a context variable, which threads and tasks do not share. What only the whole
process can have, such as a function that is replaced, is changed by the first block that needs it
and changed back by the last, in whatever order blocks of several threads end.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from threading import RLock, local
from typing import Any, Generic, TypeVar

import torch
from torch import overrides
from torch.utils import _python_dispatch

Item = TypeVar("Item")


class _Block(Generic[Item]):
    """A block that opened an item. A task that was started inside it may outlive it."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.is_running = True


class _Thread(local):
    def __init__(self) -> None:
        self.blocks: tuple[_Block[Any], ...] = ()


class Opened(Generic[Item]):
    """The items that the blocks around the running code have opened.

    Compiled code reads those of its thread and does not tell tasks apart: torch traces no context
    variable before version 2.14, and does not set one (pytorch 186449).
    """

    def __init__(self, name: str) -> None:
        self.variable: ContextVar[tuple[_Block[Item], ...]] = ContextVar(name, default=())
        self._thread = _Thread()

    def get(self) -> tuple[Item, ...]:
        """The items, that of the innermost block last."""
        blocks = self._get()
        return tuple([block.item for block in blocks if block.is_running]) if blocks else ()

    @contextmanager
    def opened(self, item: Item) -> Iterator[None]:
        """In the block the item is one of them."""
        block = _Block(item)
        self._set((*self._get(), block))
        try:
            yield
        finally:
            block.is_running = False
            self._set(tuple([other for other in self._get() if other.is_running]))

    @contextmanager
    def limited(self, stop: int) -> Iterator[tuple[Item, ...]]:
        """In the block only the first are open, `[:stop]` of them; gives all that were."""
        before = self._get()
        running = tuple([block for block in before if block.is_running])
        self._set(running[:stop])
        try:
            yield tuple([block.item for block in running])
        finally:
            self._set(before)

    def _get(self) -> tuple[_Block[Item], ...]:
        return self._thread.blocks if torch.compiler.is_compiling() else self.variable.get()

    def _set(self, blocks: tuple[_Block[Item], ...]) -> None:
        self._thread.blocks = blocks
        if not torch.compiler.is_compiling():
            self.variable.set(blocks)


_lock = RLock()
_changes: dict[Hashable, tuple[AbstractContextManager[Any], int]] = {}
_pauses: Counter[Hashable] = Counter()


@contextmanager
def shared(key: Hashable, change: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """In the block, and in others of the same key, the process is changed by `change()`, once."""
    with _lock:
        if key in _changes:
            made, number = _changes[key]
        else:
            made, number = change(), 0
            made.__enter__()
            if _pauses[key]:
                made.__exit__(None, None, None)
        _changes[key] = made, number + 1
    try:
        yield
    finally:
        with _lock:
            made, number = _changes.pop(key)
            if number > 1:
                _changes[key] = made, number - 1
            elif not _pauses[key]:
                made.__exit__(None, None, None)


@contextmanager
def _paused(key: Hashable) -> Iterator[None]:
    """In the block the process is as it was before `shared(key, …)` changed it, in all threads."""
    with _lock:
        if key in _changes and not _pauses[key]:
            _changes[key][0].__exit__(None, None, None)
        _pauses[key] += 1
    try:
        yield
    finally:
        with _lock:
            _pauses[key] -= 1
            if key in _changes and not _pauses[key]:
                _changes[key][0].__enter__()


def uncompiled() -> AbstractContextManager[None]:
    """In the block compiled modules run uncompiled, in all threads: torch has one stance."""
    # no function of ours, which torch.compile would trace where it runs what it could not compile
    return shared("stance", partial(torch.compiler.set_stance, "force_eager"))


@contextmanager
def compiled() -> Iterator[None]:
    """In the block compiled functions run compiled, also inside `uncompiled`: for programs of ours
    that hold all scores in memory when they are not compiled.

    Modes that see torch's functions are off: torch.compile would trace them, and where it cannot it
    compiles nothing. While it lasts, compiled modules of other threads run compiled, too. A stance
    that was set inside the block of `uncompiled` is "force_eager" afterwards.
    """
    with _paused("stance"), ExitStack() as stack:
        while torch._C._len_torch_function_stack():
            stack.enter_context(overrides._pop_mode_temporarily())
        yield


def dispatch_flags_kept() -> AbstractContextManager[None]:
    """Around a `TorchDispatchMode`: torch keeps for the process whether there is one, and each mode
    puts back what it found. Of two threads the last would leave that there is one, and then
    torch.compile compiles nothing any more."""
    return shared("dispatch flags", _dispatch_flags_kept)


@contextmanager
def _dispatch_flags_kept() -> Iterator[None]:
    flags = {
        name: flag for name, flag in vars(_python_dispatch).items() if name.startswith("_is_in")
    }
    try:
        yield
    finally:
        vars(_python_dispatch).update(flags)
        told: Any = getattr(
            _python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None
        )
        if told is not None:
            told(flags.get("_is_in_any_mode_without_ignore_compile_internals", False))
