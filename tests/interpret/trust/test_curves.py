"""Curves of removal: closed forms of a linear model, lots, ends, and parity with torchcam."""

from functools import partial
from io import StringIO

import pytest
import torch
from rich.console import Console

import attnkit
from attnkit.interpret import console
from attnkit.interpret.trust.curves import (
    perturbation_curves,
    removal_ranks,
    removed_counts,
)
from attnkit.interpret.trust.removal import as_pixels, on_grid
from attnkit.metrics import PerturbationGap

EVERY = [number / 15 for number in range(16)]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_linear_models_curve_is_f_less_cumulated_sums(linear, images, sign):
    map = sign * linear.contributions(images, 3)
    curves = perturbation_curves(linear, images, 3, map, fractions=EVERY, of="logit")
    sums = sign * map.flatten(1).sort(dim=1, descending=True).values.cumsum(dim=1)
    whole = linear(images)[:, 3:4]
    torch.testing.assert_close(curves.most_first[:, :1], whole)
    torch.testing.assert_close(curves.most_first[:, 1:], whole - sums)
    reverse = sign * map.flatten(1).sort(dim=1).values.cumsum(dim=1)
    torch.testing.assert_close(curves.least_first[:, 1:], whole - reverse)
    torch.testing.assert_close(curves.removed, torch.arange(16).double() / 15)

    some = perturbation_curves(linear, images, 3, map, fractions=[0.41, 0.2], of="logit")
    assert some.removed.tolist() == pytest.approx([0, 3 / 15, 6 / 15, 1])
    torch.testing.assert_close(some.most_first, curves.most_first[:, [0, 3, 6, 15]])
    metric = PerturbationGap()
    metric.update(*some)
    area = torch.trapezoid(some.least_first - some.most_first, some.removed)
    assert metric.compute().item() == pytest.approx(area.mean().item(), rel=1e-5)
    assert sign * metric.compute() > 0


def test_probability_is_the_softmax_of_the_logits(linear, images):
    map = torch.rand(7, 3, 5)
    curves = [perturbation_curves(linear, images, target, map, of="logit") for target in range(5)]
    logits = torch.stack([torch.stack(each[:2]) for each in curves])
    target = torch.tensor([0, 4, 3, 1, 1, 2, 2])
    found = perturbation_curves(linear, images, target, map)
    expected = logits.softmax(dim=0)[target, :, torch.arange(7)].movedim(1, 0)
    torch.testing.assert_close(torch.stack(found[:2]), expected)
    of_predicted = perturbation_curves(linear, images, None, map)
    assert (of_predicted.most_first[:, 0] >= found.most_first[:, 0]).all()


def test_chunks_cut_through_images_and_orders(linear, images):
    map = torch.rand(7, 3, 5)
    whole = perturbation_curves(linear, images, 3, map)
    for batch_size in (1, 4, 1000):
        some = perturbation_curves(linear, images, 3, map, batch_size=batch_size)
        torch.testing.assert_close(some, whole)


def test_a_progress_bar_where_there_is_a_terminal(linear, images, monkeypatch):
    for is_terminal in (True, False):
        shown = StringIO()
        given = {"file": shown, "force_terminal": is_terminal, "width": 80}
        monkeypatch.setattr(console, "Console", partial(Console, **given))
        attnkit.explain(linear, images, 3, "occlusion", patch=(2, 5), batch_size=2)
        assert ("occlusion" in shown.getvalue()) == is_terminal


def test_a_sparse_map_loses_exactly_what_is_asked():
    """Of a map with 80 % zeros, thresholds would remove all or nothing."""
    maps = torch.zeros(3, 5, 7)
    maps[:, 2, :] = torch.rand(3, 7)
    ranks = removal_ranks(maps, torch.Generator().manual_seed(0))
    for count in removed_counts([0.1, 0.2, 0.5], 35):
        assert ((ranks < count).sum(dim=1) == count).all()
    assert (ranks.unflatten(1, (5, 7))[:, 2] < 7).all()


def test_equal_values_go_by_seeded_lot():
    constant = torch.full((4000, 3, 5), 0.3)
    ranks = removal_ranks(constant, torch.Generator().manual_seed(5))
    again = removal_ranks(constant, torch.Generator().manual_seed(5))
    other = removal_ranks(constant, torch.Generator().manual_seed(6))
    assert torch.equal(ranks, again)
    assert not torch.equal(ranks, other)
    assert (ranks.sort(dim=1).values == torch.arange(15)).all()
    # each place is as often first as another: 4000/15 ± 4 standard deviations
    first = (ranks == 0).sum(dim=0)
    assert ((first - 4000 / 15).abs() < 4 * (4000 / 15) ** 0.5).all()


