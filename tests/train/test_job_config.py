"""The schema of a job, and which values it refuses."""

import copy
import pickle

import pytest
from omegaconf import OmegaConf

from qat.errors import ConfigError
from qat.train.config import complete, validate
from qat.train.problems import JointConfigError, Problems
from qat.train.validation import moment_problem


def config(**changes):
    """A valid configuration; `a__b=1` sets a.b."""
    given = OmegaConf.create({"model": {"name": "mobilenetv1"}, "data": {"name": "digits"}})
    for key, value in changes.items():
        OmegaConf.update(given, key.replace("__", "."), value)
    return OmegaConf.to_container(given)


def test_complete_is_plain_and_a_fixed_point():
    full = complete(config(fold__options={"r_max": 2.0}))
    assert type(full) is dict and type(full["quant"]["weight"]) is dict
    assert full["quant"]["activation"] == {
        "bits": 8,
        "symmetric": False,
        "per_channel": False,
        "narrow": False,
        "power_of_two": False,
        "range": "ema",
    }
    assert full["fold"]["options"] == {"r_max": 2.0}
    assert complete(full) == full


def test_validate_leaves_its_argument_alone():
    given = complete(config())
    before = copy.deepcopy(given)
    assert validate(given) is None
    assert given == before


def test_interpolations_are_resolved():
    assert complete(config(seed="${trainer.max_epochs}", trainer__max_epochs=4))["seed"] == 4


@pytest.mark.parametrize(
    "change, where, said",
    [
        ({"optim__lrr": 1.0}, "optim.lrr", "'lr'"),
        ({"optm": {"lr": 1}}, "optm", "'optim'"),
        ({"quant__weight__bitts": 8}, "quant.weight.bitts", "'bits'"),
        ({"quant": 3}, "quant", "weight, activation"),
        ({"optim": None}, "optim", "None"),
        ({"seed": 0.5}, "seed", "a whole number"),
        ({"data__mean": 0.5}, "data.mean", "a list of numbers or null"),
        ({"model__options": 3}, "model.options", "a mapping"),
        ({"seed": "${nothing}"}, "seed", "nothing"),
        ({"model__name": "???"}, "model.name", "nothing"),
        ({"model__source": "tim"}, "model.source", "'timm'"),
        ({"data__name": "digit"}, "data.name", "'digits'"),
        ({"data__augment": "shft"}, "data.augment", "'shift'"),
        ({"data__batch_size": 0}, "data.batch_size", "1 or more"),
        ({"data__val_fraction": 1.0}, "data.val_fraction", "1.0"),
        ({"data__split_seed": -1}, "data.split_seed", "4294967295"),
        ({"float_training__seed": 2**32}, "float_training.seed", "4294967295"),
        ({"float_training__seed": "x"}, "float_training.seed", "a whole number or null"),
        ({"quant__weight__bits": 1}, "quant.weight.bits", "from 2 to 8"),
        ({"quant__activation__bits": 9}, "quant.activation.bits", "from 2 to 8"),
        ({"quant__weight__range": "ema"}, "quant.weight.range", "minmax"),
        ({"quant__activation__range": "emma"}, "quant.activation.range", "'ema'"),
        ({"quant__weight__range": "cross_entropy"}, "quant.weight.range", "the logits alone"),
        ({"quant__activation__range": "cross_entropy"}, "quant.activation.range", "the logits alone"),
        ({"quant__overrides": {"fc": {"weight": {"range": "cross_entropy"}}}}, "quant.overrides", "holds the logits"),
        ({"quant__activation__per_channel": True}, "quant.activation.per_channel", "one scale"),
        ({"quant__overrides": {"stem": {"wieght": {"bits": 8}}}}, "quant.overrides", "weight"),
        ({"quant__delay": -1}, "quant.delay", "-1"),
        ({"quant__freeze_ranges": "auto"}, "quant.freeze_ranges", "'auto'"),
        ({"fold__name": "bn_corection"}, "fold.name", "'bn_correction'"),
        ({"fold__freeze": 1.0}, "fold.freeze", "auto"),
        ({"fold__freeze": True}, "fold.freeze", "True"),
        ({"fold__lr_after_freeze": -0.1}, "fold.lr_after_freeze", "0 or more"),
        ({"fold__reestimate_before_eval": -1}, "fold.reestimate_before_eval", "0 or more"),
        ({"fold__options": {"r_max": 3.0}}, "fold.options.r_max", "bn_correction"),
        ({"optim__name": "adm"}, "optim.name", "'adam'"),
        ({"optim__schedule": "cosin"}, "optim.schedule", "'cosine'"),
        ({"optim__lr": -0.1}, "optim.lr", "0 or more"),
        ({"optim__momentum": 1.5}, "optim.momentum", "from 0 to 1"),
        ({"float_training__optim__lr": -0.1}, "float_training.optim.lr", "0 or more"),
        ({"trainer__devices": 0}, "trainer.devices", "auto"),
        ({"trainer__devices": "two"}, "trainer.devices", "'two'"),
        ({"trainer__devices": True}, "trainer.devices", "True"),
        ({"trainer__accelerator": "gpuu"}, "trainer.accelerator", "'gpu'"),
        ({"trainer__max_epochs": -1}, "trainer.max_epochs", "0 or more"),
        ({"trainer__limit_train_batches": 0}, "trainer.limit_train_batches", "batches"),
        ({"ptq__equalise": True}, "ptq.equalise", "'equalize'"),
        ({"ptq__equalize": 1.5}, "ptq.equalize", "true or false"),
        ({"ptq__correct_bias": "emprical"}, "ptq.correct_bias", "'empirical'"),
        ({"ptq__adaround": -1}, "ptq.adaround", "0 or more"),
        ({"ptq__pictures": 0}, "ptq.pictures", "1 or more"),
        ({"report__moments": -1}, "report.moments", "a whole number, 0 or more"),
        ({"report__moment": 9}, "report.moment", "'moments'"),
        ({"report__pictures": 2.5}, "report.pictures", "a whole number"),
        ({"ptq__within_relu6": True}, "ptq.within_relu6", "ptq.equalize=true"),
        ({"ptq__equalize": True, "ptq__within_relu6": True, "ptq__replace_relu6": True}, "ptq.within_relu6", "one of the two"),
        ({"ptq__replace_relu6": True}, "ptq.replace_relu6", "ptq.equalize=true"),
        ({"ptq__adaround": 100}, "ptq.adaround", "trainer.max_epochs=0"),
        ({"ptq__correct_bias": "analytic"}, "ptq.correct_bias", "trainer.max_epochs=0"),
        ({"trainer__max_epochs": 0, "trainer__devices": 2}, "trainer.devices", "one device"),
        ({"trainer__max_epochs": 0, "trainer__options": {"num_nodes": 2}}, "trainer.devices", "one device"),
        (
            {"trainer__max_epochs": 0, "ptq__adaround": 100, "fold__reestimate_before_eval": 2},
            "fold.reestimate_before_eval",
            "fold.reestimate_before_eval=0",
        ),
        (
            {"trainer__max_epochs": 0, "ptq__correct_bias": "empirical", "fold__reestimate_before_eval": 2},
            "fold.reestimate_before_eval",
            "the same shift of the means",
        ),
        ({"target__name": "ort_x68"}, "target.name", "'ort_x86'"),
        ({"seed": -1}, "seed", "-1"),
    ],
)
def test_what_is_refused(change, where, said):
    with pytest.raises(ConfigError) as caught:
        validate(config(**change))
    assert caught.value.where == where
    (line,) = str(caught.value).splitlines()
    assert said in line


