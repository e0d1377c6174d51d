"""Out of memory in training: half the batch and twice the accumulation, from the last checkpoint.

The effective batch stays as it was, and with it the number of optimizer steps and the schedule. A
batch norm sees the smaller batches.
"""

from collections.abc import Mapping
from typing import Any

from attnkit.lightning.errors import RunError

MOST = 3
RETRIES = "oom_retries"  # in results.json

# Arguments of the trainer that count batches, where they are whole numbers.
_BATCHES = (
    "limit_batches",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "overfit_batches",
    "val_check_interval",
)


class OutOfMemory(RunError):
    """Training ran out of memory; the message is the allocator's first line."""


def wanted(config: Mapping[str, Any]) -> bool:
    """Whether a run is to be tried again, `trainer.oom_retry`."""
    return config["run"] == "train" and (config.get("trainer") or {}).get("oom_retry", True)


def smaller(config: Mapping[str, Any], tries: int, why: str) -> tuple[dict[str, Any], str]:
    """The configuration with half the batch, and in words what it changes.

    An odd batch is rounded down, so that the effective batch is a little smaller.

    Args:
        tries: how often the batch was halved before.
        why: what the allocator said.

    Raises:
        RunError: there is nothing to halve, or it did not help `MOST` times.
    """
    data, trainer = dict(config.get("data") or {}), dict(config.get("trainer") or {})
    batch, accumulated = data.get("batch_size"), trainer.get("accumulate_grad_batches") or 1
    if type(batch) is not int:
        what = "this data has no data.batch_size" if "batch_size" not in data else (
            f"data.batch_size={'null' if batch is None else batch}"
        )  # fmt: skip
        raise RunError(f"out of memory, and no batch to halve: {what}\n  {why}")
    if tries >= MOST or batch < 2:
        halved = f", halved {tries} times" if tries else ""
        raise RunError(
            f"out of memory with batches of {batch}{halved}\n  {why}\n"
            "  a smaller model or input takes less"
        )
    data["batch_size"] = batch // 2
    trainer["accumulate_grad_batches"] = 2 * accumulated
    trainer |= {k: 2 * trainer[k] for k in _BATCHES if type(trainer.get(k)) is int}
    said = (
        f"out of memory with batches of {batch}: again with {batch // 2}, "
        f"{2 * accumulated} to a step (trainer.oom_retry=false: not)"
    )
    if batch % 2:
        said += f"; a step has {batch // 2 * 2 * accumulated} instead of {batch * accumulated}"
    return {**config, "data": data, "trainer": trainer}, said
