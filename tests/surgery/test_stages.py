"""Stages of networks nobody here wrote: found in every family that has any, and left again."""

import pytest
import timm
import torch
import torchvision
from torch import nn

from attnkit import insert_attention, remove_attention

SMALL = {
    "timm/densenet121": "features.denseblock1 features.denseblock2 features.denseblock3 "
                        "features.denseblock4",
    "timm/repvgg_a0": "stem stages.0.1 stages.1.3 stages.2.13 stages.3.0",
    "timm/test_nfnet": "stages.0.0 stages.1.0 stages.2.0 stages.3.0",
    "torchvision/googlenet": "inception3b inception4e inception5b",
    "timm/dla46_c": "level2 level3 level4 level5",
    "timm/poolformer_s12": "stages.0.blocks.1 stages.1.blocks.1 stages.2.blocks.5 "
                           "stages.3.blocks.1",
    "timm/edgenext_xx_small": "stages.0.blocks.1 stages.1.blocks.1 stages.2.blocks.5 "
                              "stages.3.blocks.1",
    "torchvision/shufflenet_v2_x0_5": "stage2.3 stage3.7 stage4.3",
    "torchvision/mnasnet0_5": "layers.8.2 layers.9.2 layers.11.1 layers.13.0",
    "timm/ghostnet_050": "blocks.0.0 blocks.2.0 blocks.4.0 blocks.6.4 blocks.9.0",
    "timm/ghostnetv3_050": "blocks.0.0 blocks.2.0 blocks.4.0 blocks.6.4 blocks.9.0",
    # between these two there are always several maps beside each other
    "timm/hrnet_w18_small": "layer1.0 final_layer",
    # blocks that give lists
    "timm/selecsls42": "features.1.conv6 features.3.conv6 features.5.conv6",
    # without a block: the last layer of each size before the next is pooled
    "torchvision/alexnet": "features.1 features.4 features.11",
    # maps [batch, height, width, channels]
    "timm/mambaout_femto": "stages.0.blocks.2 stages.1.blocks.2 stages.2.blocks.8 "
                           "stages.3.blocks.2",
    # tokens inside of stages, maps between them
    "timm/pvt_v2_b0": "stages.0 stages.1 stages.2 stages.3",
}  # fmt: skip

FAMILIES = """
    bat_resnext26ts botnet26t_256 caformer_s18 coatnet_pico_rw_224 coatnet_rmlp_nano_rw_224
    coatnext_nano_rw_224 convformer_s18 convmixer_768_32 convnext_atto convnextv2_atto
    cpubone_nano cs3darknet_s csatv2_21m cspdarknet53 cspnext_tiny cspresnet50 cspresnext50
    darknet17 darknetaa53 davit_tiny densenet121 densenetblur121d dla46_c dm_nfnet_f0 dpn48b
    eca_botnext26ts_256 eca_halonext26ts eca_nfnet_l0 eca_resnet33ts eca_resnext26ts eca_vovnet39b
    ecaresnet26t ecaresnetlight ecaresnext26t_32x4d edgenext_small efficientformer_l1
    efficientformerv2_s0 efficientnet_b0 efficientnet_blur_b0 efficientnet_lite0
    efficientnetv2_rw_t efficientvit_b0 efficientvit_m0 ese_vovnet19b_slim fasternet_t0 fastvit_t8
    fastvit_mci0 fbnetc_100 fbnetv3_b focalnet_tiny_lrf gc_efficientnetv2_rw_t gcresnet50t
    gcresnext26ts gcvit_tiny gernet_s ghostnet_050 ghostnetv2_100 ghostnetv3_050 halo2botnet50ts_256
    halonet26t haloregnetz_b hardcorenas_b hgnet_tiny hgnetv2_b0 hieradet_small hrnet_w18_small
    iformer_t inception_v3 inception_v4 inception_next_atto inception_resnet_v2 lambda_resnet26t
    lamhalobotnet50ts_256 lcnet_035 lcnetv2_small legacy_seresnet18 legacy_seresnext26_32x4d
    legacy_xception levit_conv_128s lowformer_b0 mambaout_femto maxvit_pico_rw_256
    maxvit_rmlp_pico_rw_256 maxxvit_rmlp_nano_rw_256 maxxvitv2_nano_rw_256 mixnet_s mnasnet_050
    mobilenet_edgetpu_v2_xs mobilenetv1_100 mobilenetv2_035 mobilenetv3_small_050
    mobilenetv4_conv_small_050 mobileone_s0 mobilevit_xxs mobilevitv2_050 nasnetalarge nest_tiny
    nextvit_small nf_ecaresnet26 nf_regnet_b0 nf_resnet26 nf_seresnet26 nfnet_l0 pnasnet5large
    poolformer_s12 poolformerv2_s12 pvt_v2_b0 rdnet_tiny regnetv_040 regnetx_002 regnety_002
    regnetz_005 repghostnet_050 repvgg_a0 repvit_m0_9 res2net50_48w_2s resnest14d resnet18
    resnetaa50 resnetblur18 resnetrs50 resnetv2_18 resnext50_32x4d rexnet_100 rexnetr_100
    sam2_hiera_tiny samvit_base_patch16 sebotnet33ts_256 sedarknet21 sehalonet33ts selecsls42
    semnasnet_050 sequencer2d_s seresnet18 seresnetaa50d seresnext26ts seresnextaa101d_32x8d
    shvit_s1 skresnet18 skresnext50_32x4d spnasnet_100 starnet_s050 swiftformer_xs
    swin_tiny_patch4_window7_224 swin_s3_tiny_224 swinv2_tiny_window8_256 swinv2_cr_tiny_224
    test_byobnet test_efficientnet test_resnet tf_efficientnet_b0 tf_efficientnetv2_b0 tf_mixnet_s
    tf_mobilenetv3_small_minimal_100 tiny_vit_5m_224 tinynet_a tresnet_m vgg11 visformer_tiny
    vitamin_small_224 volo_d1_224 vovnet39a wide_resnet50_2 xception41
"""

