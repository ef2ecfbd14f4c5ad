"""One job: float network -> post-training quantization -> quantization-aware training, or none -> integers -> ONNX -> result."""

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, tee
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qat
from qat.deploy.modules import IntegerLayer
from qat.deploy.runtime import predict
from qat.deploy.targets import saturation_risk
from qat.errors import ConfigError
from qat.report.html import write_report
from qat.report.layers import read_layers
from qat.report.result import identity, write_result
from qat.train.data import ImageData
from qat.train.evaluate import accuracy, confusion, network_confusion
from qat.train.float_model import float_network
from qat.train.layers import record_layers
from qat.train.memory import peak_memory_mb
from qat.train.metrics_file import read_metrics
from qat.train.module import Classifier, module_config
from qat.train.notes import notes_of
from qat.train.post_training import SAID, first_pictures, quantized
from qat.train.qat_training import best_or_last, log_accuracies, loggers, qat_trainer, save_untrained, schedule_callbacks
from qat.train.resume import checkpoint_to_resume
from qat.train.saved_file import read_checkpoint
from qat.train.schedule import total_steps, validate_schedule
from qat.train.seeds import job_data
from qat.train.trainer import evaluation_device, fit

log = logging.getLogger(__name__)


def run_job(config: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """Run a job and fill its folder: checkpoints/, metrics.csv, TensorBoard events, model.onnx, layers.json, result.json, report.html.

    Args:
        config: plain dict of a resolved recipe. `resume`, when set, is the folder of an interrupted run of the same recipe.
        run_dir: existing folder of this run.

    Returns:
        The content of result.json; {} on ranks other than 0 of a run of several processes.

    Raises:
        ConfigError: bad input, before any training.
        KeyboardInterrupt: stopped by the user; checkpoints/ has what a resume needs.
    """
    gc.collect()  # what an earlier job of this process left in cycles of its trainer: this one needs the memory
    run_dir, seconds = Path(run_dir), dict[str, float]()
    device = evaluation_device(config["trainer"])

    with timed(seconds, "setup"):
        data = job_data(config)
        batches = len(data.train_dataloader())
        trains = config["trainer"]["max_epochs"] > 0
        if trains:
            validate_schedule(config, total_steps(batches, config["trainer"]))
        last = checkpoint_to_resume(config, run_dir) if trains else None
        # a network that cannot be prepared, or has another head, is refused here, not after the float training
        checked_network(config, data)

    def test_accuracy(network: nn.Module) -> float:
        return accuracy(network_confusion(network, data.test_dataloader(), data.num_classes, device))

    with timed(seconds, "float"):
        network = float_network(config, data, run_dir)
        found = {"float": test_accuracy(network)}
        float_val = accuracy(network_confusion(network, data.val_dataloader(), data.num_classes, device))
        log.info("float: test accuracy %.4f, validation %.4f", found["float"], float_val)

    begin = time.perf_counter()
    for step, module in quantized(config, data, network, device):
        before = list(found.values())[-1]
        found[step] = test_accuracy(module.network)
        log.info("%s: test accuracy %.4f (%+.4f)", SAID.get(step, step), found[step], found[step] - before)
        begin, seconds[step] = time.perf_counter(), time.perf_counter() - begin

    with timed(seconds, "qat"):
        schedule = schedule_callbacks(config)
        if trains:
            trainer = qat_trainer(config, run_dir, schedule, float_val, batches, last)
            log_accuracies(trainer.loggers, found)
            fit(trainer, module.cpu(), data, last)
            if not trainer.is_global_zero:
                return {}
            chosen = best_or_last(trainer, run_dir)
        else:
            log_accuracies(loggers(run_dir), found)
            chosen = save_untrained(module.cpu(), run_dir)

    with timed(seconds, "fake_quant"):
        module = shipped_module(chosen, config, data)
        found["fake_quant"] = test_accuracy(module.network)
        validation = accuracy(network_confusion(module.network, data.val_dataloader(), data.num_classes, device))
        what = "quantization-aware training" if trains else "simulated integers"
        log.info("%s: test accuracy %.4f (%s)", what, found["fake_quant"], chosen.name)

    with timed(seconds, "export"):
        onnx = run_dir / "model.onnx"
        converted = qat.convert(module.network.cpu().eval())
        qat.export_onnx(converted, (torch.zeros(1, *data.input_shape),), onnx, notes=notes_of(config, data))
        if risky := saturation_risk(m for m in converted.modules() if isinstance(m, IntegerLayer)):
            todo = "there, create the session with session.x64quantprecision=1"
            log.info("model.onnx on x86 machines without VNNI: sums of %d layers could saturate; %s", len(risky), todo)
        pictures = [images[:32] for images, _ in islice(data.test_dataloader(), 2)]
        parity = qat.verify(converted, onnx, pictures)
        parity_line = f"largest difference to convert() {parity.max_lsb} LSB on {sum(map(len, pictures))} test pictures"

    with timed(seconds, "integer"):
        counts = confusion(onnx_answers(onnx, data), data.num_classes)
        found["integer"] = accuracy(counts)
        log.info("onnxruntime: test accuracy %.4f; %s", found["integer"], parity_line)

    with timed(seconds, "layers"):
        wanted = config["report"]["pictures"]
        shown = first_pictures(data, wanted) if wanted else []
        labelled = data.first_of("val", min(wanted, len(data.splits.val.labels))) if wanted else []
        record_layers(run_dir, schedule["record"].history, module.network, converted, network, shown, labelled, device)

    result = {
        "status": "ok",
        **identity(config),
        "accuracy": found,
        "validation": validation,
        "parity": {"identical": float(parity.identical), "max_lsb": int(parity.max_lsb)},
        "freeze_step": schedule["freeze_bn"].frozen_at,
        "steps": trainer.global_step if trains else 0,
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "peak_memory_mb": peak_memory_mb(),
    }
    write_result(run_dir, result)
    try:
        rows, layers = read_metrics(run_dir / "metrics.csv"), read_layers(run_dir)
        write_report(run_dir, result, rows, module.network, parity, counts, data.class_names, layers)
    except Exception as error:  # the page shows the result; it must not cost it
        log.warning("report.html could not be written (%s: %s)", type(error).__name__, error, exc_info=True)
    return result


def shipped_module(checkpoint: Path, config: dict[str, Any], data: ImageData) -> Classifier:
    """The module of a checkpoint with the statistics it is shipped with, on the CPU.

    The network is that of `config`; what the checkpoint says about it is not followed.

    Raises:
        ConfigError: a checkpoint that cannot be read, or of another network.
    """
    module = Classifier(module_config(config, data))
    load_state(module, read_checkpoint(checkpoint), checkpoint)
    if config["fold"]["reestimate_before_eval"]:
        qat.reestimate_bn(module.network, data.calibration_batches(config["fold"]["reestimate_before_eval"]))
    return module


def load_state(module: nn.Module, saved: dict[str, Any], path: Path) -> None:
    """
    Raises:
        ConfigError: the tensors at `path` are not those of `module`.
    """
    try:
        module.load_state_dict(saved["state_dict"])
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        found = f"other tensors than the network's ({(str(error).splitlines() or [type(error).__name__])[-1].strip()})"
        raise ConfigError(str(path), found, "the checkpoint of this network", "Run it again.") from error


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Wall time of a phase, in seconds, under `name`."""
    begin = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - begin


def check_job(config: dict[str, Any]) -> str:
    """What can be checked of a job with its data at hand and nothing trained; what is worth telling of its network, or "".

    Raises:
        ConfigError: data that cannot be read, or a network that cannot be prepared or has another head.
    """
    network = checked_network(config, job_data(config))
    if network.fold_report.folded:
        return ""
    counts = str(network.fold_report).splitlines()[0]
    return f"nothing in {config['model']['name']} can be folded, so that all strategies are the same ({counts})"


def checked_network(config: dict[str, Any], data: ImageData) -> Any:
    """The prepared network with random weights.

    Raises:
        ConfigError: it cannot be prepared or has another head.
    """
    network = Classifier(module_config(config, data)).network
    check_head(network, data)
    return network


def check_head(network: nn.Module, data: ImageData) -> None:
    """Raise ConfigError unless `network` gives one logit a class."""
    with torch.no_grad():
        logits = network.eval()(torch.zeros(1, *data.input_shape))
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if shape != (1, data.num_classes):
        todo = "Give the network a head of that many classes that returns one tensor of logits."
        raise ConfigError("model", f"an output of {shape} for one picture", f"(1, {data.num_classes}), one column a class", todo)


def onnx_answers(path: Path, data: ImageData) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits, labels) of the whole test split, as onnxruntime computes them."""
    for_images, for_labels = tee(data.test_dataloader())
    answers = predict(path, (images for images, _ in for_images))
    return ((torch.as_tensor(logits), labels) for logits, (_, labels) in zip(answers, for_labels))
