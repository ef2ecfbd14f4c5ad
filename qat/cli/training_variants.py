"""Networks to time a training step of: float, every fold strategy before and after its freeze, and what other libraries prepare."""

from __future__ import annotations

import copy
import importlib
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import qat
from qat.quant import FakeQuantizer

FLOAT = "float"


@dataclass
class Variant:
    """A network to train, and how many tensors it quantizes."""

    network: nn.Module
    weights: int = 0
    activations: int = 0


def our_variants(model: nn.Module, x: Tensor, strategies: list[str]) -> dict[str, Callable[[], Variant]]:
    """Builders by name. A strategy whose training forward changes with the freeze has two, and moving_average two sources of statistics."""
    builders: dict[str, Callable[[], Variant]] = {FLOAT: lambda: Variant(copy.deepcopy(model))}
    prepared = partial(_prepared, model, x)
    for name in strategies:
        builders[name] = partial(prepared, name)
        if name == "moving_average":
            builders[f"{name}, quantized statistics"] = partial(prepared, name, statistics="quantized")
        if not qat.STRATEGIES[name].always_frozen and qat.STRATEGIES[name].keeps_bn:
            builders[f"{name}, after freeze"] = partial(prepared, name, freeze=True)
    return builders


def _prepared(model: nn.Module, x: Tensor, strategy: str, freeze: bool = False, **options: Any) -> Variant:
    network = qat.prepare(copy.deepcopy(model), (x,), qat.QATConfig(fold=strategy, fold_options=options))
    qat.calibrate(network, [x])
    network.train()
    if freeze:
        qat.freeze_bn(network)
    quantizers = [name for name, m in network.named_modules() if isinstance(m, FakeQuantizer)]
    weights = sum(name.endswith("weight_quantizer") for name in quantizers)
    return Variant(network, weights, len(quantizers) - weights)


def torch_ao_fx(model: nn.Module, x: Tensor) -> Variant:
    """torch.ao's FX graph mode with its default QAT configuration of the fbgemm backend: one weight scale a channel."""
    quantization = importlib.import_module("torch.ao.quantization")
    fx = importlib.import_module("torch.ao.quantization.quantize_fx")
    mapping = quantization.get_default_qat_qconfig_mapping("fbgemm")
    return _counted(fx.prepare_qat_fx(copy.deepcopy(model).train(), mapping, (x,)))


def torchao_pt2e(model: nn.Module, x: Tensor) -> Variant:
    """torchao's PT2E with the x86 quantizer's QAT configuration."""
    pt2e = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
    x86 = importlib.import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config(is_qat=True))
    exported = torch.export.export(copy.deepcopy(model).train(), (x,)).module()
    network = pt2e.prepare_qat_pt2e(exported, quantizer)
    importlib.import_module("torchao.quantization.pt2e").move_exported_model_to_train(network)
    return _counted(network)


def brevitas(model: nn.Module, x: Tensor) -> Variant:
    """brevitas' graph quantization with float scales; its BatchNorms stay unfolded in training."""
    graph = importlib.import_module("brevitas.graph.quantize")
    network = graph.quantize(graph.preprocess_for_quantize(copy.deepcopy(model).eval(), trace_model=True, merge_bn=False)).train()
    network(x)
    kinds = [type(m).__name__ for m in network.modules() if getattr(m, "is_quant_enabled", False)]
    weights = sum(kind.startswith("WeightQuantProxy") for kind in kinds)
    return Variant(network, weights, sum(kind.startswith("ActQuantProxy") for kind in kinds))


def aimet(model: nn.Module, x: Tensor) -> Variant:
    """aimet-torch on the network with its BatchNorms folded, which is what its guide recommends before training."""
    module = importlib.import_module("aimet_torch")
    fold = importlib.import_module("aimet_torch.batch_norm_fold")
    prepared = importlib.import_module("aimet_torch.model_preparer").prepare_model(copy.deepcopy(model).eval())
    fold.fold_all_batch_norms(prepared, tuple(x.shape))
    simulation = module.QuantizationSimModel(prepared, x, default_output_bw=8, default_param_bw=8)
    simulation.compute_encodings(lambda network: network(x))
    quantizers = importlib.import_module("aimet_torch.v2.quantization.base.quantizer").QuantizerBase
    named = [name for name, m in simulation.model.named_modules() if isinstance(m, quantizers)]
    weights = sum(name.endswith("param_quantizers.weight") for name in named)
    activations = sum("_quantizers" in name and "param_quantizers" not in name for name in named)
    return Variant(simulation.model.train(), weights, activations)


PEERS: dict[str, Callable[[nn.Module, Tensor], Variant]] = {
    "torch.ao FX": torch_ao_fx,
    "torchao PT2E": torchao_pt2e,
    "brevitas": brevitas,
    "aimet-torch": aimet,
}


def build_peer(name: str, model: nn.Module, x: Tensor) -> Variant | str:
    """The variant, after one step that shows that it trains, or in one line why there is none."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            variant = PEERS[name](model, x)
            variant.network(x).sum().backward()
            return variant
    except Exception as error:
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:160]}"
    finally:
        logging.disable(logging.NOTSET)


def _counted(network: nn.Module) -> Variant:
    """Fake quantizers of torch.ao and torchao: those of weights are submodules of that name, or read a parameter in the graph."""
    named = {name: m for name, m in network.named_modules(remove_duplicate=False) if "FakeQuantize" in type(m).__name__}
    weights = {name for name in named if "weight_fake_quant" in name}
    for node in getattr(getattr(network, "graph", None), "nodes", ()):
        if node.op == "call_module" and str(node.target) in named and _reads_a_parameter(node.args[0], network):
            weights.add(str(node.target))
    return Variant(network, len(weights), len(named) - len(weights))


def _reads_a_parameter(node: Any, network: nn.Module) -> bool:
    """Whether a weight comes here, if need be through the arithmetic of a fold."""
    while getattr(node, "op", "") == "call_function" and node.args:
        node = node.args[0]
    return getattr(node, "op", "") == "get_attr"
