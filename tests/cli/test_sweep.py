"""A sweep recipe, with jobs that are only recorded: which run, how one goes on, what is chosen, and what is refused."""

import csv
import json
import re
import shlex
import sys
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

import qat.cli.compare
from qat.cli.train import main
from qat.errors import ConfigError
from qat.report.compare_runs import read_runs
from qat.report.result import identity, read_result, write_result

MINI = """# what: two strategies
defaults: [base/mbv1]
float_training: {seed: 0}
sweep:
  over: {fold: [naive, static], seed: [0, 1]}
  baseline: static
"""
ALL = ["naive seed 0", "static seed 0", "naive seed 1", "static seed 1"]


@pytest.fixture
def sweep(here, jobs, write_recipe, monkeypatch):
    """Recipe `mini` and jobs that leave a result. `sweep.act` may fail, `sweep.score` gives the validation accuracy.

    `sweep.compared` are the runs that count in each comparison, `sweep.compare` makes one."""
    write_recipe("mini", MINI)
    jobs.score, jobs.compared = (lambda config: 0.5), []

    def run_job(config, run_dir):
        jobs.seen.append((config, run_dir))
        jobs.act(config)
        accuracy = {"float": 0.9, "ptq": 0.8, "fake_quant": 0.85, "integer": 0.85}
        measured = {"accuracy": accuracy, "validation": jobs.score(config), "seconds": {"float": 1.0, "qat": 59.0}}
        result = {"status": "ok", **identity(config), **measured}
        write_result(run_dir, result)
        return result

    monkeypatch.setitem(sys.modules, "qat.train.job", SimpleNamespace(run_job=run_job, check_job=lambda config: jobs.check(config)))
    jobs.compare = qat.cli.compare.compare

    def compare(folders, out, baseline):
        assert folders == [out] and baseline is None
        jobs.compared.append([run.folder for run in read_runs(folders, {})[0]])

    monkeypatch.setattr("qat.cli.compare.compare", compare)
    return jobs


def ran(sweep):
    """Labels of the jobs that ran since the last call."""
    labels = [f"{config['fold']['name']} seed {config['seed']}" for config, _ in sweep.seen]
    sweep.seen.clear()
    return labels


def folder_of(here, recipe="mini"):
    (folder,) = (here / "runs" / recipe).iterdir()
    return folder.relative_to(here)


def failing(*labels, error=RuntimeError):
    def act(config):
        if f"{config['fold']['name']} seed {config['seed']}" in labels:
            raise error("no memory")

    return act


# ---- what runs, and where


def test_every_combination_runs_in_a_folder_of_the_sweep(here, sweep, capsys):
    assert main(["recipe=mini"]) == 0
    folder = folder_of(here)
    names = [path.relative_to(folder).as_posix() for _, path in sweep.seen]
    assert names == ["jobs/naive-seed0", "jobs/static-seed0", "jobs/naive-seed1", "jobs/static-seed1"]
    assert all(config["float_training"]["seed"] == 0 and config["recipe"] == "mini" for config, _ in sweep.seen)
    for config, path in sweep.seen:
        assert OmegaConf.to_container(OmegaConf.load(path / "config.yaml")) == config
        assert (path / "env.json").is_file() and (path / "train.log").is_file()
    swept = OmegaConf.to_container(OmegaConf.load(folder / "sweep.yaml"))
    assert swept["over"] == {"fold": ["naive", "static"], "seed": [0, 1]} and swept["recipe"] == "mini"
    lines = capsys.readouterr().out.splitlines()
    said = [line for line in lines if line.startswith("job ")]
    assert said[0] == "job 1 of 4, naive seed 0, time left not known yet" and said[3] == "job 4 of 4, static seed 1, about 1 min left"
    assert lines[-1] == "4 of 4 jobs ok"
    assert sweep.compared == [sorted(path for _, path in sweep.seen)]


def test_jobs_are_quiet_but_for_their_log_and_errors(here, sweep, capsys):
    import logging

    def act(config):
        logging.getLogger("qat.train").info("an epoch")
        print("printed")
        failing("static seed 0")(config)

    sweep.act = act
    assert main(["recipe=mini"]) == 1
    said = capsys.readouterr()
    assert "an epoch" not in said.out and "printed" not in said.out and "Traceback" not in said.err
    assert said.err.startswith("error: RuntimeError: no memory")
    log = folder_of(here) / "jobs" / "naive-seed0" / "train.log"
    assert "an epoch" in log.read_text()
    assert main(["recipe=mini", "sweep.new=true", "sweep.verbose=true"]) == 1
    assert "an epoch" in capsys.readouterr().out


