"""An SQLite file that one writer holds: opening, transactions, and what happens when they fail."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ampdebug._errors import FormatError, RunExistsError, StoreError
from ampdebug._schema import check_tables, create_tables

# 8 KB pages hold the blobs of a step with little waste; a checkpoint (two fsyncs) then comes every 16 MB of writing.
_PAGE_SIZE = 8192
_CHECKPOINT_PAGES = 2000


_TRIES = 8
"""How often a file that exists is found unlocked before it is taken for nobody's.

A writer lets go of the lock for some microseconds after each step; for longer, where other threads or programs keep it
from running on. Tries a while apart don't all fall into such gaps; one that does is short, and the writer waits for it.
"""


class StoreFile:
    """A run file open for writing.

    The write lock is held from opening to closing and not just in transactions, so that a second writer is refused,
    also one in another process. Readers are not hindered. The lock goes with the process, however that ends.

    Args:
        path: The file; its directory is made if need be.
        rank: Rank to note in a new file.
        append: Open the file that is there.

    Raises:
        RunExistsError: the file is there, and ``append`` is False.
        FormatError: the file that is there is no run, or of another version.
        StoreError: it can't be written, or another writer has it.
    """

    def __init__(self, path: Path, rank: int, *, append: bool) -> None:
        self.path = path
        self.lock = threading.RLock()
        self._closed: str | None = None
        self._process = os.getpid()
        self._pending = False
        tries = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Exclusive creation: of two processes that start at once, one gets the file and the other the error.
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError as error:
            if not path.is_file():
                raise StoreError(f"cannot record into {path.parent}: {error}") from error
            if not append:
                raise RunExistsError(
                    f"{path} already holds a run; choose another directory, delete the file, or pass append=True to "
                    "continue that run"
                ) from error
            tries = _TRIES
        except OSError as error:
            raise StoreError(f"cannot create {path}: {error}") from error
        self._connection = self._open(rank, tries)
        stat = os.stat(path)
        self._identity = (stat.st_dev, stat.st_ino)

    def _open(self, rank: int, tries: int) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = None
        try:
            connection = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
            connection.execute(f"PRAGMA page_size = {_PAGE_SIZE}")
            for _ in range(tries):
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
                time.sleep(0.01)
            # Where the file system can't do write-ahead logging, SQLite keeps to its rollback journal: slower, as safe.
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
            connection.execute("PRAGMA busy_timeout = 5000")
            connection.execute("BEGIN IMMEDIATE")
            if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                check_tables(connection, self.path, writing=True)
            else:
                create_tables(connection, rank, f"ampdebug, SQLite {sqlite3.sqlite_version}")
            self._commit(connection)
        except (sqlite3.Error, OSError, StoreError) as error:
            if connection is not None:
                connection.close()
            if isinstance(error, StoreError):
                raise
            if "locked" in str(error):
                raise StoreError(
                    f"{self.path} is being written by another monitor (or locked by another program); give every run a "
                    "directory of its own"
                ) from error
            if isinstance(error, (sqlite3.OperationalError, OSError)):
                raise StoreError(f"cannot write {self.path}: {error}") from error
            raise FormatError(f"{self.path} is not a run of ampdebug, or is damaged: {error}") from error
        return connection

    def query(self, sql: str) -> list[Any]:
        """Rows of a query, read within the open transaction."""
        with self._guarded() as connection:
            return connection.execute(sql).fetchall()

    def insert_pending(self, sql: str, row: Sequence[Any]) -> None:
        """Write a row that becomes lasting with the next transaction."""
        with self._guarded() as connection:
            self._pending = True
            connection.execute(sql, row)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Everything inside is written together, or not at all. It has become lasting when the block is left.

        Raises:
            StoreError: it could not be written. The file is closed then; what it held before stays readable.
        """
        with self._guarded() as connection:
            if self._pending:
                # Apart from the transaction, so that undoing that one does not take these back.
                self._commit(connection)
                self._pending = False
            try:
                yield connection
                self._commit(connection)
            except (sqlite3.Error, OSError):
                raise
            except BaseException:
                # Ctrl-C in the middle, or a mistake of ours: take back what was written here; the run can go on.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                connection.execute("BEGIN IMMEDIATE")
                raise

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[sqlite3.Connection]:
        with self.lock:
            if self._closed is not None:
                raise StoreError(f"{self.path} is closed: {self._closed}")
            if os.getpid() != self._process:
                raise StoreError(
                    f"{self.path} belongs to process {self._process}; a forked process can't record into it"
                )
            try:
                # SQLite would go on for ever writing into a deleted file.
                stat = os.stat(self.path)
                if (stat.st_dev, stat.st_ino) != self._identity:
                    raise OSError("it was deleted or replaced while recording")
                yield self._connection
            except (sqlite3.Error, OSError) as error:
                self._closed = f"recording ended by an error ({error})"
                # Closing rolls back. It must not hide the error that brought us here; nothing more can be saved anyway.
                with contextlib.suppress(sqlite3.Error):
                    self._connection.close()
                raise StoreError(
                    f"cannot write {self.path}: {error}; recording ends, what was written before stays readable"
                ) from error

    @staticmethod
    def _commit(connection: sqlite3.Connection) -> None:
        connection.execute("COMMIT")
        connection.execute("BEGIN IMMEDIATE")

    @property
    def usable(self) -> bool:
        """Not closed, not failed, and not in a forked process."""
        return self._closed is None and os.getpid() == self._process

    def close(self) -> None:
        """Close the file, as one plain file where possible."""
        with self._guarded() as connection:
            connection.execute("ROLLBACK")
            # A file without a log beside it also opens from a read-only place. With a reader around this can't be had;
            # the log then stays, which is as readable.
            connection.execute("PRAGMA busy_timeout = 100")
            with contextlib.suppress(sqlite3.OperationalError):
                connection.execute("PRAGMA journal_mode = DELETE")
            connection.close()
            self._closed = "recording has ended"
