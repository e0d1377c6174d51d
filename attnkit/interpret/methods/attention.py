"""Methods on the attention between tokens: raw attention, rollout, relevance and LeGrad."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnkit.core.capture.calls import PROPAGATED_ELEMENTS, AttentionCall
from attnkit.core.weights import row_blocks
from attnkit.interpret.methods.hooks import module_runs
from attnkit.interpret.methods.question import Question
from attnkit.interpret.methods.tokens import Step, watch


def attention(question: Question) -> Tensor:
    """Return the raw attention of the token that is read, the mean over heads, [batch, tokens].

        mean_h A[i, j]        i: the class token, or the mean over all patches

    It is that of the last layer, or the mean over the chosen layers, and does not depend on the
    class. If the model averages patches, it is the mean attention that a token receives from all
    patches, and not the attention of a single token.
    """
    chain = watch(question, "attention", default=-1)
    maps = [
        step.looked_at(rows)
        for step, rows in zip(chain.steps, chain.rows_read(), strict=True)
        if step.is_used
    ]
    return torch.stack(maps).mean(dim=0)


def value_weighted(question: Question) -> Tensor:
    """Return the attention times the norm of what it moves (Kobayashi et al., Attention is Not Only
    a Weight, 2020), the mean over heads, [batch, tokens].

        mean_h A_h[i, j] ‖v_h,j W_O,h‖

    W_O,h are the rows of the output projection that read head h. The output projection is the
    linear layer whose input is the merged heads; without one, ‖v_h,j‖ is used and a note is added.
    A sum of norms is not the norm of the sum, so heads that cancel each other still count.
    """
    with module_runs(question.model, lambda run: isinstance(run.module, nn.Linear)) as runs:
        chain = watch(question, "value_weighted", default=-1)
    merged = {
        run.module: run.given[0].detach()
        for run in runs
        if isinstance(run.module, nn.Linear) and run.given
    }
    maps = [
        _weighted(step, rows, _value_norms(step, merged, question))
        for step, rows in zip(chain.steps, chain.rows_read(), strict=True)
        if step.is_used
    ]
    return torch.stack(maps).mean(dim=0)


@torch.no_grad()
def _value_norms(step: Step, merged: dict[nn.Linear, Tensor], question: Question) -> Tensor:
    """Return ‖v_h,j W_O,h‖, [batch, heads, keys]."""
    call = step.call
    value = call.value.detach()
    value = value if value.dtype == torch.float64 else value.float()
    value = value.repeat_interleave(call.num_heads // call.value.shape[1], dim=1)
    projection = _output_projection(call, merged, question.model)
    if projection is None:
        question.notes.append(
            f"no output projection of {call.layer!r} found: weighted by the values' own norm"
        )
        return value.norm(dim=-1)
    # ‖v W‖² = v (W Wᵀ) vᵀ needs no tensor of tokens × heads × dim
    per_head = projection.detach().T.unflatten(0, (call.num_heads, -1)).to(value.dtype)
    gram = per_head @ per_head.transpose(1, 2)
    return ((value @ gram) * value).sum(dim=-1).clamp(min=0).sqrt()


def _output_projection(
    call: AttentionCall, merged: dict[nn.Linear, Tensor], model: nn.Module
) -> Tensor | None:
    """Return the weight [dim, heads · value_dim] of the layer whose input is the merged heads."""
    output = call.output.detach().transpose(1, 2).flatten(2)
    for layer, given in merged.items():
        fits = given.numel() == output.numel() and layer.in_features == output.shape[-1]
        if fits and torch.equal(given.reshape(-1), output.reshape(-1)):
            return layer.weight
    # some modules call torch's function with the layer's weights, so that no hook of it runs
    module = dict(model.named_modules()).get(call.layer)
    last = getattr(module, "out_proj", None)
    plain = isinstance(module, nn.MultiheadAttention) or getattr(module, "gate_proj", 0) is None
    if plain and isinstance(last, nn.Linear) and last.in_features == output.shape[-1]:
        return last.weight
    return None


def _weighted(step: Step, rows: Tensor, norms: Tensor) -> Tensor:
    call = step.call
    total = torch.zeros(len(rows), call.num_keys, dtype=rows.dtype, device=rows.device)
    read = rows.any(dim=0).nonzero()[:, 0]
    for some in row_blocks(call.inputs, read, PROPAGATED_ELEMENTS):
        weights = call.weights(rows=some)
        total += torch.einsum("bi,bhij,bhj->bj", rows[:, some], weights, norms.to(weights.dtype))
    total /= call.num_heads
    return torch.nn.functional.pad(total, (step.num_tokens - call.num_keys, 0))


def rollout(question: Question) -> Tensor:
    """Attention rollout (Abnar and Zuidema, Quantifying Attention Flow in Transformers, 2020),
    [batch, tokens], with the sum 1.

        r ← r (I + mean_h A_l) / 2        from the last layer down

    One half is the authors' assumption for the residual connection, not a measurement. A layer with
    learned queries has no residual connection to the tokens; there r ← r mean_h A_l.

    One output needs only one row of the product of all layers' matrices. Here and in `relevance`
    this row is a vector that is multiplied from the left, so no tokens × tokens matrix is stored.
    """
    chain = watch(question, "rollout")
    r = chain.start
    for step in reversed(chain.steps):
        if not step.is_used:
            r = step.kept(r)
        elif step.rows is None:
            r = step.looked_at(r)
        else:
            r = (step.kept(r) + step.looked_at(r)) / 2
    return r


def relevance(question: Question) -> Tensor:
    """Gradient-weighted relevance (Chefer, Gur and Wolf, Generic Attention-model Explainability for
    Interpreting Bi-Modal and Encoder-Decoder Transformers, 2021), one row of their R,
    [batch, tokens].

        r ← r + r Ā_l,   Ā_l = mean_h (∂y/∂A_l ⊙ A_l)⁺        (5), (6), from the last layer down

    The identity with which R starts is subtracted from the result, as in their (8). Nothing is
    normalized: values grow with depth and with y. A layer with learned queries has no residual
    connection to the tokens; there r ← r Ā_l, as in (11).
    """
    chain = watch(question, "relevance")
    used = [step.call.output for step in chain.steps if step.is_used]
    gradients = question.gradients(chain.y, used)
    # kept apart, since the gain may be tiny compared with the identity
    identity, gained = chain.start, torch.zeros_like(chain.start)
    for step in reversed(chain.steps):
        looked_at: Tensor | float = 0.0
        if step.is_used:
            looked_at = step.looked_at(identity + gained, gradients.pop())
        identity, gained = step.kept(identity), step.kept(gained) + looked_at
    return gained


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
