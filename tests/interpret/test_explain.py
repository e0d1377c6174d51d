"""`attnkit.explain` on models of several libraries; what it leaves alone; and what it refuses."""

from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
import timm
import torch
from lightning import LightningModule
from PIL import Image
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision.models import DenseNet, VisionTransformer, resnet18

import attnkit
from attnkit.interpret import explain
from attnkit.interpret.methods.table import methods_of

ARRAYS = ("map", "tokens", "share", "target", "predicted", "logit", "probability")
METHODS = methods_of("patch")
ATTENTION = ("attention", "value_weighted", "rollout", "relevance", "legrad")
SMALL = {"img_size": (32, 48), "patch_size": 16, "embed_dim": 24, "depth": 3, "num_heads": 3}


def randomised(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def ours(**options):
    options = {"image_size": (32, 48), "num_classes": 7, "depth": 3, "dim": 24} | options
    return attnkit.ViT(**options)


def of_timm(name="vit_tiny_patch16_224", **options):
    return timm.create_model(name, num_classes=7, **SMALL, **options)


class Module(LightningModule):
    """It returns logits, or an output that has them, as transformers' models do."""

    def __init__(self, model, has_logits=False):
        super().__init__()
        self.model, self.has_logits = model, has_logits

    def forward(self, images):
        logits = self.model(images)
        return SimpleNamespace(logits=logits) if self.has_logits else logits


def of_a_task():
    from attnkit.tasks.image_classification import ImageClassification

    return ImageClassification(ours(), num_classes=7, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))


MODELS = {
    "ours": (ours, 1),
    "registers": (lambda: ours(num_registers=2), 3),
    "rotary, grouped by mean": (lambda: ours(pooling="mean", positions="rotary2d"), 0),
    "ours, attention pool": (lambda: ours(pooling="attention", num_registers=2), 2),
    "timm": (of_timm, 1),
    "timm, registers": (lambda: of_timm(reg_tokens=2), 3),
    "timm, mean": (lambda: of_timm(global_pool="avg"), 1),
    "timm, attention pool": (lambda: of_timm(global_pool="map", class_token=False), 0),
    "timm, DINOv2": (lambda: of_timm("vit_small_patch14_reg4_dinov2"), 5),
    "timm, DeiT": (lambda: of_timm("deit_tiny_distilled_patch16_224"), 2),
    "Lightning": (lambda: Module(ours()), 1),
    "a task": (of_a_task, 1),
    "outputs with .logits": (lambda: Module(of_timm(), has_logits=True), 1),
}


# each is another way to say what one of the others holds
SLOW = {"registers", "timm, registers", "timm, mean", "timm, DeiT", "Lightning"}
NAMES = [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in MODELS]


@pytest.mark.parametrize("name", NAMES)
def test_every_method_on_every_kind_of_vit(name):
    make, prefix = MODELS[name]
    model = randomised(make())
    images = torch.randn(2, 3, 32, 48)
    for method in METHODS:
        seen = explain(model, images, method=method)
        assert seen.map.shape == (2, 2, 3), method
        assert seen.map.isfinite().all(), method
        assert (seen.map != 0).any() or method == "grad_cam"
        if method in ATTENTION:
            assert seen.num_prefix_tokens == prefix
            assert seen.tokens.shape == (2, prefix + seen.map[0].numel())
            torch.testing.assert_close(seen.tokens[:, prefix:], seen.map.flatten(1))
            if method == "rollout":
                torch.testing.assert_close(seen.tokens.sum(dim=1), torch.ones(2))


def test_torchvisions_vit():
    model = randomised(VisionTransformer(48, 16, 3, 3, 24, 48, num_classes=7))
    for method in METHODS:
        seen = explain(model, torch.randn(2, 3, 48, 48), method=method)
        assert seen.map.shape == (2, 3, 3)
        assert (seen.num_prefix_tokens == 1) is (method in ATTENTION)
        assert not any("projection" in note for note in seen.notes)


def test_items_of_a_batch_do_not_see_each_other():
    model, images = randomised(ours()), torch.randn(3, 3, 32, 48)
    together = explain(model, images, [1, 6, 2]).map
    alone = torch.cat([explain(model, images[i : i + 1], t).map for i, t in enumerate([1, 6, 2])])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-4)
    assert not torch.allclose(together[0], explain(model, images[:1], 2).map[0], rtol=1e-2)


