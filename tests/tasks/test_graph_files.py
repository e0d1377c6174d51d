"""A graph in one's own files or OGB's folder: each form is read as it is meant, or refused."""

import gzip
import json
import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from attnkit.launch.config.compose import Composer
from attnkit.launch.decide import Request, decide
from attnkit.launch.main import main
from attnkit.lightning import UserError
from attnkit.tasks.graphs import GraphFilesData, HeterophilousData, OGBFilesData, PlanetoidData

NODES = 11
CLASSES = ("ant", "bee, honey", "cat")
NUMBERS = np.arange(NODES) % 3
UNUSED = 10  # in no split
TEXT = ("csv", "csv.gz", "tsv", "txt")
# Of pandas: without and with a header, with its index, with numbers for names of columns, and an
# index that was read as a column and written again.
STYLES = ("plain", "header", "index", "numbered", "unnamed")
SPLITS = ("train", "val", "test")


def parts():
    random = np.random.default_rng(0)
    place = np.stack([random.permutation(UNUSED) for _ in range(2)], axis=1)
    place = np.concatenate([place, [[99, 99]]])
    return {
        "features": random.standard_normal((NODES, 3)).astype(np.float32),
        "edges": np.unique(random.integers(0, NODES, (29, 2)), axis=0)[1:],
        "labels": np.where(np.arange(NODES) == UNUSED, -1, NUMBERS),
        "train": place < 5,
        "val": (place >= 5) & (place < 8),
        "test": (place >= 8) & (place < 10),
    }


EDGES = len(parts()["edges"])


def put(folder, **files):
    """Write files by stem and content in the place of a part; None: the part is missing."""
    for name, content in files.items():
        stem, _, ending = name.partition("_as_")
        old = next(iter(folder.glob(f"{stem}.*")), None)
        content = content(old.read_bytes()) if callable(content) else content
        for path in folder.glob(f"{stem}.*"):
            path.unlink()
        path = folder / f"{stem}.{(ending or 'csv').replace('_', '.')}"
        if isinstance(content, np.ndarray):
            np.save(path.with_suffix(".npy"), content, allow_pickle=True)
        elif content is not None:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def write(folder, **changes):
    """The graph of `parts` as arrays, with changes (see `put`)."""
    folder.mkdir(exist_ok=True)
    return put(put(folder, **parts()), **changes)


def parquet(columns, metadata=None):
    """The bytes of a Parquet file, with pandas' index columns among the metadata."""
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table(columns)
    if metadata is not None:
        described = json.dumps({"index_columns": metadata})
        table = table.replace_schema_metadata({"pandas": described})
    buffer = pyarrow.BufferOutputStream()
    pytest.importorskip("pyarrow.parquet").write_table(table, buffer)
    return buffer.getvalue().to_pybytes()


def columns_of(array):
    return {f"f{i}": column for i, column in enumerate(array.reshape(len(array), -1).T)}


def range_index(start, stop, step):
    return {"kind": "range", "name": None, "start": start, "stop": stop, "step": step}


def graph_of(folder, **options):
    data = GraphFilesData(folder, **options)
    data.setup()
    return data


def same_as_parts(graph):
    given = parts()
    assert torch.equal(graph.x, torch.from_numpy(given["features"]))
    assert graph.y.tolist() == given["labels"].tolist()
    assert graph.edge_index.T.tolist() == given["edges"].tolist()
    for name in SPLITS:
        assert graph[f"{name}_mask"].tolist() == given[name][:, 0].tolist()


# --- every form -----------------------------------------------------------------------------------


def truth_of(part, values):
    """What a form of a part has to give: the attribute of the graph and its value."""
    if part in SPLITS:
        return f"{part}_mask", values[:, 0]
    return {"features": "x", "labels": "y", "edges": "edge_index"}.get(part, part), values


def forms(part):
    """Arrays that mean the same, by what is special."""
    plain = parts()
    if part == "features":
        return {"floats": plain[part], "whole": plain[part].round(), "truths": plain[part] > 0}
    if part == "edges":
        return {"whole": plain[part], "as floats": plain[part].astype(float)}
    if part == "labels":
        numbers, named = plain[part], [CLASSES[n] for n in NUMBERS[:UNUSED]]
        words = {f"names, {none}": np.array([*named, none]) for none in ("-1", "nan", "NaN", "")}
        missing = np.where(numbers < 0, np.nan, numbers)
        return words | {"numbers": numbers, "floats": numbers.astype(float), "nan": missing}
    if part in SPLITS:
        mask = plain[part]
        return {
            "truths": mask[:, 0],
            "0 and 1": mask[:, 0].astype(int),
            "0.0 and 1.0": mask[:, 0].astype(float),
            "truths of splits": mask,
            "0 and 1 of splits": mask.astype(np.uint8),
            "numbers": mask[:, 0].nonzero()[0],
        }
    values = np.random.default_rng(1).random((EDGES, 3 if part == "edge_attr" else 1))
    found = {"floats": values.astype(np.float32), "whole": (values * 9).astype(int)}
    return found | {"one": values[:, 0].astype(np.float16), "truths": values > 0.5}


