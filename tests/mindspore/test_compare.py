"""Comparisons of small networks: what is measured, and that no level ends it."""

from __future__ import annotations

import functools
import json
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops, value_and_grad

import ampdebug
from ampdebug._cli import main
from ampdebug._compare_noise import noise_of
from ampdebug._compare_records import BaselineRuns, Mode, TrainingRun
from ampdebug._errors import ArgumentError
from ampdebug.hooks._compare import _Measurements, compare
from ampdebug.hooks._compare_memory import MemoryMeter
from ampdebug.hooks._compare_shares import share_of
from ampdebug.hooks._compare_training import TrainingSpec, run_training
from ampdebug.hooks._state import seeded

pytestmark = pytest.mark.own_process

NETS = f"{Path(__file__).with_name('compare_nets.py')}"
STEPS = 6


@pytest.fixture(autouse=True)
def mode_is_put_back() -> Iterator[None]:
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


def spec(name: str, level: str, mode: Mode = "pynative", **parts: int) -> TrainingSpec:
    return TrainingSpec(f"{NETS}:{name}", level, mode, **{"steps": STEPS, **parts})


@functools.cache
def plain(level: str, mode: Mode = "pynative", seed: int = 0) -> TrainingRun:
    """Measured once for all tests."""
    return run_training(spec("plain", level, mode, seed=seed))


def by_hand() -> tuple[list[float], float]:
    """The training at O0 as anyone would write it."""
    from ampdebug._target import load_workload

    workload = load_workload(f"{NETS}:plain")
    with seeded(0):
        net = workload.network().set_train()
        optimizer = workload.optimizer(net.trainable_params())  # type: ignore[misc]
        step = value_and_grad(lambda x, y: workload.loss(net(x), y), None, optimizer.parameters)
        losses = []
        for _ in range(STEPS // 3):
            for x, y in workload.data():  # type: ignore[operator]
                loss, gradients = step(Tensor(x), Tensor(y))
                optimizer(gradients)
                losses.append(float(loss.asnumpy()))
    return losses, workload.metric(net.set_train(False))  # type: ignore[misc]


@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_o0_is_the_training_that_anyone_would_write(mode: Mode) -> None:
    expected, metric = by_hand()
    run = plain("O0", mode)
    assert run.status == "ok", run.reason
    # Warming up must leave no trace, in the moving statistics either: they decide the metric.
    np.testing.assert_allclose(run.losses, expected, rtol=2e-6)
    assert run.metric == pytest.approx(metric)
    assert (run.first_scale, run.skipped) == (1.0, ())
    assert len(run.step_seconds) == STEPS
    assert min(run.step_seconds) > 0
    assert run.first_seconds > 0
    assert run.memory is not None
    assert 0 < run.memory.used < 2**31
    assert run.memory.source == "process"


@pytest.mark.parametrize(("level", "mode"), [("O2", "pynative"), ("auto", "graph")])
def test_a_level_begins_with_the_same_weights(level: str, mode: Mode) -> None:
    base, run = plain("O0", mode), plain(level, mode)
    assert run.status == "ok", run.reason
    assert run.losses != base.losses
    np.testing.assert_allclose(run.losses, base.losses, rtol=5e-3)
    assert run.first_scale == 2.0**16


def test_other_seeds_are_other_trainings() -> None:
    assert plain("O0", seed=1).losses[0] != plain("O0").losses[0]


def test_the_loss_scale_comes_down_before_the_first_step() -> None:
    from ampdebug._target import load_workload

    steep = replace(load_workload(f"{NETS}:plain"), loss=_Steep(), optimizer=_timid)
    run = run_training(TrainingSpec(steep, "O2", "pynative", STEPS))
    assert run.status == "ok", run.reason
    assert run.first_scale < 2.0**16
    assert run.skipped == ()
    static = run_training(TrainingSpec(steep, "O2", "pynative", STEPS, loss_scale=2.0**16))
    assert static.first_scale == 2.0**16
    assert static.skipped == tuple(range(STEPS))


def _timid(parameters: Any) -> nn.Optimizer:
    return nn.SGD(parameters, 1e-6)


class _Steep(nn.Cell):
    """Its gradients are too large for a loss scale of 2**16 in float16."""

    def construct(self, logits: Tensor, label: Tensor) -> Tensor:
        return 100.0 * ops.cross_entropy(logits, label)


def test_what_overflows_in_the_forward_pass_is_seen() -> None:
    run = run_training(spec("overflowing", "O3"))
    assert run.status == "ok", run.reason
    assert not any(map(math.isfinite, run.losses))
    assert run.skipped == tuple(range(STEPS))


def test_a_network_that_draws_without_the_seed_is_not_reproducible() -> None:
    runs = [run_training(spec("restless", "O0", seed=seed)) for seed in (0, 0, 1)]
    noise = noise_of(BaselineRuns(runs[0], runs[1], (runs[2],)))
    assert noise.reproducible == "no"
    assert noise.repeat > 1e-3


def test_a_network_with_a_seed_is_reproducible() -> None:
    again = run_training(spec("plain", "O0"))
    assert noise_of(BaselineRuns(plain("O0"), again, (plain("O0", seed=1),))).reproducible in ("bitwise", "closely")


def test_shares_are_those_of_the_audit() -> None:
    low = share_of(spec("plain", "O3"))
    assert low.operators == {"float16": sum(low.operators.values())}
    kept = share_of(spec("plain", "O2"))
    assert kept.operators["float32"] == 1  # the norm
    assert low.kinds["matmul"] == 2
    # inlet (matmul and bias), norm and relu give [16, 8]; fc gives [16, 3] twice.
    assert low.bytes == {"float16": 2 * 16 * (4 * 8 + 2 * 3)}
    assert kept.bytes["float32"] == 4 * 16 * 8
    assert share_of(spec("plain", "O0")).low_operators == 0.0


def test_shares_of_a_graph() -> None:
    low = share_of(spec("plain", "O3", "graph"))
    assert low.low_operators == 1.0
    assert low.kinds["matmul"] == 2
    assert set(low.bytes) == {"float16"}
    assert low.bytes["float16"] >= 2 * 16 * (4 * 8 + 2 * 3)


def test_memory_is_the_high_water_mark() -> None:
    meter = MemoryMeter()
    filled = np.ones(8_000_000)  # 64 MB
    held = meter.read()
    del filled
    after = meter.read()
    assert 60e6 < held.used < 200e6
    assert after.peak > held.peak - 2e6  # the kernel counts in batches
    assert MemoryMeter().read().used < 30e6


def _temporary_files_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(folder))  # of the workers
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


