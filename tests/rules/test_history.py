"""The digest keeps what matters and stays small, whatever comes."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from ampdebug._records import Step
from ampdebug.rules import History, Record
from ampdebug.rules._history import PLAIN_CAP, REMARKABLE_CAP


def feed(kinds: str, count: int) -> History:
    """``p`` a plain step, ``o`` an overflow, ``n`` a NaN loss, ``s`` a changed scale."""
    history = History()
    scale = 1024.0
    for number, kind in zip(range(1, count + 1), itertools.cycle(kinds), strict=False):
        if kind == "s":
            scale = 3072.0 - scale
        loss = float("nan") if kind == "n" else 1.0
        history.add(Record(Step(number, loss=loss, loss_scale=scale, overflow=kind == "o")))
    history.finish()
    return history


@pytest.mark.parametrize("kinds", ["p", "o", "po", "ppo", "n", "pn", "s", "ps", "p" * 50 + "o", "ons"])
def test_bounded_whatever_comes(kinds: str) -> None:
    begin = time.process_time()
    history = feed(kinds, 200_000)
    assert len(history.records) <= PLAIN_CAP + REMARKABLE_CAP + 200
    assert time.process_time() - begin < 30
    assert history.totals.records == 200_000
    assert history.totals.overflows == sum(1 for k in itertools.islice(itertools.cycle(kinds), 200_000) if k == "o")
    numbers = [r.step.step for r in history.records]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == len(numbers)
    assert numbers[0] == 1
    assert numbers[-1] == 200_000


def test_everything_is_kept_of_a_short_run() -> None:
    history = feed("ppopn", 20_000)
    assert history.exact
    assert len(history.records) == 20_000


def test_remarkable_steps_and_those_before_them_survive() -> None:
    rng = random.Random(0)
    special = set(rng.sample(range(2, 300_000), 2_000))
    history = History()
    for number in range(1, 300_001):
        history.add(Record(Step(number, loss=1.0, overflow=number in special)))
    history.finish()
    kept = {r.step.step for r in history.records}
    assert special <= kept
    assert {number - 1 for number in special} <= kept
    assert not history.exact


def test_restart_counts_segments_once() -> None:
    history = History()
    history.restart()
    history.add(Record(Step(1, loss=1.0)))
    history.restart()
    history.restart()
    history.add(Record(Step(2, loss=1.0)))
    assert [r.segment for r in history.records] == [0, 1]
