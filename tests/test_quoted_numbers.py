"""Every accuracy that a text quotes is one of docs/results, or a mean, an interval or a difference of them."""

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

from qat.report.quote import accuracies, kept_results, quote
from qat.report.statistics import estimate, paired

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
PATTERNS = ["docs/*.md", "docs/strategies/*.md", "docs/results/**/README.md", "recipes/*.yaml"]
TEXTS = [ROOT / "README.md", *(path for pattern in PATTERNS for path in sorted(ROOT.glob(pattern)))]
QUOTED = re.compile(r"(?<![\d.])[01]\.\d{4}(?!\d)")  # accuracies have four decimals, other numbers have not


def without_seed(config):
    """What tells cells apart: the configuration but for the seed and for what is recorded."""
    return json.dumps({**config, "seed": None, "report": None}, sort_keys=True)


@pytest.fixture(scope="module")
def known():
    """Texts of all numbers that may be quoted."""
    cells = defaultdict(dict)
    numbers = set()
    for path in RESULTS.rglob("result.json"):
        result = json.loads(path.read_text())
        config = yaml.safe_load((path.parent / "config.yaml").read_text())
        numbers |= {*result["accuracy"].values(), result.get("validation", 0)}
        if not result.get("tuning"):
            cells[without_seed(config)][result["seed"]] = result["accuracy"]
    groups = defaultdict(list)
    for key, cell in cells.items():
        config = json.loads(key)
        groups[json.dumps([config["model"], config["data"], config["quant"]["weight"], config["quant"]["activation"]])].append(cell)
        for step in set.intersection(*(set(found) for found in cell.values())):
            mean = estimate([found[step] for found in cell.values()])
            numbers |= {mean.mean, mean.half or 0}
        off = estimate([found["integer"] - found["float"] for found in cell.values()])
        numbers |= {abs(off.mean), off.half or 0}
    for group in groups.values():
        for one in group:
            for other in group:
                common = sorted(one.keys() & other.keys())
                if one is other or not common:
                    continue
                test = paired([one[seed]["integer"] for seed in common], [other[seed]["integer"] for seed in common])
                numbers |= {abs(test.difference.mean), test.difference.half or 0, test.p or 0}
    return {f"{value:.4f}" for value in numbers}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_quoted_accuracies_were_measured(path, known):
    text = path.read_text()
    if path.suffix == ".yaml":
        text = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    assert not sorted(set(QUOTED.findall(text)) - known)


def test_headers_and_the_table_of_the_readme_are_what_the_results_say():
    said = subprocess.run([sys.executable, ROOT / "scripts" / "quote_results.py", "--check"], capture_output=True, text=True)
    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")


def test_an_interval_is_quoted_where_there_are_several_seeds(tmp_path):
    for place, seed, accuracy in [("run", 0, 0.9), ("run/seed_1", 1, 0.92), ("run/seed_2", 2, 0.94)]:
        (tmp_path / place).mkdir()
        measured = {"float": 0.95, "ptq": 0.5, "fake_quant": accuracy, "integer": accuracy}
        (tmp_path / place / "result.json").write_text(json.dumps({"status": "ok", "seed": seed, "steps": 7, "accuracy": measured}))
    results = kept_results(tmp_path / "run")
    half = "0.0497"  # 4.3027 * 0.02 / sqrt(3)
    assert quote(results) == (
        f"float 0.9500 (equal), ptq 0.5000 (equal), fake-quant 0.9200 ± {half}, integer 0.9200 ± {half} (seeds 0, 1, 2)"
    )
    assert accuracies(results[:1])["integer"].half is None and quote(results[:1]).endswith("integer 0.9000 (seed 0)")
