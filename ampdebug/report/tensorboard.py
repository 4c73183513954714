"""A run as TensorBoard event files: curves, exponent histograms, heat maps, the table of dtypes.

All numbers of a step are one event, and the tags are ours: unique, and as they are written here.

Tags
----
``loss``, ``loss-scale``, ``overflow``, ``nonfinite-gradients``, ``update-skipped``, ``grad-norm``, ``learning-rate``:
    one scalar a step; flags are 0 or 1; what is unknown is left out.
``output-absmax/PATH``, ``output-flushed/PATH``, ``output-nonfinite/PATH``:
    largest finite magnitude; share of the elements that float16 rounds to zero; share that is NaN or infinite. The same
    for ``gradient-…``, ``reduced_gradient-…``, ``output_gradient-…`` and ``parameter-…``, and for the input of the
    network itself (``input-…``). ``update-flushed`` is the share of a parameter's elements that moved by less than half
    an ulp, ``update-rms`` the size of the change.
``output-exponents/PATH``, ``gradient-exponents/NAME``, …:
    histogram of the binary exponents: the bar from 3 to 4 counts the elements with 8 ≤ ``|x|`` < 16.
``heat-map/largest-exponent``, ``heat-map/smallest-exponent``:
    cells × steps as an image.
``loss-scale-trace``:
    loss, loss scale and overflows over the steps as one image.
``dtypes``:
    what each cell was asked to compute in, and what it does compute in.
``bisect/result``, ``bisect/ranking``:
    a stored bisection as text, and the head of its ranking as bars (``bisect-1/…`` and so on where there are several).

Where a cell is called more than once in a step, or its value is nested, the tag goes on with `` call 1`` or
`` slot 1.mask``.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ampdebug._errors import ArgumentError, FormatError
from ampdebug._records import Cell, Kind, Site, Step
from ampdebug._summary import SiteSummary
from ampdebug.report.bisection import bisection_markdown, draw_ranking, stored_bisections
from ampdebug.report.event_file import EventFile
from ampdebug.report.heatmap import ALL_ZERO, NONFINITE, ExponentMap, exponent_span
from ampdebug.report.scale_chart import ScaleChart

if TYPE_CHECKING:
    from ampdebug._run import Progress, Run

_SCALARS: tuple[tuple[str, str], ...] = (
    ("loss", "loss"),
    ("loss-scale", "loss_scale"),
    ("overflow", "overflow"),
    ("nonfinite-gradients", "nonfinite_gradients"),
    ("update-skipped", "update_skipped"),
    ("grad-norm", "grad_norm"),
    ("learning-rate", "learning_rate"),
)
_HISTOGRAMS: frozenset[Kind] = frozenset(("output", "gradient", "reduced_gradient", "output_gradient"))
_MAX_BIRTH_STEPS = 100


class TensorBoardSink:
    """Writes the curves of a run while it trains.

    The scalars of the run are written at every step. Those of the cells cost more (MindSpore switches protobuf to its
    slow version, 10 µs a number), so they are written as often as fits into ``cells_share`` of the wall time, and in
    every step whose first non-finite value appears elsewhere than in the step before. Nothing is lost by that: the
    store keeps every step, and `write_tensorboard` writes them later.

    Args:
        logdir: Directory for the event files, made if missing.
        append: Go on in a directory that already holds event files. TensorBoard then drops what it read there of the
            steps that are written again.
        cells_share: Share of the wall time that the numbers of the cells may cost, 0 to 1; 0 leaves them out, 1 writes
            them at every step.

    Raises:
        ArgumentError: for a bad ``cells_share``, or if the directory holds event files and ``append`` is False.
        StoreError: if the directory cannot be written; likewise from every method.
    """

    def __init__(self, logdir: str | os.PathLike[str], *, append: bool = False, cells_share: float = 0.02) -> None:
        if not 0 <= cells_share <= 1:
            raise ArgumentError(
                f"cells_share={cells_share!r} is the share of the wall time that the numbers of the cells may cost: "
                "give a number from 0 (leave them out) to 1 (write them at every step)"
            )
        self._file = EventFile(Path(logdir), append=append)
        self._share = cells_share
        self._tags: dict[Site, str] = {}
        self._taken: set[str] = set()
        self._map = ExponentMap()
        self._chart = ScaleChart()
        self._next_cells = -math.inf
        self._last_birth: object = None
        self._last_step = 0

    def __enter__(self) -> TensorBoardSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """The event file being written."""
        return self._file.path

    def describe(self, cells: Iterable[Cell], *, seen: Mapping[str, str] | None = None) -> None:
        """Write the table of dtypes as text.

        Args:
            cells: The cells of the network.
            seen: ``{cell path: dtypes of its inputs and outputs as they were seen}``, for one more column.
        """
        self._file.write(self._last_step, [self._file.text("dtypes", dtype_table(cells, seen=seen))])

    def step(
        self,
        step: Step,
        sites: Sequence[Site] = (),
        rows: npt.NDArray[Any] | None = None,
        exponents: npt.NDArray[np.unsignedinteger[Any]] | None = None,
    ) -> None:
        """Write one step.

        Args:
            step: Its scalars.
            sites: What each row is about, ``[n]``.
            rows: Statistics, `STATS_DTYPE` ``[n]``; not kept.
            exponents: Counts of the binary exponents, unsigned ``[n, 256]``; not kept.
        """
        values = self._file.scalars(run_scalars(step))
        self._last_step = step.step
        if rows is None or step.loss is not None or step.loss_scale is not None:
            self._chart.add(step)
        birth = step.forward_birth or step.backward_birth
        where = None if birth is None else (birth.phase, birth.path, birth.kind)
        new_birth = where is not None and where != self._last_birth
        self._last_birth = where
        start = time.perf_counter()
        wanted = self._share > 0 and (start >= self._next_cells or new_birth)
        if rows is not None and exponents is not None and len(rows) and wanted:
            values += self.cell_values(step.step, sites, rows, exponents, histograms=True)
            self._file.write(step.step, values)
            spent = time.perf_counter() - start
            self._next_cells = start + (spent / self._share if self._share < 1 else 0.0)
        else:
            self._file.write(step.step, values)

    def cell_values(
        self,
        step: int,
        sites: Sequence[Site],
        rows: npt.NDArray[Any],
        exponents: npt.NDArray[np.unsignedinteger[Any]],
        *,
        histograms: bool,
    ) -> list[Any]:
        """Return the numbers of the cells as protobuf values, and enter them in the heat map."""
        values = self._file.scalars(self._cell_scalars(sites, rows))
        spans: dict[str, tuple[int, int] | int] = {}
        nonfinite = rows["nan"] + rows["pos_inf"] + rows["neg_inf"]
        for site, counts, bad in zip(sites, exponents, nonfinite.tolist(), strict=True):
            if site.kind == "output":
                span = NONFINITE if bad else exponent_span(counts) or ALL_ZERO
                spans[site.path] = _wider(spans.get(site.path, ALL_ZERO), span)
            if histograms and site.kind in _HISTOGRAMS and counts.any():
                values.append(self._file.exponent_histogram(self._tag(site, "exponents"), counts))
        if spans:
            self._map.add(step, spans)
        return values

    def _cell_scalars(self, sites: Sequence[Site], rows: npt.NDArray[Any]) -> Iterable[tuple[str, float]]:
        elements = rows["count"].tolist()
        count = np.maximum(rows["count"], 1)
        absmax = np.maximum(np.abs(rows["min"]), np.abs(rows["max"])).tolist()
        flushed = (rows["flushed"] / count).tolist()
        nonfinite = ((rows["nan"] + rows["pos_inf"] + rows["neg_inf"]) / count).tolist()
        for k, site in enumerate(sites):
            # Integers have no statistics; the inputs of inner cells are some cell's outputs.
            if elements[k] and (site.kind != "input" or not site.path):
                if site.kind == "update":  # rows of updates have no extremes
                    yield self._tag(site, "rms"), float(rows["rms"][k])
                else:
                    yield self._tag(site, "absmax"), absmax[k]
                yield self._tag(site, "flushed"), flushed[k]
                yield self._tag(site, "nonfinite"), nonfinite[k]

    def _tag(self, site: Site, statistic: str) -> str:
        """The tag of a site: its group, a slash, and a name that no other site of the group has."""
        name = self._tags.get(site)
        if name is None:
            name = site.path or "(network)"
            name += f" call {site.call}" if site.call else ""
            name += f" slot {site.slot}" if site.slot else ""
            # A parameter may be named "a call 1", or a cell of one path change its type: keep them apart all the same.
            free = (f"{name} #{k}" if k else name for k in itertools.count())
            name = next(candidate for candidate in free if f"{site.kind}/{candidate}" not in self._taken)
            self._taken.add(f"{site.kind}/{name}")
            self._tags[site] = name
        return f"{site.kind}-{statistic}/{name}"

    def bisections(self, results: Sequence[Mapping[str, Any]]) -> None:
        """Write stored results of ``bisect``: each as text, and the head of its ranking as a picture."""
        for number, data in enumerate(results, start=1):
            name = "bisect" if len(results) == 1 else f"bisect-{number}"
            values = [self._file.text(f"{name}/result", bisection_markdown(data))]
            picture = draw_ranking(data)
            if picture is not None:
                values.append(self._file.image(f"{name}/ranking", picture))
            self._file.write(self._last_step, values)

    def draw_maps(self) -> None:
        """Write the heat maps and the loss-scale trace of what was given so far, if anything was."""
        if self._chart.tells:
            self._file.write(self._last_step, [self._file.image("loss-scale-trace", self._chart.draw())])
        if len(self._map):
            for which in ("largest", "smallest"):
                picture = self._map.draw(which)
                self._file.write(self._last_step, [self._file.image(f"heat-map/{which}-exponent", picture)])

    def close(self) -> None:
        """Write the heat maps and close the file. A second call does nothing."""
        if not self._file.closed:
            try:
                self.draw_maps()
            finally:
                self._file.close()


def write_tensorboard(
    run: Run, logdir: str | os.PathLike[str], *, cell_steps: int = 500, progress: Progress | None = None
) -> tuple[Path, ...]:
    """Write a recorded run as TensorBoard event files.

    The scalars of the run are written for every step. Those of the cells are written for ``cell_steps`` steps, evenly
    spread, and for the first steps of every place in which a first non-finite value appeared: TensorBoard itself shows
    a sample of at most 1000 points a curve, and a file with every number of a long run takes it minutes to load.

    Args:
        run: The run. If its directory holds several ranks, each gets a folder of its own (``rank0``, ``rank1``, …),
            which TensorBoard shows as runs side by side.
        logdir: Directory for the event files, made if missing.
        cell_steps: For about how many steps the numbers of the cells are written; 0 for none.
        progress: Called as ``progress(steps done, steps in all)``.

    Returns:
        The files.

    Raises:
        ArgumentError: for a negative ``cell_steps``, or if the directory holds event files already.
        StoreError: if the run cannot be read or the files not be written. Steps that are damaged are left out.
    """
    if cell_steps < 0:
        raise ArgumentError(f"cell_steps={cell_steps} must be 0 (no numbers of the cells) or more")
    ranks = run.ranks
    if len(ranks) == 1:
        return (_write_rank(run, Path(logdir), cell_steps, progress),)
    paths = []
    for rank in ranks:
        with run.rank(rank) as one:
            paths.append(_write_rank(one, Path(logdir) / f"rank{rank}", cell_steps, progress))
    return tuple(paths)


def _write_rank(run: Run, logdir: Path, cell_steps: int, progress: Progress | None) -> Path:
    with TensorBoardSink(logdir, cells_share=1) as sink:
        births: dict[object, int] = {}
        for step in run.steps(on_damage="skip"):
            sink.step(step)
            for birth in (step.forward_birth, step.backward_birth):
                if birth is not None and len(births) < _MAX_BIRTH_STEPS:
                    births.setdefault((birth.phase, birth.path, birth.kind), step.step)
        chosen = _spread(run.sampled_steps().tolist(), cell_steps, births.values())
        sites = run.sites
        for done, number in enumerate(chosen):
            if progress is not None:
                progress(done, len(chosen))
            try:
                found = run.tensors(number)
            except FormatError as error:
                if str(error) not in run.problems:
                    run.problems.append(str(error))
                continue
            if found.site_ids.size and int(found.site_ids.max()) >= len(sites):
                sites = run.sites  # training registered more meanwhile
            sink.step(Step(number), [sites[k] for k in found.site_ids.tolist()], found.rows, found.exponents)
        if progress is not None:
            progress(len(chosen), len(chosen))
        if run.cells:
            sink.describe(run.cells, seen=_seen_dtypes(run.summary()))
        sink.bisections(stored_bisections(run))
    return sink.path


def _spread(steps: Sequence[int], wanted: int, also: Iterable[int]) -> list[int]:
    """About so many of the steps, evenly spread with both ends, and those of ``also`` that are among them."""
    if wanted == 0 or not steps:
        return []
    places = np.unique(np.linspace(0, len(steps) - 1, min(wanted, len(steps))).round().astype(int)).tolist()
    chosen = {steps[place] for place in places}
    for step in also:
        place = bisect.bisect_left(steps, step)
        if place < len(steps) and steps[place] == step:
            chosen.add(step)
    return sorted(chosen)


def _seen_dtypes(summaries: Iterable[SiteSummary]) -> dict[str, str]:
    """``{cell path: "float32 → float16"}``: the dtypes of inputs and outputs as they were seen."""
    found: dict[str, dict[str, dict[str, None]]] = {}
    for summary in summaries:
        if summary.site.kind in ("input", "output"):
            sides = found.setdefault(summary.site.path, {"input": {}, "output": {}})
            sides[summary.site.kind].update(dict.fromkeys(summary.dtypes))
    return {path: " → ".join(", ".join(side) for side in sides.values()) for path, sides in found.items()}


def run_scalars(step: Step) -> Iterable[tuple[str, float]]:
    """Yield the tag and the value of each scalar of the step that is known."""
    for tag, name in _SCALARS:
        value = getattr(step, name)
        if value is not None:
            yield tag, float(value)


def dtype_table(cells: Iterable[Cell], *, seen: Mapping[str, str] | None = None) -> str:
    """Return the dtypes of the cells as a Markdown table."""

    def escaped(text: str) -> str:
        return text.replace("|", "\\|").replace("\n", " ")

    lines = [
        "| cell | type | asked | computes in | known from | parameters | inputs → outputs | note |",
        "|---" * 8 + "|",
    ]
    for cell in cells:
        computes = ", ".join(f"{name}: {dtype}" if name else dtype for name, dtype in cell.compute_dtypes.items())
        parameters = ", ".join(f"{name}: {dtype}" for name, dtype in cell.parameters.items())
        values = (
            cell.path or "(network)",
            cell.cell_type,
            cell.asked_dtype or "",
            computes,
            cell.compute_source,
            parameters,
            (seen or {}).get(cell.path, ""),
            cell.note,
        )
        lines.append("| " + " | ".join(escaped(value) for value in values) + " |")
    return "\n".join(lines)


def _wider(one: tuple[int, int] | int, other: tuple[int, int] | int) -> tuple[int, int] | int:
    """Of two spans of one cell (another call, another slot) what covers both; non-finite wins, all-zero loses."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return min(one[0], other[0]), max(one[1], other[1])
    if NONFINITE in (one, other):
        return NONFINITE
    return other if one == ALL_ZERO else one