def test_a_single_job_is_not_quiet(sweep, capsys):
    import logging

    sweep.act = lambda config: logging.getLogger("qat.train").info("an epoch")
    assert main(["recipe=mini", "seed=0", "fold=static"]) == 0
    assert ran(sweep) == ["static seed 0"] and "an epoch" in capsys.readouterr().out


def test_any_key_or_group_can_be_swept(sweep, write_recipe):
    over = "{optim.name: [sgd, adam], fold.freeze: [null, 0.5, 100], model.options: [{width: 0.25}, {width: 0.5}]}"
    write_recipe("mine", f"defaults: [base/mbv1]\nseed: 3\nsweep: {{over: {over}}}\n")
    assert main(["recipe=mine"]) == 0
    found = [(c["optim"]["name"], c["fold"]["freeze"], c["model"]["options"]["width"], c["seed"]) for c, _ in sweep.seen]
    assert found == [(name, freeze, width, 3) for name in ("sgd", "adam") for freeze in (None, 0.5, 100) for width in (0.25, 0.5)]
    assert sweep.seen[0][1].name.startswith("optim.name=sgd-fold.freeze=null-model.options=")


def test_what_depends_on_the_seed_is_composed_for_each(sweep, write_recipe):
    write_recipe("mine", "defaults: [base/mbv1]\noptim: {lr: '${seed}'}\nsweep: {over: {seed: [1, 2]}}\n")
    assert main(["recipe=mine"]) == 0
    assert [config["optim"]["lr"] for config, _ in sweep.seen] == [1.0, 2.0]


def test_a_sweep_builds_on_another_and_null_takes_a_key_out(sweep, write_recipe):
    write_recipe("wider", "defaults: [mini]\nsweep: {over: {seed: null, quant: [w8a8_per_tensor, w4a8_per_tensor]}, baseline: naive}\n")
    assert main(["recipe=wider"]) == 0
    assert [path.name for _, path in sweep.seen] == [
        f"{fold}-{bits}" for fold in ("naive", "static") for bits in ("w8a8_per_tensor", "w4a8_per_tensor")
    ]
    sweep.seen.clear()
    write_recipe("one", "defaults: [mini]\nsweep: null\n")
    assert main(["recipe=one"]) == 0
    assert len(sweep.seen) == 1 and sweep.seen[0][1].parent.name == "one"


# ---- the command line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["seed=2,3"], ["naive seed 2", "static seed 2", "naive seed 3", "static seed 3"]),
        (["seed=range(5,7)", "fold=static"], ["static seed 5", "static seed 6"]),
        (["sweep.over.seed=[4]", "sweep.over.fold=[frozen,naive]"], ["frozen seed 4", "naive seed 4"]),
        (["sweep.over={fold:[frozen],seed:[7]}"], ["frozen seed 7"]),
        (["~sweep.over.fold"], ["bn_correction seed 0", "bn_correction seed 1"]),
        (["~sweep.over.seed", "fold=glob(s*)"], ["scale_merge seed 0", "single_pass seed 0", "static seed 0"]),
        (["seed=1", "optim.lr=0.1,0.2"], ["naive seed 1", "naive seed 1", "static seed 1", "static seed 1"]),
        (["seed=1", "fold.freeze=7", "trainer.max_epochs=1"], ["naive seed 1", "static seed 1"]),
    ],
)
def test_forms_of_the_command_line(sweep, words, expected):
    assert main(["recipe=mini", *words]) == 0
    for config, _ in sweep.seen:
        if "fold.freeze=7" in words:
            assert config["fold"]["freeze"] == 7 and config["trainer"]["max_epochs"] == 1
    if "optim.lr=0.1,0.2" in words:
        assert [config["optim"]["lr"] for config, _ in sweep.seen] == [0.1, 0.2, 0.1, 0.2]
    assert ran(sweep) == expected


def comparison_of(sweep, folder):
    """Rows of the comparison that `compare.py SWEEP_DIR` makes: {variant, setting}: row."""
    sweep.compare([folder], folder, None)
    with (folder / "compare_cells.csv").open(newline="") as file:
        return {(row["variant"], row["setting"]): row for row in csv.DictReader(file)}


def test_a_baseline_that_is_not_swept_is_said_and_not_used(here, sweep, capsys):
    assert main(["recipe=mini", "fold=naive,frozen"]) == 0
    assert "note: static is not among what is compared" in capsys.readouterr().out
    found = comparison_of(sweep, folder_of(here))
    assert {row["baseline"] for row in found.values()} == {"naive"}


