"""From an array to its statistics: the only place where a statistic is computed.

Counts and extremes are exact; sums are taken in float64 after widening, which is exact, so that they are right to
float64 rounding. What *subnormal*, *flushed*, *exceeding* and *saturated* count refers to float16 whatever the tensor's
own dtype is: they say what float16 does, or would do, to these values.

:class:`StatsTable` is the quick way for many arrays; :func:`summarize` gives one array's statistics as an object. The
work is done by compiled code where numba is there (``pip install 'ampdebug[fast]'``) and by numpy otherwise, with the
same results. numba is imported at the first measurement, never by a reader of the records.
"""

from __future__ import annotations

import math
import threading
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ampdebug import _bits
from ampdebug._errors import ArgumentError
from ampdebug._formats import FLOAT64, Format, format_of
from ampdebug._tensor_stats import EXPONENT_BIAS, STATS_DTYPE, TensorStats, UpdateStats

__all__ = [
    "EXPONENT_BIAS",
    "STATS_DTYPE",
    "Batch",
    "KernelName",
    "StatsTable",
    "TensorStats",
    "UpdateStats",
    "is_finite",
    "kernel_name",
    "kernel_reason",
    "measure_update",
    "nonfinite_counts",
    "summarize",
]

_COLUMNS = STATS_DTYPE.itemsize // 8

_NO_BITS = np.zeros(0, np.uint32)

KernelName = Literal["numba", "numpy"]

# numpy dtype -> (kind, dtype the kernels read it as). Only native byte order; others are copied first.
_KINDS: dict[np.dtype[Any], tuple[int, np.dtype[Any]]] = {
    np.dtype(np.float16): (_bits.F16, np.dtype(np.uint16)),
    np.dtype(np.float32): (_bits.F32, np.dtype(np.uint32)),
    np.dtype(np.float64): (_bits.F64, np.dtype(np.float64)),
}


def _flatten(array: npt.NDArray[Any], bfloat16_bits: bool) -> tuple[_bits.Flat, int]:
    """Return the elements as the kernels want them: 1-D, contiguous, aligned, native, writable or a copy; and the kind.

    The order of the elements is lost where another one saves a copy; no statistic depends on it.
    """
    if bfloat16_bits:
        if array.dtype != np.uint16:
            raise TypeError(f"bfloat16_bits=True wants the bits as a uint16 array, this one is {array.dtype}")
        kind, read_as = _bits.BF16, array.dtype
    else:
        known = _KINDS.get(array.dtype)
        if known is None:
            native = array.dtype.newbyteorder("=")
            if native not in _KINDS:
                raise TypeError(
                    f"statistics are of float16, float32 or float64 arrays, this one is {array.dtype}; record only the "
                    "dtype of such a tensor, and pass bfloat16 as uint16 bits with bfloat16_bits=True"
                )
            array, known = array.astype(native), _KINDS[native]
        kind, read_as = known
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned and flags.writeable):
        # A Fortran-ordered array is a C-ordered one read backwards: no copy. The compiled code takes one array type
        # only, which is writable although it never writes; read-only arrays are rare enough to be copied.
        array = array.T if flags.f_contiguous and flags.aligned and flags.writeable else array.copy()
    flat = array if array.ndim == 1 else array.reshape(-1)
    return (flat if read_as is flat.dtype else flat.view(read_as)), kind


class _Kernels:
    """The set of functions in use, one per kind of array where they differ."""

    def __init__(self, name: KernelName, reason: str, module: Any) -> None:
        self.name: KernelName = name
        self.reason = reason
        self.measure: tuple[Any, ...] = module.MEASURE
        self.measure_all: Any = module.measure_all
        self.nonfinite: Any = module.nonfinite
        self.update: Any = module.update
        self.scratch_size: int = module.SCRATCH_SIZE


_lock = threading.Lock()
_numpy_kernels = _Kernels("numpy", "asked for", _bits)
_best_kernels: _Kernels | None = None


def _load(kernel: KernelName | None = None) -> _Kernels:
    """Return the named functions, or the fastest that work here."""
    global _best_kernels
    if kernel == "numpy":
        return _numpy_kernels
    if kernel not in (None, "numba"):
        raise ArgumentError(f"kernel={kernel!r} is not known; choose 'numba', 'numpy', or None for the faster one")
    with _lock:
        if _best_kernels is None:
            _best_kernels = _load_best()
    if kernel == "numba" and _best_kernels.name != "numba":
        raise ArgumentError(f"kernel='numba' does not work here: {_best_kernels.reason}")
    return _best_kernels


