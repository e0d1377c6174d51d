"""What every conversion keeps: which parameters are frozen, their dtypes, the device, the modes."""

import pytest
import timm
import torch
import torch_geometric.nn as pyg
import torchvision
from timm.layers import EcaModule, SEModule
from timm.layers.cbam import CbamModule
from timm.layers.coord_attn import CoordAttn
from torch import nn
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

import attnkit
from attnkit import interop

METADATA = ["paper", "author"], [("paper", "cites", "paper"), ("author", "writes", "paper")]
VIT = {"img_size": 32, "depth": 1, "embed_dim": 16, "num_heads": 2, "num_classes": 3}
SWIN = {"img_size": 16, "patch_size": 2, "window_size": 4, "depths": (2,), "embed_dim": 8,
        "num_heads": (2,), "num_classes": 3}  # fmt: skip
V2 = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2}


def replaced(model):
    attnkit.replace_attention(model)
    return model


def replaced_by_cosine(model):
    attnkit.replace_attention(model, score="general")
    return model


def inserted(model):
    attnkit.insert_attention(
        model, "cbam", example=next(model.parameters()).new_zeros(1, 3, 16, 16), reduction=2
    )
    return model


def taken_out(model):
    inserted(model)
    attnkit.remove_attention(model)
    return model


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x):
        return x + self.norm(self.conv(x))


def timm_model(name, **options):
    return lambda: timm.create_model(name, **options)


TABLE = {
    "from_torch": (lambda: nn.MultiheadAttention(8, 2), interop.from_torch),
    "from_torch, kdim": (lambda: nn.MultiheadAttention(8, 2, kdim=6), interop.from_torch),
    "from_timm, ViT": (timm_model("vit_tiny_patch16_224", **VIT), interop.from_timm),
    "from_timm, pooled by attention": (
        timm_model("vit_base_patch16_siglip_224", **VIT),
        interop.from_timm,
    ),
    "from_timm, SE": (lambda: SEModule(16), interop.from_timm),
    "from_timm, ECA": (lambda: EcaModule(16), interop.from_timm),
    "from_timm, CBAM": (lambda: CbamModule(16), interop.from_timm),
    "from_timm, coordinates": (lambda: CoordAttn(16), interop.from_timm),
    "from_torchvision, ViT": (
        lambda: torchvision.models.VisionTransformer(32, 16, 1, 2, 16, 32, num_classes=3),
        interop.from_torchvision,
    ),
    "from_torchvision, SE": (
        lambda: torchvision.ops.SqueezeExcitation(16, 4),
        interop.from_torchvision,
    ),
    "from_pyg, TransformerConv": (
        lambda: pyg.TransformerConv(5, 4, 2, beta=True, edge_dim=3),
        interop.from_pyg,
    ),
    "from_pyg, GATv2Conv": (lambda: pyg.GATv2Conv(5, 4, 2, edge_dim=3), interop.from_pyg),
    "from_pyg, GATConv": (
        lambda: pyg.GATConv((5, 6), 4, 2, residual=True, add_self_loops=False),
        interop.from_pyg,
    ),
    "from_pyg, HGTConv": (lambda: pyg.HGTConv(5, 4, METADATA, 2), interop.from_pyg),
    "from_pyg, HANConv": (lambda: pyg.HANConv(5, 4, METADATA, 2), interop.from_pyg),
    "from_pyg, RGATConv": (lambda: pyg.RGATConv(5, 4, 2, edge_dim=3), interop.from_pyg),
    "from_pyg, a model": (lambda: pyg.GAT(5, 8, 2, 3, heads=2, norm="BatchNorm"), interop.from_pyg),
    "explainable": (lambda: attnkit.GAT(5, 8, 3, heads=2, norm="batch"), interop.explainable),
    "replace_attention, ViT": (timm_model("vit_tiny_patch16_224", **VIT, qk_norm=True), replaced),
    "replace_attention, another score": (
        timm_model("vit_tiny_patch16_224", **VIT),
        replaced_by_cosine,
    ),
    "replace_attention, projections apart": (
        timm_model("eva02_base_patch14_448", **VIT, patch_size=16),
        replaced,
    ),
    "replace_attention, BEiT": (timm_model("beit_base_patch16_224", **VIT), replaced),
    "replace_attention, Swin": (timm_model("swin_tiny_patch4_window7_224", **SWIN), replaced),
    "replace_attention, Swin V2": (timm_model("swinv2_tiny_window8_256", **SWIN), replaced),
    "replace_attention, torchvision's Swin V2": (
        lambda: torchvision.models.SwinTransformer([4, 4], 8, [2], [2], [4, 4], **V2),
        replaced,
    ),
    "replace_attention, torch": (
        lambda: nn.ModuleList([nn.MultiheadAttention(8, 2, kdim=6)]),
        replaced,
    ),
    "insert_attention": (lambda: nn.Sequential(Residual(), Residual()), inserted),
    "remove_attention": (lambda: nn.Sequential(Residual(), Residual()), taken_out),
}
IN_PLACE = ("replace", "insert", "remove")
NORMS = (nn.LayerNorm, nn.modules.batchnorm._BatchNorm)

FROZEN = {
    "everything": lambda name, module: True,
    "biases": lambda name, module: name.endswith("bias"),
    "norms": lambda name, module: isinstance(module, NORMS),
}


def tagged(model):
    """The parameters by a power of two that each is filled with."""
    tags = {2.0**number: tensor for number, tensor in enumerate(model.parameters(), start=1)}
    assert len(tags) < 50  # whose sums are exact in float64
    for tag, parameter in tags.items():
        parameter.data.fill_(tag)
    return tags