def test_the_comparison_is_with_the_baseline_of_the_recipe(here, sweep, capsys):
    assert main(["recipe=mini", "sweep.baseline=naive"]) == 0
    found = comparison_of(sweep, folder_of(here))
    assert {key: row["verdict"] for key, row in found.items()}[("naive", "W8A8 per channel")] == "baseline"
    assert "note:" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "values", "baseline", "others"),
    [
        ("optim.name", ("sgd", "adam"), "sgd", ["optim.name adam"]),
        ("optim.weight_decay", (0.0, 0.1), "0.1", ["optim.weight_decay 0.0"]),
        ("optim", ("sgd", "adam"), "null", ["optim.name adam"]),
        ("quant", ("w8a8_per_tensor", "w4a8_per_channel"), "null", ["quant.weight.bits 4"]),
    ],
)
def test_a_sweep_over_something_else_compares_that(here, sweep, write_recipe, key, values, baseline, others):
    text = MINI.replace("fold: [naive, static]", f"{key}: [{values[0]}, {values[1]}]")
    write_recipe("mini", text.replace("baseline: static", f"baseline: {baseline}"))
    assert main(["recipe=mini"]) == 0
    found = comparison_of(sweep, folder_of(here))
    verdicts = {variant: row["verdict"] for (variant, _), row in found.items()}
    assert set(others) < set(verdicts) and sorted(verdicts.values()) == ["baseline", "no difference found"]
    assert baseline == "null" or verdicts[others[0]] != "baseline"
    assert len(found) == 2 and len({setting for _, setting in found}) == 1 and {row["seeds"] for row in found.values()} == {"2"}


def test_values_chosen_for_a_cell_make_no_settings(here, sweep, write_recipe):
    """Learned weight ranges are better for naive, min-max for static."""
    write_recipe("mini", MINI.replace("baseline", "tune: {quant.weight.range: [minmax, lsq]}\n  baseline"))
    sweep.score = lambda config: float((config["quant"]["weight"]["range"] == "lsq") == (config["fold"]["name"] == "naive"))
    assert main(["recipe=mini"]) == 0
    found = comparison_of(sweep, folder_of(here))
    assert {variant: row["quant.weight.range"] for (variant, _), row in found.items()} == {"naive": "lsq", "static": "minmax"}
    assert {setting for _, setting in found} == {"W8A8 per channel"} and {row["seeds"] for row in found.values()} == {"2"}
    page = (folder_of(here) / "compare.html").read_text()
    assert "2 folders left out: run to choose values by (tuning)." in page


def test_jobs_of_a_resumed_sweep_say_what_starts_it(here, sweep):
    sweep.act = failing("naive seed 1", error=KeyboardInterrupt)
    assert main(["recipe=mini", "optim.lr=0.5"]) == 130
    sweep.act = lambda config: None
    folder = folder_of(here)
    assert main([f"resume={folder}"]) == 0
    command = json.loads((folder / "jobs" / "static-seed1" / "env.json").read_text())["command"]
    words = shlex.split(command)[1:]
    assert words[:2] == ["recipe=mini", "optim.lr=0.5"] and not any(word.startswith("resume") for word in words)
    sweep.seen.clear()
    assert main([*words, "sweep.new=true"]) == 0 and ran(sweep) == ALL


def test_cfg_prints_the_configuration_of_every_job(here, sweep, capsys):
    assert main(["recipe=mini", "run_root=elsewhere", "--cfg", "job"]) == 0
    printed = [OmegaConf.create(text) for text in capsys.readouterr().out.split("---\n")]
    assert [f"{config.fold.name} seed {config.seed}" for config in printed] == ALL
    assert {config.run_root for config in printed} == {"elsewhere"} and not sweep.seen and not (here / "elsewhere").exists()


def test_the_table_says_all_or_how_many(sweep, capsys):
    assert main([]) == 2
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert " all " in rows["compare_fold"] and " 2 of them" in rows["mini"]


