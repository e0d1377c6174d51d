"""The rows, table and findings of a report on images, sentences, nodes, pairs or graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from attnkit.interpret.report.edges import edge_sections
from attnkit.interpret.report.findings import Judged, Row, number
from attnkit.interpret.report.maps import image_sections, over_chance, word_sections
from attnkit.interpret.report.page import Section
from attnkit.interpret.trust.judge import pooled, spearman
from attnkit.interpret.trust.result import SENSITIVE, SURVIVING
from attnkit.lightning.protocols import Explained

_NO_NODES = "are explained image by image; leave it out"
_NO_IMAGES = {
    "against": "of another model are explained in a run of their own, with ckpt=",
    "layer": "have edges and no image to draw on; leave it out",
}
_OF_EDGES = {
    "map": "map",
    "class": "class",
    "p": "probability",
    "edges": "edges",
    "p lost": "fidelity_plus",
    "random": "fidelity_random_plus_low to fidelity_random_plus_high",
    "p left": "fidelity_minus",
    "AUROC": "auroc",
}
_KINDS_OF_GAP = {"mask": "gap in p, tokens masked", "mean": "gap in p, mean colour"}
_SCORES = {
    "class_sensitivity": "class sensitivity",
    "similarity_random_weights": "similarity, all weights random",
    "similarity_another_image": "similarity, another image",
    "pointing": "pointing",
    "mass_over_chance": "mass over chance",
}
"""Columns of `scores.csv` and their names in `Trust`; the first three mean nothing for random maps.
"""


class Kind(NamedTuple):
    """How a report shows a kind of input.

    unit: unit of `attnkit.explain`, which determines the methods.
    asks: what goes through the model in a forward, in words.
    refused: arguments of `Report` that do not apply, and why.
    reading: what a reader may and may not conclude, in one sentence.
    rows: function to the rows of `scores.csv`.
    columns, caption: the columns of the table, as in `table_of`, and the meaning of its numbers.
    worth, called: the findings about a row and the format of its name, as in `findings_of`.
    sections: function to the sections of the page, of images of one size; its last argument is the
        batch size.
    summary: function from the rows of `scores.csv` to those of the table.
    """

    unit: str
    asks: str
    refused: Mapping[str, str]
    reading: str
    rows: Callable[[Explained, Sequence[Judged]], list[Row]]
    columns: Mapping[str, str]
    caption: str
    worth: Callable[[Row], Mapping[str, str]]
    called: str
    sections: Callable[[Explained, Sequence[Judged], int], list[Section]]
    summary: Callable[[list[Row]], list[Row]] = list


def arrays_of(explained: Explained, found: Sequence[Judged]) -> dict[str, Any]:
    """Return the arrays of `maps.npz` by name.

    - images: for each method, maps [images, rows, columns], tokens, gaps [images]; the model's
      answers; if images have several sizes, the maps and tokens of each image, by its index
    - sentences: for each method, maps [images, words, rows, columns]; the words
    - nodes, pairs: for each node or pair and method, numbers of the edges [edges]; the edges
    - graphs: for each graph and method, numbers of the edges [edges]; the edges of each graph
    """
    if explained.has_sizes:
        return _of_sizes([arrays_of(one, part) for one, part in apart(explained, found)])
    first, arrays = found[0].seen, {}
    for method, seen, trust, other, place in found:
        if explained.graphs is not None:
            number = explained.graphs[place]
            arrays[f"edges_{number}_{method}"] = seen.edges
            arrays[f"edge_index_{number}"] = seen.edge_index
        elif explained.kind in ("nodes", "pairs"):
            nodes = "_".join(map(str, seen.unit.target.nodes))
            arrays[f"edges_{nodes}_{method}"] = seen.edges
        elif explained.kind == "sentences":
            arrays[f"map_{method}"] = seen.words
        else:
            arrays |= {f"{name}_{method}": one for name, one in seen.unit.arrays().items()}
            arrays |= {
                f"gap_{kind}_{method}": gap for kind, gap in (trust.gaps if trust else {}).items()
            }
            if other is not None:
                arrays[f"against_{method}"] = other.map
    if explained.kind in ("nodes", "pairs"):
        arrays["edge_index"] = first.edge_index
    elif explained.graphs is not None:
        arrays["graphs"] = np.array([*dict.fromkeys(explained.graphs[one.place] for one in found)])
    elif explained.kind == "sentences":
        longest = max(map(len, explained.words), default=0)
        texts = [[*words, *[""] * (longest - len(words))] for words in explained.words]
        arrays |= {"sentences": explained.sentences, "words": np.array(texts)}
    else:
        names = ("target", "predicted", "logit", "probability")
        arrays |= {name: getattr(first, name) for name in names}
    return {name: one.cpu().numpy() if isinstance(one, Tensor) else one
            for name, one in arrays.items()}  # fmt: skip


def _of_sizes(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the arrays of single images: concatenate 1-D arrays, and name maps by their index."""
    arrays: dict[str, Any] = {}
    for name in each[0]:
        if each[0][name].ndim == 1:
            arrays[name] = np.concatenate([one[name] for one in each])
        else:
            arrays |= {f"{name}_{place}": one[name][0] for place, one in enumerate(each)}
    return arrays


