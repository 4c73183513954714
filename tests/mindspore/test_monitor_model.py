"""``AMPMonitor`` under ``Model.train``: alone, beside others, with and without a loss scale manager."""

from __future__ import annotations

import inspect
import sys
import warnings
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.train import Callback, LossMonitor, Model

from ampdebug import AmpdebugWarning, AMPMonitor, ArgumentError, RunExistsError, open_run, watch
from ampdebug.hooks import _monitor

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode: test modules can't import each other by themselves
import nets
from nets import (
    LEVELS,
    MODES,
    Found,
    build,
    dataset,
    exact,
    images,
    many,
    number,
    numbers_of,
    set_mode,
    vectors,
    weights,
)

pytestmark = pytest.mark.own_process

BOTH = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    set_mode("pynative")


class Losses(Callback):
    """Keeps the losses, as a user's own callback would."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_step_end(self, run_context: Any) -> None:
        outputs = run_context.original_args().net_outputs
        self.seen.append(number(outputs[0] if isinstance(outputs, tuple) else outputs))


def train(
    net: nn.Cell,
    batches: Any,
    *callbacks: Any,
    level: str = "O0",
    manager: Any = None,
    scale: float = 1.0,
    epochs: int = 1,
) -> tuple[list[float], Model]:
    if isinstance(net, nets.Exact):
        loss, optimizer = nn.L1Loss("sum"), nn.SGD(net.trainable_params(), 0.125)
    else:
        loss, optimizer = nn.CrossEntropyLoss(), nn.Momentum(net.trainable_params(), 0.05, 0.9, loss_scale=scale)
    model = Model(net, loss, optimizer, amp_level=level, loss_scale_manager=manager)
    losses = Losses()
    model.train(epochs, dataset(batches), callbacks=[*callbacks, losses], dataset_sink_mode=False)
    return losses.seen, model


@BOTH
@pytest.mark.parametrize("level", LEVELS)
def test_numbers_are_bitwise_those_without_the_monitor(mode: str, level: str, tmp_path: Path) -> None:
    set_mode(mode)
    fixed = ms.FixedLossScaleManager(1024.0, drop_overflow_update=False)
    if mode == "pynative":
        train(build(nets.ConvNet), many(images()), level=level, manager=fixed, scale=1024.0)
    bare = build(nets.ConvNet)
    plain, _ = train(bare, images(), level=level, manager=fixed, scale=1024.0)
    net = build(nets.ConvNet)
    losses, model = train(net, images(), AMPMonitor(tmp_path / "run"), level=level, manager=fixed, scale=1024.0)
    assert numbers_of(losses) == numbers_of(plain)
    assert weights(net) == weights(bare)
    _nothing_left(model)
    run = open_run(tmp_path / "run")
    assert run.meta["amp_level"] == level
    steps = list(run.steps())
    assert numbers_of(step.loss for step in steps) == numbers_of(losses)
    assert [step.loss_scale for step in steps] == [1024.0] * 3
    assert [(step.epoch, step.epoch_step) for step in steps] == [(1, 1), (1, 2), (1, 3)]
    assert [step.update_skipped for step in steps] == [False] * 3
    assert len(run.tensors(3)) > 40


def _nothing_left(model: Model) -> None:
    train_network = model._train_network
    level_keeps = {"construct"} if model._amp_level == "auto" else set()
    roots = {id(train_network)}
    if model._amp_level == "auto":  # its wrapper around the network's construct is the level's own
        roots = {id(cell) for _, cell in train_network.cells_and_names() if "construct" in cell.__dict__}
        assert len(roots) == 1
    for _, cell in train_network.cells_and_names():
        left = {"construct", "_recompute_cell", "compile_and_run"} & set(cell.__dict__)
        left = {name for name in left if cell.__dict__[name] is not None}
        assert left <= (level_keeps if id(cell) in roots else set()), f"{type(cell).__name__} keeps {left}"
    assert not [p.name for p in train_network.get_parameters() if p.hooks()]


@BOTH
def test_without_a_manager_beside_loss_monitor_over_two_epochs(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_mode(mode)
    net = build(nets.Mlp)
    found = Found(net)
    losses, _ = train(net, vectors(3), AMPMonitor(tmp_path / "run"), LossMonitor(1), epochs=2)
    found.check()
    assert capsys.readouterr().out.count("loss is") == 6
    steps = list(open_run(tmp_path / "run").steps())
    assert [(s.step, s.epoch, s.epoch_step) for s in steps] == [
        (1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 2, 1), (5, 2, 2), (6, 2, 3)
    ]  # fmt: skip
    assert numbers_of(step.loss for step in steps) == numbers_of(losses)
    assert [step.loss_scale for step in steps] == [1.0] * 6


@BOTH
def test_listed_before_a_loss_monitor_that_raises_at_nan(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    net = build(nets.Mlp)
    found = Found(net)
    batches = [*vectors(3)]
    infinite = batches[1][0].asnumpy().copy()
    infinite[:, 1] = np.inf  # not NaN: ReLU would swallow it
    batches[1] = (Tensor(infinite), batches[1][1])
    with pytest.raises(ValueError, match="loss is NAN or INF"):
        train(net, batches, AMPMonitor(tmp_path / "run"), LossMonitor(1))
    found.check()
    run = open_run(tmp_path / "run")
    steps = list(run.steps())
    assert [step.step for step in steps] == [1, 2]
    assert np.isnan(steps[1].loss)
    assert steps[1].forward_birth.path == ""
    assert steps[1].forward_birth.kind == "input"
    # the file is closed: no journal beside it
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["ampdebug-rank0.sqlite"]


@BOTH
@pytest.mark.parametrize("manager", ["fixed", "dynamic"])
def test_what_this_device_refuses_is_refused_in_mindspores_own_words(mode: str, manager: str, tmp_path: Path) -> None:
    set_mode(mode)
    made = (
        ms.FixedLossScaleManager(1024.0, drop_overflow_update=True)
        if manager == "fixed"
        else ms.DynamicLossScaleManager(1024, 2, 10)
    )
    net = build(nets.Mlp)
    found = Found(net)
    with pytest.raises(ValueError) as plain:
        train(build(nets.Mlp), vectors(1), manager=made)
    with pytest.raises(ValueError) as watched:
        train(net, vectors(1), AMPMonitor(tmp_path / "run"), manager=made)
    assert str(watched.value) == str(plain.value)
    assert not isinstance(watched.value, ArgumentError)
    found.check()
    assert not (tmp_path / "run").exists()


@BOTH
def test_a_train_cell_with_a_dynamic_scale(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    cell = nets.scale_cell(build(nets.Mlp), scale=4.0)
    found = Found(cell)
    losses = Losses()
    Model(cell).train(1, dataset(vectors(5)), callbacks=[AMPMonitor(tmp_path / "run"), losses], dataset_sink_mode=False)
    found.check()
    steps = list(open_run(tmp_path / "run").steps())
    assert [step.loss_scale for step in steps] == [4.0, 4.0, 8.0, 8.0, 16.0]
    assert [step.loss_scale_after for step in steps] == [4.0, 8.0, 8.0, 16.0, 16.0]
    assert numbers_of(step.loss for step in steps) == numbers_of(losses.seen)
    assert [step.learning_rate for step in steps] == [pytest.approx(0.05)] * 5


@BOTH
def test_one_monitor_and_one_model_after_another(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    net = build(nets.Mlp)
    found = Found(net)
    _, model = train(net, vectors(2), AMPMonitor(tmp_path / "one"))
    found.check()
    model.train(1, dataset(vectors(2)), callbacks=[AMPMonitor(tmp_path / "two")], dataset_sink_mode=False)
    found.check()
    rows = [nets.Rows(tmp_path / name, step) for name, step in (("one", 1), ("one", 2), ("two", 1), ("two", 2))]
    assert all(list(r.paths()) == ["", "(loss)", "act", "first", "second"] for r in rows)
    with pytest.raises(RunExistsError, match="append"):
        model.train(1, dataset(vectors(1)), callbacks=[AMPMonitor(tmp_path / "two")], dataset_sink_mode=False)
    found.check()
    monitor = AMPMonitor(tmp_path / "two", append=True)
    model.train(1, dataset(vectors(2)), callbacks=[monitor], dataset_sink_mode=False)
    model.train(1, dataset(vectors(1)), callbacks=[monitor], dataset_sink_mode=False)
    found.check()
    assert [step.step for step in open_run(tmp_path / "two").steps()] == [1, 2, 3, 4, 5]


@BOTH
def test_every_third_step_has_rows_and_all_have_scalars(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    bare = build(nets.Exact)
    plain, _ = train(bare, exact(7))
    net = build(nets.Exact)
    losses, _ = train(net, exact(7), AMPMonitor(tmp_path / "run", every=3))
    assert numbers_of(losses) == numbers_of(plain)
    assert weights(net) == weights(bare)
    run = open_run(tmp_path / "run")
    assert list(run.sampled_steps()) == [1, 4, 7]
    steps = list(run.steps())
    assert [step.sampled for step in steps] == [True, False, False, True, False, False, True]
    assert numbers_of(step.loss for step in steps) == numbers_of(losses)
    assert [step.update_skipped for step in steps] == [False] * 7
    assert [step.grad_norm is not None for step in steps] == [step.sampled for step in steps]


@BOTH
def test_a_bad_step_makes_the_next_ones_recorded(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    batches = [*vectors(20)]
    for index in range(2, 16):  # steps 3 to 16
        batches[index] = (Tensor(np.full((4, 5), np.inf, np.float32)), batches[index][1])
    cell = nets.scale_cell(build(nets.Mlp), scale=2.0**30, window=1000)
    Model(cell).train(
        1, dataset(batches), callbacks=[AMPMonitor(tmp_path / "run", every=1000)], dataset_sink_mode=False
    )
    # seen in step 3 by the overflow flag; 4 to 13 are ten in a row
    assert list(open_run(tmp_path / "run").sampled_steps()) == [1, *range(4, 14)]


@BOTH
def test_a_network_that_is_not_the_one_that_runs_is_warned_of_once(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    net, other = build(nets.Mlp), build(nets.Mlp)
    found = Found(net, other)

    class Elsewhere(AMPMonitor):
        """Watches what does not run, as happens where a project trains a copy."""

        def on_train_begin(self, run_context: Any) -> None:
            params = run_context.original_args()
            real = params.train_network
            params.train_network = other
            super().on_train_begin(run_context)
            params.train_network = real

    with pytest.warns(AmpdebugWarning) as caught:
        train(net, vectors(3), Elsewhere(tmp_path / "run"))
    found.check()
    ours = [w for w in caught if issubclass(w.category, AmpdebugWarning)]
    assert len(ours) == 1
    assert ("GRAPH_MODE" if mode == "graph" else "PYNATIVE_MODE") in str(ours[0].message)
    run = open_run(tmp_path / "run")
    assert [event.kind for event in run.events] == ["no-observation"]
    assert len(list(run.steps())) == 3


@pytest.mark.parametrize("bad", [{"every": 0}, {"every": True}, {"every": 2.0}, {"cells": "nosuch*"}, {"cells": 3}])
def test_bad_arguments_are_named_and_nothing_is_left(bad: dict[str, Any], tmp_path: Path) -> None:
    net = build(nets.Mlp)
    found = Found(net)
    with pytest.raises(ArgumentError, match=next(iter(bad))):
        train(net, vectors(1), AMPMonitor(tmp_path / "run", **bad))
    found.check()
    assert not (tmp_path / "run").exists()


@BOTH
def test_only_the_chosen_cells(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(build(nets.ConvNet), images(1), AMPMonitor(tmp_path / "run", cells=["head.*", nn.BatchNorm2d, "Flatten"]))
    assert list(nets.Rows(tmp_path / "run").paths()) == ["bn", "flat", "head.0", "head.1", "head.2"]


def test_evaluation_in_the_middle_is_not_mixed_into_a_step(tmp_path: Path) -> None:
    class Evaluate(Callback):
        def __init__(self, net: nn.Cell) -> None:
            super().__init__()
            self.net = net

        def on_train_step_begin(self, run_context: Any) -> None:
            pass

        def on_train_step_end(self, run_context: Any) -> None:
            self.net(ops.ones((4, 5), ms.float32))

    net = build(nets.Mlp)
    train(net, vectors(2), AMPMonitor(tmp_path / "run"), Evaluate(net))
    rows = nets.Rows(tmp_path / "run", 2)
    assert ("output", "first", 1, "") not in rows


def test_every_argument_has_its_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {
        "every": 3,
        "cells": "head",
        "append": True,
        "amp_level": "my level",
        "graph": "capture",
        "tensorboard": tmp_path / "board",
        "keep_bad_steps": 7,
        "keep_every": 8,
        "keep_bytes": 9,
    }
    arguments = set(inspect.signature(AMPMonitor.__init__).parameters) - {"self", "out"}
    assert arguments == set(given), "add the new one above"
    arrived: dict[str, Any] = {}

    def session(target: Any, out: Any, **options: Any) -> Any:
        arrived.update(options, out=out)
        raise KeyboardInterrupt

    monkeypatch.setattr(_monitor, "Session", session)
    with pytest.raises(KeyboardInterrupt):
        train(build(nets.Mlp), vectors(1), AMPMonitor(tmp_path / "run", **given))
    kept = arrived.pop("keep")
    assert (kept.bad_steps, kept.every, kept.nbytes) == (7, 8, 9)
    assert arrived == {"out": tmp_path / "run", **{k: v for k, v in given.items() if not k.startswith("keep")}}


def test_graph_capture_is_used_where_it_is_asked_for(tmp_path: Path) -> None:
    set_mode("graph")
    train(build(nets.Mlp), vectors(2), AMPMonitor(tmp_path / "run", graph="capture"))
    run = open_run(tmp_path / "run")
    assert run.meta["graph"] == "capture"
    assert len(run.tensors(2)) > 5


@pytest.mark.parametrize("out", [5, None, b"runs", ["runs"]])
def test_an_out_that_is_no_path_is_refused_at_once(out: Any) -> None:
    with pytest.raises(ArgumentError, match=r"out=.*: must be a path"):
        AMPMonitor(out)
    with pytest.raises(ArgumentError, match=r"out=.*: must be a path"), watch(build(nets.Mlp), out=out):
        pass
