"""verify, export and evaluate on a run made by the main command."""

import json
import shutil

import numpy as np
import onnx
import pytest
import torch

import qat
from qat.cli import evaluate, export, verify
from qat.train.finished_run import open_run


@pytest.fixture
def here(run, monkeypatch):
    monkeypatch.chdir(run.parents[2])
    return run


# Single roundings of float sums grow on their way through 27 layers.
@pytest.mark.parametrize(
    ("against", "bound", "identical"),
    [
        ("onnxruntime", 0, 1.0),
        ("onnxruntime_unoptimized", 12, 0.95),
        ("integers_float", 1, 0.999),
        ("integers_fixed", 1, 0.999),
        ("trained", 1, 0.999),
    ],
)
def test_verify_says_that_the_file_computes_what_was_trained(here, capsys, against, bound, identical):
    words = [str(here), "--pictures", "64", "--against", against, "--max-lsb", str(bound), "--identical", str(identical)]
    assert verify.main(words) == 0
    said = capsys.readouterr().out
    if against == "onnxruntime":
        assert "the same answer as convert() for 64 of 64 pictures" in said
    assert f"(bounds {bound} LSB" in said and "identical at every tensor" in said and "SQNR" in said and "quantizers." in said


def test_verify_names_the_first_tensor_that_diverges(here, capsys, tmp_path):
    model = onnx.load(here / "model.onnx")
    bias = next(i for i in model.graph.initializer if i.name.endswith("bias") and i.data_type == onnx.TensorProto.INT32)
    layer = bias.name.removesuffix(".bias")
    bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) + np.int32(100000), bias.name))
    for item in here.iterdir():
        (tmp_path / item.name).symlink_to(item)
    (tmp_path / "model.onnx").unlink()
    onnx.save(model, tmp_path / "model.onnx")
    assert verify.main([str(tmp_path), "--pictures", "32"]) == 1
    said = capsys.readouterr().out
    reader = next(n for n in qat.convert(open_run(here).network(open_run(here).data())).graph.nodes if str(n.target) == layer)
    while not str(reader.target).startswith("quantizers."):
        reader = next(iter(reader.users))
    assert f"first diverges at {reader.target}" in said


def test_the_float_network_is_found_from_another_folder(run, here, tmp_path, monkeypatch):
    expected, told = open_run(run).float_network()
    monkeypatch.chdir(tmp_path)
    network, again = open_run(run).float_network()
    assert told == again == "the float network it started from"
    assert all(torch.equal(value, network.state_dict()[key]) for key, value in expected.state_dict().items())


def test_evaluate_counts_as_the_run_did(here, capsys):
    assert evaluate.main([str(here)]) == 0
    said = capsys.readouterr().out
    accuracy = json.loads((here / "result.json").read_text())["accuracy"]["integer"]
    assert f"top-1                 {accuracy:.4f}" in said and "the float network it started from" in said
    assert evaluate.main([str(here / "model.onnx")]) == 0
    assert f"top-1                 {accuracy:.4f}" in capsys.readouterr().out


def test_the_file_says_where_it_comes_from(here):
    notes = {p.key: p.value for p in onnx.load(here / "model.onnx").metadata_props}
    assert notes["qat.recipe"] == "mbv1_bncorr" and notes["qat.target"] == "ort_vnni" and notes["qat.opset"] == "21"
    assert "bn_correction" in notes["qat.scales"] and json.loads(notes["qat.classes"]) == list("0123456789")
    assert not any(str(here.parents[2]) in value for value in notes.values())


def test_export_for_another_target(here, capsys, tmp_path):
    output = tmp_path / "again.onnx"
    assert export.main([str(here), "--target", "integer_only", "--output", str(output)]) == 0
    assert {p.key: p.value for p in onnx.load(output).metadata_props}["qat.target"] == "integer_only"
    assert verify.main([str(here), "--pictures", "32", "--file", str(output), "--max-lsb", "0"]) == 0
    capsys.readouterr()
    assert export.main([str(here), "--target", "openvino", "--output", str(tmp_path / "v.onnx")]) == 2
    assert "half-way" in capsys.readouterr().err
    assert export.main([str(here), "--target", "tensorrt", "--output", str(tmp_path / "t.onnx")]) == 2
    said = capsys.readouterr().err
    assert "a network trained for ort_vnni with asymmetric activations" in said and "Train it with target=tensorrt" in said
    assert export.main([str(here), "--target", "ort_x86", "--output", str(tmp_path / "x.onnx")]) == 2
    assert "weights of 8 bits" in capsys.readouterr().err
    assert export.main([str(here), "--output", str(output)]) == 2
    assert "there already" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["again.onnx"]


@pytest.mark.parametrize(
    ("command", "words", "expected"),
    [
        (verify, ["nowhere"], "no result.json"),
        (verify, ["{run}", "--pictures", "-64"], "--pictures"),
        (verify, ["{run}", "--identical", "nan"], "bounds"),
        (verify, ["{run}", "--max-lsb", "-1"], "bounds"),
        (verify, ["gone"], "no such file"),
        (verify, ["{run}", "--against", "openvino"], "half-way"),
        (verify, ["{run}/model.onnx"], "the folder of a finished run"),
        (verify, ["damaged"], "best.ckpt"),
        (export, ["unread"], "config.yaml"),
        (evaluate, ["{run}", "--batch-size", "0"], "--batch-size"),
        (evaluate, ["{run}/model.onnx", "--data", "npz", "--root", "colour.npz"], "inputs that it takes"),
        (evaluate, ["nowhere.onnx"], "no such file"),
        (evaluate, ["broken.onnx"], "no ONNX file"),
        (evaluate, ["float.onnx"], "without scales"),
        (evaluate, ["{run}/model.onnx", "--data", "npz", "--root", "other.npz"], "classes"),
        (evaluate, ["bare.onnx"], "--data"),
    ],
)
def test_bad_input_is_one_line(here, capsys, monkeypatch, tmp_path, command, words, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    torch.onnx.export(torch.nn.Linear(2, 2).eval(), (torch.zeros(1, 2),), "float.onnx", dynamo=True, verbose=False)
    bare = onnx.load(here / "model.onnx")
    del bare.metadata_props[:]
    onnx.save(bare, "bare.onnx")
    x, y = np.zeros((40, 16, 16, 3), np.uint8), np.arange(40) % 4
    np.savez("other.npz", **{f"{part}_{kind}": a for part in ("train", "val", "test") for kind, a in (("images", x), ("labels", y))})
    for name, content in (("gone", None), ("damaged", "checkpoints/best.ckpt"), ("unread", "config.yaml")):
        shutil.copytree(here, tmp_path / name, ignore=shutil.ignore_patterns("model.onnx" if name == "gone" else "*.html"))
        if content:
            (tmp_path / name / content).write_text("a: [1,")
    colour, labels = np.zeros((40, 16, 16, 3), np.uint8), np.arange(40) % 10
    parts = {f"{part}_{kind}": a for part in ("train", "val", "test") for kind, a in (("images", colour), ("labels", labels))}
    np.savez("colour.npz", **parts)
    capsys.readouterr()
    assert command.main([word.format(run=here) for word in words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and expected in lines[0]
