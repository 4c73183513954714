"""A run on disk, the reading side: what every judge of a run reads. The writing side is ``_store.py``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ampdebug._aggregate import AGGREGATE_KINDS, NEVER, Aggregate, Columns, step_columns
from ampdebug._blobs import BlobError, unpack_columns
from ampdebug._errors import ArgumentError, FormatError, StoreError
from ampdebug._observations import FIELDS, Observations, unpack_observations
from ampdebug._paths import as_path
from ampdebug._run_records import OnDamage, RecordReader, Segment, check_on_damage
from ampdebug._summary import Heatmap, HeatmapBuilder, Summary, summarize_sites

__all__ = ["Heatmap", "Observations", "OnDamage", "Run", "Segment", "Summary", "open_run"]

Progress = Callable[[int, int], None]
"""Called as ``progress(steps done, steps in all)`` now and then, and once at the end."""

_Unit = tuple[int, int, int, npt.NDArray[np.int64], Columns]

# Up to so many recorded steps the map of exponent ranges is made from the steps themselves (some 0.3 ms each), beyond
# from the aggregates, which then are at least this number / 32 columns.
_HEATMAP_STEPS = 2048

_RANK = re.compile(r"ampdebug-rank(\d+)\.sqlite")


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a recorded run; training may still be writing it.

    Args:
        path: The directory given to the monitor (its lowest rank is opened, `Run.rank` gives the others), or one file.

    Raises:
        ArgumentError: ``path`` is no path.
        StoreError: there is no run there or it can't be read.
        FormatError: it is truncated, damaged, foreign or written by a newer version. The message says which.
    """
    place = as_path(path, "path")
    try:
        if not place.is_dir():
            if not place.exists():
                raise StoreError(f"{place} does not exist; give the directory of a run or its .sqlite file")
            return Run(place)
        ranks = _ranks_in(place)
    except OSError as error:
        raise StoreError(f"cannot read {place}: {error}") from error
    if not ranks:
        raise StoreError(
            f"{place} holds no run: there is no file ampdebug-rank0.sqlite in it; give the directory that the monitor "
            "wrote to"
        )
    return Run(ranks[min(ranks)])


def _ranks_in(directory: Path) -> dict[int, Path]:
    found = ((_RANK.fullmatch(file.name), file) for file in directory.iterdir())
    return {int(match[1]): file for match, file in sorted(found, key=lambda item: item[1]) if match}


