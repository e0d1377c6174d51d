"""Vision towers of transformers: attention, LoRA, explanations and training from a folder."""

import copy
import json
import shutil
import sys
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

import attnkit
from attnkit import finetune, interop
from attnkit.finetune.layers import blocks_of, head_of, layer_numbers
from attnkit.launch.main import main
from attnkit.models.preprocessing import expected_images, tower_facts

transformers = pytest.importorskip("transformers")
interop.register_transformers()

SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
         "num_attention_heads": 3, "image_size": 32, "patch_size": 8}  # fmt: skip
WINDOWS = {"image_size": 32, "patch_size": 4, "embed_dim": 12, "depths": [2, 2],
           "num_heads": [2, 3], "window_size": 4}  # fmt: skip
REGISTERS = {**SIZES, "num_register_tokens": 3}
# class, settings, prefix tokens (None: windows), and whether it asks transformers' interface
TOWERS = {
    "vit": ("ViTModel", SIZES, 1, True),
    "deit": ("DeiTModel", SIZES, 2, True),
    "vit_msn": ("ViTMSNModel", SIZES, 1, True),
    "ijepa": ("IJepaModel", SIZES, 0, True),
    "dinov2": ("Dinov2Model", SIZES, 1, True),
    "dinov2, registers": ("Dinov2WithRegistersModel", REGISTERS, 4, True),
    "dinov3": ("DINOv3ViTModel", REGISTERS, 4, True),
    "beit": ("BeitModel", {**SIZES, "use_relative_position_bias": True}, 1, True),
    "beit, shared": ("BeitModel", {**SIZES, "use_shared_relative_position_bias": True}, 1, True),
    "data2vec": ("Data2VecVisionModel", {**SIZES, "use_relative_position_bias": True}, 1, False),
    "swin": ("SwinModel", WINDOWS, None, True),
    "swin v2": ("Swinv2Model", WINDOWS, None, False),
    "clip": ("CLIPVisionModel", SIZES, 1, True),
    "siglip": ("SiglipVisionModel", SIZES, 0, True),
    "aimv2": ("Aimv2VisionModel", SIZES, 0, True),
    "mlcd": ("MLCDVisionModel", SIZES, 1, True),
}
OTHERS = {
    "vit_mae": ("ViTMAEModel", {**SIZES, "mask_ratio": 0.25}, {"noise": torch.rand(2, 16)}),
    "siglip2": (
        "Siglip2VisionModel",
        {name: size for name, size in SIZES.items() if name != "image_size"} | {"num_patches": 16},
        {"pixel_attention_mask": torch.arange(16).expand(2, -1) < torch.tensor([[16], [8]]),
         "spatial_shapes": torch.tensor([[4, 4], [2, 4]])},
    ),
}  # fmt: skip


