"""Trust in the map of one image: the curves of p as a drawing, and what they say in a sentence."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from attnkit.interpret.page.html import escaped
from attnkit.interpret.trust.gaps import fall
from attnkit.interpret.trust.removal import REMOVALS
from attnkit.interpret.trust.result import VERDICTS, Trust
from attnkit.metrics.perturbation import perturbation_gap

_WIDE, _HIGH = 240, 150  # of a drawing's axes, in the units of its viewBox
_LEFT, _TOP, _RIGHT, _BELOW = 46, 10, 18, 34  # around them


def sentences(trust: Trust, image: int) -> list[tuple[str, str]]:
    """What is lost where the map points on this image, and whether that is more than a random map
    loses, for each kind of removal."""
    said = []
    for kind, curves in trust.curves.items():
        one = {name: values[:, image : image + 1] for name, values in curves.items()}
        share = trust.falls[kind].share
        point = int((trust.removed - share).abs().argmin())
        random = one["random"]
        drawn = perturbation_gap(random[::2], random[1::2], trust.removed)
        within = 2 * float(drawn.square().mean().sqrt())
        gap = float(trust.gaps[kind][image])
        verdict = VERDICTS[0] if gap > within else VERDICTS[1]
        lost = fall(one, trust.removed, point)
        # two standard errors of a mean reach beyond what a probability can be
        lost = lost._replace(low=max(0.0, lost.low), high=min(1.0, lost.high))
        said.append(
            (
                lost.sentence(kind, 1),
                f"Gap {_signed(gap)}, random maps 0 ± {within:.2f}: {verdict}.",
            )
        )
    return said


def curve_figures(trusts: Mapping[str, Trust], image: int, target: str) -> list[str]:
    """A figure for each kind of removal: p against the share removed, the maps by their names."""
    kinds = dict.fromkeys(kind for trust in trusts.values() for kind in trust.curves)
    return [
        _figure({name: trust for name, trust in trusts.items() if kind in trust.curves}, kind,
                image, target)
        for kind in kinds
    ]  # fmt: skip


def _figure(trusts: Mapping[str, Trust], kind: str, image: int, target: str) -> str:
    parts = [_axes(target)]
    first = next(iter(trusts.values()))
    random = first.curves[kind]["random"][:, image]
    low, high = random.amin(dim=0), random.amax(dim=0)
    there, back = _points(first.removed, high), _points(first.removed.flip(0), low.flip(0))
    parts.append(f'<polygon class="band" points="{there} {back}"/>')
    for number, trust in enumerate(trusts.values()):
        for order, way in enumerate(("most", "least")):
            line = _points(trust.removed, trust.curves[kind]["map"][order, image])
            parts.append(f'<polyline class="{way} c{number % 6}" points="{line}"/>')
    words = f"p({target}) against the share of patches removed, {REMOVALS[kind]}"
    size = f"0 0 {_LEFT + _WIDE + _RIGHT} {_TOP + _HIGH + _BELOW}"
    legend = "".join(
        f'<span class="key c{number % 6}">{escaped(name)}</span>'
        for number, name in enumerate(trusts)
    )
    return (
        f'<figure class="curve"><h3>Patches removed: {REMOVALS[kind]}</h3>'
        f'<svg viewBox="{size}" role="img" aria-label="{escaped(words)}">{"".join(parts)}</svg>'
        f"<figcaption>{legend}<br>Solid: highest-ranked patches removed first; dashed: last. "
        f"Grey: {len(random)} random orders, lowest to highest.</figcaption></figure>"
    )


def _axes(target: str) -> str:
    parts = []
    for tick in (0.0, 0.5, 1.0):
        x, y = _place(tick, tick)
        parts.append(
            f'<line class="tick" x1="{_LEFT}" x2="{_LEFT + _WIDE}" y1="{y}" y2="{y}"/>'
            f'<text class="right" x="{_LEFT - 6}" y="{y + 4}">{tick:g}</text>'
            f'<text class="middle" x="{x}" y="{_TOP + _HIGH + 15}">{100 * tick:.0f} %</text>'
        )
    middle = f"{_LEFT + _WIDE / 2}"
    parts.append(f'<text class="middle" x="{middle}" y="{_TOP + _HIGH + 30}">removed</text>')
    shown = target if len(target) < 16 else f"{target[:14]}…"
    across = f"{10},{_TOP + _HIGH / 2}"
    parts.append(
        f'<text class="middle" transform="translate({across}) rotate(-90)">p({escaped(shown)})'
        "</text>"
    )
    return "".join(parts)


def _points(shares: Tensor, values: Tensor) -> str:
    pairs = zip(shares.tolist(), values.tolist(), strict=True)
    return " ".join("{},{}".format(*_place(x, y)) for x, y in pairs)


def _place(share: float, p: float) -> tuple[float, float]:
    return round(_LEFT + share * _WIDE, 1), round(_TOP + (1 - p) * _HIGH, 1)


def _signed(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")
