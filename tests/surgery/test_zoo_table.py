"""The table of timm's networks in docs/zoo.md, made anew from timm's registry.

`python tests/surgery/test_zoo_table.py` prints it.
"""

from collections import Counter

import pytest
import timm
import torch
from timm.models import _registry as registry

from attnkit.surgery.convert import is_known
from attnkit.surgery.replace import _attention_modules

# words in the names of small networks, the smallest first
SMALL = ("test_", "pico", "atto", "nano", "tiny", "xxs", "xx_small", "_xs", "_s", "small")
START, END = "<!-- timm: start -->\n", "<!-- timm: end -->"


def table():
    """A row for each file of timm.models whose small network has attention by name of its class."""
    families = {}
    for name in timm.list_models():
        families.setdefault(registry._model_to_module[name], []).append(name)
    rows, counts = [], Counter()
    for family, names in sorted(families.items()):
        chosen = next((n for word in SMALL for n in names if word in n), names[0])
        with torch.device("meta"):
            network = timm.create_model(chosen)
        found = {type(m).__name__: is_known(m) for _, m in _attention_modules(network)}
        if not found:
            continue
        said = [", ".join(n for n, known in found.items() if known is yes) for yes in (True, False)]
        rows.append(f"| `{family}` | `{chosen}` | {said[0]} | {said[1]} |")
        counts["all" if not said[1] else "some" if said[0] else "none"] += 1
    total = f"Of {len(rows)} files {counts['all']} are replaced whole, {counts['some']} in part."
    head = ["| timm.models | tried | replaced | left |", "|---|---|---|---|"]
    return "\n".join([total, "", *head, *rows]) + "\n"


@pytest.mark.slow
def test_the_table_is_what_the_registry_gives(repository):
    page = (repository / "docs" / "zoo.md").read_text("utf-8")
    assert page.partition(START)[2].partition(END)[0].strip() == table().strip()


if __name__ == "__main__":
    print(table())
