"""Selects layers of a model that are known only once it has run."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

Layers = int | str | Sequence[int | str] | None
"""Positions or names (`*` matches anything); None for all."""


class LayerChoice:
    """The layers asked for.

    Args:
        layers: as a user gives them.
        known: the names that positions count, in their order; None: those that run, as they run.
    """

    def __init__(self, layers: Layers, known: Sequence[str] | None = None) -> None:
        self.asked: list[int | str] | None = None
        if layers is not None:
            self.asked = [layers] if isinstance(layers, int | str) else list(layers)
        self.is_known = known is not None
        self.known = list(known or ())
        self.ran: dict[str, list[object]] = {}
        """An item for each time that a layer ran."""

    @property
    def names(self) -> list[str]:
        """What positions count."""
        return self.known if self.is_known else [*self.ran]

    def has(self, name: str) -> bool:
        """Whether a layer is asked for, as far as the model has run."""
        return self.asked is None or any(self._is_meant(asked, name) for asked in self.asked)

    def may_have(self, name: str) -> bool:
        """Whether it is, or may be once more layers have run, which puts it further from the
        end."""
        if self.has(name) or self.is_known or name not in self.names:
            return self.has(name)
        from_end = self.names.index(name) - len(self.names)
        return any(isinstance(asked, int) and asked < from_end for asked in self.asked or ())

    def is_sure(self, name: str) -> bool:
        """Whether it is, however many layers run after it."""
        if self.asked is None or self.is_known:
            return self.has(name)
        lasting = [asked for asked in self.asked if isinstance(asked, str) or asked >= 0]
        return any(self._is_meant(asked, name) for asked in lasting)

    def check(self, others: Sequence[str] = ()) -> None:
        """ValueError if something that is asked for is neither a layer nor one of the others."""
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
