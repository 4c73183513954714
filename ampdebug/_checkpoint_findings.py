"""What to know of a checkpoint's parameters, as findings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ampdebug._checkpoint_file import CheckpointFile
from ampdebug._tensor_stats import TensorStats
from ampdebug.rules._finding import EVIDENCE_LIMIT, Evidence, Finding, Severity

_LOW = ("float16", "bfloat16")
# What optimizers keep beside a parameter: MindSpore's moments.fc.weight, moment1.…, accum.…, PyTorch's exp_avg.
_STATE = re.compile(r"(^|[._])(moments?[12]?|moment[12v]|accum|exp_avg(_sq)?|adam_[mv]|stat|velocity|mean_grad|"
                    r"mean_square|vhat|linear)([._]|$)")  # fmt: skip
# Fewer elements than this may use few bits of their mantissa by chance.
_ENOUGH = 64


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """One parameter of a checkpoint.

    Attributes:
        name: Its name.
        dtype: In the file.
        shape: Its shape.
        elements: How many.
        stats: None for other than floats.
    """

    HEADERS: ClassVar[Sequence[str]] = (
        "parameter", "dtype", "shape", "absmax", "not finite", "beyond float16", "0 in float16", "subnormal", "why"
    )  # fmt: skip

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    stats: TensorStats | None

    @property
    def is_state(self) -> bool:
        """By its name it belongs to the optimizer, whose state stays in float32 at every level."""
        return _STATE.search(self.name) is not None

    @property
    def flushed_share(self) -> float:
        """Of the nonzero elements, how many float16 rounds to zero."""
        if self.stats is None or self.stats.finite <= self.stats.zeros:
            return 0.0
        return self.stats.flushed / (self.stats.finite - self.stats.zeros)

    @property
    def passed_through(self) -> str | None:
        """The 16-bit format that all its float32 values are values of; None where they use more bits."""
        stats = self.stats
        if stats is None or self.dtype not in ("float32", "float64") or stats.finite - stats.zeros < _ENOUGH:
            return None
        if stats.mantissa_bits > 10 or stats.mantissa_bits < 4:  # few bits: ones, powers of two, counts
            return None
        if stats.mantissa_bits <= 7:
            return "bfloat16"
        return None if stats.exceeding or stats.flushed else "float16"

    @property
    def why(self) -> tuple[str, ...]:
        """Why it deserves a look."""
        stats = self.stats
        if stats is None:
            return ()
        reasons = []
        if stats.nonfinite:
            reasons.append("not finite")
        if stats.exceeding and not self.is_state:
            reasons.append("infinite in float16")
        if self.flushed_share > 0 and not self.is_state:
            reasons.append(f"{100 * self.flushed_share:.3g} % become 0 in float16")
        if self.passed_through is not None:
            reasons.append(f"only {self.passed_through} values")
        return tuple(reasons)

    @property
    def matters(self) -> bool:
        """It has a line in the printed table."""
        return bool(self.why)

    def cells(self) -> list[str]:
        """A line of the printed table."""
        stats = self.stats
        assert stats is not None
        numbers = (stats.nonfinite, stats.exceeding, stats.flushed, stats.subnormal)
        return [
            self.name,
            self.dtype,
            "×".join(map(str, self.shape)) or "scalar",
            f"{stats.absmax:.4g}",
            *(f"{n:,}" if n else "" for n in numbers),
            "; ".join(self.why),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; numbers that are not finite are None."""
        stats = None
        if self.stats is not None:
            stats = {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in self.stats.to_dict().items()
                if key != "exponents"
            }
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "elements": self.elements,
            "optimizer_state": self.is_state,
            "why": list(self.why),
            "stats": stats,
        }


def judge_checkpoint(file: CheckpointFile, rows: Sequence[ParameterRow]) -> tuple[Finding, ...]:
    """All findings, the most severe first."""
    found = [
        finding
        for rule in (_damaged, _nonfinite, _narrow, _beyond, _flushing, _rounded_before)
        for finding in rule(file, rows)
    ]
    order = ("error", "warning", "note")
    return tuple(sorted(found, key=lambda finding: order.index(finding.severity)))


def _damaged(file: CheckpointFile, rows: Sequence[ParameterRow]) -> Iterator[Finding]:
    if file.crc is False:
        yield _finding(
            "checksum-wrong",
            "The checksum at the end of the file is not that of its content: bytes were changed.",
            "error",
            "the CRC-32 of the file was computed",
            (),
            "Take another copy of the file.",
        )
    if file.repeated:
        yield _finding(
            "parameter-twice",
            f"{_names(file.repeated)} occurs more than once; the last one counts when it is loaded.",
            "warning",
            "the names were read",
            (),
            "Save the checkpoint anew; parameters of two networks may have been given the same names.",
            file.repeated[0],
        )


