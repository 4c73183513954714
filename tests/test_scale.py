"""Policies against independent simulations of the same scalers, and flushing against float16 itself."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from ampdebug._errors import ArgumentError
from ampdebug._scale import (
    DEFAULT_POLICIES,
    DeepSpeedScale,
    DynamicScale,
    ScalePolicy,
    StaticScale,
    TorchScale,
    simulate_scale,
)


def load(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


simulate = load("simulate")

PAIRS = [
    (StaticScale(1024.0), lambda: simulate.Static(1024.0)),
    (DynamicScale(2.0**20, window=7), lambda: simulate.Dynamic(2.0**20, 7)),
    (TorchScale(interval=5), lambda: simulate.Torch(65536.0, 5)),
    (DeepSpeedScale(power=20, window=6, hysteresis=1), lambda: simulate.DeepSpeed(20, 6, 1)),
    (DeepSpeedScale(power=20, window=6, hysteresis=3), lambda: simulate.DeepSpeed(20, 6, 3)),
]


@pytest.mark.parametrize(("policy", "make"), PAIRS, ids=lambda v: getattr(v, "name", ""))
@pytest.mark.parametrize("seed", range(5))
def test_policies_against_independent_scalers(policy: ScalePolicy, make: object, seed: int) -> None:
    rng = np.random.default_rng(seed)
    largest = 2.0 ** rng.normal(2, 3, 400)
    largest[rng.integers(0, 400, 5)] = np.nan
    result = simulate_scale(largest, policies=[policy]).replays[0]
    scaler = make()  # type: ignore[operator]
    for step, value in enumerate(largest):
        assert result.scales[step] == scaler.scale, step
        with np.errstate(over="ignore"):
            # What float16 itself makes of the product decides, not a constant of ours.
            overflow = not np.isfinite(np.float16(value * scaler.scale))
        assert (step + 1 in result.skipped) == overflow
        scaler.update(overflow)


def test_flushed_share_against_float16() -> None:
    rng = np.random.default_rng(3)
    rows, exponents, largest, shares = 12, [], [], []
    for _ in range(rows):
        values = np.exp2(rng.uniform(-45, -5, 3000)) * rng.choice([-1, 1], 3000)
        # Exact powers of two are the ties at the limit; the histogram can't tell them from what lies just above.
        values *= 1 + rng.uniform(0.01, 0.9, 3000)
        values = values.astype(np.float32).astype(np.float64)
        exponents.append(np.bincount(np.floor(np.log2(np.abs(values))).astype(int) + 127, minlength=256))
        largest.append(np.abs(values).max())
        shares.append(np.mean((values * 2.0**10).astype(np.float16) == 0))
    result = simulate_scale(largest, exponents=np.array(exponents), policies=[StaticScale(2.0**10)]).replays[0]
    assert result.skipped == ()
    assert result.flushed_share == pytest.approx(np.mean(shares), abs=1e-12)


def test_skipped_steps_flush_nothing() -> None:
    counts = np.zeros((2, 256), np.int64)
    counts[:, 80] = 5
    result = simulate_scale([1e9, 1e-3], exponents=counts, policies=[StaticScale(1.0)]).replays[0]
    assert result.skipped == (1,)
    assert result.flushed_share == 1.0


def test_the_boundary_of_overflow_is_float16s() -> None:
    edge = np.nextafter(65520.0, 0)
    assert np.isfinite(np.float16(edge))
    sim = simulate_scale([edge, 65520.0, np.inf, np.nan], policies=[StaticScale(1.0)])
    assert sim.replays[0].skipped == (2, 3, 4)


def test_best_is_least_flushed_at_few_skipped_steps() -> None:
    counts = np.zeros((3000, 256), np.int64)
    counts[:, 90:110] = 10
    sim = simulate_scale(np.full(3000, 2.0**-10), exponents=counts)
    assert sim.best().flushed_share == min(r.flushed_share for r in sim.replays)  # type: ignore[type-var]
    assert sim.best().policy != "static 1024"
    assert simulate_scale(np.full(3000, 2.0**-10)).best().policy.startswith("d")


def test_report_has_a_row_for_each_policy_and_numbers_that_agree() -> None:
    sim = simulate_scale(np.exp2(np.random.default_rng(0).normal(0, 2, 500)))
    lines = str(sim).split("\n")
    assert len(lines) == len(DEFAULT_POLICIES) + 2
    for line, replay in zip(lines[1:-1], sim.replays, strict=True):
        assert line.startswith(replay.policy)
        assert int(line[len(replay.policy) :].split()[0] if replay.policy in line else -1) == len(replay.skipped)
    data = sim.to_dict()
    assert [row["policy"] for row in data["replays"]] == [p.name for p in DEFAULT_POLICIES]
    assert data["best"] == sim.best().policy


def test_policies_can_be_used_again() -> None:
    policy = DeepSpeedScale(window=3, hysteresis=2)
    values = np.exp2(np.random.default_rng(1).normal(0, 3, 200))
    first, second = (simulate_scale(values, policies=[policy]).replays[0] for _ in range(2))
    assert first == second
    assert (first.scales == second.scales).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "at least one step"),
        (([-1.0],), "is negative"),
        (([[1.0]],), "one number for each"),
    ],
)
def test_bad_gradients(arguments: tuple[list[float]], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        simulate_scale(*arguments)


def test_bad_options() -> None:
    with pytest.raises(ArgumentError, match="policies is empty"):
        simulate_scale([1.0], policies=[])
    with pytest.raises(ArgumentError, match=r"must be \(1, 256\)"):
        simulate_scale([1.0], exponents=np.zeros((2, 256)))
    with pytest.raises(ArgumentError, match="window=0"):
        DynamicScale(window=0)
    with pytest.raises(ArgumentError, match="factor=1"):
        DynamicScale(factor=1.0)
    with pytest.raises(ArgumentError, match=r"backoff=1\.5"):
        TorchScale(backoff=1.5)
    with pytest.raises(ArgumentError, match="hysteresis=0"):
        DeepSpeedScale(hysteresis=0)
