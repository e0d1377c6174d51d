"""Curves of fidelity over how many edges are taken, as drawings in a page."""

import math
from collections.abc import Sequence

from attnkit.interpret.graphs.fidelity import EdgeFidelity
from attnkit.interpret.page.html import escaped

_LEFT, _TOP, _WIDE, _HIGH = 34, 20, 240, 120  # of the field in which curves lie


def fidelity_curves(fidelity: EdgeFidelity) -> str:
    """p without the edges that rank first, and with these alone, beside random edges."""
    return (
        _curve(fidelity, "plus", "without the first k edges (fidelity₊)")
        + _curve(fidelity, "minus", "with these alone (fidelity₋)")
        + '<p class="note legend">'
        + '<span><svg class="sample" viewBox="0 -4 16 8" aria-hidden="true">'
        '<path class="ranked" d="M0 0H16"/></svg> edges as ranked</span>'
        '<span><svg class="sample" viewBox="0 -4 16 8" aria-hidden="true">'
        '<path class="band" d="M0 -4H16V4H0Z"/><path class="mean" d="M0 0H16"/></svg> '
        f"{fidelity.num_draws} random orders and their mean</span>"
        '<span><svg class="sample" viewBox="0 -4 16 8" aria-hidden="true">'
        '<path class="whole" d="M0 0H16"/></svg> all edges</span></p>'
    )


def _curve(fidelity: EdgeFidelity, name: str, title: str) -> str:
    p, rows = fidelity.probability, fidelity.rows
    ks = [row["k"] for row in rows]
    last = math.log(ks[-1] / ks[0]) or 1.0
    xs = [_LEFT + _WIDE * math.log(k / ks[0]) / last for k in ks]

    def line(key: str) -> list[str]:
        return _points(xs, [p - row[key] for row in rows])

    band = [*line(f"random_{name}_low"), *line(f"random_{name}_high")[::-1]]
    grid = "".join(
        f'<path class="grid" d="M{_LEFT} {_y(tick):.1f}H{_LEFT + _WIDE}"/>'
        f'<text class="tick" text-anchor="end" x="{_LEFT - 5}" y="{_y(tick) + 3:.1f}">'
        f"{tick:g}</text>"
        for tick in (0.0, 0.5, 1.0)
    )
    below = _TOP + _HIGH + 14
    numbers = "".join(
        f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{below}">{k:g}</text>'
        for x, k in zip(xs, ks, strict=True)
    )
    dots = "".join(
        f'<circle class="dot" r="2.6" cx="{point.split()[0]}" cy="{point.split()[1]}"/>'
        for point in line(name)
    )
    said = ", ".join(f"{p - row[name]:.2f} at k = {row['k']:g}" for row in rows)
    alt = f"p({fidelity.target}) {title}: {said}; with all edges {p:.2f}."
    return (
        f'<svg class="fid" viewBox="0 0 {_LEFT + _WIDE + 12} {below + 20}" role="img" '
        f'aria-label="{escaped(alt)}">'
        f'<text x="0" y="12">p({fidelity.target}) {escaped(title)}</text>'
        f'{grid}<path class="band" d="M{"L".join(band)}Z"/>'
        f'<path class="mean" d="M{"L".join(line(f"random_{name}"))}"/>'
        f'<path class="whole" d="M{_LEFT} {_y(p):.1f}H{_LEFT + _WIDE}"/>'
        f'<path class="ranked" d="M{"L".join(line(name))}"/>{dots}{numbers}'
        f'<text class="tick" text-anchor="middle" x="{_LEFT + _WIDE / 2:.0f}" y="{below + 14}">'
        "k, edges</text></svg>"
    )


def _points(xs: Sequence[float], ps: Sequence[float]) -> list[str]:
    return [f"{x:.1f} {_y(p):.1f}" for x, p in zip(xs, ps, strict=True)]


def _y(p: float) -> float:
    return _TOP + _HIGH * (1 - p)
