import json
import signal

import pytest
import torch

from qat.errors import ConfigError, QATError
from qat.fold import STRATEGIES
from qat.report.result import read_result
from qat.train.float_model import cache_path
from qat.train.job import check_job, run_job
from qat.train.metrics_file import read_metrics
from qat.train.module import Classifier

FIELDS = [
    "status",
    "recipe",
    "fold",
    "seed",
    "weight_bits",
    "activation_bits",
    "per_channel",
    "accuracy",
    "validation",
    "parity",
    "freeze_step",
    "steps",
    "seconds",
    "peak_memory_mb",
]


def folder(tmp_path, name="run"):
    path = tmp_path / name
    path.mkdir()
    return path


def test_the_story_from_float_to_integers(config, tmp_path):
    run = folder(tmp_path)
    result = run_job(config, run)
    assert list(result) == FIELDS and result == read_result(run)
    assert (result["status"], result["freeze_step"], result["steps"]) == ("ok", 9, 18)
    assert list(result["accuracy"]) == ["float", "ptq", "fake_quant", "integer"]
    assert all(0 <= value <= 1 for value in result["accuracy"].values())
    best = max(row["val_acc"] for row in read_metrics(run / "metrics.csv")[1:] if "val_acc" in row and row["step"] > 9)
    assert result["validation"] == pytest.approx(best)
    assert abs(result["accuracy"]["integer"] - result["accuracy"]["fake_quant"]) <= 0.03
    assert result["parity"]["max_lsb"] <= 1
    assert result["peak_memory_mb"] > 50 and set(result["seconds"]) >= {"float", "ptq", "qat", "export", "integer"}
    names = {path.name for path in run.iterdir()}
    assert {"checkpoints", "metrics.csv", "model.onnx", "report.html", "result.json"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt", "float.ckpt"}
    rows = read_metrics(run / "metrics.csv")
    assert len([row for row in rows if "val_acc" in row]) == 3
    assert {"lr", "train_loss_step"} <= {key for row in rows for key in row}
    assert rows[0] == {"step": 0, **{f"test_acc_{step}": result["accuracy"][step] for step in ("float", "ptq")}}
    shipped = Classifier.load_from_checkpoint(run / "checkpoints" / "best.ckpt", weights_only=True)
    assert all(m.frozen for m in shipped.network.modules() if hasattr(m, "keeps_bn") and m.keeps_bn)


def test_a_report_that_fails_does_not_cost_the_result(config, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("qat.train.job.write_report", lambda *args: 1 / 0)
    run = folder(tmp_path)
    assert run_job(config, run)["status"] == "ok" and read_result(run)["status"] == "ok"
    assert "report.html could not be written (ZeroDivisionError" in caplog.text


def test_the_float_network_is_trained_once(config, tmp_path):
    first = run_job(config, folder(tmp_path, "a"))
    (cached,) = (tmp_path / "runs" / "float_cache").iterdir()
    assert cached == cache_path(config)
    stamp = cached.stat().st_mtime_ns
    again = run_job(config, folder(tmp_path, "b"))
    assert cached.stat().st_mtime_ns == stamp and not (tmp_path / "b" / "checkpoints" / "float.ckpt").exists()
    assert again["accuracy"] == first["accuracy"] and again["parity"] == first["parity"]


def test_a_damaged_cache_is_trained_again(config, tmp_path, caplog):
    cache_path(config).parent.mkdir(parents=True)
    cache_path(config).write_bytes(b"half a file")
    run_job(config, folder(tmp_path))
    assert "training the float network again" in caplog.text


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (("data", "workers", 3), True),
        (("fold", "name", "static"), True),
        (("optim", "lr", 1.0), True),
        (("seed", None, 1), False),
        (("model", "options", {"dropout": 0.1}), False),
        (("data", "batch_size", 8), False),
        (("float_training", "max_epochs", 3), False),
    ],
)
def test_what_the_float_network_depends_on(config, change, same):
    before = cache_path(config)
    part, key, value = change
    config[part] = value if key is None else {**config[part], key: value}
    assert (cache_path(config) == before) is same


# one that follows the batch, one without a BatchNorm, one that merges into scales; the layers of all are tested by themselves
SOON = ("batch_renorm", "static", "scale_merge")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SOON else pytest.mark.slow) for name in STRATEGIES if name != "bn_correction"]
)
def test_every_strategy(config, tmp_path, name):
    config["fold"]["name"] = name
    config["float_training"]["max_epochs"] = config["trainer"]["max_epochs"] = 1
    result = run_job(config, folder(tmp_path))
    assert (result["status"], result["fold"]) == ("ok", name)
    assert result["freeze_step"] == (None if name in ("static", "frozen") else 3)
    assert result["parity"]["max_lsb"] <= 1


def test_reestimation_learned_scales_and_four_bits(config, tmp_path):
    config["fold"] |= {"freeze": "auto", "reestimate_before_freeze": 2, "reestimate_before_eval": 2}
    for part in ("weight", "activation"):
        config["quant"][part] |= {"bits": 4, "range": "lsq"}
    config["float_training"]["max_epochs"] = config["trainer"]["max_epochs"] = 1
    result = run_job(config, folder(tmp_path))
    assert (result["weight_bits"], result["activation_bits"]) == (4, 4) and result["parity"]["max_lsb"] <= 1


def press_ctrl_c(monkeypatch, step, epochs):
    """Ctrl-C during step `step` of the fit that runs for `epochs` epochs."""
    original = Classifier.training_step

    def training_step(self, batch, batch_idx):
        if self.trainer.max_epochs == epochs and self.global_step == step:
            signal.raise_signal(signal.SIGINT)
        return original(self, batch, batch_idx)

    monkeypatch.setattr(Classifier, "training_step", training_step)


