"""The pieces that the HTML page's texts are made of. Whatever a run says is escaped here, once."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ampdebug.rules import Evidence

# Beside the word, so that nobody needs to tell colours apart.
SIGNS = {"error": "●", "warning": "▲", "note": "■", "ok": "✓"}
ROWS = 300  # of one table or list; the page says how many more there are
DEPTH = 5  # of nested values; what is deeper is an ellipsis


def text(value: Any) -> str:
    """A value as escaped text."""
    return html.escape(words(value))


def words(value: Any, depth: int = 0) -> str:
    """A plain JSON value for a reader."""
    if depth > DEPTH:
        return "…"
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(words(item, depth + 1) for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {words(item, depth + 1)}" for key, item in value.items())
    return str(value)


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]], caption: str) -> str:
    """A table that the page's script makes sortable and searchable. Values are plain JSON values; texts are escaped."""
    rows = list(rows)
    numeric = [
        any(map(_is_number, column)) and all(map(_is_number_or_none, column)) for column in zip(*rows, strict=True)
    ]
    numeric = numeric or [False] * len(headers)
    classes = [' class="number"' if number else "" for number in numeric]
    head = "".join(
        f'<th scope="col"{kind}>{html.escape(name)}</th>' for name, kind in zip(headers, classes, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(_data(value, kind) for value, kind in zip(row, classes, strict=True)) + "</tr>"
        for row in rows[:ROWS]
    )
    more = f'<p class="more">{len(rows) - ROWS} more rows are left out here.</p>' if len(rows) > ROWS else ""
    return (
        f'<div class="table"><table class="sortable"><caption>{html.escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}"
    )


def _data(value: Any, kind: str) -> str:
    exact = f' data-value="{html.escape(str(value))}"' if _is_number(value) else ""
    return f"<td{kind}{exact}>{text(value)}</td>"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_number_or_none(value: Any) -> bool:
    return value is None or value in ("nan", "inf", "-inf") or _is_number(value)


def pairs(items: Iterable[tuple[str, Any]]) -> str:
    """A list of subjects and what is said of each; the values are escaped."""
    body = "".join(f"<dt>{html.escape(name)}</dt><dd>{text(value)}</dd>" for name, value in items)
    return f'<dl class="pairs">{body}</dl>' if body else ""


def items(sentences: Iterable[Any]) -> str:
    """A bulleted list of escaped texts."""
    body = "".join(f"<li>{text(sentence)}</li>" for sentence in sentences)
    return f"<ul>{body}</ul>" if body else ""


def fold(title: str, body: str) -> str:
    """What is there for those who want it."""
    return f"<details><summary>{html.escape(title)}</summary>{body}</details>" if body else ""


def finding(found: Mapping[str, Any], *, unfolded: bool = False) -> str:
    """A cause with its evidence, and what to do.

    Args:
        found: ``Finding.to_dict()``, perhaps read back from a run.
        unfolded: Show the evidence at once.

    Raises:
        KeyError, TypeError: it is something else.
    """
    severity = html.escape(str(found["severity"]))
    first, last = found["first_step"], found["last_step"]
    place = []
    if first is not None:
        place.append(f"step {first}" if last in (None, first) else f"steps {first} to {last}")
    if found["where"]:
        place.append(f"at {found['where']}")
    where = f' <span class="where">{html.escape(", ".join(place))}</span>' if place else ""
    evidence = "".join(f"<li><code>{html.escape(str(Evidence(**row)))}</code></li>" for row in found["evidence"])
    confirm = f"<p><b>To confirm:</b> {text(found['confirm'])}</p>" if found["confirm"] else ""
    follows = f"<p>Follows from it:</p>{items(found['consequences'])}" if found["consequences"] else ""
    return (
        f'<article class="finding {severity}">'
        f'<h3><span class="sign" aria-hidden="true">{SIGNS.get(severity, "■")}</span> '
        f'<span class="severity">{severity}</span> <span class="slug">{text(found["slug"])}</span>{where}</h3>'
        f"<p>{text(found['sentence'])}</p>"
        f'<p class="do"><b>Do:</b> {text(found["action"])}</p>{confirm}{follows}'
        f"<details{' open' if unfolded else ''}><summary>Evidence and confidence</summary>"
        f"<p>Confidence {text(found['confidence'])}: {text(found['confidence_reason'])}.</p>"
        f'<ul class="evidence">{evidence}</ul></details></article>'
    )
