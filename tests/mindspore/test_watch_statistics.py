"""The recorded rows are the statistics of the real tensors, in both modes, whatever shape a cell's values have."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn, ops

from ampdebug import AmpdebugWarning, open_run, watch
from ampdebug.hooks._listener import Listener
from ampdebug.hooks._tensors import dtype_name

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode: test modules can't import each other by themselves
import nets
from nets import MODES, MeanInBfloat16, Rows, assert_row, build, reference, set_mode

pytestmark = pytest.mark.own_process

BOTH = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    set_mode("pynative")


def observe(net: nn.Cell, out: Path, *inputs: Tensor, scale: float = 1.0) -> tuple[list[Any], list[Any], Rows]:
    """One watched step of a network that returns its loss and then whatever it made on the way.

    Returns:
        These tensors as arrays (loss first), the gradients, and the rows of the step.
    """

    def forward(*args):
        loss, *rest = net(*args)
        return (loss * scale, *rest)

    gradient = ms.value_and_grad(forward, None, net.trainable_params(), has_aux=True)
    with watch(net, out=out, loss_scale=scale) as run:
        values, grads = gradient(*inputs)
        run.step(loss=values[0] / scale)
    arrays = [v.astype(ms.float32).asnumpy() if v.dtype == ms.bfloat16 else v.asnumpy() for v in values]
    return arrays, [g.asnumpy() for g in grads], Rows(out)


def called(net: nn.Cell, out: Path, *inputs: Tensor) -> Rows:
    """The rows of one watched call, without a backward pass."""
    with watch(net, out=out) as run:
        net(*inputs)
        run.step(loss=0.0)
    return Rows(out)


def random(*shape: int, seed: int = 0) -> Tensor:
    return Tensor(np.random.RandomState(seed).randn(*shape).astype(np.float32))


class Open(nn.Cell):
    """An MLP that hands out what it makes on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(5, 6)
        self.act = nn.ReLU()
        self.second = nn.Dense(6, 3)
        self.unused = Parameter(Tensor(np.full(2, 3.0, np.float32)), name="unused", requires_grad=False)

    def construct(self, x):
        a = self.first(x)
        b = self.act(a)
        c = self.second(b)
        return c.sum(), a, b, c


@BOTH
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "auto"])
def test_forward_values_gradients_and_parameters(mode: str, level: str, tmp_path: Path) -> None:
    set_mode(mode)
    net = build(Open, level)
    x = random(4, 5)
    (_, a, b, c), grads, rows = observe(net, tmp_path / "run", x, scale=2.0**14)
    # What the cell was handed: before its implicit cast in PyNative mode, after it in a graph.
    assert_row(rows["input", "first", 0, ""], x.asnumpy().astype(rows.dtypes["input", "first", 0, ""]))
    assert_row(rows["output", "first", 0, ""], a)
    assert_row(rows["input", "act", 0, ""], a)
    assert_row(rows["output", "act", 0, ""], b)
    assert_row(rows["output", "second", 0, ""], c)
    assert_row(rows["output", "", 0, "3"], c)
    parameters = net.trainable_params()
    for parameter, gradient in zip(parameters, grads, strict=True):
        assert_row(rows["gradient", parameter.name, 0, ""], gradient)
        assert_row(rows["parameter", parameter.name, 0, ""], parameter.asnumpy())
    assert_row(rows["parameter", "unused", 0, ""], np.full(2, 3.0, np.float32))
    assert ("gradient", "unused", 0, "") not in rows
    step = next(open_run(tmp_path / "run").steps())
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads))
    np.testing.assert_allclose([step.grad_norm_scaled, step.grad_norm], [norm, norm / 2.0**14], rtol=1e-12)
    assert step.loss_scale == 2.0**14
    assert step.parameters_without_gradient == 0
    dtype = rows.dtypes["output", "first", 0, ""]
    # O2 and O3 run the cell in fp16; O1 and auto cast back what a converted operator gave (auto: as the next asks).
    assert dtype == ("float16" if level in ("O2", "O3") else dtype)
    assert (level != "O0") or dtype == "float32"


