"""Put attention into a network of timm, train it on digits, and look at what its answers depend on.

    python docs/examples/swap_attention.py [--attention cbam] [--epochs 4]

The network is a ResNet with random weights, so that no network connection is needed. The attention
starts as the identity: until it is trained, the network computes what it did without.
"""

import argparse

import timm
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

import attnkit


def main(attention: str = "cbam", epochs: int = 4, picture: str = "swap_attention.png") -> float:
    torch.manual_seed(0)
    digits = load_digits()
    images = F.interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, size=32)
    labels = torch.tensor(digits.target)
    train, test = torch.randperm(len(images)).split([1500, len(images) - 1500])

    network = timm.create_model("test_resnet", num_classes=10, in_chans=1, output_stride=8).eval()
    with torch.no_grad():
        before = network(images[test])
        inserted = attnkit.insert_attention(
            network, attention, where="stages", start_as_identity=True, example=images[:1]
        )
        print(inserted)
        assert torch.equal(network(images[test]), before)

    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    for _ in range(epochs):
        network.train()
        for batch in train[torch.randperm(len(train))].split(64):
            loss = F.cross_entropy(network(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    network.eval()
    with torch.no_grad():
        accuracy = float((network(images[test]).argmax(1) == labels[test]).float().mean())
    print(f"test accuracy {accuracy:.3f}")

    attnkit.explain(network, images[test[:4]], method="grad_cam").save(picture)
    judged = images[test[:16]]
    seen = attnkit.explain(network, judged, method="grad_cam")
    print(attnkit.trust(network, judged, None, seen.map))
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--attention", default="cbam")
    parser.add_argument("--epochs", type=int, default=4)
    asked = parser.parse_args()
    main(asked.attention, asked.epochs)
