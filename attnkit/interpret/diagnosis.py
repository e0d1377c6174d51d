"""`attnkit.diagnose_attention` measures every head of a model's attention in one pass."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from attnkit.core.arguments import at_least
from attnkit.core.capture.calls import AttentionCall, Call, EdgeCall
from attnkit.core.capture.pyg import attention_convolutions, softmax_replaced
from attnkit.core.capture.watch import LayerChoice, Layers, told_of_attention
from attnkit.core.running import module_name, undisturbed
from attnkit.interpret.console import text_table
from attnkit.interpret.head_measures import Sampling, measure_edges, measure_tokens
from attnkit.interpret.methods.grid import Family, Grid, family_of, settled_grids
from attnkit.layers.graph.attention import GraphAttention
from attnkit.layers.graph.heads import NodeHeads

Row = dict[str, Any]

MEASURES = (
    "entropy", "sink", "prefix", "padding", "distance", "divergence", "static", "uniform",
    "high_norm",
)  # fmt: skip
MOST_ROWS = 48  # a longer table is printed with one row for each layer
SINK = 0.5  # a finding reports a key that takes at least this share of a head's attention


SIGNS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("padding", lambda value: value > 0, "look at padding, which must be 0"),
    (
        "static",
        lambda value: value >= 0.999,
        "rank the keys alike for every query (static score ≥ 0.999), so that they cannot depend on "
        "the query",
    ),
    (
        "entropy",
        lambda value: value >= 0.99,
        "spread evenly over what they see (normalised entropy ≥ 0.99), as a mean would",
    ),
    (
        "sink",
        lambda value: value >= SINK,
        f"give {SINK:.0%} or more of their attention to one key; gates and registers are what is "
        "known to help",
    ),
)
"""Possible findings, in the order in which a user should act on them: a column, the condition on a
head's number, and the words that report it."""


@dataclass(eq=False, repr=False)
class Diagnosis:
    """Measures of each attention head of a model; `print` shows a table and the findings.

    rows: a dictionary for each head of each call: `layer`, `call` (how often the layer ran before),
        `edge_type` (for heterogeneous graphs, else None), `head`, and the following numbers, which
        are None if they have no meaning or could not be measured:

        entropy: mean over rows of −Σ w ln w / ln(number of visible keys): 1 even, 0 one key.
        sink: largest share of all attention that a single key takes.
        prefix: share of attention on class and register tokens.
        padding: share of attention on padding; must be 0.
        distance: mean distance from patch to patch, in patches.
        divergence: mean Jensen–Shannon divergence from the other heads, in bits: 0 equal heads,
            1 disjoint heads.
        static: mean Kendall τ between two queries' rankings of the keys that both see: 1 if all
            queries rank alike.
        uniform: for graphs, mean total variation distance from 1/degree, 0 to 1.
        high_norm: share of tokens after the layer's block with a norm over 4 × their median.

        For graphs there also is `entropy_by_degree`: the entropy of nodes with 2, 3–4, 5–8, …
        edges.
    findings: what stands out, at most five sentences.
    notes: what was drawn or assumed, in sentences.
    accuracy, uniform_accuracy: accuracy of a graph model with labels, with its attention and with
        1/degree in its place.
    """

    rows: list[Row]
    findings: list[str]
    notes: list[str] = field(default_factory=list)
    accuracy: float | None = None
    uniform_accuracy: float | None = None

    def __repr__(self) -> str:
        rows, heading, below = self.rows, "head", [""]
        if len(rows) > MOST_ROWS:
            rows, heading = _layer_means(rows), "heads"
            below = ["means over the heads of a layer; `rows` has every head", ""]
        shown = [name for name in MEASURES if any(row[name] is not None for row in rows)]
        table = [["layer", heading, *shown]]
        for row in rows:
            numbers = ("–" if row[name] is None else f"{row[name]:.3f}" for name in shown)
            table.append([_place(row), str(row["head"]), *numbers])
        return "\n".join([text_table(table), *below, *self.findings, *self.notes])


