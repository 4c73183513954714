"""Making the findings of an audit: what they are made from, and the parts that are the same for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ampdebug._audit_flow import Leak, RoundTrip
from ampdebug._audit_records import AuditedStep
from ampdebug._audit_rows import OperatorRow
from ampdebug.rules._finding import EVIDENCE_LIMIT, Evidence, Finding, Severity
from ampdebug.rules._operator_flow import Flow


@dataclass(frozen=True, slots=True)
class Judged:
    """What the findings are made from.

    Attributes:
        seen: The step.
        flow: Its ways.
        rows: Its operators.
        trips: Casts back and forth.
        leaks: Chains that stay in float32.
    """

    seen: AuditedStep
    flow: Flow
    rows: Sequence[OperatorRow]
    trips: Sequence[RoundTrip]
    leaks: Sequence[Leak]


def finding(
    slug: str,
    sentence: str,
    *,
    severity: Severity,
    reason: str,
    evidence: Iterable[str],
    action: str,
    where: str,
    confidence_high: bool = True,
) -> Finding:
    """A finding without a step; what is recognised by its looks and not measured has ``confidence_high=False``."""
    rows = tuple(Evidence(text.removesuffix(": ")) for text in evidence)[:EVIDENCE_LIMIT]
    return Finding(
        slug, sentence, severity, "high" if confidence_high else "medium", reason, None, None, where, rows, action
    )


def unnumbered(told: Finding) -> Finding:
    """The same without the number of a step, which an audit has none of."""
    return replace(
        told, first_step=None, last_step=None, evidence=tuple(replace(row, step=None) for row in told.evidence)
    )


def at(row: OperatorRow) -> str:
    """``"matmul in fc at net.py:3"``."""
    return f"{row.kind} in {cell_name(row.path)}" + (f" at {row.line}" if row.line else "")


def cell_name(path: str) -> str:
    """A cell path for a reader."""
    return "the loss function" if path == "(loss)" else path or "the network's own code"


def by_line(rows: Iterable[OperatorRow]) -> list[str]:
    """``"sum, log in loss at net.py:3 [float16]: …"``: one entry for the operators of one source line."""
    lines: dict[tuple[str, str, str, str], list[str]] = {}
    for row in rows:
        lines.setdefault((row.path, row.line, row.dtype, row.text), []).append(row.kind)
    return [
        f"{', '.join(dict.fromkeys(kinds))} in {cell_name(path)}"
        + (f" at {line}" if line else "")
        + f" [{dtype}]: {text}"
        for (path, line, dtype, text), kinds in lines.items()
    ]


def count(things: Sequence[object] | range, one: str, many: str) -> str:
    """``"1 cast"``, ``"3 casts"``."""
    return f"{len(things)} {one if len(things) == 1 else many}"


def in_float32(seen: AuditedStep) -> str:
    """How to keep a few lines in float32 at this level."""
    if seen.level in ("O2", "O3", "O2 or O3"):
        return (
            "Put these lines into a cell of their own and call its to_float(ms.float32) after the level is applied: "
            "inside a cell that is set to 16 bits, .astype(ms.float32) is taken back before each operator."
        )
    return "Compute these lines in float32: x.astype(ms.float32) before, and back afterwards."


def show_bytes(count: int) -> str:
    """``"1.5 MB"``, in powers of 1000."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"
