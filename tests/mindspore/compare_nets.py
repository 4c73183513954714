"""Workloads that levels break in every way, importable for worker processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops

from ampdebug import Workload


class Net(nn.Cell):
    """Features [N, 6], float32, to 3 logits."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Dense(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.fc = nn.Dense(8, 3)

    def construct(self, x: Tensor) -> Tensor:
        return self.fc(ops.relu(self.norm(self.inlet(x))))


class Treacherous(Net):
    """Hangs at O2 and dies at O3, and talks. O2 wraps the norm; O3 gives it float16."""

    def __init__(self) -> None:
        super().__init__()
        sys.stdout.write("made\n")
        sys.stdout.flush()

    def construct(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        if type(self.norm).__name__ == "_OutputTo16":
            time.sleep(300)
        elif "16" in str(x.dtype):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.fc(self.norm(x))


class Restless(Net):
    """Draws numbers that no seed reaches."""

    def construct(self, x: Tensor) -> Tensor:
        drawn = np.random.default_rng().normal(size=x.shape).astype(np.float32)
        return super().construct(x + Tensor(drawn))


class Overflowing(Net):
    """Its squares leave float16, and a division brings them back."""

    def construct(self, x: Tensor) -> Tensor:
        x = ops.square(ops.tanh(self.inlet(x)) * 500.0)
        return self.fc(x / 250000.0)


def data() -> Iterator[tuple[Any, Any]]:
    random = np.random.default_rng(1)
    for _ in range(3):
        x = random.normal(size=(16, 6)).astype(np.float32)
        yield x, (x.argmax(1) % 3).astype(np.int32)


def accuracy(net: nn.Cell) -> float:
    assert not net.training
    return float(np.mean([(net(Tensor(x)).asnumpy().argmax(1) == y).mean() for x, y in data()]))


def momentum(parameters: Any) -> nn.Optimizer:
    return nn.Momentum(parameters, 0.1, 0.9)


def workload(network: Any, **parts: Any) -> Workload:
    given = {"data": data, "loss": nn.CrossEntropyLoss(), "optimizer": momentum, "metric": accuracy, **parts}
    return Workload(network=network, **given)


plain = workload(Net)
treacherous = workload(Treacherous, metric=None)
restless = workload(Restless)
overflowing = workload(Overflowing)
unsendable = workload(lambda: Net())
untrainable = Workload(network=Net, data=data)
