"""Attention over the edges of a graph by torch's operators, in memory of edges × heads, and its
weights.

Only the scores of edges are computed, by products sampled at the edges, and weighted sums of values
by bags of rows; no tensor of edges × heads × channels is made. Weights are not normalized edge by
edge. With u_e = exp(score_e − shift) and z_i = Σ_e u_e,

    output_i = Σ_e u_e v_e / z_i,   d score_e = u_e (g′_i · v_e − g′_i · output_i),   g′ = g / z

Under torch.compile everything is one operator that is not traced, because the computation depends
on the number of edges and on the values of their scores.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor

from attnkit.core.inputs import Inputs, check_inputs, in_high_precision
from attnkit.core.kernels.base import (
    Backend,
    computes_by_operators,
    empty_reasons,
    functorch_reasons,
)
from attnkit.core.kernels.edges.problem import (
    NUM_FLAT,
    SCHEMA,
    TENSORS,
    EdgeProblem,
    Gradients,
    Results,
    solve,
)
from attnkit.core.kernels.edges.scores import (
    add_feature_products,
    groups,
    new_gradients,
    products,
    sum_edges,
    sum_edges_by_source,
    sum_features,
    sum_weights,
)
from attnkit.core.kernels.reference import softmax_of_edges
from attnkit.core.masks.edges import EdgeFeatures, Edges
from attnkit.core.operators.precision import no_autocast
from attnkit.core.scores.additive import Additive
from attnkit.core.scores.kinds import Cosine, Gaussian, Score

DENSITY = 16  # products of a full matrix that take as long as one sampled product


class EdgesKernel(Backend):
    """The kernel for `Edges` by torch's operators, in time and memory linear in the edges."""

    name = "edges"
    needs_mask = "mask=Edges(…) and no other mask"
    reads_edges = True
    has_sink = True

    def reasons(self, inputs: Inputs) -> Iterator[str]:
        if not isinstance(inputs.mask, Edges):
            if inputs.mask is not None:
                yield f"needs {self.needs_mask}"
            return
        yield from empty_reasons(inputs)
        score, features = inputs.score, inputs.edge_features
        edges = inputs.mask.edge_index.device
        if edges != inputs.query.device:
            yield f"needs edges on {inputs.query.device}, as the tensors, got {edges}"
        if inputs.dot_dim is None and not isinstance(score, Additive):
            yield f"needs a dot-product score or Additive, got {score}"
        if score.softcap is not None:
            yield f"cannot compute a softcap, got {score.softcap}"
        if inputs.bias is not None:
            yield "cannot read a bias"
        if torch.compiler.is_exporting():
            yield "sorts edges by their values, which an exported program cannot"
        yield from functorch_reasons()
        reads_features = features is not None and features.key_weight is not None
        if reads_features and isinstance(score, Cosine | Gaussian):
            yield f"cannot read edge features inside the score {score}"

    def pays(self, inputs: Inputs) -> bool:
        assert isinstance(inputs.mask, Edges)
        if inputs.edge_features is not None or torch.compiler.is_compiling():
            return True  # other kernels cannot check for duplicate edges under torch.compile
        return inputs.mask.num_edges * DENSITY < inputs.num_queries * inputs.num_keys

    def compute(self, inputs: Inputs) -> Tensor:
        lanes = inputs.query.shape[:2]
        with no_autocast(inputs.query):
            exact = in_high_precision(inputs)
            problem = EdgeProblem.of(exact)
            if torch.compiler.is_compiling():
                output, sums, _, _ = edge_softmax(*problem.flat())
            else:
                output, sums = solve(EdgesKernel() if computes_by_operators() else self, problem)
            output = output.unflatten(0, lanes)
            features = exact.edge_features
            if features is not None and features.value_weight is not None:
                sums = sums.unflatten(0, lanes)
                output = output + sums @ features.value_weight.transpose(1, 2)
        return output.to(inputs.query.dtype)

    def forward(self, problem: EdgeProblem) -> tuple[Results, Results]:
        """Compute outputs [lanes, targets, value_dim] and sums of features [lanes, targets,
        edge_dim]; and exponentials [lanes, edges] and their sums [lanes, targets, 1]."""
        value, num_edges = problem.value, problem.adjacency.num_edges
        shape = problem.query.shape[:2]
        new = value.new_empty if num_edges else value.new_zeros
        output, sums = new(*shape, value.shape[2]), new(*shape, problem.summed_dim)
        weights, totals = value.new_empty(shape[0], num_edges), value.new_ones(*shape, 1)
        for group in groups(problem):
            graph, lanes = group.graph, group.lanes
            exponentials = weights[lanes].view(-1)
            total = group.exponentials(exponentials)
            keep = group.keep(exponentials)
            kept = exponentials if keep is None else keep.mul_(exponentials)
            _rows(totals, lanes).copy_(total)
            value_sums = sum_edges(graph, kept, group.table("value"))
            torch.div(value_sums, total, out=_rows(output, lanes))
            if problem.sums_features:
                feature_sums = sum_features(graph, kept, group.features())
                torch.div(feature_sums, total, out=_rows(sums, lanes))
        return (output, sums), (weights, totals)

    def backward(
        self, problem: EdgeProblem, results: Results, gradients: Gradients, wanted: set[str]
    ) -> dict[str, Tensor]:
        """Compute the gradients of the wanted tensors, by name."""
        output, sums, weights, totals = results
        gradient, sums_gradient = gradients
        if gradient is None:
            gradient = torch.zeros_like(output)
        found = new_gradients(problem, wanted)
        for group in groups(problem):
            graph, lanes = group.graph, group.lanes
            kept = used = weights[lanes].view(-1)
            by_target = group.new("gradient", gradient)
            torch.div(gradient[lanes], totals[lanes], out=by_target.view(gradient[lanes].shape))
            row_products = group.new("products", gradient)
            shift = torch.mul(by_target, _rows(output, lanes), out=row_products).sum(dim=1)
            slopes = torch.empty_like(used)
            products(graph, by_target, group.table("value"), slopes)
            features_by_target = None
            if sums_gradient is not None and problem.sums_features:
                features_by_target = (sums_gradient[lanes] / totals[lanes]).flatten(0, 1)
                shift += (features_by_target * _rows(sums, lanes)).sum(dim=1)
                add_feature_products(graph, features_by_target, group.features(), slopes)
            keep = group.keep(used)
            if keep is not None:
                slopes.mul_(keep)
                kept = keep.mul_(used)
            slopes.sub_(shift.index_select(0, graph.target)).mul_(used)
            parts = {}
            if "value" in wanted:
                by_source = kept.index_select(0, graph.by_source)
                parts["value"] = sum_edges_by_source(graph, by_source, by_target)
            if "sink" in wanted:  # the sink has the weight that is left by the edges
                left = totals[lanes].flatten() - sum_weights(graph, used).flatten()
                parts["sink"] = -(left * shift).view(lanes.stop - lanes.start, -1).sum(dim=1)
            group.add_gradients(found, slopes, parts)
            if features_by_target is not None and "features" in wanted:
                rows = features_by_target.index_select(0, graph.target).mul_(kept[:, None])
                found["features"] += rows.view(-1, *found["features"].shape).sum(dim=0)
        return found


