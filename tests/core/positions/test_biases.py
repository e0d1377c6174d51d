"""Biases of positions against their formulas, and Swin's table against torchvision's and timm's."""

import pytest
import torch

from attnkit import ALiBi, Causal, RelativeBias1d, RelativeBias2d, attend


@pytest.mark.parametrize("num_heads", [1, 2, 5, 8, 12])
def test_alibi_is_its_formula(num_heads):
    bias = ALiBi(num_heads)(5, 7, offset=2)
    powers = {1: [8], 2: [4, 8], 8: range(1, 9)}
    powers[5] = [2, 4, 6, 8, 1]
    powers[12] = [*range(1, 9), 0.5, 1.5, 2.5, 3.5]
    assert bias.shape == (1, num_heads, 5, 7)
    for h, power in enumerate(powers[num_heads]):
        for i in range(5):
            for j in range(7):
                expected = -(2.0**-power) * abs(j - i - 2)
                assert bias[0, h, i, j].item() == pytest.approx(expected, rel=1e-6)


def test_alibi_under_causal_is_the_papers():
    query, key, value = torch.randn(3, 2, 3, 7, 5, dtype=torch.float64).unbind()
    alibi = ALiBi(3).double()
    papers = alibi.slopes[:, None, None] * torch.arange(7)
    symmetric = attend(query, key, value, mask=Causal(), bias=alibi(7))
    torch.testing.assert_close(symmetric, attend(query, key, value, mask=Causal(), bias=papers))


def test_relative_1d_is_its_formula():
    module = RelativeBias1d(3, 4)
    bias = module(11, 7, offset=-2)
    for i in range(11):
        for j in range(7):
            distance = max(-4, min(4, j - i + 2))
            assert torch.equal(bias[0, :, i, j], module.table[distance + 4])
    bias[:, 1].sum().backward()
    assert module.table.grad[:, 1].sum() == 77
    assert (module.table.grad[:, [0, 2]] == 0).all()


def test_relative_2d_is_its_formula():
    module = RelativeBias2d(2, 3, 5, num_prefix_tokens=1)
    bias = module()
    assert bias.shape == (1, 2, 16, 16)
    assert (bias[:, :, 0] == 0).all()
    assert (bias[..., 0] == 0).all()
    table = module.table.detach().view(5, 9, 2)
    for i in range(15):
        for j in range(15):
            entry = table[i // 5 - j // 5 + 2, i % 5 - j % 5 + 4]
            assert torch.equal(bias[0, :, i + 1, j + 1], entry)


def test_relative_2d_is_torchvisions_and_timms():
    from timm.models.swin_transformer import WindowAttention
    from torchvision.models.swin_transformer import ShiftedWindowAttention

    theirs = ShiftedWindowAttention(12, [3, 5], [0, 0], 2)
    timms = WindowAttention(12, 2, window_size=(3, 5))
    ours = RelativeBias2d(2, 3, 5)
    with torch.no_grad():
        ours.table.normal_()
        theirs.relative_position_bias_table.copy_(ours.table)
        timms.relative_position_bias_table.copy_(ours.table)
    assert torch.equal(ours(), theirs.get_relative_position_bias())
    assert torch.equal(ours()[0], timms._get_rel_pos_bias().reshape(2, 15, 15))
    # and through the attention, torchvision's with its own projections
    x = torch.randn(2, 3, 5, 12)
    with torch.no_grad():
        heads = theirs.qkv(x).flatten(1, 2).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
        output = attend(*heads.unbind(), bias=ours()).transpose(1, 2).flatten(2)
        torch.testing.assert_close(theirs.proj(output), theirs(x).flatten(1, 2))


def test_relative_2d_is_resized():
    module = RelativeBias2d(2, 3, 5, num_prefix_tokens=1)
    assert torch.equal(module.resized(3, 5).table, module.table)
    with torch.no_grad():  # a plane stays nearly one
        y, x = torch.meshgrid(torch.arange(-2.0, 3), torch.arange(-4.0, 5), indexing="ij")
        module.table.copy_(torch.stack([y, 3 * x], dim=-1).view(-1, 2))
    larger = module.resized(7, 11)
    assert larger().shape == (1, 2, 78, 78)
    table = larger.table.view(13, 21, 2)
    assert torch.allclose(table[6, 10], torch.zeros(2), atol=1e-5)  # no offset stays none
    middle = table[4:9, 7:14]
    assert torch.allclose(middle[1:, :, 0] - middle[:-1, :, 0], torch.tensor(5 / 13), atol=0.1)
    assert torch.allclose(middle[:, 1:, 1] - middle[:, :-1, 1], torch.tensor(27 / 21), atol=0.3)


def test_learned_biases_get_gradients_beside_any_mask():
    query, key, value = torch.randn(3, 2, 3, 15, 5, dtype=torch.float64).unbind()
    for module in (RelativeBias1d(3, 4), RelativeBias2d(3, 3, 5)):
        module = module.double()
        arguments = (15,) if isinstance(module, RelativeBias1d) else ()
        gradients = []
        for backend in ("auto", "reference"):
            output = attend(
                query, key, value, mask=Causal(), bias=module(*arguments), backend=backend
            )
            gradients += torch.autograd.grad(output.square().sum(), module.table)
        torch.testing.assert_close(gradients[0], gradients[1])
        assert gradients[0].abs().sum() > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ALiBi(0), "num_heads: expected at least 1, got 0"),
        (lambda: RelativeBias1d(3, 0), "max_distance: expected at least 1, got 0"),
        (lambda: RelativeBias2d(3, 0, 5), "height: expected at least 1, got 0"),
        (lambda: RelativeBias2d(3, 3, 5, num_prefix_tokens=-1), "num_prefix_tokens: expected"),
    ],
)
def test_wrong_biases_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
