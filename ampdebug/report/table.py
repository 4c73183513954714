"""The report of a run: a table of the cells that deserve a look, then a summary. The only user of tabulate."""

from __future__ import annotations

import fnmatch
import html
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from tabulate import tabulate

from ampdebug._aggregate import Aggregate, step_columns
from ampdebug._errors import ArgumentError
from ampdebug._summary import SiteSummary, summarize_sites
from ampdebug.report.facts import RunFacts, gather_facts
from ampdebug.report.summary import describe_run, shorten, summary_lines
from ampdebug.report.watchlist import Judgement, judge_sites, share, uses_float16

if TYPE_CHECKING:
    from ampdebug._run import Progress, Run

Sort = Literal["weight", "order", "name", "absmax", "nonfinite", "flushed", "zeros"]
SORTS: tuple[Sort, ...] = get_args(Sort)

WIDTH = 120
LINES = 40
_PASSED_ON = 40  # the weight of a non-finite output that is not a birth, and of all that explains more
_SHORT = {"output_gradient": "out. grad.", "reduced_gradient": "red. grad."}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a cell or a parameter, with the site that has the heaviest reason.

    Attributes:
        path: Cell path or parameter name.
        cell_type: Class name of the cell, "" for a parameter.
        kind: Which kind of site the numbers are of.
        call: Call of the cell within a step.
        slot: Place in a nested value.
        dtype: Dtypes it was seen with, joined by ``/``.
        steps: In how many steps it was measured.
        count: Elements over all these steps, as for the next four.
        zeros: Elements that are 0.
        nan: NaN.
        pos_inf: +inf.
        neg_inf: -inf.
        flushed: Elements that float16 rounds to zero.
        absmax: Largest finite magnitude, NaN for none.
        absmax_step: The step that had it.
        alarm: It deserves a look.
        reasons: ``(slug, clause)``, the most explaining first.
    """

    path: str
    cell_type: str
    kind: str
    call: int
    slot: str
    dtype: str
    steps: int
    count: int
    zeros: int
    nan: int
    pos_inf: int
    neg_inf: int
    flushed: int
    absmax: float
    absmax_step: int | None
    alarm: bool
    reasons: tuple[tuple[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain Python values."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {**values, "reasons": [{"slug": slug, "text": text} for slug, text in self.reasons]}


@dataclass(frozen=True)
class Report:
    """What `build_report` found. ``str()`` is the report for a terminal of 120 columns.

    Attributes:
        title: What run, over which steps.
        rows: The rows asked for: those that deserve a look, or all of them.
        facts: The scalars of the steps in numbers.
        summary: ``(subject, sentence)`` of each line below the table.
        considered: How many cells and parameters were looked at.
        alarms: How many of these deserve a look.
        limit: How many lines the text may have; None for all.
        hint: How to see what is left out.
    """

    title: str
    rows: tuple[Row, ...]
    facts: RunFacts
    summary: tuple[tuple[str, str], ...]
    considered: int
    alarms: int
    limit: int | None
    wide: bool
    hint: str

    @property
    def healthy(self) -> bool:
        """Nothing deserves a look and the loss is finite."""
        return not self.alarms and self.facts.loss_is_finite

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values: the rows, the summary by subject, the verdict."""
        return {
            "title": self.title,
            "healthy": self.healthy,
            "considered": self.considered,
            "alarms": self.alarms,
            "rows": [row.to_dict() for row in self.rows],
            "summary": dict(self.summary),
        }

    def _verdict(self) -> str:
        if not self.considered:
            return "No cell was measured in these steps."
        if not self.alarms:
            if not self.facts.loss_is_finite:
                return f"None of {self.considered} cells and parameters stands out, but the loss is not finite."
            return f"Healthy: none of {self.considered} cells and parameters stands out."
        verb = "deserves" if self.alarms == 1 else "deserve"
        return f"{self.alarms} of {self.considered} cells and parameters {verb} a look."

    def __str__(self) -> str:
        head = [*textwrap.wrap(self.title, WIDTH), self._verdict()]
        tail: list[str] = []
        indent = max((len(subject) for subject, _ in self.summary), default=0) + 2
        for subject, sentence in self.summary:
            wrapped = textwrap.wrap(sentence, WIDTH - indent) or [""]
            tail += [f"{subject:{indent}}{wrapped[0]}", *(" " * indent + line for line in wrapped[1:])]
        room = None if self.limit is None else self.limit - len(head) - len(tail) - 3
        table = self._table(room)
        return "\n".join([*head, *(["", *table] if table else []), *(["", *tail] if tail else [])])

    def _table(self, room: int | None) -> list[str]:
        """The table cut to so many lines, with a last line that says what is left out."""
        if not self.rows:
            return []
        blocks = [_cells_of(row, self.wide) for row in self.rows]
        headers = ["cell or parameter", "what", "dtype", "absmax", "not finite", *(_WIDE if self.wide else ()), "why"]
        # The reason takes what the other columns leave, each of which is as wide as its widest entry.
        widths = [max(len(header), *(len(block[k]) for block in blocks)) for k, header in enumerate(headers[:-1])]
        left = max(24, WIDTH - sum(widths) - 2 * len(widths))
        table = [[*block[:-1], "\n".join(textwrap.wrap(block[-1], left))] for block in blocks]
        heights = [max(1, row[-1].count("\n") + 1) for row in table]
        shown = len(table)
        if room is not None and 2 + sum(heights) > room:
            used, shown = 3, 0  # the header, its rule, and the line that says what is left out
            while shown < len(table) and (used := used + heights[shown]) <= max(room, 4 + heights[0]):
                shown += 1
        align = ["left", "left", "left", "right", "right", *(["right"] * len(_WIDE) if self.wide else ()), "left"]
        text = tabulate(table[:shown], headers, tablefmt="simple", disable_numparse=True, colalign=align)
        lines = [line.rstrip() for line in text.splitlines()]
        if shown < len(table):
            rest = len(table) - shown
            lines.append(f"… {rest} more row{'s' if rest > 1 else ''}: {self.hint}")
        return lines

    def _repr_html_(self) -> str:
        headers = ["cell or parameter", "type", "what", "dtype", "absmax", "not finite", "why"]
        body = [
            [row.path or "(network)", row.cell_type, *_cells_of(row, False)[1:]]
            for row in (self.rows if self.limit is None else self.rows[: self.limit])
        ]
        table = tabulate(body, headers, tablefmt="html", disable_numparse=True) if body else ""
        lines = "".join(f"<tr><th>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>" for a, b in self.summary)
        left_out = len(self.rows) - len(body)
        more = f"<p>{left_out} more rows: {html.escape(self.hint)}</p>" if left_out else ""
        title, verdict = html.escape(self.title), html.escape(self._verdict())
        return f"<p>{title}</p><p><b>{verdict}</b></p>{table}{more}<table>{lines}</table>"


