"""Rules about the forward pass: where values stopped being finite, or hide that they did."""

from __future__ import annotations

from collections.abc import Iterator

from ampdebug._sites import is_cast
from ampdebug.rules._finding import Finding
from ampdebug.rules._operator_causes import TESTS
from ampdebug.rules._operator_finding import FORWARD_CONSEQUENCES, finding, keep_wide, told
from ampdebug.rules._operator_flow import SOFTMAX, Birth, Flow, moves, passes_on
from ampdebug.rules._operator_records import FLOAT16_OVERFLOWS, Operator

_NORMS = ("layernorm", "groupnorm", "instancenorm", "rmsnorm", "batchnorm")


def forward_births(flow: Flow) -> Iterator[Finding]:
    """The first non-finite values of the forward pass, one finding a cause."""
    reported: set[int] = set()
    slugs: set[str] = set()
    for birth in flow.births:
        if not _harmful(flow, birth) or birth.origin.index in reported or birth.operator.index in reported:
            continue
        if flow.descends(birth.operator, reported):
            continue
        cause = next(c for test in TESTS if (c := test(flow, birth)) is not None)
        reported |= {birth.origin.index, birth.operator.index, cause.operator.index}
        if cause.slug in slugs:
            continue
        slugs.add(cause.slug)
        swallowed = not flow.output_nonfinite
        evidence = told(cause.operator)
        if birth.operator is not cause.operator:
            evidence += told(birth.operator)[:1] + told(birth.operator)[-1:]
        yield finding(
            flow,
            cause.slug,
            cause.sentence,
            severity="error",
            confidence=cause.confidence,
            reason=_reason(flow, cause.operator, birth),
            evidence=evidence + ([_swallowed(flow, birth)] if swallowed else []),
            action=cause.action,
            where=cause.operator.path,
            explains=tuple(s for s in FORWARD_CONSEQUENCES if s != cause.slug),
        )


def _harmful(flow: Flow, birth: Birth) -> bool:
    out = birth.operator.out
    assert out is not None
    if flow.guarded(birth.operator) and not flow.output_nonfinite:
        return False  # the backward pass may still meet it; that is another rule's
    if out.nan:
        return True
    if flow.is_mask(birth.operator):
        return False
    reached = flow.spread(birth.operator)
    return flow.harmed or any(r.out is not None and r.out.nan for r in reached)


def _reason(flow: Flow, operator: Operator, birth: Birth) -> str:
    exact = operator.reference
    if exact is not None and not exact.nonfinite:
        return "the same operator on the same operands is finite in float32"
    if exact is not None and flow.exact_nonfinite is False:
        return "the operands were measured: float32 fails on them too, but makes other ones where every line is in it"
    if exact is not None:
        return "the operands were measured; float32 gives non-finite values too"
    if birth.operand is not None:
        return "the way of the value was followed back to where it came in"
    return "every operand was measured and is finite"


def _swallowed(flow: Flow, birth: Birth) -> str:
    for reached in flow.spread(birth.operator):
        if reached.out is not None and not reached.out.nonfinite:
            return f"it does not show in the output: {reached.place} turns it into finite numbers"
    return "it does not show in the output"


def masked_rows(flow: Flow) -> Iterator[Finding]:
    """A row of a softmax that has no finite entry."""
    for operator in flow.step.operators:
        operand = operator.operands[0] if operator.operands else None
        if operator.phase == "update" or operand is None or not operand.masked_rows:
            continue
        later = [operator, *flow.after(operator, 3, lambda o: True)]
        spoiled = any(o.out is not None and o.out.nan for o in later)
        if not spoiled and operator.kind not in SOFTMAX:
            continue
        becomes = "NaN" if spoiled else "NaN in float16 and on other devices, and zeros here"
        made = next((m for m in flow.before(operator, 6) if any(o.overflows_in(m.dtype) for o in m.operands)), None)
        also = f" The constant comes from {made.place}, where it is infinite." if made is not None else ""
        yield finding(
            flow,
            "softmax-row-fully-masked",
            f"{operand.masked_rows} rows of {operator.place} are masked completely: every entry is -inf, and softmax "
            f"over nothing is 0/0: {becomes}.{also}",
            severity="error" if spoiled else "warning",
            reason="the rows were counted",
            evidence=told(operator),
            action="Keep at least one entry of each row, or mask with a large finite number that the format holds "
            "(-1e4 in float16), or put zeros where the whole row is masked.",
            where=operator.path,
            explains=(
                *tuple(s for s in FORWARD_CONSEQUENCES if s != "softmax-row-fully-masked"),
                "mask-constant-overflows-fp16",
                "mean-over-zero-valid-labels",
            ),
        )
        return