def findings_of(
    rows: list[Row], accuracy: float | None = None, uniform_accuracy: float | None = None
) -> list[str]:
    """Return at most five sentences on what stands out, or one that says that nothing does."""
    found = []
    if accuracy is not None and uniform_accuracy is not None:
        found.append(
            f"accuracy: {accuracy:.4f} with attention, {uniform_accuracy:.4f} with 1/degree in its "
            f"place; attention is worth {accuracy - uniform_accuracy:+.4f}."
        )
    for column, is_met, words in SIGNS:
        measured = [row for row in rows if row[column] is not None]
        chosen = [row for row in measured if is_met(row[column])]
        if chosen:
            places = ", ".join(f"{_place(row)} head {row['head']}" for row in chosen[:3])
            more = f" and {len(chosen) - 3} more" if len(chosen) > 3 else ""
            low, high = (f"{least(row[column] for row in chosen):.4g}" for least in (min, max))
            found.append(
                f"{column}: {len(chosen)} of {len(measured)} heads {words}: {places}{more}; "
                + (f"{low}." if low == high else f"{low} to {high}.")
            )
    return found or ["nothing stands out: no head is on padding, static, even or a sink."]


def _layer_means(rows: list[Row]) -> list[Row]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["layer"], row["call"], row["edge_type"]), []).append(row)
    means = []
    for heads in groups.values():
        mean: Row = {"head": len(heads)}
        for name in MEASURES:
            known = [row[name] for row in heads if row[name] is not None]
            mean[name] = sum(known) / len(known) if known else None
        means.append(heads[0] | mean)
    return means


def _place(row: Row) -> str:
    words = [row["layer"] or "(itself)"]
    words += [f"call {row['call']}"] if row["call"] else []
    words += [" ".join(row["edge_type"])] if row["edge_type"] else []
    return ", ".join(words)


