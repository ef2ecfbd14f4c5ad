"""The latency benchmark: what it measures and writes. Speed itself is not tested."""

import json

import pytest

from qat.cli import benchmark, benchmark_growth, benchmark_start, benchmark_train, training_step, training_variants
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


@pytest.mark.slow
def test_training_steps_of_strategies_and_other_libraries(tmp_path, capsys, monkeypatch):
    def missing(model, x):
        raise ImportError("not here\nat all")

    peers = {"torch.ao FX": training_variants.torch_ao_fx, "other": missing}
    monkeypatch.setattr(training_variants, "PEERS", peers)
    monkeypatch.setattr(benchmark_train, "PEERS", peers)
    words = "train --models resnet18 --strategies static,moving_average --batch 2 --rounds 2 --threads 1 --peers --output".split()
    assert benchmark.main([*words, str(tmp_path / "o")]) == 0
    found = json.loads((tmp_path / "o" / "training.json").read_text())
    rows = {row["variant"]: row for row in found["rows"]}
    ours = ["static", "moving_average", "moving_average, quantized statistics", "moving_average, after freeze"]
    assert list(rows) == ["float", *ours, "torch.ao FX"]
    assert rows["float"]["ratio_median"] == rows["float"]["memory_ratio"] == 1
    # 20 convolutions and the head; the input, 17 activations, 3 shortcuts, 8 convolutions in front of additions, pooling, the head
    assert all((rows[name]["weight_quantizers"], rows[name]["activation_quantizers"]) == (21, 31) for name in ours)
    assert rows["torch.ao FX"]["weight_quantizers"] == 21
    # Parameters, gradients and momentum of 11 million numbers, and something on top.
    assert rows["float"]["memory_mb"] > 3 * 4 * 11.1 and all(row["memory_ratio"] >= 1 for row in found["rows"])
    assert found["skipped"] == {"resnet18": {"other": "ImportError: not here"}}
    assert "other: not measured, ImportError: not here" in capsys.readouterr().out
    assert (tmp_path / "o" / "training.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "--models", "resnet19"], "resnet18"),
        (["train", "--strategies", "statik"], "static"),
        (["train", "--batch", "0"], "--batch"),
        (["train", "--device", "gpu"], "cpu"),
        (["growth", "--axes", "dept"], "depth"),
        (["start", "--rounds", "0"], "--rounds"),
        (["start", "--recipes", "mbv1_bncor"], "mbv1_bncorr"),
        (["profile", "--models", "resnet19"], "resnet18"),
    ],
)
def test_bad_input_of_other_benchmarks_is_one_line(words, expected, capsys):
    assert benchmark.main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and expected in lines[0]


def test_exponents_of_powers():
    rows = [
        {"axis": "a", "variant": variant, "number": n, "ms_median": time(n)}
        for n in (1, 2, 4)
        for variant, time in (("float", lambda n: 3 * n**2), ("static", lambda n: 5 * n**3))
    ]
    assert benchmark_growth.exponents(rows) == [
        {"axis": "a", "variant": "float", "exponent": 2.0, "exponent_of_float_time": 1.0},
        {"axis": "a", "variant": "static", "exponent": 3.0, "exponent_of_float_time": 1.5},
    ]
    assert benchmark_growth.exponents(rows[:2]) == []


def test_growth_over_an_axis(tmp_path, monkeypatch, capsys):
    sizes = {
        "batch (pictures)": lambda: [
            benchmark_growth.Point(f"{n}", n, lambda: training_step.build_network("squeezenet1_1"), n) for n in (1, 2)
        ]
    }
    monkeypatch.setattr(benchmark_growth, "AXES", sizes)
    assert benchmark.main(["growth", "--axes", "batch", "--strategies", "static", "--rounds", "1", "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "growth.json").read_text())
    assert [(row["point"], row["variant"]) for row in found["rows"]] == [(n, v) for n in "12" for v in ("float", "static")]
    assert len(found["exponents"]) == 2 and "exponent" in capsys.readouterr().out


def test_time_in_front_of_the_first_step(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark_start, "COMMANDS", {"nothing": "pass"})
    words = ["start", "--prepare", "squeezenet1_1", "--rounds", "1", "--output", str(tmp_path)]
    assert benchmark.main(words) == 0
    found = json.loads((tmp_path / "start.json").read_text())
    assert [row["what"] for row in found["rows"]] == ["nothing", "prepare squeezenet1_1"]
    ((recipe, read, trained),) = [tuple(row.values()) for row in found["data"]]
    assert recipe == "mbv1_bncorr" and read > 0 and trained > 0
    assert "pictures read" in capsys.readouterr().out


def test_a_trace_for_each_phase(tmp_path, capsys):
    words = "profile --models squeezenet1_1 --strategies static --batch 1 --rows 3 --output".split()
    assert benchmark.main([*words, str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"squeezenet1_1_float.json", "squeezenet1_1_static.json"}
    assert json.loads((tmp_path / "squeezenet1_1_static.json").read_text())["traceEvents"]
    out = capsys.readouterr().out
    assert "squeezenet1_1, static" in out and "aten::" in out
