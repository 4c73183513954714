"""Two checkpoint files against each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ampdebug._checkpoint_file import CheckpointFile, is_measured
from ampdebug._checkpoint_stats import ParameterChange, compare
from ampdebug.report.table import plain_table

_LIMIT = 20


@dataclass(frozen=True)
class CheckpointDiff:
    """What changes from one file to another. ``str()`` is the report.

    Attributes:
        before, after: The files.
        changes: Floating-point parameters that both have with the same shape, the largest relative change first.
        gone, new: Names that only one has.
        reshaped: ``(name, shape before, shape after)``.
        uncompared: Names of other than floats.
    """

    before: str
    after: str
    changes: tuple[ParameterChange, ...]
    gone: tuple[str, ...]
    new: tuple[str, ...]
    reshaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    uncompared: tuple[str, ...]

    @property
    def kind(self) -> str:
        """``"equal"``, ``"rounded"`` (one is the other in a narrower dtype) or ``"different"``."""
        kinds = {change.kind for change in self.changes}
        if self.gone or self.new or self.reshaped or "different" in kinds:
            return "different"
        return "rounded" if "rounded" in kinds else "equal"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "before": self.before,
            "after": self.after,
            "kind": self.kind,
            "changes": [change.to_dict() for change in self.changes],
            "only_before": list(self.gone),
            "only_after": list(self.new),
            "reshaped": [[name, list(a), list(b)] for name, a, b in self.reshaped],
            "not_compared": list(self.uncompared),
        }

    def __str__(self) -> str:
        kinds = Counter(change.kind for change in self.changes)
        told = ", ".join(f"{kinds[kind]} {kind}" for kind in ("equal", "rounded", "different") if kinds[kind])
        lines = [f"Against {self.before}: {told or 'no floating-point parameter in both'}."]
        shown = [change for change in self.changes if change.kind != "equal"][:_LIMIT]
        if shown:
            body = [
                [
                    c.name,
                    " → ".join(dict.fromkeys(c.dtypes)),
                    c.kind,
                    f"{c.differing:,} of {c.elements:,}",
                    f"{c.largest:.3g}",
                    f"{c.relative:.3g}",
                ]
                for c in shown
            ]
            lines.append(plain_table(["parameter", "dtype", "", "elements that differ", "largest", "relative"], body))
        for what, names in (("Only there", self.gone), ("Only here", self.new)):
            if names:
                lines.append(
                    f"{what}: {', '.join(names[:8])}" + (f" and {len(names) - 8} more." if len(names) > 8 else ".")
                )
        lines += [f"{name}: shape {a} there, {b} here." for name, a, b in self.reshaped[:_LIMIT]]
        return "\n".join(lines)


def diff_files(before: CheckpointFile, after: CheckpointFile) -> CheckpointDiff:
    """Compares them parameter by parameter, by name.

    Raises:
        FormatError: A file became shorter meanwhile.
    """
    old = {entry.name: entry for entry in before.entries}
    new = {entry.name: entry for entry in after.entries}
    both = [name for name in old if name in new]
    changes, reshaped, uncompared = [], [], []
    with before.path.open("rb") as first, after.path.open("rb") as second:
        for name in both:
            x, y = old[name], new[name]
            if x.shape != y.shape:
                reshaped.append((name, x.shape, y.shape))
            elif is_measured(x) and is_measured(y):
                changes.append(compare(first, before, x, second, after, y))
            else:
                uncompared.append(name)
    changes.sort(key=lambda change: -change.relative)
    return CheckpointDiff(
        str(before.path),
        str(after.path),
        tuple(changes),
        tuple(name for name in old if name not in new),
        tuple(name for name in new if name not in old),
        tuple(reshaped),
        tuple(uncompared),
    )
