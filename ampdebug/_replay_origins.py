"""Where in one step values were born that are not finite, were pinned to the largest number, or flushed to zero."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ampdebug._records import parameter_name
from ampdebug._sites import is_cast
from ampdebug._tensor_stats import TensorStats
from ampdebug.rules._operator_backward import _born
from ampdebug.rules._operator_finding import cell_of
from ampdebug.rules._operator_flow import Flow, moves
from ampdebug.rules._operator_forward import _harmful
from ampdebug.rules._operator_records import FLOAT16_OVERFLOWS, LOW, Operand, Operator

ExactGradients = Mapping[tuple[int, int], TensorStats]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the first value of one kind was born.

    Attributes:
        kind: ``"non-finite"``; ``"saturated"``: exactly 65504, and larger in truth; ``"flushed"``: zero, and not so in
            truth.
        phase: ``"forward"`` or ``"backward"``: in the operator itself or in its derivative.
        operator: ``"exp"``; ``""`` where it came from outside of any operator or cannot be said.
        path: Cell path; ``""`` is the network itself, ``"(loss)"`` the loss function.
        cell: For a reader: ``"Dense 'head'"``.
        line: ``"net.py:33"`` or ``""``.
        text: The source line.
        dtype: What the operator computed in.
        came_from: What held the value already when it came in (``"input 0"``, a parameter's name), ``""`` otherwise.
        inputs: What went in, one a line, with dtype, shape and range; in the backward pass the gradient that arrived
            first.
        result: What came out; in the backward pass the gradient that left.
        float32: What float32 makes of the same, ``""`` where it is not known.
    """

    kind: Literal["non-finite", "saturated", "flushed"]
    phase: Literal["forward", "backward"]
    operator: str
    path: str
    cell: str
    line: str
    text: str
    dtype: str
    came_from: str
    inputs: tuple[str, ...]
    result: str
    float32: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "inputs": list(self.inputs)}

    def lines(self) -> list[str]:
        """For the report."""
        what = {"non-finite": "non-finite", "saturated": "saturated", "flushed": "flushed"}[self.kind]
        derivative = "the derivative of " if self.phase == "backward" and self.operator else ""
        where = f"{derivative}{self.operator} in {self.cell}" if self.operator else self.came_from or "not located"
        at = f" at {self.line}" if self.line else ""
        lines = [f"First {what} value, {self.phase} pass: {where}{at}"]
        if self.text:
            lines.append(f"    > {textwrap.shorten(self.text, 110)}")
        lines += [f"    {row}" for row in self.inputs]
        lines.append(f"    {self.result}")
        if self.float32:
            lines.append(f"    in float32: {self.float32}")
        return lines


def origins_of(flow: Flow, exact_gradients: ExactGradients, loss_scale: float) -> Iterator[Origin]:
    """The first non-finite value, then the first saturated and flushed ones before it; of each at most one a phase."""
    last = len(flow.step.operators)
    backward = True
    for place, origin in _forward_nonfinite(flow):
        last, backward = place, False
        yield origin
        break
    else:
        if not flow.output_nonfinite:
            yield from _backward_nonfinite(flow, exact_gradients, loss_scale)
    before = [operator for operator in flow.step.operators[:last] if operator.phase != "update"]
    pinned = next((operator for operator in before if _pinned(operator)), None)
    if pinned is not None:
        yield _forward("saturated", pinned)
    lost = next((operator for operator in before if _loses(operator)), None)
    if lost is not None:
        yield _forward("flushed", lost)
    if backward:
        yield from _backward_flushed(flow, exact_gradients)


# --- forward ----------------------------------------------------------------------------------------------------------


def _forward_nonfinite(flow: Flow) -> Iterator[tuple[int, Origin]]:
    """With the number of the operator; 0 for what came from outside."""
    for given in flow.step.inputs:
        if given.stats is not None and given.stats.nonfinite:
            rows = f"; samples {', '.join(map(str, given.samples))}" if given.samples else ""
            yield 0, _outside(given.name, f"{given.name}: {ranged(given.stats)}{rows}")
    for variable in flow.step.variables:
        if variable.before.nonfinite:
            yield 0, _outside(variable.name, f"{variable.name} before the step: {ranged(variable.before)}")
    for birth in flow.births:
        if _harmful(flow, birth):
            if birth.operand is not None and birth.operand.source:
                yield birth.operator.index, _forward("non-finite", birth.operator, birth.operand.source)
            else:
                yield birth.origin.index, _forward("non-finite", birth.origin)


