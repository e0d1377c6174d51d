"""`run=export`: writes the weights and programs of a checkpoint."""

from __future__ import annotations

from attnkit.launch import console
from attnkit.launch.run import Run
from attnkit.lightning.build import build
from attnkit.lightning.errors import UserError
from attnkit.lightning.export import Export


def export(run: Run) -> dict[str, float]:
    """Write the weights and programs of the checkpoint's module."""
    module = run.make_module()
    run.make_trainer()
    run.ready()
    run.restore()
    writer = build(run.config["export"], at="export")
    if not isinstance(writer, Export):
        raise UserError(f"export: {run.config['export']['_target_']} is not an Export")
    written = writer(module)
    for name, why in written.left_out.items():
        console.say(f"{name}: left out: {why}")
    figures = {f"difference/{name}": value for name, value in written.differences.items()}
    return {**figures, "parameters": run.num_parameters}
