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
from attnkit.tasks.graphs import DigitsGraphData
from attnkit.tasks.image_classification import NeedleDigits

IMAGE = 5  # of the test images
PIXEL = (3, 13)  # whose attention is shown, of 16 × 16
NODE = 17
FRAME = "#0b5fb0"


def main(patches, pixels, channels, nodes, path):
    data = NeedleDigits()
    data.prepare_data()
    data.setup("test")
    image = next(iter(data.test_dataloader()))[0][IMAGE]
    figure, panels = plt.subplots(1, 4, figsize=(14, 4.1), layout="constrained")
    with torch.no_grad():
        draw_patches(panels[0], attnkit.load(patches).eval(), image)
        draw_pixels(panels[1], attnkit.load(pixels).eval(), image)
        draw_channels(panels[2], attnkit.load(channels).eval())
        draw_nodes(panels[3], attnkit.load(nodes).eval())
    for panel in panels:
        panel.set_box_aspect(1)
        panel.set_xticks([])
        panel.set_yticks([])
        panel.spines[:].set_color("0.8")
    figure.savefig(path, dpi=110)


def weights_of(module, layer, *inputs):
    """The weights of the layer's first head in a forward of the first item, [queries, keys]."""
    with attnkit.capture_attention(module) as found:
        module(*inputs)
    return found[layer][0][0, 0]


def overlay(panel, image, grid):
    """Strokes as ink on paper, which is as blue as the map is high."""
    map = F.interpolate(grid[None, None], image.shape[1:], mode="nearest")[0, 0]
    map = (map / map.max()).sqrt()
    stroke, least = image.amax(0).float(), image.amin(0).float()
    colour = image.float() / stroke.clamp(min=1)
    saturation = 1 - least / stroke.clamp(min=1)
    ink = saturation * colour + (1 - saturation) * 0.15
    paper = 1 - map * torch.tensor([0.55, 0.18, 0.0]).view(3, 1, 1)
    covered = (0.5 + 0.5 * map) * stroke / stroke.max()
    panel.imshow((paper * (1 - covered) + ink * covered).permute(1, 2, 0).numpy())


def draw_patches(panel, module, image):
    row = weights_of(module, "model.blocks.2.attention", image[None])[0]
    overlay(panel, image, row[1:].unflatten(0, (4, 4)))
    title(panel, "patches", "ViT: where the class token looks")


def draw_pixels(panel, module, image):
    layer = "model.stages.1.1.attention.attention"
    row = weights_of(module, layer, image[None])[PIXEL[0] * 16 + PIXEL[1]]
    overlay(panel, image, row.unflatten(0, (16, 16)))
    x, y = 2 * PIXEL[1] - 0.5, 2 * PIXEL[0] - 0.5
    panel.add_patch(plt.Rectangle((x, y), 2, 2, fill=False, ec=FRAME, lw=2.5))
    title(panel, "pixels", "SpatialAttention: where the framed pixel looks")


def draw_channels(panel, module):
    image = DigitsGraphData().load().x[NODE].view(1, 1, 8, 8)
    weights = weights_of(module, "model.stages.1.1.attention", image)
    panel.imshow(weights.sqrt(), cmap="OrRd")
    panel.set_ylabel("32 query channels", fontsize=10)
    title(panel, "channels", "ChannelAttention: 32 key channels")


def title(panel, tokens, caption):
    panel.set_title(tokens, fontsize=14)
    panel.set_xlabel(caption, fontsize=10)


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
    colours = ["#b2182b" if b == NODE else "0.75" for _, b in drawn.edges]
    nx.draw_networkx_edges(drawn, places, ax=panel, width=widths, edge_color=colours, arrows=True,
                           node_size=900, arrowsize=9)  # fmt: skip
    for node, place in places.items():
        thumb = OffsetImage(graph.x[node].view(8, 8), zoom=4, cmap="gray", interpolation="nearest")
        frame = {"edgecolor": FRAME if node == NODE else "0.7", "linewidth": 2.5}
        panel.add_artist(AnnotationBbox(thumb, place, pad=0.1, bboxprops=frame))
    panel.margins(0.18)
    title(panel, "graph nodes", "GraphAttention: where the framed node looks")


if __name__ == "__main__":
    main(*sys.argv[1:])
