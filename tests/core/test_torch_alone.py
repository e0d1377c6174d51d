"""attnkit's core runs where torch and what torch requires are installed, and nothing else."""

import subprocess
import sys

PROGRAM = """
import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

installed = {canonicalize_name(each.name) for each in metadata.distributions()}
needed, waiting = set(), ["torch", "numpy"]
while waiting:
    name = canonicalize_name(waiting.pop())
    if name not in needed and name in installed:
        needed.add(name)
        asked = map(Requirement, metadata.requires(name) or ())
        waiting += [a.name for a in asked if not a.marker or a.marker.evaluate({"extra": ""})]
others = {
    module
    for module, names in metadata.packages_distributions().items()
    if not {canonicalize_name(name) for name in names} & (needed | {"attnkit"})
}
assert {"lightning", "torchvision", "timm", "numba", "sklearn", "hydra"} <= others


class Without:
    # finds none of the others

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *rest):
        return None if name.split(".")[0] in others else self.finder.find_spec(name, *rest)


for name in [name for name in sys.modules if name.split(".")[0] in others]:
    del sys.modules[name]
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]

import torch

import attnkit

query = key = value = torch.randn(2, 4, 33, 8)
index = torch.randint(33, (2, 100))
masks = [
    None,
    attnkit.Causal() & attnkit.Padding(torch.tensor([33, 20])),
    attnkit.Window(3, 3),
    attnkit.Packed([20, 13]),
    attnkit.Edges(index, 33),
]
for mask in masks:
    with attnkit.record_backends() as record:
        output = attnkit.attend(query, key, value, mask=mask)
    expected = attnkit.attend(query, key, value, mask=mask, backend="reference")
    torch.testing.assert_close(output, expected)
    print(attnkit.explain_backends(query, key, value, mask=mask))
block = attnkit.MultiHeadAttention(dim=32, num_heads=4)
with attnkit.capture_attention(block) as captured:
    block(torch.randn(2, 9, 32)).sum().backward()
loaded = {name.split(".")[0] for name in sys.modules} & others
assert not loaded, loaded
print("done")
"""


def test_core_needs_torch_alone():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("done")
