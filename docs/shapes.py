"""The first picture of the README: four trained models, one for each shape of attention.

    python docs/shapes.py PATCHES PIXELS CHANNELS NODES docs/shapes.png

The first four are folders of `run=export export.formats=[]`, of the runs

    python -m attnkit task=vit data=needle_digits
    python -m attnkit task=spatial data=needle_digits attention=spatial
    python -m attnkit task=channel attention=channel trainer.max_epochs=8
    python -m attnkit task=graph

which take about 30 minutes on one core.
"""

import sys

import matplotlib.pyplot as plt
import networkx as nx
import torch
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from torch.nn import functional as F

import attnkit
from attnkit.tasks.image_classification import NeedleDigits
from attnkit.tasks.node_classification import DigitsGraphData

IMAGE = 5  # of the test images
PIXEL = (3, 13)  # whose attention is shown, of 16 × 16
NODE = 17
SHADE = "magma"
FRAME = "#4db3ff"


def main(patches, pixels, channels, nodes, path):
    data = NeedleDigits()
    data.prepare_data()
    data.setup("test")
    image = next(iter(data.test_dataloader()))[0][IMAGE]
    figure, panels = plt.subplots(1, 4, figsize=(14, 4.0), layout="constrained")
    with torch.no_grad():
        draw_patches(panels[0], attnkit.load(patches).eval(), image)
        draw_pixels(panels[1], attnkit.load(pixels).eval(), image)
        draw_channels(panels[2], attnkit.load(channels).eval())
        draw_nodes(panels[3], attnkit.load(nodes).eval())
    for panel in panels:
        panel.set_xticks([])
        panel.set_yticks([])
        panel.spines[:].set_visible(False)
    figure.savefig(path, dpi=110)


def weights_of(module, layer, *inputs):
    """The weights of the layer's first head in a forward of the first item, [queries, keys]."""
    with attnkit.capture_attention(module) as found:
        module(*inputs)
    return found[layer][0][0, 0]


def overlay(panel, image, grid, title):
    """The image, bright where the map is high."""
    light = F.interpolate(grid[None, None], image.shape[1:], mode="nearest")[0, 0]
    light = 0.35 + 0.65 * light / light.max()
    pixels = image.float() / image.max()
    panel.imshow((pixels + 0.35 * (1 - pixels)).mul(light).permute(1, 2, 0))
    panel.set_title(title, fontsize=13)


def draw_patches(panel, module, image):
    row = weights_of(module, "model.blocks.2.attention", image[None])[0]
    grid = row[1:].unflatten(0, (4, 4))
    overlay(panel, image, grid, "patches")
    panel.set_xlabel("ViT: what the class token looks at", fontsize=10)


def draw_pixels(panel, module, image):
    layer = "model.stages.1.1.attention.attention"
    row = weights_of(module, layer, image[None])[PIXEL[0] * 16 + PIXEL[1]]
    overlay(panel, image, row.unflatten(0, (16, 16)), "pixels")
    x, y = 2 * PIXEL[1] - 0.5, 2 * PIXEL[0] - 0.5
    panel.add_patch(plt.Rectangle((x, y), 2, 2, fill=False, ec=FRAME, lw=2.5))
    panel.set_xlabel("SpatialAttention: what the framed position looks at", fontsize=10)


def draw_channels(panel, module):
    image = DigitsGraphData().load().x[NODE].view(1, 1, 8, 8)
    panel.imshow(weights_of(module, "model.stages.1.1.attention", image), cmap=SHADE)
    panel.set_title("channels", fontsize=13)
    panel.set_xlabel("ChannelAttention: 32 channels at 32", fontsize=10)


def draw_nodes(panel, module):
    graph = DigitsGraphData().load()
    edges = attnkit.Edges(graph.edge_index, graph.num_nodes)
    layer = module.model.layers[0].attention
    weights = layer.attention_weights(graph.x, edges)[: graph.num_edges].mean(1)  # no self-loops
    sources, targets = graph.edge_index.tolist()
    near = {NODE} | {s for s, t in zip(sources, targets, strict=True) if t == NODE}
    drawn = nx.DiGraph()
    for source, target, weight in zip(sources, targets, weights.tolist(), strict=True):
        if source in near and target in near and source != target:
            drawn.add_edge(source, target, weight=weight)
    places = nx.circular_layout(near - {NODE}) | {NODE: (0.0, 0.0)}
    widths = [12 * drawn[a][b]["weight"] * (b == NODE) + 0.3 for a, b in drawn.edges]
    colours = ["#b2182b" if b == NODE else "0.7" for _, b in drawn.edges]
    nx.draw_networkx_edges(drawn, places, ax=panel, width=widths, edge_color=colours, arrows=True,
                           node_size=900, arrowsize=9)  # fmt: skip
    for node, place in places.items():
        thumb = OffsetImage(graph.x[node].view(8, 8), zoom=4, cmap="gray", interpolation="nearest")
        frame = {"edgecolor": FRAME if node == NODE else "0.7", "linewidth": 2.5}
        panel.add_artist(AnnotationBbox(thumb, place, pad=0.1, bboxprops=frame))
    panel.margins(0.18)
    panel.set_title("graph nodes", fontsize=13)
    panel.set_xlabel("GraphAttention: what the framed node looks at", fontsize=10)


if __name__ == "__main__":
    main(*sys.argv[1:])
