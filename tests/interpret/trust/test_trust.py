"""`attnkit.trust`: scores whose values are known, verdicts that are calibrated, and words."""

import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

import attnkit
from attnkit.interpret.trust.judge import _verdicts, spearman, with_random_weights
from attnkit.interpret.trust.result import Fall, Score, Trust

CONTROLS = {"name", "map", "random", "within", "centre", "input_gradient", "oracle"}


def gradient_times_input(model, images, classes):
    images = images.clone().requires_grad_()
    y = model(images).gather(1, classes[:, None]).sum()
    (gradient,) = torch.autograd.grad(y, images)
    return (gradient * images).sum(dim=1).detach()


def raw_attention(model, images, classes):
    with attnkit.capture_attention(model, layers=-1, rows=0) as weights:
        model(images)
    (found,) = weights.values()
    prefix = model.num_prefix_tokens
    return found[0].mean(dim=1)[:, 0, prefix:].unflatten(1, (3, 5))


def test_the_right_map_of_a_linear_model_is_better_than_all(linear, images):
    map = linear.contributions(images, 3)
    found = attnkit.trust(linear, images, 3, map, removals=["mean"], full=True)
    rivals = ("random", "centre", "input gradient")
    assert found.verdicts["mean"] == tuple(f"better than {name}" for name in rivals)
    gap = found["gap in logit, mean colour"]
    assert gap.map > 2 * gap.within > 0
    # two standard errors of random maps, whose mean gap is 0
    most, least = found.curves["mean"]["random"][::2], found.curves["mean"]["random"][1::2]
    lots = torch.trapezoid(least - most, found.removed.to(most))
    within = 2 * (lots.square().mean() / 7).sqrt()
    assert found["gap in p, mean colour"].within == pytest.approx(float(within))
    reverse = attnkit.trust(linear, images, 3, -map, removals=["mean"], full=True)
    assert reverse["gap in logit, mean colour"].map == pytest.approx(-gap.map)
    assert reverse.verdicts["mean"] == tuple(f"no better than {name}" for name in rivals)


def test_a_random_map_of_many_images_is_within_two_standard_errors(linear):
    images = torch.randn(80, 2, 6, 15, dtype=torch.float64)
    for map in (torch.rand(80, 3, 5), torch.ones(80, 2, 2)):
        found = attnkit.trust(linear, images, None, map, removals=["mean"])
        assert found.verdicts["mean"][0] == "no better than random"
        for name in ("gap in p, mean colour", "gap in logit, mean colour"):
            assert abs(found[name].map) < 1.5 * found[name].within
            assert found[name].random == 0


def test_two_maps_are_compared_image_by_image():
    torch.manual_seed(6)
    of_images = torch.randn(16)  # far more than what parts the maps
    more = 0.1 + 0.05 * torch.randn(16)
    gaps = {"map": of_images + more, "centre": of_images, "input_gradient": of_images + 2 * more}
    error = 2 * more.std() / 4
    assert error < more.mean() < 0.2 < abs(of_images).mean()
    words = _verdicts(gaps, 0.3)
    assert words[1:] == ("better than centre", "no better than input gradient")
    near = gaps | {"centre": gaps["map"] - more + more.mean() - 0.75 * error}
    assert _verdicts(near, 0.3)[1] == "no better than centre"  # one and a half standard errors
    # of a few images, it takes more than what parts random maps
    few = {key: values[:9] for key, values in gaps.items()}
    least = float((few["map"] - few["centre"]).mean())
    assert _verdicts(few, least / 1.4)[1] == "no better than centre"
    assert _verdicts(few, least / 1.43)[1] == "better than centre"


def test_what_cannot_depend_on_the_class_has_sensitivity_exactly_0(vit, images):
    raw = raw_attention(vit, images, None)
    found = attnkit.trust(vit, images, None, raw, method=raw_attention)
    sensitivity = found["class sensitivity"]
    assert sensitivity.map == 0
    assert sensitivity.centre == 0
    assert sensitivity.input_gradient > 0.001
    assert found.verdicts["class"] == ("not class-specific",)
    assert found.removed.tolist() == pytest.approx([0, 3 / 15, 8 / 15, 1])
    assert {*found.curves} == {"mask", "mean"}


def test_class_sensitivity_of_a_linear_model(linear, images):
    """Its map is that of the class whatever the other pixels say."""
    first, second = linear(images).topk(2, dim=1).indices.unbind(1)
    maps = [gradient_times_input(linear, images, classes) for classes in (first, second)]
    maps = [map.unflatten(2, (5, 3)).unflatten(1, (3, 2)).mean(dim=(2, 4)) for map in maps]
    expected = [
        1 - spearmanr(a.flatten(), b.flatten()).statistic for a, b in zip(*maps, strict=True)
    ]
    found = attnkit.trust(
        linear, images, None, maps[0], method=gradient_times_input, removals=["mean"]
    )
    assert found["class sensitivity"].map == pytest.approx(sum(expected) / 7, abs=1e-5)
    assert found.verdicts["class"] == ("class-specific",)


