"""timm's attention that keeps its own projections: equal outputs and gradients, by our `attend`."""

from functools import partial
from importlib import import_module

import pytest
import torch
from timm.layers import RelPosBias
from torch import nn

import attnkit
from attnkit import Hard, replace_attention
from attnkit.surgery.timm_forwards import FORWARDS, MIXING, OVER_CHANNELS, cross_covariance, fused

TOKENS, MAPS, LAST = (2, 7, 12), (2, 12, 3, 5), (2, 3, 5, 12)
PLAIN = {"dim": 12, "num_heads": 3}
TABLE = {**PLAIN, "key_dim": 4, "resolution": (3, 5)}
RELATIVE = {"dim": 12, "dim_head": 4, "rel_pos_cls": partial(RelPosBias, window_size=(3, 5))}
STRIDED = {"input_dim": 60, "head_dim_mul": 1.0, "att_stride": 2}
POOLED = {"dim": 12, "dim_out": 24, "feat_size": (4, 4), "num_heads": 3, "kernel_q": (3, 3),
          "stride_q": (2, 2), "kernel_kv": (3, 3)}  # fmt: skip

# arguments of each class, the shape of its input, and other arguments of its forward
LAYERS = {
    "timm.layers.attention2d:Attention2d": (PLAIN, MAPS),
    "timm.layers.attention2d:MultiQueryAttention2d": ({**PLAIN, "kv_stride": 2}, MAPS),
    "timm.layers.attention_pool:AttentionPoolLatent": (
        {"in_features": 12, "num_heads": 3, "latent_len": 2, "pool_type": "avg"}, TOKENS),
    "timm.layers.attention_pool2d:AttentionPool2d": (
        {"in_features": 12, "num_heads": 3, "head_dim": None, "feat_size": (3, 5)}, MAPS),
    "timm.layers.attention_pool2d:RotAttentionPool2d": (
        {"in_features": 12, "num_heads": 3, "head_dim": None, "ref_feat_size": (3, 5)}, MAPS),
    "timm.layers.diff_attention:DiffAttention": (PLAIN, TOKENS),
    "timm.models.cait:ClassAttn": (PLAIN, TOKENS),
    "timm.models.cpubone:ConvAttention": (STRIDED, (2, 60, 6, 4)),
    "timm.models.fastvit:Attention": ({"dim": 12, "head_dim": 4}, MAPS),
    "timm.models.gemma4_vit:Gemma4Attention": (
        {**PLAIN, "head_dim": 8}, TOKENS, torch.randn(2, 7, 8), torch.randn(2, 7, 8)),
    "timm.models.hieradet_sam2:MultiScaleAttention": (
        {**PLAIN, "dim_out": 24, "q_pool": nn.MaxPool2d(2)}, (2, 4, 6, 12)),
    "timm.models.iformer:SHMA": ({"dim": 12, "window_size": 2}, MAPS),
    "timm.models.lowformer:ConvAttention": (STRIDED, (2, 60, 6, 4)),
    "timm.models.maxxvit:Attention2d": (RELATIVE, MAPS),
    "timm.models.maxxvit:AttentionCl": (RELATIVE, LAST),
    "timm.models.nest:Attention": (PLAIN, LAST),
    "timm.models.nextvit:EfficientAttention": (
        {"dim": 12, "head_dim": 4, "sr_ratio": 2}, (2, 8, 12)),
    "timm.models.pvt_v2:Attention": ({**PLAIN, "linear_attn": True}, (2, 15, 12), (3, 5)),
    "timm.models.twins:GlobalSubSampleAttn": ({**PLAIN, "sr_ratio": 2}, (2, 24, 12), (4, 6)),
    "timm.models.twins:LocallyGroupedAttn": ({**PLAIN, "ws": 3}, (2, 35, 12), (5, 7)),
    "timm.models.vision_transformer_sam:Attention": (
        {**PLAIN, "use_rel_pos": True, "input_size": (3, 5)}, LAST),
    "timm.models.visformer:Attention": (PLAIN, MAPS),
    "timm.models.volo:Attention": (PLAIN, LAST),
    "timm.layers.bottleneck_attn:BottleneckAttn": (
        {**PLAIN, "dim_head": 8, "feat_size": (3, 5), "scale_pos_embed": True}, MAPS),
    "timm.models.cait:TalkingHeadAttn": (PLAIN, TOKENS),
    "timm.models.convit:GPSA": (PLAIN, (2, 9, 12)),
    "timm.models.davit:ChannelAttention": (PLAIN, TOKENS),
    "timm.models.davit:ChannelAttentionV2": (PLAIN, TOKENS),
    "timm.models.edgenext:CrossCovarianceAttn": (PLAIN, TOKENS),
    "timm.models.efficientformer:Attention": (TABLE, (2, 15, 12)),
    "timm.models.efficientformer_v2:Attention2d": (
        {**TABLE, "resolution": (4, 6), "stride": 2}, (2, 12, 4, 6)),
    "timm.models.efficientformer_v2:Attention2dDownsample": (
        {**TABLE, "resolution": (4, 6)}, (2, 12, 4, 6)),
    "timm.models.efficientvit_msra:CascadedGroupAttention": (
        {**TABLE, "resolution": 5, "attn_ratio": 1, "kernels": (3, 3, 3)}, (2, 12, 5, 5)),
    "timm.models.gcvit:WindowAttentionGlobal": (
        {**PLAIN, "window_size": (3, 5)}, (4, 15, 12), torch.randn(2, 15, 12)),
    "timm.models.hiera:MaskUnitAttention": (
        {"dim": 12, "dim_out": 24, "heads": 3, "q_stride": 2, "window_size": 4,
         "use_mask_unit_attn": True}, (2, 40, 12)),
    "timm.models.levit:Attention": ({**TABLE, "use_conv": True}, MAPS),
    "timm.models.levit:AttentionDownsample": (
        {"in_dim": 12, "out_dim": 24, "key_dim": 4, "num_heads": 3, "resolution": (4, 6)},
        (2, 24, 12)),
    "timm.models.mvitv2:MultiScaleAttention": (POOLED, (2, 17, 12), [4, 4]),
    "timm.models.shvit:SHSA": ({"dim": 12, "qk_dim": 4, "pdim": 8}, MAPS),
    "timm.models.swin_transformer_v2_cr:WindowMultiHeadAttention": (
        {**PLAIN, "window_size": (3, 5)}, (4, 15, 12), torch.randn(2, 15, 15)),
    "timm.models.tiny_vit:Attention": (TABLE, (2, 15, 12)),
    "timm.models.xcit:XCA": (PLAIN, TOKENS),
}  # fmt: skip


