"""Trees of image files: which splits and classes a folder holds, and which files are broken."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torchvision.datasets.folder import IMG_EXTENSIONS

from attnkit.lightning.errors import UserError
from attnkit.lightning.telling.say import say as tell

SUFFIXES = frozenset((*IMG_EXTENSIONS, ".gif", ".jfif"))
SPELLINGS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
MAX_NAMED = 10


@dataclass
class Files:
    """The image files of one split: paths and the numbers of their classes."""

    paths: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)


def find_splits(root: str | Path) -> tuple[dict[str, Files], list[str]]:
    """The splits under `root` and the class names, sorted as torchvision's ImageFolder does.

    `root` holds `train/` and, if given, `val/` and `test/` (or another usual spelling), each with
    one folder per class; or it holds the class folders itself, which are then all "train".

    Raises:
        UserError: no images, fewer than two classes, an empty class folder in train, or classes
            in val or test that train lacks; each names the folder.
    """
    root = Path(root)
    folders = _split_folders(root)
    class_names = _subfolders(folders["train"])
    if len(class_names) < 2:
        found = f"only {class_names[0]!r}" if class_names else "none"
        raise UserError(
            f"data.root: {folders['train']} must hold one folder per class, at least two; "
            f"found {found}"
        )
    splits, skipped = {}, Counter[str]()
    for split, folder in folders.items():
        _check_classes(folder, class_names)
        files = Files()
        for label, name in enumerate(class_names):
            paths = list_images(folder / name, skipped) if (folder / name).is_dir() else []
            files.paths += paths
            files.labels += [label] * len(paths)
        splits[split] = files
        _check_counts(split, folder, files, class_names)
    if skipped:
        kinds = ", ".join(f"{count} × {suffix}" for suffix, count in sorted(skipped.items()))
        say_once(f"{root}: files without an image suffix are ignored: {kinds}")
    return splits, class_names


def list_images(folder: str | Path, skipped: Counter[str] | None = None) -> list[str]:
    """All files with an image suffix below a folder, sorted; hidden ones are left out.

    `skipped` counts the other files by suffix.
    """
    paths = []
    for directory, names, files in os.walk(folder, followlinks=True):
        names[:] = sorted(name for name in names if not _hidden(name))
        for name in sorted(files):
            suffix = os.path.splitext(name)[1].lower()
            if _hidden(name):
                continue
            if suffix in SUFFIXES:
                paths.append(os.path.join(directory, name))
            elif skipped is not None:
                skipped[suffix or "no suffix"] += 1
    return paths


def report_failures(
    failures: Mapping[str, str], split: str, total: int, *, given: bool, skip_corrupt: bool
) -> None:
    """Name the files that cannot be decoded, and stop if they are too many.

    Args:
        failures: path to reason.
        split: the name of the split, for the message.
        total: files in it.
        given: whether it is a val or test folder of the user's: then none may be broken.
        skip_corrupt: go on in any case.

    Raises:
        UserError: more than 1 % of the files, or any in a given val or test folder.
    """
    if not failures:
        return
    named = [f"{path} ({reason})" for path, reason in failures.items()]
    if skip_corrupt or not (given or len(failures) > 0.01 * total):
        say_once(f"{split}: {len(failures)} of {total} files cannot be decoded and are left out:")
        for line in shortened(named, MAX_NAMED):
            say_once(f"  {line}")
        return
    limit = f"none may be in a given {split} folder" if given else "more than 1 %"
    raise UserError(
        f"{split}: {len(failures)} of {total} files cannot be decoded ({limit})\n"
        f"{'; '.join(shortened(named, 3))}\n"
        "data.skip_corrupt=true leaves them out"
    )


def say(line: str) -> None:
    """One line on the screen, and in run.log."""
    tell(line, error=True)


say_once = rank_zero_only(say)  # where all processes look at the same files


def _split_folders(root: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for split, spellings in SPELLINGS.items():
        present = [root / name for name in spellings if (root / name).is_dir()]
        if len(present) > 1:
            names = " and ".join(path.name for path in present)
            raise UserError(f"data.root: {root} holds both {names}; keep one of them as {split}")
        if present:
            found[split] = present[0]
    # A class may be called "train" too: a split holds class folders, a class holds images.
    layout = {split: path for split, path in found.items() if _subfolders(path)}
    others = set(_subfolders(root)) - {path.name for path in found.values()}
    if "train" in layout:
        flat = [path for split, path in found.items() if split not in layout]
        if flat:
            raise UserError(f"data.root: {flat[0]} must hold one folder per class; found none")
        return layout
    if layout or (found and not others):
        raise UserError(
            f"data.root: {root} holds {', '.join(sorted(p.name for p in found.values()))} "
            "but no train/ with one folder per class"
        )
    return {"train": root}


def _check_classes(folder: Path, class_names: Sequence[str]) -> None:
    names = set(_subfolders(folder))
    extra, missing = sorted(names - set(class_names)), sorted(set(class_names) - names)
    lines = [f"data.root: the class folders of {folder} differ from train's"]
    if extra:
        lines.append(f"not in train: {', '.join(shortened(extra, 5))}")
    if extra and missing:
        lines.append(f"missing: {', '.join(shortened(missing, 5))}")
    if extra:
        raise UserError("\n".join(lines))


def _check_counts(split: str, folder: Path, files: Files, class_names: Sequence[str]) -> None:
    if not files.paths:
        kinds = " ".join(sorted(SUFFIXES))
        raise UserError(f"data.root: no images under {folder} (suffixes: {kinds})")
    counts = Counter(files.labels)
    empty = [name for label, name in enumerate(class_names) if not counts[label]]
    named = ", ".join(shortened(empty, 5))
    if empty and split == "train":
        raise UserError(f"data.root: class folders without images in {folder}: {named}")
    if empty:
        say_once(f"{split}: no images of {named}")


def _subfolders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not _hidden(entry.name))


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def shortened(items: Sequence[str], count: int) -> list[str]:
    return [*items[:count], *([f"… and {len(items) - count} more"] if len(items) > count else [])]
