"""The network of a run built again, rules for more bits, and how few of them it takes."""

from types import SimpleNamespace

import pytest
import torch
from scipy import stats
from torch import nn

import qat
from qat.cli.more_bits import Search
from qat.errors import ConfigError, QATError
from qat.graph.sensitivity import layer_quantizers
from qat.report.sensitivity import Cost
from qat.report.statistics import ONE_SIDED
from qat.train.answers import Answers, Change, among, answers, change
from qat.train.data import build_data
from qat.train.finished_run import FinishedRun
from qat.train.float_model import cache_path
from qat.train.job import run_job
from qat.train.more_bits import Rebuilder, Setting, fewest, rules_for, weight_bytes, with_rules

CPU = torch.device("cpu")
FEW_BITS = {"weight": {"bits": 3}, "activation": {"bits": 4}}
pytestmark = pytest.mark.filterwarnings("ignore:.*rounds all weights of channels")


def finished(config, folder, epochs, quant, network="tiny", **fold):
    """A run of few bits with `epochs` of training, its data and its network."""
    folder.mkdir()
    for part, keys in quant.items():
        config["quant"][part] |= keys
    config["model"]["name"] = f"tiny_networks:{network}"
    config["fold"] |= fold
    config["trainer"]["max_epochs"] = epochs
    run = FinishedRun(folder, config, run_job(config, folder))
    data = run.data()
    return run, data, run.network(data)


def bits(network):
    return {name: tuple(q.spec.bits for q in own) for name, own in layer_quantizers(network).items()}


@pytest.mark.parametrize(("fold", "range"), [("bn_correction", "minmax"), ("naive", "lsq"), ("static", "minmax"), ("scale_merge", "lsq")])
def test_without_rules_it_is_the_network_that_was_trained(config, tmp_path, fold, range):
    ranges = {"weight": {"bits": 3, "range": range}, "activation": {"bits": 4, "range": "lsq" if range == "lsq" else "ema"}}
    run, data, network = finished(config, tmp_path / "run", 1, ranges, "clipped", name=fold, freeze=None)
    assert bits(network)["0"] == (3, 4)
    pictures, again = data.first_of("val", 40), Rebuilder(run, data, network, CPU)({})
    assert torch.allclose(answers(again, pictures, CPU).losses, answers(network, pictures, CPU).losses, atol=1e-5)
    # a static layer's sums go through another rounding; where the BatchNorm is alive all is the same
    assert fold == "static" or all(torch.equal(again(images), network(images)) for images, _ in pictures)


def test_a_rule_changes_the_layer_and_leaves_the_ranges_of_the_others(config, tmp_path):
    run, data, network = finished(config, tmp_path / "run", 1, FEW_BITS)
    before, own = bits(network), dict(network.named_modules())
    rules = rules_for(network, "ort_vnni")
    assert rules["3"] == {"weight": {"bits": 8}, "activation": {"bits": 8}} and rules["input_1"] == {"activation": {"bits": 8}}
    changed = Rebuilder(run, data, network, CPU)({"3": rules["3"]})
    assert bits(changed) == {**before, "3": (8, 8)} and bits(network) == before
    for name, module in changed.named_modules():
        if isinstance(module, qat.FakeQuantizer) and module.spec.bits != 8:
            assert torch.equal(module.scale, own[name].scale)
    assert weight_bytes(changed) - weight_bytes(network) == 8 * 6 * 9 * (8 - 3) / 8


def test_a_layer_at_its_most_bits_is_skipped(config, tmp_path):
    run, data, network = finished(config, tmp_path / "run", 1, {}, name="static")
    rules = rules_for(network, "ort_vnni")
    assert set(map(str, rules.values())) == {"{'skip': True}"}
    changed = Rebuilder(run, data, network, CPU)({"0": rules["0"]})
    assert isinstance(changed.get_submodule("0"), nn.Conv2d) and "0" not in bits(changed)
    assert weight_bytes(changed) - weight_bytes(network) == 6 * 9 * 3
    network.get_submodule("0").weight_quantizer.enabled = False
    (images, _), *_ = data.first_of("val", 40)
    assert torch.allclose(changed(images), network(images), atol=0.02)  # single roundings may go the other way
    qat.set_fake_quant(network, weights=False, activations=False)
    qat.set_fake_quant(changed, weights=False, activations=False)
    assert torch.allclose(changed(images), network(images), atol=1e-5)


