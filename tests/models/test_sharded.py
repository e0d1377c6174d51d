"""Parameters divided among many ranks by torch's `fully_shard`: a process group that sends nothing
lets one process be one of eight."""

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import attnkit
from attnkit.models.captioning.captioner import Captioner
from attnkit.models.captioning.image_encoders import CNNEncoder
from attnkit.models.captioning.transformer_decoder import TransformerDecoder

RANKS, RANK = 8, 3


@pytest.fixture
def one_of_eight():
    distributed.init_process_group("fake", rank=RANK, world_size=RANKS, store=FakeStore())
    yield
    distributed.destroy_process_group()


def captioner():
    encoder = CNNEncoder((24, 40), 3, dim=16, stages=[[8], [8, 8], [16]])
    return Captioner(encoder, TransformerDecoder(9, 7, dim=8, memory_dim=16, num_heads=2))


NETWORKS = {
    "ViT": (
        lambda: attnkit.ViT(
            image_size=16, patch_size=4, in_channels=3, num_classes=5, dim=32, depth=2, num_heads=2
        ),
        lambda: (torch.randn(2, 3, 16, 16),),
    ),
    "spatial": (lambda: attnkit.SpatialAttention(16), lambda: (torch.randn(2, 16, 8, 8),)),
    "channels": (lambda: attnkit.ChannelAttention(16), lambda: (torch.randn(2, 16, 8, 8),)),
    "GAT": (
        lambda: attnkit.GAT(6, 8, 3),
        lambda: (torch.randn(9, 6), torch.randint(9, (2, 30))),
    ),
    "captioner": (
        captioner,
        lambda: (torch.randn(2, 3, 24, 40), torch.tensor([[1, 4, 5], [1, 4, 2]])),
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "captioner" else [])
        for name in NETWORKS
    ],
)
def test_a_step_of_one_rank_of_eight(name, one_of_eight):
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("replicate", "shard"))
    make, inputs = NETWORKS[name]
    network = make()
    whole = sum(parameter.numel() for parameter in network.parameters())
    for module in list(network.modules())[1:]:
        if isinstance(module, attnkit.layers.TransformerBlock):
            fully_shard(module, mesh=mesh)
    fully_shard(network, mesh=mesh)
    optimizer = torch.optim.AdamW(network.parameters())
    network(*inputs()).square().mean().backward()
    optimizer.step()
    own = sum(p.to_local().numel() for p in network.parameters())
    assert own < whole / 2
    assert any(p.grad is not None for p in network.parameters())
