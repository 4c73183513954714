"""The parts of the HTML page that are text: they are there without a script, too."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ampdebug.report.html_blocks import SIGNS, finding, fold, items, pairs, table
from ampdebug.report.html_results import result

if TYPE_CHECKING:
    from ampdebug._diagnose import Diagnosis
    from ampdebug._records import Event
    from ampdebug.report.table import Report

_EVENTS = 300


def verdict(report: Report, diagnosis: Diagnosis | None) -> str:
    """The answer in a line or two, before everything else."""
    findings = () if diagnosis is None else diagnosis.findings
    worst = next((level for level in ("error", "warning") if any(f.severity == level for f in findings)), "ok")
    counted = [
        f"{number} {level}{'' if number == 1 else 's'}"
        for level in ("error", "warning", "note")
        if (number := sum(f.severity == level for f in findings))
    ]
    if worst == "ok" and not report.healthy:
        worst = "warning"
    said = "Nothing is wrong" if worst == "ok" else ""
    if counted:
        said = f"{said} ({', '.join(counted)})" if said else ", ".join(counted)
    elif not said:
        said = "Worth a look"
    first = f"<span>{html.escape(findings[0].sentence)}</span> " if worst in {f.severity for f in findings[:1]} else ""
    return (
        f'<p class="verdict {worst}"><span class="sign" aria-hidden="true">{SIGNS[worst]}</span> '
        f"<strong>{html.escape(said)}.</strong> {first}"
        f'<span id="considered">{html.escape(report._verdict())}</span></p>'
    )


def summary(report: Report) -> str:
    """The lines that stand below the table in a terminal."""
    return pairs(report.summary)


def diagnosis(found: Diagnosis | None, problem: str) -> str:
    """The findings, most explaining first, then what was looked at."""
    if found is None:
        return f"<p>{html.escape(problem)}</p>"
    cards = "".join(finding(f.to_dict(), unfolded=not number) for number, f in enumerate(found.findings))
    none = "" if found.findings else "<p>No rule found anything.</p>"
    looked = items(found.looked_at)
    unknown = f"<p>Cannot be said from this run:</p>{items(found.unknown)}" if found.unknown else ""
    return f"{cards}{none}{fold('What was looked at', looked + unknown)}"


def results(stored: Mapping[str, Sequence[Any]]) -> str:
    """Every stored result by kind, the newest of a kind first; "" where there are none."""
    parts = []
    for kind, found in stored.items():
        for number, data in enumerate(reversed(found)):
            which = f" ({len(found) - number} of {len(found)})" if len(found) > 1 else ""
            body = result(kind, data)
            title = f"<h3>{html.escape(kind)}{which}</h3>"
            older = fold(f"{kind}{which}, older", body)
            parts.append(f'<article class="result">{older if number else title + body}</article>')
    if not parts:
        return ""
    return (
        f'<section id="results" aria-labelledby="h-results"><h2 id="h-results">Results</h2>{"".join(parts)}</section>'
    )


def events(found: Sequence[Event]) -> str:
    """What the monitor said."""
    if not found:
        return ""
    rows = [[event.step, event.kind, event.message] for event in found[:_EVENTS]]
    left = len(found) - len(rows)
    more = f'<p class="more">{left} more events are left out here.</p>' if left else ""
    body = table(("step", "event", "message"), rows, "What the monitor said")
    return f'<section id="events" aria-labelledby="h-events"><h2 id="h-events">Events</h2>{body}{more}</section>'


def about(meta: Mapping[str, Any], problems: Sequence[str], honest: Sequence[str]) -> str:
    """How the page was made: what was merged, what is missing, what the run was made with."""
    left_out = f"<h3>Left out: damaged</h3>{items(problems)}" if problems else ""
    short = [(name, value) for name, value in meta.items() if not isinstance(value, (dict, list))]
    return f"{items(honest)}{left_out}{fold('What the run was made with', pairs(short))}"
