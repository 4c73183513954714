"""One TensorBoard event file. The only user of tensorboardX, and of its file format half only.

Its ``add_*`` methods make one event of every number and rewrite tags silently (``a:b`` and ``a b`` both become
``a_b``); its queue loses errors in a thread. Here the events are made and written by the caller.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ampdebug._errors import ArgumentError, StoreError
from ampdebug._stats import EXPONENT_BIAS
from ampdebug.report.heatmap import png

_FLUSH_SECONDS = 5.0  # a killed process loses at most so much of the curves; the run itself loses nothing
_file_number = itertools.count()


class EventFile:
    """Makes protobuf values and writes them as events.

    Args:
        logdir: Directory, made if missing.
        append: Go on in a directory that already holds event files.

    Raises:
        ArgumentError: if it holds some and ``append`` is False.
        StoreError: if it cannot be written; likewise from `write` and `close`.
    """

    def __init__(self, logdir: Path, *, append: bool) -> None:
        # Imported at first use: 0.1 s that reading and reporting do not have to pay.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2
        from tensorboardX.summary import text

        self._event: Any = event_pb2.Event
        self._session: Any = event_pb2.SessionLog
        self._summary: Any = summary_pb2.Summary
        self._histogram: Any = summary_pb2.HistogramProto
        self._text: Any = text
        self._logdir = logdir
        try:
            logdir.mkdir(parents=True, exist_ok=True)
            there = sorted(path.name for path in logdir.glob("events.out.tfevents.*"))
            if there and not append:
                raise ArgumentError(
                    f"logdir={str(logdir)!r} already holds event files ({there[0]}): TensorBoard would draw both runs "
                    "as one line. Give a directory of its own to each run, or remove the old files"
                )
            # tensorboardX names files by second and host, and a second one of that name overwrites the first.
            suffix = f".{os.getpid()}.{next(_file_number)}.ampdebug"
            self._writer: Any = EventsWriter(str(logdir / "events"), suffix)
        except OSError as error:
            raise self._failed(error) from error
        self.path = Path(self._writer._file_name)
        self.closed = False
        self._restart = bool(there)
        self._next_flush = -math.inf

    def _failed(self, error: OSError) -> StoreError:
        return StoreError(f"cannot write TensorBoard files in {str(self._logdir)!r}: {error}")

    def write(self, step: int, values: list[Any]) -> None:
        """Append one event. An empty list writes nothing."""
        if not values:
            return
        now = time.time()
        try:
            if self._restart:
                # Tells TensorBoard to forget later steps that an older file of this directory holds.
                start = self._session(status=self._session.SessionStatus.Value("START"))
                self._writer.write_event(self._event(wall_time=now, step=step, session_log=start))
                self._restart = False
            self._writer.write_event(self._event(wall_time=now, step=step, summary=self._summary(value=values)))
            if now >= self._next_flush:
                self._writer.flush()
                self._next_flush = now + _FLUSH_SECONDS
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Flush and close."""
        self.closed = True
        try:
            self._writer.close()
        except OSError as error:
            raise self._failed(error) from error

    def scalars(self, named: Iterable[tuple[str, float]]) -> list[Any]:
        """One value for each ``(tag, number)``; TensorBoard keeps numbers as float32."""
        make = self._summary.Value
        return [make(tag=tag, simple_value=value) for tag, value in named]

    def exponent_histogram(self, tag: str, counts: npt.NDArray[np.unsignedinteger[Any]]) -> Any:
        """The histogram from counts already made; at least one must not be zero."""
        used = np.flatnonzero(counts)
        first, last = int(used[0]), int(used[-1])
        part = counts[first : last + 1].astype(float)
        lower = np.arange(first, last + 1) - EXPONENT_BIAS
        middle = lower + 0.5
        return self._summary.Value(
            tag=tag,
            histo=self._histogram(
                min=float(lower[0]),  # TensorBoard takes it as the lower edge of the first bar
                max=float(lower[-1] + 1),
                num=float(part.sum()),
                sum=float(part @ middle),
                sum_squares=float(part @ middle**2),
                bucket_limit=(lower + 1.0).tolist(),
                bucket=part.tolist(),
            ),
        )

    def image(self, tag: str, picture: npt.NDArray[np.uint8]) -> Any:
        """An RGB picture ``[height, width, 3]``."""
        height, width, _ = picture.shape
        encoded = self._summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png(picture))
        return self._summary.Value(tag=tag, image=encoded)

    def text(self, tag: str, markdown: str) -> Any:
        """A text; TensorBoard shows it under the tag with ``/text_summary``."""
        (value,) = self._text(tag, markdown).value
        return value
