"""Recurrent decoders of words, with soft and with hard attention to the memory."""

from __future__ import annotations

from math import log
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from attnkit.core.arguments import at_least, choice, share
from attnkit.core.attend import attend
from attnkit.core.cache import KeyValueCache
from attnkit.core.kernels.hard import record_draws
from attnkit.core.masks.sequences import Padding
from attnkit.core.normalizers import Hard, Normalizer, as_normalizer
from attnkit.core.running import undone_on_error
from attnkit.core.scores.kinds import SCORES, General, Score
from attnkit.core.scores.learned import AdditiveScore
from attnkit.core.weights import Indices, attention_weights
from attnkit.models.captioning.word_decoder import (
    PAD,
    Logits,
    Memory,
    MemoryMask,
    WordDecoder,
    Words,
    num_words,
)

MemoryScore = Literal["additive", "general", "dot", "scaled_dot"]


class MemoryAttention(nn.Module):
    """Attention of one head whose values are the memory itself.

        context = Σ_j α_j memory_j,   α = normalizer_j(score(state, memory_j))

    | score                 | of state s and position m                                        |
    |-----------------------|------------------------------------------------------------------|
    | `"additive"`          | vᵀ tanh(W_s s + W_m m + b) (Bahdanau et al. 2015; Xu et al. 2015) |
    | `"general"`           | sᵀ W m (Luong et al. 2015)                                       |
    | `"dot"`, `"scaled_dot"` | s·m, and s·m / √memory_dim; state_dim must equal memory_dim    |

    States [batch, queries, state_dim] attend to a memory [batch, positions, memory_dim], for which
    `remember` computes once what does not depend on the state; [batch, queries, memory_dim] out.

    Args:
        state_dim, memory_dim: channels.
        attention_dim: channels of the additive score; other scores do not use it.
        score: how well a state matches a position.
        normalizer: how scores become weights; in evaluation, its `evaluated()` form.

    Raises:
        ValueError: an unknown score, or a dot product of unequal channels.
    """

    def __init__(
        self,
        state_dim: int,
        memory_dim: int,
        attention_dim: int,
        *,
        score: MemoryScore = "additive",
        normalizer: str | Normalizer = "softmax",
    ) -> None:
        super().__init__()
        choice(get_args(MemoryScore), score=score)
        if score in SCORES and state_dim != memory_dim:
            raise ValueError(
                f"score: {score!r} needs a state of the memory's {memory_dim} channels, "
                f"got {state_dim}; 'general' does not"
            )
        self.score_name = score
        self.normalizer = as_normalizer(normalizer)
        self.query_proj = self.key_proj = self.additive = None
        if score == "additive":
            self.query_proj = nn.Linear(state_dim, attention_dim)
            self.key_proj = nn.Linear(memory_dim, attention_dim, bias=False)
            self.additive = AdditiveScore(1, attention_dim)
        self.weight: nn.Parameter | None = None
        if score == "general":
            self.weight = nn.Parameter(torch.empty(state_dim, memory_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the matrix of "general" Xavier-uniform."""
        if self.weight is not None:
            nn.init.xavier_uniform_(self.weight)

    def remember(self, memory: Tensor) -> KeyValueCache:
        """Return the keys and values of a memory, which many steps will read."""
        key = memory if self.key_proj is None else self.key_proj(memory)
        return KeyValueCache.of(key[:, None], memory[:, None])

    def forward(self, states: Tensor, memory: KeyValueCache, mask: Padding | None = None) -> Tensor:
        """Return the contexts of the states.

        Args:
            memory: the result of `remember`.
            mask: the positions that exist.
        """
        query, score, normalizer = self._prepare(states)
        context = attend(
            query, memory.key, memory.value, score=score, mask=mask, normalizer=normalizer
        )
        return context[:, 0]

    def attention_weights(
        self,
        states: Tensor,
        memory: KeyValueCache,
        mask: Padding | None = None,
        *,
        rows: Indices = None,
        heads: Indices = None,
    ) -> Tensor:
        """Return α of `forward`, [batch, 1, queries, positions]; differentiable."""
        query, score, normalizer = self._prepare(states)
        return attention_weights(
            query, memory.key, score=score, mask=mask, normalizer=normalizer, rows=rows, heads=heads
        )

    def _prepare(self, states: Tensor) -> tuple[Tensor, Score, Normalizer]:
        score: Score
        query = states if self.query_proj is None else self.query_proj(states)
        if self.additive is not None:
            score = self.additive()
        elif self.weight is not None:
            score = General(self.weight)
        else:
            score = SCORES[self.score_name]
        normalizer = self.normalizer if self.training else self.normalizer.evaluated()
        return query[:, None], score, normalizer


class RecurrentDecoder(WordDecoder):
    """LSTM with attention to the memory at each word (Bahdanau et al. 2015; Xu et al., Show,
    Attend and Tell, 2015).

        h_0 = tanh(W_h m̄),  c_0 = tanh(W_c m̄)                  m̄ the mean of the memory
        z_t = attention(h_{t−1}, memory)                         with the chosen score
        β_t = sigmoid(w·h_{t−1} + b)                             the gating scalar; 1 without `gate`
        h_t, c_t = LSTM([E y_{t−1}, β_t z_t], (h_{t−1}, c_{t−1}))
        logits_t = W_o dropout(E y_{t−1} + W_s h_t + W_z β_t z_t)

    With the grid of an image as memory it is the captioner of Show, Attend and Tell; with the
    tokens of a sentence it is the encoder–decoder of Bahdanau et al., with an LSTM for their gated
    unit. Luong et al. attend from h_t rather than h_{t−1}; here their scores have Bahdanau's order.

    With `doubly_stochastic` λ the loss includes λ · mean over items of Σ_j (1 − Σ_t α_tj)², over
    the positions j, which encourages attention to every position (Xu et al. 2015, who sum).

    Args:
        vocabulary_size, max_words, label_smoothing: as in `WordDecoder`.
        dim: channels of the state, and of the word embedding unless `embedding_dim` is given.
        memory_dim, embedding_dim: channels of memory and embedding; None: `dim`.
        attention_dim: channels of the additive score; other scores have none; None: `dim`.
        score: "additive", "general", "dot" or "scaled_dot", as in `MemoryAttention`.
        gate: whether the context is multiplied by the gating scalar.
        doubly_stochastic: λ, not negative; the paper's is 1.
        dropout_p: dropout before the output layer, in training only.
        tie_embeddings: whether the word embedding E is also the output layer W_o.
    """

    def __init__(
        self,
        vocabulary_size: int,
        max_words: int,
        *,
        dim: int = 256,
        memory_dim: int | None = None,
        embedding_dim: int | None = None,
        attention_dim: int | None = None,
        score: MemoryScore = "additive",
        gate: bool = True,
        doubly_stochastic: float = 0.0,
        dropout_p: float = 0.0,
        tie_embeddings: bool = False,
        label_smoothing: float = 0.0,
    ) -> None:
        memory_dim = dim if memory_dim is None else memory_dim
        super().__init__(vocabulary_size, max_words, memory_dim, label_smoothing)
        embedding_dim = dim if embedding_dim is None else embedding_dim
        if attention_dim is not None and score != "additive":
            raise ValueError(
                "attention_dim: only the score 'additive' has one, "
                f"got {attention_dim} with {score!r}"
            )
        attention_dim = dim if attention_dim is None else attention_dim
        at_least(1, dim=dim, embedding_dim=embedding_dim, attention_dim=attention_dim)
        at_least(0, doubly_stochastic=doubly_stochastic)
        self.dim = dim
        self.doubly_stochastic = doubly_stochastic
        self.embedding = nn.Embedding(vocabulary_size, embedding_dim)
        self.first_hidden = nn.Linear(memory_dim, dim)
        self.first_cell = nn.Linear(memory_dim, dim)
        self.attention = MemoryAttention(
            dim, memory_dim, attention_dim, score=score, normalizer=self.normalizer()
        )
        self.gate = nn.Linear(dim, 1) if gate else None
        self.cell = nn.LSTMCell(embedding_dim + memory_dim, dim)
        self.state_proj = nn.Linear(dim, embedding_dim)
        self.context_proj = nn.Linear(memory_dim, embedding_dim, bias=False)
        self.dropout = nn.Dropout(dropout_p)
        self.head = nn.Linear(embedding_dim, vocabulary_size, bias=False)
        nn.init.normal_(self.embedding.weight, std=embedding_dim**-0.5)
        if tie_embeddings:
            self.head.weight = self.embedding.weight

    def normalizer(self) -> str | Normalizer:
        """Return the normalizer, which turns scores into weights."""
        return "softmax"

    def forward(self, memory: Memory, words: Words, memory_mask: MemoryMask = None) -> Logits:
        return self._run(memory, words, memory_mask, with_weights=False)[0]

    def word_weights(self, memory: Memory, words: Words, memory_mask: MemoryMask = None) -> Tensor:
        return self._run(memory, words, memory_mask, with_weights=True)[1][:, None, None]

    def loss(
        self, memory: Memory, words: Words, memory_mask: MemoryMask = None
    ) -> dict[str, Tensor]:
        """Return the loss to minimize, "loss" = cross_entropy + λ · doubly_stochastic, and its
        terms."""
        if not self.doubly_stochastic:
            return super().loss(memory, words, memory_mask)
        logits, weights = self._run(memory, words[:, :-1], memory_mask, with_weights=True)
        losses, is_word = self.word_losses(logits, words), words[:, 1:] != PAD
        cross_entropy = losses.sum() / num_words(words)
        looked = (weights * is_word[..., None]).sum(dim=1)
        penalty = (1 - looked).square()
        if memory_mask is not None:
            penalty = penalty * memory_mask
        doubly_stochastic = penalty.sum(dim=1).mean()
        return {
            "loss": cross_entropy + self.doubly_stochastic * doubly_stochastic,
            "cross_entropy": cross_entropy,
            "doubly_stochastic": doubly_stochastic,
        }

    def start(
        self,
        memory: Memory,
        memory_mask: MemoryMask = None,
        *,
        max_words: int | None = None,
        num_beams: int = 1,
    ) -> RecurrentState:
        self.check(memory, None, memory_mask)
        return RecurrentState(self, memory, memory_mask)

    def step(self, words: Tensor, state: RecurrentState) -> Tensor:
        with undone_on_error(state):
            embedded = self.embedding(words)
            context, _ = self._advance(embedded, state, with_weights=False)
            return self._logits(embedded, state.hidden, context)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters an optimiser should not shrink."""
        return {"embedding.weight"}

    def _run(
        self, memory: Tensor, words: Tensor, memory_mask: Tensor | None, *, with_weights: bool
    ) -> tuple[Tensor, Tensor]:
        """Return logits [batch, words, vocabulary_size] and, with `with_weights`, α [batch, words,
        positions]."""
        self.check(memory, words, memory_mask)
        state = RecurrentState(self, memory, memory_mask)
        embedded = self.embedding(words)
        hidden, contexts, weights = [], [], []
        for word in embedded.unbind(dim=1):
            context, weight = self._advance(word, state, with_weights=with_weights)
            hidden.append(state.hidden)
            contexts.append(context)
            weights.append(weight)
        logits = self._logits(embedded, torch.stack(hidden, dim=1), torch.stack(contexts, dim=1))
        return logits, torch.stack(weights, dim=1) if with_weights else memory.new_empty(0)

    def _advance(
        self, embedded: Tensor, state: RecurrentState, *, with_weights: bool
    ) -> tuple[Tensor, Tensor]:
        """Advance a word; return its gated context [rows, memory_dim] and α [rows, positions]."""
        # the hypotheses of an item are queries to its one memory
        items = state.memory.value.shape[0]
        beams = state.hidden.shape[0] // items if items else 1
        states = state.hidden.view(items, beams, self.dim)
        weights = embedded.new_empty(0)
        if with_weights:
            weights = self.attention.attention_weights(states, state.memory, state.mask)[:, 0]
            context = weights @ state.memory.value[:, 0]
            weights = weights.flatten(0, 1)
        else:
            context = self.attention(states, state.memory, state.mask)
        context = context.flatten(0, 1)
        if self.gate is not None:
            context = self.gate(state.hidden).sigmoid() * context
        state.hidden, state.cell = self.cell(
            torch.cat([embedded, context], dim=-1), (state.hidden, state.cell)
        )
        return context, weights

    def _logits(self, embedded: Tensor, hidden: Tensor, context: Tensor) -> Tensor:
        mixed = embedded + self.state_proj(hidden) + self.context_proj(context)
        return self.head(self.dropout(mixed))


class RecurrentState:
    """The decoding state of `RecurrentDecoder`: the states of the LSTM, the memory and its keys."""

    def __init__(
        self, decoder: RecurrentDecoder, memory: Tensor, memory_mask: Tensor | None
    ) -> None:
        self.memory = decoder.attention.remember(memory)
        self.mask = None if memory_mask is None else Padding(memory_mask)
        if memory_mask is None:
            mean = memory.mean(dim=1)
        else:
            is_there = memory_mask[..., None]
            count = is_there.sum(dim=1).clamp(min=1)
            mean = memory.masked_fill(~is_there, 0.0).sum(dim=1) / count
        self.hidden = decoder.first_hidden(mean).tanh()
        self.cell = decoder.first_cell(mean).tanh()

    def expand(self, num_beams: int) -> None:
        self.hidden, self.cell = (
            state.repeat_interleave(num_beams, dim=0) for state in (self.hidden, self.cell)
        )

    def select(self, beams: Tensor) -> None:
        first = torch.arange(len(beams), device=beams.device)[:, None] * beams.shape[1]
        rows = (first + beams).flatten()
        self.hidden, self.cell = self.hidden[rows], self.cell[rows]


class HardRecurrentDecoder(RecurrentDecoder):
    """A `RecurrentDecoder` whose context is one position of the memory, drawn from α in training
    and the likeliest in evaluation (Xu et al., Show, Attend and Tell, 2015, section 4.1).

        ℓ_t = −log p(word t | words before, positions s_1 … s_t),   s_t ~ α_t
        loss = mean_t ℓ_t + mean_t [Σ_{t'≥t} (ℓ_t' − b)] log α_t(s_t) − λ mean_t H(α_t)

    The brackets have no gradient: the first two terms together have, on average over the draws,
    the gradient of the expected mean of ℓ (REINFORCE, Williams 1992). b is a moving average of
    the mean of ℓ, the buffer `baseline`, which begins with log(vocabulary_size). H is the entropy.
    The paper weighs each position by the loss of the whole sentence. Here it is weighed by the loss
    of the words that can depend on it, which has the same mean and less variance. The paper uses
    the soft context instead of the draw half of the time; this class never does.

    Args:
        entropy: λ, not negative.
        baseline_decay: share of the moving average that stays at each batch.
        the others: as in `RecurrentDecoder`, which has `doubly_stochastic` besides.

    Raises:
        RuntimeError: `forward` in training and with gradients, outside of `attnkit.record_draws`:
            the draws have no gradient of their own; `loss` records them.
    """

    baseline: Tensor

    def __init__(
        self,
        vocabulary_size: int,
        max_words: int,
        *,
        dim: int = 256,
        memory_dim: int | None = None,
        embedding_dim: int | None = None,
        attention_dim: int | None = None,
        score: MemoryScore = "additive",
        gate: bool = True,
        entropy: float = 0.01,
        baseline_decay: float = 0.9,
        dropout_p: float = 0.0,
        tie_embeddings: bool = False,
        label_smoothing: float = 0.0,
    ) -> None:
        at_least(0, entropy=entropy)
        share(baseline_decay=baseline_decay)
        super().__init__(
            vocabulary_size,
            max_words,
            dim=dim,
            memory_dim=memory_dim,
            embedding_dim=embedding_dim,
            attention_dim=attention_dim,
            score=score,
            gate=gate,
            dropout_p=dropout_p,
            tie_embeddings=tie_embeddings,
            label_smoothing=label_smoothing,
        )
        self.entropy = entropy
        self.baseline_decay = baseline_decay
        self.register_buffer("baseline", torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the baseline to the loss of equally likely words."""
        self.baseline.fill_(log(self.vocabulary_size))

    def normalizer(self) -> str | Normalizer:
        return Hard("score_function")

    def loss(
        self, memory: Memory, words: Words, memory_mask: MemoryMask = None
    ) -> dict[str, Tensor]:
        """Return the loss to minimize, "loss" = cross_entropy + reinforce − λ · entropy, and its
        terms; in evaluation, where nothing is drawn, only the cross-entropy."""
        if not self.training:
            return super().loss(memory, words, memory_mask)
        with record_draws() as draws:
            logits = self(memory, words[:, :-1], memory_mask)
        log_p = torch.stack([draw.log_probability.flatten() for draw in draws], dim=1)
        entropies = torch.stack([draw.entropy.flatten() for draw in draws], dim=1)
        losses, is_word = self.word_losses(logits, words), words[:, 1:] != PAD
        count = num_words(words)
        cross_entropy = losses.sum() / count
        worse = ((losses - self.baseline) * is_word).detach()
        worse_from_here = worse.flip(1).cumsum(dim=1).flip(1)
        reinforce = (worse_from_here * log_p * is_word).sum() / count
        entropy = (entropies * is_word).sum() / count
        if torch.is_grad_enabled():
            self.baseline.lerp_(cross_entropy.detach().to(self.baseline), 1 - self.baseline_decay)
        return {
            "loss": cross_entropy + reinforce - self.entropy * entropy,
            "cross_entropy": cross_entropy,
            "reinforce": reinforce,
            "entropy": entropy,
        }
