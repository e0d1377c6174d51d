"""Every kernel × mask × dtype that it serves, output and gradients, against float64.

The error is ‖a − exact‖ / ‖exact‖, the worst of output, query's, key's and value's gradient over
the masks; beside it the same of plain matrix products and softmax in that dtype (`math`).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

import attnkit
from attnkit.core.inputs import check_inputs
from attnkit.core.kernels.choose import BACKENDS

BATCH, HEADS, KV_HEADS, SIDE, DIM = 2, 6, 3, 16, 40
TOKENS = SIDE * SIDE + 1  # no multiple of any block
FLEX = ("window", "grid", "packed", "causal & padding")  # each is compiled, which takes seconds


def masks(device: str) -> dict[str, object]:
    lengths = torch.tensor([TOKENS, TOKENS // 3], device=device)
    index = torch.randint(TOKENS, (2, 8 * TOKENS), device=device).unique(dim=1)
    some = torch.rand(BATCH, 1, TOKENS, TOKENS, device=device) > 0.4
    some[1, :, 3] = False  # a row that may look nowhere
    packed = torch.tensor([100, 1, TOKENS - 101])
    return {
        "none": None,
        "causal": attnkit.Causal(),
        "padding": attnkit.Padding(lengths),
        "causal & padding": attnkit.Causal() & attnkit.Padding(lengths),
        "dense": attnkit.Dense(some),
        "window": attnkit.Window(11, 7),
        "grid": attnkit.Window2d(SIDE, SIDE, 2, 3, num_prefix_tokens=1),
        "packed": attnkit.Packed(packed),
        "packed & causal": attnkit.Packed(packed) & attnkit.Causal(),
        "edges": attnkit.Edges(index, TOKENS),
    }


def results(tensors: list[Tensor], **options) -> list[Tensor]:
    output = attnkit.attend(*tensors, **options)
    toward = (torch.arange(output.numel(), device=output.device) % 17 - 8).view_as(output) / 8
    return [output, *torch.autograd.grad(output, tensors, toward.to(output.dtype))]


def error(actual: list[Tensor], exact: list[Tensor]) -> float:
    """NaN where anything is not finite."""
    pairs = zip(actual, exact, strict=True)
    return max(((a.double() - e).norm() / e.norm()).item() for a, e in pairs)


def rows(device: str, _) -> Iterator[dict]:
    every = masks(device)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)[: 3 if device == "cuda" else 1]
    cases, exact, plain = {}, {}, {}
    for dtype in dtypes:
        for name, mask in every.items():
            shapes = [(BATCH, heads, TOKENS, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
            tensors = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
            tensors = [tensor.requires_grad_() for tensor in tensors]
            double = [tensor.detach().double().requires_grad_() for tensor in tensors]
            cases[dtype, name] = tensors
            exact[dtype, name] = results(double, mask=mask, backend="reference")
            plain[dtype, name] = error(
                results(tensors, mask=mask, backend="math"), exact[dtype, name]
            )
    for backend in sorted(BACKENDS, key=lambda backend: backend.name == "flex"):
        for dtype in dtypes:
            errors, failures = {}, []
            for name, mask in every.items():
                tensors = cases[dtype, name]
                if not backend.serves(check_inputs(*tensors, mask=mask)):
                    continue
                if backend.name == "flex" and name not in FLEX:
                    continue
                try:
                    actual = results(tensors, mask=mask, backend=backend.name)
                    errors[name] = error(actual, exact[dtype, name])
                except Exception as failure:
                    print(backend.name, dtype, name, repr(failure)[:2000], flush=True)
                    failures.append(f"{name}: {type(failure).__name__}")
            if errors or failures:
                found = {"worst error": "–", "of math": "–"}
                if errors:  # one that is not a number is the worst of all
                    worst = max(errors, key=lambda n: (errors[n] != errors[n], errors[n]))
                    found["worst error"] = f"{errors[worst]:.1e} ({worst})"
                    found["of math"] = f"{plain[dtype, worst]:.1e}"
                yield {
                    "kernel": backend.name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "masks": ", ".join(errors),
                    **found,
                    "failures": "; ".join(failures) or "none",
                }
