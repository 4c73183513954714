"""The recorder where one tensor comes by at several places and is handed over at one of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ampdebug import _background
from ampdebug._recorder import Seen, StepRecorder
from ampdebug._stats import StatsTable


def recorder() -> StepRecorder:
    sites: dict[Any, int] = {}
    return StepRecorder(lambda site, shape: sites.setdefault(site, len(sites)), {"a": "", "b": ""}, [""])


def whole(array: Any, same: int | None = None, *, lasting: bool = False) -> Seen:
    return Seen(array, array.dtype.name, array.shape, lasting, same)


def without(array: Any, same: int) -> Seen:
    return Seen(None, array.dtype.name, array.shape, same=same)


def expected(*arrays: Any) -> StatsTable:
    table = StatsTable()
    for array in arrays:
        table.add(array)
    return table


def assert_rows(found: StepRecorder, *arrays: Any) -> None:
    table = expected(*arrays)
    assert found.table.rows.tobytes() == table.rows.tobytes()
    assert found.table.exponents.tobytes() == table.exponents.tobytes()


SIZES = [5, _background.WORTHWHILE]


@pytest.mark.parametrize("size", SIZES)
def test_the_row_is_the_others_wherever_it_comes(size: int) -> None:
    rng = np.random.RandomState(0)
    x, y = rng.randn(size).astype(np.float16), rng.randn(size).astype(np.float32)
    seen = recorder()
    seen.begin()
    seen.cell_call("b", "B", [("", without(x, 1))], [("", whole(y, 2, lasting=True))])  # before the one it copies
    seen.cell_call("a", "A", [], [("", whole(x, 1, lasting=True))])
    seen.cell_call("", "Net", [("0", without(y, 2)), ("1", without(x, 1))], [("", without(y, 2))])
    assert_rows(seen, x, y, x, y, x, y)
    assert seen.dtypes.tolist() == [seen.dtypes[2], seen.dtypes[1], seen.dtypes[2], seen.dtypes[1], *seen.dtypes[4:]]
    assert [site.path for site in seen.sites] == ["b", "b", "a", "", "", ""]


@pytest.mark.parametrize("size", SIZES)
def test_the_second_time_is_the_others_second_time(size: int) -> None:
    arrays = [np.full(size, value, np.float32) for value in (1.0, 2.0, 3.0)]
    seen = recorder()
    seen.begin()
    for number, array in enumerate(arrays):
        first, second = ("a", "b") if number % 2 else ("b", "a")  # "b" has it, "a" copies
        for path in (first, second):
            shown = whole(array, 7, lasting=True) if path == "b" else without(array, 7)
            seen.cell_call(path, "Cell", [], [("", shown), ("1", without(array, 7))])
        if number == 1:
            assert len(seen.table) == 8  # looked at in the middle
    assert_rows(seen, *(array for array in arrays for _ in range(4)))


def test_nothing_is_kept_for_the_next_step() -> None:
    seen = recorder()
    for value in (1.0, np.nan, 2.0):
        array = np.full(3, value, np.float32)
        seen.begin()
        seen.cell_call("a", "A", [("", without(array, 3))], [("", whole(array, 3))])
        assert_rows(seen, array, array)


def test_a_copied_row_counts_where_a_birth_is_told() -> None:
    good, bad = np.ones(4, np.float32), np.full(4, np.nan, np.float32)
    seen = recorder()
    seen.begin()
    seen.cell_call("a", "A", [("", whole(good, 1))], [("", whole(bad, 2))])
    seen.cell_call("b", "B", [("", without(bad, 2))], [("", whole(bad))])
    seen.cell_call("", "Net", [("", without(good, 1))], [("", without(bad, 2))])
    forward, _ = seen.births(float("nan"))
    assert forward is not None
    assert (forward.path, forward.inputs_finite) == ("a", True)

    seen.begin()
    seen.cell_call("b", "B", [("", without(bad, 2))], [("", whole(bad, 3))])
    seen.cell_call("a", "A", [], [("", whole(bad, 2))])
    forward, _ = seen.births(float("nan"))
    assert forward is not None
    assert (forward.path, forward.kind) != ("b", "output"), "its input was not finite"
