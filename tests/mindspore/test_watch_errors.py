"""An error inside the monitor: one warning with the cause, everything detached, the training goes on unchanged."""

from __future__ import annotations

import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore import nn
from mindspore.train import Callback, Model

from ampdebug import AmpdebugWarning, AMPMonitor, ArgumentError, StoreError, open_run, watch
from ampdebug._recorder import StepRecorder
from ampdebug._store import RunWriter

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode: test modules can't import each other by themselves
import nets
from nets import MODES, Found, build, call_all, dataset, exact, exact_loop, numbers_of, scale_cell, set_mode, weights

pytestmark = pytest.mark.own_process

BOTH = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    set_mode("pynative")


class Failing:
    """Makes a method of ours fail at a step: as a full disk or a bug of ours would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, step: int, error: Exception) -> None:
        self.begun = 0
        real, real_begin = getattr(owner, name), StepRecorder.begin

        def begin(recorder: StepRecorder) -> None:
            self.begun += 1
            real_begin(recorder)

        def fail(this: Any, *args: Any, **kwargs: Any) -> Any:
            if self.begun >= step:
                raise error
            return real(this, *args, **kwargs)

        monkeypatch.setattr(StepRecorder, "begin", begin)
        monkeypatch.setattr(owner, name, fail)


WHERE = [
    (StepRecorder, "cell_call"),  # inside the compiled graph's callback
    (StepRecorder, "gradient"),
    (StepRecorder, "parameter"),
    (StepRecorder, "births"),
    (RunWriter, "put_step"),
    (RunWriter, "site_id"),
]


@BOTH
@pytest.mark.parametrize(("owner", "name"), WHERE, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_an_error_in_a_functional_loop(
    mode: str, owner: type, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_mode(mode)
    bare = build(nets.Exact)
    plain = exact_loop(bare).run(exact(5))
    net = build(nets.Exact)
    found = Found(net)
    loop = exact_loop(net)
    step = 1 if name == "site_id" else 3  # sites are registered in the first step only
    Failing(monkeypatch, owner, name, step, StoreError("the disk is full"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with watch(net, out=tmp_path / "run", optimizer=loop.optimizer, loss_scale=loop.scaler) as run:
            numbers = loop.run(exact(5)[:step], run)
            found.check()  # at once, not only at the end
            assert run.step(loss=1.0) is None
            numbers += loop.run(exact(5)[step:], run)
    ours = [str(w.message) for w in caught if issubclass(w.category, AmpdebugWarning)]
    assert len(ours) == 1
    assert f"step {step}" in ours[0]
    assert "StoreError: the disk is full" in ours[0]
    assert "The training goes on unchanged" in ours[0]
    assert numbers_of(numbers) == numbers_of(plain)
    assert weights(net) == weights(bare)
    found.check()
    recorded = open_run(tmp_path / "run")
    assert [s.step for s in recorded.steps()] == list(range(1, step))
    if owner is not RunWriter:
        assert [event.kind for event in recorded.events] == ["monitor-off"]


@BOTH
def test_an_error_in_a_train_cell(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_mode(mode)
    bare = scale_cell(build(nets.Exact))
    plain = call_all(bare, exact(5))
    cell = scale_cell(build(nets.Exact))
    found = Found(cell)
    Failing(monkeypatch, StepRecorder, "cell_call", 3, ValueError("a bug of ours"))

    def train() -> list[float]:
        with watch(cell, out=tmp_path / "run"):
            numbers = call_all(cell, exact(5)[:3])
            found.check()
            return numbers + call_all(cell, exact(5)[3:])

    with pytest.warns(AmpdebugWarning, match=r"step 3: ValueError: a bug of ours") as caught:
        numbers = train()
    assert len(caught) == 1
    assert numbers_of(numbers) == numbers_of(plain)
    assert weights(cell) == weights(bare)
    found.check()
    assert [s.step for s in open_run(tmp_path / "run").steps()] == [1, 2]


@BOTH
@pytest.mark.parametrize("strict", [False, True], ids=["warnings", "warnings-as-errors"])
def test_an_error_under_model_train(
    mode: str, strict: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_mode(mode)

    def train(net: nn.Cell, *callbacks: Any) -> None:
        optimizer = nn.SGD(net.trainable_params(), 0.125)
        model = Model(net, nn.L1Loss("sum"), optimizer)
        model.train(1, dataset(exact(5)), callbacks=list(callbacks), dataset_sink_mode=False)

    bare = build(nets.Exact)
    train(bare)
    net = build(nets.Exact)
    found = Found(net)
    Failing(monkeypatch, StepRecorder, "cell_call", 3, ValueError("a bug of ours"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error" if strict else "always")
        train(net, AMPMonitor(tmp_path / "run"))
    said = capsys.readouterr().err if strict else "".join(str(w.message) for w in caught)
    assert said.count("ampdebug switched itself off in step 3: ValueError: a bug of ours") == 1
    assert weights(net) == weights(bare)
    found.check()
    assert [s.step for s in open_run(tmp_path / "run").steps()] == [1, 2]


@BOTH
def test_the_directory_vanishes(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    bare = build(nets.Exact)
    plain = exact_loop(bare).run(exact(5))
    net = build(nets.Exact)
    found = Found(net)
    loop = exact_loop(net)

    def train() -> list[float]:
        with watch(net, out=tmp_path / "run", loss_scale=loop.scaler) as run:
            numbers = loop.run(exact(5)[:2], run)
            shutil.rmtree(tmp_path / "run")
            return numbers + loop.run(exact(5)[2:], run)

    with pytest.warns(AmpdebugWarning, match=r"switched itself off in step 3") as caught:
        numbers = train()
    assert len(caught) == 1
    assert numbers_of(numbers) == numbers_of(plain)
    assert weights(net) == weights(bare)
    found.check()


@pytest.mark.parametrize("kind", ["watch", "callback"])
def test_the_directory_vanishes_before_the_end(kind: str, tmp_path: Path) -> None:
    net = build(nets.Exact)
    found = Found(net)

    def train() -> None:
        if kind == "watch":
            with watch(net, out=tmp_path / "run") as run:
                exact_loop(net).run(exact(2), run)
                shutil.rmtree(tmp_path / "run")
        else:
            model = Model(net, nn.L1Loss("sum"), nn.SGD(net.trainable_params(), 0.125))
            callbacks = [AMPMonitor(tmp_path / "run"), Vanish(tmp_path / "run")]
            model.train(1, dataset(exact(1)), callbacks=callbacks, dataset_sink_mode=False)

    with pytest.warns(AmpdebugWarning, match=r"ampdebug switched itself off") as caught:
        train()
    assert len(caught) == 1
    found.check()


class Vanish(Callback):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def on_train_epoch_end(self, run_context: Any) -> None:
        shutil.rmtree(self.directory)


@BOTH
def test_the_probes_cannot_be_put_in(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another MindSpore without one of the functions: the training runs all the same."""
    set_mode(mode)
    bare = build(nets.Exact)
    plain = exact_loop(bare).run(exact(2))
    net = build(nets.Exact)
    found = Found(net)
    loop = exact_loop(net)
    from ampdebug.hooks import _compiled

    def lacking() -> Any:
        raise AttributeError("module 'mindspore.graph.api' has no attribute '_real_phase'")

    monkeypatch.setattr(_compiled, "_replace", lacking)
    with pytest.warns(AmpdebugWarning, match="_real_phase") as caught, watch(net, out=tmp_path / "run") as run:
        numbers = loop.run(exact(2), run)
    assert len(caught) == 1
    assert numbers_of(numbers) == numbers_of(plain)
    found.check()