def _nonfinite(file: CheckpointFile, rows: Sequence[ParameterRow]) -> Iterator[Finding]:
    bad = [(row, row.stats) for row in rows if row.stats is not None and row.stats.nonfinite]
    if not bad:
        return
    statistics = [row for row, _ in bad if re.search(r"(moving|running)_(mean|var)", row.name)]
    only = " All of them are moving statistics: training may look fine, and every evaluation fails." if len(
        statistics) == len(bad) else ""  # fmt: skip
    yield _finding(
        "nonfinite-parameters",
        f"{len(bad)} parameter{'s are' if len(bad) > 1 else ' is'} not finite: {_names([r.name for r, _ in bad])}."
        f"{only}",
        "error",
        "every element was read",
        [f"{row.name}: {stats.nan} NaN, {stats.pos_inf} +inf, {stats.neg_inf} -inf of {stats.count} elements"
         for row, stats in bad],
        "Go back to a checkpoint from before; `ampdebug diagnose` of the run's log says since when.",
        bad[0][0].name,
    )  # fmt: skip


def _narrow(file: CheckpointFile, rows: Sequence[ParameterRow]) -> Iterator[Finding]:
    floats = [row for row in rows if row.stats is not None]
    low = [row for row in floats if row.dtype in _LOW]
    if not low:
        return
    if len(low) == len(floats):
        kinds = " and ".join(sorted({row.dtype for row in low}))
        yield _finding(
            "all-parameters-16-bit",
            f"All {len(low)} floating-point parameters are {kinds}: a file for inference, or training that kept no "
            "float32 weights.",
            "note",
            "the dtypes were read",
            (),
            "To go on training, keep float32 weights: updates below half a unit in the last place are lost in "
            f"{low[0].dtype}.",
        )
        return
    yield _finding(
        "low-precision-parameters",
        f"{len(low)} of {len(floats)} floating-point parameters are {low[0].dtype} in a file whose others are "
        f"{next(row.dtype for row in floats if row.dtype not in _LOW)}: {_names([row.name for row in low])}.",
        "warning",
        "the dtypes were read",
        [f"{row.name}: {row.dtype}, {row.elements} elements" for row in low],
        "Levels keep parameters in float32 and cast them at use. Something cast these for good (a parameter made in "
        "16 bits, network.to_float before creation, set_dtype): make them float32 again and train on from there.",
        low[0].name,
    )


def _beyond(file: CheckpointFile, rows: Sequence[ParameterRow]) -> Iterator[Finding]:
    found = [(row, row.stats) for row in rows if row.stats is not None and row.stats.exceeding and not row.is_state]
    if found:
        yield _finding(
            "parameters-beyond-float16",
            f"{len(found)} parameter{'s hold' if len(found) > 1 else ' holds'} values beyond 65504, infinite in "
            f"float16: {_names([row.name for row, _ in found])}.",
            "warning",
            "every element was read",
            [
                f"{row.name}: {stats.exceeding} of {stats.count} elements, absmax {stats.absmax:.6g}"
                for row, stats in found
            ],
            "Keep their cells in float32 (to_float(ms.float32) after the level is applied), or use bfloat16.",
            found[0][0].name,
        )


def _flushing(file: CheckpointFile, rows: Sequence[ParameterRow]) -> Iterator[Finding]:
    found = [(r, r.stats) for r in rows if r.stats is not None and r.stats.flushed and not r.is_state]
    if not found:
        return
    found.sort(key=lambda pair: -pair[0].flushed_share)
    worst, _ = found[0]
    several = len(found) > 1
    yield _finding(
        "parameters-zero-in-float16",
        f"{len(found)} parameter{'s hold' if several else ' holds'} values so small that float16 makes them 0; most in "
        f"{worst.name} ({100 * worst.flushed_share:.3g} % of its nonzero elements).",
        "warning" if worst.flushed_share >= 0.01 else "note",
        "every element was read",
        [
            f"{row.name}: {stats.flushed} become 0 and {stats.subnormal} subnormal of {stats.count}"
            for row, stats in found
        ],
        "Where it is a variance or a scale, keep its cell in float32; weights that small seldom matter.",
        worst.name,
    )


def _rounded_before(file: CheckpointFile, rows: Sequence[ParameterRow]) -> Iterator[Finding]:
    found = [(row, passed) for row in rows if (passed := row.passed_through) is not None]
    if found:
        formats = " or ".join(sorted({passed for _, passed in found}))
        yield _finding(
            "float32-holds-16-bit-values",
            f"{len(found)} {found[0][0].dtype} parameter{'s hold' if len(found) > 1 else ' holds'} only values of "
            f"{formats}: {_names([row.name for row, _ in found])}. They went through 16 bits before they were saved.",
            "warning",
            "the mantissas of every element were read",
            [f"{row.name}: {row.stats.mantissa_bits if row.stats else 0} mantissa bits in use" for row, _ in found],
            "Look for a cast on the way (a 16-bit file converted back, parameters cast for good). Float32 weights that "
            "were trained use all 23 bits.",
            found[0][0].name,
        )


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _finding(
    slug: str, sentence: str, severity: Severity, reason: str, evidence: Sequence[str], action: str, where: str = ""
) -> Finding:
    rows = tuple(Evidence(text) for text in evidence)[:EVIDENCE_LIMIT]
    return Finding(slug, sentence, severity, "high", reason, None, None, where, rows, action)
