"""`attnkit.explain`: what a model's answer for images depends on, or where it looks."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, overload

import torch
from torch import Tensor, nn

from attnkit.interpret.captions import Said, explain_captions
from attnkit.interpret.explanation import Explanation
from attnkit.interpret.graphs.explain import explain_graph
from attnkit.interpret.graphs.explanation import GraphExplanation
from attnkit.interpret.layer_table import layer_table
from attnkit.interpret.methods.grid import find_grid
from attnkit.interpret.methods.question import Layers, Question, Target, looking, probabilities
from attnkit.interpret.methods.table import METHODS
from attnkit.interpret.sentences import captioner_of

Map = Annotated[Tensor, "batch map_height map_width"] | Annotated[Tensor, "batch tokens"]
MapFunction = Callable[[nn.Module, Tensor, Tensor], Tensor]


@overload
def explain(model: nn.Module, inputs: Tensor, *args: Any, **kwargs: Any) -> Explanation: ...


@overload
def explain(
    model: nn.Module, inputs: tuple[Any, ...] | dict[str, Any], *args: Any, **kwargs: Any
) -> GraphExplanation: ...


def explain(
    model: nn.Module,
    inputs: Annotated[Tensor, "batch channels height width"] | tuple[Any, ...] | dict[str, Any],
    target: Target | Said = None,
    method: str | MapFunction | Map = "relevance",
    *,
    layers: Layers = None,
    grid: tuple[int, int] | None = None,
    num_prefix_tokens: int | None = None,
    **options: Any,
) -> Explanation | GraphExplanation:
    """Map what a model's answer depends on, or where it looks, on the model's own grid.

        seen = attnkit.explain(vit, images)
        seen.map                    # [batch, rows, columns]
        print(seen)
        seen.save("seen.png")

    | method                   | is                                             | knows the class |
    |--------------------------|------------------------------------------------|-----------------|
    | `"attention"`            | raw attention of the last layer                | no              |
    | `"value_weighted"`       | times the norm of what is moved                | no              |
    | `"rollout"`              | attention multiplied through the layers        | no              |
    | `"relevance"`            | the same, of attention times its gradient      | yes             |
    | `"legrad"`               | positive gradients of attention                | yes             |
    | `"grad_cam"`             | channels weighted by their gradient            | yes             |
    | `"input_gradient"`       | size of the gradient at the pixels             | yes             |
    | `"integrated_gradients"` | gradient from a baseline to the image, signed  | yes             |
    | `"occlusion"`            | what y loses without a patch, signed           | yes             |
    | `"random"`, `"centre"`   | baselines to compare a map with                | no              |

    y is the logit of the class, not its probability, which would also depend on the other classes.
    The kernels that compute the output do not change. Attention is computed in addition, only for
    the rows that are needed, and never as a matrix of tokens × tokens. The model runs in evaluation
    mode and is left as it was: modes, buffers, gradients of parameters and random numbers.

    A captioner (`attnkit.Captioner`, or a module that holds one as `model`) is explained word by
    word, `seen.words` [batch, words, rows, columns]: y is the logit of the word that was said,
    behind the words before it. `target` is then sentences [batch, words] as `generate` gives them,
    or None for the likeliest words, and the methods are "attention", "relevance", "input_gradient",
    "occlusion", "random" and "centre"; relevance goes through decoder and encoder.

    A model of a graph, of attnkit, torch_geometric or your own, is explained edge by edge,
    `seen.edges` in the order of `edge_index`, for the logit of a node: `index`. `inputs` are then
    (x, edge_index, …), or a dictionary of arguments, and the methods "attention", "relevance",
    "input_gradient" (of a factor on an edge's messages), "occlusion" (the edge taken out),
    "removal_gradient" (its first order, in one backward) and "random"; `seen.trust()` is its
    fidelity beside random edges, `seen.top()` a table, and `seen.save("seen.png")` a drawing.

    Args:
        model: returns logits [batch, classes], or an object with `.logits`: models of attnkit,
            timm, torchvision, transformers and your own, a LightningModule as well.
        inputs: images, as the model takes them; or what it is called with for a graph.
        target: a class for all images, or one for each; None: the class that is predicted. Refused
            by methods that do not know of it.
        method: a name of the table; a function (model, images, classes) -> map; or a finished
            map, [batch, rows, columns] or [batch, tokens].
        layers: which layers of attention take part, by position or by name (`*` matches anything);
            None: all, or the last for "attention", "value_weighted" and "grad_cam", which may name
            any module that returns tokens or a map.
        grid: rows and columns of the patches; None: found, and said in `notes`.
        num_prefix_tokens: class and register tokens before the patches, as what is behind them is
            the rest; None: found.
        options: of the method: `baseline` and `num_steps` of "integrated_gradients"; `baseline`,
            `patch` and `batch_size` of "occlusion"; `seed` of "random"; `spread` of "centre". Of
            graphs `index`, the node, left out where the model gives one row for a graph, and
            `num_hops`, in how many steps edges reach it, if that is not to be counted.

    Raises:
        TypeError: a model, images or a target of another type; an option that the method lacks.
        ValueError: an unknown method; no attention where one needs it; a target out of range or
            for a method that does not know of it; layers or a grid that the model does not have.
        RuntimeError: the model stops the gradient; the message names the module.
    """
    if isinstance(inputs, tuple | Mapping):
        for name, given in {"grid": grid, "num_prefix_tokens": num_prefix_tokens}.items():
            if given is not None:
                raise TypeError(f"{name}: a graph has none; leave it out")
        return explain_graph(model, inputs, target=target, method=method, layers=layers, **options)
    if captioner_of(model) is not None:
        for name, given in {"grid": grid, "num_prefix_tokens": num_prefix_tokens}.items():
            if given is not None:
                raise TypeError(f"{name}: a captioner has its own grid; leave it out")
        return explain_captions(model, inputs, target, method, layers, options)
    question = Question(model, inputs, target, layers, grid, num_prefix_tokens)
    if isinstance(method, str):
        _check_arguments(method, target, layers, num_prefix_tokens, options)
        name, is_signed = method, METHODS[method].is_signed
        has_target = METHODS[method].has_target
    else:
        if options or layers is not None:
            what = "layers" if layers is not None else next(iter(options))
            raise TypeError(f"{what}: only methods of attnkit's own have one")
        name = getattr(method, "__name__", "given") if callable(method) else "given"
        is_signed, has_target = False, True
    with looking(model):
        if isinstance(method, str):
            values = METHODS[method].function(question, **options)
        else:
            values = _given(question, method)
            is_signed = bool((values < 0).any())
        if question.logits is None:
            with torch.no_grad():
                question.ask()
        table = None if question.chain is None else layer_table(question.chain)
        tokens, places, prefix = _on_grid(question, values.detach())
    logits, classes = question.logits, question.target
    assert logits is not None
    assert classes is not None

    def again(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        given: dict[str, Any] = {"grid": grid, "num_prefix_tokens": num_prefix_tokens}
        wanted = classes if has_target else None
        return explain(model, images, wanted, method, layers=layers, **given, **options).map

    return Explanation(
        method=name,
        map=places,
        tokens=tokens,
        num_prefix_tokens=prefix,
        target=classes,
        predicted=logits.argmax(dim=1),
        logit=logits.gather(1, classes[:, None])[:, 0],
        probability=probabilities(logits).gather(1, classes[:, None])[:, 0],
        images=question.images.detach(),
        model=model,
        layers=table,
        notes=question.notes,
        is_signed=is_signed,
        has_target=has_target,
        again=None if isinstance(method, Tensor) else again,
    )


def _check_arguments(
    method: str,
    target: Target,
    layers: Layers,
    num_prefix_tokens: int | None,
    options: dict[str, Any],
) -> None:
    if method not in METHODS:
        raise ValueError(
            f"method: expected one of {', '.join(METHODS)}, a function or a map, got {method!r}"
        )
    known = METHODS[method]
    if target is not None and not known.has_target:
        knowing = ", ".join(name for name, one in METHODS.items() if one.has_target)
        raise ValueError(
            f"target: {method!r} gives the same map for every class; leave it out, or take one of "
            f"{knowing}"
        )
    if not known.has_layers and (layers is not None or num_prefix_tokens is not None):
        what = "layers" if layers is not None else "num_prefix_tokens"
        raise ValueError(f"{what}: {method!r} does not use attention layers; leave it out")
    for option in options:
        if option not in known.options:
            has = f"has {', '.join(known.options)}" if known.options else "has no options"
            raise TypeError(f"{option}: {method!r} {has}")


def _given(question: Question, method: MapFunction | Tensor) -> Tensor:
    """A map that is not ours, checked."""
    if not isinstance(method, Tensor):
        if not callable(method):
            raise TypeError(
                f"method: expected a name, a function or a tensor, got {type(method).__name__}"
            )
        with torch.no_grad():
            question.ask()
        assert question.target is not None
        method = method(question.model, question.images.detach(), question.target)
    if (
        not isinstance(method, Tensor)
        or method.ndim not in (2, 3)
        or len(method) != question.batch
        or not method.is_floating_point()
    ):
        got = list(method.shape) if isinstance(method, Tensor) else type(method).__name__
        raise ValueError(
            f"method: expected a map [{question.batch}, rows, columns] or [{question.batch}, "
            f"tokens] of floating-point numbers, got {got}"
        )
    return method.to(question.images.device)


def _on_grid(question: Question, values: Tensor) -> tuple[Tensor | None, Tensor, int]:
    """Tokens, map, and how many tokens are a prefix."""
    if values.ndim == 3:
        return None, values, 0
    if question.chain is not None:
        grid = question.chain.grid
    else:
        grid = find_grid(
            question.model,
            question.images,
            values.shape[1],
            question.grid,
            question.num_prefix_tokens,
        )
    places = grid.patches(values).unflatten(1, (grid.rows, grid.columns))
    return values, places, grid.num_prefix_tokens
