"""The unit of explanations of captioners: words, each with a map of the image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnkit.interpret.sentences import Sentences, WordLogits
from attnkit.interpret.trust.judge import trust
from attnkit.interpret.trust.words import trust_words
from attnkit.interpret.units.patch import Patches

if TYPE_CHECKING:
    from attnkit.interpret.explanation import Explanation


class Words(Patches):
    """The patches of images for each word of a sentence.

    Attributes:
        words: [batch, words, rows, columns], 0 after the end of the sentence.
        values: [batch, rows, columns], the mean over the words.
    """

    name = "word"
    target: Sentences

    def __init__(self, target: Sentences, found: Tensor) -> None:
        self.words = found * target.is_word[..., None, None]
        number = target.is_word.sum(dim=1).clamp(min=1)
        super().__init__(target, self.words.sum(dim=1) / number[:, None, None])

    def trust(
        self,
        seen: Explanation,
        image: int | None = None,
        word: int | None = None,
        **options: Any,
    ) -> Any:
        """Compute `attnkit.trust` of one word of one image, given the words before it, as a class.

        Without `image` and `word` it is `trust_words` of all words.
        """
        if image is None and word is None:
            return trust_words(self.target, self.words, **options)
        number, length, *grid = self.words.shape
        for name, index, size in (("image", image, number), ("word", word, length)):
            if index is None or not 0 <= index < size:
                raise ValueError(f"{name}: expected one from 0 to {size - 1}, got {index}")
        assert image is not None
        assert word is not None
        if not self.target.is_word[image, word]:
            raise ValueError(f"word: the sentence of image {image} ends before word {word}")
        if word + 1 >= grid[0] * grid[1] and "mask" in options.get("removals", ("mask",)):
            raise ValueError(
                f"word: behind {word} words, these and the {grid[0] * grid[1]} places of the image "
                "cannot be told apart by their number, to hide them; take removals=['mean']"
            )
        assert seen.again is not None
        again, said = seen.again, self.target.said[image : image + 1]

        def of_word(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
            other = torch.cat([said[:, :word], classes[:, None]], dim=1)
            return again(model.get_submodule("captioner"), images, other)[:, word]

        known: dict[str, Any] = {"target": said[:, word], "method": of_word, "grid": (*grid,)}
        known |= {"map": self.words[image : image + 1, word], "of": self.target.of}
        model = WordLogits(self.target.captioner, self.target.before[image, : word + 1])
        return trust(model, self.target.images.detach()[image : image + 1], **known | options)

    def arrays(self) -> dict[str, Tensor]:
        """Return the maps of the words, and their mean."""
        return {"map": self.values, "words": self.words}

    def line(self, seen: Explanation, number: int) -> str:
        """Return the number of words of a sentence, and their mean probability."""
        said = self.target.is_word[number]
        mean = float(seen.probability[number][said].mean()) if said.any() else 0.0
        return f"{int(said.sum())} words, mean {seen.quantity.symbol} = {mean:.3f}"

    def _panels(self, seen: Explanation, number: int, names: Any) -> tuple[Tensor, list[str], str]:
        said = self.target.is_word[number]
        titles = [str(word) for word in self.target.said[number][said].tolist()]
        given = names[number] if names else []
        titles[: len(given)] = given[: len(titles)]
        return self.words[number, : len(titles)], titles, f"{seen.method}, one scale for all words"
