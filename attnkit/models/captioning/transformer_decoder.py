"""A Transformer decoder of words and its decoding state."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from attnkit.core.arguments import at_least, choice
from attnkit.core.cache import KeyValueCache
from attnkit.core.capture.watch import capture_attention
from attnkit.core.masks.sequences import Padding
from attnkit.core.positions.absolute import LearnedPositions1d, sincos_1d
from attnkit.core.positions.relative import ALiBi, RelativeBias1d, Rotary1d, Rotation
from attnkit.core.running import undone_on_error
from attnkit.core.scores.learned import ScoreName
from attnkit.layers.transformer import Activation, DecoderBlock
from attnkit.models.captioning.word_decoder import Logits, Memory, MemoryMask, WordDecoder, Words

WordPositions = Literal["learned", "sincos", "rotary", "alibi", "relative"]


class TransformerDecoder(WordDecoder):
    """Transformer decoder (Vaswani et al. 2017) with the norms first, as in GPT-2.

        x = dropout(embedding[words] + positions)
        x = block(x, memory)    depth times: causal self-attention, cross-attention, MLP
        logits = norm(x) · embeddingᵀ

    Memory [batch, positions, memory_dim] and words [batch, words] in, logits [batch, words,
    vocabulary_size] out.

    Decoding keeps keys and values of the words in one cache for each layer, allocated once, and
    those of the memory, projected once. The hypotheses of an item are queries to one memory and one
    cache; a bias hides from each all but its own past, so that beam search copies no keys.

    Args:
        vocabulary_size, max_words, memory_dim, label_smoothing: as in `WordDecoder`; `memory_dim`
            None: `dim`.
        dim, depth, num_heads, mlp_ratio: channels, blocks, heads, and the MLP's width over `dim`.
        positions: position encoding of the words: "learned", "sincos" (fixed), "rotary" (Su et al.
            2021), "alibi" (Press et al. 2022), "relative" (a learned bias for each distance, one
            for all layers, as in T5), or None: only the causal mask conveys the order.
        tie_embeddings: whether the word embedding is also the output layer (Press and Wolf 2017).
        qkv_bias, qk_norm, score, dropout_p, attention_dropout_p, activation, norm_eps, backend: as
            in `TransformerBlock`.
    """

    def __init__(
        self,
        vocabulary_size: int,
        max_words: int,
        *,
        dim: int = 256,
        depth: int = 4,
        num_heads: int = 8,
        memory_dim: int | None = None,
        mlp_ratio: float = 4.0,
        positions: WordPositions | None = "learned",
        tie_embeddings: bool = True,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        score: ScoreName = "scaled_dot",
        dropout_p: float = 0.0,
        attention_dropout_p: float = 0.0,
        label_smoothing: float = 0.0,
        activation: Activation = "gelu",
        norm_eps: float = 1e-6,
        backend: str = "auto",
    ) -> None:
        memory_dim = dim if memory_dim is None else memory_dim
        super().__init__(vocabulary_size, max_words, memory_dim, label_smoothing)
        choice((*get_args(WordPositions), None), positions=positions)
        at_least(1, depth=depth)
        self.positions = positions
        self.embedding = nn.Embedding(vocabulary_size, dim)
        self.position_table = LearnedPositions1d(max_words, dim) if positions == "learned" else None
        self.fixed_positions: Tensor | None
        fixed = torch.empty(max_words, dim) if positions == "sincos" else None
        self.register_buffer("fixed_positions", fixed, persistent=False)
        self.rotary = Rotary1d(dim // num_heads, max_words) if positions == "rotary" else None
        self.distance_bias: ALiBi | RelativeBias1d | None = None
        if positions == "alibi":
            self.distance_bias = ALiBi(num_heads)
        elif positions == "relative":
            self.distance_bias = RelativeBias1d(num_heads, max(1, max_words - 1))
        self.dropout = nn.Dropout(dropout_p)
        self.blocks: Any = nn.ModuleList(
            DecoderBlock(
                dim,
                num_heads,
                memory_dim=memory_dim,
                mlp_ratio=mlp_ratio,
                qkv_bias=qkv_bias,
                qk_norm=qk_norm,
                score=score,
                dropout_p=dropout_p,
                attention_dropout_p=attention_dropout_p,
                activation=activation,
                norm_eps=norm_eps,
                backend=backend,
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim, eps=norm_eps)
        self.head = nn.Linear(dim, vocabulary_size, bias=False)
        if tie_embeddings:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize embedding and output layer normal, and compute fixed positions."""
        nn.init.normal_(self.embedding.weight, std=0.02)
        if self.head.weight is not self.embedding.weight:
            nn.init.normal_(self.head.weight, std=0.02)
        if self.fixed_positions is not None:
            with torch.device("cpu"):
                table = sincos_1d(*self.fixed_positions.shape)
            self.fixed_positions.copy_(table)

    def forward(self, memory: Memory, words: Words, memory_mask: MemoryMask = None) -> Logits:
        self.check(memory, words, memory_mask)
        mask = None if memory_mask is None else Padding(memory_mask)
        bias = None if self.distance_bias is None else self.distance_bias(words.shape[1])
        tokens = self._embed(words, 0)
        for block in self.blocks:
            tokens = block(tokens, memory, bias=bias, positions=self.rotary, memory_mask=mask)
        return self.head(self.norm(tokens))

    def start(
        self,
        memory: Memory,
        memory_mask: MemoryMask = None,
        *,
        max_words: int | None = None,
        num_beams: int = 1,
    ) -> TransformerState:
        self.check(memory, None, memory_mask)
        max_words = self.max_words if max_words is None else max_words
        if not 1 <= max_words <= self.max_words:
            raise ValueError(f"max_words: expected 1 to {self.max_words}, got {max_words}")
        return TransformerState(self, memory, memory_mask, max_words, num_beams)

    def step(self, words: Tensor, state: TransformerState) -> Tensor:
        with undone_on_error(state, *state.caches):
            return self._step(words, state)

    def _step(self, words: Tensor, state: TransformerState) -> Tensor:
        num_before = state.num_words
        bias = state.advance()
        if self.distance_bias is not None:
            # the cache has columns of all hypotheses, several at each word position
            row = self.distance_bias(1, num_before + 1, offset=num_before)
            row = row[..., state.places]
            bias = row if bias is None else row + bias
        rotation = None
        if self.rotary is not None:
            here = slice(num_before, num_before + 1)
            shape = (state.num_beams, -1)
            rotation = Rotation(
                self.rotary.cos[here].expand(shape), self.rotary.sin[here].expand(shape)
            )
        tokens = self._embed(words.view(-1, 1), num_before).view(-1, state.num_beams, self.dim)
        for block, cache, memory in zip(self.blocks, state.caches, state.memories, strict=True):
            tokens = block.step(
                tokens,
                cache,
                memory,
                bias=bias,
                positions=rotation,
                memory_bias=state.memory_bias,
            )
        return self.head(self.norm(tokens)).flatten(0, 1)

    def word_weights(self, memory: Memory, words: Words, memory_mask: MemoryMask = None) -> Tensor:
        with capture_attention(self, layers="blocks.*.cross_attention") as captured:
            self(memory, words, memory_mask)
        return torch.stack([weights for (weights,) in captured.values()], dim=1)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters an optimiser should not shrink: embeddings and positions."""
        names = {"embedding.weight", "position_table.table", "distance_bias.table"}
        return names & {name for name, _ in self.named_parameters()}

    @property
    def dim(self) -> int:
        """Channels."""
        return self.embedding.embedding_dim

    def _embed(self, words: Tensor, start: int) -> Tensor:
        tokens = self.embedding(words)
        if self.position_table is not None:
            tokens = self.position_table(tokens, start=start)
        elif self.fixed_positions is not None:
            tokens = tokens + self.fixed_positions[start : start + words.shape[1]]
        return self.dropout(tokens)


class TransformerState:
    """The decoding state of `TransformerDecoder`: keys and values of words and memory.

    All hypotheses of an item share one cache for each block. Each step every hypothesis writes one
    column behind those before. A hypothesis reads its own past only: a bias [batch, 1, num_beams,
    columns] is 0 there and −∞ elsewhere. When hypotheses survive, their rows of the bias are
    copied; keys and values stay where they are. Every step reads the columns of all hypotheses,
    dead ones included.

    max_words: number of steps. max_beams: largest number of hypotheses of an item.
    """

    def __init__(
        self,
        decoder: TransformerDecoder,
        memory: Tensor,
        memory_mask: Tensor | None,
        max_words: int,
        max_beams: int,
    ) -> None:
        self.batch = len(memory)
        self.max_columns = max_words * max_beams
        self.max_beams = max_beams
        self.num_beams = 1
        self.num_words = 0
        self.num_columns = 0
        self.places: list[int] = []  # the word position of each column
        self._bias: Tensor | None = None
        self._own = memory.new_empty(0)  # what hypotheses see of their new columns
        self.caches = [
            block.attention.new_cache(self.batch, self.max_columns, device=memory.device)
            for block in decoder.blocks
        ]
        self.memories = [block.cross_attention.remember(memory) for block in decoder.blocks]
        self.memory_bias = None
        if memory_mask is not None:
            # an item without any position sees all of them, whose values are 0
            is_dead = ~memory_mask.any(dim=1, keepdim=True)
            bias = memory.new_zeros(memory_mask.shape)
            bias = bias.masked_fill(~(memory_mask | is_dead), -torch.inf)
            self.memory_bias = bias[:, None, None]
            dead = is_dead[:, :, None, None]
            self.memories = [
                KeyValueCache.of(kept.key, kept.value.masked_fill(dead, 0.0))
                for kept in self.memories
            ]

    def advance(self) -> Tensor | None:
        """Add a column for each hypothesis and return the bias; None if nothing is hidden."""
        begin, end = self.num_columns, self.num_columns + self.num_beams
        self.places = self.places + [self.num_words] * self.num_beams
        self.num_words += 1
        self.num_columns = end
        if self._bias is None:
            return None
        self._bias[..., begin:end] = self._own
        return self._bias[..., :end]

    def expand(self, num_beams: int) -> None:
        """Turn the single hypothesis of each item into several with the same past."""
        if self.num_beams != 1 or not 1 <= num_beams <= self.max_beams:
            raise ValueError(
                f"num_beams: expected 1 to {self.max_beams} from 1 hypothesis, "
                f"got {num_beams} from {self.num_beams}"
            )
        self.num_beams = num_beams
        if num_beams > 1:
            shape = (self.batch, 1, num_beams, self.max_columns)
            self._bias = self._own.new_zeros(shape)
            others = ~torch.eye(num_beams, dtype=torch.bool, device=self._bias.device)
            self._own = self._bias.new_zeros(others.shape).masked_fill(others, -torch.inf)

    def select(self, beams: Tensor) -> None:
        """Continue from the chosen hypotheses of each item, integers [batch, num_beams]."""
        if beams.shape != (self.batch, self.num_beams):
            raise ValueError(
                f"beams: expected {[self.batch, self.num_beams]}, got {list(beams.shape)}"
            )
        if self._bias is not None:
            past = self._bias[..., : self.num_columns]
            past.copy_(past.gather(2, beams[:, None, :, None].expand(past.shape)))
