"""A dry run of a network: which modules run, what they return, and what depends on what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cached_property, reduce
from itertools import chain, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd

from attnkit.core.running import undisturbed
from attnkit.surgery.hooks import hooks_of

Node = tuple[Any, int]
"""A computed tensor: the function of autograd's graph that made it, and the index of the function's
output."""


def node_of(tensor: Tensor) -> Node | None:
    """Return the node of a tensor; None if it was not computed from one with a gradient."""
    return None if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


class Paths:
    """All paths from one node to another.

    A node a *dominates* a node b if every path from the source to b leads through a. The nodes that
    dominate the sink are the *main path*: what follows them depends on earlier nodes only through
    them.

    before: for each node except the source, the nodes it was computed from.
    dominator: for each node except the source, the nearest other node that dominates it (Cooper,
        Harvey and Kennedy 2001, A simple, fast dominance algorithm).
    depth: for each node, the number of other nodes that dominate it.
    main: the main path from the source to the sink; `depth` is the index in it. Empty if the sink
        does not depend on the source.
    """

    def __init__(self, source: Node, sink: Node) -> None:
        self.before: dict[Node, list[Node]] = {}
        self.dominator: dict[Node, Node] = {}
        self.depth = {source: 0}
        for node in _in_order(sink):
            before = [other for other in _inputs(node) if other in self.depth]
            if before and node != source:
                self.before[node] = list(dict.fromkeys(before))
                self.dominator[node] = reduce(self._nearest_common, before)
                self.depth[node] = self.depth[self.dominator[node]] + 1
        self.main = list(self.dominators(sink))[::-1] if sink in self.depth else []

    def dominators(self, node: Node) -> Iterator[Node]:
        """Yield the node, and those that dominate it, the nearest first."""
        yield node
        while node in self.dominator:
            node = self.dominator[node]
            yield node

    def dominates(self, node: Node, other: Node) -> bool:
        """Whether every path to `other` leads through `node`; a node dominates itself."""
        return any(found == node for found in self.dominators(other))

    def _nearest_common(self, one: Node, other: Node) -> Node:
        while one != other:
            if self.depth[one] < self.depth[other]:
                one, other = other, one
            one = self.dominator[one]
        return one


def _inputs(node: Node) -> list[Node]:
    return [(function, index) for function, index in node[0].next_functions if function is not None]


def _in_order(sink: Node) -> Iterator[Node]:
    """Yield every node that the sink depends on, each after its inputs."""
    seen, stack = {sink}, [(sink, iter(_inputs(sink)))]
    while stack:
        node, inputs = stack[-1]
        for found in inputs:
            if found not in seen:
                seen.add(found)
                stack.append((found, iter(_inputs(found))))
                break
        else:
            stack.pop()
            yield node


See = Callable[[str, "Node | None", object], None]


class Map(NamedTuple):
    """The shape of a map as [batch, channels, height, width], its dtype and device, and whether the
    network keeps it as [batch, height, width, channels]."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    channels_last: bool = False

    def zeros(self) -> Tensor:
        """Return one map of zeros of this kind, [1, channels, height, width]."""
        return torch.zeros(1, *self.shape[1:], dtype=self.dtype, device=self.device)


