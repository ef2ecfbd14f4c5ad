"""Models by name, their adaptation to small pictures, and checkpoints that fit or say why not."""

import math
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import nn

from qat.errors import ConfigError
from qat.train.data import build_data
from qat.train.models import SOURCES, build_model

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"
MBV1 = {"source": "qat", "name": "mobilenetv1", "options": {"width": 0.25}, "small_input": True}


def outputs(network, channels=3, size=32):
    with torch.no_grad():
        return network.eval()(torch.zeros(2, channels, size, size))


def resolution(network, stage):
    """Height of what enters the module called `stage`, for pictures of 32 pixels."""
    heights = []
    handle = network.get_submodule(stage).register_forward_pre_hook(lambda module, args: heights.append(args[0].shape[-1]))
    outputs(network)
    handle.remove()
    return heights[0]


@pytest.mark.parametrize("name", ["mobilenetv1", "mobilenetv2", "resnet18"])
@pytest.mark.parametrize("small_input", [False, True])
def test_own_networks_at_a_quarter_of_the_width(name, small_input):
    network = build_model({"source": "qat", "name": name, "options": {"width": 0.25}, "small_input": small_input}, 7, 1)
    assert outputs(network, channels=1).shape == (2, 7)


def test_full_width_resnet18_has_the_published_number_of_parameters():
    assert sum(p.numel() for p in build_model({"source": "qat", "name": "resnet18"}, 1000, 3).parameters()) == 11_689_512


def test_narrow_resnet18_scales_every_stage():
    network = build_model({"source": "qat", "name": "resnet18", "options": {"width": 0.25}, "small_input": True}, 10, 3)
    convs = {name: m for name, m in network.named_modules() if isinstance(m, nn.Conv2d)}
    assert sorted({c.out_channels for c in convs.values()}) == [16, 32, 64, 128]
    assert network.layer1[0].downsample is None
    # kaiming, fan out: the stem is initialised as the rest
    expected = math.sqrt(2 / (16 * 9))
    assert abs(network.layer1[0].conv1.weight.std().item() / expected - 1) < 0.1
    assert abs(network.conv1.weight.std().item() / expected - 1) < 0.2
    assert network.layer1[0].bn2.weight.abs().max() == 0  # zero_init_last, as timm does


def test_width_and_options_reach_timm():
    options = {"width": 0.75, "pad_type": "same", "bn_eps": 1e-3, "act_layer": "relu", "drop_rate": 0.2}
    network = build_model({"source": "qat", "name": "mobilenetv1", "options": options}, 10, 3)
    assert network.conv_stem.out_channels == 24 and type(network.conv_stem).__name__ == "Conv2dSame"
    assert network.bn1.eps == 1e-3 and isinstance(network.bn1.act, nn.ReLU) and network.drop_rate == 0.2


@pytest.mark.parametrize(
    ("source", "name", "stage"),
    [
        ("timm", "mobilenetv2_050", "blocks"),
        ("timm", "tf_efficientnet_lite0", "blocks"),
        ("timm", "mobilenetv3_small_050", "blocks"),
        ("timm", "resnet10t", "layer1"),
        ("timm", "resnet18", "layer1"),
        ("torchvision", "mobilenet_v2", "features.1"),
        ("torchvision", "mobilenet_v3_small", "features.1"),
        ("torchvision", "resnet18", "layer1"),
    ],
)
def test_small_input_keeps_the_resolution_of_the_stem(source, name, stage):
    network = build_model({"source": source, "name": name, "small_input": True}, 10, 3)
    assert resolution(network, stage) == 32
    assert outputs(network).shape == (2, 10)


