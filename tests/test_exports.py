"""Every shipped model is exported, loaded again, and says the same."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attnkit
from attnkit.lightning import Export
from attnkit.lightning.export import ONNX_EXTRA
from attnkit.models.captioning.word_decoder import END


def _script(repository):
    spec = importlib.util.spec_from_file_location("exports", repository / "docs" / "exports.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = _script(Path(__file__).resolve().parent.parent)
MODELS = SCRIPT.models()
# of images and of a graph; every format of every model: test_every_format
TRACED = ("model=vit", "model=graph_transformer model.global_attention=linear")
# Of the same classes as others, or of those that test_configs.py trains.
ALIKE = {
    *(f"model={name}" for name in ("vit_tiny", "vit_small", "vit_base")),
    *(f"model=cnn attention={name}" for name in ("channel", "danet", "eca", "se", "spatial")),
    "model=cnn attention=window",
    *(f"encoder=vit decoder={name}" for name in ("transformer", "lstm_hard")),
    *(f"encoder=timm decoder={name}" for name in ("lstm", "lstm_hard")),
    *(f"encoder=cnn decoder={name}" for name in ("transformer", "lstm")),
}


def outputs(module, *sizes):
    """What the module says of the inputs that its programs take."""
    with torch.no_grad():
        return {
            name: program.network(*program.draw(*sizes[: len(program.sizes)]))
            for name, program in module.programs().items()
        }


def test_every_choice_is_there(repository):
    conf = repository / "conf"
    for group in ("model", "attention", "encoder", "decoder"):
        for path in conf.glob(f"{group}/*.yaml"):
            known = f"{group}={path.stem}"
            if known in ("model=captioner", "model=transformers"):  # by its parts; by its towers,
                continue  # which tests/test_vision_towers.py exports
            assert any(known in name.split() for name in MODELS), known


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ALIKE)) for n in MODELS]
)
def test_load_gives_the_module_back(name, tmp_path):
    module = SCRIPT.random_module(MODELS[name])
    Export(tmp_path / "export", [])(module)
    again = attnkit.load(tmp_path / "export")
    assert type(again) is type(module)
    assert not again.training
    wanted, found = outputs(module, 3, 7), outputs(again, 3, 7)
    assert wanted.keys() == found.keys()
    assert wanted
    for key, output in wanted.items():
        assert output.isfinite().all()
        assert output.std() > 1e-3
        assert torch.equal(found[key], output)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACED)
def test_torch_export(name, tmp_path):
    module = SCRIPT.random_module(MODELS[name])
    written = Export(tmp_path / "export", ["torch_export"])(module)
    assert not written.left_out
    assert max(written.differences.values()) <= 1e-5
    for program in module.programs():
        exported = torch.export.load(tmp_path / "export" / f"{program}.pt2")
        used = {str(node.target) for node in exported.graph.nodes}
        assert len(used) > 3
        assert not [name for name in used if "attnkit" in name]


@pytest.mark.slow
def test_onnx(tmp_path):
    for name in ONNX_EXTRA:
        pytest.importorskip(name)
    written = Export(tmp_path / "export")(SCRIPT.random_module(MODELS["model=vit"]))
    assert not written.left_out
    assert {path.name for path in written.files} == {
        "weights.safetensors", "config.json", "model.pt2", "model.onnx",
    }  # fmt: skip
    assert written.differences["model.onnx"] <= 1e-5
    node = json.loads((tmp_path / "export" / "config.json").read_text())["programs"]["model"]
    assert node["files"] == {"torch_export": "model.pt2", "onnx": "model.onnx"}
    assert node["inputs"]["images"]["shape"] == ["batch", 1, 8, 8]
    assert node["inputs"]["images"]["dtype"] == "uint8"
    assert node["outputs"]["logits"]["shape"] == ["batch", 10]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_format(name, tmp_path, repository):
    for extra in ONNX_EXTRA:
        pytest.importorskip(extra)
    row = SCRIPT.row(name, SCRIPT.random_module(MODELS[name]), tmp_path / "export")
    written = (repository / "docs" / "exports.md").read_text()
    # the last digits are the machine's, what is possible is not
    possible = [cell.strip().startswith("no") for cell in row.split("|")[2:-1]]
    (line,) = [line for line in written.splitlines() if line.startswith(f"| `{name}` |")]
    assert [cell.strip().startswith("no") for cell in line.split("|")[2:-1]] == possible


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["transformer", "lstm"])
def test_captions_from_the_page(decoder, tmp_path, repository, monkeypatch):
    """The search that docs/exports.md shows says what the module says."""
    pytest.importorskip("onnxruntime")
    module = SCRIPT.random_module(MODELS[f"encoder=cnn decoder={decoder}"])
    images = torch.randint(0, 256, (40, 3, 3, 3), dtype=torch.uint8)
    images = images.repeat_interleave(16, dim=-2).repeat_interleave(16, dim=-1)
    words = module.model.decoder
    with torch.no_grad():  # so that sentences differ, and some of them end
        module.model.encoder.positions.mul_(0.1)
        for parameter in words.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)
        said = module.model.generate(module.normalized(images)).words
        shares = {int(word): (said == word).any(dim=1).float().mean() for word in said.unique()}
        word = min(shares, key=lambda word: abs(shares[word] - 0.5))
        words.head.weight[END] = 1.02 * words.head.weight[word]
    Export(tmp_path / "mymodel" / "export", ["onnx"])(module)
    monkeypatch.chdir(tmp_path)
    page = (repository / "docs" / "exports.md").read_text()
    (code,) = [
        block.partition("```")[0]
        for block in page.split("```python\n")[1:]
        if "onnxruntime" in block.partition("```")[0]
    ]
    names = {"images": images.numpy()}
    exec(compile(code, "exports.md", "exec"), names)
    said = [module.tokenizer.decode(row[1:].tolist()) for row in names["words"]]
    assert said == module.caption(images, max_words=module.max_words - 1)
    assert len(set(said)) > 1
    assert len({(row == END).any() for row in names["words"]}) == 2


@pytest.mark.slow
def test_programs_need_no_attnkit(tmp_path):
    Export(tmp_path / "export", ["torch_export"])(SCRIPT.random_module(MODELS["model=gatv2"]))
    code = (
        "import sys, torch\n"
        f"run = torch.export.load({str(tmp_path / 'export' / 'model.pt2')!r}).module()\n"
        "print(run(torch.randn(9, 64), torch.randint(0, 9, (2, 20))).shape)\n"
        "assert not [name for name in sys.modules if name.startswith('attnkit')]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[9, 10]" in done.stdout
