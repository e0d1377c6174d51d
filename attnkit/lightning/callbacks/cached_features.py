"""Features of a frozen network, computed once for each sample."""

import logging
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from attnkit.finetune.record import finetuned
from attnkit.lightning._private import is_compiled

_log = logging.getLogger(__name__)
CHUNK = 32  # samples that features are computed of at once, always as many


class CachedFeatures(Callback):
    """Computes the features of each sample only once, if only the head of a network is trained.

    A `TaskModule` fine-tuned by `attnkit.finetune.head_only` adds it. The network must be called
    with one tensor, and its output must be that of its head. Samples are recognized by their
    content, so any data in any order will do: each is hashed to 64 bits, and its features are kept
    in memory, on the device. They are computed in chunks of one size, so that they do not depend on
    the batch and a run that is resumed is the same.

    One line says whether features are kept. They are not where samples change from epoch to epoch:
    with mixup, cutmix, an augmentation of the data, or, as is seen in the second epoch, any other;
    nor under torch.compile. Training then goes on as it would without this callback.
    """

    def __init__(self) -> None:
        self._network: nn.Module | None = None
        self._rows: dict[int, int] = {}
        """Of each sample's hash, the row of its features."""
        self._features: Tensor | None = None
        self._known = 0  # samples of this epoch that were there already
        self._said = False

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
        self._known = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        if self._network is None:
            return
        if not self._rows:
            self._stop("the network is not called with one tensor of samples")
        elif not self._said:
            self._say("features are computed once for each sample, and kept")
        elif trainer.current_epoch and not self._known and trainer.is_last_batch:
            self._stop("no sample occurred twice")

    def on_fit_end(self, *args: Any) -> None:
        self._restore()

    def on_exception(self, *args: Any) -> None:
        self._restore()

    def _say(self, what: str) -> None:
        self._said = True
        rank_zero_only(_log.info)(f"finetune=head: {what}")

    def _stop(self, reason: str) -> None:
        self._say(f"features are computed again in every epoch: {reason}")
        self._restore()

    def _restore(self) -> None:
        if self._network is not None:
            del self._network.forward
        self._network, self._features, self._rows = None, None, {}

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or not len(args[0]):
            return self._original(*args, **kwargs)
        samples = args[0]
        hashes = _hashes(samples)
        new: dict[int, int] = {}
        for index, key in enumerate(hashes):
            if key in self._rows:
                self._known += 1
            else:
                new.setdefault(key, index)
        indices = list(new.values())
        for start in range(0, len(indices), CHUNK):
            features = self._computed(samples[indices[start : start + CHUNK]])
            if features is None:
                self._stop("the network's output is not its head's")
                return self._original(samples)
            self._keep([*new][start : start + CHUNK], features)
        assert self._features is not None
        rows = torch.tensor([self._rows[key] for key in hashes], device=self._features.device)
        return self._head(self._features[rows])

    @torch.inference_mode(False)  # in validation, too, they are for training
    @torch.no_grad()
    def _computed(self, samples: Tensor) -> Tensor | None:
        """The features of up to `CHUNK` samples; None if they are not what decides the output."""
        missing = CHUNK - len(samples)
        padded = torch.cat([samples, samples.new_zeros(missing, *samples.shape[1:])])
        read: list[Any] = []
        was_training = self._head.training
        self._head.eval()
        hooks = [
            self._head.register_forward_pre_hook(lambda _, inputs: read.append(inputs)),
            self._head.register_forward_hook(lambda _, inputs, output: read.append(output)),
        ]
        try:
            output = self._original(padded)
        finally:
            self._head.train(was_training)
            for hook in hooks:
                hook.remove()
        fits = len(read) == 2 and len(read[0]) == 1 and isinstance(read[0][0], Tensor)
        if not fits or len(read[0][0]) != CHUNK or not torch.equal(read[1], output):
            return None
        return read[0][0][: len(samples)]

    @torch.inference_mode(False)
    def _keep(self, keys: list[int], features: Tensor) -> None:
        start = len(self._rows)
        table = self._features
        if table is None or start + len(keys) > len(table):
            grown = features.new_empty(max(1024, 2 * start), *features.shape[1:])
            if table is not None:
                grown[:start] = table[:start]
            self._features = table = grown
        table[start : start + len(keys)] = features
        self._rows.update(zip(keys, range(start, start + len(keys)), strict=True))


def _reason(
    trainer: Trainer, module: LightningModule, network: nn.Module, head: tuple[str, ...]
) -> str:
    """Why features can't be kept, or nothing."""
    data = getattr(trainer, "datamodule", None)
    if getattr(module, "mix", None) is not None:
        return "module.mixup or cutmix mixes the samples"
    if getattr(data, "augment", None) is not None:
        return "the data are augmented; data.augment=null leaves that out"
    if len(head) != 1:
        return f"the head is several modules, {', '.join(head)}"
    if is_compiled(module) or is_compiled(network):
        return "the network is compiled"
    return ""


def _hashes(samples: Tensor) -> list[int]:
    """64 bits of each sample's content."""
    rows = samples.detach().cpu().contiguous().flatten(1).view(torch.uint8).numpy()
    return [hash(row.tobytes()) for row in rows]
