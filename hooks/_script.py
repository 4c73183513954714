"""``ampdebug run``: an unmodified training script, watched.

The script runs as ``__main__`` with its own arguments. Where it calls ``Model.train`` or ``Model.fit``, an
:class:`AMPMonitor` is put first among its callbacks; where it calls a train cell by itself, that cell is watched from its
first call on.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mindspore import nn
from mindspore.train import Model

from ampdebug._errors import ArgumentError, NoObservationsError
from ampdebug.hooks._cells import is_train_cell
from ampdebug.hooks._monitor import AMPMonitor
from ampdebug.hooks._watch import Watch


def run_script(
    path: str | os.PathLike[str], arguments: Sequence[str] = (), *, out: str | os.PathLike[str], every: int = 1
) -> int:
    """Runs a training script and records what it trains.

    Args:
        path: The script.
        arguments: Its arguments, ``sys.argv[1:]`` for it.
        out: Directory of the run. A second network trained by train cells goes to ``OUT-2`` and so on.
        every: As for :class:`AMPMonitor`.

    Returns:
        The script's own exit status.

    Raises:
        ArgumentError: There is no such script.
        NoObservationsError: The script ended well and neither ``Model.train`` nor a train cell ran in it.
    """
    script = Path(path)
    if not script.is_file():
        raise ArgumentError(f"script {str(path)!r}: no such file; give the path of a Python training script")
    watched = _Watched(Path(out), every)
    argv, sys_path = list(sys.argv), list(sys.path)
    status = 0
    with ExitStack() as stack:
        stack.callback(watched.close)
        watched.patch(stack)
        stack.callback(setattr, sys, "argv", argv)
        stack.callback(sys.path.__setitem__, slice(None), sys_path)
        sys.argv = [str(script), *arguments]
        sys.path.insert(0, str(script.resolve().parent))
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
            if isinstance(leaving.code, str):
                print(leaving.code, file=sys.stderr)
    if status == 0 and not watched.used:
        raise NoObservationsError(
            f"{script} ran, but neither Model.train nor a train cell was called in it, so nothing was recorded. In a "
            "functional loop (value_and_grad) put the loop into `with ampdebug.watch(net, ...)`"
        )
    return status


class _Watched:
    """What was watched in the script."""

    def __init__(self, out: Path, every: int) -> None:
        self.out = out
        self.every = every
        self.used = 0
        self._in_model = 0
        self._model_runs = 0
        self._watches: list[Watch] = []
        self._cells: dict[int, Any] = {}

    def patch(self, stack: ExitStack) -> None:
        """Replaces the two entry points until ``stack`` is closed."""
        train = Model._train
        call = nn.Cell.__call__

        @functools.wraps(train)
        def watched_train(
            model: Any, epoch: Any, train_dataset: Any, callbacks: Any = None, *args: Any, **kw: Any
        ) -> Any:
            given = (
                list(callbacks) if isinstance(callbacks, (list, tuple)) else [] if callbacks is None else [callbacks]
            )
            if not any(isinstance(callback, AMPMonitor) for callback in given):
                monitor = AMPMonitor(self.out, every=self.every, append=self._model_runs > 0)
                self._model_runs += 1
                given.insert(0, monitor)
            self.used += 1
            self._in_model += 1
            try:
                return train(model, epoch, train_dataset, given, *args, **kw)
            finally:
                self._in_model -= 1

        @functools.wraps(call)
        def watched_call(cell: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._in_model and id(cell) not in self._cells and is_train_cell(cell) and cell.training:
                self._watch(cell)
            return call(cell, *args, **kwargs)

        for owner, name, new in ((Model, "_train", watched_train), (nn.Cell, "__call__", watched_call)):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, new)

    def _watch(self, cell: Any) -> None:
        self._cells[id(cell)] = cell  # kept, so that its id stays its own
        if any(is_train_cell(other) and other is not cell and cell in _inside(other) for other in self._cells.values()):
            return
        self.used += 1
        number = self.used
        watch = Watch(cell, self.out if number == 1 else Path(f"{self.out}-{number}"), every=self.every)
        watch.__enter__()
        self._watches.append(watch)

    def close(self) -> None:
        """Ends all watches that train cells began."""
        failed = sys.exc_info()
        while self._watches:
            self._watches.pop().__exit__(*failed)


def _inside(cell: Any) -> list[Any]:
    return [inner for _, inner in cell.cells_and_names()]