def apart(
    explained: Explained, found: Sequence[Judged]
) -> Iterator[tuple[Explained, list[Judged]]]:
    """Yield images of several sizes one by one with their results; others all together."""
    for place in range(len(explained.inputs)) if explained.has_sizes else ():
        yield explained.alone(place), [one for one in found if one.place == place]
    if not explained.has_sizes:
        yield explained, list(found)


# --- images ---------------------------------------------------------------------------------------


def _image_rows(explained: Explained, found: Sequence[Judged]) -> list[Row]:
    """Return a row for each method, over all images, then a row for each baseline."""
    rows: list[Row] = []
    of_methods: dict[str, list[Judged]] = {}
    for one in found:  # images of several sizes have one entry each
        of_methods.setdefault(one.method, []).append(one)
    trusts = {
        name: pooled([one.trust for one in judged]) if judged[0].trust else None
        for name, judged in of_methods.items()
    }
    for method, judged in of_methods.items():
        trust = trusts[method]
        images = sum(len(one.seen.map) for one in judged)
        row = {"map": method, "images": images, **_scores(trust, "map")}
        for kind, words in (trust.verdicts if trust else {}).items():
            row[f"verdict_{kind}"] = "; ".join(words)
        if judged[0].seen.share is not None:
            row["prefix_share"] = float(torch.cat([one.seen.share for one in judged]).mean())
        if judged[0].other is not None:
            alike = [spearman(one.seen.map, one.other.map) for one in judged]
            row["spearman_against"] = float(torch.cat(alike).mean())
        rows.append(row)
    for name in ("random", "centre", "input_gradient", "oracle"):
        first: Any = trusts[found[0].method]
        scores = _scores(first, name)
        if name == "random":  # these scores mean nothing for random maps
            scores |= dict.fromkeys([*_SCORES][:3])
        is_known = any(scores.get(f"gap_{kind}") is not None for kind in _KINDS_OF_GAP)
        if is_known and all(name != one.method for one in found):
            rows.append({"map": name, "images": first.num_images, **scores})
    return rows


def _scores(trust: Any, whose: str) -> Row:
    """Return the scores of the map, or of a baseline."""
    known = {score.name: score for score in trust.scores} if trust else {}
    row: Row = {}
    for kind, name in _KINDS_OF_GAP.items():
        if name in known:
            row[f"gap_{kind}"] = getattr(known[name], whose)
            row[f"gap_{kind}_random"] = known[name].within
    scores = {column: name for column, name in _SCORES.items() if name in known}
    return row | {column: getattr(known[name], whose) for column, name in scores.items()}


def _worth_of_image_row(row: Row) -> dict[str, str]:
    kinds = [kind for kind in _KINDS_OF_GAP if f"verdict_{kind}" in row]
    if not kinds:
        return {}
    verdicts = [row[f"verdict_{kind}"] for kind in kinds]
    gaps = (number(row[f"gap_{kind}"], row[f"gap_{kind}_random"]) for kind in kinds)
    gap = f"gap {' and '.join(gaps)}"
    worse = ["no better than random" in verdict for verdict in verdicts]
    said = {"Better than a random map however patches are removed": gap}
    if all(worse):
        said = {"No better than a random map, so not what the answer depends on": gap}
    elif any(worse):
        said = {"Better than a random map in one way of removing patches, not in another": gap}
    if any("no better than centre" in verdict for verdict in verdicts):
        said["No better than always pointing at the centre"] = gap
    if (sensitivity := row.get("class_sensitivity")) is not None and sensitivity < SENSITIVE:
        words = "Nearly the same map for every class, so no reason for this one"
        said[words] = f"class sensitivity {number(sensitivity)}"
    if (similarity := row.get("similarity_random_weights", 0.0)) >= SURVIVING:
        words = "Survives random weights, so it shows the image more than what was learned"
        said[words] = f"similarity {number(similarity)}"
    return said


