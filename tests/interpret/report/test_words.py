"""Captions in a report: words with their maps and scores, on the page and in a browser."""

from types import SimpleNamespace

import pytest
import torch

import attnkit
from attnkit.interpret.picture import overlay_scale
from attnkit.interpret.report import Report
from attnkit.interpret.report.findings import Judged
from attnkit.interpret.report.maps import word_sections
from attnkit.interpret.report.page import map_uri, write_page
from attnkit.interpret.trust.words import WordScore
from attnkit.lightning import Explained
from attnkit.metrics.maps import area, mass
from attnkit.models.captioning.word_decoder import END, PAD

WORDS = ["a", "<b>", "<end>"]


def looking(**given):
    """Two sentences; of the second the first word looks at row 1, column 2, the others nowhere."""
    words = torch.zeros(2, 4, 2, 3)
    words[1, 0, 1, 2] = 0.5
    words[1, 1, 0, 0] = 0.25
    words[1, 3] = 9.0  # behind the end
    return SimpleNamespace(**{"words": words, "method": "attention", "is_signed": False} | given)


def score(gap, within):
    each = torch.linspace(0.4, 0.9, 6).view(2, 3)
    return WordScore(gap, within, 0.97, (1, 2), 0.31, 0.88, each)


def section(scores=None, seen=None, words=WORDS):
    """The second of two sentences, so that none is taken for the other."""
    pictures = torch.rand(2, 3, 20, 30)
    given = Explained(None, None, pictures=pictures, sentences=torch.zeros(2, 4), words=[[], words])
    trust = scores and SimpleNamespace(scores=[[], scores])
    return word_sections(given, [Judged("attention", seen or looking(), trust, None)])[1]


def test_words_have_maps_on_one_scale_and_texts_that_stand_for_them(tmp_path):
    made = section()
    assert [one["title"] for one in made["figures"]] == WORDS
    assert made["title"] == "image 1: a <b> <end>"
    alts = [one["alt"] for one in made["figures"]]
    assert alts[0] == "Map: a. Largest 0.5 at row 1, column 2 of 2 × 3."
    assert alts[1] == "Map: <b>. Largest 0.25 at row 0, column 0 of 2 × 3."
    assert made["bar"]["label"] == "attention, one scale for all words"
    assert made["bar"]["ticks"] == ["0", "0.5"]  # and not 9, which is behind the end
    assert made["shape"] == "30 / 20"
    scale = overlay_scale([torch.tensor([0.5])])
    assert made["figures"][1]["uri"] == map_uri(looking().words[1, 1], scale)
    assert "was not measured" in made["caption"]
    assert made["data"]["words"][0] == {"word": "a", "values": [0, 0, 0, 0, 0, 0.5]}
    assert (made["data"]["rows"], made["data"]["columns"]) == (2, 3)
    text = write_page(tmp_path / "page.html", [made], title="Captions").read_text()
    assert "<h3>&lt;b&gt;</h3>" in text
    assert "<h3><b>" not in text
    assert text.count("--picture: url(") == 1  # however many words there are


def test_what_is_no_better_than_random_is_faded_and_says_so():
    made = section([score(0.3, 0.1), score(0.1, 0.1), score(-0.2, 0.1)])
    assert [one["faded"] for one in made["figures"]] == [False, True, True]
    assert [one["lines"][2] for one in made["figures"]] == [
        "better than random (0.1)",
        "no better than random (0.1)",
        "no better than random (0.1)",
    ]
    assert made["figures"][2]["lines"][1] == "gap −0.2"
    assert made["figures"][0]["lines"][0] == "p 0.97, without its first region 0.31"
    assert "The maps of 1 of 3 words are better than random" in made["caption"]
    assert made["data"]["words"][0]["without"][5] == pytest.approx(0.9)


def test_signed_maps_are_evenly_about_0():
    made = section(seen=looking(is_signed=True))
    assert made["bar"]["ticks"] == ["−0.5", "0", "0.5"]


def test_in_a_browser(tmp_path, open_page):
    scores = [score(0.3, 0.1), score(0.1, 0.1), score(-0.2, 0.1)]
    path = write_page(tmp_path / "page.html", [section(scores)], title="Captions")
    page = open_page(path, viewport={"width": 380, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    said, frames = page.locator(".said"), page.locator(".frame")
    page.keyboard.press("Tab")  # the list of sections
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "frame main small live"
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert said.text_content() == (
        "Row 1, column 2: looked at by 1 of 3 words more than the rest of the image; most by “a” "
        "0.5 (p 0.97, without the region 0.90)."
    )
    # each frame shows the place
    assert page.locator(".cursor:not([hidden])").count() == frames.count() == 4
    page.keyboard.press("Enter")  # words cannot be left out one by one
    assert not page.locator(".gone").first.is_visible()
    box = frames.nth(2).bounding_box()
    frames.nth(2).hover(position={"x": 0.1 * box["width"], "y": 0.1 * box["height"]})
    assert said.text_content().startswith("Row 0, column 0: looked at by 1 of 3 words")
    assert "“<b>” 0.25" in said.text_content()
    page.emulate_media(media="print")
    assert not said.is_visible()
    assert frames.nth(3).is_visible()


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
