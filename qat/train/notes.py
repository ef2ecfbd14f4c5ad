"""What a file says about itself beside the graph: which recipe made it, where its scales come from, what pictures it wants."""

import json
from typing import Any

from qat.train.data import ImageData


def notes_of(config: dict[str, Any], data: ImageData) -> dict[str, str]:
    """Metadata of a run's ONNX file; nothing of the machine it was made on."""
    trained = config["trainer"]["max_epochs"] > 0
    how = f"quantization-aware training, {config['fold']['name']}" if trained else "post-training quantization"
    steps = {key: value for key, value in config["ptq"].items() if value and key != "pictures"}
    ranges = {part: config["quant"][part]["range"] for part in ("weight", "activation")}
    return {
        "qat.recipe": str(config["recipe"]),
        "qat.seed": str(config["seed"]),
        "qat.scales": f"{how}; ranges {json.dumps(ranges)}" + (f"; steps {json.dumps(steps)}" if steps else ""),
        "qat.data": json.dumps({"name": config["data"]["name"], "input_shape": list(data.input_shape), **data.normalisation}),
        "qat.classes": json.dumps(list(map(str, data.class_names))),
    }
