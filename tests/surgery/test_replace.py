"""The shared block in transformers nobody here wrote: equal outputs and gradients, or a refusal."""

import copy
import io

import pytest
import timm
import torch
import torchvision
from timm.models import metaformer, nest, volo
from torch import nn
from torch.nn import functional as F
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

import attnkit
from attnkit import Window2d, replace_attention

SMALL = {"img_size": 64, "num_classes": 5, "depth": 2}
NARROW = {**SMALL, "embed_dim": 48, "num_heads": 3}
SWIN = {"img_size": 64, "num_classes": 5, "window_size": 4, "depths": (2, 2), "embed_dim": 24,
        "num_heads": (3, 6)}  # fmt: skip
V2 = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2}

NETWORKS = {
    "vit": ("vit_tiny_patch16_224", SMALL),
    "vit with qk norm": ("vit_tiny_patch16_224", {**SMALL, "qk_norm": True}),
    "deit, distilled": ("deit_tiny_distilled_patch16_224", SMALL),
    "deit3": ("deit3_small_patch16_224", SMALL),
    "beit": ("beit_base_patch16_224", NARROW),
    "beit, shared bias": ("beit_base_patch16_224", {**NARROW, "use_rel_pos_bias": False,
                                                    "use_shared_rel_pos_bias": True}),
    "relative positions": ("vit_relpos_base_patch16_cls_224", NARROW),
    "relative positions, shared": ("vit_srelpos_small_patch16_224", NARROW),
    "eva02": ("eva02_tiny_patch14_224", {**SMALL, "patch_size": 16}),
    "eva02, projections apart": ("eva02_base_patch14_448", {**NARROW, "patch_size": 16}),
    "dinov3": ("vit_small_patch16_dinov3", {**SMALL, "embed_dim": 48, "num_heads": 3}),
    "rotary": ("vit_small_patch16_rope_224", NARROW),
    "rotary, mixed": ("vit_small_patch16_rope_mixed_224", NARROW),
    "swin": ("swin_tiny_patch4_window7_224", SWIN),
    "swin v2": ("swinv2_tiny_window8_256", SWIN),
    "swin v2 cr": ("swinv2_cr_tiny_224", {"img_size": 64, "num_classes": 5, "depths": (2, 2),
                                          "embed_dim": 24, "num_heads": (3, 6)}),
    "hiera": ("hiera_tiny_224", {"img_size": (64, 64), "num_classes": 5, "embed_dim": 24,
                                 "num_heads": 1, "stages": (1, 1, 1, 1)}),
    "siglip": ("vit_base_patch16_siglip_224", NARROW),
    "metaformer": lambda: metaformer.MetaFormer(
        3, 5, depths=(1, 2), dims=(32, 64), drop_path_rate=0.0,
        token_mixers=(metaformer.SepConv, metaformer.Attention),
        norm_layers=(metaformer.LayerNorm2dNoBias, metaformer.LayerNormNoBias)),
    "nest": lambda: nest.Nest(64, patch_size=4, num_levels=2, depths=(1, 1), embed_dims=(24, 48),
                              num_heads=(2, 3), num_classes=5, drop_path_rate=0.0),
    "volo": lambda: volo.VOLO([1, 1], 64, num_classes=5, embed_dims=[24, 48], num_heads=[2, 3],
                              mlp_ratio=[2, 2], downsamples=[True, False], patch_size=8,
                              outlook_attention=(False, False)),
    "tnt": ("tnt_s_patch16_224", {**SMALL, "depth": 1}),
    "crossvit": ("crossvit_9_240", {"num_classes": 5, "img_size": 48, "img_scale": (1.0, 1.0),
                                    "depth": ((1, 1, 0),), "num_heads": (2, 2),
                                    "embed_dim": (24, 48), "mlp_ratio": (1, 1, 1)}),
    "pvt v2": ("pvt_v2_b0", {"num_classes": 5, "depths": (1, 1, 1, 1)}),
    "twins": ("twins_svt_small", {"num_classes": 5, "depths": (1, 2, 1, 1), "img_size": 64}),
    "torchvision's vit": lambda: torchvision.models.VisionTransformer(64, 16, 2, 3, 48, 64,
                                                                      num_classes=5),
    "torchvision's swin": lambda: torchvision.models.SwinTransformer(
        [4, 4], 24, [2, 2], [3, 6], [7, 5], num_classes=5, stochastic_depth_prob=0.0),
    "torchvision's swin, windows as wide as the map": lambda: torchvision.models.SwinTransformer(
        [4, 4], 24, [2, 2], [3, 6], [16, 4], num_classes=5, stochastic_depth_prob=0.0),
    "torchvision's swin v2": lambda: torchvision.models.SwinTransformer(
        [4, 4], 24, [2, 2], [3, 6], [7, 5], num_classes=5, stochastic_depth_prob=0.0, **V2),
}  # fmt: skip

