"""The audit of a level: what every cell and operator really ran in, who asked for it, and what to know about it."""

from __future__ import annotations

import fnmatch
import html
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ampdebug._audit_diff import AuditDiff, diff_audits, dtypes_text
from ampdebug._audit_findings import judge_level
from ampdebug._audit_flow import Leak, RoundTrip, leaks, round_trips
from ampdebug._audit_records import AuditedStep
from ampdebug._audit_rows import CellRow, OperatorRow, cell_rows, itemsize, operator_rows
from ampdebug._audit_told import Judged, show_bytes
from ampdebug._diagnose import _finding_lines, _wrap
from ampdebug._errors import ArgumentError
from ampdebug.report.table import plain_table
from ampdebug.rules._finding import Finding
from ampdebug.rules._operator_flow import Flow

_LIMIT = 40


@dataclass(frozen=True)
class AuditReport:
    """What a network runs in at a level. ``str()`` is the report.

    Attributes:
        name: Class of the network.
        level: The AMP level.
        mode: ``"pynative"`` or ``"graph"``.
        cells: One row for each cell with operators or parameters of its own, in the network's order.
        operators: One row for each operator call of the forward pass, in order of execution.
        round_trips: Casts back and forth, those that move most bytes first.
        leaks: Chains that stay in float32.
        findings: What a user must know, the most severe first.
        backward: A backward pass was made, so that the rows tell dtypes of gradients.
        shown: Only cells that match this glob are printed; None for all.
    """

    name: str
    level: str
    mode: str
    cells: tuple[CellRow, ...]
    operators: tuple[OperatorRow, ...]
    round_trips: tuple[RoundTrip, ...]
    leaks: tuple[Leak, ...]
    findings: tuple[Finding, ...]
    backward: bool = False
    shown: str | None = field(default=None, compare=False)

    @property
    def ok(self) -> bool:
        """There is no finding above severity ``"note"``."""
        return all(finding.severity == "note" for finding in self.findings)

    @property
    def title(self) -> str:
        """``"Net at O2"``."""
        return f"{self.name} at {self.level}" + (" (graph)" if self.mode == "graph" else "")

    @property
    def cast_bytes(self) -> int:
        """Bytes that all casts of the forward pass read and write."""
        return sum(row.cast_bytes for row in self.operators)

    def dtype_share(self) -> dict[str, dict[str, int]]:
        """``{dtype: {"operators": n, "bytes": results in bytes}}`` of the operators that compute."""
        operators: Counter[str] = Counter()
        size: Counter[str] = Counter()
        for row in self.operators:
            if row.computes:
                operators[row.dtype] += 1
                size[row.dtype] += row.elements * itemsize(row.dtype)
        return {dtype: {"operators": operators[dtype], "bytes": size[dtype]} for dtype in sorted(operators)}

    def only(self, cells: str) -> AuditReport:
        """The same report that prints only cells whose path matches a glob (``"blocks.*"``; ``"(network)"`` the root).

        Raises:
            ArgumentError: None does.
        """
        if not any(_matches(row.path, cells) for row in self.cells):
            raise ArgumentError(
                f"cells={cells!r} matches none of the {len(self.cells)} cells, such as "
                f"{', '.join(repr(row.path or '(network)') for row in self.cells[:4])}"
            )
        return AuditReport(
            self.name, self.level, self.mode, self.cells, self.operators, self.round_trips, self.leaks, self.findings,
            self.backward, cells,
        )  # fmt: skip

    def diff(self, other: AuditReport) -> AuditDiff:
        """What changes from this audit to another one: of another level, or of another version of the network."""
        return diff_audits(self, other)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; with :meth:`only`, the cells and operators that match."""
        return {
            "name": self.name,
            "level": self.level,
            "mode": self.mode,
            "backward": self.backward,
            "verdict": "ok" if self.ok else "findings",
            "findings": [finding.to_dict() for finding in self.findings],
            "dtype_share": self.dtype_share(),
            "cast_bytes": self.cast_bytes,
            "cells": [row.to_dict() for row in self.cells if self._shows(row.path)],
            "operators": [row.to_dict() for row in self.operators if self._shows(row.path)],
            "round_trips": [trip.to_dict() for trip in self.round_trips],
            "leaks": [leak.to_dict() for leak in self.leaks],
        }

    def _shows(self, path: str) -> bool:
        return self.shown is None or _matches(path, self.shown)

    def __str__(self) -> str:
        serious = sum(finding.severity != "note" for finding in self.findings)
        notes = len(self.findings) - serious
        verdict = f"{serious} finding{'s' if serious != 1 else ''}" if serious else "no finding"
        if notes:
            verdict += f", {notes} note{'s' if notes > 1 else ''}"
        lines = [f"Audit of {self.title}: {verdict}.", *self._summary(), ""]
        lines += self._table() if self.shown is None else self._operator_table()
        for number, finding in enumerate(self.findings, 1):
            lines += ["", *_finding_lines(number, finding)]
        return "\n".join(lines)

    def _summary(self) -> list[str]:
        share = self.dtype_share()
        total = sum(part["operators"] for part in share.values())
        size = sum(part["bytes"] for part in share.values())
        told = ", ".join(
            f"{part['operators']} in {dtype}" + (f" ({100 * part['bytes'] / size:.0f} % of the bytes)" if size else "")
            for dtype, part in share.items()
        )
        lines = [f"  {total} operators compute floats: {told or 'none'}."]
        if self.mode == "pynative":
            lines.append(_wrap(f"Casts read and write {show_bytes(self.cast_bytes)} in a forward pass.", "  "))
        return lines

    def _table(self) -> list[str]:
        body = [
            [
                row.path or "(network)",
                row.cell_type,
                f"{row.asked} ({row.asked_by})" if row.asked else "",
                dtypes_text(dict(row.ran)),
                ", ".join(row.reasons[:2]) + (", …" if len(row.reasons) > 2 else ""),
                "/".join(row.gradients),
                show_bytes(row.cast_bytes) if row.cast_bytes else "",
            ]
            for row in self.cells
            if row.ran
        ]
        headers = ["cell", "type", "asked", "ran in", "because of", "gradients", "casts"]
        if not body:
            return ["No cell computes floats."]
        told = [k for k in range(len(headers)) if k < 4 or any(line[k] for line in body)]
        lines = [plain_table([headers[k] for k in told], [[line[k] for k in told] for line in body[:_LIMIT]])]
        if len(body) > _LIMIT:
            lines.append(f"… {len(body) - _LIMIT} more cells (--cells GLOB shows some, --json all)")
        return lines

    def _operator_table(self) -> list[str]:
        """Every operator of the cells that were asked for."""
        body = [
            [
                row.path or "(network)",
                row.operator,
                row.line,
                ", ".join(row.inputs),
                row.dtype,
                row.asked_by,
                row.gradient,
                show_bytes(row.cast_bytes) if row.cast_bytes else "",
            ]
            for row in self.operators
            if self._shows(row.path) and row.dtype
        ]
        headers = ["cell", "operator", "line", "given", "ran in", "because of", "gradient", "casts"]
        return [plain_table(headers, body)] if body else ["These cells have no operators of their own."]

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _matches(path: str, glob: str) -> bool:
    return fnmatch.fnmatchcase(path or "(network)", glob)


def judge_audit(seen: AuditedStep) -> AuditReport:
    """Makes the report from what was seen."""
    rows = operator_rows(seen)
    flow = Flow(seen.step, 1)
    trips, chains = round_trips(seen, flow), leaks(seen, flow)
    return AuditReport(
        seen.name,
        seen.level,
        seen.mode,
        cell_rows(seen.cells, rows),
        rows,
        trips,
        chains,
        judge_level(Judged(seen, flow, rows, trips, chains)),
        seen.backward,
    )
