"""Stored bisections for readers: a line for the report, a text and a picture of the ranking for TensorBoard.

What is read here came from a file, so that nothing about its shape is taken for granted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ampdebug._bisect_store import KIND
from ampdebug.report._font import HEIGHT, WIDTH
from ampdebug.report.heatmap import Image, write_text

if TYPE_CHECKING:
    from ampdebug._run import Run

_NAMED = 4  # culprits that a line of the report names before it says how many more there are
_SHOWN = 3  # results of one run that the report tells of, the newest

_BARS = 25
_BAR_WIDTH = 200
_LABEL = 60
_CULPRIT, _OTHER = (213, 94, 0), (86, 180, 233)  # vermilion and sky blue of the Okabe-Ito palette

_SENTENCES = {
    "nothing-to-find": "passes as it is: nothing to find",
    "precision-innocent": "fails in float32 too: precision is not the cause",
    "not-found": "no set of known operators in float32 is enough",
}


def stored_bisections(run: Run) -> list[Mapping[str, Any]]:
    """All results of the run, oldest first."""
    return list(run.results(KIND))


def bisection_lines(run: Run) -> Iterator[tuple[str, str]]:
    """Yields ``(subject, sentence)`` of the newest results, oldest of these first; subjects are unique."""
    found = stored_bisections(run)
    newest = found[-_SHOWN:]
    for number, data in enumerate(newest, start=len(found) - len(newest) + 1):
        yield "bisect" if len(found) == 1 else f"bisect {number}", describe_bisection(data)


def describe_bisection(data: Mapping[str, Any]) -> str:
    """One sentence on a result: what was searched, what must stay in float32, how much of that was verified."""
    head = " ".join(part for part in (_text(data.get("task")), _text(data.get("level"))) if part)
    status = _text(data.get("status"))
    culprits = _culprits(data)
    if data.get("direction") == "down":
        lowered = len(_rows(data.get("lowered")))
        head += f" down, {lowered} of {_text(data.get('units'))} units may go to {_text(data.get('dtype'))}"
        if not culprits:
            return f"{head} ({status})"
    if not culprits:
        return f"{head}: {_SENTENCES.get(status, f'no answer yet ({status})')}"
    named = "; ".join(_place(_map(culprit.get("unit"))) for culprit in culprits[:_NAMED])
    more = f"; and {len(culprits) - _NAMED} more" if len(culprits) > _NAMED else ""
    verified = all(culprit.get("needed") == "verified" for culprit in culprits)
    proof = ", each verified to be needed" if status == "found" and verified else f", search {status}"
    probes = f" ({data.get('probes')} probes{proof})"
    return f"{head}: keep in float32 {named}{more}{probes}; good is {_text(data.get('criterion'))}"


def _place(unit: Mapping[str, Any]) -> str:
    line = f" at {_text(unit.get('line'))}" if unit.get("line") else ""
    return f"{_text(unit.get('operator'))} in {_text(unit.get('path')) or '(root)'}{line}"


def bisection_markdown(data: Mapping[str, Any]) -> str:
    """A result as Markdown: the sentence, a table of what must stay, the head of the ranking, the checks, the notes."""
    lines = [describe_bisection(data), ""]
    culprits = _culprits(data)
    if culprits:
        rows = []
        for culprit in culprits:
            unit = _map(culprit.get("unit"))
            where = [_text(unit.get(name)) for name in ("operator", "path", "line", "source")]
            rows.append([_text(culprit.get("rank")), *where, _text(culprit.get("why")), _text(culprit.get("needed"))])
        lines += [*_markdown(["rank", "operator", "cell", "at", "source", "why", "needed"], rows), ""]
    ranking = _rows(data.get("ranking"))
    if ranking:
        columns = ("rank", "operator", "path", "line", "score", "why")
        rows = [[_text(row.get(name)) for name in columns] for row in ranking[:_BARS]]
        lines += ["Head of the ranking:", "", *_markdown(list(columns), rows), ""]
    for check in _rows(data.get("checks")):
        passed = check.get("passed")
        word = "ok" if passed is True else "FAILED" if passed is False else "not checked"
        lines.append(f"- check {_text(check.get('name'))}: {word} ({_text(check.get('detail'))})")
    notes = data.get("notes")
    lines += [f"- note: {_text(note)}" for note in (notes if isinstance(notes, list) else [])]
    return "\n".join(lines)


def _markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [line(headers), "|---" * len(headers) + "|", *map(line, rows)]


def draw_ranking(data: Mapping[str, Any]) -> Image | None:
    """The head of the ranking as bars, uint8 RGB ``[height, width, 3]``; None where the result has no ranking.

    A bar is as long as the logarithm of the score over the range that is shown, so that a tenth of the largest score
    can still be told from a hundredth. A score that is infinite (an overflow) has a full bar. What must stay in float32
    is vermilion, the rest sky blue.
    """
    rows = _rows(data.get("ranking"))[:_BARS]
    if not rows:
        return None
    culprits = {_text(_map(culprit.get("unit")).get("name")) for culprit in _culprits(data)}
    scores = [_number(row.get("score")) for row in rows]
    lengths = bar_lengths(scores)
    labels = [_cut(f"{_text(row.get('rank')):>3} {_place(row)}") for row in rows]
    numbers = ["not ranked" if math.isnan(score) else f"{score:.3g}" for score in scores]
    title = f"what rounding does to the loss, {_cut(_text(data.get('task')))} {_text(data.get('level'))}"
    legend = ((_CULPRIT, "must stay in float32"), (_OTHER, "need not"))
    left = WIDTH * (max(map(len, labels)) + 1)
    width = max(left + _BAR_WIDTH + WIDTH * 12, WIDTH * (len(title) + 1))
    picture = np.full((HEIGHT * (len(rows) + 3 + len(legend)), width, 3), 255, np.uint8)
    write_text(picture, title, 0, 0)
    top = 2 * HEIGHT
    for row, label, number, length in zip(rows, labels, numbers, lengths, strict=True):
        write_text(picture, label, top, 0)
        colour = _CULPRIT if _text(row.get("name")) in culprits else _OTHER
        picture[top + 1 : top + HEIGHT - 1, left : left + length] = colour
        write_text(picture, number, top, left + length + WIDTH)
        top += HEIGHT
    top += HEIGHT
    for colour, text in legend:
        picture[top + 1 : top + HEIGHT - 1, : 2 * WIDTH] = colour
        write_text(picture, text, top, 3 * WIDTH)
        top += HEIGHT
    return picture


def bar_lengths(scores: Sequence[float]) -> list[int]:
    """Length of each bar in pixels: 0 for an unknown score or zero, at least 1 for any other."""
    finite = [math.log10(score) for score in scores if 0 < score < math.inf]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    low = min(low, high - 1) - 0.1  # a lone score, and the smallest one, have a bar too

    def length(score: float) -> int:
        if math.isnan(score) or score <= 0:
            return 0
        if math.isinf(score):
            return _BAR_WIDTH
        return max(1, round(0.95 * _BAR_WIDTH * (math.log10(score) - low) / (high - low)))

    return [length(score) for score in scores]


def _number(value: Any) -> float:
    try:
        return math.nan if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan


def _cut(text: str) -> str:
    """Letters that the font has, and not too many: what a path differs by stands at its ends."""
    text = text.replace("→", "->").replace("…", "...")
    half = (_LABEL - 2) // 2
    return text if len(text) <= _LABEL else f"{text[:half]}..{text[-half:]}"


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _rows(value: Any) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _culprits(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return _rows(data.get("culprits"))