def test_a_level_that_dies_is_a_row(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    temporary = tmp_path_factory.mktemp("temporary")
    _temporary_files_in(temporary, monkeypatch)
    here = os.listdir(".")
    report = compare(
        f"{NETS}:treacherous", levels=("O0", "O3"), modes=("pynative",), steps=3, seeds=2, kernels=False, out=tmp_path
    )
    assert "made" not in capfd.readouterr().out
    base, died = report.rows
    assert base.run.status == "ok", base.run.reason
    assert report.noise["pynative"].reproducible in ("bitwise", "closely")
    assert report.noise["pynative"].seeds == 2
    assert base.run.share is not None
    assert died.run.status == "crashed"
    assert "died with signal 9" in died.run.reason
    assert report.advice[0].level == "O0"
    assert "died with signal 9" in str(report)
    with ampdebug.open_run(tmp_path) as run:
        (stored,) = run.results("compare")
    assert json.loads(json.dumps(stored))["rows"] == report.to_dict()["rows"]
    assert os.listdir(".") == here  # no rank_0, no rewritten_network
    assert os.listdir(temporary) == []


def test_a_level_that_hangs_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _temporary_files_in(tmp_path, monkeypatch)
    measurements = _Measurements(f"{NETS}:treacherous", 3, None, 3.0, lambda text: None)
    run = measurements.level("O2", "pynative")
    assert (run.status, run.reason) == ("timeout", "it took longer than 3 s and was ended")
    assert os.listdir(tmp_path) == []


def test_a_level_that_raises_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("\n-----\n- Kernel select failed:\n-----\nUnsupported op [X] on CPU\n")

    monkeypatch.setattr(amp, "auto_mixed_precision", fail)
    run = run_training(spec("plain", "O1"))
    assert run.status == "failed"
    assert run.reason == "converting the network to O1 raised RuntimeError: Unsupported op [X] on CPU"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"levels": ("O2", "O9")},
            "levels=('O2', 'O9'): must be a tuple of 'O0', 'O1', 'O2', 'O3', 'auto'; 'O9' is not",
        ),
        ({"levels": "O2"}, "levels='O2': must be a tuple"),
        ({"modes": ("pynative", "pynative")}, "names one twice"),
        ({"modes": ()}, "modes is empty"),
        ({"steps": 1}, "steps=1: must be at least 2"),
        ({"seeds": 1}, "seeds=1: must be at least 2"),
        ({"tolerance": math.nan}, "tolerance=nan: must be a number of at least 0"),
        ({"timeout": 0}, "timeout=0: must be a positive number"),
        ({"loss_scale": -1.0}, "loss_scale=-1.0: must be a positive number"),
    ],
)
def test_arguments(options: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        compare(f"{NETS}:plain", **options)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", f"{NETS}:plain", "--levels", "O2", "--steps", "1"]) == 2
    assert capsys.readouterr().err == (
        "ampdebug compare: steps=1: must be at least 2, since the first step of a training is never timed\n"
    )
    assert main(["compare", f"{NETS}:nothing"]) == 2
    assert "has no such name 'nothing'" in capsys.readouterr().err


def test_workloads_that_cannot_be_compared() -> None:
    from ampdebug._target import load_workload

    with pytest.raises(ArgumentError, match="cannot be sent to another process"):
        compare(load_workload(f"{NETS}:unsendable"))
    with pytest.raises(ArgumentError, match="compare needs the workload's loss and optimizer"):
        compare(f"{NETS}:untrainable")
    with pytest.raises(ArgumentError, match="workload is a int"):
        compare(3)  # type: ignore[arg-type]
