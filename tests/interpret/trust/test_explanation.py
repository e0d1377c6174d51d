"""`explanation.trust()`: a map that says itself how far to trust it."""

import pytest
import torch
from torch import nn

import attnkit
from attnkit.interpret.methods.table import METHODS
from attnkit.models.captioning.word_decoder import END, PAD, START


@pytest.mark.parametrize("method", ["attention", "relevance", "input_gradient", "centre"])
def test_every_method_can_be_judged(vit, images, method):
    seen = attnkit.explain(vit, images, method=method)
    found = seen.trust(removals=["mask"], seed=3)
    has_target = METHODS[method].has_target
    assert (found["class sensitivity"].map == 0) == (not has_target)
    assert {*found.verdicts} == {"mask", "class", "weights"}
    alone = attnkit.trust(vit, images, None, seen.map, removals=["mask"], seed=3)
    assert found["gap in p, tokens masked"] == alone["gap in p, tokens masked"]
    same = {"random", "centre"}
    if method in same | {"input_gradient"}:
        score = found["similarity, all weights random"]
        expected = 1 if method in same else score.input_gradient
        assert score.map == pytest.approx(expected, abs=1e-6)


def test_options_of_the_method_are_kept(vit, images):
    first = attnkit.explain(vit, images, method="relevance", layers=0)
    found = first.again(vit, images, first.target)
    assert torch.equal(found, first.map)
    assert not torch.equal(found, attnkit.explain(vit, images).map)


class Tokens(nn.Module):
    """Attention of 18 x 20 pixels, which says nothing of patches."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, 1, 6))
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 5)

    def forward(self, images):
        tokens = images.flatten(2).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(images), -1, -1), tokens], dim=1)
        return self.head(tokens[:, 0] + self.attention(tokens, tokens, tokens)[0][:, 0])


def test_what_is_removed_are_the_patches_that_were_found():
    torch.manual_seed(0)
    seen = attnkit.explain(Tokens(), torch.randn(2, 6, 18, 20))
    assert seen.map.shape == (2, 18, 20)
    found = seen.trust()
    assert not found.unavailable
    assert found.removed.tolist() == pytest.approx([0, 0.2, 0.5, 1])  # 72 and 180 of 360


def test_a_given_map_has_no_method(vit, images):
    map = torch.rand(7, 3, 5)
    found = attnkit.explain(vit, images, 2, method=map).trust(removals=["mean"], full=False)
    assert {*found.verdicts} == {"mean"}
    expected = attnkit.trust(vit, images, 2, map, removals=["mean"])
    assert found.to_dict() == expected.to_dict()


def test_bad_options(vit, images):
    seen = attnkit.explain(vit, images)
    with pytest.raises(TypeError, match="removal"):
        seen.trust(removal="mean")
    with pytest.raises(ValueError, match="word: only a captioner's explanation has words"):
        seen.trust(word=2)


@pytest.fixture
def captioner():
    torch.manual_seed(0)
    encoder = attnkit.ViTEncoder((16, 24), dim=12, depth=2, num_heads=3, num_registers=2)
    decoder = attnkit.TransformerDecoder(23, 11, dim=12, depth=2, num_heads=3)
    model = attnkit.Captioner(encoder, decoder)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


SAID = torch.tensor([[7, 9, 4, 21, END], [5, 17, END, PAD, PAD]])


@pytest.mark.parametrize("method", ["relevance", "attention"])
def test_a_word_of_a_sentence(captioner, method):
    images = torch.randn(2, 3, 16, 24)
    seen = attnkit.explain(captioner, images, SAID, method=method)
    found = seen.trust(image=0, word=3, full=True)
    assert found.removed.tolist() == pytest.approx([0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1])
    torch.testing.assert_close(
        found.curves["mask"]["map"][:, 0, 0], seen.probability[0, 3].expand(2)
    )
    assert {*found.verdicts} == {"mask", "mean", "class", "weights"}
    # the same by hand
    before = torch.tensor([[START, 7, 9, 4]])
    grid, map = seen.words.shape[2:], seen.words[:1, 3]

    class Next(nn.Module):
        def __init__(self):
            super().__init__()
            self.captioner = captioner

        def forward(self, images):
            return captioner(images, before.expand(len(images), -1))[:, 3]

    expected = attnkit.trust(Next(), images[:1], 21, map, grid=tuple(grid), full=True)
    name = "gap in logit, tokens masked"
    assert found[name].map == pytest.approx(expected[name].map, rel=1e-5)
    again = seen.again(captioner, images[:1], SAID[:1])
    torch.testing.assert_close(again, seen.words[:1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"word": 0}, "image: expected one from 0 to 1, got None"),
        ({"image": 0}, "word: expected one from 0 to 4, got None"),
        ({"image": 2, "word": 0}, "image: expected one from 0 to 1, got 2"),
        (
            {"image": 0, "word": 5},
            "word: behind 5 words, these and the 6 places of the image cannot",
        ),
        ({"image": 1, "word": 3}, "word: the sentence of image 1 ends before word 3"),
    ],
)
def test_bad_words(captioner, options, message):
    longer = torch.cat([torch.full((2, 2), 3), SAID], dim=1)
    said = longer if options.get("word") == 5 else SAID
    seen = attnkit.explain(captioner, torch.randn(2, 3, 16, 24), said, method="centre")
    with pytest.raises(ValueError, match=message):
        seen.trust(**options)
