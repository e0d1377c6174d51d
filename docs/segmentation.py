"""The picture of the tutorial on segmentation: the examples that a run left, one a column.

python -m attnkit task=segmentation run_dir=RUN
python docs/segmentation.py RUN docs/segmentation.png
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

EXAMPLES = 7  # of the 8 that examples.png has, one below the other under a line of text
LINE = 14  # pixels


def main(run, path):
    matplotlib.style.use(Path(__file__).with_name("pictures.mplstyle"))
    sheet = plt.imread(Path(run, "examples.png"))
    side = sheet.shape[1] // 3
    figure, panels = plt.subplots(3, EXAMPLES, figsize=(11, 4.9), layout="constrained")
    for row, name in enumerate(("image", "truth", "prediction")):
        for column, panel in enumerate(panels[row]):
            top, left = LINE + (column + 1) * side, row * side
            panel.imshow(sheet[top : top + side, left : left + side])
            panel.set(xticks=[], yticks=[])
            panel.spines[:].set_visible(False)
        panels[row, 0].set_ylabel(name)
    figure.savefig(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
