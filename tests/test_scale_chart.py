"""The picture of loss, loss scale and overflows: what stands where, and that TensorBoard has it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ampdebug
from ampdebug._records import Step
from ampdebug.report import TensorBoardSink
from ampdebug.report.scale_chart import _BAD, _LEFT, _LOSS, _SCALE, COLUMNS, ScaleChart


def columns_of(picture: Any, color: tuple[int, int, int]) -> list[int]:
    """Columns of the chart that hold a colour."""
    return sorted({(x - _LEFT) // 2 for x in np.argwhere((picture == color).all(-1))[:, 1].tolist()})


def rows_of(picture: Any, color: tuple[int, int, int], column: int) -> list[int]:
    part = picture[:, _LEFT + 2 * column + 1]
    return np.flatnonzero((part == color).all(-1)).tolist()  # type: ignore[no-any-return]


def test_what_stands_where() -> None:
    chart = ScaleChart()
    for step in range(1, 101):
        overflow = step in (10, 50)
        loss = math.nan if step == 50 else 5.0 - step / 50
        chart.see(step, loss=loss, scale=2.0**16 if step <= 50 else 2.0**15, overflow=overflow)
    picture = chart.draw()
    assert picture.dtype == np.uint8
    assert columns_of(picture, _BAD) == [9, 49]
    assert len(columns_of(picture, _LOSS)) == 99  # all but the NaN
    assert columns_of(picture, _SCALE) == list(range(100))
    assert rows_of(picture, _LOSS, 0)[0] < rows_of(picture, _LOSS, 99)[0]  # it falls, and rows count downwards
    assert rows_of(picture, _SCALE, 49)[0] < rows_of(picture, _SCALE, 60)[0]


def test_many_steps_share_columns_and_no_overflow_is_lost() -> None:
    chart = ScaleChart()
    for step in range(1, 20_001):
        chart.see(step, loss=2.0, scale=1024.0, overflow=step == 12_345)
    assert len(chart) <= COLUMNS
    (at,) = columns_of(chart.draw(), _BAD)
    assert at == pytest.approx(12_345 / 20_000 * len(chart), abs=1.5)


def test_nothing_to_tell() -> None:
    chart = ScaleChart()
    chart.see(1, loss=1.0)
    chart.see(2, loss=1.0)
    assert not chart.tells
    assert chart.draw().ndim == 3
    chart.see(3, loss=1.0, scale=0.0)
    assert not chart.tells
    chart.see(4, loss=1.0, scale=2.0)
    assert chart.tells


def images(folder: Path) -> dict[str, Any]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    return {tag: events.Images(tag) for tag in events.Tags()["images"]}


def test_a_run_has_it_in_tensorboard(tmp_path: Path) -> None:
    with TensorBoardSink(tmp_path) as sink:
        for number in range(1, 31):
            sink.step(Step(number, loss=2.0, loss_scale=1024.0, overflow=number == 9))
    (shown,) = images(tmp_path)["loss-scale-trace"]
    assert (shown.width, shown.height) == ScaleChart().draw().shape[1::-1] or shown.width > 100


def test_without_a_scale_there_is_none(tmp_path: Path) -> None:
    with TensorBoardSink(tmp_path) as sink:
        for number in range(1, 31):
            sink.step(Step(number, loss=2.0))
    assert "loss-scale-trace" not in images(tmp_path)


def test_a_simulation_has_it_in_tensorboard(tmp_path: Path) -> None:
    simulation = ampdebug.simulate_scale([0.5] * 50 + [4.0] * 50)
    path = simulation.write_tensorboard(tmp_path / "sim")
    assert path.exists()
    assert list(images(tmp_path / "sim")) == ["simulated-loss-scale"]
    assert simulation.draw().shape[2] == 3
