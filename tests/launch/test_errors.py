"""What a command says at its end of errors that hide what they come from."""

import multiprocessing.synchronize

import pytest

from attnkit.launch.errors import summary

SHARED = "  make /dev/shm larger (docker run --shm-size=8g), or data.num_workers=0"
MEMORY = "  the system kills processes that take too much memory; fewer workers take less"
IN_WORKER = "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most …):\n"


@pytest.mark.parametrize(
    ("text", "said", "advice"),
    [
        (
            "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that "
            "dataloader's workers are out of shared memory. Please try to raise your shared "
            "memory limit.",
            "DataLoader worker (pid 7) is killed by signal: Bus error: shared memory is full",
            SHARED,
        ),
        (
            f"{IN_WORKER}RuntimeError: unable to allocate shared memory(shm) for file "
            "</torch_2_9_5>: No space left on device (28)",
            "a DataLoader worker can't send a batch: shared memory is full",
            SHARED,
        ),
        (
            f"{IN_WORKER}RuntimeError: unable to write to file </torch_2_9_5>: No space left on "
            "device (28)",
            "a DataLoader worker can't send a batch: shared memory is full",
            SHARED,
        ),
        (
            "DataLoader worker (pid 7) is killed by signal: Killed. ",
            "DataLoader worker (pid 7) is killed by signal: Killed",
            MEMORY,
        ),
        (
            "DataLoader worker (pid(s) 5, 6) exited unexpectedly",
            "DataLoader worker (pid(s) 5, 6) exited unexpectedly",
            MEMORY,
        ),
    ],
)
def test_a_worker_that_died(text, said, advice):
    assert summary(RuntimeError(text)).splitlines() == [said, advice]


def test_no_room_for_the_queues_of_workers(monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(multiprocessing.synchronize._multiprocessing, "SemLock", full)
    with pytest.raises(OSError, match="No space left") as caught:
        multiprocessing.Queue()
    assert summary(caught.value).splitlines()[1] == SHARED
