"""`scripts/compare.py` on made-up run folders: what is grouped, what is said, and what is refused."""

import csv
import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from fake_runs import SETTINGS, STRATEGIES, config, write_comparison, write_run

from qat.cli.compare import compare, main
from qat.report.compare_cells import into_cells
from qat.report.compare_numbers import seconds_per_step
from qat.report.compare_runs import read_runs

ROOT = Path(__file__).parents[2]


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def cells(folder, **keys):
    """Rows of compare_cells.csv with these values."""
    return [row for row in rows(folder / "compare_cells.csv") if all(row[key] == value for key, value in keys.items())]


def run_of(root, strategy, seed, accuracy, **changes):
    name = "_".join([strategy, str(seed), *(f"{key}_{value}" for key, value in changes.items())])
    return write_run(root / name[:80], accuracy, strategy=strategy, seed=seed, **changes)


def test_two_runs(tmp_path, capsys):
    a, b = run_of(tmp_path, "naive", 0, 0.90), run_of(tmp_path, "static", 0, 0.95)
    assert main([str(a), str(b), "--out", str(tmp_path / "out"), "--baseline", "naive"]) == 0
    said = capsys.readouterr().out
    assert "2 strategies in 1 setting: 2 runs of 1 seed (0), 1 in each cell." in said
    assert "Nothing could be tested against naive" in said and "not tested (one seed): static" in said
    (static,) = cells(tmp_path / "out", variant="static")
    assert float(static["minus_baseline"]) == pytest.approx(0.05) and static["p"] == static["minus_baseline_low"] == ""
    assert float(static["minus_float"]) == pytest.approx(0.95 - 0.97) and static["verdict"] == "not tested"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["compare.csv", "compare.html", "compare_cells.csv"]


def test_pairs_over_seeds_and_says_what_is_significant(tmp_path, capsys):
    for seed, base in enumerate((0.80, 0.85, 0.90)):
        run_of(tmp_path, "bn_correction", seed, base)
        run_of(tmp_path, "naive", seed, base - 0.0100 - 0.0005 * seed)  # always worse, by less than the seeds differ
        run_of(tmp_path, "static", seed, base + (0.01, -0.02, 0.015)[seed])
        run_of(tmp_path, "frozen", seed, base + 0.002)
    compare([tmp_path], tmp_path, None)
    said = capsys.readouterr().out
    assert "1 of 2 comparisons with bn_correction shows a significant difference" in said
    assert "worse than bn_correction: naive (−0.0105, 95 % interval −0.0117 to −0.0093, p = 0.0015, 3 seeds)" in said
    assert "no difference found: static" in said and "not tested (the same difference in every seed): frozen" in said
    (naive,) = cells(tmp_path, variant="naive")
    # t = 0.0105 / (0.0005 / sqrt(3)) = 36.37, two degrees of freedom: p = 0.000755; Holm: the smallest of two, doubled
    assert float(naive["p_uncorrected"]) == pytest.approx(0.000755, rel=1e-3)
    assert float(naive["p"]) == pytest.approx(2 * float(naive["p_uncorrected"]))
    page = (tmp_path / "compare.html").read_text()
    assert "no difference found: static" in page and "<strong>0.8520</strong>" in page


def test_only_seeds_that_both_have_are_paired(tmp_path):
    for seed in range(3):
        run_of(tmp_path, "naive", seed, 0.9 + 0.01 * seed)
        if seed != 1:
            run_of(tmp_path, "bn_correction", seed, 0.95 + 0.012 * seed)
    compare([tmp_path], tmp_path, None)
    (naive,) = cells(tmp_path, variant="naive")
    assert naive["seeds"] == "3" and naive["common_seeds"] == "2"
    assert float(naive["minus_baseline"]) == pytest.approx(((0.90 - 0.95) + (0.92 - 0.974)) / 2)
    assert "(2 common)" in (tmp_path / "compare.html").read_text()


