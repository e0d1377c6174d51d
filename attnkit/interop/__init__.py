"""Weights from modules of other libraries, and attnkit's attention in models of transformers, with
equal outputs.

A model with something that attnkit's lacks is refused with the reason, and nothing is dropped:
every module of the model must be of a known type, the settings of its blocks must be equal, and no
entry of its state dict may be left over. Dtypes, devices, the mode, and which parameters are frozen
are those of the original.
"""

from typing import TYPE_CHECKING

from attnkit.core.names import lazy

if TYPE_CHECKING:
    from attnkit.interop.pretrained import PretrainedViT, timm_network
    from attnkit.interop.pyg import from_pyg
    from attnkit.interop.pyg_tools import explainable, to_hetero
    from attnkit.interop.transformers import record_masks, register_transformers
    from attnkit.interop.vision import from_timm, from_torch, from_torchvision
    from attnkit.interop.vision_tower import VisionTower
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "PretrainedViT",
    "VisionTower",
    "explainable",
    "from_pyg",
    "from_timm",
    "from_torch",
    "from_torchvision",
    "record_masks",
    "register_transformers",
    "timm_network",
    "to_hetero",
]
