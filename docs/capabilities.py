"""Writes docs/capabilities.md from what the kernels themselves declare.

    python docs/capabilities.py

No kernel runs: CUDA's limits are asked of tensors without memory, so no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attnkit
from attnkit.core.inputs import Inputs, check_inputs
from attnkit.core.kernels.choose import BACKENDS
from attnkit.core.kernels.sdpa import Sdpa

BATCH, HEADS, SIDE, DIM = 2, 4, 4, 8
TOKENS = SIDE * SIDE
Factory = dict[str, Callable[..., Any]]

SCORES: Factory = {
    "scaled_dot": lambda: "scaled_dot",
    "dot": lambda: "dot",
    "general": lambda: attnkit.General(torch.rand(HEADS, DIM, DIM)),
    "cosine": lambda: attnkit.Cosine(torch.rand(HEADS) + 1),
    "gaussian": lambda: attnkit.Gaussian(torch.rand(HEADS) + 1),
    "additive": lambda: attnkit.Additive(torch.rand(HEADS, DIM)),
    "any, softcap": lambda: attnkit.ScaledDot(softcap=5.0),
}
MASKS: dict[str, Any] = {
    "none": None,
    "Causal": attnkit.Causal(),
    "Padding": attnkit.Padding(torch.tensor([16, 5])),
    "Window": attnkit.Window(3, 2),
    "Window2d": attnkit.Window2d(SIDE, SIDE, 1, 1),
    "Packed": attnkit.Packed(torch.tensor([5, 11])),
    "Packed & Causal": attnkit.Packed(torch.tensor([5, 11])) & attnkit.Causal(),
    "Blocks": attnkit.Blocks(torch.eye(SIDE) > 0, SIDE),
    "Edges": attnkit.Edges(torch.tensor([[0, 1, 5], [1, 2, 3]]), TOKENS),
    "Dense": attnkit.Dense(torch.eye(TOKENS) > 0),
    "Causal & Padding": attnkit.Causal() & attnkit.Padding(torch.tensor([16, 5])),
    "~Window": ~attnkit.Window(3, 2),
}
NORMALIZERS: Factory = {
    "softmax": lambda: "softmax",
    "hard, drawn": lambda: attnkit.Hard(),
    "hard, the best": lambda: attnkit.Hard(None),
    "linear": lambda: attnkit.Linear(),
    "delta rule": lambda: attnkit.DeltaRule(torch.rand(BATCH, HEADS, TOKENS)),
}
OPTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "bias": lambda: {"bias": torch.rand(HEADS, TOKENS, TOKENS)},
    "learned bias": lambda: {"bias": torch.rand(HEADS, TOKENS, TOKENS, requires_grad=True)},
    "sink": lambda: {"sink": torch.rand(HEADS)},
    "dropout": lambda: {"dropout_p": 0.1},
    "scale ≤ 0": lambda: {"scale": -1.0},
    "grouped heads": dict,
}
DEVICES = {
    "CPU": ("cpu", torch.float32),
    "CUDA, half precision": ("cuda", torch.bfloat16),
    "CUDA, float32": ("cuda", torch.float32),
}

HEAD = """# What runs where

Written by `python docs/capabilities.py` from what the kernels declare; a test keeps it up to date.
`attnkit.explain_backends(query, key, value, …)` tells you the same about your own tensors.

A cell lists the kernels that can serve, the preferred one first; `backend="auto"` takes the first
of them that is worthwhile at your sizes. A kernel that is not listed refuses, and says why if you
force it. The reasons are below each table.

- °: except on `reference`, exact algebra turns the score into a scaled dot product.
- ▫: the mask is first turned into a boolean tensor of queries × keys. The other kernels use the
  mask's structure, or compute the part that a block needs.
- If a cell is empty, the two do not go together, and `attend` raises `ValueError`.

