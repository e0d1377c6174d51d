"""Dropout against torch's, tasks in threads of our own, and what Linux tells of caches."""

import os
import random
import signal
import threading
import time

import pytest
import torch

from attnkit.core.operators.cpu import (
    USUAL,
    Caches,
    caches,
    dropout,
    keep_mask,
    read_caches,
    run_tasks,
)


@pytest.mark.parametrize("p", [1e-4, 0.3, 0.6, 0.999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_keeps_the_right_share_and_scales_it(p, dtype):
    count = 200_001
    kept = keep_mask(torch.empty(count, dtype=dtype), p)
    assert kept.dtype == dtype
    assert set(kept.unique().tolist()) == {0.0, float(torch.tensor(1 / (1 - p), dtype=dtype))}
    share, deviation = (kept != 0).double().mean().item(), (p * (1 - p) / count) ** 0.5
    assert abs(share - (1 - p)) < 5 * deviation


def test_neighbours_are_drawn_apart():
    # numbers are drawn by twos from one of 64 bits
    kept = (keep_mask(torch.empty(400_000), 0.5) != 0).double().view(-1, 2)
    both = kept.prod(dim=1).mean().item()
    assert abs(both - 0.25) < 5 * (0.25 * 0.75 / 200_000) ** 0.5


def test_a_generator_gives_the_same_again():
    like = torch.empty(7, 11)
    draws = [keep_mask(like, 0.5, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*draws)
    torch.manual_seed(5)
    first = keep_mask(like, 0.5)
    torch.manual_seed(5)
    assert torch.equal(first, keep_mask(like, 0.5))
    assert not torch.equal(first, keep_mask(like, 0.5))


def test_gradient_is_of_what_was_kept():
    x = torch.randn(50, 3, requires_grad=True)
    output = dropout(x, 0.5)
    output.sum().backward()
    torch.testing.assert_close(x.grad * x, output)


def test_inside_of_transforms_it_is_torchs():
    torch.manual_seed(0)
    x = torch.randn(4, 9)
    output = torch.vmap(lambda row: dropout(row, 0.5), randomness="different")(x)
    assert ((output == 0) | torch.isclose(output, 2 * x)).all()
    assert torch.equal(dropout(x, 0.0), x)
    assert torch.equal(dropout(x, 1.0), torch.zeros_like(x))


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_torch_computes_with_one_thread_in_a_task(three_threads):
    """Also in a thread where an earlier task changed the number."""
    seen = {}

    def change():
        torch.set_num_threads(3)
        time.sleep(0.02)

    def task():
        seen.setdefault(threading.current_thread(), set()).add(torch.get_num_threads())
        time.sleep(0.02)

    run_tasks([change] * 12)
    run_tasks([task] * 12)
    assert len(seen) == 3
    assert set.union(*seen.values()) == {1}
    assert torch.get_num_threads() == 3


def test_what_tasks_return_is_called_in_their_order(three_threads):
    generator, order = random.Random(0), []
    waits = [generator.random() / 200 for _ in range(60)]

    def task(index):
        time.sleep(waits[index])
        return None if index % 7 == 0 else lambda: order.append(index)

    run_tasks([lambda index=index: task(index) for index in range(60)])
    assert order == [index for index in range(60) if index % 7]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_tasks_in_a_forked_process(three_threads):
    """Threads are not there after a fork: the child starts its own."""

    def count():
        found = set()

        def task():
            found.add(threading.current_thread().name)
            time.sleep(0.02)

        run_tasks([task] * 12)
        return len(found)

    assert count() == 3
    child = os.fork()
    if child == 0:
        signal.alarm(100)  # which ends a child that waits for threads it does not have
        os._exit(count())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_a_task_that_fails_is_told():
    def fail():
        raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        run_tasks([lambda: None] * 5 + [fail] + [lambda: None] * 5)


def test_tasks_fill_tensors_of_inference(three_threads):
    # a test of Lightning's runs in inference mode, whose tensors no other thread could change
    both_work = threading.Barrier(2, timeout=30)
    with torch.inference_mode():
        made = torch.zeros(2)

        def task(place):
            both_work.wait()  # so that each has a thread of its own
            made[place] = 1

        run_tasks([lambda: task(0), lambda: task(1)])
    assert made.tolist() == [1, 1]


SERVER = {1: ("32K", "0"), 2: ("512K", "0"), 3: ("8192K", "0-3")}
TWO_THREADS = {1: ("48K", "0,64"), 2: ("2048K", "0,64"), 3: ("107520K", "0-63,64-127")}
CLUSTER = {1: ("64K", "0"), 2: ("4096K", "0-3"), 3: ("24M", "0-7")}
NO_THIRD = {1: ("32K", "0"), 2: ("1024K", "0-3")}


def processor(folder, levels, siblings):
    (folder / "topology").mkdir()
    (folder / "topology/thread_siblings_list").write_text(f"{siblings}\n")
    for place, (level, (size, shared)) in enumerate(sorted(levels.items())):
        index = folder / f"cache/index{place}"
        index.mkdir(parents=True)
        told = {"level": level, "type": "Unified", "size": size, "shared_cpu_list": shared}
        for name, value in told.items():
            (index / name).write_text(f"{value}\n")
    return folder


@pytest.mark.parametrize(
    ("levels", "siblings", "expected"),
    [
        (SERVER, "0", Caches(2**19, 2**23)),
        (TWO_THREADS, "0,64", Caches(2**21, 105 * 2**20)),
        (CLUSTER, "0", Caches(2**20, 24 * 2**20)),
        (NO_THIRD, "0", Caches(2**18, 2**20)),
    ],
)
def test_what_is_told(levels, siblings, expected, tmp_path):
    assert read_caches(processor(tmp_path, levels, siblings)) == expected


def test_instructions_are_not_counted(tmp_path):
    folder = processor(tmp_path, SERVER | {4: ("64M", "0-7")}, "0")
    (folder / "cache/index3/type").write_text("Instruction\n")
    assert read_caches(folder).last == 2**23


@pytest.mark.parametrize("broken", ["size", "shared_cpu_list", "level"])
def test_what_is_not_told_is_the_usual(broken, tmp_path):
    assert read_caches(tmp_path / "nowhere") == USUAL
    folder = processor(tmp_path, SERVER, "0")
    (folder / "cache/index1" / broken).write_text("\n")
    assert read_caches(folder) == USUAL


def test_this_machine_has_some():
    assert 0 < caches().core < caches().last
