"""Statistics of a checkpoint's parameters, and of two against each other; only a piece of each is in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ampdebug._checkpoint_file import CheckpointFile, Entry, read_chunks
from ampdebug._formats import round_through
from ampdebug._stats import StatsTable
from ampdebug._tensor_stats import STATS_DTYPE, TensorStats


def measure(stream: BinaryIO, file: CheckpointFile, entry: Entry) -> TensorStats:
    """The statistics of one floating-point parameter, as :func:`ampdebug.summarize` gives them for an array."""
    table = StatsTable()
    total: npt.NDArray[Any] | None = None
    exponents = np.zeros(256, np.int64)
    for chunk in read_chunks(stream, file.path, entry):
        table.clear()
        table.add(chunk, bfloat16_bits=entry.dtype == "bfloat16")
        exponents += table.exponents[0]
        total = table.rows[:1].copy() if total is None else _joined(total, table.rows[:1])
    if total is None:
        table.add(np.zeros(0, np.float32))
        total = table.rows[:1].copy()
    return TensorStats.from_row(total[0], exponents)


def _joined(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Two rows of statistics as that of both arrays together."""
    result = a.copy()
    finite = [int(row["count"] - row["nan"] - row["pos_inf"] - row["neg_inf"]) for row in (a[0], b[0])]
    for name in STATS_DTYPE.names or ():
        if STATS_DTYPE[name].kind == "i":
            result[name] = np.maximum(a[name], b[name]) if name == "mantissa_bits" else a[name] + b[name]
    result["min"], result["max"] = np.fmin(a["min"], b["min"]), np.fmax(a["max"], b["max"])
    if not finite[0] or not finite[1]:
        kept = a if finite[0] else b
        for name in ("mean", "rms"):
            result[name] = kept[name]
        return result
    share = finite[0] / (finite[0] + finite[1])
    result["mean"] = share * a["mean"] + (1 - share) * b["mean"]
    # hypot does not overflow where the squares would
    result["rms"] = np.hypot(math.sqrt(share) * a["rms"], math.sqrt(1 - share) * b["rms"])
    return result


@dataclass(frozen=True, slots=True)
class ParameterChange:
    """One parameter in two checkpoints.

    Attributes:
        name: Its name.
        dtypes: In both.
        elements: How many.
        differing: Elements that are not the same number; NaN equals NaN.
        not_rounded: Elements that are not what rounding the other file's value to this file's dtype gives.
        largest: Largest absolute difference among elements that are finite in both.
        relative: Root mean square of the differences over that of the first file's values.
        nonfinite: Elements that are NaN or infinite, in both.
    """

    name: str
    dtypes: tuple[str, str]
    elements: int
    differing: int
    not_rounded: int
    largest: float
    relative: float
    nonfinite: tuple[int, int]

    @property
    def kind(self) -> str:
        """``"equal"``, ``"rounded"`` (each value is the other's, rounded to the narrower dtype) or ``"different"``."""
        return "equal" if not self.differing else "different" if self.not_rounded else "rounded"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; ``relative`` is None where it is infinite."""
        return {
            "name": self.name,
            "kind": self.kind,
            "dtypes": list(self.dtypes),
            "elements": self.elements,
            "differing": self.differing,
            "largest": self.largest,
            "relative": self.relative if math.isfinite(self.relative) else None,
            "nonfinite": list(self.nonfinite),
        }


def compare(
    first: BinaryIO, a: CheckpointFile, x: Entry, second: BinaryIO, b: CheckpointFile, y: Entry
) -> ParameterChange:
    """Two floating-point parameters of the same shape, element by element, in float64."""
    differing = not_rounded = 0
    largest = squares = size = 0.0
    nonfinite = [0, 0]
    wider, narrower = (x.dtype, y.dtype) if _bits(x.dtype) >= _bits(y.dtype) else (y.dtype, x.dtype)
    for u, v in _together(read_chunks(first, a.path, x), read_chunks(second, b.path, y), x.dtype, y.dtype):
        same = (u == v) | (np.isnan(u) & np.isnan(v))
        differing += int((~same).sum())
        if not same.all():
            wide, narrow = (u, v) if wider == x.dtype else (v, u)
            expected = round_through(wide, narrower)
            not_rounded += int(((expected != narrow) & ~(np.isnan(expected) & np.isnan(narrow))).sum())
        fine = np.isfinite(u) & np.isfinite(v)
        nonfinite[0] += int((~np.isfinite(u)).sum())
        nonfinite[1] += int((~np.isfinite(v)).sum())
        if fine.any():
            off = np.abs(u[fine] - v[fine])
            largest = max(largest, float(off.max()))
            squares += float(np.square(off).sum())
            size += float(np.square(u[fine]).sum())
    relative = math.sqrt(squares / size) if size else (math.inf if squares else 0.0)
    return ParameterChange(
        x.name, (x.dtype, y.dtype), x.elements, differing, not_rounded, largest, relative, (nonfinite[0], nonfinite[1])
    )


def _bits(dtype: str) -> tuple[int, int]:
    # float16 and bfloat16 hold each other's values in neither direction; the order between them is arbitrary.
    return {"float64": (64, 0), "float32": (32, 0), "bfloat16": (16, 1), "float16": (16, 0)}[dtype]


def widened(chunk: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float64]:
    """Values as float64, which holds those of every format."""
    if dtype == "bfloat16":
        chunk = (chunk.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return chunk.astype(np.float64)


def _together(
    first: Iterator[npt.NDArray[Any]], second: Iterator[npt.NDArray[Any]], a: str, b: str
) -> Iterator[tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]:
    """Pieces of two parameters of the same length, cut alike."""
    u = v = np.zeros(0)
    while True:
        if not u.size:
            u = next((widened(chunk, a) for chunk in first), u)
        if not v.size:
            v = next((widened(chunk, b) for chunk in second), v)
        both = min(u.size, v.size)
        if not both:
            return
        yield u[:both], v[:both]
        u, v = u[both:], v[both:]
