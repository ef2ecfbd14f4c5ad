"""scripts/sensitivity.py on runs of the main command."""

import csv
import errno
import json
import os
import shlex
import shutil
import tempfile

import pytest
import torch
from scipy import stats

from qat.cli import sensitivity
from qat.cli.compose import Composer
from qat.cli.recipes import find_recipes, read_header
from qat.cli.train import main
from qat.graph.sensitivity import layer_losses, layer_quantizers
from qat.report.statistics import holm
from qat.train.answers import answers
from qat.train.finished_run import open_run
from qat.train.module import Classifier, module_config

pytestmark = pytest.mark.filterwarnings("ignore:.*rounds all weights of channels")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    """Folder of a run of few bits without training, which loses much, with words of its own."""
    place = tmp_path_factory.mktemp("sensitivity")
    words = "recipe=mbv1_static quant=w4a4_per_tensor trainer.max_epochs=0 float_training.max_epochs=6 data.image_size=16 seed=1"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(words.split()) == 0
    (folder,) = (place / "runs" / "mbv1_static").iterdir()
    return folder


def rows_of(folder, ending=""):
    with (folder / f"sensitivity{ending}.csv").open() as file:
        return list(csv.DictReader(file))


def test_losses_are_those_of_the_network(run, monkeypatch, capsys):
    monkeypatch.chdir(run.parents[2])
    assert sensitivity.main([str(run), "--pictures", "50", "--share", "0"]) == 0
    said, rows = capsys.readouterr().out, rows_of(run)
    opened = open_run(run)
    network = opened.network(opened.data())
    pictures = opened.data().first_of("val", 50)
    layers = list(layer_quantizers(network))
    assert [row["setting"] for row in rows] == ["unquantized", "quantized", *("alone", "others") * len(layers)]
    assert {row["layer"] for row in rows} == {"", *layers}
    expected = answers(network, pictures, CPU)
    assert float(rows[1]["loss"]) == pytest.approx(expected.loss, rel=1e-5) and float(rows[1]["accuracy"]) == expected.accuracy
    changes = {(row["layer"], row["setting"]): float(row["change"]) for row in rows[2:]}
    for found in layer_losses(network, lambda n: answers(n, pictures, CPU).loss):
        assert changes[found.name, "alone"] == pytest.approx(found.alone, abs=1e-5)
        assert changes[found.name, "others"] == pytest.approx(found.others, abs=1e-5)
    alone = [value for (_, setting), value in changes.items() if setting == "alone"]
    assert alone == sorted(alone, reverse=True)
    by_kind = [{row["layer"]: row for row in rows if row["setting"] == kind} for kind in ("alone", "others")]
    for kind in by_kind:
        p = [stats.t.sf(float(row["change"]) / float(row["standard_error"]), 49) for row in kind.values()]
        assert [float(row["p_holm"]) for row in kind.values()] == pytest.approx(holm(p), rel=1e-3)
    assert f"Holm's correction for {len(layers)} layers" in said
    assert "50 val pictures of digits, the trained network" in said and all(layer in said for layer in layers)
    html = (run / "sensitivity.html").read_text()
    assert "<svg" in html and "src=" not in html and 'href="http' not in html and "conv_stem" in html
    assert not (run / "more_bits.yaml").exists() and not list(run.glob("*.part"))


