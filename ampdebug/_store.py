"""A run on disk, the writing side. What the file holds is described in ``_schema.py``; ``_run.py`` reads it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ampdebug._aggregate import Aggregate, Columns, step_columns
from ampdebug._blobs import MAX_ROWS, crop_histograms, pack_columns, pack_counts
from ampdebug._errors import ArgumentError, FormatError
from ampdebug._paths import as_path
from ampdebug._record_rows import parse_rows, text_to_sql, to_json
from ampdebug._records import DTYPE_CODES, DTYPES, KINDS, Cell, Event, Site, Step
from ampdebug._schema import AGGREGATE_COLUMNS, CELLS, EVENTS, SITES, STEPS
from ampdebug._stats import STATS_DTYPE
from ampdebug._store_file import StoreFile

__all__ = ["DTYPES", "DTYPE_CODES", "RunWriter", "run_file"]

AGGREGATE_EVERY = 32
"""Recorded steps that one row of ``aggregates`` covers: few enough to draw a map of a long run from, and enough that
the aggregates take some 2 % of a file."""

_STATS_FIELDS = STATS_DTYPE.names or ()


class Table(Protocol):
    """What `RunWriter.put_step` needs of a ``StatsTable``."""

    @property
    def rows(self) -> npt.NDArray[Any]: ...
    @property
    def exponents(self) -> npt.NDArray[np.uint32]: ...


def run_file(out: str | os.PathLike[str], rank: int) -> Path:
    """The file that a rank's run in this directory has."""
    return as_path(out, "out") / f"ampdebug-rank{rank}.sqlite"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


