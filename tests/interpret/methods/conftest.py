"""A small ViT of nobody's library, whose attention is fused, or eager with its weights kept."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

HEIGHT, WIDTH, PATCH, DIM, HEADS, CLASSES = 12, 20, 4, 15, 3, 7


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.last = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.eager, self.kept, self.merged = False, None, None

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1)
        )
        if self.eager:
            self.kept = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(dim=-1)
            self.value, out = v, self.kept @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v)
        return self.last(out.transpose(1, 2).flatten(2))


class Pool(nn.Module):
    """One learned query that looks at the patches."""

    def __init__(self):
        super().__init__()
        self.query, self.eager = nn.Parameter(torch.empty(1, HEADS, 1, DIM // HEADS)), False

    def forward(self, x):
        kv = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        if self.eager:
            self.kept = (self.query @ kv.mT * kv.shape[-1] ** -0.5).softmax(dim=-1)
            out = self.kept @ kv
        else:
            out = F.scaled_dot_product_attention(self.query.expand(len(x), -1, -1, -1), kv, kv)
        return out.transpose(1, 2).flatten(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(DIM), Attention()
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 22), nn.GELU())
        self.back = nn.Linear(22, DIM)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.back(self.mlp(x))


class PlainViT(nn.Module):
    """One class token and one register before 3 x 5 patches."""

    def __init__(self, pooling="class", depth=3):
        super().__init__()
        self.patches = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.prefix = nn.Parameter(torch.empty(1, 2, DIM))
        self.table = nn.Parameter(torch.empty(1, 17, DIM))
        self.steps = nn.Sequential(*(Block() for _ in range(depth)))
        self.norm, self.classify, self.pooling = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES), pooling
        self.pool = Pool() if pooling == "learned" else None
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.4)

    @property
    def attentions(self):
        return [block.attention for block in self.steps]

    def end(self, tokens):
        tokens = self.norm(tokens)
        if self.pooling == "learned":
            return self.classify(self.pool(tokens[:, 2:]))
        pooled = tokens[:, 0] if self.pooling == "class" else tokens[:, 2:].mean(dim=1)
        return self.classify(pooled)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.prefix.expand(len(x), -1, -1), x], dim=1) + self.table
        return self.end(self.steps(x))

    def eager(self, is_eager=True):
        for attention in [*self.attentions, *([self.pool] if self.pool else [])]:
            attention.eager = is_eager
        return self


@pytest.fixture
def vit():
    return lambda *given, **options: PlainViT(*given, **options).eval()


@pytest.fixture(params=["class", "mean"])
def model(request, vit):
    return vit(request.param)


@pytest.fixture
def images():
    return torch.randn(2, 3, HEIGHT, WIDTH)


@pytest.fixture
def target():
    return torch.tensor([5, 2])
