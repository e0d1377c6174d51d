"""Hidden keys: a model that nobody told says what it says of the other tokens alone."""

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

import attnkit
from attnkit.core.key_masking import hide_keys


def randomize(module):
    """Random norms, biases and positions, at which no swap goes unseen."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.double().eval()


def our_vit(**options):
    vit = randomize(
        attnkit.ViT(
            image_size=(6, 10),
            patch_size=2,
            in_channels=2,
            num_classes=7,
            dim=24,
            depth=3,
            **options,
        )
    )
    return vit, vit.num_prefix_tokens


def of_kept(vit, images, kept, num_prefix):
    """The logits of a ViT whose sequence is shortened to the kept tokens, item by item."""
    prefix = torch.ones(num_prefix, dtype=torch.bool)
    logits = []
    for image, keep in zip(images, kept, strict=True):
        if isinstance(vit, attnkit.ViT):
            tokens, rotation = vit._embed(image[None])
            assert rotation is None
            tokens = tokens[:, torch.cat([prefix, keep])]
            for block in vit.blocks:
                tokens = block(tokens)
            tokens = vit.norm(tokens)
            logits.append(vit.head(vit.pooled_norm(tokens[:, 0])))
        else:
            tokens = vit._pos_embed(vit.patch_embed(image[None]))[:, torch.cat([prefix, keep])]
            logits.append(vit.forward_head(vit.norm(vit.blocks(tokens))))
    return torch.cat(logits)


@pytest.mark.parametrize("kind", ["class", "registers", "timm"])
def test_a_vit_says_what_it_says_of_the_other_patches(kind):
    torch.manual_seed(0)
    images = torch.randn(3, 2, 6, 10).double()
    hidden = torch.rand(3, 15) < 0.4
    options = {"num_registers": 2} if kind == "registers" else {}
    if kind == "timm":
        vit = timm.models.VisionTransformer(
            (6, 10), 2, 2, num_classes=7, embed_dim=24, depth=3, num_heads=3, reg_tokens=2
        )
        vit = randomize(vit)
    else:
        vit, _ = our_vit(**options)
    with torch.no_grad():
        expected = of_kept(vit, images, ~hidden, vit.num_prefix_tokens)
        with hide_keys(hidden, vit.num_prefix_tokens) as hiding:
            found = vit(images)
        assert (vit(images) - found).abs().max() > 1e-2  # and after the block nothing is hidden
    torch.testing.assert_close(found, expected)
    assert hiding.masked == {15 + vit.num_prefix_tokens: 3}
    assert not hiding.passed


@pytest.mark.parametrize("mask", [None, "bool", "float", "padding", "causal"])
def test_torchs_encoder_with_masks_of_its_own(mask):
    """In evaluation its fast path would look at all."""
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(22, 2, 31, batch_first=True)
    encoder = randomize(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    tokens = torch.randn(3, 13, 22).double()
    hidden = torch.zeros(3, 13, dtype=torch.bool)
    hidden[:, [2, 3, 7]] = True  # the same in all, so that the others are one batch
    kept = ~hidden[0]
    seen = torch.rand(13, 13) < 0.7
    seen.fill_diagonal_(True)
    padding = torch.zeros(3, 13, dtype=torch.bool)
    padding[1, 9:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(13).double()
    options, fewer = {
        None: ({}, {}),
        "bool": ({"mask": ~seen}, {"mask": ~seen[kept][:, kept]}),
        "float": ({"mask": causal}, {"mask": causal[kept][:, kept]}),
        "padding": (
            {"src_key_padding_mask": padding},
            {"src_key_padding_mask": padding[:, kept]},
        ),
        "causal": ({"mask": causal, "is_causal": True}, {"mask": causal[kept][:, kept]}),
    }[mask]
    with torch.no_grad():
        expected = encoder(tokens[:, kept], **fewer)
        with hide_keys(hidden) as hiding:
            found = encoder(tokens, **options)[:, kept]
    torch.testing.assert_close(found, expected)
    assert hiding.masked == {13: 2}


@pytest.mark.parametrize("kind", [torch.bool, torch.float64])
def test_torchs_function_of_heads_with_padding(kind):
    torch.manual_seed(5)
    block = randomize(nn.MultiheadAttention(22, 2))
    tokens = torch.randn(13, 3, 22).double()
    hidden, padding = torch.rand(2, 3, 13) < 0.3
    hidden[:, 0] = padding[:, 0] = False

    def attended(padding):
        given = (tokens, tokens, tokens, 22, 2, block.in_proj_weight, block.in_proj_bias)
        given += (None, None, False, 0.0, block.out_proj.weight, block.out_proj.bias)
        return F.multi_head_attention_forward(*given, key_padding_mask=padding)[0]

    expected = attended(hidden | padding)
    if kind != torch.bool:
        padding = torch.zeros(3, 13, dtype=kind).masked_fill(padding, -torch.inf)
    with hide_keys(hidden):
        torch.testing.assert_close(attended(padding), expected)


@pytest.mark.parametrize("mask", ["none", "bool", "float", "causal", "3d"])
def test_torchs_function(mask):
    torch.manual_seed(2)
    query, key, value = torch.randn(3, 2, 5, 7, 11).double().unbind()
    hidden = torch.rand(2, 7) < 0.4
    hidden[:, 0] = False
    kept = ~hidden[:, None, None]
    seen = torch.ones(7, 7, dtype=torch.bool).tril()
    bias = torch.randn(2, 5, 7, 7).double()
    options, expected = {
        "none": ({}, kept),
        "3d": ({}, kept),
        "bool": ({"attn_mask": seen}, seen & kept),
        "float": ({"attn_mask": bias}, bias.masked_fill(~kept, -torch.inf)),
        "causal": ({"is_causal": True}, seen & kept),
    }[mask]
    expected = F.scaled_dot_product_attention(query, key, value, expected)
    tensors = (query, key, value)
    if mask == "3d":  # [batch, tokens, channels]
        tensors, expected = [tensor[:, 3] for tensor in tensors], expected[:, 3]
    with hide_keys(hidden):
        found = F.scaled_dot_product_attention(*tensors, **options)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": attnkit.Causal("top_left")},
        {"mask": attnkit.Padding(torch.tensor([7, 6]))},
        {"mask": attnkit.Window(2, 2)},
        {"backend": "blockwise"},
        {"score": attnkit.Gaussian(2.0)},
        {"normalizer": "linear"},
    ],
    ids=str,
)
def test_attend_is_attend_on_fewer_keys(options):
    torch.manual_seed(3)
    query, key, value = torch.randn(3, 2, 5, 7, 11).unbind()
    hidden = torch.zeros(2, 7, dtype=torch.bool)
    hidden[0, [1, 4]] = hidden[1, [0, 5]] = True
    kept = attnkit.Padding(~hidden)
    mask = kept if options.get("mask") is None else options["mask"] & kept
    expected = attnkit.attend(query, key, value, **options | {"mask": mask})
    with hide_keys(hidden) as hiding:
        found = attnkit.attend(query, key, value, **options)
    torch.testing.assert_close(found, expected)
    assert (attnkit.attend(query, key, value, **options) - found).abs().max() > 1e-2
    assert (hiding.masked, hiding.passed) == ({7: 1}, {})


def test_a_compiled_model_and_hidings_in_each_other():
    torch.manual_seed(4)
    images = torch.randn(3, 2, 6, 10).double()
    vit, num_prefix = our_vit()
    hidden, other = torch.rand(2, 3, 15) < 0.3
    compiled = torch.compile(vit, backend="eager")
    with torch.no_grad():
        compiled(images)
        with hide_keys(hidden | other, num_prefix):
            expected = vit(images)
        with hide_keys(hidden, num_prefix), hide_keys(other, num_prefix):
            torch.testing.assert_close(compiled(images), expected)


def test_attention_of_other_keys_is_passed():
    query, key = torch.randn(2, 3, 5, 11), torch.randn(2, 3, 9, 11)
    with hide_keys(torch.ones(2, 7, dtype=torch.bool), 1) as hiding:
        assert torch.equal(
            F.scaled_dot_product_attention(query, key, key),
            attnkit.attend(query, key, key),
        )
        folded = torch.randn(6, 7, 11)  # windows or heads in the batch
        F.scaled_dot_product_attention(folded, folded, folded)
    assert not hiding.masked
    assert hiding.passed == {9: 2, 7: 1}


@pytest.mark.parametrize(
    ("hidden", "error", "message"),
    [
        (
            torch.ones(2, 7),
            TypeError,
            "hidden: expected a boolean tensor, True = hidden, got torch",
        ),
        ([True], TypeError, "hidden: expected a boolean tensor, True = hidden, got list"),
        (torch.ones(7, dtype=torch.bool), ValueError, r"hidden: expected \[batch, tokens\], got"),
    ],
)
def test_bad_hidden(hidden, error, message):
    with pytest.raises(error, match=message), hide_keys(hidden):
        pass
