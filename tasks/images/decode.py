"""Decode image files to uint8 pixels, in the same way for every reader."""

import contextlib
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from attnkit.lightning.errors import UserError, first_line
from attnkit.tasks.images.sizes import Fit, Size, sides

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


class OwnSize(NamedTuple):
    """Rules by which a picture becomes an image of its own size.

    Each side becomes the nearest multiple of the patch. A picture of more than `max_tokens` patches
    is shrunk to at most that many, with its aspect ratio.

    Attributes:
        patch_size: side of a patch in pixels.
        max_tokens: maximum number of patches of an image.
        interpolation, value_range: as in `Fit`.
    """

    patch_size: int
    max_tokens: int
    interpolation: str = "bicubic"
    value_range: Sequence[float] | None = None

    @classmethod
    def of(cls, data: Any, patch_size: int, max_tokens: int) -> "OwnSize":
        return cls(patch_size, max_tokens, data.interpolation or "bicubic", data.value_range)

    @property
    def max_pixels(self) -> int:
        return self.max_tokens * self.patch_size**2

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of patches of a picture of this height and width in pixels.

        Raises:
            UndecodableImageError: a side is shorter than a patch.
        """
        if min(height, width) < self.patch_size:
            raise UndecodableImageError(
                f"{width} × {height} pixels, a side is below the patch of {self.patch_size}"
            )
        factor = min(1.0, self.patch_size * math.sqrt(self.max_tokens / (height * width)))
        rows, columns = (max(1, round(n * factor / self.patch_size)) for n in (height, width))
        if rows * columns > self.max_tokens:  # because of rounding
            if rows > columns:
                return self.max_tokens // columns, columns
            return rows, self.max_tokens // rows
        return rows, columns


class Read(NamedTuple):
    """The result of reading a file.

    Attributes:
        image: uint8 RGB [3, height, width].
        whole: the whole picture, [height, width, 3], if it was requested.
        depth: what 8 bits a channel cannot hold, if anything.
        shrunk: whether the picture has more patches than an image of its own size may have.
    """

    image: Tensor
    whole: Tensor | None
    depth: Depth | None
    shrunk: bool = False


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


def read_file(path: str | Path, fit: Fit | OwnSize, least_area: float | None = None) -> Read:
    """Read the image of `read_image`, and with `least_area` also the picture of `read_picture`; or
    an image of its own size.

    The file is decoded once if the result is the same.
    """
    if isinstance(fit, OwnSize):
        picture, _, depth = _opened(path, fit.value_range, least_area=fit.max_pixels)
        rows, columns = fit.grid(picture.height, picture.width)
        shrunk = picture.width * picture.height > 1.01 * fit.max_pixels
        size = columns * fit.patch_size, rows * fit.patch_size
        if size != picture.size:
            picture = picture.resize(size, Image.Resampling[fit.interpolation.upper()])
        return Read(as_tensor(picture), None, depth, shrunk)
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


_TOPS = {INTEGERS: (255, 1023, 4095, 16383, 65535), FLOATS: (1, 255)}
_LOST = {
    COLOURS: "the upper 8 of them are read; files that use fewer bits are dark, convert them",
    FOURTH_BAND: "it is left out, be it near infrared or transparency",
}


def range_of(depths: Mapping[str, Depth]) -> list[float] | None:
    """Return the values that become 0 and 255, one range for a data set, from its training files.

    For integers the range is 0 to the largest number of 8, 10, 12, 14 or 16 bits, for floats 0 to 1
    or 255, if it contains all values; otherwise from the lowest to the highest value.

    Args:
        depths: maps a path to what 8 bits cannot hold of the file.

    Returns:
        [low, high], or None if no file is grey with more than 8 bits.

    Raises:
        UserError: some files hold integers and others floats, with different ranges.
    """
    ranges: dict[str, tuple[str, list[float]]] = {}
    for kind, tops in _TOPS.items():
        found = {path: depth for path, depth in depths.items() if depth[0] == kind}
        low = min((low for _, low, _ in found.values()), default=math.inf)
        high = max((high for _, _, high in found.values()), default=-math.inf)
        if high < low:
            continue
        slack = 0.01 if kind == FLOATS else 0.0  # tolerance for rounding errors
        fits = (t for t in tops if -slack * t <= low and high <= t * (1 + slack))
        top = next((t for t in fits if kind == INTEGERS or high > t / 4), None)
        bottom = min(0, low)
        observed = [bottom, high if high > bottom else 1.0]
        chosen: list[float] = observed if top is None else [0, top]
        ranges[kind] = next(iter(found)), chosen
    if len({tuple(chosen) for _, chosen in ranges.values()}) > 1:
        named = " and ".join(
            f"{path} holds {kind}, {_text(chosen)}" for kind, (path, chosen) in ranges.items()
        )
        raise UserError(
            f"data: {named}\n  bring them to one kind, or set data.value_range=[low,high]"
        )
    return next((chosen for _, chosen in ranges.values()), None)


def depth_lines(
    split: str,
    depths: Mapping[str, Depth],
    value_range: Sequence[float] | None,
    *,
    brief: bool = False,
) -> Iterator[str]:
    """Yield a line for each kind of file of more than 8 bits that says how its values are mapped.

    Args:
        split: the split of the files, for the line.
        depths: maps a path to what 8 bits cannot hold of the file.
        value_range: see `Fit`.
        brief: leave out lines that repeat those of the training files.
    """
    by_kind: dict[str, dict[str, Depth]] = defaultdict(dict)
    for path, depth in depths.items():
        by_kind[depth[0]][path] = depth
    for kind, found in by_kind.items():
        files = f"{len(found):,} files have" if len(found) > 1 else f"{next(iter(found))} has"
        if kind in _LOST:
            yield f"{split}: {files} {kind}; {_LOST[kind]}"
            continue
        low, high = value_range or FULL_RANGES[kind]
        span = [min(one[1] for one in found.values()), max(one[2] for one in found.values())]
        outside = sum(one[1] < low or one[2] > high for one in found.values())
        if outside or not brief:
            line = f"{split}: {files} {kind}, {_text(span)}; {_text((low, high))} becomes 0 to 255"
            line += f", and what is outside, in {outside:,}, is cut off" if outside else ""
            yield f"{line} (value_range=[{low:g},{high:g}])"


def _text(span: Sequence[float]) -> str:
    return f"{span[0]:g} to {span[1]:g}"
