"""Maps of what attention layers or gates do with images, and a picture of these maps."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from attnkit.core.capture.watch import capture_attention
from attnkit.core.running import module_name
from attnkit.interpret.explain import explain
from attnkit.interpret.methods.grid import Grid, find_grid
from attnkit.interpret.methods.question import Question, looking
from attnkit.interpret.methods.tokens import watch
from attnkit.interpret.picture import OVERLAY, Panel, Row, Scale, as_picture, draw
from attnkit.layers.gates import capture_gates
from attnkit.lightning.protocols import Explained

ATTENTION = "attention / uniform attention"


class LayerMap(NamedTuple):
    """A layer's map for each image of a batch.

    values: map over the image, [batch, rows, columns]; for a channel gate [batch, channels], and
        for attention over channels [batch, channels, channels].
    label: meaning of the numbers. Attention is divided by uniform attention, so that 1 is uniform;
        gates are between 0 and 1.
    is_over_image: whether the values are places of the image.
    share: for attention over tokens, the share of class and register tokens.
    """

    layer: str
    values: Tensor
    label: str = ATTENTION
    is_over_image: bool = True
    share: Annotated[Tensor, "batch"] | None = None

    @property
    def scale(self) -> Scale:
        """The colour scale, on which a uniform map has the middle colour or a lower one."""
        largest = max(2.0, float(self.values.max()))
        return Scale(0.0, largest if self.label == ATTENTION else 1.0, OVERLAY)

    @property
    def below(self) -> list[str]:
        """The text below each map."""
        if self.share is None:
            return [""] * len(self.values)
        return [f"class and register tokens: {100 * share:.0f} %" for share in self.share.tolist()]


class LayerPicture(NamedTuple):
    """A figure of layers' maps, and the maps themselves.

    maps: maps [batch, …] by the layer's name; for a captioner maps for each word, named `words`.
    caption: text that explains the figure.
    """

    figure: Figure
    maps: dict[str, Tensor]
    caption: str


def chosen_layers(model: nn.Module, layer: int | str) -> tuple[bool, list[str]]:
    """Return whether the chosen layers are gates, and their names.

    Gates are chosen only if the model has no attention.

    Args:
        model: any module.
        layer: a position among the layers, or a name (`*` matches anything).

    Raises:
        ValueError: the model has neither attention nor gates, or no such layer.
    """
    modules = {module_name(name): module for name, module in model.named_modules()}
    attention = [n for n, m in modules.items() if callable(getattr(m, "attention_weights", None))]
    gates = [n for n, m in modules.items() if callable(getattr(type(m), "gate", None))]
    names = attention or gates
    if not names:
        raise ValueError(
            f"layer: {type(model).__name__} has neither attention with weights nor gates: nothing "
            "to draw; insert_attention puts them in, replace_attention makes timm's visible"
        )
    if isinstance(layer, int):
        chosen = names[layer : layer + 1 or None] if -len(names) <= layer else []
    else:
        chosen = [name for name in names if fnmatchcase(name, layer)]
    if not chosen:
        raise ValueError(f"layer: {layer!r} is none of the {len(names)} layers {', '.join(names)}")
    return not attention, chosen


def layer_maps(
    model: nn.Module, images: Annotated[Tensor, "batch channels height width"], layer: int | str
) -> list[LayerMap]:
    """Return the maps of some layers over images.

    Attention is that of the tokens from which the answer is read, as in `explain` with the method
    "attention". For a layer that is not between the tokens of a whole image, or that the answer
    does not depend on, it is the mean over all queries.

    Args:
        model: any module.
        images: images as the model takes them.
        layer: as in `chosen_layers`.

    Raises:
        ValueError: there is no such layer, or it did not run, attends within windows, or over
            tokens that form no grid.
    """
    are_gates, names = chosen_layers(model, layer)
    with looking(model):
        found = {} if are_gates else _as_explained(model, images)
        others = [name for name in names if name not in found]
        captures = capture_gates(model) if are_gates else capture_attention(model, others)
        if others:
            with torch.no_grad(), captures as captured:
                model(images)
        for name in others:
            if name not in captured:
                raise ValueError(f"layer: {name!r} did not run")
            values = captured[name][-1].float()
            if not are_gates:
                found[name] = _of_attention(name, values, model, images)
            elif values[0, 0].numel() == 1:
                values = values.flatten(1)
                found[name] = LayerMap(name, values, "gate", is_over_image=False)
            else:
                found[name] = LayerMap(name, values.mean(dim=1), "gate, mean of channels")
    return [found[name] for name in names]


def _as_explained(model: nn.Module, images: Tensor) -> dict[str, LayerMap]:
    """Return by name the maps of the layers through which tokens can be followed."""
    try:
        chain = watch(Question(model, images), "attention")
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, RuntimeError):
        return {}
    found = {}
    for step, rows in zip(chain.steps, chain.rows_read(), strict=True):
        name, received = step.call.layer, step.looked_at(rows).detach()
        found[name] = _on_grid(name, received, step.call.num_keys, chain.grid)
    return found


def _on_grid(layer: str, received: Tensor, num_keys: int, grid: Grid) -> LayerMap:
    """Return the attention that each token receives, [batch, tokens], as a map over the patches."""
    values = grid.image(received * num_keys)
    share = grid.others(received).sum(dim=1) if grid.num_others else None
    return LayerMap(layer, values, share=share)


def _of_attention(name: str, weights: Tensor, model: nn.Module, images: Tensor) -> LayerMap:
    """Return the map of a single layer, the mean of its weights over heads and queries."""
    batch, num_keys = len(images), weights.shape[-1]
    if getattr(model.get_submodule(name), "is_over_channels", False):
        return LayerMap(name, weights.mean(dim=1) * num_keys, is_over_image=False)
    received = weights.mean(dim=(1, 2))
    if len(weights) > batch:
        raise ValueError(
            f"layer: {name!r} attends within {len(weights) // batch} parts of the image, windows "
            "or rows, which are not drawn; take another layer"
        )
    return _on_grid(name, received, num_keys, find_grid(model, images, num_keys))


def draw_layer(given: Explained, layer: int | str) -> LayerPicture:
    """Draw layers' maps, with a column for each image and a row for each layer.

    For a captioner it draws the layer's attention at each word.

    Args:
        given: a model and images, or a captioner and its sentences.
        layer: as in `chosen_layers`; for a captioner several layers are averaged.

    Raises:
        ValueError: as in `layer_maps`.
    """
    assert given.pictures is not None
    if given.sentences is not None:
        seen = explain(given.model, given.inputs, given.sentences, "attention", layers=layer)
        assert seen.words is not None
        figure = seen.draw(given.words or None, given.pictures)
        said = f"What layer {layer} looks at for each word of a caption, the mean over heads."
        return LayerPicture(figure, {"words": seen.words}, f"{said} Each image has one scale.")
    maps = layer_maps(given.model, given.inputs, layer)
    with looking(given.model), torch.no_grad():
        titles = _titles(given, given.model(given.inputs))
    pictures = [as_picture(one) for one in given.pictures]
    rows = [Row([Panel(one, title=said) for one, said in zip(pictures, titles, strict=True)])]
    for one in maps:
        panels = [
            Panel(picture if one.is_over_image else None, values, below=below)
            for picture, values, below in zip(pictures, one.values, one.below, strict=True)
        ]
        panels[0] = panels[0]._replace(title=one.layer)  # once for the row
        rows.append(Row(panels, one.scale, one.label))
    figure = draw(rows, across=len(pictures))
    said = (
        "Attention is a multiple of what uniform attention would give, the mean over heads."
        if maps[0].label == ATTENTION
        else "Gates multiply what passes: 0 closes, 1 lets all through."
    )
    caption = f"{said} Each row is a layer and has one scale for all images."
    return LayerPicture(figure, {one.layer: one.values for one in maps}, caption)


def _titles(given: Explained, output: Any) -> list[str]:
    """Return the title of each image: its name, its class and the predicted class."""
    lines: list[list[str]] = [[] for _ in given.inputs]
    for line, name in zip(lines, given.names, strict=False):
        line.append("/".join(Path(name).parts[-2:]))
    classes = {"true": given.truth}
    if isinstance(output, Tensor) and output.ndim == 2 and output.shape[1] > 1:
        classes["predicted"] = output.argmax(dim=1)
    for what, numbers in classes.items():
        for line, number in zip(lines, () if numbers is None else numbers.tolist(), strict=False):
            line.append(f"{what}: {given.class_name(number)}")
    return ["\n".join(line) for line in lines]
