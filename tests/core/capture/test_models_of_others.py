"""Captured weights against the eager ones of models nobody here wrote, with random weights."""

import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import attnkit
from attnkit.core.capture.watch import watch_attention

transformers = pytest.importorskip("transformers")

IMAGE = 32
SMALL = {"patch_size": 8, "embed_dim": 12, "num_heads": 3, "depth": 2}
WINDOWS = {"embed_dim": 12, "num_heads": (1, 2, 3, 4), "window_size": 2}


def randomized(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval()


def some_images(size=IMAGE):
    torch.manual_seed(2)
    return torch.randn(2, 3, size, size)


def captured_as_recorded(model, run):
    """The captured weights, call after call; output and kernels are those of the model alone."""
    with attnkit.record_backends() as record:
        expected = run()
    with attnkit.record_backends() as watched, attnkit.capture_attention(model) as captured:
        output = run()
    assert watched.counts == record.counts
    assert torch.equal(output, expected)
    return captured


def slow(names, *quick):
    """The names, all but the quick ones marked."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


class Shapes(TorchFunctionMode):
    """Of the queries that torch's function was given."""

    def __init__(self):
        super().__init__()
        self.queries = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            self.queries.add(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


# timm

FUSED = {
    "vit_tiny_patch16_224": SMALL,
    "deit3_small_patch16_224": SMALL,
    "beit_base_patch16_224": SMALL,
    "beitv2_base_patch16_224": SMALL,
    "eva02_tiny_patch14_224": SMALL,
    "vit_base_patch16_siglip_gap_224": SMALL,
    "vit_small_patch14_reg4_dinov2": SMALL,
    "flexivit_small": SMALL,
    "vit_relpos_small_patch16_224": SMALL,
    "samvit_base_patch16": SMALL,
    "pit_ti_224": {"depth": (1, 1, 1)},
    "maxvit_pico_rw_256": {"img_size": 256},
}
EAGER = {
    "cait_xxs24_224": (SMALL, "blocks.0.attn, blocks.1.attn"),
    "xcit_nano_12_p8_224": ({**SMALL, "embed_dim": 12}, "blocks.0.attn, blocks.1.attn"),
    "swin_tiny_patch4_window7_224": (WINDOWS, "layers.0.blocks.0.attn, .* and 9 more"),
    "swinv2_tiny_window8_256": (WINDOWS, "layers.0.blocks.0.attn, .* and 9 more"),
    "mvitv2_tiny": ({}, "stages.0.blocks.0.attn, .* and 7 more"),
    "coat_lite_tiny": ({}, "serial_blocks1.0.factoratt_crpe, .* and 5 more"),
}


def make_timm(name, options):
    size = options.get("img_size", IMAGE)
    if "patch_size" in options and name.startswith("xcit"):
        options = {key: value for key, value in options.items() if key != "patch_size"}
    own = {} if size == 256 else {"img_size": size}
    given = {key: value for key, value in options.items() if key != "img_size"}
    return randomized(timm.create_model(name, num_classes=5, **own, **given)), some_images(size)


def dropped(model, run):
    """What timm's eager attention gives to its dropout: the weights."""
    seen, handles = [], []
    fused = [module for module in model.modules() if getattr(module, "fused_attn", False)]
    for module in fused:
        module.fused_attn = False
    for name, module in model.named_modules():
        if name.endswith("attn_drop"):
            handles.append(module.register_forward_hook(lambda *given: seen.append(given[-1])))
    run()
    for handle in handles:
        handle.remove()
    for module in fused:
        module.fused_attn = True
    return seen


@pytest.mark.parametrize("name", slow(FUSED, "vit_tiny_patch16_224"))
@torch.no_grad()
def test_timm(name):
    model, x = make_timm(name, FUSED[name])
    theirs = dropped(model, lambda: model(x))
    captured = captured_as_recorded(model, lambda: model(x))
    ours = [weights for calls in captured.values() for weights in calls]
    assert len(ours) == len(theirs) > 1
    for weights, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(weights.reshape(expected.shape), expected, atol=1e-5, rtol=1e-5)
        # random weights that are no more than uniform would hide what is wrong
        assert weights.std() > 0.01 * weights.mean()


@pytest.mark.slow
@pytest.mark.parametrize("name", EAGER)
@torch.no_grad()
def test_eager_models_of_timm_are_named(name):
    options, names = EAGER[name]
    model, x = make_timm(name, options)
    with (
        pytest.raises(ValueError, match=rf"which are not seen, in {names}; attnkit.replace_att"),
        attnkit.capture_attention(model),
    ):
        model(x)


# torchvision


@torch.no_grad()
def test_torchvisions_vit():
    vit = torchvision.models.VisionTransformer(16, 8, 2, 2, 12, 17, num_classes=3)
    model, x = randomized(vit), some_images(16)
    captured = captured_as_recorded(model, lambda: model(x))
    layers = [f"encoder.layers.encoder_layer_{place}.self_attention" for place in range(2)]
    assert list(captured) == layers
    theirs = []
    for name in layers:
        attention = model.get_submodule(name)

        def hook(module, args, kwargs, output):
            with torch.no_grad():
                options = kwargs | {"need_weights": True, "average_attn_weights": False}
                theirs.append(type(module).forward(module, *args, **options)[1])

        attention.register_forward_hook(hook, with_kwargs=True)
    model(x)
    for (weights,), expected in zip(captured.values(), theirs, strict=True):
        torch.testing.assert_close(weights, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "names"),
    [
        ("swin_t", 64, "features.1.0.attn, features.1.1.attn, .* and 9 more"),
        ("swin_v2_t", 64, "features.1.0.attn, features.1.1.attn, .* and 9 more"),
        ("maxvit_t", 224, "blocks.0.layers.0.layers.window_attention.attn_layer.1, .*19 more"),
    ],
)
@torch.no_grad()
def test_eager_models_of_torchvision_are_named(name, size, names):
    model = getattr(torchvision.models, name)().eval()
    with (
        pytest.raises(ValueError, match=rf"which are not seen, in {names}; attnkit.replace_att"),
        attnkit.capture_attention(model),
    ):
        model(torch.randn(1, 3, size, size))


# transformers

VISION = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 17,
    "image_size": IMAGE,
    "patch_size": 8,
}
TEXT = {
    "vocab_size": 31,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 17,
    "max_position_embeddings": 40,
}
SWIN = {
    "image_size": IMAGE,
    "patch_size": 2,
    "embed_dim": 12,
    "depths": [2, 2],
    "num_heads": [2, 3],
    "window_size": 4,
}
GPT2 = {"vocab_size": 31, "n_embd": 24, "n_layer": 2, "n_head": 6, "n_positions": 40}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
LLAMA = {**TEXT, "num_key_value_heads": 2}
T5 = {"vocab_size": 31, "d_model": 24, "num_layers": 2, "num_heads": 3, "d_kv": 8, "d_ff": 17}
TRANSFORMERS = {
    "ViT": VISION,
    "DeiT": VISION,
    "Dinov2": VISION,
    "Dinov2WithRegisters": VISION,
    "DINOv3ViT": VISION,
    "CLIPVision": VISION,
    "SiglipVision": {**VISION, "vision_use_head": False},
    "Beit": {**VISION, "use_relative_position_bias": True},
    "Data2VecVision": VISION,
    "Swin": SWIN,
    "Segformer": {
        "hidden_sizes": [8, 12, 12, 12],
        "num_attention_heads": [1, 2, 3, 3],
        "depths": [1, 1, 1, 1],
    },
    "Bert": TEXT,
    "GPT2": GPT2,
    "Llama": LLAMA,
    "T5Encoder": T5,
    "Gemma2": {**LLAMA, "head_dim": 4, "sliding_window": 5},
    "GptOss": {
        **LLAMA,
        "head_dim": 4,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "intermediate_size": 16,
    },
}
INTERFACES = {
    **dict.fromkeys(TRANSFORMERS, ("sdpa", "eager")),
    "ViT": ("sdpa", "eager", "flex_attention"),
    "Llama": ("sdpa", "eager", "flex_attention"),
    "Data2VecVision": ("sdpa",),  # its eager attention asks no interface
    "Gemma2": ("eager",),  # which caps its scores, as torch's function can't
    "GptOss": ("eager",),  # nor has it sinks
}
IN_TRANSFORMERS = [f"{name}, {kind}" for name, kinds in INTERFACES.items() for kind in kinds]
QUICK = ("ViT, sdpa", "Llama, sdpa", "Llama, eager")


