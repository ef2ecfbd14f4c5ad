"""The job configuration: every key, its type and its default. The text of a recipe is checked against this before any work.

The dataclasses are only read here. `complete` gives a plain dict, and plain dicts are what builders get.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from qat.errors import ConfigError
from qat.targets import suit_target
from qat.train.problems import Problems
from qat.train.validation import validate_values


@dataclass
class ModelConfig:
    source: str = "qat"  # qat | timm | torchvision | python
    name: str = MISSING
    checkpoint: str | None = None
    small_input: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataConfig:
    name: str = MISSING
    root: str | None = None
    image_size: int | None = None
    batch_size: int = 64
    eval_batch_size: int = 256
    workers: int = 0
    augment: str = "none"
    mean: list[float] | None = None
    std: list[float] | None = None
    val_fraction: float = 0.15
    split_seed: int | None = None  # chooses the validation split; null: the float training's seed


@dataclass
class QuantizerConfig:
    bits: int = 8
    symmetric: bool = True
    per_channel: bool = True
    narrow: bool = True
    power_of_two: bool = False
    range: str = "minmax"


@dataclass
class QuantConfig:
    weight: QuantizerConfig = field(default_factory=QuantizerConfig)
    activation: QuantizerConfig = field(
        default_factory=lambda: QuantizerConfig(symmetric=False, per_channel=False, narrow=False, range="ema")
    )
    overrides: dict[str, Any] = field(default_factory=dict)  # layer name pattern -> {skip: true}, {leaf: true} or {weight: {bits: 8}}
    calibration_batches: int = 8
    range_search: int = 0  # batches on which learned weight ranges are chosen by the network's output before training; 0: none
    delay: Any = 0  # null | steps | share of the run
    freeze_ranges: Any = None  # null | steps | share of the run


@dataclass
class FoldConfig:
    name: str = "bn_correction"
    freeze: Any = 0.5  # null | steps | share of the run | auto
    lr_after_freeze: float = 0.1  # factor on the learning rate from the freeze on
    reestimate_before_freeze: int = 0  # training batches
    reestimate_before_eval: int = 0  # training batches
    drift_bound: float = 0.5
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class PTQConfig:
    """Post-training steps, in their order."""

    equalize: bool = False
    within_relu6: bool = False  # equalize through ReLU6 the channels that stay below it
    replace_relu6: bool = False  # put ReLU in its place, where equalization would have to cross one
    absorb_bias: bool = False
    adaround: int = 0  # iterations a layer; 0: none
    correct_bias: str | None = None  # empirical | analytic
    pictures: int = 1024  # of the training split, without augmentation, for adaround and correct_bias


@dataclass
class OptimConfig:
    name: str = "sgd"
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: str = "cosine"
    min_lr: float = 0.0
    scale_lr: float | None = None  # of learned scales; null: lr
    label_smoothing: float = 0.0


@dataclass
class FloatTrainingConfig:
    max_epochs: int = 20  # 0: model.checkpoint is the float model
    seed: int | None = None  # null: the run's
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=0.1, weight_decay=5.0e-4))


@dataclass
class TrainerConfig:
    max_epochs: int = 10  # 0: no training, post-training quantization alone
    accelerator: str = "auto"
    devices: Any = 1
    strategy: str = "auto"
    precision: str = "32-true"
    gradient_clip_val: float | None = None
    limit_train_batches: Any = None
    log_every_n_steps: int = 10
    options: dict[str, Any] = field(default_factory=dict)  # more keyword arguments of lightning's Trainer


@dataclass
class TargetConfig:
    name: str = "ort_vnni"


@dataclass
class ReportConfig:
    """What is measured for the report beside the result."""

    moments: int = 60  # of the training at which jitter and ranges are recorded; 0: none
    pictures: int = 256  # of the training split for the noise of each layer, of validation for its loss, at the end; 0: neither


@dataclass
class JobConfig:
    recipe: str | None = None
    seed: int = 0
    run_root: str = "runs"
    resume: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    fold: FoldConfig = field(default_factory=FoldConfig)
    ptq: PTQConfig = field(default_factory=PTQConfig)
    float_training: FloatTrainingConfig = field(default_factory=FloatTrainingConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    report: ReportConfig = field(default_factory=ReportConfig)


def schema() -> DictConfig:
    """The typed configuration with its defaults; OmegaConf refuses unknown keys and other types in it."""
    return OmegaConf.structured(JobConfig)


def is_open(node: object) -> bool:
    """A mapping whose keys are the user's own, such as `fold.options`."""
    return isinstance(node, DictConfig) and OmegaConf.get_type(node) is dict


def _kind(leaf: Any) -> str:
    """What a leaf of the schema takes, in words."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    kind = words.get(leaf._metadata.ref_type, "a mapping" if is_open(leaf) else "a list of numbers")
    return f"{kind} or null" if leaf._is_optional() else kind


def _merge(node: DictConfig, given: dict[Any, Any], path: str, problems: Problems) -> None:
    for key, value in given.items():
        where = f"{path}{key}"
        if key not in list(node):  # `in` of OmegaConf overlooks keys without a value
            problems.name(where, str(key), [str(known) for known in node], what="an unknown key")
            continue
        part = node._get_node(key)
        if isinstance(part, DictConfig) and not is_open(part):
            if isinstance(value, dict):
                _merge(part, value, where + ".", problems)
            else:
                keys = ", ".join(map(str, part))
                problems.add(where, repr(value), f"the keys {keys}", f"Give {where} as a mapping.")
            continue
        try:
            node[key] = value
        except OmegaConfBaseException:
            problems.add(where, repr(value), _kind(part), f"Change {where}.")


def complete(config: Any) -> dict[str, Any]:
    """The configuration as a plain dict, resolved, absent keys at their defaults, its grids those the target needs.

    Args:
        config: mapping or DictConfig, whole or in part.

    Raises:
        ConfigError: all unknown keys, wrong types and missing values, a line each.
    """
    node, problems = schema(), Problems()
    try:
        given = OmegaConf.to_container(OmegaConf.create(config), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            str(error.full_key or "configuration"), str(error).splitlines()[0], "a value", "Check the ${...} in it."
        ) from error
    _merge(node, given, "", problems)  # type: ignore[arg-type]
    for key in sorted(OmegaConf.missing_keys(node)):
        problems.add(key, "nothing", "a value", f"Set {key}=VALUE.")
    problems.raise_any()
    whole: dict[str, Any] = OmegaConf.to_container(node)  # type: ignore[assignment]
    return {**whole, "quant": suit_target(whole["quant"], whole["target"]["name"])}


def validate(config: dict[str, Any]) -> None:
    """Check all that can be checked without reading data or building a model.

    Raises:
        ConfigError: everything that is wrong, a line each.
    """
    validate_values(complete(config))