@pytest.mark.parametrize(
    ("section", "where", "hint"),
    [
        ("3", "sweep", "a mapping with over, tune, baseline"),
        ("{over: {folds: [naive]}}", "sweep.over.folds", "'fold'"),
        ("{over: {fold: [niave]}}", "sweep.over.fold", "'naive'"),
        ("{over: {fold: []}}", "sweep.over.fold", "an empty list"),
        ("{over: {fold: naive}}", "sweep.over.fold", "a list of values"),
        ("{over: {seed: [0, 1, 0]}}", "sweep.over.seed", "0 twice"),
        ("{over: {seed: [a]}}", "sweep.over.seed", "whole numbers"),
        ("{over: {optim.lrr: [0.1]}}", "sweep.over.optim.lrr", "'lr'"),
        ("{over: {run_root: [a, b]}}", "sweep.over.run_root", "where or what"),
        ("{over: {recipe: [a, b]}}", "sweep.over.recipe", "where or what"),
        ("{over: {hydra/launcher: [a]}}", "sweep.over.hydra/launcher", "where or what"),
        ("{over: [fold]}", "sweep.over", "a mapping of keys"),
        ("{tune: {optim.lr: [0.1]}}", "sweep.over", "at least one key"),
        ("{over: {optim.lr: [0.1]}, tune: {optim.lr: [0.1]}}", "sweep.tune.optim.lr", "in over too"),
        ("{over: {fold: [naive]}, tune: {seed: [1]}}", "sweep.tune.seed", "the seed"),
        ("{over: {fold: [naive]}, baseline: niave}", "sweep.baseline", "'naive'"),
        ("{over: {fold: [naive]}, tunes: {}}", "sweep.tunes", "'tune'"),
    ],
)
def test_a_bad_section_is_one_line_that_names_the_file(here, refused, write_recipe, section, where, hint):
    write_recipe("mine", f"defaults: [base/mbv1]\nsweep: {section}\n")
    (line,) = refused("recipe=mine")
    assert line.startswith(f"error: recipes/mine.yaml: {where}:") and hint in line


@pytest.mark.parametrize(
    ("words", "where", "hint"),
    [
        (["sweep.over.folds=[naive]"], "sweep.over.folds", "'fold'"),
        (["sweep.ovr.fold=[naive]"], "sweep.ovr.fold", "'over'"),
        (["fold=naive,niave"], "sweep.over.fold", "'naive'"),
        (["seed=0,0"], "sweep.over.seed", "0 twice"),
        (["sweep.over.seed=0"], "sweep.over.seed", "a list of values"),
        (["~sweep.over.quant"], "sweep.over.quant", "not swept"),
        (["~sweep.over"], "sweep.over", "at least one key"),
        (["sweep=3"], "sweep", "over"),
        (["sweep.retry=1"], "sweep.retry", "true or false"),
        (["sweep.baseline=[naive]"], "sweep.baseline", "naive"),
        (["optim.lr=-1"], "optim.lr", "0 or more"),
        (["optim.lr=0.1,-1"], "optim.lr", "0 or more"),
        (["seed=-1"], "seed", "from 0"),
        (["optm.lr=1"], "optm.lr", "'optim'"),
        (["fold.name=naive", "fold.freeze=null"], "sweep.over", "the same job as 'naive seed 0' and 'static seed 0'"),
        (["trainer.devices=2"], "trainer.devices", "1 in a sweep"),
        (["fold=scale_merge", "quant=w8a8_per_tensor"], "sweep.over", "no combination that can be built"),
        (["-m"], "-m", "Leave out -m"),
        (["-m", "recipe=mini,mbv1_static"], "-m", "Leave out -m"),
        (["recipe=mini,mbv1_static"], "recipe", "several values"),
        (["hydra/launcher=joblib"], "hydra.launcher", "no launcher"),
        (["-m", "hydra/launcher=joblib"], "hydra.launcher", "no launcher"),
        (["resume=nowhere", "sweep.retry=true"], "sweep.retry", "a recipe with a section sweep"),
    ],
)
def test_bad_words_are_one_line_and_no_run(refused, write_recipe, words, where, hint):
    write_recipe("mini", MINI)
    named = [] if any(word.startswith("recipe=") for word in words) else ["recipe=mini"]
    (line,) = refused(*named, *words)
    assert line.startswith(f"error: {where}:") and hint in line


def test_words_for_a_sweep_without_one(refused):
    (line,) = refused("recipe=mbv1_static", "sweep.over.seed=[0,1]")
    assert line.startswith("error: sweep.over.seed:") and "a recipe with a section sweep" in line


# ---- combinations that cannot be built


