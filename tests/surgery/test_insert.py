"""Attention in networks nobody here wrote: it acts, begins as nothing, and goes again."""

import copy
import io
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from itertools import pairwise

import pytest
import timm
import torch
import torchvision
from timm.layers import SEModule
from torch import nn

import attnkit
from attnkit import count_multiply_adds, insert_attention, remove_attention
from attnkit.surgery import insert

NETWORKS = [
    "timm/resnet18",
    "timm/resnet26",
    "timm/seresnet18",
    "timm/resnetv2_18",
    "timm/res2net50_14w_8s",
    "timm/convnext_atto",
    "timm/convnextv2_atto",
    "timm/efficientnet_lite0",
    "timm/tf_efficientnetv2_b0",
    "timm/regnety_002",
    "timm/mobilenetv2_050",
    "timm/mobilenetv3_small_050",
    "timm/mobilenetv4_conv_small_050",
    "torchvision/resnet18",
    "torchvision/resnet50",
    "torchvision/convnext_tiny",
    "torchvision/efficientnet_b0",
    "torchvision/regnet_x_400mf",
    "torchvision/mobilenet_v2",
    "torchvision/mobilenet_v3_small",
]
FEW = ("timm/seresnet18", "timm/convnext_atto", "timm/mobilenetv3_small_050")
IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def network(name):
    return copy.deepcopy(_network(name))


@lru_cache(maxsize=3)  # most tests have one of these
def _network(name):
    """With norms, biases and layer scales that show what is swapped or forgotten."""
    torch.manual_seed(0)
    library, name = name.split("/")
    if library == "timm":
        options = {"layers": (2, 2, 2, 2)} if name.startswith("res2net") else {}
        model = timm.create_model(name, num_classes=5, **options)
    else:
        model = getattr(torchvision.models, name)(weights=None, num_classes=5)
    generator = torch.Generator().manual_seed(0)
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 1 or "scale" in parameter_name:
            noise = torch.rand(parameter.shape, generator=generator)
            parameter.data = noise / 2 + (0.5 if parameter_name.endswith("weight") else 0)
    return calibrated(model).eval()


def calibrated(model):
    """With running statistics of these images, so that no map fades away in evaluation."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        model.train()(IMAGES)
    return model


def trained(model):
    torch.manual_seed(0)  # of dropout and stochastic depth
    return model.train()(IMAGES)


class Zeros(nn.Module):
    def forward(self, maps):
        return 0 * maps


def state_of(model):
    """All that a network is, besides its parameters' values."""
    return {
        name: (
            {key: list(value) for key, value in vars(module).items() if isinstance(value, dict)},
            {key: value for key, value in vars(module).items() if isinstance(value, int | str)},
        )
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS if n not in FEW)]
)
def test_networks(name):
    model = network(name)
    backbone = copy.deepcopy(model.state_dict())
    before = state_of(model)
    with torch.no_grad():
        expected = model(IMAGES)
        training = trained(model)
        model.load_state_dict(backbone)
        model.eval()
    report = insert_attention(model, SEModule, start_as_identity=True, example=IMAGES[:1])
    assert len(report) > 3

    # nothing changed: modes, running statistics, state-dict keys, outputs to the bit
    missing, unexpected = model.load_state_dict(backbone, strict=False)
    assert not unexpected
    assert missing
    assert all(".attention." in key for key in missing)
    assert not any(module.training for module in model.modules())
    output = model(IMAGES)
    assert torch.equal(output, expected)

    # every module is reached by the gradient, and acts
    gammas = [model.get_submodule(row.name).gamma for row in report]
    gradients = torch.autograd.grad(output.square().sum(), gammas)
    assert all(gradient.abs() > 0 for gradient in gradients)
    with torch.no_grad():
        one = model(IMAGES[:1])
        for gamma in gammas:
            gamma.fill_(0.5)
            changed = model(IMAGES[:1])
            assert changed.isfinite().all()
            assert not torch.equal(changed, one)
            gamma.fill_(0.0)
        assert torch.equal(trained(model), training)
        model.load_state_dict(backbone, strict=False)
        model.eval()

    # parameters and multiply-adds are those of the network
    added = sum(p.numel() for p in model.parameters())
    total = count_multiply_adds(model, IMAGES[:1])
    removed = remove_attention(model)
    assert removed == [row.name for row in report]
    assert report.parameters == added - sum(p.numel() for p in model.parameters())
    assert report.multiply_adds == total - count_multiply_adds(model, IMAGES[:1])
    assert state_of(model) == before
    model.load_state_dict(backbone)
    with torch.no_grad():
        assert torch.equal(model(IMAGES), expected)


