"""The first picture of the README: four networks, one for each shape of attention.

    python docs/shapes.py docs/shapes.png

Each learns to take noise from the two photographs that scikit-learn ships, china.jpg and
flower.jpg, and the picture shows where one token of a noisy photograph looks. Nothing is
downloaded, and no network was trained before. About 100 seconds on one core.
"""

import io
import sys
import time
from pathlib import Path

import matplotlib
import numpy as np
import torch
from PIL import Image
from sklearn.cluster import KMeans
from sklearn.datasets import load_sample_image
from torch import nn
from torch.nn import functional as F

import attnkit
from attnkit import ChannelAttention, GraphAttention, SpatialAttention
from attnkit.layers import TransformerBlock

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.collections import LineCollection

NOISE = 0.25  # standard deviation; colours are between 0 and 1
PATCH = 8
NODES = 220
FLOWER = np.s_[..., 0:208, 40:248]  # of flower.jpg
CHINA = np.s_[..., 0:208, 60:268]
FRAME = "#ff2fd0"


def photographs():
    """Return the two photographs at half their size, [2, 3, 213, 320]."""
    both = [load_sample_image(name) for name in ("china.jpg", "flower.jpg")]
    images = torch.tensor(np.stack(both)).permute(0, 3, 1, 2).float() / 255
    return F.interpolate(images, scale_factor=0.5, mode="area")


class Patches(nn.Module):
    """A ViT without a class token, which paints a clean patch for each noisy one."""

    def __init__(self, dim=96):
        super().__init__()
        self.embed = nn.Conv2d(3, dim, PATCH, PATCH)
        self.blocks = nn.Sequential(*[TransformerBlock(dim, 4) for _ in range(2)])
        self.paint = nn.ConvTranspose2d(dim, 3, PATCH, PATCH)

    def forward(self, noisy):
        tokens = self.embed(noisy)
        seen = self.blocks(tokens.flatten(2).mT)
        return self.paint(seen.mT.unflatten(2, tokens.shape[2:]))


class Maps(nn.Module):
    """A convolutional network with an attention over the feature map in its middle."""

    def __init__(self, attention):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 32, 4, 2, 1), nn.GELU(), nn.Conv2d(32, 16, 4, 2, 1))
        self.attention = attention
        self.up = nn.Sequential(
            nn.ConvTranspose2d(16, 32, 4, 2, 1), nn.GELU(), nn.ConvTranspose2d(32, 3, 4, 2, 1)
        )

    def forward(self, noisy):
        return self.up(self.attention(self.down(noisy)))


class Nodes(nn.Module):
    """One attention along the edges of a graph, between two small networks of each node."""

    def __init__(self, edges, dim=32):
        super().__init__()
        self.edges = edges
        self.read = nn.Sequential(nn.Linear(3, dim), nn.GELU(), nn.Linear(dim, dim))
        self.attention = GraphAttention(dim, dim, score="gaussian")
        self.paint = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, 3))

    def forward(self, noisy):
        return self.paint(self.attention(self.read(noisy), self.edges))


def pieces(images, count=8, side=64):
    """Pieces of the photographs, [count, 3, side, side]."""
    photos = torch.randint(len(images), (count,))
    tops, lefts = (torch.randint(size - side + 1, (count,)) for size in images.shape[2:])
    places = zip(photos, tops, lefts, strict=True)
    return torch.stack([images[n, :, y : y + side, x : x + side] for n, y, x in places])


def graph_of(image):
    """Regions of like colour as nodes: colours [nodes, 3], places, edges [2, edges] between
    regions that touch or have a neighbour in common, and which touch."""
    height, width = image.shape[1:]
    rows, columns = np.mgrid[:height, :width] / 60
    pixels = np.stack([*image.numpy(), rows, columns], -1).reshape(-1, 5)
    found = KMeans(NODES, n_init=1, random_state=0).fit(pixels)
    regions = found.labels_.reshape(height, width)
    touch = np.zeros((NODES, NODES), bool)
    for one, other in ((regions[1:], regions[:-1]), (regions[:, 1:], regions[:, :-1])):
        touch[one, other] = touch[other, one] = True
    near = (touch.astype(int) @ touch > 0) | touch
    np.fill_diagonal(near, False)
    centres = torch.tensor(found.cluster_centers_).float()
    edges = torch.tensor(np.stack(np.nonzero(near)))
    return centres[:, :3], 60 * centres[:, [4, 3]].numpy(), edges, touch


def noisy(clean):
    return clean + NOISE * torch.randn_like(clean)


def learn(model, draw, steps):
    """Bring a network's answer to noisy tokens near the clean ones, which `draw()` gives."""
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for _ in range(steps):
        clean = draw()
        loss = F.mse_loss(model(noisy(clean)), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"{type(model).__name__}: squared error {loss:.4f}, of the noise {NOISE**2:.4f}")
    return model.eval()


def weights_of(model, layer, inputs):
    """The weights of a layer, the mean over its heads, [queries, keys]."""
    with torch.no_grad(), attnkit.capture_attention(model) as found:
        model(inputs)
    return found[layer][0][0].mean(0)


def spotlight(panel, image, row):
    """The photograph, in colour where the weights are large and grey and dim where they are not."""
    light = F.interpolate(row[None, None], image.shape[1:], mode="nearest")[0, 0]
    light = (light / light.quantile(0.98)).clamp(0, 1)
    grey = 0.12 + 0.3 * image.mean(0, keepdim=True)
    panel.imshow((light * image + (1 - light) * grey).permute(1, 2, 0))


