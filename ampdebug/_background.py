"""Statistics on a thread of their own, while the network runs on.

The compiled statistics do not hold the GIL, so they cost the caller next to nothing where a core is free. But to begin
with an array the thread needs the GIL, and it waits for that as long as the caller runs Python code: so it is given
many arrays at a time. This is only for arrays that nobody writes to before :meth:`BackgroundStats.settle`.
"""

from __future__ import annotations

import queue
import threading
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ampdebug._stats import Batch, StatsTable

WORTHWHILE = 4096
"""Elements from which handing an array over costs less than measuring it (some 4 us)."""

_TOGETHER = 1 << 19
"""Elements that are handed over at a time, some 200 us of work."""


class _Task(NamedTuple):
    """Arrays to be measured, and the rows that they belong in."""

    batch: Batch
    rows: list[int]


class _Results:
    """What one thread has measured."""

    def __init__(self) -> None:
        self._table = StatsTable()
        self._rows: list[int] = []
        self._errors: list[Exception] = []
        self.tasks = 0

    def measure(self, task: _Task) -> None:
        try:
            self._table.add_batch(task.batch)
            self._rows += task.rows
        except Exception as error:  # noqa: BLE001 - belongs to who asked, and is raised there
            self._errors.append(error)
        self.tasks += 1

    def error(self) -> Exception | None:
        return self._errors[0] if self._errors else None

    def hand_over(self, table: StatsTable) -> None:
        table.put(np.asarray(self._rows, np.intp), self._table)

    def clear(self) -> None:
        self._table.clear()
        self._rows.clear()
        self._errors.clear()
        self.tasks = 0


class _Shared:
    """What the thread and its owner both hold; the owner may go while the thread is at work."""

    def __init__(self) -> None:
        self.tasks: queue.SimpleQueue[_Task | threading.Event | None] = queue.SimpleQueue()
        self.results = _Results()


class BackgroundStats:
    """Measures arrays for a :class:`StatsTable`, whose rows were reserved for them.

    Args:
        table: Where the rows go. Only its owner's thread touches it: rows arrive there in :meth:`settle`.

    The thread starts with the first arrays and ends with the process, or with the last reference to this object.
    """

    def __init__(self, table: StatsTable) -> None:
        self._table = table
        self._waiting = _Task(Batch(), [])
        self._tasks = 0
        self._shared = _Shared()
        self._own = _Results()
        self._thread: threading.Thread | None = None

    def submit(self, array: npt.NDArray[np.generic], row: int, *, bfloat16_bits: bool = False) -> None:
        """Measures an array some time before :meth:`settle` returns.

        Args:
            array: As for ``StatsTable.add``; it must keep its values until then.
            row: The row of the table that its statistics belong in.
            bfloat16_bits: As for ``StatsTable.add``.

        Raises:
            TypeError: As for ``StatsTable.add``.
        """
        self._waiting.batch.add(array, bfloat16_bits=bfloat16_bits)
        self._waiting.rows.append(row)
        if self._waiting.batch.elements >= _TOGETHER:
            self.start()

    def start(self) -> None:
        """Hands over what was submitted: the caller has no more for now.

        Raises:
            RuntimeError: The thread had something at work that did not come along into this forked process.
        """
        if not self._waiting.rows:
            return
        if not self._alive():
            self._refuse_in_a_fork()
            self._shared = _Shared()
            self._thread = threading.Thread(target=_work, args=(self._shared,), name="ampdebug-statistics", daemon=True)
            self._thread.start()
        self._tasks += 1
        self._shared.tasks.put(self._waiting)
        self._waiting = _Task(Batch(), [])

    def settle(self) -> None:
        """Measures what the thread has not begun with, waits for the rest, and puts the rows into the table.

        Raises:
            RuntimeError: As for :meth:`start`.
            Exception: What measuring some of the arrays raised; none of the rows is in the table then.
        """
        self.start()
        if not self._tasks:
            return
        self._refuse_in_a_fork()
        while True:
            try:
                task = self._shared.tasks.get_nowait()
            except queue.Empty:
                break
            assert isinstance(task, _Task), "nothing else is in the queue now"
            self._own.measure(task)
        shared = self._shared.results
        if self._own.tasks + shared.tasks < self._tasks:
            done = threading.Event()
            self._shared.tasks.put(done)
            done.wait()
        self._tasks = 0
        try:
            error = shared.error() or self._own.error()
            if error is not None:
                raise error
            for results in (shared, self._own):
                results.hand_over(self._table)
        finally:
            shared.clear()
            self._own.clear()

    def _refuse_in_a_fork(self) -> None:
        if self._tasks and not self._alive():
            self._tasks, self._waiting = 0, _Task(Batch(), [])
            raise RuntimeError("the process was forked while arrays were being measured; only the parent has them")

    def _alive(self) -> bool:
        # A forked process has no thread of its parent's.
        return self._thread is not None and self._thread.is_alive()

    def __del__(self) -> None:
        self._shared.tasks.put(None)


def _work(shared: _Shared) -> None:
    # A function, not a method: the thread must not keep alive what is to end it.
    while (task := shared.tasks.get()) is not None:
        if isinstance(task, threading.Event):
            task.set()
            continue
        shared.results.measure(task)
        del task  # the arrays, which may be large, are not kept until the next ones come