def test_timm_name_with_a_weights_tag_builds_the_architecture():
    assert outputs(build_model({"source": "timm", "name": "mobilenetv2_050.lamb_in1k"}, 4, 1), channels=1).shape == (2, 4)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"source": "keras", "name": "x"}, "one of python, qat, timm, torchvision"),
        ({"source": "qat", "name": "mobilenet1"}, "Did you mean 'mobilenetv1'"),
        ({"source": "timm", "name": "resnet_18"}, "resnet18"),
        ({"source": "timm", "name": "hf_hub:someone/model"}, "known names"),
        ({"source": "torchvision", "name": "mobilenetv2"}, "mobilenet_v2"),
        ({"source": "qat", "name": "resnet18", "options": {"depth": 3}}, r"model\.options.*depth"),
        ({"source": "timm", "name": "resnet18", "options": {"depth": 3}}, r"model\.options.*depth"),
        ({"source": "qat", "name": "resnet18", "options": {"width": 0.5, "stem_type": "deep"}}, "width"),
        ({"source": "timm", "name": "resnet10t", "options": {"act_layer": "os.system"}}, r"model\.options.*os\.system"),
        ({"source": "timm", "name": "regnetx_002", "small_input": True}, "RegNet.*timm ResNet.*torchvision MobileNetV2"),
        ({"source": "python", "name": "no_colon"}, "package.module:function"),
        ({"source": "python", "name": "no_such_module:build"}, "no_such_module"),
        ({"source": "python", "name": "math:no_such_function"}, "no_such_function"),
        ({"source": "python", "name": "math:pi"}, "float"),
    ],
)
def test_what_cannot_be_built_is_said(model, message):
    with pytest.raises(ConfigError, match=message):
        build_model(model, 10, 3)


def test_torchvision_takes_three_channels():
    with pytest.raises(ConfigError, match="1 channels"):
        build_model({"source": "torchvision", "name": "resnet18"}, 10, 1)


