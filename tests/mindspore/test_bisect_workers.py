"""Bisection with probes in worker processes; those that fail here do so by dying."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from ampdebug._errors import ArgumentError
from ampdebug.hooks._bisection import bisect

pytestmark = [pytest.mark.own_process, pytest.mark.slow]

MAIN_PROCESS = "AMPDEBUG_TEST_MAIN_PROCESS"


@pytest.fixture(autouse=True)
def main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    monkeypatch.setenv(MAIN_PROCESS, str(os.getpid()))


class Net(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        y = ops.tanh(x) * 12.0
        e = ops.exp(y)
        return e / e.sum(-1, keepdims=True)


def evaluate(net: nn.Cell) -> float:
    y = net(Tensor(np.linspace(-3, 3, 12).reshape(3, 4).astype(np.float32))).asnumpy()
    finite = bool(np.isfinite(y).all())
    if not finite and os.environ[MAIN_PROCESS] != str(os.getpid()):
        os.kill(os.getpid(), signal.SIGSEGV)
    return 1.0 if finite else 0.0


def test_probes_that_kill_their_process_are_failed_probes(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    result = bisect(Net, evaluate, level="O3", workers=1, timeout=300, journal=path)
    assert result.status == "found"
    # The sum may overflow: an unrounded number divided by infinity is finite, and more is not asked for here.
    assert {culprit.unit.operator for culprit in result.culprits} == {"Exp", "/"}
    failed = [probe.outcome for probe in result.history if not probe.outcome.passed]
    assert failed
    assert all("died with signal 11" in outcome.reason for outcome in failed)
    again = bisect(Net, evaluate, level="O3", workers=1, journal=path)
    assert (again.probes, again.reused) == (0, result.probes)
    assert again.culprits == result.culprits


def test_a_cell_cannot_be_sent() -> None:
    with pytest.raises(ArgumentError, match="network is a cell, which cannot be sent to workers"):
        bisect(Net(), evaluate, workers=1)
    with pytest.raises(ArgumentError, match="timeout=3 needs a process that can be ended"):
        bisect(Net, evaluate, timeout=3)