def test_a_wrong_call_of_step_is_the_users_error(tmp_path: Path) -> None:
    net = build(nets.Exact)
    loop = exact_loop(net)
    with watch(net, out=tmp_path / "run") as run:
        loss, finite = loop.step(*exact(1)[0])
        with pytest.raises(ArgumentError, match="overflow and finite"):
            run.step(loss=loss, overflow=False, finite=finite)
        with pytest.raises(ArgumentError, match="loss="):
            run.step(loss="low")
        with pytest.raises(ArgumentError, match="accuracy="):
            run.step(loss=loss, accuracy="high")
        assert run.step(loss=loss, finite=finite, accuracy=0.5) is run.last
    (step,) = open_run(tmp_path / "run").steps()
    assert step.extra["accuracy"] == 0.5
    cell = scale_cell(net)
    with watch(cell, out=tmp_path / "cell") as run:
        call_all(cell, exact(1))
        with pytest.raises(ArgumentError, match=r"leave run\.step"):
            run.step(loss=1.0)


def test_a_second_run_into_a_directory_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    net = build(nets.Exact)
    found = Found(net)
    with watch(net, out=tmp_path / "run") as run:
        exact_loop(net).run(exact(1), run)
    with pytest.raises(StoreError, match="append"):
        watch(net, out=tmp_path / "run")
    found.check()
    assert np.isfinite([step.loss for step in open_run(tmp_path / "run").steps()]).all()
