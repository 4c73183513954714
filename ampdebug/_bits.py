"""The numpy version of the statistics: reads the bit patterns, so that nothing has to be compared as a float.

:mod:`ampdebug._kernels` computes the same numbers faster where numba is installed; both are reached only through
:mod:`ampdebug._stats`, which prepares the arrays (flat, contiguous, native byte order) and documents the meaning.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Flat: TypeAlias = npt.NDArray[Any]

F16, BF16, F32, F64 = range(4)
"""What a flat array holds: float16 bits as uint16, bfloat16 bits as uint16, float32 bits as uint32, float64 values."""

# Columns of a row of statistics, as ampdebug._stats.STATS_DTYPE lays them out.
COUNT, ZEROS, NAN, POS_INF, NEG_INF, SUBNORMAL, FLUSHED, EXCEEDING, SATURATED, MANTISSA_BITS = range(10)
MIN, MAX, MEAN, RMS = range(10, 14)

# Elements worked on at a time: what a chunk needs stays in the second-level cache, and the temporary arrays stay below
# the size from which the C library asks the system for memory each time (128 KiB), which costs more than the work.
CHUNK = 16384

# From here on, 16-bit arrays are measured by counting each of the 65,536 patterns.
MANY = 32768


class _Layout(NamedTuple):
    """Bit patterns of a wide format (float32 or float64) as integers; magnitudes are ordered like these."""

    magnitude: int
    infinity: int
    mantissa_bits: int
    bias_shift: int  # exponent field minus this is the index into the 256 exponent counts
    normal16: int  # 2**-14
    flush16: int  # 2**-25
    max16: int  # 65504


def _layout(wide: type[np.floating[Any]], unsigned: type[np.unsignedinteger[Any]], mantissa: int, bias: int) -> _Layout:
    def bits(value: float) -> int:
        return int(np.array(value, wide).view(unsigned))

    sign = 1 << (np.dtype(unsigned).itemsize * 8 - 1)
    return _Layout(sign - 1, bits(np.inf), mantissa, bias - 127, bits(2.0**-14), bits(2.0**-25), bits(65504.0))


_LAYOUT32 = _layout(np.float32, np.uint32, 23, 127)
_LAYOUT64 = _layout(np.float64, np.uint64, 52, 1023)


def widen(flat: Flat, kind: int) -> Flat:
    """Return the values of a flat array as float32 (float64 for F64), exactly; a view where nothing has to be done."""
    if kind == F16:
        return flat.view(np.float16).astype(np.float32)
    if kind == BF16:
        wide = flat.astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)
    return flat.view(np.float32) if kind == F32 else flat


def _scale_exponent(flat: Flat) -> int:
    """Return k such that float64 values times 2**k can be squared without overflow, or underflow that matters."""
    largest = 0.0
    for begin in range(0, flat.size, CHUNK):
        chunk = np.abs(flat[begin : begin + CHUNK])
        largest = max(largest, float(np.max(chunk, initial=0.0, where=np.isfinite(chunk))))
    exponent = int(np.frexp(largest)[1])
    # Inside, squares of the largest stay within 2**±800 and their sum within range. ldexp by more than 1000 would
    # overflow in its own factor.
    return 0 if abs(exponent) <= 400 else -max(exponent, -1000)


def measure(flat: Flat, kind: int, rows: Flat, exponents: Flat, row: int, scratch: Flat) -> None:
    """Fill one row of statistics.

    Args:
        flat: 1-D contiguous array as ``kind`` says.
        kind: One of F16, BF16, F32, F64.
        rows: int64[n, 14], the memory of a STATS_DTYPE array (its last four columns hold float64 bits).
        exponents: uint32[n, 256].
        row: The row to write, in both.
        scratch: uint32[SCRATCH_SIZE], a workspace.
    """
    ints, floats = rows[row], rows[row].view(np.float64)
    layout = _LAYOUT64 if kind == F64 else _LAYOUT32
    unsigned: type[Any] = np.uint64 if kind == F64 else np.uint32
    ints[:] = 0
    floats[MIN : RMS + 1] = np.nan
    ints[COUNT] = flat.size
    if kind in (F16, BF16) and flat.size >= MANY:
        _measure_patterns(flat, kind, ints, floats, exponents[row])
        return
    counts = np.zeros(256, np.int64)
    scale = _scale_exponent(flat) if kind == F64 else 0
    total = squares = 0.0
    lowest, highest, mantissa = np.inf, -np.inf, 0
    magnitudes = scratch[: 2 * CHUNK].view(unsigned)
    indices = scratch[2 * CHUNK : 4 * CHUNK].view(np.int64)
    exacts = scratch[4 * CHUNK :].view(np.float64)
    for begin in range(0, flat.size, CHUNK):
        wide = widen(flat[begin : begin + CHUNK], kind)
        size = wide.size
        magnitude = np.bitwise_and(wide.view(unsigned), unsigned(layout.magnitude), out=magnitudes[:size])
        if int(magnitude.max()) >= layout.infinity:
            infinite = magnitude == unsigned(layout.infinity)
            finite = magnitude < unsigned(layout.infinity)
            negative = int(np.count_nonzero(wide[infinite] < 0))
            bad = size - int(np.count_nonzero(finite))
            ints[NEG_INF] += negative
            ints[POS_INF] += int(np.count_nonzero(infinite)) - negative
            ints[NAN] += bad - int(np.count_nonzero(infinite))
            # Selecting the finite ones is slow; zeros in the place of the others change no sum and are taken off below.
            lowest = min(lowest, float(np.where(finite, wide, np.inf).min()))
            highest = max(highest, float(np.where(finite, wide, -np.inf).max()))
            magnitude *= finite
            wide = np.where(finite, wide, wide.dtype.type(0))
        else:
            bad = 0
            lowest, highest = min(lowest, float(wide.min())), max(highest, float(wide.max()))
        top = int(magnitude.max())
        zeros = size - int(np.count_nonzero(magnitude))  # and the bad
        ints[ZEROS] += zeros - bad
        flushed = int(np.count_nonzero(magnitude <= unsigned(layout.flush16))) - zeros
        ints[FLUSHED] += flushed
        ints[SUBNORMAL] += int(np.count_nonzero(magnitude < unsigned(layout.normal16))) - zeros - flushed
        if top >= layout.max16:
            ints[SATURATED] += int(np.count_nonzero(magnitude == unsigned(layout.max16)))
            ints[EXCEEDING] += int(np.count_nonzero(magnitude > unsigned(layout.max16)))
        mantissa |= int(np.bitwise_or.reduce(magnitude))
        index = np.right_shift(magnitude, unsigned(layout.mantissa_bits), out=indices[:size], casting="unsafe")
        if layout.bias_shift:
            index -= layout.bias_shift
            np.clip(index, 0, 255, out=index)
        counts += np.bincount(index, minlength=256)
        counts[0] -= zeros
        exact = exacts[:size]
        if scale:
            np.ldexp(wide, scale, out=exact)
        else:
            exact[:] = wide
        total += float(exact.sum())
        squares += float(np.dot(exact, exact))
    exponents[row] = counts
    _finish(ints, floats, layout, lowest, highest, mantissa, total, squares, scale)


def measure_all(
    flats: Sequence[Flat], kinds: Sequence[int], rows: Flat, exponents: Flat, first_row: int, scratch: Flat
) -> None:
    """Fill one row of statistics for each array, from ``first_row`` on; see :func:`measure`."""
    for row, (flat, kind) in enumerate(zip(flats, kinds, strict=True), first_row):
        measure(flat, kind, rows, exponents, row, scratch)


@functools.cache
def _patterns(kind: int) -> tuple[Flat, Flat]:
    """Return the float32 magnitude bits and the float64 values (0 for the non-finite) of all 16-bit patterns."""
    wide = widen(np.arange(65536, dtype=np.uint16), kind)
    magnitude = wide.view(np.uint32) & np.uint32(_LAYOUT32.magnitude)
    return magnitude, np.where(magnitude < np.uint32(_LAYOUT32.infinity), wide, np.float32(0)).astype(np.float64)


def _measure_patterns(flat: Flat, kind: int, ints: Flat, floats: Flat, exponents: Flat) -> None:
    """Fill a row for many 16-bit values, from how often each pattern occurs."""
    counts = np.zeros(65536, np.int64)
    for begin in range(0, flat.size, 16 * CHUNK):  # bincount widens its input to eight bytes
        counts += np.bincount(flat[begin : begin + 16 * CHUNK], minlength=65536)
    seen = np.flatnonzero(counts)
    magnitude, value, times = (a[seen] for a in (*_patterns(kind), counts))
    infinity = _LAYOUT32.infinity
    ints[NAN] = times[magnitude > infinity].sum()
    ints[POS_INF], ints[NEG_INF] = (times[(magnitude == infinity) & (seen >> 15 == sign)].sum() for sign in (0, 1))
    ints[ZEROS] = counts[0] + counts[0x8000]
    finite = magnitude < infinity
    magnitude, value, times = magnitude[finite], value[finite], times[finite]
    lowest, highest = np.min(value, initial=np.inf), np.max(value, initial=-np.inf)
    below_flush, below_normal = (
        times[magnitude <= limit].sum() for limit in (_LAYOUT32.flush16, _LAYOUT32.normal16 - 1)
    )
    ints[FLUSHED], ints[SUBNORMAL] = below_flush - ints[ZEROS], below_normal - below_flush
    ints[SATURATED] = times[magnitude == _LAYOUT32.max16].sum()
    ints[EXCEEDING] = times[magnitude > _LAYOUT32.max16].sum()
    by_exponent = np.zeros(256, np.int64)
    np.add.at(by_exponent, magnitude >> np.uint32(_LAYOUT32.mantissa_bits), times)
    by_exponent[0] -= ints[ZEROS]
    exponents[:] = by_exponent
    weight = times.astype(np.float64)
    mantissa = int(np.bitwise_or.reduce(magnitude)) if magnitude.size else 0
    total, squares = float(np.dot(weight, value)), float(np.dot(weight, value * value))
    _finish(ints, floats, _LAYOUT32, float(lowest), float(highest), mantissa, total, squares, 0)


def _finish(
    ints: Flat,
    floats: Flat,
    layout: _Layout,
    lowest: float,
    highest: float,
    mantissa: int,
    total: float,
    squares: float,
    scale: int,
) -> None:
    """Write what follows from the sums (of the values times 2**scale), the extremes and the mantissa bits seen."""
    used = mantissa & ((1 << layout.mantissa_bits) - 1)
    if used:
        ints[MANTISSA_BITS] = layout.mantissa_bits + 1 - (used & -used).bit_length()
    finite_count = int(ints[COUNT] - ints[NAN] - ints[POS_INF] - ints[NEG_INF])
    if finite_count:
        floats[MIN] = lowest + 0.0  # no negative zeros: which of the two zeros is smaller means nothing
        floats[MAX] = highest + 0.0
        floats[MEAN] = np.ldexp(total / finite_count, -scale)
        floats[RMS] = np.ldexp(np.sqrt(squares / finite_count), -scale)


def nonfinite(flat: Flat, kind: int) -> tuple[int, int, int]:
    """Return how many elements are NaN, +inf, -inf."""
    if kind == F64:
        unsigned: type[Any] = np.uint64
        infinity, mask = _LAYOUT64.infinity, _LAYOUT64.magnitude
    elif kind == F32:
        unsigned = np.uint32
        infinity, mask = _LAYOUT32.infinity, _LAYOUT32.magnitude
    else:
        unsigned = np.uint16
        infinity, mask = (0x7C00 if kind == F16 else 0x7F80), 0x7FFF
    nan = positive = negative = 0
    for begin in range(0, flat.size, CHUNK):
        bits = flat[begin : begin + CHUNK].view(unsigned)
        magnitude = bits & unsigned(mask)
        if int(magnitude.max()) >= infinity:
            nan += int(np.count_nonzero(magnitude > unsigned(infinity)))
            positive += int(np.count_nonzero(bits == unsigned(infinity)))
            negative += int(np.count_nonzero(bits == unsigned(infinity | (mask + 1))))
    return nan, positive, negative


def update(
    before: Flat, after: Flat, kind: int, mantissa_bits: int, min_exponent: int
) -> tuple[int, int, int, float, float]:
    """Compare a parameter before and after an update (neither of kind F64).

    Returns:
        How many elements are non-finite on either side; of the others, how many changed, and how many of these by less
        than half a unit in the last place that ``before`` has in the format; the sums of squares of the change and of
        ``before``.
    """
    least = np.uint32((min_exponent + 127) << 23)
    fraction = 2.0 ** (-1 - mantissa_bits)
    bad = changed = lost = 0
    change_squares = weight_squares = 0.0
    half_ulps, weights, changes = np.empty((3, min(CHUNK, before.size)), np.float64)
    for begin in range(0, before.size, CHUNK):
        old = widen(before[begin : begin + CHUNK], kind)
        new = widen(after[begin : begin + CHUNK], kind)
        size = old.size
        finite = np.isfinite(old)
        finite &= np.isfinite(new)
        good = int(np.count_nonzero(finite))
        if good < size:  # zeros do no harm: they change nothing
            bad += size - good
            old, new = np.where(finite, old, np.float32(0)), np.where(finite, new, np.float32(0))
        half_ulp, weight, change = half_ulps[:size], weights[:size], changes[:size]
        # The power of two of the weight's binade, from its exponent bits; ldexp on arrays is slow.
        half_ulp[:] = np.maximum(old.view(np.uint32) & np.uint32(_LAYOUT32.infinity), least).view(np.float32)
        half_ulp *= fraction
        weight[:] = old
        np.subtract(new, weight, out=change)
        change_squares += float(np.dot(change, change))
        weight_squares += float(np.dot(weight, weight))
        moved = change != 0
        changed += int(np.count_nonzero(moved))
        np.abs(change, out=change)
        moved &= change < half_ulp
        lost += int(np.count_nonzero(moved))
    return bad, changed, lost, change_squares, weight_squares


MEASURE = (measure, measure, measure, measure)
"""By kind."""

SCRATCH_SIZE = 6 * CHUNK
"""Elements of the uint32 array that ``measure`` works in."""
