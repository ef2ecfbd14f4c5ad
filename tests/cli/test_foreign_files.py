"""A run folder, weights or data of someone else are data: nothing in them is executed, and what is wrong is one line."""

import os
import pickle
import shutil
import zipfile

import numpy as np
import onnx
import pytest
import torch
import yaml

from qat.cli import evaluate, export, train, verify
from qat.train.float_model import cache_path

RESUME = "resume"
COMMANDS = {
    "verify": lambda folder: verify.main([folder, "--pictures", "32"]),
    "export": lambda folder: export.main([folder, "--output", "again.onnx"]),
    "evaluate": lambda folder: evaluate.main([folder]),
    RESUME: lambda folder: train.main([f"resume={folder}"]),
}


class Evil:
    """Unpickled, it makes a folder."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def zipped(path, evil):
    torch.save({"state_dict": {"weight": evil}, "global_step": 1}, path)


def bare(path, evil):
    path.write_bytes(pickle.dumps({"state_dict": {"weight": evil}}))


def with_known_tensors(path, evil):
    content = torch.load(path, weights_only=True) if path.is_file() else {"state_dict": {}}
    torch.save({**content, "extra": evil}, path)


@pytest.fixture
def place(run, tmp_path, monkeypatch):
    """A copy of everything around a finished run; the marker that nothing may make."""
    shutil.copytree(run.parents[2], tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def folder(run, place):
    return place / run.relative_to(run.parents[2])


def refused(capsys, marker, command, folder, status=2):
    if command == RESUME:
        (folder / "result.json").unlink(missing_ok=True)
    capsys.readouterr()
    assert COMMANDS[command](os.path.relpath(folder)) == status
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert not marker.exists() and len(lines) == 1 and "Traceback" not in said
    return lines[0]


def test_the_pickles_would_act(tmp_path):
    zipped(tmp_path / "a.ckpt", Evil(tmp_path / "marker"))
    torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert (tmp_path / "marker").is_dir()


@pytest.mark.parametrize("write", [zipped, bare, with_known_tensors])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_pickle_in_the_place_of_the_checkpoint(folder, tmp_path, capsys, command, write):
    name = "last.ckpt" if command == RESUME else "best.ckpt"
    write(folder / "checkpoints" / name, Evil(tmp_path / "marker"))
    if command == "evaluate":
        shutil.rmtree(folder.parents[1] / "float_cache")
    line = refused(capsys, tmp_path / "marker", command, folder, status=1 if command == RESUME else 2)
    assert name in line and "cannot be read" in line


def test_a_pickle_in_the_place_of_a_half_trained_float_network(folder, tmp_path, capsys):
    shutil.rmtree(folder.parents[1] / "float_cache")
    (folder / "checkpoints" / "last.ckpt").unlink()
    zipped(folder / "checkpoints" / "float.ckpt", Evil(tmp_path / "marker"))
    assert "float.ckpt" in refused(capsys, tmp_path / "marker", RESUME, folder, status=1)


def test_a_pickle_in_the_place_of_the_cached_float_network(folder, tmp_path, capsys):
    (cached,) = (folder.parents[1] / "float_cache").iterdir()
    zipped(cached, Evil(tmp_path / "marker"))
    assert cached.name in refused(capsys, tmp_path / "marker", "evaluate", folder)


WORDS = "recipe=mbv1_bncorr model.options.width=0.25 float_training.max_epochs=0 trainer.max_epochs=1"


@pytest.mark.parametrize("write", [zipped, bare])
def test_a_pickle_as_weights(tmp_path, monkeypatch, capsys, write):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "weights.pth", Evil(tmp_path / "marker"))
    assert train.main([*WORDS.split(), "model.checkpoint=weights.pth"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "weights.pth: found a file that cannot be read as tensors" in line and not (tmp_path / "marker").exists()


@pytest.mark.parametrize("write", [zipped, with_known_tensors])
def test_a_pickle_as_an_option_of_a_network(tmp_path, write):
    from qat.errors import ConfigError
    from qat.train.models import build_model

    write(tmp_path / "weights.pth", Evil(tmp_path / "marker"))
    model = {"source": "timm", "name": "resnet10t", "options": {"checkpoint_path": str(tmp_path / "weights.pth")}}
    with pytest.raises(ConfigError, match=r"^model\.options\.checkpoint_path: found .*model\.checkpoint"):
        build_model(model, 1000, 3)
    assert not (tmp_path / "marker").exists()


def test_a_pickle_as_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    evil = np.empty(1, object)
    evil[0] = Evil(tmp_path / "marker")
    parts = {f"{split}_{what}": np.zeros(1) for split in ("train", "val", "test") for what in ("images", "labels")}
    np.savez("data.npz", **{key: value for key, value in parts.items() if key != "train_labels"})
    with zipfile.ZipFile("data.npz", "a") as archive, archive.open("train_labels.npy", "w") as file:
        np.lib.format.write_array(file, evil, allow_pickle=True)
    assert train.main(["recipe=mbv1_bncorr", "data=npz", "data.root=data.npz"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "data.npz: found" in line and not (tmp_path / "marker").exists()


def test_a_function_of_a_module_is_not_the_users_own(place, tmp_path):
    """Called as a network, `os:mkdir` would make the folder."""
    from qat.errors import ConfigError
    from qat.train.models import build_model

    with pytest.raises(ConfigError, match="returning NoneType"):
        build_model({"source": "python", "name": "os:mkdir", "options": {"path": str(tmp_path / "marker")}}, 10, 1)
    assert (tmp_path / "marker").is_dir()


CONFIGS = {
    "a tag": (lambda c, m: f"!!python/object/apply:os.mkdir ['{m}']", "config.yaml"),
    "a tag in a value": (lambda c, m: yaml.safe_dump(c) + f"extra: !!python/object/apply:os.mkdir ['{m}']\n", "config.yaml"),
    "a list": (lambda c, m: "[1, 2]", "found a list"),
    "an environment variable": (lambda c, m: {**c, "run_root": "${oc.env:HOME}"}, "run_root: found the interpolation '${oc.env:HOME}'"),
    "a nested interpolation": (lambda c, m: {**c, "quant": {**c["quant"], "overrides": {"a": ["${seed}"]}}}, "quant.overrides.a"),
    "an interpolated key": (lambda c, m: {**c, "model": {**c["model"], "options": {"${oc.env:HOME}": 1}}}, "interpolation"),
    "a target to instantiate": (lambda c, m: {**c, "model": {**c["model"], "_target_": "os.mkdir"}}, "model._target_"),
    "a function of the system": (
        lambda c, m: {**c, "model": {**c["model"], "source": "python", "name": "os:mkdir", "options": {"path": str(m)}}},
        "model.name: found 'os:mkdir'",
    ),
    "a path as a target": (lambda c, m: {**c, "target": {"name": "../../elsewhere"}}, "target.name: found '../../elsewhere'"),
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_configuration_that_wants_more_than_to_be_read(folder, tmp_path, capsys, command, kind):
    write, expected = CONFIGS[kind]
    path = folder / "config.yaml"
    content = write(yaml.safe_load(path.read_text()), tmp_path / "marker")
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    assert expected in refused(capsys, tmp_path / "marker", command, folder)


OWN = """
import timm
def small(num_classes, in_chans, width):
    return timm.create_model("mobilenetv1_100", num_classes=num_classes, in_chans=in_chans, act_layer="relu")
