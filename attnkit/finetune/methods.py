"""Fine-tuning methods that train a part of a network's parameters."""

from torch import nn

from attnkit.core.arguments import at_least, positive
from attnkit.finetune.order import head_of, layer_numbers
from attnkit.finetune.record import (
    FineTuned,
    check_new,
    is_below,
    keep_batch_norms_in_evaluation,
    keep_frozen_in_evaluation,
    note,
    train_only,
)


def full(
    model: nn.Module,
    *,
    layer_decay: float | None = None,
    head_lr: float | None = None,
    head: str | None = None,
) -> nn.Module:
    """Train all parameters.

    Args:
        model: the network; these settings are stored on it for `parameter_groups`.
        layer_decay: ratio of a layer's learning rate to that of the next layer (Clark et al.,
            ELECTRA, 2020; Bao et al., BEiT, 2021): the head has the optimizer's, the last block
            `layer_decay` times that, the one before `layer_decay`² …; None: all have the same.
        head_lr: learning rate of the head; None: the optimizer's.
        head: a glob for the names of the head's modules; None: timm's classifier, or the modules
            with a usual name.

    Returns:
        The model itself.

    Raises:
        ValueError: the model is fine-tuned already, a number is out of range, or no head is found.
    """
    check_new(model)
    check_rates(layer_decay, head_lr)
    found = head_of(model, head) if (layer_decay, head_lr, head) != (None, None, None) else ()
    note(model, FineTuned("full", found, {"head": head}, layer_decay, head_lr))
    return model


def head_only(model: nn.Module, *, cache: bool = True, head: str | None = None) -> nn.Module:
    """Train only the head (linear probing); all else is frozen and in evaluation mode.

    Args:
        model: the network.
        cache: whether the callback `CachedFeatures`, which every `attnkit.lightning.TaskModule`
            then adds, computes the features of each sample only once.
        head: as in `full`.

    Raises:
        ValueError: the model is fine-tuned already, or no head is found.
    """
    check_new(model)
    found = head_of(model, head)
    if not found:
        raise ValueError(
            f"head: {type(model).__name__} has no head that can be found by its name; give head=…"
        )
    train_only(model, lambda name: is_below(name, found))
    keep_frozen_in_evaluation(model)
    note(model, FineTuned("head", found, {"cache": cache, "head": head}))
    return model


def last_blocks(
    model: nn.Module,
    num_blocks: int = 2,
    *,
    layer_decay: float | None = None,
    head_lr: float | None = None,
    head: str | None = None,
) -> nn.Module:
    """Train the last blocks, everything after them, and the head.

    Everything before is frozen and in evaluation mode: no dropout, norms with their running
    statistics, and no gradients.

    Args:
        model: a network with blocks, known by timm's `group_matcher`, else by the lists in it.
        num_blocks: number of trained blocks.
        layer_decay, head_lr, head: as in `full`.

    Raises:
        ValueError: the model is fine-tuned already, has fewer blocks, or no blocks.
    """
    check_new(model)
    whole_number(num_blocks=num_blocks)
    check_rates(layer_decay, head_lr)
    found = head_of(model, head)
    numbers = layer_numbers(model, found)
    total = max((n for name, n in numbers.items() if not is_below(name, found)), default=0)
    if not total:
        raise ValueError(
            f"num_blocks: {type(model).__name__} has no blocks that attnkit recognizes"
        )
    if num_blocks > total:
        raise ValueError(f"num_blocks: expected at most {total}, its blocks, got {num_blocks}")
    train_only(model, lambda name: numbers.get(name, 0) > total - num_blocks)
    keep_frozen_in_evaluation(model)
    options = {"num_blocks": num_blocks, "head": head}
    note(model, FineTuned("last_blocks", found, options, layer_decay, head_lr))
    return model


def bitfit(
    model: nn.Module,
    *,
    layer_decay: float | None = None,
    head_lr: float | None = None,
    head: str | None = None,
) -> nn.Module:
    """Train the biases and the head (Ben Zaken et al., BitFit, 2022).

    The biases of norms are trained, too. Dropout stays as in full training; batch norms keep their
    running statistics.

    Args:
        model: the network.
        layer_decay, head_lr, head: as in `full`.

    Raises:
        ValueError: the model is fine-tuned already, or has no bias.
    """
    check_new(model)
    check_rates(layer_decay, head_lr)
    found = head_of(model, head)
    train_only(model, lambda name: name.endswith("bias") or is_below(name, found))
    outside = (n for n, p in model.named_parameters() if p.requires_grad and not is_below(n, found))
    if next(outside, None) is None:
        raise ValueError(f"bitfit: {type(model).__name__} has no bias outside of its head")
    keep_batch_norms_in_evaluation(model)
    note(model, FineTuned("bitfit", found, {"head": head}, layer_decay, head_lr))
    return model


def check_rates(layer_decay: float | None, head_lr: float | None) -> None:
    """Raise ValueError if a decay or learning rate is out of range."""
    if layer_decay is not None and not 0 < layer_decay <= 1:
        raise ValueError(f"layer_decay: expected above 0 and at most 1, got {layer_decay!r}")
    if head_lr is not None:
        positive(head_lr=head_lr)


def whole_number(**arguments: object) -> None:
    """Raise ValueError unless each argument is an integer above 0."""
    for name, value in arguments.items():
        if type(value) is not int:
            raise ValueError(f"{name}: expected an integer, got {value!r}")
        at_least(1, **{name: value})
