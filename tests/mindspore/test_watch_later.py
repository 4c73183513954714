"""In PyNative mode values are read later than the cells run: they must be those of the moment the cell ended."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ampdebug import watch
from ampdebug.hooks import _later
from ampdebug.hooks._later import Later

sys.path.insert(0, str(Path(__file__).parent))
from nets import Rows, assert_row, set_mode

pytestmark = pytest.mark.own_process

SIZE = 128


@pytest.fixture(autouse=True)
def pynative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    set_mode("pynative")


@pytest.fixture
def when_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many calls of cells and gradients were read together, each time."""
    read, times = Later.read, []

    def counted(self: Later) -> None:
        if self._queue:
            times.append(len(self._queue))
        read(self)

    monkeypatch.setattr(Later, "read", counted)
    return times


class InPlace(nn.Cell):
    """Changes what its cells were given and gave, behind their backs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(SIZE, SIZE)
        self.act = nn.ReLU()
        self.kept: list[Tensor] = []

    def construct(self, x):
        y = self.first(x)
        self.kept.append(y * 1.0)
        y.copy_(y + 100.0)
        z = self.act(y)
        self.kept.append(y * 1.0)
        y[:] = 0.0
        return z


def random(shape: tuple[int, ...] = (SIZE, SIZE), dtype: Any = np.float32) -> Tensor:
    return Tensor(np.random.RandomState(0).randn(*shape).astype(dtype))


def test_what_an_in_place_operator_does_afterwards_is_not_seen(tmp_path: Path, when_read: list[int]) -> None:
    net = InPlace()
    with watch(net, out=tmp_path / "run") as run:
        z = net(random())
        run.step(loss=0.0)
    rows = Rows(tmp_path / "run")
    assert_row(rows["output", "first", 0, ""], net.kept[0].asnumpy())
    assert_row(rows["input", "act", 0, ""], net.kept[1].asnumpy())
    assert_row(rows["output", "act", 0, ""], z.asnumpy())
    assert when_read == [3], "the three calls are read together, when the step has ended"


def test_gradients_are_those_that_arrived(tmp_path: Path, when_read: list[int]) -> None:
    net = nn.SequentialCell(nn.Dense(SIZE, SIZE), nn.ReLU(), nn.Dense(SIZE, 1))
    parameters = net.trainable_params()
    step = ms.value_and_grad(lambda x: net(x).sum(), None, parameters)
    with watch(net, out=tmp_path / "run") as run:
        loss, gradients = step(random())
        kept = [gradient * 1.0 for gradient in gradients]
        for gradient in gradients:
            gradient.copy_(gradient * 0.0)  # a clip, say
        run.step(loss=loss)
    rows = Rows(tmp_path / "run")
    for parameter, value in zip(parameters, kept, strict=True):
        assert_row(rows["gradient", parameter.name, 0, ""], value.asnumpy())
    assert all((gradient.asnumpy() == 0).all() for gradient in gradients)
    assert len(when_read) == 1


class Kinds(nn.Cell):
    """Hands on tensors of all kinds."""

    def construct(self, *values):
        return values


KINDS = {
    "float16": random((3, 5), np.float16),
    "float64": random((4,), np.float64),
    "0-d": Tensor(2.5, mstype.float16),
    "empty": Tensor(np.zeros((0, 3), np.float32)),
    "int": Tensor(np.arange(4, dtype=np.int32)),
    "transposed": random((4, 6)).transpose(1, 0),
    "bfloat16": Tensor(np.array([1.0, -3.0, np.inf], np.float32), mstype.bfloat16),
    "subnormal": Tensor(np.array([3e-8, -0.0, np.nan], np.float16)),
}


@pytest.mark.parametrize("copied", [True, False])
def test_every_kind_of_tensor(copied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not copied:  # a device, or another MindSpore, on which they cannot be
        monkeypatch.setattr(_later, "_can_copy", lambda dtype: False)
    net = Kinds()
    with watch(net, out=tmp_path / "run") as run:
        net(*KINDS.values())
        run.step(loss=0.0)
    rows = Rows(tmp_path / "run")
    for index, (name, value) in enumerate(KINDS.items()):
        if name == "int":
            continue
        wide = value.astype(mstype.float32) if name == "bfloat16" else value
        assert_row(rows["output", "", 0, str(index)], wide.asnumpy())


def test_they_are_read_earlier_where_there_are_many(
    tmp_path: Path, when_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_later, "LIMIT", 2 * SIZE * SIZE * 4)
    net = nn.SequentialCell(*(nn.Dense(SIZE, SIZE) for _ in range(5)))
    with watch(net, out=tmp_path / "run") as run:
        y = net(random())
        run.step(loss=0.0)
    assert when_read == [2, 2, 2]
    rows = Rows(tmp_path / "run")
    x = random()
    for index in range(5):
        assert_row(rows["input", str(index), 0, ""], x.asnumpy())
        x = net[index](x)
        assert_row(rows["output", str(index), 0, ""], x.asnumpy())
    np.testing.assert_array_equal(x.asnumpy(), y.asnumpy())


class Compiled(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Dense(SIZE, SIZE), nn.Dense(SIZE, SIZE), nn.ReLU()

    @ms.jit
    def compiled(self, x):
        return self.inner(x)

    def construct(self, x):
        return self.last(self.compiled(self.first(x)))


def test_rows_stay_in_order_of_execution_beside_a_compiled_part(tmp_path: Path) -> None:
    net = Compiled()
    with watch(net, out=tmp_path / "run") as run:
        for _ in range(2):
            net(random())
            run.step(loss=0.0)
    for step in (1, 2):
        order = [path for kind, path, *_ in Rows(tmp_path / "run", step).order if kind == "output"]
        assert order == ["first", "inner", "last", ""]


def test_the_copies_are_no_part_of_the_gradient_and_are_not_cast() -> None:
    later, seen = Later(), []

    class Casting(nn.Cell):
        def construct(self, x):
            y = x * 2.0
            later.add([x, y], seen.extend)
            return y

    net = Casting().to_float(ms.float16)
    x = random((4, 4))
    gradient = ms.grad(lambda x: net(x).astype(ms.float32).sum())(x)
    later.read()
    assert [item.dtype for item in seen] == ["float32", "float16"]
    np.testing.assert_array_equal(seen[0].array, x.asnumpy())
    np.testing.assert_array_equal(gradient.asnumpy(), np.full((4, 4), 2.0, np.float32))
    assert ops.isfinite(gradient).all()


def test_what_can_be_copied_is_found_out_past_mixed_precision() -> None:
    """The first tensor of a dtype may come by inside a cell that casts, whose operators would cast the trial, too."""
    _later._can_copy.cache_clear()
    later = Later()

    class Casting(nn.Cell):
        def construct(self, x):
            later.add([x], lambda seen: None)
            return x * 2.0

    ms.grad(lambda x: Casting().to_float(ms.float16)(x).astype(ms.float32).sum())(random((4, 4)))
    assert _later._can_copy(mstype.float32)
    ((held, _),) = later._queue
    assert isinstance(held[0], _later._Held)


def test_tensors_of_one_call_are_copied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, concat = [], _later.pyboost_concat

    def counted(*args: Any) -> Any:
        copies.append(len(args[1][0]))
        return concat(*args)

    half = random((4, 6)).astype(mstype.float16)
    tensors = [
        random((4, 6)),
        half,
        Tensor(3.5, mstype.float32),
        random((6, 4)).transpose(1, 0),
        Tensor(np.zeros((0, 6), np.float32)),
        random((1, 6)),
        Tensor([1, 2], mstype.int32),
        Tensor(-0.0, mstype.float32),
        random((2, 3, 6)),
        half,
    ]
    later, seen = Later(), []
    later.add(tensors, seen.extend)  # whether a dtype can be copied is tried out once
    later.drop()
    monkeypatch.setattr(_later, "pyboost_concat", counted)
    later.add(tensors, seen.extend)
    assert sorted(copies) == [1, 2, 2, 3]
    later.read()
    assert len(seen) == len(tensors)
    for tensor, item in zip(tensors, seen, strict=True):
        assert item.shape == tuple(tensor.shape)
        if item.array is None:
            assert item.dtype == "int32"
        else:
            assert (item.array.dtype, item.array.shape) == (tensor.asnumpy().dtype, item.shape)
            assert item.array.tobytes() == tensor.asnumpy().tobytes()


class Writing(nn.Cell):
    """Writes to activations in place, and uses them several times."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second, self.act = nn.Dense(8, 8), nn.Dense(8, 8), nn.ReLU()

    def construct(self, x):
        y = self.first(x) * 1.0
        if self.how == "item":
            y[0] = 0.5
        elif self.how == "indices":
            y[:, Tensor([0, 2])] = 1.0
        elif self.how == "copy_":
            y[1].copy_(y[0] * 2)
        elif self.how == "add_":
            y.add_(x)
        elif self.how == "several uses":
            y = self.act(y) + y + ops.cat((y[:, :4], y[:, 4:] * 2), 1) + self.second(y)
        return self.act(self.second(y))


@pytest.mark.parametrize("how", ["item", "indices", "copy_", "add_", "several uses"])
def test_nobody_writes_to_the_gradients_of_outputs(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not copied: this is what that rests on."""
    kept, pairs = _later._kept, []

    def with_copies(tensors: Any) -> Any:
        pairs.extend(zip(tensors, _later._copied(tensors), strict=True))
        return kept(tensors)

    monkeypatch.setattr(_later, "_kept", with_copies)
    net = Writing(how)
    with watch(net, out=tmp_path / "run") as run:
        for _ in range(2):
            ms.value_and_grad(lambda x: (net(x) ** 2).sum(), None, net.trainable_params())(random((4, 8)))
            run.step(loss=0.0)
    assert len(pairs) >= 2 * 3
    for tensor, copy in pairs:
        assert copy.read().array.tobytes() == tensor.asnumpy().tobytes()
