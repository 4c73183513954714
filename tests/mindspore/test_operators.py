"""Recording every operator call of a network in PyNative mode."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, mint, nn, ops
from mindspore.graph import api

from ampdebug._errors import NoObservationsError
from ampdebug._sites import OperatorCall
from ampdebug.hooks import _interpose
from ampdebug.hooks._operators import known_paths, record_operators

pytestmark = pytest.mark.own_process


@pytest.fixture(autouse=True)
def pynative() -> Iterator[None]:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


@ms.jit
def compiled_part(x: Tensor) -> Tensor:
    return mint.add(ops.exp(-x), x)


class Block(nn.Cell):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Dense(width, width)
        self.norm = nn.LayerNorm((width,))
        self.gain = Parameter(Tensor(np.ones(width, np.float32)), name="gain")

    def construct(self, x: Tensor) -> Tensor:
        y = self.norm(self.dense(x)) * self.gain
        y = y - y.mean(axis=-1, keep_dims=True)
        return mint.add(x, ops.tanh(y)).reshape(x.shape)


class Net(nn.Cell):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inlet = nn.Dense(5, width)
        self.blocks = nn.CellList([Block(width) for _ in range(2)])
        self.hidden = [Block(width)]  # a plain list: no path
        self.head = nn.SequentialCell(nn.Dense(width, width), nn.ReLU(), nn.Dense(width, 3))

    def construct(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in (*self.blocks, self.blocks[0], *self.hidden):
            x = block(x)
        return self.head(x)


def make(level: str = "O0") -> nn.Cell:
    ms.set_seed(1)
    net = Net()
    net.set_train()
    return net if level == "O0" else amp.auto_mixed_precision(net, level)


def batch() -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(0)
    return Tensor(rng.normal(size=(6, 5)).astype(np.float32)), Tensor(rng.integers(0, 3, 6).astype(np.int32))


def losses_and_gradients(net: nn.Cell, steps: int = 3) -> list[np.ndarray[Any, Any]]:
    x, labels = batch()
    loss_fn = nn.CrossEntropyLoss()
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    step = ms.value_and_grad(lambda x, y: loss_fn(net(x).astype(ms.float32), y), None, net.trainable_params())
    seen = []
    for _ in range(steps):
        loss, gradients = step(x, labels)
        optimizer(gradients)
        seen += [loss.asnumpy().copy(), *(gradient.asnumpy().copy() for gradient in gradients)]
    return seen + [parameter.asnumpy().copy() for parameter in net.trainable_params()]


def entry_points() -> dict[str, object]:
    """What the recorder replaces, as it stands now."""
    import mindspore.ops.auto_generate.gen_ops_prim as prims
    import mindspore.ops.auto_generate.pyboost_inner_prim as inner
    import mindspore.ops.functional_overload as overloads

    owners: list[Any] = [prims, overloads, Tensor, nn.Cell, api._JitExecutor, type(api._pynative_executor)]
    owners += [cls for name, cls in vars(inner).items() if name.startswith("_Pyboost")]
    return {
        f"{owner.__name__}.{name}": value
        for owner in owners
        for name, value in vars(owner).items()
        if callable(value) and name != "cells_compile_cache"
    }


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "auto"])
def test_recording_changes_no_bit(level: str) -> None:
    for _ in range(6):  # the CPU kernels try out thread numbers in their first launches, which reorders their sums
        plain = losses_and_gradients(make(level))
    net = make(level)
    with record_operators(net, known_paths(net)) as calls:
        recorded = losses_and_gradients(net)
    assert calls
    assert len(plain) == len(recorded)
    for before, after in zip(plain, recorded, strict=True):
        np.testing.assert_array_equal(before, after, strict=True)


def test_everything_is_put_back_after_success_and_after_an_exception() -> None:
    net = make()
    net(batch()[0])
    before = entry_points()
    with record_operators(net, known_paths(net)):
        net(batch()[0])
        assert entry_points() != before
    assert entry_points() == before
    with pytest.raises(ZeroDivisionError), record_operators(net, known_paths(net)):
        raise ZeroDivisionError
    assert entry_points() == before


def test_an_exception_inside_the_network_leaves_the_recorder_usable() -> None:
    net = make()
    with record_operators(net, known_paths(net)) as calls:
        with pytest.raises(ValueError, match="MatMul"):
            net(Tensor(np.ones((2, 4), np.float32)))
        calls.clear()
        net(batch()[0])
    assert calls[0].path == "inlet"
    assert {call.path for call in calls} >= {"", "blocks.0"} - {""}


def test_nested_recordings_both_see_the_calls() -> None:
    net = make()
    with record_operators(net, known_paths(net)) as outer:
        with record_operators(net, known_paths(net)) as inner:
            net(batch()[0])
        inside = list(outer)
        net(batch()[0])
    assert inside == inner
    assert len(outer) == 2 * len(inner)


def run(net: nn.Cell) -> list[OperatorCall]:
    with record_operators(net, known_paths(net)) as calls:
        net(batch()[0])
    return calls


def test_each_call_has_its_cell_path_and_source_line() -> None:
    calls = run(make())
    first = calls[0]
    assert (first.path, first.operator, first.cell_type) == ("inlet", "MatMul", "Dense")
    assert first.inputs == first.outputs * 2 == ("float32", "float32")
    assert first.source() == "x = self.inlet(x)"
    block = [call for call in calls if call.path == "blocks.1"]
    assert [call.operator for call in block][:2] == ["Tensor.__mul__", "Tensor.mean"]
    assert block[0].source() == "y = self.norm(self.dense(x)) * self.gain"
    assert block[0].file == __file__
    assert {call.path for call in calls} >= {"blocks.0.dense", "blocks.1.norm", "head.2"}
    hidden = {call.path for call in calls if call.path is not None and "<" in call.path}
    assert hidden == {"<Block#0>", "<Block#0>.<Dense#0>", "<Block#0>.<LayerNorm#0>"}


def test_sites_are_the_same_in_every_run_and_at_every_level() -> None:
    sites = [call.site for call in run(make())]
    assert [call.site for call in run(make())] == sites
    for level in ("O2", "O3", "auto"):
        wanted = [site for site in sites if site is not None]
        seen = {call.site for call in run(make(level))}
        assert not [site for site in wanted if site not in seen]
    twice = [site for site in sites if site is not None and site.path == "blocks.0"]
    assert len(twice) == 2 * len(set(twice)), "the second call of a shared cell has the sites of the first"


def test_calls_outside_the_network_have_no_site() -> None:
    net = make()
    with record_operators(net, known_paths(net)) as calls:
        y = net(batch()[0])
        y.sum()
    assert calls[-1].operator == "Tensor.sum"
    assert calls[-1].site is None
    assert calls[-1].cell_type == ""


@pytest.mark.parametrize(("level", "dense", "norm"), [("O0", "float32", "float32"), ("O2", "float16", "float32")])
def test_the_dtype_an_operator_computes_in(level: str, dense: str, norm: str) -> None:
    calls = run(make(level))
    assert {call.compute_dtype for call in calls if call.path == "inlet"} - {None} == {dense}
    assert {call.compute_dtype for call in calls if call.path == "blocks.0.norm"} - {None} == {norm}
    assert any("float16" in call.outputs for call in calls) == (level != "O0")


class Partly(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        return compiled_part(ops.relu(x)).argmax(-1)


def test_a_compiled_part_is_named_and_still_compiles() -> None:
    net = Partly()
    x = batch()[0]
    calls: list[OperatorCall]
    with record_operators(net, known_paths(net)) as calls:
        first = net(x)
    assert [call.operator for call in calls if call.compiled] == ["compiled_part"]
    assert calls[-1].compute_dtype is None
    np.testing.assert_array_equal(first.asnumpy(), net(x).asnumpy())


def test_graph_mode_is_refused_by_name() -> None:
    net = make()
    ms.set_context(mode=ms.GRAPH_MODE)
    with (
        pytest.raises(NoObservationsError, match=r"GRAPH_MODE.*PYNATIVE_MODE"),
        record_operators(net, known_paths(net)),
    ):
        pass


def test_a_recorded_call_costs_microseconds() -> None:
    net, x = make(), batch()[0]
    calls = run(net)
    plain, recorded = [], []
    for _ in range(15):
        begin = time.thread_time()
        net(x)
        plain.append(time.thread_time() - begin)
        with record_operators(net, known_paths(net)):
            begin = time.thread_time()
            net(x)
            recorded.append(time.thread_time() - begin)
    assert (min(recorded) - min(plain)) / len(calls) < 100e-6  # measured on an idle machine: about 15 µs


def test_every_kind_of_entry_point_is_there() -> None:
    """A renamed module or attribute of MindSpore would otherwise make the recorder blind without a word."""
    seen: set[str] = set()

    class Names:
        def on_operator(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
            seen.add(name)
            return function(*args, **kwargs)

        def on_cell(self, cell: Any, args: Any, kwargs: Any, call: Any) -> Any:
            return call()

        def on_compiled(self, name: str, args: Any, kwargs: Any, call: Any) -> Any:
            seen.add(name)
            return call()

    x = Tensor(np.ones((4, 4), np.float32))
    with _interpose.interpose(Names()):
        ops.Exp()(x)  # pyboost_*
        ops.softmax(x)  # _Pyboost*Prim
        mint.add(x, x)  # *_instance
        (x + x).sum()  # Tensor
        ops.Tile()(x, (1, 2))
        ops.LRN()(x.reshape(1, 4, 2, 2))  # run_op_async
        compiled_part(x)
    assert {"Exp", "Softmax", "mint.add", "Tensor.__add__", "Tensor.sum", "LRN", "compiled_part"} <= seen
