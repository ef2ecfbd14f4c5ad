"""The latency benchmark: what it measures and writes. Speed itself is not tested."""

import json

import pytest

from qat.cli import benchmark
from qat.deploy.latency import Spread, interleaved, ratio


def test_latency_of_a_network(tmp_path, capsys):
    words = [
        "infer",
        "--models",
        "resnet18",
        "--batch",
        "1",
        "--size",
        "32",
        "--rounds",
        "2",
        "--threads",
        "1",
        "--output",
        str(tmp_path / "o"),
    ]
    assert benchmark.main(words) == 0
    found = json.loads((tmp_path / "o" / "latency.json").read_text())
    variants = {(row["runtime"], row["variant"]): row for row in found["rows"]}
    assert set(variants) == {
        ("torch", "unfolded"),
        ("torch", "folded"),
        ("onnxruntime", "unfolded"),
        ("onnxruntime", "folded"),
        ("onnxruntime", "int8"),
    }
    assert all(row["ms_median"] > 0 and row["ratio_low"] <= row["ratio_median"] <= row["ratio_high"] for row in found["rows"])
    assert variants["torch", "folded"]["ratio_median"] == 1
    int8 = variants["onnxruntime", "int8"]
    # 20 convolutions, 8 additions, the head; nothing but the pools is left float
    assert int8["fused"] == 29 and int8["float"] == {}
    assert variants["onnxruntime", "unfolded"]["batch_norms"] == 20
    assert found["command"].startswith("python scripts/benchmark.py infer") and found["environment"]["threads"] == 1
    assert (tmp_path / "o" / "latency.svg").read_text().startswith("<svg")
    assert "resnet18" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"), [(["--models", "resnet19"], "resnet18"), (["--batch", "one"], "--batch"), (["--rounds", "0"], "--rounds")]
)
def test_bad_input_is_one_line(words, expected, capsys):
    assert benchmark.main(["infer", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and expected in lines[0]


def test_calls_take_turns():
    order = []
    seconds = interleaved({name: lambda name=name: order.append(name) for name in "abc"}, rounds=3, warmup=1)
    assert order == list("abc") + list("bca") + list("cab") + list("abc")
    assert all(len(measured) == 3 for measured in seconds.values())


def test_ratios_are_of_rounds():
    assert ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == Spread(2.0, 1.5, 2.5)
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
