"""The modules, base classes and functions that a configuration may name, decided without an import.

A base class alone is not enough: some of torch's modules run code given as an argument
(`torch_geometric.nn.Sequential`), and importing a module already runs it. So only these modules may
be walked through or define a class.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from attnkit.core.names import nearest

# Modules with their submodules; their parents may only be passed through (`lightning.Trainer`).
HOMES = (
    "attnkit.core",
    "attnkit.interop",
    "attnkit.finetune",
    "attnkit.layers",
    "attnkit.lightning",
    "attnkit.metrics",
    "attnkit.models",
    "attnkit.interpret",
    "attnkit.tasks",
    "lightning.fabric.plugins",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.core",
    "lightning.pytorch.loggers",
    "lightning.pytorch.plugins",
    "lightning.pytorch.strategies",
    "lightning.pytorch.trainer",
    "timm.layers",
    "timm.models",
    "timm.optim",
    "torch.nn",
    "torch.optim",
    "torch_geometric.nn",
    "torchmetrics",
    "torchvision.models",
    "torchvision.ops",
    "torchvision.transforms",
)

PACKAGES = tuple(dict.fromkeys(home.partition(".")[0] for home in HOMES))

# Only subclasses of these are built from the places above. LightningModule, torchmetrics' Metric
# and torchvision's v2 transforms are `torch.nn.Module`s.
KINDS = (
    "torch.nn.Module",
    "torch.optim.Optimizer",
    "torch.optim.lr_scheduler.LRScheduler",
    "attnkit.lightning.export.export.Export",
    "attnkit.interpret.report.report.Report",
    "attnkit.tasks.graphs.links.data.Links",
    "lightning.Callback",
    "lightning.LightningDataModule",
    "lightning.Trainer",
    "lightning.pytorch.loggers.Logger",
    "lightning.pytorch.plugins.CheckpointIO",
    "lightning.pytorch.plugins.ClusterEnvironment",
    "lightning.pytorch.plugins.LayerSync",
    "lightning.pytorch.plugins.Precision",
    "lightning.pytorch.strategies.Strategy",
    "torchvision.transforms.Compose",
    "torchvision.transforms.PILToTensor",
    "torchvision.transforms.ToTensor",
)

# Functions that return such objects.
FUNCTIONS = (
    "attnkit.finetune.bitfit",
    "attnkit.finetune.full",
    "attnkit.finetune.head_only",
    "attnkit.finetune.last_blocks",
    "attnkit.finetune.lora",
    "attnkit.lightning.muon",
    "attnkit.lightning.warmup_cosine",
    "attnkit.lightning.warmup_polynomial",
    "attnkit.lightning.warmup_step",
    "attnkit.ViT.from_size",
    "attnkit.interop.timm_network",
    "attnkit.models.timm_backbone",
    "attnkit.tasks.image_classification.attention_network",
    "timm.create_model",
    "torchvision.models.get_model",
)

# Classes of an allowed kind that, or whose subclasses, make code of their arguments (or of names in
# the modules they are given, which torch.fx writes into a source text).
CODE_RUNNING = (
    "timm.models._features_fx.FeatureGraphNet",
    "timm.models._features_fx.GraphExtractNet",
    "torch.fx.graph_module.GraphModule",
    "torch.jit",
    "torch_geometric.nn.sequential.Sequential",
)

# Arguments that make these libraries read (and some unpickle) any file or download, or start a
# program: timm's checkpoints, torchmetrics' language and image models, W&B's service.
REFUSED_ARGUMENTS = {
    "baseline_path",
    "baseline_url",
    "cache_dir",
    "checkpoint_path",
    "feature_extractor_weights_path",
    "model_name_or_path",
    "model_path",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "settings",
}

_ON_THE_WAY = {home.rsplit(".", n)[0] for home in HOMES for n in range(1, home.count(".") + 1)}
_REGISTERED = re.compile(r"[\w.-]+", re.ASCII)  # a name without hf-hub:, local-dir: or a path


def is_place(module: str) -> bool:
    """Whether a module may be imported and searched for what a `_target_` names."""
    return module in _ON_THE_WAY or is_home(module)


def is_home(module: str) -> bool:
    """Whether a class of an allowed kind in this module may be built."""
    return any(module == home or module.startswith(f"{home}.") for home in HOMES)


def is_unknown(package: str) -> bool:
    """Whether only the user can allow a package: it is neither listed here nor Python's own."""
    return package not in PACKAGES and package not in sys.stdlib_module_names


def own(packages: Iterable[str]) -> tuple[str, ...]:
    """Return those of the packages that the user can allow."""
    return tuple(filter(is_unknown, packages))


def objection(target: Any, trusted: Sequence[str] = ()) -> str | None:
    """Return why a `_target_` may not be built, as far as its name shows; None if it may."""
    package, *inner = target.split(".") if isinstance(target, str) else [""]
    if (
        not inner
        or not all(part.isidentifier() for part in (package, *inner))
        or any(part.startswith("__") for part in inner)
    ):
        return f"expected a dotted name such as attnkit.ViT, got {target!r:.100}"
    if package in own(trusted):
        return None
    if package not in PACKAGES:
        named = ", ".join((*PACKAGES, *own(trusted)))
        problem = f"{target} is outside the allowed packages ({named})"
        if not is_unknown(package):
            return problem
        return (
            f"{problem}\n  if {package} is yours: allow=[{package}] or --config-dir its folder, "
            f"in Python `with attnkit.lightning.allowing({package!r})`"
        )
    if target in FUNCTIONS:
        return None
    if private := next((part for part in inner if part.startswith("_")), None):
        return f"{target} may not be built from a configuration: {private} is private"
    parents = [target.rsplit(".", n)[0] for n in range(len(inner), 0, -1)]
    if closed := next((p for p in parents if not is_place(p)), None):
        places = [home for home in HOMES if home.startswith(f"{package}.")]
        hint = nearest(closed, places, cutoff=0.85)
        return (
            f"{target} may not be built from a configuration{hint}\n"
            f"  of {package}, allowed are {', '.join(places)}"
        )
    return None


def runs_code(cls: type) -> bool:
    """Whether a class of an allowed kind runs its arguments as code."""
    names = [f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__]
    return any(f"{name}.".startswith(f"{bad}.") for name in names for bad in CODE_RUNNING)


def refused_argument(function: str, arguments: dict[str, Any]) -> str | None:
    """Return why these arguments may not come from a configuration; None if they may."""
    for name, value in arguments.items():
        if name in REFUSED_ARGUMENTS and value is not None:
            return f"{name} leads to a file or program: a configuration may not set it; use Python"
        registered = isinstance(value, str) and _REGISTERED.fullmatch(value)
        if (function, name) == ("create_model", "model_name") and not registered:
            return f"model_name: expected a name of timm's registry, got {value!r:.100}"
    return None
