"""Read the image files of splits once: into memory if they fit; report broken and equal ones."""

import contextlib
import hashlib
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from lightning import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.progress import track
from torch import Tensor

from attnkit.core.operators.files import cache_folder
from attnkit.lightning.console import say
from attnkit.lightning.files import SHARED_FOLDER, replacing
from attnkit.tasks.images.decode import (
    FULL_RANGES,
    Depth,
    OwnSize,
    UndecodableImageError,
    depth_lines,
    header_size,
    keys_of,
    pixel_sums,
    range_of,
    read_file,
    to_channels,
)
from attnkit.tasks.images.files import Files, report_failures, say_once, shortened
from attnkit.tasks.images.sets import FileImages, ImageSet, MemoryImages, NativeImages
from attnkit.tasks.images.sizes import Fit, default_image_size, fit_of, least_area, sides
from attnkit.tasks.loaders import module_of

_HEADERS_READ = 1024
# Reading a small file is faster than waking a thread, so that a thread reads several.
_CHUNK = 32
_SILENT_FOR = 10.0  # seconds
_SHOW_PROGRESS_FROM = 2000
_NAMED = 3


def read_splits(
    data: Any,
    splits: Mapping[str, Files],
    channels: int | None,
    crop_min_area: float | None = None,
    own: OwnSize | None = None,
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
        own: how pictures become images of their own sizes; None: all get the same size.

    Raises:
        UserError: see `report_failures`.
    """
    first = next(iter(splits.values())).paths
    found_sizes = (header_size(path) for path in first[:: max(1, len(first) // _HEADERS_READ)])
    headers = [size for size in found_sizes if size is not None] or [(1, 1)]
    short = sorted(map(min, headers))
    size = data.image_size or default_image_size(short[len(short) // 2])
    how: Fit | OwnSize = own or fit_of(data, size)
    # A trained module fixes the range of values; in training the files decide it.
    is_open = data.value_range is None and (module_of(data) is None or data.stage == "fit")
    count = sum(len(files.paths) for files in splits.values())
    each = min(mean_area(headers), own.max_pixels) if own else math.prod(sides(size))
    needed, area = 3.0 * count * each, None
    if crop_min_area is not None and "train" in splits:
        area = least_area(size, crop_min_area)
        needed += 3 * len(first) * mean_area(headers, area)
    keep = needed <= memory_bytes(data.memory_gb, data.trainer)
    found: dict[str, tuple[ImageSet, Tensor]] = {}
    there: dict[str, list[str]] = {}
    keys = []
    for split, files in splits.items():
        paths, labels = files.paths, torch.tensor(files.labels, dtype=torch.int64)
        whole = area if split == "train" else None
        decode = partial(decoded, paths, channels=channels or 3, keep=keep, least_area=whole)
        pixels = decode(how, title=f"{split} images")
        depths = {paths[number]: depth for number, depth in pixels.depths.items()}
        if is_open and (found_range := range_of(depths)):
            data.value_range = found_range
            how = how._replace(value_range=found_range)
            as_read = {FULL_RANGES[kind] for kind, *_ in depths.values() if kind in FULL_RANGES}
            if as_read != {tuple(found_range)}:
                pixels = decode(how, title=f"{split} images again")
        is_open = False
        named = split if found else "data"
        for line in depth_lines(named, depths, how.value_range, brief=bool(found)):
            say_once(line)
        failures = {paths[number]: reason for number, reason in pixels.failures.items()}
        skip, given = data.skip_corrupt, split != "train"
        report_failures(failures, split, len(paths), given=given, skip_corrupt=skip)
        if shrunk := pixels.shrunk:
            more = ", …" if len(shrunk) > 1 else ""
            say_once(
                f"{split}: {len(shrunk):,} of {len(paths):,} images have more than "
                f"{how.max_tokens:,} patches and are shrunk to that: "  # type: ignore[union-attr]
                f"{paths[shrunk[0]]}{more}; data.max_image_tokens"
            )
        good = torch.ones(len(paths), dtype=torch.bool)
        good[list(pixels.failures)] = False
        # A grey set was decoded with three equal channels, of which the first is enough.
        channels = channels or (1 if pixels.grey[good].all() else 3)
        sums = pixels.sums[:, :, :channels].clone()
        images: ImageSet
        if isinstance(how, OwnSize):
            kept: Any = pixels.images
            kept = kept and [None if one is None else one[:channels].contiguous() for one in kept]
            images = NativeImages(paths, labels, how, channels, pixels.num_patches, sums, kept)
        elif pixels.images is None:
            images = FileImages(paths, labels, how, channels, sums, whole)
        else:
            of_channels = pixels.images[:, :channels].contiguous()  # type: ignore[call-overload]
            images = MemoryImages(of_channels, labels, pixels.pictures)
            images.fitted, images.known_sums = True, sums
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
    """Return the bytes of pixels that a process may hold: as given, or half of the free memory of
    the machine, or of the process's control group if it has less."""
    if memory_gb is not None:
        return memory_gb * 1e9
    free = [4 * 10**9]
    with contextlib.suppress(OSError):
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        free = [int(found[1]) * 1024] if found else free
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        limit = int((group / "memory.max").read_text())
        free.append(limit - int((group / "memory.current").read_text()))
    world = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1
    return max(0, min(free)) / 2 / (trainer.num_devices if trainer else int(world))


def mean_area(headers: Sequence[tuple[int, int]], least_area: float = math.inf) -> float:
    """Return the mean number of pixels of pictures, after `read_picture` shrinks them."""
    areas = map(math.prod, headers)
    shrunk = [area / max(1, int(math.sqrt(area / least_area))) ** 2 for area in areas]
    return sum(shrunk) / len(shrunk)


def first_of_equal(keys: Tensor) -> list[int]:
    """Return for each key the index of the first equal key."""
    firsts: dict[int, int] = {}
    return [firsts.setdefault(key, number) for number, key in enumerate(keys.tolist())]


@dataclass
class Pixels:
    """The result of decoding files: pixels, exact sums for mean and deviation, and failures.

    Attributes:
        images: uint8 [files, channels, height, width], or a list of images of their own sizes, or
            None if the pixels were not kept.
        sums: int64 [files, 2, channels], the sum of the pixels and of their squares per channel.
        grey: bool [files], whether the channels are equal.
        keys: int64 [files], keys of the bytes of each file; see `keys_of`.
        num_patches: int64 [files], of images of their own sizes.
        failures: maps the index of a file to the reason why it cannot be decoded.
        depths: maps the index of a file to what 8 bits a channel cannot hold of it.
        shrunk: indices of the files that are too large for an image of their own size.
        pictures: the whole pictures of the files, uint8 [height, width, 3], empty if the image is
            the whole picture or there is none; None if they were not requested.
    """

    images: Tensor | list[Tensor | None] | None
    sums: Tensor
    grey: Tensor
    keys: Tensor
    num_patches: Tensor
    failures: dict[int, str]
    depths: dict[int, Depth]
    shrunk: list[int]
    pictures: list[Tensor] | None = None


def decode_files(
    paths: Sequence[str],
    fit: Fit | OwnSize,
    channels: int,
    *,
    keep: bool,
    title: str,
    least_area: float | None = None,
) -> Pixels:
    """Decode every file once, in threads (Pillow releases the interpreter's lock).

    Args:
        paths: the files.
        fit: how pictures become images.
        channels: 1 or 3.
        keep: whether the pixels stay in memory.
        title: title of the progress bar.
        least_area: that of `read_picture`, if whole pictures are kept too.
    """
    count = len(paths)
    images: Any = None
    if isinstance(fit, OwnSize):
        images = [None] * count if keep else None
    elif keep:
        images = torch.empty((count, channels, *sides(fit.size)), dtype=torch.uint8)
    sums = torch.zeros((count, 2, channels), dtype=torch.int64)
    grey = torch.zeros(count, dtype=torch.bool)
    keys, num_patches = torch.zeros((2, count), dtype=torch.int64)
    failures: dict[int, str] = {}
    depths: dict[int, Depth] = {}
    shrunk: list[int] = []
    pictures = [torch.empty(0, dtype=torch.uint8)] * count if least_area else None

    def decode_one(number: int) -> None:
        try:
            read = read_file(paths[number], fit, least_area)
        except UndecodableImageError as error:
            failures[number] = str(error)
            return
        if read.depth is not None:
            depths[number] = read.depth
        if read.shrunk:
            shrunk.append(number)
        is_part = read.whole is not None and read.whole.shape[:2] != read.image.shape[1:]
        if pictures is not None and read.whole is not None and (is_part or channels == 1):
            pictures[number] = read.whole
        pixels = to_channels(read.image, channels)
        sums[number] = pixel_sums(pixels[None])[0]
        grey[number] = bool((pixels == pixels[:1]).all())
        keys[number] = keys_of([Path(paths[number]).read_bytes()])[0]
        if isinstance(fit, OwnSize):
            num_patches[number] = pixels[0].numel() // fit.patch_size**2
        if images is not None:
            images[number] = pixels

    def decode_chunk(start: int) -> int:
        stop = min(start + _CHUNK, count)
        for number in range(start, stop):
            decode_one(number)
        return stop - start

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        chunks = pool.map(decode_chunk, range(0, count, _CHUNK))
        try:
            for _ in with_progress(chunks, count, title):
                pass
        except BaseException:  # a signal: do not wait for files that are not begun
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    failures, depths = dict(sorted(failures.items())), dict(sorted(depths.items()))
    facts = sums, grey, keys, num_patches, failures, depths, sorted(shrunk)
    return Pixels(images, *facts, pictures)


def with_progress(chunks: Iterator[int], total: int, title: str) -> Iterator[int]:
    """Yield 1 for each file that the chunks have processed, and show a progress bar; without a
    terminal, print the progress every ten seconds."""
    console = Console(stderr=True)
    rank = getattr(rank_zero_only, "rank", 0)
    quiet = total < _SHOW_PROGRESS_FROM or not console.is_terminal or rank != 0
    if not console.is_terminal and rank == 0:
        chunks = _with_lines(chunks, total, title)
    steps = (1 for count in chunks for _ in range(count))
    return iter(track(steps, title, total, console=console, transient=True, disable=quiet))


def _with_lines(chunks: Iterator[int], total: int, title: str) -> Iterator[int]:
    done, last = 0, time.monotonic()
    for count in chunks:
        yield count
        done += count
        if time.monotonic() - last >= _SILENT_FOR:
            say(f"{title}: {done:,} of {total:,}")
            last = time.monotonic()


def decoded(
    paths: list[str],
    fit: Fit | OwnSize,
    channels: int,
    *,
    keep: bool,
    title: str,
    least_area: float | None = None,
) -> Pixels:
    """Return the result of `decode_files`, from the cache if it is there.

    Pixels are cached only within a sweep, in a folder that the sweep names in the environment and
    removes at its end. They are memory-mapped, so that the processes of a machine hold them once.
    Results without pixels are cached in the user's cache folder, as the scan of a large folder
    takes minutes. Both are valid until a file's name, size or modification time differs, or a file
    becomes readable. If the folder cannot be written or is full, only time is lost.
    """
    folder = os.environ.get(SHARED_FOLDER) if keep else cache_folder() / "scans"
    what: dict[str, Any] = {"keep": keep, "least_area": least_area if keep else None}
    if not folder:
        return decode_files(paths, fit, channels, title=title, **what)
    key = hashlib.sha256(repr((5, fit, channels, what)).encode())
    for path in paths:
        with contextlib.suppress(OSError):
            stat = os.stat(path)
            key.update(f"\0{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode(errors="replace"))
    file = Path(folder) / f"{key.hexdigest()[:32]}.pt"
    with _locked(file):
        with contextlib.suppress(Exception):  # absent or damaged
            found = torch.load(file, weights_only=True, mmap=True)
            if all(_fails(paths[number], fit) for number in found["failures"]):
                return Pixels(**found)
        pixels = decode_files(paths, fit, channels, title=title, **what)
        with contextlib.suppress(OSError, RuntimeError):
            images = pixels.images if isinstance(pixels.images, list) else [pixels.images]
            tensors = [
                tensor for tensor in (*images, *(pixels.pictures or ())) if tensor is not None
            ]
            size = sum(tensor.nbytes for tensor in tensors)
            if shutil.disk_usage(file.parent).free > 2 * size:
                with replacing(file) as part:
                    torch.save(vars(pixels), part)
    return pixels


def _fails(path: str, fit: Fit | OwnSize) -> bool:
    """Return True if a file still cannot be decoded: permissions may change without the file."""
    try:
        read_file(path, fit)
    except UndecodableImageError:
        return True
    return False


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the lock of a file, so that other processes wait instead of doing the same work."""
    lock = FileLock(file.with_suffix(".lock"))
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # no folder, or a file system without locks
            file.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock)
        yield


def equal_lines(
    paths: Mapping[str, Sequence[str]], labels: Mapping[str, Mapping[str, int]], firsts: list[int]
) -> Iterator[str]:
    """Yield lines about equal files, each with what to do.

    Args:
        paths: the files, by split.
        labels: maps a split to the classes by path.
        firsts: the result of `first_of_equal` for all files in order.
    """

    def named(pairs: Sequence[tuple[tuple[str, str], tuple[str, str]]]) -> str:
        count = f"{len(pairs)} {'file is' if len(pairs) == 1 else 'files are'} equal to others"
        return f"{count}: {', '.join(shortened([f'{b[1]} = {a[1]}' for a, b in pairs], _NAMED))}"

    files = [(split, path) for split, of_split in paths.items() for path in of_split]
    pairs = [(files[first], files[n]) for n, first in enumerate(firsts) if first != n]
    across = [pair for pair in pairs if pair[0][0] != pair[1][0]]
    wrong = [(a, b) for a, b in pairs if labels[a[0]][a[1]] != labels[b[0]][b[1]]]
    if pairs:
        yield f"data: {named(pairs)}; a split that is taken from train keeps them on one side"
    if across:
        yield (
            f"data: in two splits: {named(across)}; remove them from one, or the test is of "
            "images that were trained on"
        )
    if wrong:
        yield f"data: under two labels: {named(wrong)}; keep them under the right one"
