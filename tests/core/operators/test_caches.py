"""What Linux tells of caches, and what is taken where it tells nothing."""

import pytest

from attnkit.core.operators.cpu import USUAL, Caches, caches, read_caches

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
