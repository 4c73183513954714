"""Small workloads with a known fault, importable for worker processes and for the command line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ampdebug import Workload


class Overflowing(nn.Cell):
    """Its squares leave float16 (300 squared), and a division brings them back; healthy in float32."""

    def __init__(self, gain: float = 300.0) -> None:
        super().__init__()
        weights = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
        self.inlet = nn.Dense(4, 8, weight_init=Tensor(weights), bias_init="zeros")
        self.fc = nn.Dense(8, 3, weight_init=Tensor(weights[:3, :].repeat(2, 1)), bias_init="zeros")
        self.gain = gain

    def construct(self, x: Tensor) -> Tensor:
        x = ops.tanh(self.inlet(x)) * self.gain
        energy = ops.square(x)
        x = energy / (self.gain * self.gain)
        return self.fc(x)


class Healthy(Overflowing):
    def __init__(self) -> None:
        super().__init__(gain=1.0)


class Sleeping(Overflowing):
    """Fresh it is healthy: the fault comes with what was learned."""

    def __init__(self) -> None:
        super().__init__(gain=1.0)
        self.learned = Parameter(Tensor(1.0), name="learned")

    def construct(self, x: Tensor) -> Tensor:
        x = ops.tanh(self.inlet(x)) * self.learned
        energy = ops.square(x)
        x = energy / (self.learned * self.learned + 1e-3)
        return self.fc(x)


class Energy(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        energy = ops.square(x)
        return energy / 90000.0


class Nested(Overflowing):
    """The fault is all that one cell computes, so that pinning this cell mends it in both modes."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Energy()

    def construct(self, x: Tensor) -> Tensor:
        return self.fc(self.energy(ops.tanh(self.inlet(x)) * self.gain))


def data() -> Iterator[tuple[Any, Any]]:
    rng = np.random.default_rng(1)
    for _ in range(3):
        x = rng.normal(size=(16, 4)).astype(np.float32)
        yield x, (x.argmax(1) % 3).astype(np.int32)


def accuracy(net: nn.Cell) -> float:
    assert not net.training
    hits = total = 0
    for x, y in data():
        scores = net(Tensor(x)).asnumpy()
        if not np.isfinite(scores).all():
            return float("nan")
        hits, total = hits + int((scores.argmax(1) == y).sum()), total + len(y)
    return hits / total


def workload(network: Any = Overflowing, **parts: Any) -> Workload:
    given: dict[str, Any] = {
        "data": data,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda parameters: nn.SGD(parameters, 0.1),
        "metric": accuracy,
        **parts,
    }
    return Workload(network=network, **given)


overflowing = workload()
healthy = workload(Healthy)
sleeping = workload(Sleeping)
nested = workload(Nested)


def evaluate(net: nn.Cell) -> bool:
    x, _ = next(data())
    return bool(np.isfinite(net(Tensor(x)).asnumpy()).all())


def pair() -> tuple[Any, Any]:
    return Overflowing, evaluate


def evaluate_slowly(net: nn.Cell) -> bool:
    time.sleep(1.0)
    return evaluate(net)


slow_pair = (Overflowing, evaluate_slowly)
number = 3
