"""What a report needs to know of images, captions and nodes; a class each, without a state.

methods: names of `attnkit.explain`.
refused: arguments of `Report` that do not apply, and why.
reading: what a reader may and may not conclude, in one sentence.
columns, caption: of the table: by heading the name of what is in it, and what its numbers are.
judge: how far to trust an explanation.
rows: of `scores.csv`. summary: the rows of the table, with a `name`.
worth: what is worth saying of a row of the summary, and its number.
sections: of the page. arrays: of `maps.npz`, by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from attnkit.interpret.explain import explain
from attnkit.interpret.methods.table import METHODS, methods_of
from attnkit.interpret.report.edges import edge_sections
from attnkit.interpret.report.findings import Judged, Row, number
from attnkit.interpret.report.maps import image_sections, over_chance, word_sections
from attnkit.interpret.report.page import Section
from attnkit.interpret.trust.judge import spearman
from attnkit.interpret.trust.result import SENSITIVE, SURVIVING
from attnkit.lightning.explained import Explained

if TYPE_CHECKING:
    from attnkit.interpret.report.report import Report

_SANITY = ("class_sensitivity", "similarity_random_weights", "similarity_another_image")
_NO_NODES = "are explained image by image; leave it out"


class Images:
    """Images: a row for each method, judged over all of them, and a section for each image."""

    methods: Sequence[str] = methods_of("patch")
    refused: Mapping[str, str] = {"nodes": _NO_NODES}
    reading = (
        "Trust that bright patches matter only as far as a map's gap is beyond that of random "
        "maps; do not conclude that the answer is right, or that other images are answered for the "
        "same reason."
    )
    caption = (
        "gap ±: two standard errors of random maps. class sensitivity 0: the same map for every "
        "class. random weights: a rank correlation."
    )
    # columns of scores.csv, and what `Trust` calls them
    gaps: Mapping[str, str] = {"mask": "gap in p, tokens masked", "mean": "gap in p, mean colour"}
    scores: Mapping[str, str] = {
        "class_sensitivity": "class sensitivity",
        "similarity_random_weights": "similarity, all weights random",
        "similarity_another_image": "similarity, another image",
        "pointing": "pointing",
        "mass_over_chance": "mass over chance",
    }
    columns: Mapping[str, str] = {
        "map": "name",
        "gap, tokens\nmasked": "mask",
        "gap, mean\ncolour": "mean",
        "class\nsensitivity": "class_sensitivity",
        "random\nweights": "similarity_random_weights",
        "mass over\nchance": "mass_over_chance",
        "other\nmodel": "spearman_against",
    }

    @staticmethod
    def judge(seen: Any, explained: Explained, report: Report) -> Any:
        return seen.trust(masks=explained.masks, **_options(report))

    @staticmethod
    def compare(against: Explained, seen: Any) -> Any:
        """The same classes of the same images, of another model."""
        target = seen.target if METHODS[seen.method].has_target else None
        other = explain(against.model, against.inputs, target, seen.method)
        if other.map.shape != seen.map.shape:
            ours, theirs = (" x ".join(map(str, one.map.shape[1:])) for one in (seen, other))
            raise ValueError(
                f"against: its maps are {theirs}, the first model's {ours}; expected the same grid"
            )
        return other

    @classmethod
    def rows(cls, explained: Explained, found: Sequence[Judged]) -> list[Row]:
        """A row for each method, then what each map is held against."""
        rows = []
        for method, seen, trust, other in found:
            row = {"map": method, "images": len(seen.map), **cls._scores(trust, "map")}
            for kind, words in (trust.verdicts if trust else {}).items():
                row[f"verdict_{kind}"] = "; ".join(words)
            if seen.share is not None:
                row["prefix_share"] = float(seen.share.mean())
            if other is not None:
                row["spearman_against"] = float(spearman(seen.map, other.map).mean())
            rows.append(row)
        trust = found[0].trust
        for name in ("random", "centre", "input_gradient", "oracle"):
            scores = cls._scores(trust, name)
            if name == "random":  # two random maps differ, but the one shown depends on nothing
                scores |= dict.fromkeys(_SANITY)
            known = any(scores.get(f"gap_{kind}") is not None for kind in cls.gaps)
            if known and all(name != one.method for one in found):
                rows.append({"map": name, "images": trust.num_images, **scores})
        return rows

    @classmethod
    def _scores(cls, trust: Any, whose: str) -> Row:
        """The scores of the map, or of what it is held against."""
        known = {score.name: score for score in trust.scores} if trust else {}
        row: Row = {}
        for kind, name in cls.gaps.items():
            if name in known:
                row[f"gap_{kind}"] = getattr(known[name], whose)
                row[f"gap_{kind}_random"] = known[name].within
        return row | {
            column: getattr(known[name], whose)
            for column, name in cls.scores.items()
            if name in known
        }

    @classmethod
    def summary(cls, rows: list[Row]) -> list[Row]:
        summary = []
        for row in rows:
            gaps = {
                kind: number(row.get(f"gap_{kind}"), row.get(f"gap_{kind}_random"))
                for kind in cls.gaps
            }
            summary.append({**row, **gaps, "name": row["map"].replace("_", " ")})
        return summary

    @classmethod
    def worth(cls, row: Row) -> dict[str, str]:
        verdicts = [row[f"verdict_{kind}"] for kind in cls.gaps if f"verdict_{kind}" in row]
        if not verdicts:
            return {}
        gap = f"gap {' and '.join(row[kind] for kind in cls.gaps if row[kind])}"
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

    @staticmethod
    def sections(explained: Explained, found: Sequence[Judged], report: Report) -> list[Section]:
        return image_sections(explained, found, report.batch_size)

    @staticmethod
    def arrays(explained: Explained, found: Sequence[Judged]) -> dict[str, Any]:
        """By name and method: maps [images, rows, columns], gaps [images], what the model says."""
        first = found[0].seen
        names = ("target", "predicted", "logit", "probability")
        arrays = {name: getattr(first, name) for name in names}
        for method, seen, trust, other in found:
            arrays[f"map_{method}"] = seen.map
            if seen.tokens is not None:
                arrays[f"tokens_{method}"] = seen.tokens
            if other is not None:
                arrays[f"against_{method}"] = other.map
            for kind, gap in (trust.gaps if trust else {}).items():
                arrays[f"gap_{kind}_{method}"] = gap
        return arrays


class Captions:
    """Sentences of a captioner: a row for each method and word, and a section for each sentence."""

    methods: Sequence[str] = methods_of("word")
    refused: Mapping[str, str] = {
        "nodes": _NO_NODES,
        "target": "are explained for each word they have; leave it out",
        "against": "of another model may be others; explain it in a run of its own, with ckpt=",
    }
    reading = (
        "Trust that a word hangs on the dark regions only where its map is better than random; do "
        "not conclude that the model recognised what the word names, or that the caption is right."
    )
    caption = (
        "gap: what a word's probability loses where its map points rather than elsewhere. A random "
        "map's gap is below the limit 19 times in 20; the words above it are better than random. "
        "mass over chance: of words whose object is known, what of their map is there; 1: even."
    )
    columns: Mapping[str, str] = {
        "map": "name",
        "words": "words",
        "mean p": "probability",
        "gap": "gap",
        "limit": "gap_random",
        "words better\nthan random": "better",
        "mass over\nchance": "mass_over_chance",
    }

    @staticmethod
    def judge(seen: Any, explained: Explained, report: Report) -> Any:
        return seen.trust_words(**_options(report))

    @classmethod
    def rows(cls, explained: Explained, found: Sequence[Judged]) -> list[Row]:
        rows = []
        for method, seen, trust, _ in found:
            for image, words in enumerate(explained.words):
                over = over_chance(explained, seen, image)
                for place, word in enumerate(words):
                    row = {"map": method, "image": explained.name(image), "place": place}
                    row |= {"word": word, "probability": float(seen.probability[image, place])}
                    row |= cls._scores(trust.scores[image][place]) if trust else {}
                    rows.append({**row, "mass_over_chance": over[place]})
        return rows

    @staticmethod
    def _scores(score: Any) -> Row:
        return {
            "gap": score.gap,
            "gap_random": score.within,
            "verdict": f"{'better' if score.is_better else 'no better'} than random",
            "first_row": score.first[0],
            "first_column": score.first[1],
            "probability_without_first": score.without,
            "probability_without_random": score.without_random,
        }

    @staticmethod
    def summary(rows: list[Row]) -> list[Row]:
        """A row for each method: means over all words."""
        summary = []
        for method in dict.fromkeys(row["map"] for row in rows):
            own = [row for row in rows if row["map"] == method]
            row = {"name": method.replace("_", " "), "words": len(own)}
            for name in ("probability", "gap", "gap_random", "mass_over_chance"):
                values = [one[name] for one in own if one.get(name) is not None]
                row[name] = sum(values) / len(values) if values else None
            better = sum(one.get("verdict") == "better than random" for one in own)
            row["better"] = f"{better} of {len(own)}" if row["gap"] is not None else ""
            summary.append(row)
        return summary

    @staticmethod
    def worth(row: Row) -> dict[str, str]:
        said = {}
        if row["better"]:
            gap = f"{row['better']}, mean gap {number(row['gap'])}"
            said["Words whose map is better than random"] = gap
        if row["mass_over_chance"] is not None:
            words = "On the object that a word names, in multiples of an even map"
            said[words] = number(row["mass_over_chance"])
        return said

    @staticmethod
    def sections(explained: Explained, found: Sequence[Judged], report: Report) -> list[Section]:
        return word_sections(explained, found)

    @staticmethod
    def arrays(explained: Explained, found: Sequence[Judged]) -> dict[str, Any]:
        """Maps [images, words, rows, columns] by method, and the words."""
        longest = max(map(len, explained.words), default=0)
        texts = [[*words, *[""] * (longest - len(words))] for words in explained.words]
        arrays = {f"map_{method}": seen.words for method, seen, _, _ in found}
        return {**arrays, "sentences": explained.sentences, "words": np.array(texts)}


class Nodes:
    """Nodes of a graph: a row for each node and method, and a section for each node."""

    methods: Sequence[str] = methods_of("edge")
    refused: Mapping[str, str] = {
        "against": "of another model are explained in a run of their own, with ckpt=",
        "layer": "have edges and no image to draw on; leave it out",
    }
    reading = (
        "Trust that an edge matters only as far as p falls more without it than without random "
        "edges; do not conclude that the answer is right, or that an edge of little value is of no "
        "use to the model."
    )
    caption = (
        "p lost: drop of the class's probability without the first k edges, mean over k; "
        "random: the same for random edges, lowest to highest draw; "
        "p left: drop with the first k edges alone."
    )
    columns: Mapping[str, str] = {
        "node": "node",
        "map": "method",
        "class": "class",
        "p": "probability",
        "edges": "edges",
        "p lost": "fidelity_plus",
        "random": "drawn",
        "p left": "fidelity_minus",
        "AUROC": "auroc",
    }

    @staticmethod
    def judge(seen: Any, explained: Explained, report: Report) -> Any:
        if int(seen.candidates.sum()) < 2:
            return None
        num_draws = 200 if report.trust == "full" else 20
        return seen.fidelity(num_draws=num_draws, seed=report.seed)

    @classmethod
    def rows(cls, explained: Explained, found: Sequence[Judged]) -> list[Row]:
        rows = []
        for method, seen, trust, _ in found:
            row: Row = {"node": seen.index, "map": method}
            row |= {"class": explained.class_name(int(seen.target))}
            row |= {"predicted": explained.class_name(int(seen.predicted)), "label": None}
            row |= {"probability": float(seen.probability), "edges": int(seen.candidates.sum())}
            if explained.truth is not None:
                row["label"] = explained.class_name(int(explained.truth[seen.index]))
            if seen.share:
                row["self_loops_share"] = float(seen.share)
            if trust is not None:
                of_plus = ("plus", "random_plus", "random_plus_low", "random_plus_high")
                for name in (*of_plus, "minus", "random_minus"):
                    values = [one[name] for one in trust.rows]
                    row[f"fidelity_{name}"] = sum(values) / len(values)
                row["verdict"] = trust.verdict
            right = explained.true_edges(seen.index) if explained.true_edges else None
            if right is not None:
                row["auroc"] = cls._auroc(seen, right.to(seen.edges.device))
            rows.append(row)
        return rows

    @staticmethod
    def _auroc(seen: Any, right: Tensor) -> float | None:
        """How well the numbers part the right edges from the others; ties count half."""
        scores, among = seen.edges[seen.candidates], right[seen.candidates]
        if not among.any() or among.all():
            return None
        ranks = scores.unique(return_inverse=True)[1].double()
        return float(binary_auroc(ranks / ranks.max().clamp(min=1), among.long()))

    @staticmethod
    def summary(rows: list[Row]) -> list[Row]:
        summary = []
        for row in rows:
            ends = [number(row.get(f"fidelity_random_plus_{end}")) for end in ("low", "high")]
            method = row["map"].replace("_", " ")
            texts = {"method": method, "name": f"node {row['node']}, {method}"}
            summary.append({**row, **texts, "drawn": " to ".join(filter(None, ends))})
        return summary

    @staticmethod
    def worth(row: Row) -> dict[str, str]:
        said = {}
        if verdict := row.get("verdict"):
            than = {"better": "more", "no better": "no more", "worse": "less"}
            words = than[verdict.removesuffix(" than random")]
            lost = f"p lost {number(row['fidelity_plus'])}, random {row['drawn']}"
            said[f"The edges that rank first matter {words} than random ones"] = lost
        if row.get("auroc") is not None:
            said["Right edges found, by AUROC; chance is 0.5"] = number(row["auroc"])
        return said

    @staticmethod
    def sections(explained: Explained, found: Sequence[Judged], report: Report) -> list[Section]:
        return edge_sections(explained, found)

    @staticmethod
    def arrays(explained: Explained, found: Sequence[Judged]) -> dict[str, Any]:
        """Numbers of the edges [edges] by node and method, and the edges."""
        arrays = {f"edges_{one.seen.index}_{one.method}": one.seen.edges for one in found}
        return {**arrays, "edge_index": found[0].seen.edge_index}


KINDS: dict[str, Any] = {"images": Images, "sentences": Captions, "nodes": Nodes}
"""By `Explained.kind`."""


def _options(report: Report) -> dict[str, Any]:
    """Of `attnkit.trust`."""
    full = report.trust == "full"
    return {"full": full, "seed": report.seed, "batch_size": report.batch_size}
