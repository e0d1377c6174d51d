"""The section of a caption: words, maps and scores, and in a browser what looks where."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attnkit.interpret.page.captions import caption_section
from attnkit.interpret.page.html import map_uri
from attnkit.interpret.page.page import write_page
from attnkit.interpret.page.section import Table
from attnkit.interpret.trust.words import WordScore

CHROMIUM = Path("/usr/bin/chromium")
WORDS = ["a", "<b>", "<end>"]


def explained(**given):
    """Two sentences; of the second the first word looks at row 1, column 2, the others nowhere."""
    words = torch.zeros(2, 4, 2, 3)
    words[1, 0, 1, 2] = 0.5
    words[1, 1, 0, 0] = 0.25
    words[1, 3] = 9.0  # behind the end
    return SimpleNamespace(**{"words": words, "method": "attention", "is_signed": False} | given)


def score(gap, within):
    each = torch.linspace(0.4, 0.9, 6).view(2, 3)
    return WordScore(gap, within, 0.97, (1, 2), 0.31, 0.88, each)


def section(scores=None):
    return caption_section("A scene", torch.rand(3, 20, 30), explained(), WORDS, scores, image=1)


def test_words_have_maps_on_one_scale_and_texts_that_stand_for_them():
    made = section()
    cards = re.findall(r'<li class="word">.*?</li>', made.html, re.DOTALL)
    assert len(cards) == 3
    assert 'alt="a: largest, 0.5, at row 1, column 2"' in cards[0]
    assert "&lt;b&gt;: largest, 0.25, at row 0, column 0" in cards[1]
    assert "<b>" not in made.html
    assert "attention, one scale for all words" in made.html
    assert "<span>0</span><span>0.5</span>" in made.html  # and not 9, which is behind the end
    assert "--shape:30/20" in made.html
    assert made.html.count("--picture:url(") == 1  # however many words there are
    from attnkit.interpret.colours import overlay_scale

    scale = overlay_scale([torch.tensor([0.5])])
    assert map_uri(explained().words[1, 1], scale) in cards[1]
    assert "was not measured" in made.html
    assert made.data["words"][0] == {"word": "a", "values": [0, 0, 0, 0, 0, 0.5]}
    assert (made.data["rows"], made.data["columns"], made.script) == (2, 3, "caption")


def test_what_is_no_better_than_random_is_faded_and_says_so():
    made = section([score(0.3, 0.1), score(0.1, 0.1), score(-0.2, 0.1)])
    kinds = re.findall(r'<li class="(word[^"]*)">', made.html)
    assert kinds == ["word", "word faded", "word faded"]
    assert made.html.count("no better than random (0.10)") == 2
    assert "gap −0.20" in made.html
    assert "p 0.97, without its first region 0.31" in made.html
    assert "The maps of 1 of 3 words are better than random" in made.html
    assert made.data["words"][0]["without"][5] == pytest.approx(0.9)


def test_signed_maps_are_evenly_about_0():
    signed = explained(is_signed=True)
    made = caption_section("A scene", torch.rand(3, 20, 30), signed, WORDS, image=1)
    assert "<span>−0.5</span><span>0</span><span>0.5</span>" in made.html


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seen": explained(words=None)}, "seen: expected an explanation of a captioner"),
        ({"words": list("abcde")}, "words: expected at most 4, got 5"),
        ({"scores": [score(1, 0)]}, "scores: expected one for each of 3 words, got 1"),
    ],
)
def test_bad_input_is_refused(given, message):
    known = {"title": "", "picture": torch.rand(3, 4, 4), "seen": explained(), "words": WORDS}
    with pytest.raises(ValueError, match=message):
        caption_section(**known | given)


@pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium")
def test_in_a_browser_without_network(tmp_path):
    playwright = pytest.importorskip("playwright.sync_api")
    path = write_page(
        tmp_path / "page.html", title="Captions", facts=[], table=Table([], []),
        sections=[section([score(0.3, 0.1), score(0.1, 0.1), score(-0.2, 0.1)])],
    )  # fmt: skip
    with playwright.sync_playwright() as run, run.chromium.launch(executable_path=CHROMIUM) as it:
        page = it.new_context(offline=True).new_page()
        errors = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("requestfailed", lambda request: errors.append(request.url))
        page.goto(path.as_uri())
        said, cards = page.locator(".said"), page.locator(".word")
        cards.nth(1).hover()
        assert "The map of “<b>” is largest at row 1, column 2 (0)." in said.inner_text()
        assert "Without that region p goes from 0.97 to 0.90" in said.inner_text()
        assert "by lot, to 0.88" in said.inner_text()
        assert page.locator(".large .map").get_attribute("src") == cards.nth(1).locator(
            ".map"
        ).get_attribute("src")
        page.keyboard.press("Tab")  # the list of sections, the image, the words
        page.locator(".large").focus()
        for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
            page.keyboard.press(key)
        assert said.inner_text().startswith("Row 1, column 2: looked at by 1 of 3 words")
        assert "most by “a” 0.5 (p 0.97, without the region 0.90)" in said.inner_text()
        assert "looks" in cards.nth(0).get_attribute("class")
        assert cards.nth(0).locator(".here").inner_text() == "here 0.5"
        page.keyboard.press("Tab")
        assert "The map of “a” is largest" in said.inner_text()
        page.emulate_media(media="print")
        assert not said.is_visible()
        assert cards.nth(2).is_visible()
        assert errors == []
