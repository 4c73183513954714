"""A finding: one cause with its evidence, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ampdebug.rules._history import Mark, Record

Severity = Literal["note", "warning", "error"]
Confidence = Literal["high", "medium", "low"]

EVIDENCE_LIMIT = 8


@dataclass(frozen=True, slots=True)
class Evidence:
    """One thing that was seen.

    Attributes:
        text: The log line, or a sentence with the numbers of a recorded step.
        step: The step it belongs to, None where it belongs to none.
        line: Line number in the log, None where there is no log.
        file: The log, where there are several; "" where there is one.
    """

    text: str
    step: int | None = None
    line: int | None = None
    file: str = ""

    def __str__(self) -> str:
        place = f"line {self.line}" if self.line else f"step {self.step}" if self.step is not None else ""
        if self.file:
            place = f"{self.file}:{self.line}" if self.line else f"{self.file}, {place}"
        return f"{place}: {self.text}" if place else self.text

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        plain = {"step": self.step, "line": self.line, "text": self.text}
        return {**plain, "file": self.file} if self.file else plain


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause.

    Attributes:
        slug: Stable name, one meaning each.
        sentence: What happened.
        severity: ``"note"`` needs no action, ``"warning"`` costs accuracy or time, ``"error"`` breaks the training.
        confidence: How sure, ``confidence_reason`` why.
        confidence_reason: One sentence.
        first_step: First step it was seen in, None where steps have no numbers.
        last_step: Last one.
        where: Cell path, parameter or component of the loss, "" where unknown.
        evidence: At most ``EVIDENCE_LIMIT`` rows.
        action: What to change, concretely.
        confirm: The ampdebug command that would settle it, "" where nothing is open.
        consequences: What else was seen and follows from this; sentences.
        explains: Slugs of findings that are consequences of this one when they begin no earlier.
    """

    slug: str
    sentence: str
    severity: Severity
    confidence: Confidence
    confidence_reason: str
    first_step: int | None
    last_step: int | None
    where: str
    evidence: tuple[Evidence, ...]
    action: str
    confirm: str = ""
    consequences: tuple[str, ...] = ()
    explains: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "slug": self.slug,
            "sentence": self.sentence,
            "severity": self.severity,
            "confidence": self.confidence,
            "confidence_reason": self.confidence_reason,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "where": self.where,
            "evidence": [row.to_dict() for row in self.evidence],
            "action": self.action,
            "confirm": self.confirm,
            "consequences": list(self.consequences),
        }


def show(record: Record) -> Evidence:
    """A record as evidence: its log line, or its numbers where there is no log."""
    step = record.step.step
    if record.text:
        text = record.text.decode("utf-8", "replace")
        return Evidence("".join(c if c.isprintable() else " " for c in text).strip(), step, record.line or None)
    s = record.step
    parts = [
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in (
            ("loss", s.loss),
            ("loss scale", s.loss_scale),
            ("loss scale after", s.loss_scale_after),
            ("overflow", s.overflow),
            ("grad norm", s.grad_norm),
            ("update skipped", s.update_skipped),
        )
        if value is not None
    ]
    return Evidence(", ".join(parts) or "no numbers", step, record.line or None)


def show_mark(mark: Mark) -> Evidence:
    """A marker line as evidence."""
    text = mark.text.decode("utf-8", "replace")
    return Evidence("".join(c if c.isprintable() else " " for c in text).strip(), mark.step, mark.line or None)


def rows(records: Iterable[Record | None], limit: int = EVIDENCE_LIMIT) -> tuple[Evidence, ...]:
    """Records as evidence, without doubles, at most ``limit``."""
    seen: set[int] = set()
    result: list[Evidence] = []
    for record in records:
        if record is None or id(record) in seen or len(result) >= limit:
            continue
        seen.add(id(record))
        result.append(show(record))
    return tuple(result)


def power(scale: float) -> str:
    """A loss scale for a reader: ``65536 (2**16)``."""
    if scale > 0 and scale == scale and scale not in (float("inf"),):
        exponent = _exponent(scale)
        if exponent is not None and exponent not in range(4):
            return f"{scale:g} (2**{exponent})" if scale >= 1e6 or scale < 1 else f"{scale:.10g} (2**{exponent})"
    return f"{scale:.10g}"


def _exponent(scale: float) -> int | None:
    mantissa, exponent = math.frexp(scale)
    return exponent - 1 if mantissa == 0.5 else None
