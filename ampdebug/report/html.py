"""A run as one self-contained HTML page: it needs no network, no server and no other file.

The script and the style are part of the page, and its Content-Security-Policy names them by their SHA-256: nothing else
runs, and nothing is fetched, whatever texts the run holds. The data are JSON in which no markup can begin.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import secrets
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampdebug._diagnose import Diagnosis, diagnose
from ampdebug._errors import ArgumentError, FormatError
from ampdebug.report import html_static
from ampdebug.report.html_data import PageData, collect

if TYPE_CHECKING:
    from ampdebug._run import Progress, Run

_SCRIPTS = ("core.js", "table.js", "chart.js", "heat.js", "detail.js", "main.js")
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def write_html(run: Run, path: str | os.PathLike[str], *, progress: Progress | None = None) -> Path:
    """Write a recorded run as one HTML page that opens anywhere, without a network.

    Summary and diagnosis; loss, loss scale and overflows over the steps; the exponent range of each measured tensor
    over the steps; a table of all cells and parameters with the details of each; the results stored in the run.

    Args:
        run: The run.
        path: The file to write; an older one is replaced at once, when all is there.
        progress: Called as ``progress(steps done, steps in all)`` on long runs.

    Returns:
        The path of the page.

    Raises:
        ArgumentError: if ``path`` is the run's own file.
        StoreError: if the run cannot be read.
        OSError: if the page cannot be written.

    Example:
        >>> import ampdebug
        >>> with ampdebug.open_run("runs/exp1") as run:  # doctest: +SKIP
        ...     ampdebug.write_html(run, "exp1.html")
    """
    target = Path(path)
    if target.exists() and target.samefile(run.path):
        raise ArgumentError(f"path={str(path)!r} is the run itself; give the page another name, such as 'report.html'")
    if target.is_dir():
        raise ArgumentError(
            f"path={str(path)!r} is a directory; give a file name, such as {str(target / 'report.html')!r}"
        )
    # Replaced in one step: a reader, or a mail being written, never sees half a page. Made first: where nothing can be
    # written, that shows before a long run is read.
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with open(draft, "xb") as file:
            file.write(_page(run, collect(run, progress)))
        os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return target


def _page(run: Run, found: PageData) -> bytes:
    judged, problem = _diagnosed(run)
    style = _source("page.css")
    script = '"use strict";\n(() => {\n' + "\n".join(map(_source, _SCRIPTS)) + "\n})();\n"
    assert "</" not in style
    assert "</script" not in script.lower()
    report = found.report
    events = html_static.events(run.events)
    results = html_static.results(stored_results(run))
    name = run.path.resolve().parent.name
    parts = {
        "policy": (
            f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; "
            "form-action 'none'"
        ),
        "name": html.escape(name),
        "title": html.escape(report.title),
        "style": style,
        "script": script,
        "data": _embedded(found.data),
        "verdict": html_static.verdict(report, judged),
        "diagnosis": html_static.diagnosis(judged, problem),
        "summary": html_static.summary(report),
        "without_script": report._repr_html_(),
        "events": events,
        "results": results,
        "links": ('<a href="#results">Results</a>' if results else "")
        + ('<a href="#events">Events</a>' if events else ""),
        "about": html_static.about(run.meta, run.problems, _honest(found.data)),
    }
    # Text of a run that UTF-8 has no form for (half a surrogate pair) becomes an escape.
    return _filled(_source("page.html"), parts).encode("utf-8", "backslashreplace")


def _diagnosed(run: Run) -> tuple[Diagnosis | None, str]:
    try:
        return diagnose(run), ""
    except FormatError as error:
        return None, f"There is no diagnosis: {error}."


def stored_results(run: Run) -> dict[str, list[Any]]:
    """Every result in the run, oldest first, by kind in the order in which the first of each came.

    Of a kind with a damaged result there is one sentence instead.
    """
    found: dict[str, list[Any]] = {}
    for (kind,) in run._query("SELECT kind FROM results GROUP BY kind ORDER BY min(rowid)"):
        try:
            found[str(kind)] = list(run.results(kind))
        except FormatError as error:
            found[str(kind)] = [f"It cannot be read: {error}."]
    return found


def _honest(data: Mapping[str, Any]) -> list[str]:
    """What is merged on the page, in numbers."""
    steps, columns = data["steps"], len(data["map"]["first"])
    sampled = data["map"]["sampled"]
    shown = [snapshot["step"] for snapshot in data["snapshots"]]
    result = []
    if steps["per_bin"] > 1:
        result.append(
            f"The chart groups {steps['per_bin']} neighbouring steps: a line at the last value, a band from the "
            "smallest to the largest, and a mark where any of them overflowed."
        )
    if sampled > columns:
        result.append(
            f"The map shows {sampled} measured steps in {columns} columns. A column holds the smallest and the largest "
            "exponent of its steps, and is marked when any value of any of them was not finite. A range is of single "
            "values: one stray value widens it."
        )
    if shown:
        result.append(
            f"Histograms are of steps {', '.join(map(str, shown))}. Every other number is over all measured steps."
        )
    return result


def _source(name: str) -> str:
    return (files("ampdebug.report") / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _embedded(data: Any) -> str:
    """JSON that can stand in a script element: no markup can begin in it, and it is ASCII."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _filled(template: str, parts: Mapping[str, str]) -> str:
    """Each ``{{name}}`` of the template once; what is put in is not looked into again."""
    return _PLACE.sub(lambda match: parts[match[1]], template)
