"""What an audited step computes in 16 bits that is better not: losses, softmax and norms by hand, lost constants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampdebug._audit_flow import loss_by_hand, norm_by_hand, softmax_by_hand
from ampdebug._audit_rows import OperatorRow, in_loss
from ampdebug._audit_told import Judged, at, by_line, count, finding, in_float32
from ampdebug.rules._finding import Finding, Severity
from ampdebug.rules._operator_flow import Flow, passes_on
from ampdebug.rules._operator_records import LOW, Operand, Operator

_LOSSES = ("crossentropy", "nllloss", "mseloss", "l1loss", "kldiv", "bceloss", "bcewithlogits", "ctcloss", "huberloss")
_NORMS = ("batchnorm", "layernorm", "groupnorm", "instancenorm", "rmsnorm")
# Kinds in which a number among the operands is a value and not an axis, a size or a flag.
_ARITHMETIC = ("add", "sub", "mul", "div", "pow", "clip", "maximum", "minimum", "where", "maskedfill", "fmod")
_GUARDS = ("log", "rsqrt", "sqrt", "div", "reciprocal", "pow", "log1p")


def norms_in_graph(judged: Judged) -> Iterator[Finding]:
    """Normalisations whose operator got 16 bits in the compiled graph; without values, so without an error."""
    low = [row for row in judged.rows if row.kind in _NORMS and row.dtype in LOW]
    if low:
        names = ", ".join(dict.fromkeys(f"{row.cell_type} {row.path!r}" for row in low[:6]))
        yield finding(
            "normalisation-forced-to-fp16",
            f"{names} computes in {low[0].dtype} in the compiled graph.",
            severity="warning",
            reason="read off the compiled graph",
            evidence=[f"{at(row)} [{row.dtype}]" for row in low],
            action=f"Keep normalisations in float32: net.{low[0].path}.to_float(ms.float32) after the level was "
            "applied, or level O2.",
            where=low[0].path,
        )


def loss_in_float16(judged: Judged) -> Iterator[Finding]:
    """A loss that is computed in 16 bits: built in, written by hand, or in the loss function."""
    built_in = [r for r in judged.rows if r.dtype in LOW and any(name in r.kind for name in _LOSSES)]
    by_hand = {operator.index for operator in loss_by_hand(judged.flow)}
    around = [r for r in judged.rows if r.dtype in LOW and r.computes and _in_a_loss(r)]
    low = sorted({r.index: r for r in (*built_in, *(r for r in judged.rows if r.index in by_hand), *around)}.items())
    if not low:
        return
    rows = [row for _, row in low]
    yield finding(
        "loss-in-float16",
        f"The loss is computed in {rows[0].dtype} ({', '.join(dict.fromkeys(r.kind for r in rows[:6]))}): its sum "
        "and its logarithms lose bits there, and overflow before anything else does.",
        severity="warning",
        reason="seen at its operators",
        evidence=by_line(rows),
        action="Cast what goes into the loss function to float32 (logits.astype(ms.float32)). A loss inside the "
        f"network: {in_float32(judged.seen)[0].lower()}{in_float32(judged.seen)[1:]}",
        where=rows[0].path,
    )


def _in_a_loss(row: OperatorRow) -> bool:
    return in_loss(row.path) or row.cell_type.lower().endswith(("loss", "crossentropy"))


def by_hand(judged: Judged) -> Iterator[Finding]:
    """Softmax and normalisations written with elementary operators: no list of a level knows them."""
    cells = {cell.path: cell for cell in judged.seen.cells}
    # A cell that is called a norm is told about by the rule for norms.
    norms = [o for o in norm_by_hand(judged.flow) if "norm" not in getattr(cells.get(o.path), "cell_type", "").lower()]
    for what, slug, found, danger in (
        ("softmax", "softmax-by-hand-in-float16", list(softmax_by_hand(judged.flow)), "its exponentials overflow from "
         "11.1 on in float16"),
        ("normalisation", "norm-by-hand-in-float16", norms, "squares beyond 256 overflow float16"),
    ):  # fmt: skip
        if not found:
            continue
        first = found[0]
        places = count(found, f"{what} written by hand runs", f"{what}s written by hand run")
        yield finding(
            slug,
            f"{places} in {first.dtype}, since no list names operators like "
            f"{first.kind}; {danger}. First: {first.place}.",
            severity="warning",
            reason="its operators were recognised by how they hang together",
            confidence_high=False,
            evidence=[f"{o.place} [{o.dtype}]: {o.text}" for o in found],
            action=in_float32(judged.seen),
            where=first.path,
        )


def lost_constants(judged: Judged) -> Iterator[Finding]:
    """Numbers in the source that are 0 or infinite in the dtype they are used in."""
    zeros, infinite = [], []
    for operator in judged.flow.step.operators:
        if operator.phase == "update" or operator.kind not in _ARITHMETIC or operator.dtype not in LOW:
            continue
        for operand in operator.operands:
            inside = operand.in_dtype(operator.dtype)
            if inside is None or not (operand.is_number or operand.source == "constant") or operand.nonfinite:
                continue
            if inside == 0 and operand.value:
                zeros.append((operator, operand))
            elif abs(inside) == float("inf"):
                infinite.append((operator, operand))
    if zeros:
        needed = [pair for pair in zeros if _guards(judged.flow, pair[0])]
        yield _constants(
            needed or zeros,
            "eps-1e-8-is-zero-in-fp16",
            "0",
            "warning" if needed else "note",
            f"Take a constant that the format holds, such as 1e-6. Or: {in_float32(judged.seen)}",
        )
    if infinite:
        meant = [pair for pair in infinite if not judged.flow.is_mask(pair[0])]
        yield _constants(
            meant or infinite,
            "mask-constant-overflows-fp16",
            "infinite",
            "warning" if meant else "note",
            f"Take a large number that the format holds (-1e4). Or: {in_float32(judged.seen)}",
        )


def _guards(flow: Flow, operator: Operator) -> bool:
    """A root, a logarithm or a quotient follows, for which the constant was added."""
    return operator.kind != "mul" and any(o.kind in _GUARDS for o in flow.after(operator, 2, passes_on))


def _constants(
    found: Sequence[tuple[Operator, Operand]], slug: str, what: str, severity: Severity, action: str
) -> Finding:
    operator, operand = found[0]
    value = f"{operand.value:g}"
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return finding(
        slug,
        f"The constant {value} of {operator.place} is {what} in {operator.dtype}{more}.",
        severity=severity,
        reason="the dtype of the operator was seen and the number rounded to it",
        evidence=[f"{o.place} [{o.dtype}]: {given.value:g} becomes {given.in_dtype(o.dtype):g}: {o.text}"
                  for o, given in found],
        action=action,
        where=operator.path,
    )  # fmt: skip
