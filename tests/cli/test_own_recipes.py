"""Recipes in the user's own ./recipes."""

import pytest

from qat.cli.train import main


def test_own_recipe_builds_on_a_packaged_base_and_wins(jobs, write_recipe, capsys):
    write_recipe("mbv1_bncorr", "# what: mine\nseed: 7\noptim: {lr: 0.5}\ndefaults:\n  - base/mbv1\n  - override /fold: static\n")
    assert main(["recipe=mbv1_bncorr"]) == 0
    ((config, folder),) = jobs.seen
    assert (config["seed"], config["optim"]["lr"], config["fold"]["name"]) == (7, 0.5, "static")
    assert "your own" in (folder / "train.log").read_text()
    main([])
    assert "mbv1_bncorr *" in capsys.readouterr().out


def test_own_recipe_without_defaults(jobs, write_recipe):
    write_recipe("plain", "trainer: {max_epochs: 2}\n")
    assert main(["recipe=plain"]) == 0
    assert jobs.seen[0][0]["trainer"]["max_epochs"] == 2


def test_recipe_wins_over_its_base_and_the_nearer_override_over_the_farther(jobs, write_recipe):
    write_recipe("base/mine", "defaults:\n  - mbv1\n  - override /fold: naive\nseed: 1\noptim: {lr: 0.3}\n")
    write_recipe("mine", "seed: 2\ndefaults:\n  - base/mine\n  - override /fold: static\n")
    assert main(["recipe=mine"]) == 0
    config = jobs.seen[0][0]
    assert (config["seed"], config["optim"]["lr"], config["fold"]["name"]) == (2, 0.3, "static")


@pytest.mark.parametrize(
    "text, where, hint",
    [
        ("optim: {lrr: 0.1}\n", "optim.lrr", "'lr'"),
        ("optm: {lr: 0.1}\n", "optm.lr", "'optim'"),
        ("quant: {weight: {bitts: 4}}\n", "quant.weight.bitts", "'bits'"),
        ("defaults: [override /fold: statik]\n", "defaults: fold", "'static'"),
        ("defaults: [override /folds: static]\n", "defaults: folds", "'fold'"),
        ("defaults: [base/mbv3]\n", "defaults", "base/mbv1"),
        ("defaults: [tpyo]\n", "defaults", "'tpyo'"),
        ("seed: [\n", "", "while parsing"),
        ("seed: 1\nseed: 2\n", "", "duplicate key"),
        ("- a\n", "", "not a mapping"),
    ],
)
def test_typos_name_the_file_and_the_key(refused, write_recipe, text, where, hint):
    write_recipe("typo", text)
    (line,) = refused("recipe=typo")
    assert "recipes/typo.yaml" in line and where in line and hint in line


def test_typo_in_a_base_names_the_base(refused, write_recipe):
    write_recipe("base/mine", "optim: {lrr: 0.1}\n")
    write_recipe("mine", "defaults: [base/mine]\n")
    (line,) = refused("recipe=mine")
    assert "recipes/base/mine.yaml: optim.lrr" in line


def test_circle_of_bases(refused, write_recipe):
    write_recipe("base/a", "defaults: [b]\n")
    write_recipe("base/b", "defaults: [a]\n")
    write_recipe("mine", "defaults: [base/a]\n")
    (line,) = refused("recipe=mine")
    assert "circle" in line


def test_broken_recipe_does_not_disturb_the_others(jobs, write_recipe, capsys):
    write_recipe("broken", "seed: [\n")
    assert main(["recipe=mbv1_bncorr"]) == 0
    main([])
    assert "cannot be read" in capsys.readouterr().out


def test_base_is_not_a_recipe_to_run(refused):
    (line,) = refused("recipe=base/mbv1")
    assert "base/mbv1" in line


def test_recipes_of_an_earlier_call_are_forgotten(jobs, write_recipe, refused):
    write_recipe("gone", "seed: 1\n").unlink()
    refused("recipe=gone")
