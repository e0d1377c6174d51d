"""Finds where a step makes the processor wait for the GPU, by torch's own debug mode."""

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import attnkit
from attnkit.models import GAT, ViT

HERE = Path(attnkit.__file__).parent


def steps(device: str) -> dict[str, Callable[[], object]]:
    tokens, dtype = 1024, torch.bfloat16

    def attention(**options) -> Callable[[], object]:
        shape = 2, 4, tokens, 64
        tensors = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in "qkv"]
        toward = torch.ones_like(tensors[0])
        return lambda: torch.autograd.grad(attnkit.attend(*tensors, **options), tensors, toward)

    def model(network: torch.nn.Module, *inputs: torch.Tensor) -> Callable[[], object]:
        network.to(device)
        return lambda: network(*inputs).square().mean().backward()

    lengths = torch.tensor([tokens, tokens // 2], device=device)
    index = torch.randint(tokens, (2, 8 * tokens), device=device)
    edges = attnkit.Edges(index, tokens)
    images = torch.rand(8, 3, 32, 32, device=device)
    nodes = torch.rand(tokens, 32, device=device)
    vit = ViT(
        image_size=32, patch_size=4, in_channels=3, num_classes=10, dim=64, depth=2, num_heads=4
    )
    gat = GAT(in_channels=32, hidden_channels=8, num_classes=5)
    return {
        "none": attention(),
        "causal": attention(mask=attnkit.Causal()),
        "padding": attention(mask=attnkit.Padding(lengths)),
        "dense": attention(mask=torch.rand(tokens, tokens, device=device) > 0.5),
        "window": attention(mask=attnkit.Window(16, 16)),
        "grid": attention(mask=attnkit.Window2d(32, 32, 2, 2)),
        "packed": attention(mask=attnkit.Packed([500, 524])),
        "edges": attention(mask=edges),
        "edges, dropout": attention(mask=edges, dropout_p=0.1),
        "new edges each step": lambda: attention(mask=attnkit.Edges(index, tokens))(),
        "ViT": model(vit, images),
        "GAT": model(gat, nodes, index),
    }


def rows(device: str, _) -> Iterator[dict]:
    for name, step in steps(device).items():
        step()
        step()
        found: Counter = Counter()

        def note(message, *_, found=found, **__):
            if "called a synchronizing" not in str(message):
                return
            frames = [f for f in traceback.extract_stack() if f.filename.startswith(str(HERE))]
            place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "torch"
            found[place] += 1

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("warn")
            step()
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        places = ", ".join(f"{place} × {count}" for place, count in found.items())
        yield {"step": name, "waits": found.total(), "where": places or "nowhere"}
