"""A script for test_captions: one of two gloo processes, each with its part of the captions."""

import json
import sys
from pathlib import Path

from torch import distributed
from torchmetrics import MetricCollection

from attnkit.metrics import BLEU, ROUGEL, CIDEr, CIDErD


def compute(predictions: list[str], references: list[list[str]]) -> dict:
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


if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    store = (folder / "store").as_uri()
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    predictions, references = json.loads((folder / "pairs.json").read_text())
    results = {}
    for first in (30, 37):  # with 37, rank 1 has none
        mine = slice(first) if rank == 0 else slice(first, None)
        results[first] = compute(predictions[mine], references[mine])
    (folder / f"{rank}.json").write_text(json.dumps(results))
    distributed.barrier()
    distributed.destroy_process_group()
