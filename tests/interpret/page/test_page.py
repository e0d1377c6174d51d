"""The page as a file: one, whole, with every name escaped and nothing to load."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

from attnkit.interpret.colours import DIVERGING, SEQUENTIAL, scale_of
from attnkit.interpret.page.html import colour_bar, image_uri, map_uri, table_html
from attnkit.interpret.page.page import write_page
from attnkit.interpret.page.section import Section, Table

EVIL = '<script>alert("1")</script>&'


def pixels(uri):
    import base64
    import io

    kind, _, coded = uri.partition(";base64,")
    assert kind in ("data:image/png", "data:image/jpeg")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(coded))).convert("RGB"))


def write(path, **given):
    known = {"title": "A page", "facts": [], "table": Table([], []), "sections": []}
    return write_page(path, **known | given).read_text(encoding="utf-8")


def test_names_cannot_become_elements(tmp_path):
    text = write(
        tmp_path / "page.html",
        title=EVIL,
        facts=[f"{EVIL}: {EVIL}", EVIL],
        table=Table([EVIL], [[EVIL]]),
        sections=[Section(EVIL, "<p>body</p>", {"name": EVIL}, "image")],
    )
    assert "alert" in text
    assert "<script>alert" not in text
    assert "</script>&" not in text
    # the data is what it was
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', text)
    assert json.loads(data) == {"name": EVIL}
    assert "<p>body</p>" in text


def test_one_file_that_loads_nothing(tmp_path):
    text = write(tmp_path / "page.html", sections=[Section("one", ""), Section("two", "")])
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    assert not re.search(r"https?:|//|@import|<link|src=\"(?!data:)", re.sub(r"//.*", "", text))
    assert "default-src 'none'" in text
    assert 'href="#s1">two' in text
    assert 'id="s1"' in text


def test_a_table_of_numbers(tmp_path):
    html = table_html(Table(["map", "gap"], [["rollout", 0.12345], ["random", None]]))
    assert '<th scope="col" class="number">gap' in html
    assert '<td class="number">0.123</td>' in html
    assert '<td class="number"></td>' in html
    with pytest.raises(ValueError, match="argument"):
        table_html(Table(["map", "gap"], [["rollout"]]))


def test_a_map_has_one_pixel_a_place_in_the_colours_of_its_scale():
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
    assert "−4" in colour_bar(scale, "of it")
    assert ">0<" in colour_bar(scale, "of it")


def test_maps_of_nothing_have_a_scale():
    assert scale_of([torch.zeros(2, 2)]).high == 1
    assert scale_of([]).high == 1


def test_an_image_is_itself():
    image = torch.rand(3, 7, 5)
    found = pixels(image_uri(image))
    assert np.abs(found / 255 - image.permute(1, 2, 0).numpy()).max() < 0.003
    assert image_uri(torch.rand(3, 80, 80)).startswith("data:image/jpeg")
    assert pixels(image_uri(torch.rand(1, 7, 5))).shape == (7, 5, 3)
