"""Post-training steps in a job: in their order, each measured, without training or before it; and the run folder they leave."""

import re
from pathlib import Path

import onnx
import pytest
import torch
from tiny_networks import clipped, tiny
from torch import nn

import qat
import qat.ptq
from qat.cli import evaluate, export, verify
from qat.cli.quantize_model import checked, float_model
from qat.cli.run import run_one
from qat.errors import ConfigError
from qat.fold import STRATEGIES
from qat.graph.lifecycle import folded_layers
from qat.report.result import read_result
from qat.train.data import build_data
from qat.train.finished_run import open_run
from qat.train.job import run_job, shipped_module
from qat.train.metrics_file import read_metrics
from qat.train.module import Classifier, qat_config
from qat.train.post_training import first_pictures, quantized
from qat.train.qat_training import save_untrained

# What plain rounding does to the lopsided network is what the steps mend.
pytestmark = pytest.mark.filterwarnings("ignore:.*rounds all weights of channels")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def lopsided(pictures, tmp_path_factory):
    """Weights of a trained tiny network, two of whose channels are a thousand times the others' between its convolutions."""
    torch.manual_seed(0)
    data = build_data({"name": "npz", "root": pictures, "batch_size": 96}, 0)
    network = tiny(4, 1)
    optimizer = torch.optim.Adam(network.parameters(), 0.02)
    images, labels = next(iter(data.train_dataloader()))
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
    with torch.no_grad():
        network[1].weight[:2] *= 1000
        network[1].bias[:2] *= 1000
        network[3].weight[:, :2] /= 1000
    path = tmp_path_factory.mktemp("weights") / "lopsided.pth"
    torch.save(network.state_dict(), path)
    return str(path)


@pytest.fixture
def steps(config, lopsided):
    """A job without training: one 4-bit weight scale a tensor, all steps."""
    config["model"]["checkpoint"] = lopsided
    config["float_training"]["max_epochs"] = config["trainer"]["max_epochs"] = 0
    config["quant"]["weight"] |= {"per_channel": False, "bits": 4}
    config["ptq"] |= {"equalize": True, "absorb_bias": True, "adaround": 20, "correct_bias": "empirical", "pictures": 40}
    return config


def folder(tmp_path, name="run"):
    path = tmp_path / name
    path.mkdir()
    return path


def by_hand(config):
    """Accuracy after every step, from the functions themselves."""
    data = build_data(config["data"], config["seed"])
    model = tiny(4, 1)
    model.load_state_dict(torch.load(config["model"]["checkpoint"]))
    some = data.calibration_batches(2)
    x = some[0]
    images = torch.cat([images for images, _ in data.test_dataloader()])
    labels = torch.cat([labels for _, labels in data.test_dataloader()])

    def right(network):
        with torch.no_grad():
            return float((network.eval()(images).argmax(1) == labels).double().mean())

    def prepared(network):
        made = qat.prepare(network, (x,), qat_config(config["quant"], config["fold"], "ort_vnni"))
        qat.calibrate(made, some)
        return made

    pictures = [*data.calibration_batches(2), data.calibration_batches(3)[2][:8]]
    equalized = qat.ptq.equalize(model, (x,))
    absorbed = qat.ptq.absorb_bias(equalized, (x,))
    unrounded = prepared(absorbed)
    rounded = qat.ptq.adaround(unrounded, pictures, iterations=20, seed=0, progress=False)
    corrected = qat.ptq.correct_bias(rounded, pictures, method="empirical", reference=unrounded, progress=False)
    found = {"float": right(model), "ptq": right(prepared(model)), "equalize": right(prepared(equalized))}
    return {**found, "absorb_bias": right(prepared(absorbed)), "adaround": right(rounded), "correct_bias": right(corrected)}


