"""The table of what happens to networks: one passes, one cannot be built, one is left out whole."""

import json

from qat.cli import coverage
from qat.cli.coverage_models import MODELS, input_size


def test_networks_in_processes_of_their_own(tmp_path, capsys):
    assert coverage.main(["timm:test_resnet", "timm:no_such_network", "--output", str(tmp_path)]) == 1
    good, bad = json.loads((tmp_path / "coverage.json").read_text())
    assert good["name"] == "timm:test_resnet" and "failed" not in good and good["left"] == {}
    assert good["folded"] > 5 and good["fold_error"] < 1e-4 and good["identical"] >= 0.999 and good["max_lsb"] <= 1
    assert bad["failed"].startswith("build: ")
    table = (tmp_path / "coverage.md").read_text()
    assert "1 of 2 networks pass (50.0%)" in table and "| timm:test_resnet |" in table and "FAILED build" in table
    assert "1 of 2 networks pass" in capsys.readouterr().out


def test_a_process_that_dies_is_a_row(monkeypatch):
    monkeypatch.setattr(coverage.sys, "executable", "/bin/false")
    assert coverage.apart("timm:resnet18")["failed"].startswith("the process ended with 1")


def test_names_are_said_once():
    assert len(MODELS) == len(set(MODELS)) and len(MODELS) >= 100
    assert input_size("timm:resnet18") == 64 and input_size("timm:levit_128s") == 224
