"""ViT: sizes, poolings, positions, resizing, transforms; parity with others is in test_interop."""

import pytest
import torch
from torch import nn

import attnkit
from attnkit import ScaledDot, ViT
from attnkit.core.scores.learned import LEARNED_SCORES, SCORE_NAMES
from attnkit.lightning import parameter_groups

SMALL = {"image_size": (12, 20), "patch_size": 4, "dim": 24, "depth": 2, "num_classes": 5}
VARIANTS = {
    "plain": {},
    "registers": {"num_registers": 2},
    "mean": {"pooling": "mean"},
    "mean with class token": {"pooling": "mean", "class_token": True},
    "attention": {"pooling": "attention", "positions": None},
    "rotary": {"positions": "rotary2d", "num_registers": 1},
    "sincos": {"positions": "sincos2d"},
    "factorized": {"positions": "factorized2d", "score": "cosine"},
    "all": {"layer_scale": 0.1, "qk_norm": True, "embed_norm": True, "qkv_bias": False},
}


def make(**options):
    torch.manual_seed(0)
    model = ViT(**{**SMALL, **options})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def images():
    return torch.randn(3, 3, 12, 20, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("size", "millions"), [("tiny", 5.7), ("small", 22.1), ("base", 86.6), ("large", 304.3)]
)
def test_published_sizes(size, millions):
    with torch.device("meta"):
        model = ViT.from_size(size, num_classes=1000)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_exported_and_autocast(variant, images):
    torch._dynamo.reset()
    model = make(**VARIANTS[variant]).eval()
    logits = model(images)
    assert logits.shape == (3, 5)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images), logits)
    exported = torch.export.export(model, (images,)).module()
    torch.testing.assert_close(exported(2 * images), model(2 * images))
    with torch.autocast("cpu", torch.bfloat16):
        cast = model(images)
    assert (cast - logits).norm() < 0.1 * logits.norm()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_gets_a_gradient(variant, images):
    model = make(**VARIANTS[variant])
    model(images).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("positions", ["learned", "rotary2d"])
def test_class_token_alone_is_exactly_that_of_all_tokens(positions, images):
    model = make(positions=positions, num_registers=2).double().eval()
    images = images.double()
    tokens = model.tokens(images)
    assert tokens.shape == (3, 1 + 2 + 15, 24)
    torch.testing.assert_close(model.head(tokens[:, 0]), model(images))
    with attnkit.capture_attention(model) as weights:
        model(images)
    assert [w[0].shape for w in weights.values()] == [(3, 3, 18, 18), (3, 3, 1, 18)]
    assert list(weights) == ["blocks.0.attention", "blocks.1.attention"]


def test_poolings_read_what_they_say(images):
    mean = make(pooling="mean", num_registers=2).double().eval()
    images = images.double()
    expected = mean.pooled_norm(mean.tokens(images)[:, 2:].mean(dim=1))
    torch.testing.assert_close(mean.features(images), expected)
    attention = make(pooling="attention").double().eval()
    expected = attention.head(attention.pool(attention.tokens(images)))
    torch.testing.assert_close(attention(images), expected)
    no_head = make(num_classes=0)
    assert torch.equal(no_head(images.float()), no_head.features(images.float()))


def test_without_positions_patches_may_be_swapped(images):
    swapped = torch.cat([images[:, :, 4:8], images[:, :, :4], images[:, :, 8:]], dim=2)
    for positions in (None, "learned", "factorized2d", "sincos2d", "rotary2d"):
        model = make(positions=positions).eval()
        same = torch.allclose(model(swapped), model(images), atol=1e-4)
        assert same == (positions is None)


def test_patch_dropout_leaves_patches_out_in_training_only(images):
    for positions in ("learned", "rotary2d"):
        model = make(patch_dropout=0.4, positions=positions)
        assert model.tokens(images).shape == (3, 1 + 9, 24)
        model.eval()
        assert model.tokens(images).shape == (3, 1 + 15, 24)


