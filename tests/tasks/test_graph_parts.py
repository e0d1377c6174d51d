"""Every part of a graph, as NumPy, pandas and others write it: used as it is meant, or refused."""

import gzip
import json
from importlib.util import find_spec

import numpy as np
import pytest

from attnkit.launch.config.compose import Composer
from attnkit.launch.decide import Request, decide
from attnkit.lightning import UserError
from attnkit.tasks.graphs import (
    GraphFilesData,
    HeterophilousData,
    OGBFilesData,
    PlanetoidData,
)

NODES = 11
CLASSES = ("ant", "bee, honey", "cat")
NUMBERS = np.arange(NODES) % 3
UNUSED = 10  # in no split
TEXT = ("csv", "csv.gz", "tsv", "txt")
# Of pandas: without and with a header, with its index, with numbers for names of columns, and an
# index that was read as a column and written again.
STYLES = ("plain", "header", "index", "numbered", "unnamed")


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


def names(none):
    return np.array([*(CLASSES[n] for n in NUMBERS[:UNUSED]), none])


def truth_of(part, values):
    """What a form of a part has to give: the attribute of the graph and its value."""
    if part in ("train", "val", "test"):
        return f"{part}_mask", values[:, 0]
    return {"features": "x", "labels": "y", "edges": "edge_index"}.get(part, part), values


def forms(part):
    """Arrays that mean the same, by what is special."""
    plain = parts()
    edges = len(plain["edges"])
    if part == "features":
        return {"floats": plain[part], "whole": plain[part].round(), "truths": plain[part] > 0}
    if part == "edges":
        return {"whole": plain[part], "as floats": plain[part].astype(float)}
    if part == "labels":
        numbers = plain[part]
        found = {f"names, {none or 'nothing'}": names(none) for none in ("-1", "nan", "NaN", "")}
        return found | {
            "numbers": numbers,
            "floats": numbers.astype(float),
            "nan": np.where(numbers < 0, np.nan, numbers),
        }
    if part in ("train", "val", "test"):
        mask = plain[part]
        return {
            "truths": mask[:, 0],
            "0 and 1": mask[:, 0].astype(int),
            "0.0 and 1.0": mask[:, 0].astype(float),
            "truths of splits": mask,
            "0 and 1 of splits": mask.astype(np.uint8),
            "numbers": mask[:, 0].nonzero()[0],
        }
    values = np.random.default_rng(1).random((edges, 3 if part == "edge_attr" else 1))
    found = {"floats": values.astype(np.float32), "whole": (values * 9).astype(int)}
    return found | {"one": values[:, 0].astype(np.float16), "truths": values > 0.5}


def word(value, is_alone):
    """As pandas writes it: nothing for nan, in a column without others in quotes."""
    text = str(value)
    if isinstance(value, float) and np.isnan(value):
        text = ""
    return f'"{text}"' if "," in text or (is_alone and not text) else text


def written(array, ending, style):
    between = {"tsv": "\t", "txt": " "}.get(ending, ",") if style == "plain" else ","
    between = "\t" if ending == "tsv" else between
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


def save(folder, part, array, ending, style):
    path = folder / f"{part}.{ending}"
    if ending == "parquet":
        import pyarrow
        from pyarrow import parquet

        columns = {f"f{i}": c for i, c in enumerate(array.reshape(len(array), -1).T)}
        if style == "index":
            columns["Unnamed: 0"] = np.arange(len(array))
        parquet.write_table(pyarrow.table(columns), path)
    elif ending == "npy":
        np.save(path, array)
    elif ending == "npz":
        np.savez(path, array)
    else:
        path.write_bytes(written(array, ending, style))


def graph_of(folder, **options):
    data = GraphFilesData(folder, **options)
    data.setup()
    return data


PARTS = ("features", "edges", "labels", "train", "edge_attr", "edge_weight")
REFUSED = {("edges", "as floats", "npy"), ("edges", "as floats", "npz")}  # 2**24 + 1 is no float32


