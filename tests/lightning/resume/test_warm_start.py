"""Every task starts from the weights of an earlier run whose head is another."""

import pytest
import torch
from torch import nn

from attnkit.core.positions.absolute import resize_positions
from attnkit.finetune import lora
from attnkit.lightning import UserError, warm_start
from attnkit.lightning.resume import checkpoints
from attnkit.tasks.captioning import ImageCaptioning, WordTokenizer
from attnkit.tasks.graphs import NodeClassification
from attnkit.tasks.image_classification import ImageClassification

IMAGES = {"image_size": 12, "in_channels": 1}
SEEN = {**IMAGES, "mean": [0.5], "std": [0.5]}
VIT = {"_target_": "attnkit.ViT", **IMAGES, "patch_size": 3, "dim": 20, "depth": 2, "num_heads": 2}
WORDS = ["a", "red", "blue", "disc", "square", "left", "of"]


def vit(classes, class_names=None, **changes):
    options = {**VIT, "num_classes": classes, **changes}
    seen = {**SEEN, "image_size": options["image_size"], "class_names": class_names}
    return ImageClassification(options, num_classes=classes, **seen)


def spatial(classes):
    model = {
        "_target_": "attnkit.tasks.image_classification.attention_network",
        "backbone": {"_target_": "attnkit.models.ResNet", "_partial_": True, "num_blocks": 1,
                     "widths": [6, 7]},
        "attention": {"_target_": "attnkit.SpatialAttention", "_partial_": True}, **IMAGES,
        "num_classes": classes,
    }  # fmt: skip
    return ImageClassification(model, num_classes=classes, **SEEN)


def gat(classes):
    model = {"_target_": "attnkit.GAT", "in_channels": 5, "hidden_channels": 14, "heads": 2,
             "num_classes": classes}  # fmt: skip
    return NodeClassification(model, num_classes=classes, in_channels=5)


def captioner(words, tied=True):
    tokenizer = WordTokenizer(WORDS[:words] if isinstance(words, int) else words)
    model = {
        "_target_": "attnkit.Captioner",
        "encoder": {"_target_": "attnkit.CNNEncoder", **IMAGES, "dim": 8, "stages": [[4], [6]]},
        "decoder": {"_target_": "attnkit.TransformerDecoder", "dim": 8, "num_heads": 2,
                    "depth": 1, "vocabulary_size": len(tokenizer), "max_words": 9,
                    "tie_embeddings": tied},
    }  # fmt: skip
    return ImageCaptioning(model, vocabulary=tokenizer.to_dict(), max_words=9, **SEEN)


TASKS = {"vit": vit, "spatial": spatial, "graph": gat, "captioning": captioner}


def saved(module, path):
    hyper_parameters = dict(module.hparams)
    checkpoints.save(
        {"state_dict": module.state_dict(), "hyper_parameters": hyper_parameters}, path
    )
    return path


@pytest.mark.parametrize("task", TASKS)
def test_every_task_starts_with_another_head(tmp_path, task):
    earlier, module = TASKS[task](4), TASKS[task](7)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    said = warm_start(module, saved(earlier, tmp_path / "earlier.ckpt"))
    there = earlier.state_dict()
    here = module.state_dict()
    new = {name for name, tensor in here.items() if not torch.equal(tensor, there[name])}
    assert f"init: weights of {tmp_path}/earlier.ckpt; its head is left out: " in said
    assert "\n" not in said
    assert new
    for name in new:
        (apart,) = {a - b for a, b in zip(here[name].shape, there[name].shape, strict=True)} - {0}
        assert apart == 3, name
        assert torch.equal(here[name], before[name]), name


def test_a_head_that_fits_is_kept(tmp_path):
    earlier, module = vit(4), vit(4)
    earlier.mean.fill_(0.125)
    said = warm_start(module, saved(earlier, tmp_path / "earlier.ckpt"))
    assert said == f"init: weights of {tmp_path}/earlier.ckpt"
    assert module.mean.item() == 0.5  # that of this run
    for name, tensor in earlier.model.state_dict().items():
        assert torch.equal(module.model.state_dict()[name], tensor), name


CATS = ["cat", "dog", "eel", "fox"]


