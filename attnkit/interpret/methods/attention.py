"""Maps of the raw attention from which the answer is read, or of its product with value norms."""

import torch
from torch import Tensor, nn

from attnkit.core.capture.calls import PROPAGATED_ELEMENTS, AttentionCall
from attnkit.core.weights import row_blocks
from attnkit.interpret.methods.flow import Step
from attnkit.interpret.methods.hooks import module_runs
from attnkit.interpret.methods.question import Question
from attnkit.interpret.methods.tokens import watch


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
