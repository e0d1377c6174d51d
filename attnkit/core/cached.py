"""A property that is computed once."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import torch

Value = TypeVar("Value")


class cached(Generic[Value]):
    """`functools.cached_property` that torch.compile can trace: there it is computed each time,
    unless it was kept before."""

    def __init__(self, function: Callable[[Any], Value]) -> None:
        self.func, self.__doc__ = function, function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> "cached[Value]": ...

    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...

    def __get__(self, instance: Any, owner: type) -> Any:
        """Called unless the instance has an attribute of this name: the value that was kept."""
        if instance is None:
            return self
        value = self.func(instance)
        if not torch.compiler.is_compiling():
            vars(instance)[self.name] = value
        return value
