"""Captions of images of their own sizes: a batch says what each of its images says alone."""

import pytest
import torch
from torch import nn

from attnkit.models.captioning.captioner import Captioner
from attnkit.models.captioning.image_encoders import CNNEncoder, ViTEncoder
from attnkit.models.captioning.recurrent_decoder import HardRecurrentDecoder, RecurrentDecoder
from attnkit.models.captioning.transformer_decoder import TransformerDecoder

VOCABULARY, WORDS, DIM = 13, 7, 20
DECODERS = {
    "transformer": lambda: TransformerDecoder(
        VOCABULARY, WORDS, dim=8, memory_dim=DIM, depth=2, num_heads=2, positions="relative"
    ),
    "recurrent": lambda: RecurrentDecoder(
        VOCABULARY, WORDS, dim=8, memory_dim=DIM, doubly_stochastic=1.0
    ),
    "hard": lambda: HardRecurrentDecoder(VOCABULARY, WORDS, dim=8, memory_dim=DIM, score="general"),
}
SENTENCES = torch.tensor([[1, 5, 6, 2, 0], [1, 7, 2, 0, 0], [1, 9, 8, 11, 2]])
GRIDS = [(2, 5), (7, 3), (1, 1)]


def captioner(decoder, **options):
    torch.manual_seed(3)
    encoder = ViTEncoder(
        20,
        3,
        patch_size=5,
        dim=DIM,
        depth=2,
        num_heads=5,
        num_registers=2,
        native=True,
        **options,
    )
    model = Captioner(encoder, DECODERS[decoder]()).double().eval()
    for parameter in model.parameters():  # at first weights are all alike, and norms do nothing
        nn.init.normal_(parameter, std=0.5)
    images = [torch.randn(3, 5 * rows, 5 * columns).double() for rows, columns in GRIDS]
    return model, images


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("positions", ["learned", "rotary2d"])
def test_a_batch_learns_and_says_what_its_images_do_alone(decoder, positions):
    model, images = captioner(decoder, positions=positions)
    pairs = list(zip(images, SENTENCES, strict=True))
    together = model(images, SENTENCES[:, :-1])
    alone = [model(image[None], words[None, :-1]) for image, words in pairs]
    torch.testing.assert_close(together, torch.cat(alone))

    terms = model.loss(images, SENTENCES)
    losses = [model.loss(image[None], words[None]) for image, words in pairs]
    counts = (SENTENCES[:, 1:] != 0).sum(dim=1).double()
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
        for number, (image, (rows, columns)) in enumerate(zip(images, GRIDS, strict=True)):
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
    torch.testing.assert_close(model(same, SENTENCES[:2]), model(torch.stack(same), SENTENCES[:2]))
    model.train().loss(images, SENTENCES)["loss"].backward()
    assert all(one.grad.isfinite().all() for one in model.parameters())


def test_what_takes_no_sizes_says_so():
    model, images = captioner("transformer")
    encoder = CNNEncoder(20, 3, dim=DIM, stages=[[8], [8]])
    with pytest.raises(TypeError, match=r"CNNEncoder takes one tensor .* got list; ViTEncoder"):
        encoder([image.float() for image in images])
    with pytest.raises(ValueError, match=r"images\[1\]: images: expected a multiple of patch_size"):
        model([images[0], torch.zeros(3, 20, 4).double()], SENTENCES[:2])
