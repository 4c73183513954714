"""The ranking against trying every operator out: alone in float16, the rest of the network in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from ampdebug.hooks._backend import MindSporeBackend

pytestmark = pytest.mark.own_process


@pytest.fixture(autouse=True)
def pynative() -> None:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    ms.runtime.launch_blocking()  # MindSpore's threads wait by spinning, which is slow where cores are few


class Attention(nn.Cell):
    """Large middle, small output: where the elements are many, single ones count for little."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.inlet = nn.Dense(8, width)
        self.position = Parameter(Tensor(np.linspace(-1, 1, 8 * width).reshape(1, 8, width).astype(np.float32)))
        self.query, self.key, self.value = nn.Dense(width, width), nn.Dense(width, width), nn.Dense(width, width)
        self.norm = nn.LayerNorm((width,))
        self.up, self.down = nn.Dense(width, 4 * width), nn.Dense(4 * width, width)
        self.head = nn.Dense(width, 4)

    def construct(self, x: Tensor) -> Tensor:
        x = self.inlet(x.reshape(x.shape[0], 8, 8)) + self.position
        scores = ops.softmax(ops.matmul(self.query(x), self.key(x).swapaxes(-1, -2)), -1)
        x = self.norm(x + ops.matmul(scores, self.value(x)))
        return self.head((x + self.down(ops.gelu(self.up(x)))).mean(1))


class Convolutions(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6, gamma_init=2.0, beta_init=8.0)
        self.conv2, self.bn2 = nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)
        self.conv3, self.bn3 = nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)
        self.head = nn.Dense(6, 4)

    def construct(self, x: Tensor) -> Tensor:
        x = ops.relu(self.bn1(self.conv1(x)))
        x = ops.relu(x + self.bn2(self.conv2(x)))
        x = ops.relu(x + self.bn3(self.conv3(x)) * 0.3)
        return self.head(x.mean((2, 3)))


class Chain(nn.Cell):
    """Unlike sizes, offsets and functions by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.CellList([nn.Dense(64, 32), nn.Dense(32, 32), nn.Dense(32, 32), nn.Dense(32, 4)])

    def construct(self, x: Tensor) -> Tensor:
        x = self.layers[0](x.reshape(x.shape[0], 64))
        x = ops.tanh(x) + 5.0
        x = self.layers[1](x) * 0.2
        x = ops.log(ops.exp(x) + 1.0)
        x = x - x.mean(-1, keep_dims=True)
        x = x / ops.sqrt(ops.square(x).mean(-1, keep_dims=True) + 0.01)
        x = ops.sin(self.layers[2](x) * 3.0)
        return self.layers[3](x)


@pytest.mark.parametrize(("kind", "level"), [(Attention, "O3"), (Convolutions, "O2"), (Chain, "O3")])
def test_the_five_worst_operators_are_among_the_first_ten(kind: Callable[[], nn.Cell], level: str) -> None:
    ms.set_seed(2)
    net = kind()
    net.set_train(False)
    x = Tensor(np.random.default_rng(0).normal(size=(12, 1, 8, 8)).astype(np.float32))
    exact = net(x).asnumpy().astype(np.float64)

    def evaluate(net: nn.Cell) -> float:
        seen: Any = net(x).asnumpy()
        return float(np.linalg.norm(seen - exact) / np.linalg.norm(exact))

    backend = MindSporeBackend(net, evaluate, level=level)
    sites = [unit.sites[0] for unit in backend.record()]
    assert len(sites) >= 13, "among few operators the first ten say nothing"
    scores = backend.rank()
    assert set(sites) <= scores.keys()
    ranking = sorted(sites, key=lambda site: -scores[site].score)
    everything = frozenset(backend.recorded.policy.outputs)
    assert backend.measure(everything) == 0.0
    worst = sorted(sites, key=lambda site: -backend.measure(everything - {site}))[:5]
    assert {site.key for site in worst} <= {site.key for site in ranking[:10]}
