"""The table of timm's networks in docs/zoo.md, made anew from timm's registry.

`python tests/surgery/test_zoo_table.py` prints it.
"""

from collections import Counter

import pytest
import timm
import torch
from timm.models import _registry as registry
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from attnkit.core.capture.functions import PRODUCTS, SOFTMAX
from attnkit.surgery.convert import is_known
from attnkit.surgery.replace import _attention_modules

# words in the names of small networks, the smallest first
SMALL = ("test_", "pico", "atto", "nano", "tiny", "xxs", "xx_small", "_xs", "_s", "small")
START, END = "<!-- timm: start -->\n", "<!-- timm: end -->"


class Watch(TorchFunctionMode):
    """Which modules take a softmax of products of activations, followed through all but products,
    or call torch's attention; `inside` are the modules that are running."""

    def __init__(self):
        super().__init__()
        self.products = WeakTensorKeyDictionary()
        self.inside = []
        self.attending = set()
        self.innermost = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        tensors = [given for given in args if isinstance(given, Tensor)]
        of_product = any(tensor in self.products for tensor in tensors)
        if func is F.scaled_dot_product_attention or (func in SOFTMAX and of_product):
            self.attending.update(self.inside)
            self.innermost.add(self.inside[-1])
        elif isinstance(output, Tensor) and func not in SOFTMAX:
            # a product with weights, or with the mean of a softmax, begins anew
            both = func in PRODUCTS and not any(isinstance(t, nn.Parameter) for t in tensors)
            if both or (of_product and func not in PRODUCTS and func is not F.linear):
                self.products[output] = True
        return output


def watched(network, size):
    """In which modules of a network queries and keys meet in a softmax."""
    watch = Watch()

    def leave(*_):  # a hook that returned something would change the output
        watch.inside.pop()

    for module in network.modules():
        module.register_forward_pre_hook(lambda m, *_: watch.inside.append(m))
        module.register_forward_hook(leave)
    with torch.no_grad(), watch:
        network.eval()(torch.zeros(1, *size, device="meta"))
    return watch


def table():
    """A row for each file of timm.models whose small network has attention, by name of its class or
    as it runs."""
    families = {}
    for name in timm.list_models():
        families.setdefault(registry._model_to_module[name], []).append(name)
    rows, counts = [], Counter()
    for family, names in sorted(families.items()):
        chosen = next((n for word in SMALL for n in names if word in n), names[0])
        with torch.device("meta"):
            network = timm.create_model(chosen)
        modules = {module: None for _, module in _attention_modules(network)}
        found = watched(network, network.default_cfg["input_size"])
        parts = {part for module in modules for part in module.modules()}
        modules |= dict.fromkeys(found.innermost - parts)  # which attend and are not called so
        if not modules:
            continue
        told = {}
        for module in modules:
            what = "left" if module in found.attending else "other"
            told[type(module).__name__] = "replaced" if is_known(module) else what
        lists = {
            what: ", ".join(n for n, kind in told.items() if kind == what)
            for what in ("replaced", "left", "other")
        }
        rows.append(f"| `{family}` | `{chosen}` | {' | '.join(lists.values())} |")
        if lists["left"]:
            counts["some" if lists["replaced"] else "none"] += 1
        else:
            counts["all" if lists["replaced"] else "other"] += 1
    softmax = len(rows) - counts["other"]
    total = (
        f"Of {softmax} files with softmax attention {counts['all']} are replaced whole, "
        f"{counts['some']} in part; {counts['other']} more have none."
    )
    head = [
        "| timm.models | tried | replaced | left | no softmax of queries and keys |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([total, "", *head, *rows]) + "\n"


@pytest.mark.slow
def test_the_table_is_what_the_registry_gives(repository):
    page = (repository / "docs" / "zoo.md").read_text("utf-8")
    assert page.partition(START)[2].partition(END)[0].strip() == table().strip()


if __name__ == "__main__":
    print(table())
