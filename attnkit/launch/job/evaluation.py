"""`run=test`, `predict` and `export`: what is done with a checkpoint."""

from __future__ import annotations

from lightning import Callback

from attnkit.launch.config.signatures import takes_images
from attnkit.launch.job import screen
from attnkit.launch.job.run import Run
from attnkit.lightning.build.build import build
from attnkit.lightning.callbacks.predictions import PredictionsFile
from attnkit.lightning.errors import UserError
from attnkit.lightning.export.export import Export


def test(run: Run) -> dict[str, float] | None:
    """Test the checkpoint."""
    run.make_own_data()
    run.make_module()
    trainer = run.make_trainer()
    if not run.ready():
        return None
    run.loaded(trainer.test, ckpt_path=run.ckpt, verbose=False)
    return run.metrics()


def predict(run: Run) -> dict[str, float] | None:
    """Predict with the checkpoint; leaves predictions.csv."""
    run.make_predict_data(run.make_module())
    trainer = run.make_trainer()
    file = PredictionsFile(run.folder / screen.PREDICTIONS)
    trainer.callbacks.append(file)  # type: ignore[attr-defined]
    node = run.config["predict"]
    if node and not takes_images(node):
        beside = build(node, at="predict")
        if not isinstance(beside, Callback):
            raise UserError(f"predict: {node['_target_']} takes no images and is not a Callback")
        trainer.callbacks.append(beside)  # type: ignore[attr-defined]
    if not run.ready():
        return None
    run.loaded(trainer.predict, ckpt_path=run.ckpt, return_predictions=False)
    if not file.num_rows:
        images = run.config["images"]
        nothing = f"images: nothing in {images}" if images else "data: nothing"
        raise UserError(f"{nothing} could be predicted")
    return {"predictions": file.num_rows}


def export(run: Run) -> dict[str, float] | None:
    """Write the weights and programs of the checkpoint's module."""
    module = run.make_module()
    run.make_trainer()
    if not run.ready():
        return None
    run.restore()
    writer = build(run.config["export"], at="export")
    if not isinstance(writer, Export):
        raise UserError(f"export: {run.config['export']['_target_']} is not an Export")
    written = writer(module)
    for name, why in written.left_out.items():
        screen.say(f"{name}: left out: {why}")
    figures = {f"difference/{name}": apart for name, apart in written.differences.items()}
    return {**figures, "parameters": run.num_parameters}
