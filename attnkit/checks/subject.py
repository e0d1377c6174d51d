"""The module under check: how it is called, its runs, and what its outputs see."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnkit.core.masks.sequences import Padding
from attnkit.core.multihead import MultiHeadAttention
from attnkit.core.running import buffers_of, undisturbed

Call = Callable[..., Tensor]
"""(module, tokens) or (module, tokens, mask) -> output.

tokens [batch, tokens, dim]; mask, boolean [batch, tokens], always a tensor, True = a real token;
output [batch, tokens, channels].
"""


def on_complete_graph(module: nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
    """Call a graph module, `module(x, edge_index)`, on the batch as one graph of complete graphs.

    Each item is a complete graph with self-loops, less the edges that leave masked tokens: the
    edges j → i of all i and of the j with mask[j], in torch_geometric's order (source row 0).
    x is [batch · tokens, dim]; the output comes back as [batch, tokens, channels].
    """
    batch, num_tokens, _ = tokens.shape
    nodes = torch.arange(batch * num_tokens, device=tokens.device).view(batch, num_tokens)
    sources = nodes[:, None, :].expand(-1, num_tokens, -1)
    targets = nodes[:, :, None].expand(-1, -1, num_tokens)
    edges = mask[:, None, :].expand(-1, num_tokens, -1)
    edge_index = torch.stack([sources[edges], targets[edges]])
    return module(tokens.flatten(0, 1), edge_index).unflatten(0, (batch, num_tokens))


def default_call(module: nn.Module) -> Call:
    """Return the call of a known module of torch or attnkit, else `module(tokens)`."""
    if isinstance(module, MultiHeadAttention):
        return _attnkit_multihead
    if isinstance(module, nn.MultiheadAttention):
        return _torch_multihead
    if isinstance(module, nn.TransformerEncoder | nn.TransformerEncoderLayer):
        return _torch_encoder
    return _tokens_alone


def takes_mask(call: Call) -> bool:
    """Return whether a call takes (module, tokens, mask) rather than only (module, tokens)."""
    if not callable(call):
        raise TypeError(f"call: expected a function, got {type(call).__name__}")
    signature = inspect.signature(call)
    for num_arguments in (3, 2):
        try:
            signature.bind(*range(num_arguments))
        except TypeError:
            continue
        return num_arguments == 3
    raise TypeError(
        f"call: expected to be called as (module, tokens) or (module, tokens, mask), "
        f"got a function of {signature}"
    )


def _attnkit_multihead(module: nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
    return module(tokens, mask=Padding(mask))


def _torch_multihead(module: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    x = tokens if module.batch_first else tokens.transpose(0, 1)
    output, _ = module(x, x, x, key_padding_mask=~mask, need_weights=False)
    return output if module.batch_first else output.transpose(0, 1)


def _torch_encoder(module: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    layer = module if isinstance(module, nn.TransformerEncoderLayer) else module.layers[0]
    if layer.self_attn.batch_first:
        return module(tokens, src_key_padding_mask=~mask)
    return module(tokens.transpose(0, 1), src_key_padding_mask=~mask).transpose(0, 1)


def _tokens_alone(module: nn.Module, tokens: Tensor) -> Tensor:
    return module(tokens)


BATCH = 3

Mode = Literal["eval", "training"]
MODES: tuple[Mode, ...] = ("eval", "training")


class OutputError(ValueError):
    """Raised if the call does not return a tensor [batch, tokens, channels]."""


def difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest |actual − expected| relative to the largest |expected|.

    It is 0 if they are bit-identical (or both all zeros), inf if one is not finite.
    """
    actual, expected = actual.double(), expected.double()
    if not (actual.isfinite().all() and expected.isfinite().all()):
        return float("inf")
    largest = (actual - expected).abs().max().item()
    return largest / max(expected.abs().max().item(), 1e-300) if largest else 0.0


def within_items(sees: Tensor) -> Tensor:
    """Return the part of `Subject.sees` within each item: [batch, tokens, tokens]."""
    return sees.diagonal(dim1=0, dim2=2).movedim(-1, 0)


def own(sees: Tensor) -> Tensor:
    """Return the diagonal of a matrix of who sees whom, where a token sees itself."""
    return torch.eye(sees.shape[-1], dtype=torch.bool, device=sees.device)


