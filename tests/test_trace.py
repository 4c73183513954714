"""The trace that any loop can feed."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from ampdebug._diagnose import diagnose
from ampdebug._errors import ArgumentError
from ampdebug._trace import Trace


class Tensor:
    """What a 0-d tensor of any framework offers."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value

    def __bool__(self) -> bool:
        return bool(self.value)


def test_numbers_and_tensors_are_taken() -> None:
    trace = Trace("loop")
    trace.step(loss=Tensor(1.5), loss_scale=Decimal(1024), overflow=Tensor(0), grad_norm=2, learning_rate="0.1")
    step = trace.history.records[0].step
    assert (step.loss, step.loss_scale, step.overflow, step.grad_norm, step.learning_rate) == (
        1.5,
        1024.0,
        False,
        2.0,
        0.1,
    )
    assert (step.step, step.update_skipped, step.loss_scale_after) == (1, None, None)
    assert len(trace) == 1


def test_what_is_left_out_is_unknown() -> None:
    trace = Trace()
    trace.step()
    step = trace.history.records[0].step
    assert (step.loss, step.loss_scale, step.overflow, step.grad_norm) == (None, None, None, None)


def test_huge_integers_are_infinite() -> None:
    trace = Trace()
    trace.step(loss=10**400)
    assert trace.history.records[0].step.loss == math.inf


def test_steps_count_by_themselves_or_as_told() -> None:
    trace = Trace()
    for number in (None, None, 10, None):
        trace.step(loss=1.0, step=number)
    assert [r.step.step for r in trace.history.records] == [1, 2, 10, 11]
    trace.step(loss=1.0, step=3)
    assert [r.segment for r in trace.history.records] == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": "many"}, r"loss='many' is no number; give something float\(\) takes"),
        ({"grad_norm": [1]}, "grad_norm="),
        ({"step": 0}, "step=0: steps are whole numbers from 1 on"),
    ],
)
def test_bad_values(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Trace().step(**arguments)  # type: ignore[arg-type]


def test_an_ambiguous_flag_is_refused() -> None:
    class Ambiguous:
        def __bool__(self) -> bool:
            raise ValueError("the truth value of an array is ambiguous")

    with pytest.raises(ArgumentError, match="neither true nor false"):
        Trace().step(overflow=Ambiguous())


def test_it_can_be_diagnosed_again_and_again_while_it_grows() -> None:
    trace = Trace("loop")
    for step in range(30):
        trace.step(loss=3.0 - step / 20, loss_scale=65536.0, overflow=False)
    assert trace.diagnose().ok
    for _ in range(10):
        trace.step(loss=math.nan, loss_scale=65536.0, overflow=False)
    found = diagnose(trace)
    assert [f.slug for f in found.findings] == ["nan-updates-not-skipped"]
    assert found.source == "loop"
    assert [r.step.step for r in trace.history.records] == list(range(1, 41))


def test_no_framework_and_no_numpy_is_imported() -> None:
    code = (
        "import sys\nfrom ampdebug._trace import Trace\nt = Trace()\n[t.step(loss=1.0) for _ in "
        "range(20)]\nstr(t.diagnose())\nbad = {'numpy', 'mindspore', 'torch'} & set(sys.modules)\nassert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the example ------------------------------------------------------------------------------------------------------


def example() -> Any:
    spec = importlib.util.spec_from_file_location(
        "trace_loop", Path(__file__).resolve().parent.parent / "examples" / "trace_loop.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_finds_its_fault() -> None:
    found = example().main()
    assert found.findings[0].slug == "loss-nan-before-scale-moved", str(found)
    assert found.findings[0].first_step == 300


def test_the_example_without_a_fault_is_healthy() -> None:
    assert example().main(broken_from=10**9).ok