def _rows(tensor: Tensor, lanes: slice) -> Tensor:
    """Return contiguous lanes as a view [lanes · nodes, channels]."""
    return tensor[lanes].view(-1, tensor.shape[2])


def edge_weights(
    query: Annotated[Tensor, "*batch heads targets head_dim"],
    key: Annotated[Tensor, "*batch kv_heads sources head_dim"],
    edges: Edges,
    *,
    score: str | Score = "scaled_dot",
    edge_features: EdgeFeatures | None = None,
    scale: float | None = None,
    sink: Annotated[Tensor, "heads"] | None = None,
) -> Annotated[Tensor, "*batch heads edges"]:
    """Compute the weights with which `attend(…, mask=edges)` averages the values, before dropout.

        weight_e = softmax over the edges e of a target i of score(query_i, key_j + W_k e_ij) + b_ij

    The weights of the edges into one target sum to 1, or to less with a sink; an edge given twice
    has two weights. They are computed in float32 (float64 if the inputs are) and are
    differentiable. No tensor of edges × channels is made, unless the kernel "edges" cannot compute
    the score; then the score is computed by its definition.

    Args:
        query, key: both may lack the batch; kv_heads divides heads.
        edges: the graph.
        score, scale, sink: as in `attnkit.attend`.
        edge_features: the features that edges add to scores and keys; those added to values do not
            change the weights.

    Returns:
        The weights, in the dtype of the inputs and in the order of `edges.edge_index`.

    Raises:
        ValueError, TypeError: as `attnkit.attend`.
    """
    if not isinstance(edges, Edges):
        raise TypeError(f"edges: expected attnkit.Edges, got {type(edges).__name__}")
    if query.ndim == key.ndim == 3:
        options: dict[str, Any] = {"score": score, "edge_features": edge_features}
        return edge_weights(query[None], key[None], edges, **options, scale=scale, sink=sink)[0]
    if isinstance(edge_features, EdgeFeatures):
        edge_features = replace(edge_features, value_weight=None)
    inputs = check_inputs(
        query,
        key,
        key,
        score=score,
        mask=edges,
        edge_features=edge_features,
        scale=scale,
        sink=sink,
    )
    with no_autocast(query):
        exact = in_high_precision(inputs)
        if torch.compiler.is_compiling() or next(EdgesKernel().reasons(inputs), None):
            all_keys, _ = exact.repeated_heads()
            weights = softmax_of_edges(replace(exact, key=all_keys), edges)
        else:
            problem = EdgeProblem.of(exact)
            (weights,) = solve(_EdgeWeights(), problem)
            order = problem.adjacency.order
            if order is not None:
                weights = torch.empty_like(weights).index_copy(1, order.long(), weights)
            weights = weights.unflatten(0, inputs.query.shape[:2])
    return weights.to(inputs.query.dtype)


