"""Checks what each mode refuses, before torch is imported or anything is written."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from attnkit.launch import folder as folders
from attnkit.launch.command import command_line, dotted_key
from attnkit.launch.config import schema
from attnkit.launch.config.signatures import takes_images
from attnkit.launch.modes import MODES
from attnkit.lightning.errors import UserError
from attnkit.lightning.files import absolute

if TYPE_CHECKING:
    from attnkit.launch.decide import Request

# Top-level keys of every configuration; validate() reports others as unknown.
_KEYS = {field.name for field in fields(schema.Config)}
_INSTEAD = {
    "ckpt": "\n  to train on: resume=RUN_DIR",
    "sweep": "\n  to go on with a sweep: -m resume=SWEEP_DIR",
}


def check_uses(request: Request) -> None:
    """Refuse settings that the mode does not use, and report those that it lacks.

    Raises:
        UserError: with the override as it was typed.
    """
    mode, config = request.mode, request.config
    if mode.needs_ckpt and config.get("ckpt") is None:
        raise UserError(f"run={mode.name}: needs ckpt=PATH, a checkpoint or a run folder")
    for typed in request.overrides:
        top, _, inner = dotted_key(typed).partition(".")
        if top in _KEYS and not mode.reads(top):
            users = ", ".join(name for name, other in MODES.items() if top in other.uses)
            only = f"; only in run={users}{_INSTEAD.get(top, '')}"
            raise UserError(f"{typed}: has no effect in run={mode.name}{only}")
        if top == "trainer" and inner in mode.ignores:
            raise UserError(f"{typed}: has no effect in run={mode.name}, which does not train")
    if (config.get("record") or {}).get("script") and mode.name != "reproduce":
        name = request.typed("experiment").partition("=")[2]
        raise UserError(
            f"experiment={name}: this experiment is a script; run=reproduce runs it\n"
            f"  {command_line('run=reproduce', f'reproduce.name={name}')}"
        )
    if config.get("splits") is not None and config.get("seeds") != 1:
        raise UserError("splits: not together with seeds; -m seed=0,1 runs one job for each seed")
    images = config.get("images")
    if images is not None and not absolute(str(images)).exists():
        raise UserError(f"images: no file or folder {absolute(str(images))}")


def predict(request: Request) -> None:
    """Require images if the task reads them; refuse them if it predicts its own data."""
    images = request.config.get("images")
    if takes_images(request.config.get("predict")):
        if images is None:
            raise UserError("run=predict: needs images=PATH, a folder or a file")
        _refuse_data(request)
    elif images is not None:
        raise UserError(f"images={images}: this task predicts its own data; leave it out")


def explain(request: Request) -> None:
    """Require a checkpoint, or images for a network of timm, which needs no checkpoint."""
    config, images = request.config, request.config.get("images")
    if config.get("ckpt") is None:
        names = ("attnkit.interop.timm_network", "attnkit.models.timm_backbone")
        if (config.get("model") or {}).get("_target_") not in names:
            raise UserError(
                "run=explain: needs ckpt=PATH, a checkpoint or a run folder\n"
                "  for a network not trained with attnkit: model=timm model.name=NAME images=PATH"
            )
        if images is None:
            raise UserError(
                "run=explain: without ckpt=PATH it needs images=PATH, a folder or a file"
            )
    if not config.get("explain"):
        raise UserError("run=explain: needs explain, which is null; keep its default value")
    if not takes_images(config.get("predict")):
        if images is not None:
            raise UserError(f"images={images}: this task has no images; leave it out")
        _refuse_idle(request, "predict", "run=predict reads it")
    elif images is None:
        instead = "without images=PATH; for the test data, set data.batch_size, …"
        _refuse_idle(request, "predict", instead)
    else:
        _refuse_data(request)


def export(request: Request) -> None:
    """Require a folder that can be written to."""
    node = request.config.get("export")
    if not node:
        raise UserError("run=export: needs export, which is null; keep its default value")
    if isinstance(node.get("folder"), str):
        folders.check_writable(absolute(node["folder"]), "export.folder")


def _refuse_data(request: Request) -> None:
    instead = "which reads images=…\n  for images, set predict.batch_size, …"
    _refuse_idle(request, "data", instead)


def _refuse_idle(request: Request, idle: str, instead: str) -> None:
    """Refuse overrides below a key that this run does not read."""
    for typed in request.overrides:
        if dotted_key(typed).partition(".")[0] == idle:
            raise UserError(f"{typed}: has no effect in run={request.mode.name}, {instead}")