def test_maps_of_any_size_are_pooled_to_the_grid_or_nearest():
    fine, coarse = torch.rand(2, 6, 15), torch.rand(2, 1, 5)
    expected = fine.unflatten(2, (5, 3)).unflatten(1, (3, 2)).mean(dim=(2, 4))
    torch.testing.assert_close(on_grid(fine, (3, 5)), expected)
    torch.testing.assert_close(on_grid(coarse, (3, 5)), coarse.expand(2, 3, 5))
    constant = on_grid(torch.full((1, 17, 23), 0.1), (3, 5))
    assert (constant == constant[0, 0, 0]).all()  # so that there is nothing to rank


def test_pixels_of_places():
    removed = torch.zeros(1, 15, dtype=torch.bool)
    removed[0, [0, 9]] = True
    pixels = as_pixels(removed, (3, 5), (6, 15))[0, 0]
    assert pixels.nonzero().tolist() == [
        [row, column]
        for row, columns in ((0, (0, 1, 2)), (1, (0, 1, 2)), (2, (12, 13, 14)), (3, (12, 13, 14)))
        for column in columns
    ]
    uneven = as_pixels(~removed, (3, 5), (7, 16))[0, 0]
    assert uneven.sum() == 7 * 16 - 2 * 3 - 3 * 3


@pytest.mark.parametrize("removal", ["mean", "blur"])
def test_nothing_removed_is_the_image_and_all_removed_the_paint(linear, images, removal):
    seen = []
    linear.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    perturbation_curves(linear, images, 3, torch.rand(7, 3, 5), removal=removal)
    none, *_, all_removed = seen[1][:28].split(7)
    torch.testing.assert_close(none, images)
    if removal == "mean":
        colour = images.mean(dim=(0, 2, 3), keepdim=True)
        torch.testing.assert_close(all_removed, colour.expand_as(images))
    else:
        assert all_removed.std() < 0.6 * images.std()
        constant = torch.full_like(images, 0.7)
        perturbation_curves(linear, constant, 3, torch.rand(7, 3, 5), removal=removal)
        torch.testing.assert_close(seen[-1][:7], constant[:7])


def test_parity_with_torchcam(linear, images):
    """Its insertion restores what is removed least-first, so the difference is the gap."""
    metrics = pytest.importorskip("torchcam.metrics")

    class Extractor:
        model = linear

        def __call__(self, class_idx, scores, **options):
            return [map]

        def fuse_cams(self, cams):
            return cams[0]

        def _hooks_off(self):
            return torch.no_grad()

    map = torch.rand(7, 6, 15)
    colour = images.mean(dim=(0, 2, 3), keepdim=True)
    softmax = partial(torch.softmax, dim=-1)
    theirs = metrics.DeletionInsertionMetric(Extractor(), softmax, steps=9, baseline=colour)
    theirs.update(images, 3)
    fractions = [step / 9 for step in range(10)]
    options = {"grid": (6, 15), "fractions": fractions}
    ours = perturbation_curves(linear, images, 3, map, **options)
    areas = [torch.trapezoid(curve, ours.removed).mean().item() for curve in ours[:2]]
    summary = theirs.summary()
    assert areas == pytest.approx([summary["deletion_auc"], summary["insertion_auc"]], rel=1e-6)


def test_what_the_model_was_it_is(vit, images):
    vit.train()
    before = {name: tensor.clone() for name, tensor in vit.state_dict().items()}
    state = torch.get_rng_state()
    perturbation_curves(vit, images, 3, torch.ones(7, 3, 5), removal="mask")
    assert vit.training
    assert all(torch.equal(before[name], tensor) for name, tensor in vit.state_dict().items())
    assert all(parameter.grad is None for parameter in vit.parameters())
    assert torch.equal(state, torch.get_rng_state())


MAP = torch.rand(7, 3, 5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"map": MAP[:3]}, ValueError, r"map: expected \[batch, rows, columns\] of 7 images"),
        ({"map": MAP[:, None]}, ValueError, "; sum over the channels first"),
        ({"map": MAP * torch.nan}, ValueError, "map: expected finite values"),
        ({"map": MAP.long()}, TypeError, "map: expected a floating-point tensor, got torch.int64"),
        ({"map": None}, TypeError, "map: expected a floating-point tensor, got NoneType"),
        ({"target": 5}, ValueError, "target: the model has 5 classes"),
        (
            {"of": "loss"},
            ValueError,
            "of: expected probability, sigmoid, logit or a fun.*, got 'loss'",
        ),
        ({"removal": "black"}, ValueError, "removals: expected some of mask, mean, blur, got"),
        ({"removal": "mask"}, ValueError, "no attention that can be masked ran"),
        ({"fractions": [0.2, 20]}, ValueError, "fractions: expected shares between 0 and 1"),
        ({"batch_size": 0}, ValueError, "batch_size: expected"),
        ({"grid": (3, 50)}, ValueError, "grid: expected rows and columns of an image of 6 x 15"),
    ],
)
def test_bad_arguments(linear, images, options, error, message):
    given = {"target": 3, "map": MAP} | options
    with pytest.raises(error, match=message):
        perturbation_curves(linear, images, **given)