def make_transformers(name, kind):
    """A model, one that computes the same eagerly, and inputs."""
    config = "T5" if name == "T5Encoder" else name
    options = dict(TRANSFORMERS[name])
    if kind == "flex_attention":  # whose heads are not so small
        options["hidden_size"] = 16 * options["num_attention_heads"]
    models = []
    for interface in (kind, "eager"):
        made = getattr(transformers, f"{config}Config")(**options)
        model = getattr(transformers, f"{name}Model")._from_config(
            made, attn_implementation=interface
        )
        models.append(randomized(model))
    models[1].load_state_dict(models[0].state_dict())
    if "vocab_size" not in options:
        # with fewer pixels Segformer is left with one key
        return *models, {"pixel_values": some_images(64 if name == "Segformer" else IMAGE)}
    torch.manual_seed(2)
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[1, 9:] = 0
    return *models, {"input_ids": torch.randint(1, 31, (2, 13)), "attention_mask": mask}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", slow(IN_TRANSFORMERS, *QUICK))
@torch.no_grad()
def test_transformers(case):
    name, kind = case.split(", ")
    model, eager, given = make_transformers(name, kind)
    captured = captured_as_recorded(model, lambda: model(**given)[0])
    theirs = {}
    for layer in captured:

        def hook(module, args, output, layer=layer):
            theirs[layer] = output[-1]

        eager.get_submodule(layer).register_forward_hook(hook)
    eager(**given, output_attentions=True)
    assert len(captured) >= 2
    for layer, (weights,) in captured.items():
        assert weights.shape == theirs[layer].shape
        real = theirs[layer].sum(dim=-1) > 0
        torch.testing.assert_close(weights[real], theirs[layer][real], atol=1e-5, rtol=1e-5)
    assert any(weights.std() > 0.01 * weights.mean() for (weights,) in captured.values())


