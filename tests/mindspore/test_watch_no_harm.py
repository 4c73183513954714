"""``watch`` changes nothing: numbers bitwise equal with and without, and the network afterwards as it was found."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops

from ampdebug import NoObservationsError, open_run, watch

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode: test modules can't import each other by themselves
import nets
from nets import (
    LEVELS,
    MODES,
    Found,
    Loop,
    build,
    call_all,
    exact,
    exact_loop,
    images,
    many,
    numbers_of,
    scale_cell,
    set_mode,
    vectors,
    weights,
)

pytestmark = pytest.mark.own_process


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)  # MindSpore leaves rewritten_network/ and rank_0/ where it runs
    yield
    set_mode("pynative")


def functional(net: nn.Cell, batches: Any, out: Path | None, *, jit: bool = False) -> list[float]:
    scaler = amp.DynamicLossScaler(2.0**24, 2, 1)  # 2**24 overflows the fp16 gradients: skipped and taken steps
    loop = Loop(net, scaler, jit=jit)
    if out is None:
        return loop.run(batches)
    with watch(net, out=out, optimizer=loop.optimizer, loss_scale=scaler) as run:
        return loop.run(batches, run)


def jitted(net: nn.Cell, batches: Any, out: Path | None) -> list[float]:
    return functional(net, batches, out, jit=True)


def train_cell(net: nn.Cell, batches: Any, out: Path | None) -> list[float]:
    cell = scale_cell(net, scale=2.0**24, window=1)
    if out is None:
        return call_all(cell, batches)
    with watch(cell, out=out):
        return call_all(cell, batches)


def plain_cell(net: nn.Cell, batches: Any, out: Path | None) -> list[float]:
    optimizer = nn.Momentum(net.trainable_params(), 0.05, 0.9, loss_scale=1024.0)
    cell = nn.TrainOneStepCell(nn.WithLossCell(net, nn.CrossEntropyLoss()), optimizer, sens=1024.0).set_train()
    if out is None:
        return call_all(cell, batches)
    with watch(cell, out=out):
        return call_all(cell, batches)


KINDS = [
    *(("pynative", functional, level) for level in LEVELS),
    *(("pynative", jitted, level) for level in ("O0", "O2", "auto")),
    *(("pynative", train_cell, level) for level in LEVELS),
    *(("pynative", plain_cell, level) for level in ("O0", "O2")),
    *(("graph", functional, level) for level in LEVELS),
    *(("graph", train_cell, level) for level in ("O0", "O2", "auto")),
    *(("graph", plain_cell, level) for level in ("O0", "O2")),
]


@pytest.mark.parametrize(("mode", "loop", "level"), KINDS, ids=lambda v: getattr(v, "__name__", v))
def test_numbers_are_bitwise_those_without_the_watch(mode: str, loop: Any, level: str, tmp_path: Path) -> None:
    set_mode(mode)
    if mode == "pynative" and loop is not jitted:
        loop(build(nets.ConvNet, level), many(images()), None)
    bare = build(nets.ConvNet, level)
    plain = loop(bare, images(), None)
    net = build(nets.ConvNet, level)
    found = Found(net)
    watched = loop(net, images(), tmp_path / "run")
    assert numbers_of(watched) == numbers_of(plain)
    assert weights(net) == weights(bare)
    found.check()
    run = open_run(tmp_path / "run")
    assert run.meta["amp_level"] == level
    assert [step.step for step in run.steps()] == [1, 2, 3]
    assert all(step.sampled and step.grad_norm is not None for step in run.steps())
    assert len(run.tensors(1)) > 40


@pytest.mark.parametrize("mode", MODES)
def test_detached_after_an_exception_inside(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    net = build(nets.Mlp)
    found = Found(net)

    def train() -> None:
        with watch(net, out=tmp_path / "run") as run:
            Loop(net, amp.StaticLossScaler(8.0)).run(vectors(1), run)
            raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        train()
    found.check()
    assert [step.step for step in open_run(tmp_path / "run").steps()] == [1]


@pytest.mark.parametrize("mode", MODES)
def test_an_exception_in_the_network_passes_through(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    net = build(nets.Mlp)
    found = Found(net)
    loop = Loop(net, amp.StaticLossScaler(8.0))
    wrong = Tensor(np.ones((4, 7), np.float32)), vectors(1)[0][1]
    with pytest.raises(Exception, match=r"(?i)shape|dim|size|equal"), watch(net, out=tmp_path / "run") as run:
        loop.run([wrong], run)
    found.check()


@pytest.mark.parametrize("mode", MODES)
def test_a_nested_watch_keeps_the_outer_one(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    bare = build(nets.Exact)
    plain = exact_loop(bare).run(exact(6))
    net = build(nets.Exact)
    found = Found(net)
    loop = exact_loop(net)
    with watch(net, out=tmp_path / "outer", optimizer=loop.optimizer) as outer:
        numbers = loop.run(exact(6)[:2], outer)
        with watch(net, out=tmp_path / "inner", optimizer=loop.optimizer, cells="first") as inner:
            for x, y in exact(6)[2:4]:
                loss, _ = loop.step(x, y)
                numbers += [nets.number(loss), 8.0]
                outer.step(loss=loss)
                inner.step(loss=loss)
        numbers += loop.run(exact(6)[4:], outer)
    found.check()
    assert numbers_of(numbers) == numbers_of(plain)
    assert weights(net) == weights(bare)
    outer_run, inner_run = open_run(tmp_path / "outer"), open_run(tmp_path / "inner")
    assert [len(outer_run.tensors(step)) for step in range(1, 7)] == [len(outer_run.tensors(1))] * 6
    assert [step.step for step in inner_run.steps()] == [1, 2]
    assert list(nets.Rows(tmp_path / "inner", 2).paths()) == ["first"]
    assert list(nets.Rows(tmp_path / "outer", 4).paths()) == ["", "act", "first", "second"]


@pytest.mark.parametrize("mode", MODES)
def test_attaching_after_the_network_was_compiled_and_twice_in_a_row(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    bare = build(nets.Exact)
    plain = exact_loop(bare, jit=True).run(exact(8))
    net = build(nets.Exact)
    found = Found(net)
    loop = exact_loop(net, jit=True)
    numbers = loop.run(exact(8)[:2])  # compiled without us
    with watch(net, out=tmp_path / "one") as run:
        numbers += loop.run(exact(8)[2:4], run)
    numbers += loop.run(exact(8)[4:5])
    with watch(net, out=tmp_path / "two") as run:
        numbers += loop.run(exact(8)[5:7], run)
    numbers += loop.run(exact(8)[7:])
    found.check()
    assert numbers_of(numbers) == numbers_of(plain)
    assert weights(net) == weights(bare)
    for name in ("one", "two"):
        assert list(nets.Rows(tmp_path / name, 2).paths()) == ["", "act", "first", "second"]


@pytest.mark.parametrize("mode", MODES)
def test_appending_goes_on_counting(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    cell = scale_cell(build(nets.Mlp))
    with watch(cell, out=tmp_path / "run"):
        call_all(cell, vectors(2))
    with watch(cell, out=tmp_path / "run", append=True):
        call_all(cell, vectors(2))
    assert [step.step for step in open_run(tmp_path / "run").steps()] == [1, 2, 3, 4]


def test_checkpoints_saved_after_watching_load_without_ampdebug(tmp_path: Path) -> None:
    for level in LEVELS:
        net = build(nets.ConvNet, level)
        functional(net, images(1), tmp_path / f"run{level}")
        ms.save_checkpoint(net, f"{level}.ckpt")
    script = f"""
        import sys
        import mindspore as ms
        for level in {LEVELS}:
            print(sorted(ms.load_checkpoint(level + ".ckpt")))
        assert not any(name.split(".")[0] == "ampdebug" for name in sys.modules)
    """
    # Coverage, where it measures child processes, imports what it measures.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    names = str(sorted(p.name for p in build(nets.ConvNet).get_parameters()))
    assert done.stdout.splitlines() == [names] * len(LEVELS)


@pytest.mark.parametrize("mode", MODES)
def test_watching_another_network_raises_and_names_mode_and_way_out(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    net, other = build(nets.Mlp), build(nets.Mlp)
    found = Found(net, other)
    with pytest.raises(NoObservationsError) as caught, watch(other, out=tmp_path / "run") as run:
        Loop(net, amp.StaticLossScaler(8.0)).run(vectors(1), run)
    assert ("GRAPH_MODE" if mode == "graph" else "PYNATIVE_MODE") in str(caught.value)
    assert "Watch the object that really runs" in str(caught.value)
    found.check()


def test_no_step_at_all_raises(tmp_path: Path) -> None:
    net = build(nets.Mlp)
    with (
        pytest.raises(NoObservationsError, match=r"run\.step\(\.\.\.\) was not called"),
        watch(net, out=tmp_path / "a"),
    ):
        pass
    cell = scale_cell(net)
    with pytest.raises(NoObservationsError, match="the train cell was not called"), watch(cell, out=tmp_path / "b"):
        pass
    Found(net).check()


class Slow(nn.Cell):
    """Runs for a while after Python has been told that it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(256, 256)

    def construct(self, x):
        for _ in range(12):
            x = ops.tanh(self.dense(x))
        return x.sum()


@pytest.mark.parametrize("mode", MODES)
def test_a_step_is_over_when_the_network_is_done_not_when_python_is(mode: str, tmp_path: Path) -> None:
    set_mode(mode)
    net = Slow()
    gradient = ms.value_and_grad(net, None, net.trainable_params())
    x = Tensor(np.random.RandomState(0).randn(256, 256).astype(np.float32))
    counts = []
    with watch(net, out=tmp_path / "run") as run:
        for _ in range(12):
            gradient(x)
            run.step(loss=0.0)  # nothing that would wait for the network
    recorded = open_run(tmp_path / "run")
    for step in range(1, 13):
        kinds = [recorded.sites[site].kind for site in recorded.tensors(step).site_ids]
        counts.append((kinds.count("output"), kinds.count("gradient")))
    assert counts == [(13, 2)] * 12