def build(name):
    kind, settings, *_ = {**TOWERS, **OTHERS}[name]
    kind = getattr(transformers, kind)
    model = kind(kind.config_class(**settings)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def some_images(size=32):
    torch.manual_seed(2)
    return torch.randn(2, 3, size, size)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A function from a tower's name to a folder with it, as save_pretrained writes it."""
    home, made = tmp_path_factory.mktemp("towers"), {}

    def folder(name):
        if name not in made:
            made[name] = home / name.replace(", ", "_")
            build(name).save_pretrained(made[name])
        return made[name]

    return folder


def tower(folders, name, **options):
    """With a head, in evaluation."""
    return interop.VisionTower(weights=folders(name), num_classes=5, **options).eval()


@pytest.mark.parametrize("name", [n for n in TOWERS if TOWERS[n][3]] + [*OTHERS])
def test_outputs_and_gradients_by_the_interface(name):
    """In float64, against torch's own attention: eager's softmax is of float32 in some."""
    model = build(name).double()
    given = {"pixel_values": some_images().double()}
    if name in OTHERS:
        given |= OTHERS[name][2]
    if name == "siglip2":
        given["pixel_values"] = torch.randn(2, 16, 192).double()
    results = []
    for attention in ("sdpa", "attnkit"):
        model.set_attn_implementation(attention)
        model.zero_grad()
        with interop.record_masks(model) as record:
            output = model(**given).last_hidden_state
        output.square().mean().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append((output.detach(), gradients, len(record.counts)))
    (expected, theirs, _), (output, ours, num_layers) = results
    assert num_layers == (4 if name == "swin" else 2)
    assert expected.std() > 0.01
    torch.testing.assert_close(output, expected)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_of_a_folder_and_of_its_config(name, folders):
    """The pooled vector is what transformers gives, and a checkpoint needs no folder."""
    model, images = tower(folders, name), some_images()
    output = build(name)(images)
    pooled = None if name in ("vit", "deit", "ijepa") else output.get("pooler_output")
    if pooled is None:
        tokens = output.last_hidden_state
        pooled = tokens.mean(dim=1) if TOWERS[name][2] == 0 else tokens[:, 0]
    assert pooled.std() > 0.01
    torch.testing.assert_close(model.pooled(images), pooled, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(model(images), model.head(pooled), atol=1e-5, rtol=1e-4)
    config = json.loads(json.dumps(tower_facts(folders(name))["config"]))
    again = interop.VisionTower(config=config, num_classes=5).eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(images), model(images))
    with attnkit.record_backends(model) as kernels:
        model(images)
    assert len(kernels.counts) >= (4 if name.startswith("swin") else 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOWERS)
def test_exported_for_any_batch(name, folders):
    model, images = tower(folders, name), some_images()
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (images,), dynamic_shapes={"images": {0: batch}})
    more = torch.cat([images, some_images(), images[:1]])
    torch.testing.assert_close(program.module()(more), model(more), atol=1e-5, rtol=1e-4)


def test_vit_mae_is_a_vit_that_sees_all_patches(folders):
    theirs = build("vit_mae")
    theirs.config.mask_ratio = 0.0
    tokens = theirs(some_images(), noise=torch.arange(16.0).expand(2, -1)).last_hidden_state
    pooled = tower(folders, "vit_mae").pooled(some_images())
    torch.testing.assert_close(pooled, tokens[:, 0], atol=1e-5, rtol=1e-4)


