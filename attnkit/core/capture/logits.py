"""The largest logit of each head, which shows that training diverges before the loss does."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from attnkit.core.capture.watch import listening
from attnkit.core.inputs import Inputs, in_high_precision
from attnkit.core.kernels.recompute import in_blocks
from attnkit.core.kernels.reference import scores_of_edges
from attnkit.core.listeners import Seen
from attnkit.core.masks.edges import Edges
from attnkit.core.normalizers import Hard, Softmax, masked_scores
from attnkit.core.operators.precision import no_autocast
from attnkit.core.running import RECORDING, RunningModules


@contextmanager
def record_logits(model: nn.Module | None = None) -> Iterator[dict[str, Tensor]]:
    """Collect the largest logit of each head that each layer computes inside the `with` block.

        with attnkit.record_logits(model) as logits:
            model(images)
        logits["blocks.11.attention"]    # [heads], over all calls and batch items

    A logit is score(q_i, k_j) + bias_ij before the softmax, with scale and softcap, where the mask
    allows it; a sink is not a logit. −∞ means that no query of the head may look anywhere. Training
    diverges where the largest logit grows without bound; QK-clip (Kimi K2, 2025) scales down the
    weights of queries and keys if it exceeds a threshold.

    This observes the same attention as `attnkit.capture_attention`, except the convolutions of
    torch_geometric; linear attention and the delta rule have no logits. The kernels that compute
    the output do not change. The scores of each call are computed once more, in blocks of queries,
    in float32 (float64 if the inputs are), without gradients and without the keys that the mask's
    plan skips. That takes about as long as a forward of the kernel "blockwise", so record only some
    of the steps. A layer that runs again in the backward pass does not count. Compiled modules run
    uncompiled inside the block. Other threads are recorded if they run in this context, as
    `asyncio.to_thread` does.

    Args:
        model: the model whose `named_modules()` gives the names; None: the outermost module that is
            called. The name of attention outside of any module is "".

    Raises:
        ValueError: a module computes its attention by a softmax and a product of its own, or with
            several numbers of heads.
    """
    listener = _Logits(model)
    with listening(listener, listener.running):
        yield listener.found


class _Logits:
    """Listener that keeps the largest logits of each module."""

    def __init__(self, model: nn.Module | None) -> None:
        self.found: dict[str, Tensor] = {}
        self.running = RunningModules(model)
        self._parts: dict[str, list[Tensor]] = {}
        """For modules with running calls: the earlier result, then the result of each call."""
        self._num_running: Counter[str] = Counter()

    def see(self, seen: Seen) -> None:
        if not isinstance(seen.inputs.normalizer, Softmax | Hard):
            return
        name = self.running.innermost_of_model()
        if seen.module is not None:
            name = self.running.names.get(seen.module)
        if name is not None:
            largest = _largest(seen.inputs)
            before = self.found.get(name)
            if before is not None and before.shape != largest.shape:
                raise ValueError(
                    f"model: {name or '(the model)'} computes attention of {len(before)} heads and "
                    f"of {len(largest)}, expected one number of heads under one name; give each "
                    "a module of its own"
                )
            with RECORDING:
                parts = self._parts.setdefault(name, [] if before is None else [before])
                parts.append(largest)
                self._num_running[name] += 1
                self.found[name] = torch.stack(parts).amax(0)
                self.running.on_end(partial(self._ended, name, largest))

    def _ended(self, name: str, largest: Tensor, has_raised: bool) -> None:
        """Remove the result of a call that has raised, and forget the parts after the last call."""
        parts = self._parts[name]
        if has_raised:
            parts[:] = [part for part in parts if part is not largest]
            if parts:
                self.found[name] = torch.stack(parts).amax(0)
            else:
                self.found.pop(name, None)
        self._num_running[name] -= 1
        if not self._num_running[name]:
            del self._parts[name]

    def miss(self, what: str, advice: str) -> None:
        name = self.running.innermost_of_model()
        if name is not None:
            raise ValueError(
                f"model: {name or '(the model)'} computes attention {what}, whose logits are not "
                f"seen; {advice}"
            )


@torch.no_grad()
def _largest(inputs: Inputs) -> Tensor:
    """Return the largest logit of each head, [heads]."""
    if inputs.is_empty:
        return inputs.query.new_full((inputs.query.shape[1],), -torch.inf)
    if isinstance(inputs.mask, Edges):  # may have edge features or duplicate edges
        with no_autocast(inputs.query):
            exact = in_high_precision(inputs)
            exact = replace(exact, key=exact.repeated_heads()[0])
            scores = scores_of_edges(exact, inputs.mask)
        return nn.functional.pad(scores, (0, 1), value=-torch.inf).amax((0, 2))
    (rows,) = in_blocks(replace(inputs, dropout_p=0.0), _largest_of_rows, skips=True)
    return rows.amax((0, 2))


def _largest_of_rows(block: Inputs, allowed: Tensor | None) -> tuple[Tensor]:
    return (masked_scores(block, allowed).amax(-1),)
