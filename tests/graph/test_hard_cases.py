"""Networks on which tools of this kind fail: each folds, or is left with its name and the reason, and computes what the float model does.

docs/robustness.md lists them.
"""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from small_networks import Residual, randomize
from timm.layers import BatchNormAct2d
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torchvision.ops.misc import FrozenBatchNorm2d

import qat
from qat.graph.lifecycle import folded_layers
from qat.graph.prepared import computed_tensors

EXACT = ("naive", "bn_correction", "single_pass", "scale_merge")
IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Reads(nn.Module):
    """A forward given as a function of the modules."""

    def __init__(self, forward, **modules):
        super().__init__()
        self.of = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.of(self, x)


def conv(inputs=3, outputs=3, **options):
    return nn.Conv2d(inputs, outputs, 3, padding=1, **options)


def norm(channels=3, **options):
    return nn.BatchNorm2d(channels, **options)


def tied(first, second):
    second.weight = first.weight
    return first, second


def sharing_convolutions():
    first, second = tied(conv(), conv())
    return nn.Sequential(first, norm(), nn.ReLU(), second, norm())


def sharing_norms():
    first, second = tied(norm(), norm())
    return nn.Sequential(conv(), first, nn.ReLU(), conv(), second)


def old_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(conv()), norm())


# name: (network, input, {left norm: words of the reason})
LEFT = {
    "one call of two has the norm": (
        lambda: Reads(lambda m, x: m.conv(F.relu(m.bn(m.conv(x)))), conv=conv(), bn=norm()),
        IMAGES,
        {"bn": "'conv' is called at 2 places"},
    ),
    "a linear layer called twice": (
        lambda: Reads(lambda m, x: m.bn(m.fc(F.relu(m.fc(x)))), fc=nn.Linear(8, 8), bn=nn.BatchNorm1d(8)),
        IMAGES[:, 0, 0],
        {"bn": "'fc' is called at 2 places"},
    ),
    "one norm for two branches": (
        lambda: Reads(lambda m, x: m.bn(m.a(x)) + m.bn(m.b(x)), a=conv(), b=conv(), bn=norm()),
        IMAGES,
        {"bn": "called at 2 places"},
    ),
    "a block called twice": (
        lambda: Reads(lambda m, x: m.block(m.block(x)), block=nn.Sequential(conv(), norm(), nn.ReLU())),
        IMAGES,
        {"block.1": "2 places"},
    ),
    "two norms of one convolution": (
        lambda: Reads(lambda m, x: m.a(y := m.conv(x)) * m.b(y), conv=conv(), a=norm(), b=norm()),
        IMAGES,
        {"a": "also read by 'b'", "b": "also read by 'a'"},
    ),
    "the convolution feeds a skip": (
        lambda: Reads(lambda m, x: m.bn(y := m.conv(x)) + y, conv=conv(), bn=norm()),
        IMAGES,
        {"bn": "also read by the operation 'add'"},
    ),
    "a reshape between": (
        lambda: Reads(lambda m, x: m.bn(m.conv(x).flatten(2)), conv=conv(), bn=nn.BatchNorm1d(3)),
        IMAGES,
        {"bn": "'flatten'"},
    ),
    "a pool between": (lambda: nn.Sequential(conv(), nn.MaxPool2d(2), norm()), IMAGES, {"2": "'1' (MaxPool2d)"}),
    "a linear layer over a sequence": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
        IMAGES[:, :1, 0].expand(6, 8, 8) + 0.1,
        {"1": "'0' gives rank 3"},
    ),
    "behind another norm": (lambda: nn.Sequential(conv(), norm(), norm()), IMAGES, {"2": "'1' (BatchNorm2d)"}),
    "in front of a zero-padded convolution": (lambda: nn.Sequential(norm(), conv(), nn.ReLU()), IMAGES, {"0": "the network's input"}),
    "behind an activation": (lambda: nn.Sequential(conv(), nn.ReLU(), norm(), conv()), IMAGES, {"2": "'1' (ReLU)"}),
    "behind a concatenation": (
        lambda: Reads(lambda m, x: m.bn(torch.cat([m.a(x), x], 1)), a=conv(), bn=norm(6)),
        IMAGES,
        {"bn": "the operation 'cat'"},
    ),
    "no running statistics": (lambda: nn.Sequential(conv(), norm(track_running_stats=False)), IMAGES, {"1": "no running statistics"}),
    "convolutions that share a weight": (sharing_convolutions, IMAGES, {"1": "shares a parameter", "4": "shares a parameter"}),
    "norms that share a weight": (sharing_norms, IMAGES, {"1": "shares a parameter", "4": "shares a parameter"}),
    "weight_norm": (lambda: nn.Sequential(weight_norm(conv()), norm()), IMAGES, {"1": "computed from other parameters"}),
    "weight_norm of before parametrizations": (old_weight_norm, IMAGES, {"1": "computed from other parameters"}),
    "spectral_norm": (lambda: nn.Sequential(spectral_norm(conv()), norm()), IMAGES, {"1": "computed from other parameters"}),
}
FOLDED = {
    "no gamma and beta": lambda: nn.Sequential(conv(), norm(affine=False)),
    "plain mean over the batches": lambda: nn.Sequential(conv(), norm(momentum=None)),
    "other eps and momentum": lambda: nn.Sequential(conv(bias=False), norm(eps=1e-3, momentum=0.03)),
    "a linear layer": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.BatchNorm1d(4)),
    "a norm with its activation": lambda: nn.Sequential(conv(), BatchNormAct2d(3, act_layer=nn.ReLU6)),
    "a norm that is frozen": lambda: nn.Sequential(conv(), FrozenBatchNorm2d(3), nn.ReLU(), conv(), norm()),
    "an identity between": lambda: nn.Sequential(conv(), nn.Identity(), norm()),
    "circular": lambda: nn.Sequential(conv(padding_mode="circular"), norm(), nn.ReLU(), conv(padding_mode="reflect"), norm()),
}


