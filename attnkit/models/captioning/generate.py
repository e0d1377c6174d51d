"""From a memory to sentences: greedy, by sampling, by beam search."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from attnkit.models.captioning.beam_search import beam_search
from attnkit.models.captioning.recomputed import Recomputed
from attnkit.models.captioning.word_decoder import (
    END,
    PAD,
    START,
    WordDecoder,
    forbid_what_is_no_word,
)

Method = Literal["greedy", "beam", "sample"]


@dataclass(frozen=True, eq=False)
class Sentences:
    """What `generate` said. With `num_return`, n sentences an item, the best first; without, one,
    and the dimension n is not there.

    words: integers [batch, (n,) words]: w1, …, END, then PAD; no START. A sentence that had to
        stop at `max_words` has no END.
    scores: [batch, (n)], the logarithm of the probability of the sentence; with beam search
        divided by the length penalty, of what is drawn that at its temperature, before `top_k` and
        `top_p` leave words out.
    weights: [batch, (n,) layers, heads, words, positions], how the decoder looked at the memory
        when it said each word, 0 where that is PAD; None if not asked for. A recurrent decoder has
        one layer and one head. With the encoder's grid (height, width),
        `weights.unflatten(-1, grid)` are maps.
    """

    words: Tensor
    scores: Tensor
    weights: Tensor | None = None


def generate(
    decoder: WordDecoder,
    memory: Tensor,
    *,
    memory_mask: Tensor | None = None,
    method: Method = "greedy",
    max_words: int | None = None,
    num_beams: int | None = None,
    length_penalty: float = 0.0,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    num_return: int | None = None,
    return_weights: bool = False,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
) -> Sentences:
    """Sentences for each memory, in evaluation mode and without gradients.

    | method     | says                                                                         |
    |------------|------------------------------------------------------------------------------|
    | `"greedy"` | the likeliest next word                                                      |
    | `"beam"`   | the likeliest sentences that a search with `num_beams` hypotheses finds      |
    | `"sample"` | a word drawn from softmax(logits / temperature) of the `top_k` likeliest, of |
    |            | those the fewest whose probabilities reach `top_p` (Holtzman et al. 2020)    |

    PAD and START are never said; probabilities are of the other words. Of equal words or
    sentences the one of the lower numbers is taken.

    Args:
        decoder: a `WordDecoder`.
        memory: [batch, positions, memory_dim].
        memory_mask: booleans [batch, positions], True = there; None: all are.
        max_words: the longest sentence, END included; None: the decoder's.
        num_beams: hypotheses of beam search; None: 5.
        length_penalty: α of GNMT (Wu et al. 2016): beam search looks for the largest
            log p / ((5 + words) / 6)^α, words counted with END; 0 is the likeliest sentence.
        temperature, top_k, top_p: of sampling.
        num_return: how many sentences an item, drawn or the best found; None: one.
        return_weights: whether to give the attention over the memory, too. It is computed for the
            sentences that were said, at once and by any kernel's own definition.
        generator: of the draws; None: torch's.
        use_cache: False computes all words again at each step, to the same result.

    Raises:
        ValueError: an option that the method does not have, or out of range.
    """
    options = checked_options(
        method, num_beams, length_penalty, temperature, top_k, top_p, num_return
    )
    max_words = decoder.max_words if max_words is None else max_words
    if not 1 <= max_words <= decoder.max_words:
        raise ValueError(f"max_words: expected 1 to {decoder.max_words}, got {max_words}")
    if generator is not None and method != "sample":
        raise ValueError(f"generator: only for the method 'sample', got one with {method!r}")
    num_sentences = num_return or 1
    source = decoder if use_cache else Recomputed(decoder)
    if not len(memory):
        return _of_nothing(decoder, memory, num_return, return_weights)
    with evaluating(decoder), torch.no_grad():
        num_beams = options.pop("num_beams", num_sentences)
        state = source.start(memory, memory_mask, max_words=max_words, num_beams=num_beams)
        if method == "beam":
            words, scores = beam_search(
                source.step,
                state,
                len(memory),
                memory.device,
                max_words=max_words,
                num_beams=num_beams,
                num_return=num_sentences,
                length_penalty=length_penalty,
            )
        else:
            state.expand(num_sentences)
            draw = {**options, "generator": generator} if method == "sample" else None
            words, scores = _one_by_one(
                source.step, state, len(memory), memory.device, max_words, num_sentences, draw
            )
        weights = None
        if return_weights:
            weights = _weights_of(decoder, memory, memory_mask, words)
    if num_return is None:
        words, scores = words[:, 0], scores[:, 0]
        weights = None if weights is None else weights[:, 0]
    return Sentences(words, scores, weights)


def _of_nothing(
    decoder: WordDecoder, memory: Tensor, num_return: int | None, return_weights: bool
) -> Sentences:
    """No sentences, with all their dimensions, for a batch of no memories."""
    decoder.check(memory, None, None)
    words = torch.zeros(0, num_return or 1, 1, dtype=torch.long, device=memory.device)
    scores = memory.new_zeros(words.shape[:2])
    weights = None
    if return_weights:
        one = memory.new_zeros(1, *memory.shape[1:])
        with evaluating(decoder), torch.no_grad():
            like = _weights_of(decoder, one, None, words.new_zeros(1, *words.shape[1:]))
        weights = like[:0]
    if num_return is None:
        words, scores = words[:, 0], scores[:, 0]
        weights = None if weights is None else weights[:, 0]
    return Sentences(words, scores, weights)


def checked_options(
    method: str,
    num_beams: int | None,
    length_penalty: float,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    num_return: int | None = None,
) -> dict[str, Any]:
    """The options of the method; ValueError at those it does not have."""
    if method not in get_args(Method):
        names = ", ".join(map(repr, get_args(Method)))
        raise ValueError(f"method: expected one of {names}, got {method!r}")
    belongs = {
        "num_beams": ("beam", num_beams, None),
        "length_penalty": ("beam", length_penalty, 0.0),
        "temperature": ("sample", temperature, 1.0),
        "top_k": ("sample", top_k, None),
        "top_p": ("sample", top_p, None),
    }
    for name, (owner, value, neutral) in belongs.items():
        if value != neutral and method != owner:
            raise ValueError(f"{name}: only for the method {owner!r}, got {value} with {method!r}")
    for name, count in (("num_beams", num_beams), ("top_k", top_k), ("num_return", num_return)):
        if count is not None and count < 1:
            raise ValueError(f"{name}: expected at least 1, got {count}")
    if method == "beam":
        num_beams = max(5, num_return or 1) if num_beams is None else num_beams
        if (num_return or 1) > num_beams:
            raise ValueError(f"num_return: {num_return} of {num_beams} beams")
        return {"num_beams": num_beams}
    if method == "greedy":
        if num_return not in (None, 1):
            raise ValueError(f"num_return: greedy decoding has one sentence, got {num_return}")
        return {}
    if not 0.0 < temperature < float("inf"):
        raise ValueError(f"temperature: expected a positive number, got {temperature}")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p: expected 0 < top_p <= 1, got {top_p}")
    return {"temperature": temperature, "top_k": top_k, "top_p": top_p}


def _one_by_one(
    step: Any,
    state: Any,
    batch: int,
    device: torch.device,
    max_words: int,
    num_sentences: int,
    draw: dict[str, Any] | None,
) -> tuple[Tensor, Tensor]:
    """Words [batch, num_sentences, words] and their log-probabilities; the likeliest word each
    time, or one that is drawn."""
    word = torch.full((batch * num_sentences,), START, device=device)
    is_done = torch.zeros(len(word), dtype=torch.bool, device=device)
    scores = torch.zeros(1, device=device)
    said = []
    for _ in range(max_words):
        logits = forbid_what_is_no_word(step(word, state))
        if draw is None:
            best, word = logits.max(dim=-1)
        else:
            logits = logits / draw["temperature"]
            word = _drawn(kept_by_sampling(logits, draw["top_k"], draw["top_p"]), draw["generator"])
            best = logits.gather(1, word[:, None])[:, 0]
        scores = scores + (best - logits.logsumexp(dim=-1)).masked_fill(is_done, 0.0)
        word = word.masked_fill(is_done, PAD)
        said.append(word)
        is_done = is_done | (word == END)
        if is_done.all():
            break
    words = torch.stack(said, dim=1).unflatten(0, (batch, num_sentences))
    scores = scores.expand(batch * num_sentences).view(batch, num_sentences)
    if num_sentences > 1:
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        words = words.gather(1, order[..., None].expand(words.shape))
    return words, scores


def kept_by_sampling(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """The logits [batch, words], −∞ where a word may not be drawn: not among the `top_k` likeliest,
    or not needed for these to reach the probability `top_p`. One word is always left."""
    if top_k is not None and top_k < logits.shape[-1]:
        smallest = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if top_p is not None and top_p < 1.0:
        ordered, order = logits.sort(descending=True, stable=True)
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        is_out = (before >= top_p).scatter(1, order, before >= top_p)
        logits = logits.masked_fill(is_out, -torch.inf)
    return logits


def _drawn(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]


def _weights_of(
    decoder: WordDecoder, memory: Tensor, memory_mask: Tensor | None, words: Tensor
) -> Tensor:
    """The weights [batch, n, layers, heads, words, positions] with which sentences were said."""
    batch, num_sentences, _ = words.shape
    said = words.flatten(0, 1)
    before = torch.cat([said.new_full((len(said), 1), START), said[:, :-1]], dim=1)
    if num_sentences > 1:
        memory = memory.repeat_interleave(num_sentences, dim=0)
        if memory_mask is not None:
            memory_mask = memory_mask.repeat_interleave(num_sentences, dim=0)
    weights = decoder.word_weights(memory, before, memory_mask)
    weights = weights.masked_fill((said == PAD)[:, None, None, :, None], 0.0)
    return weights.unflatten(0, (batch, num_sentences))


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """In the block the module and all in it are in evaluation mode, afterwards as before."""
    training = [child for child in module.modules() if child.training]
    try:
        module.eval()
        yield
    finally:
        for child in training:
            child.training = True