_WIDE = ("zero", "to 0 in fp16")


def _cells_of(row: Row, wide: bool) -> list[str]:
    """The texts of a row, the reason last."""
    kind = _SHORT.get(row.kind, row.kind)
    what = " ".join([kind, *([f"call {row.call}"] if row.call else []), *([row.slot] if row.slot else [])])
    name = shorten(row.path or "(network)", 36 if row.cell_type else 44)
    if row.cell_type and len(name) + len(row.cell_type) <= 40:
        name = f"{name} ({row.cell_type})"
    extra = [share(row.zeros, row.count), share(row.flushed, row.count)] if row.count else ["", ""]
    bad = row.nan + row.pos_inf + row.neg_inf
    return [
        name,
        shorten(what, 18),
        row.dtype,
        "" if math.isnan(row.absmax) else f"{row.absmax:.3g}",
        share(bad, row.count) if bad else "",
        *(extra if wide else ()),
        "; ".join(text for _, text in row.reasons[:2]),
    ]


def plain_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text as it stands, without blanks at the ends of lines; for other reports too."""
    text = tabulate(rows, headers, tablefmt="simple", disable_numparse=True)
    return "\n".join(line.rstrip() for line in text.splitlines())


def build_report(
    run: Run,
    *,
    show_all: bool = False,
    cells: str | None = None,
    step: int | None = None,
    sort: Sort = "weight",
    progress: Progress | None = None,
) -> Report:
    """Build the report of a recorded run.

    Args:
        run: The run.
        show_all: Every cell and parameter, and as many lines as that takes; else those that deserve a look, on one
            screen (40 lines of 120 columns).
        cells: Only paths and parameter names that match this glob (``"blocks.*.attn"``), with a row for each of their
            tensors.
        step: Look at this step only.
        sort: ``"weight"``: what explains most first; ``"order"``: as executed; ``"name"``; ``"absmax"``,
            ``"nonfinite"``, ``"flushed"``, ``"zeros"``: the largest first (the last three as shares).
        progress: Called as ``progress(steps done, steps in all)`` on long runs.

    Raises:
        ArgumentError: for another ``sort``, a glob that matches nothing, or a step that is not recorded or has no
            statistics.
        StoreError: if the run cannot be read.
    """
    if sort not in SORTS:
        raise ArgumentError(f"sort={sort!r} is not known; choose one of {', '.join(SORTS)}")
    facts = gather_facts(run.steps(on_damage="skip") if step is None else [run.step(step)])
    network = run.cells
    if step is None:
        found = run.summary(progress)
        summaries, problems = found.sites, found.problems
    else:
        summaries, problems = _summaries_of_step(run, step), ()
    judgements = [j for j in judge_sites(summaries, network, facts) if j.summary.rows or j.reasons]
    everything = grouped(judgements)
    alarms = sum(row.alarm for _, row in everything)
    if cells is not None:
        chosen = [(j, _row([j])) for j in judgements if fnmatch.fnmatchcase(j.summary.site.path or "(network)", cells)]
        if not chosen:
            names = [row.path or "(network)" for _, row in everything]
            raise ArgumentError(
                f"cells={cells!r} matches no measured cell or parameter of {run.path}; there are {len(names)}, "
                f"such as {', '.join(map(repr, names[:3]))} (all of them: ampdebug report --all)"
            )
    elif show_all:
        chosen = everything
    else:
        chosen = [(j, row) for j, row in everything if row.alarm]
    rows = tuple(row for _, row in sorted(chosen, key=_SORT_KEYS[sort]))
    float16 = uses_float16(network, summaries)
    return Report(
        title=describe_run(run, facts, step),
        rows=rows,
        facts=facts,
        summary=tuple(summary_lines(run, facts, judgements, uses_float16=float16, problems=problems, step=step)),
        considered=len(everything),
        alarms=alarms,
        limit=None if show_all or cells is not None else LINES,
        wide=show_all or cells is not None,
        hint=f"ampdebug report {run.path.parent} --all" if step is None else f"… --step {step} --all",
    )


def _summaries_of_step(run: Run, step: int) -> tuple[SiteSummary, ...]:
    found = run.tensors(step)
    aggregate = Aggregate()
    columns = step_columns(step, found.dtype_codes, found.rows, found.bins_first, found.bins_length)
    aggregate.merge(found.site_ids, columns)
    return summarize_sites(aggregate, run.sites, found.dtype_names)


def grouped(judgements: Iterable[Judgement]) -> list[tuple[Judgement, Row]]:
    """One row a cell, and one a parameter: inputs, outputs and calls are not shown apart."""
    groups: dict[tuple[bool, str], list[Judgement]] = {}
    for judgement in judgements:
        site = judgement.summary.site
        is_cell = site.kind in ("input", "output", "output_gradient")
        groups.setdefault((is_cell, site.path), []).append(judgement)
    return [(_heaviest(group), _row(group)) for group in groups.values()]


def _heaviest(group: Sequence[Judgement]) -> Judgement:
    """Of several tensors of one cell the one to show: the heaviest reason, else its output."""
    return max(group, key=lambda j: (j.weight, j.summary.site.kind in ("output", "gradient")))


def _row(group: Sequence[Judgement]) -> Row:
    best = _heaviest(group)
    s, site = best.summary, best.summary.site
    reasons = {reason.slug: reason for j in sorted(group, key=lambda j: -j.weight) for reason in reversed(j.reasons)}
    ordered = sorted(reasons.values(), key=lambda reason: -reason.weight)
    if best.weight >= _PASSED_ON:
        ordered = [reason for reason in ordered if reason.slug != "nonfinite-input"]  # that it came in is said by then
    alarm = any(reason.is_alarm for reason in ordered)
    # Beside an alarm, a note only distracts.
    kept = [reason for reason in ordered if reason.is_alarm or not alarm]
    return Row(
        path=site.path,
        cell_type=site.cell_type,
        kind=site.kind,
        call=site.call,
        slot=site.slot,
        dtype="/".join(s.dtypes),
        steps=s.steps,
        count=s.count,
        zeros=s.zeros,
        nan=s.nan,
        pos_inf=s.pos_inf,
        neg_inf=s.neg_inf,
        flushed=s.flushed,
        absmax=s.absmax,
        absmax_step=s.absmax_step,
        alarm=alarm,
        reasons=tuple((reason.slug, reason.text) for reason in kept),
    )


_Chosen = tuple[Judgement, Row]


def _largest(value: Callable[[Row], float]) -> Callable[[_Chosen], Any]:
    """Sorts by a number, largest first, NaN last, equals in the order of execution."""

    def key(chosen: _Chosen) -> Any:
        number = value(chosen[1])
        return (math.isnan(number), -number if not math.isnan(number) else 0.0, chosen[0].summary.site_id)

    return key


_SORT_KEYS: dict[Sort, Callable[[_Chosen], Any]] = {
    "weight": lambda chosen: (-chosen[0].weight, chosen[0].summary.site_id),
    "order": lambda chosen: chosen[0].summary.site_id,
    "name": lambda chosen: (chosen[1].path, chosen[0].summary.site_id),
    "absmax": _largest(lambda row: row.absmax),
    "nonfinite": _largest(lambda row: (row.nan + row.pos_inf + row.neg_inf) / max(row.count, 1)),
    "flushed": _largest(lambda row: row.flushed / max(row.count, 1)),
    "zeros": _largest(lambda row: row.zeros / max(row.count, 1)),
}