def float64(model, x):
    torch.manual_seed(0)
    return randomize(model()).double(), x.double()


def copied(model):
    return copy.deepcopy(model, computed_tensors(model))


def trains_as_the_float_model(strategy, model, x):
    """Quantization off: outputs, statistics and the gradient of x of two training steps, then the outputs in evaluation."""
    model, prepared = copied(model).train(), qat.prepare(model.train(), (x,), qat.QATConfig(fold=strategy))
    qat.set_fake_quant(prepared, weights=False, activations=False)
    for step in range(2):
        xs = [(x + step).clone().requires_grad_() for _ in range(2)]
        ys = [network(each) for network, each in zip((prepared, model), xs)]
        torch.testing.assert_close(*ys, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(*[torch.autograd.grad((y * y.detach().sin()).sum(), each)[0] for y, each in zip(ys, xs)])
    expected = torch.cat([b.flatten() for name, b in model.named_buffers() if "running" in name] or [x[:0].flatten()])
    found = {name: b for name, b in prepared.named_buffers() if "running" in name}
    torch.testing.assert_close(torch.cat([b.flatten() for b in found.values()] or [x[:0].flatten()]), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(prepared.eval()(x), model.eval()(x), rtol=1e-9, atol=1e-9)
    return prepared


@pytest.mark.parametrize("case", LEFT)
def test_what_cannot_fold_is_left_with_the_reason_and_works(case):
    build, x, reasons = LEFT[case]
    model, x = float64(build, x)
    folded = qat.fold(model.eval(), (x,))
    torch.testing.assert_close(folded(x), copied(model)(x), rtol=1e-9, atol=1e-9)
    prepared = trains_as_the_float_model("bn_correction", model, x)
    for report in (folded.fold_report, prepared.fold_report):
        left = dict(report.left)
        assert set(left) == set(reasons) and all(words in left[name] for name, words in reasons.items()), report
    qat.set_fake_quant(prepared)
    qat.calibrate(prepared, [x])
    prepared.train()(x).square().sum().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in prepared.parameters())
    assert bool(copy.deepcopy(prepared).eval()(x).isfinite().all())
    before = {name: b.clone() for name, b in prepared.named_buffers()}
    qat.freeze_bn(prepared)
    prepared.train()(x)
    assert all(torch.equal(before[name], b) for name, b in prepared.named_buffers() if "running" in name)


@pytest.mark.parametrize("case", FOLDED)
@pytest.mark.parametrize("strategy", EXACT)
def test_what_folds_trains_as_the_float_model(strategy, case):
    model, x = float64(FOLDED[case], IMAGES)
    prepared = trains_as_the_float_model(strategy, model, x)
    assert prepared.fold_report.left == [] and len(prepared.fold_report.folded) == len(folded_layers(prepared))


@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize(
    "case", ["one norm for two branches", "a block called twice", "behind an activation", "the convolution feeds a skip"]
)
def test_left_norms_train_as_the_float_model_beside_every_strategy(strategy, case):
    build, x, _ = LEFT[case]
    model, x = float64(lambda: nn.Sequential(conv(), norm(), build()), x)
    prepared = trains_as_the_float_model(strategy, model, x)
    assert ("0", "1") in prepared.fold_report.folded


DIMENSIONS = {
    1: (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d),
    2: (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d),
    3: (nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d),
}


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("rank", DIMENSIONS)
def test_transposed_layers_of_every_rank_and_grouping(rank, groups):
    _, transposed, batch_norm = DIMENSIONS[rank]
    model, x = float64(lambda: nn.Sequential(transposed(4, 4, 2, stride=2, groups=groups), batch_norm(4)), torch.ones(3, 4, *[3] * rank))
    x = x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape).mul(7).sin()
    prepared = trains_as_the_float_model("bn_correction", model, x)
    assert prepared.fold_report.folded == [("0", "1")]
    # The channel axis: scaling one gamma changes that output channel and no other.
    before, layer = prepared(x), prepared.get_submodule("0")
    layer.bn.weight.data[1] *= 3
    changed = (prepared(x) - before).abs().amax([d for d in range(x.dim()) if d != 1]) > 1e-6
    assert changed.tolist() == [False, True, False, False]


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
@pytest.mark.parametrize("rank", DIMENSIONS)
def test_padding_of_every_kind_is_exact_at_the_border(rank, mode):
    layer, _, batch_norm = DIMENSIONS[rank]
    model, x = float64(
        lambda: nn.Sequential(layer(4, 4, 3, padding=1, padding_mode=mode, groups=2), batch_norm(4)), torch.ones(3, 4, *[4] * rank)
    )
    x = x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape).mul(7).sin()
    assert trains_as_the_float_model("naive", model, x).fold_report.left == []


