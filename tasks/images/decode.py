"""Decode image files to uint8 pixels, in the same way for every reader."""

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from PIL import Image, ImageOps
from rich.console import Console
from rich.progress import track
from torch import Tensor

from attnkit.lightning.console import say
from attnkit.lightning.errors import first_line
from attnkit.tasks.images.sizes import Fit, Size, sides

# Reading a small file is faster than waking a thread, so that a thread reads several.
_CHUNK = 32
_SILENT_FOR = 10.0  # seconds
_SHOW_PROGRESS_FROM = 2000
_LUMA = torch.tensor([299, 587, 114], dtype=torch.int32).view(3, 1, 1)  # ITU-R BT.601, in 1/1000
# Describes `read_image` to users of exported programs.
PREPARED = (
    "pixels from 0 to 255, RGB or grey; a picture of another size is resized with antialiasing by "
    "`interpolation` until both sides are at least image_size / crop_pct, and its centre is cut "
    "out; values of files of more than 8 bits are brought from value_range to 0 to 255"
)
Depth = tuple[str, float, float]
"""The content of a file that 8 bits a channel cannot hold, one of the following, and its range of
values."""
INTEGERS = "integers of more than 8 bits"
FLOATS = "floats"
FULL_RANGES = {INTEGERS: (0, 65535), FLOATS: (0, 1)}  # ranges by default
COLOURS = "colours of 16 bits"
FOURTH_BAND = "a band beside the colours"


class UndecodableImageError(Exception):
    """A file is not an image, or is broken. The message is the reason."""


class Read(NamedTuple):
    """The result of reading a file.

    Attributes:
        image: uint8 RGB [3, height, width].
        whole: the whole picture, [height, width, 3], if it was requested.
        depth: what 8 bits a channel cannot hold, if anything.
    """

    image: Tensor
    whole: Tensor | None
    depth: Depth | None


def read_image(
    path: str | Path,
    size: Size,
    interpolation: str = "bicubic",
    crop_pct: float = 1.0,
    value_range: Sequence[float] | None = None,
) -> Tensor:
    """Read the centre of an image file as uint8 RGB [3, height, width].

    The picture is resized with antialiasing, as in timm's transform for evaluation, until both
    sides are at least size / crop_pct; then the centre is cut out. The parts that are cut away are
    never held in memory. The orientation of EXIF is applied. Palettes and CMYK become RGB, and grey
    becomes three equal channels. Grey of more than 8 bits is mapped from `value_range` to 0 to 255;
    colours of 16 bits keep their upper 8 bits. Transparent pixels are blended with white, except in
    TIFF files, whose fourth band may be near infrared: only their colours are read.

    Raises:
        UndecodableImageError: the file cannot be decoded; the message is the reason.
    """
    return read_file(path, Fit(size, interpolation, crop_pct, value_range)).image


def read_picture(
    path: str | Path,
    least_area: float | None = None,
    value_range: Sequence[float] | None = None,
) -> Image.Image:
    """Read the whole picture of a file as RGB, from any mode as in `read_image`.

    The picture is shrunk by a whole factor that leaves at least `least_area` pixels.
    """
    return _opened(path, value_range, least_area=least_area)[0]


def read_file(path: str | Path, fit: Fit, least_area: float | None = None) -> Read:
    """Read the image of `read_image`, and with `least_area` also the picture of `read_picture`.

    The file is decoded once if the result is the same.
    """
    whole = None
    if least_area is not None:
        picture, is_full, depth = _opened(path, fit.value_range, least_area=least_area)
        whole = torch.from_numpy(np.array(picture))
    if whole is None or not is_full or min(picture.size) >= 2 * _least_side(fit):
        picture, _, depth = _opened(path, fit.value_range, least_side=_least_side(fit))
    return Read(as_tensor(fit_picture(picture, fit)), whole, depth)


def as_tensor(picture: Image.Image) -> Tensor:
    """Convert an RGB or grey picture to uint8 [channels, height, width]."""
    pixels = torch.from_numpy(np.array(picture))
    return pixels.permute(2, 0, 1) if pixels.ndim == 3 else pixels.unsqueeze(0)


def as_picture(pixels: Tensor) -> Image.Image:
    """Convert uint8 [height, width, 3] or [height, width, 1] to an RGB or grey picture."""
    grey = pixels.shape[-1] == 1
    return Image.fromarray(np.ascontiguousarray(pixels[..., 0] if grey else pixels))


def _least_side(fit: Fit) -> int:
    # A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size; twice the target size loses nothing.
    return round(2 * max(sides(fit.size)) / fit.crop_pct)


