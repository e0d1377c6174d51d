"""The record of kernels against torch's profiler, by module, in eager and compiled models."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import attnkit
from attnkit import MultiHeadAttention

PROFILED = {
    "flash": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "math": "aten::_scaled_dot_product_attention_math",
}


class Two(nn.Module):
    def __init__(self, backends=("auto", "auto")):
        super().__init__()
        self.first = MultiHeadAttention(14, 2, backend=backends[0])
        self.second = nn.ModuleList([MultiHeadAttention(14, 2, backend=backends[1])])

    def forward(self, x):
        return self.second[0](self.first(x))


@pytest.mark.parametrize("kernel", ["flash", "math", "reference"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [True, False])
def test_record_equals_the_profiler(kernel, mode, training):
    model = Two((kernel, kernel)).train(training)
    with mode():
        x = torch.randn(3, 5, 14)
        with attnkit.record_backends() as record:
            output = model(x)
            if output.requires_grad:
                output.sum().backward()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            assert torch.equal(model(x), output)
    profiled = {event.key: event.count for event in profiler.key_averages()}
    for name, operator in PROFILED.items():
        assert profiled.get(operator, 0) == record.total()[name]
    assert record.counts == {"first": {kernel: 1}, "second.0": {kernel: 1}}


def test_record_by_module_and_outside_of_modules():
    x = torch.randn(3, 5, 14)
    model = Two(("math", "flash"))
    with attnkit.record_backends() as record:
        model(x)
        model(x)
        F.scaled_dot_product_attention(x[None], x[None], x[None])
        with attnkit.record_backends() as inner:
            nn.Sequential(model.first)(x)
    assert record.counts == {
        "first": {"math": 2},
        "second.0": {"flash": 2},
        "": {"flash": 1},
        "0": {"math": 1},
    }
    assert inner.counts == {"0": {"math": 1}}
    assert "second.0  flash ×2" in str(record)
    model(x)
    assert record.total() == {"math": 3, "flash": 3}


def test_record_survives_an_error_inside():
    model = Two()
    with attnkit.record_backends() as record:
        model(torch.randn(3, 5, 14))
        model.second[0].out_proj = nn.Linear(13, 14)  # raises after attention
        with pytest.raises(RuntimeError):
            model(torch.randn(3, 5, 14))
        model.second[0] = MultiHeadAttention(14, 2)
        model(torch.randn(3, 5, 14))
    assert record.counts == {"first": {"flash": 2}, "second.0": {"flash": 2}}
    assert str(attnkit.core.kernels.record.KernelCounts()).startswith("no scaled_dot_product")


def test_record_does_not_say_that_nothing_ran_where_it_cannot_see():
    from torchvision.models.swin_transformer import ShiftedWindowAttention

    with attnkit.record_backends() as record:
        ShiftedWindowAttention(16, [4, 4], [0, 0], 2)(torch.randn(1, 8, 8, 16))
    assert not record.counts
    assert "attention that a model computes by other operators is not counted" in str(record)


def test_record_sees_modules_nobody_here_wrote():
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3)
    with attnkit.record_backends() as record:
        model(torch.randn(2, 3, 32, 32))
    assert record.counts == {"blocks.0.attn": {"flash": 1}, "blocks.1.attn": {"flash": 1}}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_record_sees_torchs_own_attention(training, mode):
    from torchvision.models import VisionTransformer

    vit = VisionTransformer(16, 8, 2, 2, 16, 32, num_classes=3).train(training)
    attention = nn.MultiheadAttention(16, 2, batch_first=True).train(training)
    x = torch.randn(2, 5, 16)
    with mode(), attnkit.record_backends() as record:
        vit(torch.randn(2, 3, 16, 16))
        attention(x, x, x, need_weights=False)
        attention(x, x, x)  # with weights torch multiplies the matrices itself
    layers = [f"encoder.layers.encoder_layer_{i}.self_attention" for i in range(2)]
    assert record.counts == {**{name: {"flash": 1} for name in layers}, "": {"flash": 1, "math": 1}}


def test_record_and_capture_see_compiled_models():
    model = torch.compile(Two(), backend="eager", fullgraph=True)
    x = torch.randn(3, 5, 14)
    model(x)
    with attnkit.record_backends() as record, attnkit.capture_attention(model) as weights:
        model(x)
    assert record.counts == {"first": {"flash": 1}, "second.0": {"flash": 1}}
    assert list(weights) == ["first", "second.0"]


def test_a_record_says_what_share_was_computed():
    tensors = [torch.randn(2, 2, 512, 64) for _ in range(3)]
    with attnkit.record_backends() as record:
        attnkit.attend(*tensors, mask=attnkit.Packed([128] * 4), backend="block_sparse")
        attnkit.attend(*tensors)
    assert record.counts == {"": {"block_sparse": 1, "flash": 1}}
    assert record.shares == {"": {"block_sparse": 0.25}}
    assert "block_sparse ×1 (0.250 of the dense cost), flash ×1" in str(record)
