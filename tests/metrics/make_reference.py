"""Captions by chance, and what the reference scorers make of them, for reference.json.

    pip install --no-deps pycocoevalcap==1.2
    git clone https://github.com/vrama91/cider
    python tests/metrics/make_reference.py cider

pycocoevalcap has BLEU, ROUGE-L and CIDEr-D, which it calls CIDEr; the paper's CIDEr is in
vrama91/cider alone, in Python 2, of which two names are put right as it is read.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

Pairs = tuple[list[str], list[list[str]]]

FILE = Path(__file__).with_name("reference.json")
SMALL = {"seed": 1, "count": 30}
EDGES = [
    ("", ["w1 w2"]),
    ("", [""]),
    ("w1 w2", ["", "w1"]),
    ("w1", ["w1"]),
    ("w0 w0 w0 w0 w0 w0 w0 w0", ["w0 w0 w0", "w0 w0 w1 w0 w0"]),
    ("w4 w5", ["w4 w4 w5 w5 w6 w4 w5 w4 w5 w4 w5 w4 w5 w4 w5"]),
    ("nothing of this", ["w1 w2 w3", "w4"]),
    ("w1 w2 w3", ["w1 w2 w3 w4", "w1 w2"]),  # equally close in length
]


def make_pairs(seed: int, count: int) -> Pairs:
    """Captions that share much with their references, which number 1 to 6, and some with others."""
    chance = random.Random(seed).random  # the one draw that all Pythons agree on

    def words(number: int) -> list[str]:
        # few words are frequent, most are rare
        return [f"w{int(300 * chance() ** 3)}" for _ in range(number)]

    def changed(text: list[str]) -> list[str]:
        """Words dropped, put in, said twice, and two parts exchanged."""
        kept = [word for word in text if chance() > 0.15]
        for _ in range(int(4 * chance())):
            place = int(chance() * (len(kept) + 1))
            kept[place:place] = kept[:1] if chance() < 0.3 else words(1)
        cut = int(chance() * len(kept)) if chance() < 0.2 else 0
        return kept[cut:] + kept[:cut]

    predictions, references = [], []
    for _ in range(count):
        topic = words(int(16 * chance()))
        texts = [" ".join(changed(topic)) for _ in range(1 + int(6 * chance()))]
        # a copy now and then, and a caption of something else
        prediction = " ".join(changed(topic if chance() < 0.9 else words(9)))
        predictions.append(texts[0] if chance() < 0.1 else prediction)
        references.append(texts)
    return predictions, references


def pycocoevalcap_scores(pairs: Pairs) -> dict[str, tuple[float, list[float]]]:
    """Of the corpus, and of each caption."""
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    predictions, references = pairs
    theirs = dict(enumerate(references)), {i: [text] for i, text in enumerate(predictions)}
    corpus, each = Bleu(4).compute_score(*theirs, verbose=0)
    scores = {f"bleu{k}": (corpus[k - 1], [*each[k - 1]]) for k in (1, 2, 3, 4)}
    for name, scorer in (("rougel", Rouge()), ("ciderd", Cider())):
        mean, array = scorer.compute_score(*theirs)
        scores[name] = float(mean), array.tolist()
    return scores


def vedantam_cider(pairs: Pairs, clone: Path) -> tuple[float, list[float]]:
    code = (clone / "pyciderevalcap" / "cider" / "cider_scorer.py").read_text()
    names: dict = {}
    exec(code.replace("xrange", "range").replace("iteritems", "items"), names)
    scorer = names["CiderScorer"]()
    for pair in zip(*pairs, strict=True):
        scorer += pair
    mean, array = scorer.compute_score("corpus")
    return float(mean), array.tolist()


def scores_of(pairs: Pairs, clone: Path) -> dict[str, tuple[float, list[float]]]:
    return pycocoevalcap_scores(pairs) | {"cider": vedantam_cider(pairs, clone)}


if __name__ == "__main__":
    clone = Path(sys.argv[1])
    small = make_pairs(**SMALL)
    for prediction, texts in EDGES:
        small[0].append(prediction)
        small[1].append(texts)
    content = {
        "small": {"predictions": small[0], "references": small[1]}
        | {
            name: {"corpus": corpus, "each": each}
            for name, (corpus, each) in scores_of(small, clone).items()
        },
    }
    FILE.write_text(json.dumps(content, indent=1) + "\n")
