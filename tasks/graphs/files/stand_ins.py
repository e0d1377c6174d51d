"""Detects placeholders of files that were not downloaded."""

from pathlib import Path

from attnkit.lightning.errors import UserError

_BEGINNINGS = {
    b"version https://git-lfs": "a Git LFS pointer, not the file itself; git lfs pull fetches it",
    b"<!doctype html": "a web page, not the file itself; download it again",
    b"<html": "a web page, not the file itself; download it again",
    b"<?xml": "an XML document, such as an error of a download, not the file itself",
}


def refuse_stand_in(path: Path) -> None:
    """Raise a `UserError` if a file is a Git LFS pointer or a page that was saved instead of it."""
    try:
        with path.open("rb") as file:
            start = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    for beginning, what in _BEGINNINGS.items():
        if start.startswith(beginning):
            raise UserError(f"{path}: is {what}")
