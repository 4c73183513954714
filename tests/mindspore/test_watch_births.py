"""Where the first non-finite value of a step was born: in a leaf, in a parent's own code, in the input, in the loss."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from ampdebug import Step, open_run, watch

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode: test modules can't import each other by themselves
import nets
from nets import MODES, build, set_mode

pytestmark = pytest.mark.own_process

BOTH = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    set_mode("pynative")


def one_step(net: nn.Cell, out: Path, x: Any, *, loss_fn: Any = None, **options: Any) -> Step:
    """One watched forward and backward pass; returns the step as it was stored."""

    def forward(x):
        y = net(x)
        return y.sum() if loss_fn is None else loss_fn(y)

    gradient = ms.value_and_grad(forward, None, net.trainable_params())
    with watch(net, out=out, **options) as run:
        loss, _ = gradient(x if isinstance(x, Tensor) else Tensor(np.asarray(x, np.float32)))
        run.step(loss=loss)
    return next(open_run(out).steps())


class Log(nn.Cell):
    def construct(self, x):
        return ops.log(x)


class Exp(nn.Cell):
    def construct(self, x):
        return ops.exp(x)


class Leaf(nn.Cell):
    """Dense, then a leaf that makes inf of large values, then more cells that carry it on."""

    def __init__(self, born: Any = Exp) -> None:
        super().__init__()
        self.body = nn.SequentialCell(nn.Dense(3, 3), born())
        self.tail = nn.Dense(3, 2)

    def construct(self, x):
        return self.tail(self.body(x))


@BOTH
def test_born_in_a_leaf(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    step = one_step(build(Leaf), tmp_path / "run", np.full((2, 3), 1e4))
    birth = step.forward_birth
    assert birth is not None
    assert (birth.path, birth.cell_type, birth.kind, birth.call) == ("body.1", "Exp", "output", 0)
    assert birth.inputs_finite is True
    assert not birth.own_code
    assert birth.pos_inf > 0
    assert birth.count == 6
    assert birth.dtype == "float32"


class OwnCode(nn.Cell):
    """The parent's own code between its children overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Middle()
        self.tail = nn.Dense(3, 2)

    def construct(self, x):
        return self.tail(self.block(x))


