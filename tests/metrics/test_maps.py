"""Metrics of maps: closed forms, whole test sets, ranks, and what is refused."""

import json

import pytest
import torch
from torch import nan, tensor
from torch.nn import functional as F
from torchmetrics import MetricCollection

from attnkit.metrics import AttributionMass, PerturbationGap, PointingGame
from attnkit.metrics.maps import on_grid


def draw(count, generator):
    """Maps [count, 3, 5], masks of 6 x 15 pixels, and curves of 7 points."""
    maps = torch.rand(count, 3, 5, generator=generator)
    masks = torch.rand(count, 6, 15, generator=generator) < 0.3
    most, least = torch.rand(2, count, 7, generator=generator)
    return maps, masks, most, least


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(3)


def score(metric, *batch):
    metric.update(*batch)
    return metric.compute().item()


def test_gap_of_straight_lines():
    removed = tensor([0.0, 0.2, 1.0])
    most, least = tensor([[1.0, 0.2, 0.0]]), tensor([[1.0, 0.9, 0.0]])
    # trapezia: the lines differ by 0, 0.7 and 0
    assert score(PerturbationGap(), most, least, removed) == pytest.approx(0.7 / 2)
    assert score(PerturbationGap(), least, most, removed) == pytest.approx(-0.7 / 2)
    assert score(PerturbationGap(), most, least) == pytest.approx(0.7 * 0.5)  # 0, 0.5, 1


@pytest.mark.parametrize("kind", [PointingGame, AttributionMass])
def test_a_map_that_is_its_mask_scores_1_and_a_constant_one_chance(kind, generator):
    _, masks, *_ = draw(11, generator)
    areas = masks.float().mean(dim=(1, 2))
    assert areas.std() > 0.01
    assert score(kind(), masks.float(), masks) == 1
    assert score(kind(), torch.full((11, 3, 5), 0.7), masks) == pytest.approx(areas.mean().item())
    assert score(kind(over_chance=True), torch.zeros(11, 6, 15), masks) == pytest.approx(1)
    whole = score(kind(over_chance=True), masks.float(), masks)
    assert whole == pytest.approx(1 / areas.mean().item())


def test_a_map_at_random_scores_its_area(generator):
    mask = torch.zeros(1, 6, 15, dtype=torch.bool)
    mask[:, :4, 2:9] = True  # cuts through places of the map
    maps = torch.rand(4000, 3, 5, generator=generator)
    for metric in (PointingGame(), AttributionMass()):
        mean = score(metric, maps, mask.expand(4000, -1, -1))
        assert 0 < metric.standard_error() < 0.01
        assert abs(mean - 28 / 90) < 3 * metric.standard_error()


@pytest.mark.parametrize("grid", [(2, 3), (5, 7), (10, 14), (3, 11)])
def test_a_place_is_a_rectangle_of_the_image(grid):
    """Brought to a size that both divide, where each small pixel is a whole place's and pixel's."""
    masks = torch.rand(2, 3, 5, 7) < 0.4
    fine = masks.float().repeat_interleave(grid[0], -2).repeat_interleave(grid[1], -1)
    wanted = F.avg_pool2d(fine, (5, 7))
    shares = on_grid(masks, grid)
    torch.testing.assert_close(shares, wanted)
    torch.testing.assert_close(shares.mean((-2, -1)), masks.float().mean((-2, -1)))


def test_places_that_a_mask_cuts_and_ties():
    mask = torch.zeros(1, 4, 6, dtype=torch.bool)
    mask[:, :2, :3] = True  # of a map of 2 x 2: the first place whole
    mask[:, 2:, :1] = True  # and a third of that below
    assert score(PointingGame(), tensor([[[0.0, -1.0], [2.0, 1.0]]]), mask) == pytest.approx(1 / 3)
    assert score(PointingGame(), tensor([[[2.0, 2.0], [2.0, 1.0]]]), mask) == pytest.approx(4 / 9)
    # negative values are nowhere
    values = tensor([[[3.0, 1.0], [2.0, -9.0]]])
    assert score(AttributionMass(), values, mask) == pytest.approx((3 + 2 / 3) / 6)


