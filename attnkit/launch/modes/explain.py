"""`run=explain`: a page, a table and arrays that show where a model looks, and tests of trust."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, Subset

from attnkit.interpret.report import Report
from attnkit.launch import folder as folders
from attnkit.launch.config.schema import fill
from attnkit.launch.config.signatures import takes_images
from attnkit.lightning.build import build
from attnkit.lightning.console import say, say_table
from attnkit.lightning.errors import UserError, first_line
from attnkit.lightning.protocols import Explained, by_turns, num_rows
from attnkit.lightning.resume import checkpoints
from attnkit.lightning.versions import versions
from attnkit.models.preprocessing import expected_images
from attnkit.models.weights import read_source, timm_config

if TYPE_CHECKING:
    from attnkit.launch.run import Run

_OF_REPORT = (
    "method", "methods", "target", "nodes", "pairs", "graphs", "against", "layer", "num_images",
    "trust",
)  # fmt: skip


def explain(run: Run) -> dict[str, float]:
    """Explain predictions of the module; write explain.html, scores.csv and maps.npz."""
    report = build(run.config["explain"], at="explain")
    if not isinstance(report, Report):
        raise UserError(f"explain: {run.config['explain']['_target_']} is not a Report")
    facts = [] if run.config["ckpt"] else _of_timm(run)
    module = run.make_module()
    run.make_trainer()
    run.restore()
    device = _device(report.device)
    batch, rows, how = chosen(run, report.num_images, report.graphs)
    explained = explained_of(module, batch, device)
    against = None
    with _user_errors():
        report.check(explained)
        _add_names_and_masks(run, report, explained, batch, rows)
        if report.against is not None:
            against = explained_of(_other(module, report.against), batch, device)
    facts = [*_facts(run, report, device), *facts, how, *explained.notes]
    facts = [fact for fact in facts if fact]
    run.ready()
    for fact in facts:
        say(fact)
    with _user_errors():
        say(f"methods: {', '.join(report.methods)}; {report.cost(explained)}")
        result = report(explained, run.folder, title=_title(run), facts=facts, against=against)
    say_table(result.table(_title(run)))
    for sentence in result.said[:1]:
        say(sentence)
    count = len(report.nodes or report.pairs or explained.inputs)
    return {"explained": float(count), "parameters": run.num_parameters}


def _title(run: Run) -> str:
    return f"{run.config['task']} · explain"


def _facts(run: Run, report: Report, device: torch.device) -> list[str]:
    """Return lines on the model, its weights, the versions and the device."""
    model = getattr(run.module, "model", run.module)
    ckpt = run.config["ckpt"]
    used = ", ".join(f"{name} {version}" for name, version in versions(("torch", "timm")).items())
    facts = [f"model: {type(model).__name__}, {run.num_parameters:,} parameters"]
    facts += [f"checkpoint: {ckpt}"] if ckpt else []
    facts += [f"against: {report.against}"] if report.against else []
    return [*facts, f"versions: {used}; on {device.type}"]


def explained_of(module: LightningModule, batch: Any, device: torch.device) -> Explained:
    """Return what the module declares as explained in a batch."""
    look = getattr(module, "explained", None)
    if look is None:
        raise UserError(
            f"run=explain: {type(module).__name__} does not say what to explain in a batch\n"
            "  give it a method explained(batch), see attnkit.lightning.Explained"
        )
    module.to(device).eval()
    with torch.no_grad():
        explained = look(module.transfer_batch_to_device(batch, device, 0))
    if not isinstance(explained, Explained):
        raise UserError(
            f"run=explain: {type(module).__name__}.explained: expected "
            f"attnkit.lightning.Explained, got {type(explained).__name__}"
        )
    return explained


def _other(module: LightningModule, path: Any) -> LightningModule:
    """Return the module of another checkpoint, built as it was saved."""
    wrong = (AttributeError, LookupError, TypeError, ValueError)
    try:
        ckpt = folders.checkpoint(str(path))
        load = partial(type(module).load_from_checkpoint, ckpt, map_location="cpu")
        return checkpoints.loaded(partial(load, weights_only=True), ckpt, wrong)
    except UserError as error:
        raise UserError(f"explain.against: {str(error).removeprefix('ckpt: ')}") from error


@contextmanager
def _user_errors() -> Iterator[None]:
    """Turn errors about arguments of the explanation into `UserError`s with the typed name."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:
        name = str(error).partition(":")[0]
        if name in _OF_REPORT:
            raise UserError(f"explain.{first_line(error)}") from error
        if name in ("model", "grid", "inputs", "index", "removals", "layers"):
            raise UserError(f"run=explain: {first_line(error)}") from error
        raise


def _device(asked: str | None) -> torch.device:
    try:
        device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"explain.device: {asked!r} is not available: {first_line(error)}"
        ) from error
    return device


# --- what is explained ----------------------------------------------------------------------------


