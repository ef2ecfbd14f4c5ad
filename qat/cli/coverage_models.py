"""Networks with BatchNorms from timm (the smaller ones of each family that has them) and torchvision's classification models."""

_TIMM = """
eca_resnet33ts gcresnet33ts gernet_s mobileone_s0 repvgg_a0 regnetz_b16 resnet32ts resnet51q seresnext26ts
convmixer_768_32 cpubone_nano cs3darknet_focus_s cs3darknet_s cs3sedarknet_xdw cspresnet50 darknet17 sedarknet21 cspnext_tiny
densenet121 densenetblur121d dla34 dla46_c dla46x_c dla60_res2net dpn48b dpn68 efficientformer_l1 efficientformerv2_s0
efficientnet_b0 efficientnet_es efficientnet_lite0 efficientnet_blur_b0 efficientnetv2_rw_t fbnetc_100 mixnet_s mnasnet_050 mnasnet_100
mobilenet_edgetpu_v2_xs mobilenetv1_100 mobilenetv1_100h mobilenetv2_050 mobilenetv2_100 semnasnet_075 spnasnet_100 tf_efficientnet_b0
efficientvim_m1 efficientvit_b0 efficientvit_m0 fasternet_t0 fasternet_t1 fastvit_t8 ghostnet_050 ghostnetv2_100 ghostnetv3_050
hardcorenas_a hgnet_tiny hgnetv2_b0 hrnet_w18_small inception_v3 lcnetv2_small levit_128s levit_conv_128s lowformer_b0
fbnetv3_b lcnet_050 mobilenetv3_large_100 mobilenetv3_small_050 mobilenetv4_conv_small mobilenetv4_conv_aa_medium tf_mobilenetv3_small_100
mobilevit_xxs mobilevitv2_050 nextvit_small regnetv_040 regnetx_002 regnety_002 regnetz_005 repghostnet_050 repvit_m0_9
res2net50_14w_8s res2next50 resnest14d ecaresnet26t ecaresnetlight resnet10t resnet18 resnet18d resnet26t resnet34 resnet50 resnetaa34d
resnetblur18 resnetrs50 resnext50_32x4d seresnet18 seresnext26d_32x4d seresnextaa101d_32x8d resnetv2_18 resnetv2_50 rexnet_100 rexnetr_100
selecsls42 legacy_seresnet18 legacy_seresnext26_32x4d shvit_s1 skresnet18 starnet_s1 swiftformer_xs tiny_vit_5m_224 tresnet_m vgg11_bn
visformer_tiny ese_vovnet19b_dw ese_vovnet19b_slim eca_vovnet39b legacy_xception xception41
""".split()

_TORCHVISION = """
densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 mnasnet0_5 mobilenet_v2 mobilenet_v3_large mobilenet_v3_small
regnet_x_400mf regnet_y_400mf resnet18 resnet50 resnext50_32x4d shufflenet_v2_x0_5 shufflenet_v2_x1_0 vgg11_bn wide_resnet50_2
""".split()

MODELS = [*(f"timm:{name}" for name in _TIMM), *(f"torchvision:{name}" for name in _TORCHVISION)]

# Where 64 pixels are too few for the strides, or the network is built for one size.
_SIZES = {
    "timm:efficientformer_l1": 224,
    "timm:efficientformerv2_s0": 224,
    "timm:efficientvim_m1": 224,
    "timm:efficientvit_m0": 224,
    "timm:inception_v3": 128,
    "timm:levit_128s": 224,
    "timm:levit_conv_128s": 224,
    "timm:mobilevit_xxs": 128,
    "timm:nextvit_small": 128,
    "timm:shvit_s1": 224,
    "timm:tiny_vit_5m_224": 224,
    "timm:visformer_tiny": 224,
    "timm:swiftformer_xs": 224,
    "timm:fastvit_t8": 128,
    "timm:tresnet_m": 128,
    "torchvision:inception_v3": 299,
}


def input_size(name: str) -> int:
    """Height and width of the pictures a network is examined with."""
    return _SIZES.get(name, 64)
