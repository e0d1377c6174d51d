"""The scripts of docs/examples that no other test runs."""

import runpy

import pytest
import torch
from PIL import Image


@pytest.fixture
def example(repository):
    return lambda name: runpy.run_path(str(repository / "docs" / "examples" / name))


def test_own_score(example, capsys):
    output, weights = example("own_score.py")["main"](num_tokens=20)
    said = capsys.readouterr().out
    assert "blockwise ×1" in said
    assert "looks at tokens [0, 11, 12, 13, 14, 15, 16, 17, 18, 19]" in said
    assert output.isfinite().all()
    assert not weights[1, :, :, 10:].any()  # the padding of the second sequence
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones_like(weights[..., 0]))


def test_the_pictures_of_costs_are_drawn_from_the_tables(repository, tmp_path):
    """docs/doors.py reads docs/benchmarks.md, whose headings and rows may change."""
    doors = runpy.run_path(str(repository / "docs" / "doors.py"))
    for kind in ("masks", "edges", "attention"):
        picture = tmp_path / f"{kind}.png"
        doors[f"draw_{kind}"](picture)
        with Image.open(picture) as drawn:
            assert drawn.width > 400
    masks = doors["rows_under"]("Masks", "| mask | blocks, 4,096 tokens")
    assert all(0 < float(cell) < 1 for row in masks for cell in row[1:])
    edges = doors["rows_under"]("Attention over edges", "| times as fast as PyG")
    assert {len(row) for row in edges} == {5}


@pytest.mark.slow
def test_swap_attention(example, tmp_path, capsys):
    picture = tmp_path / "seen.png"
    accuracy = example("swap_attention.py")["main"]("se", epochs=2, picture=str(picture))
    assert accuracy > 0.5  # by chance 0.1
    assert picture.is_file()
    said = capsys.readouterr().out
    assert "layer4.0.attention" in said
    assert "this map ranks first" in said


def test_scenes(example, tmp_path):
    example("scenes.py")["main"](tmp_path / "scenes.png")
    with Image.open(tmp_path / "scenes.png") as sheet:
        assert sheet.size == (900, 760)