def test_every_step_is_measured_in_its_order(steps, tmp_path, caplog):
    caplog.set_level("INFO", "qat")
    run = folder(tmp_path)
    result = run_job(steps, run)
    expected = by_hand(steps)
    assert result == read_result(run) and list(result["accuracy"]) == [*expected, "fake_quant", "integer"]
    assert {step: result["accuracy"][step] for step in expected} == pytest.approx(expected, abs=1e-12)
    assert result["accuracy"]["fake_quant"] == result["accuracy"]["correct_bias"]
    assert expected["ptq"] < expected["float"] - 0.1 and expected["equalize"] > expected["ptq"]  # or the test would see nothing
    assert (result["steps"], result["freeze_step"], result["status"]) == (0, None, "ok") and result["parity"]["max_lsb"] <= 1
    assert set(result["seconds"]) >= set(expected)
    said = caplog.text
    assert f"equalize: test accuracy {expected['equalize']:.4f} ({expected['equalize'] - expected['ptq']:+.4f})" in said
    assert all(re.search(rf"{step}.*: \d+ done, \d+ left", said) for step in list(expected)[2:])
    (row,) = read_metrics(run / "metrics.csv")
    assert row == pytest.approx({"step": 0, **{f"test_acc_{step}": value for step, value in expected.items()}})
    page = (run / "report.html").read_text()
    assert "equalize" in page and "adaround" in page and "without training" in page and "Training</h2>" not in page
    names = {path.name for path in run.iterdir()}
    assert {"checkpoints", "metrics.csv", "model.onnx", "report.html", "result.json"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["last.ckpt"]


def test_stopped_in_a_step_resumed_and_opened_again(steps, tmp_path, monkeypatch, capsys):
    """verify, export, evaluate and quantize open the folder of a run without training."""

    def stopped(*args, **options):
        raise KeyboardInterrupt

    steps["recipe"] = "tiny"
    with monkeypatch.context() as patch:
        patch.setattr(qat.ptq, "adaround", stopped)
        status, result = run_one(steps, [], [])
    (run,) = (tmp_path / "runs" / "tiny").iterdir()
    assert status == 130 and result["status"] == read_result(run)["status"] == "interrupted"
    left = {path.name for path in run.rglob("*")}
    assert not {"last.ckpt", "model.onnx"} & left and not any(name.endswith((".part", ".tmp")) for name in left)
    with pytest.raises(ConfigError, match="resume="):
        open_run(run)
    status, result = run_one({**steps, "resume": str(run)}, [], [])
    expected = by_hand(steps)
    assert status == 0 and {step: result["accuracy"][step] for step in expected} == pytest.approx(expected, abs=1e-12)
    assert {"config.yaml", "env.json", "train.log"} <= {path.name for path in run.iterdir()}
    trust = ["--trust-model", "tiny_networks:tiny"]
    capsys.readouterr()
    assert verify.main([str(run), "--pictures", "32", "--max-lsb", "0", *trust]) == 0
    assert evaluate.main([str(run), *trust]) == 0
    assert f"top-1                 {result['accuracy']['integer']:.4f}" in capsys.readouterr().out
    again = tmp_path / "again.onnx"
    assert export.main([str(run), "--output", str(again), *trust]) == 0
    notes = [{p.key: p.value for p in onnx.load(path).metadata_props} for path in (run / "model.onnx", again)]
    assert notes[0] == notes[1] and notes[0]["qat.scales"].startswith("post-training quantization; ranges")
    assert '"adaround": 20' in notes[0]["qat.scales"] and "trained" not in notes[0]["qat.scales"]
    model = checked(float_model(str(run), None, False, "tiny_networks:tiny"), None, None, None)
    assert (model.shape, model.classes, model.data) == ((1, 8, 8), 4, "npz")
    expected = tiny(4, 1)
    expected.load_state_dict(torch.load(steps["model"]["checkpoint"]))
    x = torch.rand(5, 1, 8, 8)
    assert torch.equal(model.network(x), expected.eval()(x))


def last_module(config, build=tiny):
    """(data, module after the last step) of a job, without its files."""
    data = build_data(config["data"], config["seed"])
    torch.manual_seed(1)
    network = build(4, 1)
    if config["model"]["checkpoint"]:
        network.load_state_dict(torch.load(config["model"]["checkpoint"]))
    *_, (_, module) = quantized(config, data, network, CPU)
    return data, module


def bits_come_back(config, data, module, tmp_path):
    path = save_untrained(module, tmp_path)
    images, _ = next(iter(data.test_dataloader()))
    with torch.no_grad():
        expected = module.network.eval()(images)
        again = shipped_module(path, config, data).network.eval()
        lightning = Classifier.load_from_checkpoint(path, weights_only=True).network.eval()
        assert torch.equal(again(images), expected) and torch.equal(lightning(images), expected)
        assert torch.equal(qat.convert(again)(images), qat.convert(module.network)(images))
    return again


@pytest.mark.parametrize("fold", STRATEGIES)
def test_a_checkpoint_gives_the_same_bits_back(steps, tmp_path, fold):
    steps["fold"]["name"] = fold
    steps["quant"]["weight"]["per_channel"] = fold == "scale_merge"
    bits_come_back(steps, *last_module(steps), tmp_path)


@pytest.mark.parametrize("relu6", ["replace_relu6", "within_relu6"])
@pytest.mark.parametrize("fold", STRATEGIES)
def test_a_changed_structure_is_built_again(config, tmp_path, fold, relu6):
    """ReLU6 replaced or not, scale and shift given to a BatchNorm without, a bias given to a head without."""
    config["model"]["name"], config["fold"]["name"] = "tiny_networks:clipped", fold
    config["ptq"] |= {"equalize": True, relu6: True, "absorb_bias": True, "correct_bias": "empirical", "pictures": 32}
    data, module = last_module(config, clipped)
    again = bits_come_back(config, data, module, tmp_path)
    assert sum(isinstance(m, nn.ReLU6) for m in again.modules()) == (0 if relu6 == "replace_relu6" else 2)
    head = list(folded_layers(again).values())[-1]
    assert head.bias_fold is not None and bool((head.bias_fold != 0).any())


def test_training_starts_from_equalized_weights(steps, tmp_path):
    """With a learning rate of 0 and statistics that do not move, what is trained is what the steps gave."""
    steps["ptq"] |= {"adaround": 0, "correct_bias": None}
    steps["trainer"]["max_epochs"], steps["fold"]["name"] = 1, "frozen"
    steps["optim"] = {**steps["optim"], "lr": 0.0}
    steps["quant"]["freeze_ranges"] = 0
    run = folder(tmp_path)
    result = run_job(steps, run)
    assert list(result["accuracy"]) == ["float", "ptq", "equalize", "absorb_bias", "fake_quant", "integer"] and result["steps"] == 6
    expected = last_module(steps)[1].network.state_dict()
    shipped = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    weights = [key for key in expected if key.endswith(("conv.weight", "bn.weight", "bn.bias"))]
    assert weights and all(torch.equal(shipped[f"network.{key}"], expected[key]) for key in weights)
    assert result["accuracy"]["fake_quant"] == result["accuracy"]["absorb_bias"] > result["accuracy"]["ptq"]


def test_ranges_are_searched_after_the_float_steps(steps):
    steps["ptq"] |= {"absorb_bias": False, "adaround": 0, "correct_bias": None}
    steps["quant"]["weight"]["range"] = "lsq"
    steps["quant"]["range_search"] = 1
    data = build_data(steps["data"], steps["seed"])
    network = tiny(4, 1)
    network.load_state_dict(torch.load(steps["model"]["checkpoint"]))
    searched = {step: module.network for step, module in quantized(steps, data, network, CPU)}
    assert list(searched) == ["ptq", "equalize", "range_search"]
    expected = qat.prepare(
        qat.ptq.equalize(network, (data.calibration_batches(1)[0],)), (torch.zeros(2, 1, 8, 8),), qat_config(steps["quant"], steps["fold"])
    )
    qat.calibrate(expected, data.calibration_batches(2))
    qat.search_weight_ranges(expected, data.calibration_batches(1))
    found = searched["range_search"].state_dict()
    assert all(torch.equal(value, found[key]) for key, value in expected.state_dict().items() if torch.is_tensor(value))


@pytest.mark.parametrize(("count", "sizes"), [(16, [16]), (40, [16, 16, 8]), (1000, [16] * 6)])
def test_as_many_pictures_as_asked_for(config, count, sizes):
    data = build_data(config["data"], config["seed"])
    assert [len(batch) for batch in first_pictures(data, count)] == sizes
    assert torch.equal(torch.cat(first_pictures(data, count)), torch.cat(data.calibration_batches(6))[:count])


def test_the_example_of_the_document_runs(lopsided, config):
    page = (Path(__file__).parents[2] / "docs" / "post_training.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    data = build_data(config["data"], config["seed"])
    model = tiny(4, 1)
    model.load_state_dict(torch.load(lopsided))
    names = {"model": model.eval(), "images": data.calibration_batches(1)[0], "batches": data.calibration_batches(6)}
    exec(code.replace("1000", "10"), names)
    assert [report.step.split()[0] for report in names["prepared"].step_reports] == ["equalize", "absorb_bias", "adaround", "correct_bias"]
    with torch.no_grad():
        logits, expected = names["converted"](names["images"]), model(names["images"])
    assert float((logits - expected).square().sum() / expected.square().sum()) < 0.01
