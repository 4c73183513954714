"""Stored results of later analyses (bisect, audit, compare, ...) as HTML: a bisection in its words, others as tables.

What a result of any kind holds is only data: whatever its keys and texts are, they are escaped and never executed.
"""

from __future__ import annotations

import html
from typing import Any

from ampdebug._bisect_result import SENTENCES
from ampdebug.report.html_blocks import DEPTH, ROWS, finding, fold, items, pairs, table, text, words

_UNFOLDED = 20  # rows of a table that is shown at once


def result(kind: str, data: Any) -> str:
    """One stored result as HTML."""
    if kind == "bisect" and isinstance(data, dict):
        try:
            return _bisect(data)
        except (KeyError, TypeError, AttributeError):
            return generic(data)  # of another version, or made by hand: shown like any other
    return generic(data)


def _bisect(data: dict[str, Any]) -> str:
    sentence = SENTENCES.get(data["status"], str(data["status"]))
    rows = [
        [
            culprit["rank"],
            culprit["unit"]["operator"],
            culprit["unit"]["path"] or "(root)",
            culprit["unit"]["line"],
            culprit["unit"]["source"],
            culprit["why"],
            culprit["share"],
            culprit["needed"],
        ]
        for culprit in data["culprits"]
    ]
    headers = ("rank", "operator", "cell", "at", "source", "why", "share", "needed")
    level = str(data["level"])
    task = [("task", data["task"])] if data.get("task") else []
    measured = [
        *task,
        ("good", data["criterion"]),
        ("float32", data["reference"]),
        (level, data["low"]),
        ("noise", data["noise"]),
        ("probes", f"{data['probes']} of at most {data['bound']}, {data['reused']} more from the journal"),
        ("units", data["units"]),
        ("arithmetic", data["mode"]),
        ("time, s", data["seconds"]),
    ]
    checks, confirmed = (
        [[check["name"], check["passed"], check["detail"]] for check in data.get(part) or ()]
        for part in ("checks", "confirmations")
    )
    shown = ("rank", "operator", "path", "line", "score", "why")
    ranking = [[row[name] for name in shown] for row in data.get("ranking") or ()]
    history = [
        [
            number,
            probe["phase"],
            probe["passed"],
            probe["value"],
            len(probe["units"]),
            probe["seconds"],
            probe["reused"],
        ]
        for number, probe in enumerate(data["history"], 1)
    ]
    columns = ("probe", "phase", "passed", "value", "units in float32", "time, s", "from the journal")
    return (
        f'<p class="lead"><b>{html.escape(level)}</b>: {html.escape(sentence)}</p>'
        + (table(headers, rows, "Kept in float32") if rows else "")
        + pairs(measured)
        + (table(("check", "holds", "detail"), confirmed, "Confirmed") if confirmed else "")
        + (fold("What was checked first", table(("check", "holds", "detail"), checks, "Checks")) if checks else "")
        + fold("Notes", items(data["notes"]))
        + (fold("What the ranking saw, largest effect first", table(shown, ranking, "Ranking")) if ranking else "")
        + (fold("Every probe", table(columns, history, "Probes")) if history else "")
    )


def generic(data: Any, *, depth: int = 0) -> str:
    """Any JSON value: single values as pairs, lists of objects as tables, what is nested deeper folded away."""
    if isinstance(data, list):
        return _generic_list(data)
    if not isinstance(data, dict):
        return f"<p>{text(data)}</p>"
    single = [(key.replace("_", " "), value) for key, value in data.items() if _is_short(value)]
    parts = [pairs(single)]
    for key, value in data.items():
        if _is_short(value):
            continue
        name = key.replace("_", " ")
        if isinstance(value, list) and len(value) > _UNFOLDED:
            parts.append(fold(f"{name}: {len(value)}", _generic_list(value)))
        elif depth == 0 and isinstance(value, list):
            parts.append(f"<h4>{html.escape(name)}</h4>{_generic_list(value)}")
        else:
            body = f"<pre>{text(value)}</pre>" if depth >= DEPTH else generic(value, depth=depth + 1)
            parts.append(fold(name, body))
    return "".join(parts)


def _generic_list(data: list[Any]) -> str:
    if data and all(isinstance(item, dict) for item in data):
        found = _findings(data)
        if found:
            return found
        names = list(dict.fromkeys(name for item in data for name in item))
        return table([n.replace("_", " ") for n in names], [[item.get(n) for n in names] for item in data], "")
    more = f'<p class="more">{len(data) - ROWS} more are left out here.</p>' if len(data) > ROWS else ""
    return items(data[:ROWS]) + more


def _findings(data: list[dict[str, Any]]) -> str:
    """The list as findings, "" where it is of anything else."""
    try:
        return "".join(finding(item, unfolded=not number) for number, item in enumerate(data))
    except (KeyError, TypeError):
        return ""


def _is_short(value: Any) -> bool:
    """Fits beside its name."""
    if isinstance(value, list):
        return all(not isinstance(item, (list, dict)) for item in value) and len(words(value)) <= 60
    return not isinstance(value, dict)
