"""`scripts/quantize.py`: from a name, weights and a folder of pictures to an integer file, or one line that says why not."""

import json
import math
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import qat
import qat.ptq
from qat.cli import evaluate, quantize
from qat.cli.judge import Judge, Score
from qat.cli.quantize_data import decoded, read_folder
from qat.cli.quantize_model import checked, float_model
from qat.cli.quantize_steps import Pipeline
from qat.deploy.runtime import predict
from qat.errors import ConfigError, QATError
from qat.train.data.folders import FilePictures

CLASSES = ["bottom_left", "bottom_right", "top_left", "top_right"]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def small(num_classes=4, in_chans=3, act=nn.ReLU):
    return nn.Sequential(
        nn.Conv2d(in_chans, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        act(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        act(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, num_classes),
    )


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """24 pictures of 20x20 in four class folders: one quarter is bright."""
    root, rng = tmp_path_factory.mktemp("data") / "pictures", np.random.default_rng(0)
    for label, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True)
        for i in range(6):
            image = rng.integers(0, 100, (20, 20, 3), dtype=np.uint8)
            image[10 * (label < 2) :, 10 * (label % 2) :][:10, :10] += 100
            Image.fromarray(image).save(root / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def weights(pictures, tmp_path_factory):
    """Weights of `small` trained on the pictures, then made lopsided: the same function, but two channels a thousand times the others."""
    torch.manual_seed(0)
    folder = read_folder(str(pictures), 20, "RGB", 24)
    x = torch.cat([*decoded(folder.calibration, MEAN, STD, ""), *decoded(folder.measured, MEAN, STD, "")])
    labels = torch.cat([folder.calibration.labels, folder.measured.labels])
    network = small()
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), labels).backward()
        optimizer.step()
    with torch.no_grad():
        network[1].weight[:2] *= 1000
        network[1].bias[:2] *= 1000
        network[3].weight[:, :2] /= 1000
    path = tmp_path_factory.mktemp("weights") / "small.pth"
    torch.save(network.state_dict(), path)
    return path


