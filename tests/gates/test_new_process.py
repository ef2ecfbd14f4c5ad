"""Frozen, saved and loaded in a new process every strategy goes on as if it had never stopped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gate_network import prepared_network, train

import qat

SETTINGS = list(zip(qat.STRATEGIES, ["w8_per_channel"] * 8, ("minmax", "lsq") * 4))
CODE = """
import sys
import torch
from gate_network import prepared_network, train
torch.set_num_threads(1)
saved, going_on = torch.load(sys.argv[1], weights_only=True), {}
for setting, state in saved.items():
    prepared = prepared_network(*setting.split())
    prepared.load_state_dict(state)
    going_on[setting] = (train(prepared, 2, first=2), prepared.state_dict())
torch.save(going_on, sys.argv[2])
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(what the uninterrupted run gave, what the new process gave) by setting."""
    folder, saved, whole = tmp_path_factory.mktemp("process"), {}, {}
    for setting in SETTINGS:
        prepared = prepared_network(*setting)
        train(prepared, 2)
        qat.freeze_bn(prepared)
        saved[" ".join(setting)] = {key: value.clone() for key, value in prepared.state_dict().items()}
        whole[" ".join(setting)] = (train(prepared, 2, first=2), prepared.state_dict())
    torch.save(saved, folder / "saved.pt")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", CODE, str(folder / "saved.pt"), str(folder / "going_on.pt")]
    subprocess.run(command, check=True, cwd=Path(__file__).parent, env=environment)
    return whole, torch.load(folder / "going_on.pt", weights_only=True)


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_a_new_process_goes_on_bit_by_bit(both, strategy):
    (setting,) = [" ".join(each) for each in SETTINGS if each[0] == strategy]
    (losses, state), (resumed, after) = (each[setting] for each in both)
    assert losses == resumed and state.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in state.items())
