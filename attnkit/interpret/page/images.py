"""Sections of a page for images: maps, trust, what patches look at, and the answer without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from attnkit.interpret.colours import Scale, scale_of
from attnkit.interpret.explanation import Explanation
from attnkit.interpret.page.attention import Attention, attention_of
from attnkit.interpret.page.curves import curve_figures, sentences
from attnkit.interpret.page.heads import heads_data, heads_html, looks_data, scale_of_weights
from attnkit.interpret.page.html import colour_bar, escaped, image_uri, img, map_uri, short
from attnkit.interpret.page.section import Section
from attnkit.interpret.page.without import Without, without_each
from attnkit.interpret.trust.result import Trust


class _Shown(NamedTuple):
    """All that sections of the images of a batch share."""

    explanations: Sequence[Explanation]
    names: Sequence[str]
    trusts: Mapping[str, Trust]
    against: Mapping[str, Explanation]
    scales: Sequence[Scale]
    attention: Attention | None
    without: Without | None
    missing: Sequence[str]
    class_names: Sequence[str]
    labels: Sequence[int] | None

    def class_name(self, number: int) -> str:
        return self.class_names[number] if number < len(self.class_names) else str(number)


def image_sections(
    explanations: Sequence[Explanation],
    trusts: Sequence[Trust | None] = (),
    *,
    titles: Sequence[str] | None = None,
    labels: Sequence[int] | None = None,
    class_names: Sequence[str] = (),
    against: Mapping[str, Explanation] | None = None,
    patches: bool = True,
    batch_size: int = 64,
) -> list[Section]:
    """A section for each image of a batch.

        seen = [attnkit.explain(model, images, method=name) for name in ("relevance", "rollout")]
        sections = image_sections(seen, [one.trust() for one in seen], titles=names_of_files)

    Each method's maps have one scale for all images, so that they can be compared by eye.

    Args:
        explanations: of the same images, one for each method; what is said of patches and heads is
            of the first one's model and class.
        trusts: one for each explanation, or None; none at all leaves the curves out.
        titles: of the images.
        labels: their true classes.
        class_names: by the number of the class.
        against: what the first map is compared with, by name: the same method for another class, or
            of another checkpoint. Shown with the difference where the grids are the same.
        patches: whether to add what each patch looks at, p without it, layers and heads: a forward
            for each patch.
        batch_size: images to a forward.

    Raises:
        ValueError: explanations of other images, of captions, or none; as many trusts, titles or
            labels as are not there.
    """
    against = dict(against or {})
    trusts = list(trusts) or [None] * len(explanations)
    count = _check(explanations, trusts, against, {"titles": titles, "labels": labels})
    first = explanations[0]
    attention, without, missing = None, None, []
    if patches:
        try:
            attention = attention_of(first)
        except (ValueError, RuntimeError) as error:
            missing.append(f"Not shown: what patches look at, layers and heads. {_reason(error)}")
        without = without_each(first, attention.grid if attention else None, batch_size)
    names = _names(explanations)
    shown = _Shown(
        explanations=explanations,
        names=names,
        trusts={name: one for name, one in zip(names, trusts, strict=True) if one is not None},
        against=against,
        scales=_scales(explanations, against),
        attention=attention,
        without=without,
        missing=missing,
        class_names=class_names,
        labels=labels,
    )
    return [
        _section(shown, number, titles[number] if titles else f"Image {number}")
        for number in range(count)
    ]


def _check(
    explanations: Sequence[Explanation],
    trusts: Sequence[Trust | None],
    against: Mapping[str, Explanation],
    lists: Mapping[str, Sequence[Any] | None],
) -> int:
    if not explanations:
        raise ValueError("explanations: expected at least one, got none")
    count = len(explanations[0].images)
    for one in (*explanations, *against.values()):
        if one.words is not None:
            raise ValueError("explanations: one is of captions; caption_section shows those")
        if len(one.images) != count:
            raise ValueError(
                f"explanations: expected the same images, got {count} and {len(one.images)}"
            )
    if len(trusts) != len(explanations):
        raise ValueError(
            f"trusts: expected one for each of {len(explanations)} explanations, got {len(trusts)}"
        )
    for name, given in lists.items():
        if given is not None and len(given) != count:
            raise ValueError(f"{name}: expected {count}, one for each image, got {len(given)}")
    return count


def _scales(explanations: Sequence[Explanation], against: Mapping[str, Explanation]) -> list[Scale]:
    """For each method one for all images, and for what the first is compared with."""
    first = explanations[0].method
    scales = []
    for number, one in enumerate(explanations):
        others = [] if number else [other for other in against.values() if other.method == first]
        scales.append(scale_of([it.map for it in (one, *others)], is_signed=one.is_signed))
    return scales


def _names(explanations: Sequence[Explanation]) -> list[str]:
    """The methods, numbered where one comes twice."""
    names: list[str] = []
    for one in explanations:
        times = sum(name.split(" (")[0] == one.method for name in names)
        names.append(f"{one.method} ({times + 1})" if times else one.method)
    return names


def _reason(error: Exception) -> str:
    """An error's message, without what an argument could do about it."""
    text = str(error).partition("; ")[0].partition(", or take another method")[0]
    text = text.removeprefix("model: ")
    return f"{text[:1].upper()}{text[1:]}."