@pytest.mark.parametrize("name", NETWORKS)
def test_in_blocks_it_acts_before_the_addition(name):
    """Where the branch is made 0, a block of equal input and output gives its input back."""
    model = network(name)
    report = insert_attention(model, lambda channels: Zeros(), example=IMAGES[:1])
    seen = []
    for row in report:
        block = model.get_submodule(row.name.rpartition(".")[0])
        block.register_forward_hook(
            lambda block, args, output: seen.append((args[0].clone(), output.clone()))
        )
    with torch.no_grad():
        # clones are taken before later blocks write in place
        for module in model.modules():
            if isinstance(getattr(module, "inplace", None), bool):
                module.inplace = False
        model(IMAGES)
    same = [(given, output) for given, output in seen if given.shape == output.shape]
    assert len(same) > 2
    equal = [torch.equal(o, g) or torch.equal(o, g.relu()) for g, o in same]
    # blocks whose shortcut is a projection though the shapes agree give something else
    assert sum(equal) >= len(same) - 1


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_stochastic_depth_drops_the_attention_too(library):
    """Of a branch of zeros, attention that adds 1 leaves 1 / (1 − p), or nothing where dropped."""

    class PlusOne(nn.Module):
        def forward(self, maps):
            return maps + 1

    if library == "timm":
        block = timm.models.convnext.ConvNeXtBlock(5, drop_path=0.5, ls_init_value=0.0)
    else:
        block = torchvision.models.convnext.CNBlock(5, 0.0, 0.5)
    model = nn.Sequential(nn.Conv2d(3, 5, 1), block)
    insert_attention(model, lambda channels: PlusOne(), example=IMAGES[:1])
    torch.manual_seed(0)
    maps = torch.randn(32, 5, 7, 3)
    added = block.train()(maps) - maps
    dropped = (added == 0).flatten(1).all(1)
    assert 4 < dropped.sum() < 28
    torch.testing.assert_close(added[~dropped], torch.full_like(added[~dropped], 2.0))


@pytest.mark.parametrize("name", ["timm/resnet18", "timm/convnext_atto", "torchvision/resnet18",
                                  "timm/mobilenetv3_small_050"])  # fmt: skip
def test_stages(name):
    model = network(name)
    report = insert_attention(model, SEModule, "stages", example=IMAGES[:1])
    sizes = [(row.height, row.width) for row in report]
    assert len(set(sizes)) == len(sizes) == 4
    assert sizes == sorted(sizes, reverse=True)
    if "resnet18" in name:
        assert [row.name for row in report] == [f"layer{i}.1.attention" for i in (1, 2, 3, 4)]
        assert [row.place for row in report] == [f"after layer{i}.1" for i in (1, 2, 3, 4)]
        assert [row.channels for row in report] == [64, 128, 256, 512]


def test_of_two_attentions_in_a_block_timms_own_is_first():
    report = insert_attention(network("timm/seresnet18"), SEModule, example=IMAGES[:1])
    assert report.inserted[0].place == "after layer1.0.se"


