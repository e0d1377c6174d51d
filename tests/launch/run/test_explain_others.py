"""`run=explain` of graphs, captions and networks that nobody trained here."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import attnkit as toolkit
from attnkit.launch.main import main
from attnkit.tasks.captioning import ImageCaptioning, ScenesData
from attnkit.tasks.graphs import DigitGridsData

pytestmark = pytest.mark.slow
QUIET = ("trainer=cpu", "callbacks.curves=null", "logger.tensorboard=null")
TIMM = ("model=timm", "model.name=vit_tiny_patch16_224", "+model.depth=2", "model.image_size=64")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The runs `graph`, `graphs`, `links` and `captions`, and a picture."""
    folder = tmp_path_factory.mktemp("explain")
    graph = ("task=graph", "data=dictionary_lookup", "data.k=3", "trainer.max_epochs=2")
    graphs = ("task=graph", "level=graph", "model.hidden_channels=8", "trainer.max_epochs=1",
              "trainer.limit_batches=2")  # fmt: skip
    small = ("model.hidden_channels=8", "trainer.max_epochs=1")
    links = ("task=graph", "level=link", *small)
    captions = (
        "task=captioning", "encoder.dim=16", "encoder.stages=[[8],[8],[16]]", "decoder.dim=16",
        "data.image_size=24", "data.num_train=32", "data.num_val=4", "data.num_test=5",
        "data.batch_size=8", "trainer.max_epochs=2",
    )  # fmt: skip
    made = {"graph": graph, "graphs": graphs, "links": links, "captions": captions}
    for name, command in made.items():
        assert main([*command, *QUIET, f"run_dir={folder / name}"]) == 0
    pixels = np.random.default_rng(0).integers(0, 256, (70, 90, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "picture.png")
    return folder


def rows_of(folder) -> list[dict[str, str]]:
    with Path(folder, "scores.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_nodes(attnkit, runs):
    methods = "explain.methods=[attention,occlusion]"
    given = (f"ckpt={runs}/graph", "explain.nodes=[2,1]", methods)
    done = attnkit("run=explain", *given, "run_dir=x")
    assert done.code == 0, done.err
    assert [(row["node"], row["map"]) for row in rows_of("x")] == [
        (node, method) for node in "21" for method in ("attention", "occlusion")
    ]
    assert all(row["verdict"].endswith("than random") for row in rows_of("x"))
    assert all(0 <= float(row["auroc"]) <= 1 for row in rows_of("x"))
    arrays = np.load("x/maps.npz")
    assert arrays["edges_2_attention"].shape == arrays["edge_index"].shape[1:]
    page = Path("x/explain.html").read_text()
    assert page.count("<h2>") == 2
    assert "<h2>Node 2</h2>" in page
    assert "forwards of what reaches a node" in done.out


def test_whole_graphs(attnkit, runs):
    few = (f"ckpt={runs}/graphs", "explain.trust=none", "explain.num_images=3")
    done = attnkit("run=explain", *few, "run_dir=x")
    assert done.code == 0, done.err
    assert "shown: 3 of 359 test graphs, from each class in turn" in done.out
    data = DigitGridsData()
    data.setup()
    numbers = data.sets["test"].numbers.tolist()
    first = [next(n for n in numbers if data.graphs.y[n] == digit) for digit in range(3)]
    assert [int(row["graph"]) for row in rows_of("x")] == first
    assert [row["label"] for row in rows_of("x")] == ["0", "1", "2"]
    done = attnkit("run=predict", f"ckpt={runs}/graphs", "run_dir=said")
    assert done.code == 0, done.err
    with Path("said/predictions.csv").open(newline="") as file:
        said = {row["graph"]: row["label"] for row in csv.DictReader(file)}
    assert all(row["predicted"] == said[row["graph"]] for row in rows_of("x"))
    page = Path("x/explain.html").read_text()
    assert page.count("<h2>") == 3
    assert f"<h2>Graph {first[2]}</h2>" in page
    done = attnkit("run=explain", *few, "explain.graphs=[1796,3]", "run_dir=y")
    assert done.code == 0, done.err
    assert [row["graph"] for row in rows_of("y")] == ["1796", "3"]
    seen = toolkit.run(resume=str(runs / "graphs")).explain(graph=3)
    np.testing.assert_allclose(np.load("y/maps.npz")["edges_3_relevance"], seen.edges, atol=1e-6)


def test_pairs_of_nodes(attnkit, runs):
    few = (f"ckpt={runs}/links", "explain.pairs=[[3,7],[9,2]]", "explain.methods=[occlusion]")
    done = attnkit("run=explain", *few, "run_dir=x")
    assert done.code == 0, done.err
    assert [(row["source"], row["target"]) for row in rows_of("x")] == [("3", "7"), ("9", "2")]
    made = toolkit.run(resume=str(runs / "links"))
    seen = made.explain(index=(9, 2), method="occlusion")
    np.testing.assert_allclose(np.load("x/maps.npz")["edges_9_2_occlusion"], seen.edges, atol=1e-6)
    graph = made.data.graph
    score = made.module.eval().scores_of(graph)(torch.tensor([[9], [2]]))
    assert float(rows_of("x")[1]["probability"]) == pytest.approx(float(score.sigmoid()), abs=1e-5)
    page = Path("x/explain.html").read_text()
    assert "<h2>Pair 9, 2</h2>" in page
    assert "occlusion of the pair 9, 2: edge, p = " in page


def test_sentences(attnkit, runs):
    done = attnkit("run=explain", f"ckpt={runs}/captions", "explain.num_images=2", "run_dir=x")
    assert done.code == 0, done.err
    assert "2 of 5 test images, the first" in done.out
    rows, arrays = rows_of("x"), np.load("x/maps.npz")
    assert {row["image"] for row in rows} == {"Test image 0", "Test image 1"}
    images, words, *_ = arrays["map_relevance"].shape
    assert images == 2
    assert arrays["words"].shape == (2, words)
    said = [word for sentence in arrays["words"] for word in sentence if word]
    assert said == [row["word"] for row in rows]
    assert all(
        (float(row["gap"]) > float(row["gap_random"])) is row["verdict"].startswith("better")
        for row in rows
    )
    page = Path("x/explain.html").read_text()
    assert page.count("<h2>") == 2
    named = sum(row.get("mass_over_chance", "") != "" for row in rows)
    assert page.count("× chance on what it names") == named

    data = ScenesData(num_train=32, num_val=4, num_test=5, image_size=24, num_workers=0)
    data.setup()
    module = ImageCaptioning.load_from_checkpoint(runs / "captions/checkpoints/best.ckpt").eval()
    images = module.normalized(data.sets["test"].images.fetch(torch.tensor([0, 1])))
    trust = toolkit.explain(
        module.model, images, torch.from_numpy(arrays["sentences"])
    ).trust_words()
    gaps = [score.gap for sentence in trust.scores for score in sentence]
    assert [float(row["gap"]) for row in rows] == pytest.approx(gaps, rel=1e-3, abs=1e-7)


def test_a_network_that_nobody_trained(attnkit, runs):
    done = attnkit("run=explain", *TIMM, f"images={runs}/picture.png", "run_dir=x")
    assert done.code == 0, done.err
    assert "weights: random" in done.out
    assert "weights</dt><dd>random" in Path("x/explain.html").read_text()
    assert np.load("x/maps.npz")["map_relevance"].shape == (1, 4, 4)
    config = Path("x/config.yaml").read_text()
    assert "num_classes: 1000" in config
    assert "0.5" in config, "the mean of the network's own"


REFUSED = [
    ("ckpt=RUNS/graph", "explain.nodes: expected the numbers of nodes to explain"),
    ("ckpt=RUNS/graph explain.graphs=[1] explain.nodes=[1]", "explain.graphs: expected none"),
    ("ckpt=RUNS/graph explain.nodes=[1,100000]", "explain.nodes: expected numbers from 0 to"),
    ("ckpt=RUNS/graph explain.nodes=[1] images=RUNS/picture.png", "has no images; leave"),
    ("ckpt=RUNS/graph explain.nodes=[1] explain.layer=-1", "explain.layer: expected none for node"),
    ("ckpt=RUNS/graphs explain.graphs=[1797]", "explain.graphs: expected numbers from 0 to 1796, "),
    ("ckpt=RUNS/links", "explain.pairs: expected the numbers of nodes to explain, 0 to 1796, such"),
    ("ckpt=RUNS/links explain.pairs=[[1,2,3]]", "explain.pairs: expected two nodes each, got"),
    ("ckpt=RUNS/captions explain.method=legrad", "for sentences, got 'legrad'"),
    ("ckpt=RUNS/captions explain.target=1", "explain.target: expected none for sentences, got 1"),
    ("ckpt=RUNS/captions explain.against=RUNS/captions", "explain.against: expected none for"),
    ("", "run=explain: needs ckpt=PATH, a checkpoint or a run folder"),
    (" ".join(TIMM), "run=explain: without ckpt=PATH it needs images=PATH"),
    ("model=timm model.name=vit_tinny images=RUNS/picture.png", "model.name: expected a name"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_refused(refused, runs, given, said):
    refused(said, "run=explain", *given.replace("RUNS", str(runs)).split())


def test_a_class_without_explained_is_told(mine, refused):
    assert mine("run_dir=trained").code == 0
    refused(
        "give it a method explained(batch)", "run=explain", "ckpt=trained", "run_dir=x", by=mine
    )
    assert torch.is_grad_enabled()