OWN = """
from torch import nn
def sized(num_classes, in_chans, hidden=4):
    return nn.Sequential(nn.Conv2d(in_chans, hidden, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(hidden, num_classes))
def fixed():
    return sized(5, 3)
def anything(**keywords):
    return sized(**keywords)
def nothing():
    return 3
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_networks_for_test.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    return "own_networks_for_test"


@pytest.mark.parametrize(("function", "classes"), [("sized", 7), ("fixed", 5), ("anything", 7)])
def test_own_function_gets_the_sizes_it_accepts(own_module, function, classes):
    assert outputs(build_model({"source": "python", "name": f"{own_module}:{function}"}, 7, 3)).shape == (2, classes)


def test_own_function_gets_its_options_and_must_return_a_network(own_module):
    network = build_model({"source": "python", "name": f"{own_module}:sized", "options": {"hidden": 9}}, 7, 3)
    assert network[0].out_channels == 9
    with pytest.raises(ConfigError, match="returning int"):
        build_model({"source": "python", "name": f"{own_module}:nothing"}, 7, 3)


# ---- checkpoints


def saved(path, state):
    save_file({k: v.contiguous() for k, v in state.items()}, path) if path.suffix == ".safetensors" else torch.save(state, path)
    return str(path)


WRAPPED = {
    "plain": lambda state: state,
    "state_dict": lambda state: {"state_dict": state, "epoch": 3},
    "model": lambda state: {"model": state},
    "lightning": lambda state: {"state_dict": {f"network.{k}": v for k, v in state.items()}, "global_step": 4},
    "ddp, compiled": lambda state: {f"module._orig_mod.{k}": v for k, v in state.items()},
    "no counters": lambda state: {k: v for k, v in state.items() if not k.endswith("num_batches_tracked")},
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_checkpoints_as_people_save_them(tmp_path, wrap):
    state = build_model(MBV1, 10, 3).state_dict()
    network = build_model(MBV1 | {"checkpoint": saved(tmp_path / "a.pth", wrap(state))}, 10, 3)
    assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())


def test_safetensors(tmp_path):
    state = build_model(MBV1, 10, 3).state_dict()
    network = build_model(MBV1 | {"checkpoint": saved(tmp_path / "a.safetensors", state)}, 10, 3)
    assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())


def test_a_prefix_that_belongs_to_the_network_stays(tmp_path, monkeypatch):
    (tmp_path / "prefixed_for_test.py").write_text(
        "from torch import nn\ndef build(num_classes):\n    return nn.ModuleDict({'network': nn.Linear(3, num_classes)})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = {"source": "python", "name": "prefixed_for_test:build"}
    state = build_model(model, 4, 3).state_dict()
    network = build_model(model | {"checkpoint": saved(tmp_path / "a.pth", state)}, 4, 3)
    assert torch.equal(network["network"].weight, state["network.weight"])


class Pickled:
    pass


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda path, state: None, "no file at"),
        (lambda path, state: path.write_bytes(b"not a checkpoint"), "cannot be read"),
        (lambda path, state: torch.save({"state_dict": Pickled()}, path), "cannot be read"),
        (lambda path, state: torch.save([1, 2], path), "no state_dict"),
        (lambda path, state: torch.save({"epoch": 3}, path), "no state_dict"),
        (lambda path, state: torch.save({k: v for k, v in state.items() if "bn1" not in k}, path), r"\d+ missing: .*\(\d+ in all\)"),
        (lambda path, state: torch.save(state | {"extra.weight": torch.zeros(1)}, path), r"1 unexpected: extra\.weight"),
        (
            lambda path, state: torch.save(state | {"conv_stem.weight": torch.zeros(8, 3, 7, 7)}, path),
            r"\(8, 3, 7, 7\) instead of \(8, 3, 3, 3\)",
        ),
        (
            lambda path, state: torch.save(state | {"classifier.weight": torch.zeros(99, 256), "classifier.bias": torch.zeros(99)}, path),
            "head 'classifier' of 99 classes for data of 10",
        ),
    ],
)
def test_checkpoints_that_do_not_fit_say_why(tmp_path, content, message):
    path = tmp_path / "a.pth"
    content(path, build_model(MBV1, 10, 3).state_dict())
    with pytest.raises(ConfigError, match=message):
        build_model(MBV1 | {"checkpoint": str(path)}, 10, 3)


def test_broken_safetensors(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"broken")
    with pytest.raises(ConfigError, match="cannot be read"):
        build_model(MBV1 | {"checkpoint": str(tmp_path / "a.safetensors")}, 10, 3)


def test_every_model_config_has_every_key_and_builds():
    files = sorted((ROOT / "configs" / "model").glob("*.yaml"))
    assert {f.stem for f in files} >= {"mobilenetv1", "mobilenetv2", "resnet18", "mobilenetv1_075"}
    for file in files:
        model = yaml.safe_load(file.read_text())
        assert set(model) == {"source", "name", "checkpoint", "small_input", "options"}, file.name
        assert model["source"] in SOURCES
        if model["name"] != "???":
            assert outputs(build_model(model, 10, 3), size=64).shape == (2, 10)


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared is absent")
def test_shared_weights_recognise_imagenette():
    model = yaml.safe_load((ROOT / "configs" / "model" / "mobilenetv1_075.yaml").read_text())
    network = build_model(model | {"checkpoint": str(SHARED / "weights" / "mobilenetv1_075_imagenette.safetensors")}, 10, 3).eval()
    root = str(SHARED / "data" / "imagenette")
    data = build_data({"name": "imagenet", "root": root, "image_size": 128, "mean": 0.5, "std": 0.5}, 0)
    batches = data._batches(data.splits.test, augmented=False)
    images, labels = batches.__getitems__([(0, i) for i in range(0, 1000, 25)])
    with torch.no_grad():
        correct = (network(images).argmax(1) == labels).sum().item()
    assert correct >= 34  # of 40; 95 % are right on the whole split
    imagenet = str(SHARED / "weights" / "mobilenetv1_075_imagenet.safetensors")
    with pytest.raises(ConfigError, match="of 1000 classes for data of 10"):
        build_model(model | {"checkpoint": imagenet}, 10, 3)
