"""Batched beam search, which keeps ended hypotheses."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.models.captioning.word_decoder import (
    END,
    PAD,
    START,
    DecodingState,
    without_pad_and_start,
)

SMALL = 256  # shorter rows are sorted at once, without a test for equal values


def beam_search(
    step: Callable[[Tensor, Any], Tensor],
    state: DecodingState,
    batch: int,
    device: torch.device,
    *,
    max_words: int,
    num_beams: int,
    num_return: int,
    length_penalty: float,
) -> tuple[Tensor, Tensor]:
    """Return the best sentences [batch, num_return, words] that are found, and their scores.

        score = log p(sentence) / ((5 + words) / 6)^length_penalty      (Wu et al., GNMT, 2016)

    Each step extends the `num_beams` likeliest hypotheses of an item by every word. An extension
    that ends and is among the `num_beams` likeliest is kept if it is one of the item's `num_return`
    best; the `num_beams` likeliest that do not end continue. An item is done when no continuing
    hypothesis can score better than the worst one kept, since log-probabilities only fall; the
    search ends when all items are done. Sentences that have not ended by `max_words` are returned
    only where fewer than `num_return` have ended. With as many beams as there are extensions the
    search is exhaustive. Ties go to the better hypothesis, then to the lower word.

    Args:
        step: `WordDecoder.step`.
        state: a new state from `start`, with room for `num_beams`.
    """

    def penalty(num_words: int) -> float:
        return float(((5 + num_words) / 6) ** length_penalty)

    item = torch.arange(batch, device=device)[:, None]
    live = torch.zeros(batch, 1, device=device)
    live_words = torch.empty(batch, 1, 0, dtype=torch.long, device=device)
    word = torch.full((batch,), START, device=device)
    ended = torch.full((batch, num_return), -torch.inf, device=device)
    ended_words = torch.full((batch, num_return, max_words), PAD, device=device)
    for length in range(1, max_words + 1):
        logits = without_pad_and_start(step(word, state))
        scores, beams, words = _best_extensions(logits, live, 2 * num_beams)
        is_end = words == END
        # merge the hypotheses that end now with those that ended before
        candidates = (scores / penalty(length)).masked_fill(~is_end, -torch.inf)[:, :num_beams]
        ended, kept = _largest(torch.cat([ended, candidates], dim=1), num_return)
        sentences = torch.cat([live_words[item, beams], words[..., None]], dim=2)
        padded = F.pad(sentences, (0, max_words - length), value=PAD)
        ended_words = torch.cat([ended_words, padded[:, :num_beams]], dim=1)[item, kept]
        # continue the others; at most num_beams of 2 · num_beams extensions end
        live, kept = _largest(scores.masked_fill(is_end, -torch.inf), num_beams)
        beams, word = beams.gather(1, kept), words.gather(1, kept).flatten()
        live_words = sentences[item, kept]
        # log-probabilities are negative, so the largest penalty to come gives the best score
        bound = live[:, 0] / max(penalty(length + 1), penalty(max_words))
        if length == max_words or (ended[:, -1] >= bound).all():
            break
        if length == 1:
            state.expand(num_beams)
        else:
            state.select(beams)
    return _with_unfinished(ended, ended_words, live / penalty(length), live_words, num_return)


def _best_extensions(logits: Tensor, live: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, hypotheses and words [batch, count] of the likeliest extensions.

    Only the best words of each hypothesis are considered, so that the log-probabilities of all
    words are never computed.
    """
    best, words = _largest(logits, count)
    scores = best - logits.logsumexp(dim=-1, keepdim=True)
    scores, words = (each.unflatten(0, live.shape) for each in (scores, words))
    chosen, index = _largest((live[..., None] + scores).flatten(1), count)
    return chosen, index // best.shape[1], words.flatten(1).gather(1, index)


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest values of each row, in order, and their indices; ties go to the first.

    A row with fewer values is padded with −∞.
    """
    size = values.shape[1]
    has_equals = True
    if size > SMALL:
        found, index = values.topk(min(count + 1, size), dim=1)
        has_equals = bool((found[:, 1:] == found[:, :-1]).any())  # topk takes any of equal values
    if has_equals:
        found, index = values.sort(dim=1, descending=True, stable=True)
    found, index = found[:, :count], index[:, :count]
    missing = count - found.shape[1]
    if missing > 0:
        found = F.pad(found, (0, missing), value=-torch.inf)
        index = F.pad(index, (0, missing))
    return found, index


def _with_unfinished(
    ended: Tensor, ended_words: Tensor, live: Tensor, live_words: Tensor, num_return: int
) -> tuple[Tensor, Tensor]:
    """Return the ended sentences, completed by the best unfinished ones where too few ended."""
    length = live_words.shape[2]
    words = torch.cat([ended_words[..., :length], live_words], dim=1)
    scores = torch.cat([ended, live], dim=1)
    # both are sorted already; only the missing ones (−∞) move to the end
    order = (scores == -torch.inf).int().sort(dim=1, stable=True).indices[:, :num_return]
    item = torch.arange(len(words), device=words.device)[:, None]
    words, scores = words[item, order], scores[item, order]
    return words.masked_fill(scores[..., None] == -torch.inf, PAD), scores
