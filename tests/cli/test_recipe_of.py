"""A configuration as a recipe that composes to it."""

import shlex

import pytest

from qat.cli.compose import Composer
from qat.cli.recipe_of import recipe_of
from qat.cli.recipes import find_recipes, sweep_of

OVERRIDES = {"blocks.0.0.conv_dw": {"weight": {"bits": 8}}, "conv_stem": {"skip": True}, "[x]": {"activation": {"bits": 8}}}


def composed(*words):
    with Composer(find_recipes()) as composer:
        return composer.compose(list(words))


def same(found, wanted):
    names = ("recipe", "run_root")
    order = list(found["quant"]["overrides"]) == list(wanted["quant"]["overrides"])
    return order and {k: v for k, v in found.items() if k not in names} == {k: v for k, v in wanted.items() if k not in names}


def test_a_job_of_a_sweep_is_no_sweep(here, write_recipe):
    write_recipe("mine", "defaults: [base/mbv1]\nsweep: {over: {fold: [naive, static]}}\n")
    config = composed("recipe=mine", "fold=static", "quant.weight.bits=4")
    written = recipe_of(config, "more", find_recipes())
    assert written.words is None and written.command is None
    write_recipe("more", written.text)
    recipes = find_recipes()
    assert sweep_of("mine", recipes) is not None and sweep_of("more", recipes) is None
    assert same(composed("recipe=more"), config)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], []),
        (["quant=w4a4_per_tensor", "seed=3", "run_root=elsewhere"], ["override /quant: w4a4_per_tensor", "seed: 3"]),
        (
            ["model.options.width=0.5", "model.options.act_layer=relu6", "data.root='a b/c'", "fold=batch_renorm", "fold.options.r_max=2"],
            ["width: 0.5", "a b/c", "override /fold: batch_renorm"],
        ),
        (
            ["quant.overrides={conv_stem:{weight:{bits:4}}}", "target=ort_x86", "optim=adam", "fold.freeze=null", "data.mean=[0.1]"],
            ["override /optim: adam"],
        ),
        (["data.image_size=16", "float_training.optim.lr=1e-2", "ptq.equalize=true", "trainer.max_epochs=0"], ["image_size: 16"]),
    ],
)
def test_recipe_and_words_lead_to_the_configuration(here, write_recipe, words, parts):
    config = composed("recipe=mbv1_bncorr", *words)
    config["quant"]["overrides"] = {key: value for key, value in OVERRIDES.items() if key != "[x]"} | config["quant"]["overrides"]
    written = recipe_of(config, "more", find_recipes())
    assert written.text.startswith("defaults:\n- mbv1_bncorr\n") and all(part in written.text for part in parts)
    assert "run_root" not in written.text
    write_recipe("more", "# what: more\n" + written.text)
    assert same(composed("recipe=more"), config)
    assert written.command.startswith("python train.py recipe=mbv1_bncorr")
    assert same(composed(*shlex.split(written.command)[2:]), config)


def test_words_hold_a_backslash(here):
    config = composed("recipe=mbv1_bncorr")
    config["data"]["root"] = "back\\slash\\"
    written = recipe_of(config, "more", find_recipes())
    assert written.command is not None and same(composed(*shlex.split(written.command)[2:]), config)


def test_a_pattern_that_no_word_can_hold_is_in_the_recipe_alone(here, write_recipe):
    config = composed("recipe=mbv1_bncorr")
    config["quant"]["overrides"] = OVERRIDES
    written = recipe_of(config, "more", find_recipes())
    assert written.command is None
    write_recipe("more", written.text)
    assert same(composed("recipe=more"), config)


@pytest.mark.parametrize("recipe", ["more", "gone", None])
def test_a_recipe_of_its_own_name_or_that_is_gone_is_not_built_on(here, write_recipe, recipe):
    write_recipe("more", "defaults: [mbv1_bncorr]\nseed: 4\n")
    config = {**composed("recipe=more", "quant=w4a8_per_channel"), "recipe": recipe}
    written = recipe_of(config, "more", find_recipes())
    assert "mbv1_bncorr" not in written.text and written.command is None
    write_recipe("more", written.text)
    assert same(composed("recipe=more"), config) and config["seed"] == 4


def test_keys_that_the_recipe_has_and_the_run_had_not(here, write_recipe):
    write_recipe("mine", "defaults: [mbv1_bncorr]\nquant: {overrides: {conv_stem: {skip: true}}}\n")
    config = composed("recipe=mine")
    config["quant"]["overrides"] = {"classifier": {"skip": True}}
    written = recipe_of(config, "more", find_recipes())
    write_recipe("more", written.text)
    assert "mine" not in written.text and same(composed("recipe=more"), config)
