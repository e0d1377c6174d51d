"""Ranks that torchrun or srun has started: each checks the command line, rank 0 decides and writes.

Through a store that all ranks reach, rank 0 sends the folder of each run when the run begins, and
finally the exit code with which all ranks end.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

from attnkit.lightning.errors import UserError

_TORCHRUN = "TORCHELASTIC_RUN_ID"
# Variables that give a process its rank. They are removed for ranks that attnkit starts itself.
VARIABLES = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS"),
)
_POLL = 0.2
_ARRIVAL = 600.0  # seconds that the other ranks wait for rank 0 to start
_GOODBYE = 10.0  # seconds that rank 0 waits for the others to receive the exit code


@dataclass
class Launcher:
    """The program that started this process as one of several ranks."""

    name: str
    rank: int
    world: int
    job: Any = None
    """The job of the command line, in all ranks except rank 0."""
    _count: int = 0

    def check(self, trainer: Any) -> None:
        """Refuse a trainer for another number of processes, which would wait forever."""
        wanted = trainer.num_devices * trainer.num_nodes
        if wanted != self.world:
            raise UserError(
                f"trainer: {trainer.num_devices} devices × {trainer.num_nodes} nodes, but "
                f"{self.name} has started {self.world} processes\n"
                "  trainer.devices=N is per node; trainer=cpu_ddp, ddp or fsdp takes several"
            )

    def tell(self, **message: Any) -> None:
        """Send rank 0's message: `run_dir` and `log` of the next run, or `exit` with its code."""
        self._store.set(f"{self._count}", json.dumps(message))
        self._count += 1

    def hear(self, patience: float = math.inf) -> dict[str, Any]:
        """Return the next message of rank 0; an empty dict after `patience` seconds.

        If rank 0 has ended without a message, the result is exit code 1.
        """
        last = time.monotonic() + patience
        try:
            while not self._store.check([f"{self._count}"]):  # not wait(): signals must get through
                if time.monotonic() > last:
                    return {}
                time.sleep(_POLL)
            message = json.loads(self._store.get(f"{self._count}"))
            self._count += 1
            self._store.add("heard", 1)
            return message
        except RuntimeError:
            return {"exit": 1}

    def dismiss(self, code: int) -> None:
        """Send rank 0's exit code, and keep the store alive until the others have received it."""
        if code == 0:
            leave_group()
        try:
            self.tell(exit=code)
            last = time.monotonic() + _GOODBYE
            while self._store.add("heard", 0) < self._count * (self.world - 1):
                if time.monotonic() > last:
                    return
                time.sleep(_POLL)
        except RuntimeError:
            pass  # the store is gone, and with it the other ranks

    @cached_property
    def _store(self) -> Any:
        from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
        from torch.distributed import PrefixStore, TCPStore

        started = TorchElasticEnvironment() if self.name == "torchrun" else SLURMEnvironment()
        at = started.main_address, started.main_port
        # torchrun may serve a store at this address itself; ours also serves the process group
        master = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        last = time.monotonic() + _ARRIVAL
        while not master and not _answers(at):
            if time.monotonic() > last:
                raise RuntimeError(f"rank 0 did not start within {_ARRIVAL:.0f} s")
            time.sleep(_POLL)
        hour = timedelta(hours=1)
        store = TCPStore(*at, None, master, hour, wait_for_workers=False, multi_tenant=True)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"attnkit/{attempt}", store)


def launched() -> Launcher | None:
    """Return the launcher of this process; None if a person or a script has started it.

    srun sets the number of a job step. A batch script and an interactive allocation have none,
    although they have the number of tasks that srun would start. Other variables of launchers are
    removed, since Lightning would wait for ranks that never start.
    """
    given = os.environ
    if _TORCHRUN in given:
        return Launcher("torchrun", int(given["RANK"]), int(given["WORLD_SIZE"]))
    tasks = int(given.get("SLURM_NTASKS", "1"))
    is_job = given.get("SLURM_JOB_NAME") not in ("bash", "interactive")  # as Lightning has it
    if tasks > 1 and "SLURM_PROCID" in given and is_job:
        if "SLURM_STEP_ID" in given:
            return Launcher("srun", int(given["SLURM_PROCID"]), tasks)
        print(
            f"this is one process, but SLURM's job has {tasks} tasks; srun attnkit … starts all",
            file=sys.stderr,
        )
    for name in VARIABLES:
        given.pop(name, None)
    return None


def leave_group() -> None:
    """Destroy the process group after a successful run, since gloo's threads can abort at exit."""
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _answers(at: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(at, timeout=5):
            return True
    except OSError:
        return False
