"""The network of every recipe, with random weights: convert(), integers alone and the network in training agree at every tensor."""

import sys
from pathlib import Path

import pytest
import torch

import qat
from qat.cli.compose import Composer
from qat.cli.recipes import find_recipes, runnable
from qat.deploy.verify import verify_integers, verify_trained
from qat.train.models import build_model
from qat.train.module import qat_config

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from small_networks import randomize

SHAPES = {"digits": (1, 24, 24), "npz": (3, 32, 32), "imagefolder": (3, 64, 64)}
RECIPES = sorted(runnable(find_recipes()))


@pytest.fixture(scope="module")
def composed():
    with Composer(find_recipes()) as composer:
        yield {name: composer.compose([f"recipe={name}"]) for name in RECIPES}


# Random weights on 4-bit grids of one scale.
@pytest.mark.filterwarnings("ignore:.*rounds all weights of channels")
@pytest.mark.parametrize("name", RECIPES)
def test_the_network_of_a_recipe(composed, name):
    config = composed[name]
    channels, *size = SHAPES[config["data"]["name"]]
    torch.manual_seed(0)
    network = randomize(build_model({**config["model"], "checkpoint": None}, 10, channels))
    x = torch.randn(16, channels, *size)
    prepared = qat.prepare(network.eval(), (x,), qat_config(config["quant"], config["fold"], config["target"]["name"]))
    qat.calibrate(prepared, [x])
    prepared.eval()
    converted = qat.convert(prepared)
    # Tensor by tensor from the same integers: in deep networks with random weights a single rounding grows.
    for multipliers in ("float", "fixed"):
        check(verify_integers(converted, [x], multipliers, stepwise=True), multipliers)
    check(verify_trained(prepared, converted, [x], stepwise=True), "trained")
    # And as a whole, where most stays the same.
    assert verify_integers(converted, [x]).identical >= 0.95 and verify_trained(prepared, converted, [x]).identical >= 0.95


def check(report, told):
    assert report.max_lsb <= 1 and all(row.identical >= 0.999 for row in report.tensors), f"{told}\n{report}"
