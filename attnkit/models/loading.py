"""Loading a state dict, with an error that shows both sides where it does not fit."""

from collections.abc import Mapping

from torch import Tensor, nn


def load_matching(module: nn.Module, state: Mapping[str, Tensor], source: str = "state") -> None:
    """Load a state dict whose names and shapes are exactly the module's.

    Raises:
        ValueError: a name is missing or unexpected or a shape differs; every one is listed, with
            both shapes, and nothing is loaded.
    """
    ours = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in state.items()}
    lines = [
        f"  {name}: {theirs.get(name, 'missing')} in {source}, {ours.get(name, 'none')} here"
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name)
    ]
    if lines:
        header = f"{source} does not fit {type(module).__name__}, {len(lines)} entries differ:"
        raise ValueError("\n".join([header, *lines]))
    module.load_state_dict(dict(state))