class RunWriter:
    """Writes one rank's run.

    Each ``put_...`` is one transaction: when it returns, what it wrote survives a killed process (a power cut may take
    the last few steps, never more). Readers may open the file at any time; a second writer is refused.

    Calls may come from any thread. The first failure to write raises `StoreError` and ends the recording; what was
    written stays readable, and further ``put_...`` raise again. A wrong argument raises `ArgumentError`, writes nothing
    and ends nothing.

    Args:
        out: Directory of the run; made if need be.
        rank: Rank of this process.
        append: Go on with the run that is there, if there is one. Its sites keep their numbers, and steps continue
            after `last_step`.

    Raises:
        RunExistsError: the directory holds a run of this rank, and ``append`` is False.
        FormatError: ``append`` is True and the file that is there is not a run or was written by another version.
        StoreError: the file can't be written, or another writer has it open.
        ArgumentError: ``rank`` is below 0.
    """

    def __init__(self, out: str | os.PathLike[str], *, rank: int = 0, append: bool = False) -> None:
        if rank < 0:
            raise ArgumentError(f"rank={rank} must be 0 or more; give the rank of this process")
        self.path = run_file(out, rank)
        self._file = StoreFile(self.path, rank, append=append)
        try:
            rows = self._file.query(f"SELECT {SITES.names} FROM sites ORDER BY site")
            if [row[-1] for row in rows] != list(range(len(rows))):
                raise FormatError(f"{self.path} is damaged: its sites are not numbered 0 to {len(rows) - 1}")
            self._sites: dict[Site, int] = {site: i for i, site in enumerate(parse_rows(SITES, rows, self.path))}
            self.last_step: int = self._file.query("SELECT max(step) FROM steps")[0][0] or 0
            """The highest step in the file, 0 before the first."""
            with self._file.transaction() as connection:
                connection.execute("UPDATE segments SET status = 'interrupted' WHERE status = 'running'")
                cursor = connection.execute("INSERT INTO segments (started, status) VALUES (?, 'running')", (_now(),))
                self._segment = cursor.lastrowid
        except BaseException:
            if self._file.usable:
                self._file.close()
            raise
        self._segment_begun = False
        self._chunk = Aggregate()
        self._chunk_steps = self._chunk_first = self._chunk_last = 0

    # --- the run ------------------------------------------------------------------------------------------------------

    def put_meta(self, meta: Mapping[str, Any]) -> None:
        """Merge facts about the run: ``{name: JSON value}``; a name that is there is replaced."""
        rows = [(text_to_sql(str(key)), to_json(value, f"meta[{key!r}]")) for key, value in meta.items()]
        with self._file.transaction() as connection:
            connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)

    def put_cells(self, cells: Iterable[Cell]) -> None:
        """Store the cell tree in the given order, in place of the one that is there."""
        rows = [CELLS.row(cell) for cell in cells]
        with self._file.transaction() as connection:
            connection.execute("DELETE FROM cells")
            connection.executemany(CELLS.insert, rows)

    def put_event(self, event: Event) -> None:
        """Store an event."""
        row = EVENTS.row(event)
        with self._file.transaction() as connection:
            connection.execute(EVENTS.insert, row)

    def put_result(self, kind: str, data: Mapping[str, Any]) -> None:
        """Store the result of an analysis (bisect, audit, ...) with the run; ``data`` is plain JSON."""
        row = (time.time(), text_to_sql(kind), to_json(dict(data), "data"))
        with self._file.transaction() as connection:
            connection.execute("INSERT INTO results VALUES (?, ?, ?)", row)

    # --- sites and steps ----------------------------------------------------------------------------------------------

    def site_id(self, site: Site, shape: tuple[int, ...] | None = None, dtype: str | None = None) -> int:
        """The number of a site; numbers count from 0 in the order of registration.

        Args:
            site: The place.
            shape: Shape of its tensor when first seen.
            dtype: Dtype when first seen: all that is known of tensors that have no statistics (integers).

        A new site is written with the next transaction. ``shape`` and ``dtype`` of a known one are not changed.
        """
        known = self._sites.get(site)
        if known is not None:
            return known
        if site.kind not in KINDS:
            raise ArgumentError(f"kind={site.kind!r} is not known; choose one of {', '.join(KINDS)}")
        with self._file.lock:
            number = len(self._sites)
            sides = None if shape is None else to_json([int(side) for side in shape], "shape")
            row = SITES.row(site, sides, None if dtype is None else text_to_sql(dtype), number)
            self._file.insert_pending(SITES.insert, row)
            self._sites[site] = number
            return number

    def put_step(
        self,
        step: Step,
        site_ids: npt.NDArray[np.integer[Any]] | None = None,
        dtypes: npt.NDArray[np.uint8] | None = None,
        table: Table | None = None,
    ) -> None:
        """Store one step, all of it or nothing.

        Args:
            step: Its scalars. ``step.step`` must be larger than `last_step`.
            site_ids: Site number of each row of ``table``, integers ``[n]``; None for a step without statistics.
            dtypes: Code of each row's dtype (index into `DTYPES`), ``[n]``.
            table: The statistics, rows in execution order.

        Raises:
            ArgumentError: an argument breaks these rules; nothing is written, and the run can go on.
            StoreError: it could not be written.
        """
        values = STEPS.row(step, time.time(), None)
        packed: tuple[bytes, bytes] | None = None
        if table is not None and site_ids is not None and dtypes is not None:
            stats = table.rows
            sites, codes = self._check_rows(stats, table.exponents, site_ids, dtypes)
            first, length, counts = crop_histograms(table.exponents)
            fields = [stats[name] for name in _STATS_FIELDS]
            packed = pack_columns([sites, codes, first, length, *fields]), pack_counts(counts)
            columns = step_columns(step.step, codes, stats, first, length)
            values[-1] = len(stats)
        elif not (table is None and site_ids is None and dtypes is None):
            raise ArgumentError("site_ids, dtypes and table belong together; give all three or none of them")
        with self._file.lock:
            if step.step <= self.last_step:
                raise ArgumentError(
                    f"step.step={step.step} must be larger than {self.last_step}, the last step in {self.path}; count "
                    "over the whole run (an appended run goes on at RunWriter.last_step + 1)"
                )
            try:
                with self._file.transaction() as connection:
                    connection.execute(STEPS.insert, values)
                    if not self._segment_begun:
                        begun = (step.step, self._segment)
                        connection.execute("UPDATE segments SET first_step = ? WHERE segment = ?", begun)
                    if packed is not None:
                        connection.execute("INSERT INTO tensors VALUES (?, ?, ?)", (step.step, *packed))
                        self._add_to_chunk(step.step, sites, columns)
                        if self._chunk_steps >= AGGREGATE_EVERY:
                            connection.execute("INSERT INTO aggregates VALUES (?, ?, ?, ?, ?)", self._take_chunk())
            except BaseException:
                # The chunk may hold the step that was not written. Steps without an aggregate are no loss.
                self._clear_chunk()
                raise
            self.last_step = int(step.step)
            self._segment_begun = True

    def _check_rows(
        self, stats: npt.NDArray[Any], exponents: npt.NDArray[Any], site_ids: npt.NDArray[Any], dtypes: npt.NDArray[Any]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        sites, codes = np.asarray(site_ids, np.int64), np.asarray(dtypes, np.uint8)
        if not sites.shape == codes.shape == stats.shape == exponents.shape[:1] or len(stats) > MAX_ROWS:
            raise ArgumentError(
                f"table has {len(stats)} rows, site_ids shape {sites.shape}, dtypes shape {codes.shape}; each row "
                f"needs one of both, and a step has at most {MAX_ROWS} rows"
            )
        if len(sites) and (sites.min() < 0 or sites.max() >= len(self._sites)):
            raise ArgumentError(
                f"site_ids run from {sites.min()} to {sites.max()}, but only 0 to {len(self._sites) - 1} are "
                "registered; get the numbers from site_id()"
            )
        if len(codes) and codes.max() >= len(DTYPES):
            raise ArgumentError(
                f"dtypes holds the code {codes.max()}; codes are indices into DTYPES, below {len(DTYPES)}"
            )
        return sites, codes

    def _add_to_chunk(self, step: int, sites: npt.NDArray[np.int64], columns: Columns) -> None:
        self._chunk.merge(sites, columns)
        self._chunk_steps += 1
        self._chunk_first = self._chunk_first or step
        self._chunk_last = step

    def _take_chunk(self) -> tuple[int, int, int, int, bytes]:
        sites = self._chunk.seen()
        columns = {"site": sites, **self._chunk.select(sites)}
        blob = pack_columns([columns[name] for name in AGGREGATE_COLUMNS])
        row = (self._chunk_first, self._chunk_last, self._chunk_steps, len(sites), blob)
        self._clear_chunk()
        return row

    def _clear_chunk(self) -> None:
        self._chunk.clear()
        self._chunk_steps = self._chunk_first = self._chunk_last = 0

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self, status: Literal["finished", "failed"] = "finished") -> None:
        """End the recording. Closing again, after a failure or in a forked process does nothing.

        Raises:
            StoreError: the last rows could not be written.
        """
        if status not in ("finished", "failed"):
            raise ArgumentError(f"status={status!r} is not known; choose 'finished' or 'failed'")
        with self._file.lock:
            if not self._file.usable:
                return
            with self._file.transaction() as connection:
                if self._chunk_steps:
                    connection.execute("INSERT INTO aggregates VALUES (?, ?, ?, ?, ?)", self._take_chunk())
                ended = (_now(), status, self._segment)
                connection.execute("UPDATE segments SET ended = ?, status = ? WHERE segment = ?", ended)
            self._file.close()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("finished" if kind is None else "failed")
