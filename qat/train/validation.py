"""Which values of the job configuration make sense, alone and together.

Known names come from where they are implemented. Those modules import torch, so they are imported at the point of use: reading and
composing a configuration stays fast.
"""

import inspect
from dataclasses import replace
from typing import Any

from qat.train.problems import NotPossibleError, Problems

WEIGHT_RANGES = ("minmax", "mse", "percentile", "lsq")
ACTIVATION_RANGES = ("ema", "minmax", "mse", "percentile", "lsq")
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")


def moment_problem(value: object, *, auto: bool = False) -> bool:
    """Is `value` no moment of a run? Moments are null (never), whole steps, a share in (0, 1), and where allowed "auto"."""
    if value is None or (auto and value == "auto"):
        return False
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    return value < 0 if isinstance(value, int) else not 0 < value < 1


def _quantizer(where: str, part: dict[str, Any], ranges: tuple[str, ...], problems: Problems) -> None:
    from qat.quant import LOGIT_RANGES

    problems.number(f"{where}.bits", part["bits"], 2, 8, whole=True)
    if part["range"] in list(LOGIT_RANGES):
        todo = f"Write quant.overrides={{classifier: {{activation: {{range: {part['range']}}}}}}}."
        problems.add(f"{where}.range", repr(part["range"]), f"one of {', '.join(ranges)}; this one is for the logits alone", todo)
    else:
        problems.name(f"{where}.range", part["range"], ranges)


def _seed(where: str, seed: object, problems: Problems) -> None:
    problems.number(where, seed, 0, 2**32 - 1, whole=True)


def _optim(where: str, optim: dict[str, Any], problems: Problems) -> None:
    from qat.train.optim import OPTIMIZERS, SCHEDULES

    problems.name(f"{where}.name", optim["name"], OPTIMIZERS)
    problems.name(f"{where}.schedule", optim["schedule"], SCHEDULES)
    for key in ("lr", "weight_decay", "min_lr"):
        problems.number(f"{where}.{key}", optim[key], 0)
    for key in ("momentum", "label_smoothing"):
        problems.number(f"{where}.{key}", optim[key], 0, 1)
    problems.number(f"{where}.warmup_steps", optim["warmup_steps"], 0, whole=True)
    if optim["scale_lr"] is not None:
        problems.number(f"{where}.scale_lr", optim["scale_lr"], 0)


def _layers(quant: dict[str, Any], target: str, problems: Problems) -> None:
    from qat.graph.config import QATConfig
    from qat.targets import TARGETS

    if not quant["weight"]["symmetric"]:
        problems.add("quant.weight.symmetric", "false", "true: integer layers need symmetric weights", "Remove it.")
    if quant["activation"]["per_channel"]:
        problems.add("quant.activation.per_channel", "true", "false: an activation has one scale a tensor", "Remove it.")
    try:
        grids = QATConfig.for_target(target) if target in TARGETS else QATConfig()
        replace(grids, overrides=quant["overrides"])
    except ValueError as error:
        problems.add(
            "quant.overrides", str(error), "layer name pattern -> {skip: true}, {leaf: true} or {weight: {bits: 8}}", "Change the entry."
        )


def _moments(config: dict[str, Any], problems: Problems) -> None:
    for where, value, auto in (
        ("fold.freeze", config["fold"]["freeze"], True),
        ("quant.delay", config["quant"]["delay"], False),
        ("quant.freeze_ranges", config["quant"]["freeze_ranges"], False),
    ):
        if moment_problem(value, auto=auto):
            expected = "null, a whole number of steps, or a share of the run between 0 and 1" + (", or auto" if auto else "")
            problems.add(where, repr(value), expected, f"Write {where}=200 for steps, {where}=0.5 for half of the run.")


def _fold(config: dict[str, Any], problems: Problems) -> None:
    from qat.fold import STRATEGIES
    from qat.fold.strategies import strategy_options

    fold = config["fold"]
    if problems.name("fold.name", fold["name"], STRATEGIES):
        keywords = strategy_options(fold["name"])
        for key in fold["options"]:
            problems.name(f"fold.options.{key}", key, keywords, what=f"an option {fold['name']} does not have")
    if fold["name"] == "scale_merge" and not config["quant"]["weight"]["per_channel"]:
        expected = "one weight scale a channel, to merge the BatchNorm into"
        todo = "Use quant=w8a8_per_channel or another fold."
        problems.add("quant.weight.per_channel", "false with fold=scale_merge", expected, todo, NotPossibleError)
    if fold["name"] == "scale_merge" and config["quant"]["weight"]["power_of_two"]:
        expected = "a strategy that does not multiply scales by gamma / sigma"
        problems.add("quant.weight.power_of_two", "true with fold=scale_merge", expected, "Use another fold.", NotPossibleError)
    problems.number("fold.lr_after_freeze", fold["lr_after_freeze"], 0)
    problems.number("fold.drift_bound", fold["drift_bound"], 0)
    for key in ("reestimate_before_freeze", "reestimate_before_eval"):
        problems.number(f"fold.{key}", fold[key], 0, whole=True)


