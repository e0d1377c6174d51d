"""Weights copied from torch, timm and torchvision: equal outputs and gradients, or a refusal.

Norms, biases, tokens, positions and layer scales are given random values first: at their initial
ones (1, 0) swapped or forgotten parts would go unseen.
"""

import pytest
import timm
import torch
import torchvision
from torch import nn

from attnkit import Causal, Padding, interop

SMALL = {"depth": 2, "img_size": 33, "patch_size": 11, "num_classes": 7, "embed_dim": 24}

TIMM = {
    "class token": {},
    "class position apart": {"no_embed_class": True},
    "average": {"global_pool": "avg", "class_token": False},
    "average with class token": {"global_pool": "avg"},
    "average, norm before": {"global_pool": "avg", "fc_norm": False},
    "class token, norm after": {"fc_norm": True},
    "map": {"global_pool": "map", "class_token": False},
    "registers": {"reg_tokens": 3},
    "registers, average, positions apart": {
        "reg_tokens": 2,
        "global_pool": "avg",
        "no_embed_class": True,
    },
    "layer scale": {"init_values": 0.1},
    "qk norm": {"qk_norm": True},
    "no qkv bias": {"qkv_bias": False},
    "pre-norm": {"pre_norm": True},
    "no positions": {"pos_embed": "none"},
    "features": {"num_classes": 0},
    "tanh": {"act_layer": lambda: nn.GELU(approximate="tanh")},
    "timm's own tanh": {"act_layer": "gelu_tanh"},
    "norms of another eps": {"norm_layer": nn.LayerNorm, "qk_norm": True},
    "map with class token": {"global_pool": "map", "mlp_ratio": 49 / 24},
    "not square": {"img_size": (22, 33), "patch_size": (11, 3)},
}


def randomise(module):
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        spread = 0.3 if parameter.ndim > 1 else 0.5
        parameter.data = spread * torch.randn(parameter.shape, generator=generator)
    return module


def assert_equal_logits_and_gradients(ours, theirs, images, atol):
    images = images.requires_grad_()
    expected, actual = theirs(images), ours(images)
    assert expected.std() > 0.01
    torch.testing.assert_close(actual, expected, atol=atol, rtol=atol)
    cotangent = torch.randn_like(expected)
    (theirs_gradient,) = torch.autograd.grad(expected, images, cotangent)
    (ours_gradient,) = torch.autograd.grad(actual, images, cotangent)
    assert theirs_gradient.abs().max() > 1e-3
    torch.testing.assert_close(ours_gradient, theirs_gradient, atol=10 * atol, rtol=10 * atol)


@pytest.mark.parametrize("variant", TIMM)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_timm_variants(variant, dtype, atol):
    options = {**SMALL, **TIMM[variant]}
    theirs = randomise(timm.create_model("vit_tiny_patch16_224", **options)).to(dtype).eval()
    ours = interop.from_timm(theirs)
    assert not ours.training
    size = options["img_size"]
    height, width = (size, size) if isinstance(size, int) else size
    images = torch.randn(2, 3, height, width, dtype=dtype)
    assert_equal_logits_and_gradients(ours, theirs, images, atol)
    # the tokens of every block too, not only the pooled ones
    torch.testing.assert_close(ours.tokens(images), theirs.forward_features(images), atol=atol,
                               rtol=atol)  # fmt: skip


def test_timm_parameters_get_equal_gradients():
    theirs = randomise(timm.create_model("vit_tiny_patch16_224", **SMALL, init_values=0.1)).double()
    ours = interop.from_timm(theirs)
    images = torch.randn(3, 3, 33, 33, dtype=torch.float64)
    for model in (ours, theirs):
        model(images).square().sum().backward()
    block, their_block = ours.blocks[0], theirs.blocks[0]
    for mine, their in (
        (ours.patch_embed.weight, theirs.patch_embed.proj.weight),
        (ours.class_token, theirs.cls_token),
        (block.attention.in_proj.weight, their_block.attn.qkv.weight),
        (block.attention_norm.weight, their_block.norm1.weight),
        (block.mlp_scale.gamma, their_block.ls2.gamma),
        (ours.blocks[1].mlp.fc1.bias, theirs.blocks[1].mlp.fc1.bias),
    ):
        assert their.grad.abs().max() > 1e-6
        torch.testing.assert_close(mine.grad, their.grad)
    torch.testing.assert_close(ours.position_table.grad, theirs.pos_embed.grad[:, 1:])


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "deit_tiny_patch16_224", "vit_small_patch32_224"]
)
def test_timm_full_size(name):
    theirs = randomise_softly(timm.create_model(name)).eval()
    ours = interop.from_timm(theirs)
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "vit_base_patch16_224",
        "deit_small_patch16_224",
        "deit_base_patch16_224",
        "deit3_small_patch16_224",
        "vit_base_patch16_clip_224",
        "vit_base_patch16_siglip_224",
        "vit_small_patch14_dinov2",
        "vit_small_patch14_reg4_dinov2",
        "vit_base_patch16_gap_224",
        "vit_medium_patch16_reg4_gap_256",
    ],
)
def test_timm_full_size_slow(name):
    theirs = randomise_softly(timm.create_model(name)).eval()
    images = torch.randn(1, 3, *theirs.patch_embed.img_size)
    with torch.no_grad():
        ours = interop.from_timm(theirs)
        torch.testing.assert_close(ours(images), theirs(images), atol=1e-4, rtol=1e-4)
        theirs, images = theirs.double(), images.double()
        ours = interop.from_timm(theirs)
        torch.testing.assert_close(ours(images), theirs(images), atol=1e-8, rtol=1e-8)


