"""How alike maps rank the places of an image, and a model whose weights say nothing."""

from __future__ import annotations

from copy import deepcopy
from typing import Annotated

import torch
from torch import Tensor, nn
from torchmetrics.functional import spearman_corrcoef

from attnkit.interpret.trust.places import Maps


def spearman(maps: Maps, others: Maps) -> Annotated[Tensor, "batch"]:
    """Spearman's ρ of each image. Of equal maps 1, and of a constant one with another 0."""
    # exact, where the function adds something to a denominator
    return torch.stack(
        [
            one.new_ones(())
            if torch.equal(one, other)
            else spearman_corrcoef(one, other).nan_to_num()
            for one, other in zip(maps.float().flatten(1), others.float().flatten(1), strict=True)
        ]
    )


@torch.no_grad()
def with_random_weights(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """A copy of the model with shuffled weights: the entries of each parameter change places, so
    that their sizes stay what they were in all."""
    copy = deepcopy(getattr(model, "_orig_mod", model))
    own = [module for module in copy.modules() if any(True for _ in module.parameters(False))]
    for module in reversed(own):
        for parameter in module.parameters(recurse=False):
            flat = parameter.detach().flatten()
            drawn = torch.randperm(len(flat), generator=generator).to(flat.device)
            parameter.copy_(flat[drawn].view_as(parameter))
    return copy
