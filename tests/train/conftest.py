import copy

import numpy as np
import pytest

OPTIM = {
    "name": "sgd",
    "lr": 0.05,
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "warmup_steps": 0,
    "schedule": "cosine",
    "min_lr": 0.0,
    "scale_lr": None,
    "label_smoothing": 0.0,
}
CONFIG = {
    "recipe": "tiny",
    "seed": 0,
    "resume": None,
    "model": {"source": "python", "name": "tiny_networks:tiny", "checkpoint": None, "small_input": False, "options": {}},
    "data": {
        "name": "npz",
        "image_size": None,
        "batch_size": 16,
        "eval_batch_size": 64,
        "workers": 0,
        "augment": "shift",
        "mean": None,
        "std": None,
        "val_fraction": 0.15,
    },
    "quant": {
        "weight": {"bits": 8, "symmetric": True, "per_channel": True, "narrow": True, "range": "minmax"},
        "activation": {"bits": 8, "symmetric": False, "per_channel": False, "narrow": False, "range": "ema"},
        "overrides": {},
        "calibration_batches": 2,
        "range_search": 0,
        "delay": 0,
        "freeze_ranges": None,
    },
    "fold": {
        "name": "bn_correction",
        "freeze": 0.5,
        "lr_after_freeze": 0.1,
        "reestimate_before_freeze": 0,
        "reestimate_before_eval": 0,
        "drift_bound": 0.5,
        "options": {},
    },
    "ptq": {
        "equalize": False,
        "within_relu6": False,
        "replace_relu6": False,
        "absorb_bias": False,
        "adaround": 0,
        "correct_bias": None,
        "pictures": 1024,
    },
    "float_training": {"max_epochs": 2, "optim": OPTIM},
    "optim": OPTIM,
    "trainer": {
        "max_epochs": 3,
        "accelerator": "cpu",
        "devices": 1,
        "strategy": "auto",
        "precision": "32-true",
        "gradient_clip_val": None,
        "limit_train_batches": None,
        "log_every_n_steps": 2,
        "options": {},
    },
    "target": {"name": "ort_vnni"},
    "report": {"moments": 60, "pictures": 64},
}


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """An .npz of grey 8x8 pictures in 4 classes: a bright quarter each, under noise."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 96), ("val", 40), ("test", 40)):
        labels = np.arange(count) % 4
        images = rng.integers(0, 120, (count, 8, 8))
        for image, label in zip(images, labels):
            image[4 * (label // 2) :, 4 * (label % 2) :][:4, :4] += 80
        arrays |= {f"{split}_images": images.astype(np.uint8), f"{split}_labels": labels}
    path = tmp_path_factory.mktemp("pictures") / "quarters.npz"
    np.savez(path, **arrays)
    return str(path)


@pytest.fixture
def config(pictures, tmp_path):
    """A job of 18 steps in 3 epochs that a test may change."""
    config = copy.deepcopy(CONFIG)
    config["data"]["root"] = pictures
    config["run_root"] = str(tmp_path / "runs")
    return config
