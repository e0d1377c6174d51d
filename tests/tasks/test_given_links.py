"""Links that the data hold out: OGB's link sets and own files, with metrics as OGB's evaluator."""

import numpy as np
import pytest
import torch
from made_graphs import ogb_hits, ogb_ranks
from task_support import quiet
from torch import nn

from attnkit.launch.main import main
from attnkit.lightning import UserError
from attnkit.tasks.graphs import GraphFilesData, LinkPrediction, Links, OGBFilesData

NODES = 31


def ready(folder, links=None, cls=OGBFilesData, **options):
    data = cls(folder, links=links or Links(), **{"batch_size": 8, **options})
    data.setup()
    return data


def as_set(pairs):
    return {*map(tuple, np.asarray(pairs).tolist())}


def both(pairs):
    return as_set(pairs) | as_set(np.asarray(pairs)[:, ::-1])


class Given(nn.Module):
    """A vector of each node, whatever the graph is."""

    def __init__(self, channels=6):
        super().__init__()
        self.nodes = nn.Parameter(torch.randn(NODES, channels))

    def forward(self, x, edge_index):
        return self.nodes


def figures(data, module, tmp_path):
    return quiet(tmp_path).test(module, datamodule=data, verbose=False)[0]


@pytest.mark.parametrize("kind", ["collab", "ddi"])
def test_all_edges_are_ranked_among_the_given_negatives(graph_files, tmp_path, kind):
    edges, splits = graph_files.link_arrays(kind)
    with pytest.warns(UserWarning, match="data: 2 of 14 edges of test are trained on, too"):
        data = ready(graph_files.write_links(tmp_path / kind, kind), undirected=True)
    assert not data.describe()["directed"]
    module = LinkPrediction(Given(), hits_at=[1, 5, 20, 50])
    found = figures(data, module, tmp_path)
    vectors = module.model.nodes.detach().numpy()
    scores = vectors @ vectors.T
    given = splits["test"]
    positive, negative = (scores[given[name][:, 0], given[name][:, 1]] for name in given
                          if name in ("edge", "edge_neg"))  # fmt: skip
    for k in (1, 5, 20, 50):
        assert found[f"test/hits{k}"] == pytest.approx(ogb_hits(positive, negative, k)), k
    assert found["test/hits50"] == 1 != found["test/hits5"]
    right = np.concatenate([positive > 0, negative <= 0]).mean()
    assert found["test/accuracy"] == pytest.approx(right)
    for split, name in (("val", "valid"), ("test", "test")):
        [batch] = data.loader(split)
        assert batch.pairs.T.tolist() == splits[name]["edge"].tolist()
        assert batch.negatives.T.tolist() == splits[name]["edge_neg"].tolist()
        assert batch.ranked.T.tolist() == splits[name]["edge_neg"].tolist()
        assert as_set(batch.edge_index.T) == both(edges)
    if kind == "ddi":
        assert torch.equal(batch.x.to_dense(), torch.eye(NODES))
        assert data.describe()["in_channels"] == NODES
    assert data.summary()[1].endswith("ranked among 43 other pairs each")


def test_a_source_is_ranked_among_its_own_negatives(graph_files, tmp_path):
    edges, splits = graph_files.link_arrays("citation")
    data = ready(graph_files.write_links(tmp_path / "set", "citation"))
    assert data.describe()["directed"]
    module = LinkPrediction(Given(), directed=True)
    found = figures(data, module, tmp_path)
    vectors = module.model.nodes.detach().numpy()
    scores, given = vectors[:, :3] @ vectors[:, 3:].T, splits["test"]
    source, target, others = given.values()
    ranks = ogb_ranks(scores[source, target], scores[source[:, None], others])
    assert found["test/mrr"] == pytest.approx((1 / ranks).mean())
    for k in (1, 3, 10):
        assert found[f"test/hits{k}"] == pytest.approx((ranks <= k).mean())
    assert 0 < found["test/hits10"] < 1
    [batch] = data.loader("test")
    assert as_set(batch.edge_index.T) == as_set(edges)
    assert batch.negatives.shape == batch.pairs.shape


