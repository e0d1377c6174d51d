"""`backend="auto"` obeys what was found and measured on this machine, and nothing else."""

import itertools
import json
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support import compiling_is_exporting
from torch._dynamo.testing import EagerAndRecordGraphs

import attnkit
from attnkit import Causal, Dense, Edges, Packed, Padding, Window, attend
from attnkit.core.inputs import check_inputs
from attnkit.core.kernels import ledger
from attnkit.core.kernels.choose import BACKENDS, UnsupportedError
from attnkit.core.kernels.ledger import LedgerError, Timed, Wrong, kind_of, size_of

DAY = "2026-11-26"
MASKS = {
    "none": None,
    "causal": Causal(),
    "both": Causal() & Padding(torch.tensor([5, 3])),
    "window": Window(2, 2),
    "dense": Dense(torch.ones(7, 7).tril().bool()),
}


@pytest.fixture
def file(tmp_path):
    """The ledger's file, which is not there yet."""
    path = tmp_path / "deep" / "ledger.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNKIT_LEDGER", str(path))
        ledger.reload()
        yield path
    ledger.reload()


def tensors(dtype=torch.float32, size=(2, 2, 7, 8)):
    return [torch.randn(size, dtype=dtype) for _ in range(3)]


def wrong(kernel, *kind, what="causality", seen="output 5 sees key 9"):
    return Wrong(kernel, frozenset(kind), what, seen, DAY)


def timed(inputs, **seconds):
    return Timed(kind_of(inputs), size_of(inputs), seconds, DAY)


def chosen(*args, **options):
    return attnkit.explain_backends(*args, **options).chosen


def ran(call):
    with attnkit.record_backends() as record:
        call()
    return dict(record.total())


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("trains", [False, True], ids=["", "gradient"])
def test_a_finding_holds_for_every_attention_that_contains_its_kind(file, name, dtype, trains):
    inputs = [tensor.requires_grad_(trains) for tensor in tensors(dtype)]
    features = ["Causal", "Padding", "float32", "gradient"]
    has = {
        "float32": dtype == torch.float32,
        "Causal": name in ("causal", "both"),
        "Padding": name == "both",
        "gradient": trains,
    }
    assert ran(lambda: attend(*inputs, mask=MASKS[name])) == {"flash": 1}
    for kind in (kind for n in range(4) for kind in itertools.combinations(features, n)):
        file.unlink(missing_ok=True)
        ledger.record("cpu", found=[wrong("flash", *kind)])
        forced = ran(lambda: attend(*inputs, mask=MASKS[name], backend="flash"))
        assert forced == {"flash": 1}
        expected = "blockwise" if all(map(has.get, kind)) else "flash"
        assert ran(lambda: attend(*inputs, mask=MASKS[name])) == {expected: 1}, kind


def test_the_reference_is_taken_where_all_others_are_wrong(file):
    ledger.record("cpu", found=[wrong(kernel.name) for kernel in BACKENDS])
    for mask in MASKS.values():
        assert chosen(*tensors(), mask=mask) == "reference"
    assert chosen(*tensors(), normalizer="linear") == "reference"
    with pytest.raises(UnsupportedError, match=r"no backend can serve .*hard was found wrong here"):
        attend(*tensors(), normalizer=attnkit.Hard("score_function"))
    forced = attend(*tensors(), normalizer=attnkit.Hard("score_function"), backend="hard")
    assert forced.isfinite().all()


def test_a_kernel_that_was_looked_at_again_and_is_right_is_taken_again(file):
    kind = frozenset({"float32", "Causal"})
    ledger.record("cpu", found=[wrong("flash", *kind), wrong("blockwise", *kind)])
    assert chosen(*tensors(), mask=Causal()) == "math"
    ledger.record("cpu", checked=[("flash", frozenset({"float32"}))])  # another kind
    assert chosen(*tensors(), mask=Causal()) == "math"
    ledger.record("cpu", checked=[("flash", kind)])
    assert chosen(*tensors(), mask=Causal()) == "flash"
    assert [w.kernel for w in ledger.known_of("cpu").found] == ["blockwise"]
    ledger.record("cpu", found=[wrong("blockwise", *kind, what="padding")])  # replaces
    assert [w.what for w in ledger.known_of("cpu").found] == ["padding"]


