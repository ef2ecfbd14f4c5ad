"""How results are quoted in text: mean and half width of the 95 % interval over seeds, from kept runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qat.report.compare_words import half_text
from qat.report.result import NAME, read_result
from qat.report.statistics import Estimate, estimate

WORDS = {"fake_quant": "fake-quant"}


def kept_results(folder: Path) -> list[dict[str, Any]]:
    """Results of a kept configuration by seed: folder/result.json and folder/seed_*/result.json.

    Raises:
        ConfigError: one that cannot be read.
    """
    found = [read_result(path.parent) for path in [folder / NAME, *folder.glob(f"seed_*/{NAME}")] if path.is_file()]
    return sorted(found, key=lambda result: result["seed"])


def number(value: Estimate) -> str:
    """0.9933 ± 0.0021; 0.9933 of one seed; 0.9933 (equal) of several that gave the same."""
    return f"{value.mean:.4f}{half_text(value)}"


def accuracies(results: Sequence[dict[str, Any]]) -> dict[str, Estimate]:
    """Every measured accuracy (fraction of the test split), in the order of the run."""
    return {key: estimate([result["accuracy"][key] for result in results]) for key in results[0]["accuracy"]}


def quote(results: Sequence[dict[str, Any]]) -> str:
    """One line: float 0.9933 ± 0.0021, ptq ... (seeds 0, 1, 2); without training the last step stands for the simulation."""
    found = accuracies(results)
    if not results[0]["steps"] and len(found) > 3:
        del found["fake_quant"]
    seeds = ", ".join(str(result["seed"]) for result in results)
    told = ", ".join(f"{WORDS.get(key, key)} {number(value)}" for key, value in found.items())
    return f"{told} (seed{'s' * (len(results) > 1)} {seeds})"
