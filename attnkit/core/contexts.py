"""The state that `with` blocks change, for the code inside them only or for the whole process.

Global lists and hooks are visible to every thread and asyncio task. The items that a block opens
are therefore kept in a context variable, which threads and tasks do not share. A change that can
only be made for the whole process, such as replacing a function, is made by the first block that
needs it and undone by the last, in whatever order the blocks of several threads end.
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
    """A block that opened an item; a task that was started inside may run on after its end."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.is_running = True


class _Thread(local):
    def __init__(self) -> None:
        self.blocks: tuple[_Block[Any], ...] = ()


class Opened(Generic[Item]):
    """The items that the blocks around the running code have opened.

    Compiled code reads the items of its thread and does not distinguish tasks: before version 2.14
    torch does not trace context variables, and it does not set them (pytorch 186449).
    """

    def __init__(self, name: str) -> None:
        self.variable: ContextVar[tuple[_Block[Item], ...]] = ContextVar(name, default=())
        self._thread = _Thread()

    def get(self) -> tuple[Item, ...]:
        """Return the items, that of the innermost block last."""
        blocks = self._get()
        return tuple([block.item for block in blocks if block.is_running]) if blocks else ()

    @contextmanager
    def opened(self, item: Item) -> Iterator[None]:
        """Add the item in the block."""
        block = _Block(item)
        self._set((*self._get(), block))
        try:
            yield
        finally:
            block.is_running = False
            self._set(tuple([other for other in self._get() if other.is_running]))

    @contextmanager
    def limited(self, stop: int) -> Iterator[tuple[Item, ...]]:
        """Keep only the items `[:stop]` open in the block; yields all items that were open."""
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
    """Enter `change()` for the process in this block, once for all open blocks of the same key."""
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
    """Undo the change of `shared(key, …)` in the block, for all threads."""
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
    """Run compiled modules uncompiled in the block, in all threads: torch has one stance."""
    # not a function of ours, which torch.compile would trace after a graph break
    return shared("stance", partial(torch.compiler.set_stance, "force_eager"))


@contextmanager
def compiled() -> Iterator[None]:
    """Run compiled functions compiled in the block, also inside `uncompiled`; for programs of ours
    that would hold all scores in memory if they ran uncompiled.

    Modes that handle torch's functions are off in the block, because torch.compile would trace
    them, and compiles nothing if it cannot. Compiled modules of other threads also run compiled
    meanwhile. A stance that was set inside the block of `uncompiled` is "force_eager" afterwards.
    """
    with _paused("stance"), ExitStack() as stack:
        while torch._C._len_torch_function_stack():
            stack.enter_context(overrides._pop_mode_temporarily())
        yield


def dispatch_flags_kept() -> AbstractContextManager[None]:
    """Restore torch's flags of dispatch modes after the last block; to be opened around a
    `TorchDispatchMode`.

    torch keeps one flag for the process that says whether a mode is open, and each mode restores
    the value it found. With two threads the last could leave the flag set, and torch.compile would
    compile nothing any more.
    """
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
        set_flag: Any = getattr(
            _python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None
        )
        if set_flag is not None:
            set_flag(flags.get("_is_in_any_mode_without_ignore_compile_internals", False))
