"""Probes in processes of their own: one that crashes or hangs is a failed probe, not the end of the search."""

from __future__ import annotations

import multiprocessing
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from ampdebug._errors import AmpdebugError, ArgumentError, ProbeError

_STARTING_SECONDS = 300.0


class WorkerExecutor(Executor):
    """Runs calls in worker processes that are kept between calls and replaced when they die.

    The standard library's process pool breaks for good with the first worker that dies, and cannot end a call that
    hangs. Here such a call raises :class:`ProbeError` from its future, and the next one gets a new process.

    Args:
        workers: How many processes.
        timeout: Seconds that one call may take; None for no limit. What a new process takes to start is not counted.
        replace_after: Exceptions of a call after which its process gets no further call: it may be damaged.
        initializer: Called first in each process; picklable.

    Raises:
        ArgumentError: An argument breaks a rule.
    """

    def __init__(
        self,
        workers: int = 1,
        *,
        timeout: float | None = None,
        replace_after: tuple[type[BaseException], ...] = (),
        initializer: Callable[[], None] | None = None,
    ) -> None:
        if workers < 1:
            raise ArgumentError(f"workers={workers}: must be at least 1")
        if timeout is not None and not timeout > 0:
            raise ArgumentError(f"timeout={timeout}: must be above 0 seconds; leave it out for no limit")
        self._timeout, self._replace_after = timeout, replace_after
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._workers = [_Worker(initializer) for _ in range(workers)]
        self._threads = [threading.Thread(target=self._serve, args=(worker,), daemon=True) for worker in self._workers]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Schedules a call. Function, arguments and result must be picklable."""
        with self._lock:
            if self._closed:
                raise RuntimeError("cannot schedule calls after shutdown")
            future: Future[Any] = Future()
            self._tasks.put(_Task(future, fn, args, kwargs))
            return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the processes; with ``cancel_futures`` what runs is killed and what waits is cancelled."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if cancel_futures:
            while not self._tasks.empty():
                task = self._tasks.get()
                if task is not None:
                    task.future.cancel()
            for worker in self._workers:
                worker.kill()
        for _ in self._threads:
            self._tasks.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _serve(self, worker: _Worker) -> None:
        while (task := self._tasks.get()) is not None:
            if task.future.set_running_or_notify_cancel():
                try:
                    task.future.set_result(worker.call(task.call, self._timeout))
                except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to who waits for the future
                    if isinstance(error, self._replace_after):
                        worker.kill()
                    task.future.set_exception(error)
        worker.close()


class _Task:
    __slots__ = ("call", "future")

    def __init__(self, future: Future[Any], fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.future, self.call = future, (fn, args, kwargs)


class _Worker:
    """One process and the pipe to it; used by one thread, but killed by any."""

    def __init__(self, initializer: Callable[[], None] | None) -> None:
        self._initializer = initializer
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None

    def call(self, call: tuple[Callable[..., Any], Any, Any], timeout: float | None) -> Any:
        """Makes one call in the process, which is started if it does not run.

        Raises:
            ProbeError: The process died or took too long.
        """
        pipe = self._started()
        begin = time.monotonic()
        try:
            pipe.send(call)
            # Unpickling imports what the call needs, MindSpore for one: that belongs to starting, not to the call.
            if not pipe.poll(_STARTING_SECONDS):
                self.kill()
                raise ProbeError(f"the probe's imports took longer than {_STARTING_SECONDS:g} s")
            loaded, problem = pipe.recv()
            if not loaded:
                raise problem
            if not pipe.poll(timeout):
                self.kill()
                raise ProbeError(f"the probe took longer than {timeout:g} s and was ended")
            succeeded, value = pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            code = self.kill()
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            raise ProbeError(f"the worker process died with {how} after {time.monotonic() - begin:.1f} s") from error
        if succeeded:
            return value
        raise value

    def kill(self) -> int | None:
        """Ends the process and returns its exit code, None where there is none.

        The pipe stays open: whoever reads it finds its end, where a pipe closed by another thread would be an error.
        """
        process, self._process = self._process, None
        if process is None:
            return None
        process.join(1.0)  # one that died by itself has its own exit code
        if process.exitcode is None:
            process.kill()
            process.join()
        return process.exitcode

    def close(self) -> None:
        """Ends the process and closes the pipe to it."""
        self.kill()
        if self._pipe is not None:
            self._pipe.close()

    def _started(self) -> Connection:
        if self._process is not None and self._process.is_alive() and self._pipe is not None:
            return self._pipe
        self.close()
        # Never forked: a fork of a process that has run MindSpore has its threads' locks without the threads.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, self._initializer), daemon=True)
        process.start()
        theirs.close()
        self._process, self._pipe = process, ours
        try:
            ready = ours.poll(_STARTING_SECONDS) and ours.recv() == "ready"
        except EOFError:
            raise ProbeError(f"a worker process ended while it started, with exit code {self.kill()}") from None
        if not ready:
            self.kill()
            raise ProbeError(f"a worker process did not start within {_STARTING_SECONDS:g} s")
        return ours


def _work(pipe: Connection, initializer: Callable[[], None] | None) -> None:
    """The process: one call after the other until the pipe closes."""
    if initializer is not None:
        initializer()
    pipe.send("ready")
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except (EOFError, OSError):
            return
        except Exception as error:  # noqa: BLE001 - what cannot be unpickled here: handed to the caller
            pipe.send((False, AmpdebugError(f"the probe cannot be loaded in a worker process: {error!r}")))
            continue
        pipe.send((True, None))
        try:
            answer: tuple[bool, Any] = (True, function(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - handed to the caller as it is
            answer = (False, error)
        try:
            pipe.send(answer)
        except Exception as error:  # noqa: BLE001 - a result that cannot be pickled must not hang the caller
            pipe.send((False, AmpdebugError(f"the probe's answer cannot be sent back: {error!r}")))
