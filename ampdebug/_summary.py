"""What a run says of each site over all steps: the summary and the map of exponent ranges."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from ampdebug._aggregate import NEVER, NO_HIGH_BIN, NO_LOW_BIN, SUMS, Aggregate, Columns
from ampdebug._records import Site

EXPONENT_BIAS = 127


@dataclass(frozen=True, slots=True)
class SiteSummary:
    """One site over all recorded steps.

    Attributes:
        site_id: Its number.
        site: The place.
        rows: How often it was measured; 0 for a site without statistics (integers), whose other numbers say nothing.
        steps: In how many steps.
        first_step: First of these, None for none; likewise all the steps below.
        last_step: Last of these.
        count: Elements, summed over all rows; likewise down to ``saturated`` (their meaning: ``TensorStats``).
        zeros: See ``count``.
        nan: See ``count``.
        pos_inf: See ``count``.
        neg_inf: See ``count``.
        subnormal: See ``count``.
        flushed: See ``count``.
        exceeding: See ``count``.
        saturated: See ``count``.
        mantissa_bits: Largest of any row.
        min: Smallest finite value ever; NaN for none, as for ``max`` and ``absmax``.
        max: Largest finite value ever.
        absmax: Largest finite magnitude ever.
        absmax_step: First step that had it.
        lowest_exponent: Smallest ``floor(log2|x|)`` ever; -127 stands for all below -126; None if all was zero.
        highest_exponent: Largest; 128 stands for all from 128 on.
        first_nonfinite_step: First step with a NaN or infinity.
        max_flushed_fraction: Largest share, in any row, of its elements (all of them) that float16 rounds to zero.
        max_flushed_step: First step that had it; None where nothing was ever flushed.
        dtypes: Names of the dtypes it was seen with.
    """

    site_id: int
    site: Site
    rows: int = 0
    steps: int = 0
    first_step: int | None = None
    last_step: int | None = None
    count: int = 0
    zeros: int = 0
    nan: int = 0
    pos_inf: int = 0
    neg_inf: int = 0
    subnormal: int = 0
    flushed: int = 0
    exceeding: int = 0
    saturated: int = 0
    mantissa_bits: int = 0
    min: float = math.nan
    max: float = math.nan
    absmax: float = math.nan
    absmax_step: int | None = None
    lowest_exponent: int | None = None
    highest_exponent: int | None = None
    first_nonfinite_step: int | None = None
    max_flushed_fraction: float = 0.0
    max_flushed_step: int | None = None
    dtypes: tuple[str, ...] = ()

    @property
    def nonfinite(self) -> int:
        """NaN and infinite elements over all rows."""
        return self.nan + self.pos_inf + self.neg_inf

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain Python values; the site as a dict."""
        return {**asdict(self), "nonfinite": self.nonfinite, "dtypes": list(self.dtypes)}


@dataclass(frozen=True)
class Summary(Sequence[SiteSummary]):
    """One `SiteSummary` for each site of a run, in the order of the site numbers.

    Attributes:
        sites: The summaries.
        steps: How many steps have statistics.
        first_step: First of these, None for none.
        last_step: Last of these.
        problems: One sentence for each damaged step that had to be left out.
    """

    sites: tuple[SiteSummary, ...]
    steps: int
    first_step: int | None
    last_step: int | None
    problems: tuple[str, ...] = ()

    @overload
    def __getitem__(self, index: int) -> SiteSummary: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[SiteSummary, ...]: ...
    def __getitem__(self, index: int | slice) -> SiteSummary | tuple[SiteSummary, ...]:
        return self.sites[index]

    def __len__(self) -> int:
        return len(self.sites)

    def __iter__(self) -> Iterator[SiteSummary]:
        return iter(self.sites)