@pytest.mark.parametrize("step", [pytest.param(4, marks=pytest.mark.slow), 9, pytest.param(11, marks=pytest.mark.slow)])
def test_stopped_and_resumed_gives_the_same_result(config, tmp_path, monkeypatch, step):
    whole = run_job(config, folder(tmp_path, "whole"))
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, step, epochs=3)
        with pytest.raises(KeyboardInterrupt):
            run_job(config, folder(tmp_path, "stopped"))
    assert not (tmp_path / "stopped" / "result.json").exists()
    config["resume"] = str(tmp_path / "stopped")
    resumed = run_job(config, folder(tmp_path, "resumed"))
    for key in ("accuracy", "parity", "freeze_step", "steps"):
        assert resumed[key] == whole[key], key
    rows = [read_metrics(tmp_path / name / "metrics.csv") for name in ("whole", "resumed")]
    for row in rows[0] + rows[1]:
        row.pop("train_loss_epoch", None)  # in the epoch of the stop a mean over the steps after it
    assert rows[0] == rows[1]
    a, b = (torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for name in ("whole", "resumed"))
    assert all(torch.equal(value, b[key]) for key, value in a.items() if torch.is_tensor(value))


def test_stopped_during_the_float_training(config, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, 3, epochs=2)
        with pytest.raises(KeyboardInterrupt):
            run_job(config, folder(tmp_path, "stopped"))
    assert [path.name for path in (tmp_path / "stopped" / "checkpoints").iterdir()] == ["float.ckpt"]
    config["resume"] = str(tmp_path / "stopped")
    resumed = run_job(config, folder(tmp_path, "resumed"))
    config |= {"resume": None, "run_root": str(tmp_path / "other")}
    assert resumed["accuracy"] == run_job(config, folder(tmp_path, "whole"))["accuracy"]


def refuse_training(monkeypatch):
    def training_step(self, batch, batch_idx):
        raise AssertionError("training began")

    monkeypatch.setattr(Classifier, "training_step", training_step)


def test_bad_input_is_refused_before_any_training(config, tmp_path, monkeypatch):
    refuse_training(monkeypatch)
    cases = [
        ({"fold": {**config["fold"], "freeze": 200000}}, r"fold\.freeze: found step 200000 of a run of 18 steps"),
        ({"resume": str(tmp_path / "nowhere")}, r"resume: found no run in '.*nowhere'"),
        (
            {"float_training": {**config["float_training"], "max_epochs": 0}},
            r"float_training\.max_epochs: found 0 and no model\.checkpoint",
        ),
        ({"model": {**config["model"], "name": "tiny_networks:branching"}}, r"tiny_networks"),
        ({"model": {**config["model"], "name": "tiny_networks:other_head"}}, r"model: found an output of \(1, 3\) for one picture"),
    ]
    for number, (change, message) in enumerate(cases):
        with pytest.raises(QATError, match=message):
            run_job({**config, **change}, folder(tmp_path, str(number)))


def test_what_a_sweep_asks_before_its_jobs(config, monkeypatch):
    assert check_job(config) == ""
    monkeypatch.setattr("qat.train.module.build_model", lambda *_: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4)))
    assert check_job(config).endswith("can be folded, so that all strategies are the same (0 folded, 0 left (no normalisation found))")
    monkeypatch.setattr("qat.train.module.build_model", lambda *_: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)))
    with pytest.raises(ConfigError, match=r"an output of \(1, 3\)"):
        check_job(config)


def test_a_run_that_failed_after_training_goes_on_there(config, tmp_path):
    first = run_job(config, folder(tmp_path, "a"))
    config["resume"] = str(tmp_path / "a")
    again = run_job(config, tmp_path / "a")
    for key in ("accuracy", "parity", "freeze_step", "steps"):
        assert again[key] == first[key], key
    assert len(read_metrics(tmp_path / "a" / "metrics.csv")) == 10


def test_another_network_cannot_take_over_a_run(config, tmp_path):
    run_job(config, folder(tmp_path, "a"))
    config |= {"resume": str(tmp_path / "a"), "fold": {**config["fold"], "name": "naive"}}
    with pytest.raises(ConfigError, match=r"other values of fold\.name"):
        run_job(config, folder(tmp_path, "b"))


def test_a_checkpoint_is_the_float_network(config, tmp_path):
    torch.manual_seed(0)
    config["float_training"]["max_epochs"] = 0
    from tiny_networks import tiny

    torch.save(tiny(4, 1).state_dict(), tmp_path / "weights.pth")
    config["model"]["checkpoint"] = str(tmp_path / "weights.pth")
    config["trainer"]["max_epochs"] = 1
    result = run_job(config, folder(tmp_path))
    assert result["status"] == "ok" and not (tmp_path / "runs").exists()
    (tmp_path / "weights.pth").unlink()
    Classifier.load_from_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)


def test_the_result_is_strict_json(config, tmp_path):
    config["trainer"]["max_epochs"] = config["float_training"]["max_epochs"] = 1
    config["recipe"] = None
    run_job(config, folder(tmp_path))
    json.loads((tmp_path / "run" / "result.json").read_text(), parse_constant=pytest.fail)


def test_weight_ranges_chosen_before_training(config, tmp_path):
    config["quant"]["weight"] |= {"range": "lsq", "per_channel": False}
    config["quant"]["range_search"] = 1
    result = run_job(config, folder(tmp_path))
    assert list(result["accuracy"]) == ["float", "ptq", "range_search", "fake_quant", "integer"] and "range_search" in result["seconds"]
