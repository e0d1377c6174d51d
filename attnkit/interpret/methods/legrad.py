"""LeGrad: gradients of the answer with respect to the attention weights of each layer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnkit.core.capture.calls import PROPAGATED_ELEMENTS, AttentionCall
from attnkit.core.weights import row_blocks
from attnkit.interpret.methods.hooks import module_runs
from attnkit.interpret.methods.question import Question
from attnkit.interpret.methods.tokens import watch


def legrad(question: Question) -> Tensor:
    """LeGrad (Bousselham et al., LeGrad: An Explainability Method for Vision Transformers via
    Feature Formation Sensitivity, 2024), [batch, tokens].

        mean over layers, heads and queries of (∂y_l / ∂A_l)⁺

    y_l is the logit that the model's end (norm, pooling, head) computes from the tokens after block
    l, without later blocks. If only some tokens are read, the gradients of the other queries are 0
    and count in the mean. The gradient is not multiplied with the attention. The blocks that hold
    the layers must be a sequence; attention pooling belongs to the end.

    Raises:
        ValueError: the model's blocks are not a sequence of one block for each layer of attention.
    """
    with module_runs(question.model) as runs:
        chain = watch(question, "legrad")
    outputs = {run.module: run.output for run in runs}
    steps = [step for step in chain.steps if step.rows is not None]
    blocks = _blocks(question, [step.call.layer for step in steps])
    made = [outputs[block] for block in blocks]
    del runs, outputs
    maps = []
    for step, output in zip(steps, made, strict=True):
        if step.is_used:
            with _replaced(blocks, [*made[:-1], _as(made[-1], _first(output))]):
                y = question.ask()
            (gradient,) = question.gradients(y, [step.call.output], keep=True)
            maps.append(_positive(step.call, gradient) / step.num_tokens)
    return torch.stack(maps).mean(dim=0)


@torch.no_grad()
def _positive(call: AttentionCall, output_gradient: Tensor) -> Tensor:
    """Return the mean over heads and sum over queries of (∂y/∂A)⁺, [batch, keys], in blocks."""
    read = (output_gradient != 0).flatten(0, 1).any(dim=-1).any(dim=0).nonzero()[:, 0]
    batch, num_heads = output_gradient.shape[:2]
    total = torch.zeros(batch, call.num_keys, device=output_gradient.device)
    for rows in row_blocks(call.inputs, read, PROPAGATED_ELEMENTS):
        total = total + call.weight_gradient(output_gradient, rows=rows).relu().sum(dim=(1, 2))
    return total / num_heads


def _blocks(question: Question, layers: Sequence[str]) -> list[nn.Module]:
    """Return the modules of a sequence that each hold one of the layers."""
    paths = [layer.split(".") for layer in layers]
    shared = 0
    while all(path[shared : shared + 1] == paths[0][shared : shared + 1] for path in paths):
        if shared >= len(paths[0]) or (
            len(paths) == 1
            and isinstance(
                question.module(".".join(paths[0][:shared])), nn.ModuleList | nn.Sequential
            )
        ):
            break
        shared += 1
    names = [".".join(path[: shared + 1]) for path in paths]
    if len(set(names)) < len(layers) or any(len(path) <= shared for path in paths):
        raise ValueError(
            "model: legrad needs a sequence of blocks with one layer of attention each, got "
            f"{', '.join(layer or '(itself)' for layer in layers)}; take method='relevance'"
        )
    return [question.module(name) for name in names]


@contextmanager
def _replaced(blocks: Sequence[nn.Module], outputs: Sequence[Any]) -> Iterator[None]:
    """Replace the forward of each module by one that returns the given output."""
    before = [block.__dict__.get("forward") for block in blocks]
    try:
        for block, output in zip(blocks, outputs, strict=True):
            block.__dict__["forward"] = lambda *args, _output=output, **kwargs: _output
        yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            del block.__dict__["forward"]
            if forward is not None:
                block.__dict__["forward"] = forward


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _as(output: Any, tokens: Tensor) -> Any:
    """Return the tokens in the form of another block's output."""
    return tokens if isinstance(output, Tensor) else (tokens, *output[1:])