@pytest.mark.filterwarnings("ignore:data. edges carry")
@pytest.mark.parametrize("ending", ["npy", "npz", "parquet", *TEXT])
@pytest.mark.parametrize("part", PARTS)
def test_what_programs_write_is_used_as_meant(tmp_path, part, ending):
    styles = {"csv": STYLES, "npy": ("",), "npz": ("",)}.get(ending, ("plain", "index"))
    for number, (form, array) in enumerate(forms(part).items()):
        for style in styles:
            folder = tmp_path / f"{number}{style}"
            folder.mkdir()
            for name, values in parts().items():
                if name != part:
                    np.save(folder / f"{name}.npy", values)
            if ending == "parquet" and find_spec("pyarrow") is None:
                (folder / f"{part}.parquet").write_bytes(b"PAR1")
                with pytest.raises(UserError, match="Parquet needs pyarrow"):
                    graph_of(folder)
                return
            save(folder, part, array, ending, style)
            case = (part, form, ending, style)
            if case[:3] in REFUSED:
                with pytest.raises(UserError, match="expected whole numbers"):
                    graph_of(folder)
                continue
            data = graph_of(folder)
            values = parts()[part] if part in parts() and part != "features" else array
            name, expected = truth_of(part, values)
            found = data.graph[name].numpy()
            if part == "edges":
                found = found.T
            if part == "edge_attr":
                expected = expected.reshape(len(expected), -1)
            if part == "edge_weight":
                expected = expected.ravel()
            assert found.tolist() == np.asarray(expected, found.dtype).tolist(), case
            assert data.class_names == list(CLASSES if "names" in form else "012"), case


def change(name, content):
    """A file in the place of a part."""

    def changed(folder):
        for path in folder.glob(f"{name.partition('.')[0]}.*"):
            path.unlink()
        if isinstance(content, np.ndarray):
            np.save(folder / name, content, allow_pickle=True)
        else:
            data = content.encode()
            (folder / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)

    return changed


def both(*changes):
    return lambda folder: [one(folder) for one in changes]


def rows(*first, then="1", count=NODES):
    return "".join(f"{row}\n" for row in [*first, *[then] * (count - len(first))])


def counted(count=NODES, start=0, then=",1", by=1):
    return "".join(f"{start + by * number}{then}\n" for number in range(count))