def test_what_differs_makes_the_settings_and_what_follows_a_strategy_does_not(tmp_path):
    for seed in range(2):
        run_of(tmp_path, "naive", seed, 0.9, optim__lr=0.03)  # a learning rate tuned for each strategy
        run_of(tmp_path, "static", seed, 0.9, optim__lr=0.01)
        run_of(tmp_path, "naive", seed, 0.8, setting=SETTINGS[2], optim__lr=0.001)
        run_of(tmp_path, "static", seed, 0.8, setting=SETTINGS[2], optim__lr=0.03)
    found = into_cells(read_runs([tmp_path], {})[0])
    assert found.settings == ["W8A8 per tensor", "W4A8 per channel"] and found.variants == ["naive", "static"]
    assert found.details == ["optim.lr"] and [len(cell.runs) for cell in found.cells] == [2] * 4
    compare([tmp_path], tmp_path, "static")
    page = (tmp_path / "compare.html").read_text()
    assert "<th>optim.lr</th>" in page and page.count("<td>0.03</td>") == 2


def test_a_key_that_varies_within_a_strategy_makes_settings_or_variants(tmp_path):
    for lr in (0.01, 0.03):
        run_of(tmp_path, "naive", 0, 0.9, optim__lr=lr)
        run_of(tmp_path, "static", 0, 0.9, optim__lr=lr)
    for freeze in (0.25, 0.5):
        run_of(tmp_path, "bn_correction", 0, 0.9, optim__lr=0.01, fold__freeze=freeze)
    found = into_cells(read_runs([tmp_path], {})[0])
    assert found.settings == ["W8A8 per tensor", "W8A8 per tensor, optim.lr 0.03"] and found.usual == {"optim.lr": 0.01}
    assert found.variants == ["naive", "bn_correction, freeze 0.25", "bn_correction, freeze 0.5", "static"]


def test_a_baseline_with_variations_is_the_one_in_most_settings(tmp_path, capsys):
    for setting, freeze in ((SETTINGS[0], 0.25), (SETTINGS[0], 0.5), (SETTINGS[1], 0.5)):
        run_of(tmp_path, "bn_correction", 0, 0.9, fold__freeze=freeze, setting=setting)
        if freeze == 0.5:
            run_of(tmp_path, "naive", 0, 0.9, setting=setting)
    for asked in ("bn_correction", None):
        compare([tmp_path], tmp_path, asked)
        assert "against bn_correction, freeze 0.5:" in capsys.readouterr().out
    compare([tmp_path], tmp_path, "bn_correction, freeze 0.25")
    assert "No finished run of bn_correction, freeze 0.25, so nothing is compared: W4A8 per tensor." in capsys.readouterr().out


def test_other_keys_than_the_strategy_can_be_compared(tmp_path, capsys):
    for seed in range(3):
        run_of(tmp_path, "static", seed, 0.90 + 0.01 * seed, optim__name="sgd")
        run_of(tmp_path, "static", seed, 0.91 + 0.0101 * seed, optim__name="adam")
    assert main([str(tmp_path), "--by", "optim.name", "--baseline", "optim.name sgd"]) == 0
    said = capsys.readouterr().out
    assert "2 values of optim.name in 1 setting" in said and "better than optim.name sgd: optim.name adam" in said


def test_seeds_that_follow_the_runs_or_are_fixed(tmp_path):
    for seed in range(3):
        run_of(tmp_path / "fixed", "static", seed, 0.9)
        run_of(tmp_path / "following", "static", seed, 0.9, data__split_seed=None, float_training__seed=seed)
    for name in ("fixed", "following"):
        found = into_cells(read_runs([tmp_path / name], {})[0])
        assert [sorted(cell.runs) for cell in found.cells] == [[0, 1, 2]]
    both = into_cells(read_runs([tmp_path], {})[0])
    assert len(both.settings) > 1 and all("seed" in name for name in both.settings[1:])


def test_a_null_seed_is_what_it_comes_to(tmp_path):
    """A split follows the float training, whose null is the run's seed."""
    run_of(tmp_path, "static", 0, 0.90, data__split_seed=None, float_training__seed=None)
    run_of(tmp_path, "static", 1, 0.91, data__split_seed=None, float_training__seed=0)
    run_of(tmp_path, "static", 2, 0.92, data__split_seed=0, float_training__seed=0)
    found = into_cells(read_runs([tmp_path], {})[0])
    assert [sorted(cell.runs) for cell in found.cells] == [[0, 1, 2]]
    assert (found.same["data.split_seed"], found.same["float_training.seed"]) == (0, 0)