def test_no_more_bits_than_the_target_computes():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten())
    prepared = qat.prepare(model, (torch.zeros(1, 1, 8, 8),), qat.QATConfig.for_target("ort_x86", weight=qat.QuantSpec(bits=4)))
    assert rules_for(prepared, "ort_x86")["0"] == {"weight": {"bits": 7}}
    assert rules_for(prepared, "ort_vnni")["0"] == {"weight": {"bits": 8}}


def test_rules_win_over_what_the_run_had():
    config = {"quant": {"overrides": {"a.b": {"weight": {"bits": 4}}, "a.*": {"weight": {"bits": 5}}}}}
    ruled = with_rules(config, {"a.b": {"weight": {"bits": 8}}, "c": {"skip": True}})
    asked = qat.QATConfig(overrides=ruled["quant"]["overrides"])
    assert asked.weight_for("a.b")[0].bits == 8 and asked.weight_for("a.c")[0].bits == 5 and asked.skips("c")
    assert len(config["quant"]["overrides"]) == 2
    # a second time, where what the run had holds the first time's patterns
    again = with_rules(ruled, {"a.b": {"activation": {"bits": 7}}, "c": {"skip": False}})
    asked = qat.QATConfig(overrides=again["quant"]["overrides"] | {"[a].*": {"activation": {"bits": 6}}})
    assert asked.weight_for("a.b")[0].bits == 8 and asked.activation_for("a.b")[0].bits == 6 and not asked.skips("c")
    asked = qat.QATConfig(overrides=with_rules({"quant": {"overrides": asked.overrides}}, {"a.b": {"skip": True}})["quant"]["overrides"])
    assert asked.skips("a.b") and not asked.skips("a.c") and asked.weight_for("a.b")[0].bits == 8 and len(asked.overrides) == 8


@pytest.mark.parametrize("step", [{"correct_bias": "empirical"}, {"adaround": 20}, {"equalize": True}])
def test_a_run_without_training_goes_through_its_steps_again(config, tmp_path, step):
    config["ptq"] |= step
    run, data, network = finished(config, tmp_path / "run", 0, FEW_BITS, name="static")
    rebuild, pictures = Rebuilder(run, data, network, CPU), data.first_of("test", 40)
    assert torch.equal(answers(rebuild({}), pictures, CPU).losses, answers(network, pictures, CPU).losses)
    plain = rebuild.plainly_rounded({})
    assert (plain is None) == ("equalize" in step)
    if plain is not None:
        qat.set_fake_quant(plain, weights=False, activations=False)
        expected = answers(run.float_network()[0], pictures, CPU).losses
        assert torch.allclose(answers(plain, pictures, CPU).losses, expected, atol=1e-4)


def test_a_run_that_trained_can_be_seen_before_it(config, tmp_path):
    run, data, network = finished(config, tmp_path / "run", 1, FEW_BITS)
    before = Rebuilder(run, data, network, CPU, before_training=True)({})
    found = answers(before, data.first_of("test", 40), CPU)
    assert found.accuracy == run.result["accuracy"]["ptq"]
    assert not torch.equal(found.losses, answers(network, data.first_of("test", 40), CPU).losses)


def test_a_float_network_that_is_gone_is_one_line(config, tmp_path):
    run, data, network = finished(config, tmp_path / "run", 0, FEW_BITS)
    cache_path(config).unlink()
    with pytest.raises(ConfigError, match="expected the float network it started from"):
        Rebuilder(run, data, network, CPU)({})


def losing(costs, together=()):
    """`measure` for layers that each cost so much, and more while any of `together` has few bits."""

    def measure(layers, step):
        loss = sum(cost for name, cost in costs.items() if name not in layers) + 5 * bool(set(together) - set(layers))
        return Setting(layers, SimpleNamespace(loss=loss), 0.0, step)

    return measure


def ranked(layers):
    """The layers in this order as `next_layer`."""
    return lambda chosen: layers[len(chosen)] if len(chosen) < len(layers) else None


def test_the_first_layers_that_meet_the_goal_and_no_others():
    measure = losing({"a": 4, "b": 3, "c": 2, "d": 1})
    tried, best = fewest(ranked("abcd"), measure, goal=3, start=10)
    assert best.layers == ("a", "b") and [s.step for s in tried] == ["and a", "and b", "without a"]


def test_a_layer_that_is_not_needed_is_left_out_again():
    measure = losing({"a": 0, "b": 3, "c": 0, "d": 4})
    tried, best = fewest(ranked("abcd"), measure, goal=0, start=7)
    assert best.layers == ("b", "d") and len(tried) == 7


