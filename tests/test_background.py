"""Statistics on a thread of their own: the same rows, in the order asked for, and nothing lost when one fails."""

from __future__ import annotations

import gc
import os
import threading
import time

import numpy as np
import pytest

from ampdebug._background import WORTHWHILE, BackgroundStats
from ampdebug._recorder import Seen, StepRecorder
from ampdebug._stats import Batch, KernelName, StatsTable


def arrays(count: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [(random.standard_normal(WORTHWHILE + i) * 2.0 ** (i % 20)).astype(np.float32) for i in range(count)]


def test_rows_arrive_where_they_were_reserved() -> None:
    table, expected = StatsTable(), StatsTable()
    background = BackgroundStats(table)
    given = arrays(80)  # more than the table has room for at first
    for number, array in enumerate(given):
        background.submit(array, table.reserve())
        if number % 3 == 0:
            table.add(array[:7])
    background.settle()
    for number, array in enumerate(given):
        expected.add(array)
        if number % 3 == 0:
            expected.add(array[:7])
    np.testing.assert_array_equal(table.rows, expected.rows)
    np.testing.assert_array_equal(table.exponents, expected.exponents)


def test_bfloat16_bits_are_told_from_float16() -> None:
    table = StatsTable()
    background = BackgroundStats(table)
    bits = (np.full(WORTHWHILE, 3.0, np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    background.submit(bits, table.reserve(), bfloat16_bits=True)
    background.settle()
    assert table.rows["max"].tolist() == [3.0]


def test_what_cannot_be_measured_is_refused_and_nothing_else_is_lost() -> None:
    table = StatsTable()
    background = BackgroundStats(table)
    with pytest.raises(TypeError, match="int32"):
        background.submit(np.zeros(WORTHWHILE, np.int32), table.reserve())
    background.submit(np.full(WORTHWHILE, 2.0, np.float32), table.reserve())
    background.settle()
    assert table.rows["mean"].tolist()[1:] == [2.0]


def test_an_error_is_raised_where_the_rows_are_asked_for_and_the_next_step_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = StatsTable()
    background = BackgroundStats(table)

    def fail(self: StatsTable, batch: object) -> None:
        raise MemoryError("no room for the rows")

    with monkeypatch.context() as patch:
        patch.setattr(StatsTable, "add_batch", fail)
        background.submit(arrays(1)[0], table.reserve())
        with pytest.raises(MemoryError, match="no room"):
            background.settle()
    table.clear()
    background.submit(np.full(WORTHWHILE, 2.0, np.float32), table.reserve())
    background.settle()
    assert table.rows["mean"].tolist() == [2.0]


@pytest.mark.parametrize("kernel", ["numba", "numpy"])
def test_a_batch_is_measured_like_its_arrays_one_by_one(kernel: KernelName) -> None:
    if kernel == "numba":
        pytest.importorskip("numba")
    random = np.random.default_rng(1)
    given = []
    for number in range(150):  # the table grows more than once within it
        array = random.standard_normal(number * 7) * 2.0 ** (number % 30 - 15)
        array[: number % 5] = [np.nan, np.inf, -np.inf, 0.0, -0.0][: number % 5][: array.size]
        given.append(array.astype((np.float16, np.float32, np.float64)[number % 3]).reshape(7, -1)[:: number % 2 + 1])
    together, expected, batch = StatsTable(kernel=kernel), StatsTable(kernel=kernel), Batch()
    for table in (together, expected):
        table.add(np.ones(3, np.float32))
    with np.errstate(over="ignore"):
        for array in given:
            batch.add(array)
            expected.add(array)
    bits = np.arange(65536, dtype=np.uint16)
    batch.add(bits, bfloat16_bits=True)
    expected.add(bits, bfloat16_bits=True)
    together.add_batch(batch)
    assert batch.elements == sum(array.size for array in given) + 65536
    assert together.rows.tobytes() == expected.rows.tobytes()
    np.testing.assert_array_equal(together.exponents, expected.exponents)


def test_the_thread_is_handed_many_arrays_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    measure = StatsTable.add_batch

    def counted(self: StatsTable, batch: Batch) -> None:
        sizes.append(len(batch))
        measure(self, batch)

    monkeypatch.setattr(StatsTable, "add_batch", counted)
    table = StatsTable()
    background = BackgroundStats(table)
    array = np.ones(WORTHWHILE, np.float32)
    for _ in range(20):
        background.submit(array, table.reserve())
    background.start()
    background.start()
    background.settle()
    assert sizes == [20]


def test_nothing_to_wait_for_starts_no_thread() -> None:
    before = threading.active_count()
    background = BackgroundStats(StatsTable())
    background.settle()
    assert threading.active_count() == before


def test_the_thread_ends_with_its_owner_and_keeps_no_array() -> None:
    table = StatsTable()
    background = BackgroundStats(table)
    array = arrays(1)[0]
    background.submit(array, table.reserve())
    background.settle()
    thread = background._thread
    assert thread is not None
    assert thread.daemon
    assert len(gc.get_referrers(array)) <= 1  # this frame's own, where the interpreter shows frames at all
    del background
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("at_work", ["nothing", "something", "something, and more comes"])
def test_a_forked_process_measures_with_a_thread_of_its_own(at_work: str) -> None:
    table = StatsTable(kernel="numpy")
    background = BackgroundStats(table)
    background.submit(arrays(1)[0], table.reserve())
    background.settle()
    if at_work != "nothing":
        background.submit(arrays(1)[0], table.reserve())
        background.start()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if at_work.endswith("comes"):
                background.submit(arrays(1)[0], table.reserve())
            if at_work != "nothing":
                with pytest.raises(RuntimeError, match="forked while"):
                    background.settle()
            table.clear()
            background.submit(np.full(WORTHWHILE, 2.0, np.float32), table.reserve())
            background.settle()
            status = 0 if table.rows["max"].tolist() == [2.0] else 2
        finally:
            os._exit(status)
    for _ in range(100):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the forked process waits for a thread that it does not have")
    assert status == 0


# --- in the recorder --------------------------------------------------------------------------------------------------


def test_a_lasting_array_may_change_once_the_recorder_has_settled() -> None:
    recorder = StepRecorder(lambda site, shape: 0)
    recorder.begin()
    array = np.ones(WORTHWHILE, np.float32)
    recorder.cell_call("a", "Dense", [], [("", Seen(array, "float32", array.shape, True))])
    recorder.settle()
    array[:] = np.nan
    assert recorder.table.rows["nan"].tolist() == [0]
    assert recorder.births(0.0) == (None, None)


def test_an_array_that_does_not_last_is_measured_at_once() -> None:
    recorder = StepRecorder(lambda site, shape: 0)
    recorder.begin()
    array = np.ones(WORTHWHILE, np.float32)
    recorder.cell_call("a", "Dense", [], [("", Seen(array, "float32", array.shape))])
    array[:] = np.nan
    assert recorder.table.rows["nan"].tolist() == [0]


def test_a_birth_is_found_among_rows_measured_meanwhile() -> None:
    sites: list[object] = []
    recorder = StepRecorder(lambda site, shape: sites.append(site) or len(sites) - 1)  # type: ignore[func-returns-value]
    recorder.begin()
    good, bad = np.ones(WORTHWHILE, np.float32), np.full(WORTHWHILE, np.inf, np.float32)
    for path, given, got in (("a", good, good), ("b", good, bad), ("c", bad, bad)):
        put_in, out = (Seen(x, "float32", x.shape, True) for x in (given, got))
        recorder.cell_call(path, "Dense", [("", put_in)], [("", out)])
    recorder.gradient("w", "b", Seen(bad, "float32", bad.shape, True))
    forward, backward = recorder.births(float("inf"))
    assert forward is not None
    assert (forward.path, forward.inputs_finite) == ("b", True)
    assert backward is not None
    assert backward.path == "w"
    assert recorder.nonfinite_gradients
    assert recorder.gradient_norm == float("inf")


def test_callbacks_from_several_threads_do_not_mix_their_rows() -> None:
    numbers = iter(range(10_000))
    recorder = StepRecorder(lambda site, shape: next(numbers))
    recorder.begin()
    failed: list[BaseException] = []

    def calls(first: int) -> None:
        try:
            for number in range(first, first + 40):
                array = np.full(WORTHWHILE + number, float(number + 1), np.float32)
                small = array[:100].copy()
                recorder.cell_call(
                    f"cell{number}",
                    "Dense",
                    [("", Seen(small, "float32", small.shape))],
                    [("", Seen(array, "float32", array.shape, True))],
                )
        except BaseException as error:  # noqa: BLE001 - a thread of the test: shown below
            failed.append(error)

    threads = [threading.Thread(target=calls, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        recorder.settle()
    for thread in threads:
        thread.join()
    assert failed == []
    rows = recorder.table.rows
    assert len(rows) == len(recorder) == 2 * 4 * 40
    for row, site in zip(rows, recorder.sites, strict=True):
        number = int(site.path.removeprefix("cell"))
        assert row["min"] == row["max"] == number + 1
        assert row["count"] == (100 if site.kind == "input" else WORTHWHILE + number)