def word(value, is_alone):
    """As pandas writes it: nothing for nan, in a column without others in quotes."""
    text = "" if isinstance(value, float) and np.isnan(value) else str(value)
    return f'"{text}"' if "," in text or (is_alone and not text) else text


def written(array, ending, style):
    if ending == "parquet":
        index = {"Unnamed: 0": np.arange(len(array))} if style == "index" else {}
        return parquet(columns_of(array) | index)
    if ending in ("npy", "npz"):
        return array
    between = "\t" if ending == "tsv" else " " if (ending, style) == ("txt", "plain") else ","
    rows = array.reshape(len(array), -1).tolist()
    width = len(rows[0])
    columns = list(range(width)) if style == "numbered" else [f"f{i}" for i in range(width)]
    first = {"plain": None, "header": [], "unnamed": ["Unnamed: 0"]}.get(style, [""])
    lines = [] if first is None else [between.join(map(str, [*first, *columns]))]
    for number, row in enumerate(rows):
        cells = [word(value, width == 1 and not first) for value in row]
        lines.append(between.join([*([str(number)] if first else []), *cells]))
    data = "".join(f"{line}\n" for line in lines).encode()
    return gzip.compress(data) if ending.endswith("gz") else data


@pytest.mark.filterwarnings("ignore:data. edges carry")
@pytest.mark.parametrize("ending", ["npy", "npz", "parquet", *TEXT])
@pytest.mark.parametrize("part", ["features", "edges", "labels", "train", "edge_attr",
                                  "edge_weight"])  # fmt: skip
def test_what_programs_write_is_used_as_meant(tmp_path, part, ending):
    if ending == "parquet" and find_spec("pyarrow") is None:
        with pytest.raises(UserError, match=r"Parquet needs pyarrow: pip install 'attnkit\[parq"):
            graph_of(write(tmp_path, **{f"{part}_as_parquet": b"PAR1"}))
        return
    styles = {"csv": STYLES, "npy": ("",), "npz": ("",)}.get(ending, ("plain", "index"))
    for form, array in forms(part).items():
        for style in styles:
            case, name = (part, form, ending, style), f"{part}_as_{ending.replace('.', '_')}"
            folder = write(tmp_path, **{name: written(array, ending, style)})
            if ending == "npz":
                (folder / f"{part}.npy").unlink()
                np.savez(folder / f"{part}.npz", array)
            before = sorted(folder.iterdir())
            if (part, form) == ("edges", "as floats") and ending in ("npy", "npz"):
                with pytest.raises(UserError, match="expected whole numbers"):
                    graph_of(folder)  # 2**24 + 1 is no float32
                continue
            data = graph_of(folder)
            values = parts()[part] if part in parts() and part != "features" else array
            name, expected = truth_of(part, values)
            found = data.graph[name].numpy()
            found = found.T if part == "edges" else found
            expected = np.asarray(expected, found.dtype).reshape(found.shape)
            assert found.tolist() == expected.tolist(), case
            assert data.class_names == list(CLASSES if "names" in form else "012"), case
            assert sorted(folder.iterdir()) == before


def test_one_npz_in_the_names_of_pyg(tmp_path):
    arrays = parts()
    names = {"x": arrays["features"], "y": arrays["labels"], "edge_index": arrays["edges"].T}
    np.savez(tmp_path / "graph.npz", **names, **{f"{s}_mask": arrays[s] for s in SPLITS})
    same_as_parts(graph_of(tmp_path / "graph.npz").graph)


def test_headers_comments_and_empty_lines(tmp_path):
    lines = "".join(f"{a}\t{b}\n" for a, b in parts()["edges"].tolist())
    folder = write(tmp_path, edges_as_tsv=f"# SNAP\n\nsource\ttarget\n\n{lines}")
    same_as_parts(graph_of(folder).graph)


