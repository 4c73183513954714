"""The reader: one pass over a log, lines to records."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from ampdebug._errors import ArgumentError, FormatError
from ampdebug.logs._assemble import Assembler
from ampdebug.logs._document import Documents
from ampdebug.logs._format import LogFormat
from ampdebug.logs._pattern import user_format
from ampdebug.logs._scan import Scanner
from ampdebug.logs._source import Block, Source
from ampdebug.logs._table import BY_NAME, FORMATS, GENERIC
from ampdebug.rules._history import History

Progress = Callable[[int, int | None], None]
"""Called now and then with the bytes read so far and the size of the file (None where unknown)."""


@dataclass
class Coverage:
    """What was read and what was not.

    Attributes:
        name: The source.
        formats: ``{format: step lines}``.
        lines: Lines in the input.
        matched: Lines that were of some format or marker.
        bytes: Bytes after decompression.
        cut_lines: Over-long lines whose tail was not looked at.
        damage: Why the input ended early, else "".
        slow_lines: Lines on which the user's pattern was stopped.
    """

    name: str
    formats: dict[str, int] = field(default_factory=dict)
    lines: int = 0
    matched: int = 0
    bytes: int = 0
    cut_lines: int = 0
    damage: str = ""
    slow_lines: int = 0


def read_log(
    source: str | os.PathLike[str] | IO[Any],
    *,
    format: str | None = None,
    pattern: str | None = None,
    progress: Progress | None = None,
) -> tuple[History, Coverage]:
    """Read a training log in one pass.

    Args:
        source: A path (plain, .gz, .bz2, .xz), ``"-"`` for standard input, or an open file.
        format: Name of the only format to read; None recognises each line by itself.
        pattern: A regular expression with named groups step, loss, scale, overflow, grad_norm, lr, rank, epoch for a
            private format; takes the place of the table of formats.
        progress: Called after each block.

    Returns:
        The history, and what was covered.

    Raises:
        ArgumentError: An unknown format, both ``format`` and ``pattern``, or a pattern that can't be used.
        FormatError: The log cannot be opened.
    """
    rows: tuple[LogFormat, ...] = FORMATS
    generic, own = True, None
    if pattern is not None:
        if format is not None:
            raise ArgumentError(f"format={format!r} and pattern={pattern!r} exclude each other; give one of them")
        own = user_format(pattern)
    elif format is not None:
        if format not in BY_NAME:
            raise ArgumentError(
                f"format={format!r} is not a known log format; choose one of {', '.join(sorted(BY_NAME))}"
            )
        rows, generic = ((), True) if format == GENERIC.name else ((BY_NAME[format],), False)
    opened = Source(source)
    history = History(name=opened.name)
    assembler = Assembler(history)
    scanner = Scanner(assembler, rows, generic=generic, own=own)
    coverage = Coverage(opened.name)
    try:
        with scanner.deadline.installed():
            documents = Documents()
            for block in _counted(opened, coverage):
                if block.line == 1 and own is None and format is None:
                    documents.look(block.data)
                    scanner.header(block.data)
                for piece in documents.lines(block) if documents.found else (block,):
                    scanner.block(piece)
                if progress is not None:
                    done = opened.position()
                    progress(coverage.bytes if done is None else done, opened.size)
    except OSError as error:
        raise FormatError(f"cannot read the log {opened.name!r}: {error}") from error
    finally:
        opened.close()
    assembler.finish()
    coverage.formats = dict(assembler.formats)
    coverage.matched = scanner.matched
    coverage.cut_lines = opened.cut_lines + scanner.cut
    coverage.damage = opened.damage
    coverage.slow_lines = scanner.deadline.slow_lines
    return history, coverage


def _counted(source: Source, coverage: Coverage) -> Iterator[Block]:
    for block in source.blocks():
        coverage.bytes += len(block.data)
        coverage.lines = block.line + block.data.count(b"\n") - (1 if block.data.endswith(b"\n") else 0)
        yield block
