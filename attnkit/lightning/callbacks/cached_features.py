"""Features of a frozen network, computed once for each sample."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from attnkit.finetune.methods import finetuned
from attnkit.lightning._private import is_compiled

CHUNK = 32  # samples whose rows are computed at once, always as many
_log = logging.getLogger(__name__)


class KeptRows:
    """The outputs of a frozen network, one row for each sample, computed once and kept in memory.

    Samples are recognized by 64 bits of a hash of their content. Rows are computed for `CHUNK`
    samples at once, so that they do not depend on the batch, and a resumed run gets the same.

    Attributes:
        num_kept: number of samples with a row.
        num_found: number of requested samples that were known already, since it was set to 0.
    """

    def __init__(self) -> None:
        self._row_of: dict[int, int] = {}
        self._rows: Tensor | None = None
        self._epochs = 0
        self.num_found = 0

    @property
    def num_kept(self) -> int:
        return len(self._row_of)

    def ends_epoch_without_a_second_look(self) -> bool:
        """Count an epoch; return whether it is not the first and no sample was found in it."""
        self._epochs += 1
        return self._epochs > 1 and not self.num_found

    @torch.inference_mode(False)  # rows computed in validation serve training too
    @torch.no_grad()
    def of(self, samples: Tensor, compute: Callable[[Tensor], Tensor | None]) -> Tensor | None:
        """Return the rows of samples; None if `compute` returns None.

        Args:
            samples: [samples, …].
            compute: function of `CHUNK` samples to their rows, or None.
        """
        hashes = hashes_of(samples)
        new: dict[int, int] = {}
        for index, key in enumerate(hashes):
            if key in self._row_of:
                self.num_found += 1
            else:
                new.setdefault(key, index)
        indices = list(new.values())
        for start in range(0, len(indices), CHUNK):
            chunk = samples[indices[start : start + CHUNK]]
            missing = CHUNK - len(chunk)
            rows = compute(torch.cat([chunk, chunk.new_zeros(missing, *chunk.shape[1:])]))
            if rows is None:
                return None
            self._keep([*new][start : start + CHUNK], rows[: len(chunk)])
        assert self._rows is not None
        numbers = torch.tensor([self._row_of[key] for key in hashes], device=self._rows.device)
        return self._rows[numbers]

    def _keep(self, keys: list[int], rows: Tensor) -> None:
        start = self.num_kept
        table = self._rows
        if table is None or start + len(keys) > len(table):
            grown = rows.new_empty(max(1024, 2 * start), *rows.shape[1:])
            if table is not None:
                grown[:start] = table[:start]
            self._rows = table = grown
        table[start : start + len(keys)] = rows
        self._row_of.update(zip(keys, range(start, start + len(keys)), strict=True))


def hashes_of(samples: Tensor) -> list[int]:
    """Return 64 bits of a hash of each sample's content."""
    rows = samples.detach().cpu().contiguous().flatten(1).view(torch.uint8).numpy()
    return [hash(row.tobytes()) for row in rows]


def why_samples_change(trainer: Trainer, module: LightningModule) -> str:
    """Return what is known to change samples between epochs; empty if nothing is."""
    if getattr(module, "mix", None) is not None:
        return "module.mixup or cutmix mixes the samples"
    if getattr(getattr(trainer, "datamodule", None), "augment", None) is not None:
        return "the data are augmented; data.augment=null leaves that out"
    return ""


class CachedFeatures(Callback):
    """Computes the features of each sample only once, if only the head of a network is trained.

    A `TaskModule` fine-tuned by `attnkit.finetune.head_only` adds it. The network must be called
    with one tensor, and its output must be that of its head. Samples are recognized by their
    content (`KeptRows`), so that their order does not matter; features are kept on the device.

    A log line says whether features are kept. They are not kept if samples change between epochs:
    with mixup, cutmix, an augmentation of the data or, as the second epoch shows, any other change;
    nor under torch.compile. Training then continues as without this callback.
    """

    def __init__(self) -> None:
        self._network: nn.Module | None = None
        self._features = KeptRows()
        self._is_reported = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = finetuned(pl_module)
        if found is None or found[2].method != "head":
            return
        _, network, record = found
        if reason := _reason(trainer, pl_module, network, record.head):
            self._stop(reason)
            return
        self._network, self._head = network, network.get_submodule(record.head[0])
        self._original = network.forward
        network.forward = self._forward

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._features.num_found = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        if self._network is None:
            return
        if not self._features.num_kept:
            self._stop("the network is not called with one tensor of samples")
        elif not self._is_reported:
            self._report("features are computed once for each sample, and kept")
        if (
            self._network
            and trainer.is_last_batch
            and self._features.ends_epoch_without_a_second_look()
        ):
            self._stop("no sample occurred twice")

    def on_fit_end(self, *args: Any) -> None:
        self._restore()

    def on_exception(self, *args: Any) -> None:
        self._restore()

    def _report(self, what: str) -> None:
        self._is_reported = True
        rank_zero_only(_log.info)(f"finetune=head: {what}")

    def _stop(self, reason: str) -> None:
        self._report(f"features are computed again in every epoch: {reason}")
        self._restore()

    def _restore(self) -> None:
        if self._network is not None:
            del self._network.forward
        self._network, self._features = None, KeptRows()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or not len(args[0]):
            return self._original(*args, **kwargs)
        features = self._features.of(args[0], self._computed)
        if features is None:
            self._stop("the network's output is not its head's")
            return self._original(args[0])
        return self._head(features)

    def _computed(self, samples: Tensor) -> Tensor | None:
        """Return the features of samples; None if the output does not depend on them alone."""
        read: list[Any] = []
        was_training = self._head.training
        self._head.eval()
        hooks = [
            self._head.register_forward_pre_hook(lambda _, inputs: read.append(inputs)),
            self._head.register_forward_hook(lambda _, inputs, output: read.append(output)),
        ]
        try:
            output = self._original(samples)
        finally:
            self._head.train(was_training)
            for hook in hooks:
                hook.remove()
        fits = len(read) == 2 and len(read[0]) == 1 and isinstance(read[0][0], Tensor)
        if not fits or len(read[0][0]) != len(samples) or not torch.equal(read[1], output):
            return None
        return read[0][0]


def _reason(
    trainer: Trainer, module: LightningModule, network: nn.Module, head: tuple[str, ...]
) -> str:
    """Return why features cannot be kept; empty if they can."""
    if reason := why_samples_change(trainer, module):
        return reason
    if len(head) != 1:
        return f"the head is several modules, {', '.join(head)}"
    if is_compiled(module) or is_compiled(network):
        return "the network is compiled"
    return ""