class Subject:
    """A module, its call, and the random tokens for its runs.

    Every run starts with the same seed and the module's original buffers, so that a check does not
    depend on previous ones.
    """

    def __init__(
        self,
        module: nn.Module,
        dim: int,
        call: Call,
        *,
        causal: bool,
        num_tokens: int,
        tolerance: float | None,
        seed: int,
    ) -> None:
        self.module = module
        self.call = call
        self.takes_mask = takes_mask(call)
        self.causal = causal
        self.seed = seed
        tensors = (*module.parameters(), *module.buffers())
        like = next((t for t in tensors if t.is_floating_point()), torch.empty(0))
        self.dtype, self.device = like.dtype, like.device
        # three quarters of the digits, which do not depend on the order of sums
        self.tolerance = torch.finfo(self.dtype).eps ** 0.75 if tolerance is None else tolerance
        self._restore_buffers = buffers_of(module)
        self._generator = torch.Generator().manual_seed(seed)
        self._tokens = self._draw(BATCH, num_tokens, dim)
        self._others = self._draw(BATCH, num_tokens, dim)

    # Copies, since a module that writes into its input must not change later runs.

    @property
    def tokens(self) -> Tensor:
        """[batch, tokens, dim], normally distributed."""
        return self._tokens.clone()

    @property
    def others(self) -> Tensor:
        """Other tokens of the same shape."""
        return self._others.clone()

    @property
    def num_tokens(self) -> int:
        return self._tokens.shape[1]

    def everything(self) -> Tensor:
        """Return the mask in which all tokens are real."""
        return torch.ones(self._tokens.shape[:2], dtype=torch.bool, device=self.device)

    def lengths(self) -> Tensor:
        """Return the mask of items with no padding, two tokens, and all but two tokens of it."""
        lengths = torch.tensor([self.num_tokens, self.num_tokens - 2, 2], device=self.device)
        return torch.arange(self.num_tokens, device=self.device) < lengths[:, None]

    def output(
        self, tokens: Tensor, mask: Tensor | None = None, mode: Mode = "eval", seed: int = 0
    ) -> Tensor:
        """Return the module's output, computed as in use: in eval without gradients."""
        with torch.set_grad_enabled(mode == "training"):
            return self._run(tokens, mask, mode, seed).detach()

    def gradients(self, mask: Tensor | None, mode: Mode) -> tuple[Tensor, list[Tensor]]:
        """Return the output, and the gradients of its randomly weighted sum at tokens and
        parameters."""
        tokens = self.tokens.requires_grad_()
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        output = self._run(tokens.clone(), mask, mode)
        inputs = [tokens, *parameters]
        gradients = torch.autograd.grad((output * self._weights(output)).sum(), inputs, None, True)
        # autograd.grad leaves every .grad alone
        return output.detach(), [g for g in gradients if g is not None]

    def sees(self, mask: Tensor | None = None, mode: Mode = "eval") -> Tensor:
        """Return which tokens an output depends on, by gradients: [batch, tokens, batch, tokens].

        True means that output (b, i) depends on token (c, j). A gradient counts as zero below 1e-6
        (float64: 2e-15) of the largest one between two tokens; NaN does not count as zero.
        """
        tokens = self.tokens.requires_grad_()
        output = self._run(tokens.clone(), mask, mode)
        weighted = (output * self._weights(output)).sum(dim=-1)
        rows = [
            torch.autograd.grad(value, tokens, retain_graph=True)[0].norm(dim=-1)
            for value in weighted.flatten()
        ]
        strength = torch.stack(rows).view(*weighted.shape, *weighted.shape)
        own = torch.eye(weighted.numel(), dtype=torch.bool, device=self.device).view_as(strength)
        largest = strength.masked_fill(own, 0).nan_to_num(0, posinf=0).max()
        eps = torch.finfo(torch.float64 if self.dtype == torch.float64 else torch.float32).eps
        return ~(strength.double() <= 10 * eps * largest.double())

    def check_call(self) -> None:
        """Raise an OutputError if the call does not return [batch, tokens, channels].

        Errors of the module itself are left to the checks, which report them.
        """
        try:
            self.output(self.tokens)
        except OutputError:
            raise
        except Exception:
            pass

    def is_close(self, actual: Tensor, expected: Tensor) -> bool:
        return difference(actual, expected) <= self.tolerance

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Allow runs within the block; restore modes, buffers and random state afterwards."""
        with torch.inference_mode(False), undisturbed(self.module), torch.enable_grad():
            yield

    def _run(self, tokens: Tensor, mask: Tensor | None, mode: Mode, seed: int = 0) -> Tensor:
        self.module.train(mode == "training")
        self._restore_buffers()
        self._seed(self.seed + seed)
        if not self.takes_mask:
            output = self.call(self.module, tokens)
        else:
            real = torch.ones(tokens.shape[:2], dtype=torch.bool, device=self.device)
            output = self.call(self.module, tokens, real if mask is None else mask.clone())
        if not isinstance(output, Tensor):
            raise OutputError(
                f"call: expected to return a tensor, got {type(output).__name__}; "
                "say how to call your module with call=lambda module, tokens: …"
            )
        if output.ndim != 3 or output.shape[:2] != tokens.shape[:2]:
            expected = f"[{tokens.shape[0]}, {tokens.shape[1]}, channels]"
            raise OutputError(
                f"call: expected to return {expected} for tokens {list(tokens.shape)}, "
                f"got {list(output.shape)}"
            )
        return output

    def _seed(self, seed: int) -> None:
        # torch.manual_seed would also seed devices whose state is not restored
        torch.random.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed)

    def _draw(self, *shape: int) -> Tensor:
        values = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        return values.to(self.device, self.dtype)

    def _weights(self, output: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        return weights.to(output.device, output.dtype)
