import pytest

from qat.train.callbacks.auto_freeze import AutoFreeze


def frozen_at(drift, total=1000, bound=0.5):
    auto = AutoFreeze(total, bound)
    for step in range(1, total):
        if step >= auto.latest or (auto.measures(step) and auto.update(step, drift(step))):
            return step
    return None


def test_agreement_freezes_at_the_earliest_step():
    assert frozen_at(lambda step: 0.1) == 100


def test_the_average_decides_not_one_batch():
    # the drift itself is below the bound from step 200 on; E needs ln(4 / 0.4) / -ln(0.9) = 21.9 further measurements of 0.1
    step = frozen_at(lambda step: 4.0 if step < 200 else 0.1, bound=0.5)
    assert step == 410


def test_no_new_low_for_a_tenth_of_the_run_freezes_in_the_second_half():
    assert frozen_at(lambda step: 4.0) == 500
    # falls to 2 at step 400 and stays: the average goes on falling by 2 % for a while, then waits 100 steps
    assert 600 < frozen_at(lambda step: max(2.0, 10.0 - step / 50)) < 850


def test_still_falling_waits_until_nine_tenths():
    assert frozen_at(lambda step: 1000 * 0.99**step, bound=1e-9) == 900


@pytest.mark.parametrize("total", [1, 2, 5, 19])
def test_short_runs(total):
    step = frozen_at(lambda step: 9.0, total=total)
    assert step is None or 1 <= step < total


def test_state_continues():
    whole, first = AutoFreeze(1000, 0.5), AutoFreeze(1000, 0.5)
    drifts = [(step, 3.0 + (step % 7)) for step in range(10, 300, 10)]
    for step, drift in drifts:
        whole.update(step, drift)
    for step, drift in drifts[:11]:
        first.update(step, drift)
    second = AutoFreeze(1000, 0.5)
    second.load_state_dict(first.state_dict())
    for step, drift in drifts[11:]:
        second.update(step, drift)
    assert second.state_dict() == whole.state_dict()
