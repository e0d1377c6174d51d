"""Gradients and occlusion against captum, which nothing but this test needs."""

import pytest
import torch
from torch import nn

from attnkit.interpret import explain

captum = pytest.importorskip("captum.attr")


@pytest.fixture
def cnn():
    """Smooth, so that the integral is exact to a few digits."""
    return nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.GELU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(5 * 5 * 9, 7)
    ).eval()


def test_input_gradient_is_saliency(cnn, images, target):
    theirs = captum.Saliency(cnn).attribute(images, target=target).sum(dim=1)
    torch.testing.assert_close(explain(cnn, images, target, "input_gradient").map, theirs)


def test_input_gradient_of_patches_is_their_sum(model, images, target):
    theirs = captum.Saliency(model).attribute(images, target=target).sum(dim=1)
    model.patch_size = 4
    patches = theirs.unflatten(1, (3, 4)).unflatten(3, (5, 4)).sum(dim=(2, 4))
    torch.testing.assert_close(explain(model, images, target, "input_gradient").map, patches)


@pytest.mark.parametrize("of_channels", [False, True])
def test_integrated_gradients(cnn, images, target, of_channels):
    baseline = torch.tensor([0.3, -0.2, 0.5])[:, None, None] if of_channels else 0.25
    full = torch.as_tensor(baseline).expand_as(images)
    theirs = captum.IntegratedGradients(cnn).attribute(
        images, full, target=target, n_steps=23, method="gausslegendre"
    )
    ours = explain(cnn, images, target, "integrated_gradients", baseline=baseline, num_steps=23)
    torch.testing.assert_close(ours.map, theirs.sum(dim=1))
    assert ours.is_signed


@pytest.mark.parametrize("baseline", [0.25, torch.tensor([0.3, -0.2, 0.5])])
def test_occlusion(cnn, images, target, baseline):
    colour = torch.as_tensor(baseline)
    full = (colour[:, None, None] if colour.ndim else colour).expand_as(images)
    window = (3, 4, 5)
    theirs = captum.Occlusion(cnn).attribute(
        images, window, strides=window, target=target, baselines=full
    )
    ours = explain(cnn, images, target, "occlusion", patch=(4, 5), baseline=baseline, batch_size=6)
    torch.testing.assert_close(ours.map, theirs[:, 0, ::4, ::5])
