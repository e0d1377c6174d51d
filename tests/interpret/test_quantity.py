"""What is reported of a class: found from the head, or asked for; the same in all that is said."""

import pytest
import torch
from torch import nn

import attnkit
from attnkit.interpret.quantity import quantity_of
from attnkit.models.captioning.word_decoder import END

LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.1, 0.2, 0.3]])


def test_the_quantity_is_that_of_the_head():
    torch.testing.assert_close(quantity_of(LOGITS)(LOGITS), LOGITS.softmax(dim=1))
    single = LOGITS[:, :1]
    torch.testing.assert_close(quantity_of(single)(single), single.sigmoid())
    p = LOGITS.softmax(dim=1)
    assert torch.equal(quantity_of(p)(p), p)
    assert quantity_of(p).meaning == "the model's output, which sums to 1"
    for dtype in (torch.bfloat16, torch.float16):
        half = torch.randn(2, 1000).softmax(dim=1).to(dtype).float()
        assert torch.equal(quantity_of(half)(half), half)
    near = p * 1.01  # logits that happen to sum to almost 1
    torch.testing.assert_close(quantity_of(near)(near), near.softmax(dim=1))
    torch.testing.assert_close(quantity_of(LOGITS, "sigmoid")(LOGITS), LOGITS.sigmoid())
    assert torch.equal(quantity_of(LOGITS, "logit")(LOGITS), LOGITS)
    assert quantity_of(LOGITS, torch.exp).symbol == "exp"
    assert [quantity_of(LOGITS, of).is_usual for of in ("probability", "sigmoid")] == [True, False]


def test_what_is_no_quantity_is_refused():
    with pytest.raises(ValueError, match="of: expected probability, sigmoid, logit or a function"):
        quantity_of(LOGITS, "loss")
    with pytest.raises(TypeError, match=r"of: expected sum to return a number for each logit, \["):
        quantity_of(LOGITS, torch.sum)(LOGITS)


def network(head=None):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(128, 5), *([head] if head else []))


def test_a_model_that_ends_in_a_softmax_gets_no_second_one():
    images = torch.randn(2, 3, 16, 16)
    model = network(nn.Softmax(dim=1)).eval()
    seen = attnkit.explain(model, images, 1, "input_gradient")
    torch.testing.assert_close(seen.probability, model(images)[:, 1].detach())
    assert seen.notes[-1] == "p: the model's output, which sums to 1"
    trust = seen.trust(removals=["mean"], grid=(4, 4))
    torch.testing.assert_close(trust.curves["mean"]["map"][0, :, 0], seen.probability)
    assert str(trust).endswith("p is the model's output, which sums to 1.")


@pytest.mark.parametrize(
    ("of", "symbol", "function"),
    [
        ("sigmoid", "p", torch.sigmoid),
        ("logit", "y", lambda logits: logits),
        (torch.exp, "exp", torch.exp),
    ],
)
def test_what_is_asked_for_is_in_curves_and_sentences(of, symbol, function):
    images, model = torch.randn(2, 3, 16, 16), network().eval()
    seen = attnkit.explain(model, images, 1, "input_gradient", of=of)
    expected = function(model(images))[:, 1].detach()
    torch.testing.assert_close(seen.probability, expected)
    assert f"class 1 (predicted), {symbol} = " in repr(seen) or f"), {symbol} = " in repr(seen)
    trust = seen.trust(removals=["mean"], grid=(4, 4))
    torch.testing.assert_close(trust.curves["mean"]["map"][0, :, 0], expected)
    assert trust[f"gap in {symbol}, mean colour"].within > 0
    assert f"the mean {symbol} of 2 images" in str(trust)
    curves = attnkit.perturbation_curves(model, images, 1, seen.map, of=of, grid=(4, 4))
    torch.testing.assert_close(curves.most_first[:, 0], expected)


def test_of_edges_and_words():
    gat, edges = attnkit.GAT(5, 8, 3, heads=2).eval(), torch.randint(11, (2, 40))
    x = torch.randn(11, 5)
    seen = attnkit.explain(gat, (x, edges), 2, index=int(edges[1, 0]), of="logit")
    y = gat(x, edges)[edges[1, 0], 2].detach()
    torch.testing.assert_close(seen.probability, y)
    assert f"y = {float(y):.3f}" in repr(seen)
    assert seen.fidelity().probability == pytest.approx(float(y))
    assert "y(2) goes from" in str(seen.trust())
    encoder = attnkit.ViTEncoder((16, 16), 3, dim=16, depth=1, num_heads=2, patch_size=4)
    captioner = attnkit.Captioner(encoder, attnkit.TransformerDecoder(17, 7, dim=16)).eval()
    said = torch.tensor([[5, 9, END]])
    seen = attnkit.explain(captioner, torch.randn(1, 3, 16, 16), said, "attention", of="sigmoid")
    torch.testing.assert_close(seen.probability, seen.logit.sigmoid())
    trust = seen.trust()
    assert trust.scores[0][1].probability == pytest.approx(float(seen.probability[0, 1]), abs=1e-5)


def test_explanations_of_half_precision_are_saved(tmp_path):
    model = attnkit.ViT(image_size=16, patch_size=4, num_classes=5, dim=12, depth=1, num_heads=3)
    images = torch.randn(1, 3, 16, 16).bfloat16()
    for method in ("relevance", "grad_cam", "input_gradient", "integrated_gradients"):
        seen = attnkit.explain(model.bfloat16(), images, method=method)
        assert seen.map.dtype == torch.float32
        assert seen.save(tmp_path / f"{method}.npz").exists()
