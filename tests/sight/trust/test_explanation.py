"""`explanation.trust()`: a map that says itself how far to trust it."""

import pytest
import torch
from torch import nn

import attnkit
from attnkit.sight import METHODS


@pytest.mark.parametrize("method", METHODS)
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
    seen.words = torch.rand(7, 4, 3, 5)
    with pytest.raises(ValueError, match="trust: expected maps of classes, got those of words"):
        seen.trust()
