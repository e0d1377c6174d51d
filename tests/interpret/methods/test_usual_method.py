"""The method of whoever asks for none."""

import pytest
import torch
from torch import nn

import attnkit
from attnkit.models.captioning.word_decoder import END


def captioner(decoder):
    encoder = attnkit.ViTEncoder((16, 16), 3, dim=16, depth=1, num_heads=2, patch_size=4)
    return attnkit.Captioner(encoder, decoder(17, 7, dim=16))


def network(attention):
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)
    return nn.Sequential(nn.Conv2d(3, 6, 3), attention, nn.ReLU(), *head)


MODELS = {
    "spatial": (lambda: network(attnkit.SpatialAttention(6, residual=None)), "relevance"),
    "spatial as identity": (lambda: network(attnkit.SpatialAttention(6)), "input_gradient"),
    "channel": (lambda: network(attnkit.ChannelAttention(6)), "grad_cam"),
    "transformer": (lambda: captioner(attnkit.TransformerDecoder), "relevance"),
    "lstm": (lambda: captioner(attnkit.RecurrentDecoder), "attention"),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_first_that_serves_the_model_is_taken(name):
    torch.manual_seed(0)  # of some weights relevance sees nothing
    make, method = MODELS[name]
    model, images = make().eval(), torch.rand(2, 3, 16, 16)
    words = torch.tensor([[5, END]] * 2) if isinstance(model, attnkit.Captioner) else None
    seen = attnkit.explain(model, images, words)
    assert seen.method == method
    why = f"method '{method}', since 'relevance' does not serve the model: "
    assert any(note.startswith(why) for note in seen.notes) == (method != "relevance")