LAYERS = {"hiera": 4, "siglip": 3, "crossvit": 4, "pvt v2": 4, "twins": 5, "volo": 4}


def network(name, dtype=torch.float64, **options):
    torch.manual_seed(0)
    made = NETWORKS[name]
    model = made() if callable(made) else timm.create_model(made[0], **{**made[1], **options})
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("logit_scale"):
            parameter.data[0] = 5.0  # above the limit, which is log 100
        elif parameter.ndim <= 3:  # biases, norms, scales, tokens and tables
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return model.to(dtype).eval()


def images(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, 64, 64, generator=generator, dtype=dtype)


def run(model, x):
    """Output, gradient of the input, and of each parameter by its identity."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    torch.manual_seed(2)  # of stochastic depth
    output = model(x)
    output.square().sum().backward()
    return output.detach(), x.grad, {id(p): p.grad for p in model.parameters()}


def assert_close_to_the_largest(actual, expected):
    difference = (actual - expected).abs().max()
    assert difference <= 1e-9 * expected.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize(
    ("name", "training"), [(name, bool(number % 2)) for number, name in enumerate(NETWORKS)]
)
def test_equal_outputs_and_gradients(name, training):
    model = network(name).train(training)
    expected, input_gradient, gradients = run(model, images())
    gradients = {key: g.clone() for key, g in gradients.items() if g is not None}
    report = replace_attention(model)
    assert len(report) == LAYERS.get(name, 4 if "swin" in name else 2)
    assert all(module.training is training for module in model.modules())
    output, gradient, new = run(model, images())
    assert expected.std() > 0.1
    assert input_gradient.abs().max() > 1e-6
    torch.testing.assert_close(output, expected, atol=1e-10, rtol=1e-10)
    assert_close_to_the_largest(gradient, input_gradient)
    kept = gradients.keys() & new.keys()
    # all but biases and projections that were apart are the very same parameters
    assert len(kept) >= 0.75 * len(gradients)
    for key in kept:
        assert_close_to_the_largest(new[key], gradients[key])
    attention = [model.get_submodule(row.name).attention for row in report]
    assert all(p.grad is not None for block in attention for p in block.parameters())


@pytest.mark.parametrize("name", NETWORKS)
def test_in_single_precision_and_copied(name):
    model = network(name, torch.float32)
    x = images(torch.float32)
    with torch.no_grad():
        expected = model(x)
        replace_attention(model)
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        output = model(x)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert torch.equal(other(x), output)


@pytest.mark.parametrize(
    "name",
    ["vit", "swin", *(pytest.param(name, marks=pytest.mark.slow)
                      for name in ("beit", "eva02", "torchvision's swin"))],
)  # fmt: skip
def test_recorded_captured_and_compiled(name):
    torch._dynamo.reset()
    model = network(name, torch.float32)
    report = replace_attention(model)
    x = images(torch.float32)
    with (
        torch.no_grad(),
        attnkit.record_backends(model) as record,
        attnkit.capture_attention(model) as weights,
    ):
        expected = model(x)
    names = [f"{row.name}.attention" for row in report]
    assert list(record.counts) == list(weights) == names
    assert record.total() == {"flash": len(report)}
    for row in report:
        (found,) = weights[f"{row.name}.attention"]
        assert found.shape[1] == row.num_heads
        torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:3]))
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected)


def test_captured_weights_are_theirs():
    """Of timm's own matrix products, which it computes where its fused attention is off."""
    model = network("beit")
    seen = []
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda *given: seen.append(given[-1]))
    model(images())
    for block in model.blocks:
        block.attn.attn_drop._forward_hooks.clear()
    replace_attention(model)
    with attnkit.capture_attention(model) as weights:
        model(images())
    for theirs, (ours,) in zip(seen, weights.values(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)


def test_tokens_brought_together_by_a_shift_do_not_see_each_other():
    model = network("torchvision's swin")
    replace_attention(model)
    with attnkit.capture_attention(model) as weights:
        model(images())
    # 16 × 16 tokens in windows of 7 × 5: 3 × 4 windows, padded
    plain, shifted, *_ = (found for (found,) in weights.values())
    assert plain.shape == (2 * 12, 3, 35, 35)
    assert (plain > 1e-30).all()
    hidden = (shifted < 1e-30).all(1).flatten(1).any(1).view(2, 3, 4)
    last = torch.tensor([[row == 2 or column == 3 for column in range(4)] for row in range(3)])
    assert torch.equal(hidden, last.expand(2, 3, 4))


def test_a_mask_of_ours():
    """timm's ViT takes a mask for all layers; ours is the same by its structure."""
    window = Window2d(4, 4, 1, 2, num_prefix_tokens=1)
    model = network("vit")
    dense = window.dense(17, 17, torch.device("cpu"))
    assert not dense.all()
    with torch.no_grad():
        expected, everywhere = model(images(), attn_mask=dense), model(images())
        replace_attention(model, mask=window)
        output = model(images())
        both = model(images(), attn_mask=torch.ones(17, 17, dtype=torch.bool).tril())
        theirs = network("vit")(images(), attn_mask=(dense & torch.ones(17, 17).tril().bool()))
    assert not torch.allclose(output, everywhere)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(both, theirs)


def test_masks_that_networks_give():
    model = network("vit")
    replaced = copy.deepcopy(model)
    replace_attention(replaced)
    allowed = torch.rand(2, 1, 17, 17) < 0.7
    allowed[..., 0] = True
    for options in ({"attn_mask": allowed}, {"is_causal": True},
                    {"attn_mask": torch.randn(17, 17, dtype=torch.float64)}):  # fmt: skip
        expected, plain = model(images(), **options), model(images())
        assert not torch.allclose(expected, plain)
        torch.testing.assert_close(replaced(images(), **options), expected)


@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_options_of_timms_layers(qkv_bias, qk_norm):
    options = {"qkv_bias": qkv_bias, "qk_norm": qk_norm, "norm_layer": nn.LayerNorm,
               "attn_head_dim": 8, "gated": True}  # fmt: skip
    grouped = {"num_kv_heads": 2, "qkv_fused": False, "num_prefix_tokens": 2}
    made = [
        timm.layers.Attention(12, 4, proj_bias=False, **options),
        timm.layers.AttentionRope(12, 4, **grouped, **options),
        timm.layers.AttentionRope(12, 4, rotate_half=True, num_prefix_tokens=2, **options),
    ]
    model = nn.ModuleList(made).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    tokens = torch.randn(2, 7, 12, dtype=torch.float64)
    rope = torch.randn(5, 16, dtype=torch.float64)
    allowed = torch.ones(7, 7, dtype=torch.bool).tril(2)
    calls = [lambda m: m(tokens, allowed)] + 2 * [lambda m: m(tokens, rope, attn_mask=allowed)]
    expected = [call(module) for call, module in zip(calls, model, strict=True)]
    assert not torch.allclose(expected[1], model[1](tokens))
    replace_attention(model)
    for call, module, output in zip(calls, model, expected, strict=True):
        torch.testing.assert_close(call(module), output)
        assert module.attention.gate_proj is not None


def test_a_shared_bias_beside_a_layers_own():
    """BEiT adds it, and timm's ViT with relative positions does not read it."""
    positions = timm.layers.RelPosBias((2, 3), num_heads=2, prefix_tokens=1)
    relative = timm.models.vision_transformer_relpos.RelPosAttention(
        8, 2, rel_pos_cls=lambda **_: positions
    )
    beit = timm.models.beit.Attention(8, 2, qkv_bias=True, window_size=(2, 3))
    nn.init.normal_(beit.relative_position_bias_table)
    tokens, shared = torch.randn(2, 7, 8), torch.randn(2, 7, 7)
    model = nn.ModuleList([beit, relative])
    expected = [module(tokens, shared) for module in model]
    assert not torch.allclose(beit(tokens), expected[0])
    replace_attention(model)
    for module, output in zip(model, expected, strict=True):
        torch.testing.assert_close(module(tokens, shared), output)


def test_another_score():
    model = network("vit")
    tokens = torch.randn(2, 17, 192, dtype=torch.float64)
    theirs = model.blocks[1].attn
    report = replace_attention(model, "blocks.1.*", score="cosine", backend="reference")
    assert [row.name for row in report] == ["blocks.1.attn"]
    assert model.blocks[1].attn is not theirs
    query, key, value = theirs.qkv(tokens).unflatten(2, (3, 3, 64)).permute(2, 0, 3, 1, 4)
    cosines = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT
    expected = theirs.proj(((cosines / 0.1).softmax(-1) @ value).transpose(1, 2).flatten(2))
    ours = model.blocks[1].attn
    torch.testing.assert_close(ours(tokens), expected)
    with attnkit.record_backends() as record:
        ours(tokens).sum().backward()
    assert record.total() == {"reference": 1}
    assert ours.attention.score.log_temperature.grad.abs().min() > 0


def test_each_layer_has_a_score_and_a_normalizer_of_its_own():
    model = network("swin")
    replace_attention(model, score=attnkit.learned_scores.GaussianScore)
    scores = [m for m in model.modules() if isinstance(m, attnkit.learned_scores.GaussianScore)]
    assert len(set(scores)) == 4
    assert [len(score.log_bandwidth) for score in scores] == [3, 3, 6, 6]
    assert model(images()).isfinite().all()
    model = network("vit")
    expected = model(images())
    replace_attention(model, normalizer="linear")
    assert not torch.allclose(model(images()), expected)


def test_rates_and_frozen_parameters_are_carried_over():
    model = network("beit", proj_drop_rate=0.2, attn_drop_rate=0.3).requires_grad_(False)
    replace_attention(model)
    for block in model.blocks:
        assert block.attn.dropout.p == 0.2
        assert block.attn.attention.dropout_p == 0.3
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_module_at_two_places_stays_one():
    model = network("vit")
    model.blocks[1].attn = model.blocks[0].attn
    expected = model(images())
    assert len(replace_attention(model)) == 1
    assert model.blocks[1].attn is model.blocks[0].attn
    torch.testing.assert_close(model(images()), expected)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kdim", [None, 6])
def test_torchs_arguments(batch_first, kdim):
    attention = nn.MultiheadAttention(12, 3, batch_first=batch_first, kdim=kdim).double().eval()
    nn.init.normal_(attention.in_proj_bias)
    model = nn.ModuleList([attention])
    replace_attention(model)
    ours = model[0]
    query = torch.randn(2, 5, 12, dtype=torch.float64)
    key = torch.randn(2, 7, kdim or 12, dtype=torch.float64)
    value = torch.randn(2, 7, 12, dtype=torch.float64)
    tokens = [t if batch_first else t.transpose(0, 1) for t in (query, key, value)]
    hidden = torch.rand(2, 7) < 0.3
    hidden[:, 0] = False
    attn = torch.rand(6, 5, 7) < 0.3
    attn[..., 0] = False
    for options in (
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        {"key_padding_mask": hidden},
        {"attn_mask": attn[0]},
        {"attn_mask": attn, "key_padding_mask": hidden},
        {"attn_mask": torch.randn(6, 5, 7, dtype=torch.float64)},
        {"key_padding_mask": torch.randn(2, 7, dtype=torch.float64),
         "attn_mask": torch.randn(5, 7, dtype=torch.float64)},
    ):  # fmt: skip
        expected, actual = attention(*tokens, **options), ours(*tokens, **options)
        torch.testing.assert_close(actual, expected)
    with pytest.raises(ValueError, match="query: expected a batch of tokens"):
        ours(*(tensor[0] for tensor in tokens))


def test_torchs_hint_without_a_mask_is_refused():
    """It was not heeded: every token saw all others."""
    theirs = nn.MultiheadAttention(8, 2, batch_first=True)
    model = nn.ModuleList([theirs])
    replace_attention(model)
    tokens = torch.randn(1, 4, 8)
    for attention in (theirs, model[0]):
        with pytest.raises(RuntimeError, match="attn_mask"):
            attention(tokens, tokens, tokens, is_causal=True)
    later = torch.ones(4, 4, dtype=torch.bool).triu(1)
    expected, _ = theirs(tokens, tokens, tokens, attn_mask=later, is_causal=True)
    output, _ = model[0](tokens, tokens, tokens, attn_mask=later, is_causal=True)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize(
    ("name", "options"),
    [("swin", {"window_size": (8, 6)}), ("swin v2", {}), ("swin v2 cr", {}), ("beit", {}),
     ("beit, shared bias", {}), ("vit", {}), ("eva02", {})],
)  # fmt: skip
def test_the_input_size_may_change_afterwards(name, options):
    """As theirs changes: a bias of positions is made for another window."""
    theirs = network(name)
    ours = copy.deepcopy(theirs)
    replace_attention(ours)
    ours = copy.deepcopy(ours)
    for model in (theirs, ours):
        model.set_input_size(img_size=(128, 96), **options)
    larger = torch.randn(1, 3, 128, 96, dtype=torch.float64)
    torch.testing.assert_close(ours(larger), theirs(larger))


def test_torchs_encoder_keeps_off_its_fast_path():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 8, batch_first=True), 2)
    encoder = encoder.double().eval()
    tokens = torch.randn(2, 5, 12, dtype=torch.float64)
    hidden = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        expected = encoder(tokens, src_key_padding_mask=hidden)
        assert len(replace_attention(encoder)) == 2
        with attnkit.record_backends() as record:
            output = encoder(tokens, src_key_padding_mask=hidden)
    assert record.total() == {"flash": 2}
    torch.testing.assert_close(output[~hidden], expected[~hidden])


