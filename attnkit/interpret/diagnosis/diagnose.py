"""`attnkit.diagnose_attention`: the health of a model's attention in one pass."""

from typing import Annotated, Any

from torch import Tensor, nn

from attnkit.core.arguments import at_least
from attnkit.core.capture.calls import Call, EdgeCall
from attnkit.core.capture.layers import ChosenCalls, LayerChoice, Layers
from attnkit.core.capture.undisturbed import undisturbed
from attnkit.core.capture.watch import told_of_attention
from attnkit.interpret.diagnosis.diagnosis import Diagnosis
from attnkit.interpret.diagnosis.edges import measure_edges
from attnkit.interpret.diagnosis.findings import findings_of
from attnkit.interpret.diagnosis.norms import HighNorms
from attnkit.interpret.diagnosis.recorder import Layout, Recorder
from attnkit.interpret.diagnosis.sampling import Sampling
from attnkit.interpret.diagnosis.uniform import uniform_attention
from attnkit.interpret.methods.grid import settled_grids


def diagnose_attention(
    model: nn.Module,
    inputs: Any,
    *,
    layers: Layers = None,
    labels: Annotated[Tensor, "nodes", int] | None = None,
    real_tokens: Annotated[Tensor, "batch tokens", bool] | None = None,
    grid: tuple[int, int] | None = None,
    num_prefix_tokens: int | None = None,
    num_rows: int = 128,
    seed: int = 0,
) -> Diagnosis:
    """Measure what each head of each layer of attention does, while the model runs once.

        print(attnkit.diagnose_attention(vit, images))
        print(attnkit.diagnose_attention(gat, (x, edge_index), labels=y))

    The kernels that compute the output do not change; attention is computed in addition, in blocks
    of rows, and not kept. The model runs in evaluation mode without gradients and is left as it
    was. `Diagnosis` lists what is measured.

    Of more than `num_rows` queries, `num_rows` are drawn at random. Heads and queries are compared
    with each other on 16 of these, and 48 keys are ranked. `notes` says so.

    Args:
        model: any whose attention can be seen, as `attnkit.capture_attention`.
        inputs: what the model is called with: a tensor, a tuple of arguments, or a dictionary of
            them by name.
        layers: positions in the order they run, or names (`*` matches anything); None for all.
        labels: of a graph's nodes, negative for nodes that do not count. The accuracy of the model
            is measured with them, with its attention and with 1/degree instead.
        real_tokens: False for padding; None: the `attention_mask` of a dictionary, if it has one.
        grid, num_prefix_tokens: of the patches of images; None: found as `attnkit.explain` does.
        num_rows: the largest number of queries per layer.
        seed: of what is drawn.

    Raises:
        ValueError, TypeError: an argument is wrong or fits no attention that ran, or there is
            attention that cannot be seen, which is named.
    """
    at_least(2, num_rows=num_rows)
    at_least(0, seed=seed)
    args, kwargs = _arguments(inputs)
    given = (*args, *kwargs.values())
    images = next((t for t in given if isinstance(t, Tensor) and t.ndim == 4), None)
    if images is None and grid is not None:
        raise ValueError("grid: only images [batch, channels, height, width] have patches on one")
    mask = kwargs.get("attention_mask") if real_tokens is None else real_tokens
    real = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None
    grids = None
    if images is not None:
        is_alone = len(given) == 1  # else what belongs to the first image alone is not known
        known = is_alone and images.is_floating_point()
        grids = settled_grids(model, images, grid, num_prefix_tokens) if known else {}
    layout = Layout(grids, num_prefix_tokens, real)
    recorder = Recorder(layout, Sampling(num_rows, min(16, num_rows), seed=seed))
    norms = HighNorms()
    chosen = ChosenCalls(LayerChoice(layers), recorder.hear)
    with undisturbed(model), told_of_attention(model, chosen), norms.measured(model):
        output = model(*args, **kwargs)
    rows = recorder.rows
    if real_tokens is not None and not layout.has_met_padding:
        raise ValueError(
            f"real_tokens: no attention ran over [batch, tokens] = {list(real_tokens.shape)}"
        )
    for row in rows:
        row["high_norm"] = norms.of(row["layer"])
    accuracy = uniform_accuracy = None
    if labels is not None:
        accuracy, uniform_accuracy = _accuracies(model, args, kwargs, output, labels)
    findings = findings_of(rows, accuracy, uniform_accuracy)
    return Diagnosis(rows, findings, list(recorder.notes), accuracy, uniform_accuracy)


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if isinstance(inputs, tuple | list):
        args, kwargs = tuple(inputs), {}
    elif hasattr(inputs, "keys") and hasattr(inputs, "items") and callable(inputs.items):
        args, kwargs = (), dict(inputs.items())
    else:
        raise TypeError(
            "inputs: expected a tensor, a tuple of arguments or a dictionary of them, got "
            f"{type(inputs).__name__}"
        )
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    if tensors and not len(tensors[0]):
        raise ValueError(f"inputs: the batch is empty, {list(tensors[0].shape)}")
    return args, kwargs


def _accuracies(
    model: nn.Module, args: tuple, kwargs: dict, output: Any, labels: Tensor
) -> tuple[float, float]:
    """With attention, and with 1 / degree in its place."""
    is_of_nodes = isinstance(output, Tensor) and output.ndim == 2 and len(output) == len(labels)
    if not is_of_nodes or labels.ndim != 1:
        shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"labels: expected one for each row of the model's logits {shape}, got "
            f"{list(labels.shape)}"
        )
    left: list[str] = []

    def hear(call: Call) -> None:
        if isinstance(call, EdgeCall):
            distance = measure_edges(call, Sampling())[0].get("uniform")
            if distance is None or bool((distance < 1e-3).all()):
                return
        left.append(call.layer)

    chosen = ChosenCalls(LayerChoice(None), hear)
    with undisturbed(model), uniform_attention(model), told_of_attention(model, chosen):
        uniform = model(*args, **kwargs)
    if left:
        raise ValueError(
            f"labels: the attention of {left[0] or '(itself)'} cannot be made uniform; expected "
            "attnkit.GraphAttention or a convolution of torch_geometric alone"
        )
    counted = labels >= 0
    if not counted.any():
        raise ValueError("labels: all are negative, and no node counts")
    right = [(logits.argmax(dim=1) == labels)[counted] for logits in (output, uniform)]
    return float(right[0].float().mean()), float(right[1].float().mean())
