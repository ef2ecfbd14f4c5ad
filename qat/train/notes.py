"""What a file says about itself beside the graph: which recipe made it, where its scales come from, what pictures it wants."""

import json
from typing import Any

from qat.train.data import ImageData


def notes_of(config: dict[str, Any], data: ImageData) -> dict[str, str]:
    """Metadata of a run's ONNX file; nothing of the machine it was made on."""
    ranges = {part: config["quant"][part]["range"] for part in ("weight", "activation")}
    return {
        "qat.recipe": str(config["recipe"]),
        "qat.seed": str(config["seed"]),
        "qat.scales": f"quantization-aware training, {config['fold']['name']}; ranges {json.dumps(ranges)}",
        "qat.data": json.dumps({"name": config["data"]["name"], "input_shape": list(data.input_shape), **data.normalisation}),
        "qat.classes": json.dumps(list(map(str, data.class_names))),
    }
