"""Networks with one fault each, for the tests of the flight recorder and of ``replay``."""

from __future__ import annotations

import random
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, amp, nn, ops


class HandSoftmax(nn.Cell):
    """A softmax written by hand over a Dense, and a BatchNorm behind it: 5 numbers, 3 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Dense(5, 3, bias_init="zeros")
        self.bn = nn.BatchNorm1d(3)
        self.fc.weight.set_data(Tensor(np.eye(3, 5, dtype=np.float32)))

    def construct(self, x):
        e = ops.exp(self.fc(x))
        return self.bn(e / e.sum(-1, keepdims=True))


class RootOfSquare(nn.Cell):
    """A root of a square: finite, and its derivative at 0 is inf times 0."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Dense(5, 3, bias_init="zeros")
        self.fc.weight.set_data(Tensor(np.abs(np.eye(3, 5, dtype=np.float32)) + 0.25))

    def construct(self, x):
        h = self.fc(x)
        return ops.sqrt(h * h)


class Halves(nn.Cell):
    """A loss in float16: it does not hold a loss scale above 65504."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Dense(5, 3)

    def construct(self, x, y):
        return ops.mean(ops.square(self.fc(x).astype(ms.float16) - y.astype(ms.float16)))


class LostEpsilon(nn.Cell):
    """A quotient that an epsilon should keep from 0/0, where float16 has no such epsilon."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Dense(5, 3)

    def construct(self, x):
        h = self.fc(x)
        small = ops.abs(h) * 1e-4
        squares = small * small
        return h / (squares.sum(-1, keepdims=True) + 1e-9)


class Poisoned(nn.Cell):
    """A Dense whose output is multiplied from outside: a fault that the network itself does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Dense(5, 3)
        self.factor = 1.0

    def construct(self, x):
        return self.fc(x) * self.factor


class Dice(nn.Cell):
    """A Dense that Python's and numpy's dice spoil in one step of four."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Dense(5, 3)

    def construct(self, x):
        spoiled = np.random.rand() < 0.5 and random.random() < 0.5  # noqa: NPY002 - as user code draws
        return self.fc(x) * (float("inf") if spoiled else 1.0)


class Mse(nn.Cell):
    """Mean of the squared differences, in float32."""

    def construct(self, output, label):
        return ops.mean(ops.square(output.astype(ms.float32) - label))


def batches(steps: int = 4, bad: int = 3, value: float = 30.0) -> list[tuple[Tensor, Tensor]]:
    """Batches of 4; in the bad one the first row is ``value``."""
    rng = np.random.RandomState(0)
    made = []
    for step in range(1, steps + 1):
        x = rng.uniform(0.1, 1.0, (4, 5)).astype(np.float32)
        if step == bad:
            x[0] = value
        made.append((Tensor(x), Tensor(rng.uniform(-1, 1, (4, 3)).astype(np.float32))))
    return made


def at_level(net: nn.Cell, level: str) -> nn.Cell:
    """The network at an AMP level, in training mode."""
    return (net if level == "O0" else amp.auto_mixed_precision(net, level)).set_train()


def without_weights(net: Any) -> Any:
    """Sets ``fc`` to zero: what the recording holds must be put in for anything to happen."""
    net.fc.weight.set_data(Tensor(np.zeros((3, 5), np.float32)))
    return net


def hand_softmax() -> Any:
    """A factory, whose weights would overflow nothing."""
    return without_weights(HandSoftmax()), Mse()


def root_of_square() -> Any:
    """A factory, with a batch as ``check`` wants it."""
    return without_weights(RootOfSquare()), batches()[0], Mse()


def other_shapes() -> Any:
    """A factory of another network with the same names."""
    net = HandSoftmax()
    net.fc = nn.Dense(5, 7)
    return net, Mse()


def dense() -> Any:
    """A factory of another network."""
    return nn.Dense(5, 3), Mse()