def pinned(flow: Flow) -> Iterator[Finding]:
    """Values at the largest number of float16 that are larger in truth."""
    for operator in flow.step.operators:
        out = operator.out
        if operator.phase == "update" or out is None or out.saturated < 1 or moves(operator):
            continue
        given = [o.stats for o in operator.tensors if o.stats is not None]
        limits = operator.kind in ("clip", "minimum", "maximum", "nantonum", "where", "cast") or is_cast(operator.name)
        hidden = limits and any(s.pos_inf or s.neg_inf or s.absmax >= FLOAT16_OVERFLOWS for s in given)
        if hidden and operator.kind in ("where", "maximum", "minimum") and flow.is_mask(operator):
            continue
        exact = operator.reference
        beyond = exact is not None and not exact.nonfinite and exact.absmax >= FLOAT16_OVERFLOWS and not out.nonfinite
        if not (hidden or beyond):
            continue
        if hidden and _masks_only(flow, operator):
            continue
        yield finding(
            flow,
            "values-pinned-at-fp16-max",
            f"{out.saturated} of {out.count} values of {operator.place} are exactly 65504 and larger in truth: an "
            "overflow is clipped there and does not show as inf.",
            severity="error" if out.saturated > 0.001 * out.count else "warning",
            reason="what went in is infinite or beyond the format, and what came out is its largest number",
            evidence=told(operator),
            action="Do not clip to the largest number: keep the layer before it in float32 or bring its values down. "
            "On Ascend MS_ASCEND_CHECK_OVERFLOW_MODE=INFNAN_MODE shows such overflows.",
            where=operator.path,
            explains=("forward-overflow-scale-independent", "nan-input-hidden-by-relu", "residual-stream-exceeds-fp16",
                      "normalisation-forced-to-fp16", "gradients-flushed-to-zero-without-loss-scale"),
        )  # fmt: skip
        return


def _masks_only(flow: Flow, operator: Operator) -> bool:
    """Only -inf went in, and a softmax follows: a mask made finite."""
    if any(o.stats.pos_inf or o.stats.max >= FLOAT16_OVERFLOWS for o in operator.tensors if o.stats is not None):
        return False
    return any(o.kind in SOFTMAX for o in flow.after(operator, 6, passes_on))


def silent_norm(flow: Flow) -> Iterator[Finding]:
    """A normalisation operator whose output is 0 where float32 gives something else."""
    for operator in flow.step.operators:
        out, exact = operator.out, operator.reference
        if operator.kind not in _NORMS or out is None or exact is None or out.nonfinite or exact.nonfinite:
            continue
        if out.zeros > 0.9 * out.count and exact.zeros < 0.5 * exact.count:
            yield finding(
                flow,
                "rmsnorm-square-overflow-output-zero",
                f"{operator.place} gives {out.zeros} zeros of {out.count} values, where float32 gives absmax "
                f"{exact.absmax:.4g}: its variance overflows {operator.dtype}, and 1/sqrt(inf) is 0.",
                severity="error",
                reason="the same operator on the same operands was run in float32",
                evidence=told(operator),
                action=f"{keep_wide(operator)[0].upper()}{keep_wide(operator)[1:]}.",
                where=operator.path,
                explains=("normalisation-forced-to-fp16", "gradients-flushed-to-zero-without-loss-scale"),
            )
            return


def latent_epsilon(flow: Flow) -> Iterator[Finding]:
    """An epsilon that is 0 in the format, without harm in this batch."""
    for operator in flow.step.operators:
        if operator.phase == "update" or operator.kind not in ("add", "clip", "maximum") or operator.dtype != "float16":
            continue
        small = next((o for o in operator.operands if o.is_number and o.value and o.in_dtype("float16") == 0), None)
        follows = any(
            o.kind in ("log", "rsqrt", "sqrt", "div", "reciprocal", "pow") for o in flow.after(operator, 2, passes_on)
        )
        if small is not None and small.value is not None and follows:
            yield finding(
                flow,
                "eps-1e-8-is-zero-in-fp16",
                f"The constant {small.value:g} of {operator.place} is 0 in float16; in this batch nothing came of it.",
                severity="note",
                reason="no operand was 0 where it would have mattered",
                evidence=told(operator),
                action="Take a constant that the format holds, such as 1e-6.",
                where=operator.path,
            )
            return