def test_the_vision_tower_of_clip(tmp_path):
    text = {name: SIZES[name] for name in SIZES if name not in ("image_size", "patch_size")}
    special = {"vocab_size": 30, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.CLIPConfig(text_config=text | special, vision_config=SIZES)
    both = transformers.CLIPModel(config).eval()
    both.save_pretrained(tmp_path)
    model = interop.VisionTower(weights=tmp_path, num_classes=5, image_size=(32, 48)).eval()
    images = torch.randn(2, 3, 32, 48)
    expected = both.vision_model(images, interpolate_pos_encoding=True).pooler_output
    torch.testing.assert_close(model.pooled(images), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", TOWERS)
def test_lora_finds_its_layers(name, folders, tmp_path):
    model = tower(folders, name)
    base, expected = copy.deepcopy(model), model(some_images())
    assert head_of(model) == ("head",)
    blocks = blocks_of(model)
    assert len(blocks) == (4 if name.startswith("swin") else 2)
    numbers = layer_numbers(model, ("head",))
    for number, block in enumerate(blocks, 1):
        inside = {n: deep for n, deep in numbers.items() if n.startswith(f"{block}.")}
        assert inside
        assert set(inside.values()) == {number}
    assert numbers["head.weight"] == len(blocks) + 1
    assert all(deep == 0 for n, deep in numbers.items() if "embeddings." in n)
    finetune.lora(model, rank=2, qkv="qv", layer_decay=0.5)
    adapted = [n for n, m in model.named_modules() if isinstance(m, finetune.LoRALinear)]
    found = [n.rpartition(".")[2] for n in adapted if n.startswith(tuple(blocks))]
    own = {"in_proj", "out_proj"} if not TOWERS[name][3] else {"q_proj", "v_proj"}
    assert own <= set(found) <= own | {"o_proj", "out_proj"}
    assert found.count(min(own)) == len(blocks)
    torch.testing.assert_close(model(some_images()), expected, atol=1e-5, rtol=1e-4)
    for layer in model.modules():
        if isinstance(layer, finetune.LoRALinear):
            nn.init.normal_(layer.lora_B, std=0.3)
    moved = model(some_images())
    assert not torch.allclose(moved, expected, atol=1e-3)
    moved.square().sum().backward()
    layers = [layer for layer in model.modules() if isinstance(layer, finetune.LoRALinear)]
    assert all(layer.lora_A.grad.abs().max() > 0 for layer in layers)
    finetune.save_adapter(model, tmp_path / "adapter.safetensors")
    finetune.load_adapter(base, tmp_path / "adapter.safetensors")
    torch.testing.assert_close(base.eval()(some_images()), moved)
    finetune.merge(model)
    torch.testing.assert_close(model(some_images()), moved, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["Data2VecVision", "Swinv2"])
def test_lora_of_mlps_without_that_name(name):
    kind = getattr(transformers, f"{name}ForImageClassification")
    model = kind(kind.config_class(**(WINDOWS if name == "Swinv2" else SIZES)))
    finetune.lora(model, rank=2, targets="mlp")
    layers = [n for n, m in model.named_modules() if isinstance(m, finetune.LoRALinear)]
    dense = [layer.split(".")[-2] for layer in layers if layer.endswith(".dense")]
    num_blocks = 4 if name == "Swinv2" else 2
    assert sorted(dense) == ["intermediate"] * num_blocks + ["output"] * num_blocks
    assert not any("attention.output" in layer for layer in layers)


@pytest.mark.parametrize("name", [name for name in TOWERS if TOWERS[name][2] is not None])
def test_explained_on_its_own_grid(name, folders):
    model = tower(folders, name)
    seen = attnkit.explain(model, some_images(), method="relevance")
    assert seen.map.shape == (2, 4, 4)
    assert seen.num_prefix_tokens == TOWERS[name][2]
    assert seen.map.std() > 0


IMAGES = {
    "cut": (
        {"do_center_crop": True, "crop_size": {"height": 224, "width": 224}, "resample": 3,
         "size": {"shortest_edge": 256}, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4] * 3},
        {"image_size": 224, "crop_pct": 0.875, "interpolation": "bicubic", "std": [0.4] * 3},
    ),
    "whole": (
        {"size": {"height": 32, "width": 48}, "resample": 2, "image_mean": [0.5], "image_std": [1]},
        {"image_size": [32, 48], "crop_pct": 1.0, "interpolation": "bilinear",
         "mean": [0.5] * 3, "std": [1] * 3},
    ),
    "old": ({"size": 64, "image_mean": [0], "image_std": [1]}, {"image_size": 64}),
    "a number, and nulls": (
        {"size": None, "resample": None, "image_mean": 0.5, "image_std": 0.25, "do_rescale": None},
        {"image_size": 32, "interpolation": "bicubic", "mean": [0.5] * 3, "std": [0.25] * 3},
    ),
    "not normalised": (
        {"do_normalize": False, "image_mean": [0.1] * 3, "image_std": [0.2] * 3},
        {"mean": [0.0] * 3, "std": [1.0] * 3},
    ),
    "from 0 to 2": (
        {"rescale_factor": 2 / 255, "image_mean": [1.0] * 3, "image_std": [0.5] * 3},
        {"mean": [0.5] * 3, "std": [0.25] * 3},
    ),
    "from 0 to 255": (
        {"do_rescale": False, "rescale_factor": 7, "image_mean": [51] * 3, "image_std": [255] * 3},
        {"mean": [0.2] * 3, "std": [1.0] * 3},
    ),
    "none": ({}, {"image_size": 32, "in_channels": 3}),
}  # fmt: skip


@pytest.mark.parametrize("case", IMAGES)
def test_images_are_prepared_as_its_files_say(case, tmp_path):
    given, expected = IMAGES[case]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "image_size": 32}))
    if given:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    node = {"_target_": "attnkit.interop.VisionTower", "weights": str(tmp_path)}
    facts = expected_images(node)
    assert {name: facts[name] for name in expected} == expected
    known = {"model_type": "vit", "image_size": 32}
    assert facts["config"] == {**known, "transformers_version": "unknown"}
    assert ("mean" in facts) == bool(given)