def _trainer(trainer: dict[str, Any], problems: Problems) -> None:
    problems.number("trainer.max_epochs", trainer["max_epochs"], 0, whole=True)
    problems.number("trainer.log_every_n_steps", trainer["log_every_n_steps"], 1, whole=True)
    problems.name("trainer.accelerator", trainer["accelerator"], ACCELERATORS)
    devices = trainer["devices"]
    ok = devices in ("auto", -1) if not isinstance(devices, int) or devices == -1 else devices >= 1 and not isinstance(devices, bool)
    if not ok:
        problems.add("trainer.devices", repr(devices), "a whole number from 1 on, -1 for all, or auto", "Set trainer.devices=1.")
    if trainer["options"]:
        from pytorch_lightning import Trainer

        for key in trainer["options"]:
            problems.name(f"trainer.options.{key}", key, inspect.signature(Trainer.__init__).parameters, what="no argument of the Trainer")
    limit = trainer["limit_train_batches"]
    if limit is not None and (limit == 0 or not (limit == 1.0 or not moment_problem(limit))):
        problems.add(
            "trainer.limit_train_batches", repr(limit), "null, a number of batches, or a share in (0, 1]", "Set it to null for all."
        )


def _post_training(config: dict[str, Any], problems: Problems) -> None:
    ptq, trainer = config["ptq"], config["trainer"]
    correction, rounds = ptq["correct_bias"], problems.number("ptq.adaround", ptq["adaround"], 0, whole=True) and ptq["adaround"]
    corrects = False
    if correction is not None:
        from qat.ptq.correct_bias import METHODS  # here, so that other recipes are checked without it

        corrects = problems.name("ptq.correct_bias", correction, METHODS)
    problems.number("ptq.pictures", ptq["pictures"], 1, whole=True)
    for key in ("within_relu6", "replace_relu6"):
        if ptq[key] and not ptq["equalize"]:
            problems.add(f"ptq.{key}", "true without equalize", "ptq.equalize, which it is for", "Set ptq.equalize=true.")
    if ptq["within_relu6"] and ptq["replace_relu6"]:
        problems.add("ptq.within_relu6", "true with replace_relu6", "one of the two", "Set ptq.replace_relu6=false.")
    if trainer["max_epochs"] != 0:
        for key, asked in (("adaround", rounds), ("correct_bias", corrects)):
            if asked:
                found = f"{ptq[key]} with {trainer['max_epochs']} epochs of training"
                problems.add(f"ptq.{key}", found, "a run without training, which would undo it", "Set trainer.max_epochs=0.")
        return
    devices, nodes = {**trainer, **trainer["options"]}["devices"], trainer["options"].get("num_nodes", 1)
    if devices not in (1, "1", "auto") or nodes != 1:
        problems.add("trainer.devices", f"{devices!r} without training", "one device", "Set trainer.devices=1.")
    for key, asked, why in (
        ("adaround", rounds, "other statistics would scale the rounded weights again"),
        ("correct_bias", corrects, "other statistics would take the same shift of the means out again"),
    ):
        if asked and config["fold"]["reestimate_before_eval"]:
            found = f"{config['fold']['reestimate_before_eval']} with ptq.{key}={ptq[key]}"
            problems.add("fold.reestimate_before_eval", found, f"0: {why}", "Set fold.reestimate_before_eval=0.")


def _model(model: dict[str, Any], problems: Problems) -> None:
    from qat.train.models import SOURCES

    problems.name("model.source", model["source"], SOURCES)


def _data(data: dict[str, Any], problems: Problems) -> None:
    from qat.train.data import SOURCES
    from qat.train.data.augment import AUGMENTS

    problems.name("data.name", data["name"], SOURCES)
    problems.name("data.augment", data["augment"], AUGMENTS)
    for key in ("batch_size", "eval_batch_size"):
        problems.number(f"data.{key}", data[key], 1, whole=True)
    problems.number("data.workers", data["workers"], 0, whole=True)
    if data["image_size"] is not None:
        problems.number("data.image_size", data["image_size"], 1, whole=True)
    if not 0 < data["val_fraction"] < 1:
        problems.add("data.val_fraction", repr(data["val_fraction"]), "a share between 0 and 1", "Set data.val_fraction=0.15.")
    if data["split_seed"] is not None:
        _seed("data.split_seed", data["split_seed"], problems)


def validate_values(config: dict[str, Any]) -> None:
    """
    Args:
        config: complete and of the right types.

    Raises:
        ConfigError: everything that is wrong, a line each.
    """
    from qat.targets import TARGETS

    problems = Problems()
    _seed("seed", config["seed"], problems)
    _model(config["model"], problems)
    _data(config["data"], problems)
    _quantizer("quant.weight", config["quant"]["weight"], WEIGHT_RANGES, problems)
    _quantizer("quant.activation", config["quant"]["activation"], ACTIVATION_RANGES, problems)
    _layers(config["quant"], config["target"]["name"], problems)
    problems.number("quant.calibration_batches", config["quant"]["calibration_batches"], 1, whole=True)
    problems.number("quant.range_search", config["quant"]["range_search"], 0, whole=True)
    if config["quant"]["range_search"] and config["quant"]["weight"]["range"] != "lsq":
        found = f"{config['quant']['range_search']} with quant.weight.range={config['quant']['weight']['range']}"
        problems.add("quant.range_search", found, "0, or the learned range lsq, whose start it chooses", "Set quant.weight.range=lsq.")
    _fold(config, problems)
    _moments(config, problems)
    _optim("optim", config["optim"], problems)
    _optim("float_training.optim", config["float_training"]["optim"], problems)
    problems.number("float_training.max_epochs", config["float_training"]["max_epochs"], 0, whole=True)
    if config["float_training"]["seed"] is not None:
        _seed("float_training.seed", config["float_training"]["seed"], problems)
    _trainer(config["trainer"], problems)
    _post_training(config, problems)
    for key in ("moments", "pictures"):
        problems.number(f"report.{key}", config["report"][key], 0, whole=True)
    problems.name("target.name", config["target"]["name"], TARGETS)
    problems.raise_any()
