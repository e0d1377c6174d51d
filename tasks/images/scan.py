"""Read the image files of splits, into memory if they fit, and find broken ones."""

import contextlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from torch import Tensor

from attnkit.tasks.images.data import fit_of, module_of
from attnkit.tasks.images.decode import FULL_RANGES, header_size
from attnkit.tasks.images.depths import lines as depth_lines
from attnkit.tasks.images.depths import range_of
from attnkit.tasks.images.equal import equal_lines
from attnkit.tasks.images.folder import Files, report_failures, say_once
from attnkit.tasks.images.sets import FileImages, ImageSet, MemoryImages
from attnkit.tasks.images.shared import decoded
from attnkit.tasks.images.sizes import default_image_size, least_area, sides

_HEADERS_READ = 1024


def read_splits(
    data: Any,
    splits: Mapping[str, Files],
    channels: int | None,
    crop_min_area: float | None = None,
) -> dict[str, tuple[ImageSet, Tensor]]:
    """Return for each split its images and the indices of the files that can be decoded.

    This sets `first_of_equal` of the data module, and `value_range` if it is None, from the
    training files. It prints which files are equal byte for byte, and how files of more than 8 bits
    are read.

    Args:
        data: the data module; `image_size` (None: a size that fits the images of train),
            `interpolation`, `crop_pct`, `value_range`, `memory_gb` and `skip_corrupt` are read.
        splits: files by split, train first if it exists. Files of val and test were chosen by the
            user, so that none may be broken.
        channels: 1 or 3; None: 1 if all images of train are grey.
        crop_min_area: smallest share of a training picture that a crop keeps; None: there are no
            crops, and no whole pictures are needed.

    Raises:
        UserError: see `report_failures`.
    """
    first = next(iter(splits.values())).paths
    size = data.image_size or default_image_size(median_side(first))
    fit = fit_of(data, size)
    # A trained module fixes the range of values; in training the files decide it.
    is_open = data.value_range is None and (module_of(data) is None or data.stage == "fit")
    count = sum(len(files.paths) for files in splits.values())
    needed = 3.0 * count * math.prod(sides(size))
    area = None
    if crop_min_area is not None and "train" in splits:
        area = least_area(size, crop_min_area)
        needed += 2 * 3 * len(first) * mean_area(first, area)  # twice while being joined
    keep = needed <= memory_bytes(data.memory_gb, data.trainer)
    found: dict[str, tuple[ImageSet, Tensor]] = {}
    there: dict[str, list[str]] = {}
    keys = []
    for split, files in splits.items():
        paths, labels = files.paths, torch.tensor(files.labels, dtype=torch.int64)
        whole = area if split == "train" else None
        decode = partial(decoded, paths, channels=channels or 3, keep=keep, least_area=whole)
        pixels = decode(fit, title=f"{split} images")
        depths = {paths[number]: depth for number, depth in pixels.depths.items()}
        if is_open and (found_range := range_of(depths)):
            data.value_range = found_range
            fit = fit_of(data, size)
            as_read = {FULL_RANGES[kind] for kind, *_ in depths.values() if kind in FULL_RANGES}
            if as_read != {tuple(found_range)}:
                pixels = decode(fit, title=f"{split} images again")
        is_open = False
        named = split if found else "data"
        for line in depth_lines(named, depths, fit.value_range, brief=bool(found)):
            say_once(line)
        failures = {paths[number]: reason for number, reason in pixels.failures.items()}
        skip, given = data.skip_corrupt, split != "train"
        report_failures(failures, split, len(paths), given=given, skip_corrupt=skip)
        good = torch.ones(len(paths), dtype=torch.bool)
        good[list(pixels.failures)] = False
        # A grey set was decoded with three equal channels, of which the first is enough.
        channels = channels or (1 if pixels.grey[good].all() else 3)
        images: ImageSet
        if pixels.images is None:
            of_files = pixels.sums[:, :, :channels].clone()
            images = FileImages(paths, labels, fit, channels, of_files, whole)
        else:
            pixels_kept = pixels.images[:, :channels].contiguous()
            images = MemoryImages(pixels_kept, labels, pixels.pictures)
            images.fitted = True
            images.known_sums = pixels.sums[:, :, :channels]
        images.known_keys = pixels.keys
        found[split] = images, good.nonzero().flatten()
        there[split] = [paths[number] for number in found[split][1].tolist()]
        keys.append(pixels.keys[good])
    firsts = first_of_equal(torch.cat(keys))
    for line in equal_lines(there, {s: files.label_of for s, files in splits.items()}, firsts):
        say_once(line)
    data.first_of_equal = firsts[: len(there.get("train", ()))]
    return found


def memory_bytes(memory_gb: float | None, trainer: Trainer | None) -> float:
    """Return the bytes of pixels that a process may hold: as given, or half of the free memory."""
    if memory_gb is not None:
        return memory_gb * 1e9
    processes = (
        trainer.num_devices
        if trainer
        else int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    )
    return available_memory() / 2 / processes


def available_memory() -> int:
    """Return the free bytes of the machine, or of the process's control group if it has fewer."""
    limits = [4 * 10**9]
    with contextlib.suppress(OSError):
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        limits = [int(found[1]) * 1024] if found else limits
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        limit = int((group / "memory.max").read_text())
        limits.append(limit - int((group / "memory.current").read_text()))
    return max(0, min(limits))


def median_side(paths: Sequence[str]) -> int:
    """Return the median of the shorter sides, of about a thousand images at most."""
    step = max(1, len(paths) // _HEADERS_READ)
    short = [min(size) for path in paths[::step] if (size := header_size(path)) is not None]
    return sorted(short)[len(short) // 2] if short else 1


def mean_area(paths: Sequence[str], least_area: float) -> float:
    """Return the mean number of pixels after `read_picture` shrinks, of a thousand pictures."""
    step = max(1, len(paths) // _HEADERS_READ)
    areas = [math.prod(size) for path in paths[::step] if (size := header_size(path)) is not None]
    shrunk = [area / max(1, int(math.sqrt(area / least_area))) ** 2 for area in areas]
    return sum(shrunk) / max(1, len(shrunk))


def first_of_equal(keys: Tensor) -> list[int]:
    """Return for each key the index of the first equal key."""
    firsts: dict[int, int] = {}
    return [firsts.setdefault(key, number) for number, key in enumerate(keys.tolist())]
