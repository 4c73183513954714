"""Worker processes that crash, hang and fail."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ampdebug import _workers
from ampdebug._errors import AmpdebugError, ArgumentError, ProbeError
from ampdebug._journal import Journal
from ampdebug._search import find_minimal_set
from ampdebug._workers import WorkerExecutor


def process_id() -> int:
    return os.getpid()


def crash(number: int) -> None:
    os.kill(os.getpid(), number)


def leave(code: int) -> None:
    os._exit(code)


def hang() -> None:
    time.sleep(600)


def fail(text: str) -> None:
    raise ValueError(text)


def unpicklable() -> Any:
    return threading.Lock()


def mark() -> None:
    os.environ["AMPDEBUG_MARK"] = "1"


def marked() -> str | None:
    return os.environ.get("AMPDEBUG_MARK")


def test_a_process_is_kept_between_calls_and_is_not_ours() -> None:
    with WorkerExecutor() as executor:
        ids = {executor.submit(process_id).result() for _ in range(3)}
    assert len(ids) == 1
    assert os.getpid() not in ids


@pytest.mark.parametrize(
    ("function", "argument", "message"),
    [(crash, signal.SIGSEGV, "died with signal 11"), (leave, 7, "died with exit code 7")],
)
def test_a_crash_is_an_error_of_that_call_only(function: Callable[[int], None], argument: int, message: str) -> None:
    with WorkerExecutor() as executor:
        before = executor.submit(process_id).result()
        with pytest.raises(ProbeError, match=message):
            executor.submit(function, argument).result()
        assert executor.submit(process_id).result() != before


def test_a_call_that_hangs_is_ended() -> None:
    with WorkerExecutor(timeout=0.5) as executor:
        child = executor.submit(process_id).result()
        with pytest.raises(ProbeError, match=r"longer than 0\.5 s"):
            executor.submit(hang).result()
        assert executor.submit(process_id).result() != child
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_each_process_is_prepared_first() -> None:
    with WorkerExecutor(initializer=mark) as executor:
        assert executor.submit(marked).result() == "1"
        with pytest.raises(ProbeError):
            executor.submit(leave, 7).result()
        assert executor.submit(marked).result() == "1", "the one that took its place, too"
    assert marked() is None
    message = "ended while it started, with exit code 3"
    with WorkerExecutor(initializer=hang_up) as executor, pytest.raises(ProbeError, match=message):
        executor.submit(marked).result()


def hang_up() -> None:
    os._exit(3)


class Elsewhere:
    """Can be pickled, but not unpickled in another process."""

    def __reduce__(self) -> Any:
        return (leave_unless, (os.getpid(),))


def leave_unless(process: int) -> Elsewhere:
    if os.getpid() != process:
        raise ImportError("not on this machine")
    return Elsewhere()


def test_what_cannot_be_loaded_in_the_process_is_said() -> None:
    with WorkerExecutor() as executor, pytest.raises(AmpdebugError, match=r"cannot be loaded .*not on this machine"):
        executor.submit(print, Elsewhere()).result()


def test_an_exception_of_the_call_comes_back_as_it_is() -> None:
    with WorkerExecutor() as executor:
        child = executor.submit(process_id).result()
        with pytest.raises(ValueError, match=r"^no kernel$"):
            executor.submit(fail, "no kernel").result()
        with pytest.raises(AmpdebugError, match="cannot be sent back"):
            executor.submit(unpicklable).result()
        assert executor.submit(process_id).result() == child


def test_a_damaged_process_can_be_replaced() -> None:
    with WorkerExecutor(replace_after=(ValueError,)) as executor:
        child = executor.submit(process_id).result()
        with pytest.raises(ValueError, match="no kernel"):
            executor.submit(fail, "no kernel").result()
        assert executor.submit(process_id).result() != child


def test_shutdown_ends_what_runs_and_cancels_what_waits() -> None:
    executor = WorkerExecutor()
    child = executor.submit(process_id).result()
    running, waiting = executor.submit(hang), executor.submit(process_id)
    while not running.running():
        time.sleep(0.01)
    executor.shutdown(cancel_futures=True)
    assert waiting.cancelled()
    with pytest.raises(ProbeError):
        running.result(timeout=10)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(process_id)
    executor.shutdown()


class KilledBetween:
    """A pipe whose worker another thread kills after the answer was waited for and before it is read."""

    def __init__(self, worker: _workers._Worker, pipe: Any) -> None:
        self.worker, self.pipe, self.polls = worker, pipe, 0

    def poll(self, timeout: float | None) -> bool:
        self.polls += 1
        if self.polls < 2:
            return bool(self.pipe.poll(timeout))
        killer = threading.Thread(target=self.worker.kill)
        killer.start()
        killer.join()
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pipe, name)


def test_a_worker_that_another_thread_kills_is_a_failed_probe() -> None:
    worker = _workers._Worker(None)
    assert isinstance(worker.call((process_id, (), {}), 60), int)
    worker._pipe = KilledBetween(worker, worker._pipe)  # type: ignore[assignment]
    with pytest.raises(ProbeError, match="the worker process died"):
        worker.call((hang, (), {}), 60)
    assert isinstance(worker.call((process_id, (), {}), 60), int)
    worker.close()


class Deadly:
    """Needs 3 and 11. With 5 in it the process dies, with 6 it hangs. Every call is noted in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, items: frozenset[int]) -> bool:
        (self.folder / f"{time.time_ns()}-{os.getpid()}").touch()
        if 5 in items:
            os.kill(os.getpid(), signal.SIGSEGV)
        if 6 in items:
            hang()
        return {3, 11} <= items


