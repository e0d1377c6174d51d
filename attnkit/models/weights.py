"""Weights from a file, a Hugging Face folder or the hub, read without running code."""

import json
import logging
import os
import re
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import huggingface_hub.constants as hub
import numpy as np
import timm.models
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from attnkit.core.arguments import in_a_line
from attnkit.core.contexts import shared

HUB = "hf-hub:"
_PREFIX = "model."  # prefix of the network's names in a checkpoint of a LightningModule
_WHOLE = 0.9  # share of a network's names that makes another prefix a second network
_COMPILED = "_orig_mod."  # torch.compile puts it before the names of a module
_FILES = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")


@dataclass(frozen=True)
class Source:
    """The facts about a network in the `config.json` beside its weights; empty without the file."""

    architecture: str | None = None
    """The name in timm's registry."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of `timm.create_model` with which the network was created."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """timm's `pretrained_cfg`: mean, std, input_size, …"""


def read_source(given: str | Path) -> Source:
    """Return what is known of the network that weights belong to.

    Args:
        given: `hf-hub:NAME`, a folder or a file.

    Raises:
        ValueError: there is no such file or name, or its config.json cannot be read.
    """
    found = read_json(given, "config.json")
    if "architecture" not in found and "model_type" in found:
        made = ", ".join(found.get("architectures") or [found["model_type"]])
        raise ValueError(
            f"{given} holds a model of transformers ({made}), whose names are not timm's; "
            "expected weights of a network of timm; model=transformers takes vision towers"
        )
    arguments, config = found.get("model_args") or {}, found.get("pretrained_cfg", found)
    try:
        return Source(found.get("architecture"), dict(arguments), dict(config))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{given}: its config.json cannot be read: {error}") from error


def read_json(given: str | Path, name: str) -> dict[str, Any]:
    """Return the content of a JSON file beside weights; empty if the file is missing.

    On the hub, config.json may not be missing.

    Raises:
        ValueError: there is no such file or name, or the file holds no JSON object.
    """
    if is_hub(given):
        repository, _, revision = str(given).removeprefix(HUB).partition("@")
        with asking_hub():
            try:
                path = Path(hf_hub_download(repository, name, revision=revision or None))
            except Exception as error:
                if isinstance(error, EntryNotFoundError) and name != "config.json":
                    return {}
                raise ValueError(f"{given} cannot be loaded: {reason(error)}") from error
    elif not (path := existing(given) / name).is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise TypeError(f"expected an object, got {in_a_line(found)}")
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{given}: its {name} cannot be read: {error}") from error
    return found


