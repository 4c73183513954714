"""A monitor's run as the rules see it: the history of its steps, and views of its cells and statistics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ampdebug._errors import FormatError, StoreError
from ampdebug._records import Birth, Cell, Site
from ampdebug.rules._history import History, Record

if TYPE_CHECKING:
    from ampdebug._run import Run
    from ampdebug._summary import SiteSummary

_STATS = (
    "count",
    "zeros",
    "nan",
    "pos_inf",
    "neg_inf",
    "subnormal",
    "flushed",
    "saturated",
    "mantissa_bits",
    "min",
    "max",
    "mean",
    "rms",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of statistics of one step, as plain Python values; see ``TensorStats`` for the fields."""

    site: Site
    dtype: str
    shape: tuple[int, ...] | None
    count: int
    zeros: int
    nan: int
    pos_inf: int
    neg_inf: int
    subnormal: int
    flushed: int
    saturated: int
    mantissa_bits: int
    min: float
    max: float
    mean: float
    rms: float

    @property
    def nonfinite(self) -> int:
        """NaN and infinite elements."""
        return self.nan + self.pos_inf + self.neg_inf

    @property
    def absmax(self) -> float:
        """Largest finite magnitude; NaN where there is none."""
        return max(abs(self.min), abs(self.max))


class RunView:
    """What rules over sites read of a run. Nothing here grows with the number of steps.

    Attributes:
        run: The open run.
        meta: Its meta data.
        cells: ``{path: cell}``.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.meta: dict[str, Any] = run.meta
        self.cells: dict[str, Cell] = {cell.path: cell for cell in run.cells}
        self._rows: dict[int, list[Row]] = {}

    @property
    def level(self) -> str:
        """The AMP level, upper case; "" where it is not known."""
        return str(self.meta.get("amp_level") or "").upper()

    @cached_property
    def summary(self) -> tuple[SiteSummary, ...]:
        """Every site over all steps."""
        return self.run.summary().sites

    def describe(self) -> str:
        """What the run holds, in one sentence."""
        kinds = sorted({site.kind for site in self.run.sites})
        level = f"level {self.level}" if self.level else "level unknown"
        measured = f" ({', '.join(kinds).replace('_', ' ')})" if kinds else ""
        return (
            f"{len(self.cells)} cells at {level}, {len(self.run.sites)} measured places{measured}, statistics of "
            f"{self.run.sampled_count} steps."
        )

    def sites(self, kind: str) -> Iterator[SiteSummary]:
        """The measured sites of a kind."""
        return (found for found in self.summary if found.site.kind == kind and found.rows)

    def rows(self, step: int) -> list[Row]:
        """The statistics of one step in execution order; empty where the step was not sampled or is damaged."""
        if step not in self._rows:
            if len(self._rows) > 32:
                self._rows.clear()
            self._rows[step] = self._read(step)
        return self._rows[step]

    def _read(self, step: int) -> list[Row]:
        try:
            found = self.run.tensors(step)
        except (ValueError, StoreError):
            return []
        sites, shapes = self.run.sites, self.run.shapes
        columns = [found.rows[name].tolist() for name in _STATS]
        return [
            Row(sites[site], found.dtype_names[code], shapes[site], *numbers)
            for site, code, *numbers in zip(found.site_ids.tolist(), found.dtype_codes.tolist(), *columns, strict=True)
        ]

    def parameter_shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a parameter, None where the run does not tell."""
        for entry in self.meta.get("parameters") or ():
            if isinstance(entry, dict) and entry.get("name") == name and isinstance(entry.get("shape"), list):
                return tuple(int(n) for n in entry["shape"])
        return None

    def parameter_dtype(self, name: str) -> str:
        """Dtype of a parameter, "" where the run does not tell."""
        for entry in self.meta.get("parameters") or ():
            if isinstance(entry, dict) and entry.get("name") == name:
                return str(entry.get("dtype", ""))
        return ""


def births(view: RunView, history: History, phase: str, limit: int = 200) -> list[tuple[Record, Birth]]:
    """The records whose step has a birth in that phase, at most ``limit`` of them, the first ones."""
    result: list[tuple[Record, Birth]] = []
    for record in history.records:
        birth = record.step.forward_birth if phase == "forward" else record.step.backward_birth
        if birth is not None:
            result.append((record, birth))
            if len(result) >= limit:
                break
    return result


def history_of_run(run: Run) -> History:
    """Digest an open run."""
    history = History(name=str(run.path))
    history.prints_overflow = True
    history.scale_meaning = "used"
    view = RunView(run)
    history.facts["run"] = view
    if view.level:
        history.facts["level"] = view.level
    if view.meta.get("amp_dtype") == "bfloat16":
        history.facts["bfloat16"] = True
    for step in run.steps(on_damage="skip"):
        record = Record(step)
        if step.update_skipped is False and step.overflow:
            record.applied = True
        history.add(record)
    history.events.extend(run.events)
    ranks = run.ranks
    if len(ranks) > 1:
        _other_ranks(history, run, ranks)
    history.finish()
    return history


def _other_ranks(history: History, run: Run, ranks: tuple[int, ...]) -> None:
    """Compare the scales of the other ranks with those of this one, step by step."""
    for rank in ranks:
        if rank == run.this_rank:
            continue
        try:
            with run.rank(rank) as other:
                mine = run.steps()
                current = next(mine, None)
                for step in other.steps():
                    while current is not None and current.step < step.step:
                        current = next(mine, None)
                    if current is None:
                        break
                    a, b = current.loss_scale, step.loss_scale
                    if current.step == step.step and a is not None and b is not None and a != b:
                        history.scale_disagreements += 1
                        if history.first_disagreement is None:
                            history.first_disagreement = (step.step, 0, f"{a:g} and {b:g}")
        except (StoreError, FormatError):
            continue  # a rank whose file is damaged says nothing; the report of this rank stands
