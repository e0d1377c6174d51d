"""Find what a model must know about images in the batches of any data module."""

from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any

import torch
from lightning import LightningDataModule
from torch import Tensor, nn
from torchvision import transforms
from torchvision.transforms import v2

from attnkit.lightning.errors import UserError
from attnkit.tasks.images.sizes import default_patch_size

_IMAGES = 1024  # number of images that mean and deviation are computed from
_STEPS = 100  # a longer list holds data, not transforms


def describe_batches(data: LightningDataModule) -> dict[str, Any]:
    """Return what `describe()` would (see `attnkit.lightning.DescribedData`), from training
    batches.

    Sizes and channels are those of the first batch. The classes are the first of these that exists:
    `class_names`, `classes` or `num_classes` of the data module; the same of its training data set
    (torchvision's have them); the largest label in `targets`, `labels` or `tensors` of the data
    set. Mean and deviation are those of about a thousand images. Pixels that are normalised already
    (some are below 0 or above 1) are left as they are; `normalized_by` is then the mean and
    deviation of the one `Normalize` of torchvision in the data module or its data set, or empty.

    Args:
        data: a data module after `setup("fit")`. Its batches are images [batch, channels, height,
            width], uint8, floats in [0, 1] or normalised floats, and integer labels [batch].

    Raises:
        UserError: the batches have another form, or the number of classes cannot be found.
    """
    name = type(data).__name__
    loader = data.train_dataloader()
    images, labels = _first(loader, name)
    channels, height, width = images.shape[1:]
    size = height if height == width else [height, width]
    if channels not in (1, 3):
        raise UserError(f"data: {name}: expected images of 1 or 3 channels, got {channels}")
    found = _classes(data, getattr(loader, "dataset", None))
    if found is None:
        raise UserError(
            f"data: {name} does not tell how many classes there are\n"
            "  give it an attribute num_classes (or class_names), or a method describe():\n"
            "  see attnkit.lightning.DescribedData"
        )
    number, names = found
    if int(labels.max()) >= number or int(labels.min()) < 0:
        raise UserError(f"data: {name} has labels outside 0 to {number - 1}")
    facts: dict[str, Any] | None = _mean_and_std(loader)
    if facts is None:
        normalized_by = _normalize(images, (data, *_within(getattr(loader, "dataset", None))))
        facts = {"mean": [0.0] * channels, "std": [1.0] * channels, "normalized_by": normalized_by}
    dataset = getattr(loader, "dataset", None)
    num_images = len(dataset) if isinstance(dataset, Sized) else None
    return {
        "image_size": size,
        "patch_size": default_patch_size(size, num_images),
        "in_channels": channels,
        "num_classes": number,
        "class_names": names,
        **facts,
    }


def _first(loader: Any, name: str) -> tuple[Tensor, Tensor]:
    batch: Any = next(iter(loader), None)
    parts = list(batch) if isinstance(batch, list | tuple) else [batch]
    images, labels = [*parts, None][:2]
    fits = (
        isinstance(images, Tensor)
        and isinstance(labels, Tensor)
        and images.ndim == 4
        and labels.shape == images.shape[:1]
        and not labels.is_floating_point()
    )
    if fits:
        return images, labels
    kinds = [_kind_of(part) for part in parts]
    raise UserError(
        f"data: {name}: expected batches of images [batch, channels, height, width] and integer\n"
        f"  labels [batch], got {', '.join(kinds)[:200]}; a module of yours may take others, and\n"
        "  a method describe() says what it has to know: attnkit.lightning.DescribedData"
    )


def _kind_of(part: Any) -> str:
    if isinstance(part, Tensor):
        return f"{str(part.dtype).removeprefix('torch.')} {list(part.shape)}"
    return type(part).__name__


def _classes(data: Any, dataset: Any) -> tuple[int, list[str]] | None:
    """Return the number of classes and their names; None if they cannot be found."""
    for owner in (data, *_within(dataset)):
        for attribute in ("class_names", "classes"):
            names = getattr(owner, attribute, None)
            if isinstance(names, list | tuple) and len(names) > 1:
                return len(names), [str(name) for name in names]
        number = getattr(owner, "num_classes", None)
        if isinstance(number, int) and number > 1:
            return number, [str(n) for n in range(number)]
    for owner in _within(dataset):
        tensors = getattr(owner, "tensors", ())
        found = [getattr(owner, "targets", None), getattr(owner, "labels", None), *tensors[1:2]]
        for labels in found:
            values = torch.as_tensor(labels) if isinstance(labels, list | Tensor) else None
            if values is not None and values.ndim == 1 and not values.is_floating_point():
                number = int(values.max()) + 1
                return number, [str(n) for n in range(number)]
    return None


def _within(dataset: Any) -> Iterator[Any]:
    """Yield a data set and the data sets that it is a subset of."""
    while dataset is not None:
        yield dataset
        dataset = getattr(dataset, "dataset", None)


def _normalize(images: Tensor, owners: Iterable[Any]) -> dict[str, list[float]]:
    """Return mean and deviation of the only `Normalize`, if undoing it gives pixels in [0, 1]."""
    steps = [step for owner in owners for step in getattr(owner, "__dict__", {}).values()]
    found = set()
    while steps:
        step = steps.pop()
        if isinstance(step, transforms.Normalize | v2.Normalize):
            found.add((tuple(map(float, step.mean)), tuple(map(float, step.std))))
            continue
        inside = getattr(step, "transforms", step)  # the steps of a Compose
        inside = list(inside.values()) if isinstance(inside, dict) else inside
        if isinstance(inside, list | tuple | nn.Sequential) and len(inside) < _STEPS:
            steps += inside
    channels = images.shape[1]
    if len(found) != 1 or not {len(numbers) for numbers in next(iter(found))} <= {1, channels}:
        return {}
    by = {n: list(numbers) for n, numbers in zip(("mean", "std"), found.pop(), strict=True)}
    by = {n: numbers * (channels // len(numbers)) for n, numbers in by.items()}
    mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in by.values())
    pixels = images * std + mean
    return by if pixels.min() > -0.01 and pixels.max() < 1.01 else {}


def _mean_and_std(loader: Any) -> dict[str, Any] | None:
    """Return mean and deviation of the pixels; None if they are normalised."""
    total = seen = squares = torch.zeros(())
    images = torch.zeros(0)
    count = 0
    for images, *_ in islice(loader, _IMAGES):
        pixels = images.double() / (255 if images.dtype == torch.uint8 else 1)
        if pixels.min() < 0 or pixels.max() > 1:
            return None
        total = total + pixels.sum(dim=(0, 2, 3))
        squares = squares + pixels.square().sum(dim=(0, 2, 3))
        seen = seen + pixels[:, 0].numel()
        count += len(images)
        if count >= _IMAGES:
            break
    mean = total / seen
    std = (squares / seen - mean.square()).clamp_min(0).sqrt()
    return {"mean": mean.tolist(), "std": std.clamp_min(1 / 255).tolist()}