def test_impossible_combinations_are_said_first_and_left_out(sweep, capsys):
    assert main(["recipe=mini", "seed=0", "fold=static,scale_merge", "quant=w8a8_per_tensor,w8a8_per_channel"]) == 0
    assert [path.name for _, path in sweep.seen] == [
        "static-w8a8_per_tensor-seed0",
        "static-w8a8_per_channel-seed0",
        "scale_merge-w8a8_per_channel-seed0",
    ]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "not possible: scale_merge w8a8_per_tensor (quant.weight.per_channel: false with fold=scale_merge)"
    assert lines[-1] == "3 of 3 jobs ok; 1 combination not possible"


def test_a_network_that_no_job_could_use_is_refused_before_the_first(here, sweep, write_recipe, capsys):
    def check(config):
        checked.append(config["model"]["options"])
        if config["model"]["options"] == {"width": 0.5}:
            raise ConfigError("model", "a loop", "a network that can be captured", "Change it.")
        return "nothing can be folded"

    checked = []
    sweep.check = check
    assert main(["recipe=mini", "model.options={width:0.5},{width:0.25}"]) == 2
    assert "model: found a loop" in capsys.readouterr().err and not (here / "runs").exists() and len(checked) == 1
    assert main(["recipe=mini"]) == 0 and len(checked) == 2  # once, not for every job
    assert "note: nothing can be folded" in capsys.readouterr().out


# ---- going on


def test_a_failed_job_does_not_stop_the_others_and_is_run_again_when_asked(here, sweep, capsys):
    sweep.act = failing("static seed 0")
    assert main(["recipe=mini"]) == 1
    assert ran(sweep) == ALL
    folder = folder_of(here)
    assert read_result(folder / "jobs" / "static-seed0")["status"] == "failed"
    out = capsys.readouterr().out
    assert "job 3 of 4 (1 failed), naive seed 1" in out and "3 of 4 jobs ok, 1 failed" in out and "sweep.retry=true" in out
    assert len(sweep.compared[-1]) == 3
    sweep.act = lambda config: None
    for words in (["recipe=mini"], [f"resume={folder}"]):
        assert main(words) == 1 and ran(sweep) == []
    assert main([f"resume={folder}", "sweep.retry=true"]) == 0
    ((config, path),) = sweep.seen
    assert path == folder / "jobs" / "static-seed0" and config["resume"] == str(path) and ran(sweep) == ["static seed 0"]
    assert main(["recipe=mini"]) == 0 and ran(sweep) == []


@pytest.mark.parametrize("again", ["the same command", "resume"])
def test_an_interrupted_sweep_goes_on_where_it_stopped(here, sweep, capsys, again):
    sweep.act = failing("naive seed 1", error=KeyboardInterrupt)
    assert main(["recipe=mini", "trainer.max_epochs=2"]) == 130
    assert ran(sweep) == ALL[:3]
    folder, out = folder_of(here), capsys.readouterr().out
    assert f"resume={folder}" in out and "2 of 4 jobs ok, 2 not done" in out and len(sweep.compared) == 1
    sweep.act = lambda config: None
    assert main(["recipe=mini", "trainer.max_epochs=2"] if again == "the same command" else [f"resume={folder}"]) == 0
    (first, stopped), (second, _) = sweep.seen
    assert stopped == folder / "jobs" / "naive-seed1" and first["resume"] == str(stopped) and second["resume"] is None
    assert first["trainer"]["max_epochs"] == 2 and ran(sweep) == ALL[2:] and folder_of(here) == folder
    assert "job 3 of 4, naive seed 1, about 2 min left" in capsys.readouterr().out


def test_an_interrupt_with_one_job_done_compares_nothing(sweep):
    sweep.act = failing("static seed 0", error=KeyboardInterrupt)
    assert main(["recipe=mini"]) == 130 and sweep.compared == []


def test_other_words_or_new_begin_another_sweep(here, sweep):
    assert main(["recipe=mini", "seed=0"]) == 0 and main(["recipe=mini", "seed=0", "optim.lr=0.5"]) == 0
    assert main(["recipe=mini", "seed=0"]) == 0 and len(sweep.seen) == 4
    assert main(["recipe=mini", "seed=0", "sweep.new=true"]) == 0 and len(sweep.seen) == 6
    assert len(list((here / "runs" / "mini").iterdir())) == 3


def test_a_wider_sweep_runs_only_what_is_new(here, sweep):
    assert main(["recipe=mini"]) == 0 and ran(sweep) == ALL
    folder = folder_of(here)
    assert main([f"resume={folder}", "seed=2,0,1"]) == 0 and ran(sweep) == ["naive seed 2", "static seed 2"]
    assert main([f"resume={folder}", "sweep.over.fold=[frozen,static,naive]"]) == 0
    assert ran(sweep) == ["frozen seed 0", "frozen seed 1", "frozen seed 2"]
    assert main([f"resume={folder}"]) == 0 and ran(sweep) == []
    swept = OmegaConf.to_container(OmegaConf.load(folder / "sweep.yaml"))["over"]
    assert swept == {"fold": ["naive", "static", "frozen"], "seed": [0, 1, 2]} and len(sweep.compared[-1]) == 9


