"""Reading what a run file says in words and scalars; ``_run.py`` adds the statistics."""

from __future__ import annotations

import sqlite3
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from ampdebug._errors import ArgumentError, FormatError, StoreError
from ampdebug._record_rows import from_json, parse_rows, read_shape
from ampdebug._records import Cell, Event, Site, Step
from ampdebug._run_file import open_file, what_is_wrong
from ampdebug._schema import AGGREGATE_COLUMNS, CELLS, DATA_COLUMNS, EVENTS, SITES, STEPS

if TYPE_CHECKING:
    from typing_extensions import Self

OnDamage = Literal["raise", "skip"]

# Rows of the steps table that are held at a time: no cursor stays open between them, since an open one keeps a training
# that writes from reusing its log.
_BATCH = 256


@dataclass(frozen=True, slots=True)
class Segment:
    """One recording session of a run; more than one where it was appended to.

    Attributes:
        started: UTC time, ISO 8601.
        ended: The same, None where it goes on or was killed.
        status: ``"running"``, ``"finished"``, ``"failed"``, or ``"interrupted"`` (killed, and appended to since). A run
            that was killed and not appended to says ``"running"``.
        first_step: Its first step, None before that.
    """

    started: str
    ended: str | None
    status: str
    first_step: int | None


class RecordReader:
    """An open run file and its records. Not a public class: `Run` is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []
        self._connection, folder = open_file(path)
        self._closer = weakref.finalize(self, _close, self._connection, folder)
        self._sites: tuple[Site, ...] = ()
        self._site_extra: tuple[tuple[tuple[int, ...] | None, str | None], ...] = ()
        try:
            self._read_format()
        except BaseException:
            self.close()
            raise

    def _read_format(self) -> None:
        values = dict(self._query("SELECT key, value FROM format"))
        try:
            layout = from_json(values["layout"])
            self._columns = tuple(map(str, layout["tensors.data"]["columns"]))
            self._aggregate_columns = tuple(map(str, layout["aggregates.data"]["columns"]))
            self.dtype_names: tuple[str, ...] = tuple(map(str, layout["dtypes"]))
            self.this_rank = int(values["rank"])
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{self.path} is damaged: table 'format' is not readable ({error!r})") from error
        for needed, there in ((DATA_COLUMNS, self._columns), (AGGREGATE_COLUMNS, self._aggregate_columns)):
            missing = [name for name in needed if name not in there]
            if missing:
                raise FormatError(f"{self.path} is damaged: its layout lacks {', '.join(missing)}")
        if len(self.dtype_names) > 63:
            raise FormatError(
                f"{self.path} is damaged: it lists {len(self.dtype_names)} dtypes; at most 63 are possible"
            )

    def close(self) -> None:
        """Close the file. Also done when the object goes away."""
        self._closer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"{self.step_count} steps" if self._closer.alive else "closed"
        return f"<{type(self).__name__} {self.path}: {state}>"

    # --- reading ------------------------------------------------------------------------------------------------------

    def _query(self, sql: str, *values: Any) -> list[Any]:
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.ProgrammingError as error:
            raise StoreError(f"{self.path} was closed ({error}); open it again") from error
        except sqlite3.OperationalError as error:
            raise StoreError(f"cannot read {self.path}: {error}") from error
        except (sqlite3.Error, OverflowError, MemoryError) as error:
            raise FormatError(f"{self.path} {what_is_wrong(self.path, error)}") from error

    @property
    def meta(self) -> dict[str, Any]:
        """What the monitor knows of the run, by name."""
        meta = {}
        for key, value in self._query("SELECT key, value FROM meta"):
            try:
                meta[key] = from_json(value)
            except ValueError as error:
                raise FormatError(f"{self.path} is damaged: table 'meta', key {key!r}: {error}") from error
        return meta

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cell tree, in the order in which it was found."""
        return tuple(parse_rows(CELLS, self._query(f"SELECT {CELLS.names} FROM cells ORDER BY rowid"), self.path))

    def _refresh_sites(self) -> None:
        rows = self._query(f"SELECT {SITES.names} FROM sites WHERE site >= ? ORDER BY site", len(self._sites))
        if not rows:
            return
        start = len(self._sites)
        if [row[-1] for row in rows] != list(range(start, start + len(rows))):
            raise FormatError(f"{self.path} is damaged: its sites are not numbered in sequence after {start - 1}")
        try:
            extra = tuple((read_shape(row[-3]), None if row[-2] is None else str(row[-2])) for row in rows)
        except ValueError as error:
            raise FormatError(f"{self.path} is damaged: table 'sites': {error}") from error
        self._sites += tuple(parse_rows(SITES, rows, self.path))
        self._site_extra += extra

    @property
    def sites(self) -> tuple[Site, ...]:
        """All places that were measured, by number."""
        self._refresh_sites()
        return self._sites

    @property
    def shapes(self) -> tuple[tuple[int, ...] | None, ...]:
        """Shape of each site's tensor when first seen, by site number; None if not known."""
        self._refresh_sites()
        return tuple(shape for shape, _ in self._site_extra)

    @property
    def site_dtypes(self) -> tuple[str | None, ...]:
        """Dtype of each site's tensor when first seen, by site number; None if it was not given."""
        self._refresh_sites()
        return tuple(dtype for _, dtype in self._site_extra)

    @property
    def events(self) -> tuple[Event, ...]:
        """All events, in order."""
        return tuple(parse_rows(EVENTS, self._query(f"SELECT {EVENTS.names} FROM events ORDER BY rowid"), self.path))

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The recording sessions, in order."""
        rows = self._query("SELECT started, ended, status, first_step FROM segments ORDER BY segment")
        for started, ended, status, first in rows:
            texts = isinstance(started, str) and isinstance(ended, (str, type(None))) and isinstance(status, str)
            if not texts or not isinstance(first, (int, type(None))):
                raise FormatError(f"{self.path} is damaged: table 'segments' holds values of the wrong type")
        return tuple(Segment(*row) for row in rows)

    def results(self, kind: str) -> list[dict[str, Any]]:
        """All stored results of an analysis (``"bisect"``, ``"audit"``, ...), oldest first."""
        rows = self._query("SELECT data FROM results WHERE kind = ? ORDER BY rowid", kind)
        try:
            return [from_json(row[0]) for row in rows]
        except ValueError as error:
            raise FormatError(f"{self.path} is damaged: table 'results': {error}") from error

    # --- steps --------------------------------------------------------------------------------------------------------

    @property
    def step_count(self) -> int:
        """How many steps are recorded, sampled or not."""
        return int(self._query("SELECT count(*) FROM steps")[0][0])

    def count_steps(self, first: int | None = None, last: int | None = None) -> int:
        """How many steps are recorded from ``first`` to ``last``, both included."""
        low, high = -(1 << 63) if first is None else first, (1 << 63) - 1 if last is None else last
        return int(self._query("SELECT count(*) FROM steps WHERE step BETWEEN ? AND ?", low, high)[0][0])

    @property
    def first_step(self) -> int | None:
        """The first recorded step, None before there is one."""
        first: int | None = self._query("SELECT min(step) FROM steps")[0][0]
        return first

    @property
    def last_step(self) -> int | None:
        """The last recorded step, None before there is one."""
        last: int | None = self._query("SELECT max(step) FROM steps")[0][0]
        return last

    def _batches(self, columns: str, first: int | None, last: int | None, where: str = "") -> Iterator[list[Any]]:
        at = -(1 << 63) if first is None else first
        end = (1 << 63) - 1 if last is None else last
        while True:
            sql = f"SELECT {columns} FROM steps WHERE step BETWEEN ? AND ? {where} ORDER BY step LIMIT {_BATCH}"
            rows = self._query(sql, at, end)
            if rows:
                yield rows
            if len(rows) < _BATCH or rows[-1][0] >= end:
                return
            at = rows[-1][0] + 1

    def _problem(self, error: FormatError, on_damage: OnDamage) -> None:
        check_on_damage(on_damage)
        if on_damage == "raise":
            raise error
        if str(error) not in self.problems:
            self.problems.append(str(error))

    def steps(
        self, first: int | None = None, last: int | None = None, *, on_damage: OnDamage = "raise"
    ) -> Iterator[Step]:
        """The scalars of the steps from ``first`` to ``last``, both included; None leaves that side open."""
        for _, step in self.timed_steps(first, last, on_damage=on_damage):
            yield step

    def timed_steps(
        self, first: int | None = None, last: int | None = None, *, on_damage: OnDamage = "raise"
    ) -> Iterator[tuple[float, Step]]:
        """Like `steps`, each with the Unix time in seconds at which it was stored."""
        check_on_damage(on_damage)
        for rows in self._batches(f"{STEPS.names}", first, last):
            for row in rows:
                try:
                    step: Step = STEPS.parse(row)
                    when = float(row[-2])
                except (ValueError, TypeError) as error:
                    self._problem(FormatError(f"{self.path} is damaged: step {row[0]}: {error}"), on_damage)
                    continue
                yield when, step

    def step(self, step: int) -> Step:
        """The scalars of one step.

        Raises:
            ArgumentError: it is not recorded.
        """
        for found in self.steps(step, step):
            return found
        raise ArgumentError(f"step={step} is not recorded; {self._recorded()}")

    def _recorded(self) -> str:
        return f"{self.path} has {self.step_count} steps from {self.first_step} to {self.last_step}"


def check_on_damage(on_damage: str) -> None:
    if on_damage not in ("raise", "skip"):
        raise ArgumentError(f"on_damage={on_damage!r} is not known; choose 'raise' or 'skip'")


def _close(connection: sqlite3.Connection, folder: Any) -> None:
    connection.close()
    if folder is not None:
        folder.cleanup()
