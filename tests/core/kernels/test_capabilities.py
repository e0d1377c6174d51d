"""The page of capabilities is what the kernels declare, and every cell that it serves on the CPU is
right: gradcheck in float64, torch's tolerances below."""

import importlib.util
from dataclasses import fields, replace

import pytest
import torch

import attnkit
from attnkit.core.inputs import Inputs
from attnkit.core.kernels.choose import BACKENDS
from attnkit.core.kernels.reference import reference_attention

# (atol, rtol) of torch's own tests of its kernels
TOLERANCES = {
    torch.float32: (1e-5, 1.3e-6),
    torch.bfloat16: (1e-3, 1.6e-2),
    torch.float16: (1e-3, 1e-3),
}
# times the error of plain code in that dtype; torch allows from 3 to 150, by kernel and gradient
FUDGE = 4


@pytest.fixture(scope="module")
def page(repository):
    path = repository / "docs" / "capabilities.py"
    spec = importlib.util.spec_from_file_location("capabilities", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_kernels_declare(page, repository, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    written = (repository / "docs" / "capabilities.md").read_text()
    assert page.page() == written, "run python docs/capabilities.py"
    assert all(f"`{kernel.name}`" in written for kernel in BACKENDS)


def differentiable(inputs: Inputs) -> tuple[list[torch.Tensor], "callable"]:
    """The tensors that an attention can be differentiated by, and what it is as their function."""
    parts = {"": inputs, "score": inputs.score, "normalizer": inputs.normalizer}
    found = [
        (part, field.name, getattr(owner, field.name))
        for part, owner in parts.items()
        for field in fields(owner)
        if isinstance(getattr(owner, field.name), torch.Tensor)
    ]

    def with_tensors(*tensors: torch.Tensor) -> Inputs:
        changed = {part: {} for part in parts}
        for (part, name, _), tensor in zip(found, tensors, strict=True):
            changed[part][name] = tensor
        owners = {part: replace(parts[part], **changed[part]) for part in ("score", "normalizer")}
        return replace(inputs, **changed[""], **owners)

    return [tensor for _, _, tensor in found], with_tensors


def serving(inputs: Inputs) -> list:
    return [kernel for kernel in BACKENDS if kernel.serves(inputs)]


def cells():
    """Names of the page's cells: every score with every mask, every normalizer with every mask."""
    scores = ("scaled_dot", "dot", "general", "cosine", "gaussian", "additive", "any, softcap")
    masks = (
        "none", "Causal", "Padding", "Window", "Window2d", "Packed", "Packed & Causal", "Blocks",
        "Edges", "Dense", "Causal & Padding", "~Window",
    )  # fmt: skip
    yield from ({"score": score, "mask": mask} for score in scores for mask in masks)
    for normalizer in ("hard, the best", "linear", "delta rule"):
        yield from ({"normalizer": normalizer, "mask": mask} for mask in masks)
    for option in ("bias", "learned bias", "sink", "scale ≤ 0", "grouped heads"):
        yield from ({"option": option, "mask": mask} for mask in ("none", "Causal", "Window"))


def test_no_cell_is_forgotten(page):
    named = [{**cell} for cell in cells()]
    for kind, table in (("score", page.SCORES), ("normalizer", page.NORMALIZERS)):
        wanted = set(table) - {"softmax", "hard, drawn"}  # which tests of its own draw
        assert {(cell[kind], cell["mask"]) for cell in named if kind in cell} == {
            (name, mask) for name in wanted for mask in page.MASKS
        }
    assert {cell["option"] for cell in named if "option" in cell} == set(page.OPTIONS) - {"dropout"}


@pytest.mark.parametrize("names", list(cells()), ids=lambda names: "-".join(names.values()))
def test_every_cell_that_is_served_is_right(page, names):
    torch.manual_seed(0)
    inputs = page.Place("cpu", torch.float64).asked(**names)
    if isinstance(inputs, ValueError):
        assert names.get("normalizer") == "delta rule"
        return
    tensors, with_tensors = differentiable(inputs)
    tensors = [(tensor - 0.4).detach().requires_grad_() for tensor in tensors]
    kernels = serving(with_tensors(*tensors))
    assert kernels[-1].name == "reference"
    # a finite difference sees a kink of a LeakyReLU or a change of the best key, hence the seed
    for kernel in kernels:
        assert torch.autograd.gradcheck(
            lambda *tensors, kernel=kernel: kernel(with_tensors(*tensors)),
            tensors,
            fast_mode=True,
        )
    place = list(cells()).index(names)  # each lower precision in every third cell
    for dtype, (atol, rtol) in list(TOLERANCES.items())[(place + place // 12) % 3 :: 3]:
        rounded = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
        exact = [tensor.detach().double().requires_grad_() for tensor in rounded]
        expected = results(kernels[-1], with_tensors(*exact), exact)
        plain = results(by_definition, with_tensors(*rounded), rounded)
        for kernel in serving(with_tensors(*rounded)):
            actual = results(kernel, with_tensors(*rounded), rounded)
            assert actual[0].dtype == dtype
            for ours, wanted, simple in zip(actual, expected, plain, strict=True):
                error = (simple.double() - wanted).abs().max().item()
                torch.testing.assert_close(
                    ours.double(), wanted, atol=FUDGE * max(atol, error), rtol=FUDGE * rtol
                )


def by_definition(inputs: Inputs) -> torch.Tensor:
    """The definition in the dtype of the inputs, as one would write it without care for it."""
    key, value = inputs.repeated_heads()
    inputs = replace(inputs, key=key, value=value)
    if isinstance(inputs.score, attnkit.Gaussian):  # torch.cdist has no half precision
        distance = (inputs.query[:, :, :, None] - key[:, :, None]).square().sum(-1)
        bandwidth = inputs.score.bandwidth[:, None, None]
        scores = distance / (-2 * bandwidth**2)
        if inputs.mask is not None:
            scores = scores.masked_fill(~inputs.dense_mask(), -torch.inf)
        return attnkit.normalizers.softmax(scores) @ value
    if isinstance(inputs.normalizer, attnkit.DeltaRule):  # nor has a triangular solve
        return reference_attention(inputs)
    return inputs.normalizer.weights(inputs, inputs.dense_mask()) @ value


def results(function, inputs, tensors):
    output = function(inputs)
    towards = (torch.arange(output.numel()) % 17 - 8).view_as(output) / 8
    gradients = torch.autograd.grad(
        output, tensors, towards.to(output.dtype), allow_unused=True, materialize_grads=True
    )
    assert all(result.isfinite().all() for result in (output, *gradients))
    return [output, *gradients]
