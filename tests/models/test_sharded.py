"""Parameters divided among many ranks by torch's `fully_shard`, and Lightning's strategies: a
process group that sends nothing lets one process be one of eight. `FSDPStrategy` needs a GPU."""

import lightning
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
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


class Divided(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = NETWORKS["ViT"][0]()

    def configure_model(self):
        fully_shard(self.network, mesh=self.device_mesh["data_parallel"])

    def forward(self, images):
        return self.network(images)


@pytest.mark.parametrize("make", [DDPStrategy, lambda: ModelParallelStrategy(4, 2)])
def test_lightnings_strategies_take_a_model(make, one_of_eight):
    environment = LightningEnvironment()
    environment.set_world_size(RANKS)
    environment.set_global_rank(RANK)
    strategy = make()
    strategy.parallel_devices = [torch.device("cpu")] * RANKS
    strategy.cluster_environment, strategy.accelerator = environment, CPUAccelerator()
    strategy._local_rank = RANK
    module = Divided()
    whole = sum(parameter.numel() for parameter in module.parameters())
    strategy.connect(module)
    strategy.setup_environment()
    if isinstance(strategy, ModelParallelStrategy):
        assert strategy.device_mesh["data_parallel"].size() == 4
        module.configure_model()
        module(torch.randn(2, 3, 16, 16)).sum().backward()
        assert sum(p.to_local().numel() for p in module.parameters()) < whole / 2
    else:
        strategy.configure_ddp()
        assert strategy.model(torch.randn(2, 3, 16, 16)).shape == (2, 5)
