"""How much of attnkit a training loads: what it does not use, it does not wait for."""

import json
import subprocess
import sys

MOST = 131  # 360 before names were imported where they are used
CODE = """
import json, os, sys
from torch.optim.optimizer import register_optimizer_step_post_hook
from attnkit.launch.main import main

def package(found):
    home = getattr(found, "__module__", None) or getattr(found, "__name__", "")
    return str(home).partition(".")[0]

def tell(*_):
    ours = [name for name in sys.modules if name.partition(".")[0] == "attnkit"]
    draw = [n for n in ours if "matplotlib" in map(package, vars(sys.modules[n]).values())]
    print("\\n" + json.dumps({"ours": sorted(ours), "draw": draw}), flush=True)
    os._exit(0)

register_optimizer_step_post_hook(tell)
main(sys.argv[1:])
"""


def test_the_first_step_needs_few_of_our_modules():
    command = [sys.executable, "-c", CODE, "task=vit", "trainer=cpu", "run_dir=run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "attnkit.models.vit" in found["ours"]
    assert len(found["ours"]) <= MOST, found["ours"]
    unused = ("interpret", "interop", "surgery", "metrics", "checks", "lightning.export")
    assert [n for n in found["ours"] if n.startswith(tuple(f"attnkit.{u}" for u in unused))] == []
    # torchmetrics imports matplotlib; ours wait until something is drawn
    assert found["draw"] == []
