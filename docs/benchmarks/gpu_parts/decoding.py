"""Decoding captions against transformers' `generate`: docs/benchmarks/captioning.py on the GPU."""

from collections.abc import Iterator

import torch
from measure import alternate


def rows(device: str, _) -> Iterator[dict]:
    import captioning as cpu
    import transformers

    transformers.logging.set_verbosity_error()
    words = 20 if device == "cuda" else 4
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    with torch.device(device), torch.no_grad():
        theirs = cpu.their_decoder(1000, 64).to(device)
        ours = cpu.with_weights_of(theirs).to(device)
        cpu.never_ending(ours)
        memory = torch.randn(cpu.BATCH, cpu.TOKENS, cpu.DIM)
        for name, beams in (("greedy", 1), (f"beam search, {cpu.BEAMS}", cpu.BEAMS)):
            programs = {
                "transformers": lambda n=beams: cpu.their_words(theirs, memory, words, n),
                "attnkit": lambda n=beams: cpu.our_words(ours, memory, words, n),
            }
            said = [program() for program in programs.values()]
            same = (said[0] == said[1]).all(dim=1).float().mean()
            times = alternate(programs, 5, warm_up=1, synchronize=synchronize)
            yield {
                "decoding": f"{name}, batch {cpu.BATCH}, {words} words",
                **{f"{who}, ms": f"{1e3 * times.median(who):.1f}" for who in programs},
                "faster": f"{times.ratio('transformers', 'attnkit'):.2f} ×",
                "same sentences": f"{same:.0%}",
            }