@pytest.mark.parametrize("kind", ["text", "parquet", "numbers in parquet"])
def test_nodes_by_name(tmp_path, kind):
    """Also where names are numbers, which are never those of the rows then."""
    given = parts()
    names = np.array(
        [*range(1, NODES), 0] if "numbers" in kind else [f"node {n}" for n in "abcdefghijk"]
    )
    splits = {name: given[name][:, 0].nonzero()[0] for name in SPLITS}
    unknown = 99 if "numbers" in kind else "z"

    def file(**columns):
        if "parquet" in kind:
            return parquet(columns)
        rows = zip(*columns.values(), strict=True)
        return "".join(f"{','.join(map(str, row))}\n" for row in [tuple(columns), *rows])

    def files(**columns):
        ending = "parquet" if "parquet" in kind else "csv"
        return {f"{name}_as_{ending}": file(**held) for name, held in columns.items()}

    edges = {"from": names[given["edges"][:, 0]], "to": names[given["edges"][:, 1]]}
    folder = write(tmp_path, **files(
        nodes={"name": names}, edges=edges, **{s: {"node": names[n]} for s, n in splits.items()}
    ))  # fmt: skip
    data = graph_of(folder)
    assert data.node_names == [str(name) for name in names]
    same_as_parts(data.graph)
    if "parquet" not in kind:
        return
    put(folder, **files(val={"node": [unknown, *names[splits["val"]].tolist()]}))  # no header
    with pytest.raises(UserError, match=f"val.parquet, row 0: '{unknown}' is not the name"):
        graph_of(folder)
    put(folder, **files(edges={name: [unknown, names[0].item()] for name in "ab"}))
    with pytest.raises(UserError, match=f"edges.parquet, row 0: '{unknown}' is not the name"):
        graph_of(folder)


def test_classes_by_name(tmp_path):
    kinds = np.array(["dog", "ant", "cat"])[NUMBERS]
    folder = write(tmp_path, labels="\n".join(["kind", *kinds]))
    data = graph_of(folder)
    assert data.class_names == ["ant", "cat", "dog"]
    assert data.graph.y.tolist() == np.array([2, 0, 1])[NUMBERS].tolist()
    data = graph_of(put(folder, classes="dog\nant\ncat\n"))
    assert data.class_names == ["dog", "ant", "cat"]
    assert data.graph.y.tolist() == NUMBERS.tolist()


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize("are_named", [False, True])
@pytest.mark.parametrize(
    ("header", "is_turned"),
    [
        (("target", "source"), True),
        (("dst", "src"), True),
        (("ToNodeId", "FromNodeId"), True),
        (("source", "target"), False),
        (("a", "b"), False),
        (("target", "b"), None),
        (("a", "src_id"), None),
    ],
)
def test_columns_of_edges_are_read_by_their_names(tmp_path, header, is_turned, are_named, ending):
    edges = parts()["edges"]
    nodes = [f"n{n}" if are_named else n for n in range(NODES)]
    columns = {name: [nodes[n] for n in e] for name, e in zip(header, edges.T, strict=True)}
    lines = [header, *zip(*columns.values(), strict=True)]
    text = "".join(f"{a},{b}\n" for a, b in lines)
    named = {"nodes": "".join(f"{name}\n" for name in nodes)} if are_named else {}
    content = parquet(columns) if ending == "parquet" else text
    folder = write(tmp_path, **named, **{f"edges_as_{ending}": content})
    if is_turned is None:
        with pytest.raises(UserError, match=f"edges.{ending}: the columns .* do not say"):
            graph_of(folder)
        return
    found = graph_of(folder).graph.edge_index.numpy()
    assert found.tolist() == (edges.T[::-1] if is_turned else edges.T).tolist()


def test_a_random_split_is_of_nodes_with_a_label(tmp_path):
    folder = write(tmp_path, train=None, val=None, test=None)

    def masks(seed):
        graph = graph_of(folder, seed=seed).graph
        return torch.stack([graph[f"{name}_mask"] for name in SPLITS])

    assert masks(3).sum(dim=0).tolist() == [1] * UNUSED + [0]
    assert torch.equal(masks(3), masks(3))
    assert not torch.equal(masks(3), masks(4))


@pytest.mark.filterwarnings("ignore:data. edges carry")
def test_reversed_edges_are_there_once_and_carry_the_mean(tmp_path):
    arrays = parts() | {"edges": np.array([[0, 1], [1, 0], [2, 3]])}
    arrays |= {"edge_weight": np.array([1.0, 3, 5]), "edge_attr": np.array([[1.0, 2]] * 3)}
    np.savez(tmp_path / "graph.npz", **arrays)
    graph = graph_of(tmp_path / "graph.npz", undirected=True).graph
    pairs = map(tuple, graph.edge_index.T.tolist())
    edges = dict(zip(pairs, graph.edge_weight.tolist(), strict=True))
    assert edges == {(0, 1): 2.0, (1, 0): 2.0, (2, 3): 5.0, (3, 2): 5.0}
    assert graph.edge_attr.tolist() == [[1, 2]] * 4


@pytest.mark.parametrize("kind", [np.float16, np.float64, np.int8])
def test_only_the_rows_of_a_batch_are_read(tmp_path, kind):
    features = (parts()["features"] * 7).astype(kind)
    data = graph_of(write(tmp_path, features=features), batch_size=2)
    assert data.graph.x.dtype == torch.from_numpy(features).dtype
    for batch in data.val_dataloader():
        assert torch.equal(batch.x, torch.from_numpy(features).float()[batch.n_id])
    # Written behind its back, and seen: nothing was copied.
    on_disk = np.load(tmp_path / "features.npy", mmap_mode="r+")
    on_disk[:] = 1
    on_disk.flush()
    assert all((batch.x == 1).all() for batch in data.val_dataloader())


