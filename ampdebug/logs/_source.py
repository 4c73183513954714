"""Bytes in, blocks of whole lines out: compressed files, standard input, odd encodings, endless lines.

Nothing here knows what a training log looks like. The promises: one pass, bounded memory whatever the input, and
line numbers that agree with ``sed -n Np``.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, cast

from ampdebug._errors import FormatError

BLOCK = 1 << 20
"""Bytes read at a time."""

LINE_LIMIT = 8192
"""A line (or a piece between two carriage returns) is looked at no further than this many bytes."""

_CARRY_LIMIT = 4 << 20
_ANSI = re.compile(
    rb"\x1b(?:\[[0-9;:?]{0,64}[ -/]{0,4}[@-~]|\][^\x07\x1b\n]{0,512}(?:\x07|\x1b\\)|[()][A-Z0-9]|[=>78DEHMNOZc])"
)
_OPENERS: tuple[tuple[bytes, Callable[[IO[bytes]], Any]], ...] = (
    (b"\x1f\x8b", lambda raw: gzip.GzipFile(fileobj=raw)),
    (b"BZh", bz2.BZ2File),
    (b"\xfd7zXZ\x00", lzma.LZMAFile),
)


@dataclass(frozen=True, slots=True)
class Block:
    """Some whole lines.

    Attributes:
        data: The bytes, newline-terminated except perhaps at the end of the input. No ANSI colour codes, no NUL bytes,
            no ``\\r\\n``; a lone ``\\r`` is kept and separates pieces of one line.
        line: Number of the first line in it, counted from 1.
    """

    data: bytes
    line: int


class Source:
    """A log opened for one pass.

    Args:
        source: A path, ``"-"`` for standard input, or an open file (binary or text).

    Attributes:
        name: For messages.
        size: Bytes on disk, or None where unknown. For a compressed file the compressed size.
        cut_lines: How many over-long lines lost their tail so far.
        damage: One sentence when the input broke off (a truncated .gz), else "".

    Raises:
        FormatError: The path is missing, a directory or not readable.
    """

    def __init__(self, source: str | os.PathLike[str] | IO[Any]) -> None:
        self.size: int | None = None
        self.cut_lines = 0
        self.damage = ""
        self._close: Callable[[], None] | None = None
        if isinstance(source, str) and source == "-":
            self.name = "standard input"
            raw: IO[Any] = sys.stdin.buffer
        elif isinstance(source, str | os.PathLike):
            self.name = os.fspath(source)
            try:
                raw = open(source, "rb")  # noqa: SIM115 - closed by close(); the caller iterates in between
                self.size = os.fstat(raw.fileno()).st_size
            except (OSError, ValueError) as error:
                raise FormatError(f"cannot read the log {self.name!r}: {error}") from error
            self._close = raw.close
        else:
            self.name = str(getattr(source, "name", "the given file object"))
            raw = source
        self._raw = raw

    def close(self) -> None:
        """Close what this object opened (never a file that was handed in)."""
        if self._close is not None:
            self._close()

    def position(self) -> int | None:
        """Bytes of the file on disk that were read so far, None where that is unknown (standard input, a pipe)."""
        if self.size is None:
            return None
        try:
            return self._raw.tell()
        except (OSError, ValueError):
            return None

    def _read(self, stream: Any) -> Iterator[bytes]:
        while True:
            try:
                piece = stream.read1(BLOCK) if hasattr(stream, "read1") else stream.read(BLOCK)
            except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
                self.damage = f"the input breaks off: {error}"
                return
            if not piece:
                return
            yield piece.encode("utf-8", "replace") if isinstance(piece, str) else bytes(piece)

    def _pieces(self) -> Iterator[bytes]:
        pieces = self._read(self._raw)
        head = b""
        for piece in pieces:
            head += piece
            if len(head) >= 16:
                break
        for magic, opener in _OPENERS:
            if head.startswith(magic):
                pieces = self._read(opener(cast(IO[bytes], _Chained(head, pieces))))
                head = b""
                for piece in pieces:
                    head += piece
                    if len(head) >= 16:
                        break
                break
        encoding = _wide_encoding(head)
        if encoding is None:
            if head:
                yield head.removeprefix(codecs.BOM_UTF8)
            yield from pieces
            return
        decoder = codecs.getincrementaldecoder(encoding)("replace")
        if head:
            yield decoder.decode(head).lstrip("\ufeff").encode("utf-8", "replace")
        for piece in pieces:
            yield decoder.decode(piece).encode("utf-8", "replace")

    def blocks(self) -> Iterator[Block]:
        """Yield the input as blocks of whole lines, once."""
        line = 1
        carry = b""
        dropping = False
        for piece in self._pieces():
            if dropping:
                # The head of an endless line was handed out; its tail up to the newline is of no use.
                end = piece.find(b"\n")
                if end < 0:
                    continue
                piece = piece[end:]
                dropping = False
            data = carry + piece if carry else piece
            end = data.rfind(b"\n") + 1
            if end == 0:
                if len(data) <= _CARRY_LIMIT:
                    carry = data
                    continue
                # A progress bar may write megabytes between newlines: keep its pieces, else only the head of the line.
                end = data.rfind(b"\r") + 1
                if end == 0:
                    self.cut_lines += 1
                    yield Block(_clean(data[:LINE_LIMIT]), line)
                    carry, dropping = b"", True
                    continue
            carry = data[end:]
            data = data[:end]
            yield Block(_clean(data), line)
            line += data.count(b"\n")
        if carry:
            yield Block(_clean(carry), line)


class _Chained(io.RawIOBase):
    """A readable stream of bytes already read plus those to come, so that a decompressor can start at byte 0."""

    def __init__(self, head: bytes, rest: Iterator[bytes]) -> None:
        self._buffer = head
        self._rest = rest

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if not self._buffer:
            self._buffer = next(self._rest, b"")
        if size < 0:
            self._buffer += b"".join(self._rest)
            size = len(self._buffer)
        piece, self._buffer = self._buffer[:size], self._buffer[size:]
        return piece

    def readinto(self, buffer: Any) -> int:
        piece = self.read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


def _wide_encoding(head: bytes) -> str | None:
    """Which two-byte encoding the text is in (PowerShell's ``>`` writes UTF-16), None for everything ASCII-like."""
    if head.startswith(codecs.BOM_UTF16_LE):
        return "utf-16-le"
    if head.startswith(codecs.BOM_UTF16_BE):
        return "utf-16-be"
    sample = head[:4096]
    if len(sample) >= 16:
        zeros = sample[1::2].count(0), sample[0::2].count(0)
        half = len(sample) // 2
        if zeros[0] > 0.7 * half and zeros[1] < 0.1 * half:
            return "utf-16-le"
        if zeros[1] > 0.7 * half and zeros[0] < 0.1 * half:
            return "utf-16-be"
    return None


def _clean(data: bytes) -> bytes:
    # Each test is one memchr over the block; the copies are only made for logs that need them.
    if b"\0" in data:
        data = data.replace(b"\0", b"")
    if b"\x1b" in data:
        data = _ANSI.sub(b"", data)
    if b"\r\n" in data:
        data = data.replace(b"\r\n", b"\n")
    return data
