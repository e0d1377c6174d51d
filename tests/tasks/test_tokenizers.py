"""Tokenizers: numbers and back, as plain data, and without the library that one of them needs."""

import json
import sys
import unicodedata

import pytest
import torch

from attnkit.lightning import UserError
from attnkit.metrics import CIDEr, CIDErD
from attnkit.metrics.tokenizers import text_of
from attnkit.tasks.captioning import (
    BPETokenizer,
    ImageCaptioning,
    WordTokenizer,
    load_tokenizer,
    words_of,
)

CAPTIONS = ["A dog runs; a cat sleeps.", "The dog's ball – red!", "a dog"]


def test_words_are_lower_case_without_punctuation():
    assert words_of("The dog's T-shirt: 'two'-tone, «Über»  5.") == [
        "the",
        "dog's",
        "t-shirt",
        "two",
        "tone",
        "über",
        "5",
    ]
    assert words_of(" . ") == []
    assert words_of("❤️ 👨‍👩‍👧") == [], "what joins and colours emoji is no word"


SENTENCES = {
    "English": "The dog’s ball, a T-shirt: it's red!",
    "Hindi": "एक लाल गेंद हरी घास पर पड़ी है।",
    "Tamil": "ஒரு சிவப்பு பந்து புல் மீது உள்ளது.",
    "Bengali": "একটি লাল বল সবুজ ঘাসের উপর।",
    "Thai": "สุนัขสีน้ำตาลกำลังวิ่งอยู่บนสนามหญ้า",
    "Lao": "ໝາສີນ້ຳຕານກຳລັງແລ່ນ",
    "Khmer": "ឆ្កែពណ៌ត្នោតកំពុងរត់លើស្មៅ",
    "Burmese": "ခွေးညိုတစ်ကောင် မြက်ခင်းပေါ်မှာ ပြေးနေသည်။",
    "Hebrew": "כֶּלֶב חוּם רָץ עַל הַדֶּשֶׁא.",
    "Arabic": "كَلْبٌ بُنِّيٌّ يَجْرِي عَلَى العُشْبِ",
    "Persian": "یک سگ قهوه\u200cای روی چمن می\u200cدود.",
    "Vietnamese": "Một con chó màu nâu đang chạy trên cỏ.",
    "Korean": "갈색 개가 잔디 위를 달리고 있다.",
    "Chinese": "白色的地面上有一个红色的方块。",
    "Japanese": "茶色の犬がiPhoneで芝生の上を走っている。",
    "Greek": "Ένας καφέ σκύλος τρέχει στο γρασίδι.",
    "Russian": "Коричневая собака бежит по траве.",
}


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("build", [WordTokenizer.build, BPETokenizer.build])
def test_a_perfect_captioner_scores_1_in_every_script(build, form):
    """What is decoded of a caption's numbers, by the metrics of a run, against the caption."""
    texts = {name: unicodedata.normalize(form, text) for name, text in SENTENCES.items()}
    tokenizer = build(texts.values(), min_count=1)
    said = {name: tokenizer.decode(tokenizer.encode(text)) for name, text in texts.items()}
    for name, text in texts.items():
        metrics = {n: m for n, m in ImageCaptioning.metrics(None).items() if "cider" not in n}
        for metric in metrics.values():
            metric.update([said[name]], [[text]])
            assert float(metric.compute()) == pytest.approx(1, abs=1e-8), (name, said[name])
    for cider in (CIDEr(tokenizer="words"), CIDErD(tokenizer="words")):  # of a corpus
        cider.update(list(said.values()), [[text] for text in texts.values()])
        assert float(cider.compute()) == pytest.approx(10, abs=1e-8)


def test_words_of_scripts_without_spaces_are_joined_again():
    assert words_of("白色的iPhone") == ["白", "色", "的", "iphone"]
    assert text_of(words_of("白色的 iPhone 手机")) == "白色的 iphone 手机"
    assert text_of(words_of("สุนัขวิ่ง")) == "สุนัขวิ่ง"
    assert text_of(["a", "dog"]) == "a dog"
    assert text_of([]) == ""


def test_the_apostrophe_of_an_older_vocabulary():
    tokenizer = WordTokenizer(["dog’s", "cat's", "cat’s"])
    assert tokenizer.encode("A dog's, a dog’s, a cat’s") == [3, 4, 3, 4, 3, 5]


