"""The page as a file: one, whole, with every text escaped and nothing to load."""

import json
import re

import numpy as np
import pytest
import torch
from jinja2 import UndefinedError

from attnkit.interpret.picture import DIVERGING, SEQUENTIAL, scale_of
from attnkit.interpret.report.page import colour_bar, image_uri, map_uri, write_page

EVIL = '<script>alert("1")</script>&\n\'"'


def section(text=EVIL):
    """One of maps whose every text is this one."""
    picture = image_uri(torch.rand(3, 4, 6))
    bar = colour_bar(scale_of([torch.ones(1)]), text)
    map = {"title": text, "uri": picture, "alt": text, "bar": bar, "lines": [text], "faded": True}
    return {
        "kind": "maps", "title": text, "picture": picture, "shape": "6 / 4", "caption": text,
        "overlay": True, "bar": bar, "figures": [map], "hint": text, "looks": None, "heads": None,
        "curves": [], "said": [], "notes": [text],
        "data": {"name": text, "rows": 1, "columns": 1, "words": [{"word": text, "values": [1]}]},
    }  # fmt: skip


def write(folder, *sections, **given):
    text = write_page(folder / "page.html", sections, title="A page", **given)
    return text.read_text(encoding="utf-8")


def test_texts_cannot_become_elements(tmp_path):
    text = write(
        tmp_path, section(), facts=[f"{EVIL}: {EVIL}", EVIL], found=[EVIL], reading=EVIL,
        table=[[EVIL, EVIL], [EVIL, 0.5]], caption=EVIL,
    )  # fmt: skip
    assert text.count("alert") > 15
    assert "<script>alert" not in text
    assert "</script>&" not in text
    assert not re.search(r"<\w[^>]*alert\(\"1", text), "no attribute ends at its quotes"
    # the data is what it was
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', text)
    assert json.loads(data) == section()["data"]


def test_a_browser_shows_texts_as_texts(tmp_path, open_page):
    write(tmp_path, section(), facts=[EVIL], found=[EVIL], table=[[EVIL], [EVIL]])
    page = open_page(tmp_path / "page.html")
    assert page.locator("h2").text_content() == EVIL
    assert page.locator(".map").get_attribute("alt") == EVIL
    page.locator(".frame.main").focus()
    assert f"“{EVIL}”" not in page.locator(".said").text_content()  # 1 is no more than the mean
    assert page.locator("td").text_content() == EVIL


def test_names_that_are_no_text_are_written(tmp_path):
    """As of a file whose name is not UTF-8."""
    assert "a\\udce9.png" in write(tmp_path, section("a\udce9.png"))


def test_one_file_that_loads_nothing(tmp_path):
    text = write(tmp_path, section("one"), section("two"))
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    assert not re.search(r"https?:|@import|<link|src=\"(?!data:)|url\((?!data:)", text)
    assert "default-src 'none'" in text
    assert 'href="#s1">two' in text
    assert 'id="s1"' in text
    assert text.startswith("<!DOCTYPE html>")


def test_data_that_a_template_needs_cannot_be_forgotten(tmp_path):
    forgotten = section("one")
    del forgotten["caption"]
    with pytest.raises(UndefinedError, match="caption"):
        write(tmp_path, forgotten)
    assert not [*tmp_path.iterdir()]


def test_a_table_of_numbers(tmp_path):
    text = write(tmp_path, table=[["map", "gap"], ["rollout", -0.12345], ["random", None]])
    assert '<th scope="col">gap</th>' in text
    assert "<td>rollout</td><td>−0.123</td>" in text
    assert "<td>random</td><td></td>" in text
    assert "<table>" not in write(tmp_path, table=[["map", "gap"]])


def test_a_map_has_one_pixel_a_place_in_the_colours_of_its_scale(pixels):
    map = torch.tensor([[0.0, 1.0, 2.0], [4.0, 3.0, 9.0]])
    scale = scale_of([map[:, :2]])
    assert (scale.low, scale.high, scale.name) == (0, 4, SEQUENTIAL)
    found = pixels(map_uri(map, scale))
    assert found.shape == (2, 3, 3)
    assert (found[1, 0] == scale.palette[255]).all()
    assert (found[1, 2] == scale.palette[255]).all()  # beyond the end
    assert (found[0, 1] == scale.palette[64]).all()
    assert (found[0, 0] == scale.palette[0]).all()


def test_signed_numbers_are_white_at_0():
    scale = scale_of([torch.tensor([-1.0, 4.0])], is_signed=True)
    assert (scale.low, scale.high, scale.name) == (-4, 4, DIVERGING)
    assert scale.palette[scale.levels(torch.zeros(1))].min() > 240
    red, blue = scale.palette[255].astype(int), scale.palette[0].astype(int)
    assert red[0] > red[2]
    assert blue[2] > blue[0]
    assert colour_bar(scale, "of it")["ticks"] == ["−4", "0", "4"]


def test_an_image_is_itself(pixels):
    image = torch.rand(3, 7, 5)
    found = pixels(image_uri(image))
    assert np.abs(found / 255 - image.permute(1, 2, 0).numpy()).max() < 0.003
    assert image_uri(torch.rand(3, 80, 80)).startswith("data:image/jpeg")
    assert pixels(image_uri(torch.rand(1, 7, 5))).shape == (7, 5, 3)
