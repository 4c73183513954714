"""``ampdebug run``: an unmodified training script, watched.

The script runs as ``__main__`` with its own arguments, as under ``python train.py``. Where it calls ``Model.train`` or
``Model.fit``, an :class:`AMPMonitor` is put first among its callbacks; where it calls a train cell by itself, that cell
is watched from its first call on. A network trained a second time goes on in its directory; a second network gets
``OUT-2``, the next ``OUT-3``.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
import types
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mindspore import nn
from mindspore.train import Model

from ampdebug._errors import ArgumentError, NoObservationsError, RunExistsError
from ampdebug.hooks._cells import is_train_cell
from ampdebug.hooks._environment import rank_and_size
from ampdebug.hooks._flight import KEEP_BYTES, keep_options
from ampdebug.hooks._monitor import AMPMonitor
from ampdebug.hooks._watch import Watch


def run_script(
    path: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    out: str | os.PathLike[str],
    every: int = 1,
    keep_bad_steps: int = 0,
) -> int:
    """Runs a training script and records what it trains.

    An exception of the script is printed as Python prints it; what was recorded until then stays readable.

    Args:
        path: The script.
        arguments: Its arguments, ``sys.argv[1:]`` for it.
        out: Directory of the run. A second network goes to ``OUT-2`` and so on.
        every: As for :class:`AMPMonitor`.
        keep_bad_steps: As for :class:`AMPMonitor`, for each network.

    Returns:
        The script's own exit status: what it gave to ``sys.exit``, 1 after an exception, 130 after Ctrl-C.

    Raises:
        ArgumentError: There is no such script.
        RunExistsError: ``out`` holds a run already; the script was not started.
        NoObservationsError: The script ended well and neither ``Model.train`` nor a train cell ran in it.
    """
    if not os.path.isfile(path):
        raise ArgumentError(f"script {os.fspath(path)!r}: no such file; give the path of a Python training script")
    out = Path(out)
    rank, _ = rank_and_size()
    taken = out / f"ampdebug-rank{rank}.sqlite"
    if taken.exists():
        raise RunExistsError(f"{taken} exists: the script was not started. Give another directory: --out DIR")
    keep_options(keep_bad_steps, 1, KEEP_BYTES)  # a wrong number is said before the script starts
    watched = _Watched(out, every, keep_bad_steps)
    with ExitStack() as stack:
        watched.patch(stack)
        for name, own in (("argv", sys.argv), ("path", sys.path)):
            stack.callback(setattr, sys, name, own)
        sys.argv = [os.path.abspath(path), *arguments]  # runpy sets the first anyway
        # Python puts the folder of the script first, and resolves links to find it.
        sys.path = [os.path.dirname(os.path.realpath(path)), *sys.path]
        status = _run(os.path.abspath(path))
        watched.close(failed=status != 0)
    sys.stdout.flush()
    for directory in watched.directories:
        if directory.is_dir():
            sys.stderr.write(f"ampdebug: recorded in {directory}; to see it: ampdebug report {directory}\n")
    if status == 0 and not watched.directories and not watched.own_monitors:
        raise NoObservationsError(
            f"{os.fspath(path)} ran, but neither Model.train, Model.fit nor a train cell (a cell with .network and "
            ".optimizer) was called in it, so nothing was recorded. In a functional loop (value_and_grad) put the loop "
            "into `with ampdebug.watch(net, out=..., optimizer=...) as run:` and end each step with "
            "run.step(loss=loss)"
        )
    return status


def _run(script: str) -> int:
    """Runs the file as ``__main__`` and returns the status Python would exit with."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return int(leaving.code or 0)
        sys.stderr.write(f"{leaving.code}\n")
        return 1
    except BaseException as error:  # noqa: BLE001 - shown just as Python shows it, with its exit status
        sys.stdout.flush()
        sys.excepthook(type(error), error.with_traceback(_from_script_on(error.__traceback__, script)), None)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _from_script_on(traceback: types.TracebackType | None, script: str) -> types.TracebackType | None:
    # Above the script's own frames stand only ours and those of runpy. None (a SyntaxError in it): it never ran.
    while traceback is not None and traceback.tb_frame.f_code.co_filename != script:
        traceback = traceback.tb_next
    return traceback


class _Watched:
    """What is watched in the script.

    Attributes:
        directories: Where it is recorded, one for each network.
        own_monitors: The script brought an :class:`AMPMonitor` of its own.
    """

    def __init__(self, out: Path, every: int, keep_bad_steps: int) -> None:
        self.directories: list[Path] = []
        self.own_monitors = False
        self._out = out
        self._every = every
        self._keep_bad_steps = keep_bad_steps
        self._training_by_model = 0
        self._networks: weakref.WeakKeyDictionary[Any, Path] = weakref.WeakKeyDictionary()
        self._watches: list[Watch] = []
        self._cells: weakref.WeakSet[Any] = weakref.WeakSet()

    def patch(self, stack: ExitStack) -> None:
        """Replaces the two entry points until ``stack`` is closed."""
        train = Model._train
        call = nn.Cell.__call__

        @functools.wraps(train)
        def watched_train(model: Any, epoch: Any, data: Any, callbacks: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._training_by_model += 1
            try:
                return train(model, epoch, data, self._with_monitor(model, callbacks), *args, **kwargs)
            finally:
                self._training_by_model -= 1

        @functools.wraps(call)
        def watched_call(cell: Any, *args: Any, **kwargs: Any) -> Any:
            # Asked at every call of every cell: the cheapest question first.
            if "optimizer" in cell._cells and not self._training_by_model and cell not in self._cells:
                self._look_at(cell)
            return call(cell, *args, **kwargs)

        for owner, name, new in ((Model, "_train", watched_train), (nn.Cell, "__call__", watched_call)):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, new)

    def _with_monitor(self, model: Any, callbacks: Any) -> list[Any]:
        """The script's callbacks with a monitor before them, unless it has one."""
        given = list(callbacks) if isinstance(callbacks, (list, tuple)) else [] if callbacks is None else [callbacks]
        if any(isinstance(callback, AMPMonitor) for callback in given):
            self.own_monitors = True
            return given
        again = self._networks.get(model._network)
        directory = again or self._next_directory()
        self._networks[model._network] = directory
        append = again is not None
        return [AMPMonitor(directory, every=self._every, append=append, keep_bad_steps=self._keep_bad_steps), *given]

    def _look_at(self, cell: Any) -> None:
        self._cells.add(cell)
        if not is_train_cell(cell):
            return
        self._cells.update(inner for _, inner in cell.cells_and_names())  # a train cell inside is a part of this one
        keep = keep_options(self._keep_bad_steps, 1, KEEP_BYTES)
        watch = Watch(cell, self._next_directory(), silence="warn", every=self._every, keep=keep)
        watch.__enter__()
        self._watches.append(watch)

    def _next_directory(self) -> Path:
        number = len(self.directories) + 1
        self.directories.append(self._out if number == 1 else self._out.with_name(f"{self._out.name}-{number}"))
        return self.directories[-1]

    def close(self, *, failed: bool) -> None:
        """Ends all watches that calls of train cells began."""
        error = RuntimeError("the script failed") if failed else None
        while self._watches:
            self._watches.pop().__exit__(type(error) if error else None, error, None)