def test_networks_that_differ_have_files_that_differ(run, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(run.parents[2])
    before = {path: path.stat().st_mtime_ns for path in run.iterdir()}
    out = tmp_path / "new" / "folder"
    words = [str(run), "--pictures", "20", "--share", "0", "--out", str(out)]
    assert sensitivity.main(words) == sensitivity.main([*words, "--before-training"]) == 0
    trained, start = (rows_of(out, ending) for ending in ("", "_before_training"))
    assert {row["network"] for row in trained} == {"trained"} and {row["network"] for row in start} == {"before training"}
    assert trained[1]["loss"] != start[1]["loss"]
    pages = [(out / f"sensitivity{ending}.html").read_text() for ending in ("", "_before_training")]
    assert f"{run}: 20 val pictures of digits, the trained network" in pages[0] and "the network before training" in pages[1]
    assert "sensitivity before training</h1>" in pages[1] and len(list(out.iterdir())) == 4
    assert f"written: {out / 'sensitivity_before_training.csv'}" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in run.iterdir()} == before
    assert sensitivity.Places(out, "_before_training").recipe == out / "more_bits_before_training.yaml"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "--out {run}: found a folder that cannot be written to (Read-only file system)"),
        (["--out", "file"], "--out file: found a file; expected a folder"),
        (["--out", "taken"], "more_bits.yaml: found a folder in the place of a file; expected a file, or nothing."),
    ],
)
def test_places_that_cannot_be_written_to_are_told_before_the_work(run, monkeypatch, tmp_path, capsys, words, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "taken" / "more_bits.yaml").mkdir(parents=True)
    monkeypatch.setattr(sensitivity, "readings", lambda *_: pytest.fail("measured"))
    if not words:  # as root every folder can be written to

        def refuse(**_):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert sensitivity.main([str(run), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and expected.format(run=run) in line and "give --out FOLDER." in line.replace("Give", "give")


def test_a_gap_within_noise_writes_no_recipe(run, monkeypatch, capsys):
    monkeypatch.chdir(run.parents[2])
    assert sensitivity.main([str(run), "--split", "test", "--pictures", "40"]) == 0
    said = capsys.readouterr().out
    assert "nothing to bring back: quantization costs" in said and "--before-training" in said
    assert not (run / "more_bits.yaml").exists()


def test_the_recipe_gives_what_was_measured(rounded, monkeypatch, capsys):
    place = rounded.parents[2]
    monkeypatch.chdir(place)
    assert sensitivity.main([str(rounded), "--share", "0.1"]) == 0
    said = capsys.readouterr().out
    assert "of a run without training" in said and "as a run with it ends, without training" in said
    (place / "recipes").mkdir()
    shutil.copy(rounded / "more_bits.yaml", place / "recipes")
    header = read_header((rounded / "more_bits.yaml").read_text())
    assert set(header) == {"what", "why", "command"} and header["command"] == "python train.py recipe=more_bits"
    assert "of what quantization loses in the network of a run without training: loss" in header["why"]

    (line,) = [line for line in said.splitlines() if line.startswith("more bits for ") and ":" in line]
    layers = line.partition(": ")[2].split(", ")
    with Composer(find_recipes()) as composer:
        config = composer.compose(["recipe=more_bits"])
        (same,) = [line for line in said.splitlines() if line.startswith("the same: python train.py ")]
        by_words = composer.compose(shlex.split(same)[4:])
    assert {**by_words, "recipe": "more_bits"} == config
    own = open_run(rounded).config
    assert set(config["quant"]["overrides"]) == set(layers)
    for part in config:
        if part not in ("recipe", "quant"):
            assert config[part] == own[part]

    assert main(["recipe=more_bits"]) == 0
    capsys.readouterr()
    (again,) = (place / "runs" / "more_bits").iterdir()
    data = open_run(again).data()
    prepared = Classifier(module_config(config, data)).network
    for name, quantizers in layer_quantizers(prepared).items():
        assert all(q.spec.bits == (8 if name in layers else 4) for q in quantizers)
    pictures = data.first_of("val", len(data.splits.val.labels))
    found = answers(open_run(again).network(data), pictures, CPU)
    (loss,) = [line for line in said.splitlines() if line.startswith("loss ") and "->" in line]
    before, after, unquantized = (float(part.strip("(),")) for part in (loss.split()[1], loss.split()[3], loss.split()[5]))
    assert found.loss == pytest.approx(after, rel=1e-3)
    assert before - after >= 0.1 * (before - unquantized) - 1e-3 and before > after > 0
    assert json.loads((again / "result.json").read_text())["status"] == "ok"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nowhere"], "no result.json"),
        (["failed"], "status 'failed'"),
        (["{run}", "--pictures", "0"], "--pictures: found 0"),
        (["{run}", "--pictures", "-3"], "--pictures"),
        (["{run}", "--pictures", "1"], "2 or more"),
        (["{run}", "--pictures", "100000"], "as many as the val split has"),
        (["{run}", "--split", "train"], "--split: found 'train'"),
        (["{run}", "--share", "1.5"], "--share: found 1.5"),
        (["{run}", "--share", "nan"], "--share: found nan"),
        (["damaged"], "best.ckpt"),
    ],
)
def test_bad_input_is_one_line(run, monkeypatch, tmp_path, capsys, words, expected):
    monkeypatch.chdir(tmp_path)
    for name in ("failed", "damaged"):
        shutil.copytree(run, name, ignore=shutil.ignore_patterns("sensitivity.*"))
    (tmp_path / "failed" / "result.json").write_text('{"status": "failed"}')
    (tmp_path / "damaged" / "checkpoints" / "best.ckpt").write_text("no checkpoint")
    before = sorted(path for path in run.iterdir())
    assert sensitivity.main([word.format(run=run) for word in words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and expected in lines[0]
    assert sorted(run.iterdir()) == before and not list(tmp_path.rglob("sensitivity.*"))