def test_what_was_measured_faster_is_preferred(file):
    query = tensors()
    inputs = check_inputs(*query, mask=Causal())
    cases = [
        ({"flash": 2e-3, "math": 1.2e-3, "blockwise": 1.5e-3}, "math"),
        ({"flash": 1.04, "math": 1.0}, "flash"),  # by noise
        ({"flash": 1.06, "math": 1.0}, "math"),
        ({"math": 1e-9, "blockwise": 1.0}, "flash"),  # which was not measured
        ({"flash": 1.0, "flex": 0.1, "nonsense": 0.2, "reference": 0.3}, "reference"),
        ({"flash": 1.0, "block_sparse": 0.5}, "block_sparse"),  # it pays by the measure
        ({}, "flash"),
    ]
    for seconds, expected in cases:
        ledger.record("cpu", times=[timed(inputs, **seconds)])
        assert chosen(*query, mask=Causal()) == expected, seconds
        assert ran(lambda: attend(*query, mask=Causal())) == {expected: 1}
        assert chosen(*query) == "flash"  # another kind
        assert chosen(*tensors(size=(2, 2, 9, 8)), mask=Causal()) == "flash"  # another size
        with torch.enable_grad():
            query[0].requires_grad_()
            assert chosen(*query, mask=Causal()) == "flash"
            query[0].requires_grad_(False)
    ledger.record(
        "cpu", found=[wrong("math")], times=[timed(inputs, flash=3.0, math=1.0, blockwise=2.0)]
    )
    assert chosen(*query, mask=Causal()) == "blockwise"
    assert not attnkit.explain_backends(*query, mask=Causal()).reasons["math"]


def test_plain_attention_obeys(file):
    """It goes to torch's function without a choice, unless the ledger has something against it."""
    query = tensors()
    assert ran(lambda: attend(*query)) == {"flash": 1}
    assert ledger.keeps_plain_flash
    other = check_inputs(*query, mask=Causal())
    for entries, kept in [
        ({"found": [wrong("flash", "float32", "Causal")]}, True),
        ({"found": [wrong("flash", "bfloat16")]}, True),
        ({"times": [timed(other, flash=2.0, math=1.0)]}, True),
        ({"times": [timed(check_inputs(*query), flash=1.0, math=2.0)]}, True),
        ({"times": [timed(check_inputs(*query), flash=2.0, math=1.0)]}, False),
        ({"found": [wrong("flash", "float32")]}, False),
        ({"found": [wrong("flash", "float32", "gradient")]}, False),
        ({"found": [wrong("flash")]}, False),
    ]:
        file.unlink(missing_ok=True)
        ledger.record("cpu", **entries)
        assert not ledger.keeps_plain_flash  # nothing is read yet
        expected = chosen(*query)
        assert ran(lambda: attend(*query)) == {expected: 1}
        assert ledger.keeps_plain_flash == kept, entries
        if kept:
            assert expected == "flash"


def test_the_explanation_gives_the_reason_with_its_date(file):
    query = tensors()
    ledger.record(
        "cpu",
        found=[wrong("flash", "Causal", "float32", seen="output 5\n sees key 9")],
        times=[timed(check_inputs(*query), flash=2e-3, math=1.2e-3)],
    )
    lines = dict(
        line.split(maxsplit=1)
        for line in str(attnkit.explain_backends(*query, mask=Causal())).splitlines()
    )
    assert lines["flash"] == (
        f"found wrong here on {DAY} for Causal, float32: causality, output 5 sees key 9 "
        "(attnkit doctor)"
    )
    assert (lines["blockwise"], lines["math"]) == ("chosen", "can")
    explained = attnkit.explain_backends(*query)
    lines = dict(line.split(maxsplit=1) for line in str(explained).splitlines())
    assert lines["math"] == (f"chosen: measured fastest here on {DAY}, 1.2 ms against 2 ms (flash)")
    assert (lines["flash"], explained.chosen, list(explained.remarks)) == ("can", "math", ["math"])
    with pytest.raises(UnsupportedError, match="has no dropout"):
        attend(*query, mask=Causal(), dropout_p=0.1, backend="flash")
    lines = str(attnkit.explain_backends(*query, mask=Causal(), dropout_p=0.1))
    assert "flash         has no dropout, got dropout_p=0.1\n" in lines