def test_steps_without_training_and_before_it():
    steps = {"ptq__equalize": True, "ptq__replace_relu6": True, "ptq__absorb_bias": True}
    validate(config(**steps))
    validate(config(**steps, trainer__max_epochs=0, ptq__adaround=100, ptq__correct_bias="empirical"))
    validate(config(trainer__max_epochs=0, fold__reestimate_before_eval=4))


def test_scale_merge_needs_a_scale_for_each_channel():
    validate(config(fold__name="scale_merge"))
    with pytest.raises(ConfigError, match="per_channel"):
        validate(config(fold__name="scale_merge", quant__weight__per_channel=False))


def test_strategies_own_options_are_known():
    validate(config(fold__name="batch_renorm", fold__options={"r_max": 2.0, "d_max": 4.0}))


@pytest.mark.parametrize("devices", [1, 2, -1, "auto"])
@pytest.mark.parametrize("limit", [None, 3, 0.5, 1.0])
def test_devices_and_limits_lightning_takes(devices, limit):
    validate(config(trainer__devices=devices, trainer__limit_train_batches=limit))


@pytest.mark.parametrize(
    "value, refused",
    [(None, False), (0, False), (300, False), (0.5, False), (0.0, True), (1.0, True), (-1, True), ("auto", True), (False, True)],
)
def test_moments(value, refused):
    assert moment_problem(value) is refused
    assert not moment_problem("auto", auto=True)


def test_everything_wrong_is_said_a_line_each():
    with pytest.raises(ConfigError) as caught:
        validate(config(quant__weight__bits=1, fold__freeze=2.0, optim__lr=-1.0))
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["quant.weight.bits", "fold.freeze", "optim.lr"]
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, JointConfigError) and str(again) == str(caught.value)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0])
def test_a_number_is_finite(value):
    problems = Problems()
    assert not problems.number("optim.lr", value, 0) and len(problems.found) == 1
    assert problems.number("optim.lr", 0.1, 0)