INPLACE = {
    "ReLU": nn.ReLU(True),
    "ReLU6": nn.ReLU6(True),
    "Hardswish": nn.Hardswish(True),
    "SiLU": nn.SiLU(True),
    "LeakyReLU": nn.LeakyReLU(0.1, True),
    "Threshold": nn.Threshold(0.1, 0.1, True),
    "F.relu_": F.relu_,
    "F.relu(inplace=True)": lambda y: F.relu(y, inplace=True),
    "F.hardtanh_": F.hardtanh_,
    "torch.clamp_": lambda y: torch.clamp_(y, 0, 1),
    "relu_": lambda y: y.relu_(),
    "mul_": lambda y: y.mul_(0.5),
    "clamp_": lambda y: y.clamp_(-0.5, 1),
    "sub_": lambda y: y.sub_(0.3),
    "masked_fill_": lambda y: y.masked_fill_(y < 0, 0.0),
    "fill_": lambda y: y.fill_(0.5),
    "zero_": lambda y: y.zero_(),
    "copy_": lambda y: y.copy_(y * 2),
}


@pytest.mark.parametrize("name", INPLACE)
def test_an_in_place_change_is_seen_by_its_second_reader(name):
    torch.manual_seed(0)
    change = INPLACE[name]

    def forward(m, x):
        y = m.bn(m.conv(x))
        z = getattr(m, "change", change)(y)
        return m.last(z) + y

    modules = {"change": change} if isinstance(change, nn.Module) else {}
    model = randomize(Reads(forward, conv=conv(), bn=norm(), last=conv(), **modules)).eval()
    with torch.no_grad():
        expected = model(IMAGES)
        prepared = qat.prepare(model, (IMAGES,))
        assert prepared.fold_report.folded == [("conv", "bn")]
        qat.set_fake_quant(prepared, weights=False, activations=False)
        torch.testing.assert_close(prepared(IMAGES), expected, rtol=1e-5, atol=1e-5)
        qat.set_fake_quant(prepared)
        qat.calibrate(prepared, [IMAGES])
        torch.testing.assert_close(prepared(IMAGES), expected, rtol=0, atol=0.05 * float(expected.abs().max()))


