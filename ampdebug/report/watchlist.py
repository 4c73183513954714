"""Which sites deserve a look, and why: a judge over the summaries of the sites. It reads records only.

A reason has a weight; the heavier, the more it explains. From 10 on it is an *alarm*, below it is a *note*: true and
sometimes useful, but as common in healthy runs (−inf from an attention mask, gradients of a frozen part that are 0, an
overflow that the loss scaler caught).

What counts as out of range is asked only where float16 is at work: of tensors that are float16, and of float32 tensors
that a cell casts to float16 on entry. A float32 run with values above 65504 is healthy; that they would not fit is a
note.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ampdebug._formats import FLOAT16
from ampdebug._records import Cell, Kind
from ampdebug._summary import SiteSummary
from ampdebug.report.facts import RunFacts

ALARM = 10
NEAR_LIMIT = FLOAT16.max / 4
_FORWARD: frozenset[Kind] = frozenset(("input", "output"))
_BACKWARD: frozenset[Kind] = frozenset(("output_gradient", "gradient", "reduced_gradient"))
_FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a site deserves a look.

    Attributes:
        slug: A stable name.
        weight: The heavier, the more it explains; below `ALARM` it is a note.
        text: One clause.
    """

    slug: str
    weight: int
    text: str

    @property
    def is_alarm(self) -> bool:
        """Whether it is more than a note."""
        return self.weight >= ALARM


@dataclass(frozen=True, slots=True)
class Judgement:
    """A site with its reasons, heaviest first; none where it is unremarkable."""

    summary: SiteSummary
    reasons: tuple[Reason, ...] = ()

    @property
    def weight(self) -> int:
        """The weight of the heaviest reason, 0 for none."""
        return self.reasons[0].weight if self.reasons else 0


def computes_in_float16(cell: Cell) -> bool:
    """Whether the cell's own operators compute in float16, as far as it is known: seen, else what it was asked to."""
    if cell.compute_dtypes:
        return "float16" in cell.compute_dtypes.values()
    return cell.asked_dtype == "float16"


def uses_float16(cells: Iterable[Cell], summaries: Iterable[SiteSummary]) -> bool:
    """Whether anything in the run is, or computes in, float16."""
    return any("float16" in s.dtypes for s in summaries) or any(computes_in_float16(cell) for cell in cells)


def judge_sites(summaries: Sequence[SiteSummary], cells: Sequence[Cell], facts: RunFacts) -> list[Judgement]:
    """Judge every site.

    Args:
        summaries: The sites over the steps in question.
        cells: The cells of the network.
        facts: What the scalars of the same steps amount to.

    Returns:
        One judgement a site, in the same order.
    """
    return _Judge(summaries, cells, facts).all()