TORCHVISION = """
    alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3
    maxvit_t mnasnet0_5 mobilenet_v2 mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18
    resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_1 swin_t swin_v2_t vgg11 wide_resnet50_2
"""

# none of their maps is all that goes on: tokens from the first layer to the last, class tokens or
# maps of other sizes beside each map
WITHOUT = """
    beit_base_patch16_224 cait_xxs24_224 coat_tiny convit_tiny crossvit_tiny_240
    deit_tiny_patch16_224 efficientvim_m1 eva02_tiny_patch14_224 gmixer_12_224 gmlp_ti16_224
    hiera_tiny_224 levit_128s mixer_s16_224 mvitv2_tiny pit_ti_224 resmlp_12_224 tnt_s_patch16_224
    twins_svt_small vit_tiny_patch16_224 xcit_nano_12_p8_224
"""


def network(name):
    torch.manual_seed(0)
    library, name = name.split("/")
    if library == "timm":
        model = timm.create_model(name, num_classes=5)
    else:
        options = {}
        if name in ("googlenet", "inception_v3"):
            options = {"init_weights": False, "aux_logits": False}
        model = torchvision.models.get_model(name, weights=None, num_classes=5, **options)
    for parameter in model.parameters():
        if not parameter.any():  # heads and scales that begin at 0 hide all that is before them
            nn.init.normal_(parameter, std=0.1)
    return model.eval()


def images_for(model):
    images = torch.randn(1, 3, 128, 128)
    try:
        model(images)
    except (AssertionError, RuntimeError, ValueError):  # of networks for one size of images
        config = getattr(model, "pretrained_cfg", {"input_size": (3, 224, 224)})
        return torch.randn(1, *config["input_size"])
    return images


def calibrated(model, images):
    """With running statistics of such images, so that no map fades away in evaluation."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        model.train()(torch.randn(4, *images.shape[1:]))
    return model.eval()


def assert_stages_work(model):
    """Identity start, one run of each a pass, gradients in every parameter, removal."""
    keys, images = list(model.state_dict()), images_for(model)
    calibrated(model, images)
    with torch.no_grad():
        before = model(images)
    report = insert_attention(model, "eca", "stages", start_as_identity=True, example=images)
    attention = [model.get_submodule(row.name) for row in report]
    runs = []
    for module in attention:
        module.register_forward_hook(lambda module, *_: runs.append(module))
    with torch.no_grad():
        assert torch.equal(model(images), before)
    assert runs == attention
    for module in attention:
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.01)  # no gate is shut or open, however large the map
    output = model(images)
    (output * torch.randn_like(output)).sum().backward()
    for module in attention:
        for key, parameter in module.named_parameters():
            assert parameter.grad.abs().sum() > 0, key
    assert not torch.equal(output, before)
    assert remove_attention(model) == [row.name for row in report]
    assert list(model.state_dict()) == keys
    with torch.no_grad():
        assert torch.equal(model(images), before)
    return report


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_small_networks(name):
    report = assert_stages_work(network(name))
    assert [row.place.removeprefix("after ") for row in report] == SMALL[name].split()
    sizes = [(row.height, row.width) for row in report]
    assert len(set(sizes)) == len(sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [f"timm/{name}" for name in FAMILIES.split()]
    + [f"torchvision/{name}" for name in TORCHVISION.split()],
)
def test_a_network_of_every_family(name):
    assert_stages_work(network(name))


def refused(name):
    model = network(f"timm/{name}")
    keys = list(model.state_dict())
    with pytest.raises(
        ValueError, match=f"{type(model).__name__} has no stage: none of its blocks"
    ):
        insert_attention(model, "se", "stages")
    assert list(model.state_dict()) == keys


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT.split())
def test_networks_without_stages(name):
    refused(name)


def test_a_small_network_without_stages():
    refused("test_vit")
