"""Which seed a part of a job follows, and its data.

The float network may have a seed of its own, so that runs of several seeds start from one. The validation split follows that seed
unless it has one of its own too: pictures that the float network was trained on must not judge what is made of it.
"""

from typing import Any

from qat.train.data import ImageData, build_data


def float_seed(config: dict[str, Any]) -> int:
    """Seed of the float network's start, of the order of its samples and of their augmentation."""
    own = config["float_training"].get("seed")
    return int(config["seed"] if own is None else own)


def split_seed(config: dict[str, Any]) -> int:
    """Seed of the validation split, of the float training and of the job alike."""
    own = config["data"].get("split_seed")
    return float_seed(config) if own is None else int(own)


def job_data(config: dict[str, Any], **changes: Any) -> ImageData:
    """The data of a job; `changes` replace values of its `data` part.

    Raises:
        ConfigError: data that cannot be used.
    """
    return build_data({**config["data"], "split_seed": split_seed(config), **changes}, config["seed"])
