"""Statistics on a thread of their own, while the network runs on.

The compiled statistics do not hold the GIL, so they cost the caller next to nothing where a core is free. But to begin
with an array the thread needs the GIL, and it waits for that as long as the caller runs Python code: so it is given
many arrays at a time. This is only for arrays that nobody writes to before :meth:`BackgroundStats.settle`.
"""

from __future__ import annotations

import queue
import threading

import numpy as np
import numpy.typing as npt

from ampdebug._stats import Batch, StatsTable

WORTHWHILE = 4096
"""Elements from which handing an array over costs less than measuring it (some 4 us)."""

_TOGETHER = 1 << 18
"""Elements from which a thread with nothing to do is woken (some 200 us of work)."""


class _Shared:
    """What the thread and its owner both hold; the owner may go while the thread is at work."""

    def __init__(self) -> None:
        self.tasks: queue.SimpleQueue[Batch | threading.Event | None] = queue.SimpleQueue()
        self.measured = StatsTable()
        self.errors: list[Exception] = []
        self.batches_done = 0


class BackgroundStats:
    """Measures arrays for a :class:`StatsTable`, whose rows were reserved for them.

    Args:
        table: Where the rows go. Only its owner's thread touches it: rows arrive there in :meth:`settle`.

    The thread starts with the first arrays and ends with the process, or with the last reference to this object.
    """

    def __init__(self, table: StatsTable) -> None:
        self._table = table
        self._rows: list[int] = []
        self._waiting = Batch()
        self._batches = 0
        self._shared = _Shared()
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
        self._waiting.add(array, bfloat16_bits=bfloat16_bits)
        self._rows.append(row)
        if self._waiting.elements >= _TOGETHER and self._batches == self._shared.batches_done:
            self.start()

    def start(self) -> None:
        """Has the thread begin with what was submitted: the caller has no more for now."""
        if not self._waiting:
            return
        if self._thread is None or not self._thread.is_alive():  # a forked process has no thread of its parent's
            self._shared, self._batches = _Shared(), 0
            self._thread = threading.Thread(target=_work, args=(self._shared,), name="ampdebug-statistics", daemon=True)
            self._thread.start()
        self._batches += 1
        self._shared.tasks.put(self._waiting)
        self._waiting = Batch()

    def settle(self) -> None:
        """Waits until all is measured and puts the rows into the table.

        Raises:
            Exception: What measuring one of the arrays raised; none of the rows is in the table then.
        """
        if not self._rows:
            return
        self.start()
        if self._thread is None or not self._thread.is_alive():
            self._rows = []
            raise RuntimeError("the process was forked while arrays were being measured; only the parent has them")
        done = threading.Event()
        self._shared.tasks.put(done)
        done.wait()
        rows, self._rows = self._rows, []
        shared = self._shared
        errors, shared.errors = shared.errors, []
        try:
            if errors:
                raise errors[0]
            self._table.put(np.asarray(rows), shared.measured)
        finally:
            shared.measured.clear()

    def __del__(self) -> None:
        self._shared.tasks.put(None)


def _work(shared: _Shared) -> None:
    # A function, not a method: the thread must not keep alive what is to end it.
    while (task := shared.tasks.get()) is not None:
        if isinstance(task, threading.Event):
            task.set()
            continue
        try:
            shared.measured.add_batch(task)
        except Exception as error:  # noqa: BLE001 - belongs to who asked, and is raised there
            shared.errors.append(error)
        shared.batches_done += 1
        del task  # the arrays, which may be large, are not kept until the next ones come
