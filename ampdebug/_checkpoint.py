"""The audit of a checkpoint file: dtypes, non-finite values, and what float16 would do to its parameters."""

from __future__ import annotations

import html
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ampdebug._audit_told import show_bytes
from ampdebug._checkpoint_diff import CheckpointDiff, diff_files
from ampdebug._checkpoint_file import CheckpointFile, is_measured, open_checkpoint
from ampdebug._checkpoint_findings import ParameterRow, judge_checkpoint
from ampdebug._checkpoint_stats import measure
from ampdebug._diagnose import _finding_lines
from ampdebug.report.table import plain_table
from ampdebug.rules._finding import Finding

Progress = Callable[[int, "int | None"], None]
_LIMIT = 30


@dataclass(frozen=True)
class CheckpointReport:
    """What a checkpoint file holds. ``str()`` is the report.

    Attributes:
        path: The file.
        format: ``"ckpt"`` or ``"safetensors"``.
        size: In bytes.
        parameters: In the file's order.
        findings: The most severe first.
        against: The comparison with another file, if one was given.
    """

    path: str
    format: str
    size: int
    parameters: tuple[ParameterRow, ...]
    findings: tuple[Finding, ...]
    against: CheckpointDiff | None = None

    @property
    def ok(self) -> bool:
        """There is no finding above severity ``"note"``."""
        return all(finding.severity == "note" for finding in self.findings)

    def dtypes(self) -> dict[str, dict[str, int]]:
        """``{dtype: {"parameters": n, "elements": n}}``, most elements first."""
        names: Counter[str] = Counter()
        elements: Counter[str] = Counter()
        for row in self.parameters:
            names[row.dtype] += 1
            elements[row.dtype] += row.elements
        return {dtype: {"parameters": names[dtype], "elements": n} for dtype, n in elements.most_common()}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with every parameter."""
        return {
            "path": self.path,
            "format": self.format,
            "size": self.size,
            "verdict": "ok" if self.ok else "findings",
            "dtypes": self.dtypes(),
            "findings": [finding.to_dict() for finding in self.findings],
            "parameters": [row.to_dict() for row in self.parameters],
            "against": None if self.against is None else self.against.to_dict(),
        }

    def __str__(self) -> str:
        serious = sum(finding.severity != "note" for finding in self.findings)
        verdict = f"{serious} finding{'s' if serious != 1 else ''}" if serious else "no finding"
        told = ", ".join(
            f"{part['parameters']} {dtype} ({part['elements']:,} elements)" for dtype, part in self.dtypes().items()
        )
        lines = [
            f"Checkpoint {self.path}: {verdict}.",
            f"  {self.format}, {show_bytes(self.size)}, {len(self.parameters)} parameters: {told}.",
        ]
        shown = [row for row in self.parameters if row.matters]
        if shown:
            body = [row.cells() for row in shown[:_LIMIT]]
            lines += ["", plain_table(ParameterRow.HEADERS, body)]
            if len(shown) > _LIMIT:
                lines.append(f"… {len(shown) - _LIMIT} more parameters (--json has all)")
        for number, finding in enumerate(self.findings, 1):
            lines += ["", *_finding_lines(number, finding)]
        if self.against is not None:
            lines += ["", str(self.against)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def audit_checkpoint(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> CheckpointReport:
    """Look at a checkpoint file itself: dtypes, non-finite parameters, and what float16 would do to the values.

    Works without MindSpore and in bounded memory: parameters are read in pieces of 8 MB.

    Args:
        path: A ``.ckpt`` or ``.safetensors`` file.
        against: Another one, to compare parameter by parameter: which are equal, which are the other's values rounded
            to a narrower dtype, which differ and by how much.
        progress: Called as ``progress(bytes read, bytes in all)``.

    Returns:
        The report; ``str()`` of it is a table with findings.

    Raises:
        FormatError: A file is no such checkpoint, or truncated, or contradicts itself.
        OSError: It cannot be read.

    Example:
        >>> print(ampdebug.audit_checkpoint("net.ckpt", against="net_fp16.safetensors"))  # doctest: +SKIP
    """
    file = open_checkpoint(path)
    other = None if against is None else open_checkpoint(against)
    rows = tuple(_rows(file, progress))
    return CheckpointReport(
        str(file.path),
        file.format,
        file.size,
        rows,
        judge_checkpoint(file, rows),
        None if other is None else diff_files(other, file),
    )


def _rows(file: CheckpointFile, progress: Progress | None) -> Iterator[ParameterRow]:
    total = sum(entry.bytes for entry in file.entries)
    done = 0
    with file.path.open("rb") as stream:
        for entry in file.entries:
            stats = measure(stream, file, entry) if is_measured(entry) else None
            yield ParameterRow(entry.name, entry.dtype, entry.shape, entry.elements, stats)
            done += entry.bytes
            if progress is not None:
                progress(done, total)
