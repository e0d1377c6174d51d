"""Images of which it is known where the evidence is: what maps are judged by."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True)
class Truth:
    """Images, and the objects in them that an answer is to be seen from.

    images: uint8 [images, channels, height, width], as the model takes them.
    masks: bool [images, objects, height, width]: True = the object.
    classes: int64 [images, objects]: the class that each object speaks for; None: of captions.
    objects_of: of captions, the words of a sentence that name an object: (number of the image,
        sentence) to pairs (number of the word, number of the object).
    """

    images: Tensor
    masks: Tensor
    classes: Tensor | None = None
    objects_of: Callable[[int, str], list[tuple[int, int]]] | None = None

    def mask_of(self, image: int, class_number: int) -> Tensor | None:
        """The mask of the object that speaks for a class, bool [height, width]; None: no object of
        the image does."""
        if self.classes is None:
            raise ValueError(
                "mask_of: objects of captions have words instead of classes; use objects_of"
            )
        found = (self.classes[image] == class_number).nonzero().flatten().tolist()
        return self.masks[image, found].any(dim=0) if found else None


@runtime_checkable
class KnowsTruth(Protocol):
    """A data module that knows where in its images the evidence is; asked after `setup`."""

    def truth(self, split: str = "test") -> Truth:
        """The images of a split, in its order."""
        ...