def test_numbers_of_words():
    tokenizer = WordTokenizer.build(CAPTIONS)
    assert tokenizer.words[:2] == ["a", "dog"]  # 3 and 2 times
    assert tokenizer.words[2:] == sorted(tokenizer.words[2:])
    assert len(tokenizer) == 4 + 9
    assert tokenizer.encode("A DOG, unheard-of") == [4, 5, 3]
    assert tokenizer.decode([1, 4, 5, 3, 2, 4, 0]) == "a dog <unknown>"
    assert tokenizer.decode(torch.tensor([4, 5, 2, 0])) == "a dog"
    assert tokenizer.decode([]) == ""


def test_rare_words_are_unknown():
    tokenizer = WordTokenizer.build(CAPTIONS, min_count=2)
    assert tokenizer.words == ["a", "dog"]
    with pytest.raises(ValueError, match="min_count: expected at least 1, got 0"):
        WordTokenizer.build(CAPTIONS, min_count=0)


def test_padding():
    tokenizer = WordTokenizer.build(CAPTIONS)
    assert tokenizer.pad("a dog", 6) == [1, 4, 5, 2, 0, 0]
    assert tokenizer.pad("a dog", 4) == [1, 4, 5, 2]
    assert tokenizer.pad("a dog a dog", 4) == [1, 4, 5, 2]
    assert tokenizer.pad("", 3) == [1, 2, 0]


def test_plain_data_and_back(tmp_path):
    tokenizer = WordTokenizer.build(CAPTIONS)
    plain = json.loads(json.dumps(tokenizer.to_dict()))
    torch.save(plain, tmp_path / "plain.pt")
    again = load_tokenizer(torch.load(tmp_path / "plain.pt", weights_only=True))
    assert isinstance(again, WordTokenizer)
    assert again.to_dict() == tokenizer.to_dict() == WordTokenizer.from_dict(plain).to_dict()
    assert again.encode(CAPTIONS[0]) == tokenizer.encode(CAPTIONS[0])


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({}, "vocabulary: expected what a tokenizer's to_dict"),
        (["a"], "vocabulary: expected what a tokenizer's to_dict"),
        ({"tokenizer": "pickle"}, "vocabulary: expected what a tokenizer's to_dict"),
        ({"tokenizer": "words"}, "vocabulary: expected what a tokenizer's to_dict"),
        ({"tokenizer": "words", "words": ["a", "b", "a"]}, "words: expected different.*'a' twice"),
    ],
)
def test_what_is_no_tokenizer(plain, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(plain)


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for make in (
        lambda: BPETokenizer.build(CAPTIONS),
        lambda: load_tokenizer({"tokenizer": "bpe", "data": "{}"}),
    ):
        with pytest.raises(UserError, match=r"pip install 'attnkit\[bpe\]'"):
            make()


class TestBPE:
    @pytest.fixture(autouse=True)
    def _library(self):
        pytest.importorskip("tokenizers")

    @pytest.fixture
    def tokenizer(self):
        return BPETokenizer.build(CAPTIONS * 9, size=300)

    @pytest.mark.parametrize("text", ["a dog's ball", "über 犬 <end> <pad>!", "", "x"])
    def test_every_text_comes_back(self, tokenizer, text):
        ids = tokenizer.encode(f"  {text.upper()} ")
        assert all(3 < number < len(tokenizer) for number in ids)
        assert tokenizer.decode([1, *ids, 2, 7, 0]) == text

    def test_frequent_words_are_one_number(self, tokenizer):
        assert 260 < len(tokenizer) <= 300
        assert len(tokenizer.encode("a dog")) == 2
        assert len(tokenizer.encode("zebra")) > 2

    def test_plain_data_and_back(self, tokenizer):
        plain = json.loads(json.dumps(tokenizer.to_dict()))
        again = load_tokenizer(plain)
        assert isinstance(again, BPETokenizer)
        assert again.encode(CAPTIONS[1]) == tokenizer.encode(CAPTIONS[1])
        assert len(again) == len(tokenizer)

    def test_rare_pairs_are_not_merged(self):
        assert len(BPETokenizer.build(CAPTIONS, size=300, min_count=99)) == 260

    def test_bad_arguments(self):
        with pytest.raises(ValueError, match="size: expected at least 260, got 100"):
            BPETokenizer.build(CAPTIONS, size=100)
        with pytest.raises(ValueError, match="data: not a tokenizer of the library"):
            BPETokenizer("{}")
