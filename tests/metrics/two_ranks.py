"""A script for test_captions and test_maps: one of two gloo processes, with a part of the data.

    python two_ranks.py FOLDER RANK

FOLDER/data.json has captions and references, or maps, masks and curves.
"""

import json
import sys
from pathlib import Path

import torch
from torch import distributed
from torchmetrics import MetricCollection

from attnkit.metrics import (
    BLEU,
    ROUGEL,
    AttributionMass,
    CIDEr,
    CIDErD,
    PerturbationGap,
    PointingGame,
)


def of_captions(predictions: list[str], references: list[list[str]]) -> dict:
    """What this rank gets, whose captions these are."""
    alone = {kind.__name__: kind() for kind in (BLEU, ROUGEL, CIDEr, CIDErD)}
    together = MetricCollection({name: type(metric)() for name, metric in alone.items()})
    for metric in (*alone.values(), together):
        for start in range(0, len(predictions), 11):
            batch = slice(start, start + 11)
            metric.update(predictions[batch], references[batch])

    def values_of(metrics) -> dict[str, float]:
        return {name: metric.compute().item() for name, metric in metrics.items()}

    results = {
        "alone": values_of(alone),
        "together": {name: value.item() for name, value in together.compute().items()},
        "captions": alone["CIDErD"].per_caption(),
    }
    # what comes after a compute joins this rank's captions, not those of both
    for part in (slice(5), slice(5, None)):
        for metric in alone.values():
            if part.start is None:
                metric.reset()
            metric.update(predictions[part], references[part])
        results["again"] = values_of(alone)
    return results


def of_maps(maps, masks, most, least) -> dict[str, list[float]]:
    """Mean and standard error of each metric, whose images these are."""
    on_objects = MetricCollection({"pointing": PointingGame(), "mass": AttributionMass()})
    gap = PerturbationGap()
    for start in range(0, len(maps), 3):
        batch = slice(start, start + 3)
        on_objects.update(maps[batch], masks[batch])
        gap.update(most[batch], least[batch])
    values = on_objects.compute()
    return {
        name: [metric.compute().item(), metric.standard_error().item()]
        for name, metric in [*on_objects.items(), ("gap", gap)]
        if name not in values or values[name] == metric.compute()
    }


if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    store = (folder / "store").as_uri()
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    parts, compute = json.loads((folder / "data.json").read_text()), of_captions
    if len(parts) == 4:
        parts, compute = list(map(torch.tensor, parts)), of_maps
    results = []
    for first in (len(parts[0]) // 2, len(parts[0])):  # the second time, rank 1 has none
        mine = slice(first) if rank == 0 else slice(first, None)
        results.append(compute(*(part[mine] for part in parts)))
    (folder / f"{rank}.json").write_text(json.dumps(results))
    distributed.barrier()
    distributed.destroy_process_group()
