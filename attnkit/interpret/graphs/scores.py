"""Numbers for a set of edges said to matter, from what a model predicts with and without it."""

from typing import Annotated

import torch
from torch import Tensor


def characterization(
    plus: Annotated[Tensor, "*batch"],
    minus: Annotated[Tensor, "*batch"],
    plus_weight: float = 0.5,
    minus_weight: float = 0.5,
) -> Annotated[Tensor, "*batch"]:
    """Fidelity₊ and 1 − fidelity₋ in one number, their weighted harmonic mean, 0 to 1.

        (w₊ + w₋) / (w₊ / fid₊ + w₋ / (1 − fid₋))

    Amara et al. (GraphFramEx, 2022); 0, its limit, where a term divides by zero, in
    which torch_geometric's `characterization_score` fails.

    Raises:
        ValueError: weights that are not positive.
    """
    if plus_weight <= 0 or minus_weight <= 0:
        raise ValueError(
            f"plus_weight, minus_weight: expected above 0, got {plus_weight} and {minus_weight}"
        )
    necessary, sufficient = plus.clamp(min=0), (1 - minus).clamp(min=0)
    below = plus_weight * sufficient + minus_weight * necessary
    total = (plus_weight + minus_weight) * necessary * sufficient
    return torch.where(below > 0, total / below.where(below > 0, torch.ones_like(below)), 0.0)


def unfaithfulness(
    whole: Annotated[Tensor, "*batch classes"], part: Annotated[Tensor, "*batch classes"]
) -> Annotated[Tensor, "*batch"]:
    """1 − exp(−KL(whole ‖ part)) of the probabilities with all edges and with a part of them.

    Agarwal et al. (Evaluating Explainability for Graph Neural Networks, 2023). The divergence is
    of their formula, and of torch_geometric's documentation; the code of both computes
    KL(part ‖ whole).
    """
    tiny = torch.finfo(whole.dtype).tiny
    logs = whole.clamp(min=tiny).log() - part.clamp(min=tiny).log()
    return 1 - (-(whole * logs).sum(dim=-1)).exp()
