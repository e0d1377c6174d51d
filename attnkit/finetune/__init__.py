"""attnkit.finetune: train a part of a pretrained network, or a small change of it.

    attnkit.finetune.lora(network, rank=8)                   in place, before the optimizer is made
    optimizer = AdamW(attnkit.lightning.parameter_groups(network), lr=1e-3)
    …
    attnkit.finetune.save_adapter(network, "adapter.safetensors")
    attnkit.finetune.merge(network)                          plain layers with equal outputs

This file is the public table and nothing else.
"""

from typing import TYPE_CHECKING

from attnkit.core.names import lazy

if TYPE_CHECKING:
    from attnkit.finetune.adapter import load_adapter, save_adapter
    from attnkit.finetune.lora_linear import (
        LoRALinear,
        lora,
        merge,
        merge_state_dict,
        merged,
        unmerge,
    )
    from attnkit.finetune.methods import FineTuned, bitfit, finetuned, full, head_only, last_blocks
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "FineTuned",
    "LoRALinear",
    "bitfit",
    "finetuned",
    "full",
    "head_only",
    "last_blocks",
    "load_adapter",
    "lora",
    "merge",
    "merge_state_dict",
    "merged",
    "save_adapter",
    "unmerge",
]