@pytest.mark.parametrize("positions", ["learned", "factorized2d", "sincos2d", "rotary2d", None])
def test_resize(positions, images):
    model = make(positions=positions).eval()
    before = model(images)
    torch.testing.assert_close(model.resize()(images), before)
    assert model.resize(image_size=(24, 40), patch_size=(8, 8)) is model
    enlarged = nn.functional.interpolate(images, scale_factor=2, mode="bilinear")
    assert (model(enlarged) - before).norm() < 0.35 * before.norm()
    model.resize(image_size=16, patch_size=4)
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 5)
    fresh = ViT(**{**SMALL, "image_size": 16, "positions": positions})
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh.eval()(enlarged[:, :, :16, :16]),
                               model(enlarged[:, :, :16, :16]))  # fmt: skip


def test_no_weight_decay_names_tokens_and_positions():
    model = make(num_registers=2, pooling="attention", class_token=True)
    assert model.no_weight_decay() == {"class_token", "registers", "position_table", "pool.query"}
    assert make(positions="sincos2d").no_weight_decay() == {"class_token"}
    tables = {"factorized_positions.row_table", "factorized_positions.column_table"}
    model = make(positions="factorized2d")
    assert model.no_weight_decay() == {"class_token", *tables}
    _, exempt = parameter_groups(model)
    ours = model.factorized_positions.parameters()
    assert all(any(table is p for p in exempt["params"]) for table in ours)


def test_weights_at_the_start():
    model = ViT(image_size=64, patch_size=4, dim=96, depth=1, num_classes=7, position_std=0.5)
    assert model.position_table.std().item() == pytest.approx(0.5, rel=0.05)
    factorized = ViT(image_size=99, patch_size=3, dim=96, positions="factorized2d", depth=1,
                     position_std=0.5).factorized_positions  # fmt: skip
    assert factorized.positions().std().item() == pytest.approx(0.5, rel=0.05)
    block = model.blocks[0]
    for matrix in (*block.attention.in_proj.weight.split(96), block.mlp.fc1.weight):
        bound = (6 / sum(matrix.shape)) ** 0.5  # Glorot and Bengio, 2010
        assert 0.97 * bound < matrix.abs().max() <= bound
    assert not any(p.any() for name, p in block.named_parameters() if name.endswith("proj.bias"))


def test_factorized_positions_are_those_of_rows_and_columns():
    """A picture of equal patches: what tells its tokens apart before the blocks are the tables."""
    model = make(positions="factorized2d", depth=1, num_registers=1).eval()
    tokens, rotation = model._embed(torch.zeros(1, 3, 12, 20))
    assert rotation is None
    grid = (tokens[0, 2:] - model.patch_embed.bias).view(3, 5, 24)
    tables = model.factorized_positions
    torch.testing.assert_close(grid, tables.row_table[:, None] + tables.column_table)


SOFTCAP = ScaledDot(softcap=2.0)


@pytest.mark.parametrize("score", [*SCORE_NAMES, SOFTCAP], ids=str)
@pytest.mark.parametrize("pooling", ["class", "attention"])
def test_every_score_trains_on_the_kernel_it_is_lowered_to(score, pooling, images):
    torch.manual_seed(0)
    model = ViT(**SMALL, score=score, pooling=pooling)
    attentions = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, attnkit.MultiHeadAttention)
    }
    assert len(attentions) == (3 if pooling == "attention" else 2)
    learned = [p for module in attentions.values() for n, p in module.named_parameters()
               if n.startswith("score.")]  # fmt: skip
    assert len(learned) == (len(attentions) if score in LEARNED_SCORES else 0)
    before = [p.clone() for p in learned]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    labels, losses = torch.tensor([4, 0, 2]), []
    with attnkit.record_backends(model) as record:
        for _ in range(3):
            losses.append(nn.functional.cross_entropy(model(images), labels))
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
    assert losses[2] < losses[1] < losses[0]
    assert all(not torch.equal(p, b) for p, b in zip(learned, before, strict=True))
    kernel = "blockwise" if score == "additive" or score is SOFTCAP else "flash"
    assert record.counts == {name: {kernel: 3} for name in attentions}


