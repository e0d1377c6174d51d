"""What FSDP does with a large model: made on the meta device, given memory, and every module that
owns tensors is told to initialize them."""

import pytest
import torch
from torch import nn

import attnkit
import attnkit.layers
import attnkit.models
from attnkit.core.names import homes
from attnkit.finetune import LoRALinear
from attnkit.models.graph_model import GraphPool
from attnkit.models.sgformer import GraphConvolution
from attnkit.surgery.insert import IdentityStart

METADATA = (["a", "b"], [("a", "to", "b"), ("b", "of", "a")])
VIT = {"image_size": 8, "patch_size": 4, "dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
WORDS = {"vocabulary_size": 11, "max_words": 7, "dim": 16}
DECODER = {**WORDS, "depth": 1, "num_heads": 2}
MODULES = {
    "ALiBi": lambda: attnkit.ALiBi(6),
    "RelativeBias1d": lambda: attnkit.RelativeBias1d(4, 8),
    "RelativeBias2d": lambda: attnkit.RelativeBias2d(4, 3, 5, num_prefix_tokens=1),
    "LearnedPositions1d": lambda: attnkit.LearnedPositions1d(8, 32),
    "LearnedPositions2d": lambda: attnkit.LearnedPositions2d((3, 5), 32),
    "FactorizedPositions2d": lambda: attnkit.FactorizedPositions2d((3, 5), 32),
    "Rotary1d": lambda: attnkit.Rotary1d(8, 16, dtype=torch.bfloat16),
    "Rotary2d": lambda: attnkit.Rotary2d(8, (3, 5), num_prefix_tokens=2),
    **{
        f"MultiHeadAttention, {score}": lambda score=score: attnkit.MultiHeadAttention(
            24, 4, score=score, gate="head", qk_norm=True
        )
        for score in ("general", "additive", "cosine", "gaussian")
    },
    "MultiHeadAttention, delta_rule": lambda: attnkit.MultiHeadAttention(
        24, 4, key_dim=10, normalizer="delta_rule"
    ),
    "AttentionPool": lambda: attnkit.AttentionPool(32, 4, num_queries=3, mlp_ratio=2.0),
    "NadarayaWatson": lambda: attnkit.NadarayaWatson(0.3),
    "TransformerBlock": lambda: attnkit.layers.TransformerBlock(24, 3, layer_scale=0.1),
    "PatchEmbedding": lambda: attnkit.layers.PatchEmbedding((2, 3), 5, 16),
    "LoRALinear": lambda: LoRALinear.adapt(nn.Linear(9, 16), 4, 1.0),
    "SpatialAttention": lambda: attnkit.SpatialAttention(16, num_heads=2, residual="gamma"),
    "ChannelAttention": lambda: attnkit.ChannelAttention(16, residual="gamma"),
    "CrossCovarianceAttention": lambda: attnkit.CrossCovarianceAttention(16, num_heads=2),
    "TransposedAttention": lambda: attnkit.TransposedAttention(16, num_heads=2),
    "ContextAttention": lambda: attnkit.ContextAttention(64),
    "DualAttention": lambda: attnkit.DualAttention(16),
    "IdentityStart": lambda: IdentityStart(attnkit.ChannelAttention(16)),
    "SqueezeExcitation": lambda: attnkit.SqueezeExcitation(16),
    "SpatialExcitation": lambda: attnkit.SpatialExcitation(16),
    "SCSE": lambda: attnkit.SCSE(16),
    "EfficientChannelAttention": lambda: attnkit.EfficientChannelAttention(16),
    "CBAM": lambda: attnkit.CBAM(32),
    "BAM": lambda: attnkit.BAM(32),
    "CoordinateAttention": lambda: attnkit.CoordinateAttention(32),
    "GatedSum": lambda: attnkit.GatedSum(8),
    **{
        f"GraphAttention, {score}": lambda score=score: attnkit.GraphAttention(
            (7, 9), 16, 3, score=score, edge_dim=2, residual=True, gate=True, add_self_loops=True,
            fill_value=torch.tensor([0.5, 2.0], device="cpu"),
        )
        for score in ("scaled_dot", "gat", "gatv2")
    },
    "GraphAttention": lambda: attnkit.GraphAttention(7, 16, 3),
    "GraphConvolution": lambda: GraphConvolution(7, 16),
    "GraphPool": lambda: GraphPool(32, 4),
    "SparseDropout": lambda: attnkit.layers.SparseDropout(),
    "SparseLinear": lambda: attnkit.layers.SparseLinear(7, 16),
    "HANAttention": lambda: attnkit.HANAttention(7, 16, METADATA, 2),
    "HGTAttention": lambda: attnkit.HGTAttention(7, 16, METADATA, 2),
    "RGATAttention": lambda: attnkit.RGATAttention(7, 16, 3, heads=2, num_bases=2),
    "GAT": lambda: attnkit.GAT(7, 16, 3, heads=2, mlp_ratio=2.0, norm="batch"),
    "GraphTransformer": lambda: attnkit.GraphTransformer(
        7, 16, 3, num_layers=1, heads=2, num_virtual_nodes=3, expander_degree=4,
        global_attention=None,
    ),
    "Polynormer": lambda: attnkit.Polynormer(7, 16, 3, heads=2),
    "SGFormer": lambda: attnkit.SGFormer(7, 16, 3),
    **{
        f"ViT, {positions}": lambda positions=positions: attnkit.ViT(
            **VIT, positions=positions, num_registers=2, qk_norm=True
        )
        for positions in ("learned", "sincos2d", "factorized2d", "rotary2d")
    },
    "ViT, attention": lambda: attnkit.ViT(**VIT, pooling="attention"),
    "ResNet": lambda: attnkit.models.ResNet(3, 3, widths=(8, 16)),
    "CNNEncoder": lambda: attnkit.CNNEncoder(image_size=16, dim=16, stages=[[8], [8]]),
    "ViTEncoder": lambda: attnkit.ViTEncoder(
        image_size=8, patch_size=4, dim=16, depth=1, num_heads=2
    ),
    **{
        f"TransformerDecoder, {positions}": lambda positions=positions: attnkit.TransformerDecoder(
            **DECODER, positions=positions, tie_embeddings=False
        )
        for positions in ("learned", "sincos", "rotary", "alibi", "relative")
    },
    "RecurrentDecoder": lambda: attnkit.RecurrentDecoder(**WORDS, score="general"),
    "HardRecurrentDecoder": lambda: attnkit.HardRecurrentDecoder(**WORDS),
}  # fmt: skip
OF_OTHERS = {
    "Captioner",  # an encoder and a decoder that were made before
    "Combined",  # two modules that were made before
    "Gate",  # the base of the gates
    "GraphBlock",  # around a GraphAttention; in GAT
    "TimmEncoder",  # timm's network
}


def tensors(module):
    return dict([*module.named_parameters(), *module.named_buffers()])


def materialized(make):
    """On the meta device first, then with memory that holds garbage, then initialized."""
    with torch.device("meta"):
        module = make()
    module = module.to_empty(device="cpu")
    for tensor in tensors(module).values():
        tensor.data.fill_(float("nan") if tensor.is_floating_point() else 77)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    return module


@pytest.mark.parametrize("name", MODULES)
def test_modules_initialize_all_that_they_own(name):
    module, normal = materialized(MODULES[name]), MODULES[name]()
    found, expected = tensors(module), tensors(normal)
    assert found.keys() == expected.keys()
    assert [key for key, tensor in found.items() if not tensor.isfinite().all()] == []
    for key, buffer in normal.named_buffers():
        assert torch.equal(found[key], buffer), key
        assert found[key].dtype == buffer.dtype
    for place, part in normal.named_modules():
        if not type(part).__module__.startswith("attnkit"):
            continue  # torch's and timm's, which begin as they do
        for key, parameter in part.named_parameters(prefix=place, recurse=False):
            if parameter.numel() < 2 or parameter.std() == 0:
                assert torch.equal(found[key], parameter), key
            elif parameter.numel() >= 40:
                assert 0.5 < found[key].std() / parameter.std() < 2, key


def test_every_public_module_is_in_the_table():
    served = "attnkit.core", "attnkit.layers", "attnkit.models"  # others need more to import
    values = [
        getattr(attnkit, name)
        for name, (home, _) in homes("attnkit").items()
        if home.startswith(served)
    ]
    for package in (attnkit.layers, attnkit.models):
        values += [getattr(package, name) for name in package.__all__]
    public = {value for value in values if isinstance(value, type) and issubclass(value, nn.Module)}
    made = {type(part) for make in MODULES.values() for part in make().modules()}
    lacking = {kind.__name__ for kind in public - made} - OF_OTHERS
    assert lacking == set()
