"""Opening a run file for reading, wherever it lies and whatever became of its writer."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import time
from pathlib import Path

from ampdebug._errors import FormatError, StoreError
from ampdebug._schema import check_tables

_SIDE_FILES = ("-wal", "-journal")
_COPY_TRIES = 5


def open_file(path: Path) -> tuple[sqlite3.Connection, tempfile.TemporaryDirectory[str] | None]:
    """Open a run file without ever writing to it.

    Training may be writing it, may have been killed (its last steps are in the log file beside it then), and the folder
    may be read-only. SQLite needs a writable folder to read a log; where there is none, the file is copied first.

    Returns:
        The connection and the folder of the copy, which must live as long as the connection; None without a copy.

    Raises:
        StoreError: it can't be opened.
        FormatError: it is truncated, damaged or no run.
    """
    try:
        return _connect(path.absolute().as_uri() + "?mode=ro", path), None
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise StoreError(f"cannot read {path}: another program holds a lock on it ({error}); try again") from error
        first = error
    except sqlite3.DatabaseError as error:
        raise FormatError(f"{path} {what_is_wrong(path, error)}") from error
    try:
        if not any(_size(_beside(path, suffix)) for suffix in _SIDE_FILES):
            return _connect(path.absolute().as_uri() + "?immutable=1", path), None
        folder = tempfile.TemporaryDirectory(prefix="ampdebug-")
        try:
            copy = _copy(path, Path(folder.name))
            # Our own copy: a writable connection, so that SQLite can replay the log into it.
            return _connect(copy.as_uri(), path), folder
        except BaseException:
            folder.cleanup()
            raise
    except sqlite3.OperationalError as error:
        raise StoreError(f"cannot read {path}: {first}; a read-only way failed too: {error}") from error
    except sqlite3.DatabaseError as error:
        raise FormatError(f"{path} {what_is_wrong(path, error)}") from error
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error}") from error


def _connect(uri: str, path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, timeout=5, isolation_level=None, check_same_thread=False)
    try:
        # The file may come from anywhere: no function of its schema may have side effects, and nothing is written.
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA cell_size_check = ON")
        # Text that is damaged is shown as it is; the record that it belongs to judges it.
        connection.text_factory = lambda data: data.decode("utf-8", "backslashreplace")
        check_tables(connection, path)
        # SQLite notices a file that lacks whole pages, but takes a part of a page for a page.
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
        if _size(path) < pages * size and not any(_size(_beside(path, suffix)) for suffix in _SIDE_FILES):
            raise FormatError(f"{path} is truncated: {_size(path)} bytes are left of {pages * size}")
    except BaseException:
        connection.close()
        raise
    return connection


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _copy(path: Path, folder: Path) -> Path:
    """Copy the file and its log so that they fit together, though a writer may be at work."""
    for attempt in range(_COPY_TRIES):
        before = _state(path)
        for suffix in ("", *_SIDE_FILES):
            source, target = _beside(path, suffix), folder / ("run" + suffix)
            target.unlink(missing_ok=True)
            if source.exists():
                shutil.copyfile(source, target)
        if _state(path) == before:
            return folder / "run"
        time.sleep(0.05 * (attempt + 1))
    raise StoreError(
        f"cannot read {path}: its folder is read-only, so it must be copied to be read, and it changed during each of "
        f"{_COPY_TRIES} copies; open it from a folder you may write to, or when training has ended"
    )


def _state(path: Path) -> list[tuple[int, int] | None]:
    result: list[tuple[int, int] | None] = []
    for suffix in ("", *_SIDE_FILES):
        try:
            stat = _beside(path, suffix).stat()
        except FileNotFoundError:
            result.append(None)
        else:
            result.append((stat.st_size, stat.st_mtime_ns))
    return result


def what_is_wrong(path: Path, error: Exception) -> str:
    """The end of a sentence that begins with the file's name."""
    # Read only now that SQLite gave up on it. Opening the file by hand while a writer of this same process has it would
    # drop the writer's locks when we close it (POSIX locks belong to the process).
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(100)
    except OSError as problem:
        return f"cannot be read: {problem}"
    if not head.startswith(b"SQLite format 3\0"):
        return "is not a run of ampdebug: it is not an SQLite database"
    page = int.from_bytes(head[16:18], "big")
    page = 65536 if page == 1 else page
    expected = page * int.from_bytes(head[28:32], "big")
    if len(head) < 100 or size < expected:
        return f"is truncated: {size} bytes are left of {expected}"
    return f"is damaged: {error}"
