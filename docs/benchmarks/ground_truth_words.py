"""Tests whether maps of words are on the objects that they name, with captioners of several seeds.

    for seed in 0 1 2 3 4; do
        python -m attnkit task=captioning seed=$seed run_dir=runs/words_$seed
    done
    python docs/benchmarks/ground_truth_words.py runs/words.jsonl runs/words_*

Asked about are the nouns and colours of the sentences that a captioner says of test scenes, where
they name what is there; answered right is a scene of which a word does. Class sensitivity is of the
word said and the likeliest other in its place. Each captioner adds its rows to the file. Training
takes 3 minutes of one core's time, the maps one more.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d
from truths import Row, details, kept, overview

import attnkit
from attnkit.interpret.methods.table import methods_of
from attnkit.interpret.methods.words import Sentences
from attnkit.interpret.trust.judge import spearman, with_random_weights
from attnkit.metrics.maps import area, mass
from attnkit.models.captioning.word_decoder import PAD, START
from attnkit.tasks.captioning import ImageCaptioning, ScenesData


def rows_of(truth: str, name: str, seed: int, *, runs: list[str], num_images: int) -> list[Row]:
    checkpoint = Path(runs[seed]) / "checkpoints" / "best.ckpt"
    module = ImageCaptioning.load_from_checkpoint(checkpoint, map_location="cpu").eval()
    model = module.model
    drawn = with_random_weights(model, torch.Generator().manual_seed(0))
    data = ScenesData(num_train=100, num_val=1, num_test=num_images, seed=seed)
    data.setup()
    scenes = data.truth()
    images = module.normalized(scenes.images)
    said = model.generate(images).words
    places = [
        (image, word, thing)
        for image, words in enumerate(said.tolist())
        for word, thing in scenes.objects_of(image, module.tokenizer.decode(words))
    ]
    image, word, thing = torch.tensor(places).T
    masks, images, said = scenes.masks[image, thing], images[image], said[image]
    other = with_another(model, images, said, word)
    oracle = adaptive_avg_pool2d(masks[:, None].float(), model.grid)[:, 0]
    known = {"measure": "mass", "chance": float(area(masks).mean()), "num": len(places)}
    known["right"] = len(set(image.tolist())) / num_images
    rows = []
    for method in methods_of("word"):
        maps, of_other, of_drawn = (
            maps_of(method, *asked, images, word)
            for asked in ((model, said), (model, other), (drawn, said))
        )
        row = {"method": method, "score": float(mass(maps, masks).mean())}
        row["class_sensitivity"] = 1 - float(spearman(maps, of_other).mean())
        row["random_weights"] = float(spearman(maps, of_drawn).mean())
        rows.append(row | known)
    return [*rows, {"method": "oracle", "score": float(mass(oracle, masks).mean()), **known}]


@torch.no_grad()
def with_another(model: nn.Module, images: Tensor, said: Tensor, word: Tensor) -> Tensor:
    """The sentences with the likeliest other word in the place of each that is asked about."""
    each = torch.arange(len(said))
    logits = Sentences(model, images, said).logits_of_words(images)[each, word]
    logits[:, [PAD, START]] = logits[each, said[each, word]] = -torch.inf
    return said.index_put((each, word), logits.argmax(dim=1))


def maps_of(method: str, model: nn.Module, said: Tensor, images: Tensor, word: Tensor) -> Tensor:
    parts = zip(images.split(50), said.split(50), strict=True)
    maps = torch.cat([attnkit.explain(model, *part, method).words for part in parts])
    return maps[torch.arange(len(maps)), word]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("runs", nargs="+", help="run folders of captioners, of seeds 0, 1, …")
    parser.add_argument("--images", type=int, default=60)
    arguments = parser.parse_args()
    of_words = partial(rows_of, runs=arguments.runs, num_images=arguments.images)
    cases = [("scenes", "captioner")]
    rows = kept(arguments.file, len(arguments.runs), cases, of_words)
    print(f"{overview(rows)}\n\n{details(rows)}")
