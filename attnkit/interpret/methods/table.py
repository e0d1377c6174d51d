"""The table of all methods by name."""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from attnkit.interpret.methods import edges, words
from attnkit.interpret.methods.attention import (
    attention,
    legrad,
    relevance,
    rollout,
    value_weighted,
)
from attnkit.interpret.methods.grad_cam import grad_cam
from attnkit.interpret.methods.gradients import centre, input_gradient, integrated_gradients, random
from attnkit.interpret.methods.occlusion import occlusion
from attnkit.interpret.methods.question import Target


class Method(NamedTuple):
    """A method that gives each unit of an input a number.

    functions: function by unit: from a `Question` (patches) to [batch, tokens], prefix included, or
        [batch, rows, columns]; from `Sentences` (words) to [batch, words, rows, columns]; from a
        `GraphQuestion` (edges) to [edges + 1], added self-loops last.
    has_target: whether it depends on the class.
    layers: the units for which layers can be chosen.
    is_signed: whether numbers may be negative, which is evidence against the class.
    """

    functions: Mapping[str, Callable[..., Tensor]]
    has_target: bool = True
    layers: tuple[str, ...] = ()
    is_signed: bool = False

    def options(self, unit: str = "patch") -> tuple[str, ...]:
        """Return the names of the method's own options for a unit."""
        parameters = inspect.signature(self.functions[unit]).parameters.values()
        return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "attention": Method(
            {"patch": attention, "word": words.attention, "edge": edges.attention},
            has_target=False,
            layers=("patch", "word", "edge"),
        ),
        "value_weighted": Method({"patch": value_weighted}, has_target=False, layers=("patch",)),
        "rollout": Method({"patch": rollout}, has_target=False, layers=("patch",)),
        "relevance": Method(
            {"patch": relevance, "word": words.relevance, "edge": edges.relevance},
            layers=("patch", "edge"),
        ),
        "legrad": Method({"patch": legrad}, layers=("patch",)),
        "grad_cam": Method({"patch": grad_cam}, layers=("patch",)),
        "input_gradient": Method(
            {"patch": input_gradient, "word": words.input_gradient, "edge": edges.input_gradient},
            layers=("edge",),
        ),
        "integrated_gradients": Method({"patch": integrated_gradients}, is_signed=True),
        "removal_gradient": Method({"edge": edges.removal_gradient}, layers=("edge",)),
        "occlusion": Method(
            {"patch": occlusion, "word": words.occlusion, "edge": edges.occlusion}, is_signed=True
        ),
        "random": Method(
            {"patch": random, "word": words.random, "edge": edges.random}, has_target=False
        ),
        "centre": Method({"patch": centre, "word": words.centre}, has_target=False),
    }
)
USUAL = {
    "patch": ("relevance", "grad_cam", "input_gradient", "occlusion"),
    "word": ("relevance", "attention", "input_gradient", "occlusion"),
    "edge": ("relevance", "occlusion"),
}
"""The methods to try in order if none is given; each requires less of a model than the one before.
"""
_KINDS = {"patch": "images", "word": "a captioner", "edge": "a graph"}
_OTHERS = {"patch": ", a function or a map", "word": "", "edge": ", or numbers [edges]"}


def methods_of(unit: str) -> list[str]:
    """Return the names of the methods for a unit."""
    return [name for name, method in METHODS.items() if unit in method.functions]


def check_method(
    method: str, target: Target, has_target: bool, options: Mapping[str, Any]
) -> Callable[..., Tensor]:
    """Check that a method fits the question and options, and return its function.

    Args:
        has_target: whether the user gave a class.

    Raises:
        ValueError: no method of this unit; a class or layers that the method does not use.
        TypeError: an option that the method does not have.
    """
    unit, kind = target.unit, _KINDS[target.unit]
    if method not in methods_of(unit):
        raise no_method(unit, repr(method))
    known = METHODS[method]
    if has_target and not known.has_target and unit != "word":  # a word's target is the sentence
        knowing = ", ".join(name for name in methods_of(unit) if METHODS[name].has_target)
        raise ValueError(
            f"target: {method!r} gives the same map for every class; leave it out, or take one of "
            f"{knowing}"
        )
    given = {"layers": target.layers}
    given["num_prefix_tokens"] = getattr(target, "num_prefix_tokens", None)
    for name, value in given.items():
        if value is not None and unit not in known.layers:
            raise ValueError(f"{name}: {method!r} does not use attention layers; leave it out")
    for option in options:
        own = known.options(unit)
        if option not in own:
            has = f"has {', '.join(own)}" if own else "has no options"
            raise TypeError(f"{option}: {method!r}{'' if unit == 'patch' else f' of {kind}'} {has}")
    return known.functions[unit]


def no_method(unit: str, got: str) -> ValueError:
    """Return the error that names the methods of a unit."""
    names = ", ".join(methods_of(unit))
    return ValueError(
        f"method: expected one of {names}{_OTHERS[unit]} for {_KINDS[unit]}, got {got}"
    )
