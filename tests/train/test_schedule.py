import logging

import pytest

from qat.errors import ConfigError
from qat.train.schedule import resolve, total_steps, validate_schedule


@pytest.mark.parametrize(("value", "step"), [(None, None), (0, 0), (99, 99), (0.5, 50), (0.999, 99), (0.001, 0)])
def test_steps_and_shares(value, step):
    assert resolve("fold.freeze", value, 100) == step


@pytest.mark.parametrize("value", [100, -1, 1.0, 0.0, 1.5, True, "half"])
def test_what_is_neither(value):
    with pytest.raises(ConfigError, match=r"fold\.freeze"):
        resolve("fold.freeze", value, 100)


@pytest.mark.parametrize(("limit", "accumulate", "steps"), [(None, 1, 30), (4, 1, 12), (40, 1, 30), (0.5, 1, 15), (None, 4, 9)])
def test_total_steps(limit, accumulate, steps):
    assert total_steps(10, {"max_epochs": 3, "limit_train_batches": limit, "options": {"accumulate_grad_batches": accumulate}}) == steps


def config(**changes):
    values = {"delay": 0, "freeze_ranges": None, "freeze": 0.5} | changes
    return {"quant": {"delay": values["delay"], "freeze_ranges": values["freeze_ranges"]}, "fold": {"freeze": values["freeze"]}}


@pytest.mark.parametrize("key", ["delay", "freeze_ranges", "freeze"])
def test_a_step_beyond_the_run_is_named(key):
    with pytest.raises(ConfigError, match=rf"{key}: found step 200000 of a run of 60 steps"):
        validate_schedule(config(**{key: 200000}), 60)


def test_auto_is_fine_and_a_run_of_nothing_is_not():
    validate_schedule(config(freeze="auto"), 60)
    with pytest.raises(ConfigError, match="max_epochs"):
        validate_schedule(config(), 0)


def test_frozen_before_quantized_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        validate_schedule(config(delay=0.5, freeze=0.2), 100)
    assert "step 20 is not after quant.delay at step 50" in caplog.text


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"devices": 2}, 15),
        ({"devices": "auto"}, 30),
        ({"options": {"max_steps": 7}}, 7),
        ({"options": {"max_steps": -1}}, 30),
        ({"options": {"max_epochs": 1}}, 10),
    ],
)
def test_total_steps_of_other_trainers(changes, steps):
    assert total_steps(10, {"max_epochs": 3, "limit_train_batches": None, "options": {}} | changes) == steps
