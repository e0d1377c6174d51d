"""Pieces of HTML: escaped text, images as data: URIs, tables."""

import base64
import io
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from attnkit.interpret.colours import Scale
from attnkit.interpret.page.section import Table
from attnkit.interpret.picture import as_picture

_LOSSLESS = 64 * 64  # pixels of an image up to which it is stored without loss


def escaped(text: Any) -> str:
    """Text that is safe inside an element and inside a quoted attribute."""
    return escape(str(text), quote=True)


def map_uri(values: Tensor | np.ndarray, scale: Scale) -> str:
    """A map [rows, columns] as a PNG of one pixel a place, in the colours of the scale."""
    picture = Image.fromarray(scale.levels(values))
    picture.putpalette(scale.palette.tobytes())
    return _uri(picture, "png", optimize=True)


def image_uri(image: Tensor) -> str:
    """An image [channels, height, width] of any range; a large one as a JPEG."""
    pixels = np.round(255 * as_picture(image)).astype(np.uint8)
    picture = Image.fromarray(pixels)
    if pixels.shape[0] * pixels.shape[1] <= _LOSSLESS:
        return _uri(picture, "png", optimize=True)
    return _uri(picture, "jpeg", quality=88)


def img(uri: str, alt: str, *, is_map: bool = False) -> str:
    """An image with the text that stands for it; a map is enlarged without smoothing."""
    name = ' class="map"' if is_map else ""
    return f'<img{name} src="{uri}" alt="{escaped(alt)}">'


def colour_bar(scale: Scale, label: str) -> str:
    """The scale with the numbers of its ends, and of 0 where that is its middle."""
    uri = map_uri(np.linspace(scale.low, scale.high, 256)[None], scale)
    ticks = [scale.low, scale.high] if scale.low == 0 else [scale.low, 0.0, scale.high]
    numbers = "".join(f"<span>{short(tick)}</span>" for tick in ticks)
    return (
        f'<div class="scale"><img src="{uri}" alt="">'
        f'<div class="ticks">{numbers}</div><div class="label">{escaped(label)}</div></div>'
    )


def table_html(table: Table) -> str:
    """A table; columns of numbers stand on the right."""
    columns = zip(*table.rows, strict=True) if table.rows else ([] for _ in table.header)
    is_number = [all(isinstance(one, int | float | None) for one in column) for column in columns]
    kinds = [' class="number"' if number else "" for number in is_number]
    head = "".join(
        f'<th scope="col"{kind}>{escaped(name)}</th>'
        for name, kind in zip(table.header, kinds, strict=True)
    )
    body = "".join(f"<tr>{_cells(row, kinds)}</tr>" for row in table.rows)
    rows = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="wide"><table>{rows}</table></div>'


def _cells(row: Sequence[Any], kinds: Sequence[str]) -> str:
    return "".join(
        f"<td{kind}>{escaped(_cell(value))}</td>" for value, kind in zip(row, kinds, strict=True)
    )


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{round(value, 3) + 0.0:.3f}" if isinstance(value, float) else str(value)


def short(value: float) -> str:
    """A number in three digits, with a true minus sign."""
    return f"{value + 0.0:.3g}".replace("-", "−")


def _uri(picture: Image.Image, kind: str, **options: Any) -> str:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
