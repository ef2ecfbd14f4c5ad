"""Every recipe and every option of every group gives a valid configuration."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from qat.cli.compose import Composer
from qat.cli.folders import PACKAGE, packaged
from qat.cli.recipes import find_recipes, read_header, runnable, sweep_of
from qat.cli.sweep_plan import plan_of
from qat.cli.sweep_section import section_of
from qat.cli.table import strategy_of
from qat.cli.train import main
from qat.train.config import validate
from qat.train.float_model import cache_path
from qat.train.seeds import split_seed

RECIPES = find_recipes(packaged("recipes"))
NAMES = sorted(runnable(RECIPES))
STRATEGIES = {"naive", "moving_average", "frozen", "batch_renorm", "bn_correction", "single_pass", "static", "scale_merge"}
STUDY = ["compare_cifar_mbv1", "compare_cifar_mbv1_per_tensor", "compare_cifar_resnet18"]
OPTIONS = sorted((path.parent.name, path.stem) for path in packaged("configs").glob("*/*.yaml"))


@pytest.fixture(scope="module")
def composer():
    with Composer(RECIPES) as composer:
        yield composer


@pytest.mark.parametrize("name", NAMES)
def test_recipe_is_valid_and_is_what_its_header_and_the_table_say(composer, name):
    config = composer.compose([f"recipe={name}"])
    validate(config)
    assert config["recipe"] == name
    header = RECIPES[name].header
    assert set(header) == {"what", "why", "paper", "command", "measured"}
    assert header["command"] == f"python train.py recipe={name}"
    if sweep_of(name, RECIPES) is None:
        assert strategy_of(name, RECIPES) == config["fold"]["name"]


def test_sweeps_among_the_recipes():
    """Each wants a test of its jobs."""
    assert [name for name in NAMES if sweep_of(name, RECIPES) is not None] == [*STUDY, "compare_fold"]


def test_compare_fold_covers_every_strategy_from_one_float_network(composer):
    whole = section_of("compare_fold", sweep_of("compare_fold", RECIPES), composer)
    plan = plan_of(replace(whole, tune={}), composer)
    assert len(plan.jobs) == len(plan.cells) * len(plan.seeds) == 29 * 3
    assert len(plan.cells) * (2 + 2) == 116 and list(map(len, whole.tune.values())) == [2]  # as its header says
    assert {job.config["fold"]["name"] for job in plan.jobs.values()} == STRATEGIES
    assert len({cache_path(job.config) for job in plan.jobs.values()}) == 1
    assert {split_seed(job.config) for job in plan.jobs.values()} == {0}
    assert [cell for cell, _ in plan.impossible] == [f"scale_merge {bits}_per_tensor" for bits in ("w8a8", "w4a8", "w4a4")]


@pytest.mark.parametrize("name", STUDY)
def test_the_study_starts_every_job_from_one_float_network(composer, name):
    whole = section_of(name, sweep_of(name, RECIPES), composer)
    plan = plan_of(replace(whole, over={**whole.over, "fold": ["static"]}, tune={}), composer)
    assert not plan.impossible and len(plan.cells) == len(whole.over["quant"]) and plan.seeds == [0, 1, 2]
    assert len({cache_path(job.config) for job in plan.jobs.values()}) == 1
    assert {split_seed(job.config) for job in plan.jobs.values()} == {0}
    assert {job.config["ptq"]["equalize"] for job in plan.jobs.values()} == {name.endswith("mbv1_per_tensor")}
    assert STRATEGIES - set(whole.over["fold"]) == ({"scale_merge"} if name.endswith("per_tensor") else set())


@pytest.mark.parametrize("group, option", OPTIONS)
def test_group_option_is_valid(composer, group, option):
    asked = [f"{group}.name=mine:Net"] if "???" in (packaged("configs") / group / f"{option}.yaml").read_text() else []
    config = composer.compose(["recipe=mbv1_bncorr", f"{group}={option}", *asked])
    validate(config)
    if group == "fold":
        assert option.startswith(config["fold"]["name"])


@pytest.mark.parametrize(
    "network, strategies", [("mbv1", STRATEGIES), ("resnet18", STRATEGIES), ("mbv2", {"bn_correction", "static", "scale_merge"})]
)
def test_networks_have_their_strategies(network, strategies):
    assert {strategy_of(name, RECIPES) for name in NAMES if name.startswith(f"{network}_")} == strategies


def test_header_goes_on_over_indented_lines():
    assert read_header("# what: one\n#   two\n# why: three\n\n# paper: not in the header\n") == {"what": "one two", "why": "three"}


def test_no_recipe_prints_the_table(here, capsys):
    assert main([]) == 2
    printed = capsys.readouterr().out
    assert all(name in printed for name in NAMES)
    assert not any(here.iterdir())


def test_the_table_needs_no_torch(here):
    code = "import sys; from qat.cli.train import main; main([]); sys.exit(int('torch' in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)}, stdout=subprocess.DEVNULL, timeout=60
    )
    assert done.returncode == 0


def test_folders_inside_the_package_come_first(tmp_path):
    inside, beside = tmp_path / "qat" / "configs", tmp_path / "configs"
    (tmp_path / "qat").mkdir()
    beside.mkdir()
    assert packaged("configs", tmp_path / "qat") == beside
    inside.mkdir()
    assert packaged("configs", tmp_path / "qat") == inside
    with pytest.raises(FileNotFoundError, match="install qat again"):
        packaged("recipes", tmp_path / "qat")


def test_wheel_carries_what_packaged_looks_for():
    import tomllib

    project = Path(__file__).parents[2] / "pyproject.toml"
    carried = tomllib.loads(project.read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert carried == {"configs": "qat/configs", "recipes": "qat/recipes"}
