"""Rules about the backward pass and the update."""

from __future__ import annotations

from collections.abc import Iterator

from ampdebug._formats import round_through
from ampdebug._records import parameter_name
from ampdebug.rules._finding import Finding
from ampdebug.rules._operator_finding import counted, finding, keep_wide, told
from ampdebug.rules._operator_flow import Flow, lost_constant
from ampdebug.rules._operator_records import Operator, Variable


def backward_nan(flow: Flow) -> Iterator[Finding]:
    """A finite forward pass and NaN in the backward one."""
    step = flow.step
    bad = [v for v in step.variables if v.gradient is not None and v.gradient.nonfinite]
    if flow.output_nonfinite:
        return
    born = _born(flow)
    if not bad and born is None:
        return
    nan = any(v.gradient is not None and v.gradient.nan for v in bad) or (
        born is not None and _gradient_nan(flow, born)
    )
    exact_bad = any(v.exact_gradient is not None and v.exact_gradient.nonfinite for v in bad)
    names = ", ".join(v.name for v in bad[:4])
    rows = told(born) if born is not None else []
    rows += [f"gradient of {v.name}: {counted(v.gradient)}" for v in bad if v.gradient is not None][:4]
    where = born.path if born is not None else bad[0].path
    at = f"the derivative of {born.place}" if born is not None else "a derivative on the way"
    if born is not None and (lost := lost_constant(flow, born)) is not None and not exact_bad:
        made, operand, inside = lost
        yield finding(
            flow,
            "eps-1e-8-is-zero-in-fp16",
            f"The constant {operand.value:g} of {made.place} is {inside:g} in {made.dtype}, so {at} is infinite where "
            f"its operand is 0: the gradient of {names or 'its operand'} is not finite although the forward pass is.",
            severity="error",
            reason="the gradient before this operator is finite and the one after it is not; in float32 both are",
            evidence=[*told(made), *rows],
            action=f"Take a constant that the format holds (1e-4 to 1e-6), or {keep_wide(made)}.",
            where=where,
            explains=("backward-nan-from-noop-clamp",),
        )
        return
    overflowed = born is not None and not _suspicious(born) and not exact_bad and _gradient_inf(flow, born)
    if not nan or overflowed:
        yield finding(
            flow,
            "backward-overflow-fp16",
            f"The forward pass is finite, and {at} overflows 16 bits: the gradient of {names or 'its operand'} is "
            "infinite.",
            severity="error" if exact_bad else "note",
            reason="a loss scale that is still falling does this in its first steps"
            if not exact_bad
            else "float32 too",
            evidence=rows,
            action="Nothing while a dynamic loss scale finds its value; else lower the scale.",
            where=where,
            confidence="medium",
        )
        return
    same = " float32 gives NaN there too." if exact_bad else ""
    yield finding(
        flow,
        "backward-nan-from-noop-clamp",
        f"The forward pass is finite, but {at} is NaN: the gradient of {names or 'its operand'} is lost. It is inf "
        "times 0 (a "
        "root, norm, logarithm or quotient at 0 behind a clamp, maximum or where that leaves the value and not the "
        f"derivative).{same}",
        severity="error",
        reason="the gradient that arrives at this operator is finite, and the one that leaves it is not"
        if born is not None
        else "the gradients of the parameters were measured",
        confidence="high" if born is not None else "medium",
        evidence=rows,
        action="Make the argument safe before the function, not its result after it: sqrt(maximum(x, eps)) instead of "
        "maximum(sqrt(x), eps), where(mask, x, 1) inside the logarithm as well as outside.",
        where=where,
    )


def _born(flow: Flow) -> Operator | None:
    """The operator whose backward made the first non-finite gradient: the last one in order of execution."""
    for operator in reversed(flow.step.operators):
        gradients = [r.gradient for r in operator.results if r.gradient is not None]
        if not gradients or any(g.nonfinite for g in gradients):
            continue
        for operand in operator.operands:
            made = flow.producer(operand)
            if made is None:
                if operand.source and _variable_gradient_bad(flow, operand.source):
                    return operator
                continue
            others = flow.consumers.get(made.index, [])
            arrived = [r.gradient for r in made.results if r.gradient is not None and r.gradient.nonfinite]
            # With several consumers the gradient is a sum; the one with a finite gradient of its own may be innocent,
            # but then the other one, later in execution, was met before it.
            if arrived and (len(others) == 1 or operator is others[-1] or _suspicious(operator)):
                return operator
    return None


def _variable_gradient_bad(flow: Flow, source: str) -> bool:
    return any(
        v.gradient is not None and v.gradient.nonfinite and v.name == parameter_name(source)
        for v in flow.step.variables
    )


def _suspicious(operator: Operator) -> bool:
    return operator.kind in (
        "sqrt",
        "rsqrt",
        "norm",
        "lpnorm",
        "log",
        "div",
        "pow",
        "reciprocal",
        "acos",
        "asin",
        "std",
    )


def _gradient_nan(flow: Flow, operator: Operator) -> bool:
    for operand in operator.operands:
        made = flow.producer(operand)
        if made is not None and any(r.gradient is not None and r.gradient.nan for r in made.results):
            return True
    return False


def _gradient_inf(flow: Flow, operator: Operator) -> bool:
    """The gradient that leaves it is infinite, and nowhere NaN."""
    left = [
        r.gradient
        for operand in operator.operands
        if (made := flow.producer(operand)) is not None
        for r in made.results
        if r.gradient is not None and r.gradient.nonfinite
    ]
    return bool(left) and not any(g.nan for g in left)


