"""Generation of sentences from a memory: greedy, by sampling or by beam search."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.core.arguments import at_least, choice, positive
from attnkit.core.running import evaluating
from attnkit.models.captioning.word_decoder import (
    END,
    PAD,
    START,
    DecodingState,
    Memory,
    MemoryMask,
    WordDecoder,
    without_pad_and_start,
)

Method = Literal["greedy", "beam", "sample"]


@dataclass(frozen=True, eq=False)
class Sentences:
    """The sentences that `generate` returns. With `num_return` each item has n, the best first;
    without it each item has one, and the dimension n is missing.

    words: w1, …, END, then PAD; no START. A sentence that had to stop at `max_words` has no END.
    scores: the log-probability of each sentence, divided by the length penalty in beam search.
        Sampled sentences have the one at their temperature, before `top_k` and `top_p`.
    weights: the attention to the memory at each word, 0 at PAD; None unless requested. A recurrent
        decoder has one layer and one head. `weights.unflatten(-1, grid)` gives maps on the
        encoder's grid (height, width).
    """

    words: Annotated[Tensor, "batch *returned words", int]
    scores: Annotated[Tensor, "batch *returned"]
    weights: Annotated[Tensor, "batch *returned layers heads words positions"] | None = None


def generate(
    decoder: WordDecoder,
    memory: Memory,
    *,
    memory_mask: MemoryMask = None,
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
) -> Sentences:
    """Generate sentences for each memory, in evaluation mode and without gradients.

    | method     | gives                                                                        |
    |------------|------------------------------------------------------------------------------|
    | `"greedy"` | the likeliest next word                                                      |
    | `"beam"`   | the likeliest sentences that a search with `num_beams` hypotheses finds      |
    | `"sample"` | a word drawn from softmax(logits / temperature) of the `top_k` likeliest, of |
    |            | those the fewest whose probabilities reach `top_p` (Holtzman et al. 2020)    |

    PAD and START never occur; probabilities are over the other words. Ties go to the word or the
    sentence with the lower numbers.

    Args:
        decoder: a `WordDecoder`.
        memory_mask: True where a position exists; None: everywhere.
        max_words: longest sentence, END included; None: the decoder's.
        num_beams: number of hypotheses of beam search; None: 5.
        length_penalty: α of GNMT (Wu et al. 2016): beam search looks for the largest
            log p / ((5 + words) / 6)^α, words counted with END; 0 is the likeliest sentence.
        temperature, top_k, top_p: settings of sampling.
        num_return: number of sentences of each item, drawn or the best found; None: one.
        return_weights: whether to return the attention to the memory too. It is computed at the
            end, for these sentences.
        generator: random generator of sampling; None: torch's.

    Raises:
        ValueError: an option that the method does not have, or a value out of range.
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
    with evaluating(decoder), torch.no_grad():
        num_beams = options.pop("num_beams", num_sentences)
        state = decoder.start(memory, memory_mask, max_words=max_words, num_beams=num_beams)
        if method == "beam":
            words, scores = beam_search(
                decoder.step,
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
                decoder.step, state, len(memory), memory.device, max_words, num_sentences, draw
            )
        weights = None
        if return_weights:
            weights = _weights_of(decoder, memory, memory_mask, words)
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
    """Return the options of the method; raise ValueError for options that it does not have."""
    choice(get_args(Method), method=method)
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
    at_least(1, num_beams=num_beams, top_k=top_k, num_return=num_return)
    if method == "beam":
        num_beams = max(5, num_return or 1) if num_beams is None else num_beams
        if (num_return or 1) > num_beams:
            raise ValueError(
                f"num_return: expected at most num_beams = {num_beams}, got {num_return}"
            )
        return {"num_beams": num_beams}
    if method == "greedy":
        if num_return not in (None, 1):
            raise ValueError(f"num_return: expected 1 or None with 'greedy', got {num_return}")
        return {}
    positive(temperature=temperature)
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
    """Return words [batch, num_sentences, words] and their log-probabilities. Each word is the
    likeliest one, or is sampled if `draw` is given."""
    word = torch.full((batch * num_sentences,), START, device=device)
    is_done = torch.zeros(len(word), dtype=torch.bool, device=device)
    scores = torch.zeros(1, device=device)
    chosen = []
    for _ in range(max_words):
        logits = without_pad_and_start(step(word, state))
        if draw is None:
            best, word = logits.max(dim=-1)
        else:
            logits = logits / draw["temperature"]
            kept = kept_by_sampling(logits, draw["top_k"], draw["top_p"]).softmax(dim=-1)
            word = torch.multinomial(kept, 1, generator=draw["generator"])[:, 0]
            best = logits.gather(1, word[:, None])[:, 0]
        scores = scores + (best - logits.logsumexp(dim=-1)).masked_fill(is_done, 0.0)
        word = word.masked_fill(is_done, PAD)
        chosen.append(word)
        is_done = is_done | (word == END)
        if is_done.all():
            break
    words = torch.stack(chosen, dim=1).unflatten(0, (batch, num_sentences))
    scores = scores.expand(batch * num_sentences).view(batch, num_sentences)
    if num_sentences > 1:
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        words = words.gather(1, order[..., None].expand(words.shape))
    return words, scores


def kept_by_sampling(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Return the logits [batch, words], −∞ for words that may not be drawn: those outside the
    `top_k` likeliest, or not needed to reach the probability `top_p`. One word is always left."""
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


def _weights_of(
    decoder: WordDecoder, memory: Tensor, memory_mask: Tensor | None, words: Tensor
) -> Tensor:
    """Return the attention [batch, n, layers, heads, words, positions] to the memory."""
    batch, num_sentences, _ = words.shape
    flat = words.flatten(0, 1)
    before = torch.cat([flat.new_full((len(flat), 1), START), flat[:, :-1]], dim=1)
    if num_sentences > 1:
        memory = memory.repeat_interleave(num_sentences, dim=0)
        if memory_mask is not None:
            memory_mask = memory_mask.repeat_interleave(num_sentences, dim=0)
    weights = decoder.word_weights(memory, before, memory_mask)
    weights = weights.masked_fill((flat == PAD)[:, None, None, :, None], 0.0)
    return weights.unflatten(0, (batch, num_sentences))


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
