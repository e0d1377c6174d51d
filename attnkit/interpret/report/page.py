"""`write_page`: one HTML file that needs nothing but a browser, and the pictures inside it.

Python prepares plain data, `templates/` lays it out: `page.html`, `page.css` and `page.js`.
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

_LOSSLESS = 64 * 64  # pixels of an image up to which it is stored without loss

Section = dict[str, Any]
"""One thing that a page shows, as the template reads it: `title`, `kind` ("maps", "graph" or
"picture"), what that kind shows, and `data` for the script. Texts are plain; the template escapes
them."""
Table = Sequence[Sequence[Any]]
"""The headings, then the rows. None is an empty cell."""


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
    """Write a page; the file is there whole or not at all. Returns the path.

    Args:
        sections: of `image_sections`, `word_section` or `edge_section`, in this order.
        title: of the page.
        facts: what was shown and how it was made, `name: what`.
        found: what the numbers say, a sentence each.
        reading: what a reader may and may not conclude, in one sentence.
        table: of the scores.
        caption: of the table, what its numbers are.
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
    """Jinja2 with every text escaped, and an error for data that a template expects in vain."""
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
    """A picture of what layers do, of any size; a small screen scrolls a wide one."""
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
    """Return a scale's colours with the numbers of its ends, and of 0 where that is its middle."""
    ends = [scale.low, scale.high] if scale.low == 0 else [scale.low, 0.0, scale.high]
    colours = np.linspace(scale.low, scale.high, 256)[None]
    return {"uri": map_uri(colours, scale), "ticks": [short(end) for end in ends], "label": label}


def short(value: float) -> str:
    """Return a number in three digits, with a true minus sign."""
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