@pytest.mark.parametrize(
    "key, one, other",
    [
        ("data__mean", [*range(60)], [*range(59), 99]),
        ("data__mean", ["a" * 100], ["a" * 99 + "b"]),
        ("quant__overrides", {"a.*": {"skip": True}, "*.b": {"skip": False}}, {"*.b": {"skip": False}, "a.*": {"skip": True}}),
    ],
)
def test_configurations_that_differ_late_or_in_their_order_are_two(tmp_path, key, one, other):
    run_of(tmp_path / "one", "static", 0, 0.90, **{key: one})
    run_of(tmp_path / "other", "static", 0, 0.95, **{key: other})
    found = into_cells(read_runs([tmp_path], {})[0])
    assert len(found.cells) == 2 and not found.duplicates


def test_one_float_network_has_no_interval(tmp_path):
    for seed in range(3):
        run_of(tmp_path, "static", seed, 0.9)
        run_of(tmp_path, "naive", seed, 0.8)
    compare([tmp_path], tmp_path, "naive")
    head = (tmp_path / "compare.html").read_text().split("test accuracy of the float networks")[1][:80]
    assert "0." in head and "±" not in head


def test_the_newest_run_of_a_seed_counts(tmp_path, capsys):
    for name, accuracy in (("2026-01-02_00-00-00_000000", 0.9), ("2026-01-01_00-00-00_000000", 0.5)):
        write_run(tmp_path / "static" / name, accuracy, strategy="static")
    run_of(tmp_path, "naive", 0, 0.8)
    compare([tmp_path], tmp_path, "naive")
    assert "1 folder left out: replaced by a newer run of the same cell and seed." in capsys.readouterr().out
    assert cells(tmp_path, variant="static")[0]["accuracy"] == "0.9"
    (older,) = [row for row in rows(tmp_path / "compare.csv") if row["used"] == "no"]
    assert "2026-01-01" in older["folder"] and older["reason"].startswith("duplicate: ") and "2026-01-02" in older["reason"]


def test_mixtures(tmp_path, capsys):
    run_of(tmp_path, "naive", 0, 0.9)
    run_of(tmp_path, "static", 0, 0.95, result_accuracy={"float": 0.97, "fake_quant": 0.95}, result_parity="odd", result_seconds=None)
    run_of(tmp_path, "frozen", 0, 0.9, result_status="failed", result_error="RuntimeError: no <b>luck</b>\nmore")
    run_of(tmp_path, "frozen", 1, 0.9, result_status="interrupted")
    run_of(tmp_path, "frozen", 2, 0.9, result_tuning=True)
    run_of(tmp_path, "frozen", 3, 0.9, result_accuracy={"float": float("nan"), "integer": 0.5})
    run_of(tmp_path, "frozen", 4, 0.9, result_status="odd")
    (run_of(tmp_path, "frozen", 5, 0.9) / "result.json").unlink()
    (run_of(tmp_path, "frozen", 6, 0.9) / "config.yaml").unlink()
    (run_of(tmp_path, "frozen", 7, 0.9) / "result.json").write_text('{"status": "ok", ')
    (run_of(tmp_path, "frozen", 8, 0.9) / "config.yaml").write_text("a: [1, 2")
    (run_of(tmp_path, "frozen", 9, 0.9) / "config.yaml").write_bytes(b"\xff\xfe\x00")
    bomb = "a: &a {x: 1}\n" + "".join(f"b{i}: &b{i} {{p: *b{i - 1}, q: *b{i - 1}}}\n" for i in range(1, 40)).replace("*b0", "*a")
    (run_of(tmp_path, "frozen", 10, 0.9) / "config.yaml").write_text(bomb)
    (run_of(tmp_path, "single_pass", 0, 0.9) / "layers.json").write_text('{"jitter": [1], "ranges": {"steps": "x"}, "sqnr": {"a": "b"}')
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("no run")
    compare([tmp_path], tmp_path, "naive")
    said = capsys.readouterr().out
    assert "3 strategies in 1 setting" in said
    for words in ("1 folder left out: failed", "1 folder left out: interrupted", "1 folder left out: run to choose values by (tuning)"):
        assert words in said
    assert "1 folder left out: without a result yet" in said and "7 folders left out: not readable as a run" in said
    page = (tmp_path / "compare.html").read_text()
    assert "no &lt;b&gt;luck&lt;/b&gt;" in page and "<b>luck" not in page and "(1 fake-quantized)" in page
    (static,) = cells(tmp_path, variant="static")
    assert static["without_integer_accuracy"] == "1" and static["seconds_per_step"] == ""
    assert len(rows(tmp_path / "compare.csv")) == 14 and not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"version": 1, "jitter": {"steps": [1, 2], "layers": {"a": [0.1]}}, "filters": {"a": {"after": []}}}',
        '{"jitter": {"steps": [2, 1], "layers": {"a": [0.1, 0.2]}}, "ranges": {"steps": [1], "tensors": {"a": 3}}, "alone": {"a": null}}',
        '{"jitter": {"steps": [1, 2], "layers": {"a": [null, 0.0]}}, "filters": {"$a<": {"after": [0.0, 0.0], "before": ["x"]}}}',
        '{"ranges": {"steps": [1], "tensors": {"a": {"scale_low": [0], "scale_high": [0], "low": [null], "high": [null]}}}}',
        '{"filters": {"a": {"after": [0.0, 1.0, NaN]}}, "alone": {"a": -0.1}, "jitter": {"steps": [0], "layers": {"a": [0]}}}',
    ],
)
def test_odd_layers_cost_at_most_their_plots(tmp_path, content):
    folder = run_of(tmp_path, "naive", 0, 0.9)
    (folder / "layers.json").write_text(content)
    (folder / "metrics.csv").write_text("step,val_acc\n1,0.5\n2,\nx,0.5\n3,0.6\n4")
    compare([tmp_path], tmp_path, None)
    page = (tmp_path / "compare.html").read_text()
    assert "Validation accuracy against optimizer step" in page and "Left out, as no layers.json has the numbers: " in page