def test_stages_of_a_glob_are_those_of_the_blocks():
    """The output of a stage is that of its last block, wherever the attention is owned."""
    with torch.no_grad():
        outputs = []
        for where in ("stages", "layer?", "layer?.1"):
            model = network("torchvision/resnet18")
            torch.manual_seed(0)
            report = insert_attention(model, SEModule, where, example=IMAGES[:1])
            assert [row.name for row in report] == [f"layer{i}.1.attention" for i in (1, 2, 3, 4)]
            outputs.append(model(IMAGES))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def plain():
    return nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Sequential(nn.Conv2d(5, 7, 3, padding=1), nn.ReLU()),
        nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(7, 3),
    )


def test_plain_sequential():
    model = plain()
    keys = list(model.state_dict())
    images = torch.randn(2, 1, 22, 26)
    report = insert_attention(model, lambda channels: nn.Conv2d(channels, channels, 1))
    assert [(row.name, row.place, row.channels) for row in report] == [
        ("2.attention", "after 2", 5),
        ("5.attention", "after 5", 7),
    ]
    assert [(row.height, row.width) for row in report] == [(224, 224), (112, 112)]
    assert [row.parameters for row in report] == [5 * 6, 7 * 8]
    assert [row.multiply_adds for row in report] == [224**2 * 25, 112**2 * 49]
    model.eval()
    expected = model[2].attention(model[:2](images).relu())  # once, and nowhere else
    torch.testing.assert_close(model[:3](images), expected)
    model(images).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    remove_attention(model)
    assert list(model.state_dict()) == keys
    assert model.eval()[:3](images).min() == 0


def test_a_container_owns_nothing_that_it_would_call():
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 5, 1), nn.Sequential(nn.ReLU())))
    report = insert_attention(model, SEModule, "0")
    assert [row.name for row in report] == ["0.1.0.attention"]
    assert len(model[0]) == 2
    calls = []
    model.get_submodule("0.1.0.attention").register_forward_hook(lambda *_: calls.append(1))
    model(IMAGES)
    assert calls == [1]


@pytest.mark.parametrize("start_as_identity", [False, True])
def test_copies_and_pickles_have_attention_of_their_own(start_as_identity):
    model = network("timm/resnet18")
    insert_attention(model, SEModule, start_as_identity=start_as_identity, example=IMAGES[:1])
    if start_as_identity:
        nn.init.constant_(model.layer1[0].attention.gamma, 0.3)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.no_grad():
        expected = model(IMAGES)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert torch.equal(other(IMAGES), expected)
            for parameter in other.layer2[1].attention.parameters():
                parameter.add_(1.0)
            if start_as_identity:
                other.layer1[0].attention.gamma.add_(1.0)
            assert not torch.equal(other(IMAGES), expected)
            remove_attention(other)
            assert torch.equal(model(IMAGES), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["timm/resnet18", "timm/convnext_atto", "torchvision/mobilenet_v3_small"]
)
def test_compiled(name):
    torch._dynamo.reset()
    model = network(name)
    insert_attention(model, SEModule, start_as_identity=True, example=IMAGES[:1])
    for module in model.modules():
        if hasattr(module, "gamma") and module.gamma is not None and module.gamma.numel() == 1:
            nn.init.constant_(module.gamma, 0.5)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(IMAGES), model(IMAGES))


def test_exported():
    model = network("timm/test_resnet")
    insert_attention(model, SEModule, example=IMAGES[:1])
    program = torch.export.export(model, (IMAGES,))
    with torch.no_grad():
        torch.testing.assert_close(program.module()(IMAGES), model(IMAGES))


def test_two_at_different_places_and_not_two_at_one():
    model = network("timm/resnet18")
    insert_attention(model, SEModule, example=IMAGES[:1])
    report = insert_attention(model, SEModule, "stages", example=IMAGES[:1])
    assert report.inserted[0].name == "layer1.1.attention_2"
    keys = list(model.state_dict())
    message = r"attention after layer1.0.bn2 already, 'attention' of layer1.0; remove_attention"
    with pytest.raises(ValueError, match=message):
        insert_attention(model, SEModule, example=IMAGES[:1])
    assert list(model.state_dict()) == keys
    assert len(remove_attention(model)) == 12
    with pytest.raises(ValueError, match="no inserted attention"):
        remove_attention(model)


