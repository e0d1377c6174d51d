"""Every shipped configuration of every group composes and trains two batches.

Every kind of task is checked and predicted with, too.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from attnkit.launch.config.compose import Composer
from attnkit.launch.main import main
from attnkit.tasks.image_classification import CIFAR10Data, MemoryImages

CONF = Path(__file__).resolve().parent.parent / "conf"
FILES = sorted(p.relative_to(CONF) for p in CONF.glob("*/*.yaml"))
ELSEWHERE = {Path("trainer/cpu_ddp.yaml")}  # takes its steps in launch/test_vit.py
QUICK_EXPERIMENTS = {"cifar10_resnet", "cifar10_vit", "dictionary_lookup", "digits_quick"}


def _experiments():
    """A run of each experiment that is none of these, with the task and data that it chooses."""
    for path in sorted(CONF.glob("experiment/*.yaml")):
        content = yaml.safe_load(path.read_text())
        if "script" in content["record"]:
            ELSEWHERE.add(path.relative_to(CONF))  # launch/test_records.py
        elif path.stem not in QUICK_EXPERIMENTS:
            lines = content.get("defaults", [])
            chosen = {key.split("/")[1]: value for line in lines for key, value in line.items()}
            data = chosen.get("data") or DATA_OF[chosen.get("task", "vit")]
            yield f"task={chosen.get('task', 'vit')} data={data} experiment={path.stem} trainer=cpu"


DATA_OF = {"vit": "digits", "spatial": "digits", "captioning": "scenes", "graph": "digits_graph"}
# Checked, trained, and predicted with: every task; task=channel is task=spatial in this.
WHOLE = [
    "task=vit model=vit data=digits trainer=cpu logger=default",
    "task=spatial model=cnn backbone=resnet attention=spatial callbacks=ema trainer=auto",
    "task=captioning model=captioner data=scenes callbacks=looks trainer=cpu",
    "task=vit level=image_values data=image_csv trainer=cpu",
    "task=segmentation model=segmenter backbone=vit decoder=linear data=scene_masks trainer=cpu",
    "task=graph level=node model=gatv2 data=digits_graph callbacks=default trainer=cpu",
    "task=graph level=link model=gatv2 data=digits_graph trainer=cpu",
    "task=graph level=graph model=gps data=digit_grids trainer=cpu",
]
# Trained, the rest of the groups: a file that needs no run of its own goes with another's.
TRAINED = [
    "task=channel level=image attention=channel data=image_folder optimizer=adam trainer=cpu",
    "task=graph model=graph_transformer data=pyg optimizer=muon trainer=cpu",
    "task=vit model=vit_tiny data=needle_digits optimizer=adamw callbacks=default trainer=cpu",
    "task=vit model=vit_small optimizer=sgd scheduler=constant finetune=full trainer=cpu",
    "task=graph level=graph_values model=sgformer trainer=cpu",
    "task=graph level=graph model=gat data=pyg_graphs trainer=cpu",
    "task=graph level=graph data=graphs_files trainer=cpu",
    "task=graph level=node_values data=digits_values trainer=cpu",
    "task=graph level=node_values model=gat data=ppi trainer=cpu",
    "task=graph model=gat data=planetoid optimizer=adamw trainer=cpu",
    "task=graph model=exphormer data=graph_files trainer=cpu",
    "task=graph model=sgformer data=infection trainer=cpu",
    "task=graph model=polynormer data=ogb_files trainer=cpu",
    "task=graph model=gat_sep data=heterophilous scheduler=warmup_cosine trainer=cpu",
    "task=graph data=dictionary_lookup experiment=dictionary_lookup trainer=cpu",
    "task=vit experiment=digits_quick logger=wandb finetune=last_blocks callbacks=early_stopping"
    " scheduler=plateau trainer=cpu",
    *(f"task=vit trainer={trainer}" for trainer in ("gpu", "ddp", "fsdp")),
    "task=vit model=timm scheduler=polynomial trainer=cpu",
    "task=vit model=transformers data=digits trainer=cpu",
    "task=vit experiment=cifar10_vit data=image_folder trainer=cpu",
    "task=channel experiment=cifar10_resnet attention=eca data=image_folder trainer=cpu",
    "task=spatial backbone=timm attention=se data=cifar10 finetune=head scheduler=step trainer=cpu",
    "task=spatial attention=window data=planted_shortcut trainer=cpu",
    "task=channel attention=danet data=digit_grid callbacks=interpret trainer=cpu",
    # The attention of test_exports.py, where each of these is quickly made from its file.
    *(
        pytest.param(f"task=spatial attention={name} trainer=cpu", marks=pytest.mark.slow)
        for name in (
            *("axial", "bam", "cbam", "context", "coordinate", "criss_cross", "none", "scse"),
            *("transposed", "xca"),
        )
    ),
    "task=captioning encoder=cnn decoder=transformer data=caption_csv finetune=bitfit trainer=cpu",
    "task=captioning encoder=timm decoder=lstm data=coco_captions trainer=cpu",
    "task=captioning encoder=vit decoder=lstm_hard data=karpathy finetune=lora trainer=cpu",
    "task=segmentation decoder=convolutional data=segmentation_files finetune=lora trainer=cpu",
    "task=segmentation decoder=queries backbone=timm finetune=head trainer=cpu",
    pytest.param("task=vit model=vit_base trainer=cpu", marks=pytest.mark.slow),
    *(pytest.param(run, marks=pytest.mark.slow) for run in _experiments()),
]
QUICK = (
    "trainer.max_epochs=1", "trainer.limit_batches=2", "data.batch_size=3", "callbacks.last=null",
    "callbacks.curves=null", "logger.tensorboard=null",
)  # fmt: skip
# Attention that is none of torch's, or none.
WITHOUT_KERNELS = {"bam", "cbam", "coordinate", "eca", "none", "scse", "se"}


def test_there_are_configurations():
    assert len(FILES) >= 18
    groups = {path.parent.name for path in FILES}
    assert {"task", "model", "data", "optimizer", "scheduler", "trainer", "callbacks"} <= groups


@pytest.mark.parametrize("path", ["config.yaml", *map(str, FILES)])
def test_says_what_it_is(path):
    first = (CONF / path).read_text().removeprefix("# @package _global_\n").splitlines()[0]
    assert first.startswith("# ")
    assert len(first) > 20


def _chosen(run):
    """The choices of a run, by their groups."""
    return dict(choice.split("=") for choice in run.split(" "))


def test_every_configuration_is_trained():
    runs = WHOLE + [getattr(run, "values", [run])[0] for run in TRAINED]
    chosen = {
        Path(group, f"{choice}.yaml") for run in runs for group, choice in _chosen(run).items()
    }
    assert chosen == set(FILES) - ELSEWHERE


@pytest.mark.parametrize("run", WHOLE)
def test_checks_trains_and_predicts(run, arranged, tmp_path, capfd):
    command = arranged(run)
    before = set(tmp_path.rglob("*"))
    assert main(["run=check", *command]) == 0, capfd.readouterr().err
    assert set(tmp_path.rglob("*")) == before
    said = capfd.readouterr().out
    assert "multiply-adds of a sample" in said
    assert ("kernel of" in said) == (not set(_chosen(run).values()) & WITHOUT_KERNELS)
    _trains(command, tmp_path / "run", capfd)
    predict = ["run=predict", f"ckpt={tmp_path / 'run'}", f"run_dir={tmp_path / 'predicted'}"]
    if "task=graph" in command:  # all of them
        predict.append("data.batch_size=600")
    else:
        predict.append(f"images={_pictures(tmp_path / 'pictures')}")
    assert main(predict) == 0, capfd.readouterr().err
    rows = (tmp_path / "predicted" / "predictions.csv").read_text().splitlines()
    assert len(rows) > 2


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ("learned", 0.5),
        ("factorized2d", 0.5),
        ("sincos2d", None),
        ("null", None),
    ],
)
def test_spread_of_positions_is_given_to_learned_ones_only(positions, expected):
    config = Composer().compose(["task=vit", f"model.positions={positions}"])
    assert config.model.position_std == expected


@pytest.mark.parametrize("run", TRAINED)
def test_trains(run, arranged, tmp_path, capfd):
    trainer = _chosen(run)["trainer"]
    if trainer in ("gpu", "ddp", "fsdp") and not torch.cuda.is_available():
        assert main([*arranged(run), f"run_dir={tmp_path / 'run'}"]) == 2
        assert "trainer: " in capfd.readouterr().err
        assert not (tmp_path / "run").exists()
        return
    reports = ("classes", "nodes") if "task=graph" in run else ("classes",)
    reports = () if "level=graph_values" in run else reports
    reports = ("nodes",) if "level=node_values" in run else reports
    without = [f"callbacks.{name}=null" for name in reports]
    _trains([*arranged(run), *without], tmp_path / "run", capfd)


def _trains(command, run, capfd):
    assert main([*command, f"run_dir={run}"]) == 0, capfd.readouterr().err
    results = json.loads((run / "results.json").read_text())
    assert results["steps"] == 2
    figure = "test/bleu1" if "task=captioning" in command else "test/accuracy"
    if "test/mae" in results:  # in pixels
        assert 0 <= results["test/mae"] <= 8
    else:
        assert 0 <= results[figure] <= 1


@pytest.fixture
def arranged(graph_files, tmp_path, monkeypatch):
    """Makes the command of a run: small, and on data that are made up."""
    monkeypatch.chdir(tmp_path)
    return lambda run: _arranged(run, graph_files, tmp_path, monkeypatch)


def _arranged(run, graph_files, tmp_path, monkeypatch):
    chosen = _chosen(run)
    data = chosen.get("data")
    command = [*run.split(" "), *QUICK]
    if chosen.get("logger") == "wandb":
        pytest.importorskip("wandb.sdk")  # not the folder of that name
        command.append("logger.wandb.offline=true")
    if chosen["task"] == "captioning":
        command += ["encoder.dim=16", "decoder.dim=16"]
        if chosen.get("encoder") == "timm":
            command.append("encoder.name=test_resnet")
        if data == "scenes":
            command += ["data.num_train=9", "data.num_val=3", "data.num_test=3"]
        else:
            command += _captions(data, tmp_path / "captions")
    elif chosen["task"] == "segmentation":
        timm = chosen.get("backbone") == "timm"
        command.append("backbone.name=test_vit" if timm else "backbone.dim=24")
        if data == "segmentation_files":
            command.append(f"data.root={_masks(tmp_path / 'masked')}")
        else:
            command += ["data.num_train=9", "data.num_val=3", "data.num_test=3"]
    elif chosen["task"] in ("spatial", "channel"):
        timm = chosen.get("backbone") == "timm"
        command.append("backbone.name=test_resnet" if timm else "backbone.num_blocks=1")
    elif chosen.get("model") == "timm":
        command += ["model.name=test_vit", "data.image_size=32"]
    elif chosen.get("model") == "transformers":
        kind = pytest.importorskip("transformers").ViTModel
        sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3}
        tower = kind(kind.config_class(**sizes, image_size=8, patch_size=4, num_channels=1))
        tower.save_pretrained(tmp_path / "tower")
        command.append(f"model.weights={tmp_path / 'tower'}")
    elif chosen["task"] == "vit":
        command += ["model.depth=1", *([] if "model" in chosen else ["model.dim=24"])]
    name = None
    if "experiment" in chosen:
        path = CONF / "experiment" / f"{chosen['experiment']}.yaml"
        name = yaml.safe_load(path.read_text()).get("data", {}).get("name")
        command += ["seeds=1", "splits=null"]
    if data == "planetoid":
        graph_files.write_planetoid(tmp_path / "graph", name or "Cora", isolated=())
        command.append(f"data.root={tmp_path / 'graph'}")
    if data == "heterophilous":
        np.savez(tmp_path / f"{name or 'minesweeper'}.npz", **graph_files.heterophilous_arrays())
        command.append(f"data.root={tmp_path}")
    if data == "graph_files":
        command.append(f"data.root={graph_files.write_own(tmp_path / 'mine')}")
    if data == "graphs_files":
        made = graph_files.write_own(tmp_path / "mine", graph_files.graphs_arrays(4))
        command.append(f"data.root={made}")
    if data == "ppi":
        pytest.importorskip("networkx", minversion="3.4")  # with older ones PyG cannot read it
        graph_files.write_ppi(tmp_path / "ppi")
        command.append(f"data.root={tmp_path / 'ppi'}")
    if data == "ogb_files":
        graph_files.write_ogb(tmp_path / "ogb")
        command.append(f"data.root={tmp_path / 'ogb'}")
    if data == "image_folder":
        command.append(f"data.root={_images(tmp_path / 'images')}")
    if data == "image_csv":
        paths = sorted(_images(tmp_path / "images").rglob("*.png"))
        table = tmp_path / "images" / "table.csv"
        rows = [f"{path},{'a|b' if number % 2 else 'b'}" for number, path in enumerate(paths)]
        table.write_text("\n".join(["path,labels", *rows]))
        command.append(f"data.table={table}")
    if data == "cifar10":  # 170 MB that are not here: random images of its size instead
        monkeypatch.setattr(CIFAR10Data, "load", _random_images)
        monkeypatch.setattr(CIFAR10Data, "prepare_data", lambda self: None)
    return command


def _pictures(root):
    root.mkdir()
    for number in range(2):
        Image.new("RGB", (33, 31), (number * 90, 70, 110)).save(root / f"{number}.png")
    return root


def _images(root):
    for name in ("cats", "dogs"):
        (root / "train" / name).mkdir(parents=True)
        for number in range(7):
            Image.new("RGB", (19, 17), (number * 30, 70, 110)).save(
                root / "train" / name / f"{number}.png"
            )
    return root


def _masks(root):
    for number in range(9):
        picture = Image.effect_mandelbrot((32, 32), (-2, -1, 1, 1), number + 2)
        mask = picture.point(lambda value: int(value > 40))
        for folder, made in (("images", picture.convert("RGB")), ("masks", mask)):
            (root / folder).mkdir(parents=True, exist_ok=True)
            made.save(root / folder / f"{number}.png")
    return root


def _captions(choice, root):
    """Twenty captioned pictures in the form of a data set, and the keys that say where they are."""
    root.mkdir()
    names = [f"{number}.png" for number in range(20)]
    for number, name in enumerate(names):
        Image.new("RGB", (32, 32), (number * 10, 70, 110)).save(root / name)
    sentences = [f"a picture number {number}" for number in range(20)]
    file = root / "captions.json"
    command = [f"data.annotations={file}", f"data.images={root}", "data.min_count=1"]
    if choice == "caption_csv":
        rows = [f"{name},{sentence}" for name, sentence in zip(names, sentences, strict=True)]
        (root / "captions.csv").write_text("\n".join(["image,caption", *rows]))
        return [f"data.table={root / 'captions.csv'}", "data.min_count=1"]
    if choice == "karpathy":
        images = [
            {"filename": name, "split": "train", "sentences": [{"raw": sentence}]}
            for name, sentence in zip(names, sentences, strict=True)
        ]
        file.write_text(json.dumps({"images": images}))
        return command
    images = [{"id": number, "file_name": name} for number, name in enumerate(names)]
    captions = [{"image_id": n, "caption": s} for n, s in enumerate(sentences)]
    file.write_text(json.dumps({"images": images, "annotations": captions}))
    return command


def _random_images(self):
    images = torch.randint(0, 256, (53, 3, 32, 32), dtype=torch.uint8)
    labels = torch.arange(53) % 10
    return {"train": MemoryImages(images, labels), "test": MemoryImages(images, labels)}, list(
        "abcdefghij"
    )
