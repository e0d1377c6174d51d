"""Optimizer parameter groups and the default learning-rate schedule."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

from torch.optim import Optimizer

from attnkit.core.arguments import at_least, choice

Coefficients = Literal["original", "quintic", "polar_express", "polar_express_safer"]


def muon(
    groups: Sequence[dict[str, Any]],
    *,
    lr: float = 4e-3,
    weight_decay: float = 0.05,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    ns_coefficients: Coefficients = "original",
    betas: tuple[float, float] = (0.9, 0.98),
) -> Optimizer:
    """timm's Muon (Jordan et al. 2024) for matrices and convolutions, with AdamW for the rest.

    A step of Muon has singular values of about 1: it moves directions of small gradients as far as
    those of large ones, which shortens the plateaus before attention finds out where to look.
    AdamW gets what Muon cannot treat (vectors) and what is not a map from vectors to vectors: the
    group that `parameter_groups` does not decay, of embeddings and positions.

    Args:
        groups: of `parameter_groups`.
        lr, weight_decay: of both, as Muon's steps are scaled to the size that AdamW's have.
        momentum: of Muon.
        nesterov: whether both look ahead.
        ns_steps, ns_coefficients: of Newton and Schulz's iteration, by their names in timm.
        betas: of AdamW.

    Raises:
        ValueError: a number that is out of its range, or coefficients of another name.
    """
    choice(get_args(Coefficients), ns_coefficients=ns_coefficients)
    at_least(1, ns_steps=ns_steps)
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas: expected two numbers in [0, 1), got {betas}")
    from timm.optim import Muon  # a second that other optimizers need not wait

    told = [{**group, "use_fallback": group.get("weight_decay") == 0.0} for group in groups]
    return Muon(
        told,
        lr=lr,
        weight_decay=weight_decay,
        momentum=momentum,
        nesterov=nesterov,
        ns_steps=ns_steps,
        ns_coefficients=ns_coefficients,
        betas=(betas[0], betas[1]),
    )
