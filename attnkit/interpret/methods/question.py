"""What is asked: a model, images, and for which class; and how the model is run for an answer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from attnkit.core.arguments import in_a_line
from attnkit.core.contexts import uncompiled
from attnkit.core.kernels.record import unrecorded
from attnkit.core.running import module_name, undisturbed

Target = int | Sequence[int] | Annotated[Tensor, "batch", int] | None
Layers = int | str | Sequence[int | str] | None


class Question:
    """A model, images and a class for each: y is the sum over the batch of the classes' logits.

    Items do not see each other in evaluation, so that the gradient of the sum holds that of each.

    Attributes:
        forward: what takes images; the model, if nothing else is told.
        model: in evaluation while `looking` is open.
        images: [batch, channels, height, width], a leaf that requires a gradient, so that all that
            is made of it is in the graph, whether parameters are frozen or not.
        target: [batch], int; after `ask`, where none was given, the predicted classes.
        layers: of those methods that choose layers.
        logits: [batch, classes], of the first `ask`.
        chain: the attention that ran, where a method watched it.
        notes: what was assumed on the way, a sentence each.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        target: Target = None,
        layers: Layers = None,
        grid: tuple[int, int] | None = None,
        num_prefix_tokens: int | None = None,
        forward: Callable[[Tensor], Any] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        self.model = model
        self.forward = model if forward is None else forward
        with torch.inference_mode(False):  # a clone made there can have gradients
            self.images = _checked(images).detach().clone().requires_grad_()
        self.target = _as_classes(target, self.images)
        self.layers = layers
        self.grid = grid
        self.num_prefix_tokens = num_prefix_tokens
        self.logits: Tensor | None = None
        self.chain: Any = None
        self.notes: list[str] = []

    @property
    def batch(self) -> int:
        return len(self.images)

    def ask(self, images: Tensor | None = None) -> Tensor:
        """The logit of its class for each image, [batch], in the graph; None: the images asked of.

        A batch of n times as many images is n copies of the batch, one after the other.
        """
        images = self.images if images is None else images
        # a copy, since a model may begin in place, and a leaf with a gradient may not be written
        logits = logits_of(self.forward(images.clone()), type(self.model).__name__)
        if len(logits) != len(images):
            raise ValueError(
                f"model: expected logits of {len(images)} images, got {list(logits.shape)}"
            )
        if self.target is None:
            self.target = logits.detach().argmax(dim=1)
        largest = int(self.target.max())
        if largest >= logits.shape[1]:
            raise ValueError(
                f"target: the model has {logits.shape[1]} classes, expected 0 to "
                f"{logits.shape[1] - 1}, got {largest}"
            )
        if self.logits is None:
            self.logits = logits.detach()
        target = self.target.repeat(len(images) // self.batch)
        return logits.gather(1, target[:, None])[:, 0]

    def module(self, name: str) -> nn.Module:
        """The module of a name as in `named_modules()`, compiled or not."""
        return next(m for n, m in self.model.named_modules() if module_name(n) == name)

    def gradients(self, y: Tensor, of: Sequence[Tensor], *, keep: bool = False) -> list[Tensor]:
        """∂ sum(y) / ∂ of each tensor; no `.grad` is written.

        Raises:
            RuntimeError: the model cuts the graph between one of them and y.
        """
        if not y.requires_grad or not all(tensor.requires_grad for tensor in of):
            raise RuntimeError(self._why_no_gradient())
        found = torch.autograd.grad(y.sum(), of, retain_graph=keep, allow_unused=True)
        gradients = [gradient for gradient in found if gradient is not None]
        if len(gradients) < len(found):
            raise RuntimeError(self._why_no_gradient())
        return gradients

    def _why_no_gradient(self) -> str:
        """Which module breaks the graph: it runs others without gradients, or detaches its own."""
        names = {module: module_name(name) for name, module in self.model.named_modules()}
        entered: list[nn.Module] = []
        broken: list[nn.Module] = []

        def enter(module: nn.Module, args: Any) -> None:
            if entered and not torch.is_grad_enabled():
                broken.append(entered[-1])
            entered.append(module)

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            entered.pop()
            given, made = _tensors([*args, *kwargs.values()]), _tensors(output)
            if any(t.requires_grad for t in given) and not any(t.requires_grad for t in made):
                broken.append(module)

        with ExitStack() as stack:
            for module in names:
                for handle in (
                    module.register_forward_pre_hook(enter),
                    module.register_forward_hook(leave, with_kwargs=True),
                ):
                    stack.callback(handle.remove)
            self.forward(self.images.clone())
        found = [*broken, self.model][0]
        where = f"the module {names[found]!r}" if names[found] else type(found).__name__
        return (
            f"model: {where} stops the gradient; remove the torch.no_grad or .detach() in it "
            "(checkpoint activations with use_reentrant=False), or take method='occlusion', which "
            "needs none"
        )


def probabilities(logits: Tensor) -> Tensor:
    """Of logits [..., classes] by softmax; of a single logit, as of a binary classifier, by the
    sigmoid."""
    return logits.sigmoid() if logits.shape[-1] == 1 else logits.softmax(dim=-1)


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
    return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output


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


def _as_classes(target: Target, images: Tensor) -> Tensor | None:
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


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, Mapping) else output
    return [t for t in values if isinstance(t, Tensor)] if hasattr(values, "__iter__") else []
