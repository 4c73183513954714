"""The live TensorBoard files of a session."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ampdebug._recorder import StepRecorder
from ampdebug._records import Cell, Step
from ampdebug.report.tensorboard import TensorBoardSink


class LiveTensorBoard:
    """Hands each step of a session to a :class:`TensorBoardSink`.

    Args:
        logdir: Directory of the event files; with several ranks each has a folder in it.
        rank: This rank.
        append: Go on in a directory that holds event files.
    """

    def __init__(self, logdir: str | os.PathLike[str], *, rank: int, append: bool) -> None:
        self._sink = TensorBoardSink(Path(logdir) / f"rank{rank}" if rank else logdir, append=append)

    def step(self, step: Step, recorder: StepRecorder) -> None:
        """Writes one step."""
        if step.sampled and len(recorder):
            self._sink.step(step, recorder.sites, recorder.table.rows, recorder.table.exponents)
        else:
            self._sink.step(step)

    def describe(self, cells: Iterable[Cell]) -> None:
        """Writes the dtype table."""
        self._sink.describe(cells)

    def close(self) -> None:
        """Ends the files."""
        self._sink.close()
