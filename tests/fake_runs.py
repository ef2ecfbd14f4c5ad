"""Run folders that look like those of a comparison, with numbers made up by a rule: nothing is trained."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import yaml

STRATEGIES = ("naive", "moving_average", "frozen", "batch_renorm", "bn_correction", "single_pass", "static", "scale_merge")
SETTINGS = ((8, 8, False), (4, 8, False), (4, 8, True), (4, 4, False))
LAYERS = ["conv_stem", *(f"blocks.{i // 4}.{i % 4}.conv_{kind}" for i in range(13) for kind in ("dw", "pw")), "classifier"]


def config(strategy="bn_correction", setting=SETTINGS[0], seed=0, **changes):
    """A configuration as a run folder holds it; `changes` are dotted keys with __ in the place of dots."""
    weight_bits, activation_bits, per_channel = setting
    nested = {
        "recipe": "compare_fold",
        "seed": seed,
        "run_root": "runs",
        "resume": None,
        "model": {"source": "qat", "name": "mobilenetv1", "options": {"width": 0.25}},
        "data": {"name": "digits", "batch_size": 32, "mean": [0.5], "workers": 0, "split_seed": 0},
        "quant": {"weight": {"bits": weight_bits, "per_channel": per_channel, "range": "minmax"}, "activation": {"bits": activation_bits}},
        "fold": {"name": strategy, "freeze": 0.5 if strategy in ("bn_correction", "batch_renorm") else None, "options": {}},
        "float_training": {"max_epochs": 20, "seed": 0},
        "optim": {"name": "sgd", "lr": 0.01},
        "trainer": {"max_epochs": 10},
    }
    for key, value in changes.items():
        node = nested
        *path, last = key.split("__")
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return nested


def write_run(folder, accuracy=0.95, steps=350, **changes):
    """A finished run; `result_` in front of a change sends it to result.json."""
    folder.mkdir(parents=True)
    result_changes = {key.removeprefix("result_"): changes.pop(key) for key in list(changes) if key.startswith("result_")}
    settings = config(**changes)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    env = {
        "command": "train.py recipe=compare_fold",
        "packages": {"torch": "2.9.0", "onnxruntime": "1.20.0"},
        "git": {"commit": "0123abcd" * 5},
    }
    (folder / "env.json").write_text(json.dumps({**env, "cpu": "a <processor>", "device": "cpu"}))
    result = {
        "status": "ok",
        "recipe": "compare_fold",
        "fold": settings["fold"]["name"],
        "seed": settings["seed"],
        "accuracy": {"float": 0.97, "ptq": accuracy - 0.1, "fake_quant": accuracy, "integer": accuracy},
        "parity": {"identical": 1.0, "max_lsb": 0},
        "freeze_step": None if settings["fold"]["freeze"] is None else steps // 2,
        "steps": steps,
        "seconds": {"float": 80.0, "qat": 0.09 * steps},
        "peak_memory_mb": 1125.6,
        "validation": 0.96,
        **result_changes,
    }
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def round4(values):
    return [None if not math.isfinite(v) else float(f"{v:.4g}") for v in np.asarray(values, dtype=float).tolist()]


def layers_json(generator, worse, steps, layers=LAYERS, filters=64):
    """Content of layers.json; `worse` from 0 to 1 makes everything noisier."""
    at = np.linspace(1, steps, 60).astype(int)
    time = at / steps
    jitter, tensors, widths, sqnr, alone = {}, {}, {}, {}, {}
    for i, name in enumerate(layers):
        noise = generator.lognormal(0, 0.3, len(at))
        jitter[name] = round4((0.002 + 0.2 * worse * (time < 0.5) + 0.01 * worse) * noise * np.exp(-2 * time))
        scale = 0.01 * (1 + i % 5) * np.exp(worse * np.cumsum(generator.normal(0, 0.03, len(at))))
        tensors[f"{name}.weight_quantizer"] = {
            k: round4(f * scale) for k, f in (("scale_low", 0.1), ("scale_high", 1), ("low", -127), ("high", 127))
        }
        top = 4 * (1 + worse * np.sin(3 * time + i)) + 2
        tensors[f"quantizers.{name}"] = {
            "scale_low": round4(top / 255),
            "scale_high": round4(top / 255),
            "low": round4(-0.1 * top),
            "high": round4(top),
        }
        before = generator.lognormal(-1, 0.4, filters)
        widths[name] = {"before": round4(before), "after": round4(before * generator.lognormal(1, 0.3 + worse, filters))}
        sqnr[f"quantizers.{name}"] = float(f"{32 - 0.4 * i - 12 * worse + generator.normal():.4g}")
        alone[name] = float(f"{abs(generator.normal(0, 0.02)) * (1 + 3 * (i == 0)) * (0.2 + worse):.4g}")
    return {
        "version": 1,
        "jitter": {"steps": at.tolist(), "layers": jitter},
        "ranges": {"steps": at.tolist(), "tensors": tensors},
        "filters": widths,
        "sqnr": sqnr,
        "alone": alone,
    }


def write_comparison(root, strategies=STRATEGIES, settings=SETTINGS, seeds=(0, 1, 2), layers=LAYERS):
    """A run of every combination below root/jobs/, each with metrics.csv and, unless `layers` is empty, layers.json."""
    steps = 350
    for j, setting in enumerate(settings):
        for i, strategy in enumerate(strategies):
            for seed in seeds:
                generator = np.random.default_rng([i, j, seed])
                worse = (0.9 if strategy == "naive" else 0.1 + 0.05 * i) * j / 3
                final = 0.97 - 0.01 * j - 0.08 * worse + generator.normal(0, 0.002) + 0.004 * seed
                folder = write_run(
                    root / "jobs" / f"{strategy}_{j}_seed_{seed}", round(final, 4), steps, strategy=strategy, setting=setting, seed=seed
                )
                with (folder / "metrics.csv").open("w", newline="") as file:
                    rows = csv.writer(file)
                    rows.writerow(["step", "train_loss_step", "val_acc"])
                    for step in range(0, steps, 10):
                        rows.writerow([step, f"{math.exp(-step / 100):.4f}", ""])
                        if step % 30 == 20:
                            noise = generator.normal(0, 0.03 * worse)
                            rows.writerow([step + 9, "", f"{final - 0.5 * worse * math.exp(-step / 60) + noise:.4f}"])
                if layers:
                    (folder / "layers.json").write_text(json.dumps(layers_json(generator, worse, steps, layers)))
    return Path(root)