def _outside(name: str, result: str) -> Origin:
    return Origin("non-finite", "forward", "", "", "", "", "", "", name, (), result, "")


def _place(operator: Operator) -> tuple[str, str, str, str, str, str]:
    """Operator, path, cell, line, text and dtype of an origin."""
    return operator.kind, operator.path, cell_of(operator), operator.line, operator.text, operator.dtype


def _forward(kind: Literal["non-finite", "saturated", "flushed"], operator: Operator, came_from: str = "") -> Origin:
    out = operator.out
    assert out is not None
    return Origin(
        kind,
        "forward",
        *_place(operator),
        came_from,
        tuple(_operands(operator)),
        f"result ({operator.dtype}): {ranged(out)}",
        _forward_in_float32(operator),
    )


def _forward_in_float32(operator: Operator) -> str:
    if operator.reference is not None:
        return ranged(operator.reference)
    given = next(operator.tensors, None)
    if is_cast(operator.name) and given is not None and given.stats is not None and given.dtype not in LOW:
        return f"{ranged(given.stats)}, what went in"
    if operator.dtype and operator.dtype not in LOW:
        return f"the same: it ran in {operator.dtype}"
    return ""


def _pinned(operator: Operator) -> bool:
    out = operator.out
    if out is None or not out.saturated or moves(operator):
        return False
    exact = operator.reference
    if exact is not None and exact.absmax >= FLOAT16_OVERFLOWS:
        return True
    limits = operator.kind in ("clip", "minimum", "maximum", "nantonum", "where") or is_cast(operator.name)
    given = [o.stats for o in operator.tensors if o.stats is not None]
    return limits and any(s.pos_inf or s.neg_inf or s.absmax >= FLOAT16_OVERFLOWS for s in given)


def _loses(operator: Operator) -> bool:
    """More than half of what is not zero in truth is zero in the result."""
    out, exact = operator.out, operator.reference
    if out is None or operator.dtype not in LOW or out.nonfinite:
        return False
    if exact is not None and not exact.nonfinite:
        return out.zeros - exact.zeros > 0.5 * (exact.count - exact.zeros) > 0
    given = next(operator.tensors, None)
    if not is_cast(operator.name) or operator.dtype != "float16" or given is None or given.stats is None:
        return False
    return given.stats.flushed > 0.5 * (given.stats.count - given.stats.zeros)


def _operands(operator: Operator) -> Iterator[str]:
    for place, operand in enumerate(operator.operands):
        yield f"operand {place} ({_kind(operand)}): {_value(operand, operator.dtype)}"


def _kind(operand: Operand) -> str:
    if operand.is_number:
        return "number"
    shape = ", ".join(map(str, operand.shape))
    return f"{operand.dtype} [{shape}]" + (f", {operand.source}" if operand.source else "")


def _value(operand: Operand, dtype: str) -> str:
    if operand.stats is not None and operand.stats.count != 1:
        return ranged(operand.stats)
    if operand.value is not None:
        inside = operand.in_dtype(dtype)
        return f"{operand.value:g}" + (f", in {dtype} {inside:g}" if inside is not None and dtype in LOW else "")
    if operand.stats is not None:
        return ranged(operand.stats)
    return f"{operand.low} to {operand.high}" if operand.low is not None else "not measured"


# --- backward ---------------------------------------------------------------------------------------------------------


def _backward_nonfinite(flow: Flow, exact_gradients: ExactGradients, loss_scale: float) -> Iterator[Origin]:
    bad = [v for v in flow.step.variables if v.gradient is not None and v.gradient.nonfinite]
    operator = _born(flow)
    if operator is not None:
        yield _backward("non-finite", flow, operator, exact_gradients)
    elif bad:
        last = _last_with_gradient(flow)
        start = last is not None and all(r.gradient is None or r.gradient.nonfinite for r in last.results)
        gradient, exact = bad[0].gradient, bad[0].exact_gradient
        assert gradient is not None
        if last is not None and start:
            scale = f"the loss scale {loss_scale:g}"
            result = f"the gradient that the backward pass begins with is not finite: {scale} in {last.dtype}"
            yield Origin(
                "non-finite",
                "backward",
                "",
                last.path,
                cell_of(last),
                last.line,
                last.text,
                last.dtype,
                scale,
                (),
                result,
                "" if exact is None else f"gradient of {bad[0].name}: {ranged(exact)}",
            )
        else:
            yield Origin(
                "non-finite",
                "backward",
                "",
                bad[0].path,
                "",
                "",
                "",
                bad[0].dtype,
                f"gradient of {bad[0].name}",
                (),
                f"gradient of {bad[0].name}: {ranged(gradient)}",
                "" if exact is None else ranged(exact),
            )