def _section(shown: _Shown, number: int, title: str) -> Section:
    first = shown.explanations[0]
    target = shown.class_name(int(first.target[number]))
    height, width = first.images.shape[-2:]
    frame = f'style="aspect-ratio: {width} / {height}"'
    figures = [
        f'<figure><h3>Image</h3><div class="frame main" {frame}>'
        f"{img(image_uri(first.images[number]), title)}</div>"
        f"<figcaption>{escaped(_says(shown, number))}</figcaption></figure>"
    ]
    for name, one, scale in zip(shown.names, shown.explanations, shown.scales, strict=True):
        about = _about(shown, one, number)
        figures.append(_map(name, one.map[number], scale, frame, _of_all(one), about))
    for name, other in shown.against.items():
        figures += _compared(shown, name, other, number, frame)
    data: dict[str, Any] = {}
    if shown.without is not None:
        figures.append(_without(shown.without, number, frame, target))
        rows, columns = shown.without.grid
        data |= {"rows": rows, "columns": columns, "target": target, "kind": shown.without.kind}
        data["whole"] = round(float(shown.without.whole[number]), 4)
        data["without"] = [round(p, 4) for p in shown.without.p[number].tolist()]
    if shown.attention is not None and shown.attention.looks:
        scale = scale_of_weights([one.weights[number] for one in shown.attention.looks])
        data["looks"] = looks_data(shown.attention, number, scale)
        figures.append(_looks_figure(shown.attention, scale, frame))
    parts = [f'<div class="figures">{"".join(figures)}</div>']
    if data:
        parts.append(f'<p class="said screen" aria-live="polite">{_how(data)}</p>')
    parts += _trust(shown, number, target)
    if shown.attention is not None:
        parts.append(heads_html(shown.attention, number))
        data["heads"] = heads_data(shown.attention, number)
    parts += [f'<p class="note">{escaped(line)}</p>' for line in shown.missing]
    return Section(title, "\n".join(parts), data, "image")


def _says(shown: _Shown, number: int) -> str:
    first = shown.explanations[0]
    target, predicted = int(first.target[number]), int(first.predicted[number])
    p = float(first.probability[number])
    says = shown.class_name(predicted)
    text = f"Predicted: {says}, p = {p:.2f}"
    if target != predicted:
        text = f"Predicted: {says}; explained: {shown.class_name(target)}, p = {p:.2f}"
    if shown.labels is not None:
        text += f"; label: {shown.class_name(int(shown.labels[number]))}"
    return f"{text}."