def test_gradients_through_the_interface():
    results = []
    for kind in ("sdpa", "eager"):
        model, _, given = make_transformers("Llama", kind)
        with watch_attention(model) as calls:
            y = model(**given)[0].square().sum()
        gradients = torch.autograd.grad(y, [call.output for call in calls])
        pairs = zip(calls, gradients, strict=True)
        results.append([call.weight_gradient(gradient) for call, gradient in pairs])
    for sdpa, eager in zip(*results, strict=True):
        torch.testing.assert_close(sdpa, eager, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_steps_of_generation_with_grouped_heads(padded):
    """With a mask transformers gives torch the heads of one query as queries."""
    model, _, given = make_transformers("Llama", "sdpa")
    ids = given["input_ids"][:, :9]
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, : 2 if padded else 0] = 0
    whole = captured_as_recorded(model, lambda: model(ids, mask)[0])
    cache = transformers.DynamicCache(config=model.config)
    kept = {"past_key_values": cache}
    with attnkit.capture_attention(model) as captured, Shapes() as shapes:
        for step in range(9):
            now = slice(step, step + 1)
            kept["position_ids"] = torch.full((2, 1), step)
            model(ids[:, now], mask[:, : step + 1], **kept)
    assert ((2, 2, 3, 4) in shapes.queries) == padded
    for layer, calls in captured.items():
        assert len(calls) == 9
        for step, weights in enumerate(calls):
            expected = whole[layer][0][:, :, step : step + 1, : step + 1]
            real = expected.sum(dim=-1) > 0
            if padded and step < 2:
                real[1] = False
            torch.testing.assert_close(weights[real], expected[real], atol=1e-5, rtol=1e-5)


def test_what_an_interface_does_not_mean_is_not_told():
    """A function that users registered, with a sink: its output is not A V."""

    def with_sink(module, query, key, value, attention_mask, scaling=None, **options):
        scores = query @ key.mT * scaling
        scores = F.pad(scores, (0, 1)).softmax(dim=-1)[..., :-1]
        return (scores @ value).transpose(1, 2), None

    transformers.AttentionInterface.register("sink_of_a_test", with_sink)
    config = transformers.ViTConfig(**VISION)
    model = transformers.ViTModel._from_config(config, attn_implementation="sink_of_a_test")
    try:
        with (
            pytest.raises(ValueError, match=r"which are not seen, in layers.0.attention, layers.1"),
            attnkit.capture_attention(randomized(model)),
        ):
            model(some_images())
    finally:
        del transformers.AttentionInterface._global_mapping["sink_of_a_test"]


def test_a_model_half_of_it_attnkits():
    """Ours beside theirs in one model: both are seen."""
    model, x = make_timm("vit_tiny_patch16_224", SMALL)
    ours = nn.Sequential(model, nn.Unflatten(1, (1, 5)), attnkit.MultiHeadAttention(5, 1))
    with attnkit.capture_attention(ours) as captured:
        ours(x)
    assert list(captured) == ["0.blocks.0.attn", "0.blocks.1.attn", "2"]