def read_weights(given: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a network by their names; code in a file is never run.

    Args:
        given: `hf-hub:NAME`; a folder with `model.safetensors` or `pytorch_model.bin`; or a file,
            in safetensors or written by `torch.save`: a state dict, alone or under any key;
            averaged weights are preferred. `of_network` selects the names of one network.

    Raises:
        ValueError: there is no such file or name, or it holds code, is damaged or has no weights.
    """
    if is_hub(given):
        with asking_hub():
            try:
                state = timm.models.load_state_dict_from_hf(str(given).removeprefix(HUB))
            except Exception as error:
                raise ValueError(f"{given} cannot be loaded: {reason(error)}") from error
    else:
        path = existing(given)
        if path.is_dir():
            files = [path / name for name in _FILES if (path / name).is_file()]
            if not files:
                raise ValueError(
                    f"{given}: no weights in this folder: no {' or '.join(_FILES[:2])}"
                )
            path = files[0]
        state = _read_file(path)
    if not state or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        kind = next((type(v).__name__ for v in state.values() if not isinstance(v, Tensor)), None)
        raise ValueError(f"{given}: expected tensors by name, got {kind or 'nothing'}")
    return state


def timm_config(name: Any) -> dict[str, Any] | None:
    """Return timm's `pretrained_cfg` of a registered name, `NAME` or `NAME.TAG`; None if unknown.

    Raises:
        ValueError: there are no weights with this tag.
    """
    if not isinstance(name, str) or not timm.models.is_model(name):
        return None
    try:
        config: Any = timm.models.get_pretrained_cfg(name)
    except RuntimeError as error:
        tags = timm.models.list_pretrained(f"{name.partition('.')[0]}.*")
        has = f"; there are {', '.join(tags[:3])}" if tags else ""
        raise ValueError(f"timm has no weights {name}{has}") from error
    return {} if config is None else {**config.to_dict(), "has_weights": config.has_weights}


def check_name(name: Any) -> dict[str, Any]:
    """Return timm's `pretrained_cfg` of a name.

    Raises:
        ValueError: the name is not in timm's registry, or there are no weights with its tag.
    """
    try:
        config = timm_config(name)
    except ValueError as error:
        raise ValueError(f"name: {error}") from error
    if config is None:
        near = timm.models.list_models(f"*{str(name).split('.')[0][:6]}*")[:5] if name else []
        hint = f"; near: {', '.join(near)}" if near else ""
        raise ValueError(f"name: expected a name of timm's registry, got {name!r}{hint}")
    return config


def is_name(given: str | Path) -> bool:
    """Whether `given` is a name of timm's registry and no file or folder of that name exists."""
    return timm.models.is_model(str(given)) and not Path(given).exists()


def is_hub(given: str | Path) -> bool:
    """Whether `given` is a name on Hugging Face's hub."""
    return str(given).startswith(HUB)


def existing(given: str | Path) -> Path:
    """Return the path of an existing file or folder.

    Raises:
        ValueError: it does not exist.
    """
    path = Path(given).expanduser()
    if not path.exists():
        raise ValueError(f"no file or folder {given}")
    return path


def misfits(error: RuntimeError, *, shown: int = 3) -> str | None:
    """Return the names that did not fit a state dict, with both sides; None for other errors."""
    text = str(error)
    if "loading state_dict" not in text:
        return None
    shapes = re.findall(
        r"size mismatch for (\S+): copying a param with shape (?:torch\.Size\()?(\[[\d, ]*\])\)? "
        r"from checkpoint, the shape in current model is (?:torch\.Size\()?(\[[\d, ]*\])",
        text,
    )
    found = [f"{name} is {there} there, {here} here" for name, there, here in shapes]
    for kind, side in (("Missing", "is only here"), ("Unexpected", "is only there")):
        names = re.search(rf"{kind} key\(s\) in state_dict: (.*)", text)
        found += [f"{name} {side}" for name in re.findall(r'"([^"]+)"', names[1] if names else "")]
    rest = f"; and {len(found) - shown} more" if len(found) > shown else ""
    return "; ".join(found[:shown]) + rest


def asking_hub() -> AbstractContextManager[None]:
    """Return a context for requests to the hub, without the log lines of its retries, and without
    retries if the hub cannot be reached at all.

    Cached files are then found at once, and missing ones are an error at once.
    """
    return shared("hub", partial(_asking_hub, hub.HF_HUB_OFFLINE or not _reachable()))


@contextmanager
def _asking_hub(is_offline: bool) -> Iterator[None]:
    log = logging.getLogger("huggingface_hub")
    level, offline = log.level, hub.HF_HUB_OFFLINE
    log.setLevel(logging.ERROR)
    hub.HF_HUB_OFFLINE = is_offline
    try:
        yield
    finally:
        log.setLevel(level)
        hub.HF_HUB_OFFLINE = offline


def reason(error: BaseException) -> str:
    """Return in one line why something could not be loaded from the hub."""
    known = {
        "RepositoryNotFoundError": "no such repository, or a private one",
        "RemoteEntryNotFoundError": "no such file in the repository",
        "GatedRepoError": "its licence must be accepted first, and HF_TOKEN set",
    }
    for cls in type(error).__mro__:
        if cls.__name__ in known:
            return known[cls.__name__]
    if type(error).__name__ in ("LocalEntryNotFoundError", "OfflineModeIsEnabled"):
        return "no network connection to the hub, and not in its cache"
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return line[:200] or type(error).__name__


def _reachable() -> bool:
    host = urlparse(hub.ENDPOINT).hostname or ""
    proxies = ("https_proxy", "http_proxy", "all_proxy")
    if any(os.environ.get(name) or os.environ.get(name.upper()) for name in proxies):
        return True  # a proxy resolves the host itself
    with suppress(OSError):
        return bool(socket.getaddrinfo(host, 443))
    return False


def of_network(state: Mapping[str, Tensor], own: Iterable[str]) -> dict[str, Tensor]:
    """Return the part of a state dict that belongs to one network, under the network's own names.

    The part may be under a prefix, as an attribute of a LightningModule is; the prefix with the
    most of the network's names is taken.

    Raises:
        ValueError: there are two such networks, such as a student and a teacher.
    """
    own = set(own)
    counts: Counter[str] = Counter({"": 0})
    for name in state:
        starts = [0, *(place.end() for place in re.finditer(r"\.", name))]
        counts.update(name[:start] for start in starts if name[start:] in own)
    prefix = max(counts, key=lambda prefix: (counts[prefix], -len(prefix)))
    twins = [other for other, count in counts.items() if count >= _WHOLE * counts[prefix] > 0]
    for twin in twins:
        is_inside = twin.startswith(prefix) or prefix.startswith(twin)
        if not is_inside and not _are_equal(state, prefix, twin):
            first, second = sorted((prefix, twin))
            raise ValueError(
                f"there are two networks in it, under {first!r} and {second!r}; expected one: load "
                "it by torch.load and save the tensors of the one you want"
            )
    if not counts[prefix] and any(name.startswith(_PREFIX) for name in state):
        prefix = _PREFIX  # names that timm converts into its own
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}


