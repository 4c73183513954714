"""Networks whose operators are moved to float32 by the tests of the fix: one way of writing an operator each.

A module of its own, with functions at its top, so that a process of its own can import it; and with imports written as
people write them.
"""

import functools

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops


def halved(function):
    """A decorator as people put on construct."""

    @functools.wraps(function)
    def wrapper(self, x):
        return function(self, x) / 2

    return wrapper


def log_sum(x, axis=-1):
    # outside of any class
    return ops.log(ops.exp(x).sum(axis))


class Calls(nn.Cell):
    """Function calls, chained; the value between them is used by others too."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Dense(4, 4)

    def construct(self, x):
        e = ops.exp(self.fc(x) * 3.0)  # a comment
        rest = ops.relu(e)
        return ops.log(e) + ops.tanh(rest)


class Methods(nn.Cell):
    """Methods and operators in one expression over several lines."""

    def construct(self, x):
        y = (
            x.exp()
            # a comment in the middle
            / x.exp().sum(-1, keepdims=True)  # and at the end
        )
        return y @ x.swapaxes(0, 1)


class Augmented(nn.Cell):
    """Augmented assignments."""

    def construct(self, x):
        x = x * 30.0
        x *= x
        x /= 7.0
        return x.sum(-1)


class Loops(nn.Cell):
    """A loop and a list."""

    def construct(self, x):
        for _ in range(2):
            x = ops.exp(x * 0.7) * 0.5
        parts = [ops.exp(v * 1.3) for v in (x, x + 1.0)]
        return parts[0] + parts[1] * 1e-2


class Primitives(nn.Cell):
    """A primitive of its own, and a parameter."""

    def __init__(self):
        super().__init__()
        self.mean = ops.ReduceMean()
        self.scale = Parameter(Tensor(np.full(4, 3.0, np.float32)), name="scale")

    def construct(self, x):
        x = ops.reshape(x * self.scale, (x.shape[0], 2, 2))
        return self.mean(x, 2) + 1.0


class Helpers(nn.Cell):
    """A function outside, and a decorated construct."""

    @halved
    def construct(self, x):
        return log_sum(x * 5.0) + 1.0


class Cells(nn.Cell):
    """Cells of the library: an attribute, one in a SequentialCell, some in a CellList, under O2's BatchNorm."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(4, beta_init=ms.common.initializer.Constant(5.0))
        self.fc = nn.Dense(4, 4, weight_init=ms.common.initializer.Constant(0.4))
        self.head = nn.SequentialCell(nn.Dense(4, 4), nn.Dense(4, 4), nn.Tanh())
        self.layers = nn.CellList([nn.Dense(4, 4) for _ in range(2)])

    def construct(self, x):
        x = self.fc(self.bn(x)) * 0.1
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Softmax(nn.Cell):
    """The hand-written one."""

    def construct(self, x):
        e = ops.exp(x)
        return e / e.sum(-1, keepdims=True)


class Attention(nn.Cell):
    """A culprit in a child, whose output meets 16 bits in the parent."""

    def __init__(self, factor=4.0):
        super().__init__()
        self.query, self.key = nn.Dense(4, 4), nn.Dense(4, 4)
        self.softmax = Softmax()
        self.factor = factor

    def construct(self, x):
        scores = ops.matmul(self.query(x), self.key(x).swapaxes(-1, -2)) * self.factor
        return ops.matmul(self.softmax(scores), self.query(x))


def data():
    """``[6, 4]``: small enough that float16 rounds everything and loses nothing."""
    return Tensor(np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32) * 0.3 + 0.5)


def evaluate(net):
    """Every output and every gradient in one number, so that two networks that compute differently differ."""
    x = data()
    signs = Tensor(np.random.default_rng(1).choice([-1.0, 1.0, 0.5], (6, 6)).astype(np.float32))

    def forward(x):
        out = net(x).astype(ms.float32)
        out = out.reshape(out.shape[0], -1)
        return (ops.log(out * out + 1.0) * signs[:, : out.shape[1]]).sum()

    loss, (gradient, weights) = ms.value_and_grad(forward, 0, net.trainable_params())(x)
    total = float(loss.asnumpy())
    for place, value in enumerate((gradient, *weights)):
        total += float(np.cos(place + 1.0) * value.asnumpy().astype(np.float64).sum())
    return total


def overflowing():
    """Its exponentials leave float16 and not float32."""
    net = Attention(factor=1.0)
    for dense in (net.query, net.key):
        dense.weight.set_data(Tensor(np.eye(4, dtype=np.float32) * 3.0))
    return net


def finite(net):
    """All outputs are finite, in training and in evaluation."""
    return bool(np.isfinite(net(data()).asnumpy()).all()) and bool(np.isfinite(evaluate(net)))


class Pooled(nn.Cell):
    """The culprit stands in a parent, on what children in 16 bits give it: the sum of many leaves float16."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Dense(4, 4)
        self.list = nn.CellList([nn.Dense(4, 4), nn.Dense(4, 4)])

    def construct(self, x):
        y = self.fc(x)
        for layer in self.list:
            y = y + layer(x)
        return (y * 0.0 + 40000.0).sum(0, keepdims=True) / 6.0 + self.fc.bias * 0.0


def pooled():
    return Pooled()


class LargeDense(nn.Cell):
    """A layer whose sums no float16 holds, also under O1, which leaves all but such layers in float32."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Dense(64, 64)
        self.head = nn.Dense(64, 4)

    def construct(self, x):
        y = self.fc(x * 1e4) / 1e4
        return self.head(y)


LARGE = Tensor(np.random.RandomState(0).randn(16, 64).astype(np.float32) * 3)


def large_is_finite(net):
    return bool(np.isfinite(net(LARGE).asnumpy()).all())