def test_other_encoders_and_the_random_state_stay():
    encoders = nn.ModuleList(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 8, batch_first=True), 1)
        for _ in range(2)
    )
    before = torch.get_rng_state()
    replace_attention(encoders, "1.*", score=attnkit.learned_scores.CosineScore)
    assert torch.equal(torch.get_rng_state(), before)
    assert [encoder.use_nested_tensor for encoder in encoders] == [True, False]


def test_where_is_named_where_it_helps():
    wrong = nn.MultiheadAttention(4, 2, add_zero_attn=True)
    model = nn.ModuleList([wrong, nn.MultiheadAttention(4, 2)])
    with pytest.raises(ValueError, match=r"zeros; where= can leave it out$"):
        replace_attention(model, "0")
    with pytest.raises(ValueError, match=r"zeros; partial=True or where= leaves it"):
        replace_attention(model)
    with pytest.raises(ValueError, match=r"key of zeros$"):
        replace_attention(nn.ModuleList([wrong]))


class Subclass(timm.layers.Attention):
    pass


def alter(change):
    model = timm.create_model("vit_tiny_patch16_224", **SMALL)
    change(model)
    return model


class Softmax(nn.Module):
    def forward(self, x):
        return x.softmax(dim=1)


def subclass_and_softmax(model):
    model.blocks[1].attn = Subclass(192)
    model.norm = nn.Sequential(model.norm, Softmax())