def randomise_softly(module):
    """Random vectors; matrices as they were initialised, so that depth does not blow values up."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1 or "token" in name or "pos_embed" in name:
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.data = noise + (1 if "norm" in name and "weight" in name else 0)
    for module_ in module.modules():
        if isinstance(module_, nn.Linear) and (module_.weight == 0).all():
            nn.init.normal_(module_.weight, std=0.02)
    return module


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_torchvision(dtype, atol):
    theirs = torchvision.models.VisionTransformer(
        image_size=33, patch_size=11, num_layers=2, num_heads=3, hidden_dim=24, mlp_dim=41,
        num_classes=7, dropout=0.1,
    )  # fmt: skip
    theirs = randomise(theirs).to(dtype).eval()
    ours = interop.from_torchvision(theirs)
    images = torch.randn(2, 3, 33, 33, dtype=dtype)
    assert_equal_logits_and_gradients(ours, theirs, images, atol)
    assert ours.dropout.p == 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_b_16", "vit_b_32"])
def test_torchvision_full_size(name):
    theirs = randomise_softly(getattr(torchvision.models, name)(weights=None)).eval()
    ours = interop.from_torchvision(theirs)
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("sizes", [{}, {"kdim": 13, "vdim": 17}], ids=["", "kdim"])
@pytest.mark.parametrize("bias", [True, False])
def test_torch_multihead(batch_first, sizes, bias):
    theirs = nn.MultiheadAttention(22, 2, bias=bias, batch_first=batch_first, **sizes).double()
    theirs = randomise(theirs).double().eval()
    ours = interop.from_torch(theirs)
    query = torch.randn(3, 5, 22, dtype=torch.float64)
    key = torch.randn(3, 7, sizes.get("kdim", 22), dtype=torch.float64)
    value = torch.randn(3, 7, sizes.get("vdim", 22), dtype=torch.float64)
    lengths = torch.tensor([7, 2, 5])
    given = [t if batch_first else t.transpose(0, 1) for t in (query, key, value)]
    expected, weights = theirs(
        *given,
        key_padding_mask=torch.arange(7) >= lengths[:, None],
        attn_mask=torch.ones(5, 7, dtype=torch.bool).triu(1),
        average_attn_weights=False,
    )
    expected = expected if batch_first else expected.transpose(0, 1)
    mask = Causal("top_left") & Padding(lengths)
    torch.testing.assert_close(ours(query, key, value, mask=mask), expected)
    torch.testing.assert_close(ours.attention_weights(query, key, value, mask=mask), weights)


@pytest.mark.parametrize(
    ("make", "convert", "reason"),
    [
        (lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True), "torch", "add_bias_kv"),
        (lambda: nn.MultiheadAttention(8, 2, add_zero_attn=True), "torch", "add_zero_attn"),
        (lambda: nn.Linear(3, 3), "torch",
         "MultiheadAttention itself, got torch.nn.modules.linear.Linear"),
        (lambda: timm.create_model("deit_tiny_distilled_patch16_224", depth=1), "timm",
         "VisionTransformerDistilled"),
        (lambda: timm.create_model("swin_tiny_patch4_window7_224"), "timm", "SwinTransformer"),
        (lambda: timm.create_model("vit_tiny_patch16_224", depth=1, global_pool="max"), "timm",
         "global_pool='max'"),
        (lambda: timm.create_model("vit_tiny_patch16_224", depth=1, act_layer="relu"), "timm",
         "ReLU at blocks.0.mlp.act"),
        (lambda: timm.create_model("vit_tiny_patch16_224", depth=1, final_norm=False), "timm",
         "no final norm"),
        (lambda: timm.create_model("vit_tiny_patch16_224", depth=1, scale_attn_norm=True), "timm",
         "norms before the output projections"),
        (lambda: timm.create_model("vit_tiny_patch16_224", depth=1, norm_layer="rmsnorm"), "timm",
         "RmsNorm at blocks.0.norm1, blocks.0.norm2 and 1 more"),
        (lambda: timm.create_model("vit_tiny_patch16_224", depth=1, drop_rate=0.1), "timm",
         "dropout before the head"),
        (lambda: torchvision.models.VisionTransformer(32, 16, 1, 2, 8, 8, representation_size=5),
         "torchvision", "Tanh at heads.act"),
        (lambda: torchvision.models.resnet18(), "torchvision",
         "got torchvision.models.resnet.ResNet"),
    ],
)  # fmt: skip
def test_what_cannot_be_carried_over_is_refused(make, convert, reason):
    with pytest.raises((ValueError, TypeError), match=reason) as error:
        getattr(interop, f"from_{convert}")(make())
    assert "\n" not in str(error.value)


def alter(change, model=None):
    """A model that is plain but for one change."""
    model = timm.create_model("vit_tiny_patch16_224", **SMALL) if model is None else model
    change(model)
    return model


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m.blocks[1].mlp, "act", nn.Sigmoid()), "Sigmoid at blocks.1.mlp.act"),
        (lambda m: setattr(m.blocks[1].mlp, "act", nn.Identity()), "another activation than GELU"),
        (lambda m: setattr(m.blocks[1].mlp, "act", nn.GELU("tanh")), "activations that differ"),
        (lambda m: setattr(m.blocks[1].norm2, "eps", 0.1), r"layer norms of different eps \[1e-06"),
        (lambda m: setattr(m.norm, "eps", 0.1), "layer norms of different eps"),
        (lambda m: setattr(m.blocks[1].attn, "num_heads", 4), "heads that differ"),
        (lambda m: m.blocks[1].register_forward_hook(lambda *given: 2 * given[-1]),
         "hooks at blocks.1"),
        (lambda m: nn.utils.parametrizations.weight_norm(m.head), "ParametrizedLinear at head"),
        (lambda m: setattr(m, "head", nn.Sequential(m.head, nn.Linear(7, 7))),
         r"does not fit ViT: head.0.weight is .* in VisionTransformer and missing here, "
         r"head.0.bias .* and 4 more$"),
        (lambda m: setattr(m.patch_embed.proj, "stride", (9, 9)), "patches that overlap"),
        (lambda m: setattr(m.blocks[0], "drop_path2", timm.layers.DropPath(0.1)),
         "drop path that does not rise linearly"),
        (lambda m: setattr(m.blocks[1].attn.proj_drop, "p", 0.1), "dropout rates that differ"),
        (lambda m: m.set_grad_checkpointing(), "gradient checkpointing"),
    ],
)  # fmt: skip
def test_one_change_in_a_plain_model_is_seen(change, reason):
    with pytest.raises(ValueError, match=reason):
        interop.from_timm(alter(change))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m.encoder.layers[1].mlp, "1", nn.ReLU()), "ReLU at encoder.layers"),
        (lambda m: setattr(m.encoder.layers[1].ln_2, "eps", 0.1), "layer norms of different eps"),
        (lambda m: setattr(m.encoder.layers[1].dropout, "p", 0.1), "dropout rates that differ"),
        (lambda m: m.heads.append(nn.Linear(7, 7)), "heads other than one linear layer"),
    ],
)
def test_one_change_in_torchvisions_model_is_seen(change, reason):
    model = torchvision.models.VisionTransformer(33, 11, 2, 3, 24, 41, num_classes=7)
    with pytest.raises(ValueError, match=reason):
        interop.from_torchvision(alter(change, model))


@pytest.mark.parametrize("head", [nn.Linear(24, 5), nn.Sequential(nn.Linear(24, 5))])
def test_torchvision_with_another_head(head):
    theirs = torchvision.models.VisionTransformer(33, 11, 2, 3, 24, 41, num_classes=7)
    theirs.heads = head
    theirs = randomise(theirs).double().eval()
    ours = interop.from_torchvision(theirs)
    images = torch.randn(2, 3, 33, 33, dtype=torch.float64)
    assert_equal_logits_and_gradients(ours, theirs, images, 1e-10)


def test_rates_and_mode_are_carried_over():
    rates = {"pos_drop_rate": 0.1, "proj_drop_rate": 0.1, "attn_drop_rate": 0.2}
    rates |= {"drop_path_rate": 0.3, "patch_drop_rate": 0.4}
    theirs = timm.create_model("vit_tiny_patch16_224", **SMALL, **rates).train()
    ours = interop.from_timm(theirs)
    assert ours.training
    assert ours.dropout.p == ours.blocks[1].dropout.p == ours.blocks[1].mlp.drop2.p == 0.1
    assert ours.blocks[0].attention.dropout_p == 0.2
    assert ours.blocks[1].drop_path.drop_prob == pytest.approx(0.3)
    assert ours.patch_dropout.prob == 0.4


def test_subclasses_of_torchs_attention_are_refused():
    class Doubled(nn.MultiheadAttention):
        def forward(self, *given, **options):
            return 2 * super().forward(*given, **options)[0], None

    with pytest.raises(TypeError, match=r"MultiheadAttention itself, got .*Doubled"):
        interop.from_torch(Doubled(8, 2))