def test_batches_are_one_test_set(generator):
    maps, masks, most, least = draw(11, generator)
    for metric, batch in (
        (PointingGame(), (maps, masks)),
        (AttributionMass(over_chance=True), (maps, masks)),
        (PerturbationGap(), (most, least)),
    ):
        whole = score(metric, *batch)
        error = metric.standard_error()
        metric.reset()
        for start in range(0, 11, 3):
            metric(*(part[start : start + 3] for part in batch))
        metric.update(*(part[:0] for part in batch))
        assert metric.compute().item() == pytest.approx(whole)
        assert metric.standard_error().item() == pytest.approx(error.item(), rel=1e-4)
    gaps = torch.trapezoid(least - most, dx=1 / 6)
    assert metric.compute().item() == pytest.approx(gaps.mean().item(), rel=1e-5)
    assert error.item() == pytest.approx((gaps.std() / 11**0.5).item(), rel=1e-4)


def test_a_collection_does_not_take_one_metric_for_another(generator):
    """After a batch whose maps are the masks, the two have the same values."""
    metrics = MetricCollection([PointingGame(), AttributionMass()])
    maps, masks, *_ = draw(5, generator)
    metrics.update(masks.float(), masks)
    metrics.update(maps, masks)
    values = metrics.compute()
    for kind in (PointingGame, AttributionMass):
        alone = kind()
        alone.update(masks.float(), masks)
        assert values[kind.__name__].item() == pytest.approx(score(alone, maps, masks))
    assert values["PointingGame"] != values["AttributionMass"]


MASKS = torch.ones(2, 4, 6, dtype=torch.bool)


@pytest.mark.parametrize(
    ("maps", "masks", "error", "message"),
    [
        (torch.ones(2, 3, 4, 6), MASKS, ValueError, r"maps: expected \[batch, height, width\]"),
        (torch.ones(2, 4, 6), MASKS[0], ValueError, r"masks: expected \[batch, height, width\]"),
        (torch.ones(3, 4, 6), MASKS, ValueError, "masks: expected one for each of 3 maps, got 2"),
        (torch.ones(2, 4, 6), MASKS.float(), TypeError, "masks: expected a boolean tensor, True"),
        (torch.ones(2, 4, 6).long(), MASKS, TypeError, "maps: expected a floating-point tensor"),
        ([[1.0]], MASKS, TypeError, "maps: expected a floating-point tensor, got list"),
        (torch.full((2, 4, 6), nan), MASKS, ValueError, "maps: expected finite values"),
        (torch.ones(2, 4, 6), ~MASKS, ValueError, "masks: expected an object in each, got none in"),
    ],
)
def test_bad_maps(maps, masks, error, message):
    metric = PointingGame()
    with pytest.raises(error, match=message):
        metric.update(maps, masks)
    assert score(metric, torch.ones(2, 4, 6), MASKS) == 1  # nothing was kept of what was refused


@pytest.mark.parametrize(
    ("least", "removed", "message"),
    [
        (torch.ones(2, 5), None, "least_first: expected the shape of most_first"),
        (torch.ones(2, 4), tensor([0.0, 0.5, 1.0]), "removed: expected 4 shares"),
        (torch.ones(2, 4), tensor([0.0, 0.5, 0.4, 1.0]), "removed: expected shares rising from 0"),
        (torch.ones(2, 4), tensor([0.1, 0.2, 0.4, 1.0]), "removed: expected shares rising from 0"),
    ],
)
def test_bad_curves(least, removed, message):
    with pytest.raises(ValueError, match=message):
        PerturbationGap().update(torch.ones(2, 4), least, removed)
    with pytest.raises(ValueError, match="most_first: expected"):
        PerturbationGap().update(torch.ones(2, 1), torch.ones(2, 1))


@pytest.mark.parametrize("kind", [PointingGame, AttributionMass, PerturbationGap])
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_no_images(kind):
    with pytest.raises(ValueError, match=f"{kind.__name__}: expected images to score, got none"):
        kind().compute()


@pytest.mark.slow
def test_two_ranks_are_one_test_set(generator, two_ranks, of_two_ranks, tmp_path):
    images = draw(11, generator)
    (tmp_path / "data.json").write_text(json.dumps([part.tolist() for part in images]))
    whole = two_ranks.of_maps(*images)
    assert whole.keys() == {"pointing", "mass", "gap"}
    for results in of_two_ranks(tmp_path):
        assert len(results) == 2
        for found in results:
            assert found.keys() == whole.keys()
            for name, values in found.items():
                assert values == pytest.approx(whole[name], rel=1e-4)
