"""A sample of the campaign of planted faults; the whole of it is benchmarks/bisect_campaign.py."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

import mindspore as ms
import pytest
from mindspore import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))

import _faults
import bisect_campaign as campaign

pytestmark = [
    pytest.mark.own_process,
    pytest.mark.skipif(
        importlib.util.find_spec("mindcv") is None,
        reason="mindcv is not installed: pip install --no-deps mindcv==0.3.0, and pip install tqdm pyyaml",
    ),
]


@pytest.fixture(autouse=True)
def pynative() -> None:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    ms.runtime.launch_blocking()  # MindSpore's threads wait by spinning, which is slow where cores are few


# One that rounds; three that overflow together; one that flushes beside two that round.
@pytest.mark.parametrize("number", [33, 37, pytest.param(38, marks=pytest.mark.slow)])
def test_a_planted_set_is_found_exactly(number: int) -> None:
    row = campaign.solve(*campaign.valid_case(number, steps=1))
    assert row.case.net == "mindcv vit"
    assert row.by_hand.holds
    assert row.found == row.case.expected
    assert row.exact
    assert all(culprit.needed == "verified" for culprit in row.result.culprits)
    assert row.result.reference == 0.0, "the engine's float32 network is the one written by hand"
    assert all(check.passed for check in row.result.checks)
    assert row.result.probes <= row.allowed
    assert "| exact |" in campaign.line(row)
    assert "**1 of 1 sets found exactly**" in campaign.report([row])


class Harmless(_faults.ScaledUpAndDown):
    """Float16 holds what is scaled by so little."""

    def construct(self, x: Tensor) -> Tensor:
        y = self.inner(x) * 2.0
        return y / 2.0

    def steps(self, step: _faults.Steps, x: _faults.Value) -> _faults.Value:
        return step(lambda a: a / 2.0, step(lambda a: a * 2.0, x))


def test_what_does_no_harm_is_no_planted_fault() -> None:
    case = dataclasses.replace(campaign.case_of(33, steps=1), faults={"blocks.0.mlp.fc1": Harmless})
    seen = campaign.by_hand(case)
    assert max(seen.without) < 0.01
    assert not seen.holds


def test_every_kind_of_fault_and_every_count_is_planted() -> None:
    cases = [campaign.case_of(number) for number in range(campaign.CASES)]
    assert len(cases) == 40
    assert {case.net for case in cases} == set(campaign.NETS)
    assert {fault for case in cases for fault in case.faults.values()} == {
        *campaign.SINGLES,
        *campaign.PAIRS,
        *campaign.TRIPLES,
    }
    assert {case.expected.total() for case in cases} == {1, 2, 3}
    assert {case.level for case in cases} == {"O2", "O3"}