def test_all_splits_of_masks_are_run(tmp_path):
    """Which are counted by reading the data, once: a resumed job knows the number."""
    words = ["task=graph", "data=graph_files", f"data.root={write(tmp_path)}"]
    job = decide(Request.read(Composer(), [*words, "splits=all"]))
    assert [run["data"]["split"] for run in job.runs] == [0, 1]
    assert job.config["splits"] == 2
    with pytest.raises(UserError, match="splits=3: the data has 2"):
        decide(Request.read(Composer(), [*words, "splits=3"]))


# --- an index or a header -------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["features", "labels"])
@pytest.mark.parametrize(
    "index",
    [
        np.arange(NODES),
        np.arange(NODES)[::-1],
        range_index(0, 5 * NODES, 1),  # of a table, of which rows were taken out
        range_index(0, NODES, 1),
        range_index(NODES - 1, -1, -1),
        range_index(0, 2 * NODES, 2),
    ],
    ids=str,
)
def test_an_index_in_parquet_counts_the_rows(tmp_path, part, index):
    """pandas writes it as a column that the metadata name, or as three numbers among them."""
    columns, described = columns_of(parts()[part]), index
    counts = isinstance(index, dict) and index["step"] == 1
    if isinstance(index, np.ndarray):
        columns, described = columns | {"__index_level_0__": index}, "__index_level_0__"
        counts = index[0] == 0
    folder = write(tmp_path, **{f"{part}_as_parquet": parquet(columns, [described])})
    if counts:
        assert graph_of(folder).graph.num_nodes == NODES
        return
    with pytest.raises(UserError, match=rf"{part}.parquet: its index .* is not 0, 1, 2"):
        graph_of(folder)


@pytest.mark.parametrize(("part", "count"), [("features", NODES), ("edge_attr", EDGES)])
def test_an_index_in_parquet_that_is_a_column_is_refused(tmp_path, part, count):
    table = parquet({"index": np.arange(count), "a": np.ones(count), "b": np.ones(count)})
    folder = write(tmp_path, **{f"{part}_as_parquet": table})
    with pytest.raises(UserError, match=rf"{part}.parquet: the first column counts the rows or"):
        graph_of(folder)


@pytest.mark.filterwarnings("ignore:data. edges carry")
@pytest.mark.parametrize("part", ["edge_weight", "edge_attr"])
@pytest.mark.parametrize("ending", ["csv", "parquet", "range"])
def test_what_edges_carry_has_their_index(tmp_path, part, ending):
    edges, counting = parts()["edges"], np.arange(EDGES)

    def file(columns, index):
        if ending == "csv":
            rows = zip(index.tolist(), *(c.tolist() for c in columns.values()), strict=True)
            return "".join(f"{','.join(map(str, row))}\n" for row in [("", *columns), *rows])
        start, step = index[0].item(), (index[1] - index[0]).item()
        if ending == "range":
            return parquet(columns, [range_index(start, start + step * EDGES, step)])
        return parquet(columns | {"__index_level_0__": index}, ["__index_level_0__"])

    kind = "csv" if ending == "csv" else "parquet"
    for of_edges, of_values, fits in (
        (counting, counting, True),
        (counting[::-1], counting[::-1], True),
        (3 * counting, 3 * counting, True),  # of rows that were filtered
        (counting, counting[::-1], False),
        (counting[::-1], counting, False),
    ):
        pairs = file({"a": edges[:, 0], "b": edges[:, 1]}, of_edges)
        values = file({"w": counting / 8}, of_values)
        folder = write(tmp_path, **{f"edges_as_{kind}": pairs, f"{part}_as_{kind}": values})
        if fits:
            assert graph_of(folder).graph[part].flatten().tolist() == (counting / 8).tolist()
            continue
        with pytest.raises(UserError, match=rf"{part}.* its index is not that of .*edges"):
            graph_of(folder)


@pytest.mark.filterwarnings("ignore:data. edges carry")
@pytest.mark.parametrize(
    ("edges", "weights", "expected"),
    [
        ("0,1\n2,3\n", 2, [[0, 1], [2, 3]]),
        ("0,1\n2,3\n", 1, [[2, 3]]),
        ("0,1\n2,3\n0,1\n", 0, [[2, 3], [0, 1]]),
        ("0 1\n2 3\n", 0, [[0, 1], [2, 3]]),
    ],
)
def test_a_first_row_of_edges_that_counts_is_an_edge_or_a_header(
    tmp_path, edges, weights, expected
):
    """As what they carry says, or the same edge further on; pandas puts no blanks between."""
    carried = {"edge_weight": np.ones(weights)} if weights else {}
    folder = write(tmp_path, edges=edges, **carried)
    assert graph_of(folder).graph.edge_index.T.tolist() == expected