HASH = "".join(f"{n},{'#' if n < 2 else 'n'}{n}\n" for n in range(NODES))
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1329769\n"
WRONG = {
    "a short mask of 0 and 1": (
        change("val.npy", np.arange(NODES - 1) % 2),
        "val.npy: holds only 0 and 1, as a mask: expected one of 11 nodes, got [10]",
    ),
    "0 and 1 as numbers": (change("val.csv", "0\n1\n"), None),
    "a mask of words": (
        change("val.csv", rows("yes", "no")),
        "val.csv, line 1: expected the number of a node, got 'yes'",
    ),
    "a mask with nan": (
        change("val.npy", np.where(np.arange(NODES) == 1, np.nan, 1.0)),
        "val.npy: expected numbers of nodes, or a mask bool [11]",
    ),
    "a class called None": (
        change("labels.csv", rows("ant", "None", then="bee")),
        "labels.csv, line 2: 'None' is a class, or no label",
    ),
    "a class called None in classes": (
        both(change("labels.csv", rows("ant", "None", then="ant")),
             change("classes.csv", "ant\nNone\n")),
        None,
    ),
    "columns of labels": (
        change("labels.csv", "node,label\n" + rows("0,ant", "1,bee", then="2,cat")),
        "expected a whole number per node, got <U5 [11, 2]; an index is left out if it has no name",
    ),
    "a name with a bare comma": (change("labels.csv", rows("ant", "bee, red", then="cat")), None),
    "fields that come and go": (
        change("labels.csv", ",label\n" + rows("0,ant", "1,bee, honey", then="2,cat")),
        "labels.csv, line 3: expected 2 fields, got ['1', 'bee', 'honey']",
    ),
    "rows in another order": (
        change("features.csv", ",a,b\n" + rows("1,1,2", "0,3,4", then="5,6,7")),
        "features.csv: the first column has no name, as an index, but is not 0, 1, 2, …",
    ),
    "labels in another order": (
        change("labels.csv", ",kind\n" + rows("1,ant", "0,bee", then="5,cat")),
        "labels.csv: the first column has no name, as an index, but is not 0, 1, 2, …",
    ),
    "names as the index": (
        change("features.csv", ",a,b\n" + rows("ann,1,2", "bob,3,4", then="eve,6,7")),
        "features.csv: the first column has no name, as an index, but is not 0, 1, 2, …",
    ),
    "an edge, or a header": (
        change("edges.csv", "0,1\n2,3\n"),
        "edges.csv: the first row, 0, 1, is an edge, or a header of columns without names",
    ),
    "an index that has a name": (
        change("features.csv", "id,a\n" + counted()),
        "features.csv: the first column counts the rows or names the nodes: it is an index, or",
    ),
    "an index that counts from 1": (
        change("features.csv", "id,a\n" + counted(start=1)),
        "features.csv: the first column counts the rows or names the nodes: it is an index, or",
    ),
    "an index in another order": (
        change("features.csv", "id,a\n" + "".join(f"{5 * n % NODES},1\n" for n in range(NODES))),
        "features.csv: the first column counts the rows or names the nodes: it is an index, or",
    ),
    "an index and no header": (
        change("features.csv", counted()),
        "features.csv: the first column counts the rows or names the nodes: it is an index, or",
    ),
    "an index of edges that has a name": (
        change("edge_attr.csv", "id,a\n" + counted(len(parts()["edges"]))),
        "edge_attr.csv: the first column counts the rows or names the nodes: it is an index, or",
    ),
    "one feature that counts": (change("features.csv", "id\n" + counted(then="")), None),
    "names of nodes as features": (
        both(change("features.csv", "id,a\n" + counted(by=7)),
             change("nodes.csv", counted(then="", by=7)),
             change("edges.csv", "0,7\n")),
        "features.csv: the first column counts the rows or names the nodes: it is an index, or",
    ),
    "a header of numbers": (change("features.csv", "0,1,2\n" + rows(then="1.5,2.5,3.5")), None),
    "features that count": (change("features.csv", rows("0,1,2", then="1,2,3")), None),
    "a header of numbers, or features": (
        both(change("features.csv", rows("0,1,2", then="1,2,3")),
             change("labels.csv", rows("0", "1", then="2"))),
        "features.csv: the first row, 0, 1, 2, …, is the features of a node, or a header",
    ),
    "an index of R": (
        change("features.csv", '"","a"\n' + "".join(f'"{n + 1}",{n}\n' for n in range(NODES))),
        None,
    ),
    "edges of an index that was filtered": (change("edges.csv", ",a,b\n7,0,1\n9,2,3\n"), None),
    "an edge of a name with #": (
        both(change("nodes.csv", ",name\n" + HASH), change("edges.csv", "a,b\nn2,n3\n#0,n3\n")),
        "edges.csv, line 3: begins with #, as a comment or a name: put comments above the first",
    ),
    "a first edge of a name with #": (
        both(change("nodes.csv", ",name\n" + HASH), change("edges.csv", "#0,n3\nn2,n3\n")),
        "edges.csv, line 1: begins with #, as a comment or a name",
    ),
    "a split by names with #": (
        both(change("nodes.csv", ",name\n" + HASH), change("edges.csv", "n2,n3\n"),
             change("val.csv", "node\nn5\n#0\n")),
        "val.csv, line 3: begins with #, as a comment or a name",
    ),
    "a split that begins with a name with #": (
        both(change("nodes.csv", ",name\n" + HASH), change("edges.csv", "n2,n3\n"),
             change("val.csv", "# mine\n#0\nn5\n")),
        "val.csv, line 2: begins with #, as a comment or a name",
    ),
    "an unknown name under an index": (
        both(change("nodes.csv", rows(*(f"n{n}" for n in range(NODES)))),
             change("edges.csv", "n2,n3\n"), change("val.csv", ",node\n0,m5\n1,n6\n")),
        "val.csv, line 2: 'm5' is not the name of a node",
    ),
    "an edge of unknown names under an index": (
        both(change("nodes.csv", rows(*(f"n{n}" for n in range(NODES)))),
             change("edges.csv", ",a,b\n0,m2,m3\n1,n2,n3\n")),
        "edges.csv, line 2: 'm2' is not the name of a node",
    ),
    "an unknown name that is a number": (
        both(change("nodes.csv", counted(then="", start=1)), change("edges.csv", "2,3\n"),
             change("val.csv", "node\n99\n5\n")),
        "val.csv, line 2: '99' is not the name of a node",
    ),
    "classes 01 and 1": (
        change("labels.csv", "kind\n" + rows("1", "01", "2", then="0")),
        "labels.csv, line 2: '1' and '01' are one class or two; write one of them",
    ),
    "classes 1 and 1.0": (
        change("labels.csv", "kind\n" + rows("1", "1.0", "2.", then="0")), None
    ),
    "classes 00 and 01": (change("labels.csv", "kind\n" + rows("00", then="01")), None),
    "a name of a node with #": (
        change("nodes.csv", "name\n" + rows("n1", "#2", then="n3")),
        "nodes.csv, line 3: begins with #, as a comment or a name",
    ),
    "a class with #": (
        change("labels.csv", "kind\n" + rows("#ant", then="bee")),
        "labels.csv, line 2: begins with #, as a comment or a name",
    ),
    "a first class with #": (
        change("labels.csv", rows("#ant", then="bee") + "\n"),
        "labels.csv: expected 11 labels, one per node, got 10",
    ),
    "names with # between quotes": (
        both(change("nodes.csv", "name\n" + rows('"#0"', *(f"n{n}" for n in range(1, NODES)))),
             change("edges.csv", '# mine\n"#0",n3\nn2,"#0"\n'),
             change("labels.csv", '"#ant"\n' * 5 + rows(then="bee", count=NODES - 5))),
        None,
    ),
    "few weights": (
        change("edge_weight.npy", np.ones(3)),
        "edge_weight.npy: expected numbers [",
    ),
    "weights in columns": (
        change("edge_weight.npy", np.ones((28, 2))),
        "edge_weight.npy: expected numbers [",
    ),
    "features of edges that are not finite": (
        change("edge_attr.csv", "a\n" + rows("1", "inf", count=len(parts()["edges"]))),
        "edge_attr.csv, line 3: is inf, expected finite numbers",
    ),
    "words for weights": (
        change("edge_weight.csv", rows("1", "heavy", count=len(parts()["edges"]))),
        "edge_weight.csv, line 2: expected a number, got 'heavy'",
    ),
    "objects": (
        change("labels.npy", np.array([None] * NODES)),
        "labels.npy: is not an array: it holds Python objects, which are not loaded",
    ),
    "a pickle": (
        change("labels.npy", "cposix\nsystem\n"),
        "labels.npy: is not an array: another kind of file",
    ),
    "a page": (change("edges.csv", "<!DOCTYPE html>\n<html>404\n"), "edges.csv: is a web page"),
}  # fmt: skip
WRONG |= {
    f"a pointer for {name}": (change(name, POINTER), f"{name}: is a Git LFS pointer")
    for name in ("features.npy", "features.npz", "edges.csv", "labels.tsv", "val.parquet")
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", WRONG)
def test_what_may_be_meant_otherwise_is_refused(tmp_path, case):
    changed, message = WRONG[case]
    for name, values in parts().items():
        np.save(tmp_path / f"{name}.npy", values)
    changed(tmp_path)
    if message is None:
        assert graph_of(tmp_path).graph.num_nodes == NODES
        return
    with pytest.raises(UserError) as caught:
        graph_of(tmp_path)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("part", ["features", "labels"])
def test_an_index_in_parquet_counts_the_rows(tmp_path, part):
    """As in text; pandas writes it as a column, of which the metadata say that it is the index."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, values in parts().items():
        if name != part:
            np.save(tmp_path / f"{name}.npy", values)
    values = parts()[part]
    columns = {f"f{i}": c for i, c in enumerate(values.reshape(len(values), -1).T)}
    metadata = {"pandas": json.dumps({"index_columns": ["__index_level_0__"]})}

    def write(order):
        table = pyarrow.table(columns | {"__index_level_0__": order})
        parquet.write_table(table.replace_schema_metadata(metadata), tmp_path / f"{part}.parquet")

    write(np.arange(NODES))
    assert graph_of(tmp_path).graph.num_nodes == NODES
    write(np.arange(NODES)[::-1])
    with pytest.raises(UserError, match=rf"{part}.parquet: its index .* is not 0, 1, 2"):
        graph_of(tmp_path)


@pytest.mark.parametrize("part", ["features", "labels"])
@pytest.mark.parametrize("end", [None, (0, NODES, 1), (NODES - 1, -1, -1), (0, 2 * NODES, 2)])
def test_a_range_as_index_in_parquet_counts_the_rows(tmp_path, part, end):
    """pandas writes it as three numbers among the metadata."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, values in parts().items():
        if name != part:
            np.save(tmp_path / f"{name}.npy", values)
    values = parts()[part]
    columns = {f"f{i}": c for i, c in enumerate(values.reshape(len(values), -1).T)}
    start, stop, step = end or (0, 5 * NODES, 1)  # that of a table, of which rows were taken out
    index = {"kind": "range", "name": None, "start": start, "stop": stop, "step": step}
    table = pyarrow.table(columns).replace_schema_metadata(
        {"pandas": json.dumps({"index_columns": [index]})}
    )
    parquet.write_table(table, tmp_path / f"{part}.parquet")
    if step == 1:
        assert graph_of(tmp_path).graph.num_nodes == NODES
        return
    with pytest.raises(UserError, match=rf"{part}.parquet: its index {start}, … is not 0, 1, 2"):
        graph_of(tmp_path)


@pytest.mark.parametrize("part", ["features", "edge_attr"])
def test_an_index_in_parquet_that_is_a_column_is_refused(tmp_path, part):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, values in parts().items():
        if name != part:
            np.save(tmp_path / f"{name}.npy", values)
    count = NODES if part == "features" else len(parts()["edges"])
    table = pyarrow.table({"index": np.arange(count), "a": np.ones(count), "b": np.ones(count)})
    parquet.write_table(table, tmp_path / f"{part}.parquet")
    with pytest.raises(UserError, match=rf"{part}.parquet: the first column counts the rows or"):
        graph_of(tmp_path)


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
    for name, values in parts().items():
        np.save(tmp_path / f"{name}.npy", values)
    edges = parts()["edges"]
    (tmp_path / "edges.npy").unlink()
    nodes = [f"n{n}" if are_named else n for n in range(NODES)]
    if are_named:
        change("nodes.csv", "".join(f"{name}\n" for name in nodes))(tmp_path)
    columns = {name: [nodes[n] for n in e] for name, e in zip(header, edges.T, strict=True)}
    if ending == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table(columns), tmp_path / "edges.parquet")
    else:
        lines = [header, *zip(*columns.values(), strict=True)]
        text = "".join(f"{a},{b}\n" for a, b in lines)
        change("edges.csv", text)(tmp_path)
    if is_turned is None:
        with pytest.raises(UserError, match=f"edges.{ending}: the columns .* do not say"):
            graph_of(tmp_path)
        return
    found = graph_of(tmp_path).graph.edge_index.numpy()
    assert found.tolist() == (edges.T[::-1] if is_turned else edges.T).tolist()