def _last_with_gradient(flow: Flow) -> Operator | None:
    return next(
        (o for o in reversed(flow.step.operators) if any(r.gradient is not None for r in o.results)),
        None,
    )


def _backward(
    kind: Literal["non-finite", "flushed"], flow: Flow, operator: Operator, exact_gradients: ExactGradients
) -> Origin:
    arrived = [
        f"gradient that arrived ({r.dtype}): {ranged(r.gradient)}" for r in operator.results if r.gradient is not None
    ]
    left, exact = _leaving(kind, flow, operator, exact_gradients)
    return Origin(
        kind,
        "backward",
        *_place(operator),
        "",
        (*arrived, *_operands(operator)),
        left,
        exact,
    )


def _leaving(
    kind: Literal["non-finite", "flushed"], flow: Flow, operator: Operator, exact_gradients: ExactGradients
) -> tuple[str, str]:
    """The gradient of the first operand that shows the fault, and what it is in float32."""
    for place, operand in enumerate(operator.operands):
        for gradient, exact in _gradients(flow, operand, exact_gradients):
            if gradient.nonfinite if kind == "non-finite" else _all_lost(gradient, exact):
                left = f"gradient that left, of operand {place}: {ranged(gradient)}"
                return left, "" if exact is None else ranged(exact)
    return "gradient that left: not measured", ""


def _gradients(
    flow: Flow, operand: Operand, exact_gradients: ExactGradients
) -> Iterator[tuple[TensorStats, TensorStats | None]]:
    made = flow.producer(operand)
    if made is not None:
        for slot, result in enumerate(made.results):
            if result.gradient is not None:
                yield result.gradient, exact_gradients.get((made.index, slot))
        return
    for variable in flow.step.variables:
        if variable.gradient is not None and variable.name == parameter_name(operand.source):
            yield variable.gradient, variable.exact_gradient


def _all_lost(gradient: TensorStats, exact: TensorStats | None) -> bool:
    if exact is None or gradient.nonfinite or exact.nonfinite:
        return False
    return gradient.zeros - exact.zeros > 0.5 * (exact.count - exact.zeros) > 0


def _backward_flushed(flow: Flow, exact_gradients: ExactGradients) -> Iterator[Origin]:
    for operator in reversed(flow.step.operators):
        arrived = [r.gradient for r in operator.results if r.gradient is not None]
        if operator.phase == "update" or not arrived:
            continue
        given = [exact_gradients.get((operator.index, slot)) for slot in range(len(operator.results))]
        if any(_all_lost(g, e) for g, e in zip(arrived, given, strict=False)):
            continue  # it was lost before, on its way here
        for operand in operator.operands:
            if any(_all_lost(g, e) for g, e in _gradients(flow, operand, exact_gradients)):
                yield _backward("flushed", flow, operator, exact_gradients)
                return


# --- words ------------------------------------------------------------------------------------------------------------


def ranged(stats: TensorStats) -> str:
    """``"-3.2 to 88.7, 12 elements"``; what is not finite comes first."""
    special = [f"{n} {name}" for n, name in ((stats.nan, "NaN"), (stats.pos_inf, "+inf"), (stats.neg_inf, "-inf")) if n]
    if special and not stats.finite:
        return f"{', '.join(special)}, nothing finite"
    span = f"{stats.min:.6g} to {stats.max:.6g}" if not math.isnan(stats.min) else "empty"
    zeros = f", {stats.zeros} zeros" if stats.zeros else ""
    elements = "1 element" if stats.count == 1 else f"{stats.count} elements"
    return f"{', '.join(special)}; the rest {span}{zeros}, {elements}" if special else f"{span}{zeros}, {elements}"
