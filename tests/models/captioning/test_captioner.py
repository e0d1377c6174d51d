"""Captioners: every encoder with every decoder, their grids, images of their own sizes, and that
they learn."""

import pytest
import torch
from layer_support import assert_named
from torch import nn

from attnkit.core.positions.absolute import sincos_2d
from attnkit.models.captioning.captioner import Captioner
from attnkit.models.captioning.image_encoders import (
    CNNEncoder,
    ImageEncoder,
    TimmEncoder,
    ViTEncoder,
)
from attnkit.models.captioning.recurrent_decoder import HardRecurrentDecoder, RecurrentDecoder
from attnkit.models.captioning.transformer_decoder import TransformerDecoder

VOCABULARY, WORDS, DIM = 13, 7, 20

ENCODERS = {
    "cnn": lambda: CNNEncoder((24, 40), 3, dim=DIM, stages=[[8], [8, 8], [16]]),
    "vit": lambda: ViTEncoder((24, 40), 3, patch_size=8, dim=DIM, depth=1, num_registers=2),
    "feature map": lambda: TimmEncoder("test_resnet", (64, 96), dim=DIM),
    "tokens": lambda: TimmEncoder("test_vit", (48, 32), dim=DIM, frozen=True),
}
GRIDS = {"cnn": (6, 10), "vit": (3, 5), "feature map": (2, 3), "tokens": (3, 2)}
DECODERS = {
    "transformer": lambda: TransformerDecoder(VOCABULARY, WORDS, dim=8, memory_dim=DIM,
                                              depth=2, num_heads=2, positions="relative"),
    "recurrent": lambda: RecurrentDecoder(VOCABULARY, WORDS, dim=8, memory_dim=DIM,
                                          doubly_stochastic=1.0),
    "hard": lambda: HardRecurrentDecoder(VOCABULARY, WORDS, dim=8, memory_dim=DIM,
                                         score="general"),
}  # fmt: skip
SENTENCES = torch.tensor([[1, 5, 6, 2, 0], [1, 7, 2, 0, 0]])


