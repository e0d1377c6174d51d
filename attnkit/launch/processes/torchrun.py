"""Ranks that torchrun or srun has started: rank 0 decides and writes, the others follow it.

Only rank 0 composes. It tells the others, through a store they all reach, which written
configuration to run next, and at last the exit code to end with.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from attnkit.lightning.errors import UserError

_TORCHRUN = "TORCHELASTIC_RUN_ID"
_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
# What tells a process its rank; wrong for, or in the way of, ranks that attnkit starts itself.
VARIABLES = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS"),
)
_POLL = 0.2
_ARRIVAL = 600.0  # seconds the others wait for rank 0 to be there at all
_GOODBYE = 10.0  # seconds rank 0 waits for the others to hear how it ended
_PORT_STEP = 10_000  # from Lightning's port to ours, past those of jobs with the next numbers


@dataclass
class Launcher:
    """Who started this process as one of several ranks."""

    name: str
    rank: int
    world: int

    def __post_init__(self) -> None:
        self._store: Any = None
        self._count = 0

    def check(self, trainer: Any) -> None:
        """A trainer for another number of processes would train apart, or wait for ever."""
        wanted = trainer.num_devices * trainer.num_nodes
        if wanted != self.world:
            raise UserError(
                f"trainer: {trainer.num_devices} devices × {trainer.num_nodes} nodes, but "
                f"{self.name} has started {self.world} processes\n"
                "  trainer.devices=N is per node; trainer=cpu_ddp, ddp or fsdp takes several"
            )

    def tell(self, **message: Any) -> None:
        """Rank 0: what the others do next."""
        self._connect().set(f"{self._count}", json.dumps(message))
        self._count += 1

    def dismiss(self, code: int) -> None:
        """Rank 0: the others end with this code; wait until they have heard it."""
        if code == 0:
            leave_group()
        try:
            self.tell(exit=code)
            last = time.monotonic() + _GOODBYE
            heard = [f"heard/{rank}" for rank in range(1, self.world)]
            while not self._store.check(heard) and time.monotonic() < last:
                time.sleep(_POLL)
        except RuntimeError:
            pass  # the store has gone, and with it everyone who would listen

    def next(self) -> dict[str, Any]:
        """The others: what rank 0 says; when it has gone without a word, that it failed."""
        try:
            store = self._connect()
            while not store.check([f"{self._count}"]):  # not wait(): signals must get through
                time.sleep(_POLL)
            message = json.loads(store.get(f"{self._count}"))
            self._count += 1
            if "exit" in message:
                store.set(f"heard/{self.rank}", "")
            return message
        except RuntimeError:
            return {"exit": 1}

    def ending(self) -> int | None:
        """The others, when something went wrong: the code rank 0 ends with, if it says one soon."""
        last = time.monotonic() + _GOODBYE / 2
        try:
            while time.monotonic() < last:
                if self._connect().check([f"{self._count}"]):
                    return self.next().get("exit")
                time.sleep(_POLL)
        except RuntimeError:
            pass
        return None

    def _connect(self) -> Any:
        if self._store is None:
            from torch.distributed import PrefixStore, TCPStore

            address, port, hosted = self._address()
            master = self.rank == 0 and not hosted
            last = time.monotonic() + _ARRIVAL
            while not master and not _answers(address, port):
                if time.monotonic() > last:
                    raise RuntimeError(f"rank 0 has not come within {_ARRIVAL:.0f} s")
                time.sleep(_POLL)
            store = TCPStore(
                address, port, is_master=master, wait_for_workers=False, timeout=timedelta(hours=1)
            )
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            self._store = PrefixStore(f"attnkit/{attempt}", store)
        return self._store

    def _address(self) -> tuple[str, int, bool]:
        """Where the store is, and whether torchrun holds it already."""
        if self.name == "torchrun":
            from lightning.fabric.plugins.environments import TorchElasticEnvironment

            found: Any = TorchElasticEnvironment()
        else:
            from lightning.fabric.plugins.environments import SLURMEnvironment

            found = SLURMEnvironment()
        address, port = found.main_address, found.main_port
        if os.environ.get(_AGENT) == "True":
            return address, port, True
        return address, port + (_PORT_STEP if port + _PORT_STEP < 2**16 else -_PORT_STEP), False


def launched() -> Launcher | None:
    """The launcher of this process; None where a person or a script has started it.

    As Lightning tells them apart, so that both agree: an interactive allocation is none. Variables
    that somebody left behind are removed, or Lightning would wait for ranks that never come.
    """
    given = os.environ
    if _TORCHRUN in given:
        return Launcher("torchrun", int(given["RANK"]), int(given["WORLD_SIZE"]))
    if (
        int(given.get("SLURM_NTASKS", "1")) > 1
        and "SLURM_PROCID" in given
        and given.get("SLURM_JOB_NAME") not in ("bash", "interactive")
    ):
        return Launcher("srun", int(given["SLURM_PROCID"]), int(given["SLURM_NTASKS"]))
    for name in VARIABLES:
        given.pop(name, None)
    return None


def leave_group() -> None:
    """After a run that went well. A thread of gloo's that outlives Python can abort the process."""
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _answers(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=5):
            return True
    except OSError:
        return False
