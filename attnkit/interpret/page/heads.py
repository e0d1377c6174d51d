"""Thumbnails of attention: of each layer and head, and of what each patch looks at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnkit.interpret.colours import Scale
from attnkit.interpret.diagnosis.diagnosis import SINK
from attnkit.interpret.page.attention import Attention
from attnkit.interpret.page.html import colour_bar, escaped, map_uri

_SIDE = 44  # pixels of a thumbnail, at least a pixel for each place


def scale_of_weights(weights: Sequence[Tensor]) -> Scale:
    """From 0 to what 99 of 100 weights are below, and at least to twice uniform attention.

    A few keys that nearly everything looks at would leave all else dark.
    """
    values = torch.cat([one.flatten() for one in weights]).sort().values
    return Scale(0.0, max(2.0, float(values[int(0.99 * (len(values) - 1))])))


def looks_data(attention: Attention, image: int, scale: Scale) -> list[dict[str, Any]]:
    """For each layer a sheet of tiles, one at the place of each patch, and the numbers said."""
    found = []
    for one in attention.looks:
        weights = one.weights[image]
        times, most = weights.max(dim=1)
        tiles = weights.unflatten(0, attention.grid).unflatten(2, attention.grid)
        found.append(
            {
                "layer": one.layer or "(itself)",
                "heads": one.num_heads,
                "sheet": map_uri(_sheet(tiles), scale),
                "most": most.tolist(),
                "times": [round(value, 1) for value in times.tolist()],
                "prefix": [round(100 * value) for value in one.prefix[image].tolist()]
                if attention.num_prefix_tokens
                else [],
            }
        )
    return found


def heads_data(attention: Attention, image: int) -> dict[str, Any]:
    """What is said of each head, by layer."""
    return {
        "layers": [one.layer or "(itself)" for one in attention.heads],
        "entropy": [_rounded(one.entropy[image]) for one in attention.heads],
        "share": [_rounded(one.share[image]) for one in attention.heads],
        "receiver": [one.receiver[image].tolist() for one in attention.heads],
        "prefix": attention.num_prefix_tokens,
        "columns": attention.columns,
    }


def heads_html(attention: Attention, image: int) -> str:
    """A row for each layer, a thumbnail for each head, under it its entropy, and sinks marked."""
    rows, columns = attention.grid
    most_heads = max(len(one.entropy[image]) for one in attention.heads)
    scale = scale_of_weights([one.weights[image] for one in attention.heads])
    tiles = torch.zeros(len(attention.heads), most_heads, rows, columns)
    for number, one in enumerate(attention.heads):
        tiles[number, : one.weights.shape[1]] = one.weights[image].unflatten(1, attention.grid)
    each = max(1, round(_SIDE / max(rows, columns)))
    names = "".join(f"<span>{escaped(one.layer or '(itself)')}</span>" for one in attention.heads)
    numbers = "".join(f"<span>{number}</span>" for number in range(most_heads))
    cells = "".join(
        _cell(layer, head, float(one.entropy[image, head]), float(one.share[image, head]))
        for layer, one in enumerate(attention.heads)
        for head in range(one.weights.shape[1])
    )
    style = (
        f"--wide: {each * columns}px; --high: {each * rows}px; --heads: {most_heads}; "
        f"--layers: {len(attention.heads)}; --sheet: url({map_uri(_sheet(tiles), scale)})"
    )
    reads = "the class token" if attention.num_prefix_tokens else "the tokens that are read"
    return (
        f'<div class="heads"><h3>Layers and heads</h3><div class="beside"><div class="wide">'
        f'<div class="matrix" style="{style}">'
        f'<div class="names">{names}</div><div class="tiles" role="img" '
        f'aria-label="Attention of {len(attention.heads)} layers and {most_heads} heads">{cells}'
        f'</div><div class="numbers">{numbers}</div></div></div>'
        f'<div class="legend">{colour_bar(scale, "attention / uniform; higher is clipped")}'
        f'<p class="note">What {reads} looks at. The bar below each is its entropy: full for '
        f'equal keys, empty for a single key. <i class="dot"></i> marks a sink: one token gets '
        f'{100 * SINK:.0f} % or more.</p><p class="said screen" aria-live="polite">Point at a '
        f"head, or press Tab and arrow keys.</p></div></div></div>"
    )


def _cell(layer: int, head: int, entropy: float, share: float) -> str:
    sink = ' class="sink"' if share >= SINK else ""
    place = f"--layer: {layer}; --head: {head}; --entropy: {entropy:.3f}"
    return f'<i{sink} style="{place}"><b></b></i>'


def _sheet(tiles: Tensor) -> Tensor:
    """[down, across, rows, columns] as one map, tile beside tile."""
    return tiles.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 3) for value in values.tolist()]
