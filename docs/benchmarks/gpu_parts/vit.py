"""A training step of ViT-B/16 at 224 pixels, batch 128, bfloat16, against timm's model.

Both have the same weights. The share of the peak counts the operations of matrix products and
attention in a step against the fastest product of 8192 × 8192 matrices in the same run.
"""

from collections.abc import Callable, Iterator

import timm
import torch
from measure import alternate
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from attnkit import interop

ROUNDS = 12


def rows(device: str, _) -> Iterator[dict]:
    on_cuda = device == "cuda"
    name, batch, size = ("vit_base_patch16_224", 128, 8192) if on_cuda else ("test_vit", 2, 256)
    synchronize = torch.cuda.synchronize if on_cuda else lambda: None
    theirs = timm.create_model(name, num_classes=1000)
    ours = interop.from_timm(theirs)
    pixels = theirs.patch_embed.img_size
    images = torch.randn(batch, 3, *pixels, device=device)
    labels = torch.randint(1000, (batch,), device=device)
    for model in (theirs, ours):
        model.to(device).train()
    with FlopCounterMode(display=False) as counter:
        theirs(images[:2]).sum().backward()
    operations = counter.get_total_flops() * batch / 2
    factors = [torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2)]
    product = {"product": lambda: factors[0] @ factors[1]}
    seconds = min(alternate(product, 20, synchronize=synchronize).seconds["product"])
    peak = 2 * size**3 / seconds
    yield {f"product of {size} × {size}, bfloat16": f"{peak / 1e12:,.0f} TFLOP/s"}
    for how in ("eager", "compiled"):
        for model in (theirs, ours):
            if how == "compiled":
                model.compile()
        programs = {
            who: step(model, images, labels, device)
            for who, model in (("timm", theirs), ("attnkit", ours))
        }
        times = alternate(programs, ROUNDS, warm_up=4, synchronize=synchronize)
        memory = {who: memory_of(program, device) for who, program in programs.items()}
        for who in programs:
            yield {
                "step": f"{name}, {batch} images, {how}",
                "model": who,
                "ms": f"{1e3 * times.median(who):.2f}",
                "images/s": f"{batch / times.median(who):,.0f}",
                "time / timm's": f"{times.ratio(who, 'timm'):.3f}",
                "share of the peak": f"{operations / times.median(who) / peak:.1%}",
                "peak memory, GB": memory[who],
            }


def step(model, images, labels, device: str) -> Callable[[], object]:
    """Forward, backward and a fused AdamW step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return run


def memory_of(program: Callable[[], object], device: str) -> str:
    if device == "cpu":
        return "–"
    torch.cuda.reset_peak_memory_stats()
    program()
    return f"{torch.cuda.max_memory_allocated() / 1e9:.1f}"