def test_a_map_that_the_model_has_no_part_in_survives_random_weights(vit, images):
    def of_pixels(model, images, classes):
        return images[:, 0]

    found = attnkit.trust(vit, images, None, images[:, 0], method=of_pixels, full=True)
    assert found["similarity, all weights random"].map == 1
    assert found.verdicts["weights"] == ("survives random weights",)
    assert "survives random weights (1.00), which is bad" in str(found)
    floor = found["similarity, another image"].map
    assert abs(floor) < 0.5

    other = attnkit.trust(vit, images, None, images[:, 0], method=gradient_times_input)
    assert other.verdicts["weights"] == ("does not survive random weights",)
    assert "bad" not in str(other)


def test_weights_change_places(vit):
    before = {name: value.clone() for name, value in vit.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    for model in (vit, torch.compile(vit, backend="eager")):
        now = dict(with_random_weights(model, generator).named_parameters())
        for key, value in before.items():
            assert torch.equal(now[key].flatten().sort()[0], value.flatten().sort()[0])
            assert not torch.equal(now[key], value)
    assert all(torch.equal(before[name], value) for name, value in vit.named_parameters())


def test_masks_and_the_oracle(vit, images):
    masks = torch.zeros(7, 6, 15, dtype=torch.bool)
    masks[:, 2:4, 3:9] = True  # two patches
    found = attnkit.trust(vit, images, None, masks.double(), masks=masks)
    assert found["pointing"].map == found["pointing"].oracle == 1
    assert found["pointing"].random == pytest.approx(2 / 15)
    mass = found["mass over chance"]
    assert mass.map == mass.oracle == pytest.approx(15 / 2)
    assert mass.random == 1
    # equal but for lots
    gap = found["gap in p, tokens masked"]
    assert abs(gap.map - gap.oracle) < 2 * gap.within
    constant = attnkit.trust(vit, images, None, torch.ones(7, 3, 5), masks=masks)
    assert constant["pointing"].map == pytest.approx(2 / 15)
    assert constant["mass over chance"].map == pytest.approx(1)


def test_rank_correlations_are_scipys():
    torch.manual_seed(3)
    maps, others = torch.randint(0, 9, (2, 4, 3, 5)).float()  # with ties
    expected = [
        spearmanr(*(m.flatten() for m in p)).statistic for p in zip(maps, others, strict=True)
    ]
    assert spearman(maps, others).tolist() == pytest.approx(expected, abs=1e-5)
    assert (spearman(maps, maps) == 1).all()
    assert (spearman(maps, torch.ones_like(maps)) == 0).all()


def test_forwards_are_counted_and_a_seed_gives_the_same_scores(vit, images):
    map = torch.rand(7, 3, 5)
    plain = attnkit.trust(vit, images, None, map, removals=["mean"])
    # intact, input gradient, both ends, and two points of 8 + 6 orders, some of which are the same
    assert 0.9 * (2 + 2 + 2 * 14) < plain.num_forwards <= 2 + 2 + 2 * 14
    assert f"7 images, {plain.num_forwards:.0f} forwards each" in repr(plain)
    again, other = (
        attnkit.trust(vit, images, None, map, removals=["mean"], seed=seed) for seed in (0, 1)
    )
    assert plain.to_dict() == again.to_dict() != other.to_dict()


def test_a_model_without_gradient_or_with_one_logit(vit, images):
    class Broken(nn.Module):
        patch_size = (2, 3)

        def __init__(self):
            super().__init__()
            self.vit = vit

        def forward(self, images):
            with torch.no_grad():
                return self.vit(images)[:, :1]

    found = attnkit.trust(Broken(), images, 0, torch.rand(7, 3, 5))
    assert found.unavailable["input gradient"] == "model: Broken stops the gradient"
    assert all(score.input_gradient is None for score in found.scores)
    assert "input gradient" not in repr(found).splitlines()[0]
    with torch.no_grad():
        expected = vit(images)[:, 0].sigmoid()
    torch.testing.assert_close(found.curves["mean"]["map"][0, :, 0], expected)


def test_an_error_of_the_model_is_not_taken_for_a_missing_gradient(linear, images):
    calls = []

    def run_out(module, args):
        calls.append(module)
        if torch.is_grad_enabled():
            raise RuntimeError("out of memory")

    linear.register_forward_pre_hook(run_out)
    with pytest.raises(RuntimeError, match="out of memory"):
        attnkit.trust(linear, images, None, torch.rand(7, 3, 5), removals=["mean"])
    assert len(calls) == 2


def example(**changes):
    fall = Fall(0.2, 0.974, 0.312, 0.881, 0.852, 0.911, 8)
    options = {
        "num_images": 1,
        "removed": torch.tensor([0, 0.2, 1]),
        "scores": [
            Score("gap in p, tokens masked", 0.41, 0.0, 0.052, 0.1, 0.2),
            Score("class sensitivity", 0.612, 1.0, None, 0.0, 0.9),
            Score("similarity, all weights random", 0.034),
        ],
        "verdicts": {
            "mask": ("better than random", "better than centre", "no better than input gradient"),
            "mean": ("better than random", "better than centre", "no better than input gradient"),
            "class": ("class-specific",),
            "weights": ("does not survive random weights",),
        },
        "falls": {"mask": fall, "mean": fall},
        "num_forwards": 58.4,
    }
    return Trust(**options | changes)


def test_sentences():
    assert str(example()) == (
        "Without the 20 % of patches that this map ranks first (tokens masked), p falls from 0.97 "
        "to 0.31; without a random 20 %, to 0.88 (0.85 to 0.91, 8 orders). Tokens masked and mean "
        "colour: better than random, better than centre, no better than input gradient. The map: "
        "class-specific (0.61), does not survive random weights (0.03)."
    )
    fall = Fall(0.2, 0.301, 0.3, 0.25, 0.2, 0.3, 8)
    assert str(
        example(
            num_images=16,
            falls={"mean": fall},
            verdicts={"mask": ("better than random",), "mean": ("no better than random",)},
            unavailable={"blur": "none today"},
        )
    ) == (
        "Without the 20 % of patches that this map ranks first (mean colour), the mean p of 16 "
        "images goes from 0.30 to 0.30; without a random 20 %, to 0.25 (0.20 to 0.30, 8 orders). "
        "Tokens masked: better than random. Mean colour: no better than random. The kinds of "
        "removal disagree. Not available: blurred; none today."
    )
    rises = Fall(0.05, 0.3, 0.4, 0.25, 0.2, 0.3, 2).sentence("blur", 2)
    assert "the mean p of 2 images rises from 0.30 to 0.40; without a random 5 %, to 0.25" in rises


def test_table():
    assert repr(example()).splitlines() == [
        "                                  map         random  centre  input gradient",
        "gap in p, tokens masked         0.410  0.000 ± 0.052   0.100           0.200",
        "class sensitivity               0.612          1.000   0.000           0.900",
        "similarity, all weights random  0.034",
        "1 image, 58 forwards each",
    ]
    assert example().to_dict()["similarity, all weights random"] == {"map": 0.034}
    with pytest.raises(KeyError, match="'gap' is not one of the scores 'gap in p, tokens masked'"):
        example()["gap"]


MAP = torch.rand(7, 3, 5)
MASKS = torch.ones(7, 6, 15, dtype=torch.bool)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"map": MAP[0]}, ValueError, r"map: expected \[batch, rows, columns\] of 7 images"),
        ({"masks": MASKS[:2]}, ValueError, "masks: expected one for each of 7 maps, got 2"),
        ({"masks": MASKS.float()}, TypeError, "masks: expected a boolean tensor"),
        ({"masks": ~MASKS}, ValueError, "masks: expected an object in each, got none in 0"),
        ({"orders": 5}, ValueError, "orders: expected an even number, half of them reversed"),
        ({"orders": 0}, ValueError, "orders: expected"),
        ({"removals": "mean"}, ValueError, "removals: expected kinds of removal in a list"),
        ({"removals": []}, ValueError, "removals: expected kinds of removal in a list"),
        ({"removals": ["mask"]}, ValueError, "removals: 'mask' is not available; no attention"),
        ({"removals": ["black"]}, ValueError, "removals: expected some of mask, mean, blur"),
        ({"fractions": [0.01]}, ValueError, "fractions: expected one that is some and not all of"),
        ({"method": "rollout"}, TypeError, "method: expected a function, got str"),
        ({"method": lambda *_: MAP[:2]}, ValueError, "method: expected .batch, rows, columns"),
        ({"target": [1, 2]}, ValueError, "target: expected one class, or 7"),
        ({"inputs": torch.rand(2, 6, 15)}, ValueError, "inputs: expected images .batch, channels"),
        ({"model": torch.sum}, TypeError, "model: expected a torch.nn.Module"),
    ],
)
def test_bad_arguments(linear, images, options, error, message):
    given = {"model": linear, "inputs": images, "target": None, "map": MAP} | options
    with pytest.raises(error, match=message):
        attnkit.trust(**given)
