"""What people do to a network while it trains: averages of its weights."""

import pytest
import torch
from small_networks import Residual, randomize
from timm.utils import ModelEmaV2, ModelEmaV3

import qat

X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("average", [ModelEmaV2, ModelEmaV3])
@pytest.mark.parametrize("config", [{}, {"fold": "static"}, {"fold": "scale_merge"}, {"weight_range": "lsq", "activation_range": "lsq"}])
def test_averages_of_weights(average, config):
    prepared = qat.prepare(randomize(Residual()), (X,), qat.QATConfig(**config))
    qat.calibrate(prepared, [X])
    ema = average(prepared, decay=0.5)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.05)
    before = {name: value.detach().clone() for name, value in prepared.named_parameters()}
    prepared.train()
    prepared(X).square().mean().backward()
    optimizer.step()
    ema.update(prepared)
    averaged = dict(ema.module.named_parameters())
    for name, value in prepared.named_parameters():
        torch.testing.assert_close(averaged[name], (before[name] + value) / 2)
    y = ema.module.eval()(X)
    assert torch.isfinite(y).all()
    assert qat.convert(ema.module)(X).shape == y.shape


class Optional(torch.nn.Module):
    """An input that is mostly left out."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 1)

    def forward(self, x, scale=None):
        return self.conv(x)


def test_inputs_with_a_default_may_be_left_out(tmp_path):
    prepared = qat.prepare(Optional(), (X,))
    qat.calibrate(prepared, [X])
    converted = qat.convert(prepared)
    path = qat.export_onnx(converted, (X,), tmp_path / "m.onnx")
    assert qat.verify(converted, path, [X]).max_lsb == 0
    with pytest.raises(qat.QATError, match="3 items for a network of 1 input"):
        qat.calibrate(prepared, [(X, X, X)])