TIMES_THE_MEDIAN = 4  # the norm of a token is high above this multiple of the median


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

    The kernels that compute the output do not change. Attention is computed in addition, in blocks
    of rows, and not stored. The model runs in evaluation mode without gradients, and its state is
    restored. `Diagnosis` lists the measures.

    If a layer has more than `num_rows` queries, `num_rows` of them are drawn at random. Heads and
    queries are compared with each other on 16 of these, and 48 keys are ranked. `notes` reports
    what was drawn.

    Args:
        model: any model whose attention `attnkit.capture_attention` can capture.
        inputs: the model's inputs: a tensor, a tuple of arguments, or a dictionary of arguments by
            name.
        layers: positions in the order they run, or names (`*` matches anything); None for all.
        labels: classes of a graph's nodes, negative for nodes that do not count. They are used to
            measure the model's accuracy with its attention and with 1/degree instead.
        real_tokens: False for padding; None: the `attention_mask` of a dictionary, if it has one.
        grid, num_prefix_tokens: as in `attnkit.explain`, for images.
        num_rows: largest number of queries per layer.
        seed: seed of the draws.

    Raises:
        ValueError, TypeError: an argument is wrong or fits no attention that ran, or some attention
            cannot be captured; the message names it.
    """
    at_least(2, num_rows=num_rows)
    at_least(0, seed=seed)
    args, kwargs = _arguments(inputs)
    given = (*args, *kwargs.values())
    images = next((t for t in given if isinstance(t, Tensor) and t.ndim == 4), None)
    if images is None and grid is not None:
        raise ValueError("grid: only images [batch, channels, height, width] have patches on one")
    mask = kwargs.get("attention_mask") if real_tokens is None else real_tokens
    grids: dict[Family, Grid | None] | None = None
    if images is not None:
        grids = {}

        def ask(other: Tensor) -> Any:
            """Run the model with other images and the other arguments unchanged."""
            others = {name: other if one is images else one for name, one in kwargs.items()}
            return model(*(other if one is images else one for one in args), **others)

        if images.is_floating_point():
            of_all = ask if len(given) > 1 else None
            grids = settled_grids(model, images, grid, num_prefix_tokens, of_all)
    recorder = Recorder(
        Sampling(num_rows, min(16, num_rows), seed=seed),
        grids=grids,
        num_prefix_tokens=num_prefix_tokens,
        real=mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None,
    )
    recording = told_of_attention(model, recorder.hear, LayerChoice(layers))
    with undisturbed(model), recording, _high_norms(model) as high_norms:
        output = model(*args, **kwargs)
    if real_tokens is not None and not recorder.has_met_padding:
        raise ValueError(
            f"real_tokens: no attention ran over [batch, tokens] = {list(real_tokens.shape)}"
        )
    for row in recorder.rows:
        around = [name for name in high_norms if f"{row['layer']}.".startswith(f"{name}.")]
        row["high_norm"] = high_norms[max(around, key=len)] if around else None
    accuracies = () if labels is None else _accuracies(model, args, kwargs, output, labels)
    findings = findings_of(recorder.rows, *accuracies)
    return Diagnosis(recorder.rows, findings, list(recorder.notes), *accuracies)


@dataclass
class Recorder:
    """Receives calls of attention and stores one row of a `Diagnosis` for each head.

    sampling: number of queries and keys that are measured.
    grids: grid of the keys on the images, by family of layers; None without images.
    num_prefix_tokens: number of tokens before the patches; None: found from the model.
    real: [batch, tokens], False for padding; None: no padding.
    rows: the rows of the diagnosis, one for each head.
    notes: sentences on what was sampled or assumed, as the keys of a dictionary.
    has_met_padding: whether attention over as many tokens as `real` has run.
    """

    sampling: Sampling
    grids: dict[Family, Grid | None] | None = None
    num_prefix_tokens: int | None = None
    real: Tensor | None = None
    rows: list[Row] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    has_met_padding: bool = False
    _times: Counter[tuple[str, Any]] = field(default_factory=Counter)

    def hear(self, call: Call) -> None:
        """Measure a call of attention and store its rows."""
        edge_type: tuple[str, str, str] | None = None
        by_degree: dict[str, Tensor] | None = None
        if isinstance(call, EdgeCall):
            edge_type = call.edge_type
            measures, by_degree = measure_edges(call, self.sampling)
        else:
            measures = self._of_tokens(call)
        number = self._times[call.layer, edge_type]
        self._times[call.layer, edge_type] += 1
        for head in range(call.num_heads):
            row = {"layer": call.layer, "call": number, "edge_type": edge_type, "head": head}
            row |= dict.fromkeys(MEASURES)
            row |= {name: float(of_heads[head]) for name, of_heads in measures.items()}
            if by_degree is not None:
                of_degrees = {name: float(of_heads[head]) for name, of_heads in by_degree.items()}
                row["entropy_by_degree"] = of_degrees
            self.rows.append(row)

    def _of_tokens(self, call: AttentionCall) -> dict[str, Tensor]:
        sampling, num_keys = self.sampling, call.num_keys
        grid = None
        if self.grids is not None:
            grid = self.grids.get(family_of(call))
            if grid is None:
                self._note(f"grid: the {num_keys} keys of {call.layer or '(itself)'} form none.")
            else:
                self._note(f"grid: {grid.rows} x {grid.columns}, {grid.source}.")
        drawn = f"drawn with the seed {sampling.seed}"
        if call.num_queries > sampling.rows:
            self._note(f"{sampling.rows} queries of each layer, {drawn}.")
        if call.num_queries > sampling.compared or num_keys > sampling.keys:
            self._note(
                f"divergence and static: of at most {sampling.compared} queries and, of those that "
                f"are ranked, {sampling.keys} keys, {drawn}."
            )
        real = self.real
        if real is not None and real.shape != (len(call.query), num_keys):
            real = None
        self.has_met_padding |= real is not None
        known = self.num_prefix_tokens
        return measure_tokens(call, sampling, num_prefix_tokens=known, grid=grid, real=real)

    def _note(self, sentence: str) -> None:
        self.notes[sentence] = None


@contextmanager
def _high_norms(model: nn.Module) -> Iterator[dict[str, float]]:
    """Collect, for every module in a list of modules, the share of tokens with a high norm.

    A norm is high if it exceeds 4 times the median over the tokens. In large vision transformers
    these are patches without content that serve as memory (Darcet et al., Vision Transformers Need
    Registers, 2024; their threshold is absolute and for one model, this one is relative).
    """
    shares: dict[str, float] = {}
    lists = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

    def measure(name: str, output: object) -> None:
        while isinstance(output, tuple | list) and len(output):
            output = output[0]
        # 2 dimensions are nodes and 3 are tokens of a batch; feature maps have 4
        if isinstance(output, Tensor) and output.ndim in (2, 3) and output.numel():
            norms = output.detach().float().norm(dim=-1)
            bound = TIMES_THE_MEDIAN * norms.median(dim=-1, keepdim=True).values
            shares[name] = float((norms > bound).float().mean())

    with ExitStack() as stack:
        for name, parent in model.named_modules():
            for part, module in parent.named_children() if isinstance(parent, lists) else ():
                if next(module.children(), None) is not None:
                    path = module_name(f"{name}.{part}".removeprefix("."))
                    handle = module.register_forward_hook(
                        lambda module, args, output, path=path: measure(path, output)
                    )
                    stack.callback(handle.remove)
        yield shares


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
    """Return the accuracy with the model's attention, and with 1/degree in its place."""
    is_of_nodes = isinstance(output, Tensor) and output.ndim == 2 and len(output) == len(labels)
    if not is_of_nodes or labels.ndim != 1:
        shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"labels: expected one for each row of the model's logits {shape}, got "
            f"{list(labels.shape)}"
        )
    others: list[str] = []

    def hear(call: Call) -> None:
        if isinstance(call, EdgeCall):
            distance = measure_edges(call, Sampling(compared=0, pairs=0))[0].get("uniform")
            if distance is None or bool((distance < 1e-3).all()):
                return
        others.append(call.layer)

    with undisturbed(model), _uniform_attention(model), told_of_attention(model, hear):
        uniform = model(*args, **kwargs)
    if others:
        raise ValueError(
            f"labels: the attention of {others[0] or '(itself)'} cannot be made uniform; expected "
            "attnkit.GraphAttention or a convolution of torch_geometric alone"
        )
    counted = labels >= 0
    if not counted.any():
        raise ValueError("labels: all are negative, and no node counts")
    right = [(logits.argmax(dim=1) == labels)[counted] for logits in (output, uniform)]
    return float(right[0].float().mean()), float(right[1].float().mean())


@contextmanager
def _uniform_attention(model: nn.Module) -> Iterator[None]:
    """Make every `GraphAttention` and torch_geometric convolution weigh edges by 1/degree.

    The values that are averaged do not change.
    """

    def of_zeros(softmax: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda src, *args, **kwargs: softmax(torch.zeros_like(src), *args, **kwargs)

    def without_keys(module: nn.Module, args: object, nodes: NodeHeads) -> NodeHeads:
        return nodes._replace(key=torch.zeros_like(nodes.key))  # equal keys have equal scores

    with ExitStack() as stack:
        convolutions = list(attention_convolutions(model).values())
        stack.enter_context(softmax_replaced(convolutions, of_zeros))
        for heads in [m.projections for m in model.modules() if isinstance(m, GraphAttention)]:

            def without_key_weight(features: Tensor, whole: Any = heads.edge_features) -> Any:
                return replace(whole(features), key_weight=None, bias=None)

            stack.callback(heads.register_forward_hook(without_keys).remove)
            stack.enter_context(patch.object(heads, "edge_features", without_key_weight))
        yield
