"""Maps from attention and its gradients against autograd through eager weights."""

import pytest
import torch

from attnkit.interpret import explain

TOKENS = 17


def eager_weights(model, images):
    """[layers] of weights in the graph, and the logits."""
    logits = model.eager()(images)
    model.eager(False)
    return [attention.kept for attention in model.attentions], logits


def read(model):
    """The row that is read, as a distribution over tokens."""
    row = torch.zeros(TOKENS)
    row[0 if model.pooling == "class" else slice(2, None)] = 1
    return row / row.sum()


@pytest.mark.parametrize("layers", [None, [0, 2]])
def test_relevance_is_autograd_through_eager_weights(model, images, target, layers):
    weights, logits = eager_weights(model, images)
    y = logits.gather(1, target[:, None]).sum()
    matrix = torch.eye(TOKENS).expand(2, -1, -1)
    for number in layers or range(3):
        (gradient,) = torch.autograd.grad(y, weights[number], retain_graph=True)
        matrix = matrix + (gradient * weights[number]).relu().mean(dim=1) @ matrix
    expected = torch.einsum("i,bij->bj", read(model), matrix - torch.eye(TOKENS)).detach()
    got = explain(model, images, target, "relevance", layers=layers)
    torch.testing.assert_close(got.tokens, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.map, expected[:, 2:].unflatten(1, (3, 5)), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.share, expected[:, :2].sum(dim=1) / expected.sum(dim=1))
    torch.testing.assert_close(got.logit, logits.detach().gather(1, target[:, None])[:, 0])


@pytest.mark.parametrize("layers", [None, [1, 2]])
def test_rollout_is_the_product_of_eager_weights(model, images, layers):
    weights, _ = eager_weights(model, images)
    matrix = torch.eye(TOKENS).expand(2, -1, -1)
    for number in layers or range(3):
        mean = weights[number].detach().mean(dim=1)
        matrix = (mean + torch.eye(TOKENS)) / 2 @ matrix
    expected = torch.einsum("i,bij->bj", read(model), matrix)
    got = explain(model, images, method="rollout", layers=layers)
    torch.testing.assert_close(got.tokens, expected)


def test_learned_queries_carry_nothing_back_and_a_prefix_they_leave_out_has_nothing(
    vit, images, target
):
    model = vit("learned", depth=1)
    (weights,), logits = eager_weights(model, images)
    pooled = model.pool.kept
    grads = torch.autograd.grad(logits.gather(1, target[:, None]).sum(), [weights, pooled])
    pad = torch.zeros(2, 1, 2)
    even, keep = weights.mean(dim=1), torch.eye(TOKENS)
    row = torch.cat([pad, pooled.mean(dim=1)], dim=2)
    got = explain(model, images, method="rollout")
    torch.testing.assert_close(got.tokens, (row @ (even + keep) / 2)[:, 0].detach())
    even, row = ((g * w).relu().mean(dim=1) for g, w in zip(grads, (weights, pooled), strict=True))
    row = torch.cat([pad, row], dim=2)
    expected = (row @ (even + keep))[:, 0].detach()
    got = explain(model, images, target, "relevance")
    torch.testing.assert_close(got.tokens, expected, atol=1e-5, rtol=1e-5)


def test_uniform_attention_rolls_out_to_a_known_share(vit, images):
    model = vit()
    for attention in model.attentions:
        torch.nn.init.zeros_(attention.qkv.weight[:30])  # queries and keys
        torch.nn.init.zeros_(attention.qkv.bias[:30])
    even = torch.full((2, TOKENS), (1 - 2**-3) / TOKENS)
    even[:, 0] += 2**-3
    torch.testing.assert_close(explain(model, images, method="rollout").tokens, even)


def test_attention_is_the_last_layers(model, images):
    weights, _ = eager_weights(model, images)
    last = torch.einsum("i,bhij->bj", read(model), weights[-1].detach()) / 3
    got = explain(model, images, method="attention")
    torch.testing.assert_close(got.tokens, last)
    both = torch.einsum("i,lbhij->bj", read(model), torch.stack(weights[:2]).detach()) / 6
    got = explain(model, images, method="attention", layers=[0, "steps.1.*"])
    torch.testing.assert_close(got.tokens, both)


def test_value_weighted_is_the_norm_of_what_each_head_moves(model, images):
    weights, _ = eager_weights(model, images)
    last = model.attentions[-1]
    moved = torch.stack(
        [last.value[:, h] @ last.last.weight[:, 5 * h : 5 * h + 5].T for h in range(3)], dim=1
    )
    norms = moved.norm(dim=-1).detach()
    expected = torch.einsum("i,bhij,bhj->bj", read(model), weights[-1].detach(), norms) / 3
    got = explain(model, images, method="value_weighted")
    torch.testing.assert_close(got.tokens, expected)
    assert not any("projection" in note for note in got.notes)


def test_value_weighted_without_a_projection_says_so(model, images):
    model.attentions[-1].last = torch.nn.Identity()
    weights, _ = eager_weights(model, images)
    norms = model.attentions[-1].value.norm(dim=-1).detach()
    expected = torch.einsum("i,bhij,bhj->bj", read(model), weights[-1].detach(), norms) / 3
    got = explain(model, images, method="value_weighted")
    torch.testing.assert_close(got.tokens, expected)
    assert any("no output projection of 'steps.2.attention'" in note for note in got.notes)


@pytest.mark.parametrize("layers", [None, [0, 2]])
def test_legrad_is_autograd_through_eager_weights(model, images, target, layers):
    maps = []
    for number in layers or [0, 1, 2]:
        tokens = model.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([model.prefix.expand(2, -1, -1), tokens], dim=1) + model.table
        tokens = model.eager().steps[: number + 1](tokens)
        y = model.end(tokens).gather(1, target[:, None]).sum()
        (gradient,) = torch.autograd.grad(y, model.attentions[number].kept)
        maps.append(gradient.relu().mean(dim=(1, 2)))
        model.eager(False)
    got = explain(model, images, target, "legrad", layers=layers)
    torch.testing.assert_close(got.tokens, torch.stack(maps).mean(dim=0), atol=1e-5, rtol=1e-5)
    assert "forward" not in vars(model.steps[0])


def test_grad_cam_weighs_the_channels_of_what_the_last_attention_reads(model, images, target):
    given = []
    handle = model.steps[-1].norm.register_forward_hook(lambda *call: given.append(call[-1]))
    y = model(images).gather(1, target[:, None]).sum()
    handle.remove()
    (gradient,) = torch.autograd.grad(y, given)
    weights = gradient[:, 2:].mean(dim=1, keepdim=True)
    expected = (given[0][:, 2:] * weights).sum(dim=-1).relu().unflatten(1, (3, 5)).detach()
    got = explain(model, images, target, "grad_cam")
    torch.testing.assert_close(got.map, expected)
    assert got.tokens is None
    assert got.share is None