@pytest.mark.parametrize("names", [["ape", "dog", "eel", "gnu"], ["dog", "cat", "eel", "fox"]])
def test_as_many_other_classes_have_another_head(tmp_path, names):
    earlier, module = vit(4, CATS), vit(4, names)
    before = {name: tensor.clone() for name, tensor in module.model.state_dict().items()}
    said = warm_start(module, saved(earlier, tmp_path / "earlier.ckpt"))
    assert "earlier.ckpt; its head is left out: class 'cat' there is " in said
    assert said.count(" there is ") == 2
    for name, tensor in module.model.state_dict().items():
        kept = before if name.startswith("head.") else earlier.model.state_dict()
        assert torch.equal(tensor, kept[name]), name


@pytest.mark.parametrize("classes", [(CATS, CATS), (None, CATS), (CATS, None)])
def test_the_same_classes_or_unknown_ones_keep_the_head(tmp_path, classes):
    earlier, module = (vit(4, names) for names in classes)
    said = warm_start(module, saved(earlier, tmp_path / "earlier.ckpt"))
    assert said.endswith("earlier.ckpt")
    assert torch.equal(module.model.head.weight, earlier.model.head.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_as_many_other_words_have_another_head(tmp_path, tied):
    """And another embedding; a width of as many channels as there are words is not confused."""
    words = ["one", "two", "six", "ten"]  # with the special words eight, as wide as the network
    earlier, module = captioner(WORDS[:4], tied), captioner(words, tied)
    before = {name: tensor.clone() for name, tensor in module.model.state_dict().items()}
    said = warm_start(module, saved(earlier, tmp_path / "earlier.ckpt"))
    assert "; its head is left out: word 'a' there is 'one' here; word 'red' there is " in said
    assert said.endswith("; and 1 more")
    new = ("decoder.head.", "decoder.embedding.")
    for name, tensor in module.model.state_dict().items():
        kept = before if name.startswith(new) else earlier.model.state_dict()
        assert torch.equal(tensor, kept[name]), name
    same = captioner(WORDS[:4], tied)
    assert warm_start(same, tmp_path / "earlier.ckpt").endswith("earlier.ckpt")


def test_weights_without_a_run(tmp_path):
    """A plain state dict does not say how many classes it was for."""
    earlier, module = vit(4), vit(7)
    torch.save(earlier.model.state_dict(), tmp_path / "net.pth")
    said = warm_start(module, tmp_path / "net.pth")
    assert said.endswith(
        "its head is left out: head.weight is [4, 20] there, [7, 20] here; "
        "head.bias is [4] there, [7] here"
    )
    trunk = {n: t for n, t in earlier.model.state_dict().items() if not n.startswith("head.")}
    torch.save(trunk, tmp_path / "trunk.pth")
    said = warm_start(module, tmp_path / "trunk.pth")
    assert said.endswith("left out: head.weight is only here; head.bias is only here")
    assert torch.equal(module.model.class_token, earlier.model.class_token)


def test_positions_are_resampled_and_lora_stays(tmp_path):
    earlier, module = vit(4), vit(4, image_size=[18, 24])
    lora(module.model, rank=2)
    nn.init.normal_(earlier.model.position_table)
    warm_start(module, saved(earlier, tmp_path / "earlier.ckpt"))
    expected = resize_positions(earlier.model.position_table, (4, 4), (6, 8))
    assert torch.equal(module.model.position_table, expected)
    block = "blocks.1.mlp.fc1.weight"
    assert torch.equal(module.model.state_dict()[block], earlier.model.state_dict()[block])


def test_a_copy_beside_the_network(tmp_path):
    """As of averaged weights: of the same kind of module it is known which is which."""
    earlier, module = vit(4), vit(4)
    for each in (earlier, module):
        each.average = vit(4).model
    path = saved(earlier, tmp_path / "earlier.ckpt")
    with pytest.raises(UserError, match=r"earlier.ckpt: .* under 'average\.' and 'model\.'"):
        warm_start(vit(4), path)
    warm_start(module, path)
    assert torch.equal(module.model.class_token, earlier.model.class_token)


def test_another_network_is_refused_and_nothing_is_changed(tmp_path):
    module = vit(7)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    path = saved(vit(4, dim=40, num_registers=2), tmp_path / "earlier.ckpt")
    with pytest.raises(UserError) as error:
        warm_start(module, path)
    said = str(error.value)
    assert said.startswith(
        f"init: {path} does not fit the model: class_token is [1, 1, 40] there, "
    )
    assert "there, [1, 1, 20] here; " in said
    assert said.endswith(" more")
    assert "\n" not in said
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name

    path = saved(vit(4, mlp_ratio=2.0), tmp_path / "wider.ckpt")
    with pytest.raises(UserError, match=r"mlp.fc1.weight is \[40, 20\] there, \[80, 20\] here"):
        warm_start(module, path)
