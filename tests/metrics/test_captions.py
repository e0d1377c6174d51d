"""Captions kept: over updates, pickling, collections and processes."""

import json
import pickle

import pytest
import torch
from torchmetrics import MetricCollection

from attnkit.metrics import BLEU, ROUGEL, CIDEr, CIDErD

KINDS = [BLEU, ROUGEL, CIDEr, CIDErD]


@pytest.fixture(scope="module")
def pairs(make_reference):
    return make_reference.make_pairs(seed=3, count=37)


def value_of(kind, predictions, references, **options):
    metric = kind(**options)
    metric.update(predictions, references)
    return metric.compute()


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_one_corpus(kind, pairs):
    whole = value_of(kind, *pairs)
    metric = kind()
    for start in range(0, 37, 5):
        batch = [part[start : start + 5] for part in pairs]
        assert metric(*batch) == value_of(kind, *batch)  # forward: the batch by itself
        metric.update([], [])
    assert metric.compute() == whole
    assert pickle.loads(pickle.dumps(metric)).compute() == whole
    half, other = kind(), kind()
    half.update(*(part[:11] for part in pairs))
    other.update(*(part[11:] for part in pairs))
    half.merge_state(other)
    assert half.compute() == whole

    metric.reset()
    first = [part[:7] for part in pairs]
    metric.update(*first)
    assert metric.compute() == value_of(kind, *first) != whole


def test_pickled_in_the_middle_and_restored_from_a_state_dict(pairs):
    metric = CIDErD()
    metric.persistent(True)
    metric.update(*(part[:11] for part in pairs))
    copy, loaded = pickle.loads(pickle.dumps(metric)), CIDErD()
    loaded.load_state_dict(metric.state_dict())
    for each in (copy, loaded):
        each.update(*(part[11:] for part in pairs))
        assert each.compute() == value_of(CIDErD, *pairs)


def test_a_collection_keeps_captions_once_whatever_the_tokenizers():
    """The first batch is the same to both tokenizers, the second is not."""
    metrics = MetricCollection(
        {f"bleu{k}": BLEU(k) for k in (1, 2, 3, 4)}
        | {"cider": CIDEr(), "ciderd": CIDErD(), "rouge": ROUGEL(), "words": ROUGEL("words")}
    )
    for _ in range(2):
        metrics.update(["a dog"], [["a dog runs"]])
        metrics.update(["A man."], [["a man", "the man"]])
        assert len(metrics.compute_groups) == 1
        values = metrics.compute()
        assert set(values) == {*metrics}
        assert (
            values["words"]
            > values["rouge"]
            == value_of(ROUGEL, ["a dog", "A man."], [["a dog runs"], ["a man", "the man"]])
        )
        metrics.update(["snow"], [["snow"]])
        assert metrics.compute()["words"] > values["words"]
        metrics.reset()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_kept_survives_another_dtype(dtype, pairs):
    metric = CIDErD()
    metric.update(*(part[:11] for part in pairs))
    metric.set_dtype(dtype)  # torchmetrics turns all that is kept
    metric.update(*(part[11:] for part in pairs))
    value = metric.compute()
    assert value == value_of(CIDErD, *pairs)
    assert value.shape == ()
    assert value.dtype == torch.float64


def test_worst_and_best_captions():
    metric = CIDErD()
    references = [["a red kite", "a kite"], ["a dog runs"], ["two men talk"]]
    predictions = ["a red kite", "two men", "two men talk\u2028“loud” \n\ud800"]
    metric.update(predictions[:1], references[:1])
    metric.update(predictions[1:], tuple(map(tuple, references[1:])))
    captions = metric.per_caption()
    assert [caption.prediction for caption in captions] == predictions
    assert [caption.references for caption in captions] == references
    assert min(captions).prediction == "two men"
    assert max(captions).prediction == predictions[2]
    assert captions[2].score > captions[0].score > captions[1].score == 0
    mean = sum(caption.score for caption in captions) / 3
    assert metric.compute().item() == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize(
    ("predictions", "references", "error", "message"),
    [
        (["a", "b"], [["a"]], ValueError, "references: expected a list for each of 2 predictions"),
        (["a"], [[]], ValueError, r"references\[0\]: expected one string or more, got none"),
        ("a b", [["a"]] * 3, TypeError, "predictions: expected a list of strings, got 'a b'"),
        (["a"], ["a"], TypeError, r"references\[0\]: expected a list of strings, got 'a'"),
        (["a"], "a", TypeError, "references: expected a list of lists of strings, got 'a'"),
        ([b"a"], [["a"]], TypeError, "predictions: expected a list of strings, got"),
        (["a"], [["a", None]], TypeError, r"references\[0\]: expected a list of strings, got"),
    ],
)
def test_bad_captions(predictions, references, error, message):
    metric = ROUGEL()
    with pytest.raises(error, match=message):
        metric.update(predictions, references)
    metric.update(["a"], [["a"]])
    assert metric.compute() == 1  # nothing was kept of what was refused


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_no_captions(kind):
    with pytest.raises(ValueError, match=f"{kind.__name__}: expected captions to score, got none"):
        kind().compute()


@pytest.mark.slow
def test_two_ranks_are_one_corpus(pairs, of_two_ranks, tmp_path):
    (tmp_path / "data.json").write_text(json.dumps(pairs))
    found = of_two_ranks(tmp_path)
    expected = {kind.__name__: value_of(kind, *pairs).item() for kind in KINDS}
    for results in found:
        assert len(results) == 2
        for result in results:
            assert result["alone"] == result["together"] == result["again"] == expected
            assert [prediction for _, prediction, _ in result["captions"]] == pairs[0]
            scores = [score for score, *_ in result["captions"]]
            assert sum(scores) / 37 == pytest.approx(expected["CIDErD"], rel=1e-12)