def test_jobs_are_known_by_their_configuration_not_by_their_folder(here, sweep):
    assert main(["recipe=mini"]) == 0 and ran(sweep) == ALL
    root = folder_of(here) / "jobs"
    (root / "static-seed1").rename(root / "any name")
    assert main(["recipe=mini"]) == 0 and ran(sweep) == []
    assert root / "any name" in sweep.compared[-1]


@pytest.mark.parametrize(
    ("words", "where", "hint"),
    [
        (["seed=0"], "sweep.over.seed", "values without 1"),
        (["seed=2"], "sweep.over.seed", "values without 0, 1"),
        (["fold=naive"], "sweep.over.fold", "values without static"),
        (["optim.lr=0.1,0.2"], "sweep.over", "other keys to sweep over (optim.lr)"),
        (["sweep.tune.optim.lr=[0.1]"], "sweep.tune", "other keys"),
        (["trainer.max_epochs=7"], "resume", "other values of trainer.max_epochs"),
        (["quant=w4a8_per_tensor"], "resume", "other values of quant.weight.bits"),
        (["recipe=compare_fold"], "resume", "other values of recipe"),
        (["run_root=elsewhere"], "resume", "other values of run_root"),
        (["-m"], "-m", "Leave out"),
        (["sweep.new=true"], "sweep.new", "true with resume"),
    ],
)
def test_other_settings_are_refused_on_resume(here, sweep, capsys, words, where, hint):
    assert main(["recipe=mini", "trainer.max_epochs=2"]) == 0
    ran(sweep)
    capsys.readouterr()
    before = {path: path.read_bytes() for path in folder_of(here).rglob("*") if path.is_file()}
    assert main([f"resume={folder_of(here)}", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"error: {where}:") and hint in lines[0] and len(lines) == 1 and not sweep.seen
    assert before == {path: path.read_bytes() for path in folder_of(here).rglob("*") if path.is_file()}


def test_the_words_of_the_start_may_be_given_again(here, sweep):
    words = ["recipe=mini", "trainer.max_epochs=2", "quant=w4a8_per_tensor"]
    assert main(words) == 0 and ran(sweep) == ALL
    assert main([*words, "seed=0,1,2", f"resume={folder_of(here)}"]) == 0 and ran(sweep) == ["naive seed 2", "static seed 2"]


def test_a_recipe_that_changed_since_is_refused(here, sweep, write_recipe, capsys):
    assert main(["recipe=mini"]) == 0
    ran(sweep)
    write_recipe("mini", MINI + "optim: {lr: 0.3}\n")
    for words in (["recipe=mini"], [f"resume={folder_of(here)}"]):
        capsys.readouterr()
        assert main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "jobs/naive-seed0: found other values of optim.lr" in line and "sweep.new=true" in line and not sweep.seen


def test_two_processes_do_not_run_the_same_sweep(here, sweep, capsys):
    fcntl = pytest.importorskip("fcntl")
    assert main(["recipe=mini"]) == 0
    with open(folder_of(here) / ".lock") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert main(["recipe=mini", "sweep.retry=true"]) == 2
    assert "another process is running" in capsys.readouterr().err


def test_one_job_of_a_sweep_can_be_resumed_by_itself(here, sweep):
    sweep.act = failing("naive seed 0", error=KeyboardInterrupt)
    assert main(["recipe=mini"]) == 130
    sweep.seen.clear()
    sweep.act = lambda config: None
    job = folder_of(here) / "jobs" / "naive-seed0"
    assert main(["recipe=mini", f"resume={job}"]) == 0 and sweep.seen[0][1] == job and len(sweep.seen) == 1


def test_a_moved_sweep_writes_beside_itself(here, sweep, monkeypatch):
    sweep.act = failing("static seed 0", error=KeyboardInterrupt)
    assert main(["recipe=mini"]) == 130
    moved = here / "theirs" / "sweep"
    moved.parent.mkdir()
    (here / folder_of(here)).rename(moved)
    ran(sweep)
    sweep.act = lambda config: None
    assert main(["resume=theirs/sweep"]) == 0
    assert {config["run_root"] for config, _ in sweep.seen} == {"theirs"} and ran(sweep) == ALL[1:]


def test_a_sweep_does_not_say_where_on_this_machine_to_write(here, sweep):
    """Every folder lies in /."""
    sweep.act = failing("static seed 0", error=KeyboardInterrupt)
    assert main(["recipe=mini"]) == 130
    ran(sweep)
    path = folder_of(here) / "sweep.yaml"
    path.write_text(path.read_text().replace("run_root: runs", "run_root: /"))
    sweep.act = lambda config: None
    assert main([f"resume={folder_of(here)}"]) == 0
    assert {config["run_root"] for config, _ in sweep.seen} == {"runs/mini"}


def test_a_changed_file_of_another_sweep_does_not_disturb(here, sweep):
    assert main(["recipe=mini", "seed=0"]) == 0
    (folder_of(here) / "sweep.yaml").write_text("[")
    assert main(["recipe=mini", "seed=0"]) == 0 and len(sweep.seen) == 4


def test_a_comparison_that_fails_does_not_cost_the_runs(sweep, monkeypatch, capsys):
    monkeypatch.setattr("qat.cli.compare.compare", lambda *arguments: 1 / 0)
    assert main(["recipe=mini"]) == 0
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith("warning: no comparison (ZeroDivisionError") and "4 of 4 jobs ok" in said.out


# ---- someone else's sweep


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda swept: {**swept, "words": ["model.name=${oc.env:HOME}"]}, "interpolation"),
        (lambda swept: {**swept, "words": ["run_root=/"]}, "run_root among its words"),
        (lambda swept: {**swept, "words": ["hydra.searchpath=[x]"]}, "hydra"),
        (lambda swept: {**swept, "words": [3]}, "no text"),
        (lambda swept: {**swept, "over": {"run_root": ["a"]}}, "where or what"),
        (lambda swept: {**swept, "over": 3}, "other content"),
        (lambda swept: {**swept, "words": ["model=python", "model.name=os:getcwd"]}, "not defined in the working directory"),
    ],
)
def test_its_file_is_read_as_data(here, sweep, capsys, change, hint):
    assert main(["recipe=mini"]) == 0
    folder = folder_of(here)
    swept = OmegaConf.to_container(OmegaConf.load(folder / "sweep.yaml"))
    (folder / "sweep.yaml").write_text(json.dumps(change(swept)))
    for path in (folder / "jobs").rglob("config.yaml"):
        path.unlink()
    ran(sweep)
    capsys.readouterr()
    assert main([f"resume={folder}"]) == 2 and not sweep.seen
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("error: ") for line in lines) and hint in lines[0]


