"""One run, built from its configuration: data, module, trainer, starting point and results."""

from __future__ import annotations

import inspect
import logging
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from attnkit.launch import folder as folders
from attnkit.launch.config import schema
from attnkit.launch.config.schema import fill
from attnkit.launch.config.signatures import takes_images
from attnkit.launch.modes import mode_of, named
from attnkit.launch.trainer import Elapsed, make_trainer
from attnkit.lightning._private import report_lost_batches
from attnkit.lightning.build import build
from attnkit.lightning.errors import UserError, first_line
from attnkit.lightning.loggers import WandbRun
from attnkit.lightning.modules.checks import unlogged
from attnkit.lightning.modules.module import TaskModule, untrained
from attnkit.lightning.protocols import DescribedData
from attnkit.lightning.resume import checkpoints

if TYPE_CHECKING:
    from attnkit.interpret.explanation import Explanation

_log = logging.getLogger(__name__)
_PRETRAINED = ("name", "model_name", "pretrained", "weights")
"""Arguments that choose pretrained weights. Nothing is known of the weights of other networks."""
_FULL = {"_target_", "_partial_"}  # the only keys of finetune=full


class Run:
    """A run: its configuration and folder, and the objects that its mode builds.

    `carry_out` calls the function of the mode, which reads top-down: it makes trainer, data and
    module, calls `ready`, and then trains, tests or does whatever else the mode is for.

    Attributes:
        config, folder: what is run, and where it writes.
        data, module, trainer: set once they are built.

    Args:
        config: the resolved configuration. Nulls of `model` and `module` that the data decides are
            filled in.
        alone: whether the checkpoint to test or predict with has no run folder; `config` then has
            no sizes.
        callbacks: names of callbacks that the command line mentions.
        on_ready: called by `ready` with this run.
    """

    data: LightningDataModule
    module: LightningModule
    trainer: Trainer

    def __init__(
        self,
        config: dict[str, Any],
        *,
        alone: bool = False,
        callbacks: Collection[str] = (),
        on_ready: Callable[[Run], object] = lambda run: None,
    ) -> None:
        self.config = config
        self.mode = mode_of(config["run"])
        self.folder = Path(config["run_dir"])
        self.alone = alone
        self.ended_by = ""
        self.from_data: list[str] = []
        """Keys of the configuration that were null or below a part `auto`, and whose values came
        from the data or the pretrained weights."""
        self.chosen: dict[str, Any] = {}
        """Keys in `from_data` whose values were chosen, while others would work as well, with the
        chosen values."""
        self._asked = callbacks
        self._on_ready = on_ready
        self._started = time.perf_counter()
        self._before = 0.0
        self._seed()
        report_lost_batches()
        self.newest = checkpoints.Newest(None, "", [])
        if self.mode.trains:
            self.newest = checkpoints.newest_intact(self.folder / folders.CHECKPOINTS)
        self.start = self.newest.path
        if self.newest.broken and self.start is None:
            raise self.newest.broken[0]
        if config["ckpt"] is not None:
            checkpoints.load(config["ckpt"], mmap=True)  # before anything is built or written

    def ready(self) -> None:
        """Call `on_ready`, once everything is built and nothing is written yet.

        It does not return if other processes carry out the rest. The seconds of a run are counted
        from here, so that trials of a sweep are comparable: only the first one imports packages and
        decodes the images that all share.
        """
        self._before = self._seconds_before()  # before training replaces the checkpoint
        self._started = time.perf_counter()
        self._on_ready(self)

    # --- building ---

    def make_data(self) -> LightningDataModule:
        """Build the data, and fill nulls of the module with its facts (image_size, …).

        Facts of pretrained weights fill nulls of the data and the module before that.
        """
        nulls = set(self._nulls())
        self._follow_weights()
        self.make_own_data()
        nodes = [self.config.get(key) or {} for key in schema.FILLED]
        describe = self._describer()
        if describe and not self.alone and any(v is None for n in nodes for v in n.values()):
            self.data.prepare_data()
            self.data.setup("fit")
            facts = {k: list(v) if isinstance(v, tuple) else v for k, v in describe().items()}
            model = self.config.get("model") or {}
            choices: dict[str, Any] = getattr(self.data, "chosen", {})
            if choices and "patch_size" in facts and model.get("patch_size", 0) is None:
                self.chosen["model.patch_size"] = facts["patch_size"]
            for node in nodes:
                fill(node, facts)
            for key, chosen in choices.items():
                self.config["data"][key].update(chosen)
                self.chosen |= {f"data.{key}.{name}": value for name, value in chosen.items()}
        self.from_data = sorted((nulls - {*self._nulls()}) | {*self.chosen})
        return self.data

    def _nulls(self) -> Iterator[str]:
        """Yield the keys of the data, the module and its model that are null."""
        for part in ("data", *schema.FILLED):
            for key, value in (self.config.get(part) or {}).items():
                if value is None:
                    yield f"{part}.{key}"

    def _describer(self) -> Callable[[], Mapping[str, Any]] | None:
        """Return the function that gives facts of the data: the data's, else the module class's."""
        if isinstance(self.data, DescribedData):
            return self.data.describe
        look = getattr(self._module_class(), "describe_data", None)
        return partial(look, self.data) if look else None

    def make_predict_data(self, module: LightningModule) -> LightningDataModule:
        """Build the data of `predict`, its nulls filled from the trained module, or else `data`."""
        node = self.config["predict"]
        if takes_images(node):
            facts = {k: getattr(module, k, None) for k, v in node.items() if v is None}
            images = self.config["images"]
            self.data = build({**node, **facts}, at="predict", images=images)
            return self.data
        self.make_own_data()
        if type(self.data).predict_dataloader is LightningDataModule.predict_dataloader:
            target = self.config["data"]["_target_"]
            raise UserError(f"run=predict: {target} has no predict_dataloader")
        return self.data

    def make_own_data(self) -> LightningDataModule:
        """Build the run's own data, without giving its facts to the module."""
        data = build(self.config["data"], at="data")
        if not isinstance(data, LightningDataModule):
            raise UserError(f"data: {self.config['data']['_target_']} is not a LightningDataModule")
        self.data = data
        return data

    def _follow_weights(self) -> None:
        """Fill nulls of model, data and module with facts of pretrained weights."""
        if self._is_trained:  # the checkpoint has these facts
            return
        nodes = {key: self.config.get(key) or {} for key in ("model", *schema.MODEL_PARTS)}
        nodes = {k: n for k, n in nodes.items() if any(n.get(name) for name in _PRETRAINED)}
        if not nodes and not self.config.get("init"):
            return
        from attnkit.lightning.resume.warm_start import trained_on
        from attnkit.models.preprocessing import OF_DATA, OF_MODEL, expected_images

        facts: dict[str, Any] = {}
        for key, node in nodes.items():
            try:
                found = expected_images(node)
            except ValueError as error:
                raise UserError(f"{key}.{error}") from error
            fill(node, {name: found[name] for name in OF_MODEL if name in found})
            if found and self.config.get("init"):
                raise UserError(f"init: not together with pretrained weights of {key}; give one")
            facts |= found
        if self.config.get("init"):
            facts |= trained_on(self.config["init"])
        data, module = (self.config.get(key) or {} for key in ("data", "module"))
        of_data = (*OF_DATA, "patch_size") if data.get("native") else OF_DATA
        fill(data, {key: facts[key] for key in of_data if key in facts})
        means: dict[str, Any] = {key: facts[key] for key in ("mean", "std") if key in facts}
        if data.get("in_channels") == 1:  # in grey images all colours are equal
            means = {key: [sum(values) / len(values)] for key, values in means.items()}
        fill(module, means)

    def make_module(self) -> LightningModule:
        """Build the module. Its initial weights depend on the seed only, not on the data."""
        self._seed()
        self.module = self._loaded_module() if self.alone else self._new_module()
        mode = self.config["compile"]
        if mode and "compile" in self.mode.uses:  # in place, so that names in checkpoints stay
            model = getattr(self.module, "model", None)
            target = model if isinstance(model, nn.Module) else self.module
            target.compile(mode="default" if mode is True else mode)
        return self.module

    def restore(self, ckpt: str | None = None) -> None:
        """Load weights into the module from a checkpoint; None: from `ckpt`, if still necessary."""
        ckpt = ckpt or self.ckpt
        if ckpt is not None:
            checkpoint = checkpoints.load(ckpt)
            self.module.on_load_checkpoint(checkpoint)
            checkpoints.loaded(partial(self.module.load_state_dict, checkpoint["state_dict"]), ckpt)

    def make_trainer(self) -> Trainer:
        """Build the trainer, with the callbacks and loggers that take part."""
        self.trainer = make_trainer(self.config, self.mode, self._asked)
        return self.trainer

    def _module_class(self) -> Any:
        node = {"_target_": self.config["module"]["_target_"], "_partial_": True}
        return build(node, at="module").func

    def _new_module(self) -> LightningModule:
        """Build the module with the model, optimizer and scheduler of the configuration."""
        node = self.config["module"]
        make = build({**node, "_partial_": True}, at="module")
        parts = _module_parts(self.config, is_trained=self._is_trained)
        # attnkit's modules take configurations of their parts, which checkpoints then contain;
        # other modules take objects.
        if not (isinstance(make.func, type) and issubclass(make.func, TaskModule)):
            parts = {
                key: build(part if key == "model" else {**part, "_partial_": True}, at=key)
                for key, part in parts.items()
            }
        try:
            module = make(**parts)
        except UserError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"module: {node['_target_']}: {first_line(error)}") from error
        if not isinstance(module, LightningModule):
            raise UserError(f"module: {node['_target_']} is not a LightningModule")
        if self.config.get("init") and not self._is_trained:
            from attnkit.lightning.resume.warm_start import warm_start

            _log.info(warm_start(module, self.config["init"]))
        return module

    def _loaded_module(self) -> LightningModule:
        """Return the module of the checkpoint, built as it was saved."""
        ckpt, cls = self.config["ckpt"], self._module_class()
        parameters = inspect.signature(cls).parameters
        held = checkpoints.load(ckpt, mmap=True).get("hyper_parameters", {})
        unknown = [name for name in held if name not in parameters]
        if unknown and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            task = self.config["task"]
            raise UserError(
                f"ckpt: {ckpt} is not a checkpoint of task={task}: {cls.__name__} has no "
                f"{unknown[0]}\n"
                "  give the task it was trained with: task=…; inside a run folder it is known"
            )
        load = partial(cls.load_from_checkpoint, ckpt, map_location="cpu", weights_only=True)
        return checkpoints.loaded(load, ckpt, (AttributeError, LookupError, TypeError, ValueError))

    # --- properties ---

    @property
    def _is_trained(self) -> bool:
        """Whether the module's weights come from a checkpoint."""
        return bool(self.start or self.config["ckpt"])

    @property
    def best(self) -> str | None:
        """The best checkpoint of this training, if one was kept."""
        kept = self.trainer.checkpoint_callbacks
        best = [c.best_model_path for c in kept if isinstance(c, ModelCheckpoint) and c.monitor]
        return best[-1] or None if best else None

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.module.parameters())

    @property
    def ckpt(self) -> str | None:
        """The checkpoint whose weights the module does not have yet."""
        return None if self.alone else self.config["ckpt"]

    @property
    def results(self) -> dict[str, float]:
        """The numbers of results.json."""
        return folders.load_results(self.folder)

    def explain(
        self, num_images: int = 8, *, graph: int | None = None, **options: Any
    ) -> Explanation:
        """Explain the first test data, or a node or a pair of nodes by `index`.

        Images of different sizes are resized to one size.

        Args:
            num_images: the largest number of images, taken from each class in turn.
            graph: the number of the graph to explain, for data of many graphs; None: the first one
                of the first class in the test data.
            options: arguments of `attnkit.explain`.

        Raises:
            UserError: the module does not define what is explained.
            ValueError, TypeError: as `attnkit.explain`; or `graph` was given for other data.
        """
        from attnkit.interpret.explain import explain
        from attnkit.launch.modes.explain import chosen, explained_of

        batch, _, _ = chosen(self, num_images, None if graph is None else [graph])
        given = explained_of(self.module, batch, self.module.device).of_one_size()
        if graph is not None and given.graphs is None:
            raise TypeError(f"graph: expected none for {given.kind}, got {graph}")
        options = {"target": given.sentences, "of": given.of, **options}
        inputs = given.inputs if given.graphs is None else given.inputs[0]
        return explain(given.model, inputs, **options)

    def loaded(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Call a function of the trainer that loads the checkpoint, with `weights_only=True`."""
        call = partial(function, self.module, datamodule=self.data, weights_only=True, **arguments)
        wrong = () if self.mode.trains else (KeyError,)
        return checkpoints.loaded(call, arguments.get("ckpt_path"), wrong)

    # --- running ---

    def carry_out(self) -> None:
        """Run the mode's function; write its numbers to results.json and `done` to state.json."""
        done = False
        try:
            figures: dict[str, float] = self._work()
            done = True
        finally:
            for logger in (getattr(self, "trainer", None) and self.trainer.loggers) or ():
                if isinstance(logger, WandbRun):
                    logger.close(failed=not done)
        self.save(figures)
        if self.trainer.is_global_zero:
            progress = {k: figures[k] for k in ("epochs", "steps") if k in figures}
            folders.save_state(self.folder, folders.DONE, ended_by=self.ended_by, **progress)

    def save(self, figures: Mapping[str, float]) -> None:
        """Add numbers to results.json."""
        if self.trainer.is_global_zero:
            seconds = round(self._before + time.perf_counter() - self._started, 2)
            known = {**folders.load_results(self.folder), **figures}
            folders.save_results(self.folder, {**known, "num_seeds": 1, "seconds": seconds})

    def _work(self) -> dict[str, float]:
        try:
            return named(self.mode.function)(self)
        except SystemExit:
            trainer = getattr(self, "trainer", None)
            if trainer is not None and trainer.interrupted:  # Lightning's way to answer Ctrl-C
                signal.signal(signal.SIGINT, signal.default_int_handler)
                raise KeyboardInterrupt from None
            raise
        except (MisconfigurationException, RuntimeError) as error:
            trainer = getattr(self, "trainer", None)  # the error may come before it is built
            if trainer is not None and (about_monitor := unlogged(error, trainer)):
                raise about_monitor from error
            if not isinstance(error, MisconfigurationException):
                raise
            raise UserError(f"trainer: {first_line(error)}") from error

    def _seed(self) -> None:
        lightning.seed_everything(self.config["seed"], workers=True, verbose=False)

    def _seconds_before(self) -> float:
        """Return the seconds that the run had taken up to the checkpoint it continues from."""
        if self.start is None:
            return 0.0
        states = checkpoints.load(self.start, mmap=True).get("callbacks", {})
        elapsed = states.get(Elapsed.__name__, {}).get("time_elapsed", {})
        return float(elapsed.get("train", 0.0))


def _module_parts(config: Mapping[str, Any], *, is_trained: bool = False) -> dict[str, Any]:
    """Return the configurations of model, optimizer, … for a module's constructor.

    Args:
        config: the configuration of the run.
        is_trained: whether a checkpoint is loaded next, so that no pretrained weights are read.
    """
    parts = {key: config[key] for key in schema.PARTS if config.get(key)}
    if not {k for k, v in parts.get("finetune", {}).items() if v is not None} - _FULL:
        parts.pop("finetune", None)  # everything is trained, as without a finetune node
    if "model" in parts:
        inner = {key: config[key] for key in schema.MODEL_PARTS if config.get(key)}
        parts["model"] = {**parts["model"], **inner}
        if is_trained:
            parts["model"] = untrained(parts["model"])
    return parts
