"""What the command line changes, and what it refuses."""

import pytest
from omegaconf import OmegaConf

from qat.cli.train import main

BASE = "recipe=mbv1_bncorr"


@pytest.fixture
def composed(here, capsys):
    """The configuration that a command line gives."""

    def run(*words):
        assert main([*words, "--cfg", "job"]) == 0
        return OmegaConf.to_container(OmegaConf.create(capsys.readouterr().out))

    return run


def test_groups_and_keys_on_the_command_line_win_over_the_recipe(composed):
    config = composed(
        "recipe=resnet18_w4a4_lsq", "fold=static", "quant=w4a8_per_tensor", "trainer.max_epochs=3", "seed=1", "optim.scale_lr=0.5"
    )
    assert config["fold"] == composed("recipe=mbv1_static")["fold"]
    assert (config["quant"]["weight"]["bits"], config["quant"]["activation"]["bits"]) == (4, 8)
    assert config["quant"]["weight"]["range"] == "minmax" and not config["quant"]["weight"]["per_channel"]
    assert (config["trainer"]["max_epochs"], config["seed"], config["optim"]["scale_lr"]) == (3, 1, 0.5)
    assert config["recipe"] == "resnet18_w4a4_lsq"


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_open_mappings_take_keys_the_recipe_lacks(composed, prefix):
    options = composed(BASE, f"{prefix}model.options.depth=2")["model"]["options"]
    assert options["depth"] == 2


@pytest.mark.parametrize("key", ["quant.range_search", "data.split_seed", "float_training.seed", "report.moments", "optim.scale_lr"])
def test_keys_that_the_options_chosen_leave_out_can_be_given(composed, key):
    value = composed("recipe=mbv1_bncorr", f"{key}=3")
    for part in key.split("."):
        value = value[part]
    assert value == 3


def test_open_mappings_are_given_whole(composed):
    config = composed(BASE, "quant.overrides={conv_stem:{weight:{bits:4}}}", "trainer.options={accumulate_grad_batches:2}")
    assert config["quant"]["overrides"] == {"conv_stem": {"weight": {"bits": 4}}}
    assert config["trainer"]["options"] == {"accumulate_grad_batches": 2}


def test_help_lists_groups(here, capsys):
    assert main(["--help"]) == 0
    assert "scale_merge" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, where, hint",
    [
        (["recipe=mbv1_bncor"], "recipe", "mbv1_bncorr"),
        ([BASE, "fold=statik"], "fold", "static"),
        ([BASE, "fold.name=niave"], "fold.name", "naive"),
        ([BASE, "folld=static"], "folld", "fold"),
        ([BASE, "quant=w4a8_per_tensr"], "quant", "w4a8_per_tensor"),
        ([BASE, "optim.lrr=1"], "optim.lrr", "lr"),
        ([BASE, "++optim.lrr=1"], "optim.lrr", "lr"),
        ([BASE, "quant.weight.bitts=4"], "quant.weight.bitts", "bits"),
        ([BASE, "seeed=1"], "seeed", "seed"),
        ([BASE, "seed.x=1"], "seed.x", "a key below a value"),
        ([BASE, "hydra.run.dir=x"], "hydra.run.dir", "run_root"),
        ([BASE, "optim.lr=fast"], "optim.lr", "a number"),
        ([BASE, "optim.lr=-1"], "optim.lr", "0 or more"),
        ([BASE, "quant.weight.bits=9"], "quant.weight.bits", "from 2 to 8"),
        ([BASE, "fold=scale_merge", "quant=w8a8_per_tensor"], "quant.weight.per_channel", "w8a8_per_channel"),
        ([BASE, "fold=batch_renorm", "fold.options.rmax=2"], "fold.options.rmax", "r_max"),
        ([BASE, "trainer.options.acumulate_grad_batches=2"], "trainer.options.acumulate_grad_batches", "accumulate_grad_batches"),
        ([BASE, "quant.weight.symmetric=false"], "quant.weight.symmetric", "symmetric weights"),
        ([BASE, "seed=0,1"], "seed", "-m"),
        ([BASE, "seed"], "command line", "KEY=VALUE"),
        ([BASE, "seed=["], "command line", "KEY=VALUE"),
        (["-m", BASE, "seed=0,1", "trainer.devices=2"], "trainer.devices", "sweep"),
        (["-m", BASE, "seed=0,1", "trainer.devices=auto"], "trainer.devices", "sweep"),
        (["-m", BASE, "seed=0,1", "trainer.options.devices=2"], "trainer.devices", "sweep"),
        (["-m", "recipe=mbv1_bncorr,mbv1_statik"], "recipe", "mbv1_static"),
        (["-m", "resume=runs/x"], "resume", "-m"),
        ([BASE, "resume=nowhere"], "resume", "runs/RECIPE/TIMESTAMP"),
        (["mbv1_bncorr"], "command line", "recipe=mbv1_bncorr"),
        (["seed=1"], "command line", "lists the recipes"),
    ],
)
def test_bad_input_gets_one_line_and_no_run(refused, words, where, hint):
    (line,) = refused(*words)
    assert line.startswith(f"error: {where}:") and hint in line


def test_all_that_is_wrong_is_said_at_once(refused):
    lines = refused(BASE, "quant.weight.bits=1", "fold.freeze=1.5", "optim.name=sdg")
    assert [line.split(":")[1].strip() for line in lines] == ["quant.weight.bits", "fold.freeze", "optim.name"]


def test_unknown_flag_is_refused(here, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([BASE, "--multi-run"])
    assert "--multi-run" in capsys.readouterr().err