def _load_best() -> _Kernels:
    try:
        from ampdebug import _kernels

        _kernels.check()
    except ModuleNotFoundError as error:
        if error.name != "numba":
            return _Kernels("numpy", f"numba can't be imported: {error}", _bits)
        return _Kernels("numpy", "numba is not installed; for faster statistics: pip install 'ampdebug[fast]'", _bits)
    except Exception as error:  # noqa: BLE001  a broken compiler must cost speed, not the training run
        return _Kernels("numpy", f"numba does not work here: {type(error).__name__}: {error}", _bits)
    return _Kernels("numba", f"numba {_kernels.NUMBA_VERSION}", _kernels)


def kernel_name() -> KernelName:
    """Return which code computes the statistics: ``"numba"`` (compiled) or ``"numpy"``. Loads it."""
    return _load().name


def kernel_reason() -> str:
    """Return one sentence on why it is that one: the version, or what is missing."""
    return _load().reason


class Batch:
    """Arrays that are measured together (:meth:`StatsTable.add_batch`), without the GIL all that time.

    Attributes:
        elements: How many they have in all.
    """

    def __init__(self) -> None:
        self.flats: list[npt.NDArray[Any]] = []
        self.kinds: list[int] = []
        self.elements = 0

    def __len__(self) -> int:
        return len(self.flats)

    def add(self, array: npt.NDArray[Any], *, bfloat16_bits: bool = False) -> None:
        """Add an array, which is kept and must not change until it is measured; as for ``StatsTable.add``."""
        flat, kind = _flatten(array, bfloat16_bits)
        self.flats.append(flat)
        self.kinds.append(kind)
        self.elements += flat.size


class StatsTable:
    """A growing table with the statistics of many arrays, reused from step to step.

    Args:
        kernel: ``"numba"`` or ``"numpy"``; None takes numba where it works.

    Raises:
        ArgumentError: for another name, or for ``"numba"`` where it does not work (the message says why).

    Not for use from several threads at once; several tables in several threads are fine (the compiled code does not
    hold the GIL).
    """

    def __init__(self, *, kernel: KernelName | None = None) -> None:
        kernels = _load(kernel)
        self.kernel = kernels.name
        self._measure = kernels.measure
        self._measure_all = kernels.measure_all
        self._scratch = np.zeros(kernels.scratch_size, np.uint32)
        self._size = 0
        self._capacity = 64
        self._empty: npt.NDArray[np.int64] | None = None
        self._rows = np.zeros((self._capacity, _COLUMNS), np.int64)
        self._exponents = np.zeros((self._capacity, 256), np.uint32)

    def __len__(self) -> int:
        return self._size

    def add(self, array: npt.NDArray[Any], *, bfloat16_bits: bool = False) -> int:
        """Measure an array and return the number of its row.

        Args:
            array: float16, float32 or float64 of any shape, strides and byte order; with ``bfloat16_bits`` a uint16
                array holding the bits of bfloat16 values. It is never written to and not kept.
            bfloat16_bits: Say that it is bfloat16.

        Raises:
            TypeError: for any other dtype. The table is unchanged then.
        """
        flat, kind = _flatten(array, bfloat16_bits)
        row = self._size
        if row == self._capacity:
            self._grow()
        self._measure[kind](flat, kind, self._rows, self._exponents, row, self._scratch)
        self._size = row + 1
        return row

    def add_batch(self, batch: Batch) -> None:
        """Measure all arrays of a batch, in its order."""
        while self._size + len(batch) > self._capacity:
            self._grow()
        self._measure_all(batch.flats, batch.kinds, self._rows, self._exponents, self._size, self._scratch)
        self._size += len(batch)

    def reserve(self) -> int:
        """Return the number of a new row that reads like that of an empty array, to be filled later."""
        row = self._size
        if row == self._capacity:
            self._grow()
        if self._empty is None:
            self._measure[_bits.F32](_NO_BITS, _bits.F32, self._rows, self._exponents, row, self._scratch)
            self._empty = self._rows[row].copy()
        self._rows[row] = self._empty
        self._exponents[row] = 0
        self._size = row + 1
        return row

    def put(self, rows: npt.NDArray[np.intp], measured: StatsTable) -> None:
        """Fill reserved rows with those of another table, in the order in which that one has them."""
        self._rows[rows] = measured._rows[: measured._size]
        self._exponents[rows] = measured._exponents[: measured._size]

    def copy(self, rows: npt.NDArray[np.intp], sources: npt.NDArray[np.intp]) -> None:
        """Fill reserved rows with other rows of this table."""
        self._rows[rows] = self._rows[sources]
        self._exponents[rows] = self._exponents[sources]

    def _grow(self) -> None:
        rows, exponents = self._rows, self._exponents
        self._capacity *= 2
        self._rows = np.zeros((self._capacity, _COLUMNS), np.int64)
        self._exponents = np.zeros((self._capacity, 256), np.uint32)
        self._rows[: self._size] = rows[: self._size]
        self._exponents[: self._size] = exponents[: self._size]

    @property
    def rows(self) -> npt.NDArray[Any]:
        """STATS_DTYPE view of shape [len]. Its memory is used again after ``clear``: copy what you keep."""
        return self._rows.view(STATS_DTYPE)[: self._size, 0]

    @property
    def exponents(self) -> npt.NDArray[np.uint32]:
        """uint32 view of shape [len, 256]; see :attr:`TensorStats.exponents`. Memory is reused as with ``rows``."""
        return self._exponents[: self._size]

    def clear(self) -> None:
        """Forget all rows; keep the memory for the next ones."""
        self._size = 0