def test_the_dry_run_leaves_no_trace():
    class Draws(nn.Module):
        def forward(self, maps):
            return maps + torch.randn_like(maps)

    model = nn.Sequential(nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5), Draws()).double()
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    (row,) = insert_attention(model, lambda channels: Zeros())
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model] == [True, False, True]
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert row.height == row.width == 224


def test_new_modules_have_dtype_and_mode_of_where_they_are():
    model = network("timm/resnet18").double()
    model.layer1.train()
    insert_attention(model, SEModule, example=IMAGES[:1].double())
    for name in ("layer1.0", "layer2.0"):
        attention = model.get_submodule(name).attention
        assert attention.fc1.weight.dtype == torch.float64
        assert attention.training == (name == "layer1.0")


def test_the_input_is_that_of_timms_config():
    model = timm.create_model("mobilenetv3_small_050", in_chans=2)
    model.pretrained_cfg = {"input_size": (3, 96, 64)}
    report = insert_attention(model, SEModule)
    assert (report.inserted[0].height, report.inserted[0].width) == (12, 8)


def test_what_replaces_a_hooked_module_is_noticed():
    model = network("timm/resnet18")
    insert_attention(model, SEModule, example=IMAGES[:1])
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    with pytest.raises(RuntimeError, match=r"BasicBlock.bn2 was replaced .*convert_sync_batchnorm"):
        model(IMAGES)
    assert len(remove_attention(model)) == 8


def test_subclasses_of_a_known_block():
    class Block(timm.models.resnet.BasicBlock):
        pass

    model = timm.models.resnet.ResNet(Block, (1, 1, 1, 1), num_classes=5).eval()
    assert len(insert_attention(model, SEModule, example=IMAGES[:1])) == 4

    class Otherwise(timm.models.resnet.BasicBlock):
        def forward(self, x):
            return self.act1(self.bn1(self.conv1(x)))

    model = timm.models.resnet.ResNet(Otherwise, (1, 1, 1, 1), num_classes=5).eval()
    with pytest.raises(ValueError, match=r"no block of ResNet adds a map to its input; where='sta"):
        insert_attention(model, SEModule, example=IMAGES[:1])


