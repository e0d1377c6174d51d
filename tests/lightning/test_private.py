"""Private names of other packages: all of them in two files, and there in what is installed."""

import ast
import inspect
import multiprocessing.queues
from pathlib import Path

import hydra._internal.callbacks
import hydra._internal.config_loader_impl
import hydra._internal.config_repository
import hydra._internal.hydra
import hydra._internal.utils
import lightning.fabric.loggers.csv_logs as csv_logs
import omegaconf._utils
import pytest
import torch
import torchmetrics
from hydra._internal.core_plugins import basic_sweeper, importlib_resources_config_source
from lightning import LightningModule, Trainer
from lightning.fabric.utilities import data as fabric_data
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, launchers

import attnkit

ROOT = Path(attnkit.__file__).parent
ALONE = (ROOT / "lightning" / "_private.py", ROOT / "launch" / "config" / "_hydra.py")


@pytest.fixture(scope="module")
def trainer():
    return Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)


def names(path):
    """Where which private name of another package is used, or of an object that is not self."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if not module.startswith("attnkit"):
                yield from filter(is_private, (*module.split("."), *(a.name for a in node.names)))
        elif isinstance(node, ast.Import):
            yield from (part for a in node.names for part in a.name.split(".") if is_private(part))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node):
            yield node.attr


def is_own(node):
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def defined(paths):
    """Private names that attnkit gives: functions, classes and attributes of its own objects."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Attribute) and is_own(node):
                yield node.attr


def test_they_stand_in_two_files():
    """As far as reading tells: of a name that attnkit gives too, no object says whose it is."""
    rooms = (ROOT / "launch", ROOT / "lightning", (ROOT / "tasks").resolve())
    paths = [path for room in rooms for path in room.rglob("*.py") if path not in ALONE]
    assert len(paths) > 80
    known = {name for path in ALONE for name in names(path)}
    assert {"_signal_connector", "_should_accumulate", "_set_sampler_epoch"} <= known
    python = {"_exit", "_getframe", "_fields", "_asdict", "_replace"}  # documented
    ours = python | {"_trial_id"} | set(defined(paths)) - known  # a trial's, of Optuna
    found = {
        f"{path.relative_to(path.parents[2])}: {name}"
        for path in paths
        for name in names(path)
        if name not in ours
    }
    assert not found


# Those of one owner, of which some are overridden or called by the classes of best_and_last.py.
OWNED = [
    (hydra._internal.callbacks, "Callbacks"),
    (hydra._internal.config_loader_impl, "ConfigLoaderImpl"),
    (hydra._internal.config_repository.ConfigRepository, "initialize_sources"),
    (importlib_resources_config_source.ImportlibResourcesConfigSource, "_read_config"),
    (importlib_resources_config_source.ConfigSource, "_get_header_dict _normalize_file_name"),
    (omegaconf._utils, "get_yaml_loader"),
    (basic_sweeper.BasicSweeper, "split_arguments"),
    (hydra._internal.hydra.Hydra, "compose_config"),
    (hydra._internal.utils, "create_config_search_path"),
    (csv_logs._ExperimentWriter, "_check_log_dir_exists"),
    (fabric_data, "_set_sampler_epoch"),
    (LightningModule(), "_current_fx_name _trainer"),
    (multiprocessing.queues.Queue, "_on_queue_feeder_error"),
    (torch.nn.Module, "_compiled_call_impl"),
    (launchers, "_SubprocessScriptLauncher"),
    (torch.utils._pytree, "tree_leaves"),
    (torch.utils.data._utils.worker, "_worker_loop"),
    (DDPStrategy(), "_timeout"),
    (FSDPStrategy(), "_timeout"),
    (torchmetrics.MeanMetric(), "_update_count _computed _defaults"),
    (CSVLogger("."), "_experiment"),
    (RichProgressBar(), "_init_progress _get_train_description"),
    (ModelCheckpoint(), "_last_global_step_saved _last_checkpoint_saved _save_checkpoint"),
    (ModelCheckpoint(), "_save_monitor_checkpoint _get_metric_interpolated_filepath_name"),
    (ModelCheckpoint(), "_should_remove_checkpoint _remove_checkpoint _save_topk_checkpoint"),
    (ModelCheckpoint(), "_monitor_candidates _should_skip_saving_checkpoint"),
]


@pytest.mark.parametrize(("owner", "names"), OWNED, ids=[names for _, names in OWNED])
def test_they_are_there(owner, names):
    assert not [name for name in names.split() if not hasattr(owner, name)]


@pytest.mark.parametrize(
    "path",
    [
        "_results",
        "_logger_connector._current_fx",
        "_signal_connector.register_signal_handlers",
        "_checkpoint_connector.dump_checkpoint",
        "fit_loop._can_stop_early",
        "fit_loop._data_fetcher",
        "fit_loop._combined_loader",
        "fit_loop.epoch_loop._results",
        "fit_loop.epoch_loop.val_loop._results",
        "fit_loop.epoch_loop._should_accumulate",
        "fit_loop.epoch_loop._num_ready_batches_reached",
        "fit_loop.epoch_loop._should_check_val_fx",
    ],
)
def test_the_trainer_has_it(trainer, path):
    thing = trainer
    for name in path.split("."):
        assert hasattr(thing, name), name
        thing = getattr(thing, name)


def test_wandb_is_given_what_the_logger_holds():
    source = inspect.getsource(WandbLogger)  # to make one needs wandb
    assert "self._wandb_init" in source
    assert "wandb.init(**self._wandb_init)" in source
    assert "self._experiment" in source


def test_every_name_of_the_file_is_tested():
    """What a new function of it reaches for is added to the tables above."""
    tested = Path(__file__).read_text("utf-8")
    assert not [name for path in ALONE for name in names(path) if name not in tested]
