"""Writes the table of docs/exports.md: every shipped model exported, read again and compared.

    python docs/exports.py            about 5 minutes; needs pip install 'attnkit[onnx]'

Weights and buffers are random, so that no gate that starts at 0 hides what is behind it.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import torch
from lightning import LightningModule

import attnkit
from attnkit.launch.config.compose import Composer
from attnkit.launch.decide import Request, decide
from attnkit.launch.run import Run
from attnkit.lightning import Export

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "exports.md"
CONF = ROOT / "conf"
ENCODERS = ("cnn", "vit", "timm")
DECODERS = ("transformer", "lstm", "lstm_hard")
SCENES = ("data.num_train=9", "data.num_val=3", "data.num_test=3", "data.batch_size=3")


def models() -> dict[str, tuple[str, ...]]:
    """The command line of every shipped model, as small as it goes, by its name in the table."""
    attentions = sorted(path.stem for path in CONF.glob("attention/*.yaml"))
    small = ("model.dim=24", "model.num_heads=3", "model.depth=2")
    found: dict[str, tuple[str, ...]] = {
        f"model={name}": ("task=vit", f"model={name}", *small)
        for name in ("vit", "vit_tiny", "vit_small", "vit_base")
    }
    found["model=timm (test_vit)"] = (
        "task=vit", "model=timm", "model.name=test_vit", "data.image_size=32",
    )  # fmt: skip
    for change in ("positions=rotary2d", "score=additive", "pooling=attention"):
        found[f"model=vit model.{change}"] = ("task=vit", *small, f"model.{change}")
    for name in attentions:
        found[f"model=cnn attention={name}"] = (
            "task=spatial", f"attention={name}", "backbone.num_blocks=1",
        )  # fmt: skip
    found["model=cnn backbone=timm (test_resnet)"] = (
        "task=spatial", "attention=se", "backbone=timm", "backbone.name=test_resnet",
    )  # fmt: skip
    for name in ("gat", "gatv2", "gat_sep", "graph_transformer", "exphormer", "gps", "sgformer"):
        found[f"model={name}"] = (
            "task=graph", f"model={name}", "model.hidden_channels=16", "model.heads=2",
            "model.num_layers=2",
        )  # fmt: skip
    found["model=graph_transformer model.global_attention=linear"] = (
        *found["model=graph_transformer"], "model.global_attention=linear",
    )  # fmt: skip
    found["model=polynormer"] = (
        "task=graph", "model=polynormer", "model.hidden_channels=16", "model.heads=2",
        "model.num_local_layers=2",
    )  # fmt: skip
    for encoder in ENCODERS:
        for decoder in DECODERS:
            found[f"encoder={encoder} decoder={decoder}"] = (
                "task=captioning", f"encoder={encoder}", f"decoder={decoder}", "encoder.dim=16",
                "decoder.dim=16", *(["encoder.name=test_resnet"] if encoder == "timm" else []),
                *SCENES,
            )  # fmt: skip
    for head in ("linear", "convolutional", "queries"):
        found[f"model=segmenter decoder={head}"] = (
            "task=segmentation", f"decoder={head}", "backbone.dim=24", *SCENES,
        )  # fmt: skip
    return found


def random_module(overrides: tuple[str, ...]) -> LightningModule:
    """The module of a command line with random parameters and buffers."""
    job = decide(Request.read(Composer(), ["trainer=cpu", "logger.tensorboard=null", *overrides]))
    run = Run(job.runs[0])
    run.make_data()
    module = run.make_module().eval()
    generator = torch.Generator().manual_seed(0)
    state = module.state_dict()
    for name, tensor in state.items():
        if tensor.is_floating_point() and name not in ("mean", "std"):
            noise = torch.randn(tensor.shape, generator=generator)
            # the variance of a batch norm must stay positive
            tensor.copy_(noise.abs() + 0.5 if name.endswith("_var") else 0.3 * noise)
    module.load_state_dict(state)
    return module


def row(name: str, module: LightningModule, folder: Path) -> str:
    """Export a module and load it again; its row in the table."""
    written = Export(folder)(module)
    attnkit.load(folder)  # equal to the bit, or the export had failed
    cells = [f"`{name}`", "equal"]
    for kind, suffix in (("torch_export", ".pt2"), ("onnx", ".onnx")):
        apart = [value for file, value in written.differences.items() if file.endswith(suffix)]
        cells.append(f"{max(apart):.0e}" if apart else f"no: {written.left_out[kind]}")
    return f"| {' | '.join(cells)} |"


def page(rows: list[str]) -> str:
    """The page with these rows as its table."""
    text = PAGE.read_text(encoding="utf-8")
    head = "| model | `attnkit.load` | `torch.export` | ONNX |\n|---|---|---|---|\n"
    table = head + "".join(f"{line}\n" for line in rows)
    return re.sub(r"(?<=<!-- table -->\n)(.*?)(?=<!-- end -->)", table, text, flags=re.DOTALL)


def main() -> None:
    """Write the page."""
    rows = []
    for name, overrides in models().items():
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(name, random_module(overrides), Path(folder) / "export"))
            print(rows[-1], flush=True)
    PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