The tables for CUDA show what the kernels declare for compute capability 9.0.
[Benchmarks](benchmarks.md#on-one-gpu) says what was run there and what was not.
"""


class Place:
    """A device and a dtype, where tensors are made; CUDA's have no memory behind them, as if on a
    GPU of compute capability 9.0."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.mode = FakeTensorMode() if device == "cuda" else nullcontext()

    def asked(
        self,
        score: str = "scaled_dot",
        mask: str = "none",
        normalizer: str = "softmax",
        option: str = "",
    ) -> Inputs | ValueError:
        """Return the inputs of an attention of the tables, or the error if its parts do not fit."""
        kv_heads = HEADS // 2 if option == "grouped heads" else HEADS
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with self.mode, torch.device(self.device):
                query = torch.rand(BATCH, HEADS, TOKENS, DIM)
                key = torch.rand(BATCH, kv_heads, TOKENS, DIM)
                options = {"score": SCORES[score](), "normalizer": NORMALIZERS[normalizer]()}
                options |= OPTIONS[option]() if option else {}
        finally:
            torch.set_default_dtype(before)
        try:
            return check_inputs(query, key, key, mask=MASKS[mask], **options)
        except ValueError as error:
            return error


def cell(inputs: Inputs | ValueError) -> str:
    """Return the kernels that can compute the inputs, the preferred one first."""
    if isinstance(inputs, ValueError):
        return "–"
    names = []
    for kernel in BACKENDS:
        if kernel.serves(inputs):
            is_dense = isinstance(kernel, Sdpa) and inputs.mask is not None and inputs.has_attn_mask
            names.append(f"{kernel.name}▫" if is_dense else kernel.name)
    return ", ".join(names)


def table(place: Place, corner: str, columns: dict[str, dict], rows: dict[str, dict]) -> list[str]:
    lines = [f"| {corner} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        cells = (cell(place.asked(**row, **column)) for column in columns.values())
        lines.append(f"| **{name}** | {' | '.join(cells)} |")
    return lines


def refusals(place: Place, cells: dict[str, dict]) -> list[str]:
    """Per reason, which kernels refuse what for it."""
    reasons: dict[tuple[str, str], list[str]] = {}
    errors: dict[str, list[str]] = {}
    for kernel in BACKENDS:
        where: dict[str, list[str]] = {}
        for name, arguments in cells.items():
            inputs = place.asked(**arguments)
            if isinstance(inputs, ValueError):
                errors.setdefault(str(inputs), []).append(name)
                continue
            for reason in kernel.unsupported_reasons(inputs):
                where.setdefault(reason, []).append(name)
        for reason, names in where.items():
            listed = "all" if len(names) == len(cells) else "; ".join(names)
            reasons.setdefault((listed, reason), []).append(f"`{kernel.name}`")
    return [
        f"- {', '.join(kernels)}, {names}: {reason}" for (names, reason), kernels in reasons.items()
    ] + [f"- ValueError, {'; '.join(dict.fromkeys(names))}: {e}" for e, names in errors.items()]


def page() -> str:
    sections = [HEAD]
    lowered = {"general", "cosine", "gaussian"}
    scores = {name + "°" * (name in lowered): {"score": name} for name in SCORES}
    masks = {name: {"mask": name} for name in MASKS}
    normalizers = {name: {"normalizer": name} for name in NORMALIZERS}
    options = {name: {"option": name} for name in OPTIONS}
    forms = {
        "scaled_dot, no mask": {},
        "additive, Causal": {"score": "additive", "mask": "Causal"},
        "scaled_dot, Window": {"mask": "Window"},
    }
    causal = {name: {**row, "mask": "Causal"} for name, row in normalizers.items()}
    windowed = {name: {**row, "mask": "Window"} for name, row in options.items()}
    for title, where in DEVICES.items():
        place = Place(*where)
        sections += [f"## {title}", "### Mask × score", *table(place, "mask", scores, masks), ""]
        sections += ["Refused, with scaled_dot, by mask:", "", *refusals(place, masks), ""]
        sections += ["Refused, without a mask, by score:", "", *refusals(place, scores), ""]
        sections += ["### Mask × normalizer", *table(place, "mask", normalizers, masks), ""]
        sections += ["Refused, causal, by normalizer:", "", *refusals(place, causal), ""]
        sections += ["### Options", *table(place, "option", forms, options), ""]
        sections += ["Refused, with a Window, by option:", "", *refusals(place, windowed), ""]
    return "\n".join(sections)


if __name__ == "__main__":
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    Path(__file__).with_suffix(".md").write_text(page())
