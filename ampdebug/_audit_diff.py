"""Where two audits part: cells and operators that run in another dtype, findings that one has and the other not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampdebug._audit_rows import CellRow, OperatorRow
from ampdebug.report.table import plain_table

if TYPE_CHECKING:
    from ampdebug._audit import AuditReport

_LIMIT = 40


@dataclass(frozen=True, slots=True)
class CellChange:
    """A cell that runs otherwise.

    Attributes:
        path: Its path.
        cell_type: Its class.
        before, after: ``{dtype: number of operators}``; None where no such cell computes anything.
        operators: ``(operator, dtype before, dtype after)`` of those that differ; ``""`` where it did not run.
    """

    path: str
    cell_type: str
    before: dict[str, int] | None
    after: dict[str, int] | None
    operators: tuple[tuple[str, str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "cell": self.path,
            "cell_type": self.cell_type,
            "before": self.before,
            "after": self.after,
            "operators": [list(change) for change in self.operators],
        }


@dataclass(frozen=True)
class AuditDiff:
    """What changes from one audit to another. ``str()`` is the report.

    Attributes:
        before, after: Titles of the two.
        cells: Those that differ, in order.
        same: How many cells do not.
        gone, new: Slugs of findings that only the first, only the second has.
        cast_bytes: Of both.
    """

    before: str
    after: str
    cells: tuple[CellChange, ...]
    same: int
    gone: tuple[str, ...]
    new: tuple[str, ...]
    cast_bytes: tuple[int, int]

    @property
    def equal(self) -> bool:
        """Every cell runs in the same dtypes."""
        return not self.cells

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "before": self.before,
            "after": self.after,
            "cells": [cell.to_dict() for cell in self.cells],
            "same": self.same,
            "findings_gone": list(self.gone),
            "findings_new": list(self.new),
            "cast_bytes": list(self.cast_bytes),
        }

    def __str__(self) -> str:
        from ampdebug._audit_told import show_bytes

        differ = "1 cell differs" if len(self.cells) == 1 else f"{len(self.cells)} cells differ"
        lines = [f"From {self.before} to {self.after}: {differ}, {self.same} run the same."]
        body = []
        for cell in self.cells[:_LIMIT]:
            changes = Counter(cell.operators)
            told = ", ".join(
                f"{operator} {a or 'absent'} → {b or 'absent'}" + (f" ×{n}" if n > 1 else "")
                for (operator, a, b), n in list(changes.items())[:4]
            )
            more = f", {len(changes) - 4} more" if len(changes) > 4 else ""
            body.append([cell.path or "(network)", cell.cell_type, dtypes_text(cell.before), dtypes_text(cell.after),
                         told + more])  # fmt: skip
        if body:
            lines += ["", plain_table(["cell", "type", "before", "after", "operators"], body)]
        if len(self.cells) > _LIMIT:
            lines.append(f"… {len(self.cells) - _LIMIT} more (to_dict() and --json have all)")
        lines.append("")
        lines.append(f"Casts in a forward pass: {show_bytes(self.cast_bytes[0])} → {show_bytes(self.cast_bytes[1])}.")
        if self.gone:
            lines.append(f"Findings only before: {', '.join(self.gone)}.")
        if self.new:
            lines.append(f"Findings only after: {', '.join(self.new)}.")
        return "\n".join(lines)


def dtypes_text(ran: dict[str, int] | None) -> str:
    """``"float16 ×3, float32"``; what a cell ran in."""
    if ran is None:
        return "did not run"
    return ", ".join(f"{dtype} ×{n}" if n > 1 else dtype for dtype, n in ran.items()) or "–"


def diff_audits(before: AuditReport, after: AuditReport) -> AuditDiff:
    """Compares two audits, of two levels or of two versions of a network.

    Operators are matched by cell and name, the k-th with the k-th: O1 rewrites the source, so that its lines say
    nothing. Casts are left out: that a level casts is how it works.
    """
    old, new = _by_path(before.cells), _by_path(after.cells)
    ops_old, ops_new = _operators(before.operators), _operators(after.operators)
    changed = []
    paths = list(dict.fromkeys((*old, *new)))
    for path in paths:
        mine, theirs = ops_old.get(path, {}), ops_new.get(path, {})
        differing = tuple(
            (key[0], mine.get(key, ""), theirs.get(key, ""))
            for key in dict.fromkeys((*mine, *theirs))
            if mine.get(key) != theirs.get(key)
        )
        a, b = old.get(path), new.get(path)
        if differing or a is None or b is None:
            some = a or b
            assert some is not None
            changed.append(
                CellChange(
                    path,
                    some.cell_type,
                    None if a is None else dict(a.ran),
                    None if b is None else dict(b.ran),
                    differing,
                )
            )
    slugs = [tuple(dict.fromkeys(f.slug for f in report.findings)) for report in (before, after)]
    return AuditDiff(
        before.title,
        after.title,
        tuple(changed),
        len(paths) - len(changed),
        tuple(slug for slug in slugs[0] if slug not in slugs[1]),
        tuple(slug for slug in slugs[1] if slug not in slugs[0]),
        (before.cast_bytes, after.cast_bytes),
    )


def _by_path(rows: Iterable[CellRow]) -> dict[str, CellRow]:
    return {row.path: row for row in rows if row.ran}


def _operators(rows: Iterable[OperatorRow]) -> dict[str, dict[tuple[str, int], str]]:
    """``{cell path: {(operator, k): dtype}}``."""
    found: dict[str, dict[tuple[str, int], str]] = {}
    for row in rows:
        if not row.computes:
            continue
        cell = found.setdefault(row.path, {})
        index = sum(name == row.kind for name, _ in cell)
        cell[row.kind, index] = row.dtype
    return found
