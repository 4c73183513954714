"""Graphs in which each tensor is handed over once: the same rows, bit for bit, and the same training."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, _c_expression, amp, nn, ops

from ampdebug import watch
from ampdebug.hooks import _slim, _slim_probe

sys.path.insert(0, str(Path(__file__).parent))
from nets import (
    ConvNet,
    Loop,
    MeanInBfloat16,
    Mlp,
    Rows,
    Transformer,
    assert_row,
    build,
    call_all,
    images,
    numbers_of,
    scale_cell,
    set_mode,
    tokens,
    vectors,
    weights,
)

pytestmark = pytest.mark.own_process

NEVER = 10**18


@pytest.fixture(autouse=True)
def graph_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_slim, "WORTHWHILE", 0)
    set_mode("graph")
    yield
    set_mode("pynative")


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements left out, of each graph in turn."""
    numbers: list[int] = []
    done = _slim.Slimmer.settled

    def noted(self: Any) -> None:
        if self._planned:
            numbers.append(self.saved)
        done(self)

    monkeypatch.setattr(_slim.Slimmer, "settled", noted)
    return numbers


class Pair(nn.Cell):
    """Gives a tuple, one of them as it came."""

    def construct(self, x, y):
        return x, y * 2.0


class Named(nn.Cell):
    """Takes its inputs by name, hands one on in a dictionary's place."""

    def construct(self, a, b=None):
        return a + b


class Branch(nn.Cell):
    """Runs one of two cells, which a value decides."""

    def __init__(self) -> None:
        super().__init__()
        self.yes = nn.Dense(6, 6)
        self.no = nn.ReLU()

    def construct(self, x):
        if x.sum() > 0:
            return self.yes(x)
        return self.no(x)


class Tangled(nn.Cell):
    """Residuals, a shared cell, containers in containers, tuples, keywords, a branch, an integer input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.SequentialCell(nn.Dense(6, 6), nn.SequentialCell(nn.ReLU(), nn.Dense(6, 6)))
        self.shared = nn.Dense(6, 6)
        self.pair = Pair()
        self.named = Named()
        self.branch = Branch()
        self.same = nn.Identity()
        self.head = nn.Dense(6, 3)

    def construct(self, x, labels=None):
        x = x + self.body(x)
        x = self.shared(self.shared(x))
        left, right = self.pair(x, x)
        x = self.named(left, b=right)
        x = x + self.branch(x)
        x = self.same(x)
        return self.head(x)


def sixes(steps: int = 2, batch: int = 4) -> list[Tensor]:
    return [Tensor(np.random.RandomState(seed).randn(batch, 6).astype(np.float32)) for seed in range(steps)]


def inference(make: Callable[[], nn.Cell], inputs: list[Any], out: Path) -> list[bytes]:
    net = build(make)
    outputs = []
    with watch(net, out=out) as run:
        for x in inputs:
            y = net(x)
            outputs.append(y.asnumpy().tobytes())
            run.step(loss=0.0)
    return outputs


def calls_of(rows: Rows) -> list[tuple[Any, ...]]:
    return [key for key in rows.order if key[0] in ("input", "output")]


def assert_same_rows(first: Path, second: Path, steps: int) -> Rows:
    for step in range(1, steps + 1):
        mine, other = Rows(first, step), Rows(second, step)
        # Gradients that do not wait for each other come in an order that differs from one compilation to the next.
        assert sorted(mine.order) == sorted(other.order)
        assert calls_of(mine) == calls_of(other)
        for key in mine.order:
            assert mine[key].tobytes() == other[key].tobytes(), key
            assert mine.exponents[key].tobytes() == other.exponents[key].tobytes(), key
            assert mine.dtypes[key] == other.dtypes[key], key
    return mine


def both(
    run: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> tuple[Rows, Any, Any]:
    """Runs it with slim and with whole graphs; asserts that the rows are the same bits."""
    slim = run(tmp_path / "slim")
    with monkeypatch.context() as patch:
        patch.setattr(_slim, "WORTHWHILE", NEVER)
        whole = run(tmp_path / "whole")
    return assert_same_rows(tmp_path / "slim", tmp_path / "whole", steps), slim, whole


def test_rows_of_a_tangled_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: list[int]) -> None:
    inputs = [*sixes(2), -sixes(1)[0]]  # the last goes another way through the branch
    rows, slim, whole = both(lambda out: inference(Tangled, inputs, out), tmp_path, monkeypatch, len(inputs))
    assert slim == whole
    # x twice (network, body, first Dense), body's output, the shared cell is left whole, ...
    assert len(saved) == 1
    assert saved[0] >= 8 * 24
    assert_row(rows["input", "body", 0, ""], inputs[-1].asnumpy())
    assert ("output", "shared", 1, "") in rows


class Shift(nn.Cell):
    def construct(self, x, mean):
        return x - mean.astype(ms.float32)


class Centred(nn.Cell):
    """A scalar in bfloat16 goes from one cell to another."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(6, 6)
        self.mean = MeanInBfloat16()
        self.shift = Shift()

    def construct(self, x):
        y = self.dense(x)
        return self.shift(y, self.mean(y))