def test_layers_that_help_only_together():
    tried, best = fewest(ranked("abc"), losing({"a": 0, "b": 0, "c": 1}, together="ab"), goal=1, start=6)
    assert best.layers == ("a", "b") and [s.answers.loss for s in tried] == [6, 1, 6]


def test_a_goal_out_of_reach_takes_the_least_loss_met():
    _, best = fewest(ranked("ab"), losing({"a": 1, "b": -1, "c": 5}), goal=0.5, start=5)
    assert best.layers == ("a",) and best.answers.loss == 4
    assert fewest(ranked("b"), losing({"b": -1}), goal=-5, start=-1)[1] is None
    assert fewest(ranked(""), losing({}), goal=0, start=1) == ([], None)


def test_answers_and_their_change_by_hand():
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    network = lambda images: logits[: len(images)] if len(images) == 2 else logits[2:]  # noqa: E731
    found = answers(network, [(torch.zeros(2, 1), torch.tensor([0, 0])), (torch.zeros(1, 1), torch.tensor([0]))], CPU)
    assert found.accuracy == pytest.approx(2 / 3)
    by_hand = [torch.log1p(torch.exp(torch.tensor(-m, dtype=torch.float64))) for m in (2.0, -1.0, 3.0)]
    assert torch.allclose(found.losses, torch.stack(by_hand))
    other = Answers(found.losses + torch.tensor([1.0, 2.0, 6.0]), found.right)
    difference = change(found, other)
    assert difference.value == pytest.approx(3) and difference.error == pytest.approx((7 / 3) ** 0.5)
    assert difference.p == pytest.approx(stats.ttest_rel(other.losses, found.losses, alternative="greater").pvalue)
    assert not difference.significant and change(found, Answers(found.losses + 1, found.right)).significant
    assert not change(found, found).significant and not change(Answers(found.losses + 1, found.right), found).significant
    with pytest.raises(QATError, match="a loss of NaN or Inf on 1 pictures"):
        answers(lambda images: images, [(torch.tensor([[0.0, torch.nan], [0.0, 1.0]]), torch.tensor([0, 0]))], CPU)


def test_of_many_layers_that_cost_nothing_hardly_ever_one_has_a_star():
    generator = torch.Generator().manual_seed(0)
    starred, alone = 0, 0
    for _ in range(200):
        drawn = torch.randn(20, 50, generator=generator, dtype=torch.float64)
        changes = {str(i): Change(float(x.mean()), float(x.std() / 50**0.5), 50) for i, x in enumerate(drawn)}
        starred += any(p < ONE_SIDED for p in among(changes).values())
        alone += any(found.significant for found in changes.values())
    assert starred / 200 <= 0.025 + 3 * (0.025 * 0.975 / 200) ** 0.5 < 0.3 < alone / 200
    changes["costs"] = Change(1.0, 0.2, 50)
    found = among(changes)
    assert list(found) == list(changes) and found["costs"] == pytest.approx(21 * stats.t.sf(5, 49)) and among({}) == {}


def test_the_next_layer_has_a_star_among_the_others_or_alone():
    costs = [
        Cost("alone", "noise", "4", 1.0, 1.0, 0.9, 0.3, 0.03),
        Cost("others", "noise", "4", 1.0, 1.0, 2.0, 0.9, 0.5),
        Cost("alone", "small", "4", 1.0, 1.0, 0.5, 0.1, 0.001),
        Cost("others", "small", "4", 1.0, 1.0, 0.0, 0.9, 1.0),
        Cost("alone", "star", "4", 1.0, 1.0, 0.0, 0.1, 1.0),
        Cost("others", "star", "4", 1.0, 1.0, 1.0, 0.1, 0.001),
    ]
    assert Search(None, [], costs, {}).next_layer(()) == "star"
    assert Search(None, [], costs[:-1], {}).next_layer(()) == "small"
    assert Search(None, [], costs[:2], {}).next_layer(()) is None


def test_pictures_are_the_same_at_every_call_and_from_all_over_the_split(config):
    data = build_data(config["data"] | {"eval_batch_size": 8}, 3)
    batches = data.first_of("val", 20)
    assert [len(labels) for _, labels in batches] == [8, 8, 4]
    again = data.first_of("val", 20)
    assert all(torch.equal(one, other) for pair, pair_again in zip(batches, again) for one, other in zip(pair, pair_again))
    whole = torch.cat([images for images, _ in data.val_dataloader()])
    places = [int((whole == image).flatten(1).all(1).nonzero()) for images, _ in batches for image in images]
    assert len(set(places)) == 20 and max(places) > 25
    with pytest.raises(ConfigError, match="found 41 pictures of the test split"):
        data.first_of("test", 41)
