"""Sentences explained word by word: where in the image a captioner looked to say each."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn

from attnkit.core.capture.calls import AttentionCall
from attnkit.core.capture.watch import watch_attention
from attnkit.interpret.explanation import Explanation
from attnkit.interpret.methods.controls import centred, drawn
from attnkit.interpret.methods.flow import Step
from attnkit.interpret.methods.gradients import sum_over
from attnkit.interpret.methods.occlusion import colours_of, in_colour
from attnkit.interpret.methods.question import Layers, Question, looking
from attnkit.interpret.methods.tokens import chosen_layers
from attnkit.interpret.progress import shown
from attnkit.interpret.sentences import Sentences, WordLogits, captioner_of
from attnkit.models.captioning.word_decoder import PAD, START

Said = Annotated[Tensor, "batch words", int]


class _Sentences(Sentences):
    """With the question that is asked of it."""

    def __init__(self, question: Question, said: Tensor) -> None:
        super().__init__(question.model, said)
        self.question = question


def explain_captions(
    model: nn.Module,
    images: Annotated[Tensor, "batch channels height width"],
    said: Any,
    method: Any,
    layers: Layers,
    options: dict[str, Any],
) -> Explanation:
    """What `attnkit.explain` gives for a captioner: a map for each word, [batch, words, rows,
    columns], 0 at PAD, and their mean over the words as the map of the image.

    y is the logit of the word said, behind the true words before it (teacher forcing).
    """
    captioner = captioner_of(model)
    assert captioner is not None
    if not isinstance(method, str) or method not in METHODS:
        got = repr(method) if isinstance(method, str) else type(method).__name__
        raise ValueError(f"method: expected one of {', '.join(METHODS)} for a captioner, got {got}")
    known = METHODS[method]
    for option in options:
        if option not in known.options:
            has = f"has {', '.join(known.options)}" if known.options else "has no options"
            raise TypeError(f"{option}: {method!r} of a captioner {has}")
    if layers is not None and not known.has_layers:
        raise ValueError(f"layers: {method!r} does not use attention layers; leave it out")
    question = Question(captioner, images, layers=layers)
    if said is not None:
        said = _checked(said, question, captioner)
    with looking(captioner):
        if said is None:
            said = captioner.generate(question.images.detach()).words
        sentences = _Sentences(question, said)
        question.forward = sentences.ask
        with torch.no_grad():
            logits = sentences.logits(question.images)
        words = known.function(sentences, **options)
    words = words.detach() * (sentences.said != PAD)[..., None, None]
    number = (sentences.said != PAD).sum(dim=1).clamp(min=1)
    chosen = sentences.said[..., None]

    def again(model: nn.Module, images: Tensor, said: Tensor) -> Tensor:
        found = explain_captions(model, images, said, method, layers, options).words
        assert found is not None
        return found

    def one_word(image: int, word: int) -> nn.Module:
        return WordLogits(captioner, sentences.before[image, : word + 1])

    return Explanation(
        method=method,
        map=words.sum(dim=1) / number[:, None, None],
        tokens=None,
        num_prefix_tokens=0,
        target=sentences.said,
        predicted=logits.argmax(dim=2),
        logit=logits.gather(2, chosen)[..., 0],
        probability=logits.softmax(dim=2).gather(2, chosen)[..., 0],
        images=question.images.detach(),
        model=model,
        notes=question.notes,
        is_signed=known.is_signed,
        has_target=known.has_target,
        words=words,
        again=again,
        one_word=one_word,
    )


# --- methods --------------------------------------------------------------------------------------


def _attention(sentences: _Sentences) -> Tensor:
    """Mean over heads of the attention to the memory, of the last layer or the mean of those asked
    for."""
    memory = sentences.captioner.encode(sentences.question.images)
    weights = sentences.captioner.decoder.word_weights(memory, sentences.before)
    names = [f"layer {number}" for number in range(weights.shape[1])]
    chosen = torch.tensor(chosen_layers(names, sentences.question.layers, -1))
    return weights[:, chosen.to(weights.device)].mean(dim=(1, 2)).unflatten(-1, sentences.grid)


def _relevance(sentences: _Sentences) -> Tensor:
    """Gradient-weighted relevance of a Transformer decoder (Chefer et al. 2021), a word at a time.

        m ← m + r Ā_cross,   r ← r + r Ā_self        from the decoder's last layer down
        m ← m + m Ā_l                                from the encoder's, if it attends

    r over words begins as 1 at the place that says the word, m over positions as 0: a row of their
    (6) and (7) for words and memory as one sequence. Unlike their (10), the words' own relevance is
    no factor of the cross-attention, and nothing is normalized. Gradients are those of the word's
    logit, a backward for each word.
    """
    question, said = sentences.question, sentences.said
    with watch_attention(sentences.captioner) as calls:
        y = sentences.ask(question.images)
    encoder = [call for call in calls if call.layer.startswith("encoder.")]
    decoder = [call for call in calls if call.layer.startswith("decoder.")]
    pairs = _pairs(decoder, said.shape[1], sentences.grid)
    steps = _encoder_steps(encoder, question, sentences.grid)
    outputs = [call.output for pair in pairs for call in pair] + [s.call.output for s in steps]
    maps = []
    for place in range(said.shape[1]):
        gradients = iter(question.gradients(y[:, place], outputs, keep=True))
        of_pairs = [(next(gradients), next(gradients)) for _ in pairs]
        of_steps = list(gradients)
        r = torch.zeros(said.shape, dtype=torch.float32, device=said.device)
        r[:, place] = 1
        m = torch.zeros(len(said), pairs[0][1].num_keys, device=said.device)
        for (own, cross), (own_gradient, cross_gradient) in zip(
            reversed(pairs), reversed(of_pairs), strict=True
        ):
            m = m + cross.propagate(r, output_gradient=cross_gradient)
            r = r + own.propagate(r, output_gradient=own_gradient)
        for step, gradient in zip(reversed(steps), reversed(of_steps), strict=True):
            first = step.num_tokens - m.shape[1]
            m = nn.functional.pad(m, (first, 0))
            m = m + step.looked_at(m, gradient)
        maps.append(m[:, m.shape[1] - sentences.grid[0] * sentences.grid[1] :])
    return torch.stack(maps, dim=1).unflatten(-1, sentences.grid)


def _pairs(
    calls: list[Any], num_words: int, grid: tuple[int, int]
) -> list[tuple[AttentionCall, AttentionCall]]:
    """Self-attention over words and attention to the memory, layer by layer."""
    own, cross = calls[::2], calls[1::2]
    positions = grid[0] * grid[1]
    fits = len(own) == len(cross) > 0 and all(
        a.num_queries == a.num_keys == b.num_queries == num_words and b.num_keys == positions
        for a, b in zip(own, cross, strict=True)
    )
    if not fits:
        raise ValueError(
            "method: 'relevance' of sentences needs a decoder whose layers attend to the words and "
            "then to the image, as TransformerDecoder; take 'attention' or 'input_gradient'"
        )
    return list(zip(own, cross, strict=True))


def _encoder_steps(calls: list[Any], question: Question, grid: tuple[int, int]) -> list[Step]:
    """The encoder's attention, if its tokens are those of the memory behind a prefix."""
    positions = grid[0] * grid[1]
    if not calls:
        question.notes.append("relevance ends at the encoder's output, which has no attention")
        return []
    num_tokens = calls[0].num_keys
    for call in calls:
        if (
            not call.num_queries == call.num_keys == num_tokens >= positions
            or len(call.query) != question.batch
            or not call.output.requires_grad
        ):
            question.notes.append(
                f"relevance ends at the encoder's output: tokens cannot be followed through "
                f"{call.layer!r}"
            )
            return []
    rows = torch.arange(num_tokens, device=calls[0].query.device)
    return [Step(call, rows, num_tokens) for call in calls]


