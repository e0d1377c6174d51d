"""One attention by hand: a mask of parts, a score of your own, its weights, and which kernel ran.

    python docs/examples/own_score.py

Two sequences of unequal length look back at most eight tokens, and always at their first token.
The score is one that attnkit does not have: minus the largest difference in any channel.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import attnkit
from attnkit import Causal, Dense, Padding, Window
from attnkit.core.scores import Score


@dataclass(frozen=True, eq=False)
class Chebyshev(Score):
    """score_ij = −max_c |q_ic − k_jc| / bandwidth"""

    bandwidth: float = 1.0

    def uncapped(self, query: Tensor, key: Tensor) -> Tensor:
        return -torch.cdist(query, key, p=float("inf")) / self.bandwidth


def main(num_tokens: int = 64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, num_tokens, 16)  # [batch, heads, tokens, head_dim]
    first = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    first[:, 0] = True
    lengths = torch.tensor([num_tokens, num_tokens // 2])
    mask = (Window(8, 0) | Dense(first)) & Causal() & Padding(lengths)

    score = Chebyshev(bandwidth=0.5)
    with attnkit.record_backends() as record:
        output = attnkit.attend(query, key, value, mask=mask, score=score)
    print(record)
    print(attnkit.explain_backends(query, key, value, mask=mask, score=score))

    weights = attnkit.attention_weights(query, key, mask=mask, score=score)
    torch.testing.assert_close(weights @ value, output, atol=1e-5, rtol=1e-4)
    seen = (weights[0, 0, -1] > 0).nonzero().flatten().tolist()
    print(f"the last token of the first sequence looks at tokens {seen}")
    return output, weights


if __name__ == "__main__":
    main()
