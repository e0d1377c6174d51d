"""`attnkit.explain` maps what a model's answer depends on, or where the model looks."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from attnkit.interpret.explanation import Explanation
from attnkit.interpret.methods.graph_question import GraphQuestion
from attnkit.interpret.methods.question import (
    Classes,
    Layers,
    MapFunction,
    Question,
    Target,
    captioner_of,
    in_float,
    looking,
)
from attnkit.interpret.methods.table import METHODS, USUAL, check_method, no_method
from attnkit.interpret.methods.words import Sentences
from attnkit.interpret.quantity import Of
from attnkit.interpret.units import Edges, Patches, Words

Map = (
    Annotated[Tensor, "batch map_height map_width"]
    | Annotated[Tensor, "batch tokens"]
    | Annotated[Tensor, "edges"]
)


def explain(
    model: nn.Module,
    inputs: Annotated[Tensor, "batch channels height width"] | tuple[Any, ...] | dict[str, Any],
    target: Classes | Annotated[Tensor, "batch words", int] = None,
    method: str | MapFunction | Map | None = None,
    *,
    layers: Layers = None,
    grid: tuple[int, int] | None = None,
    num_prefix_tokens: int | None = None,
    of: Of = "probability",
    index: int | Sequence[int] | None = None,
    num_hops: int | None = None,
    **options: Any,
) -> Explanation:
    """Map what a model's answer depends on, or where the model looks, on its own grid.

        seen = attnkit.explain(vit, images)
        seen.map                    # [batch, rows, columns]
        print(seen)
        seen.save("seen.png")

    | method                   | computes                                        | uses the class |
    |--------------------------|-------------------------------------------------|----------------|
    | `"attention"`            | raw attention of the last layer                 | no             |
    | `"value_weighted"`       | raw attention times the norm of what it moves   | no             |
    | `"rollout"`              | attention multiplied through the layers         | no             |
    | `"relevance"`            | rollout of attention times its gradient         | yes            |
    | `"legrad"`               | positive gradients of attention                 | yes            |
    | `"grad_cam"`             | channels weighted by their gradient             | yes            |
    | `"input_gradient"`       | size of the gradient at the pixels              | yes            |
    | `"integrated_gradients"` | gradient from a baseline to the image, signed   | yes            |
    | `"occlusion"`            | what y loses without a patch, signed            | yes            |
    | `"random"`, `"centre"`   | baselines to compare a map with                 | no             |

    y is the logit of the class, not its probability, which would also depend on the other classes.
    The kernels that compute the output do not change. Attention is computed in addition, only for
    the rows that are needed, and never as a matrix of tokens × tokens. The model runs in evaluation
    mode. Its modes, buffers, parameter gradients and the random state are restored.

    A captioner (`attnkit.Captioner`, or a module that holds one as `model`) is explained word by
    word, with maps `seen.words` [batch, words, rows, columns]. y is then the logit of each word of
    the sentence, given the words before it. `target` holds sentences [batch, words] as `generate`
    returns them, or None for the likeliest words. The methods are "attention", "relevance",
    "input_gradient", "occlusion", "random" and "centre"; relevance passes through decoder and
    encoder.

    A graph model (of attnkit, torch_geometric or your own) is explained edge by edge, with numbers
    `seen.edges` in the order of `edge_index`, for the logit of the node `index`. `inputs` are then
    (x, edge_index, …) or a dictionary of arguments. The methods are "attention", "relevance",
    "input_gradient" (of a factor on an edge's messages), "occlusion" (y without the edge),
    "removal_gradient" (its first order, in one backward) and "random". `seen.trust()` gives the
    fidelity compared with random edges, `seen.top()` a table, and `seen.save("seen.png")` a
    drawing.

    Args:
        model: a model that returns logits [batch, classes] or an object with `.logits`, from
            attnkit, timm, torchvision, transformers or your own; a LightningModule works as well.
        inputs: images as the model takes them, or the arguments of a graph model.
        target: one class for all images, or one for each; None: the predicted class. Methods that
            do not use the class refuse it.
        method: a name in the table; a function (model, images, classes) -> map; or a finished map,
            [batch, rows, columns], [batch, tokens] or [edges]. None: the first of "relevance",
            "grad_cam" (for captioners "attention"), "input_gradient" and "occlusion" that works for
            the model; if that is not relevance, `notes` give the reason. With layers, a grid or
            options, None always is relevance.
        layers: attention layers to use, by position or by name (`*` matches anything); None: all,
            or the last one for "attention", "value_weighted" and "grad_cam". "grad_cam" also takes
            the name of any module that returns tokens or a map.
        grid: rows and columns of the patches; None: found from the model and reported in `notes`.
        num_prefix_tokens: number of class and register tokens before the patches; all tokens after
            the patches are suffix tokens. None: found from the model.
        of: the quantity to report for the class, here and in `trust`: "probability", which is the
            softmax, the sigmoid of a single logit, or the model's output if it sums to 1;
            "sigmoid", of each logit by itself, for several labels; "logit", also for regression; or
            a function of the logits.
        index: the node of a graph; or a pair of nodes, for a model that takes `pairs` [2, pairs]
            and returns a row for each; None: the model returns one row for the graph.
        num_hops: number of steps in which edges of a graph reach the node; None: found from the
            model.
        options: options of the method: `baseline` and `num_steps` of "integrated_gradients";
            `baseline`, `patch` and `batch_size` of "occlusion"; `seed` of "random"; `spread` of
            "centre".

    Raises:
        TypeError: a model, images or a target of another type; an option that the method or the
            kind of input does not have.
        ValueError: an unknown method; a model without the attention that the method needs; a target
            that is out of range or that the method does not use; layers or a grid that the model
            does not have.
        RuntimeError: the model stops the gradient; the message names the module.
    """
    asked_of: dict[str, Any] = {
        "layers": layers, "grid": grid, "num_prefix_tokens": num_prefix_tokens, "of": of,
        "index": index, "num_hops": num_hops,
    }  # fmt: skip
    if method is None:
        return _by_usual_method(model, inputs, target, asked_of, options)
    asked, unit_of = _asked(model, inputs, target, **asked_of)
    if isinstance(method, str):
        function = check_method(method, asked, target is not None, options)
        name, has_target, is_signed = method, METHODS[method].has_target, METHODS[method].is_signed
    else:
        if options or layers is not None:
            what = "layers" if layers is not None else next(iter(options))
            raise TypeError(f"{what}: only attnkit's own methods have it; leave it out")
        function = partial(_given, method=method)
        name, has_target, is_signed = getattr(method, "__name__", "given"), True, False
    with looking(asked.model):
        asked.prepare()
        found = in_float(function(asked, **options).detach())
        if asked.logits is None:
            with torch.no_grad():
                asked.ask()
        unit = unit_of(asked, found)
    assert asked.logits is not None
    assert asked.target is not None
    assert asked.quantity is not None
    logit, value, _ = asked.values(asked.logits, torch.arange(len(asked.logits)))
    of_each = {"target": asked.target, "predicted": asked.logits.argmax(dim=-1)}
    of_each |= {"logit": logit, "probability": value}
    if unit.name == "edge":  # the batch is one graph
        of_each = {key: one[0] for key, one in of_each.items()}
    if not asked.quantity.is_usual:
        asked.notes.append(f"{asked.quantity.symbol}: {asked.quantity.meaning}")

    def again(model: nn.Module, inputs: Any, classes: Tensor) -> Tensor:
        wanted = classes if has_target or unit.name == "word" else None
        seen = explain(model, inputs, wanted, method, **asked_of, **options)
        return seen.unit.values if seen.words is None else seen.words

    return Explanation(
        method=name,
        unit=unit,
        **of_each,
        quantity=asked.quantity,
        notes=asked.notes,
        is_signed=is_signed or bool((found < 0).any()),
        has_target=has_target,
        again=None if isinstance(method, Tensor) else again,
    )


def _by_usual_method(
    model: nn.Module, inputs: Any, target: Any, asked_of: dict[str, Any], options: dict[str, Any]
) -> Explanation:
    """Explain by the first method that works for the model; a note says why others failed.

    With layers, a grid or options, only the first method is tried.
    """
    again = partial(explain, model, inputs, target, **asked_of, **options)
    asked, _ = _asked(model, inputs, target, **asked_of)
    first, *rest = USUAL[asked.unit]
    chosen = (asked_of[name] for name in ("layers", "grid", "num_prefix_tokens"))
    if options or any(given is not None for given in chosen):
        return again(method=first)
    try:
        return again(method=first)
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:
        refused = error
    with looking(asked.model), torch.no_grad():  # raises errors that every method would meet
        asked.prepare()
        asked.ask()
    for name in rest:
        try:
            seen = again(method=name)
        except torch.OutOfMemoryError:
            raise
        except (ValueError, TypeError, RuntimeError):
            continue
        why = str(refused).partition("; ")[0]
        seen.notes.append(f"method {name!r}, since {first!r} does not serve the model: {why}")
        return seen
    raise refused


def _asked(
    model: nn.Module,
    inputs: Any,
    target: Any,
    *,
    layers: Layers,
    of: Of,
    grid: tuple[int, int] | None,
    num_prefix_tokens: int | None,
    index: int | Sequence[int] | None,
    num_hops: int | None,
) -> tuple[Target, Callable[[Any, Tensor], Patches | Edges]]:
    """Return the question and the class of its units, chosen by the model and its inputs."""
    of_images = {"grid": grid, "num_prefix_tokens": num_prefix_tokens}
    of_graphs = {"index": index, "num_hops": num_hops}
    if captioner_of(model) is not None:
        _refuse("a captioner has its own grid", of_images)
        _refuse("only a graph has one", of_graphs)
        return Sentences(model, inputs, target, layers, of), Words
    if isinstance(inputs, tuple | Mapping):
        _refuse("a graph has none", of_images)
        return GraphQuestion(model, inputs, index, target, num_hops, layers, of), Edges
    _refuse("only a graph has one", of_graphs)
    return Question(model, inputs, target, layers, grid, num_prefix_tokens, of), Patches


def _refuse(why: str, options: Mapping[str, Any]) -> None:
    for name, given in options.items():
        if given is not None:
            raise TypeError(f"{name}: {why}; leave it out")


def _given(asked: Any, method: MapFunction | Tensor) -> Tensor:
    """Check and return the values of a user's function or map."""
    if asked.unit == "word":
        raise no_method(asked.unit, type(method).__name__)
    if asked.unit == "edge":
        if not isinstance(method, Tensor):
            raise no_method(asked.unit, repr(method))
        if list(method.shape) != [asked.num_edges] or not method.is_floating_point():
            raise ValueError(
                f"method: expected floating-point numbers [edges] = [{asked.num_edges}], got "
                f"{list(method.shape)}, {method.dtype}"
            )
        return torch.nn.functional.pad(method.to(asked.edge_index.device), (0, 1))
    if not isinstance(method, Tensor):
        if not callable(method):
            raise TypeError(
                f"method: expected a name, a function or a tensor, got {type(method).__name__}"
            )
        with torch.no_grad():
            asked.ask()
        method = method(asked.model, asked.images.detach(), asked.target)
    if (
        not isinstance(method, Tensor)
        or method.ndim not in (2, 3)
        or len(method) != asked.batch
        or not method.is_floating_point()
    ):
        got = list(method.shape) if isinstance(method, Tensor) else type(method).__name__
        raise ValueError(
            f"method: expected a map [{asked.batch}, rows, columns] or [{asked.batch}, "
            f"tokens] of floating-point numbers, got {got}"
        )
    return method.to(asked.images.device)