@BOTH
def test_exponents_and_execution_order(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    (_, a, *_), _, rows = observe(build(Open), tmp_path / "run", random(4, 5))
    exponents = np.bincount(np.frexp(np.abs(a[a != 0]).astype(np.float64))[1] - 1 + 127, minlength=256)
    np.testing.assert_array_equal(rows.exponents["output", "first", 0, ""], exponents)
    forward = [key for key in rows.order if key[0] == "output" and key[3] == ""]
    assert [key[1] for key in forward] == ["first", "act", "second"]
    if mode == "pynative":  # a graph may begin with the backward pass before a callback of the forward pass has run
        kinds = [key[0] for key in rows.order]
        assert max(i for i, k in enumerate(kinds) if k == "output") < kinds.index("gradient")


@BOTH
def test_updates(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    net = build(nets.Mlp)
    net.first.bias.set_data(Tensor(np.full(6, 4096.0, np.float32)))  # half an fp16 ulp here is 2
    loop = nets.Loop(net, amp.StaticLossScaler(16.0), rate=0.5)
    before = {p.name: p.asnumpy().copy() for p in net.get_parameters()}
    with watch(net, out=tmp_path / "run", optimizer=loop.optimizer, loss_scale=loop.scaler) as run:
        loop.run(nets.vectors(1), run)
    rows = Rows(tmp_path / "run")
    for parameter in net.get_parameters():
        row, change = rows["update", parameter.name, 0, ""], parameter.asnumpy().astype(np.float64)
        change = change - before[parameter.name]
        assert row["count"] == change.size
        assert row["zeros"] == (change == 0).sum()
        np.testing.assert_allclose(row["rms"], np.sqrt((change**2).mean()), rtol=1e-12)
    moved = net.first.bias.asnumpy() != 4096.0
    assert moved.any()
    assert rows["update", "first.bias", 0, ""]["flushed"] == moved.sum()


# --- shapes of values -------------------------------------------------------------------------------------------------


class Split(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.float32([0.5, -2.0, 3.0])), name="weight")

    def construct(self, x):
        y = x * self.weight
        return y, [y + 1, (y * 2, y - 3)]


class Named(nn.Cell):
    def construct(self, x, *, factor, shift=None):
        y = x * factor
        if shift is not None:
            y = y + shift
        return {"high": y, "low": y * 0.25}


class Nested(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.split = Split()
        self.named = Named()

    def construct(self, x):
        a, (b, (c, d)) = self.split(x)
        named = self.named(a, factor=b, shift=c)
        return (named["low"] + d).sum(), a, b, c, d, named["high"], named["low"]


@BOTH
def test_nested_outputs_and_keyword_arguments(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    (_, a, b, c, d, high, low), _, rows = observe(build(Nested), tmp_path / "run", random(4, 3))
    for slot, array in (("0", a), ("1.0", b), ("1.1.0", c), ("1.1.1", d)):
        assert_row(rows["output", "split", 0, slot], array)
    for slot, array in (("high", high), ("low", low)):
        assert_row(rows["output", "named", 0, slot], array)
    named = {key[3]: rows[key] for key in rows.order if key[:2] == ("input", "named")}
    assert set(named) == {"0.0", "1.factor", "1.shift"} or set(named) == {"0", "factor", "shift"}
    for row, array in zip(named.values(), (a, b, c), strict=True):
        assert_row(row, array)


class Shared(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(3, 3)
        self.again = nn.CellList([self.dense, nn.Tanh()])

    def construct(self, x):
        a = self.dense(x)
        b = self.again[1](a)
        c = self.again[0](b)
        return c.sum(), a, b, c


@BOTH
def test_several_calls_of_a_shared_cell(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    net = build(Shared)
    (_, a, b, c), grads, rows = observe(net, tmp_path / "run", random(4, 3))
    assert_row(rows["output", "dense", 0, ""], a)
    assert_row(rows["output", "again.1", 0, ""], b)
    assert_row(rows["input", "dense", 1, ""], b)
    assert_row(rows["output", "dense", 1, ""], c)
    assert ("output", "dense", 2, "") not in rows
    for parameter, gradient in zip(net.trainable_params(), grads, strict=True):
        assert_row(rows["gradient", parameter.name, 0, ""], gradient)
    cell = next(cell for cell in open_run(tmp_path / "run").cells if cell.path == "dense")
    assert cell.aliases == ("again.0",)


class Count(nn.Cell):
    def construct(self, number):
        return number + 2


class Pick(nn.Cell):
    def construct(self, x, index, mask):
        return ops.select(mask, x, x * 0), index


class Odd(nn.Cell):
    """No tensors, integers and bools, 0-d."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Count()
        self.pick = Pick()
        self.mean = Mean()
        self.weight = Parameter(Tensor(np.float32([1.0, 2.0, 3.0])), name="weight")

    def construct(self, x, index):
        number = self.count(1)
        y, _ = self.pick(x * self.weight * number, index, x > 0)
        z = self.mean(y)
        return z * 1.0, y, z


class Mean(nn.Cell):
    def construct(self, x):
        return x.mean()


@BOTH
def test_cells_without_tensors_integers_bools_and_scalars(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    index = Tensor(np.arange(4, dtype=np.int32))
    (_, y, z), _, rows = observe(build(Odd), tmp_path / "run", random(4, 3), index)
    assert_row(rows["output", "pick", 0, "0"], y)
    assert_row(rows["output", "mean", 0, ""], z)
    for key, dtype in ((("input", "pick", 0, "1"), "int32"), (("input", "pick", 0, "2"), "bool")):
        assert rows.dtypes[key] == dtype
        assert rows[key]["count"] == 0
    assert rows.dtypes["output", "pick", 0, "1"] == "int32"
    assert "count" not in list(rows.paths())
    run = open_run(tmp_path / "run")
    shapes = {(site.kind, site.path): shape for site, shape in zip(run.sites, run.shapes, strict=True)}
    assert shapes["output", "mean"] == ()


class Empty(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.tail = Tail()
        self.dense = nn.Dense(3, 2)

    def construct(self, x):
        nothing = self.tail(x)
        y = self.dense(x)
        return y.sum(), y, nothing


class Tail(nn.Cell):
    def construct(self, x):
        return ops.zeros((0, 3), x.dtype)


@BOTH
def test_an_empty_tensor(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    (_, y, nothing), _, rows = observe(build(Empty), tmp_path / "run", random(4, 3))
    assert nothing.size == 0
    assert_row(rows["output", "tail", 0, ""], nothing)
    assert_row(rows["output", "dense", 0, ""], y)
    assert rows.dtypes["output", "tail", 0, ""] == "float32"


class ToBfloat16(nn.Cell):
    def construct(self, x):
        return x.astype(ms.bfloat16)


class Halves(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.down = ToBfloat16()
        self.up = ToFloat32()
        self.weight = Parameter(Tensor(np.float32([1.0, 2.0, 3.0])), name="weight")

    def construct(self, x):
        half = self.down(x * self.weight)
        wide = self.up(half)
        return wide.sum(), half, wide


class ToFloat32(nn.Cell):
    def construct(self, x):
        return x.astype(ms.float32)


@BOTH
def test_bfloat16(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    (_, half, wide), _, rows = observe(build(Halves), tmp_path / "run", random(4, 3))
    assert_row(rows["output", "down", 0, ""], half)
    assert_row(rows["input", "up", 0, ""], half)
    assert_row(rows["output", "up", 0, ""], wide)
    assert rows.dtypes["output", "down", 0, ""] == "bfloat16"
    assert rows["output", "up", 0, ""]["mantissa_bits"] <= 7


class Many(nn.Cell):
    def construct(self, a, b, c, d, e, f, g):
        return a + b, c * d, e - f * g, a * g


class Wide(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.many = Many()
        self.weight = Parameter(Tensor(np.float32([1.0, 2.0, 3.0])), name="weight")

    def construct(self, x):
        y = x * self.weight
        p, q, r, s = self.many(y, y + 1, y + 2, y + 3, y + 4, y + 5, y + 6)
        t, u, v, w = self.many(p, q, r, s, p, q, r)
        return (t + u + v + w).sum(), p, q, r, s, t, u, v, w


@BOTH
def test_more_than_six_tensors_in_one_call_and_two_such_calls(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    (_, *values), _, rows = observe(build(Wide), tmp_path / "run", random(4, 3))
    for index, array in enumerate(values):
        assert_row(rows["output", "many", index // 4, str(index % 4)], array)
    for index, array in enumerate((*values[:4], *values[:3])):
        assert_row(rows["input", "many", 1, str(index)], array)


class Changing(nn.Cell):
    """Changes a cell's output in place before the next cell gets it."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(3, 3)
        self.next = nn.Tanh()

    def change(self, y):
        y.add_(1)  # MindSpore 2.10 does nothing here in PyNative mode on the CPU; the values decide
        return y

    def construct(self, x):
        y = self.dense(x)
        before = y * 1.0
        y = self.change(y)
        z = self.next(y)
        return z.sum(), before, y * 1.0, z


class Adding(Changing):
    def change(self, y):
        y += 1
        return y


class Assigning(Changing):
    def change(self, y):
        y[0] = 7.0
        return y


@BOTH
@pytest.mark.parametrize("make", [Changing, Adding, Assigning])
def test_a_value_changed_in_place_is_measured_again(mode: str, make: Any, tmp_path: Path) -> None:
    set_mode(mode)
    (_, before, after, z), _, rows = observe(build(make), tmp_path / "run", random(4, 3))
    assert make is Changing or (before != after).any()
    assert_row(rows["output", "dense", 0, ""], before)
    assert_row(rows["input", "next", 0, ""], after)
    assert_row(rows["output", "next", 0, ""], z)


class Recomputing(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.SequentialCell(nn.Dense(5, 5), nn.Tanh())
        self.block.recompute()
        self.head = nn.Dense(5, 2)

    def construct(self, x):
        a = self.block(x)
        b = self.head(a)
        return b.sum(), a, b


@BOTH
def test_a_recomputed_cell_is_one_call(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    net = build(Recomputing)
    found = nets.Found(net)
    (_, a, b), grads, rows = observe(net, tmp_path / "run", random(4, 5))
    assert_row(rows["output", "block", 0, ""], a)
    assert_row(rows["output", "block.1", 0, ""], a)
    assert_row(rows["output", "head", 0, ""], b)
    assert not [key for key in rows.order if key[2] > 0]
    norm = np.sqrt(sum((gradient.astype(np.float64) ** 2).sum() for gradient in grads))
    np.testing.assert_allclose(next(open_run(tmp_path / "run").steps()).grad_norm, norm, rtol=1e-12)
    for parameter, gradient in zip(net.trainable_params(), grads, strict=True):
        assert_row(rows["gradient", parameter.name, 0, ""], gradient)
    found.check()


@BOTH
def test_special_values(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    special = np.float32([0.0, -0.0, 1e-5, 2.0**-25, 2.0**-24, 65504.0, 65520.0, 1e38, np.nan, np.inf, -np.inf, -3.0])
    x = Tensor(np.tile(special, (2, 1))[:, :12])
    net = build(Special)
    (_, y), _, rows = observe(net, tmp_path / "run", x)
    assert_row(rows["input", "act", 0, ""], special * np.ones((2, 1), np.float32))
    assert_row(rows["output", "act", 0, ""], y)
    assert reference(special)["flushed"] == 1


class Special(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.act = Identity()
        self.weight = Parameter(Tensor(np.float32([1.0])), name="weight")

    def construct(self, x):
        y = self.act(x)
        return (y * self.weight).sum(), y


class Identity(nn.Cell):
    def construct(self, x):
        return x * 1.0


class Scaled(nn.Cell):
    """With a parameter that has no axes."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.gain = Parameter(Tensor(1.5, dtype), name="gain")

    def construct(self, x):
        y = self.gain.astype(ms.float32) * x
        return y.sum(), y


@BOTH
@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16, ms.float32, ms.float64])
def test_the_gradient_of_a_parameter_without_axes_has_its_own_dtype(mode: str, dtype: Any, tmp_path: Path) -> None:
    set_mode(mode)
    _, (gradient,), rows = observe(Scaled(dtype), tmp_path / "run", Tensor([0.25, 2.0], ms.float32))
    key = ("gradient", "gain", 0, "")
    assert rows.dtypes[key] == dtype_name(dtype)
    assert float(rows[key]["max"]) == float(gradient) == 2.25
    run = open_run(tmp_path / "run")
    assert {(site.kind, site.path): shape for site, shape in zip(run.sites, run.shapes, strict=True)}[key[:2]] == ()


class Means(nn.Cell):
    """Scalars in bfloat16, alone and among more tensors than one callback takes."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(3, 4)
        self.mean = MeanInBfloat16()
        self.many = Sevenfold()

    def construct(self, x):
        y = self.dense(x)
        mean = self.mean(y)
        seven = self.many(y, mean)
        return seven[0].sum(), ops.stop_gradient(mean).astype(ms.float32), y


class Sevenfold(nn.Cell):
    def construct(self, x, factor):
        wide = factor.astype(ms.float32)
        return x * wide, x + wide, x - wide, x * 2.0, x * 3.0, (wide * 0.5).astype(ms.bfloat16)


@BOTH
@pytest.mark.parametrize("marked", [False, True])
def test_scalars_in_bfloat16(mode: str, marked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_mode(mode)
    if marked:
        monkeypatch.setattr(
            Listener, "wants_output_gradients", property(lambda self: True, lambda self, value: None), raising=False
        )
    (_, mean, y), _, rows = observe(build(Means), tmp_path / "run", random(5, 3))
    for key in (("output", "mean", 0, ""), ("input", "many", 0, "1")):
        assert rows.dtypes[key] == "bfloat16"
        assert rows[key]["count"] == 1
        assert rows[key]["max"] == float(mean) != 0
    assert rows.dtypes["output", "many", 0, "5"] == "bfloat16"
    assert rows["output", "many", 0, "5"]["max"] == float(mean) / 2
    assert_row(rows["input", "many", 0, "0"], y)


class Positive(nn.Cell):
    """How many elements go to the last cell is known only when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(3, 3)
        self.twice = Twice()
        self.act = nn.ReLU()

    def construct(self, x):
        y = self.dense(x)
        return self.twice(ops.masked_select(y, y > 0)).sum(), self.act(y)


class Twice(nn.Cell):
    def construct(self, x):
        return x * 2.0


@pytest.mark.parametrize("unknown", ["inside", "input"])
@pytest.mark.parametrize("graph", ["callback", "capture"])
def test_a_shape_that_is_known_only_when_the_graph_runs(unknown: str, graph: Any, tmp_path: Path) -> None:
    set_mode("graph")
    inputs = [random(2, 3), random(5, 3, seed=1)]

    def outputs(net: nn.Cell, run: Any = None) -> list[Any]:
        if unknown == "input":
            net.set_inputs(Tensor(shape=[None, 3], dtype=ms.float32))
        found = []
        for x in inputs:
            found.append([out.asnumpy().tobytes() for out in net(x)])
            if run is not None:
                run.step(loss=0.0)
        return found

    plain = outputs(build(Positive))
    net = build(Positive)
    with (
        pytest.warns(AmpdebugWarning, match=r"known only when it runs: some of .*twice.* PyNative") as said,
        watch(net, out=tmp_path / "run", graph=graph) as run,
    ):
        assert outputs(net, run) == plain
    assert len(said) == 1
    rows = Rows(tmp_path / "run", 2)
    assert rows["output", "", 0, "0"]["count"] == 1
    if unknown == "inside":
        assert_row(rows["input", "dense", 0, ""], inputs[1].asnumpy())
        assert rows["output", "act", 0, ""]["count"] == 15
    else:
        assert rows.dtypes["input", "", 0, ""] == "float32"
        assert rows["input", "", 0, ""]["count"] == 0
    (event,) = [event for event in open_run(tmp_path / "run").events if event.kind == "shape-known-at-run-time"]
    assert "twice" in event.data["cells"]


class Told(nn.Cell):
    """Is handed what is no tensor."""

    def construct(self, x, function, primitive, dtype=None):
        return primitive(function(x)).astype(dtype)


class Telling(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.told = Told()
        self.relu = ops.ReLU()

    def construct(self, x):
        return self.told(x, ops.tanh, self.relu, dtype=ms.float16).sum()


@BOTH
def test_functions_primitives_and_dtypes_among_the_arguments(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    x = random(3, 4)
    rows = called(Telling(), tmp_path / "run", x)
    assert_row(rows["input", "told", 0, "0"], x.asnumpy())
    assert rows.dtypes["output", "told", 0, ""] == "float16"
    assert rows["output", "told", 0, ""]["min"] == 0


class ByPlaceAndName(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.add = Add()

    def construct(self, x):
        return self.add(x, more=x + 1.0, scale=2.0).sum()


class Add(nn.Cell):
    def construct(self, x, more=None, scale=1.0):
        return x + more * scale


@BOTH
def test_arguments_by_place_and_by_name(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    x = random(3, 4)
    rows = called(ByPlaceAndName(), tmp_path / "run", x)
    assert {key[3] for key in rows.order if key[:2] == ("input", "add")} == {"0", "more"}
    assert_row(rows["input", "add", 0, "0"], x.asnumpy())
    assert_row(rows["input", "add", 0, "more"], x.asnumpy() + 1)