@pytest.mark.parametrize("name, content", [("layers.json", '{"jitter": {"steps": [1,'), ("metrics.csv", "\x00\x00"), ("layers.json", "")])
def test_damaged_files_are_named(tmp_path, capsys, name, content):
    a, b = run_of(tmp_path, "naive", 0, 0.9), run_of(tmp_path, "static", 0, 0.9)
    (b / name).write_text(content)
    compare([tmp_path], tmp_path, None)
    told = f"Damaged, and not drawn: {name} of {b}."
    assert told in capsys.readouterr().out and told in (tmp_path / "compare.html").read_text()
    (b / name).unlink()
    compare([tmp_path], tmp_path, None)
    assert "Damaged" not in capsys.readouterr().out and a.is_dir()


def test_runs_from_before_a_key_was_there(tmp_path):
    new, old = run_of(tmp_path, "static", 0, 0.9, ptq__equalize=False), run_of(tmp_path, "static", 1, 0.8)
    assert "ptq" in yaml.safe_load((new / "config.yaml").read_text()) and "ptq" not in yaml.safe_load((old / "config.yaml").read_text())
    compare([tmp_path], tmp_path, None)
    (cell,) = cells(tmp_path)
    assert cell["seeds"] == "2" and float(cell["accuracy"]) == pytest.approx(0.85)


MORE_SETTINGS = [*SETTINGS, (8, 4, False), (2, 8, True), (6, 6, False), (3, 8, True)]


def test_two_hundred_runs(tmp_path):
    write_comparison(tmp_path, STRATEGIES, MORE_SETTINGS, (0, 1, 2), layers=[])
    for seed in range(8):
        run_of(tmp_path, "static", seed, 0.9, data__augment="shift")
    compare([tmp_path], tmp_path, "bn_correction")
    assert len(rows(tmp_path / "compare.csv")) == 200 and len(cells(tmp_path)) == 65
    page = (tmp_path / "compare.html").read_text()
    assert page.count('aria-label="Test accuracy with intervals') == 9 and page.count('aria-label="Validation accuracy against') == 8
    assert "No finished run of bn_correction, so nothing is compared: W8A8 per tensor, data.augment shift." in page


@pytest.mark.slow
def test_two_hundred_runs_with_their_layers_make_a_page_that_opens_on_a_phone(tmp_path):
    write_comparison(tmp_path, STRATEGIES, MORE_SETTINGS, (0, 1, 2))
    compare([tmp_path], tmp_path, "bn_correction")
    page = (tmp_path / "compare.html").read_text()
    assert len(page.encode()) < 15e6 and page.count("<details") >= 8 * 4