# --- what is refused, or said ---------------------------------------------------------------------


def rows(*first, then="1", count=NODES):
    return "".join(f"{row}\n" for row in [*first, *[then] * (count - len(first))])


def counted(count=NODES, start=0, then=",1", by=1):
    return "".join(f"{start + by * number}{then}\n" for number in range(count))


def with_one(value):
    features = parts()["features"]
    features[4, 2] = value
    return features


PACKED = gzip.compress(b"".join(b"%d,%d\n" % (n % NODES, n * n % NODES) for n in range(9999)))
HASH = ",name\n" + "".join(f"{n},{'#' if n < 2 else 'n'}{n}\n" for n in range(NODES))
NAMED = rows(*(f"n{n}" for n in range(NODES)))
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1329769\n"
FIRST = int(parts()["train"][:, 0].argmax())
TWO = "expected 2 whole numbers, got "
COUNTS = "the first column counts the rows or names the nodes: it is an index, or"
UNORDERED = "the first column has no name, as an index, but is not 0, 1, 2, …"
COMMENT = "begins with #, as a comment or a name"

# The files of each case, and a part of the message; "": it is read.
CASES = [
    # edges
    ({"edges": "1,2\n3,4\nfive,6\n"}, f"edges.csv, line 3: {TWO}'five,6'"),
    ({"edges": "a,b\n1,2\n3,4.5\n"}, f"edges.csv, line 3: {TWO}'3,4.5'"),
    ({"edges": "1,2,0.5\n"}, f"edges.csv, line 1: {TWO}'1,2,0.5'"),
    ({"edges": "1,2\n\n3\n"}, f"edges.csv, line 3: {TWO}'3'"),
    ({"edges": "1,99999999999999999999\n"}, "edges.csv, line 1: expected 2 whole"),
    ({"edges": "a,b\n\n1,2\n3,1044\n"},
     "edges.csv, line 4: there is no node 1044: expected 0 to 10; for other numb"),
    ({"edges": "1,-2\n"}, "edges.csv, line 1: there is no node -2"),
    ({"edges": b"1,2\n\xff\xfe\n"}, f"edges.csv, line 2: {TWO}'\\\\xff"),
    ({"edges_as_csv_gz": PACKED[: len(PACKED) // 2]}, "edges.csv.gz: ends early, after line "),
    ({"edges_as_csv_gz": b"1,2\n"}, "edges.csv.gz: cannot be read: Not a gzipped"),
    ({"edges_as_parquet": b"PAR1"}, "edges.parquet: "),
    ({"edges": np.ones((2, 9))},
     "edges.npy: expected whole numbers [2, edges] or [edges, 2], got float64"),
    ({"edges": np.ones((3, 9), int)}, "edges.npy: expected whole numbers [2, edges]"),
    ({"edges": np.array([[1, 2, 3], [4, 5, 11]])}, "edges.npy, edge 2: there is no node 11"),
    ({"edges_as_npy": lambda whole: whole[:300]}, "edges.npy: ends early, after 300 bytes"),
    ({"edges_as_npy": lambda whole: whole[:30]}, "edges.npy: is not an array: "),
    ({"edges": "<!DOCTYPE html>\n<html>404\n"}, "edges.csv: is a web page"),
    ({"edges": "0,1\n2,3\n"},
     "edges.csv: the first row, 0, 1, is an edge, or a header of columns without names"),
    ({"edges": ",a,b\n7,0,1\n9,2,3\n"}, ""),  # of rows that were filtered
    ({"edge_weight": np.ones(3)}, "edge_weight.npy: expected numbers ["),
    ({"edge_weight": np.ones((EDGES, 2))}, "edge_weight.npy: expected numbers ["),
    ({"edge_attr": "a\n" + rows("1", "inf", count=EDGES)},
     "edge_attr.csv, line 3: is inf, expected finite numbers"),
    ({"edge_weight": rows("1", "heavy", count=EDGES)},
     "edge_weight.csv, line 2: expected a number, got 'heavy'"),
    ({"edge_attr": "id,a\n" + counted(EDGES)}, f"edge_attr.csv: {COUNTS}"),
    # features
    ({"features_as_npy": b""}, "features.npy: is empty"),
    ({"features": with_one(np.nan)},
     "features.npy: node 4, feature 2, is nan, expected finite numbers"),
    ({"features": "a,b\n" + rows(*["1,2"] * 9, "3,inf", then="1,2")},
     "features.csv, line 11, feature 1, is inf"),
    ({"features": "1,2\n3,x\n"}, "features.csv, line 2: expected 2 numbers, got '3,x'"),
    ({"features": np.ones(NODES)},
     "features.npy: expected numbers [nodes, channels], got float64 [11]"),
    ({"features": np.ones((0, 5))}, "features.npy: expected nodes and channels, got [0, 5]"),
    ({"features": np.ones((NODES, 0))}, "features.npy: expected nodes and channels, got [11, 0]"),
    ({"features": None}, "has no file features or x with an ending of .npy"),
    ({"x": "1,2\n"}, "expected one of"),
    ({"features": ",a,b\n" + rows("1,1,2", "0,3,4", then="5,6,7")}, f"features.csv: {UNORDERED}"),
    ({"features": ",a,b\n" + rows("ann,1,2", then="eve,6,7")}, f"features.csv: {UNORDERED}"),
    ({"features": "id,a\n" + counted()}, f"features.csv: {COUNTS}"),
    ({"features": "id,a\n" + counted(start=1)}, f"features.csv: {COUNTS}"),
    ({"features": "id,a\n" + rows(*(f"{5 * n % NODES},1" for n in range(NODES)))},
     f"features.csv: {COUNTS}"),
    ({"features": counted()}, f"features.csv: {COUNTS}"),
    ({"features": "id\n" + counted(then="")}, ""),
    ({"features": "id,a\n" + counted(by=7), "nodes": counted(then="", by=7), "edges": "0,7\n"},
     f"features.csv: {COUNTS}"),
    ({"features": "0,1,2\n" + rows(then="1.5,2.5,3.5")}, ""),
    ({"features": rows("0,1,2", then="1,2,3")}, ""),
    ({"features": rows("0,1,2", then="1,2,3"), "labels": rows("0", "1", then="2")},
     "features.csv: the first row, 0, 1, 2, …, is the features of a node, or a header"),
    ({"features": '"","a"\n' + rows(*(f'"{n + 1}",{n}' for n in range(NODES)))}, ""),  # of R
    # labels
    ({"labels": np.zeros(10, int)}, "labels.npy: expected 11 labels, one per node, got 10"),
    ({"labels": np.zeros((NODES, 2), int)},
     "labels.npy: expected a whole number per node, got int64 [11, 2]"),
    ({"labels": np.full(NODES, 0.5)},
     "labels.npy: expected a whole number per node, got float64 [11]"),
    ({"labels": np.array([None] * NODES)},
     "labels.npy: is not an array: it holds Python objects, which are not loaded"),
    ({"labels_as_npy": b"cposix\nsystem\n"}, "labels.npy: is not an array: another kind of file"),
    ({"classes": "a\nb\n"}, "labels.npy: node "),
    ({"classes": "a\nb\n", "labels": rows(*"abababababc")},
     "labels.csv, line 11: 'c' is not the name of a class"),
    ({"labels": "class\n" + rows(then="-1")},
     f"labels.csv, line {FIRST + 2}: node {FIRST} of train has no label"),
    ({"labels": np.full(NODES, -1)}, f"labels.npy: node {FIRST} of train has no label"),
    ({"labels": rows(*"010101010", "-2")},
     "labels.csv, line 10: node 9 is of class -2, expected one from 0 on, or -1 for none"),
    ({"labels": rows("ant", "None", then="bee")},
     "labels.csv, line 2: 'None' is a class, or no label"),
    ({"labels": rows("ant", "None", then="ant"), "classes": "ant\nNone\n"}, ""),
    ({"labels": "node,label\n" + rows("0,ant", "1,bee", then="2,cat")},
     "expected a whole number per node, got <U5 [11, 2]; an index is left out if it has no name"),
    ({"labels": rows("ant", "bee, red", then="cat")}, ""),
    ({"labels": ",label\n" + rows("0,ant", "1,bee, honey", then="2,cat")},
     "labels.csv, line 3: expected 2 fields, got ['1', 'bee', 'honey']"),
    ({"labels": ",kind\n" + rows("1,ant", "0,bee", then="5,cat")}, f"labels.csv: {UNORDERED}"),
    ({"labels": "kind\n" + rows("1", "01", "2", then="0")},
     "labels.csv, line 2: '1' and '01' are one class or two; write one of them"),
    ({"labels": "kind\n" + rows("1", "1.0", "2.", then="0")}, ""),
    ({"labels": "kind\n" + rows("00", then="01")}, ""),
    ({"labels": "kind\n" + rows("#ant", then="bee")}, f"labels.csv, line 2: {COMMENT}"),
    ({"labels": rows("#ant", then="bee") + "\n"},
     "labels.csv: expected 11 labels, one per node, got 10"),
    # splits
    ({"val": np.array([], int)}, "val.npy: is empty, expected nodes"),
    ({"val": "node\n"}, "val.csv: is empty, expected nodes"),
    ({"val": np.zeros(NODES, bool)}, "val.npy: is empty, expected nodes"),
    ({"val": np.ones(10, bool)}, "val.npy: expected numbers of nodes, or a mask bool [11]"),
    ({"val": np.where(np.arange(NODES) == 1, np.nan, 1.0)},
     "val.npy: expected numbers of nodes, or a mask bool [11]"),
    ({"val": np.arange(10) % 2},
     "val.npy: holds only 0 and 1, as a mask: expected one of 11 nodes, got [10]"),
    ({"val": "0\n1\n"}, ""),
    ({"val": rows("yes", "no")}, "val.csv, line 1: expected the number of a node, got 'yes'"),
    ({"test": "3\n11\n"}, "test.csv, line 2: there is no node 11: expected 0 to 10"),
    ({"test": np.array([3, -1])}, "test.npy, place 1: there is no node -1"),
    ({"val": None}, "has no val"),
    # names
    ({"nodes": "a\nb\n"}, "nodes.csv: expected 11 names, got 2"),
    ({"nodes": rows(then="a")}, "nodes.csv: 'a' occurs twice"),
    ({"nodes": NAMED, "edges": "from,to\nn1,n2\nn3,m4\n"},
     "edges.csv, line 3: 'm4' is not the name of a node"),
    ({"nodes": NAMED, "edges": "n2,n3\n", "val": ",node\n0,m5\n1,n6\n"},
     "val.csv, line 2: 'm5' is not the name of a node"),
    ({"nodes": NAMED, "edges": ",a,b\n0,m2,m3\n1,n2,n3\n"},
     "edges.csv, line 2: 'm2' is not the name of a node"),
    ({"nodes": counted(then="", start=1), "edges": "2,3\n", "val": "node\n99\n5\n"},
     "val.csv, line 2: '99' is not the name of a node"),
    ({"nodes": HASH, "edges": "a,b\nn2,n3\n#0,n3\n"},
     f"edges.csv, line 3: {COMMENT}: put comments above the first"),
    ({"nodes": HASH, "edges": "#0,n3\nn2,n3\n"}, f"edges.csv, line 1: {COMMENT}"),
    ({"nodes": HASH, "edges": "n2,n3\n", "val": "node\nn5\n#0\n"}, f"val.csv, line 3: {COMMENT}"),
    ({"nodes": HASH, "edges": "n2,n3\n", "val": "# mine\n#0\nn5\n"},
     f"val.csv, line 2: {COMMENT}"),
    ({"nodes": "name\n" + rows("n1", "#2", then="n3")}, f"nodes.csv, line 3: {COMMENT}"),
    ({"nodes": "name\n" + rows('"#0"', *(f"n{n}" for n in range(1, NODES))),
      "edges": '# mine\n"#0",n3\nn2,"#0"\n', "labels": rows(*['"#ant"'] * 5, then="bee")}, ""),
    *(({f"{part}_as_{ending}": POINTER}, f"{part}.{ending}: is a Git LFS pointer")
      for part, ending in (("features", "npy"), ("features", "npz"), ("edges", "csv"),
                           ("labels", "tsv"), ("val", "parquet"))),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("files", "message"), CASES)
def test_what_is_wrong_or_may_be_meant_otherwise_is_refused(tmp_path, files, message):
    folder = write(tmp_path, **files)
    if not message:
        assert graph_of(folder).graph.num_nodes == NODES
        return
    with pytest.raises(UserError) as caught:
        graph_of(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mask_of_two_nodes_may_be_their_numbers(tmp_path):
    arrays = {"x": np.ones((2, 3)), "y": np.array([0, 1]), "edges": np.array([[0, 1]])}
    put(tmp_path, **arrays, **dict.fromkeys(SPLITS, np.array([1, 0])))
    with pytest.raises(UserError, match=r"\[1, 0\] is a mask, or the numbers of nodes"):
        graph_of(tmp_path)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"edges": np.array([[1, 2], [3, 0], [1, 2], [1, 2], [4, 4]])},
         "edges.npy: 2 edges are given again and 1 lead from a node to itself; they count"),
        ({"train": np.array([1, 2, 3]), "val": np.array([1, 2])},
         "train and val share nodes .2, such as 1."),
        ({"val": np.array([5, 6, 6])}, "val.npy: node 6 is there more than once; it counts once"),
        ({"labels": NUMBERS * 3}, "data: no node has class 1, 2, 4, 5"),
    ],
)  # fmt: skip
def test_what_is_odd_is_said_and_counts(tmp_path, files, said):
    with pytest.warns(UserWarning, match=said):
        data = graph_of(write(tmp_path, **files))
    assert data.graph.num_edges == len(files.get("edges", parts()["edges"]))
    if list(files) == ["val"]:
        assert data.graph.val_mask.nonzero().flatten().tolist() == [5, 6]