OPERATIONS = {
    "+=": (lambda a, b: a.__iadd__(b), lambda a, b: a + b),
    "*=": (lambda a, b: a.__imul__(b), lambda a, b: a * b),
    "-=": (lambda a, b: a.__isub__(b), lambda a, b: a - b),
    "add_": (lambda a, b: a.add_(b), lambda a, b: a + b),
    "add_(alpha)": (lambda a, b: a.add_(b, alpha=2), lambda a, b: torch.add(a, b, alpha=2)),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_an_in_place_operation_and_one_shared_relu_are_quantized_as_the_plain_form(strategy, name):
    outputs = []
    for operation, inplace in zip(OPERATIONS[name], (True, False)):
        torch.manual_seed(0)

        def forward(m, x, operation=operation):
            x = m.relu(m.first(x))
            return m.relu(operation(m.bn(m.conv(x)), x))

        model = randomize(Reads(forward, first=conv(), conv=conv(), bn=norm(), relu=nn.ReLU(inplace))).train()
        prepared = qat.prepare(model, (IMAGES,), qat.QATConfig(fold=strategy))
        qat.calibrate(prepared, [IMAGES])
        quantizers = [n for n, _ in prepared.named_modules() if n.startswith("quantizers.")]
        assert [n for n in quantizers if "relu" in n] == ["quantizers.relu", "quantizers.relu_1"]
        outputs += [prepared.train()(IMAGES), prepared.eval()(IMAGES)]
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3])


def value_dependent(kind):
    def forward(m, x):
        if kind == "item" and x.max().item() > 0:
            return x * 2
        if kind == "shape" and x.shape[0] > 3:
            return x * 2
        if kind == "while":
            while x.norm() > 1:
                x = x / 2
        if kind == "loop":
            for row in x:
                x = x + row
        if kind == "int":
            return x * int(x.sum())
        if kind == "assignment":
            x[:, 0] = 0
        if kind == "assert":
            assert x.sum() > -1e9
        return x

    return forward


@pytest.mark.parametrize("kind", ["item", "shape", "while", "loop", "int", "assignment", "assert"])
def test_control_flow_names_the_module_and_the_line_and_the_way_out(kind):
    model = nn.Sequential(conv(), norm(), nn.Sequential(Reads(value_dependent(kind))))
    with pytest.raises(qat.CaptureError, match=r"2\.0: .*test_hard_cases\.py:\d+.*'skip': True") as error:
        qat.prepare(model, (IMAGES,))
    assert "\n" not in str(error.value)
    assert qat.prepare(model, (IMAGES,), qat.QATConfig(overrides={"2.0": {"skip": True}})).fold_report.folded == [("0", "1")]


def test_a_branch_on_the_mode_is_said_and_evaluation_is_kept():
    model = Reads(lambda m, x: m.conv(x) * 2 if m.training else m.conv(x), conv=conv()).eval()
    graph = qat.fold(model, (IMAGES,))
    assert "evaluation branch was captured" in graph.fold_report.notes[0]
    torch.testing.assert_close(graph(IMAGES), model(IMAGES))


def test_a_copy_of_a_network_with_a_computed_weight_goes_on_alone():
    model, x = float64(old_weight_norm, IMAGES)
    prepared = qat.prepare(model.train(), (x,))
    prepared(x)
    twin = copy.deepcopy(nn.ModuleList([prepared]))[0]
    assert torch.equal(twin(x), prepared(x))
    with torch.no_grad():
        twin.get_submodule("0").weight_g[0].mul_(-2)
    assert not torch.allclose(twin.eval()(x), prepared.eval()(x))


def test_a_left_norm_says_which_layer_a_batch_of_one_reached():
    prepared = qat.prepare(nn.Sequential(nn.Conv2d(3, 4, 8), nn.ReLU(), norm(4)).train(), (IMAGES,))
    with pytest.raises(qat.QATError, match=r"^2: .*more than 1 value per channel"):
        prepared(IMAGES[:1])


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_a_batch_of_one_and_a_last_partial_batch(strategy):
    model = randomize(Residual()).double().train()
    prepared = qat.prepare(model, (IMAGES.double(),), qat.QATConfig(fold=strategy))
    qat.set_fake_quant(prepared, weights=False, activations=False)
    for x in (IMAGES[:1].double(), IMAGES[:3].double()):
        if strategy in EXACT:
            torch.testing.assert_close(prepared(x), model(x), rtol=1e-9, atol=1e-9)
        assert bool(prepared(x).isfinite().all())
