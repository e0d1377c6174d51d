"""What is done with a trained model: `run=test`, `run=predict` and `run=export`."""

from __future__ import annotations

from lightning import Callback

from attnkit.launch import console
from attnkit.launch.config.signatures import takes_images
from attnkit.launch.run import Run
from attnkit.lightning.build import build
from attnkit.lightning.callbacks.meter import measured
from attnkit.lightning.callbacks.results import PredictionsFile
from attnkit.lightning.errors import UserError


def test(run: Run) -> dict[str, float]:
    """Test the checkpoint."""
    run.make_own_data()
    run.make_module()
    trainer = run.make_trainer()
    run.ready()
    run.loaded(trainer.test, ckpt_path=run.ckpt, verbose=False)
    return measured(trainer)


def predict(run: Run) -> dict[str, float]:
    """Predict with the checkpoint, and write predictions.csv."""
    run.make_predict_data(run.make_module())
    trainer = run.make_trainer()
    file = PredictionsFile(run.folder / console.PREDICTIONS)
    trainer.callbacks.append(file)  # type: ignore[attr-defined]
    node = run.config["predict"]
    if node and not takes_images(node):
        callback = build(node, at="predict")
        if not isinstance(callback, Callback):
            raise UserError(f"predict: {node['_target_']} takes no images and is not a Callback")
        trainer.callbacks.append(callback)  # type: ignore[attr-defined]
    run.ready()
    run.loaded(trainer.predict, ckpt_path=run.ckpt, return_predictions=False)
    if not file.num_rows:
        images = run.config["images"]
        nothing = f"images: nothing in {images}" if images else "data: nothing"
        raise UserError(f"{nothing} could be predicted")
    return {"predictions": file.num_rows}


def export(run: Run) -> dict[str, float]:
    """Write the weights and programs of the checkpoint's module."""
    from attnkit.lightning.export import Export

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
