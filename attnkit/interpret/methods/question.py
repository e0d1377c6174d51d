"""What is asked of a model, and for which class; and how the model is run for an answer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from attnkit.core.arguments import in_a_line
from attnkit.core.contexts import uncompiled
from attnkit.core.kernels.record import unrecorded
from attnkit.core.running import module_name, undisturbed
from attnkit.interpret.methods.hooks import ModuleRun, module_runs
from attnkit.interpret.quantity import Of, Quantity, quantity_of

Classes = int | Sequence[int] | Annotated[Tensor, "batch", int] | None
Layers = int | str | Sequence[int | str] | None
MapFunction = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""A map of a model, images and a class for each."""


class Target:
    """What is asked of a model, of whatever its input is made: y, the logit of a class.

    Each unit of explanation has a subclass: `Question` for the patches of images, `Sentences` for
    the patches of images behind each word, `GraphQuestion` for the edges of a graph.

    Attributes:
        unit: "patch", "word" or "edge".
        model: in evaluation while `looking` is open.
        target: the classes, int; after the first answer the predicted ones, where none were given.
        layers: of those methods that choose layers.
        logits: [batch, *words, classes], of the first answer.
        quantity: what is reported of a class; found from the first answer.
        notes: what was assumed on the way, a sentence each.
    """

    unit = ""

    def __init__(self, model: nn.Module, layers: Layers = None, of: Of = "probability") -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        self.model = model
        self.layers = layers
        self.of = of
        self.target: Annotated[Tensor, "batch *words", int] | None = None
        self.logits: Annotated[Tensor, "batch *words classes"] | None = None
        self.quantity: Quantity | None = None
        self.notes: list[str] = []

    def run(self) -> object:
        """Run the model on the whole input, and return what it returns."""
        raise NotImplementedError

    def ask(self) -> Tensor:
        """Ask the model, and remember its first answer."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Ask the model what a method needs to know first; called while `looking` is open."""

    def see(self, logits: Annotated[Tensor, "batch *words classes"]) -> None:
        """Remember the first answer, and of it the predicted classes and the quantity.

        Raises:
            ValueError: the target is a class that the model does not have.
        """
        if self.target is None:
            self.target = logits.detach().argmax(dim=-1)
        self.target = self.target.to(logits.device)
        largest, number = int(self.target.max()), logits.shape[-1]
        if largest >= number:
            raise ValueError(
                f"target: the model has {number} classes, expected 0 to {number - 1}, got {largest}"
            )
        if self.logits is None:
            self.logits = logits.detach()
            self.quantity = quantity_of(self.logits, self.of)

    def values(
        self, logits: Annotated[Tensor, "_ *words classes"], items: Annotated[Tensor, "_", int]
    ) -> Annotated[Tensor, "3 _ *words"]:
        """Of logits for some items of the batch: logit and quantity of the target, and 1 where it
        is the class with the largest logit, else 0."""
        assert self.target is not None
        assert self.quantity is not None
        target = self.target[items.to(self.target.device)]
        logit, value = (
            values.gather(-1, target[..., None])[..., 0]
            for values in (logits, self.quantity(logits))
        )
        return torch.stack([logit, value, (logits.argmax(dim=-1) == target).to(logit)])

    def module(self, name: str) -> nn.Module:
        """The module of a name as in `named_modules()`, compiled or not."""
        return next(m for n, m in self.model.named_modules() if module_name(n) == name)

    def gradients(
        self, y: Tensor, of: Sequence[Tensor], *, keep: bool = False, may_miss: bool = False
    ) -> list[Tensor]:
        """∂ sum(y) / ∂ of each tensor; no `.grad` is written.

        Args:
            keep: whether the graph is needed again.
            may_miss: whether y may not depend on some of them, whose gradient is then 0.

        Raises:
            RuntimeError: the model cuts the graph between one of them and y.
        """
        if not y.requires_grad or not all(tensor.requires_grad for tensor in of):
            raise RuntimeError(self.why_no_gradient())
        found = torch.autograd.grad(y.sum(), of, retain_graph=keep, allow_unused=True)
        if not may_miss and any(gradient is None for gradient in found):
            raise RuntimeError(self.why_no_gradient())
        return [
            torch.zeros_like(tensor) if gradient is None else gradient
            for tensor, gradient in zip(of, found, strict=True)
        ]

    def why_no_gradient(self) -> str:
        """Which module breaks the graph: it runs others without gradients, or detaches its own."""

        def breaking(run: ModuleRun) -> bool:
            takes = any(tensor.requires_grad for tensor in run.given)
            return not run.has_gradients or (
                takes and not any(tensor.requires_grad for tensor in run.made)
            )

        with module_runs(self.model, breaking) as runs:
            self.run()
        path = runs[0].path() if runs else ()
        name = next((run.name for run in path if run.has_gradients), "")
        where = f"the module {name!r}" if name else type(self.model).__name__
        return (
            f"model: {where} stops the gradient; remove the torch.no_grad or .detach() in it "
            "(checkpoint activations with use_reentrant=False), or take method='occlusion'"
            + (" with removal='colour'" if self.unit == "patch" else "")
            + ", which needs none"
        )


