"""Image files to uint8 pixels, the same way for every reader."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from PIL import Image, ImageOps
from rich.console import Console
from rich.progress import track
from torch import Tensor

from attnkit.lightning.errors import first_line
from attnkit.tasks.images.sizes import Fit, Size, sides

# Small files are read faster than a thread is woken: threads take them by the handful.
_CHUNK = 32
_SHOW_PROGRESS_FROM = 2000
_LUMA = torch.tensor([299, 587, 114], dtype=torch.int32).view(3, 1, 1)  # ITU-R BT.601, in 1/1000
# What `read_image` does, for users of exported programs.
PREPARED = (
    "pixels from 0 to 255, RGB or grey; a picture of another size is resized with antialiasing by "
    "`interpolation` until both sides are at least image_size / crop_pct, and its centre is cut out"
)


class UndecodableImageError(Exception):
    """A file is not an image, or is broken. The message is the reason."""


def read_image(
    path: str | Path, size: Size, interpolation: str = "bicubic", crop_pct: float = 1.0
) -> Tensor:
    """The centre of an image file as uint8 RGB [3, height, width].

    It is resized with antialiasing, as by timm's transform for evaluation: until both sides are
    at least size / crop_pct; then the centre is cut out. The parts that are cut away are never
    held. The orientation of EXIF is applied. Palettes and CMYK become RGB, grey becomes three equal
    channels, 16 bits a channel become 8 (the upper ones), floats are taken to be in [0, 1], and
    transparency is laid on white.

    Raises:
        UndecodableImageError: the file cannot be decoded; the message is the reason.
    """
    try:
        with Image.open(path) as image:
            # A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size; twice the target loses nothing.
            twice = round(2 * max(sides(size)) / crop_pct)
            image.draft(None, (twice, twice))
            image.load()
            with contextlib.suppress(Exception):  # a broken EXIF block leaves the pixels usable
                ImageOps.exif_transpose(image, in_place=True)
            rgb = _to_rgb(image)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UndecodableImageError("no such file") from error
    except Exception as error:  # Pillow's plugins raise about anything on broken files
        raise UndecodableImageError(_reason(path, error)) from error
    rgb = fit_picture(rgb, Fit(size, interpolation, crop_pct))
    return torch.from_numpy(np.array(rgb)).permute(2, 0, 1)


def fit_picture(picture: Image.Image, fit: Fit) -> Image.Image:
    """The picture at the size of `fit`."""
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


def short_side(path: str | Path) -> int | None:
    """The shorter side in pixels, read from the header alone; None if there is no header."""
    try:
        with Image.open(path) as image:
            return min(image.size)
    except Exception:
        return None


def to_channels(images: Tensor, channels: int) -> Tensor:
    """RGB images [..., 3, height, width] as they are, or as grey [..., 1, height, width].

    Unlike torchvision's, this grey rounds instead of truncating: a grey pixel keeps its value.
    """
    if channels == 3:
        return images
    grey = (images.to(torch.int32) * _LUMA.to(images.device)).sum(dim=-3, keepdim=True)
    return ((grey + 500) // 1000).to(torch.uint8)


@dataclass
class Pixels:
    """What decoding files found: exact sums for mean and deviation, and the failures.

    Attributes:
        images: uint8 [files, channels, height, width], or None if the pixels were not kept.
        sums: int64 [files, 2, channels], the sum of the pixels and of their squares per channel.
        grey: bool [files], whether the channels are equal.
        failures: file number to the reason for which it cannot be decoded.
    """

    images: Tensor | None
    sums: Tensor
    grey: Tensor
    failures: dict[int, str]


def decode_files(
    paths: Sequence[str], fit: Fit, channels: int, *, keep: bool, title: str
) -> Pixels:
    """Decode every file once, in threads (Pillow releases the interpreter's lock)."""
    shape = (len(paths), channels, *sides(fit.size))
    images = torch.empty(shape, dtype=torch.uint8) if keep else None
    sums = torch.zeros((len(paths), 2, channels), dtype=torch.int64)
    grey = torch.zeros(len(paths), dtype=torch.bool)
    failures: dict[int, str] = {}

    def decode_chunk(start: int) -> int:
        decoded: dict[int, Tensor] = {}
        stop = min(start + _CHUNK, len(paths))
        for number in range(start, stop):
            try:
                decoded[number] = read_image(paths[number], *fit)
            except UndecodableImageError as error:
                failures[number] = str(error)
        if decoded:
            pixels = to_channels(torch.stack([*decoded.values()]), channels)
            rows = torch.tensor([*decoded])
            sums[rows] = pixel_sums(pixels)
            grey[rows] = (pixels == pixels[:, :1]).flatten(1).all(dim=1)
            if images is not None:
                images[rows] = pixels
        return stop - start

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        chunks = pool.map(decode_chunk, range(0, len(paths), _CHUNK))
        for _ in _with_progress(chunks, len(paths), title):
            pass
    return Pixels(images, sums, grey, dict(sorted(failures.items())))


def pixel_sums(images: Tensor) -> Tensor:
    """Sums of pixels and of squared pixels, int64 [images, 2, channels]; exact in any order."""
    wide = images.flatten(2).to(torch.int32)
    return torch.stack([wide.sum(dim=2), wide.square().sum(dim=2)], dim=1)


def _with_progress(chunks: Iterator[int], total: int, title: str) -> Iterator[int]:
    console = Console(stderr=True)
    rank = getattr(rank_zero_only, "rank", 0)
    quiet = total < _SHOW_PROGRESS_FROM or not console.is_terminal or rank != 0
    steps = (1 for count in chunks for _ in range(count))
    return iter(track(steps, title, total, console=console, transient=True, disable=quiet))


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        upper = np.clip(np.asarray(image).astype(np.int64), 0, 65535) >> 8
        image = Image.fromarray(upper.astype(np.uint8))
    elif image.mode == "F":
        scaled = np.nan_to_num(np.asarray(image)).clip(0, 1) * 255
        image = Image.fromarray(scaled.round().astype(np.uint8))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _reason(path: str | Path, error: Exception) -> str:
    if isinstance(error, PermissionError):
        return "not readable"
    with contextlib.suppress(OSError):
        if os.path.getsize(path) == 0:
            return "zero bytes"
    if isinstance(error, Image.UnidentifiedImageError):
        return "not an image"
    return first_line(error)
