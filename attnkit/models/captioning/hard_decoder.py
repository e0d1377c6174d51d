"""A recurrent decoder with hard attention: one position a word, trained by REINFORCE."""

from math import log

import torch
from torch import Tensor

from attnkit.core.arguments import at_least, share
from attnkit.core.kernels.hard import record_draws
from attnkit.core.normalizers import Hard, Normalizer
from attnkit.models.captioning.memory_attention import MemoryScore
from attnkit.models.captioning.recurrent_decoder import RecurrentDecoder
from attnkit.models.captioning.word_decoder import PAD, Memory, MemoryMask, Words, num_words


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