class Shared(nn.Module):
    """Its layer runs twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return x + self.layer(self.layer(x))


class Sums(nn.Module):
    """What is added to the input, one after the other, by name."""

    def __init__(self, downsample=None, **branches):
        super().__init__()
        self.branches = nn.ModuleDict(branches)
        self.downsample = downsample

    def forward(self, x):
        for branch in self.branches.values():
            shortcut = x if self.downsample is None else self.downsample(x)
            x = shortcut + 0.5 * branch(x)
        return x


def conv(*channels, **options):
    """As many convolutions as there are channels after the first."""
    return nn.Sequential(*(nn.Conv2d(a, b, 3, padding=1, **options) for a, b in pairwise(channels)))


@pytest.mark.parametrize(
    ("model", "places"),
    [
        (Sums(one=conv(3, 5, 3), two=conv(3, 3)), ["after branches.one", "after branches.two"]),
        # the shortcut may be a projection, which is the shorter of the two
        (Sums(nn.Conv2d(3, 7, 1), one=conv(3, 5, 7)), ["after branches.one"]),
        (nn.Sequential(nn.Conv2d(3, 3, 1), Sums(one=conv(3, 3))), ["after 1.branches.one"]),
        (Sums(one=nn.Sequential(conv(3, 3), nn.Dropout2d())), ["after branches.one.0"]),
        (Sums(one=nn.Dropout2d()), None),  # nothing is computed
        (Sums(conv(3, 5, 7), one=conv(3, 7)), None),  # which of the two is the branch
        (Sums(one=nn.Sequential(conv(3, 3), nn.AdaptiveAvgPool2d(1))), None),  # one pixel
        (nn.Sequential(Sums(one=conv(3, 3)), nn.AdaptiveAvgPool2d(1), Sums(two=conv(3, 3))),
         ["after 0.branches.one", "after 2.branches.two"]),
        (Shared(), "layer runs 2 times in one pass"),
    ],
)  # fmt: skip
def test_branches_are_found_by_running(model, places):
    given = {"attention": lambda channels: nn.Conv2d(channels, channels, 1),
             "example": torch.randn(1, 3, 8, 12)}  # fmt: skip
    if not isinstance(places, list):
        with pytest.raises(ValueError, match=places or "adds a map to its input|no child of this"):
            insert_attention(model, **given)
        return
    report = insert_attention(model, **given)
    assert [row.place for row in report] == places
    assert all(row.name.rpartition(".")[0] in ("", "0", "1", "2") for row in report)


def test_a_branch_that_a_container_runs_is_dropped_with_its_attention():
    """Attention is before what drops the branch wherever that is written."""
    branch = nn.Sequential(nn.Conv2d(3, 3, 1), torchvision.ops.StochasticDepth(0.5, "row"))
    model = Sums(one=branch)
    insert_attention(model, lambda channels: Zeros(), example=IMAGES[:1])
    assert torch.equal(model(IMAGES), IMAGES)
    hooked = [module for module in model.modules() if module._forward_hooks]
    assert hooked == [branch[0]]


def runs_of(model, report, images):
    """How often each attention runs, and the shapes that it is given."""
    seen = {row.name: [] for row in report}
    for name, shapes in seen.items():
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, shapes=shapes: shapes.append(list(args[0].shape))
        )
    model.eval()(images)
    return list(seen.values())


@pytest.mark.parametrize(
    ("name", "where", "owners"),
    [
        ("regnetx_002", "s?", ["s1.b1", "s2.b1", "s3.b4", "s4.b7"]),
        ("regnety_002", "s2", ["s2.b1"]),
        ("resnet18", "layer?", ["layer1.1", "layer2.1", "layer3.1", "layer4.1"]),
        ("convnext_atto", "stages.1", ["stages.1"]),
    ],
)
def test_what_iterates_over_its_children_owns_nothing(name, where, owners):
    """A stage of RegNet's calls whatever children it has."""
    model = timm.create_model(name, num_classes=5)
    report = insert_attention(model, "se", where, example=IMAGES[:1])
    assert [row.name for row in report] == [f"{owner}.attention" for owner in owners]
    assert [row.place for row in report] == [
        f"after {name}" for name, _ in model.named_modules() if fnmatchcase(name, where)
    ]
    channels = [[row.channels, row.height, row.width] for row in report]
    assert runs_of(model, report, IMAGES) == [[[2, *shape]] for shape in channels]


def test_what_calls_any_child_and_has_none_is_refused():
    class Iterates(nn.Module):
        def forward(self, x):
            for child in self.children():
                x = child(x)
            return x

    model = nn.Sequential(nn.Conv2d(3, 5, 1), Iterates())
    message = "model: 1 would call attention as a child, and has no child that could own it"
    with pytest.raises(ValueError, match=message):
        insert_attention(model, "se", "1", example=IMAGES[:1])
    assert not list(model[1].children())


