"""The tables of a run file.

A run file is an SQLite database, one a rank, that any SQLite tool opens. ``PRAGMA application_id`` is ``0x414D5044``
("AMPD"), ``PRAGMA user_version`` the version of the format.

============ =========================================================================================================
format       key, value: ``layout`` (JSON: what the blobs hold, see `LAYOUT`), ``rank``, ``writer``
meta         key, value (JSON): whatever the monitor knows of the run
segments     one row each time recording began: when, status (running, finished, failed, interrupted), first step
cells        one row a cell, in tree order; lists and dicts are JSON
sites        one row a place that is measured: number, kind, path, call, slot, cell type, shape (JSON or NULL), dtype
steps        one row a step: a column for every field of ``Step``, then ``time`` (Unix seconds) and ``tensor_rows``
             (rows of statistics, NULL for none)
tensors      one row a step with statistics: ``data`` a column blob, ``exponents`` a count blob (see ``_blobs.py``)
aggregates   one row every some steps: the merged statistics of each site from ``first_step`` to ``last_step``; what
             they say follows from ``tensors``, they only make long runs quick to summarise
events       one row an event; data is JSON
results      one row a result (bisect, audit, ...): kind and JSON
============ =========================================================================================================

NULL means unknown. SQLite has no NaN (it turns it into NULL), so a number that is not finite is stored as the text
``nan``, ``inf`` or ``-inf`` in the same column. JSON is strict; inside it such a number is the same word as a string.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from ampdebug._aggregate import AGGREGATE_KINDS
from ampdebug._errors import FormatError
from ampdebug._record_rows import RecordTable
from ampdebug._records import DTYPES, Cell, Event, Site, Step
from ampdebug._stats import STATS_DTYPE

APPLICATION_ID = 0x414D5044
FORMAT_VERSION = 1

DATA_COLUMNS = ("site", "dtype", "bins_first", "bins_length", *(STATS_DTYPE.names or ()))
AGGREGATE_COLUMNS = tuple(AGGREGATE_KINDS)

LAYOUT: dict[str, Any] = {
    "tensors.data": {"encoding": "columns", "columns": list(DATA_COLUMNS)},
    "tensors.exponents": {"encoding": "counts", "first": "bins_first", "length": "bins_length", "bias": 127},
    "aggregates.data": {"encoding": "columns", "columns": list(AGGREGATE_COLUMNS)},
    "dtypes": list(DTYPES),
}

STEPS = RecordTable(Step, "steps", ("time", "REAL NOT NULL"), ("tensor_rows", "INTEGER"))
CELLS = RecordTable(Cell, "cells")
SITES = RecordTable(Site, "sites", ("shape", "TEXT"), ("dtype", "TEXT"), ("site", "INTEGER PRIMARY KEY"))
EVENTS = RecordTable(Event, "events")

SCHEMA = (
    "CREATE TABLE format (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE segments (segment INTEGER PRIMARY KEY, started TEXT NOT NULL, ended TEXT, status TEXT NOT NULL, "
    "first_step INTEGER)",
    f"CREATE TABLE cells ({CELLS.declaration})",
    f"CREATE TABLE sites ({SITES.declaration})",
    f"CREATE TABLE steps ({STEPS.declaration.replace('INTEGER NOT NULL', 'INTEGER PRIMARY KEY', 1)})",
    "CREATE TABLE tensors (step INTEGER PRIMARY KEY, data BLOB NOT NULL, exponents BLOB NOT NULL)",
    "CREATE TABLE aggregates (first_step INTEGER PRIMARY KEY, last_step INTEGER NOT NULL, steps INTEGER NOT NULL, "
    "sites INTEGER NOT NULL, data BLOB NOT NULL)",
    f"CREATE TABLE events ({EVENTS.declaration})",
    "CREATE TABLE results (time REAL NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL)",
)

TABLES: dict[str, tuple[str, ...]] = {
    "format": ("key", "value"),
    "meta": ("key", "value"),
    "segments": ("segment", "started", "ended", "status", "first_step"),
    "cells": CELLS.columns,
    "sites": SITES.columns,
    "steps": STEPS.columns,
    "tensors": ("step", "data", "exponents"),
    "aggregates": ("first_step", "last_step", "steps", "sites", "data"),
    "events": EVENTS.columns,
    "results": ("time", "kind", "data"),
}


def create_tables(connection: sqlite3.Connection, rank: int, writer: str) -> None:
    """Make the tables of an empty file, within the open transaction."""
    for statement in SCHEMA:
        connection.execute(statement)
    values = [("layout", json.dumps(LAYOUT)), ("rank", str(rank)), ("writer", writer)]
    connection.executemany("INSERT INTO format VALUES (?, ?)", values)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")


def check_tables(connection: sqlite3.Connection, path: Path, *, writing: bool = False) -> None:
    """Make sure that the file is a run that this version can read, or with ``writing`` can add to.

    Raises:
        FormatError: naming the file and what is wrong with it.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        objects = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if not objects:
            raise FormatError(f"{path} is empty: recording ended before the file was set up, so no run is in it")
        raise FormatError(f"{path} is an SQLite database, but not a run of ampdebug")
    if version > FORMAT_VERSION:
        raise FormatError(
            f"{path} has run format {version}; this ampdebug reads up to {FORMAT_VERSION}: it was written by a newer "
            "version, upgrade to read it"
        )
    kinds = {name: (kind, sql) for name, kind, sql in connection.execute("SELECT name, type, sql FROM sqlite_master")}
    for table, columns in TABLES.items():
        kind, sql = kinds.get(table, (None, ""))
        # A view or a virtual table would run what its author wrote.
        if kind != "table" or not str(sql).upper().startswith("CREATE TABLE"):
            raise FormatError(f"{path} is damaged: it has no table {table!r}")
        missing = sorted(set(columns) - _columns(connection, table))
        if missing:
            raise FormatError(f"{path} is damaged: table {table!r} lacks the column(s) {', '.join(missing)}")
    foreign = [name for name, (kind, _) in kinds.items() if kind in ("view", "trigger")]
    if foreign:
        raise FormatError(f"{path} is not opened: no run holds views or triggers, this one does: {', '.join(foreign)}")
    if writing:
        layout = connection.execute("SELECT value FROM format WHERE key = 'layout'").fetchone()
        extra = [table for table, columns in TABLES.items() if set(columns) != _columns(connection, table)]
        if layout is None or layout[0] != json.dumps(LAYOUT) or extra:
            raise FormatError(
                f"{path} was written by another version of ampdebug, whose records differ; it can be read but not "
                "appended to: record into another directory"
            )


def _columns(connection: sqlite3.Connection, table: str) -> set[str]:
    # Ordinary columns only (hidden = 0): a generated one would compute what its author wrote.
    return {row[1] for row in connection.execute(f"PRAGMA table_xinfo({table})") if row[6] == 0}
