"""The statistics of one recorded step as the reader hands them out, and the numbers derived from them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ampdebug._blobs import BlobError, check_bins, unpack_columns, unpack_counts
from ampdebug._stats import STATS_DTYPE

DERIVED = ("absmax", "norm", "finite", "nonfinite", "flushed_fraction", "nonfinite_fraction")
STATS_FIELDS: tuple[str, ...] = STATS_DTYPE.names or ()
FIELDS = (*STATS_FIELDS, *DERIVED)


def derive(rows: npt.NDArray[Any], field: str) -> npt.NDArray[Any]:
    """A field of statistics rows, or a number derived from them.

    Args:
        rows: `STATS_DTYPE` array.
        field: A field of it or one of `DERIVED`. The first four are those of ``TensorStats``; the fractions are of all
            elements, 0.0 for an empty tensor.

    Returns:
        int64 or float64 array of the same shape.
    """
    if field in STATS_FIELDS:
        return np.asarray(rows[field])
    nonfinite = rows["nan"] + rows["pos_inf"] + rows["neg_inf"]
    if field == "absmax":
        return np.asarray(np.maximum(np.abs(rows["min"]), np.abs(rows["max"])))
    if field == "nonfinite":
        return np.asarray(nonfinite)
    finite = rows["count"] - nonfinite
    if field == "finite":
        return np.asarray(finite)
    if field == "norm":
        return np.where(finite > 0, rows["rms"] * np.sqrt(finite.clip(0)), 0.0)
    part = {"flushed_fraction": rows["flushed"], "nonfinite_fraction": nonfinite}[field]
    return np.asarray(part / np.maximum(rows["count"], 1))


class Observations:
    """All statistics rows of one step, in execution order.

    Attributes:
        step: The step.
        site_ids: Site number of each row, int64 ``[n]``: index into ``Run.sites``.
        dtype_codes: uint8 ``[n]``, index into ``dtype_names``.
        dtype_names: Names by code.
        rows: The statistics, `STATS_DTYPE` ``[n]``, read-only.
        bins_first: First non-empty exponent bin of each row, int64 ``[n]``.
        bins_length: Number of bins up to the last non-empty one, int64 ``[n]``; 0 where every element is zero or not
            finite.
    """

    def __init__(
        self,
        step: int,
        site_ids: npt.NDArray[np.int64],
        dtype_codes: npt.NDArray[np.uint8],
        dtype_names: tuple[str, ...],
        rows: npt.NDArray[Any],
        bins_first: npt.NDArray[np.int64],
        bins_length: npt.NDArray[np.int64],
        counts: bytes | None,
    ) -> None:
        self.step = step
        self.site_ids = site_ids
        self.dtype_codes = dtype_codes
        self.dtype_names = dtype_names
        self.rows = rows
        self.bins_first = bins_first
        self.bins_length = bins_length
        self._counts = counts

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"<Observations of step {self.step}: {len(self)} rows>"

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """Dtype name of each row."""
        return tuple(self.dtype_names[code] for code in self.dtype_codes.tolist())

    @cached_property
    def exponents(self) -> npt.NDArray[np.uint32]:
        """Exponent histograms, uint32 ``[n, 256]`` by biased float32 exponent; unpacked at first use.

        Raises:
            BlobError: the stored histograms are damaged. (`Run` checks them before it hands the object out, unless it
            was told to leave histograms away; then this is an error of the caller.)
        """
        if self._counts is None:
            raise BlobError(f"step {self.step} was read without its histograms")
        return unpack_counts(self._counts, self.bins_first, self.bins_length)

    def lowest_exponent(self) -> npt.NDArray[np.float64]:
        """Smallest ``floor(log2|x|)`` of each row, NaN for none; -127 stands for all below -126."""
        return np.where(self.bins_length > 0, self.bins_first - 127.0, np.nan)

    def highest_exponent(self) -> npt.NDArray[np.float64]:
        """Largest ``floor(log2|x|)`` of each row, NaN for none; 128 stands for all from 128 on."""
        return np.where(self.bins_length > 0, self.bins_first + self.bins_length - 128.0, np.nan)

    def derive(self, field: str) -> npt.NDArray[Any]:
        """A field of ``rows``, or one derived from it: see the function `derive`."""
        return derive(self.rows, field)


def unpack_observations(
    step: int,
    data: bytes,
    counts: bytes | None,
    rows: int,
    columns: tuple[str, ...],
    dtype_names: tuple[str, ...],
    sites: int,
) -> Observations:
    """Decode the blobs of a step.

    Args:
        step: The step.
        data: Column blob.
        counts: Count blob, None to leave the histograms away.
        rows: Declared number of rows.
        columns: Names of the columns in the blob, at least those that `Observations` needs.
        dtype_names: Dtype names by code.
        sites: How many sites are registered.

    Raises:
        BlobError: a blob is damaged or does not fit what is declared.
    """
    values = dict(zip(columns, unpack_columns(data, len(columns), rows), strict=True))
    whole = ("site", "dtype", "bins_first", "bins_length", *(n for n in STATS_FIELDS if STATS_DTYPE[n].kind == "i"))
    wrong = [name for name in whole if values[name].dtype.kind == "f"]
    if wrong:
        raise BlobError(f"holds fractions where {', '.join(wrong)} must be integers")
    site_ids, codes = values["site"].astype(np.int64), values["dtype"].astype(np.int64)
    if rows and (site_ids.min() < 0 or site_ids.max() >= sites):
        raise BlobError(f"names site {int(site_ids.max())}; only 0 to {sites - 1} exist")
    if rows and (codes.min() < 0 or codes.max() >= len(dtype_names)):
        raise BlobError(f"names dtype code {int(codes.max())}; only 0 to {len(dtype_names) - 1} exist")
    first, length = values["bins_first"].astype(np.int64), values["bins_length"].astype(np.int64)
    check_bins(first, length)
    stats = np.empty(rows, STATS_DTYPE)
    for name in STATS_FIELDS:
        stats[name] = values[name]
    stats.flags.writeable = False
    return Observations(step, site_ids, codes.astype(np.uint8), dtype_names, stats, first, length, counts)
