"""The table of what happens to networks: one passes, one cannot be built, one is left out whole."""

import json

from qat.cli import coverage
from qat.cli.coverage_models import MODELS, input_size


def test_a_network_in_a_process_of_its_own(tmp_path, capsys):
    assert coverage.main(["timm:test_resnet", "--output", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "coverage.json").read_text())
    assert row["name"] == "timm:test_resnet" and "failed" not in row and row["left"] == {}
    assert row["folded"] > 5 and row["fold_error"] < 1e-4 and row["identical"] >= 0.999 and row["max_lsb"] <= 1
    assert "1 of 1 networks pass" in capsys.readouterr().out


def test_a_network_that_fails_is_a_row_with_its_step():
    row = coverage.examine("timm:no_such_network")
    assert row["failed"].startswith("build: ") and "FAILED build" in coverage.line(row)
    table = coverage.as_markdown([row], 0)
    assert "0 of 1 networks pass (0.0%)" in table and "FAILED build" in table


def test_unknown_names_are_refused(capsys):
    for name, expected in (("timm:resnt18", "resnet18"), ("resnet18", "timm:resnet18"), ("torchvision:resnet19", "resnet18")):
        assert coverage.main([name]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and expected in lines[0]


def test_a_process_that_dies_is_a_row(monkeypatch):
    monkeypatch.setattr(coverage.sys, "executable", "/bin/false")
    assert coverage.apart("timm:resnet18")["failed"].startswith("the process ended with 1")


def test_names_are_said_once():
    assert len(MODELS) == len(set(MODELS)) and len(MODELS) >= 100
    assert input_size("timm:resnet18") == 64 and input_size("timm:levit_128s") == 224