def test_training_knows_nothing_of_what_is_held_out(graph_files, tmp_path):
    edges, splits = graph_files.link_arrays("ddi")
    folder = graph_files.write_links(tmp_path / "set", "ddi")
    data = ready(folder, Links(num_negatives=20), undirected=True)
    asked, negatives = set(), set()
    for epoch in range(20):
        loader = data.loader("train")
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            asked |= as_set(batch.pairs.T)
            assert not both(batch.pairs.T) & as_set(batch.edge_index.T)
            assert both(batch.pairs.T) | as_set(batch.edge_index.T) == both(edges)
            negatives |= as_set(batch.negatives.T)
    assert asked | {(j, i) for i, j in asked} == both(edges)
    assert not negatives & both(edges)
    held = as_set(splits["valid"]["edge"]) | as_set(splits["test"]["edge"][:12])
    assert negatives >= held  # they are drawn as if they were no edges
    [batch] = data.loader("predict")
    present = {(n // NODES, n % NODES) for n in batch.present.tolist()}
    assert present >= held | both(edges)


def test_every_negative_counts_in_one_process(graph_files, tmp_path):
    data = ready(graph_files.write_links(tmp_path / "set"), undirected=True)
    items = data._link_sets.items("test", 8)
    parts = [items.__getitems__(range(start, len(items), 3)) for start in range(3)]
    negatives = torch.cat([part.negatives for part in parts], dim=1)
    assert sorted(negatives.T.tolist()) == sorted(items.negatives.T.tolist())
    assert all(torch.equal(part.ranked, items.ranked) for part in parts)


def test_trains_tests_and_predicts(graph_files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    graph_files.write_links(tmp_path / "set")
    small = ("model.hidden_channels=8", "model.num_classes=8", "data.batch_size=8")
    assert main(["task=graph", "level=link", "data=ogb_files", "data.root=set", "trainer=cpu",
                 "data.undirected=true", "module.hits_at=[5]", "trainer.max_epochs=1", *small,
                 "run_dir=made"]) == 0  # fmt: skip
    assert main(["run=test", "ckpt=made", "run_dir=again"]) == 0
    results = [(tmp_path / name / "results.json").read_text() for name in ("made", "again")]
    hits = [line for text in results for line in text.splitlines() if '"test/hits5"' in line]
    assert hits[0] == hits[1]  # also of edges that are in training, too
    assert main(["run=predict", "ckpt=made", "run_dir=said"]) == 0


# --- own files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("brings", [("edges", "negatives"), ("edges",)])
def test_own_files(graph_files, tmp_path, brings):
    edges, splits = graph_files.link_arrays("ddi")
    names = [f"n{number}" for number in range(NODES)]
    parts = {"edges": np.unique(edges, axis=0)}
    for split, name in (("val", "valid"), ("test", "test")):
        given = {"edges": splits[name]["edge"], "negatives": splits[name]["edge_neg"]}
        parts |= {f"{split}_{kind}": given[kind] for kind in brings}
    for name, pairs in parts.items():
        lines = "".join(f"{names[i]},{names[j]}\n" for i, j in pairs)
        (tmp_path / f"{name}.csv").write_text("from,to\n" + lines)
    (tmp_path / "nodes.txt").write_text("\n".join(names))
    np.save(tmp_path / "features.npy", np.random.rand(NODES, 5).astype(np.float32))
    data = ready(tmp_path, cls=GraphFilesData, undirected=True, links=Links(num_ranked=100))
    [batch] = data.loader("test")
    pairs = splits["test"]["edge"].tolist()
    assert as_set(batch.edge_index.T) == both(edges)
    if "negatives" in brings:
        assert batch.pairs.T.tolist() == pairs
        assert batch.ranked.T.tolist() == splits["test"]["edge_neg"].tolist()
    else:  # drawn, from both ends of each edge
        assert batch.pairs.T.tolist() == pairs + [pair[::-1] for pair in pairs]
        assert batch.ranked.shape == (2, 2 * len(pairs), 100)
        held = both(splits["valid"]["edge"]) | both(splits["test"]["edge"])
        assert not as_set(batch.ranked.flatten(1).T) & (held | both(edges))
    (tmp_path / "val_edges.csv").write_text("from,to\n")
    with pytest.raises(UserError, match=r"val_edges.csv: expected edges, got none"):
        ready(tmp_path, cls=GraphFilesData, undirected=True)
    (tmp_path / "val_edges.csv").unlink()
    with pytest.raises(UserError, match="has no file val_edges"):
        ready(tmp_path, cls=GraphFilesData, undirected=True)


# --- bad input ------------------------------------------------------------------------------------


class Odd:
    """What no file of data holds."""


def wrong(**changes):
    def change(folder):
        path = folder / "split/time/test.pt"
        with torch.serialization.safe_globals([]):
            held = torch.load(path, weights_only=False)
        torch.save({k: v for k, v in {**held, **changes}.items() if v is not None}, path)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wrong(extra=Odd()), r"test.pt is not a file of tensors and arrays: it names "
                             r"[\w.]*test_given_links.Odd, which is refused"),
        (wrong(edge=np.array([["a", "b"]], dtype=object)),
         "test.pt is not a file of tensors and arrays: an array of .*O8', expected numbers"),
        (wrong(edge_neg=None), r"test.pt: expected arrays edge and edge_neg, or source_node, .*, "
                               r"got edge \[14, 2\], year \[14\], weight \[14\]"),
        (wrong(edge=np.ones((3, 2))), "test.pt: expected arrays edge and edge_neg"),
        (wrong(edge=np.array([[0, 31]])),
         "test.pt: there is no node 31 of edges: expected 0 to 30"),
        (wrong(edge_neg=np.array([[0, -1]])), "test.pt: there is no node -1 of absent pairs"),
        (wrong(edge=np.ones((3, 4), int)), r"test.pt: expected edges, int64 \[2, …\], got .*4, 3"),
        (lambda folder: (folder / "split/time/test.pt").write_bytes(b"PK\3\4torn"),
         "test.pt is not a file of tensors and arrays: .* not a ZIP archive"),
        (lambda folder: (folder / "split/time/test.pt").write_bytes(b""),
         "test.pt is not a file of tensors and arrays: it ends early"),
        (lambda folder: (folder / "split/time/test.pt").unlink(),
         "test.pt: cannot be read: No such"),
        (lambda folder: (folder / "split/other").mkdir(), "data.split_name: expected a folder of"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named(graph_files, tmp_path, change, message):
    folder = graph_files.write_links(tmp_path / "set")
    change(folder)
    with pytest.raises(UserError, match=message) as error:
        ready(folder, undirected=True)
    assert "\n" not in str(error.value)


def test_tensors_are_read_too(graph_files, tmp_path):
    folder = graph_files.write_links(tmp_path / "set")
    _, splits = graph_files.link_arrays("collab")
    wrong(**{k: torch.from_numpy(v).int() for k, v in splits["test"].items()})(folder)
    [batch] = ready(folder, undirected=True).loader("test")
    assert batch.pairs.T.tolist() == splits["test"]["edge"].tolist()


@pytest.mark.parametrize(
    ("links", "message"),
    [
        (
            {"val_fraction": 0.05},
            "data.links.val_fraction: the data has its own splits, expect",
        ),
        ({"num_ranked": 7}, "data.links.num_ranked: .* expected 100, got 7"),
    ],
)
def test_a_setting_that_is_not_read_is_refused(graph_files, tmp_path, links, message):
    with pytest.raises(UserError, match=message):
        ready(graph_files.write_links(tmp_path / "set"), Links(**links), undirected=True)
