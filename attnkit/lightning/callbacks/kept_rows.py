"""Outputs of a frozen network for samples, computed once for each sample."""

from collections.abc import Callable

import torch
from lightning import LightningModule, Trainer
from torch import Tensor

CHUNK = 32  # samples whose rows are computed at once, always as many


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
