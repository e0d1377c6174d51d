"""A model's attention layers as steps between tokens, and the tokens that its answer reads."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnkit.core.capture.calls import AttentionCall
from attnkit.core.capture.watch import LayerChoice, watch_attention
from attnkit.interpret.methods.grid import (
    Grid,
    heads_joined,
    locate,
    maps_among,
    settled,
)
from attnkit.interpret.methods.hooks import module_runs
from attnkit.interpret.methods.question import Layers, Question

OTHERS = "leave method out, which takes one that serves this model"


@dataclass(eq=False)
class Step:
    """A layer of attention between tokens.

    call: the `AttentionCall` that ran.
    rows: index of the token of each query, int [queries]; None: learned queries, which are no
        tokens.
    num_tokens: number of tokens of the layer's input; if there are fewer keys, they are the last.
    is_used: whether the layer takes part; otherwise relevance passes through it unchanged.
    """

    call: Any
    rows: Tensor | None
    num_tokens: int
    is_used: bool = True

    def kept(self, r: Tensor) -> Tensor:
        """Propagate relevance through the residual, [batch, queries] to [batch, tokens]."""
        tokens = r.new_zeros(len(r), self.num_tokens)
        return tokens if self.rows is None else tokens.index_add_(1, self.rows, r)

    def looked_at(self, r: Tensor, output_gradient: Tensor | None = None) -> Tensor:
        """Propagate relevance through the attention, [batch, queries] to [batch, tokens]."""
        moved = self.call.propagate(r, output_gradient=output_gradient)
        return torch.nn.functional.pad(moved, (self.num_tokens - moved.shape[1], 0))


class Chain(NamedTuple):
    """A model's attention layers as they ran for a question.

    steps: all layers, in the order in which they ran; `is_used` marks the chosen ones.
    start: [batch, queries of the last step], uniform weights over the queries that y depends on.
    grid: the grid of the tokens.
    y: [batch], in the graph.
    """

    steps: list[Step]
    start: Tensor
    grid: Grid
    y: Tensor

    @property
    def used(self) -> list[Step]:
        return [step for step in self.steps if step.is_used]

    def rows_read(self) -> list[Tensor]:
        """Return for each step how much each of its queries is read, [batch, queries], sum 1.

        A residual connection keeps a token at its position. Below learned queries, which look at
        all tokens, the weights are uniform over all tokens.
        """
        rows: list[Tensor] = []
        r = self.start
        for step in reversed(self.steps):
            rows.append(r)
            r = step.kept(r)
            if step.rows is None:
                r = torch.full_like(r, 1 / step.num_tokens)
        return rows[::-1]


def watch(question: Question, method: str, default: Layers = None) -> Chain:
    """Run the model once, and return its attention as steps from token to token.

    The gradient of y shows which rows of the last layer are read: only the class token's, or all
    patches' if they are averaged. Likewise, queries without a gradient at the layer before are the
    learned queries of a pooling.

    Raises:
        ValueError: unknown layers, layers that ran twice, or whose tokens are not the same from
            layer to layer.
        RuntimeError: the model has no gradient.
    """
    calls: list[Any] = []
    try:
        with (
            watch_attention(question.model) as calls,
            module_runs(question.model, lambda run: not calls) as runs,
        ):
            y = question.ask()
    except ValueError as error:
        if not calls:
            question.ask()  # raises errors that have nothing to do with attention
        # drop the hint at replace_attention, which may refuse the model, too
        reason = str(error).partition("; ")[0]
        raise ValueError(f"{reason}; {OTHERS}") from None
    calls, gradient = _until_read(calls, y, question)
    why = _why_no_chain(calls, question)
    if why is not None:
        raise ValueError(f"method: {method!r} follows tokens from layer to layer, but {why}")
    layer, times = Counter(call.layer for call in calls).most_common(1)[0]
    if times > 1:
        raise ValueError(
            f"model: the layer {layer or '(itself)'!r} ran {times} times, and its calls cannot be "
            "told apart; give each a module of its own"
        )
    num_tokens, last = calls[0].num_keys, calls[-1]
    steps = [
        Step(call, _tokens_of_queries(question, call, before, num_tokens), num_tokens)
        for call, before in zip(calls, [None, *calls], strict=False)
    ]
    if gradient is None:
        raise RuntimeError(question.why_no_gradient())
    is_read = (gradient != 0).flatten(0, 1).any(dim=-1).any(dim=0)
    if not is_read.any():
        raise RuntimeError(
            f"model: its logits do not depend on the last layer of attention, {last.layer!r}; "
            + OTHERS
        )
    exact = torch.float64 if last.query.dtype == torch.float64 else torch.float32
    start = (is_read.to(exact) / is_read.sum()).expand(question.batch, -1).contiguous()
    chosen = chosen_layers([step.call.layer for step in steps], question.layers, default)
    for step, is_used in zip(steps, chosen, strict=True):
        step.is_used = is_used
    given = question.grid, question.num_prefix_tokens
    found = None
    if None in given:
        maps = maps_among(runs, question.images, calls)
        found = locate(heads_joined(calls[0].key, calls[0].value), maps)
    grid = settled(question.model, question.images, num_tokens, found, *given)
    question.notes.append(str(grid))
    question.chain = Chain(steps, start, grid, y)
    return question.chain


def _until_read(calls: list[Any], y: Tensor, question: Question) -> tuple[list[Any], Tensor | None]:
    """Return the calls up to the last one that y depends on, and ∂y/∂O of that one.

    Some models have a pooling that they do not use. If y depends on no call, return all calls and
    None.
    """
    for number in reversed(range(len(calls))):
        output = calls[number].output
        if not (output.requires_grad and y.requires_grad):
            break
        (gradient,) = torch.autograd.grad(y.sum(), output, retain_graph=True, allow_unused=True)
        if gradient is not None:
            unread = [call.layer for call in calls[number + 1 :]]
            question.notes += [f"the logits do not depend on {layer!r}" for layer in unread]
            return calls[: number + 1], gradient
    return calls, None


def token_layers(question: Question) -> list[str]:
    """Return the attention layers' names if all attend over a whole image's tokens, else []."""
    try:
        with torch.no_grad(), watch_attention(question.model) as calls:
            question.forward(question.images.clone())
    except ValueError:  # no visible attention; the next run raises any other error again
        return []
    return [call.layer for call in calls] if calls and not _why_no_chain(calls, question) else []


def _why_no_chain(calls: Sequence[Any], question: Question) -> str | None:
    """Return why the calls are not layers over the tokens of a whole image; None: they are."""
    batch = question.batch
    num_tokens = getattr(calls[0], "num_keys", 0)
    for number, call in enumerate(calls):
        if not isinstance(call, AttentionCall):
            return f"{call.layer!r} attends over the edges of a graph"
        if getattr(question.module(call.layer), "is_over_channels", False):
            return f"{call.layer!r} attends over channels, which are not places; {OTHERS}"
        if len(call.query) != batch:
            pieces = len(call.query) // batch
            return f"{call.layer!r} attends within windows, {pieces} an image; {OTHERS}"
        is_last = number + 1 == len(calls)
        square = call.num_queries == call.num_keys == num_tokens
        if not square and not (is_last and call.num_queries < call.num_keys <= num_tokens):
            return (
                f"{call.layer!r} has {call.num_queries} queries and {call.num_keys} keys where "
                f"{calls[0].layer!r} has {num_tokens}; {OTHERS}"
            )
    return None


def _tokens_of_queries(
    question: Question, call: AttentionCall, before: AttentionCall | None, num_tokens: int
) -> Tensor | None:
    """Return the token of each query, by the row of the previous layer that it depends on.

    None if the queries are learned.
    """
    if call.num_queries < num_tokens and before is not None:
        rows = []
        for number in range(call.num_queries):
            query, gradient = call.query[:, :, number].sum(), None
            if query.requires_grad:
                (gradient,) = torch.autograd.grad(
                    query, before.output, retain_graph=True, allow_unused=True
                )
            if gradient is None or not gradient.any():
                return None
            rows.append(gradient.abs().sum(dim=(0, 1, 3)).argmax())
        return torch.stack(rows)
    if call.num_queries < num_tokens:
        question.notes.append(f"queries of {call.layer!r} assumed to be the first tokens")
    return torch.arange(call.num_queries, device=call.query.device)


def chosen_layers(names: list[str], layers: Layers, default: Layers) -> list[bool]:
    """Return for each layer whether it is chosen, by position or by name (`*` matches anything)."""
    choice = LayerChoice(default if layers is None else layers, known=names)
    choice.check()
    chosen = [choice.has(name) for name in names]
    if not any(chosen):
        raise ValueError("layers: expected at least one, got none")
    return chosen