class Question(Target):
    """Images and a class for each: y is the sum over the batch of the classes' logits.

    Items do not see each other in evaluation, so that the gradient of the sum holds that of each.

    Attributes:
        forward: what takes images; the model, if nothing else is told.
        images: [batch, channels, height, width], a leaf that requires a gradient, so that all that
            is made of it is in the graph, whether parameters are frozen or not.
        chain: the attention that ran, where a method watched it.
    """

    unit = "patch"

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        target: Classes = None,
        layers: Layers = None,
        grid: tuple[int, int] | None = None,
        num_prefix_tokens: int | None = None,
        of: Of = "probability",
    ) -> None:
        super().__init__(model, layers, of)
        self.forward: Callable[[Tensor], Any] = model
        with torch.inference_mode(False):  # what is made there cannot be in a graph
            self.images = _checked(images).detach().clone().requires_grad_()
            self.target = _as_classes(target, self.images)
        self.grid = grid
        self.num_prefix_tokens = num_prefix_tokens
        self.chain: Any = None

    @property
    def batch(self) -> int:
        return len(self.images)

    def run(self) -> object:
        """The model's output for the images."""
        # a copy, since a model may begin in place, and a leaf with a gradient may not be written
        return self.forward(self.images.clone())

    def ask(self, images: Tensor | None = None) -> Tensor:
        """The logit of its class for each image, [batch], in the graph.

        Args:
            images: as many as were asked of; None: those.
        """
        images = self.images if images is None else images
        logits = logits_of(self.forward(images.clone()), type(self.model).__name__)
        if len(logits) != len(images):
            raise ValueError(
                f"model: expected logits of {len(images)} images, got {list(logits.shape)}"
            )
        self.see(logits)
        assert self.target is not None
        return logits.gather(1, self.target[:, None])[:, 0]


@contextmanager
def looking(model: nn.Module) -> Iterator[None]:
    """In the block the model is in evaluation, uncompiled, with gradients, and no record counts.

    After it modes, buffers and torch's random numbers are as before; no `.grad` was written.

    Raises:
        RuntimeError: the model was made in inference mode and cannot have gradients.
    """
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise RuntimeError(
            "model: its parameters were made in inference mode, where nothing has gradients; "
            "build or load it outside of torch.inference_mode()"
        )
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(uncompiled())
        stack.enter_context(undisturbed(model))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(unrecorded())
        yield


def logits_of(output: Any, name: str = "the model") -> Tensor:
    """Logits [batch, classes] in what a model returned: a tensor, `.logits` or `["logits"]`."""
    if isinstance(output, Mapping):
        output = output.get("logits", output)
    else:
        output = getattr(output, "logits", output)
    if not isinstance(output, Tensor) or output.ndim != 2:
        got = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise TypeError(
            f"model: expected logits [batch, classes] of {name}, or an output with .logits, got "
            f"{got}; wrap it in a module that returns them"
        )
    return in_float(output)


def captioner_of(model: nn.Module) -> Any:
    """The captioner that a model is, or that a module of a task holds; None: neither."""
    for found in (model, getattr(model, "model", None)):
        if callable(getattr(getattr(found, "decoder", None), "word_weights", None)):
            return found
    return None


def in_float(values: Tensor) -> Tensor:
    """Values of half precision in float32; others as they are."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _checked(images: Tensor) -> Tensor:
    if not isinstance(images, Tensor):
        raise TypeError(
            "inputs: expected images as a tensor [batch, channels, height, width], got "
            f"{type(images).__name__}; transform them as for the model's forward"
        )
    if images.ndim != 4:
        raise ValueError(
            f"inputs: expected images [batch, channels, height, width], got {list(images.shape)}"
            + ("; images[None] is a batch of one" if images.ndim == 3 else "")
        )
    if not images.is_floating_point():
        raise TypeError(
            f"inputs: expected floating-point images, got {images.dtype}; transform them, or "
            "divide by 255 for a model that takes 0 to 1"
        )
    if images.numel() == 0:
        raise ValueError(f"inputs: there is no image in a batch {list(images.shape)}")
    return images


def _as_classes(target: Classes, images: Tensor) -> Tensor | None:
    if target is None:
        return None
    try:
        classes = torch.as_tensor(target, device=images.device)
        is_right = not classes.is_floating_point() and classes.dtype != torch.bool
    except (TypeError, ValueError, RuntimeError):  # words, lists of different lengths
        is_right = False
    if not is_right or classes.ndim > 1:
        raise TypeError(
            f"target: expected a class, or one for each image, as integers, got {in_a_line(target)}"
        )
    if classes.ndim == 1 and len(classes) != len(images):
        raise ValueError(
            f"target: expected one class, or {len(images)}, one for each image, got {len(classes)}"
        )
    if int(classes.min()) < 0:
        raise ValueError(f"target: expected a class from 0, got {int(classes.min())}")
    return classes.long().expand(len(images)).clone()