def test_a_scalar_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: list[int]) -> None:
    rows, slim, whole = both(lambda out: inference(Centred, sixes(2), out), tmp_path, monkeypatch, 2)
    assert slim == whole
    assert saved[0] >= 2 * 24
    for key in (("output", "mean", 0, ""), ("input", "shift", 0, "1")):
        assert rows.dtypes[key] == "bfloat16"
        assert rows[key]["count"] == 1


class AddsInPlace(nn.Cell):
    """The same tensor before and after something was added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Identity()
        self.after = nn.Identity()

    def construct(self, x):
        y = self.before(x * 2.0)
        y.add_(x)
        return self.after(y)


class AddsToAView(AddsInPlace):
    """The same through a view."""

    def construct(self, x):
        y = self.before(x * 2.0)
        y.view(-1).add_(1.0)
        return self.after(y)


class AssignsBetween(nn.Cell):
    """A parameter before and after an assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Identity()
        self.after = nn.Identity()
        self.total = Parameter(Tensor(np.ones((4, 6), np.float32)), name="total")

    def construct(self, x):
        first = self.before(self.total)
        ops.assign(self.total, first + x)
        return self.after(self.total)


@pytest.mark.parametrize("make", [AddsInPlace, AddsToAView, AssignsBetween])
def test_what_is_written_to_meanwhile_is_not_the_same(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, slim, whole = both(lambda out: inference(make, sixes(), out), tmp_path, monkeypatch, 2)
    assert slim == whole
    if make is AddsInPlace:
        x = sixes()[1].asnumpy()
        assert_row(rows["input", "before", 0, ""], x * 2)
        assert_row(rows["input", "after", 0, ""], x * 2 + x)


Training = Callable[..., list[float]]


def batches_for(net: nn.Cell) -> Any:
    kinds = {type(cell) for _, cell in net.cells_and_names()}
    return tokens() if Transformer in kinds else vectors() if Mlp in kinds else images()


def functional(net: nn.Cell, out: Path, *, jit: bool = False) -> list[float]:
    scaler = amp.DynamicLossScaler(2.0**24, 2, 1)  # 2**24 overflows the fp16 gradients: bad steps and good ones
    loop = Loop(net, scaler, jit=jit)
    with watch(net, out=out, optimizer=loop.optimizer, loss_scale=scaler) as run:
        return loop.run(batches_for(net), run)


def jitted(net: nn.Cell, out: Path) -> list[float]:
    return functional(net, out, jit=True)


def jitted_part(net: nn.Cell, out: Path, times: int = 1) -> list[float]:
    """Only the network is compiled; what is around it runs in PyNative mode."""
    optimizer = nn.Momentum(net.trainable_params(), 0.05, 0.9)
    loss_fn = nn.CrossEntropyLoss()

    @ms.jit
    def call(x):
        return net(x)

    def forward(x, y):
        return loss_fn(call(x), y)

    gradient = ms.value_and_grad(forward, None, optimizer.parameters)
    numbers = []
    with watch(net, out=out, optimizer=optimizer) as run:
        for x, y in batches_for(net) * times:
            loss, grads = gradient(x, y)
            optimizer(grads)
            numbers.append(float(loss.asnumpy()))
            run.step(loss=loss)
    return numbers


def train_cell(net: nn.Cell, out: Path) -> list[float]:
    cell = scale_cell(net, scale=2.0**24, window=1)
    with watch(cell, out=out):
        return call_all(cell, batches_for(net))


@pytest.mark.parametrize(
    ("make", "level", "loop", "mode"),
    [
        (ConvNet, "O2", train_cell, "graph"),
        pytest.param(Transformer, "O0", functional, "graph", marks=pytest.mark.slow),
        (Mlp, "O2", jitted, "pynative"),
        (Mlp, "O2", jitted_part, "pynative"),
    ],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_training_and_rows_are_those_of_whole_graphs(
    make: Any, level: str, loop: Training, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: list[int]
) -> None:
    set_mode(mode)

    def run(out: Path) -> Any:
        net = build(make, level)
        return numbers_of(loop(net, out)), weights(net)

    if loop is jitted_part:  # the kernels of PyNative mode settle in their first calls
        loop(build(make, level), tmp_path / "warm", 6)
    _, slim, whole = both(run, tmp_path, monkeypatch, 3)
    assert slim == whole
    assert saved
    assert min(saved) > 20


def test_a_network_that_recomputes_is_left_whole(tmp_path: Path, saved: list[int]) -> None:
    net = build(Mlp)
    net.act.recompute()
    functional(net, tmp_path / "run")
    assert not saved


def test_other_shapes_have_a_plan_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: list[int]
) -> None:
    inputs = [*sixes(1), *sixes(1, batch=7), *sixes(1), *sixes(1, batch=7)]
    both(lambda out: inference(Tangled, inputs, out), tmp_path, monkeypatch, len(inputs))
    assert len(saved) == 2
    assert saved[1] * 4 == saved[0] * 7


def test_a_network_that_runs_twice_in_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: list[int]) -> None:
    def run(out: Path) -> None:
        net = build(Tangled)
        with watch(net, out=out) as watched:
            for _ in range(2):
                for x in (*sixes(2), *sixes(1, batch=3)):
                    net(x)
                watched.step(loss=0.0)

    rows, _, _ = both(run, tmp_path, monkeypatch, 2)
    assert len(saved) == 2
    for call, x in enumerate((*sixes(2), *sixes(1, batch=3))):
        assert_row(rows["input", "body.0", call, ""], x.asnumpy())