class _EdgeWeights:
    """Solver that computes the weights of a problem, [lanes, edges]."""

    name = "edges"

    def forward(self, problem: EdgeProblem) -> tuple[Results, Results]:
        weights = problem.query.new_empty(len(problem.query), problem.adjacency.num_edges)
        for group in groups(problem):
            exponentials = weights[group.lanes].view(-1)
            totals = group.exponentials(exponentials).squeeze(1)
            exponentials.div_(totals.index_select(0, group.graph.target))
        return (weights,), ()

    def backward(
        self, problem: EdgeProblem, results: Results, gradients: Gradients, wanted: set[str]
    ) -> dict[str, Tensor]:
        (weights,), (gradient,) = results, gradients
        assert gradient is not None
        found = new_gradients(problem, wanted - {"value"})
        for group in groups(problem):
            # d score_e = weight_e (g_e − Σ weight g over the edges of its target)
            used = weights[group.lanes].view(-1)
            slopes = gradient[group.lanes].reshape(-1) * used
            shift = sum_weights(group.graph, slopes).squeeze(1)
            slopes -= shift.index_select(0, group.graph.target) * used
            parts = {}
            if "sink" in wanted:  # the sink has the weight that is left by the edges
                left = 1 - sum_weights(group.graph, used).flatten()
                num_lanes = group.lanes.stop - group.lanes.start
                parts["sink"] = -(left * shift).view(num_lanes, -1).sum(dim=1)
            group.add_gradients(found, slopes, parts)
        return found


@torch.library.custom_op(
    "attnkit::edge_softmax",
    mutates_args=(),
    schema=f"({SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def edge_softmax(*flat):
    """Call `EdgesKernel.forward` with a flat problem."""
    outputs, kept = EdgesKernel().forward(EdgeProblem.of_flat(*flat))
    return *outputs, *kept


@torch.library.custom_op(
    "attnkit::edge_softmax_backward",
    mutates_args=(),
    schema=f"({SCHEMA}, Tensor output, Tensor sums, Tensor weights, Tensor totals, "
    "Tensor? gradient, Tensor? sums_gradient, bool[] wanted) -> Tensor[]",
)
def _backward(*arguments):
    """Call `EdgesKernel.backward`; return a tensor for each name, empty if it is not wanted."""
    problem = EdgeProblem.of_flat(*arguments[:NUM_FLAT])
    *results, gradient, sums_gradient, wanted = arguments[NUM_FLAT:]
    names = {name for name, is_wanted in zip(TENSORS, wanted, strict=True) if is_wanted}
    found = EdgesKernel().backward(problem, tuple(results), (gradient, sums_gradient), names)
    return [
        found[name].contiguous() if name in names else problem.query.new_empty(0)
        for name in TENSORS
    ]


@edge_softmax.register_fake
def _(*flat):
    problem = EdgeProblem.of_flat(*flat)
    (lanes, targets, _), value = problem.query.shape, problem.value
    return (
        value.new_empty(lanes, targets, value.shape[2]),
        value.new_empty(lanes, targets, problem.summed_dim),
        value.new_empty(lanes, problem.adjacency.target.shape[0]),
        value.new_empty(lanes, targets, 1),
    )


@_backward.register_fake
def _(*arguments):
    problem = EdgeProblem.of_flat(*arguments[:NUM_FLAT])
    return [
        problem.query.new_empty(getattr(problem, name).shape if is_wanted else 0)
        for name, is_wanted in zip(TENSORS, arguments[-1], strict=True)
    ]


def _setup_context(ctx, inputs, output):
    ctx.numbers = [None if isinstance(given, Tensor) else given for given in inputs]
    ctx.save_for_backward(
        *(given if isinstance(given, Tensor) else None for given in inputs), *output
    )
    ctx.set_materialize_grads(False)


def _derivative(ctx, gradient, sums_gradient, *_):
    *tensors, output, sums, weights, totals = ctx.saved_tensors
    flat = [n if t is None else t for n, t in zip(ctx.numbers, tensors, strict=True)]
    num_others = NUM_FLAT - len(TENSORS)
    wanted = [bool(needed) for needed in ctx.needs_input_grad[num_others:]]
    found = _backward(*flat, output, sums, weights, totals, gradient, sums_gradient, wanted)
    by_name = (part if is_wanted else None for part, is_wanted in zip(found, wanted, strict=True))
    return *(None,) * num_others, *by_name


edge_softmax.register_autograd(_derivative, setup_context=_setup_context)