def test_a_first_row_of_nodes_that_may_be_a_header_is_said(tmp_path, caplog):
    with caplog.at_level("INFO"):
        graph_of(write(tmp_path, val="0\n3\n"))
    assert "val.csv: the first row is read as a node, not as a header" in caplog.text


def test_a_wrong_file_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capfd):
    write(tmp_path / "mine", edges="1,2\n3,x\n")
    monkeypatch.chdir(tmp_path)
    for wrong, message in (
        ("data=graph_files data.root=mine", f"edges.csv, line 2: {TWO}'3,x'"),
        ("data=graph_files data.root=nowhere", "GraphFilesData: root: no such folder or .npz: "),
        ("data=ogb_files data.root=mine", "has no folder raw"),
    ):
        assert main(["task=graph", "trainer=cpu", *wrong.split(), "run_dir=made"]) == 2
        said = capfd.readouterr().err
        assert message in said
        assert len(said.strip().splitlines()) == 1, said
        assert os.listdir() == ["mine"]


@pytest.mark.slow
def test_more_ranks_than_seeds(tmp_path, monkeypatch, capfd):
    write(tmp_path / "mine", train=np.array([0]))
    monkeypatch.chdir(tmp_path)
    files = ("task=graph", "data=graph_files", "data.root=mine", "data.batch_size=8")
    assert main([*files, "trainer=cpu_ddp", "run_dir=made"]) == 2
    said = capfd.readouterr().err.strip()
    assert "data: 1 train nodes are too few for 2 processes" in said
    assert len(said.splitlines()) == 1, said
    assert os.listdir() == ["mine"]


