"""Starting a training from the weights of an earlier one, with another head."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from attnkit.core.positions.absolute import resize_positions
from attnkit.finetune.layers import head_of
from attnkit.finetune.methods import finetuned
from attnkit.lightning.errors import UserError, first_line
from attnkit.lightning.modules.module import TaskModule, training_of
from attnkit.lightning.resume import checkpoints
from attnkit.models.preprocessing import OF_DATA
from attnkit.models.vit import ViT
from attnkit.models.weights import of_network, read_weights

_SHOWN = 3
_IMAGES = (*OF_DATA, "mean", "std")


def warm_start(module: nn.Module, given: str | Path) -> str:
    """Load the weights of an earlier run into a network; a head of another size is left out.

    Tensors are matched by name, without the prefix (`model.`, `net.`) under which a file has them.
    The head is every tensor whose shape differs only by the number of classes (words, for
    captions). If the number is the same and the classes or words differ, the head is the module
    that computes the outputs, and the embedding of words. Learned positions of attnkit's `ViT` are
    resampled to the image size. What `finetune.lora` has added is not changed.

    Args:
        module: a LightningModule or any network, changed in place.
        given: a checkpoint, or other weights as in `timm_backbone`: a file, a Hugging Face folder,
            `hf-hub:NAME`.

    Returns:
        One line about where the weights are from, and what was left out.

    Raises:
        UserError: the weights cannot be read, or other tensors do not fit; the first of them are
            named with both shapes. The module is unchanged.
    """
    state, arguments, (keys, has_unknown) = _read(given)
    network = getattr(module, "model", None)
    target = network if isinstance(network, nn.Module) else module
    here = target.state_dict()
    state = _of_target(given, state, module, target)
    state = _resampled(target, state, here)
    arguments_here = getattr(module, "hparams", {})
    outputs = _num_outputs(arguments_here) or getattr(module, "num_classes", None)
    others = _other_outputs(arguments, arguments_here)
    head = _head(state, here, _num_outputs(arguments), outputs)
    head += _outputs_of(target, outputs) if others else []
    shapes = [{n: list(t.shape) for n, t in tensors.items()} for tensors in (state, here)]
    wrong = _misfits(*shapes)
    if any(name not in head for name in wrong):
        first = _first([text for name, text in wrong.items() if name not in head])
        raise UserError(f"init: {given} does not fit the model: {first}")
    fitting = {n: t for n, t in state.items() if n not in wrong and n not in head}
    target.load_state_dict(fitting, strict=False)
    if isinstance(module, TaskModule):
        module.trained_on, module.has_unknown = keys, has_unknown
    left = f"; its head is left out: {_first([*others, *wrong.values()])}" if head or wrong else ""
    return f"init: weights of {given}{left}"


def _of_target(
    given: str | Path, state: dict[str, Tensor], module: nn.Module, target: nn.Module
) -> dict[str, Tensor]:
    """Return the part of a state dict for the target, `module.model` or the module itself."""
    rest = {name for name in state if not name.startswith("model.")}
    if target is not module and rest and rest <= module.state_dict().keys():  # from such a module
        return {n.removeprefix("model."): t for n, t in state.items() if n not in rest}
    try:
        return of_network(state, target.state_dict())
    except ValueError as error:
        raise UserError(f"init: {given}: {error}") from error


def trained_on(given: str | Path) -> dict[str, Any]:
    """Return size, mean, standard deviation, … of the images that a checkpoint was trained on.

    Raises:
        UserError: the checkpoint cannot be read.
    """
    if not _is_checkpoint(given):
        return {}
    arguments = checkpoints.load(given, mmap=True).get("hyper_parameters") or {}
    return {key: arguments[key] for key in _IMAGES if arguments.get(key) is not None}


def _read(
    given: str | Path,
) -> tuple[dict[str, Tensor], Mapping[str, Any], tuple[Tensor | None, bool]]:
    """Return the tensors, the hyper-parameters, if any, and the result of `training_of`."""
    if _is_checkpoint(given):
        from attnkit.finetune.lora_linear import merge_state_dict

        checkpoint = checkpoints.load(given)
        arguments = checkpoint.get("hyper_parameters") or {}
        try:
            state = merge_state_dict(checkpoint["state_dict"], **(arguments.get("finetune") or {}))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"init: {given}: {first_line(error, named=True)}") from error
        return state, arguments, training_of(checkpoint)
    try:
        return read_weights(given), {}, training_of({})
    except ValueError as error:
        raise UserError(f"init: {error}") from error


def _is_checkpoint(given: str | Path) -> bool:
    return Path(given).suffix == ".ckpt"


def _num_outputs(arguments: Mapping[str, Any]) -> int | None:
    """Return the number of classes or words in the hyper-parameters of a module."""
    model = arguments.get("model") or {}
    nodes = [arguments, model, (model.get("decoder") or {}) if isinstance(model, Mapping) else {}]
    for node in nodes:
        for name in ("num_classes", "vocabulary_size"):
            if isinstance(node, Mapping) and isinstance(node.get(name), int):
                return node[name]
    return None


def _head(
    state: Mapping[str, Tensor], here: Mapping[str, Tensor], there: int | None, outputs: int | None
) -> list[str]:
    """Return the names of tensors whose shapes differ by the number of outputs alone."""
    if outputs is None:
        return []
    head = []
    for name, tensor in here.items():
        shape = tuple(tensor.shape)
        if name not in state:  # the network there has no head
            if outputs in shape and not any(n.startswith(_layer(name)) for n in state):
                head.append(name)
            continue
        old = tuple(state[name].shape)
        differ = [i for i, (a, b) in enumerate(zip(old, shape, strict=False)) if a != b]
        if len(old) != len(shape) or len(differ) != 1:
            continue
        (place,) = differ
        # without hyper-parameters, the first number found is that of all
        there = there or old[place]
        if shape[place] == outputs and old[place] == there:
            head.append(name)
    return head


def _other_outputs(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return how equally many classes or words differ; empty if one side is unknown."""
    classes = [arguments.get("class_names") or () for arguments in (there, here)]
    tokenizers = [arguments.get("vocabulary") or {} for arguments in (there, here)]
    words = [tokenizer.get("words") or () for tokenizer in tokenizers]
    for of, sides in (("class", classes), ("word", words)):
        if len(sides[0]) == len(sides[1]):
            pairs = zip(*sides, strict=True)
            if texts := [f"{of} {a!r} there is {b!r} here" for a, b in pairs if a != b]:
                return texts
    is_known = all(tokenizers) and not all(words)
    return ["the tokenizer is another"] if is_known and tokenizers[0] != tokenizers[1] else []


