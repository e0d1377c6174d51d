"""`write_page` writes one self-contained HTML file with embedded pictures.

Python prepares plain data, and `page.html`, `page.css` and `page.js` in `templates/` lay it out.
"""

import base64
import io
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image
from torch import Tensor

from attnkit.interpret.picture import Scale, as_picture
from attnkit.lightning.files import write_text

_LOSSLESS = 64 * 64  # images up to this number of pixels are stored without loss

Section = dict[str, Any]
"""A section of a page, as the template reads it: `title`, `kind` ("maps", "graph" or "picture"),
the fields of that kind, and `data` for the script. Texts are plain; the template escapes them."""
Table = Sequence[Sequence[Any]]
"""A row of headings, then the other rows; None is an empty cell."""


def write_page(
    path: str | os.PathLike[str],
    sections: Sequence[Section],
    *,
    title: str,
    facts: Sequence[str] = (),
    found: Sequence[str] = (),
    reading: str = "",
    table: Table = (),
    caption: str = "",
) -> Path:
    """Write a page atomically and return its path.

    Args:
        sections: results of `image_sections`, `word_sections` or `edge_sections`.
        title: title of the page.
        facts: facts on what is shown and how it was made, as `name: value`.
        found: findings, in sentences.
        reading: what a reader may and may not conclude, in one sentence.
        table: the table of scores.
        caption: the meaning of the table's numbers.
    """
    page = _environment().get_template("page.html")
    text = page.render(
        sections=sections,
        title=title,
        facts=[fact.partition(": ") for fact in facts],
        found=found,
        reading=reading,
        table=table,
        caption=caption,
    )
    path = Path(path)
    write_text(path, text)
    return path


@cache
def _environment() -> Environment:
    """Return the Jinja2 environment, which escapes all texts and raises for missing data."""
    environment = Environment(
        loader=PackageLoader("attnkit.interpret.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = _in_table
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def map_uri(values: Tensor | np.ndarray, scale: Scale) -> str:
    """Return a map [rows, columns] as a PNG of one pixel a place, in the colours of the scale."""
    picture = Image.fromarray(scale.levels(values))
    picture.putpalette(scale.palette.tobytes())
    return _uri(picture, "png", optimize=True)


def image_uri(image: Tensor) -> str:
    """Return an image [channels, height, width] of any range; a large one as a JPEG."""
    pixels = np.round(255 * as_picture(image)).astype(np.uint8)
    picture = Image.fromarray(pixels)
    if pixels.shape[0] * pixels.shape[1] <= _LOSSLESS:
        return _uri(picture, "png", optimize=True)
    return _uri(picture, "jpeg", quality=88)


def picture_section(path: Path, caption: str) -> Section:
    """Return the section with the picture of layers, which may be of any size."""
    with Image.open(path) as picture:
        uri, width = _uri(picture, "png", optimize=True), picture.width
    return {
        "kind": "picture",
        "title": "What layers do",
        "picture": uri,
        "width": width,
        "caption": caption,
        "notes": [],
    }


def colour_bar(scale: Scale, label: str) -> dict[str, Any]:
    """Return a scale's colours with the numbers at its ends, and 0 if that is the middle."""
    ends = [scale.low, scale.high] if scale.low == 0 else [scale.low, 0.0, scale.high]
    colours = np.linspace(scale.low, scale.high, 256)[None]
    return {"uri": map_uri(colours, scale), "ticks": [short(end) for end in ends], "label": label}


def short(value: float) -> str:
    """Return a number with three digits and a typographic minus sign."""
    return f"{value + 0.0:.3g}".replace("-", "−")


def _in_table(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{round(value, 3) + 0.0:.3f}".replace("-", "−")
    return str(value)


def _uri(picture: Image.Image, kind: str, **options: Any) -> str:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