def some_images(encoder, count=2):
    return torch.randn(count, 3, *encoder.image_size)


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("decoder", DECODERS)
def test_every_encoder_with_every_decoder(encoder, decoder):
    model = Captioner(ENCODERS[encoder](), DECODERS[decoder]())
    images = some_images(model.encoder)
    assert model.grid == GRIDS[encoder]
    assert model.encode(images).shape == (2, model.grid[0] * model.grid[1], DIM)
    terms = model.loss(images, SENTENCES)
    terms["loss"].backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
    model.eval()
    with torch.no_grad():
        logits = model(images, SENTENCES[:, :-1])
        assert logits.shape == (2, 4, VOCABULARY)
        assert torch.equal(logits, model.decoder(model.encode(images), SENTENCES[:, :-1]))
    model.train()
    said = model.generate(
        images, "beam", num_beams=2, num_return=2, max_words=5, return_weights=True
    )
    batch, ranks, layers, heads, words, positions = said.weights.shape
    assert (batch, ranks, words) == said.words.shape
    assert (layers, heads) == ((2, 2) if decoder == "transformer" else (1, 1))
    assert said.weights.unflatten(-1, model.grid).shape[-2:] == model.grid
    assert positions == model.grid[0] * model.grid[1]
    torch.testing.assert_close(said.weights[..., 0, :].sum(-1), torch.ones(2, 2, layers, heads))


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_positions_are_places_row_by_row(name):
    """What changes in one place of the image is felt there most."""
    encoder = ENCODERS[name]().eval()
    for parameter in encoder.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    if isinstance(encoder, CNNEncoder):  # random 3 x 3 convolutions look about, in any direction
        for module in encoder.network.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.dirac_(module.weight)
    images = some_images(encoder, 1)
    before = encoder(images)
    rows, columns = encoder.grid
    height, width = (size // count for size, count in zip(encoder.image_size, encoder.grid))  # noqa: B905
    right = 0
    for row in range(rows):
        for column in range(columns):
            changed = images.clone()
            y, x = row * height, column * width
            changed[..., y : y + height, x : x + width] *= -3.0
            felt = (encoder(changed) - before).norm(dim=-1)[0]
            place = int(felt.argmax())
            assert max(abs(place // columns - row), abs(place % columns - column)) <= 1
            right += int(place == row * columns + column)
    assert right >= 0.5 * rows * columns


@torch.no_grad()
def test_the_small_networks_memory_is_what_is_seen_and_where():
    encoder = CNNEncoder((16, 24), 1, dim=8, stages=[[4], [6]], position_scale=3.0).eval()
    memory = encoder(torch.zeros(1, 1, 16, 24))[0]
    places = sincos_2d((8, 12), 8)
    # far from the edges an empty image is the same everywhere, but for the places
    inner = torch.arange(96).view(8, 12)[3:-3, 3:-3].flatten()
    seen = memory[inner] - 3.0 * places[inner]
    torch.testing.assert_close(seen, seen[:1].expand_as(seen))
    torch.testing.assert_close(seen.mean(-1), torch.zeros(len(seen)), atol=1e-5, rtol=0)


def test_frozen_networks_stay_as_they_are():
    encoder = TimmEncoder("test_resnet", 64, dim=DIM, frozen=True).train()
    before = {name: tensor.clone() for name, tensor in encoder.network.state_dict().items()}
    encoder(some_images(encoder)).sum().backward()
    assert all(torch.equal(before[n], t) for n, t in encoder.network.state_dict().items())
    assert all(parameter.grad is None for parameter in encoder.network.parameters())
    assert encoder.proj.weight.grad is not None
    thawed = TimmEncoder("test_resnet", 64).train()
    thawed(some_images(thawed)).sum().backward()
    assert all(parameter.grad is not None for parameter in thawed.network.parameters())
    assert thawed.network.training


@pytest.mark.parametrize(
    "kind", [TransformerDecoder, pytest.param(RecurrentDecoder, marks=pytest.mark.slow)]
)
def test_learns_what_it_is_shown(kind):
    """Sixteen images, each with one bright patch, and where it is in words."""
    options = {"depth": 1, "num_heads": 4} if kind is TransformerDecoder else {}
    model = Captioner(
        CNNEncoder(32, 1, dim=32, stages=[[8], [16], [32]]),
        kind(12, 4, dim=32, **options),
    )
    images, words = torch.zeros(16, 1, 32, 32), torch.ones(16, 4, dtype=torch.long)
    for number in range(16):
        row, column = divmod(number, 4)
        images[number, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = 1.0
        words[number, 1:] = torch.tensor([4 + row, 8 + column, 2])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        model.loss(images, words)["loss"].backward()
        optimizer.step()
    for options in ({}, {"method": "beam", "num_beams": 3}):
        said = model.generate(images, **options).words
        assert (said == words[:, 1:]).all(1).float().mean() >= 0.9


@pytest.mark.parametrize(
    ("name", "size", "side"), [("mixer_s32_224", 224, 7), ("test_mambaout", 160, 5)]
)
@torch.no_grad()
def test_tokens_and_maps_of_other_layouts(name, size, side):
    encoder = TimmEncoder(name, size).eval()
    images = some_images(encoder, 1)
    assert encoder.grid == (side, side)
    features = encoder.network.forward_features(images).reshape(1, side * side, encoder.dim)
    torch.testing.assert_close(encoder(images), features)


def test_names_that_do_not_decay_are_parameters():
    for encoder in ENCODERS.values():
        model = Captioner(encoder(), DECODERS["transformer"]())
        assert model.no_weight_decay() <= dict(model.named_parameters()).keys()
        assert "decoder.embedding.weight" in model.no_weight_decay()


SIZES = [(2, 5), (7, 3), (1, 1)]
OWN = torch.tensor([[1, 5, 6, 2, 0], [1, 7, 2, 0, 0], [1, 9, 8, 11, 2]])


def captioner(decoder, **options):
    torch.manual_seed(3)
    encoder = ViTEncoder(
        20, 3, patch_size=5, dim=DIM, depth=2, num_heads=5, num_registers=2, native=True, **options
    )
    model = Captioner(encoder, DECODERS[decoder]()).double().eval()
    for parameter in model.parameters():  # at first weights are all alike, and norms do nothing
        nn.init.normal_(parameter, std=0.5)
    images = [torch.randn(3, 5 * rows, 5 * columns).double() for rows, columns in SIZES]
    return model, images


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("positions", ["learned", "rotary2d"])
def test_a_batch_learns_and_says_what_its_images_do_alone(decoder, positions):
    model, images = captioner(decoder, positions=positions)
    pairs = list(zip(images, OWN, strict=True))
    together = model(images, OWN[:, :-1])
    alone = [model(image[None], words[None, :-1]) for image, words in pairs]
    torch.testing.assert_close(together, torch.cat(alone))

    terms = model.loss(images, OWN)
    losses = [model.loss(image[None], words[None]) for image, words in pairs]
    counts = (OWN[:, 1:] != 0).sum(dim=1).double()
    mean = sum(n * one["cross_entropy"] for n, one in zip(counts, losses, strict=True))
    expected = {"cross_entropy": mean / counts.sum()}
    if decoder == "recurrent":
        expected["doubly_stochastic"] = sum(one["doubly_stochastic"] for one in losses) / 3
    for name, value in expected.items():
        torch.testing.assert_close(terms[name], value)
    parameters = [one for one in model.parameters() if one.requires_grad]
    options = {"allow_unused": True, "materialize_grads": True}
    found = torch.autograd.grad(sum(terms[name] for name in expected), parameters, **options)
    wanted = torch.autograd.grad(sum(expected.values()), parameters, **options)
    assert sum(bool(gradient.any()) for gradient in wanted) > 20
    torch.testing.assert_close(found, wanted)

    for method in ("greedy", "beam"):
        said = model.generate(images, method, return_weights=True)
        for number, (image, (rows, columns)) in enumerate(zip(images, SIZES, strict=True)):
            assert model.grid_of(image) == (rows, columns)
            one = model.generate(image[None], method, return_weights=True)
            words, places = one.words.shape[1], rows * columns
            assert torch.equal(said.words[number, :words], one.words[0])
            assert not said.words[number, words:].any()
            torch.testing.assert_close(said.scores[number], one.scores[0])
            weights = said.weights[number]
            torch.testing.assert_close(weights[:, :, :words, :places], one.weights[0])
            assert not weights[..., places:].any()


def test_a_list_of_one_size_needs_no_mask_and_trains():
    model, images = captioner("transformer")
    same = [images[0], images[0].flip(-1)]
    assert model._memory(same)[1] is None
    torch.testing.assert_close(model(same, OWN[:2]), model(torch.stack(same), OWN[:2]))
    model.train().loss(images, OWN)["loss"].backward()
    assert all(one.grad.isfinite().all() for one in model.parameters())


WRONG = [
    (lambda: CNNEncoder(0), "image_size: expected a positive integer or two, got 0"),
    (lambda: CNNEncoder((8, 8, 8)), "image_size: expected a positive integer or two"),
    (lambda: CNNEncoder(32, 0), "in_channels: expected at least 1, got 0"),
    (lambda: CNNEncoder(32, stages=[]), "stages: expected positive channels"),
    (lambda: CNNEncoder(32, stages=[[8], []]), "stages: expected positive channels"),
    (lambda: CNNEncoder(32, stages=[[8], [0]]), "stages: expected positive channels"),
    (lambda: CNNEncoder((32, 3), stages=[[8]] * 3), "3 stages are too many for 32 x 3 pixels"),
    (lambda: CNNEncoder(32, dim=6), "dim: 6 is not a multiple of 4"),
    (lambda: CNNEncoder(32)(torch.zeros(1, 3, 32, 31)), "images: expected 32 x 32 pixels"),
    (lambda: CNNEncoder(20)([torch.zeros(3, 9, 9)]), "takes one tensor .* got list; ViTEncoder"),
    (
        lambda: ViTEncoder(24)([torch.zeros(3, 8, 8), torch.zeros(3, 24, 4)]),
        r"images\[1\]: images: expected a multiple of patch_size",
    ),
    (lambda: TimmEncoder("resnet19", 32), "name: expected a name of timm's registry"),
    (
        lambda: Captioner(CNNEncoder(32), TransformerDecoder(9, 5)),
        "decoder: reads a memory of 256 channels, but the encoder gives 128",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_wrong_is_named(call, message):
    assert_named(call, message)


def test_an_encoder_that_does_not_say_its_sizes_is_named():
    with pytest.raises(AttributeError, match="'ImageEncoder' object has no attribute 'dim'"):
        Captioner(ImageEncoder(32), RecurrentDecoder(11, 5, dim=8))
