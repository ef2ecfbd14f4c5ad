"""Random networks of layers and norms: folding keeps the function, speaks of every norm once, and leaves the model alone."""

from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from timm.layers import BatchNormAct2d, Conv2dSame
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torchvision.ops.misc import FrozenBatchNorm2d

import qat

C = 4
SIZES: dict[str, tuple[int, ...]] = {"1d": (7,), "2d": (5, 6), "3d": (3, 4, 3), "linear": ()}
CONVS = {"1d": nn.Conv1d, "2d": nn.Conv2d, "3d": nn.Conv3d}
TRANSPOSED = {"1d": nn.ConvTranspose1d, "2d": nn.ConvTranspose2d, "3d": nn.ConvTranspose3d}
BATCH_NORMS = {"1d": nn.BatchNorm1d, "2d": nn.BatchNorm2d, "3d": nn.BatchNorm3d, "linear": nn.BatchNorm1d}
LAYERS = (
    "zeros pointwise same circular reflect replicate grouped depthwise transposed transposed_grouped same_timm weight_norm tied".split()
)
NORMS = "plain eps cumulative no_affine no_statistics sync act frozen group".split()
GAMMAS = "any negative some_zero all_zero tiny".split()
STEPS = (
    "layer_norm layer_norm layer norm norm_layer layer_norm_norm norm_of_relu norm_of_sum norm_of_cat read_twice layer_again norm_again "
    "block_twice block_again".split()
)
TRAINS_AS_FLOAT = ["naive", "bn_correction", "single_pass", "scale_merge"]


class Step(NamedTuple):
    """What to do with the tensor `source`; `other` is a second tensor, or the earlier part that is used again."""

    kind: str
    source: int
    other: int
    layer: str
    bias: bool
    norm: str
    gamma: str
    tiny_variance: bool


def build_layer(step: Step, rank: str, earlier: list[Any]) -> nn.Module:
    width = 2 * C if step.kind == "norm_of_cat" else C
    kind = "pointwise" if width != C else step.layer
    layer: Any
    if rank == "linear":
        layer = nn.Linear(width, C, step.bias)
    elif kind.startswith("transposed"):
        layer = TRANSPOSED[rank](C, C, 3, padding=1, bias=step.bias, groups=2 if kind.endswith("grouped") else 1)
    elif kind == "same_timm" and rank == "2d":
        layer = Conv2dSame(C, C, 3, bias=step.bias)
    elif kind == "pointwise":
        layer = CONVS[rank](width, C, 1, bias=step.bias)
    else:
        mode = kind if kind in ("circular", "reflect", "replicate") else "zeros"
        groups = {"grouped": 2, "depthwise": C}.get(kind, 1)
        layer = CONVS[rank](C, C, 3, padding="same" if kind == "same" else 1, padding_mode=mode, groups=groups, bias=step.bias)
    if kind == "tied":
        like = [other for other in earlier if "weight" in other._parameters and other.weight.shape == layer.weight.shape]
        if like:
            layer.weight = like[0].weight
    return weight_norm(layer) if kind == "weight_norm" else layer


def build_norm(step: Step, rank: str) -> nn.Module:
    kinds = {
        "eps": lambda: BATCH_NORMS[rank](C, eps=1e-3, momentum=0.03),
        "cumulative": lambda: BATCH_NORMS[rank](C, momentum=None),
        "no_affine": lambda: BATCH_NORMS[rank](C, affine=False),
        "no_statistics": lambda: BATCH_NORMS[rank](C, track_running_stats=False),
        "sync": lambda: nn.SyncBatchNorm(C),
        "group": lambda: nn.GroupNorm(2, C),
        **({"act": lambda: BatchNormAct2d(C), "frozen": lambda: FrozenBatchNorm2d(C)} if rank == "2d" else {}),
    }
    norm: Any = kinds.get(step.norm, lambda: BATCH_NORMS[rank](C))()
    if getattr(norm, "running_mean", None) is not None:
        norm.running_mean.copy_(torch.randn(C) * 0.3)
        norm.running_var.copy_(torch.rand(C) + 0.5)
        if step.tiny_variance:
            norm.running_var[1] = 1e-14
    if norm.weight is not None:
        gamma = (torch.rand(C) + 0.3) * {"negative": -1.0, "tiny": 1e-6, "all_zero": 0.0}.get(step.gamma, 1.0)
        gamma[0] *= -1
        gamma[2] *= step.gamma != "some_zero"
        norm.weight.data.copy_(gamma)
        norm.bias.data.copy_(torch.randn(C) * 0.2)
    return norm


