"""One training, test or prediction, from a plain configuration. The only part that needs torch."""

from __future__ import annotations

import gc
import inspect
import math
import signal
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from attnkit.launch.causes import is_out_of_memory, of_allocator
from attnkit.launch.config import schema
from attnkit.launch.job import folder as folders
from attnkit.launch.job import out_of_memory as oom
from attnkit.launch.job.execute import save_results
from attnkit.launch.job.predictions import gathered, rows_of, save_predictions
from attnkit.launch.job.trainer import make_trainer
from attnkit.launch.measure import bench
from attnkit.lightning.build.build import build
from attnkit.lightning.errors import UserError, first_line
from attnkit.lightning.export.export import Export
from attnkit.lightning.loggers.wandb import WandbRun
from attnkit.lightning.modules.module import TaskModule, untrained
from attnkit.lightning.resume import checkpoints


class Work:
    """The objects of one run: made when this is, before anything is written.

    Args:
        config: resolved. Nulls of `model` and `module` that the data decides are filled in.
        alone: the checkpoint to test or predict with is all there is; `config` knows no sizes.
    """

    def __init__(self, config: dict[str, Any], *, alone: bool = False) -> None:
        self.config = config
        self.folder = Path(config["run_dir"])
        self.started = time.perf_counter()
        lightning.seed_everything(config["seed"], workers=True, verbose=False)
        self.alone = alone
        self.start, self.broken = self._newest_checkpoint()
        if config["ckpt"] is not None:
            checkpoints.load(config["ckpt"], mmap=True)  # before anything is built or written
        if config["run"] == "export":
            self.module = self._load_module() if alone else self._make_module()
            self.data = LightningDataModule()  # none is read
        elif config["run"] in schema.PREDICTING:
            self.module = self._load_module() if alone else self._make_module()
            self.data = self._make_predict_data()
        else:
            self.data = self._make_data()
            if not alone:
                self._fill_from_data()
            # The first weights depend on the seed only, not on what the data has drawn.
            lightning.seed_everything(config["seed"], workers=True, verbose=False)
            self.module = self._load_module() if alone else self._make_module()
        self.trainer = make_trainer(self.config, self.folder)
        self._compile()

    @property
    def needs_processes(self) -> bool:
        """Whether the trainer wants several processes, which must not start from this one."""
        launcher = self.trainer.strategy.launcher
        return (
            isinstance(launcher, _SubprocessScriptLauncher)
            and not launcher.cluster_environment.creates_processes_externally
        )

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.module.parameters())

    def move(self, config: dict[str, Any]) -> None:
        """The same run in another folder: what holds paths is made again."""
        for key in schema.FILLED:
            config[key] = self.config[key]
        self.config, self.folder = config, Path(config["run_dir"])
        self.trainer = make_trainer(self.config, self.folder)

    def start_again(self, config: dict[str, Any]) -> None:
        """The same run from its newest checkpoint, differently configured; all else is let go."""
        del self.module, self.data, self.trainer
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.__init__(config)  # type: ignore[misc]

    # --- building ---

    def _make_data(self) -> LightningDataModule:
        data = build(self.config["data"], at="data")
        if not isinstance(data, LightningDataModule):
            raise UserError(f"data: {self.config['data']['_target_']} is no LightningDataModule")
        return data

    def _make_predict_data(self) -> LightningDataModule:
        """Its nulls are what the trained module says of itself: image_size, …"""
        node = self.config["predict"]
        if node is None:
            data = self._make_data()
            if type(data).predict_dataloader is LightningDataModule.predict_dataloader:
                target = self.config["data"]["_target_"]
                raise UserError(f"run=predict: {target} has no predict_dataloader")
            return data
        facts = {k: getattr(self.module, k, None) for k, v in node.items() if v is None}
        return build({**node, **facts}, at="predict", images=self.config["images"])

    def _fill_from_data(self) -> None:
        """Nulls whose names the data module describes: image_size, num_classes, …"""
        describe = getattr(self.data, "describe", None)
        nodes = [self.config.get(key) or {} for key in schema.FILLED]
        if describe is None or all(v is not None for node in nodes for v in node.values()):
            return
        self.data.prepare_data()
        self.data.setup("fit")
        facts = {k: list(v) if isinstance(v, tuple) else v for k, v in describe().items()}
        for node in nodes:
            node.update({k: facts[k] for k, v in node.items() if v is None and k in facts})

    def _make_module(self) -> LightningModule:
        """The module with those of model, optimizer and scheduler that the configuration has."""
        node = self.config["module"]
        make = build({**node, "_partial_": True}, at="module")
        parts = {key: self.config[key] for key in schema.PARTS if self.config.get(key)}
        if "model" in parts:
            inner = {key: self.config[key] for key in schema.MODEL_PARTS if self.config.get(key)}
            parts["model"] = {**parts["model"], **inner}
            if self.start is not None or self.config["ckpt"] is not None:
                parts["model"] = untrained(parts["model"])
        # attnkit's modules build their parts themselves, so that a checkpoint knows how; others
        # get objects.
        if not (isinstance(make.func, type) and issubclass(make.func, TaskModule)):
            parts = {
                key: build(part if key == "model" else {**part, "_partial_": True}, at=key)
                for key, part in parts.items()
            }
        try:
            module = make(**parts)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"module: {node['_target_']}: {first_line(error)}") from error
        if not isinstance(module, LightningModule):
            raise UserError(f"module: {node['_target_']} is no LightningModule")
        return module

    def _load_module(self) -> LightningModule:
        target = self.config["module"]["_target_"]
        cls = build({"_target_": target, "_partial_": True}, at="module").func
        load = partial(cls.load_from_checkpoint, map_location="cpu", weights_only=True)
        ckpt = self.config["ckpt"]
        _check_is_of(cls, ckpt, self.config["task"])
        wrong = (AttributeError, LookupError, TypeError, ValueError)
        return _loaded(partial(load, ckpt), ckpt, wrong)

    def _compile(self) -> None:
        mode = self.config["compile"]
        if mode and self.config["run"] != "export":
            # In place, so that the names in checkpoints stay.
            model = getattr(self.module, "model", None)
            target = model if isinstance(model, nn.Module) else self.module
            target.compile(mode="default" if mode is True else mode)

    # --- running ---

    def run(self) -> None:
        """Train and test, test, predict or export; leaves results.json."""
        done = False
        try:
            self._run()
            done = True
        finally:
            for logger in self.trainer.loggers:
                if isinstance(logger, WandbRun):
                    logger.close(failed=not done)

    def _run(self) -> None:
        try:
            steps = {
                "train": self._train,
                "test": self._test,
                "bench": self._bench,
                "export": self._export,
            }
            steps.get(self.config["run"], self._predict)()
        except SystemExit:
            if self.trainer.interrupted:  # Lightning's way to answer Ctrl-C
                signal.signal(signal.SIGINT, signal.default_int_handler)
                raise KeyboardInterrupt from None
            raise
        except MisconfigurationException as error:
            raise UserError(f"trainer: {first_line(error)}") from error
        except RuntimeError as error:
            if not str(error).startswith("Early stopping conditioned on metric"):
                raise
            raise UserError(f"callbacks: {first_line(error)}") from error

    def _train(self) -> None:
        trainer = self.trainer
        for error in self.broken:
            rank_zero_warn(f"{error}; going on from {self.start}")
        fit = partial(trainer.fit, self.module, datamodule=self.data, weights_only=True)
        try:
            _loaded(partial(fit, ckpt_path=self.start), str(self.start), wrong=())
        except Exception as error:
            if not is_out_of_memory(error) or not self._may_shrink():
                raise
            raise oom.OutOfMemory(of_allocator(error)) from error
        if trainer.interrupted:
            raise KeyboardInterrupt
        figures = self._figures()
        figures.update(epochs=trainer.current_epoch, steps=trainer.global_step)
        figures["parameters"] = self.num_parameters
        best = None
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.monitor:
                best = callback.best_model_path or None
                if callback.best_model_score is not None:
                    figures[f"{callback.monitor}_best"] = float(callback.best_model_score)
        if self._has_test():
            trainer.test(
                self.module, datamodule=self.data, ckpt_path=best, weights_only=True, verbose=False
            )
            figures.update(self._figures())
        self._save(figures)

    def _may_shrink(self) -> bool:
        """Whether smaller batches can be accumulated; not by a module that steps itself."""
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        scheduled = any(isinstance(c, GradientAccumulationScheduler) for c in callbacks)
        return oom.wanted(self.config) and self.module.automatic_optimization and not scheduled

    def _newest_checkpoint(self) -> tuple[Path | None, list[checkpoints.CheckpointError]]:
        """The newest checkpoint that is intact, and what is wrong with those newer than it."""
        if self.config["run"] != "train":
            return None, []
        start, broken = checkpoints.newest_intact(self.folder / folders.CHECKPOINTS)
        if broken and start is None:
            raise broken[0]
        return start, broken

    def _test(self) -> None:
        # A module loaded on its own has its weights already.
        ckpt = None if self.alone else self.config["ckpt"]
        _loaded(
            partial(
                self.trainer.test,
                self.module,
                datamodule=self.data,
                ckpt_path=ckpt,
                weights_only=True,
                verbose=False,
            ),
            self.config["ckpt"],
        )
        self._save(self._figures())

    def _predict(self) -> None:
        ckpt = None if self.alone else self.config["ckpt"]
        batches = _loaded(
            partial(
                self.trainer.predict,
                self.module,
                datamodule=self.data,
                ckpt_path=ckpt,
                weights_only=True,
            ),
            self.config["ckpt"],
        )
        rows = gathered(rows_of(batches or []), self.trainer)
        if not rows:
            images = self.config["images"]
            nothing = f"images: nothing in {images}" if images else "data: nothing"
            raise UserError(f"{nothing} could be predicted")
        if self.trainer.is_global_zero:
            save_predictions(self.folder, rows)
        self._save({"predictions": len(rows)})

    def _bench(self) -> None:
        figures, table = bench.bench(self.trainer, self.module, self.data)
        (self.folder / bench.FILE).write_text(table, encoding="utf-8")
        self._save(figures)

    def _export(self) -> None:
        from attnkit.launch.job import screen as report

        if not self.alone:
            checkpoint = checkpoints.load(self.config["ckpt"])
            self.module.on_load_checkpoint(checkpoint)
            load = partial(self.module.load_state_dict, checkpoint["state_dict"])
            _loaded(load, self.config["ckpt"])
        export = build(self.config["export"], at="export")
        if not isinstance(export, Export):
            raise UserError(f"export: {self.config['export']['_target_']} is no Export")
        written = export(self.module)
        for name, why in written.left_out.items():
            report.say(f"{name}: left out: {why}")
        figures = {f"difference/{name}": apart for name, apart in written.differences.items()}
        self._save({**figures, "parameters": self.num_parameters})

    def _has_test(self) -> bool:
        cls = type(self.module)
        return (
            cls.test_step is not LightningModule.test_step
            and type(self.data).test_dataloader is not LightningDataModule.test_dataloader
        )

    def _figures(self) -> dict[str, float]:
        return {
            name: float(value)
            for name, value in self.trainer.callback_metrics.items()
            if math.isfinite(float(value))
        }

    def _save(self, figures: Mapping[str, float]) -> None:
        if not self.trainer.is_global_zero:
            return
        seconds = round(time.perf_counter() - self.started, 2)
        before = folders.load_results(self.folder)
        save_results(self.folder, {**before, **figures, "seconds": seconds})