# --- sentences ------------------------------------------------------------------------------------


def _word_rows(explained: Explained, found: Sequence[Judged]) -> list[Row]:
    """Return a row for each method and word."""
    if explained.has_sizes:
        return [row for part in apart(explained, found) for row in _word_rows(*part)]
    rows = []
    for method, seen, trust, *_ in found:
        for image, words in enumerate(explained.words):
            over = over_chance(explained, seen, image)
            for place, word in enumerate(words):
                row = {"map": method, "image": explained.name(image), "place": place}
                row |= {"word": word, "probability": float(seen.probability[image, place])}
                if trust:
                    score = trust.scores[image][place]
                    row |= {
                        "gap": score.gap,
                        "gap_random": score.within,
                        "verdict": f"{'better' if score.is_better else 'no better'} than random",
                        "first_row": score.first[0],
                        "first_column": score.first[1],
                        "probability_without_first": score.without,
                        "probability_without_random": score.without_random,
                    }
                rows.append({**row, "mass_over_chance": over[place]})
    return rows


def _means_over_words(rows: list[Row]) -> list[Row]:
    """Return the means over words, a row for each method."""
    means = []
    for method in dict.fromkeys(row["map"] for row in rows):
        own = [row for row in rows if row["map"] == method]
        mean: Row = {"map": method, "words": len(own)}
        for name in ("probability", "gap", "gap_random", "mass_over_chance"):
            values = [one[name] for one in own if one.get(name) is not None]
            mean[name] = sum(values) / len(values) if values else None
        better = sum(one.get("verdict") == "better than random" for one in own)
        mean["better"] = None if mean["gap"] is None else f"{better} of {len(own)}"
        means.append(mean)
    return means


def _worth_of_word_row(row: Row) -> dict[str, str]:
    said = {}
    if row["better"]:
        gap = f"{row['better']}, mean gap {number(row['gap'])}"
        said["Words whose map is better than random"] = gap
    if row["mass_over_chance"] is not None:
        words = "On the object that a word names, in multiples of an even map"
        said[words] = number(row["mass_over_chance"])
    return said


# --- nodes, pairs and graphs ----------------------------------------------------------------------


def _edge_rows(explained: Explained, found: Sequence[Judged]) -> list[Row]:
    """Return a row for each node, pair or graph and method; fidelity is the mean over k."""
    rows = []
    for method, seen, trust, _, place in found:
        row: Row = {"node": seen.index, "map": method}
        if explained.graphs is not None:
            name = explained.names[place] if explained.names else None
            row = {"graph": explained.graphs[place], "name": name, "map": method}
        elif explained.of_pairs:
            row = dict(zip(("source", "target"), seen.index, strict=True), map=method)
        row |= {"class": explained.class_name(int(seen.target)), "predicted": None, "label": None}
        if explained.of == "probability" and not explained.of_pairs:
            row["predicted"] = explained.class_name(int(seen.predicted))
        row |= {"probability": float(seen.probability), "edges": int(seen.candidates.sum())}
        if explained.truth is not None:
            row["label"] = explained.class_name(int(explained.truth[place]))
        if seen.share:
            row["self_loops_share"] = float(seen.share)
        if trust is not None:
            of_plus = ("plus", "random_plus", "random_plus_low", "random_plus_high")
            for name in (*of_plus, "minus", "random_minus"):
                values = [one[name] for one in trust.rows]
                row[f"fidelity_{name}"] = sum(values) / len(values)
            row["verdict"] = trust.verdict
        right = explained.true_edges(place) if explained.true_edges else None
        if right is not None:
            row["auroc"] = _auroc(seen, right.to(seen.edges.device))
        rows.append(row)
    return rows


def _auroc(seen: Any, right: Tensor) -> float | None:
    """Return the AUROC by which the numbers separate right edges from others; ties count half."""
    scores, among = seen.edges[seen.candidates], right[seen.candidates]
    if not among.any() or among.all():
        return None
    ranks = scores.unique(return_inverse=True)[1].double()
    return float(binary_auroc(ranks / ranks.max().clamp(min=1), among.long()))


