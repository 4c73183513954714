"""Statistics on a thread of their own, while the network runs on.

The compiled statistics do not hold the GIL, so they cost the caller next to nothing where a core is free. This is only
for arrays that nobody writes to before :meth:`BackgroundStats.settle`.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from ampdebug._stats import StatsTable

WORTHWHILE = 32_768
"""Elements from which handing an array over costs less than measuring it (some 10 us)."""

_Task = tuple[npt.NDArray[Any], bool]


class BackgroundStats:
    """Measures arrays for a :class:`StatsTable`, whose rows were reserved for them.

    Args:
        table: Where the rows go. Only its owner's thread touches it: rows arrive there in :meth:`settle`.

    The thread starts with the first array and ends with the process, or with the last reference to this object.
    """

    def __init__(self, table: StatsTable) -> None:
        self._table = table
        self._rows: list[int] = []
        self._measured = StatsTable()
        self._errors: list[Exception] = []
        self._tasks: queue.SimpleQueue[_Task | threading.Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, array: npt.NDArray[Any], row: int, *, bfloat16_bits: bool = False) -> None:
        """Measures an array some time before :meth:`settle` returns.

        Args:
            array: As for ``StatsTable.add``; it must keep its values until then.
            row: The row of the table that its statistics belong in.
            bfloat16_bits: As for ``StatsTable.add``.
        """
        if self._thread is None or not self._thread.is_alive():  # a forked process has no thread of its parent's
            self._tasks = queue.SimpleQueue()
            arguments = (self._tasks, self._measured, self._errors)
            self._thread = threading.Thread(target=_work, args=arguments, name="ampdebug-statistics", daemon=True)
            self._thread.start()
        self._rows.append(row)
        self._tasks.put((array, bfloat16_bits))

    def settle(self) -> None:
        """Waits until all is measured and puts the rows into the table.

        Raises:
            Exception: What measuring one of the arrays raised; none of the rows is in the table then.
        """
        if not self._rows:
            return
        done = threading.Event()
        self._tasks.put(done)
        done.wait()
        rows, self._rows = self._rows, []
        errors = self._errors[:]
        self._errors.clear()
        try:
            if errors:
                raise errors[0]
            self._table.put(np.asarray(rows), self._measured)
        finally:
            self._measured.clear()

    def __del__(self) -> None:
        self._tasks.put(None)


def _work(
    tasks: queue.SimpleQueue[_Task | threading.Event | None], measured: StatsTable, errors: list[Exception]
) -> None:
    # A function, not a method: the thread must not keep alive what is to end it.
    while (task := tasks.get()) is not None:
        if isinstance(task, threading.Event):
            task.set()
            continue
        try:
            measured.add(task[0], bfloat16_bits=task[1])
        except Exception as error:  # noqa: BLE001 - belongs to who asked, and is raised there
            errors.append(error)
        del task  # the array, which may be large, is not kept until the next one comes