def test_maps_with_the_channels_last():
    options = {"img_size": 64, "depths": (2, 2), "embed_dim": 24, "num_heads": (3, 6)}
    model = timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **options).eval()
    plain = copy.deepcopy(model)
    report = insert_attention(model, nn.BatchNorm2d, "layers.?")
    sizes = [(row.channels, row.height, row.width) for row in report]
    assert sizes == [(24, 16, 16), (48, 8, 8)]
    for row in report:
        norm = model.get_submodule(row.name)
        nn.init.normal_(norm.weight)
        norm.running_mean.normal_()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.no_grad():
        maps = plain.patch_embed(IMAGES)
        for layer, row in zip(plain.layers, report, strict=True):
            maps = model.get_submodule(row.name)(layer(maps).permute(0, 3, 1, 2))
            maps = maps.permute(0, 2, 3, 1)
        expected = plain.head(plain.norm(maps))
        for other in (model, copy.deepcopy(model), torch.load(file, weights_only=False)):
            torch.testing.assert_close(other(IMAGES), expected)
    remove_attention(model)
    assert torch.equal(model(IMAGES), plain(IMAGES))


class Cube(nn.Module):
    """Maps of as many channels as rows and columns, the channels last or first."""

    def __init__(self, channels_last, fixed):
        super().__init__()
        self.layer = nn.Conv2d(3, 8, 1)
        self.cube = nn.Identity()
        self.channels_last = channels_last
        self.fixed = fixed

    def forward(self, x):
        if self.fixed and x.shape[2:] != (8, 8):
            raise ValueError("expected 8 × 8")
        x = self.layer(x)
        return self.cube(x.permute(0, 2, 3, 1) if self.channels_last else x)


def test_where_shapes_do_not_tell_the_layout():
    """Then larger images do, or it is refused; a guess would go unseen."""
    images, wide = torch.randn(1, 3, 8, 8), torch.randn(2, 3, 5, 7)
    for channels_last in (False, True):
        model = Cube(channels_last, fixed=False)
        (row,) = insert_attention(model, nn.BatchNorm2d, "cube", example=images)
        assert runs_of(model, [row], wide) == [[[2, 8, 5, 7]]]
    message = r"cannot tell height and width from channels in \[1, 8, 8, 8\], the output of cube;"
    with pytest.raises(ValueError, match=message):
        insert_attention(Cube(False, fixed=True), "se", "cube", example=images)


def test_the_input_is_what_the_network_is_made_for():
    vit = timm.create_model("vit_tiny_patch16_224", img_size=96, depth=1)
    (row,) = insert_attention(vit, "se", "patch_embed.proj")
    assert (row.height, row.width) == (6, 6)
    unshuffled = nn.Sequential(nn.PixelUnshuffle(4), nn.Conv2d(48, 16, 1))
    (row,) = insert_attention(unshuffled, "se", "1")
    assert (row.channels, row.height) == (16, 56)


def test_report():
    model = network("timm/resnet18")
    report = insert_attention(model, SEModule, "stages", example=IMAGES[:1])
    lines = str(report).splitlines()
    assert lines[0].split() == ["module", "place", "channels", "map", "parameters", "multiply-adds"]
    assert lines[1].split() == ["layer1.1.attention", "after", "layer1.1", "64", "16", "×", "16",
                                "1,096", "1,024"]  # fmt: skip
    assert lines[-1].split() == ["4", "modules", f"{report.parameters:,}",
                                 f"{report.multiply_adds:,}"]  # fmt: skip
    assert len({len(line) for line in lines}) == 1


