"""What a compiled graph hands over is measured on another thread: the numbers must be those of the moment it was handed
over, however often the graph, or one cell in it, runs in a step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from ampdebug import _background, watch

sys.path.insert(0, str(Path(__file__).parent))
from nets import Rows, assert_row, set_mode

pytestmark = pytest.mark.own_process

SIZE = 192
assert SIZE * SIZE >= _background.WORTHWHILE


@pytest.fixture(autouse=True)
def graph_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    set_mode("graph")
    yield
    set_mode("pynative")


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the arrays that went to the thread, which is made so slow that a race would show."""
    sizes: list[int] = []
    submit, work = _background.BackgroundStats.submit, _background.StatsTable.add_batch

    def counted(self: Any, array: Any, row: int, **how: Any) -> None:
        sizes.append(array.size)
        submit(self, array, row, **how)

    def slow(self: Any, batch: Any) -> None:
        _background.threading.Event().wait(0.2)
        work(self, batch)

    monkeypatch.setattr(_background.BackgroundStats, "submit", counted)
    monkeypatch.setattr(_background.StatsTable, "add_batch", slow)
    return sizes


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(SIZE, SIZE)
        self.act = nn.ReLU()
        self.second = nn.Dense(SIZE, SIZE)

    def construct(self, x):
        a = self.first(x)
        b = self.act(a)
        return self.second(b).sum(), a, b


class Block(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(SIZE, SIZE)

    @ms.jit
    def construct(self, x):
        return self.dense(x)


class PartlyCompiled(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.act = nn.ReLU()

    def construct(self, x):
        return self.block(self.act(self.block(x)))


class Looping(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.double = Double()

    def construct(self, x, times):
        while times > 0:
            x = self.double(x)
            times = times - 1
        return x


class Double(nn.Cell):
    def construct(self, x):
        return x * 2.0


def random(seed: int) -> Tensor:
    return Tensor(np.random.RandomState(seed).randn(SIZE, SIZE).astype(np.float32))


def test_a_graph_that_runs_twice_in_a_step(tmp_path: Path, handed_over: list[int]) -> None:
    net = Net()
    with watch(net, out=tmp_path / "run") as run:
        _, *first = net(random(0))
        loss, *second = net(random(1))
        run.step(loss=loss)
    rows = Rows(tmp_path / "run")
    for call, (a, b) in enumerate((first, second)):
        assert_row(rows["input", "first", call, ""], random(call).asnumpy())
        assert_row(rows["output", "first", call, ""], a.asnumpy())
        assert_row(rows["output", "act", call, ""], b.asnumpy())
    assert len(handed_over) >= 2 * 4, "the thread was not asked for these"


def test_compiled_and_uncompiled_cells_are_recorded_in_the_order_in_which_they_ran(
    tmp_path: Path, handed_over: list[int]
) -> None:
    set_mode("pynative")
    net = PartlyCompiled()
    with watch(net, out=tmp_path / "run") as run:
        out = net(random(0))
        run.step(loss=out.sum())
    rows = Rows(tmp_path / "run")
    paths = [path for kind, path, _, _ in rows.order if kind == "output"]
    assert paths == ["block.dense", "block", "act", "block.dense", "block", ""]
    np.testing.assert_array_equal(rows["output", "block.dense", 1, ""]["max"], rows["output", "", 0, ""]["max"])
    assert rows["output", "block.dense", 0, ""]["max"] == rows["output", "act", 0, ""]["max"]


def test_a_cell_that_a_loop_calls_is_measured_at_once(tmp_path: Path, handed_over: list[int]) -> None:
    net = Looping()
    x = random(0)
    with watch(net, out=tmp_path / "run") as run:
        net(x, Tensor(3, ms.int32))
        run.step(loss=0.0)
    rows = Rows(tmp_path / "run")
    for call in range(3):
        assert_row(rows["output", "double", call, ""], x.asnumpy() * 2.0 ** (call + 1))
    assert len(handed_over) <= 2, "only the outer cell's values may go to the thread"


def test_the_thread_failing_ends_the_watching_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Any, batch: Any) -> None:
        raise ValueError("a bug of ours")

    monkeypatch.setattr(_background.StatsTable, "add_batch", failing)
    net = Net()
    expected = net(random(0))[0].asnumpy()
    with watch(net, out=tmp_path / "run") as run:
        loss = net(random(0))[0]
        with pytest.warns(UserWarning, match="a bug of ours"):
            run.step(loss=loss)
    np.testing.assert_array_equal(loss.asnumpy(), expected)
    assert ops.isfinite(loss)
