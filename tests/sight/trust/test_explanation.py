"""`explanation.trust()`: a map that says itself how far to trust it."""

import pytest
import torch

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
