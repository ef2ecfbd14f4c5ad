"""frozen: fold with the running statistics, which never move.

Source: [MQ] arXiv 2111.03759, strategy 1.
Integer graph simulated, and the training forward itself:

    y = conv(x, Q(gamma W / sigma)) + beta + gamma (b - mu) / sigma

W, b: weight and bias of the layer. mu, sigma: running mean and sqrt(var + eps) as they were before training. gamma, beta, W and b train.
"""

from qat.fold.base import FoldedConvBN


class Frozen(FoldedConvBN):
    """Its state is always frozen: `unfreeze` does not thaw it."""

    strategy = "frozen"
    always_frozen = True