def test_kinds():
    query = tensors()
    gradient = [tensor.requires_grad_() for tensor in tensors(torch.float64)]
    grouped = [query[0], query[1][:, :1], query[2][:, :1]]
    edges = Edges(torch.tensor([[0, 1], [1, 2]]), 7)
    bias, learned = torch.zeros(7, 7), torch.zeros(7, 7, requires_grad=True)
    for given, options, expected in [
        (query, {}, ""),
        (gradient, {}, "gradient float64"),
        (grouped, {"mask": Causal()}, "Causal grouped"),
        (query, {"mask": Causal() & Padding(torch.tensor([5, 3]))}, "Causal Padding"),
        (query, {"mask": Causal() | edges}, "Or"),
        (query, {"mask": bias.bool()}, "Dense"),
        (query, {"bias": bias, "dropout_p": 0.1}, "bias dropout"),
        (query, {"bias": learned, "sink": torch.zeros(2)}, "bias gradient sink"),
        (query, {"score": attnkit.Cosine(1.0, softcap=2.0)}, "Cosine softcap"),
        (query, {"normalizer": "linear"}, "Linear"),
        (
            query,
            {"mask": edges, "edge_features": attnkit.EdgeFeatures(bias=torch.zeros(2, 2))},
            "Edges edge_features",
        ),
    ]:
        kind = kind_of(check_inputs(*given, **options))
        assert kind == {*expected.split()} | ({"float32"} if "float64" not in expected else set())
    with torch.no_grad():
        assert kind_of(check_inputs(*gradient)) == {"float64"}


def test_sizes(monkeypatch):
    query, threads = tensors(size=(3, 5, 100, 11)), 3
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    edges = Edges(torch.zeros(2, 700, dtype=torch.long), 100)
    for mask, expected in {
        None: 128,
        Causal(): 128,
        Window(3, 5): 16,
        Window(5, None): 128,
        Packed(torch.tensor([30, 30, 40])): 64,
        Packed(torch.tensor([30, 30, 40])) & Window(4, 0): 8,
        edges: 8,
        Edges(torch.zeros(2, 0, dtype=torch.long), 100): 1,
    }.items():
        size = size_of(check_inputs(*query, mask=mask))
        assert size == (256, 128, 128, expected, threads), mask
    few = size_of(check_inputs(query[0][:, :, :1], *query[1:]))
    assert few == (256, 1, 128, 128, threads)
    for mask in (Padding(torch.tensor([5, 6, 7])), Dense(torch.ones(100, 100).bool()), ~Causal()):
        assert size_of(check_inputs(*query, mask=mask)) is None
    for size in [(1, 1, 64, 64), (1, 2, 65, 64), (4, 1, 1, 64), (1, 4, 128, 65)]:
        width, queries, keys, seen, _ = size_of(check_inputs(*tensors(size=size)))
        numbers = size[0] * size[1] * size[3]
        assert numbers <= width < 4 * numbers
        assert size[2] <= queries == keys == seen < 2 * size[2]


def test_the_file_is_as_it_is_said(file):
    inputs = check_inputs(*tensors(), mask=Causal())
    assert ledger.record("cpu", found=[wrong("flash", "float32", "Causal")]) == file
    ledger.record("cpu", times=[timed(inputs, flash=0.0012, math=1)])
    read = json.loads(file.read_text())
    (key,) = read["machines"]
    assert torch.__version__ in key
    assert attnkit.__version__ in key
    entry = {"kind": ["Causal", "float32"], "date": DAY}
    found = {"kernel": "flash", "what": "causality", "seen": "output 5 sees key 9"}
    size = [64, 8, 8, 8, torch.get_num_threads()]
    times = {"size": size, "seconds": {"flash": 0.0012, "math": 1}}
    machine = {"found": [found | entry], "times": [times | entry]}
    assert read == {"attnkit ledger": 1, "machines": {key: machine}}
    assert [*file.parent.iterdir()] == [file]
    (kept,) = ledger.known_of("cpu").times.values()
    assert kept == timed(inputs, flash=0.0012, math=1.0)


