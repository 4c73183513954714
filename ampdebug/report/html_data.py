"""What the HTML page knows of a run: collected in a few streaming passes, as plain JSON values."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ampdebug._formats import FLOAT16
from ampdebug._records import KINDS, Cell, Site, Step
from ampdebug._summary import EXPONENT_BIAS, Heatmap, SiteSummary
from ampdebug.report.facts import gather_facts
from ampdebug.report.heatmap import colours
from ampdebug.report.html_steps import StepBins, plain_number
from ampdebug.report.summary import describe_run, summary_lines
from ampdebug.report.table import LINES, Report, grouped
from ampdebug.report.watchlist import judge_sites, uses_float16

if TYPE_CHECKING:
    from ampdebug._observations import Observations
    from ampdebug._run import Progress, Run

# What keeps the page of a large network small: places x columns of the map, and places x steps with histograms.
_MAP_CELLS = 600_000
_MAP_COLUMNS = (48, 240)
_SNAPSHOT_ROWS = 12_000
_SNAPSHOTS = (2, 8)

_COUNTS = (
    "rows",
    "steps",
    "count",
    "zeros",
    "nan",
    "pos_inf",
    "neg_inf",
    "subnormal",
    "flushed",
    "exceeding",
    "saturated",
    "absmax_step",
    "lowest_exponent",
    "highest_exponent",
    "first_nonfinite_step",
)
_REALS = ("min", "max", "absmax")
_SNAPSHOT_FIELDS = ("count", "zeros", "nan", "pos_inf", "neg_inf", "flushed")


@dataclass(frozen=True)
class PageData:
    """A run as the page shows it.

    Attributes:
        report: Title, verdict, summary and all rows, as `build_report` makes them.
        data: What the page's script reads, plain JSON values.
    """

    report: Report
    data: dict[str, Any]


class Stages:
    """One count of progress over several passes of known lengths."""

    def __init__(self, progress: Progress | None, *lengths: int) -> None:
        self._progress = progress
        self._total = sum(lengths)
        self._starts = [sum(lengths[:k]) for k in range(len(lengths))]

    def stage(self, number: int) -> Callable[[int, int], None]:
        """The callback of one pass; the end of a pass is not the end of all."""

        def show(done: int, _: int) -> None:
            if self._progress is not None:
                self._progress(min(self._starts[number] + done, self._total - 1), self._total)

        return show

    def finish(self) -> None:
        """All is done."""
        if self._progress is not None:
            self._progress(self._total, self._total)


def collect(run: Run, progress: Progress | None = None) -> PageData:
    """Read a run once for each part of the page; memory depends on the number of places, not of steps.

    Raises:
        StoreError: if the run cannot be read.
    """
    sampled, recorded = run.sampled_count, run.step_count
    stages = Stages(progress, sampled, sampled, recorded)
    network = run.cells
    summary = run.summary(stages.stage(0))
    sites = len(summary.sites)
    low, high = _MAP_COLUMNS
    heat = run.heatmap(max(low, min(high, _MAP_CELLS // max(1, sites))), stages.stage(1))
    bins = StepBins(recorded, columns=heat.first_steps)
    facts = gather_facts(_watched(run, bins, stages.stage(2)))
    judgements = [j for j in judge_sites(summary.sites, network, facts) if j.summary.rows or j.reasons]
    rows = sorted(grouped(judgements), key=lambda chosen: (-chosen[0].weight, chosen[0].summary.site_id))
    snapshots = [_snapshot(found, sites) for found in _read_snapshots(run, summary.sites)]
    lines = summary_lines(
        run,
        facts,
        judgements,
        uses_float16=uses_float16(network, summary.sites),
        problems=[*summary.problems, *(p for p in run.problems if p not in summary.problems)],
        step=None,
    )
    report = Report(
        title=describe_run(run, facts, None),
        rows=tuple(row for _, row in rows),
        facts=facts,
        summary=tuple(lines),
        considered=len(rows),
        alarms=sum(row.alarm for _, row in rows),
        limit=LINES,  # of the plain table; the page's own has all rows
        wide=True,
        hint="a browser with JavaScript shows them",
    )
    data = {
        "kinds": list(KINDS),
        "dtypes": list(run.dtype_names),
        "sites": _sites(summary.sites, run.shapes),
        "rows": [
            {
                "site": j.summary.site_id,
                "alarm": row.alarm,
                "weight": j.weight,
                "reasons": [list(r) for r in row.reasons],
            }
            for j, row in rows
        ],
        "cells": [_cell(cell) for cell in network],
        "steps": bins.to_dict(),
        "map": {**_map(heat, sites), "overflows": bins.column_overflows, "sampled": sampled},
        "snapshots": snapshots,
        "palette": _palette(),
        "float16": _float16(),
    }
    stages.finish()
    return PageData(report, data)


def _watched(run: Run, bins: StepBins, progress: Callable[[int, int], None]) -> Iterator[Step]:
    """The steps of the run, each shown to ``bins`` as it passes by: one pass for all who read scalars."""
    for number, step in enumerate(run.steps(on_damage="skip"), 1):
        bins.add(step)
        if number % 256 == 0:
            progress(number, 0)
        yield step


def _sites(summaries: tuple[SiteSummary, ...], shapes: tuple[tuple[int, ...] | None, ...]) -> dict[str, list[Any]]:
    """``{field: [one value a place]}``."""
    sites: list[Site] = [s.site for s in summaries]
    return {
        "kind": [KINDS.index(site.kind) for site in sites],
        "path": [site.path for site in sites],
        "call": [site.call for site in sites],
        "slot": [site.slot for site in sites],
        "type": [site.cell_type for site in sites],
        "shape": [None if shape is None else list(shape) for shape in shapes[: len(sites)]],
        "dtypes": [list(s.dtypes) for s in summaries],
        **{name: [getattr(s, name) for s in summaries] for name in _COUNTS},
        **{name: [plain_number(getattr(s, name)) for s in summaries] for name in _REALS},
    }


def _cell(cell: Cell) -> dict[str, Any]:
    return {
        "path": cell.path,
        "type": cell.cell_type,
        "asked": cell.asked_dtype,
        "computes": cell.compute_dtypes,
        "parameters": cell.parameters,
        "watched": cell.watched,
        "note": cell.note,
    }


def _map(heat: Heatmap, sites: int) -> dict[str, Any]:
    """The map as base64: exponent bins as bytes ``[sites, columns]``, lowest above highest for none; two bit planes."""
    lowest, highest = heat.lowest[:sites], heat.highest[:sites]
    empty = highest == Heatmap.EMPTY
    return {
        "first": heat.first_steps.tolist(),
        "last": heat.last_steps.tolist(),
        "lowest": _base64(np.where(empty, 255, lowest + EXPONENT_BIAS).astype(np.uint8)),
        "highest": _base64(np.where(empty, 0, highest + EXPONENT_BIAS).astype(np.uint8)),
        "nonfinite": _base64(np.packbits(heat.nonfinite[:sites].ravel(), bitorder="little")),
        "seen": _base64(np.packbits(heat.seen[:sites].ravel(), bitorder="little")),
    }


def _read_snapshots(run: Run, summaries: tuple[SiteSummary, ...]) -> Iterator[Observations]:
    """Some steps with their histograms: evenly spread, and the first in which anything was not finite."""
    steps = run.sampled_steps()
    low, high = _SNAPSHOTS
    count = max(low, min(high, _SNAPSHOT_ROWS // max(1, len(summaries))))
    chosen = {int(steps[k]) for k in np.linspace(0, len(steps) - 1, min(count, len(steps))).round().astype(int)}
    first_bad = [s.first_nonfinite_step for s in summaries if s.first_nonfinite_step is not None]
    for step in sorted(chosen | ({min(first_bad)} if first_bad else set())):
        yield from run.iter_tensors(step, step, on_damage="skip")


def _snapshot(found: Observations, sites: int) -> dict[str, Any]:
    """One step's histograms: LEB128 integers, first a fixed number for each row, then all counts behind each other."""
    keep = found.site_ids < sites  # training may have registered more since the summary
    rows = found.rows[keep]
    first, length = found.bins_first[keep], found.bins_length[keep]
    head = np.stack(
        [found.site_ids[keep], found.dtype_codes[keep], *(rows[name] for name in _SNAPSHOT_FIELDS), first, length], 1
    )
    bins = np.arange(256)
    used = (bins >= first[:, None]) & (bins < (first + length)[:, None])
    counts = found.exponents[keep][used]
    data = leb128(np.concatenate([head.ravel(), counts.astype(np.int64)]))
    return {"step": found.step, "rows": len(rows), "data": base64.b64encode(data).decode()}