def chosen(
    run: Run, num_images: int, graphs: Sequence[int] | None = None
) -> tuple[Any, list[int], str]:
    """Return a batch to explain, its rows in the data, and a sentence on how it was chosen."""
    images = run.config["images"]
    trained = getattr(run, "data", None)  # present after a training in this process
    data = run.make_predict_data(run.module) if images else trained or run.make_own_data()
    data.trainer = run.trainer
    run.trainer.strategy.connect(run.module)  # the data reads sizes and words from the module
    data.prepare_data()
    data.setup("predict" if images else "test")
    choose = getattr(data, "to_explain", None)
    if choose and getattr(data, "level", None) == "graph":  # many graphs, one label each
        batch, how = choose(num_images, graphs)
        return batch, [], how
    if not takes_images(run.config["predict"]):  # a graph is one batch
        is_whole = type(data).predict_dataloader is not LightningDataModule.predict_dataloader
        loader = data.predict_dataloader() if is_whole else _first(data.test_dataloader())
        return next(iter(loader)), [], "" if is_whole else "shown: the first batch of the test data"
    loader = data.predict_dataloader() if images else _first(data.test_dataloader())
    dataset = getattr(loader, "dataset", None)
    if dataset is None or not hasattr(dataset, "__len__"):
        raise UserError("data: its test loader has no data set to choose from; give images=PATH")
    labels = getattr(dataset, "labels", None)
    count = min(num_images, len(dataset))
    rows, how = list(range(count)), "the first ones"
    if not images and labels is not None and labels.ndim == 1:  # one label for each image
        rows, how = by_turns(labels.tolist(), count), "taken from each class in turn"
    some = DataLoader(Subset(dataset, rows), batch_size=count, collate_fn=loader.collate_fn)
    batch = data.on_after_batch_transfer(next(iter(some)), 0)
    count = num_rows(batch)  # without files that can't be decoded
    if not count:
        raise UserError(f"images: none of the first {len(rows)} in {images} can be read")
    source = f"images in {images}" if images else "test images"
    return batch, rows, f"shown: {count} of {len(dataset):,} {source}, {how}"


def _add_names_and_masks(
    run: Run, report: Report, explained: Explained, batch: Any, rows: list[int]
) -> None:
    """Add names from the data, and masks or edges that mark the true evidence, if it has them."""
    if run.config["images"]:
        root = str(run.config["images"])
        explained.names = [name.removeprefix(root).lstrip("/") or name for name in explained.names]
        return
    if explained.kind == "nodes":
        look = getattr(run.data, "true_edges", None)
        explained.true_edges = look and partial(look, batch)
    if explained.graphs is not None and (names := getattr(run.data, "graph_names", None)):
        explained.names = [names[number] for number in explained.graphs]
    if explained.kind in ("nodes", "pairs", "graphs"):
        return
    explained.names = explained.names or [f"Test image {row}" for row in rows]
    look = getattr(run.data, "truth", None)
    if look is None or explained.kind != "images" or explained.truth is None:
        return
    truth, target = look("test"), report.class_of(explained)
    classes = explained.truth.tolist() if target is None else [target] * len(rows)
    masks = [truth.mask_of(row, one) for row, one in zip(rows, classes, strict=True)]
    known = [mask for mask in masks if mask is not None]
    if len(known) == len(masks):
        explained.masks = torch.stack(known).to(explained.truth.device)
    else:
        explained.notes.append("masks: not all images hold the class that is asked for")


def _first(loaders: Any) -> Any:
    """Return the first of several loaders, or the only one."""
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    return loaders[0] if isinstance(loaders, list | tuple) else loaders


# --- a network trained elsewhere ------------------------------------------------------------------


def _of_timm(run: Run) -> list[str]:
    """Fill in timm's facts of a network (sizes, mean, deviation, classes); return lines on it."""
    config = run.config
    node, module = config["model"], config["module"]
    has_weights = bool(node.get("pretrained") or node.get("weights"))
    try:
        facts = expected_images(node if has_weights else {**node, "pretrained": True})
        known = timm_config(facts.get("name") or node.get("name")) or {}
        if node.get("weights"):
            known |= read_source(node["weights"]).config
    except ValueError as error:
        raise UserError(f"model.{error}") from error
    if node.get("image_size"):
        facts["image_size"] = node["image_size"]
    facts["num_classes"] = known.get("num_classes")
    source = node.get("name") or node.get("weights")
    missing = [key for key in ("name", "image_size", "num_classes") if not facts.get(key)]
    if missing:
        raise UserError(f"model.{missing[0]}: not known from {source}; set model.{missing[0]}=…")
    asked = {key: node[key] for key in ("in_channels", "num_classes") if node.get(key) is not None}
    for part in (node, module):
        fill(part, {**facts, **asked})
    network = f"network: {facts['name']} of timm"
    if has_weights:
        return [network, f"weights: {node.get('weights') or 'those of timm'}"]
    random = "random; maps and scores are those of a network that has learned nothing"
    return [network, f"weights: {random}"]
