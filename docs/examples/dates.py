"""Rewrite dates: a recurrent encoder and decoder with attention (Bahdanau et al. 2015).

    python docs/examples/dates.py [--steps 200] [--picture docs/dates.png]

"Saturday, November 21 2026" becomes "2026-11-21", letter by letter. The decoder is that of
captions, and its memory is what a bidirectional GRU makes of the letters, instead of an image. The
picture is the alignment: which letters each letter of the answer looked at.
"""

import argparse
import random
from datetime import date, timedelta

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor, nn

from attnkit.models import RecurrentDecoder
from attnkit.models.captioning.generate import generate
from attnkit.models.captioning.word_decoder import END, PAD, START, UNKNOWN

FORMATS = ["%d %B %Y", "%B %d, %Y", "%a %d %b %Y", "%A, %B %d %Y", "%d.%m.%Y", "%m/%d/%Y",
           "%Y, the %d of %B", "%b %d %Y"]  # fmt: skip
LETTERS = " ,./-" + "".join(map(chr, range(48, 58))) + "".join(map(chr, range(97, 123)))
ANSWER = len("2026-11-21") + 1  # and the end


def a_date(random_numbers: random.Random) -> tuple[str, str]:
    """A date as people write it, and as it should be."""
    day = date(1950, 1, 1) + timedelta(days=random_numbers.randrange(40_000))
    return day.strftime(random_numbers.choice(FORMATS)).lower(), day.isoformat()


def encoded(texts: list[str]) -> Tensor:
    """START, letters, END and PAD, [batch, letters + 2]."""
    rows = [[START, *(UNKNOWN + 1 + LETTERS.index(c) for c in text), END] for text in texts]
    longest = max(map(len, rows))
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def decoded(words: Tensor) -> str:
    return "".join(LETTERS[word - UNKNOWN - 1] for word in words.tolist() if word > UNKNOWN)


class Rewriter(nn.Module):
    def __init__(self, dim: int = 96) -> None:
        super().__init__()
        vocabulary = UNKNOWN + 1 + len(LETTERS)
        self.embedding = nn.Embedding(vocabulary, dim)
        self.encoder = nn.GRU(dim, dim // 2, batch_first=True, bidirectional=True)
        self.decoder = RecurrentDecoder(vocabulary, ANSWER, dim=dim, gate=False)

    def memory(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        letters = encoded(texts)
        return self.encoder(self.embedding(letters))[0], letters != PAD


def main(steps: int = 200, picture: str | None = None, seed: int = 0) -> float:
    """The share of dates never seen that are rewritten without a mistake."""
    torch.manual_seed(seed)
    numbers = random.Random(seed)
    model = Rewriter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    for step in range(steps):
        texts, answers = zip(*(a_date(numbers) for _ in range(128)), strict=True)
        memory, mask = model.memory(list(texts))
        loss = model.decoder.loss(memory, encoded(list(answers)), mask)["loss"]
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1}: cross-entropy {float(loss.detach()):.3f}")
    texts, answers = zip(*(a_date(numbers) for _ in range(500)), strict=True)
    memory, mask = model.memory(list(texts))
    said = generate(model.decoder, memory, memory_mask=mask, return_weights=True)
    rewritten = [decoded(words) for words in said.words]
    right = sum(a == b for a, b in zip(rewritten, answers, strict=True)) / len(texts)
    print(f"{right:.1%} of {len(texts)} dates right, such as {texts[0]!r}: {rewritten[0]}")
    if picture is not None:
        long = sorted(range(len(texts)), key=lambda item: -len(texts[item]))[:60:29]
        pairs = [(texts[item], rewritten[item]) for item in long]
        draw(pairs, said.weights[long, 0, 0].numpy(), picture)
    return right


def draw(pairs: list[tuple[str, str]], weights: np.ndarray, path: str) -> None:
    """The alignment of each pair: rows are letters of the answer, columns those of the text."""
    figure, axes = plt.subplots(
        1, len(pairs), figsize=(4.2 * len(pairs) + 0.6, 3.2), layout="constrained"
    )
    for axis, (text, answer), weight in zip(axes, pairs, weights, strict=True):
        # the first and last columns are START and END
        shown = weight[: len(answer), 1 : len(text) + 1]
        image = axis.imshow(shown, cmap="Blues", aspect="auto", vmin=0, vmax=1)
        axis.set_xticks(range(len(text)), text.replace(" ", "␣"), fontsize=9)
        axis.set_yticks(range(len(answer)), answer, fontsize=9)
        axis.tick_params(length=0)
        axis.set_xlabel("letters of the text")
    axes[0].set_ylabel("letters of the answer")
    figure.colorbar(image, ax=axes, label="attention", pad=0.01)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--picture", default=None)
    arguments = parser.parse_args()
    main(arguments.steps, arguments.picture)