class Middle(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Dense(3, 3)
        self.after = nn.Tanh()

    def construct(self, x):
        y = self.before(x)
        y = ops.log(y - y)  # -inf
        y = y * 0.0  # NaN
        return self.after(y)


@BOTH
def test_born_in_a_parents_own_code(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    birth = one_step(build(OwnCode), tmp_path / "run", np.ones((2, 3))).forward_birth
    assert birth is not None
    assert (birth.path, birth.cell_type, birth.seen_at) == ("block", "Middle", "block.after")
    assert birth.own_code
    assert birth.inputs_finite is True
    assert birth.nan == 6


@BOTH
def test_born_in_the_networks_input(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    birth = one_step(build(nets.Mlp), tmp_path / "run", [[1.0, np.nan, 1.0, 1.0, 1.0]]).forward_birth
    assert birth is not None
    assert (birth.path, birth.kind, birth.inputs_finite, birth.nan) == ("", "input", False, 1)


def log_of_zero(y):
    return ops.log((y - y).sum())


@BOTH
def test_born_in_the_loss(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    net = build(nets.Mlp)
    step = one_step(net, tmp_path / "run", np.ones((2, 5)), loss_fn=log_of_zero)
    assert step.forward_birth is None  # every watched cell gave finite values
    assert step.loss == -np.inf
    assert step.nonfinite_gradients


@BOTH
def test_born_in_a_loss_cell(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    net = build(nets.Mlp)
    loss = BadLoss()
    cell = nn.TrainOneStepCell(nn.WithLossCell(net, loss), nn.SGD(net.trainable_params(), 0.1)).set_train()
    with watch(cell, out=tmp_path / "run"):
        nets.call_all(cell, nets.vectors(1))
    birth = next(open_run(tmp_path / "run").steps()).forward_birth
    assert birth is not None
    assert (birth.path, birth.cell_type, birth.inputs_finite) == ("(loss)", "BadLoss", True)


class BadLoss(nn.Cell):
    def construct(self, y, label):
        return ops.log((y - y).sum()) * 0.0


class BackwardOnly(nn.Cell):
    """sqrt(0): the value is finite, its gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(3, 3, weight_init="zeros", bias_init="zeros")
        self.last = nn.Dense(3, 2)

    def construct(self, x):
        return self.last(ops.sqrt(self.first(x)))


@BOTH
def test_born_in_the_backward_pass(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    step = one_step(build(BackwardOnly), tmp_path / "run", np.ones((2, 3)))
    assert step.forward_birth is None
    assert step.loss is not None
    assert np.isfinite(step.loss)
    assert step.nonfinite_gradients
    birth = step.backward_birth
    assert birth is not None
    assert birth.phase == "backward"
    # the gradient that reached `first` was bad; what went into the pass before it was fine
    assert birth.path in ("first", "first.weight", "first.bias")
    assert birth.inputs_finite is not False
    assert step.grad_norm is not None
    assert not np.isfinite(step.grad_norm)


@BOTH
def test_a_causal_mask_is_no_birth(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    net = build(nets.Transformer)
    x, _ = nets.tokens(1)[0]
    step = one_step(net, tmp_path / "run", x)
    assert step.forward_birth is None
    assert step.backward_birth is None
    rows = nets.Rows(tmp_path / "run")
    assert rows["input", "blocks.0.softmax", 0, ""]["neg_inf"] == 4 * 6  # and yet it was recorded


class Swallowing(nn.Cell):
    """NaN goes in, a finite number comes out (MindSpore on the CPU)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Parameter(Tensor(np.float32([1.0])), name="scale")
        self.born = Log()
        self.swallow = self.swallower()
        self.head = nn.Dense(4, 2)

    def swallower(self) -> nn.Cell:
        return nn.ReLU()

    def construct(self, x):
        return self.head(self.swallow(self.born(x)))


class Clip(nn.Cell):
    def construct(self, x):
        return ops.clip_by_value(x, -1.0, 1.0)


class Maximum(nn.Cell):
    def construct(self, x):
        return ops.maximum(x, ops.zeros_like(x))


class Pool(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2, 1, pad_mode="same")

    def construct(self, x):
        return self.pool(x.reshape(1, 1, -1, 4)).reshape(-1, 4)


class SwallowingClip(Swallowing):
    def swallower(self) -> nn.Cell:
        return Clip()


class SwallowingMaximum(Swallowing):
    def swallower(self) -> nn.Cell:
        return Maximum()


class SwallowingPool(Swallowing):
    def swallower(self) -> nn.Cell:
        return Pool()


@BOTH
@pytest.mark.parametrize("make", [Swallowing, SwallowingClip, SwallowingMaximum, SwallowingPool])
def test_a_swallowed_nan_is_found(mode: str, make: Any, tmp_path: Path) -> None:
    set_mode(mode)
    x = np.ones((4, 4))
    x[0, 1] = -1.0  # log gives NaN
    step = one_step(build(make), tmp_path / "run", x)
    assert step.loss is not None
    assert np.isfinite(step.loss), "the NaN was not swallowed: this test shows nothing"
    birth = step.forward_birth
    assert birth is not None
    assert (birth.path, birth.cell_type, birth.nan, birth.inputs_finite) == ("born", "Log", 1, True)


class Softmax(nn.Cell):
    """As a beginner writes it: exp overflows in fp16 from 11.1 on."""

    def construct(self, x):
        y = ops.exp(x)
        return y / y.sum(-1, keepdims=True)


class OverflowingHead(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(3, 3, weight_init="ones", bias_init="zeros")
        self.softmax = Softmax()

    def construct(self, x):
        return self.softmax(self.first(x))


@BOTH
@pytest.mark.parametrize(("level", "born"), [("O0", False), ("O2", True), ("O3", True)])
def test_an_overflow_of_float16_only(mode: str, level: str, born: bool, tmp_path: Path) -> None:
    set_mode(mode)
    step = one_step(build(OverflowingHead, level), tmp_path / "run", np.full((2, 3), 5.0))
    if not born:
        assert step.forward_birth is None
        return
    assert step.forward_birth is not None
    assert (step.forward_birth.path, step.forward_birth.cell_type) == ("softmax", "Softmax")
    assert step.forward_birth.inputs_finite is True
    assert step.forward_birth.nan == 6


@BOTH
def test_only_some_cells_watched(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    step = one_step(build(Leaf), tmp_path / "run", np.full((2, 3), 1e4), cells=["tail"])
    birth = step.forward_birth
    assert birth is not None
    assert (birth.path, birth.kind, birth.inputs_finite) == ("tail", "input", False)
    assert list(nets.Rows(tmp_path / "run").paths()) == ["tail"]
