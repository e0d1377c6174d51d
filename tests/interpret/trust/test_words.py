"""The trust of all words of a sentence at once."""

import pytest
import torch
from torch import nn

import attnkit
from attnkit.interpret.methods.words import Sentences
from attnkit.interpret.trust.words import trust_words
from attnkit.models.captioning.word_decoder import END, PAD, START

GRID, VOCABULARY = (4, 6), 29


class Looker(nn.Module):
    """Says word w for sure if region w is bright, and anything with the same p if it is dark; the
    words before change nothing."""

    grid = GRID

    def __init__(self):
        super().__init__()
        self.seen = 0

    def forward(self, images, before):
        self.seen += len(images)
        places = nn.functional.adaptive_avg_pool2d(images.mean(1), GRID).flatten(1)
        logits = torch.zeros(len(images), before.shape[1], VOCABULARY)
        logits[:, :, 4:28] = 20 * places[:, None]
        return logits


@pytest.fixture
def images():
    """Two of 8 x 18 pixels: the first bright at region 2, the second at region 10."""
    images = torch.zeros(2, 3, 8, 18)
    images[0, :, :2, 6:9] = 1.0
    images[1, :, 2:4, 12:15] = 1.0
    return images


def test_of_a_captioner_whose_words_stand_each_for_a_region(images):
    said = torch.tensor([[6, 5, END], [14, END, PAD]])
    maps = torch.zeros(2, 3, *GRID)
    maps[0, :, 0, 2] = 1.0
    maps[1, :, 1, 4] = 1.0
    captioner = Looker()
    trust = trust_words(Sentences(captioner, images, said), maps)
    assert trust.num_forwards == 2 + 24 + 2 * (64 + 2 * 3)
    assert trust.num_forwards == captioner.seen / 2 - 1  # which found what p is
    assert [len(words) for words in trust.scores] == [3, 2]
    named, other, end = trust.scores[0]
    assert named.probability == pytest.approx(1, abs=1e-6)
    assert named.first == (0, 2)
    even = torch.e ** (20 / 24)  # of a region in the mean colour, and 1 of one that is dark

    def without(k):  # p where the bright region and k others have the mean colour
        return even / ((1 + k) * even + 28 - k)

    assert named.without == pytest.approx(without(0), rel=1e-4)
    assert named.without_each[0, 2] == pytest.approx(named.without)
    assert named.without_each[1, 0] == pytest.approx(1, abs=1e-6)
    assert named.without_random == pytest.approx((23 + without(0)) / 24, rel=1e-4)
    # without 0, 1, 5, 12 and 24 regions: most first p falls at once, least first at the end
    most = torch.tensor([1, without(0), without(4), without(11), without(23)])
    least = torch.tensor([1, 1, 1, 1, without(23)])
    expected = torch.trapezoid(least - most, torch.tensor([0, 1, 5, 12, 24]) / 24)
    assert named.gap == pytest.approx(float(expected), rel=1e-4)
    assert named.is_better
    assert not other.is_better  # the word's region was dark from the start
    assert not end.is_better  # which is the likelier without it
    assert end.gap < 0
    assert trust.scores[1][0].first == (1, 4)
    assert trust.scores[1][0].gap == pytest.approx(named.gap, rel=1e-4)
    assert str(trust).startswith("image 0: 1 of 3 words have a map better than random; mean gap")


def test_a_word_alone_has_the_gap_of_trust():
    """Against `attnkit.trust` of a word: the same orders of the same map by another way."""
    model = attnkit.Captioner(
        attnkit.ViTEncoder((16, 24), dim=12, depth=1, num_heads=3),
        attnkit.TransformerDecoder(23, 7, dim=12, depth=1, num_heads=3),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    images = torch.randn(2, 3, 16, 24)  # 2 x 3 regions, so that 1, 3 and 6 are what trust removes
    said = torch.tensor([[7, 9, 4, END], [5, END, PAD, PAD]])
    seen = attnkit.explain(model, images, said)
    state = torch.get_rng_state()
    model.train()
    trust = seen.trust_words(batch_size=5)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    for image, word in ((0, 1), (0, 3), (1, 0)):
        alone = seen.trust(image=image, word=word, removals=["mean"])
        score = trust.scores[image][word]
        assert score.gap == pytest.approx(alone["gap in p, mean colour"].map, abs=1e-5)
        assert score.probability == pytest.approx(float(seen.probability[image, word]), abs=1e-5)
        dropped = seen.words[image, word].argmax()
        assert score.first == divmod(int(dropped), 3)
    assert score.gap != 0
    logits = model(images, torch.cat([torch.full((2, 1), START), said[:, :-1]], dim=1))
    expected = logits.detach().softmax(2).gather(2, said[..., None])[0, 2, 0]
    assert trust.scores[0][2].probability == pytest.approx(float(expected), abs=1e-5)


def test_random_maps_are_no_better_than_random():
    torch.manual_seed(1)
    images = torch.rand(20, 3, 8, 18)
    said = torch.randint(4, 28, (20, 5))
    maps = torch.rand(20, 5, *GRID)
    trust = trust_words(Sentences(Looker(), images, said), maps)
    better = sum(word.is_better for words in trust.scores for word in words)
    assert 1 <= better <= 12  # of 100, of which 5 are expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"orders": 3}, "orders: expected an even number, half of them reversed, got 3"),
        ({"orders": 0}, "orders: expected at least 2, got 0"),
        ({"batch_size": 0}, "batch_size: expected at least 1, got 0"),
        ({"fractions": (0, 1)}, "fractions: expected one that is more than one and not"),
        ({"maps": torch.rand(2, 4, *GRID)}, r"maps: expected \[batch, words, …\] = \[2, 3\]"),
    ],
)
def test_bad_input_is_refused_in_one_line(images, given, message):
    said = torch.full((2, 3), 6)
    known = {"maps": torch.rand(2, 3, *GRID)} | given
    with pytest.raises(ValueError, match=message) as error:
        trust_words(Sentences(Looker(), images, said), **known)
    assert "\n" not in str(error.value)


def test_what_has_no_words_is_refused():
    vit = attnkit.ViT(image_size=8, patch_size=4, num_classes=3, dim=12, depth=1, num_heads=3)
    with pytest.raises(ValueError, match="words: only a captioner's explanation has words"):
        attnkit.explain(vit, torch.rand(1, 3, 8, 8)).trust_words()
