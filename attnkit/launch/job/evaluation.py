"""`run=test`, `predict` and `export`: what is done with a checkpoint."""

from __future__ import annotations

from lightning import Callback

from attnkit.launch.config.signatures import takes_images
from attnkit.launch.job import screen
from attnkit.launch.job.one_run import Session
from attnkit.lightning.build.build import build
from attnkit.lightning.callbacks.predictions import PredictionsFile
from attnkit.lightning.errors import UserError
from attnkit.lightning.export.export import Export


def test(session: Session) -> dict[str, float] | None:
    """Test the checkpoint."""
    session.make_own_data()
    session.make_module()
    trainer = session.make_trainer()
    if not session.begin():
        return None
    session.loaded(trainer.test, ckpt_path=session.ckpt, verbose=False)
    return session.metrics()


def predict(session: Session) -> dict[str, float] | None:
    """Predict with the checkpoint; leaves predictions.csv."""
    session.make_predict_data(session.make_module())
    trainer = session.make_trainer()
    file = PredictionsFile(session.folder / screen.PREDICTIONS)
    trainer.callbacks.append(file)  # type: ignore[attr-defined]
    node = session.config["predict"]
    if node and not takes_images(node):
        beside = build(node, at="predict")
        if not isinstance(beside, Callback):
            raise UserError(f"predict: {node['_target_']} takes no images and is not a Callback")
        trainer.callbacks.append(beside)  # type: ignore[attr-defined]
    if not session.begin():
        return None
    session.loaded(trainer.predict, ckpt_path=session.ckpt, return_predictions=False)
    if not file.num_rows:
        images = session.config["images"]
        nothing = f"images: nothing in {images}" if images else "data: nothing"
        raise UserError(f"{nothing} could be predicted")
    return {"predictions": file.num_rows}


def export(session: Session) -> dict[str, float] | None:
    """Write the weights and programs of the checkpoint's module."""
    module = session.make_module()
    session.make_trainer()
    if not session.begin():
        return None
    session.restore()
    writer = build(session.config["export"], at="export")
    if not isinstance(writer, Export):
        raise UserError(f"export: {session.config['export']['_target_']} is not an Export")
    written = writer(module)
    for name, why in written.left_out.items():
        screen.say(f"{name}: left out: {why}")
    figures = {f"difference/{name}": apart for name, apart in written.differences.items()}
    return {**figures, "parameters": session.num_parameters}
