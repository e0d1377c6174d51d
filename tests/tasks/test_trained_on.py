"""A test of a trained module is of nothing that it was trained on, or says so."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from task_support import quiet
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GCN

import attnkit
from attnkit.lightning import UserError
from attnkit.lightning.resume.warm_start import warm_start
from attnkit.tasks.captioning import CaptionCsvData, ImageCaptioning
from attnkit.tasks.graphs import DigitsGraphData, GraphFilesData, NodeClassification
from attnkit.tasks.graphs.features import to_sparse_csr
from attnkit.tasks.graphs.splits import node_keys
from attnkit.tasks.image_classification import (
    ImageClassification,
    ImageDataModule,
    ImageFolderData,
    MemoryImages,
)

SIDE = 8
COUNT = 24
MEAN = {"mean": [0.5] * 3, "std": [0.5] * 3}


pytestmark = pytest.mark.usefixtures("own_cache")


def draw(path, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def root(tmp_path):
    for number in range(COUNT):
        (tmp_path / "old" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        draw(tmp_path / "old" / "ab"[number % 2] / f"{number:02}.png", number)
    return tmp_path / "old"


def labelled(root, **options):
    return ImageFolderData(root, image_size=SIDE, in_channels=3, augment=None, **options)


def captioned(root, **options):
    rows = [f"{path.relative_to(root)},a dog" for path in sorted(root.rglob("*.png"))]
    (root / "table.csv").write_text("\n".join(["image,caption", *rows]))
    return CaptionCsvData(root / "table.csv", root, image_size=SIDE, min_count=1, **options)


def classifier(data):
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 2))
    return ImageClassification(
        model, num_classes=2, class_names=["a", "b"], image_size=SIDE, **MEAN
    )


def captioner(data):
    encoder = attnkit.CNNEncoder(SIDE, dim=8, stages=[[4]])
    model = attnkit.Captioner(
        encoder, attnkit.TransformerDecoder(6, 6, dim=8, depth=1, num_heads=1)
    )
    words = {"vocabulary": data.describe()["vocabulary"], "max_words": 5}
    return ImageCaptioning(model, image_size=SIDE, **words, **MEAN)


TASKS = {"images": (labelled, classifier), "captions": (captioned, captioner)}


def trained(root, make, module_of):
    """The data of a training, its module, and the file of its checkpoint."""
    data = make(root, num_workers=0)
    data.setup("fit")
    module = module_of(data)
    trainer = quiet(root, max_steps=1, limit_val_batches=0)
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(root.parent / "it.ckpt")
    return data, module, root.parent / "it.ckpt"


def contents(data, *splits):
    sets = [getattr(data.sets[split], "images", data.sets[split]) for split in splits]
    sets = [s if hasattr(s, "fetch") else data.sets[n] for s, n in zip(sets, splits, strict=True)]
    return {image.numpy().tobytes() for s in sets for image in s.fetch(torch.arange(len(s)))}


def line_of(module, data, capfd, **options):
    """The line that says what a test is of."""
    capfd.readouterr()
    quiet(".").test(module, datamodule=data, verbose=False, **options)
    lines = "".join(capfd.readouterr()).splitlines()
    return next(line for line in lines if line.startswith("test: "))


def copy(root):
    shutil.copytree(root, root.parent / "copy")
    return root.parent / "copy"


def rename(root):
    (root / "a" / "00.png").rename(root / "a" / "zz.png")


# What is done to the folder of a training, how many images are then there, and what is asked for.
CHANGES = {
    "nothing": (lambda root: None, COUNT, {}),
    "added": (lambda root: draw(root / "a" / "new.png", 99), COUNT + 1, {}),
    "removed": (lambda root: (root / "a" / "00.png").unlink(), COUNT - 1, {}),
    "renamed": (rename, COUNT, {}),
    "copied": (copy, COUNT, {}),
    "seed": (lambda root: None, COUNT, {"seed": 1}),
    "test": (lambda root: None, COUNT, {"test_fraction": 0.4}),
    "val": (lambda root: None, COUNT, {"val_fraction": 0.4}),
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("change", CHANGES)
def test_no_image_of_a_training_is_tested(root, capfd, task, change):
    make, module_of = TASKS[task]
    data, _, file = trained(root, make, module_of)
    seen, left_out = contents(data, "train", "val"), contents(data, "test")
    act, count, options = CHANGES[change]
    again = make(act(root) or root, num_workers=0, **options)
    line = line_of(module_of(data), again, capfd, ckpt_path=file)
    found = contents(again, "test")
    assert not found & seen
    assert change in ("added", "removed") or found == left_out
    assert line == (
        f"test: {len(found)} images of {count}; the others were in the module's training; "
        "data.test_fraction=1 tests all"
    )


@pytest.mark.parametrize("task", TASKS)
def test_what_is_given_or_asked_for_is_tested_whole_and_said(root, capfd, task):
    make, module_of = TASKS[task]
    data, module, _ = trained(root, make, module_of)
    seen = len(contents(data, "train", "val"))
    every = line_of(module, make(root, num_workers=0, test_fraction=1), capfd)
    assert every == f"test: {COUNT} images, {seen} of which were in the module's training"
    for number, path in enumerate(root.rglob("*.png")):
        draw(path, 100 + number)
    new = make(root, num_workers=0)
    assert line_of(module, new, capfd) == f"test: {COUNT} images"


def test_a_given_test_split_says_which_images_were_trained_on(root, capfd):
    data, module, _ = trained(root, labelled, classifier)
    assert line_of(module, data, capfd).endswith(" images")  # as at the end of a training
    shutil.copytree(root, root.parent / "new" / "test")
    line = line_of(module, labelled(root.parent / "new", num_workers=0), capfd)
    seen = len(contents(data, "train", "val"))
    assert line == f"test: {COUNT} images, {seen} of which were in the module's training"


def test_nothing_left_and_nothing_known(root, capfd):
    data, module, _ = trained(root, labelled, classifier)
    for image in root.rglob("*.png"):
        if np.array(Image.open(image)).transpose(2, 0, 1).tobytes() in contents(data, "test"):
            image.unlink()
    with pytest.raises(UserError, match="got 0 of 22: all were in the module's tr") as error:
        line_of(module, labelled(root, num_workers=0), capfd)
    assert len(str(error.value).splitlines()) <= 3
    line = line_of(classifier(data), labelled(root, num_workers=0, test_fraction=0.2), capfd)
    assert line == (
        "test: 4 images of 22; split by data.seed=0, as what the module was trained on is not "
        "known; data.test_fraction=1 tests all"
    )


def test_keys_go_on_from_the_weights_of_another_run(root):
    _, earlier, file = trained(root, labelled, classifier)
    for number, path in enumerate(root.rglob("*.png")):
        draw(path, 100 + number)
    data = labelled(root, num_workers=0)
    data.setup("fit")
    module = classifier(data)
    warm_start(module, file)
    quiet(root, max_steps=1, limit_val_batches=0).fit(module, datamodule=data)
    keys = [*earlier.trained_on.tolist(), *data.training_keys().tolist()]
    assert module.trained_on.tolist() == sorted(keys)


@pytest.mark.parametrize("first", ["weights", "loaders", "a checkpoint without keys"])
def test_what_is_not_known_of_a_training_is_said_after_the_next(root, capfd, first):
    """A later training adds its keys, but what came before it stays unknown."""
    data, module, file = trained(root, labelled, classifier)
    if first == "loaders":
        module = classifier(data)
        quiet(root, max_steps=1, limit_val_batches=0).fit(module, data.train_dataloader())
    else:
        state = torch.load(file, weights_only=False)
        del state["trained_on"]
        weights = first == "weights"
        other = root.parent / ("w.pt" if weights else "other.ckpt")
        torch.save(module.state_dict() if weights else state, other)
        module = classifier(data)
        warm_start(module, other)
    data = labelled(root, num_workers=0, seed=1)
    trainer = quiet(root, max_steps=1, limit_val_batches=0)
    trainer.fit(module, datamodule=data)
    unknown = "; what else the module was trained on is not known"
    count = len(data.sets["test"])
    assert line_of(module, data, capfd) == f"test: {count} images{unknown}"
    trainer.save_checkpoint(root.parent / "again.ckpt")
    again = classifier(data)
    warm_start(again, root.parent / "again.ckpt")
    data = labelled(root, num_workers=0, seed=2)
    assert line_of(again, data, capfd) == (
        f"test: {count} images of {COUNT}; the others were in the module's training{unknown}; "
        "data.test_fraction=1 tests all"
    )


class Arrays(ImageDataModule):
    def load(self):
        images = torch.randint(0, 256, (COUNT, 3, SIDE, SIDE), generator=torch.manual_seed(0))
        return {"train": MemoryImages(images.byte(), torch.arange(COUNT) % 2)}, ["a", "b"]


def test_images_in_memory_are_known_too(root, capfd):
    data, module, _ = trained(root, lambda _, **options: Arrays(**options), classifier)
    again = Arrays(seed=1)
    assert "the others were in the module's training" in line_of(module, again, capfd)
    assert contents(again, "test") == contents(data, "test")


@pytest.mark.parametrize("batch_size", [None, 64])
def test_no_node_of_a_training_is_tested(tmp_path, batch_size):
    def graph(**options):
        return DigitsGraphData(num_val=300, batch_size=batch_size, **options)

    data = graph()
    data.setup()
    module = NodeClassification(GCN(64, 4, 1, 10), num_classes=10, class_names=data.class_names)
    quiet(tmp_path, max_steps=1, limit_val_batches=0).fit(module, datamodule=data)
    seen = data.graph.train_mask | data.graph.val_mask
    nodes = []
    module.on_test_batch_end = lambda outputs, *_: nodes.append(outputs["node"])
    quiet(tmp_path).test(module, datamodule=graph(), verbose=False)
    assert sum(map(len, nodes)) == 1000  # as after the training
    nodes.clear()
    other = graph(seed=1, k=5, normalize_features=True)  # the same nodes
    with pytest.warns(UserWarning, match=r"of 1,000 nodes; the others .* data.seed"):
        quiet(tmp_path).test(module, datamodule=other, verbose=False)
    tested = torch.cat(nodes)
    assert not seen[tested].any()
    assert len(tested) == int((other.graph.test_mask & ~seen).sum()) < 1000
    quiet(tmp_path, max_steps=1, limit_val_batches=0).fit(module, datamodule=other)
    nodes.clear()
    with pytest.warns(UserWarning, match=r"of 1,000 nodes were in earlier trainings"):
        quiet(tmp_path).test(module, datamodule=other, verbose=False)
    assert sum(map(len, nodes)) == 1000  # the split of a training stays whole
    fresh = NodeClassification(GCN(64, 4, 1, 10), num_classes=10, class_names=data.class_names)
    with pytest.warns(UserWarning, match="not known which nodes the module was trained on"):
        quiet(tmp_path).test(fresh, datamodule=graph(), verbose=False)


def test_a_node_is_known_again_in_its_graph_alone():
    """By its number, label and features."""

    def graph(seed, edges):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(40, 3, generator=generator)
        edge_index = torch.randint(0, 40, (2, edges), generator=generator)
        return Data(x=x, edge_index=edge_index, y=torch.arange(40) % 3)

    known = node_keys(graph(0, 200))
    assert torch.equal(node_keys(graph(0, 200)), known)
    assert not torch.isin(node_keys(graph(1, 200)), known).any()
    assert torch.equal(node_keys(graph(0, 20)), known)
    assert not torch.isin(node_keys(graph(1, 0)), known).any()
    more = graph(0, 200)  # one whose features are those of the first
    more.x = torch.cat([more.x, more.x[:1]])
    more.y = torch.cat([more.y, more.y[:1]])
    more.num_nodes = 41
    assert torch.isin(node_keys(more), known).tolist() == [True] * 40 + [False]
    sparse = graph(0, 20)
    sparse.x = to_sparse_csr(sparse.x)
    assert torch.equal(node_keys(sparse), known)


@pytest.mark.parametrize("undirected", [False, True])
@pytest.mark.parametrize("features", ["ones", "degrees"])
def test_nodes_with_equal_features_are_known_again_among_other_edges(
    tmp_path, features, undirected
):
    count, random = 120, np.random.default_rng(0)
    edges = random.integers(0, count, (400, 2))
    degrees = np.bincount(edges[:, 1], minlength=count).clip(max=7)
    x = np.ones((count, 8)) if features == "ones" else np.eye(8)[degrees]
    arrays = {"x": x.astype(np.float32), "y": np.arange(count) % 3}
    np.savez(tmp_path / "graph.npz", edges=edges, **arrays)
    data = GraphFilesData(tmp_path / "graph.npz")
    data.setup()
    module = NodeClassification(GCN(8, 4, 1, 3), num_classes=3, class_names=data.class_names)
    quiet(tmp_path, max_steps=1, limit_val_batches=0).fit(module, datamodule=data)
    seen = data.graph.train_mask | data.graph.val_mask
    more = np.concatenate([edges, random.integers(0, count, (99, 2))])
    np.savez(tmp_path / "graph.npz", edges=more, **arrays)
    other = GraphFilesData(tmp_path / "graph.npz", seed=1, undirected=undirected)
    nodes = []
    module.on_test_batch_end = lambda outputs, *_: nodes.append(outputs["node"])
    with pytest.warns(UserWarning, match="the others were .* with other nodes, so that only"):
        quiet(tmp_path).test(module, datamodule=other, verbose=False)
    tested = torch.cat(nodes)
    assert not seen[tested].any()
    assert len(tested) == int((other.graph.test_mask & ~seen).sum()) > 0
