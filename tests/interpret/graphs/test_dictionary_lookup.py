"""DictionaryLookup: the one right edge of each query, of networks trained on it."""

import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy
from torchmetrics.functional.classification import binary_auroc

import attnkit
from attnkit.tasks.graphs.datasets.synthetic import LookupGraphs, distinct_permutations

K, STEPS, BATCH = 10, 400, 64


def trained(repository, values):
    """GATv2 as in the experiment's configuration, on graphs of these values [graphs, k]."""
    torch.manual_seed(1)
    graphs = LookupGraphs(values, "train")
    recipe = yaml.safe_load((repository / "conf/experiment/dictionary_lookup.yaml").read_text())
    options = recipe["model"]
    width = options.pop("hidden_channels")
    model = attnkit.GAT(2 * K + 1, width, K, score="gatv2", **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe["optimizer"]["lr"])
    for numbers in torch.arange(STEPS * BATCH).split(BATCH):
        batch = graphs.__getitems__(numbers)
        logits = model(batch.x, batch.edge_index)
        loss = cross_entropy(logits[batch.train_mask], batch.y[batch.train_mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def auroc(model, graphs, method):
    """Of the edge from the query's own key among all edges into the query."""
    scores, right = [], []
    for graph in graphs:
        attribute = graph.x[:, :K].argmax(dim=1)
        source, target = graph.edge_index
        for query in range(K):
            seen = attnkit.explain(model, (graph.x, graph.edge_index), None, method, index=query)
            into = target == query
            scores.append(seen.edges[into])
            right.append(attribute[source[into]] == attribute[query])
    return float(binary_auroc(torch.cat(scores), torch.cat(right).int()))


def diagnosed(model, graph):
    labels = torch.where(graph.test_mask, graph.y, -1)
    return attnkit.diagnose_attention(model, (graph.x, graph.edge_index), labels=labels)


@pytest.mark.slow
def test_the_edge_that_a_trained_gatv2_needs_is_found(repository):
    """Values are drawn one by one, so that those of other keys say nothing of one's own."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(K, (STEPS * BATCH + 5, K), generator=generator)
    model = trained(repository, values[:-5])
    unseen = LookupGraphs(values[-5:], "test")
    graphs = [unseen[number] for number in range(5)]
    found = diagnosed(model, graphs[0])
    assert found.accuracy == 1
    assert found.uniform_accuracy < 0.7
    assert found.rows[0]["static"] < 0.5
    assert auroc(model, graphs, "attention") >= 0.99
    assert auroc(model, graphs, "occlusion") >= 0.99
    # ∂y/∂α is of weights that need not sum to 1, and other edges have their share of it
    assert 0.6 < auroc(model, graphs, "relevance") < 0.99
    assert 0.8 < auroc(model, graphs, "input_gradient") < 0.99
    assert 0.85 < auroc(model, graphs, "removal_gradient") < 0.99
    assert 0.3 < auroc(model, graphs, "random") < 0.7
    fidelity = attnkit.explain(model, (graphs[0].x, graphs[0].edge_index), index=3).trust()
    assert fidelity.verdict == "better than random"
    assert fidelity.rows[0]["plus_prediction"] == 1
    assert fidelity.rows[0]["minus_prediction"] == 0


@pytest.mark.slow
def test_a_gatv2_that_is_right_by_elimination_does_not_look_at_the_right_edge(repository):
    """Of a permutation the value that the other keys lack is one's own, which networks find: right
    answers are not evidence that attention is on the edge that an annotation calls right."""
    values = distinct_permutations(K, STEPS * BATCH + 5, seed=0)
    model = trained(repository, values[:-5])
    unseen = LookupGraphs(values[-5:], "test")
    graphs = [unseen[number] for number in range(5)]
    assert diagnosed(model, graphs[0]).accuracy >= 0.9
    assert auroc(model, graphs, "attention") < 0.7