def test_names_and_options(monkeypatch):
    table = {"squeeze": SEModule, "narrow": partial(SEModule, rd_ratio=1 / 32)}
    monkeypatch.setattr(insert, "FEATURE_ATTENTION", table)
    for attention, options, width in (
        ("squeeze", {}, 8),
        ("narrow", {}, 8),
        ("squeeze", {"rd_channels": 6}, 6),
        ("narrow", {"rd_ratio": 1 / 2}, 32),
        (SEModule, {"rd_channels": 6}, 6),
    ):
        model = plain()
        model[0] = nn.Conv2d(1, 64, 1)
        insert_attention(model[:1], attention, example=torch.zeros(1, 1, 5, 7), **options)
        assert model[0].attention.fc1.out_channels == width


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"attention": "sqeeze"}, ValueError,
         r"attention: expected one of squeeze, narrow, got 'sqeeze'; did you mean squeeze\?"),
        ({"attention": "squeeze", "reduction": 8}, TypeError,
         r"SEModule: .*'reduction'; it takes rd_ratio, rd_channels"),
        ({"attention": SEModule(64)}, TypeError, "got the module SEModule itself"),
        ({"attention": 3}, TypeError, "attention: expected a name, .* got 3"),
        ({"attention": lambda channels: channels}, TypeError, "expected a module .* got int"),
        ({"attention": lambda channels: nn.Conv2d(channels, 3, 1)}, ValueError,
         r"attention: expected maps of the shape they came in, \[1, 64, 16, 16\] after layer1.0"),
        ({"where": "layr?"}, ValueError, r"'layr\?' matches none; near it: layer"),
        ({"where": "fc*"}, ValueError, r"none of the 1 modules that 'fc\*' matches, such as fc"),
        ({"where": "layer1.0.relu"}, ValueError, "layer1.0.relu runs 2 times in one pass"),
        ({"example": torch.zeros(1, 4, 64, 64)}, ValueError,
         r"the dry run with the input of the shape \[1, 4, 64, 64\] failed with RuntimeError"),
        ({"model": nn.Linear(64, 5)}, ValueError, "no block of Linear adds a map to its input;"),
        ({"model": nn.Linear(64, 5), "where": "stages"}, ValueError, "Linear has no stage: none"),
        ({"model": nn.Sequential(nn.Linear(64, 3))}, ValueError, "no child .* has a convolution"),
        ({"model": torch.compile(nn.Linear(3, 5))}, ValueError, "model: is compiled"),
    ],
)  # fmt: skip
def test_what_is_refused(change, error, message, monkeypatch):
    table = {"squeeze": SEModule, "narrow": SEModule}
    monkeypatch.setattr(insert, "FEATURE_ATTENTION", table)
    model = torchvision.models.resnet18(weights=None, num_classes=5)
    given = {"model": model, "attention": SEModule, "example": IMAGES[:1], **change}
    before = state_of(given["model"])
    with pytest.raises(error, match=message):
        insert_attention(**given)
    assert state_of(given["model"]) == before


def test_what_attends_is_recorded_and_captured():
    class Pixels(nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.block = attnkit.MultiHeadAttention(channels, 4)

        def forward(self, maps):
            return self.block(maps.flatten(2).mT).mT.unflatten(2, maps.shape[2:])

    model = network("timm/resnet18")
    insert_attention(model, Pixels, "layer3", example=IMAGES[:1])
    with (
        torch.no_grad(),
        attnkit.record_backends(model) as record,
        attnkit.capture_attention(model) as weights,
    ):
        model(IMAGES)
    assert list(record.counts) == list(weights) == ["layer3.1.attention.block"]
    assert weights["layer3.1.attention.block"][0].shape == (2, 4, 16, 16)


def test_globs_do_not_reach_into_attention_inserted_before():
    model = timm.create_model("resnet10t", num_classes=3)
    attnkit.insert_attention(model, "cbam", "stages", example=torch.zeros(1, 3, 64, 64))
    attnkit.insert_attention(model, "eca", "layer*bn1", example=torch.zeros(1, 3, 64, 64))
    with pytest.raises(ValueError, match=r"'attention' of layer1\.0; remove_attention"):
        attnkit.insert_attention(model, "eca", "stages", example=torch.zeros(1, 3, 64, 64))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"channels": 7}, TypeError, "channels: is found by the dry run"),
        ({"example": "x"}, TypeError, "example: expected a tensor or None, got str"),
    ],
)
def test_options_that_are_not_the_attentions(options, error, message):
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    with pytest.raises(error, match=message):
        attnkit.insert_attention(model, "se", **options)


def test_a_network_made_in_inference_mode():
    with torch.inference_mode():
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    assert attnkit.count_multiply_adds(model, torch.zeros(1, 3, 5, 5)) == 9 * 3 * 8 * 9