# ---- tuning

TUNED = MINI.replace("baseline", "tune: {optim.lr: [0.1, 0.2, 0.4]}\n  baseline")


def best_at(**of_fold):
    return lambda config: 1 - abs(config["optim"]["lr"] - of_fold[config["fold"]["name"]])


def learning_rates(sweep):
    found = [(c["fold"]["name"], c["seed"], c["optim"]["lr"]) for c, _ in sweep.seen]
    sweep.seen.clear()
    return found


GRID = [("naive", 0, 0.1), ("naive", 0, 0.2), ("naive", 0, 0.4), ("static", 0, 0.1), ("static", 0, 0.2), ("static", 0, 0.4)]


@pytest.fixture
def tuned(sweep, write_recipe):
    write_recipe("mini", TUNED)
    sweep.score = best_at(naive=0.2, static=0.4)
    return sweep


def test_every_combination_gets_the_values_of_its_best_validation_accuracy(here, tuned, capsys):
    assert main(["recipe=mini"]) == 0
    assert learning_rates(tuned) == [*GRID, ("naive", 1, 0.2), ("static", 1, 0.4)]
    folder = folder_of(here)
    chosen = json.loads((folder / "tuned.json").read_text())
    assert {cell: entry["values"] for cell, entry in chosen.items()} == {"naive": {"optim.lr": 0.2}, "static": {"optim.lr": 0.4}}
    assert chosen["naive"]["validation"] == {"optim.lr=0.1": 0.9, "optim.lr=0.2": 1.0, "optim.lr=0.4": 0.8}
    counted = ["naive-seed0-optim.lr=0.2", "static-seed0-optim.lr=0.4", "naive-seed1-optim.lr=0.2", "static-seed1-optim.lr=0.4"]
    assert [path.name for path in tuned.compared[0]] == sorted(counted)
    marked = {path.name: read_result(path).get("tuning", False) for path in (folder / "jobs").iterdir()}
    assert {name for name, passed_over in marked.items() if not passed_over} == set(counted) and len(marked) == 8
    out = capsys.readouterr().out
    assert "naive: chosen optim.lr=0.2 by validation accuracy (optim.lr=0.1 0.9000, optim.lr=0.2 1.0000, optim.lr=0.4 0.8000)" in out
    assert out.count("(tuning)") == 4 and "job 7 of 8, naive seed 1 optim.lr=0.2" in out