class Run(RecordReader):
    """A recorded run of one rank; made by `open_run`.

    Everything is read when asked for, so a run that training still writes shows what is there at that moment, and
    nothing grows with the number of steps. Methods over many steps read one step at a time.

    A damaged step does not hide the others: ``on_damage="skip"`` leaves it out and adds a sentence to `problems`;
    ``"raise"`` (the default) raises `FormatError` naming it.

    Attributes:
        path: The file.
        dtype_names: Dtype names by code.
        problems: One sentence for each damaged step that was left out so far.
    """

    def __str__(self) -> str:
        """The report: the cells that deserve a look and why, then a summary."""
        from ampdebug.report.table import build_report  # reports read runs; only this method needs one

        return str(build_report(self))

    def _repr_html_(self) -> str:
        from ampdebug.report.table import build_report

        return build_report(self)._repr_html_()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have a file in the same directory, ascending."""
        return tuple(sorted({*_ranks_in(self.path.parent), self.this_rank}))

    def rank(self, rank: int) -> Run:
        """The run of another rank.

        Raises:
            ArgumentError: there is none.
        """
        path = _ranks_in(self.path.parent).get(rank)
        if rank == self.this_rank and path is None:
            path = self.path
        if path is None:
            raise ArgumentError(f"rank={rank} has no file in {self.path.parent}; there are {list(self.ranks)}")
        return Run(path)

    # --- statistics ---------------------------------------------------------------------------------------------------

    def sampled_steps(self, first: int | None = None, last: int | None = None) -> npt.NDArray[np.int64]:
        """Numbers of the steps that have statistics, int64, ascending (8 bytes a step)."""
        batches = self._batches("step", first, last, "AND tensor_rows IS NOT NULL")
        return np.array([row[0] for rows in batches for row in rows], np.int64)

    def tensors(self, step: int) -> Observations:
        """The statistics of one step.

        Raises:
            ArgumentError: the step is not recorded or has no statistics.
            FormatError: its rows are damaged.
        """
        rows = self._query("SELECT tensor_rows FROM steps WHERE step = ?", step)
        if not rows:
            raise ArgumentError(f"step={step} is not recorded; {self._recorded()}")
        if rows[0][0] is None:
            raise ArgumentError(
                f"step={step} has no statistics, it was not sampled; Run.sampled_steps() lists those that were"
            )
        return self._read(step, rows[0][0], exponents=True)

    def _read(self, step: int, rows: Any, *, exponents: bool) -> Observations:
        names = "data, exponents" if exponents else "data, NULL"
        found = self._query(f"SELECT {names} FROM tensors WHERE step = ?", step)
        try:
            if not found:
                raise BlobError("has no row in table 'tensors'")
            data, counts = found[0]
            if type(rows) is not int or not isinstance(data, bytes) or not isinstance(counts, bytes | None):
                raise BlobError("holds values of the wrong type")
            sites = len(self._sites)
            try:
                result = self._unpack(step, data, counts, rows)
            except BlobError:
                # Perhaps a site that training registered since.
                self._refresh_sites()
                if len(self._sites) == sites:
                    raise
                result = self._unpack(step, data, counts, rows)
            if exponents:
                _ = result.exponents
        except BlobError as error:
            raise FormatError(f"{self.path} is damaged: the statistics of step {step}: {error}") from error
        return result

    def _unpack(self, step: int, data: bytes, counts: bytes | None, rows: int) -> Observations:
        return unpack_observations(step, data, counts, rows, self._columns, self.dtype_names, len(self._sites))

    def iter_tensors(
        self,
        first: int | None = None,
        last: int | None = None,
        *,
        exponents: bool = True,
        on_damage: OnDamage = "raise",
    ) -> Iterator[Observations]:
        """The statistics of every sampled step from ``first`` to ``last``, one at a time.

        Args:
            first: First step, None from the start.
            last: Last step, None to the end.
            exponents: False leaves the histograms away (their range is there all the same): twice as fast.
            on_damage: ``"skip"`` leaves damaged steps out and notes them in `problems`.
        """
        check_on_damage(on_damage)
        for rows in self._batches("step, tensor_rows", first, last, "AND tensor_rows IS NOT NULL"):
            for step, size in rows:
                try:
                    found = self._read(step, size, exponents=exponents)
                except FormatError as error:
                    self._problem(error, on_damage)
                    continue
                yield found

    def series(
        self,
        site: int,
        field: str,
        first: int | None = None,
        last: int | None = None,
        *,
        on_damage: OnDamage = "raise",
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        """One number of one site over the steps.

        Args:
            site: Site number.
            field: A field of the statistics, or ``absmax``, ``norm``, ``finite``, ``nonfinite``, ``flushed_fraction``,
                ``nonfinite_fraction``.
            first: First step, None from the start.
            last: Last step, None to the end.
            on_damage: ``"skip"`` leaves damaged steps out and notes them in `problems`.

        Returns:
            The steps (int64) and the values (int64 or float64), one for each row of the site.
        """
        if not 0 <= site < len(self.sites):
            raise ArgumentError(f"site={site} does not exist; {self.path} has sites 0 to {len(self.sites) - 1}")
        if field not in FIELDS:
            raise ArgumentError(f"field={field!r} is not known; choose one of {', '.join(FIELDS)}")
        steps: list[int] = []
        values: list[npt.NDArray[Any]] = []
        for found in self.iter_tensors(first, last, exponents=False, on_damage=on_damage):
            mine = np.flatnonzero(found.site_ids == site)
            steps += [found.step] * len(mine)
            values.append(found.derive(field)[mine])
        return np.array(steps, np.int64), np.concatenate(values) if values else np.empty(0)

    # --- over all steps -----------------------------------------------------------------------------------------------

    def _units(self, progress: Progress | None, *, whole: bool) -> Iterator[_Unit]:
        """Everything recorded, in order: ``(first step, last step, steps, sites, columns)`` of an aggregate or a step.

        With ``whole`` an aggregate stands for its steps where there is one; otherwise every step comes by itself.
        Damaged aggregates are replaced by their steps, damaged steps are left out and noted.
        """
        self._refresh_sites()
        done, total = 0, self.sampled_count
        at = -(1 << 63)
        for first, last, steps, sites in self._aggregates() if whole else ():
            columns = self._aggregate(first, sites)
            if columns is None or first < at or self._count_sampled(first, last) != steps:
                continue  # damaged: its steps come with the next gap
            for unit in self._step_units(at, first - 1):
                done += 1
                _report(progress, done, total)
                yield unit
            at = last + 1
            done += steps
            _report(progress, done, total)
            yield first, last, steps, columns.pop("site"), columns
        for unit in self._step_units(at, None):
            done += 1
            _report(progress, done, total)
            yield unit
        if progress is not None:
            progress(max(done, total), max(done, total))

    @property
    def sampled_count(self) -> int:
        """How many steps have statistics."""
        return int(self._query("SELECT count(tensor_rows) FROM steps")[0][0])

    def _count_sampled(self, first: int, last: int) -> int:
        return int(self._query("SELECT count(tensor_rows) FROM steps WHERE step BETWEEN ? AND ?", first, last)[0][0])

    def _aggregates(self) -> list[tuple[int, int, int, int]]:
        rows = self._query("SELECT first_step, last_step, steps, sites FROM aggregates ORDER BY first_step")
        # Whatever a damaged row says, its steps are still there to be read by themselves.
        return [row for row in rows if all(type(value) is int and abs(value) < NEVER for value in row)]

    def _aggregate(self, first: int, rows: int) -> Columns | None:
        """The columns of an aggregate, None where it is damaged."""
        try:
            data = self._query("SELECT data FROM aggregates WHERE first_step = ?", first)[0][0]
            names = self._aggregate_columns
            if not rows or not isinstance(data, bytes):
                return None
            found = dict(zip(names, unpack_columns(data, len(names), rows), strict=True))
        except (BlobError, FormatError):
            return None
        if any(found[name].dtype.kind == "f" and kind != "<f8" for name, kind in AGGREGATE_KINDS.items()):
            return None
        columns = {name: found[name].astype(kind) for name, kind in AGGREGATE_KINDS.items()}
        sites = columns["site"]
        self._refresh_sites()
        if sites.min() < 0 or sites.max() >= len(self._sites) or len(np.unique(sites)) != rows:
            return None
        return columns

    def _step_units(self, first: int, last: int | None) -> Iterator[_Unit]:
        for found in self.iter_tensors(first, last, exponents=False, on_damage="skip"):
            columns = step_columns(found.step, found.dtype_codes, found.rows, found.bins_first, found.bins_length)
            yield found.step, found.step, 1, found.site_ids, columns

    def summary(self, progress: Progress | None = None) -> Summary:
        """Every site over all steps, from the stored aggregates and the steps after the last of them.

        Damaged steps are left out; ``Summary.problems`` names them.
        """
        before = len(self.problems)
        aggregate = Aggregate()
        steps, first_step, last_step = 0, None, None
        for first, last, count, sites, columns in self._units(progress, whole=True):
            aggregate.merge(sites, columns)
            steps += count
            first_step = first if first_step is None else first_step
            last_step = last
        sites_now = summarize_sites(aggregate, self.sites, self.dtype_names)
        return Summary(sites_now, steps, first_step, last_step, tuple(self.problems[before:]))

    def heatmap(self, max_steps: int = 256, progress: Progress | None = None) -> Heatmap:
        """The exponent range of every site over the steps, in at most ``max_steps`` columns of equally many steps.

        Runs of more than 2,048 recorded steps are read from the aggregates: one of these (32 steps) is the finest
        column then.

        Raises:
            ArgumentError: ``max_steps`` is less than 1.
        """
        if max_steps < 1:
            raise ArgumentError(f"max_steps={max_steps} must be 1 or more")
        before = len(self.problems)
        whole = self.sampled_count > max(_HEATMAP_STEPS, max_steps)
        # Counted first: how many units make a column must be known before the first one comes.
        units = sum(1 for _ in self._units(None, whole=True)) if whole else self.sampled_count
        builder = HeatmapBuilder(len(self.sites), units, max_steps)
        for first, last, _, sites, columns in self._units(progress, whole=whole):
            builder.add(first, last, sites, columns)
        return builder.build(self.problems[before:])


def _report(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None and done < total and done % 32 == 0:
        progress(done, total)
