"""Making findings about operators: the parts that are the same for all."""

from __future__ import annotations

from collections.abc import Iterable

from ampdebug._tensor_stats import TensorStats
from ampdebug.rules._finding import EVIDENCE_LIMIT, Confidence, Evidence, Finding, Severity
from ampdebug.rules._operator_flow import Flow
from ampdebug.rules._operator_records import Operator

FORWARD_CONSEQUENCES = (
    "forward-overflow-scale-independent",
    "backward-nan-from-noop-clamp",
    "gradients-flushed-to-zero-without-loss-scale",
    "nan-input-hidden-by-relu",
    "values-pinned-at-fp16-max",
    "normalisation-forced-to-fp16",
    "bn-moving-stats-nan-after-skipped-step",
    "softmax-row-fully-masked",
    "rmsnorm-square-overflow-output-zero",
    "nan-in-any-precision",
    "domain-left-by-rounding",
)


def finding(
    flow: Flow,
    slug: str,
    sentence: str,
    *,
    severity: Severity,
    reason: str,
    evidence: Iterable[str],
    action: str,
    where: str = "",
    confidence: Confidence = "high",
    explains: tuple[str, ...] = (),
    confirm: str = "",
) -> Finding:
    """A finding of the step that ``flow`` is about."""
    rows = tuple(Evidence(text, flow.number) for text in evidence)[:EVIDENCE_LIMIT]
    number = flow.number
    return Finding(
        slug, sentence, severity, confidence, reason, number, number, where, rows, action, confirm, (), explains
    )


def counted(stats: TensorStats) -> str:
    """``"3 NaN, 1 +inf of 8 elements"``, or the range where all are finite."""
    parts = [f"{n} {name}" for n, name in ((stats.nan, "NaN"), (stats.pos_inf, "+inf"), (stats.neg_inf, "-inf")) if n]
    if parts:
        return f"{', '.join(parts)} of {stats.count} elements"
    return f"{stats.count} finite elements, absmax {stats.absmax:.4g}, {stats.zeros} zeros"


def told(operator: Operator) -> list[str]:
    """An operator as evidence: the place, what went in, what came out, what float32 gives."""
    rows = [f"{operator.place}" + (f": {operator.text}" if operator.text else "") + f" [{operator.dtype}]"]
    for place, operand in enumerate(operator.operands[:3]):
        if operand.stats is not None:
            rows.append(f"operand {place} ({operand.dtype}): {counted(operand.stats)}")
        elif operand.is_number:
            inside = operand.in_dtype(operator.dtype)
            rows.append(f"operand {place}: the number {operand.value:g}, in {operator.dtype} {inside:g}")
    if operator.out is not None:
        rows.append(f"result: {counted(operator.out)}")
    if operator.reference is not None:
        rows.append(f"the same operands in float32: {counted(operator.reference)}")
    return rows


def cell_of(operator: Operator) -> str:
    """The cell of an operator for a sentence."""
    if operator.path == "(loss)":
        return "the loss function"
    return f"{operator.cell_type} {operator.path!r}" if operator.path else f"{operator.cell_type or 'the network'}"


def keep_wide(operator: Operator) -> str:
    """How to keep an operator in float32."""
    if operator.path == "(loss)":
        return "cast what goes into the loss function to float32 (output.astype(ms.float32))"
    if operator.path:
        return f"keep this cell in float32 (net.{operator.path}.to_float(ms.float32) after the level is applied)"
    # A cast is no way out: in a cell that O2 or O3 converted each operator casts its operands back in PyNative mode.
    return (
        "compute this line in float32: put it into a cell of its own and call to_float(ms.float32) on that cell after "
        "the level is applied (a converted cell takes a mere cast back), or let ampdebug bisect ... --patch - write it"
    )