def _input_gradient(sentences: _Sentences) -> Tensor:
    """Σ |∂y/∂x| over channels and the pixels of a position, a backward for each word."""
    images = sentences.question.images
    y = sentences.ask(images)
    maps = []
    for place in range(sentences.said.shape[1]):
        (gradient,) = sentences.question.gradients(y[:, place], [images], keep=True)
        maps.append(sum_over(gradient.abs().sum(dim=1), sentences.grid))
    return torch.stack(maps, dim=1)


@torch.no_grad()
def _occlusion(
    sentences: _Sentences,
    *,
    baseline: float | Tensor | None = None,
    batch_size: int = 64,
) -> Tensor:
    """What the logit of each word loses when a position of the image has one colour."""
    images, grid = sentences.question.images.detach(), sentences.grid
    colour = colours_of(images, baseline)
    before = sentences.ask(images)
    places = torch.eye(grid[0] * grid[1], dtype=torch.bool, device=images.device)
    after = [
        sentences.ask(in_colour(images, some, grid, colour)).unflatten(0, (len(some), -1))
        for some in shown(places.split(max(1, batch_size // len(images))), "occlusion")
    ]
    drops = before - torch.cat(after)  # [places, batch, words]
    return drops.permute(1, 2, 0).unflatten(2, grid)


def _random(sentences: _Sentences, *, seed: int = 0) -> Tensor:
    return drawn((*sentences.said.shape, *sentences.grid), seed).to(sentences.said.device)


def _centre(sentences: _Sentences, *, spread: float = 0.25) -> Tensor:
    bump = centred(*sentences.grid, spread).to(sentences.said.device)
    return bump.expand(*sentences.said.shape, *sentences.grid).clone()


class _Method(NamedTuple):
    function: Callable[..., Tensor]
    options: tuple[str, ...] = ()
    has_layers: bool = False
    has_target: bool = True
    is_signed: bool = False


METHODS: Mapping[str, _Method] = MappingProxyType(
    {
        "attention": _Method(_attention, has_layers=True),
        "relevance": _Method(_relevance),
        "input_gradient": _Method(_input_gradient),
        "occlusion": _Method(_occlusion, ("baseline", "batch_size"), is_signed=True),
        "random": _Method(_random, ("seed",), has_target=False),
        "centre": _Method(_centre, ("spread",), has_target=False),
    }
)


def _checked(said: Any, question: Question, captioner: Any) -> Tensor:
    size = getattr(captioner.decoder, "vocabulary_size", None)
    if not isinstance(said, Tensor) or said.is_floating_point() or said.dtype == torch.bool:
        got = said.dtype if isinstance(said, Tensor) else type(said).__name__
        raise TypeError(
            f"target: expected sentences of a captioner as integers [batch, words], got {got}"
        )
    if said.ndim != 2 or len(said) != question.batch or not said.shape[1]:
        raise ValueError(
            f"target: expected sentences [{question.batch}, words], got {list(said.shape)}"
        )
    if bool((said < 0).any()) or (size is not None and bool((said >= size).any())):
        raise ValueError(
            f"target: expected words from 0 to {size - 1 if size else 'the last'}, got "
            f"{int(said.min())} to {int(said.max())}"
        )
    if bool((said[:, 0] == START).any()):
        raise ValueError("target: sentences begin with their first word, without START")
    return said.to(question.images.device).long()
