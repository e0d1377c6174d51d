"""How far to trust each map of a digits ViT: the test set, runs of several seeds.

    for seed in 1 2 3; do
        python -m attnkit task=vit seed=$seed run_dir=runs/trust_$seed
        python -m attnkit run=export ckpt=runs/trust_$seed export.folder=runs/trust_$seed/export
    done
    python docs/benchmarks/trust.py runs/trust_* [--images 180]

Each number is the mean over the runs, with the smallest and the largest; `better than random` is in
how many of them. 10 minutes on two cores.
"""

import argparse
from statistics import mean

import torch
from measure import table

import attnkit
from attnkit.interpret import METHODS
from attnkit.interpret.methods.table import methods_of
from attnkit.interpret.trust import Trust
from attnkit.tasks.image_classification import DigitsData

COLUMNS = {
    "gap, tokens masked": "gap in p, tokens masked",
    "gap, mean colour": "gap in p, mean colour",
    "class sensitivity": "class sensitivity",
    "random weights": "similarity, all weights random",
    "another image": "similarity, another image",
}


def judged(module, images: torch.Tensor, method: str) -> Trust:
    """The scores of a method's maps of the predicted classes."""

    def map_of(module, images, classes):
        target = classes if METHODS[method].has_target else None
        return attnkit.explain(module, images, target, method).map

    map = attnkit.explain(module, images, method=method).map
    return attnkit.trust(module, images, None, map, method=map_of, batch_size=512)


def spread(values: list[float]) -> str:
    return f"{mean(values):.3f} ({min(values):.3f}–{max(values):.3f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--images", type=int, default=180)
    parser.add_argument("--methods", nargs="+", default=methods_of("patch"))
    arguments = parser.parse_args()
    data = DigitsData(num_workers=0)
    data.setup()
    images, labels = (
        torch.cat(part)[: arguments.images] for part in zip(*data.test_dataloader(), strict=True)
    )
    images = images / 255
    modules = [attnkit.load(run) for run in arguments.runs]
    with torch.no_grad():
        right = [float((module(images).argmax(1) == labels).float().mean()) for module in modules]
    print(f"{len(images)} images, {len(modules)} runs, accuracy {spread(right)}\n")
    rows = []
    for method in arguments.methods:
        found = [judged(module, images, method) for module in modules]
        row = {"map": method}
        for column, name in COLUMNS.items():
            row[column] = spread([trust[name].map for trust in found])
        for kind in ("mask", "mean"):
            better = sum(trust.verdicts[kind][0] == "better than random" for trust in found)
            row[f"better than random, {kind}"] = f"{better} of {len(found)}"
        rows.append(row)
    print(table(rows))
    print(f"\n{arguments.methods[-1]} of the first run\n\n{found[0]!r}\n\n{found[0]}")