def low_rank(model):
    class LowRank(nn.Linear):
        pass

    model.blocks[1].attn.proj = LowRank(192, 192)


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (lambda: alter(lambda m: setattr(m.blocks[1], "attn", Subclass(192))), {}, ValueError,
         r"cannot be replaced: blocks.1.attn: .*Subclass is not a class that is known"),
        (lambda: timm.create_model("halonet26t"), {}, ValueError,
         r"stages.2.1.self_attn, .* more: timm.layers.halo_attn.HaloAttn is not"),
        (lambda: timm.create_model("cait_xxs24_224"), {"score": "cosine"}, ValueError,
         "blocks.0.attn, .* more: TalkingHeadAttn .*: another mask or score where heads mix"),
        (lambda: timm.create_model("nest_tiny"), {"normalizer": "delta_rule"}, ValueError,
         "Attention cannot be converted: a normalizer that reads tokens"),
        (lambda: timm.create_model("vit_tiny_patch16_224", scale_attn_norm=True, **SMALL), {},
         ValueError, "blocks.0.attn, blocks.1.attn: .* a norm before the output projection"),
        (lambda: alter(low_rank), {}, ValueError, "blocks.1.attn: .* not plain nn.Linear"),
        (lambda: alter(lambda m: setattr(m.blocks[0].attn, "scale", 1.0)), {}, ValueError,
         "blocks.0.attn: .* a scale other than"),
        (lambda: alter(lambda m: m.blocks[0].attn.qkv.register_forward_hook(print)), {},
         ValueError, "blocks.0.attn: Attention cannot be converted: hooks"),
        (lambda: nn.ModuleList([nn.MultiheadAttention(4, 2, add_zero_attn=True)]), {}, ValueError,
         "0: .* add_zero_attn"),
        (lambda: torchvision.models.resnet18(), {}, ValueError,
         r"attention modules of ResNet, got '\*': there is none by name of its class$"),
        (lambda: nn.MultiheadAttention(4, 2), {}, ValueError,
         r"got '\*': it is one itself, .* such as torch.nn.ModuleList\(\[attention\]\)"),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), Softmax()), {}, ValueError,
         r"softmax is taken in Softmax \(1\), not known here"),
        (lambda: alter(subclass_and_softmax), {}, ValueError,
         r"is not a class .*; a softmax is taken in Softmax \(norm.1\)"),
        (lambda: timm.create_model("efficientvit_b0"), {}, ValueError,
         r"class; activations are multiplied with each other in LiteMLA \(stages.2.blocks.1.c.*"),
        (lambda: alter(id), {"where": "block.0"}, ValueError,
         "got 'block.0': none of blocks.0.attn, blocks.1.attn"),
        (lambda: alter(id), {"score": "cosin"}, ValueError, "score: expected one of scaled_dot"),
        (lambda: alter(id), {"score": attnkit.learned_scores.CosineScore(3, 64)}, TypeError,
         "score: .* got the module CosineScore itself"),
        (lambda: alter(id), {"normalizer": "max"}, ValueError, "normalizer: expected one of"),
        (lambda: alter(id), {"backend": "fast"}, ValueError, "backend: expected 'auto' or"),
        (lambda: alter(id), {"mask": torch.ones(3, 3)}, TypeError, "mask: expected a boolean"),
        (lambda: torch.compile(alter(id)), {}, ValueError, "model: is compiled"),
    ],
)  # fmt: skip
def test_what_is_refused(make, options, error, message):
    model = make()
    before = [(name, id(module)) for name, module in model.named_modules()]
    with pytest.raises(error, match=message):
        replace_attention(model, **options)
    assert [(name, id(module)) for name, module in model.named_modules()] == before