class Part(nn.Module):
    def __init__(self, step: Step, rank: str, earlier: list[Any]):
        super().__init__()
        self.layer, self.norm, self.second = build_layer(step, rank, earlier), build_norm(step, rank), build_norm(step, rank)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


class RandomNetwork(nn.Module):
    """Each step appends one (N, C, *size) tensor; the outputs are the last one and the sum of all."""

    def __init__(self, rank: str, steps: list[Step], seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.steps = steps
        self.parts = nn.ModuleList()
        for step in steps:
            self.parts.append(Part(step, rank, [part.layer for part in self.parts]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = [x]
        for index, step in enumerate(self.steps):
            part, again = self.parts[index], step.other % (index + 1)
            again = index if self.steps[again].kind == "norm_of_cat" else again
            seen.append(self.take(step.kind, part, self.parts[again], seen[step.source % len(seen)], seen[step.other % len(seen)]))
        total = seen[0]
        for y in seen[1:]:
            total = total + y
        return seen[-1], total

    @staticmethod
    def take(kind: str, part: Any, again: Any, x: Tensor, other: Tensor) -> Tensor:
        match kind:
            case "layer_norm":
                return part(x)
            case "layer":
                return part.layer(x)
            case "norm":
                return part.norm(x)
            case "norm_layer":
                return part.layer(part.norm(x))
            case "layer_norm_norm":
                return part.second(part(x))
            case "norm_of_relu":
                return part.norm(F.relu(x))
            case "norm_of_sum":
                return part.norm(x + other)
            case "norm_of_cat":
                return part(torch.cat([x, other], 1))
            case "read_twice":
                y = part.layer(x)
                return part.norm(y) + y
            case "layer_again":
                return part.norm(again.layer(x))
            case "norm_again":
                return again.norm(part.layer(x))
            case "block_twice":
                return part(F.relu(part(x)))
            case "block_again":
                return again(x)
        raise AssertionError(kind)


STEP = st.builds(
    Step, st.sampled_from(STEPS), st.integers(0, 5), st.integers(0, 5), st.sampled_from(LAYERS), st.booleans(), st.sampled_from(NORMS),
    st.sampled_from(GAMMAS), st.booleans(),
)  # fmt: skip
CASE = given(st.sampled_from(["2d", "2d", "1d", "3d", "linear"]), st.lists(STEP, min_size=1, max_size=5), st.integers(0, 5))


def few(examples: int) -> Any:
    return settings(
        max_examples=examples, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )


def network(rank: str, steps: list[Step], seed: int, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    model = RandomNetwork(rank, steps, seed)
    x = torch.randn(6, C, *SIZES[rank])
    return model.to(dtype), x.to(dtype)


def assert_equal(got: Any, expected: Any, tolerance: float, what: str) -> None:
    """Largest difference over the largest expected value, or 1 where all are smaller."""
    assert got.shape == expected.shape and got.dtype == expected.dtype, what
    size, difference = float(expected.detach().abs().max()), float((got - expected).detach().abs().max())
    assert difference <= tolerance * max(size, 1.0), f"{what}: {difference} of {size}"


def assert_every_norm_reported_once(model: nn.Module, report: qat.FoldReport) -> None:
    kinds = (nn.modules.batchnorm._BatchNorm, FrozenBatchNorm2d, nn.GroupNorm)
    norms = sorted(id(m) for m in model.modules() if isinstance(m, kinds))
    named = [norm for _, norm in report.folded] + [norm for norm, _ in report.left]
    assert sorted(id(model.get_submodule(name)) for name in named) == norms, str(report)
    assert all(reason for _, reason in report.left)
    layers = [layer for layer, _ in report.folded]
    assert len(layers) == len(set(layers))


def state_of(model: nn.Module) -> list[Any]:
    """All that a user could find changed."""
    return [
        (name, type(m), m.training, sorted(vars(m)), [len(v) for k, v in vars(m).items() if k.endswith("_hooks")], sorted(m._parameters))
        for name, m in model.named_modules(remove_duplicate=False)
    ]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10), (torch.bfloat16, 5e-2)])
@few(25)
@CASE
def test_a_folded_network_is_the_network(dtype, tolerance, rank, steps, seed):
    model, x = network(rank, steps, seed, dtype)
    model.eval()
    shape, tensors = state_of(model), {name: value.clone() for name, value in model.state_dict().items()}
    folded = qat.fold(model, (x,))
    assert state_of(model) == shape
    assert all(torch.equal(value, tensors[name]) for name, value in model.state_dict().items())
    for got, expected in zip(folded(x), model(x)):
        assert_equal(got, expected, tolerance, str(folded.fold_report))
    assert_every_norm_reported_once(model, folded.fold_report)


def prepare(model: nn.Module, x: Tensor, strategy: str) -> Any:
    prepared = qat.prepare(model, (x,), qat.QATConfig(fold=strategy))
    qat.set_fake_quant(prepared, weights=False, activations=False)
    return prepared


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
@few(8)
@CASE
def test_a_prepared_network_without_quantization_is_the_network(strategy, rank, steps, seed):
    model, x = network(rank, steps, seed)
    model.eval()
    shape = state_of(model)
    prepared = prepare(model, x, strategy)
    assert state_of(model) == shape
    for got, expected in zip(prepared(x), model(x)):
        assert_equal(got, expected, 1e-10, str(prepared.fold_report))
    assert_every_norm_reported_once(model, prepared.fold_report)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def home(name: str, prepared: Any, there: dict[str, Tensor]) -> str | None:
    """The name in `prepared` of a parameter or buffer of the float network; None where its module is not called."""
    owner, _, leaf = name.rpartition(".")
    layer = {norm: layer for layer, norm in prepared.fold_report.folded}.get(owner)
    places = [f"{owner}.conv.{leaf}", f"{owner}.{leaf}_fold", f"{owner}.bn.{leaf}", name] if layer is None else [f"{layer}.bn.{leaf}"]
    return next((place for place in places if place in there), None)


@pytest.mark.parametrize("strategy", TRAINS_AS_FLOAT)
@few(10)
@CASE
def test_training_without_quantization_is_training_the_network(strategy, rank, steps, seed):
    model, x = network(rank, steps, seed)
    prepared = prepare(model.train(), x, strategy)
    here, there = values(model), values(prepared)
    places = {name: place for name in here if (place := home(name, prepared, there)) is not None}
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        batch, like = (torch.randn(x.shape, generator=generator, dtype=x.dtype).requires_grad_() for _ in range(2))
        copied = batch.detach().clone().requires_grad_()
        outputs, expected = prepared(batch), model(copied)
        for got, wanted in zip(outputs, expected):
            assert_equal(got, wanted, 1e-8, "output")
        prepared.zero_grad(), model.zero_grad()
        sum((y * like.detach()).sum() for y in outputs).backward()
        sum((y * like.detach()).sum() for y in expected).backward()
        assert_equal(batch.grad, copied.grad, 1e-7, "gradient of the input")
        trained = {id(value) for value in here.values() if value.grad is not None}
        assert trained == {id(here[name]) for name, place in places.items() if there[place].grad is not None}
        for name, place in places.items():
            if id(here[name]) in trained:
                assert_equal(there[place].grad, here[name].grad, 1e-7, f"gradient of {name}")
            assert_equal(there[place], here[name], 1e-8, name)
