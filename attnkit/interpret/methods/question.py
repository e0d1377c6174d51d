"""The question that an explanation answers: a model, its input and a class; and how it is run."""

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
"""A function from a model, images and a class for each image to a map."""


class Target:
    """The base class of questions: y, the logit of a class, for any kind of input.

    Each unit of explanation has a subclass: `Question` for the patches of images, `Sentences` for
    the patches of images for each word, `GraphQuestion` for the edges of a graph.

    Attributes:
        unit: "patch", "word" or "edge".
        model: the model, in evaluation mode within `looking`.
        target: the classes, int; if none were given, the predicted ones after the first answer.
        layers: the chosen layers, for methods that use layers.
        logits: [batch, *words, classes], of the first answer.
        quantity: the quantity that is reported for a class, known after the first answer.
        notes: what was assumed, in sentences.
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
        """Run the model, and store its first answer."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Run the model for what a method needs to know first; called within `looking`."""

    def see(self, logits: Annotated[Tensor, "batch *words classes"]) -> None:
        """Store the logits of the first answer, its predicted classes and its quantity.

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
        """Return, for the logits of some items of the batch, the target's logit and quantity, and 1
        if the target has the largest logit, else 0."""
        assert self.target is not None
        assert self.quantity is not None
        target = self.target[items.to(self.target.device)]
        logit, value = (
            values.gather(-1, target[..., None])[..., 0]
            for values in (logits, self.quantity(logits))
        )
        return torch.stack([logit, value, (logits.argmax(dim=-1) == target).to(logit)])

    def module(self, name: str) -> nn.Module:
        """Return the module with a name as in `named_modules()`, also if compiled."""
        return next(m for n, m in self.model.named_modules() if module_name(n) == name)

    def gradients(
        self, y: Tensor, of: Sequence[Tensor], *, keep: bool = False, may_miss: bool = False
    ) -> list[Tensor]:
        """Return the gradient of sum(y) at each tensor; no `.grad` is written.

        Args:
            keep: whether the graph is needed again.
            may_miss: whether y may be independent of some tensors, whose gradient is then 0.

        Raises:
            RuntimeError: the model cuts the graph between a tensor and y.
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
        """Return an error message with the module that stops the gradient.

        It runs its children without gradients, or detaches its output.
        """

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

    Items do not see each other in evaluation, so the gradient of the sum holds each item's own.

    Attributes:
        forward: function from images to the model's output; by default the model.
        images: [batch, channels, height, width], a leaf that requires a gradient, so that all
            activations are in the graph even if parameters are frozen.
        chain: the attention that ran, if a method watched it.
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
        with torch.inference_mode(False):  # inference tensors cannot be in a graph
            self.images = _checked(images).detach().clone().requires_grad_()
            self.target = _as_classes(target, self.images)
        self.grid = grid
        self.num_prefix_tokens = num_prefix_tokens
        self.chain: Any = None

    @property
    def batch(self) -> int:
        return len(self.images)

    def run(self) -> object:
        """Return the model's output for the images."""
        # a copy, since a model may write to its input, which a leaf with a gradient forbids
        return self.forward(self.images.clone())

    def ask(self, images: Tensor | None = None) -> Tensor:
        """Return the logit of its class for each image, [batch], in the graph.

        Args:
            images: other images, of the same number; None: the question's images.
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
    """Run the block with the model in evaluation mode, uncompiled, with gradients, unrecorded.

    Afterwards modes, buffers and torch's random state are restored; no `.grad` is written.

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
    """Return the logits [batch, classes] of a model's output: itself, `.logits` or `["logits"]`."""
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
    """Return the model if it is a captioner, or the captioner that a task's module holds; None."""
    for found in (model, getattr(model, "model", None)):
        if callable(getattr(getattr(found, "decoder", None), "word_weights", None)):
            return found
    return None


def in_float(values: Tensor) -> Tensor:
    """Return half-precision values in float32, and others unchanged."""
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
