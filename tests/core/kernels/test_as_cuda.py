"""Every CUDA path but Triton's, walked forward and backward with tensors that have no memory."""

from functools import partial
from itertools import product

import as_cuda
import pytest
import torch

import attnkit
from attnkit.core.inputs import check_inputs
from attnkit.core.kernels import flex
from attnkit.core.kernels.choose import BACKENDS, choose_backend
from attnkit.models.captioning.captioner import Captioner
from attnkit.models.captioning.image_encoders import CNNEncoder
from attnkit.models.captioning.transformer_decoder import TransformerDecoder

BATCH, HEADS, SIDE = 2, 6, 5
TOKENS = SIDE * SIDE
LENGTHS = [TOKENS, 4]

MASKS = {
    "none": lambda: None,
    "causal": attnkit.Causal,
    "padding": lambda: attnkit.Padding(torch.tensor(LENGTHS, device="cuda")),
    "causal & padding": lambda: (
        attnkit.Causal() & attnkit.Padding(torch.tensor(LENGTHS, device="cuda"))
    ),
    "dense": lambda: attnkit.Dense(torch.ones(TOKENS, TOKENS, device="cuda") > 0),
    "window": lambda: attnkit.Window(3, 2),
    "grid": lambda: attnkit.Window2d(SIDE, SIDE, 1, 2),
    "packed": lambda: attnkit.Packed([5, 1, TOKENS - 6]),
    "packed & causal": lambda: attnkit.Packed([5, 1, TOKENS - 6]) & attnkit.Causal(),
    "blocks": lambda: attnkit.Blocks(torch.ones(SIDE, SIDE, device="cuda") > 0, SIDE),
    "~window": lambda: ~attnkit.Window(3, 2),
}


def table(**options):
    return torch.randn(HEADS, TOKENS, TOKENS, device="cuda", **options)


def sink(**options):
    return torch.randn(HEADS, device="cuda", **options)


