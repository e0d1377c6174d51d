"""The picture of the tutorial on classification, of a run with maps of attention.

MATPLOTLIBRC=docs/pictures.mplstyle python -m attnkit task=vit run_dir=RUN \\
    callbacks=interpret callbacks.interpret.trust=none callbacks.interpret.layer=-1 \\
    callbacks.interpret.num_images=6
python docs/digits.py RUN docs/digits.png
"""

import sys
from pathlib import Path

from PIL import Image

WIDTH = 1200
SPACE = 24


def main(run, path):
    names = "interpret/test.png", "learning_curves.png", "confusion_matrix.png"
    maps, curves, matrix = (Image.open(Path(run, name)).convert("RGBA") for name in names)
    maps = scaled(maps, WIDTH)
    curves = scaled(curves, round(0.63 * WIDTH))
    matrix = scaled(matrix, round(0.35 * WIDTH))
    height = maps.height + SPACE + max(curves.height, matrix.height)
    sheet = Image.new("RGB", (WIDTH, height), "white")
    sheet.paste(maps, (0, 0), maps)
    sheet.paste(curves, (0, maps.height + SPACE), curves)
    sheet.paste(matrix, (WIDTH - matrix.width, maps.height + SPACE), matrix)
    sheet.save(path, optimize=True)


def scaled(image, width):
    height = round(image.height * width / image.width)
    return image.resize((width, height), Image.Resampling.LANCZOS)


if __name__ == "__main__":
    main(*sys.argv[1:])
