"""Checkpoints from elsewhere: looked at without running anything that is in them."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Mapping
from typing import Any

from attnkit.lightning.errors import UserError

_URL = re.compile(r"[A-Za-z][\w+.-]+::?//?|[\w+.-]+::", re.ASCII)  # also fsspec's zip::https://…


def refuse_url(path: Any, what: str) -> None:
    """A `UserError` for what is no local path: others could change it between two looks at it."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
    if _URL.match(str(text)):
        raise UserError(f"{what}: {text} is a URL, expected a local path; download it first")


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a checkpoint of Lightning's holds; tensors stay on disk where that is possible.

    Raises:
        UserError: names the file. It is a URL, no intact checkpoint, holds anything but tensors
            and plain values, or asks to be built by something else than its class.
    """
    import torch

    refuse_url(path, "ckpt")
    path = os.fspath(path)
    try:
        mapped = zipfile.is_zipfile(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError as error:
        raise UserError(f"no file {path}") from error
    except Exception as error:
        raise UserError(f"{path} is no intact checkpoint: {_reason(error)}") from error
    if not isinstance(content, Mapping) or not isinstance(content.get("state_dict"), Mapping):
        raise UserError(f"{path} is no checkpoint of Lightning's: it has no state_dict")
    for key in ("hyper_parameters", "hparams", "module_arguments"):  # the last two: before 1.0
        given = content.get(key) or {}
        if not isinstance(given, Mapping):
            raise UserError(f"{path}: {key}: expected a mapping, got {type(given).__name__}")
        if "_instantiator" in given:
            raise UserError(f"{path}: {key}: _instantiator: only its class may build a module")
    return dict(content)


def _reason(error: Exception) -> str:
    text = str(error)
    if found := re.search(r"Unsupported \w+:? *[^\n]*?(?= was not an allowed|\. |\n|$)", text):
        return f"it holds more than tensors and plain values ({found[0][:200]})"
    if type(error).__name__ == "UnpicklingError" or "weights_only" in text:
        return "it can't be read as tensors and plain values"
    first = (text.strip().splitlines() or [type(error).__name__])[0]
    return first.partition(". ")[0][:200]