@pytest.mark.parametrize("kind", [int, str])
def test_parquet_is_by_name_as_text_is(tmp_path, kind):
    """Also where names are numbers, which are never those of the rows then."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    given = parts()
    names = np.array([*range(1, NODES), 0]) if kind is int else np.array(list("abcdefghijk"))

    def write(part, **columns):
        parquet.write_table(pyarrow.table(columns), tmp_path / f"{part}.parquet")

    for name in ("features", "labels"):
        np.save(tmp_path / f"{name}.npy", given[name])
    write("nodes", name=names)
    write("edges", a=names[given["edges"][:, 0]], b=names[given["edges"][:, 1]])
    splits = {name: given[name][:, 0].nonzero()[0] for name in ("train", "val", "test")}
    for name, nodes in splits.items():
        write(name, node=names[nodes])
    graph = graph_of(tmp_path).graph
    assert graph.edge_index.T.tolist() == given["edges"].tolist()
    for name, nodes in splits.items():
        assert graph[f"{name}_mask"].nonzero().flatten().tolist() == nodes.tolist()
    unknown = 99 if kind is int else "z"
    write("val", node=[unknown, *names[splits["val"]].tolist()])  # no header
    with pytest.raises(UserError, match=f"val.parquet, row 0: '{unknown}' is not the name"):
        graph_of(tmp_path)
    write("edges", a=[unknown, names[0].item()], b=[unknown, names[1].item()])
    with pytest.raises(UserError, match=f"edges.parquet, row 0: '{unknown}' is not the name"):
        graph_of(tmp_path)


@pytest.mark.filterwarnings("ignore:data. edges carry")
@pytest.mark.parametrize("part", ["edge_weight", "edge_attr"])
@pytest.mark.parametrize("ending", ["csv", "parquet", "range"])
def test_what_edges_carry_has_their_index(tmp_path, part, ending):
    for name, values in parts().items():
        np.save(tmp_path / f"{name}.npy", values)
    edges = parts()["edges"]
    counting = np.arange(len(edges))

    def write(name, columns, index):
        if ending == "csv":
            rows = zip(index.tolist(), *(c.tolist() for c in columns.values()), strict=True)
            lines = [("", *columns), *rows]
            change(f"{name}.csv", "".join(f"{','.join(map(str, r))}\n" for r in lines))(tmp_path)
            return
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        (tmp_path / f"{name}.npy").unlink(missing_ok=True)
        start, step = index[0].item(), (index[1] - index[0]).item()
        stop = start + step * len(index)
        described = {"kind": "range", "name": None, "start": start, "stop": stop, "step": step}
        if ending == "parquet":
            described, columns = "__index_level_0__", columns | {"__index_level_0__": index}
        metadata = {"pandas": json.dumps({"index_columns": [described]})}
        table = pyarrow.table(columns).replace_schema_metadata(metadata)
        parquet.write_table(table, tmp_path / f"{name}.parquet")

    values = {"w": counting / 8}
    for of_edges, of_values, fits in (
        (counting, counting, True),
        (counting[::-1], counting[::-1], True),
        (3 * counting, 3 * counting, True),  # of rows that were filtered
        (counting, counting[::-1], False),
        (counting[::-1], counting, False),
    ):
        write("edges", {"a": edges[:, 0], "b": edges[:, 1]}, of_edges)
        write(part, values, of_values)
        if fits:
            assert graph_of(tmp_path).graph[part].flatten().tolist() == values["w"].tolist()
            continue
        with pytest.raises(UserError, match=rf"{part}.* its index is not that of .*edges"):
            graph_of(tmp_path)


def test_a_mask_of_two_nodes_may_be_their_numbers(tmp_path):
    for name, values in {"x": np.ones((2, 3)), "y": [0, 1], "edges": [[0, 1]]}.items():
        np.save(tmp_path / f"{name}.npy", np.array(values))
    for split in ("train", "val", "test"):
        np.save(tmp_path / f"{split}.npy", np.array([1, 0]))
    with pytest.raises(UserError, match=r"\[1, 0\] is a mask, or the numbers of nodes"):
        graph_of(tmp_path)


@pytest.mark.filterwarnings("ignore:data. edges carry")
def test_reversed_edges_carry_the_same(tmp_path):
    arrays = parts() | {"edges": np.array([[0, 1], [1, 0], [2, 3]])}
    arrays |= {"edge_weight": np.array([1.0, 3, 5]), "edge_attr": np.array([[1.0, 2]] * 3)}
    np.savez(tmp_path / "graph.npz", **arrays)
    graph = graph_of(tmp_path / "graph.npz", undirected=True).graph
    edges = dict(
        zip(map(tuple, graph.edge_index.t().tolist()), graph.edge_weight.tolist(), strict=True)
    )
    assert edges == {(0, 1): 2.0, (1, 0): 2.0, (2, 3): 5.0, (3, 2): 5.0}
    assert graph.edge_attr.tolist() == [[1, 2]] * 4


def test_all_splits_of_masks_are_run(tmp_path):
    """Which are counted by reading the data, once: a resumed job knows the number."""
    for name, values in parts().items():
        np.save(tmp_path / f"{name}.npy", values)
    words = ["task=graph", "data=graph_files", f"data.root={tmp_path}"]
    job = decide(Request.read(Composer(), [*words, "splits=all"]))
    assert [run["data"]["split"] for run in job.runs] == [0, 1]
    assert job.config["splits"] == 2
    with pytest.raises(UserError, match="splits=3: the data has 2"):
        decide(Request.read(Composer(), [*words, "splits=3"]))


def test_a_first_row_of_nodes_that_may_be_a_header_is_said(tmp_path, caplog):
    for name, values in parts().items():
        np.save(tmp_path / f"{name}.npy", values)
    change("val.csv", "0\n3\n")(tmp_path)
    with caplog.at_level("INFO"):
        graph_of(tmp_path)
    assert "val.csv: the first row is read as a node, not as a header" in caplog.text


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
    for name, values in parts().items():
        np.save(tmp_path / f"{name}.npy", values)
    change("edges.csv", edges)(tmp_path)
    if weights:
        np.save(tmp_path / "edge_weight.npy", np.ones(weights))
    assert graph_of(tmp_path).graph.edge_index.T.tolist() == expected


def test_pointers_for_published_files_are_named(graph_files, tmp_path):
    graph_files.write_planetoid(tmp_path / "raw", "Cora")
    graph_files.write_ogb(tmp_path)
    for data, name in (
        (PlanetoidData(tmp_path), "raw/ind.cora.allx"),
        (HeterophilousData(tmp_path, "squirrel"), "squirrel.npz"),
        (OGBFilesData(tmp_path), "raw/edge.csv.gz"),
    ):
        (tmp_path / name).write_text(POINTER)
        with pytest.raises(UserError, match=f"{name}: is a Git LFS pointer"):
            data.load()