def gradients_flushed(flow: Flow) -> Iterator[Finding]:
    """Gradients that are zero here and not so in float32."""
    step = flow.step
    if not step.outcome.real_loss or step.outcome.random or flow.output_nonfinite:
        return
    seen = [v for v in step.variables if v.gradient is not None and v.exact_gradient is not None]
    if any(v.gradient is not None and v.gradient.nonfinite for v in seen):
        return
    exact = {v.name: v.exact_gradient.count - v.exact_gradient.zeros for v in seen if v.exact_gradient is not None}
    total = sum(exact.values())
    lost = [v for v in seen if exact[v.name] and v.flushed > 0.9 * exact[v.name] and v.flushed >= 4]
    share = sum(v.flushed for v in seen) / total if total else 0.0
    # Only what is too small: a network that computes something else altogether has zeros for other reasons.
    small = [v for v in lost if v.exact_gradient is not None and v.exact_gradient.absmax < 2.0**-12]
    if not small or (share < 0.3 and len(small) < 0.5 * len(seen)):
        return
    worst = max(small, key=lambda v: v.flushed)
    assert worst.exact_gradient is not None
    yield finding(
        flow,
        "gradients-flushed-to-zero-without-loss-scale",
        f"{100 * share:.0f} % of the gradient elements that are not zero in float32 are zero here: they fall below "
        f"what float16 holds (2**-24). {worst.name!r} loses {worst.flushed} of {exact[worst.name]} (largest "
        f"{worst.exact_gradient.absmax:.3g}).",
        severity="warning",
        reason="the same step was run with every operator in float32",
        evidence=[
            f"{v.name}: {v.flushed} of {exact[v.name]} flushed, float32 absmax {v.exact_gradient.absmax:.3g}"
            for v in small
            if v.exact_gradient is not None
        ],
        action="Multiply the loss by a dynamic scale (amp.DynamicLossScaler(2**16, 2, 1000)) in loss_fn and in "
        "training.",
        where=worst.path,
    )


def update_rounds_away(flow: Flow) -> Iterator[Finding]:
    """Float16 parameters that an update left as they were."""
    if flow.step.optimizer is None:
        yield from _without_master_weights(flow)
        return
    stuck = [
        v
        for v in flow.step.variables
        if v.dtype in ("float16", "bfloat16") and v.nonzero >= 4 and v.unchanged > 0.9 * v.nonzero
    ]
    if not stuck:
        return
    worst = max(stuck, key=lambda v: v.unchanged)
    yield finding(
        flow,
        "fp16-update-below-half-ulp",
        f"{worst.unchanged} of {worst.nonzero} elements of {worst.name!r} did not change although their gradients are "
        "not "
        f"zero: the parameter is {worst.dtype}, and an update of less than half a unit in its last place rounds away.",
        severity="warning",
        reason="the parameters before and after the update were compared",
        evidence=[f"{v.name} ({v.dtype}): {v.unchanged} of {v.nonzero} unchanged" for v in stuck],
        action="Keep the parameters in float32 (the levels O1-O3 do; do not cast parameters to float16) so that they "
        "serve as master weights.",
        where=worst.path,
    )


def _without_master_weights(flow: Flow) -> Iterator[Finding]:
    """Float16 parameters, and no update to see what it does to them."""
    low = [v for v in flow.step.variables if v.trainable and v.dtype == "float16" and v.nonzero]
    if not low:
        return
    yield finding(
        flow,
        "fp16-update-below-half-ulp",
        f"{len(low)} trainable parameters are kept in float16 ({', '.join(v.name for v in low[:3])}): an update of "
        "less than "
        "1/4096 of a weight rounds away. No optimizer was given, so this was not seen to happen.",
        severity="note",
        confidence="low",
        reason="the dtypes of the parameters were seen, no update was",
        evidence=[f"{v.name}: {v.dtype}, rms {v.before.rms:.3g}, gradient absmax {_absmax(v):.3g}" for v in low],
        action="Keep the parameters in float32 (the levels O1-O3 do) so that they serve as master weights.",
        confirm="ampdebug.check with the optimizer: it compares the parameters around an update",
    )


def _absmax(variable: Variable) -> float:
    return variable.gradient.absmax if variable.gradient is not None else 0.0


def update_epsilon(flow: Flow) -> Iterator[Finding]:
    """An optimizer's epsilon that is 0 in the parameters' dtype."""
    optimizer = flow.step.optimizer
    low = [v for v in flow.step.variables if v.trainable and v.dtype == "float16"]
    if optimizer is None or not low:
        return
    spoiled = [v for v in low if v.after.nonfinite and not v.before.nonfinite]
    epsilon = optimizer.epsilon
    lost = epsilon is not None and epsilon != 0 and float(round_through([epsilon], "float16")[0]) == 0.0
    written = next(
        (
            found
            for o in flow.step.operators
            if o.phase == "update" and o.kind in ("div", "rsqrt", "reciprocal")
            if (found := lost_constant(flow, o, 3)) is not None
        ),
        None,
    )
    if not lost and written is None:
        return
    value = epsilon if lost else written[1].value if written is not None else None
    became = f": {', '.join(v.name for v in spoiled[:4])} became NaN or infinite" if spoiled else ""
    yield finding(
        flow,
        "adam-eps-underflow-fp16-params",
        f"{optimizer.name} adds {value:g} to its denominator, and that is 0 in float16, which {low[0].name!r} and "
        f"{len(low) - 1} more parameters are kept in{became}. Where the second moment is 0 it divides by 0.",
        severity="error" if spoiled else "warning",
        reason="the dtypes of the parameters were seen" + (" and the update measured" if spoiled else ""),
        evidence=[f"{v.name} ({v.dtype}) after the update: {counted(v.after)}" for v in (spoiled or low)[:6]],
        action="Keep the parameters and the optimizer's moments in float32, or give an epsilon that float16 holds "
        "(1e-4).",
        explains=("fp16-update-below-half-ulp",),
    )
