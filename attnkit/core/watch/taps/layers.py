"""Which layers of a model are asked for, where only running it tells which there are."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar

Layers = int | str | Sequence[int | str] | None
"""Positions or names (`*` matches anything); None for all."""


class _Named(Protocol):
    @property
    def layer(self) -> str: ...


NamedCall = TypeVar("NamedCall", bound=_Named)


class LayerChoice:
    """Keeps the calls of the layers asked for. A position from the end keeps as many layers as it
    needs until the model has run."""

    def __init__(self, layers: Layers) -> None:
        self.asked = None if layers is None else _as_list(layers)
        self.ran: list[str] = []

    def add(self, call: NamedCall, calls: list[NamedCall]) -> None:
        """A call that ran; what is not asked for any more leaves the calls."""
        if call.layer not in self.ran:
            self.ran.append(call.layer)
        if self.asked is None or self._may_be_asked(call.layer):
            calls.append(call)
            calls[:] = [call for call in calls if self._may_be_asked(call.layer)]

    def finish(self, calls: list[NamedCall]) -> None:
        """The model has run; ValueError where a layer that was asked for has not."""
        if self.asked is None:
            return
        for asked in self.asked:
            if not any(self._is_asked(asked, name) for name in self.ran):
                raise ValueError(
                    f"layers: {asked!r} is none of the {len(self.ran)} attention layers that ran, "
                    f"{', '.join(name or '(the model)' for name in self.ran) or 'as none did'}"
                )
        calls[:] = [
            call for call in calls if any(self._is_asked(asked, call.layer) for asked in self.asked)
        ]

    def _is_asked(self, asked: int | str, name: str) -> bool:
        if isinstance(asked, str):
            return fnmatchcase(name, asked)
        return -len(self.ran) <= asked < len(self.ran) and self.ran[asked] == name

    def _may_be_asked(self, name: str) -> bool:
        if self.asked is None:
            return True
        # while more layers may run, the first from the end may become the second
        from_end = self.ran.index(name) - len(self.ran)
        return any(
            self._is_asked(asked, name) or (isinstance(asked, int) and asked < from_end)
            for asked in self.asked
        )


def _as_list(layers: int | str | Sequence[int | str]) -> list[int | str]:
    return [layers] if isinstance(layers, int | str) else list(layers)