@pytest.mark.parametrize("workers", [1, 2])
def test_a_search_goes_on_over_dead_workers(tmp_path: Path, workers: int) -> None:
    ranking = [3, 11, 0, 5, 6, 1]
    with WorkerExecutor(workers, timeout=2.0) as executor:
        result = find_minimal_set(ranking, Deadly(tmp_path), executor=executor, workers=workers, failures=(ProbeError,))
    assert result.items == (3, 11)
    assert result.verified
    assert len(list(tmp_path.iterdir())) >= result.probes


def test_a_crash_is_a_failed_probe_with_its_reason(tmp_path: Path) -> None:
    with WorkerExecutor(timeout=1.0) as executor:
        result = find_minimal_set([5, 3, 11], Deadly(tmp_path), executor=executor, failures=(ProbeError,))
    assert result.status == "nothing-sufficient"  # 5 stands first in the ranking and in every prefix
    reasons = {probe.outcome.reason for probe in result.history}
    assert any("died with signal 11" in reason for reason in reasons)
    with WorkerExecutor(timeout=1.0) as executor, pytest.raises(ProbeError, match="died with signal 11"):
        find_minimal_set([5, 3, 11], Deadly(tmp_path), executor=executor)


@pytest.mark.parametrize("pool", [ThreadPoolExecutor, ProcessPoolExecutor])
def test_the_pools_of_the_standard_library(pool: Any) -> None:
    options = {} if pool is ThreadPoolExecutor else {"mp_context": multiprocessing.get_context("spawn")}
    with pool(2, **options) as executor:
        result = find_minimal_set(range(12), needs_3_and_7, executor=executor, workers=2)
    assert (result.items, result.verified) == ((3, 7), True)


def needs_3_and_7(items: frozenset[int]) -> bool:
    return {3, 7} <= items


def test_a_pool_that_breaks_ends_the_search_and_no_probe_is_called_failed(tmp_path: Path) -> None:
    path, keys = tmp_path / "journal", [str(item) for item in (3, 11, 5)]
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor,
        Journal(path, identity={}, keys=keys) as journal,
        pytest.raises(AmpdebugError, match=r"the executor broke after 2 probes .*workers=.*2 answers so far are in"),
    ):
        find_minimal_set(
            [3, 5, 11], Deadly(tmp_path), executor=executor, journal=journal, failures=(ProbeError, RuntimeError)
        )
    with Journal(path, identity={}, keys=keys) as journal:
        assert [sorted(entry.keys) for entry in journal.entries] == [[], ["3"]]


def test_a_worker_that_another_executor_reports_dead_is_a_failed_probe() -> None:
    class KilledWorker(Exception):
        """As Dask says it."""

    def probe(items: frozenset[int]) -> bool:
        if 5 in items:
            raise KilledWorker("probe-1 died on worker tcp://127.0.0.1:1")
        return 3 in items

    with ThreadPoolExecutor(1) as executor:
        result = find_minimal_set([5, 3], probe, executor=executor, failures=(ProbeError,))
        assert [probe.outcome.reason for probe in result.history if probe.outcome.reason] == [
            "KilledWorker: probe-1 died on worker tcp://127.0.0.1:1"
        ] * 2
        with pytest.raises(KilledWorker):
            find_minimal_set([5, 3], probe, executor=executor)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ArgumentError, match="workers=0: must be at least 1"):
        WorkerExecutor(0)
    with pytest.raises(ArgumentError, match="timeout=0: must be above 0 seconds"):
        WorkerExecutor(timeout=0)