def _worth_of_edge_row(row: Row) -> dict[str, str]:
    said = {}
    if verdict := row.get("verdict"):
        than = {"better": "more", "no better": "no more", "worse": "less"}
        words = than[verdict.removesuffix(" than random")]
        low, high = (number(row[f"fidelity_random_plus_{end}"]) for end in ("low", "high"))
        lost = f"p lost {number(row['fidelity_plus'])}, random {low} to {high}"
        said[f"The edges that rank first matter {words} than random ones"] = lost
    if row.get("auroc") is not None:
        said["Right edges found, by AUROC; chance is 0.5"] = number(row["auroc"])
    return said


KINDS = {
    "images": Kind(
        unit="patch",
        asks="of an image",
        refused=dict.fromkeys(("nodes", "pairs", "graphs"), _NO_NODES),
        reading="Trust that bright patches matter only as far as a map's gap is beyond that of "
        "random maps; do not conclude that the answer is right, or that other images are answered "
        "for the same reason.",
        rows=_image_rows,
        columns={
            "map": "map",
            "gap, tokens\nmasked": "gap_mask ± gap_mask_random",
            "gap, mean\ncolour": "gap_mean ± gap_mean_random",
            "class\nsensitivity": "class_sensitivity",
            "random\nweights": "similarity_random_weights",
            "mass over\nchance": "mass_over_chance",
            "other\nmodel": "spearman_against",
        },
        caption="gap ±: two standard errors of random maps. class sensitivity 0: the same map for "
        "every class. random weights: a rank correlation.",
        worth=_worth_of_image_row,
        called="{map}",
        sections=image_sections,
    ),
    "sentences": Kind(
        unit="word",
        asks="of an image",
        refused={
            **dict.fromkeys(("nodes", "pairs", "graphs"), _NO_NODES),
            "target": "are explained for each word they have; leave it out",
            "against": "of another model may be others; explain it in a run of its own, with ckpt=",
        },
        reading="Trust that a word hangs on the dark regions only where its map is better than "
        "random; do not conclude that the model recognised what the word names, or that the "
        "caption is right.",
        rows=_word_rows,
        columns={
            "map": "map",
            "words": "words",
            "mean p": "probability",
            "gap": "gap",
            "limit": "gap_random",
            "words better\nthan random": "better",
            "mass over\nchance": "mass_over_chance",
        },
        caption="gap: what a word's probability loses where its map points rather than elsewhere. "
        "A random map's gap is below the limit 19 times in 20; the words above it are better than "
        "random. mass over chance: of words whose object is known, what of their map is there; 1: "
        "even.",
        worth=_worth_of_word_row,
        called="{map}",
        sections=lambda explained, found, _: word_sections(explained, found),
        summary=_means_over_words,
    ),
    "nodes": Kind(
        unit="edge",
        asks="of what reaches a node",
        refused={
            "pairs": "have no answer for two of them; give their numbers by nodes",
            "graphs": "are of one graph; give their numbers by nodes",
            **_NO_IMAGES,
        },
        reading="Trust that an edge matters only as far as p falls more without it than without "
        "random edges; do not conclude that the answer is right, or that an edge of little value "
        "is of no use to the model.",
        rows=_edge_rows,
        columns={"node": "node", **_OF_EDGES},
        caption="p lost: drop of the class's probability without the first k edges, mean over k; "
        "random: the same for random edges, lowest to highest draw; p left: drop with the first k "
        "edges alone.",
        worth=_worth_of_edge_row,
        called="node {node}, {map}",
        sections=lambda explained, found, _: edge_sections(explained, found),
    ),
}
"""The kinds by `Explained.kind`."""
KINDS["pairs"] = KINDS["nodes"]._replace(
    asks="of what reaches a pair",
    refused={
        **dict.fromkeys(("nodes", "graphs"), "are of one graph; give their nodes by pairs"),
        **_NO_IMAGES,
    },
    columns={"source": "source", "target": "target", **_OF_EDGES},
    called="pair {source}, {target}, {map}",
)
KINDS["graphs"] = KINDS["nodes"]._replace(
    asks="of a graph",
    refused={
        **dict.fromkeys(("nodes", "pairs"), "are explained whole; leave it out"),
        **_NO_IMAGES,
    },
    columns={"graph": "graph", **_OF_EDGES},
    called="graph {graph}, {map}",
)
