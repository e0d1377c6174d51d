"""Attention from a recurrent state to a memory, with the scores of Bahdanau and Luong."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from attnkit.core.arguments import choice
from attnkit.core.attend import attend
from attnkit.core.cache import KeyValueCache
from attnkit.core.masks.sequences import Padding
from attnkit.core.normalizers import Normalizer, as_normalizer
from attnkit.core.scores.kinds import SCORES, General, Score
from attnkit.core.scores.learned import AdditiveScore
from attnkit.core.weights import Indices, attention_weights

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
