"""Whether a module's configuration builds the network that it trains."""

from __future__ import annotations

from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch import nn
from torch.nn.parameter import is_lazy

from attnkit.lightning.errors import UserError

Shapes = dict[str, "tuple[int, ...] | None"]


class NetworkAsBuilt(Callback):
    """Refuses to train a network that was changed after it was built from a configuration.

    Its checkpoints could not be loaded: the configuration in them builds the network without the
    change, as where `insert_attention` was called on it.

    Args:
        shapes: of the network when the module was made (`shapes_of`).
    """

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        changed = _apart(self.shapes, shapes_of(pl_module.model))  # type: ignore[arg-type]
        # The class of the user's own may make the change each time that it is built.
        if changed and _apart(_built_again(pl_module), shapes_of(pl_module.model)):  # type: ignore[arg-type]
            name = type(pl_module).__name__
            more = " …" if len(changed) > 2 else ""
            raise UserError(
                "model: the network was changed after it was built from its configuration "
                f"({', '.join(changed[:2])}{more}), so that no checkpoint of it could be loaded\n"
                f"  give the changed network to {name} as an object, or make the change in the "
                "configuration or in the __init__ of a class of your own"
            )


def shapes_of(network: nn.Module) -> Shapes:
    """The shapes of all tensors of a state dict by name; None: not known before the first batch."""
    state = network.state_dict(keep_vars=True)
    return {name: None if is_lazy(t) else tuple(t.shape) for name, t in state.items()}


def _apart(built: Shapes | None, here: Shapes) -> list[str]:
    """The names of tensors that only one of both has, or of another shape."""
    if built is None:
        return []
    names = dict.fromkeys([*here, *built])
    return [
        name
        for name in names
        if name not in built
        or name not in here
        or (None not in (built[name], here[name]) and built[name] != here[name])
    ]


def _built_again(module: Any) -> Shapes | None:
    """The shapes of the network that the hyper-parameters build; None: they build none."""
    try:
        return shapes_of(type(module)(**module.hparams).model)
    except Exception:  # of arguments that were objects, which load_from_checkpoint asks for
        return None
