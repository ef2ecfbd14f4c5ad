"""One float network for runs of several seeds: what it is trained on, how it is found again, and that no picture is used twice."""

import copy

import pytest
import torch
from omegaconf import OmegaConf

from qat.cli.compose import Composer
from qat.cli.recipes import find_recipes
from qat.train.config import complete
from qat.train.data import build_data
from qat.train.finished_run import open_run
from qat.train.float_model import cache_path, float_network
from qat.train.job import run_job
from qat.train.seeds import job_data

# Names of cached networks as they were before the float training had a seed of its own.
NAMES = {
    "mbv1_bncorr": "1d160aa13d5a7e79e40a9700c79ad299b310ed7e2eb0a42c4364a5926d277b89",
    "resnet18_static": "a613b35e916f34162158bb67f9c718983edb20e7dfc9c16f98b0910c96f09062",
}


def changed(config, seed=0, float_seed=None, split_seed=None):
    config = copy.deepcopy(config)
    config["seed"], config["float_training"]["seed"], config["data"]["split_seed"] = seed, float_seed, split_seed
    return config


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_cached_network_is_what_it_was(name):
    with Composer(find_recipes()) as composer:
        assert cache_path(composer.compose([f"recipe={name}", "seed=3"])).stem == NAMES[name]


def test_a_float_network_of_its_own_seed_is_that_of_a_plain_run(config):
    plain = cache_path(changed(config, 3))
    assert cache_path(changed(config, 7, float_seed=3)) == plain
    assert cache_path(changed(config, 3, float_seed=3, split_seed=3)) == plain
    assert cache_path(changed(config, 7)) != plain
    assert cache_path(changed(config, 3, split_seed=4)) != plain
    assert cache_path(changed(config, 7, 3, 4)) == cache_path(changed(config, 3, None, 4))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_it_is_trained_to_the_same_weights(config, tmp_path, dropout):
    """Start, order of the samples, augmentation and dropout are those of its seed."""
    config["model"]["options"] = {"dropout": dropout}
    found = []
    for place, chosen in (("a", changed(config, 3)), ("b", changed(config, 7, float_seed=3)), ("c", changed(config, 7))):
        (tmp_path / place).mkdir()
        chosen["run_root"] = str(tmp_path / place)
        found.append(float_network(chosen, job_data(chosen), tmp_path / place).state_dict())
    plain, shared, other = found
    assert all(torch.equal(value, shared[key]) for key, value in plain.items())
    assert any(not torch.equal(value, other[key]) for key, value in plain.items())


def test_runs_of_several_seeds_share_it_and_differ_after_it(config, tmp_path):
    results = []
    for seed in (0, 1):
        run = tmp_path / f"seed{seed}"
        run.mkdir()
        chosen = changed(config, seed, float_seed=5)
        results.append(run_job(chosen, run))
        (run / "config.yaml").write_text(OmegaConf.to_yaml(chosen))
    assert len(list((tmp_path / "runs" / "float_cache").iterdir())) == 1
    assert (tmp_path / "seed0/checkpoints/float.ckpt").exists() and not (tmp_path / "seed1/checkpoints/float.ckpt").exists()
    assert results[0]["accuracy"]["float"] == results[1]["accuracy"]["float"]
    states = [torch.load(tmp_path / f"seed{seed}/checkpoints/last.ckpt", weights_only=True)["state_dict"] for seed in (0, 1)]
    assert any(not torch.equal(value, states[1][key]) for key, value in states[0].items())


def pictures_of(part):
    return {bytes(image.numpy().tobytes()) for image in part.images}


DIGITS = {"data": {"name": "digits", "image_size": None, "batch_size": 32, "val_fraction": 0.15}}


@pytest.mark.parametrize(
    ("seeds", "split"),
    [((0, None, None), 0), ((4, None, None), 4), ((4, 2, None), 2), ((4, 2, 9), 9), ((4, None, 9), 9)],
)
def test_the_split_follows_the_float_training(config, seeds, split):
    data = job_data(changed({**config, **DIGITS}, *seeds))
    plain = build_data(DIGITS["data"], split)
    assert torch.equal(data.splits.val.images, plain.splits.val.images) and torch.equal(data.splits.train.images, plain.splits.train.images)
    assert data.train_dataloader().sampler.seed == seeds[0]


def test_no_validation_picture_was_trained_on(config):
    """The float network of seed 2 was trained on the training pictures of split 2, in a run of any seed."""
    trained = pictures_of(job_data(changed({**config, **DIGITS}, 2)).splits.train)
    held_out = [pictures_of(job_data(changed({**config, **DIGITS}, seed, 2)).splits.val) for seed in (0, 1)]
    assert held_out[0] == held_out[1] and not held_out[0] & trained
    # which is no matter of course: the split of another seed shares most of its pictures with them
    assert pictures_of(job_data(changed({**config, **DIGITS}, 0)).splits.val) & trained


def test_a_finished_run_opens_the_same_data_and_float_network(config, tmp_path, monkeypatch):
    """In a sweep's folder, from another working directory."""
    config["model"]["name"] = "mobilenetv1"
    config["model"] |= {"source": "qat", "small_input": True, "options": {"width": 0.25}}
    chosen = changed({**config, **DIGITS, "run_root": str(tmp_path / "runs")}, 4, float_seed=2)
    chosen["data"]["image_size"], chosen["trainer"]["max_epochs"], chosen["float_training"]["max_epochs"] = 16, 1, 1
    chosen["trainer"]["limit_train_batches"] = 2
    chosen = complete(chosen)
    folder = tmp_path / "runs" / "compare" / "time" / "jobs" / "one"
    folder.mkdir(parents=True)
    run_job(chosen, folder)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml({**chosen, "run_root": "runs"}))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = open_run(folder)
    data = run.data()
    assert torch.equal(data.splits.val.images, job_data(chosen).splits.val.images) and data.split_seed == 2
    network, told = run.float_network()
    cached = torch.load(cache_path(chosen), weights_only=True)["state_dict"]
    assert told == "the float network it started from"
    assert all(torch.equal(value, cached[key]) for key, value in network.state_dict().items())
