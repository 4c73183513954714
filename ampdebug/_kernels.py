"""The compiled version of the statistics (numba); same numbers as :mod:`ampdebug._bits`, reached through ``_stats``.

Importing this module imports numba, so only ``_stats`` does it, when something is first measured.

An array is worked off in blocks that stay in the first-level cache, in a few passes, of which all but the last are
loops that the compiler turns into vector code:

1. *widen* (16-bit formats only): to float32 bits.
2. *scan*: on integers, which can be ordered like the floats they stand for and know no trouble with NaN: smallest and
   largest value, smallest nonzero magnitude, zeros, mantissa bits in use. It tells which of the rarer things are in
   this block at all (non-finite, below 2**-14, from 65504 on); they are counted only there.
3. *sums* in float64.
4. *exponents*: counted in pairs where the block spans at most 31 binades, which is nearly always: two 5-bit indices
   make one of 1024 counters, so that half as many counters are written (the stores are what limits it).
   Otherwise one by one, into four tables by turns, so that equal neighbours don't wait for each other.

numba computes integers in 64 bits unless told otherwise after each operation, and 64-bit vectors hold half as many;
hence all the casts.

All compiled functions are in this one file on purpose: numba keeps machine code on disk by source file, and does not
notice when a function from another file that was compiled into it has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numba as nb
import numpy
from numba.core import cgutils
from numba.extending import intrinsic

from ampdebug import _bits
from ampdebug._bits import (
    BF16,
    COUNT,
    EXCEEDING,
    F16,
    F32,
    F64,
    FLUSHED,
    MANTISSA_BITS,
    MAX,
    MEAN,
    MIN,
    NAN,
    NEG_INF,
    POS_INF,
    RMS,
    SATURATED,
    SUBNORMAL,
    ZEROS,
)

np: Any = numpy
"""In compiled functions numba's rules for types hold, not the ones that numpy's annotations describe."""

NUMBA_VERSION: str = nb.__version__

_F = TypeVar("_F", bound=Callable[..., Any])


_compiled_functions: list[Any] = []


def _compiled(**options: Any) -> Callable[[_F], _F]:
    """Compile at the first call, run without the GIL, keep the machine code on disk if there is a place for it."""

    def decorate(function: _F) -> _F:
        try:
            compiled: _F = nb.njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # "no locator available": neither our folder nor the user's cache folder can be written
            compiled = nb.njit(nogil=True, **options)(function)
        _compiled_functions.append(compiled)
        return compiled

    return decorate


# Sums may be reordered (that is what makes them vector code), but NaN and infinities keep their meaning: no 'nnan' and
# no 'ninf'.
_REORDERED = {"reassoc", "contract", "nsz"}

BLOCK = 2048
_FEW = 256  # shorter blocks are counted straight into the row

# The scratch array, in uint32: a block of float32 bits, indices of pairs (as uint16), two tables of pairs, four of
# singles.
_INDEX = BLOCK
_PAIRS = _INDEX + BLOCK // 4
_SINGLES = _PAIRS + 2 * 1024
SCRATCH_SIZE = _SINGLES + 4 * 256

_INF = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_FLUSH16 = np.uint32(0x33000000)  # 2**-25
_NORMAL16 = np.uint32(0x38800000)  # 2**-14
_MAX16 = np.uint32(0x477FE000)  # 65504
_LOWEST = np.int32(-(2**31))
_HIGHEST = np.int32(2**31 - 1)
_ONES = np.uint32(2**32 - 1)
_U0, _U1, _U13, _U16, _U23, _U24 = (np.uint32(k) for k in (0, 1, 13, 16, 23, 24))
_I0, _I5, _I31 = (np.int32(k) for k in (0, 5, 31))
_SUBNORMAL_BELOW = np.uint32(1 << 23)
_INFINITY16 = np.uint32(0x1F << 23)
_REBIAS = np.uint32(112 << 23)
_TWO_M14 = np.float32(2.0**-14)
_BITS15, _SIGN16, _PAIR = np.uint32(0x7FFF), np.uint32(0x8000), np.uint64(0x3FF)
_Q16, _Q32, _Q48, _Q1024 = (np.uint64(k) for k in (16, 32, 48, 1024))

_MAGNITUDE64 = np.uint64(2**63 - 1)
_INF64 = np.uint64(0x7FF << 52)
_MANTISSA64 = np.uint64(2**52 - 1)


@_compiled()
def _widen(source: Any, kind: int, target: Any) -> None:
    """float16 or bfloat16 bits (uint16) to float32 bits of the same values (uint32)."""
    if kind == BF16:
        for i in range(source.size):
            target[i] = np.uint32(np.uint32(source[i]) << _U16)
        return
    for i in range(source.size):
        w = np.uint32(source[i])
        m = np.uint32(np.uint32(w & _BITS15) << _U13)
        normal = np.uint32(m + _REBIAS)
        normal = np.uint32(normal + _REBIAS) if m >= _INFINITY16 else normal  # to the all-ones exponent
        # A subnormal's bits, put below 2**-14, less 2**-14: float32 arithmetic normalises them, exactly, and without
        # ever computing with a float32 subnormal, which is slow.
        small = np.float32(np.uint32(normal + _SUBNORMAL_BELOW).view(np.float32) - _TWO_M14).view(np.uint32)
        wide = normal if m >= _SUBNORMAL_BELOW else small
        target[i] = np.uint32(wide | np.uint32(np.uint32(w & _SIGN16) << _U16))


@_compiled()
def _scan(u: Any) -> Any:
    """Smallest and largest value (as ordered integers), smallest nonzero magnitude less one, zeros, all bits used."""
    lowest, highest, smallest, zeros, used = _HIGHEST, _LOWEST, _ONES, _U0, _U0
    for i in range(u.size):
        v = np.int32(u[i])
        v = np.int32(v ^ np.int32(np.int32(v >> _I31) & _HIGHEST))
        lowest = min(lowest, v)
        highest = max(highest, v)
        m = np.uint32(u[i] & _MAGNITUDE)
        smallest = min(smallest, np.uint32(m - _U1))  # zero becomes the largest
        zeros = np.uint32(zeros + np.uint32(m == _U0))
        used = np.uint32(used | m)
    return lowest, highest, smallest, zeros, used


@_compiled()
def _magnitude(ordered: Any) -> Any:
    """The magnitude bits of a value that _scan returned."""
    return np.uint32(ordered) if ordered >= 0 else np.uint32(np.uint32(~ordered) & _MAGNITUDE)


@_compiled()
def _value(ordered: Any) -> Any:
    """The value that _scan returned, as a float64."""
    return np.float64(np.int32(ordered ^ np.int32(np.int32(ordered >> _I31) & _HIGHEST)).view(np.float32))


@_compiled()
def _replace_nonfinite(u: Any, target: Any, ints: Any) -> Any:
    """Copy with zeros for the non-finite, which are counted; smallest and largest finite value as in _scan."""
    lowest, highest = _HIGHEST, _LOWEST
    nan = positive = negative = 0
    for i in range(u.size):
        w = u[i]
        m = np.uint32(w & _MAGNITUDE)
        bad = m >= _INF
        nan += m > _INF
        positive += w == _INF
        negative += bad and m == _INF and w != _INF
        v = np.int32(w)
        v = np.int32(v ^ np.int32(np.int32(v >> _I31) & _HIGHEST))
        lowest = min(lowest, _HIGHEST if bad else v)
        highest = max(highest, _LOWEST if bad else v)
        target[i] = _U0 if bad else w
    ints[NAN] += nan
    ints[POS_INF] += positive
    ints[NEG_INF] += negative
    return nan + positive + negative, lowest, highest


@_compiled()
def _count_small(u: Any, limit: Any) -> Any:
    """How many nonzero magnitudes are at most the limit (as bits)."""
    found = _U0
    for i in range(u.size):
        # Zero, less one, is the largest.
        found = np.uint32(found + np.uint32(np.uint32(np.uint32(u[i] & _MAGNITUDE) - _U1) < limit))
    return np.int64(found)


@_compiled()
def _count_large(u: Any) -> Any:
    """How many magnitudes are 65504, and how many above."""
    equal = above = _U0
    for i in range(u.size):
        m = np.uint32(u[i] & _MAGNITUDE)
        equal = np.uint32(equal + np.uint32(m == _MAX16))
        above = np.uint32(above + np.uint32(m > _MAX16))
    return np.int64(equal), np.int64(above)


@_compiled(fastmath=_REORDERED)
def _sums(f: Any) -> Any:
    total = squares = 0.0
    for i in range(f.size):
        x = np.float64(f[i])
        total += x
        squares += x * x
    return total, squares


@_compiled()
def _count_pairs(u: Any, base: Any, index: Any, pairs: Any, hist: Any) -> None:
    """Count exponents base+1 … base+31 in pairs; zeros, which come out at or below base, go into the unread index 0."""
    half = (u.size // 2) & ~3  # whole groups of four pairs
    low = np.int32(base)
    # Two slices: with u[i + half] numba tests for a negative index, and the loop is no longer vector code.
    left, right = u[:half], u[half : 2 * half]
    for i in range(half):
        a = np.int32(np.int32(np.uint32(left[i] << _U1) >> _U24) - low)
        b = np.int32(np.int32(np.uint32(right[i] << _U1) >> _U24) - low)
        index[i] = np.uint16(np.int32(max(a, _I0) | np.int32(max(b, _I0) << _I5)))
    # Four indices a load, two tables by turns: an increment need not wait for the one before it.
    fours = index.view(np.uint64)
    for i in range(half // 4):
        w = fours[i]
        pairs[np.uint64(w & _PAIR)] += _U1
        pairs[np.uint64(np.uint64(np.uint64(w >> _Q16) & _PAIR) + _Q1024)] += _U1
        pairs[np.uint64(np.uint64(w >> _Q32) & _PAIR)] += _U1
        pairs[np.uint64(np.uint64(w >> _Q48) + _Q1024)] += _U1
    for i in range(2 * half, u.size):
        m = np.uint32(u[i] & _MAGNITUDE)
        if m != _U0:
            hist[m >> _U23] += _U1


@_compiled()
def _fold_pairs(base: Any, pairs: Any, hist: Any) -> None:
    """Add the counts of pairs to the row and empty them."""
    for b in range(32):
        both = _U0
        for a in range(32):
            at = 32 * b + a
            found = np.uint32(pairs[at] + pairs[1024 + at])
            pairs[at] = pairs[1024 + at] = _U0
            both = np.uint32(both + found)
            if a:
                hist[min(base + a, 255)] += found
        if b:
            hist[min(base + b, 255)] += both


@_compiled()
def _count_singles(u: Any, singles: Any, hist: Any) -> None:
    """Count any exponents, zeros among those of index 0."""
    if u.size < _FEW:
        for i in range(u.size):
            hist[np.uint32(u[i] << _U1) >> _U24] += _U1
        return
    quarter = u.size // 4
    part0, part1, part2, part3 = u[:quarter], u[quarter : 2 * quarter], u[2 * quarter : 3 * quarter], u[3 * quarter :]
    table0, table1, table2, table3 = singles[:256], singles[256:512], singles[512:768], singles[768:]
    for i in range(quarter):
        table0[np.uint32(part0[i] << _U1) >> _U24] += _U1
        table1[np.uint32(part1[i] << _U1) >> _U24] += _U1
        table2[np.uint32(part2[i] << _U1) >> _U24] += _U1
        table3[np.uint32(part3[i] << _U1) >> _U24] += _U1
    for i in range(quarter, part3.size):
        table3[np.uint32(part3[i] << _U1) >> _U24] += _U1


@_compiled()
def _block(u: Any, f: Any, ints: Any, floats: Any, hist: Any, scratch: Any, base: Any) -> Any:
    """Add one block to a row whose mean, rms and mantissa bits still hold sums; returns the base of the pair tables."""
    lowest, highest, smallest, zeros, used = _scan(u)
    zeros = np.int64(zeros)
    if max(_magnitude(lowest), _magnitude(highest)) >= _INF:
        size = u.size
        target = scratch[:size]
        bad, lowest, highest = _replace_nonfinite(u, target, ints)
        if bad == size:
            return base
        u = target
        f = target.view(np.float32)
        _, _, smallest, zeros, used = _scan(u)
        zeros = np.int64(zeros) - bad
    else:
        bad = np.int64(0)
    ints[ZEROS] += zeros
    floats[MIN] = min(floats[MIN], _value(lowest))
    floats[MAX] = max(floats[MAX], _value(highest))
    top = max(_magnitude(lowest), _magnitude(highest))
    if top == _U0:
        return base
    ints[MANTISSA_BITS] |= np.int64(used)
    if smallest < np.uint32(_NORMAL16 - _U1):
        flushed = _count_small(u, _FLUSH16) if smallest < _FLUSH16 else np.int64(0)
        ints[FLUSHED] += flushed
        ints[SUBNORMAL] += _count_small(u, np.uint32(_NORMAL16 - _U1)) - flushed
    if top >= _MAX16:
        equal, above = _count_large(u)
        ints[SATURATED] += equal
        ints[EXCEEDING] += above
    total, squares = _sums(f)
    floats[MEAN] += total
    floats[RMS] += squares
    first = np.int64(np.uint32(smallest + _U1) >> _U23)
    last = np.int64(top >> _U23)
    if first > 0 and last - first < 31 and u.size >= _FEW:
        pairs = scratch[_PAIRS:_SINGLES]
        if base < 0 or first <= base or last > base + 31:
            if base >= 0:
                _fold_pairs(base, pairs, hist)
            # Some room above, where there is any to give: later blocks may hold slightly larger values.
            base = max(last + min(30 - (last - first), 3) - 31, 0)
        _count_pairs(u, base, scratch[_INDEX:_PAIRS].view(np.uint16), pairs, hist)
    else:
        _count_singles(u, scratch[_SINGLES:], hist)
        hist[0] -= np.uint32(zeros + bad)
    return base


@_compiled()
def _begin(ints: Any, floats: Any, hist: Any, size: Any) -> None:
    ints[:] = 0
    ints[COUNT] = size
    floats[MIN] = np.inf
    floats[MAX] = -np.inf
    floats[MEAN] = floats[RMS] = 0.0
    hist[:] = 0


@_compiled()
def _end(ints: Any, floats: Any, mantissa_bits: Any, scale: Any) -> None:
    """From sums (of the values times 2**scale) to mean and rms, from the bits used to their number."""
    used = ints[MANTISSA_BITS] & ((np.int64(1) << mantissa_bits) - 1)
    if used:
        while not used & 1:
            used >>= 1
            mantissa_bits -= 1
        ints[MANTISSA_BITS] = mantissa_bits
    else:
        ints[MANTISSA_BITS] = 0
    finite = ints[COUNT] - ints[NAN] - ints[POS_INF] - ints[NEG_INF]
    if finite:
        floats[MIN] += 0.0  # no negative zeros
        floats[MAX] += 0.0
        floats[MEAN] = np.ldexp(floats[MEAN] / finite, -scale)
        floats[RMS] = np.ldexp(np.sqrt(floats[RMS] / finite), -scale)
    else:
        floats[MIN] = floats[MAX] = floats[MEAN] = floats[RMS] = np.nan


@_compiled()
def _end32(ints: Any, floats: Any, hist: Any, scratch: Any, base: Any) -> None:
    if base >= 0:
        _fold_pairs(base, scratch[_PAIRS:_SINGLES], hist)
    if ints[COUNT] >= _FEW:
        singles = scratch[_SINGLES:]
        for i in range(256):
            hist[i] += np.uint32(
                np.uint32(singles[i] + singles[256 + i]) + np.uint32(singles[512 + i] + singles[768 + i])
            )
        singles[:] = 0
    _end(ints, floats, 23, 0)


@_compiled()
def _measure32(flat: Any, kind: int, rows: Any, exponents: Any, row: int, scratch: Any) -> None:
    ints = rows[row]
    floats = ints.view(np.float64)
    hist = exponents[row]
    values = flat.view(np.float32)
    _begin(ints, floats, hist, flat.size)
    base = np.int64(-1)
    for at in range(0, flat.size, BLOCK):
        base = _block(flat[at : at + BLOCK], values[at : at + BLOCK], ints, floats, hist, scratch, base)
    _end32(ints, floats, hist, scratch, base)


@_compiled()
def _measure16(flat: Any, kind: int, rows: Any, exponents: Any, row: int, scratch: Any) -> None:
    ints = rows[row]
    floats = ints.view(np.float64)
    hist = exponents[row]
    _begin(ints, floats, hist, flat.size)
    base = np.int64(-1)
    for at in range(0, flat.size, BLOCK):
        wide = scratch[: min(BLOCK, flat.size - at)]
        _widen(flat[at : at + BLOCK], kind, wide)
        base = _block(wide, wide.view(np.float32), ints, floats, hist, scratch, base)
    _end32(ints, floats, hist, scratch, base)


@_compiled()
def _measure64(flat: Any, kind: int, rows: Any, exponents: Any, row: int, scratch: Any) -> None:
    """One plain loop after one that finds the scale: float64 is rare in training."""
    ints = rows[row]
    floats = ints.view(np.float64)
    hist = exponents[row]
    _begin(ints, floats, hist, flat.size)
    bits = flat.view(np.uint64)
    top = np.uint64(0)
    for i in range(flat.size):
        m = np.uint64(bits[i] & _MAGNITUDE64)
        top = max(top, m if m < _INF64 else np.uint64(0))
    # As in _bits: squares of the largest must stay within range, and 2**scale must be a float64.
    exponent = np.int64(top >> np.uint64(52)) - 1022
    scale = np.int64(0) if abs(exponent) <= 400 or top == 0 else -max(exponent, -1000)
    factor = np.ldexp(1.0, scale)
    used = np.uint64(0)
    lowest, highest, total, squares = np.inf, -np.inf, 0.0, 0.0
    for i in range(flat.size):
        m = np.uint64(bits[i] & _MAGNITUDE64)
        x = flat[i]
        if m >= _INF64:
            ints[NAN if m > _INF64 else POS_INF if x > 0 else NEG_INF] += 1
            continue
        lowest = min(lowest, x)
        highest = max(highest, x)
        if m == 0:
            ints[ZEROS] += 1
            continue
        used = np.uint64(used | m)
        size = abs(x)
        if size < 2.0**-14:
            ints[FLUSHED if size <= 2.0**-25 else SUBNORMAL] += 1
        elif size >= 65504.0:
            ints[SATURATED if size == 65504.0 else EXCEEDING] += 1
        hist[min(max(np.int64(m >> np.uint64(52)) - (1023 - 127), 0), 255)] += _U1
        y = x * factor
        total += y
        squares += y * y
    ints[MANTISSA_BITS] = np.int64(used & _MANTISSA64)
    floats[MIN], floats[MAX], floats[MEAN], floats[RMS] = lowest, highest, total, squares
    _end(ints, floats, 52, scale)


@intrinsic
def _pointer(_context: Any, address: Any) -> Any:
    """An address as a pointer."""

    def code(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return nb.types.voidptr(address), code


@_compiled()
def _measure_all(
    addresses: Any, sizes: Any, kinds: Any, rows: Any, exponents: Any, first_row: int, scratch: Any
) -> None:
    for i in range(sizes.size):
        row, kind, pointer = first_row + i, kinds[i], _pointer(addresses[i])
        if kind == F32:
            _measure32(nb.carray(pointer, (sizes[i],), np.uint32), kind, rows, exponents, row, scratch)
        elif kind == F64:
            _measure64(nb.carray(pointer, (sizes[i],), np.float64), kind, rows, exponents, row, scratch)
        else:
            _measure16(nb.carray(pointer, (sizes[i],), np.uint16), kind, rows, exponents, row, scratch)


def measure_all(
    flats: Sequence[_bits.Flat], kinds: Sequence[int], rows: Any, exponents: Any, first_row: int, scratch: Any
) -> None:
    """As :func:`ampdebug._bits.measure_all`, in one stretch without the GIL."""
    addresses = np.array([flat.__array_interface__["data"][0] for flat in flats], np.uint64)
    sizes = np.array([flat.size for flat in flats], np.int64)
    _measure_all(addresses, sizes, np.array(kinds, np.int64), rows, exponents, first_row, scratch)


@_compiled()
def _nonfinite(bits: Any, infinity: Any, mask: Any) -> Any:
    """NaN, +inf and -inf in an array of bits, given the bits of infinity and of all but the sign."""
    nan = positive = negative = 0
    for at in range(0, bits.size, 8192):
        block = bits[at : at + 8192]
        found = False
        for i in range(block.size):
            found |= (block[i] & mask) >= infinity
        if found:
            for i in range(block.size):
                m = block[i] & mask
                nan += m > infinity
                positive += block[i] == infinity
                negative += m == infinity and block[i] != infinity
    return nan, positive, negative


_NONFINITE_BITS: tuple[tuple[Any, Any], ...] = (
    (np.uint16(0x7C00), np.uint16(0x7FFF)),
    (np.uint16(0x7F80), np.uint16(0x7FFF)),
    (_INF, _MAGNITUDE),
    (_INF64, _MAGNITUDE64),
)


def nonfinite(flat: _bits.Flat, kind: int) -> tuple[int, int, int]:
    """As :func:`ampdebug._bits.nonfinite`."""
    infinity, mask = _NONFINITE_BITS[kind]
    found: tuple[int, int, int] = _nonfinite(flat.view(np.uint64) if kind == F64 else flat, infinity, mask)
    return found


@_compiled(fastmath=_REORDERED)
def _update_block(old: Any, new: Any, mantissa_bits: Any, min_exponent: Any) -> Any:
    """One block of float32 bits; see _bits.update."""
    before, after = old.view(np.float32), new.view(np.float32)
    # Half a unit in the last place is the power of two of the weight's binade (as float32: never below its smallest
    # normal, so that no subnormal is computed with) times this.
    fraction = np.ldexp(1.0, np.int64(-1 - mantissa_bits))
    least = np.uint32(min_exponent + 127)
    bad = changed = lost = 0
    change_squares = weight_squares = 0.0
    for i in range(old.size):
        w = np.uint32(old[i] & _MAGNITUDE)
        finite = (w < _INF) & (np.uint32(new[i] & _MAGNITUDE) < _INF)
        weight = np.float64(before[i])
        change = np.float64(after[i]) - weight
        weight = weight if finite else 0.0
        change = change if finite else 0.0
        binade = np.uint32(max(np.uint32(w >> _U23), least) << _U23).view(np.float32)
        half_ulp = np.float64(binade) * fraction
        moved = change != 0.0
        bad += not finite
        changed += moved
        lost += moved & (abs(change) < half_ulp)
        change_squares += change * change
        weight_squares += weight * weight
    return bad, changed, lost, change_squares, weight_squares


@_compiled()
def _update32(before: Any, after: Any, kind: int, mantissa_bits: int, min_exponent: int) -> Any:
    return _update_block(before, after, mantissa_bits, min_exponent)


@_compiled()
def _update16(before: Any, after: Any, kind: int, mantissa_bits: int, min_exponent: int) -> Any:
    scratch = np.empty((2, BLOCK), np.uint32)
    bad = changed = lost = 0
    change_squares = weight_squares = 0.0
    for at in range(0, before.size, BLOCK):
        size = min(BLOCK, before.size - at)
        old, new = scratch[0, :size], scratch[1, :size]
        _widen(before[at : at + size], kind, old)
        _widen(after[at : at + size], kind, new)
        a, b, c, d, e = _update_block(old, new, mantissa_bits, min_exponent)
        bad += a
        changed += b
        lost += c
        change_squares += d
        weight_squares += e
    return bad, changed, lost, change_squares, weight_squares


def update(
    before: _bits.Flat, after: _bits.Flat, kind: int, mantissa_bits: int, min_exponent: int
) -> tuple[int, int, int, float, float]:
    """As :func:`ampdebug._bits.update`."""
    compiled = _update32 if kind == F32 else _update16
    found: tuple[int, int, int, float, float] = compiled(before, after, kind, mantissa_bits, min_exponent)
    return found


MEASURE = (_measure16, _measure16, _measure32, _measure64)
"""By kind."""


def check() -> None:
    """Compile everything (or load it from numba's cache) and compare one small array of each kind with numpy's numbers.

    Raises:
        Exception: whatever numba raises where it can't compile here; RuntimeError where the numbers differ.
    """
    compiled = -1
    while True:
        try:
            return _compare_with_numpy()
        except OSError:
            # The cache could not be written (disk full, say). What was just compiled is kept in memory all the same, so
            # the next attempt gets further; one that does not is not about the cache.
            before, compiled = compiled, sum(len(function.signatures) for function in _compiled_functions)
            if compiled == before:
                raise


def _compare_with_numpy() -> None:
    values = np.array([0.0, -1.5, 3e-6, 65504.0, np.inf, -np.inf, np.nan, -0.0, 7e4] + [0.375] * 300)
    for kind in (F16, BF16, F32, F64):
        if kind == F16:
            flat = np.where(abs(values) == 7e4, 65504.0, values).astype(np.float16).view(np.uint16)
        elif kind == BF16:
            flat = (values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        else:
            flat = values.astype(np.float32).view(np.uint32) if kind == F32 else values
        rows, exponents = np.zeros((2, RMS + 1), np.int64), np.zeros((2, 256), np.uint32)
        MEASURE[kind](flat, kind, rows, exponents, 0, np.zeros(SCRATCH_SIZE, np.uint32))
        _bits.measure(flat, kind, rows, exponents, 1, np.zeros(_bits.SCRATCH_SIZE, np.uint32))
        same = np.array_equal(rows[0, :MEAN], rows[1, :MEAN]) and np.array_equal(*exponents)
        together, counts = np.zeros_like(rows), np.zeros_like(exponents)
        measure_all([flat, flat[:9]], [kind, kind], together, counts, 0, np.zeros(SCRATCH_SIZE, np.uint32))
        same = same and np.array_equal(together[0], rows[0]) and np.array_equal(counts[0], exponents[0])
        same = same and nonfinite(flat, kind) == _bits.nonfinite(flat, kind)
        if kind != F64:
            after = flat ^ flat.dtype.type(1)
            same = same and update(flat, after, kind, 10, -14)[:3] == _bits.update(flat, after, kind, 10, -14)[:3]
        if not same:
            raise RuntimeError(f"the compiled statistics differ from numpy's on an array of kind {kind}")
