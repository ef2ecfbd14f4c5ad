"""An activation that clips stays in the file unless the grid clips at the same value; the runtime and convert() agree either way."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import qat

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from small_networks import randomize

X = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1)) * 3
CLIPS = {"ReLU": (nn.ReLU, 0.0, None), "ReLU6": (nn.ReLU6, 0.0, 6.0), "Hardtanh": (lambda: nn.Hardtanh(-1.0, 2.0), -1.0, 2.0)}


@pytest.mark.parametrize(
    ("kind", "target"), [("ReLU", "ort_vnni"), ("ReLU", "tensorrt"), ("ReLU6", "ort_vnni"), ("ReLU6", "tensorrt"), ("Hardtanh", "tensorrt")]
)
def test_a_grid_wider_than_the_clip_does_not_let_values_through(kind, target, tmp_path):
    activation, low, high = CLIPS[kind]
    torch.manual_seed(0)
    model = randomize(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), activation(), nn.Conv2d(8, 4, 1))).eval()
    prepared = qat.prepare(model, (X,), qat.QATConfig.for_target(target))
    qat.calibrate(prepared, [X])
    quantizer = prepared.get_submodule("quantizers._2")
    wide = qat.FakeQuantizer(quantizer.spec, "minmax", running=True)
    wide(torch.tensor([-9.0, 9.0]))
    quantizer.scale.copy_(wide.scale), quantizer.zero_point.copy_(wide.zero_point)
    converted = qat.convert(prepared)
    path = qat.export_onnx(converted, (X,), tmp_path / "m.onnx")
    for runtime in ("onnxruntime", "onnxruntime_unoptimized"):
        assert qat.verify(converted, path, [X], runtime).max_lsb == 0
    seen = []
    converted.get_submodule("quantizers._2").register_forward_hook(lambda m, i, o: seen.append(o))
    converted(X)
    half = float(wide.scale) / 2
    assert float(seen[0].min()) >= low - half and float(seen[0].max()) <= (9.1 if high is None else high + half)
    assert float(seen[0].min()) <= low + half and (high is None or float(seen[0].max()) >= high - half)
