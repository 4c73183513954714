"""Numbers of one step as compressed columns, and back; plain enough for any language to decode.

A *column blob* is a zlib stream of ``codes + column 0 + column 1 + ...``. ``codes`` has one ASCII byte a column that
says how its values are stored, little-endian and without gaps: ``0`` all zero (no bytes follow), ``B H I Q`` unsigned
integers of 1, 2, 4, 8 bytes, ``q`` signed 8 bytes, ``f`` float32, ``d`` float64. A column takes the narrowest type that
keeps every value exactly.

A *count blob* holds the exponent histograms of a step: for every row, in order, the ``bins_length`` counts from bin
``bins_first`` on, concatenated over the rows. Most counts are small, so they are stored as a cascade: one uint8 a
count; for each that reads 255 a uint16 in the second part; for each of those that reads 65535 a uint32 in the third.

Files are not trusted: every size is known before anything is unpacked, so a file can't make the reader allocate more
than its declared number of rows takes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

MAX_ROWS = 1 << 20
"""More rows in one step than any network has; a file that declares more is refused."""

BINS = 256

_TYPES: dict[int, np.dtype[Any] | None] = {
    ord("0"): None,
    ord("B"): np.dtype("u1"),
    ord("H"): np.dtype("<u2"),
    ord("I"): np.dtype("<u4"),
    ord("Q"): np.dtype("<u8"),
    ord("q"): np.dtype("<i8"),
    ord("f"): np.dtype("<f4"),
    ord("d"): np.dtype("<f8"),
}
_UNSIGNED = ((0, "0"), (0xFF, "B"), (0xFFFF, "H"), (0xFFFFFFFF, "I"), (0xFFFFFFFFFFFFFFFF, "Q"))


class BlobError(ValueError):
    """A blob does not decode to what its row declares; the caller adds file and step."""


def _compress(data: bytes) -> bytes:
    # Run-length matching: measured 3-4 times faster than the default strategy here and within 1 % of its size, because
    # these bytes repeat in runs (zero columns, high bytes) and hardly ever as longer strings.
    packer = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
    return packer.compress(data) + packer.flush()


def _codes(columns: Sequence[Array]) -> str:
    """The narrowest type that keeps every value, for each column; all columns at once, as each call has its cost."""
    codes = ["0"] * len(columns)
    integers = [index for index, column in enumerate(columns) if column.dtype.kind != "f"]
    fractions = [index for index, column in enumerate(columns) if column.dtype.kind == "f"]
    if integers:
        block = np.array([columns[index] for index in integers], np.int64)
        for index, low, high in zip(integers, block.min(axis=1).tolist(), block.max(axis=1).tolist(), strict=True):
            codes[index] = "q" if low < 0 else next(code for limit, code in _UNSIGNED if high <= limit)
    if fractions:
        block = np.array([columns[index] for index in fractions], np.float64)
        with np.errstate(over="ignore", under="ignore"):
            kept = (block.astype(np.float32) == block) | np.isnan(block)
        for index, narrow in zip(fractions, kept.all(axis=1).tolist(), strict=True):
            codes[index] = "f" if narrow else "d"
    return "".join(codes)


def pack_columns(columns: Sequence[Array]) -> bytes:
    """Pack one-dimensional columns of equal length, of floats or of integers below 2**63, into a column blob."""
    codes = _codes(columns) if len(columns[0]) else "0" * len(columns)
    parts = [codes.encode()]
    for column, code in zip(columns, codes, strict=True):
        kind = _TYPES[ord(code)]
        if kind is not None:
            parts.append(column.astype(kind, copy=False).tobytes())
    return _compress(b"".join(parts))


def unpack_columns(blob: bytes, columns: int, rows: int) -> list[Array]:
    """Unpack a column blob.

    Args:
        blob: What `pack_columns` made.
        columns: How many columns it must hold.
        rows: How many values each column must hold, at most `MAX_ROWS`.

    Returns:
        One array ``[rows]`` a column, in its stored type.

    Raises:
        BlobError: it is damaged, or larger or smaller than that.
    """
    _check_rows(rows)
    stream = zlib.decompressobj()
    try:
        codes = stream.decompress(blob, columns)
        kinds = [_TYPES[code] for code in codes]
        if len(kinds) != columns:
            raise BlobError(f"ends after {len(kinds)} of {columns} column codes")
        size = sum(kind.itemsize for kind in kinds if kind is not None) * rows
        data = stream.decompress(stream.unconsumed_tail, size + 1)
    except zlib.error as error:
        raise BlobError(f"does not decompress ({error})") from error
    except KeyError as error:
        raise BlobError(f"unknown column code {error}") from error
    _check_size(stream, len(data), size, rows)
    result, offset = [], 0
    for kind in kinds:
        if kind is None:
            result.append(np.zeros(rows, np.uint8))
            continue
        result.append(np.frombuffer(data, kind, rows, offset))
        offset += kind.itemsize * rows
    return result


def crop_histograms(exponents: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Array]:
    """Cut the zeros off both ends of each histogram.

    Args:
        exponents: uint32 ``[rows, 256]``, counts by biased float32 exponent.

    Returns:
        ``(first, length, counts)``: first non-empty bin and how many bins from there to the last non-empty one, int64
        ``[rows]`` (both 0 for an empty histogram), and the counts of these bins, concatenated, uint32.
    """
    rows = len(exponents)
    used = np.flatnonzero(exponents.any(axis=0)) if rows else np.empty(0, np.int64)
    if not len(used):
        return np.zeros(rows, np.int64), np.zeros(rows, np.int64), np.empty(0, np.uint32)
    # A step uses some 20 to 40 of the 256 bins: everything after this line works on these only.
    low, width = int(used[0]), int(used[-1]) + 1 - int(used[0])
    window = np.ascontiguousarray(exponents[:, low : low + width])
    filled = window != 0
    first = filled.argmax(axis=1)
    length = width - filled[:, ::-1].argmax(axis=1) - first
    empty = ~filled.any(axis=1)
    length[empty] = 0
    flat = np.arange(rows) * width + first
    counts = window.reshape(-1)[_ranges(flat, length)]
    return np.where(empty, 0, first + low), length, counts


def _ranges(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The indices ``start, start + 1, ... start + length - 1`` of every range, concatenated."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.asarray(np.repeat(starts - (ends - lengths), lengths) + np.arange(total), np.int64)


def pack_counts(counts: Array) -> bytes:
    """Pack histogram counts (uint32, any number) into a count blob."""
    small = np.minimum(counts, 0xFF).astype(np.uint8)
    rest = counts[counts >= 0xFF]
    middle = np.minimum(rest, 0xFFFF).astype("<u2")
    large = rest[rest >= 0xFFFF].astype("<u4")
    return _compress(small.tobytes() + middle.tobytes() + large.tobytes())


def unpack_counts(blob: bytes, first: Array, length: Array) -> npt.NDArray[np.uint32]:
    """Unpack a count blob into full histograms.

    Args:
        blob: What `pack_counts` made.
        first: First bin of each row, integers ``[rows]``.
        length: Number of bins of each row, integers ``[rows]``.

    Returns:
        uint32 ``[rows, 256]``.

    Raises:
        BlobError: it is damaged, or does not fit ``first`` and ``length``.
    """
    check_bins(first, length)
    start, size = first.astype(np.int64), length.astype(np.int64)
    total = int(size.sum())
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(blob, 7 * total + 1)
    except zlib.error as error:
        raise BlobError(f"does not decompress ({error})") from error
    if len(data) < total:
        raise BlobError(f"has {len(data)} bytes for {total} histogram counts")
    counts = np.frombuffer(data, np.uint8, total).astype(np.uint32)
    wider = np.flatnonzero(counts == 0xFF)
    offset = total
    for kind, mark in (("<u2", 0xFFFF), ("<u4", None)):
        need = len(wider) * np.dtype(kind).itemsize
        if len(data) < offset + need:
            raise BlobError(f"has {len(data)} bytes where {total} histogram counts need at least {offset + need}")
        values = np.frombuffer(data, kind, len(wider), offset)
        counts[wider] = values
        offset += need
        if mark is not None:
            wider = wider[values == mark]
    _check_size(stream, len(data), offset, len(first))
    result = np.zeros((len(first), BINS), np.uint32)
    result.reshape(-1)[_ranges(np.arange(len(first)) * BINS + start, size)] = counts
    return result


def check_bins(first: Array, length: Array) -> None:
    """Raise `BlobError` unless every row's bins lie within a histogram."""
    # Each bound by itself: a sum of numbers from a damaged file may overflow.
    if np.any((first < 0) | (length < 0) | (first > BINS) | (length > BINS)) or np.any(first + length > BINS):
        raise BlobError(f"names histogram bins outside 0 to {BINS - 1}")


def _check_rows(rows: int) -> None:
    if not 0 <= rows <= MAX_ROWS:
        raise BlobError(f"declares {rows} rows; 0 to {MAX_ROWS} are possible")


def _check_size(stream: Any, size: int, expected: int, rows: int) -> None:
    if size != expected:
        more = "more than " if size > expected else ""
        raise BlobError(f"holds {more}{min(size, expected)} bytes where its {rows} rows take {expected}")
    if not stream.eof:
        # zlib reports the end, and checks its checksum, only once asked for more than there is.
        try:
            extra = stream.decompress(stream.unconsumed_tail, 1)
        except zlib.error as error:
            raise BlobError(f"does not decompress ({error})") from error
        if extra or not stream.eof:
            raise BlobError(f"is cut short or holds more than its {rows} rows take")