def test_the_predicted_class_is_explained_if_none_is_given():
    model, images = randomised(ours()), torch.randn(5, 3, 32, 48)
    with torch.no_grad():
        logits = model.eval()(images)
    seen = explain(model, images)
    assert seen.target.tolist() == seen.predicted.tolist() == logits.argmax(dim=1).tolist()
    torch.testing.assert_close(seen.probability, logits.softmax(dim=1).amax(dim=1))
    torch.testing.assert_close(seen.map, explain(model, images, seen.target).map)


def test_occlusion_hides_tokens_where_that_removes_them():
    images = torch.randn(2, 3, 32, 48)
    seen = explain(randomised(ours()), images, method="occlusion")
    assert "patches hidden from all attention" in seen.notes
    seen = explain(randomised(ours(pooling="mean")), images, method="occlusion")
    assert "hidden patches still reach the logits" in seen.notes[0]
    assert seen.notes[1:] == ["patches given the image's mean colour"]


def test_a_hidden_patch_is_one_that_changes_nothing():
    model, images = randomised(ours(depth=1)).eval(), torch.randn(2, 3, 32, 48)
    seen = explain(model, images, 3, "occlusion", batch_size=5)
    other = images.clone()
    other[:, :, :16, 32:] = torch.randn(2, 3, 16, 16)
    moved = explain(model, other, 3, "occlusion")
    # y without patch 2 does not depend on what was there
    torch.testing.assert_close(
        seen.logit - seen.map[:, 0, 2], moved.logit - moved.map[:, 0, 2], atol=1e-5, rtol=1e-5
    )
    assert not torch.allclose(seen.logit, moved.logit, atol=1e-3)


def test_convolutional_networks():
    model, images = randomised(resnet18(num_classes=7)), torch.rand(2, 3, 64, 96)
    assert explain(model, images, 3, "input_gradient").map.shape == (2, 64, 96)
    assert explain(model, images, 3, "occlusion", patch=32).map.shape == (2, 2, 3)
    assert explain(model, images, 3, "grad_cam").map.shape == (2, 2, 3)
    assert explain(model, images, method="centre", grid=(2, 3)).map.shape == (2, 2, 3)


def test_what_the_error_of_an_unseen_attention_names_works():
    """`replace_attention` refuses it too."""
    torch.manual_seed(0)
    model = timm.create_model("levit_128s", num_classes=1).eval()
    images = torch.randn(1, 3, 224, 224)
    with pytest.raises(ValueError, match="leave method out, which takes one that") as refused:
        explain(model, images, method="relevance")
    assert "replace_attention" not in str(refused.value)
    seen = explain(model, images)
    assert seen.method == "input_gradient"  # grad_cam has no map that is known to be of the image
    assert seen.notes[-1].startswith("method 'input_gradient', since 'relevance' does not serve")
    assert seen.map.any()
    torch.testing.assert_close(seen.probability, model(images)[:, 0].sigmoid().detach())


def test_a_map_or_a_function_of_somebody_else():
    model, images = randomised(ours()), torch.randn(2, 3, 32, 48)
    given = torch.rand(2, 2, 3)
    seen = explain(model, images, 4, given)
    assert torch.equal(seen.map, given)
    assert seen.target.tolist() == [4, 4]
    assert seen.method == "given"

    def brightness(net, pictures, classes):
        assert net is model
        assert classes.tolist() == [4, 4]
        return pictures.mean(dim=1)

    seen = explain(model, images, 4, brightness)
    torch.testing.assert_close(seen.map, images.mean(dim=1))
    assert seen.method == "brightness"
    tokens = torch.rand(2, 7)
    seen = explain(model, images, 4, tokens)
    assert torch.equal(seen.tokens, tokens)
    assert torch.equal(seen.map.flatten(1), tokens[:, 1:])