class DryRun:
    """A run of a network in evaluation mode, which leaves the network unchanged.

    images: the batch of the run.
    named: the network's modules by name, without attention that was inserted before.
    calls: how often each module ran, in the order in which they finished for the first time.
    starts, ends: the first input and the output of each module's last call, as nodes of `paths`.
    givers: for each node, the modules that returned it, in order.
    paths: from the images to the output with the longest main path; None: not traced.

    Args:
        example: a batch; None: one image of zeros, of the first size and number of channels with
            which the network runs.
        traced: whether to find the paths, which takes the memory of a training step.

    Raises:
        ValueError: the network does not run on the example.
    """

    def __init__(self, model: nn.Module, example: Tensor | None, *, traced: bool = False) -> None:
        if example is not None and not isinstance(example, Tensor):
            raise TypeError(f"example: expected a tensor or None, got {type(example).__name__}")
        self.model = model
        inserted = {
            id(module)
            for hooked in model.modules()
            for hook in hooks_of(hooked)
            for module in getattr(hook.owner, hook.name).modules()
        }
        self.named = {n: m for n, m in model.named_modules() if id(m) not in inserted}
        failed: list[Exception] = []
        examples = list(examples_for(model)) if example is None else [example]
        for images in examples:
            try:
                self._run(images, traced)
                return
            except Exception as raised:
                failed.append(raised)
        given, error = list(examples[0].shape), failed[0]
        raise ValueError(
            f"example: the dry run with {'an' if example is None else 'the'} input of the shape "
            f"{given} failed with {type(error).__name__}: {error}; give example=, a batch that the "
            "model takes"
        ) from error

    def shape_of(self, name: str) -> torch.Size | None:
        """Return the shape of a module's output, if that is one tensor of real numbers."""
        output = self._outputs.get(name)
        return None if output is None else output.shape

    def map_of(self, name: str) -> Map | None:
        """Return the map that a module returned; None if it returned none, or did not run.

        Height and width are the axes that have the proportions of the images. If both readings or
        none have them, they are the axes that grow with the images' height and width.

        Raises:
            ValueError: height and width cannot be told from channels.
        """
        output = self._outputs.get(name)
        if output is None or len(output.shape) != 4:
            return None
        is_first, is_last = self._readings(output.shape)
        if is_first == is_last:
            grows = self._grows(name, output.shape)
            if grows is None and is_first:
                raise ValueError(
                    f"model: cannot tell height and width from channels in {list(output.shape)}, "
                    f"the output of {name}; give example=, images of another height than width, or "
                    "choose another place"
                )
            is_first, is_last = grows in (_FIRST, _FIXED), grows == _LAST
        if not is_last:
            return output if is_first else None
        batch, height, width, channels = output.shape
        shape = torch.Size([batch, channels, height, width])
        return output._replace(shape=shape, channels_last=True)

    def one_map(self, name: str) -> Map:
        """Return the map of a module that must run once in a pass and return one."""
        found = self.map_of(name)
        if found is None:
            what = "gave no map" if name in self.calls else "did not run"
            raise ValueError(f"model: {name} {what} in the dry run")
        if self.calls[name] > 1:
            raise ValueError(
                f"model: {name} runs {self.calls[name]} times in one pass, and attention there "
                "would run each time; choose another place"
            )
        return found

    def calling_all_children(self, modules: Iterable[nn.Module]) -> list[nn.Module]:
        """Return those of the modules whose forward would call a child that is added to them."""
        probes = {module: _Probe() for module in modules}
        for module, probe in probes.items():
            module.add_module(_PROBE, probe)
        try:
            with undisturbed(self.model), suppress(Exception):
                self.model(self.images)
        finally:
            for module in probes:
                delattr(module, _PROBE)
        return [module for module, probe in probes.items() if probe.was_called]

    def _run(self, images: Tensor, traced: bool) -> None:
        self.images = images
        self.calls: Counter[str] = Counter()
        self.starts: dict[str, Node] = {}
        self.ends: dict[str, Node] = {}
        self.givers: dict[Node, list[str]] = {}
        self.paths: Paths | None = None
        self._outputs: dict[str, Map | None] = {}

        def see(name: str, given: Node | None, output: object) -> None:
            self.calls[name] += 1
            self._outputs[name] = _map(output)
            end = node_of(output) if isinstance(output, Tensor) else None
            for nodes, node in ((self.starts, given), (self.ends, end)):
                nodes.pop(name, None)
                if node is not None:
                    nodes[name] = node
            if end is not None:
                self.givers.setdefault(end, []).append(name)

        if not traced:
            self._watched(self.images, see)
            return
        with torch.inference_mode(False), torch.enable_grad():
            # times 1, because a network may write into its input
            images = self.images.clone().requires_grad_() * 1
            source = node_of(images)
            assert source is not None
            outputs = _tensors(self._watched(images, see))
        found = [Paths(source, sink) for o in outputs if (sink := node_of(o)) is not None]
        self.paths = max(found, key=lambda paths: len(paths.depth), default=None)

    def _watched(self, images: Tensor, see: See) -> Any:
        """Return the network's output for the images; `see` gets each call of a module."""
        traced = torch.is_grad_enabled() and images.requires_grad
        # autograd cannot keep tensors that were made in inference mode
        tensors = chain(self.model.named_parameters(), self.model.named_buffers())
        state = {name: t.clone() for name, t in tensors if traced and t.is_inference()}
        with ExitStack() as stack:
            stack.enter_context(undisturbed(self.model))
            stack.enter_context(torch.set_grad_enabled(traced))
            for name, module in self.named.items():
                given: list[Node | None] = []

                def enter(module, args, kwargs, given=given):
                    tensors = _tensors((args, kwargs))
                    # at once, because a module may write into its input
                    given[:] = [node_of(tensors[0]) if tensors else None]

                def leave(module, args, output, name=name, given=given):
                    see(name, given[0], output)

                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(leave).remove)
            return functional_call(self.model, state, images) if state else self.model(images)

    def _readings(self, shape: torch.Size) -> tuple[bool, bool]:
        """Whether [batch, channels, height, width] and [batch, height, width, channels] have the
        proportions of the images."""
        if self.images.ndim != 4 or shape[1:].numel() == 1:
            return True, False
        sides = self.images.shape[2:]
        return _in_proportion(shape[2:], sides), _in_proportion(shape[1:3], sides)

    def _grows(self, name: str, shape: torch.Size) -> list[list[bool]] | None:
        """Return which axes grow with the height of the images and with their width; None if
        unknown."""
        shapes = [larger.get(name) for larger in self._larger]
        if any(found is None or len(found) != 4 for found in shapes):
            return None
        return [[a != b for a, b in zip(found, shape, strict=True)] for found in shapes]  # type: ignore[arg-type]

    @cached_property
    def _larger(self) -> list[dict[str, torch.Size]]:
        """The shapes of outputs for images twice as high and twice as wide, as far as the network
        runs on those."""
        runs = []
        for axis in (2, 3):
            shapes: dict[str, torch.Size] = {}

            def see(name: str, given: Node | None, output: object, shapes=shapes) -> None:
                if isinstance(output, Tensor):
                    shapes[name] = output.shape

            with suppress(Exception):
                self._watched(torch.cat([self.images, self.images], dim=axis), see)
            runs.append(shapes)
        return runs


