"""Every method by its name."""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from attnkit.interpret.methods.attention import attention, value_weighted
from attnkit.interpret.methods.controls import centre, random
from attnkit.interpret.methods.flow import relevance, rollout
from attnkit.interpret.methods.grad_cam import grad_cam
from attnkit.interpret.methods.gradients import input_gradient, integrated_gradients
from attnkit.interpret.methods.legrad import legrad
from attnkit.interpret.methods.occlusion import occlusion
from attnkit.interpret.methods.question import Question
from attnkit.interpret.methods.tokens import watch


def rolled_out(question: Question) -> Tensor:
    chain = watch(question, "rollout")
    return rollout(chain.steps, chain.start)


def relevant(question: Question) -> Tensor:
    chain = watch(question, "relevance")
    return relevance(chain.steps, chain.start, chain.output_gradients(question))


rolled_out.__doc__, relevant.__doc__ = rollout.__doc__, relevance.__doc__


class Method(NamedTuple):
    """A function from a question to [batch, tokens], prefix included, or [batch, rows, columns].

    has_target: whether it depends on the class.
    has_layers: whether layers can be chosen.
    is_signed: whether a number may be negative, which speaks against the class.
    """

    function: Callable[..., Tensor]
    has_target: bool = True
    has_layers: bool = True
    is_signed: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        """The names of its own options."""
        parameters = inspect.signature(self.function).parameters.values()
        return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "attention": Method(attention, has_target=False),
        "value_weighted": Method(value_weighted, has_target=False),
        "rollout": Method(rolled_out, has_target=False),
        "relevance": Method(relevant),
        "legrad": Method(legrad),
        "grad_cam": Method(grad_cam),
        "input_gradient": Method(input_gradient, has_layers=False),
        "integrated_gradients": Method(integrated_gradients, has_layers=False, is_signed=True),
        "occlusion": Method(occlusion, has_layers=False, is_signed=True),
        "random": Method(random, has_target=False, has_layers=False),
        "centre": Method(centre, has_target=False, has_layers=False),
    }
)
