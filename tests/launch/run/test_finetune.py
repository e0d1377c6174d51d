"""Runs that train a part of the model: resumed exactly, exported, predicted, swept, refused."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import attnkit as package
from attnkit.lightning.resume.checkpoints import load

SMALL = (
    "model.dim=24", "model.depth=2", "model.num_heads=2", "trainer=cpu", "trainer.max_epochs=2",
    "trainer.limit_batches=3", "data.batch_size=16", "callbacks.curves=null",
    "callbacks.classes=null", "logger.tensorboard=null", "data.augment=null",
)  # fmt: skip
KINDS = {
    "head": ("finetune=head",),
    "last_blocks": ("finetune=last_blocks", "finetune.num_blocks=1", "finetune.layer_decay=0.5"),
    "lora": ("finetune=lora", "finetune.rank=3", "finetune.targets=all", "model.dropout_p=0.2"),
    "bitfit": ("finetune=bitfit", "finetune.head_lr=0.01"),
}
EACH = [pytest.param(k, marks=() if k == "lora" else pytest.mark.slow) for k in KINDS]


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    path = tmp_path_factory.mktemp("images") / "one.png"
    Image.new("L", (8, 8), 90).save(path)
    return path


@pytest.mark.parametrize("kind", EACH)
def test_a_run_resumes_exactly_exports_and_predicts(attnkit, hers, image, kind):
    words = (*SMALL, *KINDS[kind])
    done = attnkit(*words, "run_dir=whole")
    assert done.code == 0, done.err
    stop = ("+callbacks.killer._target_=mine_of_the_tests.StopAt", "+callbacks.killer.batch=4")
    assert attnkit("--config-dir", hers, *words, *stop, "run_dir=here").code == 143
    done = attnkit("--config-dir", hers, "resume=here", "callbacks.killer=null")
    assert done.code == 0, done.err
    whole, here = (load(Path(run) / "checkpoints/last.ckpt") for run in ("whole", "here"))
    assert whole["state_dict"].keys() == here["state_dict"].keys()
    for name, tensor in whole["state_dict"].items():
        assert torch.equal(tensor, here["state_dict"][name]), name
    target = whole["hyper_parameters"]["finetune"]["_target_"]
    assert target.startswith("attnkit.finetune.")

    done = attnkit("run=predict", "ckpt=whole", f"images={image}", "run_dir=seen")
    assert done.code == 0, done.err
    alone = Path("alone.ckpt")
    alone.write_bytes(Path("whole/checkpoints/best.ckpt").read_bytes())
    done = attnkit("run=predict", "task=vit", f"ckpt={alone}", f"images={image}", "run_dir=again")
    assert done.code == 0, done.err
    first, second = (Path(run, "predictions.csv").read_text() for run in ("seen", "again"))
    assert first == second
    done = attnkit("run=export", "ckpt=whole", "run_dir=ex", "export.formats=[]")
    assert done.code == 0, done.err
    module = package.load("ex")
    assert "finetune" not in json.loads(Path("ex/export/config.json").read_text())["module"]
    assert not any("lora" in name for name, _ in module.named_parameters())
    tuned = type(module).load_from_checkpoint("whole/checkpoints/best.ckpt").eval()
    images = torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(module(images), tuned(images), rtol=1e-5, atol=1e-5)
    adapter = load_file("ex/export/adapter.safetensors")
    trained = {name for name, p in tuned.model.named_parameters() if p.requires_grad}
    assert set(adapter) == trained
    for name, tensor in adapter.items():
        assert torch.equal(tensor, tuned.model.state_dict()[name])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("finetune=lora finetune.rank=0", "finetune.rank: expected at least 1, got 0"),
        ("finetune=lora finetune.alpha=big", "finetune.alpha: expected"),
        ("finetune=lora finetune.targets=*.nothing", "matches no linear layer of ViT; it has"),
        ("finetune=lora finetune.ranks=4", "no such key; did you mean rank?"),
        ("finetune=dora", "finetune has no choice 'dora'; did you mean lora?"),
        ("task=channel finetune=lora", "has no linear layer that LoRA can adapt"),
        ("optimizer.layer_decay=0.75", "torch.optim.AdamW has no such key; finetune.layer_decay"),
    ],
)
def test_bad_words(refused, words, message):
    refused(message, "trainer=cpu", "run_dir=run", *words.split())


def test_a_task_whose_module_does_not_take_it(mine, refused):
    refused(
        "takes no argument 'finetune', so it has no effect", "finetune=lora", "run_dir=run", by=mine
    )
