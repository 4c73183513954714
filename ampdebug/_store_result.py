"""Adding the result of an analysis to a run on disk, beside what a monitor recorded there."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ampdebug._record_rows import text_to_sql, to_json
from ampdebug._store import run_file
from ampdebug._store_file import StoreFile

_NAME = re.compile(r"ampdebug-rank(\d+)\.sqlite")


def append_result(out: str | os.PathLike[str], kind: str, data: Mapping[str, Any]) -> Path:
    """Stores a result with the run in a directory, or in a new run of its own.

    Unlike a ``RunWriter`` it begins no recording: whether the run there finished or failed stays as it is.

    Args:
        out: The directory; made if need be. Of several ranks the lowest one's file takes the result.
        kind: ``"bisect"`` and so on; ``Run.results`` asks for it by this name.
        data: Plain JSON.

    Returns:
        The file.

    Raises:
        StoreError: It cannot be written, or a training that is still going on holds it.
        FormatError: What is there is no run, or one of another version.
    """
    text = to_json(dict(data), "data")
    file = _opened(out)
    try:
        with file.transaction() as connection:
            connection.execute("INSERT INTO results VALUES (?, ?, ?)", (time.time(), text_to_sql(kind), text))
    finally:
        if file.usable:
            file.close()
    return file.path


def check_appendable(out: str | os.PathLike[str]) -> None:
    """Makes sure that a result could be stored there now, and makes the run if there is none: before hours of work.

    Raises:
        StoreError: As ``append_result``.
        FormatError: As ``append_result``.
    """
    _opened(out).close()


def _opened(out: str | os.PathLike[str]) -> StoreFile:
    path = run_file(out, 0)
    if Path(out).is_dir():
        found = (match for match in map(_NAME.fullmatch, os.listdir(out)) if match)
        path = run_file(out, min((int(match[1]) for match in found), default=0))
    rank = int(_NAME.fullmatch(path.name)[1])  # type: ignore[index]  # run_file named it
    return StoreFile(path, rank, append=True)