class _Judge:
    def __init__(self, summaries: Sequence[SiteSummary], cells: Sequence[Cell], facts: RunFacts) -> None:
        self._summaries = summaries
        self._cells: Mapping[str, Cell] = {cell.path: cell for cell in cells}
        self._owners = {name: cell for cell in cells for name in cell.parameters}
        self._facts = facts
        self._float16 = uses_float16(cells, summaries)
        self._inputs: dict[str, list[SiteSummary]] = {}
        self._gradients: dict[str, SiteSummary] = {}
        for summary in summaries:
            if summary.site.kind == "input":
                self._inputs.setdefault(summary.site.path, []).append(summary)
            elif summary.site.kind == "gradient":
                self._gradients[summary.site.path] = summary
        self._births = {(path, kind) for _, path, kind, _ in facts.births}
        self._first_output: dict[str, int] = {}
        for summary in summaries:
            if summary.site.kind == "output":
                self._first_output.setdefault(summary.site.path, summary.site_id)

    def all(self) -> list[Judgement]:
        result = []
        for summary in self._summaries:
            reasons = sorted(self._reasons(summary), key=lambda reason: -reason.weight)
            result.append(Judgement(summary, tuple(reasons)))
        return result

    def _reasons(self, s: SiteSummary) -> Iterator[Reason]:
        if s.site.kind == "output" and self._first_output[s.site.path] == s.site_id:
            yield from self._dtype(self._cells.get(s.site.path))
        if not s.count:
            return  # integers, or never measured
        if s.site.kind == "update":
            yield from self._update(s)
            return
        if s.nonfinite:
            yield from self._nonfinite(s)
        if s.site.kind in _FORWARD or s.site.kind == "parameter":
            yield from self._range(s)
        if s.site.kind == "output":
            yield from self._silent_zero(s)
        yield from self._small(s)

    # --- not finite ---------------------------------------------------------------------------------------------------

    def _nonfinite(self, s: SiteSummary) -> Iterator[Reason]:
        kind, path = s.site.kind, s.site.path
        what = describe_nonfinite(s.nan, s.pos_inf, s.neg_inf)
        since = f"{what} from step {s.first_nonfinite_step}"
        born = self._born(s)
        if born:
            yield born
        elif kind == "parameter":
            yield Reason(
                "parameter-nonfinite", 90, f"{since}: it is in the parameter itself, later steps can't heal it"
            )
        elif kind in _FORWARD and not (s.nan or s.pos_inf) and self._facts.loss_is_finite:
            yield Reason("mask", 2, f"only -inf, and the loss stays finite: what a mask looks like ({what})")
        elif kind in _BACKWARD:
            yield self._nonfinite_gradient(since)
        elif kind == "output" and not any(i.nonfinite for i in self._inputs.get(path, ())) and path in self._inputs:
            yield Reason("nonfinite-made-here", 85, f"{since}, although its inputs are finite in every step")
        elif kind == "input":
            yield Reason("nonfinite-input", 38, f"{since}: came in")
        else:
            yield Reason("nonfinite", 40, f"{since}; passed on")

    def _born(self, s: SiteSummary) -> Reason | None:
        for (phase, path, kind, inputs_finite), count in self._facts.births.items():
            birth = count.birth
            mine = (birth.call, birth.slot) == (s.site.call, s.site.slot) and kind == s.site.kind
            if not mine or s.site.path != (birth.seen_at or path):
                continue
            what = describe_nonfinite(birth.nan, birth.pos_inf, birth.neg_inf)
            often = f" (and in {count.steps - 1} more)" if count.steps > 1 else ""
            start = f"first non-finite value of the {phase} pass in step {count.first_step}{often}: {what}"
            if phase == "backward":
                if inputs_finite is False:
                    return Reason("nonfinite-gradient", 42, f"{start}; it follows from what was not finite before")
                if not self._facts.applied_nonfinite and self._rarely_overflows():
                    return Reason("overflow-skipped", 3, f"{start}; the update was skipped, as a loss scaler does")
                return Reason("birth-backward", 92, f"{start}; born here")
            if path == "" and kind == "input":
                return Reason("birth-input", 100, f"{start}: the network's own input is not finite")
            where = f" in {birth.path or 'the network'}" if birth.seen_at else ""
            if inputs_finite is False:
                return Reason(
                    "birth-unseen", 94, f"{start}; what went in was not finite either, its maker is not watched"
                )
            own = f" by the cell's own code{where}" if birth.own_code else where
            finite = ", its inputs are finite" if inputs_finite else ""
            return Reason("birth", 100, f"{start}; born here{own}{finite}")
        return None

    def _nonfinite_gradient(self, since: str) -> Reason:
        if not self._facts.applied_nonfinite and self._rarely_overflows():
            return Reason("overflow-skipped", 3, f"{since}; these updates were skipped, as a loss scaler does")
        if self._facts.applied_nonfinite:
            return Reason("nonfinite-gradient", 42, f"{since}, and no word that the update was skipped")
        return Reason(
            "nonfinite-gradient", 42, f"{since}; overflow in {plural(self._facts.nonfinite_gradients, 'step')}"
        )

    def _rarely_overflows(self) -> bool:
        """What a dynamic loss scale does by design: now and then, or in a row at the start until the scale fits."""
        return self._facts.nonfinite_gradients <= max(1, self._facts.sampled // 4) and self._facts.loss_is_finite

    # --- out of float16's range ---------------------------------------------------------------------------------------

    def _cast_to_float16(self, s: SiteSummary) -> bool:
        """A float32 tensor that the cell casts to float16 before it computes."""
        cell = self._owners.get(s.site.path) if s.site.kind == "parameter" else self._cells.get(s.site.path)
        enters = s.site.kind in ("input", "parameter")
        # A cell with children hands its input to them: what they do with it is their own row.
        leaf = cell is not None and (s.site.kind == "parameter" or not cell.children)
        return bool(enters and leaf and cell and computes_in_float16(cell) and "float32" in s.dtypes)

    def _range(self, s: SiteSummary) -> Iterator[Reason]:
        is_float16 = "float16" in s.dtypes
        cast = self._cast_to_float16(s)
        if s.exceeding and cast:
            text = f"{share(s.exceeding, s.count)} beyond 65504 (up to {s.absmax:.3g}): inf in the cast to float16"
            yield Reason("exceeds-float16", 80, text)
        elif s.saturated and is_float16:
            text = f"{s.saturated} values at exactly 65504, float16's largest: saturated or about to overflow"
            yield Reason("saturated", 75, text)
        elif s.absmax > NEAR_LIMIT and (is_float16 or cast):
            text = f"within a factor {FLOAT16.max / s.absmax:.2g} of float16's largest (step {s.absmax_step})"
            yield Reason("near-float16-max", 60, text)
        elif s.exceeding:
            text = f"up to {s.absmax:.3g}: float16 could not hold it, {s.dtypes[0]} does"
            yield Reason("beyond-float16", 4, text)

    def _silent_zero(self, s: SiteSummary) -> Iterator[Reason]:
        inputs = [i for i in self._inputs.get(s.site.path, ()) if i.count]
        if s.zeros == s.count and any(i.zeros < i.count for i in inputs):
            yield Reason("silent-zero", 70, "every value is exactly 0 in every step, although the inputs are not")

    def _small(self, s: SiteSummary) -> Iterator[Reason]:
        kind = s.site.kind
        nonzero = s.count - s.zeros - s.nonfinite
        if kind in ("gradient", "reduced_gradient") and s.zeros == s.count:
            yield Reason("zero-gradient", 5, "gradient exactly 0 in every step: frozen on purpose, or cut off")
        if not nonzero or not self._float16:
            return
        went_through = "float16" in s.dtypes or (s.mantissa_bits <= FLOAT16.mantissa_bits and "float32" in s.dtypes)
        if kind in _BACKWARD and went_through and s.subnormal > nonzero / 4:
            text = (
                f"{share(s.zeros, s.count)} are 0 and {share(s.subnormal, nonzero)} of the others subnormal in float16"
            )
            yield Reason("flushing", 50, f"{text}: flushing to zero, a larger loss scale would keep more")
        elif self._cast_to_float16(s) and s.flushed > nonzero / 2:
            weight = 50 if kind == "input" else 6
            yield Reason(
                "flushed-by-cast", weight, f"the cast to float16 makes {share(s.flushed, nonzero)} of the values 0"
            )
        elif kind in _FORWARD and went_through and s.subnormal > nonzero / 2:
            yield Reason(
                "subnormal", 6, f"{share(s.subnormal, nonzero)} of the nonzero values are subnormal in float16"
            )

    # --- dtypes and updates -------------------------------------------------------------------------------------------

    def _dtype(self, cell: Cell | None) -> Iterator[Reason]:
        """What it was asked to compute in against what its operators were seen to compute in."""
        if cell is None or cell.asked_dtype not in _FLOATS or cell.compute_source not in ("operators", "trace"):
            return
        computes = {op: dtype for op, dtype in cell.compute_dtypes.items() if dtype in _FLOATS and op != "Cast"}
        other = {op: dtype for op, dtype in computes.items() if dtype != cell.asked_dtype}
        if not computes or (cell.asked_dtype in computes.values() and cell.asked_dtype != "float32"):
            return
        if other:
            seen = ", ".join(f"{op} in {dtype}" if op else dtype for op, dtype in list(other.items())[:3])
            yield Reason("dtype", 55, f"asked to compute in {cell.asked_dtype}, computes {seen}")

    def _update(self, s: SiteSummary) -> Iterator[Reason]:
        """In rows of updates, zeros did not change, and flushed ones moved by less than half an ulp."""
        changed = s.count - s.zeros - s.nan
        gradient = self._gradients.get(s.site.path)
        has_gradient = gradient is not None and gradient.count and gradient.zeros < gradient.count / 2
        narrow = [dtype for dtype in s.dtypes if dtype in ("float16", "bfloat16")]
        if narrow and has_gradient and s.zeros > s.count / 2:
            text = (
                f"{share(s.zeros, s.count)} of the elements did not change in spite of a gradient: updates round away"
            )
            yield Reason("update-rounds-away", 52, f"{text} in {narrow[0]}")
        elif changed and s.flushed > changed / 2:
            text = f"{share(s.flushed, changed)} of the changes are below half an ulp of the format it is computed in"
            yield Reason("update-below-half-ulp", 6, text)


def describe_nonfinite(nan: int, pos_inf: int, neg_inf: int) -> str:
    """``"3 NaN, 2 +inf"``."""
    named = ((nan, "NaN"), (pos_inf, "+inf"), (neg_inf, "-inf"))
    return ", ".join(f"{number} {name}" for number, name in named if number)


def plural(number: int, noun: str) -> str:
    """``"1 step"``, ``"2 steps"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def share(part: int, whole: int) -> str:
    """A part as a percentage that is 0 % or 100 % only if it is exactly that."""
    percent = 100 * part / whole
    if 0 < percent < 0.1:
        return "<0.1 %"
    if 99.9 < percent < 100:
        return ">99.9 %"
    return f"{percent:.3g} %"