def _outputs_of(target: nn.Module, outputs: int | None) -> list[str]:
    """Return the names of tensors with a row for each class or word: head and word embeddings."""
    found = finetuned(target)
    modules = dict(target.named_modules())
    names = {*((found and found[2].head) or head_of(target))}
    names |= {
        n for n, m in modules.items() if isinstance(m, nn.Embedding) and m.num_embeddings == outputs
    }
    return [
        f"{name}.{inner}"
        for name in sorted(names)
        for inner, tensor in modules[name].state_dict().items()
        if outputs in tensor.shape
    ]


def _layer(name: str) -> str:
    return f"{name.rpartition('.')[0]}."


def _resampled(
    target: nn.Module, state: Mapping[str, Tensor], here: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the state dict with learned positions of a square grid resampled to the grid here."""
    fitted = dict(state)
    for prefix, module in target.named_modules():
        name = f"{prefix}.position_table".lstrip(".")
        if not isinstance(module, ViT) or name not in state or name not in here:
            continue
        patch, old = module.patch_embed.patch_size, state[name]
        grid = (module.image_size[0] // patch[0], module.image_size[1] // patch[1])
        side = math.isqrt(old.shape[1])
        if old.shape != here[name].shape and side**2 == old.shape[1]:
            fitted[name] = resize_positions(old, (side, side), grid)
    return fitted


def _misfits(there: Mapping[str, list[int]], here: Mapping[str, list[int]]) -> dict[str, str]:
    """Return what does not fit, with both sides, except what LoRA adds."""
    wrong = {}
    for name in dict.fromkeys([*here, *there]):
        if there.get(name) == here.get(name) or (name not in there and "lora_" in name):
            continue
        side = "is only here" if name in here else "is only there"
        both = name in there and name in here
        wrong[name] = f"{name} {f'is {there[name]} there, {here[name]} here' if both else side}"
    return wrong


def _first(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more
