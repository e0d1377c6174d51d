"""Hard attention, one key for each query, drawn or the best, and the record of the draws."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.core.contexts import Opened
from attnkit.core.inputs import Inputs
from attnkit.core.kernels.base import Backend
from attnkit.core.kernels.recompute import in_blocks
from attnkit.core.masks.base import Dense
from attnkit.core.normalizers import Hard, masked_scores, revived


@dataclass(frozen=True)
class Draw:
    """The draws of one call; probability and entropy are 0 for a row that may look nowhere.

    index: the key that each query looks at; −1 for a row that may look nowhere.
    log_probability: the logarithm of the probability of the draw, differentiable.
    entropy: −Σ_j p_j log p_j of the distribution of the draw, in nats, differentiable.
    """

    index: Annotated[Tensor, "batch heads queries", int]
    log_probability: Annotated[Tensor, "batch heads queries"]
    entropy: Annotated[Tensor, "batch heads queries"]


_OPEN: Opened[list[Draw]] = Opened("records of draws")


@contextmanager
def record_draws() -> Iterator[list[Draw]]:
    """Collect, in order, the draws of `Hard("score_function")` inside the `with` block.

        with attnkit.record_draws() as draws:
            output = model(x)
        reward = -loss_per_item(output).detach()
        log_probability = sum(draw.log_probability.sum((1, 2)) for draw in draws)
        loss = loss_per_item(output).mean() - ((reward - baseline) * log_probability).mean()

    The second term is the score-function estimator (REINFORCE, Williams 1992): its gradient is, on
    average, that of the expected reward. A baseline that does not depend on the draw, such as a
    moving average of rewards, lowers the variance and does not change the average. Draws of other
    threads and asyncio tasks are not collected.
    """
    draws: list[Draw] = []
    with _OPEN.opened(draws):
        yield draws


class HardKernel(Backend):
    """The kernel for `Hard` with any score, in blocks of queries; it reads the value of one key."""

    name = "hard"
    normalizers = (Hard,)
    has_all_derivatives = True

    def reasons(self, inputs: Inputs) -> Iterator[str]:
        return iter(())

    def compute(self, inputs: Inputs) -> Tensor:
        assert isinstance(inputs.normalizer, Hard)
        by_score_function = inputs.normalizer.estimator == "score_function"
        # during a backward pass it is activation checkpointing that runs the forward again
        again = by_score_function and torch._C._current_graph_task_id() != -1
        # checkpoint with use_reentrant=False serves the graph of the forward, by hooks
        if again and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            raise RuntimeError(
                "normalizer: Hard('score_function') cannot train in a reentrant checkpoint, whose "
                "draws have no gradient; give checkpoint(..., use_reentrant=False)"
            )
        recorded = by_score_function and (bool(_OPEN.get()) or again)
        if by_score_function and not recorded and _are_trained(inputs):
            raise RuntimeError(
                "normalizer: Hard('score_function') needs the probabilities of its draws to "
                "train, but they are not recorded; call inside "
                "`with attnkit.record_draws() as draws:`, or under torch.no_grad()"
            )
        if inputs.num_keys == 0:
            inputs = _with_a_hidden_key(inputs)
        output, *draw = in_blocks(inputs, partial(_pick, recorded=recorded))
        if recorded and not again:  # the second run repeats the same draws
            for draws in _OPEN.get():
                draws.append(Draw(*draw))
        return output.to(inputs.query.dtype)


def _with_a_hidden_key(inputs: Inputs) -> Inputs:
    """Return inputs without keys with one hidden key, so that a largest score exists."""
    key, value = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (inputs.key, inputs.value))
    nobody = Dense(torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=key.device))
    return replace(inputs, key=key, value=value, mask=nobody, bias=None)


def _are_trained(inputs: Inputs) -> bool:
    tensors = (inputs.query, inputs.key, inputs.bias, *vars(inputs.score).values())
    return torch.is_grad_enabled() and any(
        isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors
    )


def _pick(block: Inputs, allowed: Tensor | None, *, recorded: bool) -> tuple[Tensor, ...]:
    assert isinstance(block.normalizer, Hard)
    scores, dead = revived(masked_scores(block, allowed))
    if block.normalizer.draws:
        # the largest of scores with Gumbel noise is a draw from their softmax (Gumbel 1954)
        noise = torch.empty_like(scores).exponential_().log()
        noisy = (scores - noise) / block.normalizer.temperature
        index = noisy.detach().argmax(dim=-1, keepdim=True)
    else:
        index = scores.detach().argmax(dim=-1, keepdim=True)
    output = block.value.gather(2, index.expand(-1, -1, -1, block.value.shape[3]))
    if block.normalizer.estimator == "straight_through":
        soft = noisy.softmax(dim=-1)
        # adds exactly 0, with the gradient of the soft weights
        output = output + (soft - soft.detach()) @ block.value.detach()
    output = (output * F.dropout(torch.ones_like(output[..., :1]), block.dropout_p)).masked_fill(
        dead, 0.0
    )
    if not recorded:
        return (output,)
    log_p = scores.log_softmax(dim=-1)
    # −∞ · 0 of masked keys counts as 0
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(dim=-1)
    dead = dead.squeeze(-1)
    return (
        output,
        index.squeeze(-1).masked_fill(dead, -1),
        log_p.gather(-1, index).squeeze(-1).masked_fill(dead, 0.0),
        entropy.masked_fill(dead, 0.0),
    )
