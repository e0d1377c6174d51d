"""The code of docs/interpret.md runs, in the order of the page."""

import re
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).parents[2] / "docs" / "interpret.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_code_of_the_page(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    assert len(SNIPPETS) >= 3
    exec(compile("\n".join(SNIPPETS), "interpret.md", "exec"), {"__name__": "__main__"})
    said = capfd.readouterr().out
    assert "blocks.3.attn" in said
    assert "relevance of 2 images on 14 x 14" in said
    assert "Without the 4 edges that rank first, p(" in said
    assert "Without the 20 % of patches that this map ranks first (tokens masked)" in said
