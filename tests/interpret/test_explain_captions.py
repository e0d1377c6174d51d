"""Sentences explained word by word."""

import pytest
import torch
from lightning import LightningModule
from PIL import Image

import attnkit
from attnkit import capture_attention
from attnkit.core.capture.watch import watch_attention
from attnkit.models.captioning.word_decoder import END, PAD, START

GRID, WORDS, VOCABULARY = (2, 3), 5, 23


def captioner(encoder="vit", decoder="transformer"):
    encoders = {
        "vit": lambda: attnkit.ViTEncoder((16, 24), dim=12, depth=2, num_heads=3, num_registers=2),
        "cnn": lambda: attnkit.CNNEncoder((16, 24), dim=12, stages=((4,), (5,), (6,), (7,))),
        "frozen": lambda: attnkit.TimmEncoder("resnet18", (64, 96), dim=12, frozen=True),
    }
    decoders = {
        "transformer": lambda: attnkit.TransformerDecoder(
            VOCABULARY, 11, dim=12, depth=2, num_heads=3
        ),
        "recurrent": lambda: attnkit.RecurrentDecoder(VOCABULARY, 11, dim=12, memory_dim=12),
    }
    model = attnkit.Captioner(encoders[encoder](), decoders[decoder]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return model.eval()


@pytest.fixture
def images():
    return torch.randn(2, 3, 16, 24)


@pytest.fixture
def said():
    return torch.tensor([[7, 9, 4, 21, END], [5, 17, END, PAD, PAD]])


def test_relevance_is_chefers_rules_as_matrices(images, said):
    """(5), (6) and (7) on whole matrices, words and memory as one sequence."""
    model = captioner()
    before = torch.cat([torch.full((2, 1), START), said[:, :-1]], dim=1)
    with watch_attention(model) as calls:
        logits = model(images, before)
    seen = attnkit.explain(model, images, said)
    named = {call.layer: call for call in calls}
    for place in range(WORDS):
        y = logits[:, place].gather(1, said[:, place, None]).sum()
        gradients = torch.autograd.grad(y, [c.output for c in calls], retain_graph=True)
        bars = {
            layer: (call.weights() * call.weight_gradient(gradient)).relu().mean(dim=1)
            for (layer, call), gradient in zip(named.items(), gradients, strict=True)
        }
        r_ss = torch.eye(8)
        for number in range(2):
            r_ss = r_ss + bars[f"encoder.vit.blocks.{number}.attention"] @ r_ss
        r_qs = torch.zeros(2, WORDS, 8)
        for number in range(2):
            r_qs = r_qs + bars[f"decoder.blocks.{number}.attention"] @ r_qs
            r_qs = r_qs + bars[f"decoder.blocks.{number}.cross_attention"] @ r_ss[:, 2:]
        expected = r_qs[:, place, 2:].unflatten(1, GRID) * (said[:, place] != PAD)[:, None, None]
        torch.testing.assert_close(seen.words[:, place], expected, atol=1e-6, rtol=1e-5)


def test_attention_is_the_cross_attention_of_the_last_layer(images, said):
    model = captioner()
    before = torch.cat([torch.full((2, 1), START), said[:, :-1]], dim=1)
    with capture_attention(model, "decoder.blocks.*.cross_attention") as captured:
        model(images, before)
    first, last = (calls[0].mean(dim=1).unflatten(-1, GRID) for calls in captured.values())
    there = (said != PAD)[..., None, None]
    got = attnkit.explain(model, images, said, "attention")
    torch.testing.assert_close(got.words, last * there)
    both = attnkit.explain(model, images, said, "attention", layers=[0, 1]).words
    torch.testing.assert_close(both, (first + last) / 2 * there)
    expected = got.words.sum(dim=1) / torch.tensor([5, 3])[:, None, None]
    torch.testing.assert_close(got.map, expected)


def test_gradients_and_occlusion_are_of_the_logit_of_each_word(images, said):
    model = captioner("cnn")
    before = torch.cat([torch.full((2, 1), START), said[:, :-1]], dim=1)
    images.requires_grad_()
    logits = model(images, before)
    (gradient,) = torch.autograd.grad(logits[0, 2, 4] + logits[1, 2, END], images)
    patches = gradient.abs().sum(dim=1).unflatten(1, (2, 8)).unflatten(3, (3, 8)).sum(dim=(2, 4))
    got = attnkit.explain(model, images, said, "input_gradient")
    torch.testing.assert_close(got.words[:, 2], patches)
    torch.testing.assert_close(got.logit[1, 2], logits[1, 2, END].detach())
    covered = images.detach().clone()
    covered[:, :, 8:, 8:16] = 0.3
    with torch.no_grad():
        after = model(covered, before).gather(2, said[..., None])[..., 0]
    got = attnkit.explain(model, images, said, "occlusion", baseline=0.3, batch_size=4)
    expected = (got.logit - after) * (said != PAD)
    torch.testing.assert_close(got.words[:, :, 1, 1], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("decoder", ["transformer", "recurrent"])
def test_the_likeliest_sentence_is_explained_if_none_is_given(images, decoder):
    model = captioner("cnn", decoder)
    expected = model.generate(images).words
    for method in ("attention", "input_gradient", "random", "centre"):
        seen = attnkit.explain(model, images, method=method)
        assert torch.equal(seen.target, expected)
        assert seen.words.shape == (*expected.shape, *GRID)
        assert (seen.words[expected == PAD] == 0).all()


def test_a_module_of_lightning_is_left_as_it_was(images, said):
    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = captioner()

    module, state = Module().train(), torch.get_rng_state()
    seen = attnkit.explain(module, images, said)
    assert module.training
    assert module.model.decoder.training
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(seen.words, attnkit.explain(module.model, images, said).words)


def test_an_encoder_without_attention_ends_the_relevance(images, said):
    seen = attnkit.explain(captioner("cnn"), images, said)
    assert seen.notes == ["relevance ends at the encoder's output, which has no attention"]
    assert (seen.words[0] > 0).any()


def test_save_and_print(tmp_path, images, said):
    seen = attnkit.explain(captioner(), images, said)
    names = [["a", "red", "$", "dog", "."], ["cats"]]
    picture = Image.open(seen.save(tmp_path / "seen.png", names))
    assert picture.size[0] > picture.size[1]
    arrays = torch.load(seen.save(tmp_path / "seen.pt"), weights_only=True)
    assert torch.equal(arrays["words"], seen.words)
    assert "0: 5 words, mean p = 0." in repr(seen)
    assert "1: 3 words" in repr(seen)


BAD = {
    "method": ({"method": "legrad"}, ValueError, "for a captioner, got 'legrad'"),
    "map": ({"method": torch.rand(2, 2, 3)}, ValueError, "for a captioner, got Tensor"),
    "target": ({"target": 3}, TypeError, "target: expected sentences of a captioner as integers"),
    "batch": ({"target": torch.ones(3, 4).long()}, ValueError, r"sentences \[2, words\], got"),
    "word": ({"target": torch.full((2, 4), 23)}, ValueError, "expected words from 0 to 22, got 23"),
    "start": ({"target": torch.ones(2, 4).long()}, ValueError, "without START"),
    "grid": ({"grid": (2, 3)}, TypeError, "grid: a captioner has its own grid"),
    "option": ({"steps": 3}, TypeError, "steps: 'relevance' of a captioner has no options"),
    "layers": ({"layers": -1}, ValueError, "layers: 'relevance' does not use attention layers"),
    "layer": (
        {"method": "attention", "layers": 2}, ValueError, "layers: 2 is none of the 2 attention"
    ),
    "images": ({"inputs": [1]}, TypeError, "inputs: expected images as a tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_line(case, images):
    arguments, kind, message = BAD[case]
    arguments = {"inputs": images} | arguments
    with pytest.raises(kind, match=message) as raised:
        attnkit.explain(captioner("cnn"), arguments.pop("inputs"), **arguments)
    assert "\n" not in str(raised.value)


def test_relevance_needs_a_transformer_decoder(images, said):
    with pytest.raises(ValueError, match="method: 'relevance' of sentences needs a decoder whose"):
        attnkit.explain(captioner("cnn", "recurrent"), images, said, "relevance")
    assert attnkit.explain(captioner("cnn", "recurrent"), images, said).method == "attention"


def test_a_frozen_encoder_stops_the_gradient_and_is_named(said):
    with pytest.raises(RuntimeError, match="the module 'encoder' stops the gradient"):
        attnkit.explain(captioner("frozen"), torch.randn(2, 3, 64, 96), said, "input_gradient")