def _opened(
    path: str | Path,
    value_range: Sequence[float] | None,
    least_side: int | None = None,
    least_area: float | None = None,
) -> tuple[Image.Image, bool, Depth | None]:
    """Read a file as RGB, shrunk to no less than `least_side` or `least_area`.

    Returns:
        the picture, True if it was not shrunk, and what 8 bits cannot hold of it.
    """
    try:
        with Image.open(path) as image:
            full, factor = image.size, 1
            if least_side is not None:
                image.draft(None, (least_side, least_side))
            if least_area is not None:
                factor = max(1, int(math.sqrt(math.prod(full) / least_area)))
                image.draft(None, (-(-full[0] // factor), -(-full[1] // factor)))
                factor //= max(1, round(full[0] / image.width))
            is_full = image.size == full and factor == 1
            packed = str(image.tile)  # cleared when the pixels are loaded
            image.load()
            with contextlib.suppress(Exception):  # a broken EXIF block leaves the pixels usable
                ImageOps.exif_transpose(image, in_place=True)
            rgb, depth = _to_rgb(image, packed, value_range)
            return (rgb.reduce(factor) if factor > 1 else rgb), is_full, depth
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UndecodableImageError("no such file") from error
    except Exception as error:  # Pillow's plugins raise almost any type on broken files
        raise UndecodableImageError(_reason(path, error)) from error


def fit_picture(picture: Image.Image, fit: Fit) -> Image.Image:
    """Resize and crop a picture to the size of `fit`."""
    high, wide = sides(fit.size)
    height, width = fit.resized(picture.height, picture.width)
    if (width, height) == picture.size == (wide, high):
        return picture
    # Pillow's box says which part of the picture fills the image, in fractions of pixels.
    left, top = round((width - wide) / 2), round((height - high) / 2)
    x, y = picture.width / width, picture.height / height
    right, bottom = min((left + wide) * x, picture.width), min((top + high) * y, picture.height)
    how = Image.Resampling[fit.interpolation.upper()]
    return picture.resize((wide, high), how, (left * x, top * y, right, bottom))


def header_size(path: str | Path) -> tuple[int, int] | None:
    """Read width and height in pixels from the header alone; return None if there is none."""
    try:
        with Image.open(path) as image:
            return image.size
    except Exception:
        return None


def to_channels(images: Tensor, channels: int) -> Tensor:
    """Return RGB images [..., 3, height, width] unchanged, or as grey [..., 1, height, width].

    Unlike torchvision, this rounds instead of truncating, so that a grey pixel keeps its value.
    """
    if channels == 3:
        return images
    grey = (images.to(torch.int32) * _LUMA.to(images.device)).sum(dim=-3, keepdim=True)
    return ((grey + 500) // 1000).to(torch.uint8)


class Pictures:
    """Pictures of different sizes in one tensor, which worker processes share.

    Args:
        shapes: height and width, int64 [pictures, 2]; 0 and 0 for an empty picture.
        pixels: the pixels of all pictures, uint8.
    """

    def __init__(self, shapes: Tensor, pixels: Tensor) -> None:
        self.shapes, self.pixels = shapes, pixels
        self.starts = torch.cat([shapes.new_zeros(1), 3 * shapes.prod(dim=1).cumsum(0)])

    @classmethod
    def of(cls, pictures: Sequence[Tensor]) -> "Pictures":
        """Build from pictures uint8 [height, width, 3]; a tensor without elements is an empty
        one."""
        shapes = torch.tensor([[*p.shape[:2]] if p.numel() else [0, 0] for p in pictures])
        return cls(shapes, torch.cat([picture.flatten() for picture in pictures]))

    def __getitem__(self, number: int) -> Tensor:
        start, stop = self.starts[number : number + 2].tolist()
        return self.pixels[start:stop].view(*self.shapes[number].tolist(), 3)


@dataclass
class Pixels:
    """The result of decoding files: pixels, exact sums for mean and deviation, and failures.

    Attributes:
        images: uint8 [files, channels, height, width], or None if the pixels were not kept.
        sums: int64 [files, 2, channels], the sum of the pixels and of their squares per channel.
        grey: bool [files], whether the channels are equal.
        keys: int64 [files], keys of the bytes of each file; see `keys_of`.
        failures: maps the index of a file to the reason why it cannot be decoded.
        depths: maps the index of a file to what 8 bits a channel cannot hold of it.
        pictures: the whole pictures of the files, empty if the image is the whole picture or there
            is none; None if they were not requested.
    """

    images: Tensor | None
    sums: Tensor
    grey: Tensor
    keys: Tensor
    failures: dict[int, str]
    depths: dict[int, Depth]
    pictures: Pictures | None = None


def decode_files(
    paths: Sequence[str],
    fit: Fit,
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
    shape = (len(paths), channels, *sides(fit.size))
    images = torch.empty(shape, dtype=torch.uint8) if keep else None
    sums = torch.zeros((len(paths), 2, channels), dtype=torch.int64)
    grey = torch.zeros(len(paths), dtype=torch.bool)
    keys = torch.zeros(len(paths), dtype=torch.int64)
    failures: dict[int, str] = {}
    depths: dict[int, Depth] = {}
    pictures = [torch.empty(0, dtype=torch.uint8)] * len(paths) if least_area else None

    def decode_chunk(start: int) -> int:
        decoded: dict[int, Tensor] = {}
        stop = min(start + _CHUNK, len(paths))
        for number in range(start, stop):
            try:
                read = read_file(paths[number], fit, least_area)
            except UndecodableImageError as error:
                failures[number] = str(error)
                continue
            decoded[number] = read.image
            if read.depth is not None:
                depths[number] = read.depth
            is_part = read.whole is not None and read.whole.shape[:2] != read.image.shape[1:]
            if pictures is not None and read.whole is not None and (is_part or channels == 1):
                pictures[number] = read.whole
        if decoded:
            pixels = to_channels(torch.stack([*decoded.values()]), channels)
            rows = torch.tensor([*decoded])
            sums[rows] = pixel_sums(pixels)
            grey[rows] = (pixels == pixels[:, :1]).flatten(1).all(dim=1)
            keys[rows] = keys_of(Path(paths[number]).read_bytes() for number in decoded)
            if images is not None:
                images[rows] = pixels
        return stop - start

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        chunks = pool.map(decode_chunk, range(0, len(paths), _CHUNK))
        try:
            for _ in with_progress(chunks, len(paths), title):
                pass
        except BaseException:  # a signal: do not wait for files that are not begun
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    failures, depths = dict(sorted(failures.items())), dict(sorted(depths.items()))
    whole = Pictures.of(pictures) if pictures else None
    return Pixels(images, sums, grey, keys, failures, depths, whole)


def keys_of(contents: Iterable[bytes]) -> Tensor:
    """Return keys, int64 [contents], equal for equal contents in any file and process.

    A key has 64 bits: among a million different contents two share one with probability 3e-8.
    """
    digests = [blake2b(content, digest_size=8).digest() for content in contents]
    return torch.tensor([int.from_bytes(d, "little", signed=True) for d in digests]).long()


def pixel_sums(images: Tensor) -> Tensor:
    """Return sums of pixels and squared pixels, int64 [images, 2, channels]; exact."""
    wide = images.flatten(2).to(torch.int32)
    return torch.stack([wide.sum(dim=2), wide.square().sum(dim=2)], dim=1)


def with_progress(chunks: Iterator[int], total: int, title: str) -> Iterator[int]:
    """Yield 1 for each file that the chunks have processed, and show a progress bar."""
    console = Console(stderr=True)
    rank = getattr(rank_zero_only, "rank", 0)
    quiet = total < _SHOW_PROGRESS_FROM or not console.is_terminal or rank != 0
    if not console.is_terminal and rank == 0:
        chunks = _with_lines(chunks, total, title)
    steps = (1 for count in chunks for _ in range(count))
    return iter(track(steps, title, total, console=console, transient=True, disable=quiet))


def _with_lines(chunks: Iterator[int], total: int, title: str) -> Iterator[int]:
    """Print the progress every ten seconds, for output without a progress bar."""
    done, last = 0, time.monotonic()
    for count in chunks:
        yield count
        done += count
        if time.monotonic() - last >= _SILENT_FOR:
            say(f"{title}: {done:,} of {total:,}")
            last = time.monotonic()


def _to_rgb(
    image: Image.Image, packed: str, value_range: Sequence[float] | None
) -> tuple[Image.Image, Depth | None]:
    depth: Depth | None = (COLOURS, 0, 65535) if ";16" in packed else None
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image)
        finite = values[np.isfinite(values)]
        low, high = (finite.min(), finite.max()) if finite.size else (0, 0)
        depth = (FLOATS if image.mode == "F" else INTEGERS, float(low), float(high))
        image = Image.fromarray(_to_bytes(values, value_range))
    elif image.format == "TIFF" and (image.mode in ("RGBA", "LA") or "RGBX" in packed):
        depth = depth or (FOURTH_BAND, 0, 255)
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return (image if image.mode == "RGB" else image.convert("RGB")), depth


def _to_bytes(values: np.ndarray, value_range: Sequence[float] | None) -> np.ndarray:
    """Map values from low to high to 0 to 255; 256 grey levels keep their values."""
    is_whole = np.issubdtype(values.dtype, np.integer)
    low, high = value_range or FULL_RANGES[INTEGERS if is_whole else FLOATS]
    if is_whole:
        scaled = (values.astype(np.int64) - int(low)) * 256 // (int(high) - int(low) + 1)
    else:
        finite = np.nan_to_num(values, nan=low, posinf=high, neginf=low)
        scaled = ((finite - low) * (255 / (high - low))).round()
    return scaled.clip(0, 255).astype(np.uint8)


def _reason(path: str | Path, error: Exception) -> str:
    if isinstance(error, PermissionError):
        return "not readable"
    with contextlib.suppress(OSError):
        if os.path.getsize(path) == 0:
            return "zero bytes"
    if isinstance(error, Image.UnidentifiedImageError):
        return "not an image"
    return first_line(error)
