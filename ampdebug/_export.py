"""A recorded run as CSV or JSON lines, for other tools. Written step by step: memory does not grow with the run.

**csv** has one table a file, with a header line. Unknown is an empty field; a number that is not finite is ``nan``,
``inf`` or ``-inf``; booleans are ``true`` and ``false``.

* ``tensors``: a line for each step and site, in execution order. ``step, site, kind, path, call, slot, cell_type,
  dtype``, then the statistics (``count`` to ``rms``, see ``TensorStats``), ``absmax, norm`` and ``lowest_exponent,
  highest_exponent`` (of the finite nonzero elements, ``floor(log2|x|)``; -127 and 128 are the open ends).
* ``steps``: a line a step with the fields of ``Step``, then ``time`` (Unix seconds). ``forward_birth``,
  ``backward_birth`` and ``extra`` are JSON.

**jsonl** has one JSON object a line, each with a ``type``. First ``run`` (file, rank, meta), then ``segment``, ``cell``
and ``site`` lines, then for each step a ``step`` line followed by its ``tensor`` lines, then ``event`` lines. A
``tensor`` line has the columns above, with ``exponents`` as ``{"exponent": count}`` instead of their range. JSON has no
NaN: there the words are strings.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np

from ampdebug._errors import ArgumentError, StoreError
from ampdebug._observations import STATS_FIELDS, Observations
from ampdebug._record_rows import to_json
from ampdebug._records import Site, Step
from ampdebug._run import Progress, Run

Format = Literal["csv", "jsonl"]
CsvTable = Literal["tensors", "steps"]

FORMATS: tuple[Format, ...] = ("csv", "jsonl")
CSV_TABLES: tuple[CsvTable, ...] = ("tensors", "steps")

_SITE_FIELDS = tuple(field.name for field in dataclasses.fields(Site))
_STEP_FIELDS = tuple(field.name for field in dataclasses.fields(Step))
_JSON_FIELDS = ("forward_birth", "backward_birth", "extra")

TENSOR_COLUMNS = (
    *("step", "site", *_SITE_FIELDS, "dtype"),
    *STATS_FIELDS,
    *("absmax", "norm", "lowest_exponent", "highest_exponent"),
)
STEP_COLUMNS = (*_STEP_FIELDS, "time")


def export(
    run: Run,
    format: Format,
    target: str | os.PathLike[str] | TextIO,
    *,
    table: CsvTable | None = None,
    first: int | None = None,
    last: int | None = None,
    progress: Progress | None = None,
) -> int:
    """Write a run as CSV or JSON lines. The columns are described at the top of this module and in the documentation.

    Args:
        run: What `open_run` gave.
        format: ``"csv"`` or ``"jsonl"``.
        target: A file name, a text file that is open for writing, or with csv a directory that exists: then both tables
            are written into it, as ``tensors.csv`` and ``steps.csv``. A file gets its name when it is complete.
        table: For csv into one file, which table: ``"tensors"`` (the default) or ``"steps"``.
        first: First step, None from the start.
        last: Last step, None to the end.
        progress: Called as ``progress(steps done, steps in all)``.

    Returns:
        How many lines were written, headers not counted. Damaged steps are left out and named in ``run.problems``.

    Raises:
        ArgumentError: an argument is not one of these.
        StoreError: the run can't be read or the target can't be written.
    """
    if format not in FORMATS:
        raise ArgumentError(f"format={format!r} is not known; choose one of {', '.join(FORMATS)}")
    if table is not None and table not in CSV_TABLES:
        raise ArgumentError(f"table={table!r} is not known; choose one of {', '.join(CSV_TABLES)}")
    if format == "jsonl" and table is not None:
        raise ArgumentError(f"table={table!r} is for csv only; jsonl holds everything, each line with its type")
    steps = _Steps(run, first, last, progress)
    write: Callable[[_Steps, TextIO], int] = _write_jsonl if format == "jsonl" else _CSV_WRITERS[table or "tensors"]
    if not isinstance(target, (str, os.PathLike)):
        return write(steps, target)
    path = Path(target)
    if not path.is_dir():
        return _to_file(steps, path, write)
    if format == "jsonl" or table is not None:
        raise ArgumentError(
            f"target={os.fspath(target)!r} is a directory; give a file name (only csv without table= takes a directory)"
        )
    return sum(_to_file(steps, path / f"{name}.csv", _CSV_WRITERS[name]) for name in CSV_TABLES)


def _to_file(steps: _Steps, path: Path, write: Callable[[_Steps, TextIO], int]) -> int:
    part = path.with_name(f"{path.name}.part")
    try:
        try:
            with part.open("w", encoding="utf-8", newline="") as file:
                lines = write(steps, file)
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                part.unlink()
            raise
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error}") from error
    return lines


@dataclasses.dataclass(frozen=True)
class _Steps:
    """Which steps of which run."""

    run: Run
    first: int | None
    last: int | None
    progress: Progress | None

    def scalars(self) -> Iterator[tuple[float, Step]]:
        total, done = self.run.count_steps(self.first, self.last), 0
        for item in self.run.timed_steps(self.first, self.last, on_damage="skip"):
            yield item
            done += 1
            if self.progress is not None and done % 32 == 0 and done < total:
                self.progress(done, total)
        if self.progress is not None:
            self.progress(max(done, total), max(done, total))

    def tensors(self, step: Step, *, exponents: bool) -> Iterator[Observations]:
        # Nothing comes where the step was not sampled or is damaged.
        return self.run.iter_tensors(step.step, step.step, exponents=exponents, on_damage="skip")


def _write_tensors(steps: _Steps, file: TextIO) -> int:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(TENSOR_COLUMNS)
    lines = 0
    for _, step in steps.scalars():
        for found in steps.tensors(step, exponents=False):
            columns = _tensor_columns(steps.run, found)
            columns += [_exponents(found.lowest_exponent()), _exponents(found.highest_exponent())]
            writer.writerows(zip(*columns, strict=True))
            lines += len(found)
    return lines


def _tensor_columns(run: Run, found: Observations) -> list[list[Any]]:
    """The columns of `TENSOR_COLUMNS` up to ``norm``."""
    ids = found.site_ids.tolist()
    sites = run.sites
    here = [sites[number] for number in ids]
    return [
        [found.step] * len(ids),
        ids,
        *([getattr(site, name) for site in here] for name in _SITE_FIELDS),
        list(found.dtypes),
        *(found.derive(name).tolist() for name in (*STATS_FIELDS, "absmax", "norm")),
    ]


def _exponents(values: Any) -> list[int | None]:
    return [None if np.isnan(value) else int(value) for value in values.tolist()]


def _write_steps(steps: _Steps, file: TextIO) -> int:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(STEP_COLUMNS)
    lines = 0
    for when, step in steps.scalars():
        writer.writerow([*(_field(step, name) for name in _STEP_FIELDS), when])
        lines += 1
    return lines


def _field(step: Step, name: str) -> Any:
    value = getattr(step, name)
    if isinstance(value, bool):
        return str(value).lower()
    if name in _JSON_FIELDS and value is not None:
        return to_json(value if isinstance(value, dict) else dataclasses.asdict(value), name)
    return value


_CSV_WRITERS: dict[CsvTable, Callable[[_Steps, TextIO], int]] = {"tensors": _write_tensors, "steps": _write_steps}


def _write_jsonl(steps: _Steps, file: TextIO) -> int:
    run = steps.run
    lines = 0

    def line(kind: str, values: dict[str, Any]) -> None:
        nonlocal lines
        file.write(to_json({"type": kind, **values}, kind) + "\n")
        lines += 1

    line("run", {"file": run.path.name, "rank": run.this_rank, "meta": run.meta})
    for segment in run.segments:
        line("segment", dataclasses.asdict(segment))
    for cell in run.cells:
        line("cell", dataclasses.asdict(cell))
    for number, (site, shape, dtype) in enumerate(zip(run.sites, run.shapes, run.site_dtypes, strict=True)):
        line("site", {"site": number, **dataclasses.asdict(site), "shape": shape, "dtype": dtype})
    names = TENSOR_COLUMNS[:-2]
    for when, step in steps.scalars():
        line("step", {**dataclasses.asdict(step), "time": when})
        for found in steps.tensors(step, exponents=True):
            for values, counts in zip(zip(*_tensor_columns(run, found), strict=True), found.exponents, strict=True):
                bins = np.flatnonzero(counts)
                exponents = dict(zip((bins - 127).tolist(), counts[bins].tolist(), strict=True))
                line("tensor", {**dict(zip(names, values, strict=True)), "exponents": exponents})
    for event in run.events:
        line("event", dataclasses.asdict(event))
    return lines
