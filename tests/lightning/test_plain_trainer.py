import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_example_of_the_readme(repository, tmp_path):
    """Her own module, torchvision's network, our block and callbacks, no Hydra: as it stands."""
    script = repository / "docs" / "examples" / "plain_trainer.py"
    assert "hydra" not in script.read_text().replace("no Hydra", "")
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "attention  flash ×1" in done.stderr
    run = tmp_path / "lightning_logs" / "version_0"
    names = {path.name for path in run.iterdir()}
    assert names == {
        "checkpoints",
        "interpret",
        "learning_curves.png",
        "metrics.csv",
        "results.json",
    }
    assert len(list((run / "interpret").iterdir())) == 5
    assert json.loads((run / "results.json").read_text())["val/accuracy"] > 0.9
