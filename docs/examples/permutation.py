"""Self-attention does not see the order of its tokens, until positions say it (Lee et al. 2019).

    python docs/examples/permutation.py [--picture permutation.png]

A permutation P of the tokens permutes the outputs of self-attention and changes nothing else:

    f(P x) = P f(x)

The picture shows what each token looks at, before and after tokens were put into another order.
Without positions, the weights are the same in another order; with positions they are not.
"""

import argparse

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from attnkit import MultiHeadAttention

TOKENS, DIM = 7, 16


def main(seed: int = 0, picture: str | None = None) -> float:
    """The largest |f(P x) − P f(x)| without positions."""
    torch.manual_seed(seed)
    block = MultiHeadAttention(DIM, 1).double()
    x = torch.randn(1, TOKENS, DIM, dtype=torch.float64)
    order = torch.randperm(TOKENS)
    positions = {"no positions": torch.zeros_like(x), "positions": torch.randn_like(x)}
    differences, weights = {}, {}
    with torch.no_grad():
        for name, position in positions.items():
            before, after = x + position, x[:, order] + position
            differences[name] = float((block(after) - block(before)[:, order]).abs().max())
            weights[name] = [block.attention_weights(z)[0, 0] for z in (before, after)]
    for name, difference in differences.items():
        print(f"{name}: |f(Px) − P f(x)| is at most {difference:.1e}")
    if picture is not None:
        plot(weights, order, picture)
    return differences["no positions"]


def plot(weights: dict[str, list[Tensor]], order: Tensor, path: str) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(5.6, 5), layout="constrained")
    names = [list(range(TOKENS)), order.tolist()]
    for row, (name, pair) in zip(axes, weights.items(), strict=True):
        for axis, weight, tokens in zip(row, pair, names, strict=True):
            image = axis.imshow(weight.numpy(), cmap="Blues", vmin=0, vmax=0.5)
            axis.set_xticks(range(TOKENS), tokens)
            axis.set_yticks(range(TOKENS), tokens)
            title = "first order" if tokens == names[0] else "permuted"
            axis.set_title(f"{name}, {title}", fontsize=9)
            axis.set(xlabel="token looked at", ylabel="token")
    figure.colorbar(image, ax=axes, label="attention weight", shrink=0.6, extend="max")
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", default=None)
    main(**vars(parser.parse_args()))
