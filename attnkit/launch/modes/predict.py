"""`run=predict`: predictions of a checkpoint for images, or for the data of its run."""

from __future__ import annotations

from lightning import Callback

from attnkit.launch import console
from attnkit.launch.config.signatures import takes_images
from attnkit.launch.run import Run
from attnkit.lightning.build import build
from attnkit.lightning.callbacks.results import PredictionsFile
from attnkit.lightning.errors import UserError


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
