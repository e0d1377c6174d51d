"""The quantity that is reported for a class: its probability, logit or a function of logits."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

Kind = Literal["probability", "sigmoid", "logit"]
Of = Kind | Callable[[Tensor], Tensor]
SUM_TOLERANCE, COARSE_SUM_TOLERANCE = 1e-4, 0.02
"""Largest distance of a sum of probabilities from 1, in full and in half precision."""


class Quantity(NamedTuple):
    """A number for each class, computed from a model's logits.

    symbol: symbol in sentences and at axes: "p", "y" or the name of a function.
    meaning: how it is computed from the logits, in words.
    of: the user's choice.
    function: function from logits [..., classes] to numbers [..., classes].
    """

    symbol: str
    meaning: str
    of: Any
    function: Callable[[Tensor], Tensor]

    @property
    def is_usual(self) -> bool:
        """Whether it is the softmax, which needs no explanation."""
        return self.function is _softmax

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the numbers [..., classes] for logits [..., classes].

        Raises:
            TypeError: the caller's function returned another shape.
        """
        values = self.function(logits)
        if not isinstance(values, Tensor) or values.shape != logits.shape:
            got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise TypeError(
                f"of: expected {self.symbol} to return a number for each logit, "
                f"{list(logits.shape)}, got {got}"
            )
        return values


def quantity_of(logits: Tensor, of: Of = "probability") -> Quantity:
    """Return the chosen quantity for the model's kind of output.

    The probability of a single logit is its sigmoid, as in a binary classifier. Outputs that are
    not negative and sum to 1 are the probabilities of a model that ends in a softmax. All other
    logits get a softmax.

    Args:
        logits: [..., classes], for the explained input.
        of: "probability"; "sigmoid" of each logit by itself, for models with several labels;
            "logit", the output itself, also for regression; or a function of the logits.

    Raises:
        ValueError: another name.
    """
    if callable(of):
        name = getattr(of, "__name__", type(of).__name__)
        return Quantity(name, f"{name} of the logits", of, of)
    if of not in get_args(Kind):
        raise ValueError(f"of: expected {', '.join(get_args(Kind))} or a function, got {of!r}")
    if of == "logit":
        return Quantity("y", "the model's output as it is", of, _as_it_is)
    if of == "sigmoid":
        return Quantity("p", "the sigmoid of each logit by itself", of, torch.sigmoid)
    if logits.shape[-1] == 1:
        return Quantity("p", "the sigmoid of the single logit", of, torch.sigmoid)
    if is_distribution(logits):
        return Quantity("p", "the model's output, which sums to 1", of, _as_it_is)
    return Quantity("p", f"the softmax over {logits.shape[-1]} classes", of, _softmax)


def is_distribution(outputs: Tensor) -> bool:
    """Return whether a model's outputs [..., classes] are probabilities, by signs and sums."""
    if outputs.shape[-1] == 1 or bool((outputs < 0).any()):
        return False
    halves = torch.bfloat16, torch.float16
    is_coarse = any(torch.equal(outputs.to(half).to(outputs.dtype), outputs) for half in halves)
    tolerance = COARSE_SUM_TOLERANCE if is_coarse else SUM_TOLERANCE
    return bool(((outputs.sum(dim=-1) - 1).abs() < tolerance).all())


def _as_it_is(logits: Tensor) -> Tensor:
    return logits


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(dim=-1)