# heads of keys, dim, dim of values, and the options
FORMS = {
    "plain": (HEADS, 64, 64, dict),
    "odd": (HEADS, 33, 7, dict),
    "grouped": (HEADS // 3, 80, 80, dict),
    "wide": (HEADS, 136, 136, dict),
    "bias": (HEADS, 24, 24, lambda dtype: {"bias": table(dtype=dtype)}),
    "learned bias": (HEADS, 24, 24, lambda dtype: {"bias": table(requires_grad=True)}),
    "sink": (HEADS // 3, 33, 7, lambda dtype: {"sink": sink(requires_grad=True)}),
    "dropout": (HEADS, 24, 24, lambda dtype: {"dropout_p": 0.1}),
    "scale": (HEADS, 24, 24, lambda dtype: {"scale": -2.0}),
    "additive": (
        HEADS,
        24,
        24,
        lambda dtype: {
            "score": attnkit.Additive(torch.randn(HEADS, 24, device="cuda", dtype=dtype))
        },
    ),
}
CASES = [
    *product(FORMS, [torch.bfloat16]),
    ("plain", torch.float16),
    *product(("plain", "odd", "learned bias", "sink"), [torch.float32]),
]
# these need the places of the edges, which the tests of Triton hold
WITHOUT = ("edges", "edges_triton")


def make(form, dtype):
    kv_heads, dim, value_dim, options = FORMS[form]
    shapes = [(BATCH, HEADS, TOKENS, dim), (BATCH, kv_heads, TOKENS, dim)]
    shapes.append((BATCH, kv_heads, TOKENS, value_dim))
    tensors = [torch.randn(s, device="cuda", dtype=dtype).requires_grad_() for s in shapes]
    return tensors, options(dtype) if options is not dict else {}


@pytest.mark.parametrize("mask", MASKS)
def test_every_kernel_that_serves(mask):
    """The plain form with every mask, and each other one with every third."""
    ran = set()
    place = list(MASKS).index(mask)
    with as_cuda.cuda_without_a_gpu():
        given = MASKS[mask]()
        for form, dtype in CASES[:1] + CASES[1 + place % 3 :: 3]:
            tensors, options = make(form, dtype)
            inputs = check_inputs(*tensors, mask=given, **options)
            expected = (*tensors[0].shape[:3], tensors[2].shape[3])
            leaves = [*tensors, *(o for o in options.values() if getattr(o, "requires_grad", 0))]
            serving = [b.name for b in BACKENDS if b.serves(inputs) and b.name not in WITHOUT]
            assert choose_backend(inputs).name in serving
            for name in serving:
                output = attnkit.attend(*tensors, mask=given, backend=name, **options)
                assert (output.shape, output.dtype) == (expected, dtype), (name, form)
                assert output.device == as_cuda.CUDA
                toward = torch.ones_like(output).transpose(1, 2).contiguous().transpose(1, 2)
                gradients = torch.autograd.grad(output, leaves, toward)
                for gradient, leaf in zip(gradients, leaves, strict=True):
                    assert (gradient.shape, gradient.dtype) == (leaf.shape, leaf.dtype)
                    assert gradient.device == as_cuda.CUDA
                ran.add(name)
    assert {"efficient", "math", "blockwise", "reference"} <= ran
    assert ("flash" in ran) == (mask in ("none", "causal"))
    assert "cudnn" in ran
    assert ("flex" in ran) == (mask != "none")
    assert ("varlen" in ran) == mask.startswith("packed")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", ["auto", "varlen", "flex"])
def test_the_second_step_sends_nothing_to_the_gpu(mask, backend):
    """Nor waits for it: a number that is read raises an error here."""
    flex._made.cache_clear()
    with as_cuda.cuda_without_a_gpu() as transfers:
        given = MASKS[mask]()
        tensors, _ = make("plain", torch.bfloat16)
        if attnkit.explain_backends(*tensors, mask=given).reasons.get(backend):
            return
        sent = []
        for _ in range(2):
            before = transfers.count
            attnkit.attend(*tensors, mask=given, backend=backend).sum().backward()
            sent.append(transfers.count - before)
    assert sent[1] == 0
    # the lengths of packed sequences were on the CPU, and so are plans of what holds no tensors
    is_planned = backend == "flex" and mask in ("causal", "window", "grid", "~window")
    assert bool(sent[0]) == (mask.startswith("packed") or is_planned)


def test_flex_is_chosen_by_the_share_of_the_plan():
    """Where the mask's numbers are on the GPU, which would be waited for, by its kind."""
    with as_cuda.cuda_without_a_gpu():
        query = torch.randn(1, 2, 4096, 16, device="cuda", dtype=torch.bfloat16)
        few, many = torch.tensor([1000]), torch.tensor([4000])
        for mask, share in (
            (attnkit.Window(3000, 3000), None),
            (attnkit.Window(64, 64), 94 / 1024),
            (attnkit.Padding(many), None),
            (attnkit.Padding(few), 8 / 32),
            (attnkit.Padding(few.to("cuda")), None),
            (attnkit.Blocks(torch.ones(64, 64, device="cuda") > 0, 64), -1),
        ):
            chosen = attnkit.explain_backends(query, query, query, mask=mask).chosen
            assert (chosen == "flex") == (share is not None), mask
            if share is not None and share > 0:
                with attnkit.record_backends() as record:
                    attnkit.attend(query, query, query, mask=mask)
                assert record.shares == {"": {"flex": share}}


def test_cudnn_is_chosen_where_it_is_right_and_faster():
    """Not with masks: its backward can give NaN (pytorch 196678), and it plans anew for each length
    (FunASR 3704). Not for what is short or little: blocks of flash and cuDNN would be mostly empty,
    and cuDNN's steps take longest to start."""
    with as_cuda.cuda_without_a_gpu():

        def query(batch, tokens):
            return torch.randn(batch, 12, tokens, 64, device="cuda", dtype=torch.bfloat16)

        def chosen(query, memory=None, **options):
            memory = query if memory is None else memory
            return attnkit.explain_backends(query, memory, memory, **options).chosen

        bias = torch.randn(704, 704, device="cuda", dtype=torch.bfloat16)
        mask = attnkit.Padding(torch.tensor(32 * [700], device="cuda"))
        for trains in (False, True):
            for options, expected in (
                ({"mask": mask}, "efficient"),
                ({"bias": bias}, "efficient"),
                ({"mask": attnkit.Causal()}, "flash"),
                ({}, "cudnn"),
            ):
                assert chosen(query(32, 704).requires_grad_(trains), **options) == expected
        for batch, tokens, expected in (
            (2048, 64, "efficient"), (2048, 65, "cudnn"), (64, 197, "flash"), (128, 197, "cudnn")
        ):  # fmt: skip
            assert chosen(query(batch, tokens)) == expected
        assert chosen(query(2048, 1), query(2048, 64)) == "efficient"
        assert chosen(query(2048, 1), query(2048, 65)) == "flash"


def test_flex_is_compiled_while_it_is_recorded(monkeypatch):
    """Uncompiled it holds all scores: recording a training step needed 64 GB on a GPU. It is the
    program that runs unrecorded; other compiled functions run uncompiled, and afterwards not."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # is quicker
    flex._compiled.cache_clear()
    counts = torch._dynamo.utils.counters["stats"]
    query, key, value = torch.randn(3, 1, 2, 256, 16).unbind()
    mask = attnkit.Window(16, 16)
    inputs = check_inputs(query, key, value, mask=mask)
    other = torch.compile(lambda x: x.sin() + 1)
    before = counts["unique_graphs"]
    with attnkit.record_backends() as record:
        output = flex.Flex()(inputs)
        assert counts["unique_graphs"] == before + 1
        other(value)
        assert counts["unique_graphs"] == before + 1
    assert record.total() == {"flex": 1}
    expected = attnkit.attend(query, key, value, mask=mask, backend="reference")
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(flex.Flex()(inputs), expected)
    assert counts["unique_graphs"] == before + 1
    other(value)
    assert counts["unique_graphs"] == before + 2
    flex._compiled.cache_clear()


def networks():
    """Each with the shape of its images and, for sentences, words."""
    vit = attnkit.ViT(
        image_size=16, patch_size=4, in_channels=3, num_classes=5, dim=32, depth=2, num_heads=2
    )
    encoder = CNNEncoder((24, 40), 3, dim=16, stages=[[8], [8, 8], [16]])
    decoder = TransformerDecoder(9, 7, dim=8, memory_dim=16, depth=2, num_heads=2)
    return {
        "ViT": (vit, (3, 3, 16, 16), ()),
        "window": (
            attnkit.SpatialAttention(16, num_heads=2, pattern="window", radius=2),
            (3, 16, 16, 16),
            (),
        ),
        "captioner": (
            Captioner(encoder, decoder),
            (2, 3, 24, 40),
            (torch.tensor([[1, 4, 5, 2], [1, 4, 2, 0]]),),
        ),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_training_steps_wait_for_nothing(dtype):
    with as_cuda.cuda_without_a_gpu() as transfers:
        for name, (network, shape, others) in networks().items():
            network.to("cuda", dtype)
            images = torch.randn(shape, device="cuda", dtype=dtype)
            others = [other.to("cuda") for other in others]
            sent = transfers.count
            network(images, *others).square().mean().backward()
            assert transfers.count == sent, name
            used = [p.grad for p in network.parameters() if p.grad is not None]
            assert used, name
            assert all(gradient.device == as_cuda.CUDA for gradient in used), name


def test_it_sees_what_it_is_for():
    with as_cuda.cuda_without_a_gpu() as transfers:
        tensor = torch.ones(3, device="cuda")
        for read in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.nonzero):
            with pytest.raises((RuntimeError, NotImplementedError)):
                read(tensor[:1])
        with pytest.raises((RuntimeError, NotImplementedError)):
            bool((tensor > 0).all())
        with pytest.raises((RuntimeError, AssertionError)):
            tensor + torch.ones(3)
        assert transfers.count == 0
        torch.ones(3).to("cuda")
        assert transfers.count == 1
        query = torch.randn(1, 2, 9, 20, device="cuda", dtype=torch.bfloat16)
        as_cuda.fused(as_cuda.SDPBackend.FLASH_ATTENTION, query, query, query)
        with pytest.raises(AssertionError):  # no multiple of 8
            as_cuda.fused(as_cuda.SDPBackend.CUDNN_ATTENTION, query, query, query)