def layer(name):
    """A network of one layer, and its arguments."""
    torch.manual_seed(0)
    options, shape, *others = LAYERS[name]
    module, kind = name.split(":")
    model = nn.ModuleList([getattr(import_module(module), kind)(**options)]).double()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)
    x = torch.randn(shape, dtype=torch.float64)
    return model, (x, *(o.double() if isinstance(o, torch.Tensor) else o for o in others))


def run(model, x, *others):
    """The output, and gradients of the input and of each parameter by its identity."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    torch.manual_seed(1)  # of the dropout in Swin's network of positions
    output = model[0](x, *others)
    output = output[0] if isinstance(output, tuple) else output
    output.square().sum().backward()
    return output.detach(), x.grad, {id(p): p.grad for p in model.parameters()}


def test_every_class_is_tried():
    assert LAYERS.keys() == FORWARDS.keys()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("training", [False, True])
def test_equal_outputs_and_gradients(name, training):
    model, given = layer(name)
    model.train(training)
    expected, input_gradient, gradients = run(model, *given)
    assert expected.std() > 0.01
    assert input_gradient.abs().max() > 1e-6
    assert len(replace_attention(model)) == 1
    output, gradient, new = run(model, *given)
    torch.testing.assert_close(output, expected, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(gradient, input_gradient, atol=1e-9, rtol=1e-9)
    assert new.keys() == gradients.keys()  # the very same parameters
    largest = max(g.abs().max() for g in gradients.values() if g is not None)
    for key, found in new.items():
        before = gradients[key]
        if before is None or found is None:  # such as of what changes no weight
            assert max(0 if g is None else g.abs().max() for g in (before, found)) < 1e-9 * largest
        else:
            torch.testing.assert_close(found, before, atol=float(1e-9 * largest), rtol=1e-9)


@pytest.mark.parametrize("name", LAYERS)
def test_what_attends_is_ours(name):
    """Listeners see weights under the name of the block; another score changes the output."""
    model, given = layer(name)
    model.eval()
    replace_attention(model, backend="reference")
    with (
        torch.no_grad(),
        attnkit.capture_attention(model) as weights,
        attnkit.record_backends(model) as record,
    ):
        expected = model[0](*given)
    assert list(weights) == list(record.counts) == ["0.attention"]
    assert record.total().keys() == {"reference"}
    for found in weights["0.attention"]:
        torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:3], dtype=found.dtype))
    if FORWARDS[name] not in MIXING:
        other, given = layer(name)
        replace_attention(other.eval(), score="gaussian")
        with torch.no_grad():
            output = other[0](*given)
        pairs = [(output, expected)] if torch.is_tensor(output) else [(output[0], expected[0])]
        assert all(not torch.allclose(*pair) for pair in pairs)


@pytest.mark.parametrize("name", LAYERS)
def test_under_autocast(name):
    """In bfloat16, as far from theirs as theirs is from itself in float64, a few times over."""
    model, given = layer(name)
    exact = run(model.eval(), *given)[0]
    model.float()
    given = [g.float() if isinstance(g, torch.Tensor) else g for g in given]
    outputs = []
    for replaced in (False, True):
        if replaced:
            replace_attention(model)
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(run(model, *given)[0].double())
    theirs, ours = outputs
    error = (theirs - exact).abs().max()
    assert (ours - theirs).abs().max() < 4 * error + 0.02 * exact.abs().max()


def test_heads_are_told_from_windows_and_images():
    for name, shape in {
        "timm.models.vision_transformer_sam:Attention": (2, 3, 15, 15),
        "timm.models.hiera:MaskUnitAttention": (2 * 5, 3, 4, 8),
        "timm.models.twins:LocallyGroupedAttn": (2 * 6, 3, 9, 9),
        "timm.models.cait:TalkingHeadAttn": (2, 3, 7, 7),
    }.items():
        model, given = layer(name)
        replace_attention(model)
        with torch.no_grad(), attnkit.capture_attention(model) as weights:
            model[0](*given)
        (found,) = weights["0.attention"]
        assert found.shape == shape


@pytest.mark.parametrize("name", [n for n, f in FORWARDS.items() if f is fused][::8])
def test_compiled_without_a_break(name):
    torch._dynamo.reset()
    model, given = layer(name)
    replace_attention(model.eval())
    with torch.no_grad():
        compiled = torch.compile(model[0], backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*given), model[0](*given))


def test_dropout_of_mixed_weights_is_refused():
    for name in ("timm.models.cait:TalkingHeadAttn", "timm.models.convit:GPSA"):
        model, _ = layer(name)
        model[0].attn_drop.p = 0.1
        with pytest.raises(ValueError, match="cannot be converted: dropout of mixed weights"):
            replace_attention(model)


CHANNELS = [name for name, forward in FORWARDS.items() if forward in OVER_CHANNELS]


@pytest.mark.parametrize("name", CHANNELS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": "additive"}, "a score with weights for head_dim in attention over channels"),
        ({"score": "general"}, "a score with weights for head_dim in attention over channels"),
        ({"score": attnkit.learned_scores.GeneralScore}, "a score with weights for head_dim"),
        ({"mask": torch.ones(4, 4, dtype=torch.bool)}, "a mask in attention over channels"),
    ],
)
def test_changes_that_channels_cannot_take(name, change, message):
    model, _ = layer(name)
    theirs = model[0]
    with pytest.raises(ValueError, match=f"0: .* cannot be converted: {message}"):
        replace_attention(model, **change)
    assert model[0] is theirs


@pytest.mark.parametrize("name", CHANNELS)
@pytest.mark.parametrize("score", ["cosine", "gaussian", "dot"])
def test_scores_that_channels_can_take(name, score):
    model, given = layer(name)
    replace_attention(model, score=score)
    assert run(model, *given)[0].isfinite().all()


def test_parts_that_are_set_are_theirs():
    """Such as a head that is pruned, or a rate of dropout, of a module that stays."""
    model, given = layer("timm.models.xcit:XCA")
    replace_attention(model)
    kept, before = model[0], model[0](*given)
    new = nn.Linear(12, 36).double()
    kept.qkv = new
    kept.attn_drop = nn.Dropout(0.5)
    kept.temperature = nn.Parameter(2 * kept.temperature.detach())
    assert kept.theirs.qkv is kept.qkv is new
    assert kept.theirs.attn_drop.p == 0.5
    names = [name for name, _ in kept.named_parameters()]
    assert "qkv.weight" not in names
    assert "temperature" not in names
    kept.eval()
    assert not kept.theirs.training
    assert not torch.allclose(kept(*given), before)
    with torch.no_grad():
        expected = cross_covariance(kept.theirs, nn.functional.scaled_dot_product_attention, *given)
    torch.testing.assert_close(kept(*given), expected)


def test_what_is_not_theirs_is_set_on_the_adapter():
    model, _ = layer("timm.models.xcit:XCA")
    replace_attention(model)
    kept = model[0]
    kept.training, kept.mask, kept.note = False, None, "mine"
    assert kept.theirs.training
    assert not hasattr(kept.theirs, "mask")
    assert not hasattr(kept.theirs, "note")


def test_their_own_softmax_is_refused():
    """People set `fused_attn` to False to read weights, and would lose a mask."""
    model, given = layer("timm.models.nest:Attention")
    replace_attention(model)
    model[0].fused_attn = False
    with pytest.raises(RuntimeError, match=r"fused_attn: expected True.*capture_attention"):
        model[0](*given)


def test_a_normalizer_that_draws_does_so_in_training_alone():
    model, given = layer("timm.models.nest:Attention")
    replace_attention(model, normalizer=Hard())
    assert not torch.equal(model[0](*given), model[0](*given))
    model.eval()
    assert torch.equal(model[0](*given), model[0](*given))