@pytest.mark.parametrize("name", LEARNED_SCORES)
def test_the_models_start_leaves_the_scores_as_their_own(name):
    model = ViT(**SMALL, score=name, pooling="attention")
    blocks = [*model.blocks, model.pool]
    torch.manual_seed(7)
    fresh = LEARNED_SCORES[name](3, 8)
    for block in blocks:
        ours = block.attention.score
        if name == "additive":  # drawn at random, within Xavier's bound
            assert 0.5 * (6 / 9) ** 0.5 < ours.vector.abs().max() <= (6 / 9) ** 0.5
            assert ours.vector.unique().numel() == 24
        else:
            for parameter, right in zip(ours.parameters(), fresh.parameters(), strict=True):
                assert torch.equal(parameter, right)
    assert len({id(block.attention.score) for block in blocks}) == 3


def test_drop_path_rises_linearly():
    model = make(depth=5, drop_path=0.2)
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for block in model.blocks]
    assert rates == pytest.approx([0.0, 0.05, 0.1, 0.15, 0.2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": 5}, "patch_size: 5 x 5 does not divide image_size 12 x 20"),
        ({"patch_size": 0}, "patch_size: expected a positive integer or two, got 0"),
        ({"patch_size": 2.5}, "patch_size: expected a positive integer or two, got 2.5"),
        ({"image_size": "12"}, "image_size: expected a positive integer or two, got '12'"),
        ({"num_heads": 0}, "num_heads: expected at least 1, got 0"),
        ({"num_heads": 5, "positions": "rotary2d"}, "num_heads: 5 does not divide dim 24"),
        ({"dim": 23}, "num_heads: 3 does not divide dim 23"),
        ({"pooling": "max"}, "pooling: expected 'class', 'mean' or 'attention', got 'max'"),
        ({"score": "cosin"}, "score: expected one of scaled_dot, dot, .*got 'cosin'"),
        ({"positions": "fixed"}, "positions: expected 'learned'.* or None, got 'fixed'"),
        ({"class_token": False}, "pooling: 'class' reads the class token"),
        ({"depth": 0}, "depth: expected at least 1, got 0"),
        ({"num_classes": -1}, "num_classes: expected at least 0, got -1"),
        ({"mlp_ratio": 0.01}, "mlp_ratio: expected at least one hidden channel, got 0.01"),
        ({"drop_path": 1.0}, "drop_path: expected 0 <= drop_path < 1, got 1.0"),
        ({"positions": "sincos2d", "position_std": 0.5}, "only 'learned' and.*got 0.5 with 'sinc"),
        ({"positions": None, "position_std": 0.02}, "got 0.02 with None"),
        ({"dim": 30, "positions": "rotary2d"}, "head_dim: 10 is not a multiple of 4"),
        ({"activation": "relu"}, "activation: expected 'gelu' or 'gelu_tanh', got 'relu'"),
        ({"backend": "flsh"}, "backend: expected 'auto' or one of"),
    ],
    ids=str,
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ViT(**{**SMALL, **options})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m, x: m(x.transpose(2, 3)),
            r"images: expected 12 x 20 pixels, got \[3, 3, 20, 12\]",
        ),
        (lambda m, x: m(x[:, :1]), r"images: expected \[batch, 3, .*got \[3, 1, 12, 20\]"),
        (lambda m, x: ViT.from_size("huge"), r"size: expected 'tiny'.*got 'huge'"),
        (lambda m, x: m.resize(13), "patch_size: 4 x 4 does not divide image_size 13 x 13"),
    ],
)
def test_wrong_images_and_sizes_are_named(call, message, images):
    with pytest.raises(ValueError, match=message):
        call(make(), images)
