"""Image files to uint8 pixels, the same way for every reader."""

import contextlib
import math
import os
import time
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
from attnkit.lightning.telling.say import say
from attnkit.tasks.images.sizes import Fit, Size, sides

# Small files are read faster than a thread is woken: threads take them by the handful.
_CHUNK = 32
_SILENT_FOR = 10.0  # seconds
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
    fit = Fit(size, interpolation, crop_pct)
    picture, _ = _opened(path, least_side=_least_side(fit))
    return as_tensor(fit_picture(picture, fit))


def read_picture(path: str | Path, least_area: float | None = None) -> Image.Image:
    """The whole picture of a file as RGB, from any mode as in `read_image`.

    It is shrunk by a whole factor that leaves it `least_area` pixels.
    """
    return _opened(path, least_area=least_area)[0]


def read_both(path: str | Path, fit: Fit, least_area: float) -> tuple[Tensor, Tensor]:
    """What `read_image` gives, and the picture of `read_picture` as [height, width, 3].

    The file is decoded once where that makes no difference.
    """
    whole, is_full = _opened(path, least_area=least_area)
    if is_full and min(whole.size) < 2 * _least_side(fit):
        image = as_tensor(fit_picture(whole, fit))
    else:
        image = read_image(path, *fit)
    return image, torch.from_numpy(np.array(whole))


def as_tensor(picture: Image.Image) -> Tensor:
    """RGB or grey to uint8 [channels, height, width]."""
    pixels = torch.from_numpy(np.array(picture))
    return pixels.permute(2, 0, 1) if pixels.ndim == 3 else pixels.unsqueeze(0)


def as_picture(pixels: Tensor) -> Image.Image:
    """uint8 [height, width, 3], or [height, width, 1], to RGB or grey."""
    grey = pixels.shape[-1] == 1
    return Image.fromarray(np.ascontiguousarray(pixels[..., 0] if grey else pixels))


def _least_side(fit: Fit) -> int:
    # A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size; twice the target loses nothing.
    return round(2 * max(sides(fit.size)) / fit.crop_pct)


def _opened(
    path: str | Path, least_side: int | None = None, least_area: float | None = None
) -> tuple[Image.Image, bool]:
    """RGB of a file, shrunk on the way to not less than one of both; and whether it was not."""
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
            image.load()
            with contextlib.suppress(Exception):  # a broken EXIF block leaves the pixels usable
                ImageOps.exif_transpose(image, in_place=True)
            rgb = _to_rgb(image)
            return (rgb.reduce(factor) if factor > 1 else rgb), is_full
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UndecodableImageError("no such file") from error
    except Exception as error:  # Pillow's plugins raise about anything on broken files
        raise UndecodableImageError(_reason(path, error)) from error


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


def header_size(path: str | Path) -> tuple[int, int] | None:
    """Width and height in pixels, read from the header alone; None if there is no header."""
    try:
        with Image.open(path) as image:
            return image.size
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
        pictures: the whole pictures of the files, uint8 [height, width, 3] each, empty where
            the image is all of it and where there is none; None if they were not asked for.
    """

    images: Tensor | None
    sums: Tensor
    grey: Tensor
    failures: dict[int, str]
    pictures: list[Tensor] | None = None


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
        title: of the bar that shows the progress.
        least_area: that of `read_picture`, if whole pictures are to be kept, too.
    """
    shape = (len(paths), channels, *sides(fit.size))
    images = torch.empty(shape, dtype=torch.uint8) if keep else None
    sums = torch.zeros((len(paths), 2, channels), dtype=torch.int64)
    grey = torch.zeros(len(paths), dtype=torch.bool)
    failures: dict[int, str] = {}
    pictures = [torch.empty(0, dtype=torch.uint8)] * len(paths) if least_area else None

    def decode_chunk(start: int) -> int:
        decoded: dict[int, Tensor] = {}
        stop = min(start + _CHUNK, len(paths))
        for number in range(start, stop):
            try:
                if pictures is None or least_area is None:
                    decoded[number] = read_image(paths[number], *fit)
                else:
                    decoded[number], whole = read_both(paths[number], fit, least_area)
                    if whole.shape[:2] != decoded[number].shape[1:] or channels == 1:
                        pictures[number] = whole
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
        try:
            for _ in _with_progress(chunks, len(paths), title):
                pass
        except BaseException:  # a signal: what is not begun is not waited for
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return Pixels(images, sums, grey, dict(sorted(failures.items())), pictures)


def pixel_sums(images: Tensor) -> Tensor:
    """Sums of pixels and of squared pixels, int64 [images, 2, channels]; exact in any order."""
    wide = images.flatten(2).to(torch.int32)
    return torch.stack([wide.sum(dim=2), wide.square().sum(dim=2)], dim=1)


def _with_progress(chunks: Iterator[int], total: int, title: str) -> Iterator[int]:
    console = Console(stderr=True)
    rank = getattr(rank_zero_only, "rank", 0)
    quiet = total < _SHOW_PROGRESS_FROM or not console.is_terminal or rank != 0
    if not console.is_terminal and rank == 0:
        chunks = _said(chunks, total, title)
    steps = (1 for count in chunks for _ in range(count))
    return iter(track(steps, title, total, console=console, transient=True, disable=quiet))


def _said(chunks: Iterator[int], total: int, title: str) -> Iterator[int]:
    """Where there is no bar to see, a line every ten seconds says how far it is."""
    done, last = 0, time.monotonic()
    for count in chunks:
        yield count
        done += count
        if time.monotonic() - last >= _SILENT_FOR:
            say(f"{title}: {done:,} of {total:,}")
            last = time.monotonic()


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