MEANS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
WRONG_FILES = {
    "mean alone": ({}, {"image_mean": [0.5] * 3}, "image_std: expected 3 positive .* got nothing"),
    "std alone": ({}, {"image_std": [0.5] * 3}, "image_mean: expected 3 numbers, got nothing"),
    "two": ({}, MEANS | {"image_mean": [0.5] * 2}, r"image_mean: .* got \[0.5, 0.5\]"),
    "text": ({}, MEANS | {"image_mean": "x"}, "image_mean: expected 3 numbers, got 'x'"),
    "zero": ({}, MEANS | {"image_std": [0] * 3}, r"image_std: .* got \[0, 0, 0\]"),
    "factor": ({}, MEANS | {"rescale_factor": "x"}, "rescale_factor: expected a positive number"),
    "factor alone": ({}, {"rescale_factor": 1 / 127.5}, "image_mean: .* got nothing"),
    "filter": ({}, MEANS | {"resample": "x"}, "resample: expected a number of PIL, got 'x'"),
    "size": ({}, {"size": "x"}, "image_size: expected a positive integer or two, got 'x'"),
    "a list": ({}, [1], r"its preprocessor_config.json cannot be read: expected an object, got \["),
    "parts": ({"vision_config": [1]}, {}, r"vision_config: expected an object, got \[1\]"),
    "channels": ({"num_channels": None}, {}, "num_channels: expected a positive integer, got None"),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_files_that_say_what_cannot_be(case, tmp_path):
    config, images, message = WRONG_FILES[case]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", **config}))
    if images:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(images))
    node = {"_target_": "attnkit.interop.VisionTower", "weights": str(tmp_path)}
    with pytest.raises(ValueError, match=f"^weights: .*{message}") as error:
        expected_images(node)
    assert "\n" not in str(error.value)