def gone(**options):
    import os
    os.mkdir("marker")
"""


def test_functions_of_the_users_own_are_called(folder, place, capsys):
    """In the working directory without a word, elsewhere named again; not where the run folder brings its own code."""
    path = folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    (folder.parents[0] / "__init__.py").write_text("")
    inner = ".".join(folder.relative_to(place).parts)

    def said(name, *words):
        path.write_text(yaml.safe_dump({**config, "model": {**config["model"], "source": "python", "name": name}}))
        capsys.readouterr()
        verify.main([str(folder), "--pictures", "32", *words])
        return capsys.readouterr().err

    (place / "own_networks_here.py").write_text(OWN)
    assert "other tensors than the network's" in said("own_networks_here:small")
    (folder / "brought.py").write_text(OWN)
    for name in (f"{inner}.brought:gone", "own_networks_here:timm", "own_networks_here:nothing", "nowhere:gone", ":", "a..b:c"):
        line = said(name)
        assert "model.name: found" in line and "--trust-model" in line and not (place / "marker").exists()
    assert "found 'timm:models', a module" in said("timm:models", "--trust-model", "timm:models")


def test_a_resumed_run_writes_beside_itself(folder, place, monkeypatch):
    """Where its own run_root is not the one it lies in."""
    from qat.cli.compose import Composer
    from qat.cli.recipes import find_recipes
    from qat.cli.resume import resumed

    (folder / "result.json").unlink()
    path = folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    with Composer(find_recipes()) as composer:
        assert resumed([f"resume={folder}"], composer)["run_root"] == config["run_root"]
        path.write_text(yaml.safe_dump({**config, "run_root": str(place / "elsewhere")}))
        config = resumed([f"resume={folder}"], composer)
    assert cache_path(config).parents[1] == folder.parent


def test_a_function_named_again_on_the_command_line_is_resumed(folder):
    from qat.cli.compose import Composer
    from qat.cli.recipes import find_recipes
    from qat.cli.resume import resumed
    from qat.errors import ConfigError

    (folder / "result.json").unlink()
    path = folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**config, "model": {**config["model"], "source": "python", "name": "elsewhere:net"}}))
    with Composer(find_recipes()) as composer:
        assert resumed([f"resume={folder}", "model.name=elsewhere:net"], composer)["model"]["name"] == "elsewhere:net"
        for words in ([], ["model.name=elsewhere:other"]):
            with pytest.raises(ConfigError, match=r"model\.name: found 'elsewhere:net'"):
                resumed([f"resume={folder}", *words], composer)


@pytest.mark.parametrize(("key", "value"), [("qat.data", "{"), ("qat.data", "[1]"), ("qat.classes", "7")])
def test_notes_in_a_file_that_are_none(folder, tmp_path, capsys, key, value):
    model = onnx.load(folder / "model.onnx")
    next(p for p in model.metadata_props if p.key == key).value = value
    onnx.save(model, tmp_path / "noted.onnx")
    capsys.readouterr()
    assert evaluate.main([str(tmp_path / "noted.onnx")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"note {key}: found {value!r}" in line


@pytest.mark.parametrize("helper", ["pass", "import nothing_of_that_name", "a typo"])
def test_a_module_that_came_beside_a_run_folder_is_not_imported(tmp_path, monkeypatch, helper):
    """A downloaded folder of several runs brings its own module; one of the user's that cannot be imported is no function either."""
    from qat.errors import ConfigError
    from qat.train.recorded import require_own

    monkeypatch.chdir(tmp_path)
    run = tmp_path / "downloaded" / "run1"
    run.mkdir(parents=True)
    (tmp_path / "downloaded" / "helper.py").write_text(f"import pathlib\npathlib.Path('marker').mkdir()\n{helper}\ndef build(): ...\n")
    (tmp_path / "mine_with_a_typo.py").write_text("a typo\n")
    for name in ("downloaded.helper:build", "mine_with_a_typo:build"):
        with pytest.raises(ConfigError, match="not defined in the working directory"):
            require_own(name, run)
    assert not (tmp_path / "marker").exists()


def test_a_configuration_inside_itself_is_one_line(tmp_path):
    from qat.errors import ConfigError
    from qat.train.recorded import recorded_config

    (tmp_path / "config.yaml").write_text("a: &a [*a]\n")
    with pytest.raises(ConfigError, match=r"config\.yaml") as error:
        recorded_config(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("found", [[1], {"config": {}}, {"config": {"model": 3}}, None])
def test_a_checkpoint_without_its_configuration_is_one_line(tmp_path, found):
    from qat.errors import ConfigError
    from qat.train.resume import checkpoint_to_resume

    (tmp_path / "checkpoints").mkdir()
    torch.save({"state_dict": {}, "hyper_parameters": found}, tmp_path / "checkpoints" / "last.ckpt")
    with pytest.raises(ConfigError, match="no configuration"):
        checkpoint_to_resume({"resume": str(tmp_path)}, tmp_path / "new")
