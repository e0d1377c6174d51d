"""How loggers count epochs: from 1, as people do; Lightning counts from 0."""

from collections.abc import Mapping
from typing import Any


def from_one(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics with the epoch as everything else names it: the first is 1.

    Those of a test have none: they are of the checkpoint that is tested.
    """
    counted = dict(metrics)
    if "epoch" in counted:
        if any(name.startswith("test/") for name in counted):
            del counted["epoch"]
        else:
            counted["epoch"] += 1
    return counted