def test_two_sessions_watch_one_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: list[int]) -> None:
    def run(out: Path) -> None:
        net = build(Tangled)
        with watch(net, out=out) as outer, watch(net, out=out.with_suffix(".part"), cells="body*") as inner:
            for x in sixes(2):
                net(x)
                outer.step(loss=0.0)
                inner.step(loss=0.0)

    both(run, tmp_path, monkeypatch, 2)
    assert_same_rows(tmp_path / "slim.part", tmp_path / "whole.part", 2)
    assert len(saved) == 2


# --- when, and what if not --------------------------------------------------------------------------------------------


def compilations(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each graph compiled with probes from now on is a slim one."""
    seen: list[bool] = []
    compiled = _slim.Slimmer.compiled

    def noted(self: Any, graph: Any) -> bool:
        seen.append(bool(self._planned))
        return compiled(self, graph)

    monkeypatch.setattr(_slim.Slimmer, "compiled", noted)
    return seen


@pytest.mark.parametrize(("share", "expected"), [(1.0, True), (1.01, False)])
def test_a_second_compilation_only_where_it_pays(
    share: float, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: list[int]
) -> None:
    graphs = compilations(monkeypatch)
    sizes: list[float] = []
    compiled = _slim.Slimmer.compiled

    def limit(self: Any, graph: Any) -> bool:
        if not sizes:
            elements = sum(call.saved for call in _slim._plan(graph, self._probes).values())
            sizes.append(elements / len(graph.model.graph.node))
            monkeypatch.setattr(_slim, "WORTHWHILE", sizes[0] * share)
        return compiled(self, graph)

    monkeypatch.setattr(_slim.Slimmer, "compiled", limit)
    net = build(Tangled)
    with watch(net, out=tmp_path / "run") as run:
        for x in sixes(3):
            net(x)
            run.step(loss=0.0)
    assert graphs == ([False, True] if expected else [False])
    assert bool(saved) is expected


def test_small_networks_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_slim, "WORTHWHILE", _WORTHWHILE)
    graphs = compilations(monkeypatch)
    inference(Tangled, sixes(), tmp_path / "run")
    assert graphs == [False]


_WORTHWHILE = _slim.WORTHWHILE


def does_not_compile(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, call: Any, cell: Any, original: Any) -> Any:
        def construct(self, *args, **kwargs):
            raise ValueError("this slim probe does not compile")

        return types.MethodType(construct, cell)

    patch.setattr(_slim_probe.SlimProbe, "_slim", broken)


def comes_out_otherwise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_slim_probe.SlimProbe, "as_planned", lambda self, once: False)


def cannot_be_thrown_away(patch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, obj: Any, phases: Any) -> None:
        raise RuntimeError("this executor keeps its graphs")

    for executor in (_c_expression.GraphExecutor_, _c_expression.JitExecutor_):
        patch.setattr(executor, "del_net_res", fail)


def cannot_be_read(patch: pytest.MonkeyPatch) -> None:
    def fail(graph: Any) -> Any:
        raise IndexError("a node without inputs")

    patch.setattr(_slim, "callbacks_with_arguments", fail)


@pytest.mark.parametrize(
    ("trouble", "mode"),
    [
        (does_not_compile, "graph"),
        (does_not_compile, "pynative"),
        (comes_out_otherwise, "pynative"),
        (cannot_be_thrown_away, "graph"),
        (cannot_be_read, "graph"),
    ],
)
def test_where_the_slim_graph_fails_the_whole_one_runs(
    trouble: Any, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: list[int]
) -> None:
    set_mode(mode)

    def run(out: Path) -> Any:
        net = build(Mlp)
        loop = functional if mode == "graph" else jitted
        return numbers_of(loop(net, out)), weights(net)

    with monkeypatch.context() as patch:
        trouble(patch)
        troubled = run(tmp_path / "troubled")
    assert not saved
    monkeypatch.setattr(_slim, "WORTHWHILE", NEVER)
    assert run(tmp_path / "whole") == troubled
    assert_same_rows(tmp_path / "troubled", tmp_path / "whole", 3)
