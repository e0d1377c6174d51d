"""What an explanation is said to cost, against what goes through the model."""

import pytest
import timm
import torch

import attnkit
from attnkit.interpret.report import Report
from attnkit.lightning import Explained
from attnkit.models.captioning.word_decoder import PAD


@pytest.fixture
def counted(tmp_path):
    """A function that makes a report, and gives how many images it was said to take and took."""

    def count(report, explained):
        images = []
        explained.model.register_forward_pre_hook(lambda _, args: images.append(len(args[0])))
        said = report.num_forwards(explained)
        report(explained, tmp_path)
        return said, sum(images)

    return count


@pytest.mark.parametrize("trust", ["none", "fast", "full"])
def test_of_images(counted, trust):
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=(12, 20), patch_size=4, depth=2, embed_dim=24,
        num_heads=2, num_classes=3,
    )  # fmt: skip
    images = torch.randn(3, 3, 12, 20)
    report = Report(methods=["relevance", "attention"], trust=trust)
    said, took = counted(report, Explained(model.eval(), images, pictures=images))
    assert said == pytest.approx(took, rel=0.25)


@pytest.mark.parametrize("trust", ["none", "fast", "full"])
def test_of_sentences(counted, trust):
    torch.manual_seed(0)
    model = attnkit.Captioner(
        attnkit.ViTEncoder((16, 24), 3, dim=12, depth=1, num_heads=3, patch_size=4),
        attnkit.TransformerDecoder(17, 7, dim=12, depth=2, num_heads=3),
    ).eval()
    images = torch.randn(2, 3, 16, 24)
    said = model.generate(images).words
    words = [[str(number) for number in row if number != PAD] for row in said.tolist()]
    explained = Explained(model, images, pictures=images, sentences=said, words=words)
    said, took = counted(Report(method="attention", trust=trust), explained)
    assert said == pytest.approx(took, rel=0.25, abs=6)