def _check_is_of(cls: type[LightningModule], ckpt: str, task: str) -> None:
    """Whether a checkpoint's hyper-parameters are this class's, as far as names tell."""
    held = checkpoints.load(ckpt, mmap=True).get("hyper_parameters", {})
    parameters = inspect.signature(cls).parameters
    if not held or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    said = [f"has no {name}" for name in held if name not in parameters]
    said += [
        f"needs {name}, which it does not hold"
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name not in held
    ]
    if said:
        raise UserError(
            f"ckpt: {ckpt} is no checkpoint of task={task}: {cls.__name__} {said[0]}\n"
            "  task=… says of which it is; in its run folder it needs none"
        )


def _loaded(load: Any, ckpt: str, wrong: tuple[type[Exception], ...] = (KeyError,)) -> Any:
    """Call what loads a checkpoint; one that doesn't fit is the user's to know.

    Args:
        wrong: what else it raises at a checkpoint of another kind.
    """
    try:
        return load()
    except RuntimeError as error:
        if "loading state_dict" not in str(error):
            raise
        lines = [line.strip() for line in str(error).splitlines()[1:] if line.strip()]
        raise UserError(f"ckpt: {ckpt} does not fit the model\n  {lines[0][:300]}") from error
    except wrong as error:
        problem = f"{first_line(error, named=True)}"
        raise UserError(f"ckpt: {ckpt} is no checkpoint of this task: {problem}") from error