def test_equal_accuracies_choose_the_first(tuned):
    tuned.score = lambda config: 0.5
    assert main(["recipe=mini"]) == 0
    assert learning_rates(tuned)[-2:] == [("naive", 1, 0.1), ("static", 1, 0.1)]


@pytest.mark.parametrize("stop", [pytest.param(i, marks=[] if i == 4 else pytest.mark.slow) for i in range(8)])
def test_tuning_goes_on_where_it_stopped(here, tuned, stop):
    def act(config):
        if len(tuned.seen) == stop + 1:
            raise KeyboardInterrupt

    tuned.act = act
    assert main(["recipe=mini"]) == 130
    whole = [*GRID, ("naive", 1, 0.2), ("static", 1, 0.4)]
    assert learning_rates(tuned) == whole[: stop + 1]
    tuned.act = lambda config: None
    counted = [path for path in (folder_of(here) / "jobs").glob("*/result.json") if json.loads(path.read_text()).get("accuracy")]
    counted = [path for path in counted if "tuning" not in json.loads(path.read_text())]
    assert len(counted) == (0 if stop < 3 else 1 if stop < 6 else stop - 4)  # of a cell nothing counts before its values are chosen
    assert len(tuned.compared) == (len(counted) > 1)
    assert main(["recipe=mini"]) == 0 and learning_rates(tuned) == whole[stop:]
    assert len(tuned.compared[-1]) == 4


def test_failed_tuning_jobs_are_no_choice(here, tuned, capsys):
    def act(config):
        if config["optim"]["lr"] == 0.2 or config["fold"]["name"] == "static":
            raise RuntimeError("no memory")

    tuned.act = act
    assert main(["recipe=mini"]) == 1
    assert learning_rates(tuned) == [*GRID, ("naive", 1, 0.1)]  # no value for static: its other seed is not run
    assert "4 failed, 1 not done" in capsys.readouterr().out
    chosen = json.loads((folder_of(here) / "tuned.json").read_text())
    assert chosen["static"]["values"] is None and chosen["naive"]["validation"]["optim.lr=0.2"] is None
    tuned.act = lambda config: None
    assert main(["recipe=mini", "sweep.retry=true"]) == 0
    # the better value, once it is there, is the one that counts
    assert learning_rates(tuned) == [GRID[1], *GRID[3:], ("naive", 1, 0.2), ("static", 1, 0.4)]
    assert read_result(folder_of(here) / "jobs" / "naive-seed1-optim.lr=0.1")["tuning"] is True
    assert len(tuned.compared[-1]) == 4


def test_a_wider_grid_chooses_again(here, tuned):
    tuned.score = best_at(naive=0.3, static=0.4)
    assert main(["recipe=mini", "seed=0"]) == 0 and learning_rates(tuned) == GRID
    assert main([f"resume={folder_of(here)}", "optim.lr=0.1,0.2,0.4,0.3", "seed=0,1"]) == 0
    assert learning_rates(tuned) == [("naive", 0, 0.3), ("static", 0, 0.3), ("naive", 1, 0.3), ("static", 1, 0.4)]


def test_values_to_tune_on_the_command_line(tuned):
    assert main(["recipe=mini", "seed=0", "fold=static", "optim.lr=0.5,0.6"]) == 0
    assert learning_rates(tuned) == [("static", 0, 0.5), ("static", 0, 0.6)]
    assert main(["recipe=mini", "seed=0", "fold=static", "sweep.tune={optim.name:[sgd,adam],optim.lr:[0.7]}"]) == 0
    assert [(c["optim"]["name"], c["optim"]["lr"]) for c, _ in tuned.seen] == [("sgd", 0.7), ("adam", 0.7)]


def test_cfg_of_a_tuned_sweep_prints_what_is_known_before(tuned, capsys):
    assert main(["recipe=mini", "--cfg", "job"]) == 0
    assert len(re.findall(r"^# .* seed 0 optim.lr=", capsys.readouterr().out, flags=re.MULTILINE)) == 6
