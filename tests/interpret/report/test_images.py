"""Sections of images: their numbers, and what a browser makes of them."""

import json
import re

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import nn

import attnkit
from attnkit.interpret.diagnosis import SINK
from attnkit.interpret.picture import scale_of
from attnkit.interpret.report import Report
from attnkit.interpret.report.attention import (
    Without,
    attention_of,
    heads_data,
    scale_of_weights,
    without_each,
)
from attnkit.interpret.report.findings import Judged
from attnkit.interpret.report.maps import image_sections, patch_curves, patch_sentences
from attnkit.interpret.report.page import write_page
from attnkit.lightning import Explained

ROWS, COLUMNS = 3, 5
NAMES = [f"<script>alert({number})</script>" for number in range(3)]


def vit(seed=0):
    torch.manual_seed(seed)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=(12, 20), patch_size=4, depth=4, embed_dim=24,
        num_heads=2, num_classes=3,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.ndim > 1 else 0.2))
        model.blocks[1].attn.qkv.weight[:48] *= 10  # so that some heads have a sink
    return model.eval()


@pytest.fixture(scope="module")
def model():
    return vit()


@pytest.fixture(scope="module")
def images():
    return torch.randn(2, 3, 12, 20, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def seen(model, images):
    return [attnkit.explain(model, images, method=name) for name in ("relevance", "occlusion")]


@pytest.fixture(scope="module")
def trusts(seen):
    return [one.trust() for one in seen]


@pytest.fixture(scope="module")
def explained(model, images):
    return Explained(
        model,
        images,
        pictures=images,
        names=["one.png", "<b>two</b>.png"],
        truth=torch.tensor([1, 2]),
        class_names=NAMES,
    )


@pytest.fixture(scope="module")
def sections(explained, seen, trusts):
    both = zip(seen, trusts, strict=True)
    return image_sections(explained, [Judged(one.method, one, t, None) for one, t in both])


@pytest.fixture(scope="module")
def path(sections, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "explain.html"
    table = [["method", "gap"], ["relevance", 0.5]]
    return write_page(path, sections, title="Looks", facts=["model: vit"], table=table)


@pytest.fixture
def maps_of(pixels):
    """A function from a section to the pixels of its maps by their titles."""
    return lambda section: {one["title"]: pixels(one["uri"]) for one in section["figures"]}


def test_what_a_patch_looks_at_is_the_attention_of_its_row(model, images, seen, sections, pixels):
    attention = attention_of(seen[0])
    with attnkit.capture_attention(model) as weights:
        model(images)
    assert [one.layer for one in attention.looks] == [f"blocks.{n}.attn" for n in (0, 2, 3)]
    for one in attention.looks:
        rows = weights[one.layer][0].mean(dim=1)
        torch.testing.assert_close(one.weights, rows[:, 1:, 1:] * (ROWS * COLUMNS + 1))
        torch.testing.assert_close(one.prefix, rows[:, 1:, 0])
    # a tile of the sheet at the patch's place
    scale = scale_of_weights([one.weights[1] for one in attention.looks])
    for one, data in zip(attention.looks, sections[1]["data"]["looks"], strict=True):
        sheet = pixels(data["sheet"])
        assert sheet.shape == (ROWS**2, COLUMNS**2, 3)
        for row in range(ROWS):
            for column in range(COLUMNS):
                place = row * COLUMNS + column
                top, left = row * ROWS, column * COLUMNS
                tile = sheet[top : top + ROWS, left : left + COLUMNS]
                levels = scale.levels(one.weights[1, place].unflatten(0, (ROWS, COLUMNS)))
                assert (tile == scale.palette[levels]).all()
                assert data["most"][place] == int(one.weights[1, place].argmax())


def test_heads_are_of_what_the_class_token_looks_at(model, images):
    heads = attention_of(attnkit.explain(model, images)).heads
    with attnkit.capture_attention(model, rows=0) as weights:
        model(images)
    assert [layer.layer for layer in heads] == [*weights]
    num_keys = ROWS * COLUMNS + 1
    for layer in heads:
        of_class = weights[layer.layer][0][:, :, 0]  # [batch, heads, keys]
        entropy = torch.special.entr(of_class).sum(dim=-1) / torch.tensor(num_keys).log()
        torch.testing.assert_close(layer.entropy, entropy)
        largest, receiver = of_class.max(dim=-1)
        torch.testing.assert_close(layer.share, largest)
        assert torch.equal(layer.receiver, receiver)
        torch.testing.assert_close(layer.weights, of_class[:, :, 1:] * num_keys)


def test_p_without_a_patch_is_that_of_a_curve_that_removes_it(model, images, seen):
    found = without_each(seen[0])
    assert (found.grid, found.kind) == ((ROWS, COLUMNS), "tokens masked")
    torch.testing.assert_close(found.whole, seen[0].probability)
    for place in (0, 7, 14):
        map = torch.zeros(2, ROWS * COLUMNS)
        map[:, place] = 1
        curve = attnkit.perturbation_curves(
            model, images, seen[0].target.tolist(), map.unflatten(1, (ROWS, COLUMNS)),
            removal="mask", fractions=[1 / 15],
        )  # fmt: skip
        torch.testing.assert_close(found.p[:, place], curve.most_first[:, 1])


def test_pooled_attention_is_the_mean_of_its_patches(model, images, seen, monkeypatch):
    fine = attention_of(seen[0])
    monkeypatch.setattr("attnkit.interpret.report.attention.MOST_CELLS", 6)
    coarse = attention_of(seen[0])
    assert coarse.grid == (2, 3)
    for a, b in zip(coarse.heads, fine.heads, strict=True):
        expected = nn.functional.adaptive_avg_pool2d(
            b.weights.unflatten(2, (ROWS, COLUMNS)), (2, 3)
        )
        torch.testing.assert_close(a.weights, expected.flatten(2))
    assert coarse.looks[0].weights.shape == (2, 6, 6)


def test_methods_have_one_scale_for_all_images(sections, seen, maps_of):
    scale = scale_of([seen[1].map], is_signed=True)
    for image, section in enumerate(sections):
        found = maps_of(section)["occlusion"]
        assert (found == scale.palette[scale.levels(seen[1].map[image])]).all()
        bar = next(one["bar"] for one in section["figures"] if one["title"] == "occlusion")
        assert bar["label"] == "occlusion; one scale for 2 images"


def test_what_is_compared_has_one_scale_and_its_difference(explained, seen, images, maps_of):
    """Another checkpoint, and the likeliest of the other classes."""
    checkpoint = attnkit.explain(vit(seed=1), images)
    sections = image_sections(explained, [Judged("relevance", seen[0], None, checkpoint)])
    with torch.no_grad():
        logits = explained.model(images)
    second = logits.scatter(1, seen[0].target[:, None], -torch.inf).argmax(1)
    other = attnkit.explain(explained.model, images, target=second.tolist())
    both = scale_of([seen[0].map, checkpoint.map, other.map])
    for image, section in enumerate(sections):
        found = maps_of(section)
        assert [*found] == [
            "relevance", "the other checkpoint", "minus the other checkpoint", "another class",
            "minus another class", "Each patch removed",
        ]  # fmt: skip
        assert (found["relevance"] == both.palette[both.levels(seen[0].map[image])]).all()
        for name, one in (("the other checkpoint", checkpoint), ("another class", other)):
            assert (found[name] == both.palette[both.levels(one.map[image])]).all()
            difference = seen[0].map - one.map
            signed = scale_of([difference], is_signed=True)
            colours = signed.palette[signed.levels(difference[image])]
            assert (found[f"minus {name}"] == colours).all()


def test_eight_images_of_a_large_vit_take_two_megabytes(tmp_path, monkeypatch):
    """12 layers of 12 heads over 196 patches; p without each, which costs 1,568 forwards, drawn."""
    model = timm.create_model("vit_tiny_patch16_224", embed_dim=24, num_heads=12, num_classes=9)
    with torch.no_grad():  # attention that is far from even takes most
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    photos = [load_sample_image(name) for name in ("china.jpg", "flower.jpg")]
    tall = [torch.tensor(photo).permute(2, 0, 1)[None] / 255 for photo in photos]
    cut = [photo[..., 60 * n : 60 * n + 400] for n in range(4) for photo in tall]
    images = torch.cat([nn.functional.interpolate(one, (224, 224), mode="area") for one in cut])
    p = Without((14, 14), torch.rand(8, 196), torch.rand(8), "tokens masked")
    monkeypatch.setattr("attnkit.interpret.report.maps.without_each", lambda *_: p)
    seen = [attnkit.explain(model.eval(), images, method=m) for m in ("attention", "centre")]
    other = attnkit.explain(model, images + 0.1, method="attention")
    found = [Judged(one.method, one, None, other) for one in seen]
    sections = image_sections(Explained(model, images, pictures=images), found)
    path = write_page(tmp_path / "explain.html", sections, title="8")
    assert len(sections[7]["data"]["looks"]) == 3
    assert len(sections[7]["heads"]["tiles"]) == 12 * 12
    assert path.stat().st_size < 2_000_000


def test_sentences_are_of_the_image(trusts):
    for image in range(2):
        for trust in trusts:
            said = patch_sentences(trust, image)
            for kind, (lost, verdict) in zip(trust.curves, said, strict=True):
                whole, without = trust.curves[kind]["map"][0, image, :2].tolist()
                assert f"from {whole:.2f} to {without:.2f}; without a random 20 %" in lost
                gap = float(trust.gaps[kind][image])
                assert verdict.startswith(f"Gap {gap:.2f},".replace("-", "−"))
                within = float(re.search(r"± ([\d.]+)", verdict)[1])
                if abs(gap - within) > 0.01:
                    assert ("no better" in verdict) == (gap < within)


def test_curves_have_their_numbers_at_their_height(trusts, path):
    trust = trusts[0]
    for kind, figure in zip(trust.curves, patch_curves({"a": trust}, 1, "cat"), strict=True):
        most, least = (line["points"] for line in figure["lines"])
        for points, order in ((most, 0), (least, 1)):
            wanted = trust.curves[kind]["map"][order, 1]
            torch.testing.assert_close(torch.tensor(points)[:, 0], trust.removed.float())
            torch.testing.assert_close(torch.tensor(points)[:, 1], wanted)
        assert figure["y"] == "p(cat)"
    drawn = path.read_text().split('<section id="s1"')[1]
    (line,) = re.findall(r'<polyline class="c0 solid" points="([^"]+)', drawn)[:1]
    first = trust.curves["mask"]["map"][0, 1, 0]
    assert line.split()[0] == f"0.0,{130 * (1 - float(first)):.1f}"


def test_names_are_escaped(sections, path):
    text = path.read_text()
    assert "<script>alert" not in text
    assert "<b>two" not in text
    assert "&lt;b&gt;two&lt;/b&gt;.png" in text
    assert all(section["data"]["target"] in NAMES for section in sections)


def test_a_network_without_attention_has_the_rest(tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    images = torch.randn(1, 3, 8, 8)
    seen = attnkit.explain(network.eval(), images, method="input_gradient")
    explained = Explained(network, images, pictures=images)
    (section,) = image_sections(explained, [Judged("input_gradient", seen, None, None)])
    assert section["notes"][0].startswith("Not shown: what patches look at, layers and heads.")
    assert section["looks"] is section["heads"] is section["data"]["looks"] is None
    assert section["data"]["kind"] == "mean colour"
    assert len(section["data"]["without"]) == section["data"]["rows"] * section["data"]["columns"]
    text = write_page(tmp_path / "page.html", [section], title="CNN").read_text()
    assert "Not shown: what patches look at" in text
    assert "Layers and heads" not in text


def test_hover_click_and_keys(open_page, path, sections, pixels):
    page = open_page(path)
    data = sections[0]["data"]
    section = page.locator("#s0")
    frame, said = section.locator(".frame.main"), section.locator(".said").first
    box = frame.bounding_box()
    frame.hover(position={"x": box["width"] * 3.5 / COLUMNS, "y": box["height"] * 1.5 / ROWS})
    place, last = 1 * COLUMNS + 3, data["looks"][-1]
    row, column = divmod(last["most"][place], COLUMNS)
    assert said.text_content().startswith(
        f"The patch at row 1, column 3 looks most at row {row}, column {column}, "
        f"{last['times'][place]:g} times uniform attention, in blocks.3.attn; class and register "
        f"tokens get {last['prefix'][place]} %."
    )
    # the tile that is drawn
    script = "c => [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]"
    canvas = section.locator(".looks canvas")
    page.wait_for_function("document.querySelector('#s0 .looks canvas') !== null")
    page.wait_for_timeout(100)
    drawn = np.array(canvas.evaluate(script), dtype=np.uint8).reshape(ROWS, COLUMNS, 4)[..., :3]
    sheet = pixels(last["sheet"])
    assert (drawn == sheet[ROWS : 2 * ROWS, 3 * COLUMNS : 4 * COLUMNS]).all()
    # another patch by the keyboard, taken away by Enter
    frame.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    place = 2 * COLUMNS + 2
    p = data["without"][place]
    text = said.text_content()
    assert "Without the patch at row 2, column 2 (tokens masked), p(" in text
    digits = 2 if f"{p:.2f}" != f"{data['whole']:.2f}" else 4
    assert text.endswith(f"from {data['whole']:.{digits}f} to {p:.{digits}f}.")
    assert section.locator(".gone").is_visible()
    # it stays away while another patch is looked at
    page.keyboard.press("ArrowUp")
    assert said.text_content().startswith("The patch at row 1, column 2 looks most at ")
    assert said.text_content().endswith(text.partition(". Without")[2])
    frame.click(position={"x": box["width"] * 2.5 / COLUMNS, "y": box["height"] * 2.5 / ROWS})
    assert "Without" not in said.text_content()
    assert not section.locator(".gone").is_visible()
    # another layer
    section.locator("select").select_option("0")
    assert "in blocks.0.attn" in said.text_content()


def test_heads_by_keyboard(open_page, path, sections, model, images):
    page = open_page(path)
    attention = attention_of(attnkit.explain(model, images))
    tiles, said = page.locator("#s1 .tiles"), page.locator("#s1 .heads .said")
    tiles.focus()
    assert said.text_content().startswith("blocks.0.attn, head 0: entropy ")
    for key in ("ArrowLeft", "ArrowDown", "ArrowRight", "ArrowRight", "ArrowUp", "ArrowDown"):
        page.keyboard.press(key)
    one = attention.heads[1]
    assert said.text_content().startswith(
        f"blocks.1.attn, head 1: entropy {float(one.entropy[1, 1]):.2f}; "
    )
    assert said.text_content().endswith(f"gets most, {100 * float(one.share[1, 1]):.0f} %.")
    is_sink = [bool(share >= SINK) for one in attention.heads for share in one.share[1]]
    assert 0 < sum(is_sink) < len(is_sink)
    assert page.locator("#s1 .tiles .sink").count() == sum(is_sink)


@pytest.mark.parametrize("wide", [1280, 380])
def test_nothing_is_cut_off(open_page, path, wide):
    page = open_page(path, viewport={"width": wide, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= wide
    assert page.locator("h2").all_text_contents() == ["one.png", "<b>two</b>.png"]
    assert all(page.locator("img").evaluate_all("all => all.map(one => one.naturalWidth > 0)"))
    assert page.locator("img:not([alt])").count() == 0


def test_the_data_is_json(path):
    for text in re.findall(r'<script type="application/json">(.*?)</script>', path.read_text()):
        assert json.loads(text)["rows"] == ROWS


def test_the_picture_of_layers_stands_in_the_page(open_page, tmp_path, pixels):
    """As it is beside the page; a small screen shows no less of it."""
    torch.manual_seed(0)
    vit = attnkit.ViT(image_size=(12, 20), patch_size=4, dim=12, depth=2, num_heads=3)
    images = torch.randn(3, 3, 12, 20)
    report = Report("attention", trust="none", layer="blocks.*")
    found = report(Explained(vit.eval(), images, pictures=images), tmp_path)
    assert [one["title"] for one in found.sections] == [
        "image 0", "image 1", "image 2", "What layers do",
    ]  # fmt: skip
    assert {"layer_blocks.0.attention", "layer_blocks.1.attention"} < {*found.arrays}
    beside = np.asarray(Image.open(tmp_path / "layers.png").convert("RGB"))
    np.testing.assert_array_equal(pixels(found.sections[-1]["picture"]), beside)
    for wide, shown in ((1280, beside.shape[1]), (380, 640)):
        page = open_page(tmp_path / "explain.html", viewport={"width": wide, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= wide
        assert "multiple of what uniform attention would give" in page.locator("#s3 p").inner_text()
        assert page.locator("#s3 img").bounding_box()["width"] == pytest.approx(shown, abs=1)


@pytest.mark.parametrize(
    ("options", "who"),
    [
        ({}, "the class token looks at"),
        ({"num_registers": 2}, "the class token looks at"),
        ({"pooling": "mean"}, "the patches look at, on average"),
        ({"pooling": "mean", "num_registers": 2}, "the patches look at, on average"),
        ({"pooling": "attention"}, "the learned queries look at, and in layers below all tokens,"),
    ],
    ids=str,
)
def test_heads_are_those_of_the_tokens_that_are_read(tmp_path, options, who):
    """Whatever other tokens there are; none is called the class token that is not read."""
    torch.manual_seed(0)
    vit = attnkit.ViT(
        image_size=(12, 20), patch_size=4, dim=12, depth=2, num_heads=3, **options
    ).eval()
    images = torch.randn(1, 3, 12, 20)
    with torch.no_grad():  # so that layers look at different places, and most at the first token
        for parameter in vit.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    Report("attention", trust="none")(Explained(vit, images, pictures=images), tmp_path)
    assert f"What {who}" in " ".join((tmp_path / "explain.html").read_text().split())
    attention = attention_of(attnkit.explain(vit, images, method="attention"))
    says = [tile["says"] for tile in heads_data(attention, 0)["tiles"]]
    first = sum(one.receiver[0].tolist().count(0) for one in attention.heads)
    named = sum("the class token gets most" in one for one in says)
    assert named == (first if "class token" in who else 0)
    if options.get("pooling") == "mean":
        with attnkit.capture_attention(vit) as captured:
            vit(images)
        patches = captured["blocks.1.attention"][0][0, :, -15:].mean(1)[:, -15:]
        num_keys = 15 + options.get("num_registers", 0)
        torch.testing.assert_close(attention.heads[1].weights[0], patches * num_keys)
