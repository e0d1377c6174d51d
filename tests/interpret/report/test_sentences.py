"""Reports of sentences: words whose object is known, and seven shares instead of two."""

import pytest
import torch

import attnkit
from attnkit.interpret.report import Report
from attnkit.lightning import Explained
from attnkit.metrics.maps import area, mass
from attnkit.models.captioning.word_decoder import END, PAD


@pytest.fixture
def explained():
    """The second word of the first sentence names the left half of a row, the end nothing."""
    torch.manual_seed(0)
    model = attnkit.Captioner(
        attnkit.ViTEncoder((16, 24), 3, dim=12, depth=1, num_heads=3, patch_size=4),
        attnkit.TransformerDecoder(17, 7, dim=12, depth=2, num_heads=3),
    ).eval()
    images, said = torch.randn(2, 3, 16, 24), torch.tensor([[5, 6, END], [7, END, PAD]])
    words = [["a", "cat", "<end>"], ["dogs", "<end>"]]
    mask = torch.zeros(16, 24, dtype=torch.bool)
    mask[3:6, :12] = True
    given = {"sentences": said, "words": words, "named": [{1: mask}, {}]}
    return Explained(model, images, pictures=images, **given)


def test_the_mass_on_what_a_word_names(explained, tmp_path):
    found = Report(method="attention", trust="none")(explained, tmp_path)
    seen = attnkit.explain(explained.model, explained.inputs, explained.sentences, "attention")
    mask = explained.named[0][1][None]
    wanted = float(mass(seen.words[:1, 1], mask) / area(mask))
    rows = [(row["word"], row["mass_over_chance"]) for row in found.rows]
    assert rows == [
        ("a", None), ("cat", pytest.approx(wanted)), ("<end>", None), ("dogs", None),
        ("<end>", None),
    ]  # fmt: skip
    assert (found.shown[0][-1], found.shown[1][-1]) == ("mass over\nchance", f"{wanted:.2f}")
    page = (tmp_path / "explain.html").read_text()
    assert page.count("× chance on what it names") == 1
    explained.named = []
    found = Report(method="attention", trust="none")(explained, tmp_path)
    assert "mass_over_chance" not in found.header
    assert found.shown[0] == ["map", "words", "mean p"]


def test_full_has_seven_shares(explained, tmp_path):
    found = Report(method="attention", trust="full")(explained, tmp_path)
    seen = attnkit.explain(explained.model, explained.inputs, explained.sentences, "attention")
    wanted = seen.trust_words(fractions=(0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9))
    gaps = [score.gap for words in wanted.scores for score in words]
    assert [row["gap"] for row in found.rows] == pytest.approx(gaps)
    fast = [score.gap for words in seen.trust_words().scores for score in words]
    assert gaps != pytest.approx(fast)