def _are_equal(state: Mapping[str, Tensor], *prefixes: str) -> bool:
    """Whether the prefixes have equal tensors, as with a loss that keeps the model."""
    one, other = (
        {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
        for prefix in prefixes
    )
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


def of_vit(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of a state dict that is a Vision Transformer, of timm or attnkit."""
    return of_network(state, ["patch_embed.proj.weight", "patch_embed.weight"])


def _read_file(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            with torch.serialization.safe_globals(_numbers_of_numpy()):
                state = _tensors_of(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # unpickling may raise any error
        raise ValueError(f"{path}: {_wrong(path)}") from error
    return {name.replace(_COMPILED, ""): tensor for name, tensor in state.items()}


def _tensors_of(saved: Any) -> dict[str, Any]:
    """Return the state dict in what a training script saved; averaged weights are preferred."""
    found = {
        name: value
        for name, value in saved.items()
        if isinstance(value, Mapping) and value and all(map(torch.is_tensor, value.values()))
    }
    averaged = [name for name in found if "ema" in str(name).lower().split("_")]
    for name in (*averaged, "state_dict", "model", "model_state_dict"):
        if name in found:
            return dict(found[name])
    beside = {name: value for name, value in saved.items() if torch.is_tensor(value)}
    if not found or (len(found) == 1 and not beside):
        return dict(*found.values()) or dict(saved)
    # names tell later which of them is the network's
    states = found.items()
    return beside | {f"{key}.{name}": t for key, state in states for name, t in state.items()}


def _numbers_of_numpy() -> list[Any]:
    """Return the globals of pickled NumPy numbers, such as a best accuracy; none runs code."""
    kinds = [type(np.dtype(kind)) for kind in "?bBhHiIlLqQefd"]
    return [np.float64(0).__reduce__()[0], np.dtype, *kinds]


def _wrong(path: Path) -> str:
    with suppress(Exception):
        if unsafe := get_unsafe_globals_in_checkpoint(str(path)):
            return f"it holds more than weights and would run code ({', '.join(unsafe[:3])})"
    return "not a file of weights, or damaged"