# --- published files ------------------------------------------------------------------------------


def ogb(root, arrays=None, **options):
    data = OGBFilesData(root, **options)
    data.setup()
    if arrays is not None:
        graph = data.graph
        assert torch.equal(graph.x, torch.from_numpy(arrays["features"]))
        assert graph.y.tolist() == arrays["labels"].tolist()
        assert graph.edge_index.T.tolist() == arrays["edges"].tolist()
        for name in SPLITS:
            nodes = graph[f"{name}_mask"].nonzero().flatten().tolist()
            assert nodes == sorted(arrays[name].tolist())
    return data


def test_ogb_as_published(graph_files, tmp_path):
    arrays = graph_files.write_ogb(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert ogb(tmp_path, arrays).class_names == ["arxiv cs na", "arxiv cs mm", "arxiv cs lo"]
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "split" / "random").mkdir()
    with pytest.raises(UserError, match=r"split_name: .* which has random, time, got None"):
        ogb(tmp_path)
    ogb(tmp_path, arrays, split_name="time")


def test_ogb_in_binary_form(graph_files, tmp_path):
    arrays = graph_files.write_ogb(tmp_path)
    for path in (tmp_path / "raw").iterdir():
        path.unlink()
    labels = arrays["labels"].astype(np.float32)[:, None]
    unused = next(n for n in range(97) if not any(n in arrays[split] for split in SPLITS))
    labels[unused] = np.nan  # as of ogbn-papers100M
    binary = {"edge_index": arrays["edges"].T, "node_feat": arrays["features"]}
    np.savez(tmp_path / "raw" / "data.npz", **binary, num_nodes_list=[97])
    np.savez(tmp_path / "raw" / "node-label.npz", node_label=labels)
    arrays["labels"][unused] = -1
    ogb(tmp_path, arrays)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("raw/edge", lambda packed: packed[:-40], "edge.csv.gz: ends early, after line "),
        ("raw/node-feat", b"1,2\n" * 96, "node-feat.csv.gz: expected 97 rows, got 96"),
        ("raw/node-label", b"0,1\n" * 97,
         "node-label.csv.gz: expected a whole number per node, got int64 [97, 2]"),
        ("raw/num-node-list", b"3\n4\n",
         "num-node-list.csv.gz: expected the size of one graph, got 2"),
        ("raw/num-edge-list", b"7\n", "edge.csv.gz: expected 7 edges, got 38"),
        ("split/time/valid", None, "time has no valid.csv.gz"),
    ],
)  # fmt: skip
def test_wrong_folders_of_ogb_are_named(graph_files, tmp_path, name, content, message):
    graph_files.write_ogb(tmp_path)
    path = tmp_path / f"{name}.csv.gz"
    if content is None:
        path.unlink()
    else:
        packed = path.read_bytes()
        path.write_bytes(content(packed) if callable(content) else gzip.compress(content))
    with pytest.raises(UserError) as caught:
        ogb(tmp_path)
    assert message in str(caught.value)


def test_pointers_for_published_files_are_named(graph_files, tmp_path):
    graph_files.write_planetoid(tmp_path / "raw", "PubMed")
    graph_files.write_ogb(tmp_path)
    for data, name in (
        (PlanetoidData(tmp_path, "PubMed"), "raw/ind.pubmed.allx"),
        (HeterophilousData(tmp_path, "squirrel"), "squirrel.npz"),
        (OGBFilesData(tmp_path), "raw/edge.csv.gz"),
    ):
        (tmp_path / name).write_text(POINTER)
        with pytest.raises(UserError, match=f"{name}: is a Git LFS pointer"):
            data.load()
