"""A dozen of the scenes that captioning learns from, as a sheet: python docs/examples/scenes.py"""

import sys
from textwrap import fill

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from attnkit.tasks.captioning import ScenesData


def main(path="docs/scenes.png"):
    data = ScenesData(num_train=1, num_val=1, num_test=6, image_size=96, seed=4)
    data.setup()
    figure, axes = plt.subplots(3, 4, figsize=(9, 7.6), layout="constrained")
    for row, (name, loader) in zip((0, 6), data.test_dataloader().items(), strict=True):
        batch = next(iter(loader))
        shown = zip(batch["image"], batch["references"], strict=True)
        for axis, (image, captions) in zip(axes.flat[row:], shown, strict=False):
            axis.imshow(image.permute(1, 2, 0))
            axis.set_title(fill(captions[0], 30), fontsize=8)
            axis.set_xlabel(name, fontsize=8)
            axis.set(xticks=[], yticks=[])
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