def summarize_sites(aggregate: Aggregate, sites: Sequence[Site], dtypes: Sequence[str]) -> tuple[SiteSummary, ...]:
    """Turn merged aggregates into one summary for each site."""
    numbers = {name: column[: aggregate.size].tolist() for name, column in aggregate.columns.items()}
    names: dict[int, tuple[str, ...]] = {}
    result = []
    for number, site in enumerate(sites):
        if number >= aggregate.size or not numbers["rows"][number]:
            result.append(SiteSummary(number, site))
            continue
        row = {name: column[number] for name, column in numbers.items()}
        mask = row["dtypes"]
        if mask not in names:
            names[mask] = tuple(name for code, name in enumerate(dtypes) if mask >> code & 1)
        finite = row["absmax"] >= 0
        some = row["highest_bin"] != NO_HIGH_BIN
        result.append(
            SiteSummary(
                number,
                site,
                **{name: row[name] for name in ("rows", "steps", "first_step", "last_step", *SUMS, "mantissa_bits")},
                min=row["min"] if finite else math.nan,
                max=row["max"] if finite else math.nan,
                absmax=row["absmax"] if finite else math.nan,
                absmax_step=row["absmax_step"] if finite else None,
                lowest_exponent=row["lowest_bin"] - EXPONENT_BIAS if some else None,
                highest_exponent=row["highest_bin"] - EXPONENT_BIAS if some else None,
                first_nonfinite_step=None if row["first_nonfinite_step"] == NEVER else row["first_nonfinite_step"],
                max_flushed_fraction=row["flushed_fraction"],
                max_flushed_step=row["flushed_step"] if row["flushed"] else None,
                dtypes=names[mask],
            )
        )
    return tuple(result)


@dataclass(frozen=True)
class Heatmap:
    """Exponent ranges of every site over the steps, in at most so many columns.

    Attributes:
        first_steps: First step that went into each column, int64 ``[columns]``, ascending.
        last_steps: Last step that went into each column.
        lowest: Smallest ``floor(log2|x|)``, int16 ``[sites, columns]``; `Heatmap.EMPTY` where the site has no nonzero
            finite value or no row in these steps.
        highest: Largest, likewise.
        nonfinite: Some element was NaN or infinite, bool ``[sites, columns]``.
        seen: The site has a row in these steps, bool ``[sites, columns]``.
        problems: One sentence for each damaged step that had to be left out.
    """

    EMPTY = -32768

    first_steps: npt.NDArray[np.int64]
    last_steps: npt.NDArray[np.int64]
    lowest: npt.NDArray[np.int16]
    highest: npt.NDArray[np.int16]
    nonfinite: npt.NDArray[np.bool_]
    seen: npt.NDArray[np.bool_]
    problems: tuple[str, ...] = field(default=())


class HeatmapBuilder:
    """Merges units (a step, or an aggregate of some steps) into columns of equally many units."""

    def __init__(self, sites: int, units: int, max_steps: int) -> None:
        self._per_column = max(1, math.ceil(units / max_steps))
        columns = math.ceil(units / self._per_column)
        self._lowest = np.full((sites, columns), NO_LOW_BIN, np.int16)
        self._highest = np.full((sites, columns), NO_HIGH_BIN, np.int16)
        self._nonfinite = np.zeros((sites, columns), np.bool_)
        self._seen = np.zeros((sites, columns), np.bool_)
        self._first: list[int] = []
        self._last: list[int] = []
        self._units = 0

    def add(self, first: int, last: int, sites: npt.NDArray[np.int64], columns: Columns) -> None:
        """Add one unit: its steps, and the entries of an aggregate as `Aggregate.merge` takes them."""
        column = self._units // self._per_column
        self._units += 1
        if column == len(self._first):
            self._first.append(first)
            self._last.append(last)
        self._last[column] = last
        # ufunc.at: a site may occur twice in a step.
        np.minimum.at(self._lowest[:, column], sites, columns["lowest_bin"].astype(np.int16))
        np.maximum.at(self._highest[:, column], sites, columns["highest_bin"].astype(np.int16))
        np.logical_or.at(self._nonfinite[:, column], sites, columns["first_nonfinite_step"] != NEVER)
        self._seen[sites, column] = True

    def build(self, problems: Sequence[str]) -> Heatmap:
        """The map of what was added."""
        used = len(self._first)
        empty = self._highest[:, :used] == NO_HIGH_BIN
        return Heatmap(
            np.array(self._first, np.int64),
            np.array(self._last, np.int64),
            np.where(empty, Heatmap.EMPTY, self._lowest[:, :used] - EXPONENT_BIAS).astype(np.int16),
            np.where(empty, Heatmap.EMPTY, self._highest[:, :used] - EXPONENT_BIAS).astype(np.int16),
            self._nonfinite[:, :used],
            self._seen[:, :used],
            tuple(problems),
        )