def origins(parameter, tags):
    """The tags of the parameters that one was made of, by parts or as a sum; none: it is new."""
    values = parameter.detach().double().unique()
    if (values < 0).any() or (values != values.round()).any():
        return []
    return [tag for tag in tags if any(int(value) & int(tag) for value in values)]


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("name", TABLE)
def test_what_is_frozen_stays_so_and_nothing_else(name, frozen):
    make, convert = TABLE[name]
    theirs = make().double()
    for place, module in theirs.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            parameter.requires_grad_(not FROZEN[frozen](f"{place}.{parameter_name}", module))
    tags = tagged(theirs)
    is_trained = {tag: parameter.requires_grad for tag, parameter in tags.items()}
    with torch.no_grad():  # which is no sign of what is frozen
        ours = convert(theirs)
    seen = set()
    for parameter_name, parameter in ours.named_parameters():
        found = origins(parameter, tags)
        seen.update(found)
        expected = any(map(is_trained.get, found)) if found else True  # what is new is trained
        assert parameter.requires_grad == expected, parameter_name
    unused = {"w", "l1", "b1", "l2", "b2"} if name == "from_pyg, RGATConv" else set()
    assert len(seen) == len(tags) - len(unused)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TABLE)
def test_dtypes_are_kept(name, dtype):
    """Those of norms are float32, as in mixed precision, where converting runs nothing."""
    make, convert = TABLE[name]
    theirs = make().to(dtype)
    if "insert" not in name and "remove" not in name:
        for module in theirs.modules():
            if isinstance(module, NORMS):
                module.float()
    tags = tagged(theirs)
    dtypes = {tag: parameter.dtype for tag, parameter in tags.items()}
    for parameter_name, parameter in convert(theirs).named_parameters():
        found = origins(parameter, tags)
        wanted = {dtypes[tag] for tag in found} or {dtype}
        assert {parameter.dtype} == wanted, parameter_name


@pytest.mark.parametrize("name", [name for name in TABLE if not name.startswith(("in", "rem"))])
def test_the_device_is_kept(name):
    make, convert = TABLE[name]
    ours = convert(make().to("meta"))
    assert all(tensor.is_meta for tensor in (*ours.parameters(), *ours.buffers()))


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("name", TABLE)
def test_the_mode_is_kept(name, is_training):
    make, convert = TABLE[name]
    ours = convert(make().train(is_training))
    assert all(part.training == is_training for part in ours.modules())


@pytest.mark.parametrize("name", TABLE)
def test_parts_that_stand_in_evaluation_alone_do_so_after(name):
    """Batch norms with frozen statistics, and the first blocks of a network."""
    make, convert = TABLE[name]
    theirs = make().train()
    layers = [module for module in theirs.modules() if isinstance(module, NORMS)]
    blocks = [] if "ViT" not in name or "replace" in name else [_blocks(theirs)[0]]
    for part in (*layers, *blocks):
        part.eval()
    kept = {part: part.training for part in theirs.modules()}
    ours = convert(theirs)
    if name.startswith(IN_PLACE):
        assert all(part.training == kept.get(part, True) for part in ours.modules())
    else:
        norms = [part for part in ours.modules() if isinstance(part, NORMS[1])]
        assert not any(part.training for part in norms)
        assert not any(part.training for block in blocks for part in ours.blocks[0].modules())
    assert ours.training


def _blocks(vit):
    return vit.blocks if hasattr(vit, "blocks") else vit.encoder.layers


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("from_pyg, HGTConv", "p_rel.paper__cites__paper"),
        ("from_pyg, HANConv", "lin_src.paper__cites__paper"),
        ("replace_attention, projections apart", "blocks.0.attn.k_proj.weight"),
        ("replace_attention, BEiT", "blocks.0.attn.v_bias"),
    ],
)
def test_what_would_be_frozen_in_part_is_refused(name, frozen):
    make, convert = TABLE[name]
    theirs = make()
    theirs.get_parameter(frozen).requires_grad_(False)
    with pytest.raises(ValueError, match=r"requires_grad: .* parameters are one here, and some"):
        convert(theirs)


@pytest.mark.parametrize("frozen", ["everything", "biases"])
def test_to_hetero_copies_what_is_frozen(frozen):
    """PyG's copies begin anew, so that names tell what they are of."""
    model = attnkit.GAT((5, 5), 8, 3, heads=2, add_self_loops=False, norm="layer").eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not FROZEN[frozen](name, None))
    metadata = METADATA[0], [*METADATA[1], ("paper", "is_by", "author")]
    ours = interop.to_hetero(model, metadata)
    for name, parameter in ours.named_parameters():
        assert parameter.requires_grad != FROZEN[frozen](name, None), name
    assert not any(part.training for part in ours.modules())


def test_lora_is_of_the_layers_and_merging_gives_them_back():
    """What LoRA freezes and trains is its own; dtypes and modes are the network's."""
    model = timm.create_model("vit_tiny_patch16_224", **VIT).double().eval()
    model.norm.float()
    attnkit.finetune.lora(model, rank=2)

    def state():
        return {name: (p.dtype, p.requires_grad) for name, p in model.named_parameters()}

    adapted = state()
    for name, (dtype, is_trained) in adapted.items():
        assert dtype == (torch.float32 if name.startswith("norm.") else torch.float64), name
        assert is_trained == ("lora_" in name or name.startswith("head.")), name
    attnkit.finetune.merge(model)
    assert state() == {name: kept for name, kept in adapted.items() if "lora_" not in name}
    attnkit.finetune.unmerge(model)
    assert state() == adapted
    assert not any(part.training for part in model.modules())
