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
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from attnkit.lightning.errors import first_line

# Small files are read faster than a thread is woken: threads take them by the handful.
_CHUNK = 32
_SHOW_PROGRESS_FROM = 2000
_LUMA = torch.tensor([299, 587, 114], dtype=torch.int32).view(3, 1, 1)  # ITU-R BT.601, in 1/1000
# What `read_image` does, for users of exported programs.
PREPARED = (
    "pixels from 0 to 255, RGB or grey; of a picture of another size, its largest centred square, "
    "resized with antialiasing (bicubic)"
)


class UndecodableImageError(Exception):
    """A file is not an image, or is broken. The message is the reason."""


def read_image(path: str | Path, size: int) -> Tensor:
    """The centre square of an image file as uint8 RGB [3, size, size].

    The largest centred square is resized with antialiasing (bicubic), which is what resizing the
    short side and cropping the centre gives, without ever holding the part that is cut away.
    The orientation of EXIF is applied. Palettes and CMYK become RGB, grey becomes three equal
    channels, 16 bits a channel become 8 (the upper ones), floats are taken to be in [0, 1], and
    transparency is laid on white.

    Raises:
        UndecodableImageError: the file cannot be decoded; the message is the reason.
    """
    try:
        with Image.open(path) as image:
            # A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size; twice the target loses nothing.
            image.draft(None, (2 * size, 2 * size))
            image.load()
            with contextlib.suppress(Exception):  # a broken EXIF block leaves the pixels usable
                ImageOps.exif_transpose(image, in_place=True)
            rgb = _to_rgb(image)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UndecodableImageError("no such file") from error
    except Exception as error:  # Pillow's plugins raise about anything on broken files
        raise UndecodableImageError(_reason(path, error)) from error
    side = min(rgb.size)
    if rgb.size != (size, size):
        left, top = (rgb.width - side) // 2, (rgb.height - side) // 2
        rgb = F.resized_crop(
            rgb, top, left, side, side, [size, size], InterpolationMode.BICUBIC, antialias=True
        )
    return torch.from_numpy(np.array(rgb)).permute(2, 0, 1)


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
        images: uint8 [files, channels, size, size], or None if the pixels were not kept.
        sums: int64 [files, 2, channels], the sum of the pixels and of their squares per channel.
        grey: bool [files], whether the channels are equal.
        failures: file number to the reason for which it cannot be decoded.
    """

    images: Tensor | None
    sums: Tensor
    grey: Tensor
    failures: dict[int, str]


def decode_files(
    paths: Sequence[str], size: int, channels: int, *, keep: bool, title: str
) -> Pixels:
    """Decode every file once, in threads (Pillow releases the interpreter's lock)."""
    shape = (len(paths), channels, size, size)
    images = torch.empty(shape, dtype=torch.uint8) if keep else None
    sums = torch.zeros((len(paths), 2, channels), dtype=torch.int64)
    grey = torch.zeros(len(paths), dtype=torch.bool)
    failures: dict[int, str] = {}

    def decode_chunk(start: int) -> int:
        decoded: dict[int, Tensor] = {}
        stop = min(start + _CHUNK, len(paths))
        for number in range(start, stop):
            try:
                decoded[number] = read_image(paths[number], size)
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
