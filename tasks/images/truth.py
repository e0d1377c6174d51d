"""Ground truth of explanations: images with masks of where the evidence is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True)
class Truth:
    """Images and masks of the objects in them that show the right answer.

    images: uint8 [images, channels, height, width], as the model takes them.
    masks: bool [images, objects, height, width]: True = the object.
    classes: int64 [images, objects]: the class that each object shows; None for captions.
    objects_of: for captions, maps (index of the image, sentence) to pairs (index of the word, index
        of the object that it names).
    """

    images: Tensor
    masks: Tensor
    classes: Tensor | None = None
    objects_of: Callable[[int, str], list[tuple[int, int]]] | None = None

    def mask_of(self, image: int, class_number: int) -> Tensor | None:
        """Return the mask of the objects that show a class, bool [height, width], or None if the
        image has none."""
        if self.classes is None:
            raise ValueError(
                "mask_of: objects of captions have words instead of classes; use objects_of"
            )
        found = (self.classes[image] == class_number).nonzero().flatten().tolist()
        return self.masks[image, found].any(dim=0) if found else None


@runtime_checkable
class KnowsTruth(Protocol):
    """A data module that knows where the evidence is in its images, after `setup`."""

    def truth(self, split: str = "test") -> Truth:
        """Return the ground truth of the images of a split, in its order."""
        ...
