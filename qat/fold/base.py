"""FoldedConvBN: a convolution or linear layer with its BatchNorm folded into it, trainable.

The inference graph is one layer, conv(x, Q(s W)) + b_fold with s = gamma / sigma (see arithmetic.py). A strategy says what the training
forward computes instead while the statistics move. The BatchNorm module is never called; it is where gamma, beta and the statistics live.
"""

from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from qat.errors import QATError
from qat.fold.arithmetic import (
    at_least_float32,
    corrected,
    divisors,
    fold_weight,
    native,
    out_first,
    per_row,
    scale_rows,
    shift_bias,
    sigma,
)
from qat.fold.convolution import convolve, is_plain
from qat.fold.foldable import FROZEN_NORMS, check_foldable
from qat.fold.probe import adds_bias
from qat.fold.statistics import Count, Pool, held, move_running, write_pooled
from qat.fold.straight_through import FoldedLayer, FoldedWeight, is_one_function
from qat.fold.two_passes import TwoPasses
from qat.quant import FakeQuantizer
from qat.quant.affine import along
from qat.quant.bias import leave_room, round_bias, too_large


class FoldedConvBN(nn.Module):
    """(N, C_in, *) -> (N, C_out, *).

    Args:
        conv: nn.Conv*, nn.ConvTranspose*, nn.Linear or a subclass that is linear in its weight. Held by reference.
        bn: BatchNorm1d/2d/3d, SyncBatchNorm, timm's BatchNormAct2d, or a FrozenBatchNorm, which is frozen from the start and stays so.
            Held by reference.
        weight_quantizer: module that maps an out-first weight (C_out, C_in/g, *k) to its fake-quantized values; None trains unquantized.

    Attributes:
        activation: what a BatchNorm with a built-in activation applies last; Identity for others.
        name: qualified name, for errors.
        frozen: the statistics rest and the training forward is the inference forward. Kept in the state dict.
        batch_mean, batch_var: of the last training batch (biased; with the layer's bias), not saved.
        bias_correction: (2, C_out), the parameter `bias_key` before and after `correct_bias`; None where there was none.

    Raises:
        QATError: a pair that cannot be folded, with the reason.
    """

    strategy = ""
    keeps_bn = True
    folds_rows = True  # the weight to quantize is gamma / sigma times the layer's own
    always_frozen = False
    bias_key = "bn.bias"  # in the state dict: the parameter `add_to_bias` moves

    conv: Any
    bn: Any
    weight_quantizer: Any
    batch_mean: Tensor
    batch_var: Tensor
    bias_correction: Tensor | None

    def __init__(self, conv: nn.Module, bn: nn.Module | None, weight_quantizer: nn.Module | None = None):
        super().__init__()
        reason = check_foldable(conv, bn) or ("no BatchNorm" if bn is None and self.keeps_bn else None)
        if reason is not None:
            pair = " + ".join(type(m).__name__ for m in (conv, bn) if m is not None)
            raise QATError(pair, reason, "a pair that folds", "Leave it unfolded; STRATEGIES['static'] takes a layer alone.")
        if weight_quantizer is not None and not isinstance(weight_quantizer, nn.Module):
            found, todo = f"a {type(weight_quantizer).__name__} as weight_quantizer", "Write qat.FakeQuantizer(qat.QuantSpec())."
            raise QATError(type(conv).__name__, found, "a module or None", todo)
        if not is_plain(conv):
            adds_bias(conv, cast(Tensor, conv.weight))  # asked here, so that no forward has to
        self.conv, self.bn, self.weight_quantizer = conv, bn, weight_quantizer
        self._one_function = is_one_function(conv)
        self.activation = built_in_activation(bn)
        self.name = ""
        self.always_frozen = self.always_frozen or isinstance(bn, FROZEN_NORMS)
        self.frozen = self.always_frozen
        self._seen_batch = False
        self._pool: Pool | None = None
        # In a tuple: the quantizer belongs to the graph and must not be saved, moved or switched as a part of this layer.
        self._input_quantizer: tuple[FakeQuantizer, ...] = ()
        # Over another rank than the layer's own a BatchNorm would take another axis for the channels.
        self._rank = conv.weight.dim() if bn is not None and isinstance(conv.weight, Tensor) else None
        for key in ("batch_mean", "batch_var"):
            self.register_buffer(key, None if bn is None else torch.zeros_like(self.sigma), persistent=False)
        self.register_buffer("bias_correction", None)

        if self.keeps_bn:
            self._start_ranges()

    @property
    def gamma(self) -> Tensor:
        return torch.ones_like(self.bn.running_var) if self.bn.weight is None else self.bn.weight

    @property
    def beta(self) -> Tensor:
        return torch.zeros_like(self.bn.running_mean) if self.bn.bias is None else self.bn.bias

    @property
    def input_quantizer(self) -> FakeQuantizer | None:
        """Quantizer of the tensor this layer reads. With one, inference rounds the bias to multiples of s_x s_w, as int32 does."""
        return self._input_quantizer[0] if self._input_quantizer else None

    def set_input_quantizer(self, quantizer: FakeQuantizer | None) -> None:
        self._input_quantizer = () if quantizer is None else (quantizer,)

    @property
    def sigma(self) -> Tensor:
        """sqrt(running_var + eps), (C_out)."""
        return sigma(held(self.bn.running_var), self.bn.eps)

    @property
    def factor(self) -> Tensor:
        """gamma / sigma, (C_out)."""
        return at_least_float32(self.gamma) / self.sigma

    @property
    def behind_quantizer(self) -> Tensor | None:
        """What inference multiplies the rows of the quantized weight by, (C_out); None for nothing."""
        return None

    def folded(self) -> tuple[Tensor, Tensor]:
        """(weight in the layer's own layout, bias (C_out)) of the inference graph, before quantization; differentiable."""
        return native(self.weight_to_quantize(), self.conv), self._folded_bias()

    def quantized(self) -> tuple[Tensor, Tensor]:
        """(fake-quantized weight in the layer's own layout, bias (C_out)): what inference convolves with; differentiable."""
        if not (self.folds_rows and self.clips_nothing):
            return native(self.quantize_weight(self.weight_to_quantize()), self.conv), self._folded_bias()
        weight, s, quantized = self.quantized_outside()
        return native(FoldedWeight.apply(weight, s, quantized), self.conv), self._shifted_bias(s)

    def quantized_outside(self) -> tuple[Tensor, Tensor, Tensor]:
        """(W, s, Q(s W)), weights out-first, the last computed outside of autograd and owned by nobody; where `clips_nothing`."""
        weight, s = at_least_float32(out_first(self.conv.weight, self.conv)), self.factor
        with torch.no_grad():
            return weight, s, self.quantize_weight(scale_rows(weight, s), inplace=True)

    @torch.no_grad()
    def integer(self, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """What is shipped: int32 codes (C_out, C_in/g, *k), scale () or (C_out), bias (C_out); scale * codes is the weight of `quantized`.

        Args:
            input_scale: scale of the input's grid. The scale of a channel whose bias would not fit int32 then is raised (`leave_room`).

        Raises:
            QATError: no weight quantizer, one switched off, or an asymmetric grid.
        """
        bias = self._folded_bias()
        codes, scale = self.weight_codes()
        if input_scale is not None and bool(too_large(bias, scale * input_scale).any()):
            codes, scale = leave_room(codes, scale, bias, input_scale, self.weight_quantizer.spec)
        return codes, scale, bias

    @torch.no_grad()
    def weight_codes(self) -> tuple[Tensor, Tensor]:
        """int32 codes (C_out, C_in/g, *k) and scale () or (C_out) of the quantized weight.

        Raises:
            QATError: as `integer`.
        """
        quantizer, weight = self.integer_quantizer(), self.weight_to_quantize()
        return quantizer.codes(weight), quantizer.qparams_for(weight)[0]

    def inference_forward(self, x: Tensor) -> Tensor:
        return self.activation(self.integer_layer(x)[0])

    def integer_layer(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(output of the quantized layer before its activation, the bias in it (C_out)), as inference computes them."""
        if self.training and self._one_function and self.folds_rows and self.clips_nothing:
            return self._folded_layer(x)
        weight, bias = self.quantized()
        scale = self._bias_scale()
        if scale is not None:
            # Asked of the device in evaluation only: a training step waits for nothing.
            if not self.training and not torch.compiler.is_compiling():
                weight, scale = self._with_room(weight, bias, scale)
            bias = round_bias(bias, scale)
        return convolve(self.conv, x, weight, bias), bias

    def _folded_layer(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`integer_layer` in training, as one function."""
        weight, s, quantized = self.quantized_outside()
        bias, scale = self._shifted_bias(s), self._bias_scale()
        if scale is not None:
            bias = round_bias(bias, scale)
        return FoldedLayer.apply(x, weight, s, bias, quantized, self.conv), bias

    def training_forward(self, x: Tensor) -> Tensor:
        """The strategy: forward with the statistics alive, activation included. Side effects: `record`."""
        raise NotImplementedError

    def normalised_forward(self, x: Tensor) -> Tensor:
        """Quantized with the running statistics, normalised by those of the batch (`corrected`). Side effect: `record`."""
        passes = TwoPasses(self, x)
        mean, var, count = passes.statistics()
        u = passes.quantized(self.gamma, self.sigma)
        y = corrected(u, self.conv.bias, self.gamma, self.beta, mean, sigma(var, self.bn.eps), self.sigma)
        self.record(mean, var, count)
        return self.activation(y)

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor, Count]:
        """(mean with the layer's bias, biased variance, count) of the batch as the strategy sees it: here through the float layer."""
        return TwoPasses(self, x).statistics()

    def forward(self, x: Tensor) -> Tensor:
        if self._rank is not None and x.dim() != self._rank:
            raise QATError(self.name or type(self).__name__, f"input of rank {x.dim()}", f"rank {self._rank}", "Leave this pair unfolded.")
        if self.conv._forward_pre_hooks or self.conv._forward_hooks:
            where = self.name or type(self).__name__
            raise QATError(where, "hooks on its layer, which is never called (pruning?)", "none", "Make such changes before qat.prepare.")
        if self.training and self._pool is not None:
            # Whatever the strategy trains with: the layers behind must see the network as the pooled statistics will make it.
            return self.normalised_forward(x)
        if self.training and not self.frozen:
            return self.training_forward(x)
        return self.inference_forward(x)

    def record(self, mean: Tensor, var: Tensor, count: Count) -> None:
        """Take in the batch's statistics: the running ones move, or rest while they are pooled. Call after their last use in a forward."""
        with torch.no_grad():
            self.batch_mean.copy_(mean)
            self.batch_var.copy_(var)
        self._seen_batch = True
        if self._pool is None:
            move_running(self.bn, mean, var, count)
        else:
            self._pool.add(mean, var, count)

    def freeze(self) -> None:
        self.frozen = True

    def unfreeze(self) -> None:
        """Let the statistics move again; a FrozenBatchNorm and the 'frozen' strategy stay as they are."""
        self.frozen = self.always_frozen

    def freeze_ranges(self) -> None:
        """Hold the weight's scale: a range of the tensor at hand is taken from the weight as inference would quantize it."""
        if self.weight_quantizer is not None:
            with torch.no_grad():
                self.weight_quantizer.freeze(self.weight_to_quantize())

    def unfreeze_ranges(self) -> None:
        if self.weight_quantizer is not None:
            self.weight_quantizer.unfreeze()

    def start_pooling(self) -> None:
        """From here on training forwards, also of a frozen layer, are normalised by the batch, and the running statistics rest.

        A FrozenBatchNorm's statistics are constants of the user's: they are never pooled.
        """
        self._pool = Pool() if self.keeps_bn and not isinstance(self.bn, FROZEN_NORMS) else None

    def finish_pooling(self) -> None:
        write_pooled(self._pool, self.bn)
        self._pool = None

    @torch.no_grad()
    def quantized_under(self, running: Tensor) -> Tensor | None:
        """sigma (C_out) of the last training forward's weight to quantize, gamma W / sigma; None where no statistics reach that weight.

        Args:
            running: `sigma` before that forward.
        """
        return running if self.folds_rows else None

    @torch.no_grad()
    def drift(self) -> tuple[Tensor, Tensor] | None:
        """(|mu_B - mu| / sigma, |log(sigma_B / sigma)|) per channel of the last training batch; None when there was none."""
        if not self._seen_batch:
            return None
        return (self.batch_mean - self.bn.running_mean).abs() / self.sigma, (sigma(self.batch_var, self.bn.eps) / self.sigma).log().abs()

    def weight_to_quantize(self) -> Tensor:
        """The out-first weight that the quantizer sees in inference."""
        return fold_weight(out_first(self.conv.weight, self.conv), self.gamma, self.sigma)

    @torch.no_grad()
    def write_weight(self, weight: Tensor) -> None:
        """Set the layer's own weight so that `weight_to_quantize` is `weight`, (C_out, C_in/g, *k), up to the last bit of float32.

        Rows whose gamma is 0 are 0 whatever the layer's own weight is; they are not touched.
        """
        own = out_first(self.conv.weight, self.conv)
        dead, s = divisors(self.factor)
        unfolded = torch.where(per_row(dead, own), own, (weight / per_row(s, own)).to(own.dtype))
        self.conv.weight.copy_(native(unfolded, self.conv))

    @torch.no_grad()
    def add_to_bias(self, change: Tensor) -> None:
        """Add (C_out) to the bias of the inference graph; a layer without one gets one. The statistics stay as they are."""
        self._give_bias()
        self.bn.bias.add_(change.to(self.bn.bias.dtype))

    @torch.no_grad()
    def correct_bias(self, change: Tensor) -> None:
        """`add_to_bias`, remembered in place of an earlier correction, which is taken out first."""
        self.undo_bias_correction()
        self._give_bias()
        before = attrgetter(self.bias_key)(self).detach().clone()
        self.add_to_bias(change)
        self.bias_correction = torch.stack((before, attrgetter(self.bias_key)(self).detach()))

    @torch.no_grad()
    def undo_bias_correction(self) -> None:
        """Take the correction out of the bias again: to the last bit, unless the bias was trained since."""
        if self.bias_correction is None:
            return
        (before, after), bias = self.bias_correction, attrgetter(self.bias_key)(self)
        bias.copy_(before if torch.equal(bias, after) else bias - (after - before))
        self.bias_correction = None

    def bias_change(self) -> Tensor | None:
        """(C_out), what `correct_bias` added; None where it did not."""
        return None if self.bias_correction is None else self.bias_correction[1] - self.bias_correction[0]

    def integer_quantizer(self) -> Any:
        """The weight quantizer, if its integers can be shipped."""
        quantizer, where = self.weight_quantizer, self.name or type(self).__name__
        if quantizer is None:
            raise QATError(where, "no weight quantizer", "one", "Give the layer a FakeQuantizer.")
        if not quantizer.enabled:
            raise QATError(where, "weight quantization switched off", "an enabled quantizer", "Call qat.set_fake_quant(prepared).")
        if not quantizer.spec.symmetric:
            raise QATError(where, "weights on an asymmetric grid", "a symmetric one", "Use QuantSpec(symmetric=True) for weights.")
        return quantizer

    @property
    def clips_nothing(self) -> bool:
        """Whether the gradient passes the weight quantizer everywhere."""
        return self.weight_quantizer is None or (type(self.weight_quantizer) is FakeQuantizer and self.weight_quantizer.clips_nothing)

    def extra_repr(self) -> str:
        return f"strategy={self.strategy}, frozen={self.frozen}"

    def get_extra_state(self) -> Tensor:
        """Whether the statistics rest; a tensor, as averages of weights expect of all that a state dict holds."""
        return torch.tensor(self.frozen)

    def set_extra_state(self, state: Tensor) -> None:
        self.frozen = bool(state) or self.always_frozen

    @torch.no_grad()
    def _start_ranges(self) -> None:
        """Size and set a fresh quantizer's state, so that a learned scale quantizes before the first step and keeps its shape under DDP."""
        if isinstance(self.weight_quantizer, FakeQuantizer) and not self.weight_quantizer.initialized:
            self.weight_quantizer.initialize(self.weight_to_quantize())
            # Reads the device once, here, so that no forward has to; a compiled one could not.
            _ = self.weight_quantizer.initialized

    @property
    def group(self) -> Any:
        """Process group of the statistics, None for the default one."""
        return getattr(self.bn, "process_group", None)

    def _folded_bias(self) -> Tensor:
        return self._shifted_bias(self.factor)

    def _shifted_bias(self, s: Tensor) -> Tensor:
        return shift_bias(self.conv.bias, s, self.beta, held(self.bn.running_mean))

    @torch.no_grad()
    def weight_scale(self) -> Tensor:
        """Scale of the weight codes of `integer`, () or (C_out); in training that of the last forward."""
        quantizer = self.weight_quantizer
        if quantizer.training and quantizer.initialized:
            return quantizer.current_scale()
        return quantizer.qparams_for(self.weight_to_quantize())[0]

    def _give_bias(self) -> None:
        """Make the parameter that `add_to_bias` moves where there is none."""
        if self.bn.bias is None:
            self.bn.bias = nn.Parameter(torch.zeros_like(self.bn.running_mean), self.conv.weight.requires_grad)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}{self.bias_key}" in state_dict:
            self._give_bias()
        corrected = f"{prefix}bias_correction" in state_dict
        self.bias_correction = attrgetter(self.bias_key)(self).detach().expand(2, -1).clone() if corrected else None
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _bias_scale(self) -> Tensor | None:
        """s_x s_w, () or (C_out); None while the weight or the input is not on an integer grid."""
        weight, x = self.weight_quantizer, self.input_quantizer
        if x is None or not (x.enabled and x.initialized) or not (isinstance(weight, FakeQuantizer) and weight.enabled):
            return None
        return self.weight_scale() * x.current_scale()

    @torch.no_grad()
    def _with_room(self, weight: Tensor, bias: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The weight and s_x s_w as shipped where a bias does not fit int32 (then without gradient), as they are elsewhere."""
        if not bool(too_large(bias, scale).any()):
            return weight, scale
        input_scale = cast(FakeQuantizer, self.input_quantizer).current_scale()
        codes, raised, _ = self.integer(input_scale)
        return native(codes * along(raised, codes, 0), self.conv).to(weight.dtype), raised * input_scale

    def quantize_weight(self, weight_out_first: Tensor, inplace: bool = False) -> Tensor:
        """
        Args:
            inplace: the weight has no gradient and may be overwritten.
        """
        if self.weight_quantizer is None:
            return weight_out_first
        options = {"inplace": True} if inplace and type(self.weight_quantizer) is FakeQuantizer else {}
        return self.weight_quantizer(weight_out_first, **options)


def built_in_activation(bn: nn.Module | None) -> nn.Module:
    """What a BatchNorm with an activation of its own (timm) applies after the normalisation; Identity for others."""
    parts = [part for part in (getattr(bn, "drop", None), getattr(bn, "act", None)) if part is not None and type(part) is not nn.Identity]
    return nn.Identity() if not parts else parts[0] if len(parts) == 1 else nn.Sequential(*parts)