def frame(panel, row, column, side):
    corner = column * side - 0.5, row * side - 0.5
    panel.add_patch(plt.Rectangle(corner, side, side, fill=False, ec=FRAME, lw=2.5))


def draw_patches(panel, model, image):
    row, column = 15, 8
    side = image.shape[2] // PATCH
    weights = weights_of(model, "blocks.1.attention", noisy(image[None]))
    spotlight(panel, image, weights[row * side + column].view(side, side))
    frame(panel, row, column, PATCH)
    title(panel, "patches: a ViT", "where the framed patch looks")


def draw_pixels(panel, model, image):
    row, column = 20, 10
    side = image.shape[2] // 4
    weights = weights_of(model, "attention.attention", noisy(image[None]))
    spotlight(panel, image, weights[row * side + column].view(side, side))
    frame(panel, row, column, 4)
    title(panel, "pixels: SpatialAttention", "where the framed pixel looks")


def draw_channels(panel, model, image):
    """Feature maps as tiles, as bright as their weight."""
    seen = noisy(image[None])
    weights = weights_of(model, "attention", seen)
    with torch.no_grad():
        maps = model.down(seen)[0]
    low, high = (maps.flatten(1).quantile(q, 1)[:, None, None] for q in (0.02, 0.98))
    maps = ((maps - low) / (high - low)).clamp(0, 1)
    query = int((weights - weights.diag().diag()).amax(1).argmax())
    light = (weights[query] / weights[query].max()).sqrt()
    side = maps.shape[1] + 2
    sheet = torch.zeros(4 * side, 4 * side, 4)
    for number, tile in enumerate(maps):
        row, column = divmod(number, 4)
        colour = torch.tensor([1.0, 0.72, 0.3]) * light[number] + 0.5 * (1 - light[number])
        area = sheet[
            row * side + 1 : (row + 1) * side - 1, column * side + 1 : (column + 1) * side - 1
        ]
        area[..., :3] = (0.2 + 0.8 * tile[..., None]) * colour
        area[..., 3] = 1
    panel.imshow(sheet)
    frame(panel, *divmod(query, 4), side)
    title(panel, "channels: ChannelAttention", "where the framed channel looks")


def draw_nodes(panel, model, image, graph):
    colours, places, edges, touch = graph
    node = int(np.linalg.norm(places - (62, 100), axis=1).argmin())
    with torch.no_grad():
        weights = model.attention.attention_weights(model.read(noisy(colours)), edges)[:, 0]
    panel.imshow((0.12 + 0.3 * image.mean(0)).expand(3, -1, -1).permute(1, 2, 0))
    pairs = np.argwhere(np.triu(touch))
    panel.add_collection(LineCollection(places[pairs], colors="0.75", linewidths=0.4, alpha=0.6))
    into = edges[1] == node
    sources, light = edges[0][into].numpy(), (weights[into] / weights[into].max()).numpy()
    lines = [(places[source], places[node]) for source in sources]
    panel.add_collection(LineCollection(lines, colors=FRAME, lw=4 * light, alpha=light, zorder=2))
    panel.scatter(*places.T, s=26, c=colours.clamp(0, 1), ec="0.8", lw=0.5, zorder=3)
    panel.scatter(*places[node], s=110, c=[colours[node].tolist()], ec=FRAME, lw=2.5, zorder=4)
    panel.set(xlim=(-0.5, image.shape[2] - 0.5), ylim=(image.shape[1] - 0.5, -0.5))
    title(panel, "graph nodes: GraphAttention", "where the framed node looks")


def title(panel, tokens, caption):
    panel.set_title(tokens)
    panel.set_xlabel(caption)
    panel.set(xticks=[], yticks=[])
    panel.spines[:].set_visible(False)


def save(figure, path):
    """Write a figure with 24 levels of each colour, which halves the size of the file."""
    with io.BytesIO() as drawn:
        figure.savefig(drawn, dpi=100)
        picture = Image.open(drawn).point(lambda value: round(value / 255 * 23) * 255 // 23)
    picture.save(path, optimize=True)


def main(path):
    matplotlib.style.use(Path(__file__).with_name("pictures.mplstyle"))
    torch.manual_seed(0)
    start = time.perf_counter()
    images = photographs()
    china, flower = images[0][CHINA], images[1][FLOWER]
    graph = graph_of(flower)

    def some():
        return pieces(images)

    pixels = Maps(SpatialAttention(16, score="gaussian", residual="add"))
    channels = Maps(ChannelAttention(16, score="scaled_dot", residual="add"))
    figure, panels = plt.subplots(1, 4, figsize=(14, 4.4), layout="constrained")
    learned = "Four networks that learned to take noise from photographs."
    figure.supxlabel(f"{learned} The stronger the colour, the more attention.", fontsize=11)
    draw_patches(panels[0], learn(Patches(), some, 600), flower)
    draw_pixels(panels[1], learn(pixels, some, 900), china)
    draw_channels(panels[2], learn(channels, some, 600), china)
    draw_nodes(panels[3], learn(Nodes(graph[2]), lambda: graph[0], 2000), flower, graph)
    save(figure, path)
    print(f"{path}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