def summarize(array: npt.ArrayLike, *, bfloat16_bits: bool = False, kernel: KernelName | None = None) -> TensorStats:
    """Return the statistics of one array; arguments and errors as for :class:`StatsTable` and its ``add``.

    >>> summarize(np.array([1.0, 70000.0, np.nan], np.float32)).exceeding
    1
    """
    table = StatsTable(kernel=kernel)
    table.add(np.asarray(array), bfloat16_bits=bfloat16_bits)
    return TensorStats.from_row(table.rows[0], table.exponents[0])


def nonfinite_counts(
    array: npt.NDArray[Any], *, bfloat16_bits: bool = False, kernel: KernelName | None = None
) -> tuple[int, int, int]:
    """Return how many elements are NaN, +inf and -inf; much cheaper than all statistics. Errors as for ``add``."""
    flat, kind = _flatten(array, bfloat16_bits)
    found: tuple[int, int, int] = _load(kernel).nonfinite(flat, kind)
    return found


def is_finite(array: npt.NDArray[Any], *, bfloat16_bits: bool = False, kernel: KernelName | None = None) -> bool:
    """Return whether no element is NaN or infinite (True for an empty array). Errors as for ``add``."""
    return nonfinite_counts(array, bfloat16_bits=bfloat16_bits, kernel=kernel) == (0, 0, 0)


def measure_update(
    before: npt.NDArray[Any],
    after: npt.NDArray[Any],
    format: str | Format,
    *,
    bfloat16_bits: bool = False,
    kernel: KernelName | None = None,
) -> UpdateStats:
    """Compare a parameter before and after an update, in one pass, in float64.

    The unit in the last place of a format at x is ``2**(max(floor(log2|x|), min_exponent) - mantissa_bits)``.

    Args:
        before: float16 or float32 values of the parameter, any shape; uint16 bits with ``bfloat16_bits``.
        after: The same shape and dtype.
        format: What the computation rounds weights to: float16, bfloat16 or float32 (for weights used as they are).
        bfloat16_bits: Say that both arrays hold the bits of bfloat16 values.
        kernel: As for :class:`StatsTable`.

    Raises:
        TypeError: for other dtypes, or two different ones.
        ArgumentError: for two different shapes, or another format.
    """
    target = format_of(format)
    if target is FLOAT64:
        raise ArgumentError("format='float64' is wider than the parameter; choose float16, bfloat16 or float32")
    if before.shape != after.shape:
        raise ArgumentError(
            f"after has shape {after.shape}, before {before.shape}; give the same parameter's values, twice"
        )
    if before.dtype != after.dtype or before.dtype.itemsize > 4:
        raise TypeError(
            f"before is {before.dtype}, after is {after.dtype}; both must be float16, or both float32 (or uint16 with "
            "bfloat16_bits=True)"
        )
    # Both in C order, whatever their own: elements must meet their partners.
    old, kind = _flatten(np.ascontiguousarray(before), bfloat16_bits)
    new, _ = _flatten(np.ascontiguousarray(after), bfloat16_bits)
    found = _load(kernel).update(old, new, kind, target.mantissa_bits, target.min_exponent)
    nonfinite, changed, below_half_ulp, update_squares, weight_squares = found
    return UpdateStats(
        target.name,
        count=int(old.size),
        nonfinite=nonfinite,
        changed=changed,
        below_half_ulp=below_half_ulp,
        update_norm=math.sqrt(update_squares),
        weight_norm=math.sqrt(weight_squares),
    )
