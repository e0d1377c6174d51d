"""A script for test_maps: one of two gloo processes, each with its part of the images."""

import json
import sys
from pathlib import Path

import torch
from torch import distributed
from torchmetrics import MetricCollection

from attnkit.metrics import AttributionMass, PerturbationGap, PointingGame


def results(maps, masks, most, least) -> dict[str, list[float]]:
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
    images = torch.load(folder / "images.pt")
    found = []
    for first in (5, 11):  # with 11, rank 1 has none
        mine = slice(first) if rank == 0 else slice(first, None)
        found.append(results(*(part[mine] for part in images)))
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()