def _about(shown: _Shown, one: Explanation, number: int) -> str:
    map = one.map[number]
    rows, columns = map.shape
    row, column = divmod(int(map.argmax()), columns)
    of = "The same for every class"
    if one.has_target:
        of = f"For {shown.class_name(int(one.target[number]))}"
    text = f"{of}. Largest {short(float(map.max()))} at row {row}, column {column} of "
    text += f"{rows} × {columns}."
    if one.share is not None and one.num_prefix_tokens:
        text += f" Class and register tokens took {100 * float(one.share[number]):.0f} %."
    return text


def _of_all(one: Explanation) -> str:
    """The label of a scale."""
    count = len(one.images)
    return one.method if count == 1 else f"{one.method}, one scale for {count} images"


def _map(title: str, map: Tensor, scale: Scale, frame: str, label: str, about: str) -> str:
    picture = img(map_uri(map, scale), f"Map: {title}. {about}", is_map=True)
    return (
        f'<figure><h3>{escaped(title)}</h3><div class="frame" {frame}>{picture}</div>'
        f"{colour_bar(scale, label)}<figcaption>{escaped(about)}</figcaption></figure>"
    )


def _compared(shown: _Shown, name: str, other: Explanation, number: int, frame: str) -> list[str]:
    """The other map, and the first map minus it."""
    first, scale = shown.explanations[0], shown.scales[0]
    if other.method != first.method:
        scale = scale_of([other.map], is_signed=other.is_signed)
    target = shown.class_name(int(other.target[number]))
    about = f"{_about(shown, other, number)} p({target}) = {float(other.probability[number]):.2f}."
    figures = [_map(name, other.map[number], scale, frame, _of_all(other), about)]
    if other.method == first.method and other.map.shape == first.map.shape:
        differences = first.map - other.map
        figures.append(
            _map(
                f"minus {name}",
                differences[number],
                scale_of([differences], is_signed=True),
                frame,
                "difference",
                f"{shown.names[0]} minus that of {name}; red: more in the first.",
            )
        )
    return figures


def _without(without: Without, number: int, frame: str, target: str) -> str:
    whole = float(without.whole[number])
    loss = (whole - without.p[number]).unflatten(0, without.grid)
    scale = scale_of([without.whole[:, None] - without.p], is_signed=True)
    low, high = (f"{float(p):.2f}" for p in without.p[number].aminmax())
    about = f"p({target}) is {whole:.2f}, and without one patch {low} to {high} ({without.kind})."
    return _map("Each patch removed", loss, scale, frame, f"drop of p({target})", about)


def _looks_figure(attention: Attention, scale: Scale, frame: str) -> str:
    rows, columns = attention.grid
    options = "".join(
        f'<option value="{n}"{" selected" * (n + 1 == len(attention.looks))}>'
        f"{escaped(one.layer or '(itself)')}</option>"
        for n, one in enumerate(attention.looks)
    )
    return (
        f'<figure class="looks"><h3>What a patch looks at</h3>'
        f'<div class="frame" {frame}><canvas class="map" width="{columns}" height="{rows}" '
        f'role="img" aria-label="What the chosen patch looks at"></canvas></div>'
        f"{colour_bar(scale, 'attention / uniform; higher is clipped')}"
        f'<figcaption><span class="which"></span><label class="screen">Layer '
        f"<select>{options}</select></label></figcaption></figure>"
    )


def _how(data: Mapping[str, Any]) -> str:
    sees = "what it looks at; " if "looks" in data else ""
    return (
        f"Point at a patch, or press Tab and arrow keys: {sees}click or press Enter: p without it."
    )


def _trust(shown: _Shown, number: int, target: str) -> list[str]:
    if not shown.trusts:
        return []
    said = ""
    for name, trust in shown.trusts.items():
        said += f"<h3>{escaped(name)}</h3>"
        for lost, verdict in sentences(trust, number):
            said += f"<p>{escaped(lost)} <b>{escaped(verdict)}</b></p>"
    drawn = "".join(curve_figures(shown.trusts, number, target))
    return [f'<div class="trust"><div class="curves">{drawn}</div><div>{said}</div></div>']
