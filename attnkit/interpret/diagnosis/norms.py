"""Tokens whose norm stands out, of what each block of a model gives."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

TIMES_THE_MEDIAN = 4
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class HighNorms:
    """For each block that ran the share of its tokens with a norm over 4 times their median.

    In large vision transformers these are patches without content that serve as memory (Darcet et
    al., Vision Transformers Need Registers, 2024; their bound is of one model, ours relative).
    """

    def __init__(self) -> None:
        self.shares: dict[str, float] = {}

    @contextmanager
    def measured(self, model: nn.Module) -> Iterator[None]:
        """In the block every module of a list that has parts of its own is measured."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                for child_name, child in module.named_children():
                    if isinstance(module, _LISTS) and next(child.children(), None) is not None:
                        path = f"{name}.{child_name}".removeprefix(".")

                        def hook(module, args, output, path=path):
                            self._measure(path, output)

                        stack.callback(child.register_forward_hook(hook).remove)
            yield

    def of(self, layer: str) -> float | None:
        """That of the innermost block around a layer; None where there is none."""
        around = [name for name in self.shares if f"{layer}.".startswith(f"{name}.")]
        return self.shares[max(around, key=len)] if around else None

    def _measure(self, name: str, output: object) -> None:
        while isinstance(output, tuple | list) and len(output):
            output = output[0]
        # nodes, or tokens of a batch; maps of convolutions are neither
        if isinstance(output, Tensor) and output.ndim in (2, 3) and output.numel():
            norms = output.detach().float().norm(dim=-1)
            bound = TIMES_THE_MEDIAN * norms.median(dim=-1, keepdim=True).values
            self.shares[name] = float((norms > bound).float().mean())
