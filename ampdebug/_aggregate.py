"""What is worth knowing of each site over many steps: merged step by step, and stored once every some steps.

A long run is summarised from these aggregates, without touching the rows of each step. The same code makes them on the
writing side and merges them on the reading side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ampdebug._observations import derive
from ampdebug._stats import STATS_DTYPE

Columns = dict[str, npt.NDArray[Any]]

NEVER = 1 << 62
"""Stands for "no step" in ``first_nonfinite_step``; larger than any step, so that the minimum works."""

NO_LOW_BIN = 256
NO_HIGH_BIN = -1

SUMS = ("count", "zeros", "nan", "pos_inf", "neg_inf", "subnormal", "flushed", "exceeding", "saturated")

# name -> (how two values merge, the value of a site not seen yet, type)
_FIELDS: dict[str, tuple[str, float, str]] = {
    "rows": ("sum", 0, "<i8"),
    "steps": ("sum", 0, "<i8"),
    "first_step": ("min", NEVER, "<i8"),
    "last_step": ("max", 0, "<i8"),
    **dict.fromkeys(SUMS, ("sum", 0, "<i8")),
    "mantissa_bits": ("max", 0, "<i8"),
    "min": ("min", np.inf, "<f8"),
    "max": ("max", -np.inf, "<f8"),
    "absmax": ("best", -1.0, "<f8"),
    "absmax_step": ("with absmax", 0, "<i8"),
    "flushed_fraction": ("best", -1.0, "<f8"),
    "flushed_step": ("with flushed_fraction", 0, "<i8"),
    "first_nonfinite_step": ("min", NEVER, "<i8"),
    "lowest_bin": ("min", NO_LOW_BIN, "<i8"),
    "highest_bin": ("max", NO_HIGH_BIN, "<i8"),
    "dtypes": ("or", 0, "<i8"),
}
_BEST = {"absmax": "absmax_step", "flushed_fraction": "flushed_step"}
_MERGE: dict[str, np.ufunc] = {"sum": np.add, "min": np.minimum, "max": np.maximum, "or": np.bitwise_or}

AGGREGATE_KINDS = {"site": "<i8", **{name: kind for name, (_, _, kind) in _FIELDS.items()}}
"""Type of each column of a stored aggregate, the site number first."""


def step_columns(
    step: int,
    dtypes: npt.NDArray[np.uint8],
    rows: npt.NDArray[np.void],
    bins_first: npt.NDArray[np.int64],
    bins_length: npt.NDArray[np.int64],
) -> Columns:
    """The aggregate of one step: one entry for each row of statistics.

    Args:
        step: The step the rows belong to.
        dtypes: Codes of the dtypes, ``[rows]``, below 63.
        rows: Statistics, `STATS_DTYPE` ``[rows]``.
        bins_first: First non-empty exponent bin of each row.
        bins_length: Number of bins from there to the last non-empty one, 0 for none.

    Returns:
        ``{field: array [rows]}`` for every field of an aggregate.
    """
    assert rows.dtype == STATS_DTYPE
    size = len(rows)
    columns: Columns = {name: np.ascontiguousarray(rows[name]) for name in (*SUMS, "mantissa_bits")}
    # fmin and fmax put the neutral value where there is no finite element and min and max are NaN.
    columns["min"] = np.fmin(rows["min"], np.inf)
    columns["max"] = np.fmax(rows["max"], -np.inf)
    columns["absmax"] = np.fmax(derive(rows, "absmax"), -1.0)
    columns["flushed_fraction"] = derive(rows, "flushed_fraction")
    here = np.full(size, step, np.int64)
    for name in ("first_step", "last_step", "absmax_step", "flushed_step"):
        columns[name] = here
    columns["first_nonfinite_step"] = np.where(derive(rows, "nonfinite") > 0, step, NEVER)
    some = bins_length > 0
    columns["lowest_bin"] = np.where(some, bins_first, NO_LOW_BIN)
    columns["highest_bin"] = np.where(some, bins_first + bins_length - 1, NO_HIGH_BIN)
    columns["dtypes"] = np.left_shift(np.int64(1), dtypes.astype(np.int64))
    columns["rows"] = columns["steps"] = np.ones(size, np.int64)
    return columns


class Aggregate:
    """Per-site aggregates, indexed by site number. Its size depends on the number of sites only."""

    def __init__(self) -> None:
        self.size = 0
        self.columns: Columns = {}
        self._capacity = 0
        self._grow(64)

    def _grow(self, capacity: int) -> None:
        for name, (_, start, kind) in _FIELDS.items():
            fresh = np.full(capacity, start, kind)
            if name in self.columns:
                fresh[: self.size] = self.columns[name][: self.size]
            self.columns[name] = fresh
        self._capacity = capacity

    def clear(self) -> None:
        """Forget everything."""
        for name, (_, start, _kind) in _FIELDS.items():
            self.columns[name][: self.size] = start
        self.size = 0

    def merge(self, sites: npt.NDArray[np.integer[Any]], columns: Columns) -> None:
        """Merge entries of other aggregates or of a step.

        Args:
            sites: Site number of each entry, ``[n]``. A number may occur more than once only in entries of one step
                (a site measured twice): these count as one step and two rows.
            columns: ``{field: array [n]}``.
        """
        if not len(sites):
            return
        low, high = int(sites.min()), int(sites.max())
        if high >= self._capacity:
            self._grow(max(high + 1, 2 * self._capacity))
        self.size = max(self.size, high + 1)
        if high - low == len(sites) - 1 and bool((sites[1:] > sites[:-1]).all()):
            self._merge_unique(slice(low, high + 1), columns)
            return
        _, once = np.unique(sites, return_index=True)
        if len(once) == len(sites):
            self._merge_unique(sites, columns)
            return
        self._merge_unique(sites[once], {name: column[once] for name, column in columns.items()})
        again = np.delete(np.arange(len(sites)), once)
        rest = {name: column[again] for name, column in columns.items()}
        rest["steps"] = np.zeros(len(again), np.int64)
        self.merge(sites[again], rest)

    def _merge_unique(self, where: Any, columns: Columns) -> None:
        mine = self.columns
        for value, step in _BEST.items():
            better = columns[value] > mine[value][where]
            mine[step][where] = np.where(better, columns[step], mine[step][where])
            mine[value][where] = np.where(better, columns[value], mine[value][where])
        for name, (how, _, _) in _FIELDS.items():
            merge = _MERGE.get(how)
            if merge is not None:
                mine[name][where] = merge(mine[name][where], columns[name])

    def seen(self) -> npt.NDArray[np.int64]:
        """Numbers of the sites that have rows, ascending."""
        return np.flatnonzero(self.columns["rows"][: self.size])

    def select(self, sites: npt.NDArray[np.int64]) -> Columns:
        """The aggregates of these sites, ``{field: array [len(sites)]}``."""
        return {name: column[sites] for name, column in self.columns.items()}
