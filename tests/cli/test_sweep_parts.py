"""The parts of a sweep by themselves: words, names, estimates, and what is said."""

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qat.cli.compose import Composer
from qat.cli.recipes import find_recipes
from qat.cli.sweep_plan import folder_name
from qat.cli.sweep_progress import about, job_line, job_seconds, seconds_left, status_line
from qat.cli.sweep_section import plain
from qat.cli.words import resume_words, word


@pytest.fixture(scope="module")
def composer():
    with Composer(find_recipes()) as composer:
        yield composer


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("abzé01 ,.'\\[]{}:=$true-+/", max_size=8)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=5)


@given(value=values)
def test_a_value_survives_the_command_line(composer, value):
    (override,) = composer.parse([word("model.options.x", value)])
    found = plain(override.value())
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("folder", ["runs/mini/2026-01-02_03-04-05", "/tmp/run", "a folder/it's", "x=1,y", "/home/josé/x"])
def test_the_hint_to_go_on_can_be_pasted_into_a_shell(composer, folder):
    (word,) = shlex.split(resume_words(Path(folder)))
    (override,) = composer.parse([word])
    assert override.key_or_group == "resume" and Path(plain(override.value())) == Path(folder)


@given(a=st.text(max_size=12), b=st.text(max_size=12))
def test_different_cells_have_different_folders_that_any_file_system_takes(a, b):
    name = folder_name(a, 1, "")
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.=+-") and len(name) <= 130
    assert a.replace(" ", "-") == b.replace(" ", "-") or name != folder_name(b, 1, "")


def test_readable_names():
    assert folder_name("static w4a8_per_tensor", 1, "optim.lr=0.003") == "static-w4a8_per_tensor-seed1-optim.lr=0.003"
    long = folder_name("x" * 300, None, "")
    assert len(long) < 140 and long != folder_name("x" * 301, None, "")


def test_time_left_is_that_of_the_same_strategy_and_else_of_all():
    measured = [("naive", 100.0), ("naive", 140.0), ("static", 30.0)]
    assert seconds_left(["naive", "static"], measured) == 120 + 30
    assert seconds_left(["frozen"], measured) == 90
    assert seconds_left([], measured) == 0
    assert seconds_left(["naive"], []) is None


def test_the_float_training_of_the_first_job_is_not_expected_again():
    trained, found = {"seconds": {"float": 600.0, "qat": 50.0, "export": 5.0}}, {"seconds": {"float": 2.0, "qat": 40.0, "export": 5.0}}
    assert job_seconds([trained]) == [55.0]
    assert job_seconds([trained, found]) == [57.0, 47.0]
    assert job_seconds([{"status": "ok"}]) == [0.0]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "time left not known yet"),
        (12, "less than a minute left"),
        (41 * 60 + 20, "about 41 min left"),
        (7200 + 5 * 60, "about 2 h 5 min left"),
        (3599, "about 1 h 0 min left"),
    ],
)
def test_how_long_is_said(seconds, text):
    assert about(seconds) == text


def test_the_line_before_a_job_and_the_last_one():
    assert job_line(12, 84, 3, "static w4a8_per_tensor seed 1", 2460) == (
        "job 12 of 84 (3 failed), static w4a8_per_tensor seed 1, about 41 min left"
    )
    assert job_line(1, 2, 0, "x", None) == "job 1 of 2, x, time left not known yet"
    assert status_line(80, 3, 84, 12) == "80 of 84 jobs ok, 3 failed, 1 not done; 12 combinations not possible"
    assert status_line(2, 0, 2, 0) == "2 of 2 jobs ok"