def test_layers_are_chosen_by_place_or_name():
    model, images = randomised(ours()), torch.randn(2, 3, 32, 48)
    last = explain(model, images, 3, layers=-1)
    for name in ("blocks.2.attention", "blocks.2*"):
        torch.testing.assert_close(last.map, explain(model, images, 3, layers=name).map)
    assert not torch.allclose(last.map, explain(model, images, 3).map)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_model_is_left_as_it_was(frozen):
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(0.5), ours(dropout_p=0.5)).train()
    model[1].eval()
    model.requires_grad_(not frozen)
    (model[2].head.weight if not frozen else model[2].patch_embed).grad = torch.ones(7, 24)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images, state = torch.randn(2, 3, 32, 48), torch.get_rng_state()
    for method in METHODS:
        options = {"patch": 16, "removal": "colour"} if method == "occlusion" else {}
        first = explain(model, images, method=method, **options)
        assert torch.equal(first.map, explain(model, images, method=method, **options).map)
    assert torch.equal(state, torch.get_rng_state())
    assert [m.training for m in (model, model[0], model[1], model[2])] == [True, True, False, True]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert images.grad is None
    assert not images.requires_grad
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(grads) == (0 if frozen else 1)
    assert all(torch.equal(grad, torch.ones(7, 24)) for grad in grads)
    assert all(parameter.requires_grad is not frozen for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_needs_no_mode_of_gradients(mode):
    model, images = randomised(ours()), torch.randn(2, 3, 32, 48)
    expected = explain(model, images, 3).map
    with mode():
        inside = torch.randn(2, 3, 32, 48)
        assert torch.equal(explain(model, images, 3).map, expected)
        assert explain(model, inside, 3).map.isfinite().all()


def test_a_model_of_half_precision():
    model, images = randomised(ours()), torch.randn(2, 3, 32, 48)
    exact = explain(model, images, 3).map
    half = explain(model.bfloat16(), images.bfloat16(), 3).map
    assert half.dtype == torch.float32
    torch.testing.assert_close(half / half.sum(), exact / exact.sum(), atol=0.05, rtol=0.2)


@pytest.mark.parametrize("method", METHODS)
def test_a_model_may_begin_in_place(method):
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = randomised(ours())

        def forward(self, images):
            return self.model(images.mul_(0.5).add_(0.1))

    model, images = InPlace(), torch.randn(2, 3, 32, 48)
    kept = images.clone()
    first = explain(model, images, method=method)
    assert torch.equal(images, kept)
    assert torch.equal(first.images, kept)
    expected = explain(model.model, kept * 0.5 + 0.1, method=method).map
    scale = {"input_gradient": 0.5}.get(method, 1)
    if method != "integrated_gradients":  # whose baseline is another
        torch.testing.assert_close(first.map, scale * expected, atol=1e-5, rtol=1e-4)


def checkpointed():
    model = of_timm()
    model.set_grad_checkpointing()
    return model


def compiled():
    return torch.compile(of_timm(), backend="eager")


@pytest.mark.parametrize("make", [checkpointed, compiled])
def test_what_runs_another_way_gives_the_same_maps(make):
    torch.manual_seed(3)
    plain, images = randomised(of_timm()), torch.randn(2, 3, 32, 48)
    other = make()
    state = {name.removeprefix("_orig_mod."): p for name, p in plain.state_dict().items()}
    getattr(other, "_orig_mod", other).load_state_dict(state)
    for method in (*ATTENTION, "grad_cam", "occlusion"):
        one, two = (explain(model, images, method=method) for model in (plain, other))
        torch.testing.assert_close(one.map, two.map, msg=method)


def test_autocast():
    model, images = randomised(ours()), torch.randn(2, 3, 32, 48)
    exact = {m: explain(model, images, method=m).map for m in ATTENTION}
    with torch.autocast("cpu", torch.bfloat16):
        for method, expected in exact.items():
            got = explain(model, images, method=method).map.float()
            torch.testing.assert_close(
                got / got.sum(), expected / expected.sum(), atol=0.05, rtol=0.2
            )


def test_grad_cam_of_a_map_that_is_changed_in_place():
    model = randomised(DenseNet(4, (1, 1), 8, num_classes=7))
    images = torch.randn(2, 3, 64, 96)
    seen = explain(model.double(), images.double(), 3, "grad_cam")
    assert seen.map.dtype == torch.float64
    maps = torch.relu(model.eval().features(images.double())).detach().requires_grad_()
    y = model.classifier(maps.mean(dim=(2, 3)))[:, 3].sum()
    (gradient,) = torch.autograd.grad(y, maps)
    expected = (maps * gradient.mean(dim=(2, 3), keepdim=True)).sum(dim=1).relu().detach()
    torch.testing.assert_close(seen.map, expected)


# --- pictures and arrays --------------------------------------------------------------------------


def test_save(tmp_path):
    seen = explain(randomised(ours()), torch.rand(2, 3, 32, 48), 3)
    arrays = np.load(seen.save(tmp_path / "seen.npz"))
    np.testing.assert_array_equal(arrays["map"], seen.map.numpy())
    assert set(arrays) == {*ARRAYS}
    loaded = torch.load(seen.save(tmp_path / "seen.pt"), weights_only=True)
    assert torch.equal(loaded["share"], seen.share)
    picture = Image.open(seen.save(tmp_path / "folder" / "seen.png"))
    assert min(picture.size) > 300
    with pytest.raises(ValueError, match=r"path: expected \.png, .* got '\.jpg'"):
        seen.save(tmp_path / "seen.jpg")


def test_the_picture_shows_the_map_on_its_own_grid_with_its_scale():
    """On a white image the colours are the map's own, and each place has one."""
    seen = explain(randomised(ours()), torch.ones(2, 3, 32, 48), 3, "occlusion")
    seen.map[1] *= 10
    panels = seen.draw().axes
    for row, one in enumerate(seen.map):
        image, shown, bar = panels[2 * row], panels[2 * row + 1], panels[4 + row]
        assert image.get_title("left").startswith("class 3 (predicted")
        (drawn,) = shown.get_images()
        assert drawn.get_interpolation() == "nearest"
        size = float(one.abs().max())
        assert bar.get_ylim() == pytest.approx((-size, size))
        assert bar.get_ylabel() == "occlusion"
        colours = matplotlib.colormaps["RdBu_r"](0.5 + 0.5 * one.double().numpy() / size)[..., :3]
        pixels = drawn.get_array()
        places = pixels.reshape(2, len(pixels) // 2, 3, -1, 3).transpose(0, 2, 1, 3, 4)
        wanted = np.broadcast_to(colours[:, :, None, None], places.shape)
        np.testing.assert_allclose(places, wanted, atol=1e-6)


def test_it_is_printed_in_words():
    seen = explain(randomised(ours()), torch.rand(6, 3, 32, 48), 3)
    text = repr(seen)
    assert text.startswith("relevance of 6 images on 2 x 3\n  0: class 3 (predicted")
    assert "class and register tokens: " in text
    assert "… 2 more" in text
    assert "grid 2 x 3 behind 1 prefix tokens, as tokens depend on the image" in text


# --- what is refused ------------------------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 24, 16, 16), nn.Linear(24, 7)
        self.attention = attnkit.MultiHeadAttention(24, 3)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.attention(self.attention(x)).mean(dim=1))


class Windows(Twice):
    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = self.attention(x.reshape(-1, 3, 24)).reshape(-1, 6, 24)
        return self.head(x.mean(dim=1))


class NoGradient(nn.Module):
    """Stops the gradient in one of several ways, before or behind a ViT."""

    def __init__(self, way):
        super().__init__()
        self.way, self.model, self.head, self.cut = way, ours(), nn.Linear(7, 7), nn.Identity()
        if way == "detached":
            self.cut.forward = torch.Tensor.detach

    def forward(self, x):
        if self.way == "reentrant":
            return checkpoint(self.model, x, use_reentrant=True)
        with torch.set_grad_enabled(self.way == "detached"):
            x = self.model(self.cut(x))
        return self.head(x)


def no_grad():
    return NoGradient("no_grad")


def no_attention():
    return resnet18(num_classes=7)


def in_inference_mode():
    with torch.inference_mode():
        return ours()


def averaged():
    return ours(pooling="mean")


IMAGES = torch.zeros(2, 3, 32, 48)


def test_the_hint_of_a_stopped_gradient_works():
    model, images = no_grad(), torch.randn(1, 3, 32, 48)
    with pytest.raises(RuntimeError, match="take method='occlusion' with removal='colour', which"):
        explain(model, images, method="input_gradient")
    assert explain(model, images, method="occlusion", removal="colour").map.any()


BAD_VALUES = [
    (no_attention, {"method": "relevance"},
     "ResNet has no attention .*; leave method out, which takes one that serves this model"),
    (Windows, {"method": "rollout"},
     "but 'attention' attends within windows, 2 an image; leave method out"),
    (Twice, {"method": "relevance"}, "layer 'attention' ran 2 times, .* a module of its own"),
    (ours, {"inputs": IMAGES[0]}, "images.None. is a batch of one"),
    (ours, {"inputs": IMAGES[:0]}, "inputs: there is no image in a batch"),
    (ours, {"target": 7}, "7 classes, expected 0 to 6, got 7"),
    (ours, {"target": -1}, "target: expected a class from 0, got -1"),
    (ours, {"target": [1, 2, 3]}, "or 2, one for each image, got 3"),
    (ours, {"target": 3, "method": "rollout"},
     "target: 'rollout' gives the same map for every class; leave it out.* relevance, legrad"),
    (ours, {"method": "lrp"}, "method: expected one of attention.* 'lrp'"),
    (ours, {"method": torch.rand(3, 2, 3)}, r"expected a map \[2, rows, col"),
    (ours, {"method": torch.rand(2, 11)}, "grid: 11 tokens do not"),
    (ours, {"layers": 3}, "layers: 3 is none of the 3 attention layers"),
    (ours, {"layers": "block"}, "'block' is none of the 3 attention"),
    (ours, {"layers": []}, "layers: expected at least one, got none"),
    (ours, {"layers": -1, "method": "occlusion"},
     "layers: 'occlusion' does not use attention layers; leave it out"),
    (ours, {"num_steps": 0, "method": "integrated_gradients"}, "num_steps: expected .*1.* got 0"),
    (ours, {"baseline": torch.ones(5), "method": "integrated_gradients"},
     r"baseline: expected a number or a tensor that broadcasts to \[2, 3, 32, 48\], got \[5\]"),
    (ours, {"baseline": torch.ones(5), "method": "occlusion"},
     "baseline: expected a number or 3, one for each channel, got 5"),
    (ours, {"patch": 7, "method": "occlusion"}, "patch: 7 does not divide an image"),
    (no_attention, {"method": "occlusion"}, "patch: ResNet has no patches .* give patch="),
    (averaged, {"method": "occlusion", "removal": "tokens"},
     "removal: tokens cannot be hidden, hidden patches still reach .* take removal='colour'"),
    (ours, {"method": "occlusion", "removal": "tokens", "baseline": 0.5},
     "baseline: only removal='colour' has one, got 0.5"),
    (ours, {"spread": 0, "method": "centre"}, "spread: expected a positive"),
    (ours, {"grid": (4, 4)}, "grid: the model has 7 tokens, .* not 4 x 4"),
    (ours, {"grid": (2, 3), "num_prefix_tokens": 2}, "not 2 x 3 behind 2"),
    (ours, {"layers": [0, 1], "method": "grad_cam"}, "one layer for grad_cam"),
    (no_attention, {"layers": "fc", "method": "grad_cam"}, "'fc' returns no map over the image"),
]  # fmt: skip
BAD_TYPES = [
    (lambda: len, {}, "model: expected a torch.nn.Module, got builtin"),
    (lambda: ours().patch_embed, {}, "expected logits .batch"),
    (ours, {"inputs": [1.0]}, "inputs: expected images as a tensor"),
    (ours, {"inputs": IMAGES.byte()}, "got torch.uint8; .* 255 for"),
    (ours, {"target": "cat"}, "as integers, got 'cat'"),
    (ours, {"target": torch.rand(2, 3, 5)}, r"got a tensor \[2, 3, 5\] of torch.float32"),
    (ours, {"target": 1.5}, "target: expected a class, or one for"),
    (ours, {"method": 3}, "method: expected a name, a function or"),
    (ours, {"layers": -1, "method": IMAGES[:, 0]}, "layers: only attnkit's own"),
    (ours, {"steps": 3}, "steps: 'relevance' has no options"),
    (ours, {"steps": 3, "method": "integrated_gradients"}, "'.*' has baseline, num_steps"),
    (ours, {"index": 3}, "index: only a graph has one; leave it out"),
]
NO_GRADIENTS = [
    (no_grad, {"method": "relevance"}, "NoGradient stops the gradient; remove the torch.no_grad"),
    (lambda: NoGradient("reentrant"), {"method": "relevance"}, ".* with use_reentrant=False"),
    (lambda: NoGradient("detached"), {"method": "input_gradient"},
     "the module 'cut' stops the gradient.* take method='occlusion'"),
    (in_inference_mode, {}, "made in inference mode.* load it out"),
]  # fmt: skip
KINDS = {ValueError: BAD_VALUES, TypeError: BAD_TYPES, RuntimeError: NO_GRADIENTS}


@pytest.mark.parametrize(
    ("kind", "case"), [(kind, case) for kind, cases in KINDS.items() for case in cases]
)
def test_bad_input_is_refused_in_one_line(kind, case):
    make, arguments, message = case
    arguments = {"inputs": IMAGES} | arguments
    with pytest.raises(kind, match=message) as raised:
        explain(make(), arguments.pop("inputs"), **arguments)
    assert "\n" not in str(raised.value)