def test_other_devices_and_versions_do_not_count(file, monkeypatch):
    ledger.record("cpu", found=[wrong("flash")])
    assert chosen(*tensors()) == "blockwise"
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    ledger.reload()
    assert chosen(*tensors()) == "flash"
    assert ran(lambda: attend(*tensors())) == {"flash": 1}
    ledger.record("cpu", found=[wrong("blockwise")])
    assert len(json.loads(file.read_text())["machines"]) == 2
    monkeypatch.undo()
    ledger.reload()
    assert chosen(*tensors()) == "blockwise"


def test_a_gpu_is_told_by_its_name(file, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Made {device.index}")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    assert ledger.machine("cuda:1").startswith("Made 1, cuDNN 91002, attnkit ")
    ledger.record("cuda:1", found=[wrong("flash")])
    assert not ledger.known_of("cpu").found
    assert not ledger.known_of("cuda:0").found
    assert ledger.known_of(torch.device("cuda", 1)).found


def test_where_the_file_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for given, expected in [
        ("OFF", None),
        (str(tmp_path / "a.json"), tmp_path / "a.json"),
        ("~/a.json", tmp_path / "home" / "a.json"),
        ("", tmp_path / "cache" / "attnkit" / "ledger.json"),
    ]:
        monkeypatch.setenv("ATTNKIT_LEDGER", given)
        assert ledger.path() == expected
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert ledger.path() == tmp_path / "home" / ".cache" / "attnkit" / "ledger.json"

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert ledger.path() is None
    ledger.reload()
    assert ran(lambda: attend(*tensors())) == {"flash": 1}
    monkeypatch.undo()
    ledger.reload()


def test_off_reads_and_writes_nothing(file, monkeypatch):
    ledger.record("cpu", found=[wrong("flash")])
    before = file.read_bytes()
    monkeypatch.setenv("ATTNKIT_LEDGER", "off")
    ledger.reload()
    assert chosen(*tensors()) == "flash"
    with pytest.raises(LedgerError, match="set ATTNKIT_LEDGER to a file, not to off") as error:
        ledger.record("cpu", found=[wrong("flash")])
    assert "\n" not in str(error.value)
    assert file.read_bytes() == before


def damaged(text):
    """Texts that a ledger may have become, most of them no ledger any more."""
    yield from (text[:end] for end in range(0, len(text), len(text) // 12))
    yield from (text[:at] + "\x00" + text[at + 1 :] for at in range(5, len(text), len(text) // 7))
    yield from ("null", "[]", "{}", '"text"', "1", "NaN", "[" * 100_000, "9" * 10_000, "\ufeff{}")

    def places(value):
        """Each dict and list in a value, with its keys."""
        keys = [*value] if isinstance(value, dict) else [*range(len(value))]
        for key in keys:
            yield value, key
            if isinstance(value[key], dict | list):
                yield from places(value[key])

    whole = json.loads(text)
    for inside, key in [*places(whole)]:
        before = inside[key]
        for other in (None, 7, "text", [], {}, [[]], float("nan")):
            inside[key] = other
            yield json.dumps(whole)
        inside[key] = before


def test_what_is_damaged_is_ignored_with_a_line(file):
    query = tensors()
    inputs = check_inputs(*query)
    ledger.record(
        "cpu", found=[wrong("flash", "float32")], times=[timed(inputs, flash=1.0, math=0.5)]
    )
    text, ignored = file.read_text(), 0
    for broken in damaged(text):
        file.write_text(broken)
        ledger.reload()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outputs = [attend(*query, mask=mask) for mask in (None, Causal(), None)]
            explained = str(attnkit.explain_backends(*query))
        assert all(output.isfinite().all() for output in outputs)
        assert len(caught) <= 1
        for warning in caught:
            ignored += 1
            message = str(warning.message)
            assert message.startswith(f"{file}: is not a ledger of this attnkit, and is ignored")
            assert "delete it, or set ATTNKIT_LEDGER" in message
            assert "\n" not in message
            assert "found wrong" not in explained
            with pytest.raises(LedgerError, match=r"is not a ledger.*; delete it, or set") as error:
                ledger.record("cpu", found=[wrong("flash")])
            assert "\n" not in str(error.value)
            assert file.read_text() == broken  # it may be anybody's
    assert ignored > 80
    file.write_text(text.replace('"attnkit ledger": 1', '"attnkit ledger": 2'))  # another format
    ledger.reload()
    with pytest.warns(UserWarning, match="is not a ledger of this attnkit"):
        assert chosen(*query) == "flash"
    file.unlink()
    file.mkdir()
    ledger.reload()
    with pytest.warns(UserWarning, match="Is a directory, and is ignored"):
        attend(*query)


def test_a_folder_that_cannot_be_written_is_said_in_a_line(file, monkeypatch):
    file.parent.write_text("a file")
    with pytest.raises(LedgerError, match="; set ATTNKIT_LEDGER to a file that can be wr") as error:
        ledger.record("cpu", found=[wrong("flash")])
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)
    assert chosen(*tensors()) == "flash"


WRITER = """
import sys
from attnkit.core.kernels import ledger
for number in range(int(sys.argv[2])):
    kind = frozenset({sys.argv[1], f"number {number}"})
    ledger.record("cpu", found=[ledger.Wrong("flash", kind, "causality", "x" * 5_000)])
"""


@pytest.mark.slow
def test_several_processes_write_at_once_and_one_is_killed(file):
    code = [sys.executable, "-c", WRITER]
    writer = subprocess.Popen([*code, "first", "15"])
    killed = subprocess.Popen([*code, "killed", "100000"])
    assert writer.wait() == 0
    found = []
    while "killed" not in str(found):
        assert killed.poll() is None
        ledger.reload()
        found = ledger.known_of("cpu").found
    killed.kill()
    killed.wait()
    ledger.reload()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = {wrong.kind for wrong in ledger.known_of("cpu").found}
    expected = {frozenset({"first", f"number {i}"}) for i in range(15)}
    assert {kind for kind in found if "killed" not in kind} == expected


def test_compiled_code_obeys(file):
    if compiling_is_exporting():
        pytest.skip("this torch says that it exports where it compiles")

    def operators():
        torch._dynamo.reset()
        recorder = EagerAndRecordGraphs()
        compiled = torch.compile(
            lambda q, k, v: attend(q, k, v, mask=Causal()),
            fullgraph=True, backend=recorder,  # the second size makes sizes symbolic
        )  # fmt: skip
        for size in ((2, 2, 7, 8), (3, 2, 9, 8)):
            query = tensors(size=size)
            expected = attend(*query, mask=Causal(), backend="reference")
            torch.testing.assert_close(compiled(*query), expected, atol=1e-5, rtol=1e-5)
        nodes = [node for graph in recorder.graphs for node in graph.graph.nodes]
        names = {str(node.target) for node in nodes if node.op == "call_function"}
        return any("scaled_dot_product_attention" in name for name in names)

    times = timed(check_inputs(*tensors(), mask=Causal()), flash=2.0, math=1.0)
    ledger.record("cpu", found=[wrong("flash", "Causal", "float64")], times=[times])
    assert operators()
    ledger.record("cpu", found=[wrong("flash", "Causal", "float32"), wrong("math")])
    assert not operators()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace")
@pytest.mark.parametrize("kind", ["exported", "exported strictly", "traced"])
def test_programs_that_are_kept_are_for_other_machines(file, kind):
    class Attention(torch.nn.Module):
        def forward(self, query, key, value):
            return attend(query, key, value, mask=Causal())

    def operators():
        if kind == "traced":
            traced = torch.jit.trace(Attention(), tuple(tensors()))
            return [node.kind() for node in traced.inlined_graph.nodes()]
        strict = kind == "exported strictly"
        program = torch.export.export(Attention(), tuple(tensors()), strict=strict)
        return [str(node.target) for node in program.graph.nodes]

    expected = operators()
    assert any("scaled_dot_product_attention" in name for name in expected)
    ledger.record("cpu", found=[wrong("flash"), wrong("math")])
    assert operators() == expected
    assert chosen(*tensors(), mask=Causal()) == "blockwise"


def test_threads_read_once(file):
    file.parent.mkdir()
    file.write_text("damaged")
    barrier = threading.Barrier(8)

    def call(_):
        query = tensors()
        barrier.wait()
        for _ in range(5):
            attend(*query)
            attend(*query, mask=Causal())

    ledger.reload()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ThreadPoolExecutor(8) as pool:
            assert [*pool.map(call, range(8))] == [None] * 8
    assert len(caught) == 1