@pytest.fixture
def here(tmp_path, monkeypatch, pictures, weights):
    """A working directory with the network's code, its weights and the pictures; what it holds is all that may be there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "small_net", raising=False)
    shutil.copytree(pictures, "pictures")
    shutil.copy(weights, "small.pth")
    lines = [
        "from test_quantize import Relu6Function, small",
        "def clipped(num_classes): from torch import nn; return small(num_classes, act=nn.ReLU6)",
        "def clipped_by_function(num_classes): return small(num_classes, act=Relu6Function)",
    ]
    (tmp_path / "small_net.py").write_text("\n".join(lines))
    return tmp_path


def run(*words, out="model.onnx"):
    return quantize.main(["small_net:small", "--checkpoint", "small.pth", "--data", "pictures", "--image-size", "20", "--out", out, *words])


def rows(said):
    """{step: (top-1 or agreement, SQNR, kept)} of the table."""
    found = {}
    for line in said.splitlines():
        match = re.match(r"(float|nearest rounding|[a-z]+_[a-z]+|equalize|adaround|integers) +(.*)", line)
        if match and (numbers := re.findall(r"(?<![\w.+-])\d\.\d{4}(?!\w)", match[2])):
            verdict = next((word for word in ("taken back", "left out", "kept") if word in match[2]), "")
            found[match[1]] = (float(numbers[0]), verdict)
        elif match:
            found[match[1]] = (None, next((word for word in ("left out", "not possible") if word in match[2]), ""))
    return found


def test_the_whole_command(here, capsys):
    assert run("--per-tensor") == 0
    said, also = capsys.readouterr()
    table = rows(said)
    assert "rounds all weights" not in also  # as in the network that was equalized away
    assert "small_net:small: pictures 3x20x20" in said and "two halves, 12 to calibrate on, 12 to measure on" in said
    assert "measured: top-1" in said
    assert table["float"][0] > table["nearest rounding"][0] and table["equalize"][1] == "kept"
    assert table["adaround"][1] == "left out" and "8 bits, 0.00% lost" in said and "analytic, with only 12 pictures" in said
    assert table["integers"][0] == table["float"][0] and "at most 0 LSB apart, on 12 pictures" in said
    notes = {p.key: p.value for p in onnx.load("model.onnx").metadata_props}
    assert json.loads(notes["qat.classes"]) == CLASSES and notes["qat.target"] == "ort_vnni"
    assert json.loads(notes["qat.data"]) == {"name": "imagefolder", "input_shape": [3, 20, 20], "mean": list(MEAN), "std": list(STD)}
    assert notes["qat.model"] == "small_net:small" and "equalize" in notes["qat.scales"] and str(here) not in str(notes)
    names = [path.name for path in here.iterdir() if path.name != "__pycache__"]
    assert sorted(names) == ["model.onnx", "pictures", "small.pth", "small_net.py"]
    # the file answers as the table says, and evaluate.py reads it by what it says of itself
    folder = read_folder("pictures", 20, "RGB", 512)
    parts = [(decoded(part, MEAN, STD, "")[0], part.labels) for part in (folder.calibration, folder.measured)]
    right = [(answer.argmax(1) == labels).double() for (_, labels), answer in zip(parts, predict("model.onnx", [x for x, _ in parts]))]
    assert float(right[1].mean()) == pytest.approx(table["integers"][0], abs=5e-5)
    for split in ("train", "val"):
        shutil.copytree("pictures", f"laid/{split}")
    assert evaluate.main(["model.onnx", "--root", "laid"]) == 0
    assert f"top-1                 {float(torch.cat(right).mean()):.4f}" in capsys.readouterr().out


def test_without_classes_answers_are_compared_with_float(here, capsys):
    (here / "flat").mkdir()
    for path in sorted((here / "pictures").rglob("*.png")):
        shutil.copy(path, here / "flat" / f"{path.parent.name}{path.name}")
    assert run("--data", "flat", "--steps", "none") == 0
    said = capsys.readouterr().out
    table = rows(said)
    assert "agreement with the float network (no class folders)" in said and table["float"][0] == 1.0
    assert set(table) == {"float", "nearest rounding", "integers"}
    assert "qat.classes" not in {p.key for p in onnx.load("model.onnx").metadata_props}


def test_some_of_the_classes_are_no_labels(here, capsys, monkeypatch):
    monkeypatch.setattr(quantize, "Judge", interrupted)
    shutil.copytree("pictures", "subset", ignore=shutil.ignore_patterns("top_*"))
    assert run("--data", "subset") == 130
    assert "agreement with the float network (2 class folders for 4 classes)" in capsys.readouterr().out


def interrupted(*args, **options):
    raise KeyboardInterrupt


def test_train_and_val_are_kept_apart(here, pictures):
    shutil.copytree(pictures, "laid/train")
    shutil.copytree(pictures, "laid/val", ignore=shutil.ignore_patterns("[2-5].png"))
    folder = read_folder("laid", 20, "RGB", 512)
    paths = [[path.decode() for path in part.paths] for part in (folder.calibration, folder.measured)]
    assert (
        [len(part) for part in paths] == [24, 8]
        and all("/train/" in path for path in paths[0])
        and all("/val/" in path for path in paths[1])
    )
    assert [len(part.labels) for part in (folder.calibration, folder.measured)] == [24, 8]
    few = read_folder("laid", 20, "RGB", 10)
    assert (len(few.calibration.labels), len(few.measured.labels)) == (5, 5)


def test_halves_share_no_picture_and_use_all(pictures):
    folder = read_folder(str(pictures), 20, "RGB", 512)
    both = [*folder.calibration.paths, *folder.measured.paths]
    assert len(both) == len(set(both)) == 24
    for part in (folder.calibration, folder.measured):
        assert [CLASSES[label] for label in part.labels] == [path.decode().split("/")[-2] for path in part.paths]


class Relu6Function(nn.Module):
    def forward(self, x):
        return F.relu6(x)


class Fixed(nn.Module):
    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, x):
        return self.logits


def test_a_picture_beside_class_folders_is_asked_about(here, capsys):
    shutil.copy("pictures/" + CLASSES[0] + "/0.png", "pictures/stray.png")
    assert run() == 2
    assert "--data: found 1 pictures beside 4 folders in pictures; expected one or the other" in capsys.readouterr().err


def test_hidden_files_are_no_pictures(here):
    for folder in (Path("pictures"), Path("pictures") / CLASSES[0]):
        (folder / "._0.png").write_bytes(b"what a file manager leaves")
    folder = read_folder("pictures", 20, "RGB", 24)
    assert len(folder.calibration.labels) + len(folder.measured.labels) == 24 and folder.class_names == sorted(CLASSES)


def test_sixteen_bits_of_grey_keep_their_levels(tmp_path):
    levels = np.linspace(0, 65535, 400).reshape(20, 20).astype(np.uint16)
    Image.fromarray(levels).save(tmp_path / "deep.png")
    (picture,) = (FilePictures([os.fsencode(tmp_path / "deep.png")], [0], 20).get(0, None),)
    assert torch.equal(picture, torch.from_numpy((levels // 256).astype(np.uint8)).expand(3, 20, 20))


def test_a_picture_too_large_to_be_meant_is_named(tmp_path, monkeypatch):
    Image.fromarray(np.zeros((40, 40), np.uint8)).save(tmp_path / "huge.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ConfigError, match=r"huge\.png: found a picture that cannot be read"):
        FilePictures([os.fsencode(tmp_path / "huge.png")], [0], 20).get(0, None)


def test_a_file_that_differs_from_the_network_is_said(here, capsys, monkeypatch):
    class Parity:
        tensors, max_lsb, identical = (SimpleNamespace(name="a", max_lsb=1), SimpleNamespace(name="b", max_lsb=2)), 2, 0.9

    monkeypatch.setattr(qat, "verify", lambda *args: Parity())
    assert run("--steps", "none") == 0
    assert "warning: the file and convert() lie up to 2 LSB apart, first at b" in capsys.readouterr().err


def test_a_score_is_what_it_says():
    expected = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 0.5]])
    judge = Judge(Fixed(expected), [torch.zeros(3, 1)], torch.tensor([0, 1, 1]))
    assert judge.float_score == Score(2 / 3, math.inf)
    got = judge.score(torch.tensor([[2.0, 0.0], [0.0, 3.0], [0.0, 0.5]]))
    assert got.right == 1.0 and got.decibels == pytest.approx(10 * math.log10(14.25 / 1.0))
    assert Judge(Fixed(expected), [torch.zeros(3, 1)], None).float_score.right == 1.0
    assert judge.score(torch.full((3, 2), math.inf)).decibels == -math.inf
    assert Score(0.9, 5.0) > Score(0.8, 50.0) and Score(0.9, 6.0) > Score(0.9, 5.0)


def pipeline(here, asked, count=512, per_channel=True, bits=8, word="small_net:small"):
    model = checked(float_model(word, "small.pth", False, None), 20, None, None)
    folder = read_folder("pictures", 20, "RGB", 24)
    calibration, measured = (decoded(part, model.mean, model.std, "") for part in (folder.calibration, folder.measured))
    config = qat.QATConfig(fold="static", weight=qat.QuantSpec(bits=bits, per_channel=per_channel))
    made = Pipeline(model.network, config, calibration, Judge(model.network, measured, folder.measured.labels), asked, 5)
    made.pictures = count
    return made


def test_warnings_are_those_of_the_network_at_hand(here):
    made = pipeline(here, ["equalize"], per_channel=False)
    (warning,) = made.state.warnings
    assert warning.startswith("0: its one weight scale rounds all weights of channels [2, 3, 4, 5, 6, 7] to 0")
    made.run()
    assert made.rows[-1].kept == "kept" and made.state.warnings == ()


@pytest.mark.parametrize(
    ("per_channel", "bits", "count", "expected"),
    [
        (True, 8, 512, {"mse_ranges": "always", "correct_bias": "empirical"}),
        (True, 8, 63, {"mse_ranges": "always", "correct_bias": "analytic"}),
        (True, 4, 256, {"mse_ranges": "always", "adaround": "4 bits", "correct_bias": "empirical"}),
        (True, 4, 255, {"mse_ranges": "always", "correct_bias": "empirical"}),
        (False, 8, 64, {"equalize": "one weight scale for all", "absorb_bias": "one", "mse_ranges": "always", "correct_bias": "empirical"}),
    ],
)
def test_what_is_chosen(here, per_channel, bits, count, expected):
    made = pipeline(here, "auto", per_channel=per_channel, bits=bits, count=count)
    made.best = made.judge.float_score  # nothing is lost yet
    wanted = {step: why for step in quantize.STEPS for tries, why in [made._wanted(step)] if tries}
    assert list(wanted) == list(expected) and all(wanted[step].startswith(why) for step, why in expected.items())


@pytest.mark.parametrize(("right", "decibels", "wanted"), [(-0.02, 40.0, True), (0.0, 19.0, True), (-0.009, 21.0, False)])
def test_a_poor_network_is_rounded_better(here, right, decibels, wanted):
    made = pipeline(here, "auto")
    made.best = Score(made.judge.float_score.right + right, decibels)
    assert made._wanted("adaround")[0] is wanted


def test_a_step_that_does_harm_is_taken_back(here, monkeypatch):
    def spoiled(prepared, *args, **options):
        broken = original(prepared, *args, **options)
        with torch.no_grad():
            next(iter(broken.parameters())).zero_()
        return broken

    original = qat.ptq.correct_bias
    monkeypatch.setattr(qat.ptq, "correct_bias", spoiled)
    made = pipeline(here, ["correct_bias"])
    before, state = made.best, made.state
    assert made.run() is state.prepared and made.best == before
    assert (made.rows[-1].step, made.rows[-1].kept) == ("correct_bias", "taken back") and made.rows[-1].score < before


@pytest.mark.parametrize("asked", ["auto", ["adaround"]])
def test_a_step_that_is_not_possible(here, monkeypatch, asked):
    def refuse(*args, **options):
        raise QATError("layer", "something", "something else", "Do it.")

    monkeypatch.setattr(qat.ptq, "adaround", refuse)
    made = pipeline(here, asked, bits=4)
    if asked == "auto":
        made.run()
        assert {row.step: row.kept for row in made.rows}["adaround"] == "not possible"
    else:
        with pytest.raises(QATError, match="layer: found something"):
            made.run()


def test_relu6_is_replaced_only_where_it_cannot_stay(here, monkeypatch):
    def harmful(network, example, **relu6):
        asked.append([key for key, chosen in relu6.items() if chosen])
        changed = original(network, example, **relu6)
        if asked[-1] == ["within_relu6"]:
            with torch.no_grad():
                changed.get_parameter("8.weight").zero_()
        return changed

    asked, original = [], qat.ptq.equalize
    monkeypatch.setattr(qat.ptq, "equalize", harmful)
    made = pipeline(here, ["equalize"], per_channel=False, word="small_net:clipped")
    made.best = Score(made.best.right, 3.0)  # better than noise, worse than what equalizing gives
    made.run()
    tried = [(row.why, row.kept) for row in made.rows if row.step == "equalize"]
    assert asked == [["within_relu6"], ["replace_relu6"]]
    assert [why for why, _ in tried] == ["asked for; within ReLU6", "asked for; ReLU for ReLU6"] and tried[0][1] == "taken back"


def test_a_whole_network_is_loaded_only_when_trusted(here):
    torch.save(small().eval(), "whole.pth")
    with pytest.raises(ConfigError, match=r"whole\.pth: found a file of more than tensors .* which runs code.*--trust-file"):
        float_model("whole.pth", None, False, None)
    x = torch.rand(2, 3, 20, 20)
    loaded = checked(float_model("whole.pth", None, True, None), 20, None, None)
    assert torch.equal(loaded.network(x), torch.load("whole.pth", weights_only=False)(x)) and loaded.classes == 4


def test_pictures_and_normalisation_of_timm_architectures(here):
    import timm

    torch.save(timm.create_model("test_resnet", num_classes=7).state_dict(), "seven.pth")
    model = checked(float_model("test_resnet", "seven.pth", False, None), 64, None, [0.5])
    wanted = timm.get_pretrained_cfg("test_resnet")
    assert (model.classes, model.shape, model.mean, model.std) == (7, (3, 64, 64), list(wanted.mean), [0.5])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--data", "nowhere"], "--data: found no folder 'nowhere'"),
        (["--data", "empty"], "0 pictures"),
        (["--data", "holed"], "holed/top_left"),
        (["--data", "broken"], "broken/2.png: found a picture that cannot be read"),
        (["--target", "ort_vnnni"], "Did you mean 'ort_vnni'"),
        (["--steps", "equalise"], "Did you mean 'equalize'"),
        (["--weight-bits", "9"], "from 2 to 8"),
        (["--weight-bits", "8", "--target", "ort_x86"], "from 2 to 7"),
        (["--pictures", "0"], "--pictures"),
        (["--image-size", "-3"], "--image-size"),
        (["--mean", "0.5", "0.5"], "--mean: found 0.5 0.5; expected 1 or 3 numbers"),
        (["--std", "0"], "--std"),
        (["--out", "nowhere/model.onnx"], "--out"),
        (["--out", "small.pth"], "there already"),
        (["--checkpoint", "gone.pth"], "--checkpoint: found no file at 'gone.pth'"),
        (["--checkpoint", "other.pth"], "--checkpoint=other.pth"),
    ],
)
def test_bad_input_is_one_line(here, capsys, monkeypatch, words, expected):
    for name in ("empty", "holed/top_left", "broken"):
        (here / name).mkdir(parents=True)
    for i in range(3):
        shutil.copy(here / "pictures" / "top_left" / "0.png", here / "broken" / f"{i}.png")
    (here / "broken" / "2.png").write_bytes(b"no picture")
    torch.save(nn.Linear(3, 3).state_dict(), "other.pth")
    refuse_work(monkeypatch)
    assert run(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and expected in line and not list(here.glob("**/*.onnx*"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["resnet19"], "Did you mean 'resnet18'"),
        (["resnet18"], "nothing is downloaded"),
        (["torchvision:resnet18"], "nothing is downloaded"),
        (["torchvision:resnet19"], "'resnet18'"),
        (["small_net:smal", "--checkpoint", "small.pth"], "MODEL: found 'small_net:smal'"),
        (["no_such_module:build"], "which cannot be imported"),
        (["gone.pth"], "no file 'gone.pth'"),
        (["small.pth"], "weights without their network"),
        (["small.pth", "--checkpoint", "small.pth"], "Leave out --checkpoint"),
        (["script.pt"], "a TorchScript program"),
        (["exported.pt2"], "an exported program"),
        (["branching:build"], "branching.py"),
        (["branching:features"], "an output of (2, 8, 10, 10)"),
        (["branching:grey"], "MODEL: found RuntimeError"),
        (["pictures"], "no result.json"),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")
def test_networks_that_cannot_be_quantized(here, capsys, monkeypatch, words, expected):
    (here / "branching.py").write_text(
        "from test_quantize import small\n"
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.body = small()\n"
        "    def forward(self, x):\n"
        "        return self.body(x) if x.sum() > 0 else self.body(-x)\n"
        "def build():\n    return Net()\n"
        "def features():\n    return small()[:3]\n"
        "def grey():\n    return small(in_chans=1)\n"
    )
    monkeypatch.delitem(sys.modules, "branching", raising=False)
    if "script.pt" in words:
        torch.jit.save(torch.jit.trace(small().eval(), torch.zeros(1, 3, 20, 20)), "script.pt")
    if "exported.pt2" in words:
        torch.export.save(torch.export.export(small().eval(), (torch.zeros(1, 3, 20, 20),)), "exported.pt2")
    refuse_work(monkeypatch)
    assert quantize.main([*words, "--data", "pictures", "--image-size", "20"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and expected in line and not (here / "model.onnx").exists()


def refuse_work(monkeypatch):
    def work(*args, **options):
        raise AssertionError("work began")

    monkeypatch.setattr(Pipeline, "__init__", work)


@pytest.mark.parametrize("at", ["calibrate", "verify"])
def test_ctrl_c_leaves_nothing_behind(here, monkeypatch, at):
    monkeypatch.setattr(qat, at, interrupted, raising=False)
    before = {path for path in here.rglob("*") if "__pycache__" not in str(path)}
    assert run("--steps", "none") == 130
    assert {path for path in here.rglob("*") if "__pycache__" not in str(path)} == before
