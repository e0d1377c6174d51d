"""How attention lies on the named objects: exact on cases made by hand."""

import pytest
import torch

from attnkit.tasks.captioning import (
    BPETokenizer,
    ObjectLooks,
    WordTokenizer,
    attribute_of,
)
from attnkit.tasks.captioning.looks import tokens_of_words

SCENE = {
    "objects": [
        {"kind": "star", "colour": "purple", "size": "small", "texture": "plain"},
        {"kind": "circle", "colour": "cyan", "size": "large", "texture": "striped"},
    ],
    "relation": "above",
}
# The second object is named first: nouns at 2 and 9, colours at 1 and 8.
CAPTION = "large turquoise striped disc with a small violet star above it"


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_shares_of_a_case_made_by_hand(kind):
    """Each head looks at one place; no swap of words, objects, rows or columns keeps the shares."""
    if kind == "words":
        tokenizer = WordTokenizer.build([CAPTION])
    else:
        pytest.importorskip("tokenizers")
        tokenizer = BPETokenizer.build(["a small large with above it"], size=300, min_count=1)
    ids = [*tokenizer.encode(CAPTION), 2, 0, 0]
    if kind == "bpe":
        assert len(ids) > 20
    spans = tokens_of_words(tokenizer, ids)
    assert [tokenizer.decode([ids[p] for p in span]) for span in spans] == CAPTION.split()
    masks = torch.zeros(1, 2, 6, 8, dtype=torch.bool)
    masks[0, 0, 0:2, 2:4] = True  # position 1 of 3 rows, 4 columns
    masks[0, 1, 2:5, 0:2] = True  # position 4, and half of 8
    weights = torch.zeros(1, 2, 3, len(ids), 12)
    for word, (layer, head, position, weight) in {
        3: (0, 0, 4, 0.5),  # disc, a noun of object 1
        1: (0, 1, 8, 1.0),  # turquoise, its colour: half of that position is the object's
        8: (1, 0, 1, 0.25),  # star
        7: (1, 2, 1, 0.75),  # violet
        2: (1, 1, 4, 1.0),  # striped names nothing
        4: (1, 1, 4, 1.0),  # after the disc
    }.items():
        weights[0, layer, head, spans[word], position] = weight
    metric = ObjectLooks(2, 3)
    metric.update(torch.tensor([ids]), weights, masks, [SCENE], (3, 4), tokenizer)
    shares = {(look.words, look.layer, look.head): look.share for look in metric.compute()}
    expected = {(w, layer, head): 0.0 for w in ("noun", "colour") for layer in (0, 1) for head in (0, 1, 2)}  # fmt: skip  # noqa: E501
    expected |= {("noun", 0, 0): 0.25, ("colour", 0, 1): 0.25, ("noun", 1, 0): 0.125}
    expected |= {("colour", 1, 2): 0.375}
    assert shares == pytest.approx(expected)
    for look in metric.compute():
        assert look.chance == pytest.approx((4 + 6) / 48 / 2)
        assert look.ratio == pytest.approx(look.share / look.chance)
        assert look.num_words == 2


def test_what_names_nothing_is_not_counted():
    assert attribute_of("above") is None
    assert attribute_of("stripy") == "texture"
    tokenizer = WordTokenizer.build([CAPTION, "a red star above a blue heart"])
    metric = ObjectLooks(1, 1)
    for text in ("it it it", "a red star above a blue disc"):
        ids = torch.tensor([[*tokenizer.encode(text), 2]])
        weights = torch.ones(1, 1, 1, ids.shape[1], 12)
        masks = torch.ones(1, 2, 6, 8, dtype=torch.bool)
        metric.update(ids, weights, masks, [SCENE], (3, 4), tokenizer)
    assert metric.compute() == []


def test_parts_add_up_to_the_whole():
    """As the states of two processes do."""
    tokenizer = WordTokenizer.build([CAPTION])
    ids = torch.tensor([[*tokenizer.encode(CAPTION), 2]] * 5)
    weights, masks = torch.rand(5, 2, 3, ids.shape[1], 12), torch.rand(5, 2, 6, 8) < 0.3
    whole, first, second = (ObjectLooks(2, 3) for _ in range(3))
    for metric, part in ((whole, slice(None)), (first, slice(3)), (second, slice(3, 5))):
        scenes = [SCENE] * len(ids[part])
        metric.update(ids[part], weights[part], masks[part], scenes, (3, 4), tokenizer)
    first.merge_state(second)
    for one, other in zip(whole.compute(), first.compute(), strict=True):
        assert one[:3] == other[:3]
        assert one[3:] == pytest.approx(other[3:], rel=1e-5)
