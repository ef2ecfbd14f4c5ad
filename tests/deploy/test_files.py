"""What is in a file: integers, their types and axes, its size, and how onnxruntime fuses it."""

import sys
from collections import Counter
from pathlib import Path

import onnx
import pytest
import timm
import torch
import torchvision
from torch import nn

import qat
from qat.deploy.runtime import session
from qat.train.models import build_model

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from small_networks import Residual, randomize

X = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def converted(model, x=X, config=None):
    prepared = qat.prepare(randomize(model).eval(), (x,), config)
    qat.calibrate(prepared, [x])
    return qat.convert(prepared)


def test_four_bits_in_half_the_space(tmp_path):
    integers = converted(Residual(), config=qat.QATConfig(weight=qat.QuantSpec(bits=4), overrides={"conv1": {"weight": {"bits": 8}}}))
    plain = qat.export_onnx(integers, (X,), tmp_path / "int8.onnx")
    packed = qat.export_onnx(integers, (X,), tmp_path / "int4.onnx", int4=True)
    kinds = {i.name: i.data_type for i in onnx.load(packed).graph.initializer if i.name.endswith("codes")}
    int4, int8 = onnx.TensorProto.INT4, onnx.TensorProto.INT8
    assert kinds == {"stem.0.codes": int4, "conv1.codes": int8, "conv2.codes": int4, "fc.codes": int4}
    for path in (plain, packed):
        for runtime in ("onnxruntime", "onnxruntime_unoptimized"):
            report = qat.verify(integers, path, [X], runtime)
            assert report.max_lsb <= 1 and report.identical >= 0.999


def test_int4_is_refused_where_it_is_not_what_is_computed(tmp_path):
    with pytest.raises(qat.QATError, match="no layer with weights of 4 bits"):
        qat.export_onnx(converted(Residual()), (X,), tmp_path / "m.onnx", int4=True)
    config = qat.QATConfig.for_target("openvino", weight=qat.QuantSpec(bits=4))
    with pytest.raises(qat.QATError, match="target 'openvino'"):
        qat.export_onnx(converted(Residual(), config=config), (X,), tmp_path / "m.onnx", int4=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("groups", "axis"), [(1, 1), (2, 0)])
def test_the_axis_of_transposed_weights(groups, axis, tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 4, 2, 2, groups=groups), nn.BatchNorm2d(4))
    integers = converted(model)
    file = onnx.load(qat.export_onnx(integers, (X,), tmp_path / "m.onnx"))
    (node,) = [n for n in file.graph.node if n.op_type == "DequantizeLinear" and n.input[0] == "2.codes"]
    assert onnx.helper.get_node_attr_value(node, "axis") == axis


def test_files_do_not_depend_on_the_example(tmp_path):
    integers = converted(Residual())
    contents = []
    for i, x in enumerate((X, X[:1] * 100, torch.zeros(7, 3, 8, 8))):
        contents.append(qat.export_onnx(integers, (x,), tmp_path / f"{i}.onnx").read_bytes())
    assert contents[0] == contents[1] == contents[2]


def test_a_file_of_integers_is_a_quarter_of_the_float_file(tmp_path):
    model = build_model({"source": "qat", "name": "mobilenetv1", "checkpoint": None, "small_input": False, "options": {}}, 1000, 3).eval()
    x = torch.randn(8, 3, 32, 32)
    torch.onnx.export(model, (x,), tmp_path / "float.onnx", dynamo=True, external_data=False, verbose=False)
    path = qat.export_onnx(converted(model, x), (x,), tmp_path / "int8.onnx")
    assert path.stat().st_size <= 0.28 * (tmp_path / "float.onnx").stat().st_size


NETWORKS = {
    "resnet18": lambda: torchvision.models.resnet18(),
    "mobilenet_v2": lambda: torchvision.models.mobilenet_v2(),
    "mobilenetv1_100": lambda: timm.create_model("mobilenetv1_100"),
}


@pytest.mark.parametrize("name", ["resnet18", *(pytest.param(name, marks=pytest.mark.slow) for name in list(NETWORKS)[1:])])
def test_onnxruntime_fuses_every_convolution_and_addition(name, tmp_path):
    model, x = NETWORKS[name](), torch.randn(2, 3, 64, 64)
    integers = converted(model, x)
    path = qat.export_onnx(integers, (x,), tmp_path / "m.onnx")
    written = Counter(n.op_type for n in onnx.load(path).graph.node)
    session(path, tmp_path / "optimized.onnx")
    fused = Counter(n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert fused["QLinearConv"] == written["Conv"] == sum(isinstance(m, nn.Conv2d) for m in model.modules())
    assert fused["QLinearAdd"] == written["Add"] == {"resnet18": 8, "mobilenet_v2": 10, "mobilenetv1_100": 0}[name]
    assert fused["QGemm"] == 1 and fused["Conv"] == fused["Add"] == fused["BatchNormalization"] == 0
