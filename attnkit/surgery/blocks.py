"""Where the residual blocks of timm and torchvision add, by class.

The table is explicit because no rule finds the addition: it is written in each block's forward.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

__all__ = ["Branch", "adding_child", "branch_of"]


@dataclass(frozen=True)
class Branch:
    """The end of a block's residual branch: the child whose output, or input, is its last map.

    The input where the child is stochastic depth: attention belongs to the branch that is dropped,
    as timm's own does, and should never see the zeros of a dropped one.

    children: attributes of the block, the first that is not None.
    is_input: whether it is the child's input.
    adds_if: an attribute without which (None or False) the block adds nothing; None: it always
        adds.
    """

    children: tuple[str, ...]
    is_input: bool = False
    adds_if: str | None = None


_DROP_PATH = Branch(("drop_path",), is_input=True)
_SKIP = Branch(("drop_path",), is_input=True, adds_if="has_skip")
_SE_BN2, _SE_BN3 = Branch(("se", "bn2")), Branch(("se", "bn3"))
_REGNET = Branch(("drop_path",), is_input=True, adds_if="downsample")
_DEPTH = Branch(("stochastic_depth",), is_input=True, adds_if="use_res_connect")

BRANCHES: dict[str, Branch] = {
    "timm.models.resnet:BasicBlock": _SE_BN2,
    "timm.models.resnet:Bottleneck": _SE_BN3,
    "timm.models.res2net:Bottle2neck": _SE_BN3,
    "timm.models.resnetv2:PreActBasic": _DROP_PATH,
    "timm.models.resnetv2:PreActBottleneck": _DROP_PATH,
    "timm.models.resnetv2:Bottleneck": _DROP_PATH,
    "timm.models.convnext:ConvNeXtBlock": _DROP_PATH,
    "timm.models._efficientnet_blocks:ConvBnAct": _SKIP,
    "timm.models._efficientnet_blocks:DepthwiseSeparableConv": _SKIP,
    "timm.models._efficientnet_blocks:InvertedResidual": _SKIP,
    "timm.models._efficientnet_blocks:UniversalInvertedResidual": _SKIP,
    "timm.models._efficientnet_blocks:MobileAttention": _SKIP,
    "timm.models._efficientnet_blocks:EdgeResidual": _SKIP,
    "timm.models.regnet:Bottleneck": _REGNET,
    "timm.models.regnet:PreBottleneck": _REGNET,
    "torchvision.models.resnet:BasicBlock": Branch(("bn2",)),
    "torchvision.models.resnet:Bottleneck": Branch(("bn3",)),
    "torchvision.models.convnext:CNBlock": Branch(("stochastic_depth",), is_input=True),
    "torchvision.models.efficientnet:MBConv": _DEPTH,
    "torchvision.models.efficientnet:FusedMBConv": _DEPTH,
    "torchvision.models.mobilenetv2:InvertedResidual": Branch(("conv",), adds_if="use_res_connect"),
    "torchvision.models.mobilenetv3:InvertedResidual": Branch(
        ("block",), adds_if="use_res_connect"
    ),
    "torchvision.models.regnet:ResBottleneckBlock": Branch(("f",)),
}


def branch_of(module: nn.Module) -> Branch | None:
    """The branch of a residual block of a class in the table or derived from one."""
    for kind in type(module).__mro__:
        branch = BRANCHES.get(f"{kind.__module__}:{kind.__qualname__}")
        if branch is not None:
            return branch
    return None


def adding_child(block: nn.Module, branch: Branch) -> str | None:
    """The name of the child at the end of the branch; None of a block that adds nothing."""
    if branch.adds_if is not None and getattr(block, branch.adds_if) in (None, False):
        return None
    for name in branch.children:
        if getattr(block, name, None) is not None:
            return name
    raise ValueError(
        f"model: {type(block).__name__} has none of the children {', '.join(branch.children)}, "
        "after which its residual branch ends; name a place by a glob over module names"
    )