def test_plots_of_layers_stop_before_the_page_is_too_long(tmp_path, monkeypatch):
    write_comparison(tmp_path, ("naive", "static"), SETTINGS[:3], (0,), layers=["a", "b"])
    compare([tmp_path], tmp_path, None)
    assert "compare fewer folders" not in (tmp_path / "compare.html").read_text()
    monkeypatch.setattr("qat.report.compare_sections.MOST_FOLDED", 1)
    compare([tmp_path], tmp_path, None)
    page = (tmp_path / "compare.html").read_text()
    assert page.count("The first 1 of 3 settings; compare fewer folders to see the others.") == 4
    assert page.count('aria-label="Weight jitter') == 3 and page.count('aria-label="Signal to quantization noise') == 1


def test_the_results_that_are_kept(tmp_path, capsys):
    assert main([str(ROOT / "docs" / "results"), "--out", str(tmp_path)]) == 0
    kept = [path for path in (ROOT / "docs" / "results").rglob("result.json") if not json.loads(path.read_text()).get("tuning")]
    assert sum(row["used"] == "yes" for row in rows(tmp_path / "compare.csv")) == len(kept)
    assert "nothing is compared" in capsys.readouterr().out


def test_a_baseline_without_a_finished_run_is_a_gap(tmp_path, capsys):
    run_of(tmp_path, "naive", 0, 0.9)
    run_of(tmp_path, "static", 0, 0.9)
    run_of(tmp_path, "bn_correction", 0, 0.9, result_status="failed", result_error="out of memory")
    compare([tmp_path], tmp_path, "bn_correction")
    assert "No finished run of bn_correction, so nothing is compared: W8A8 per tensor." in capsys.readouterr().out


def refused(capsys, *words):
    assert main([str(word) for word in words]) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert not said.out
    return line


