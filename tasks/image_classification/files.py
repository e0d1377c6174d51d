"""Data modules of image files with targets: folders of classes, and CSV tables."""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from attnkit.core.arguments import at_least, choice, existing
from attnkit.lightning.errors import UserError
from attnkit.lightning.resume.sampler import grouped_split, stratified_split
from attnkit.tasks.image_classification.augment import Augment, shipped_augment
from attnkit.tasks.image_classification.data import ImageDataModule
from attnkit.tasks.images.files import (
    MAX_NAMED,
    SPELLINGS,
    Files,
    Table,
    find_splits,
    say_once,
    shortened,
    split_in,
)
from attnkit.tasks.images.native import KeepsSizes, crop_patches
from attnkit.tasks.images.scan import read_splits
from attnkit.tasks.images.sets import ImageSet
from attnkit.tasks.loaders import TokenSampler, module_of


class ImageFolderData(KeepsSizes, ImageDataModule):
    """Images under `root`: `train/`, and if given `val/` and `test/`, with a folder per class.

    Other usual spellings are read too, such as `Training/`, `dev/` or `eval/`. `root` may also hold
    the class folders themselves. Images may have any size and mode: the largest centred part with
    the aspect ratio of `image_size` is used (default: a square of the median short side of the
    training images, at most 224, rounded down to whole patches). `root` is never written to.

    `Trainer.test` of a trained module uses the test split, or if there is none, the files that the
    module was not trained on; classes of the module may be missing there.

    If `augment` has a `crop_min_area`, training images are crops of the whole pictures. These are
    first shrunk by a whole factor, such that the smallest crop, or one of half the area, still has
    as many pixels as `image_size`.

    Each file is decoded once, before training; the pixels stay in memory if all splits, and the
    whole pictures, fit in `memory_gb`. Otherwise each file is decoded once to check it (the
    result is kept in the user's cache folder until a file changes) and again whenever a batch needs
    it, in `num_workers` processes; the pixels are the same.

    Args:
        root: the folder.
        skip_corrupt: leave out files that cannot be decoded, however many. Otherwise more than 1 %
            of a split, or one such file in a given val or test folder, is an error.
        memory_gb: gigabytes (10⁹ bytes) of pixels that this process may hold; None: half of what is
            available, shared between the processes of this machine.
        native: images keep their size and aspect ratio, and a batch is a list of them, for a model
            that takes lists, such as `attnkit.ViT`. Each side becomes the nearest multiple of the
            patch. `image_size` is then only the size whose positions the model learns; positions of
            other sizes are resampled. Training images are crops of at least `crop_min_area`, of
            whole patches, and are not resized.
        max_tokens: maximum number of patches of a batch, instead of `batch_size`; None: 4096. This
            and the next two arguments need `native`.
        max_image_tokens: maximum number of patches of an image, up to half of `max_tokens`; None: a
            quarter of `max_tokens`, at most 1024. A larger picture is shrunk, with its aspect
            ratio.
        patch_size: side in pixels of the model's patches; None: 16.

    The other arguments are those of `ImageDataModule`.

    Raises:
        ValueError: `root` is not a folder, or an option needs `native` or is excluded by it.
        UserError: in `setup`, if the folders or files do not have this form.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        skip_corrupt: bool = False,
        memory_gb: float | None = None,
        native: bool = False,
        max_tokens: int | None = None,
        max_image_tokens: int | None = None,
        patch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        at_least(0, memory_gb=memory_gb)
        tokens = max_tokens, max_image_tokens, patch_size
        excluded: dict[str, Any] = {"sampling": self.sampling, "drop_last": self.drop_last or None}
        self.set_native(native, *tokens, shuffled=TokenSampler, **excluded)
        self.root = existing("root", root, folder=True)
        self.skip_corrupt = skip_corrupt
        self.memory_gb = memory_gb

    def default_augment(self) -> Augment:
        return shipped_augment("image_folder")

    def load(self) -> tuple[Mapping[str, ImageSet], list[str]]:
        known = module_of(self).hparams.get("class_names") if self.testing else None
        splits, class_names = find_splits(self.root, known)
        read = self.read(splits, self.in_channels, self.kept_crop_area)
        sets = {split: images.select(good) for split, (images, good) in read.items()}
        left = set(sets["train"].labels.tolist()) if known is None else range(len(known))
        if empty := [name for label, name in enumerate(class_names) if label not in left]:
            names = ", ".join(empty[:5])
            raise UserError(f"data.root: no image can be decoded in train of {names}")
        return sets, class_names

    def default_size(self, images: ImageSet) -> int:
        return images.size if self.native else super().default_size(images)  # type: ignore[return-value]

    def fitted_images(self, images: Any, *, cropped: bool) -> Any:
        return images if self.native else super().fitted_images(images, cropped=cropped)

    def augmented(self, images: Any, *, cropped: bool) -> Any:
        if not self.native:
            return super().augmented(images, cropped=cropped)
        if self.crop_min_area is not None:
            images = [crop_patches(image, self.crop_min_area, self.patch_size) for image in images]
        return [
            super(ImageFolderData, self).augmented(one[None], cropped=cropped)[0] for one in images
        ]


# Names, in any case, by which columns are found that the user did not name.
_PATH = ("path", "file", "filename", "image", "filepath", "file_name", "image_path", "img")
_LABEL = ("label", "class", "target", "labels", "classes", "targets")
_SPLIT = ("split", "subset", "set")
_GROUP = ("group", "group_id", "patient", "patient_id", "subject", "scene")
_ANSWERS = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0, "false": 0.0, "true": 1.0}
_UNKNOWN = ("", "nan")
_BINS = 10  # quantiles of a number, by which the splits are stratified


class _Row(NamedTuple):
    """A row of the table: its place in the file, image file, split, group and target."""

    where: str
    path: str
    split: str
    group: str
    truth: tuple[Any, ...]  # the class; the labels; or a number (or 0, 1, NaN) for each column


class ImageCsvData(ImageDataModule):
    """Images listed in a table: each row has a path and a label, and may have a split and a group.

    The table is a text file in UTF-8 with a header and a row per line; columns are separated by
    commas, semicolons or tabs. `target` selects what is learned:

    - "classes": one class per image; each distinct value of the column is a class;
    - "labels": several labels per image, for `ImageValues`: names between `separator`s in one
      column, where an empty cell means no label; or several columns of 0 and 1, where an empty cell
      is unknown and does not count;
    - "numbers": one number per image, or one in each of several columns, for `ImageValues`.

    Splits that no column gives are taken from train, about the same fraction of each class, label
    or tenth of the numbers. A group, and files with equal bytes, always stay on one side.

    Everything else, such as decoding, `memory_gb` and crops, is as in `ImageFolderData`.

    Args:
        table: the file.
        images: the folder that paths are relative to; None: the folder of the table.
        target: "classes", "labels" or "numbers".
        path_column: name of the column of files; None: path, file, filename, image or similar.
        label_column: name, or list of names, of the columns of the target; None: label, class,
            target or similar, otherwise the only remaining column, or for labels all remaining
            columns of 0 and 1. For labels, a list of one name is a column of 0 and 1.
        split_column: name of the column that holds train, val or test in any usual spelling; None:
            split, subset or set, if there is one; "": no column.
        group_column: name of the column of groups, which stay together; None: group, patient,
            subject or scene, if there is one; "": no column.
        separator: text between several labels of an image.
        delimiter: character between columns; None: the most frequent of , ; and tab in the header.
        skip_corrupt: leave out wrong rows and files that cannot be decoded. Otherwise a wrong row
            is an error; for files see `ImageFolderData`.
        memory_gb: see `ImageFolderData`.
        **options: arguments of `ImageDataModule`; `sampling` is for classes only.

    Raises:
        ValueError: the table or the folder does not exist, or an argument is out of range.
        UserError: in `setup`, if a column is missing, rows are wrong, or a group is in several of
            the given splits, so that the test would use data of the training.
    """

    def __init__(
        self,
        table: str | Path,
        images: str | Path | None = None,
        *,
        target: Literal["classes", "labels", "numbers"] = "classes",
        path_column: str | None = None,
        label_column: str | Sequence[str] | None = None,
        split_column: str | None = None,
        group_column: str | None = None,
        separator: str = "|",
        delimiter: str | None = None,
        skip_corrupt: bool = False,
        memory_gb: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        at_least(0, memory_gb=memory_gb)
        choice(("classes", "labels", "numbers"), target=target)
        if self.sampling is not None and target != "classes":
            raise ValueError(f"sampling: expected null with target={target}, got {self.sampling!r}")
        if not separator:
            raise ValueError("separator: expected the text between two labels, got ''")
        file = existing("table", table, folder=False)
        self.table = Table(file, delimiter)
        self.folder = file.parent if images is None else existing("images", images, folder=True)
        self.target = target
        self.path_column = path_column
        self.label_column = label_column
        self.split_column = split_column
        self.group_column = group_column
        self.separator = separator
        self.skip_corrupt = skip_corrupt
        self.memory_gb = memory_gb

    def default_augment(self) -> Augment:
        return shipped_augment("image_csv")

    def describe(self) -> dict[str, Any]:
        facts = super().describe()
        if self.target == "classes":
            return facts
        return {**facts, "target": self.target, "num_outputs": facts["num_classes"]}

    def load(self) -> tuple[Mapping[str, ImageSet], list[str]]:
        known = module_of(self).hparams.get("class_names") if self.testing else None
        rows, problems, columns = self._rows()
        learned = {n for row in rows if row.split == "train" or self.target != "classes"
                   for n in row.truth}  # fmt: skip
        names = list(known or columns or sorted(learned, key=_in_order))
        if not columns:
            whose = "train" if known is None else "the module"
            for row in rows:
                if unknown := [name for name in row.truth if name not in names]:
                    problems.append(f"{row.where}: {whose} has no label {unknown[0]!r}")
            rows = [row for row in rows if set(row.truth) <= set(names)]
        elif known and list(known) != columns:
            raise UserError(
                "data.label_column: expected the columns of the training, "
                f"{', '.join(known)[:80]}, "
                f"got {', '.join(columns)[:80]}"
            )
        self._report(problems, len(rows) + len(problems))
        self._check_groups(rows)
        splits = {split: [row for row in rows if row.split == split] for split in SPELLINGS}
        splits = {split: found for split, found in splits.items() if found}
        if self.testing and "test" in splits:
            splits = {"test": splits["test"]}
        if not splits or ("train" not in splits and not self.testing):
            raise UserError(f"data.table: no train images, only {', '.join(splits) or 'nothing'}")
        codes = {truth: code for code, truth in enumerate(dict.fromkeys(r.truth for r in rows))}
        if self.target == "classes":
            codes = {(name,): code for code, name in enumerate(names)}
        files = {
            split: Files([row.path for row in found], [codes[row.truth] for row in found])
            for split, found in splits.items()
        }
        groups = {group: code for code, group in enumerate(dict.fromkeys(r.group for r in rows))}
        sets = {}
        for split, (images, good) in read_splits(
            self, files, self.in_channels, self.kept_crop_area
        ).items():
            if self.target != "classes":
                truths = [row.truth for row in splits[split]]
                if not columns:
                    truths = [tuple(float(name in truth) for name in names) for truth in truths]
                images.labels = torch.tensor(truths)
            sets[split] = images.select(good)
            of_rows = torch.tensor([groups[row.group] for row in splits[split]])
            sets[split].groups = None if "" in groups else of_rows[good]  # type: ignore[attr-defined]
        if self.target == "classes" and known is None:
            left = set(sets["train"].labels.tolist())
            if empty := [name for label, name in enumerate(names) if label not in left]:
                raise UserError(
                    f"data.table: no image can be decoded in train of {', '.join(empty[:5])}"
                )
        return sets, names

    def _rows(self) -> tuple[list[_Row], list[str], list[str]]:
        """Return the valid rows, the problems of the others, and the names of the value columns."""
        path_at = self._column("path", _PATH)
        if path_at is None:
            raise self._none_called("path", _PATH)
        split_at, group_at = self._column("split", _SPLIT), self._column("group", _GROUP)
        lines = list(self.table.rows())
        at = self._label_places([path_at, split_at, group_at], lines)
        named = [self.table.header[place].strip() for place in at]
        is_listed = len(at) > 1 or not isinstance(self.label_column, str | None)
        in_columns = self.target == "numbers" or (self.target == "labels" and is_listed)
        columns = named if in_columns else []
        found: dict[str, _Row] = {}
        problems = []
        for where, line in lines:
            try:
                fields = [field.strip() for field in self.table.fields(where, line)]
                if wrong := fields and self.table.wrong_count(where, fields):
                    raise UserError(wrong)
                if not fields:
                    continue
                split = "train" if split_at is None else split_in(fields[split_at], where)
                path = os.path.normpath(self.folder / fields[path_at])
                if not fields[path_at]:
                    raise UserError(f"{where}: no {self.table.header[path_at].strip()}")
                if not os.path.isfile(path):
                    raise UserError(f"{where}: no such image: {path}")
                truth = self._truth([fields[n] for n in at], named, where, in_columns)
                group = "" if group_at is None else fields[group_at] or path
                row = _Row(where, path, split, group, truth)
                first = found.setdefault(path, row)
                if repr(first[2:]) != repr(row[2:]):  # repr, because NaN differs from NaN
                    raise UserError(
                        f"{where}: {path} has another label, split or group in "
                        f"{first.where.rpartition(', ')[2]}"
                    )
            except UserError as error:
                problems.append(str(error).removeprefix("data: "))
        return list(found.values()), problems, columns

    def _truth(
        self, cells: Sequence[str], named: Sequence[str], where: str, in_columns: bool
    ) -> tuple[Any, ...]:
        """Return the target of a row, from the cells of the label columns."""
        if self.target == "classes":
            if not cells[0]:
                raise UserError(f"{where}: no {named[0]}")
            return (cells[0],)
        if not in_columns:
            names = (name.strip() for name in cells[0].split(self.separator))
            return tuple(sorted({name for name in names if name}))
        found = []
        for cell, name in zip(cells, named, strict=True):
            value: float | None = None
            if self.target == "labels":
                value = math.nan if cell.lower() in _UNKNOWN else _ANSWERS.get(cell.lower())
            else:
                with suppress(ValueError):
                    value = float(cell) if math.isfinite(float(cell)) else None
            if value is None:
                expected = "0 or 1" if self.target == "labels" else "a number"
                raise UserError(f"{where}: expected {expected} in {name}, got {cell!r:.40}")
            found.append(value)
        return tuple(found)

    def _column(self, kind: str, guesses: Sequence[str]) -> int | None:
        """Return the place of the named column, or of one with a usual name; None: no column."""
        name = getattr(self, f"{kind}_column")
        if name is None:
            return self.table.guessed(guesses)
        return self.table.place(name) if name else None

    def _label_places(
        self, others: Sequence[int | None], lines: Sequence[tuple[str, str]]
    ) -> list[int]:
        asked = self.label_column
        if isinstance(asked, str):
            return [self.table.place(asked)]
        if asked:
            if self.target == "classes" and len(asked) > 1:
                raise UserError(
                    "data.label_column: several columns hold labels or numbers; level=image_values "
                    "data.target=labels learns them"
                )
            return [self.table.place(name) for name in asked]
        if (place := self.table.guessed(_LABEL)) is not None:
            return [place]
        left = [place for place in range(len(self.table.header)) if place not in others]
        if len(left) > 1 and self.target == "labels" and lines:
            first = self.table.fields(*lines[0])
            known = (*_ANSWERS, *_UNKNOWN)
            left = [n for n in left if n < len(first) and first[n].strip().lower() in known]
            if len(left) > 1:
                return left
        if len(left) != 1:
            raise self._none_called("label", _LABEL)
        return left

    def _none_called(self, kind: str, guesses: Sequence[str]) -> UserError:
        return UserError(
            f"data.{kind}_column: {self.table.path} has no column called {', '.join(guesses[:3])}, "
            f"only {', '.join(shortened(self.table.header, 8)) or 'an empty header'}\n"
            f"name it: data.{kind}_column=NAME"
        )

    def _report(self, problems: list[str], count: int) -> None:
        """Print the wrong rows; raise UserError unless `skip_corrupt` leaves them out."""
        for line in shortened(problems, MAX_NAMED):
            say_once(f"{'left out' if self.skip_corrupt else 'wrong'}: {line}")
        if problems and not self.skip_corrupt:
            rows = "1 row is wrong" if len(problems) == 1 else f"{len(problems)} rows are wrong"
            raise UserError(
                f"data.table: {rows} of {count:,}, such as\n{problems[0]}\n"
                "data.skip_corrupt=true leaves them out"
            )

    def _check_groups(self, rows: Sequence[_Row]) -> None:
        splits: dict[str, set[str]] = {}
        for row in rows:
            splits.setdefault(row.group, set()).add(row.split)
        if wrong := [name for name, found in splits.items() if name and len(found) > 1]:
            named = [f"{name} ({', '.join(sorted(splits[name]))})" for name in wrong]
            raise UserError(
                f"data.group_column: {len(wrong)} of {len(splits)} groups are in several splits: "
                f"{', '.join(shortened(named, 3))}\n"
                "a test would be of what was trained on; correct the column of splits, or leave it "
                "out with data.split_column=\"''\", or the groups with data.group_column=\"''\""
            )

    def _split_whole(self, train: ImageSet, fractions: Sequence[float]) -> list[Tensor]:
        """Split about these fractions off every class, label or tenth of the numbers, so that equal
        files, and files of a group, are on one side."""
        strata = self._strata(train.labels)
        groups: Tensor | None = getattr(train, "groups", None)
        equal = torch.tensor(self.first_of_equal)
        if len(equal) != len(train):
            equal = torch.arange(len(train))
        if groups is None and strata.ndim == 1 and len(equal.unique()) == len(train):
            return stratified_split(strata, fractions, self.seed)
        if strata.ndim == 1:
            strata = one_hot(strata)
        return grouped_split(_joined(groups, equal), strata, fractions, self.seed)

    def _strata(self, labels: Tensor) -> Tensor:
        """Return what the split is stratified by: a class per image, or which labels it has."""
        if self.target == "classes":
            return labels
        if self.target == "numbers":  # stratified by the first number
            return labels[:, 0].argsort().argsort() * _BINS // max(1, len(labels))
        has = labels == 1
        return torch.cat([has, ~has.any(dim=1, keepdim=True)], dim=1)


def _joined(groups: Tensor | None, equal: Tensor) -> Tensor:
    """Return groups in which groups that share a file with equal bytes are merged."""
    found = equal if groups is None else groups
    while groups is not None:
        least = torch.full_like(equal, len(groups)).scatter_reduce(0, equal, found, "amin")
        through_files = least[equal]
        lowest = torch.full_like(equal, len(groups)).scatter_reduce(
            0, groups, through_files, "amin"
        )
        after = lowest[groups]
        if torch.equal(after, found):
            break
        found = after
    return found


def _in_order(name: str) -> tuple[bool, int, str]:
    """Return a sort key: whole numbers by size, then names by letters."""
    is_number = name.isascii() and name.isdigit()
    return not is_number, int(name) if is_number else 0, name
