"""Regression by attention (Nadaraya 1964; Watson 1964), as in Dive into Deep Learning.

    python docs/examples/nadaraya_watson.py [--picture nadaraya_watson.png]

50 noisy points of y = 2 sin x + x^0.8 are keys and values, a new x is the query. The estimate is

    y(x) = Σ_j softmax_j(−(x − x_j)² / 2σ²) y_j

A large σ gives the mean of all points. The σ learned here says best what each point left out is.
"""

import argparse

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from attnkit import Dense, Gaussian, attend


def curve(x: Tensor) -> Tensor:
    return 2 * x.sin() + x**0.8


def estimate(query: Tensor, x: Tensor, y: Tensor, bandwidth: float | Tensor, mask=None) -> Tensor:
    """Attention of one head, with points and values of one channel."""
    shaped = (tensor.reshape(1, 1, -1, 1) for tensor in (query, x, y))
    return attend(*shaped, score=Gaussian(bandwidth), mask=mask).flatten()


def learned_bandwidth(x: Tensor, y: Tensor, steps: int = 100) -> Tensor:
    """The σ by which the others say best what a point is."""
    log_bandwidth = torch.zeros((), requires_grad=True)
    others = Dense(~torch.eye(len(x), dtype=torch.bool))
    optimizer = torch.optim.Adam([log_bandwidth], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        (estimate(x, x, y, log_bandwidth.exp(), others) - y).square().mean().backward()
        optimizer.step()
    return log_bandwidth.detach().exp()


def main(seed: int = 0, picture: str | None = None) -> float:
    """The mean squared distance from the true curve, with the learned σ."""
    draw = torch.Generator().manual_seed(seed)
    x = 5 * torch.rand(50, generator=draw).sort().values
    y = curve(x) + 0.5 * torch.randn(50, generator=draw)
    new = torch.arange(0, 5, 0.1)
    learned = learned_bandwidth(x, y)
    estimates = {
        "all equal": y.mean().expand(len(new)),
        "σ = 1": estimate(new, x, y, 1.0),
        f"σ = {float(learned):.2f}, learned": estimate(new, x, y, learned),
    }
    errors = {name: float((e - curve(new)).square().mean()) for name, e in estimates.items()}
    print(", ".join(f"{name}: squared error {error:.3f}" for name, error in errors.items()))
    if picture is not None:
        plot(x, y, new, estimates, picture)
    return [*errors.values()][-1]


def plot(x: Tensor, y: Tensor, new: Tensor, estimates: dict[str, Tensor], path: str) -> None:
    figure, axis = plt.subplots(figsize=(5.5, 3.2), layout="constrained")
    axis.plot(x, y, "o", color="grey", markersize=4, label="points")
    axis.plot(new, curve(new), "k--", label="2 sin x + x$^{0.8}$")
    for name, values in estimates.items():
        axis.plot(new, values, label=name)
    axis.set(xlabel="x", ylabel="y")
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", default=None)
    main(**vars(parser.parse_args()))