# which axes of an output grow with the height of the images, and which with their width
_FIRST = [[False, False, True, False], [False, False, False, True]]
_LAST = [[False, True, False, False], [False, False, True, False]]
_FIXED = [[False] * 4, [False] * 4]

_PROBE = "attnkit_probe"


class _Probe(nn.Module):
    was_called = False

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        self.was_called = True
        return x


def _map(output: object) -> Map | None:
    if isinstance(output, Tensor) and output.is_floating_point():
        return Map(output.shape, output.dtype, output.device)
    return None


def _tensors(value: object) -> list[Tensor]:
    """Return the tensors in a tensor or in sequences and mappings of them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [t for v in value for t in _tensors(v)] if isinstance(value, list | tuple) else []


def _in_proportion(map_sides: torch.Size, image_sides: torch.Size) -> bool:
    """Whether a map may belong to these images: less than a pixel is lost on the way to it."""
    (height, width), (image_height, image_width) = map_sides, image_sides
    return abs(height * image_width - width * image_height) < max(image_sides)


def examples_for(model: nn.Module) -> Iterator[Tensor]:
    """Yield zeros on the device and in the dtype of the parameters. Their size is that for which a
    part of the network is made, else timm's for the pretrained weights, else 224 × 224; their
    channels are those of the first convolution, else timm's."""
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    channels, *noted = dict(config).get("input_size") or (3, 224, 224)
    made_for = (
        getattr(module, name, None)
        for module in model.modules()
        for name in ("img_size", "image_size")
    )
    sizes = [(size, size) if isinstance(size, int) else size for size in made_for if size]
    convolutions = [m.in_channels for m in model.modules() if isinstance(m, _ConvNd)]
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    for size, width in product(
        dict.fromkeys([*sizes[:1], tuple(noted)]), dict.fromkeys([*convolutions[:1], channels])
    ):
        yield torch.zeros(1, width, *size, device=like.device, dtype=like.dtype)