class ResidualAttentionBlock(nn.Module):
    """A block around attention that is named so too, as in open_clip."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return x + self.attn(x, x, x, need_weights=False)[0]


def test_a_block_that_is_named_after_its_attention():
    model = nn.Sequential(ResidualAttentionBlock(), ResidualAttentionBlock())
    tokens = torch.randn(2, 5, 8)
    expected = model(tokens)
    assert [row.name for row in replace_attention(model)] == ["0.attn", "1.attn"]
    torch.testing.assert_close(model(tokens), expected)


def test_report_and_what_where_leaves_out():
    model = timm.create_model("vit_base_patch16_siglip_224", **NARROW)
    report = replace_attention(model, "blocks.*")
    lines = str(report).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["module", "blocks.0.attn", "blocks.1.attn"]
    assert lines[2].split()[1:] == ["timm.layers.attention.Attention", "3", "16"]
    assert len({len(line) for line in lines}) == 1
    assert [row.name for row in replace_attention(model)] == ["attn_pool"]


def test_what_cannot_be_replaced_may_stay():
    torch.manual_seed(0)
    model = timm.create_model("volo_d1_224", img_size=64, num_classes=5).double().eval()
    with pytest.raises(ValueError, match=r"OutlookAttention is not a class .* partial=True"):
        replace_attention(model)
    expected = model(images())
    report = replace_attention(model, partial=True)
    assert "timm.models.volo.OutlookAttention is not a class that is known here" in report.left[0]
    assert str(report).splitlines()[-1].startswith("left: network.0.0.attn, network.0.1.attn and 2")
    assert len(report) == 16
    torch.testing.assert_close(model(images()), expected, atol=1e-9, rtol=1e-9)
    additive = timm.create_model("swiftformer_xs")
    with pytest.raises(ValueError, match="AdditiveAttention"):  # nothing else to replace
        replace_attention(additive, partial=True)