def test_no_runs(tmp_path, capsys):
    assert "found no run; expected a finished run. Give folders under runs/." in refused(capsys, tmp_path)
    assert "nowhere: found no folder" in refused(capsys, tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_only_failed_runs(tmp_path, capsys):
    run_of(tmp_path, "naive", 0, 0.9, result_status="failed", result_error="RuntimeError: no luck")
    line = refused(capsys, tmp_path)
    assert "none that finished among 1" in line and "(failed: RuntimeError: no luck)" in line and "train.log" in line


def test_unknown_names_have_a_closest_match(tmp_path, capsys):
    run_of(tmp_path, "naive", 0, 0.9)
    assert "Did you mean 'naive'?" in refused(capsys, tmp_path, "--baseline", "naiv")
    assert "Did you mean 'optim.lr'" in refused(capsys, tmp_path, "--by", "optim.rl")
    assert not (tmp_path / "compare.csv").exists()


def test_seeds_are_not_compared(tmp_path, capsys):
    run_of(tmp_path, "naive", 0, 0.9)
    assert main([str(tmp_path), "--by", "seed"]) == 2 and "runs of several seeds" in capsys.readouterr().err


def test_a_group_of_keys_is_compared_by_its_name(tmp_path, capsys):
    for seed in range(2):
        for name, lr in (("sgd", 0.1), ("adam", 0.001)):
            run_of(tmp_path, "static", seed, 0.9, optim__name=name, optim__lr=lr)
    assert main([str(tmp_path), "--by", "optim", "--baseline", "sgd"]) == 0
    assert "2 values of optim.name in 1 setting" in capsys.readouterr().out
    assert [row["verdict"] for row in cells(tmp_path, variant="optim.name adam")] == ["no difference found"]
    assert main([str(tmp_path), "--by", "optm"]) == 2 and "optim" in capsys.readouterr().err


def sweep_of_runs(root, over, tune, baseline, runs):
    """A sweep's folder: `runs` are (strategy, seed, accuracy, changes)."""
    jobs = root / "jobs"
    for strategy, seed, accuracy, changes in runs:
        run_of(jobs, strategy, seed, accuracy, **changes)
    content = {"recipe": "mine", "words": [], "over": over, "tune": tune, "baseline": baseline, "run_root": "runs"}
    (root / "sweep.yaml").write_text(yaml.safe_dump(content))
    return root


def test_what_a_sweep_tuned_counts_for_its_own_runs_alone(tmp_path, capsys):
    """Its cells are told apart by nothing it chose; a plain run with another rate is in a setting of its own."""
    over = {"fold": ["naive", "static"], "seed": [0, 1]}
    rates = {"naive": 0.03, "static": 0.01}
    chosen = [(fold, seed, 0.9, {"optim__lr": lr}) for fold, lr in rates.items() for seed in (0, 1)]
    sweep = sweep_of_runs(tmp_path / "mine" / "a", over, {"optim.lr": [0.01, 0.03]}, "static", chosen)
    other = [(fold, seed, 0.8, {"optim__lr": 0.5}) for fold in rates for seed in (0, 1)]
    second = sweep_of_runs(tmp_path / "mine" / "b", over, {"optim.lr": [0.1, 0.5]}, "static", other)
    plain = run_of(tmp_path / "plain", "static", 0, 0.7, optim__lr=0.02)
    for folder in (sweep, sweep / "jobs", tmp_path / "mine" / "a"):  # also from inside
        compare([folder], tmp_path / "out", None)
        assert {row["setting"] for row in cells(tmp_path / "out")} == {"W8A8 per tensor"}
    assert main([str(sweep), str(second), str(plain), "--out", str(tmp_path / "out")]) == 0
    found = cells(tmp_path / "out")
    assert len(found) == 5 and "left out" not in capsys.readouterr().out
    assert {(row["setting"].partition("optim.lr ")[2], row["seeds"]) for row in found} >= {("0.02", "1")}
    assert len({row["setting"] for row in found}) == 3


def test_a_tuned_key_of_the_compared_group_does_not_split_it(tmp_path):
    over = {"optim": ["sgd", "adam"], "quant": ["a", "b"], "seed": [0]}
    rates = {("sgd", 0): 0.1, ("sgd", 1): 0.2, ("adam", 0): 0.001, ("adam", 1): 0.002}
    runs = [("static", 0, 0.9, {"optim__name": name, "optim__lr": lr, "setting": SETTINGS[i]}) for (name, i), lr in rates.items()]
    sweep = sweep_of_runs(tmp_path / "mine" / "a", over, {"optim.lr": [0.1, 0.2, 0.001, 0.002]}, None, runs)
    compare([sweep], tmp_path / "out", "sgd")
    assert {row["variant"] for row in cells(tmp_path / "out")} == {"optim.name sgd", "optim.name adam"}


def test_the_baseline_of_a_sweep_may_have_no_run_and_be_any_number(tmp_path, capsys):
    over = {"optim.lr": [1, 0.5], "seed": [0, 1]}
    runs = [("static", seed, 0.9, {"optim__lr": lr}) for lr in (1.0, 0.5) for seed in (0, 1)]
    sweep = sweep_of_runs(tmp_path / "mine" / "a", over, {}, 1, runs)
    compare([sweep], tmp_path / "out", None)
    assert {row["baseline"] for row in cells(tmp_path / "out")} == {"optim.lr 1.0"}
    sweep = sweep_of_runs(tmp_path / "mine" / "b", {"optim.lr": [0.1, 0.2]}, {}, 0.2, [("static", 0, 0.9, {"optim__lr": 0.1})])
    compare([sweep], tmp_path / "out", None)
    assert "note: no finished run of 0.2" in capsys.readouterr().out
    (sweep / "sweep.yaml").write_text("over: [")
    compare([sweep], tmp_path / "out", None)
    assert "sweep.yaml: a file that cannot be read" in capsys.readouterr().err


def test_grids_that_are_compared_do_not_name_the_setting(tmp_path):
    over = {"fold": ["static"], "quant": ["a", "b", "c"]}
    sweep = sweep_of_runs(tmp_path / "mine" / "a", over, {}, None, [("static", 0, 0.9, {"setting": s}) for s in SETTINGS[:3]])
    compare([sweep], tmp_path / "out", None)
    found = cells(tmp_path / "out")
    assert {row["setting"] for row in found} == {"all grids"} and len({row["variant"] for row in found}) == 3


def test_one_seed_does_not_say_whether_seeds_follow_it(tmp_path):
    """A sweep that stopped after the first seed of one strategy."""
    for strategy, seed in (("naive", 0), ("static", 0), ("static", 1)):
        run_of(tmp_path, strategy, seed, 0.9, float_training__seed=0, data__split_seed=0)
    assert into_cells(read_runs([tmp_path], {})[0]).settings == ["W8A8 per tensor"]
    run_of(tmp_path, "frozen", 1, 0.9, float_training__seed=1, data__split_seed=1)  # from another float network
    assert len(into_cells(read_runs([tmp_path], {})[0]).settings) == 2


def test_float_networks_of_several_kinds_have_no_interval(tmp_path):
    for seed in range(2):
        for width, value in ((0.25, 0.9), (0.5, 0.96)):
            run_of(tmp_path, "static", seed, 0.9, model__options={"width": width}, result_accuracy={"float": value, "integer": 0.9})
    compare([tmp_path], tmp_path, None, ["model.options.width"])
    page = (tmp_path / "compare.html").read_text()
    assert "0.9000 to 0.9600" in page and "0.9300" not in page


def test_one_variant_of_several_seeds_has_nothing_to_be_compared_with(tmp_path, capsys):
    for seed in range(2):
        run_of(tmp_path, "static", seed, 0.9)
    compare([tmp_path], tmp_path, "static")
    said = capsys.readouterr().out
    assert "One variant alone" in said and "two seeds that both have" not in said


def test_out_that_cannot_be_written_to(tmp_path, capsys):
    run_of(tmp_path, "naive", 0, 0.9)
    (tmp_path / "file").write_text("in the way")
    line = refused(capsys, tmp_path, "--out", tmp_path / "file")
    assert f"--out {tmp_path / 'file'}: found a file; expected a folder" in line and "Give --out FOLDER." in line


def test_links_and_repeated_folders_count_once(tmp_path):
    run_of(tmp_path / "runs", "naive", 0, 0.9)
    os.symlink(tmp_path / "runs", tmp_path / "runs" / "naive_0" / "loop")
    os.symlink(tmp_path / "runs", tmp_path / "again")
    runs, left = read_runs([tmp_path / "runs", tmp_path / "runs" / "naive_0", tmp_path / "again"], {})
    assert len(runs) == 1 and not left


def test_a_page_that_cannot_be_replaced_is_left_whole(tmp_path, monkeypatch):
    run_of(tmp_path, "naive", 0, 0.9)
    compare([tmp_path], tmp_path, None)
    before = (tmp_path / "compare.html").read_text()
    monkeypatch.setattr("qat.report.compare_page.sections", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compare([tmp_path], tmp_path, None)
    assert (tmp_path / "compare.html").read_text() == before


def test_the_head_of_the_page(tmp_path):
    folder = run_of(tmp_path, "static", 0, 0.9)
    env = json.loads((folder / "env.json").read_text())
    (folder / "env.json").write_text(json.dumps({**env, "git": {"commit": "f" * 40, "dirty": True}}))
    shutil.copytree(run_of(tmp_path, "naive", 0, 0.9), tmp_path / "other")
    (tmp_path / "other" / "env.json").unlink()
    (tmp_path / "other" / "config.yaml").write_text(yaml.safe_dump(config("frozen")))
    compare([tmp_path], tmp_path, None)
    page = (tmp_path / "compare.html").read_text()
    assert "ffffffffffff with changes (1 run)" in page and "not recorded (1 run)" in page and "a &lt;processor&gt;, cpu" in page
    assert "model.name mobilenetv1, data.name digits" in page and "torch 2.9.0, onnxruntime 1.20.0" in page
    assert "python train.py recipe=compare_fold" in page and "fold.name=static" in page
    assert "http" not in page.replace("http://www.w3.org", "").replace("http-equiv", "") and "<script" not in page


def test_a_resumed_run_tells_no_seconds_per_step(tmp_path):
    """Its seconds are those of the last process, its steps those of the whole run."""
    write_run(tmp_path / "whole", strategy="static", seed=0)
    write_run(tmp_path / "resumed", strategy="static", seed=1)
    (tmp_path / "resumed" / "env_resumed_2026-01-01_00-00-00_000000.json").write_text("{}")
    runs = {run.folder.name: run for run in read_runs([tmp_path], {})[0]}
    assert seconds_per_step(runs["whole"]) > 0 and seconds_per_step(runs["resumed"]) is None