def leb128(values: npt.NDArray[np.int64]) -> bytes:
    """Non-negative integers, seven bits a byte, least significant first; the top bit says that more follow."""
    parts = (values[:, None] >> (7 * np.arange(9))) & 0x7F
    length = np.maximum(1, 9 - np.argmax(parts[:, ::-1] > 0, axis=1))
    length[values == 0] = 1
    place = np.arange(9)
    coded = parts | np.where(place < length[:, None] - 1, 0x80, 0)
    data: bytes = coded[place < length[:, None]].astype(np.uint8).tobytes()
    return data


def _palette() -> list[str]:
    """A colour for each exponent bin, as the picture of `ExponentMap` has them."""
    shown = colours(np.arange(-EXPONENT_BIAS, 256 - EXPONENT_BIAS, dtype=np.int16))
    return [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in shown.tolist()]


def _float16() -> dict[str, int]:
    """float16's limits as binary exponents."""
    return {
        "max": int(np.floor(np.log2(FLOAT16.max))),
        "normal": round(np.log2(FLOAT16.smallest_normal)),
        "subnormal": round(np.log2(FLOAT16.smallest_subnormal)),
    }


def _base64(array: npt.NDArray[np.uint8]) -> str:
    return base64.b64encode(array.tobytes()).decode()
