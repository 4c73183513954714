"""Loss, loss scale and overflow, of whatever the user's train cell, manager or scaler is."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn, ops

from ampdebug import Step, open_run, watch
from ampdebug.hooks._loss_scale import read_learning_rate, read_scale, sort_outputs

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode: test modules can't import each other by themselves
import nets
from nets import MODES, Found, Loop, build, call_all, numbers_of, scale_cell, set_mode, vectors, weights

pytestmark = pytest.mark.own_process

BOTH = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    set_mode("pynative")


def f32(value: float) -> Tensor:
    return Tensor(np.float32(value))


def flag(value: bool) -> Tensor:
    return Tensor(value)


# --- sorting what a step returned -------------------------------------------------------------------------------------

SCALE = 1024.0


@pytest.mark.parametrize(
    ("outputs", "loss", "overflow", "scale"),
    [
        (f32(0.7), 0.7, None, None),
        ((f32(0.7), flag(True), f32(SCALE)), 0.7, True, SCALE),
        ((f32(SCALE), flag(False), f32(0.7)), 0.7, False, SCALE),
        ((flag(True), f32(SCALE), f32(0.7)), 0.7, True, SCALE),
        ((f32(0.7), flag(False)), 0.7, False, None),
        # the scale is halved after the step, and comes as the live Parameter
        ((f32(0.7), flag(True), Parameter(f32(512.0), name="scale")), 0.7, True, 512.0),
        ((Parameter(f32(512.0), name="scale"), f32(0.7), flag(True)), 0.7, True, 512.0),
        # mindformers: (loss, overflow, scale, learning rate, global norm), and two more
        ((f32(0.7), flag(False), f32(SCALE), f32(1e-3), f32(3.5)), 0.7, False, SCALE),
        ((f32(0.7), flag(False), f32(SCALE), f32(1e-3), f32(3.5), f32(0.1), f32(0.2)), 0.7, False, SCALE),
        # mindone: (loss, gradients, overflow)
        (
            (f32(0.7), (Tensor(np.ones((2, 3), np.float32)), Tensor(np.ones(3, np.float32))), flag(True)),
            0.7,
            True,
            None,
        ),
        # mindaudio: (loss, cond, scale, overflow, lr)
        ((f32(0.7), flag(False), f32(SCALE), flag(True), f32(1e-3)), 0.7, True, SCALE),
        # ECAPA: (loss, cond, scale, output)
        ((f32(0.7), flag(False), f32(SCALE), Tensor(np.ones((4, 9), np.float32))), 0.7, False, SCALE),
        # a loss that has not been reduced, an int counter, a NaN loss, a fp16 loss
        (Tensor(np.float32([1.0, 2.0, 4.5])), 2.5, None, None),
        ((f32(0.7), Tensor(np.int32(3)), flag(False)), 0.7, False, None),
        ((f32(float("nan")), flag(True), f32(SCALE)), float("nan"), True, SCALE),
        ((Tensor(np.float16(0.5)), flag(False), f32(SCALE)), 0.5, False, SCALE),
        # the loss happens to be a power of two
        ((f32(2.0), flag(False), f32(SCALE)), 2.0, False, SCALE),
        ({"loss": f32(0.7), "overflow": flag(True)}, 0.7, True, None),
        (None, None, None, None),
        ((), None, None, None),
    ],
)
def test_outputs_are_told_apart_by_type_and_value(outputs: Any, loss: Any, overflow: Any, scale: Any) -> None:
    found = sort_outputs(outputs, scales=(SCALE, 512.0), learning_rate=1e-3)
    assert found.loss == pytest.approx(loss, nan_ok=True)
    assert found.overflow is overflow
    assert found.scale == scale


def test_a_loss_equal_to_the_learning_rate_alone_is_the_loss() -> None:
    assert sort_outputs(f32(1e-3), learning_rate=1e-3).loss == pytest.approx(1e-3)


def test_further_scalars_keep_their_place() -> None:
    outputs = (f32(0.5), flag(False), f32(SCALE), f32(1e-3), f32(3.5))
    found = sort_outputs(outputs, scales=(SCALE,), learning_rate=1e-3)
    assert found.extra == {"output.3": pytest.approx(1e-3), "output.4": 3.5}


# --- reading the scale ------------------------------------------------------------------------------------------------


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


@pytest.mark.parametrize(
    ("holder", "scale"),
    [
        (lambda: 128.0, 128.0),
        (lambda: f32(128.0), 128.0),
        (lambda: amp.StaticLossScaler(128.0), 128.0),
        (lambda: amp.DynamicLossScaler(128.0, 2, 10), 128.0),
        (lambda: ms.FixedLossScaleManager(128.0, False), 128.0),
        (lambda: ms.DynamicLossScaleManager(128, 2, 10), 128.0),
        (lambda: nn.FixedLossScaleUpdateCell(128.0), 128.0),
        (lambda: Holder(scaler=amp.DynamicLossScaler(128.0, 2, 10)), 128.0),
        (lambda: Holder(loss_scale=f32(64.0), scale_sense=f32(128.0)), 64.0),
        (lambda: Holder(), None),
        (lambda: None, None),
        (lambda: "128", None),
    ],
)
def test_the_scale_is_found_in_every_holder(holder: Any, scale: float | None) -> None:
    assert read_scale(holder()) == scale


@pytest.mark.parametrize(
    ("optimizer", "rate"),
    [
        (lambda p: nn.Momentum(p, 0.25, 0.9), 0.25),
        (lambda p: nn.SGD(p, [0.5, 0.25, 0.125]), 0.5),
        (lambda p: nn.Adam([{"params": p[:1], "lr": 0.5}, {"params": p[1:]}], 0.25), 0.5),
        (lambda p: nn.Adam(p, nn.ExponentialDecayLR(0.5, 0.9, 4)), None),
        (lambda p: ms.experimental.optim.Adam(p, lr=0.25), 0.25),
        (lambda p: None, None),
    ],
)
def test_the_learning_rate_is_read_without_running_anything(optimizer: Any, rate: float | None) -> None:
    net = nets.Mlp()
    assert read_learning_rate(optimizer(net.trainable_params())) == rate


# --- the scale used is that at the step's begin -----------------------------------------------------------------------


def steps_of(directory: Path) -> list[Step]:
    return list(open_run(directory).steps())


@functools.cache
def spiky(pattern: str, *, exact: bool = False) -> list[Any]:
    """Batches; for an ``x`` in the pattern one with an infinite input."""
    good, label = nets.exact(1)[0] if exact else vectors(1)[0]
    bad = Tensor(np.where(np.arange(5) == 1, np.inf, good.asnumpy()).astype(np.float32))
    return [(bad if letter == "x" else good, label) for letter in pattern]


@BOTH
def test_growth_halving_and_the_floor_of_a_dynamic_scaler(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    net = build(nets.Mlp)
    loop = Loop(net, amp.DynamicLossScaler(4.0, 2, 2))
    pattern = "..xx.x.."
    with watch(net, out=tmp_path / "run", optimizer=loop.optimizer, loss_scale=loop.scaler) as run:
        loop.run(spiky(pattern), run)
    steps = steps_of(tmp_path / "run")
    used = [4.0, 4.0, 8.0, 4.0, 2.0, 2.0, 1.0, 1.0]
    assert [step.loss_scale for step in steps] == used
    assert [step.loss_scale_after for step in steps] == [*used[1:], 2.0]
    assert [step.overflow for step in steps] == [letter == "x" for letter in pattern]
    assert [step.nonfinite_gradients for step in steps] == [letter == "x" for letter in pattern]
    assert [step.update_skipped for step in steps] == [letter == "x" for letter in pattern]
    assert [step.accumulating for step in steps] == [False] * 8


@BOTH
def test_a_static_scaler_whose_update_is_applied_on_overflow(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    net = build(nets.Mlp)
    loop = Loop(net, amp.StaticLossScaler(8.0), skip=False)
    with watch(net, out=tmp_path / "run", optimizer=loop.optimizer, loss_scale=loop.scaler) as run:
        loop.run(spiky(".x"), run)
    first, second = steps_of(tmp_path / "run")
    assert (first.overflow, first.update_skipped, first.loss_scale, first.loss_scale_after) == (False, False, 8.0, 8.0)
    assert (second.overflow, second.update_skipped, second.nonfinite_gradients) == (True, False, True)


@BOTH
def test_the_train_cell_with_a_dynamic_scale(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    bare = scale_cell(build(nets.Exact), scale=4.0)
    plain = call_all(bare, spiky(".x..", exact=True))
    cell = scale_cell(build(nets.Exact), scale=4.0)
    found = Found(cell)
    with watch(cell, out=tmp_path / "run"):
        assert numbers_of(call_all(cell, spiky(".x..", exact=True))) == numbers_of(plain)
    found.check()
    assert weights(cell) == weights(bare)
    steps = steps_of(tmp_path / "run")
    assert [step.loss_scale for step in steps] == [4.0, 4.0, 2.0, 2.0]
    assert [step.loss_scale_after for step in steps] == [4.0, 2.0, 2.0, 4.0]
    assert [step.overflow for step in steps] == [False, True, False, False]
    assert [step.update_skipped for step in steps] == [False, True, False, False]
    assert all(step.loss is not None for step in steps)
    assert [step.learning_rate for step in steps] == [0.125] * 4


@BOTH
def test_a_plain_train_cell_uses_its_sens(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    net = build(nets.Mlp)
    optimizer = nn.Momentum(net.trainable_params(), 0.05, 0.9, loss_scale=64.0)
    cell = nn.TrainOneStepCell(nn.WithLossCell(net, nn.CrossEntropyLoss()), optimizer, sens=64.0).set_train()
    with watch(cell, out=tmp_path / "run"):
        call_all(cell, spiky(".x"))
    first, second = steps_of(tmp_path / "run")
    assert (first.loss_scale, first.overflow, first.nonfinite_gradients, first.update_skipped) == (
        64.0,
        None,
        False,
        False,
    )
    assert (second.overflow, second.nonfinite_gradients) == (None, True)
    assert first.grad_norm == pytest.approx(first.grad_norm_scaled / 64.0, rel=1e-12)


# --- train cells as users write them ----------------------------------------------------------------------------------


class Custom(nn.TrainOneStepWithLossScaleCell):
    """The common body of user-written train cells; the subclasses say what is returned."""

    def step(self, inputs):
        weights = self.weights
        loss = self.network(*inputs)
        scale = self.scale_sense
        sens = ops.ones_like(loss) * scale.astype(loss.dtype)
        grads = self.grad(self.network, weights)(*inputs, sens)
        grads = self.unscale(grads, scale)
        overflow = ops.logical_not(amp.all_finite(grads))
        return loss, grads, overflow

    def unscale(self, grads, scale):
        unscaled = ()
        for grad in grads:
            unscaled = (*unscaled, grad / scale)
        return unscaled

    def update(self, loss, grads, overflow):
        used = self.scale_sense * 1.0
        overflow = self.process_loss_scale(overflow)
        if not overflow:
            loss = ops.depend(loss, self.optimizer(grads))
        return loss, used


class ScaleFirst(Custom):
    def construct(self, *inputs):
        loss, grads, overflow = self.step(inputs)
        loss, used = self.update(loss, grads, overflow)
        return used, overflow, loss


class FlagFirst(Custom):
    def construct(self, *inputs):
        loss, grads, overflow = self.step(inputs)
        loss, used = self.update(loss, grads, overflow)
        return overflow, loss, used


class MindFormers5(Custom):
    def construct(self, *inputs):
        loss, grads, overflow = self.step(inputs)
        loss, used = self.update(loss, grads, overflow)
        return loss, overflow, used, self.optimizer.learning_rate * 1.0, grads[0].abs().max()


class MindFormers7(Custom):
    def construct(self, *inputs):
        loss, grads, overflow = self.step(inputs)
        loss, used = self.update(loss, grads, overflow)
        rate = self.optimizer.learning_rate * 1.0
        return loss, overflow, used, rate, grads[0].abs().max(), loss * 0.5, loss * 0.25


class MindOne(Custom):
    def construct(self, *inputs):
        loss, grads, overflow = self.step(inputs)
        loss, _ = self.update(loss, grads, overflow)
        return loss, grads, overflow


class MindAudio(Custom):
    def construct(self, *inputs):
        loss, grads, overflow = self.step(inputs)
        loss, used = self.update(loss, grads, overflow)
        return loss, ops.logical_and(overflow, overflow), used, overflow, self.optimizer.learning_rate * 1.0


class LossAndFlag(Custom):
    def construct(self, *inputs):
        loss, grads, overflow = self.step(inputs)
        loss, _ = self.update(loss, grads, overflow)
        return loss, overflow


@BOTH
@pytest.mark.parametrize("cls", [ScaleFirst, FlagFirst, MindFormers5, MindFormers7, MindOne, MindAudio, LossAndFlag])
def test_custom_train_cells(mode: str, cls: Any, tmp_path: Path) -> None:
    set_mode(mode)
    bare = scale_cell(build(nets.Exact), scale=4.0, cls=cls)
    losses = [nets.number(_loss(bare(*batch), cls)) for batch in spiky("..x.", exact=True)]
    cell = scale_cell(build(nets.Exact), scale=4.0, cls=cls)
    found = Found(cell)
    with watch(cell, out=tmp_path / "run"):
        for batch in spiky("..x.", exact=True):
            cell(*batch)
    found.check()
    assert weights(cell) == weights(bare)
    steps = steps_of(tmp_path / "run")
    assert numbers_of(step.loss for step in steps) == numbers_of(losses)
    assert [step.overflow for step in steps] == [False, False, True, False]
    assert [step.nonfinite_gradients for step in steps] == [False, False, True, False]
    assert [step.update_skipped for step in steps] == [False, False, True, False]
    assert [step.loss_scale for step in steps] == [4.0, 4.0, 8.0, 4.0]
    assert [step.loss_scale_after for step in steps] == [4.0, 8.0, 4.0, 4.0]


def _loss(outputs: Any, cls: Any) -> Any:
    return outputs[{ScaleFirst: 2, FlagFirst: 1}.get(cls, 0)]


class OwnScale(Custom):
    """Keeps an own ``loss_scale`` and leaves ``scale_sense`` at its first value."""

    def __init__(self, network: Any, optimizer: Any, scale_sense: Any) -> None:
        super().__init__(network, optimizer, scale_sense)
        self.loss_scale = Parameter(Tensor(np.float32(16.0)), name="loss_scale", requires_grad=False)

    def construct(self, *inputs):
        loss, grads, overflow = self.step(inputs)
        if not overflow:
            loss = ops.depend(loss, self.optimizer(grads))
        else:
            self.loss_scale = self.loss_scale * 0.5
        return loss, overflow, self.loss_scale


@BOTH
def test_an_own_loss_scale_beside_a_stale_scale_sense(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    cell = scale_cell(build(nets.Mlp), scale=1024.0, cls=OwnScale)
    with watch(cell, out=tmp_path / "run"):
        call_all(cell, spiky(".x."))
    steps = steps_of(tmp_path / "run")
    assert [step.loss_scale for step in steps] == [16.0, 16.0, 8.0]
    assert [step.loss_scale_after for step in steps] == [16.0, 8.0, 8.0]


class HardCoded(Custom):
    """Says "no overflow" whatever happens, as mindocr and mindone do on the CPU."""

    def construct(self, *inputs):
        loss, grads, _ = self.step(inputs)
        loss = ops.depend(loss, self.optimizer(grads))
        return loss, Tensor(False), self.scale_sense


@BOTH
def test_an_own_finite_check_where_the_cell_says_no_overflow(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    cell = scale_cell(build(nets.Mlp), scale=1024.0, cls=HardCoded)
    with watch(cell, out=tmp_path / "run"):
        for batch in spiky(".x"):
            cell(*batch)
    first, second = steps_of(tmp_path / "run")
    assert (first.overflow, first.nonfinite_gradients) == (False, False)
    assert (second.overflow, second.nonfinite_gradients, second.update_skipped) == (False, True, False)
    assert second.grad_norm is not None
    assert not np.isfinite(second.grad_norm)


class Clipping(Custom):
    """Clips to [-1, 1] before the finite check: inf becomes 1, nothing is seen."""

    def construct(self, *inputs):
        loss, grads, _ = self.step(inputs)
        clipped = ()
        for grad in grads:
            clipped = (*clipped, ops.clip_by_value(grad, -1.0, 1.0))
        overflow = ops.logical_not(amp.all_finite(clipped))
        loss = ops.depend(loss, self.optimizer(clipped))
        return loss, overflow, self.scale_sense


@BOTH
def test_clipping_before_the_check_does_not_hide_the_overflow(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    cell = scale_cell(build(nets.Mlp), scale=4.0, cls=Clipping)
    with watch(cell, out=tmp_path / "run"):
        for batch in spiky(".x"):
            cell(*batch)
    first, second = steps_of(tmp_path / "run")
    assert (first.nonfinite_gradients, first.update_skipped) == (False, False)
    assert (second.nonfinite_gradients, second.update_skipped) == (True, False)


class Accumulating(nn.Cell):
    """A train cell that updates each second step and averages its weights (EMA)."""

    def __init__(self, network: Any, optimizer: Any) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.optimizer = optimizer
        self.weights = optimizer.parameters
        self.sums = self.weights.clone(prefix="sum", init="zeros")
        self.averages = self.weights.clone(prefix="ema", init="same")
        self.counter = Parameter(Tensor(0, ms.int32), name="counter", requires_grad=False)
        self.grad = ops.GradOperation(get_by_list=True)

    def construct(self, x, y):
        loss = self.network(x, y)
        grads = self.grad(self.network, self.weights)(x, y)
        for i in range(len(grads)):
            ops.assign_add(self.sums[i], grads[i])
        ops.assign_add(self.counter, Tensor(1, ms.int32))
        if self.counter % 2 == 0:
            self.optimizer(tuple(self.sums))
            for i in range(len(grads)):
                ops.assign(self.sums[i], ops.zeros_like(self.sums[i]))
        for i in range(len(grads)):
            ops.assign(self.averages[i], self.averages[i] * 0.9 + self.weights[i] * 0.1)
        return loss


@BOTH
def test_accumulating_gradients_is_not_skipping(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    net = build(nets.Mlp)
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    cell = Accumulating(nn.WithLossCell(net, nn.CrossEntropyLoss()), optimizer).set_train()
    with watch(cell, out=tmp_path / "run"):
        for batch in vectors(4):
            cell(*batch)
    steps = steps_of(tmp_path / "run")
    assert [step.accumulating for step in steps] == [True, False, True, False]
    assert [step.update_skipped for step in steps] == [None, False, None, False]
    assert all(step.overflow is None and step.nonfinite_gradients is False for step in steps)


@BOTH
def test_a_functional_loop_that_accumulates(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    net = build(nets.Mlp)
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    accumulator = amp_accumulator(optimizer)
    loss_fn = nn.CrossEntropyLoss()

    def forward(x, y):
        return loss_fn(net(x), y)

    gradient = ms.value_and_grad(forward, None, optimizer.parameters)
    with watch(net, out=tmp_path / "run", optimizer=optimizer) as run:
        for x, y in vectors(4):
            loss, grads = gradient(x, y)
            accumulator(grads)
            run.step(loss=loss)
    steps = steps_of(tmp_path / "run")
    assert [step.accumulating for step in steps] == [True, False, True, False]
    assert [step.update_skipped for step in steps] == [None, False, None, False]


def amp_accumulator(optimizer: Any) -> Any:
    sums: list[Any] = []

    def accumulate(grads: Any) -> None:
        sums.append(grads)
        if len(sums) == 2:
            optimizer(tuple(a + b for a, b in zip(*sums, strict=True)))
            sums.clear()

    return accumulate