def test_without_a_vision_config_it_is_one_tower(tmp_path):
    config = {"model_type": "vit", "vision_config": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert tower_facts(tmp_path)["config"]["model_type"] == "vit"


WRONG = {
    "no config": ({}, {}, r"expected a folder that save_pretrained .*config\.json is missing"),
    "of timm": ({"architecture": "resnet18"}, {}, "config.json is of timm: model=timm takes it"),
    "a text model": ({"model_type": "bert"}, {}, "expected one of aimv2_vision_model, .*'bert'"),
    "no tensors": ({"model_type": "vit"}, {}, "cannot be loaded: .*model.safetensors"),
    "grey": ({"model_type": "vit"}, {"in_channels": 1}, r"takes 3, got 1; data\.in_channels=3"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_folders(case, tmp_path):
    config, options, message = WRONG[case]
    if config:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        interop.VisionTower(weights=tmp_path, num_classes=5, **options)


def test_weights_that_lack_a_tensor(folders, tmp_path):
    shutil.copytree(folders("vit"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in tensors if name.endswith("layernorm_after.weight"))
    save_file({n: t for n, t in tensors.items() if n != lost}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"weights: .* lacks layers\.0\.layernorm_after\.weight"):
        interop.VisionTower(weights=tmp_path, num_classes=5)


WRONG_CONFIGS = {
    "text": ("vit", {}, "config: expected the settings of a config.json, got 'vit'"),
    "another": ({"model_type": "bert"}, {}, "config: expected one of aimv2_.*'bert'"),
    "patches": ({"patch_size": "x"}, {}, "config: vit cannot be built: .*'patch_size'.*'x'"),
    "width": ({"hidden_size": None}, {}, "config: vit cannot be built: .*'hidden_size'.*None"),
    "no setter": ({"use_return_dict": False}, {}, "config: vit cannot be built: .*use_return_dict"),
    "activation": ({"hidden_act": "zz"}, {}, "config: vit cannot be built: KeyError: 'zz'"),
    "channels": ({"num_channels": None}, {}, "config: num_channels: .* got None"),
    "a typo": ({"hiden_size": 9}, {}, "config: vit has no 'hiden_size'; did you mean hidden_size"),
    "classes": ({}, {"num_classes": 0}, "num_classes: expected at least 1, got 0"),
}


@pytest.mark.parametrize("case", WRONG_CONFIGS)
def test_wrong_configs(case, capfd):
    config, options, message = WRONG_CONFIGS[case]
    if isinstance(config, dict):
        config = {"model_type": "vit", **SIZES, **config}
    with pytest.raises(ValueError, match=f"^{message}") as error:
        interop.VisionTower(**{"config": config, "num_classes": 5, **options})
    assert "\n" not in str(error.value)
    assert not capfd.readouterr().err


def test_a_file_may_say_more_than_its_class_knows(folders, tmp_path):
    config = {**tower_facts(folders("vit"))["config"], "hiden_size": 9}
    interop.VisionTower(config=config, num_classes=5)
    build("vit").save_pretrained(tmp_path)
    found = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**found, "projection_dim": 9}))
    interop.VisionTower(weights=tmp_path, num_classes=5)


def test_weights_of_another_shape_are_named(folders):
    config = {"model_type": "vit", **SIZES, "intermediate_size": 44}
    with pytest.raises(ValueError, match=r"weights: .* does not fit the config: layers\.0\.mlp\."
                       r"fc1\.bias is \[40\] there, \[44\] here, and \d+ more$"):  # fmt: skip
        tower(folders, "vit", config=config)


@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_whose_config_asks_for_tuples(name, folders):
    config = {**tower_facts(folders(name))["config"], "return_dict": False}
    model = tower(folders, name, config=config)
    assert torch.equal(model.pooled(some_images()), tower(folders, name).pooled(some_images()))


def test_a_size_it_cannot_take_and_no_transformers(folders, monkeypatch):
    with pytest.raises(
        ValueError, match=r"image_size: aimv2_vision_model cannot take 48 x 48 .*32"
    ):
        tower(folders, "aimv2", image_size=48)
    with pytest.raises(ValueError, match="weights: expected a folder that save_pretrained"):
        interop.VisionTower(num_classes=5)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"needs transformers: pip install 'attnkit\[transformers"):
        interop.VisionTower(num_classes=5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "head"])
def test_trained_from_a_folder_and_used_without_it(method, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    build("clip").save_pretrained("clip")
    how = {"size": {"shortest_edge": 40}, "crop_size": 32, "do_center_crop": True, "resample": 3,
           "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}  # fmt: skip
    (tmp_path / "clip" / "preprocessor_config.json").write_text(json.dumps(how))
    pixels = np.random.default_rng(0).integers(0, 256, (2, 9, 40, 50, 3), dtype=np.uint8)
    for name, images in zip(("cat", "dog"), pixels, strict=True):
        (tmp_path / "photos" / "train" / name).mkdir(parents=True)
        for number, image in enumerate(images):
            Image.fromarray(image).save(f"photos/train/{name}/{number}.png")
    words = ["task=vit", "model=transformers", "model.weights=clip", "data=image_folder",
             "data.root=photos", "data.batch_size=4", "data.augment=null", "trainer=cpu",
             "trainer.max_epochs=1", "run_dir=run", f"finetune={method}"]  # fmt: skip
    assert main(words) == 0
    (tmp_path / "clip").rename("gone")
    assert main(["run=test", "ckpt=run", "trainer=cpu"]) == 0
    assert "Traceback" not in capfd.readouterr().err
    saved = torch.load("run/checkpoints/best.ckpt", weights_only=False)
    known = saved["hyper_parameters"]
    assert (known["image_size"], known["crop_pct"], known["std"]) == (32, 0.8, [0.4, 0.5, 0.6])
    name = "embeddings.patch_embedding.weight"
    assert torch.equal(saved["state_dict"][f"model.tower.{name}"], build("clip").state_dict()[name])
