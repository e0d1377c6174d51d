"""Segmentation head of learned queries that pass the last blocks of a ViT with the patches."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from attnkit.core.arguments import at_least
from attnkit.core.masks.base import Mask, register
from attnkit.core.positions.relative import Rotary2d
from attnkit.models.vit import ViT
from attnkit.tasks.segmentation.heads import Features, Head, Logits


@dataclass(frozen=True, eq=False)
class _RegionOfQuery(Mask):
    """Mask with which a query sees only the patches of its region; other tokens see everything.

    The tokens are the queries, then prefix tokens, then the patches.

    Args:
        regions: True where a patch is in the region of a query.
        num_prefix_tokens: number of tokens between the queries and the patches; queries see them,
            and each other.
    """

    regions: Annotated[Tensor, "batch queries patches", bool]
    num_prefix_tokens: int = 0

    @property
    def leading(self) -> tuple[int, int]:
        return len(self.regions), 1

    def allows(
        self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor, num_queries: Any,
        num_keys: Any,
    ) -> Tensor:  # fmt: skip
        count, first = self.regions.shape[1], self.regions.shape[1] + self.num_prefix_tokens
        own = self.regions[batch, query.clamp(max=count - 1), (key - first).clamp(min=0)]
        return own | (query >= count) | (key < first)


class QueryHead(Head):
    """One learned query for each class, which passes the last blocks of the backbone together with
    the patches (Kerssies et al., Your ViT is Secretly an Image Segmentation Model, 2025: EoMT).

        tokens = block([queries, tokens], _RegionOfQuery)     for each of the last blocks
        logits[class] = mlp(query of the class) · upscale(patches)

    In training, a query sees in some of the blocks only the patches that the previous answer
    assigns to its class; the share of these blocks, `masked_share`, falls from 1 at the start to 0
    at the end, so that nothing is masked afterwards. In training the head also returns the answers
    before every block, which get the same loss as the last: [batch, answers, classes, height,
    width].

    The head takes the last blocks and the norm out of the backbone. It differs from the paper:
    there is one query for each class instead of many that are matched with regions, a patch is in
    the region of the class with the highest logit, and the share falls equally in all blocks.
    Rotary positions are applied to patches only, because queries have no position.

    Args:
        backbone: the network whose last blocks are taken.
        num_classes: number of queries.
        num_blocks: number of blocks that the queries pass; fewer than the backbone has.
    """

    def __init__(self, backbone: ViT, num_classes: int, *, num_blocks: int = 2) -> None:
        depth = len(backbone.blocks) - num_blocks
        at_least(1, num_blocks=num_blocks)
        if depth < 1:
            raise ValueError(
                f"num_blocks: expected less than the backbone's {depth + num_blocks} blocks, "
                f"got {num_blocks}"
            )
        super().__init__(backbone, [depth - 1])
        self.blocks, backbone.blocks = backbone.blocks[depth:], backbone.blocks[:depth]
        self.norm, backbone.norm = backbone.norm, nn.Identity()
        dim = backbone.dim
        self.queries = nn.Parameter(torch.randn(num_classes, dim) * 0.02)
        self.rotary: Rotary2d | None = None
        if backbone.rotary is not None:
            first = num_classes + backbone.num_prefix_tokens
            self.rotary = Rotary2d(backbone.head_dim, backbone.grid, num_prefix_tokens=first)
        layers = [nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim), nn.GELU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(dim, dim))
        # up to a quarter of the image's resolution, as in the paper
        steps = max(1, min(self.patch).bit_length() - 3)
        self.upscale = nn.Sequential(*(_Double(dim) for _ in range(steps)))
        self.masked_share = 1.0

    def anneal(self, progress: float) -> None:
        """Set the share of masked blocks for a progress of training from 0 to 1."""
        self.masked_share = (1 - progress) ** 0.9

    def forward(self, features: Features) -> Tensor:
        queries = self.queries.expand(features.shape[0], -1, -1)  # not len: torch.export
        tokens = torch.cat([queries, features[:, -1]], dim=1)
        answers = []
        for block in self.blocks:
            mask = None
            if self.training:
                answers.append(self.answer(tokens))
                if torch.rand(()) < self.masked_share:
                    mask = self._regions(answers[-1])
            tokens = block(tokens, positions=self.rotary, mask=mask)
        last = self.answer(tokens)
        return torch.stack([*answers, last], dim=1) if self.training else last

    def answer(self, tokens: Annotated[Tensor, "batch tokens dim"]) -> Logits:
        """Return the logits of every pixel from the current queries and patches."""
        tokens, count = self.norm(tokens), len(self.queries)
        pixels = self.upscale(self.maps(tokens[:, count:]))
        logits = torch.einsum("bkd,bdhw->bkhw", self.mlp(tokens[:, :count]), pixels)
        return self.enlarged(logits)

    def _regions(self, logits: Logits) -> _RegionOfQuery:
        coarse = functional.interpolate(logits.detach(), self.grid, mode="bilinear")
        classes = torch.arange(len(self.queries), device=logits.device)
        regions = coarse.argmax(dim=1, keepdim=True) == classes[:, None, None]
        return _RegionOfQuery(regions.flatten(2), self.num_prefix_tokens)


class _Double(nn.Sequential):
    """Doubles the resolution of a map, as the paper's ScaleBlock, but with a norm without
    groups."""

    def __init__(self, dim: int) -> None:
        grown = nn.ConvTranspose2d(dim, dim, 2, 2)
        within = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, bias=False)
        super().__init__(grown, nn.GELU(), within, nn.GroupNorm(1, dim))


register(_RegionOfQuery)
