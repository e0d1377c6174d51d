"""How data describe themselves to a model."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class DescribedData(Protocol):
    """A LightningDataModule that describes its data; a run fills in the model's nulls from it.

        class Cells(LightningDataModule):
            def describe(self):
                return {"image_size": 64, "in_channels": 3, "num_classes": 2,
                        "class_names": ["healthy", "infected"],
                        "mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2]}

    It may also have a method `summary()` that returns a list of lines, printed and logged before a
    run. Both are optional: without `describe()`, `ImageClassification` looks at the first batches
    (`attnkit.tasks.image_classification.describe_batches`).
    """

    def describe(self) -> Mapping[str, Any]:
        """Plain values by the names of arguments of the module and of the model.

        Called after `prepare_data()` and `setup("fit")`, before module and model are built. Each
        value fills the argument of its name where the configuration leaves it null; names that
        are not arguments are ignored. Images: `image_size` (side in pixels, or [height, width]),
        `patch_size`, `in_channels`, `num_classes`, `class_names`, and of the training pixels on the
        scale from 0 to 1 `mean` and `std` per channel; of batches that the data module normalises
        itself `normalized_by`, a dict of the `mean` and `std` that it used. Nodes of a graph:
        `in_channels`, `out_channels`, `num_classes`, `class_names`.
        """
        ...
