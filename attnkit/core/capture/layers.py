"""Selection of layers of a model whose names may be known only once it has run."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

Layers = int | str | Sequence[int | str] | None
"""Positions or names (`*` matches anything); None for all."""


class LayerChoice:
    """The layers that a user selects.

    Args:
        layers: the user's argument.
        known: the names in the order that positions refer to; None: the layers in the order in
            which they run.
    """

    def __init__(self, layers: Layers, known: Sequence[str] | None = None) -> None:
        self.asked: list[int | str] | None = None
        if layers is not None:
            self.asked = [layers] if isinstance(layers, int | str) else list(layers)
        self.is_known = known is not None
        self.known = list(known or ())
        self.ran: dict[str, list[object]] = {}
        """For each layer that ran, one item per run."""

    @property
    def names(self) -> list[str]:
        """The names that positions refer to."""
        return self.known if self.is_known else [*self.ran]

    def has(self, name: str) -> bool:
        """Return whether a layer is selected, given the layers that have run so far."""
        return self.asked is None or any(self._is_meant(asked, name) for asked in self.asked)

    def may_have(self, name: str) -> bool:
        """Return whether a layer is selected, or may be once more layers have run: a position that
        counts from the end then refers to an earlier layer than now."""
        if self.has(name) or self.is_known or name not in self.names:
            return self.has(name)
        from_end = self.names.index(name) - len(self.names)
        return any(isinstance(asked, int) and asked < from_end for asked in self.asked or ())

    def is_sure(self, name: str) -> bool:
        """Return whether a layer is selected however many layers run after it."""
        if self.asked is None or self.is_known:
            return self.has(name)
        lasting = [asked for asked in self.asked if isinstance(asked, str) or asked >= 0]
        return any(self._is_meant(asked, name) for asked in lasting)

    def check(self, others: Sequence[str] = ()) -> None:
        """Raise ValueError if a selection matches neither a layer nor one of the other names."""
        names = list(dict.fromkeys([*self.names, *self.ran]))
        for asked in self.asked or ():
            if not any(self._is_meant(asked, name) for name in (*names, *others)):
                ran = "" if self.is_known else " that ran"
                raise ValueError(
                    f"layers: {asked!r} is none of the {len(names)} attention layers{ran}: "
                    f"{', '.join(name or '(the model)' for name in names)}"
                )

    def _is_meant(self, asked: int | str, name: str) -> bool:
        if isinstance(asked, str):
            return fnmatchcase(name, asked)
        return -len(self.names) <= asked < len(self.names) and self.names[asked] == name
