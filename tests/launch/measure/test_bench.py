"""run=bench: every part of a step, and each kernel forced in turn."""

import json
import re
from pathlib import Path

import pytest
import torch

import attnkit
from attnkit.core.kernels.choose import BACKENDS
from attnkit.launch.modes import bench

VIT = ("task=vit", "model.depth=2", "model.dim=24", "trainer=cpu", "run=bench", "run_dir=run")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(bench, "SECONDS", 0.1)
    monkeypatch.setattr(bench, "ROUNDS", 2)


def test_parts_and_kernels(attnkit):
    done = attnkit(*VIT)
    assert done.code == 0, done.err
    found = json.loads(Path("run/results.json").read_text())
    parts = [found[f"step/{n}_seconds"] for n in ("data", "forward", "backward", "optimizer")]
    assert sum(parts) + found["step/other_seconds"] == pytest.approx(
        max(found["step/seconds"], sum(parts))
    )
    images = found["train/images_per_second"] * found["step/seconds"] * found["batches"]
    assert images == pytest.approx(round(images))
    assert 5 < images <= 64 * found["batches"]
    compared = {n for n in found if n.startswith("backend/")}
    assert compared == {
        f"backend/{name}_seconds"
        for name in ("auto", "block_sparse", "flash", "blockwise", "math", "reference")
    }
    table = Path("run/bench.md").read_text()
    for kernel in BACKENDS:
        assert f"| `{kernel.name}` |" in table
    assert re.search(r"\| `varlen` \|  \|  \| needs exactly one Packed mask, got no mask", table)
    assert "train/images_per_second" in done.out
    assert not Path("run/checkpoints").exists()
    assert not Path("run/metrics.csv").exists()


def test_each_kernel_really_runs():
    """The comparison forces what it says, in all layers, and puts back what was there."""

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (attnkit.MultiHeadAttention(16, 2) for _ in range(2))
            self.second.backend = "math"
            self.device = torch.device("cpu")
            self.ran = []

        def forward(self):
            with attnkit.record_backends(self) as record:
                output = self.second(self.first(torch.randn(2, 5, 16))).sum()
            self.ran.append(record.counts)
            return output

    model = Two()
    found = bench.compare_kernels(model, lambda: model())
    assert {name for name, (seconds, _) in found.items() if seconds} == {
        "auto", "block_sparse", "flash", "blockwise", "math", "reference",
    }  # fmt: skip
    assert (model.first.backend, model.second.backend) == ("auto", "math")
    ran = [{kernel for count in counts.values() for kernel in count} for counts in model.ran]
    for name in ("flash", "blockwise", "math", "reference"):
        assert ran.count({name}) >= 3, name


def test_units():
    images, words = torch.zeros(5, 3, 8, 8), torch.tensor([[1, 7, 2, 0], [1, 2, 0, 0]])
    assert bench.units((images, torch.zeros(5))) == {"images": 5}
    assert bench.units({"image": images[:2], "words": words}) == {"images": 2, "words": 5}
    assert bench.units([torch.zeros(7, 4)]) == {"samples": 7}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("trainer=cpu_ddp", "run=bench: expected one process"),
        ("seeds=2", "seeds=2: has no effect in run=bench"),
        ("-m seed=0,1", "run=bench: not with -m"),
        ("trainer.max_steps=2", "run=bench: needs more than 3 steps"),
    ],
)
def test_wrong_input(refused, argv, message):
    refused(message, *VIT, *argv.split())


def test_stopped_before_anything_is_known_it_leaves_the_folder_free(attnkit, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "compare_kernels", interrupted)
    done = attnkit(*VIT)
    assert done.code == 130
    assert "to go on: start it again" in done.err
    assert not Path("run").exists()
