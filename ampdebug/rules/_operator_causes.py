"""What the first non-finite value of a forward pass is: one test a kind of fault; the first that fits names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ampdebug._sites import is_cast
from ampdebug.rules._finding import Confidence
from ampdebug.rules._operator_finding import cell_of, counted, keep_wide
from ampdebug.rules._operator_flow import (
    MATMUL,
    REDUCTIONS,
    SOFTMAX,
    Birth,
    Flow,
    is_square,
    lost_constant,
    moves,
    passes_on,
    scale_of,
)
from ampdebug.rules._operator_records import FLOAT16_MAX, Operand, Operator

_VARIANCES = ("var", "std", "norm", "lpnorm", "l2normalize", "varmean", "stdmean", "layernorm", "groupnorm", "rmsnorm")
_ROOTS = ("rsqrt", "sqrt", "div", "pow", "reciprocal")


@dataclass(frozen=True)
class Cause:
    """What a birth is: the parts of its finding."""

    slug: str
    sentence: str
    action: str
    operator: Operator
    confidence: Confidence = "high"


def _mask_constant(flow: Flow, birth: Birth) -> Cause | None:
    for operator in (birth.operator, birth.origin):
        if operator.kind not in ("mul", "add", "sub", "div", "maskedfill", "where", "pow"):
            continue
        for operand in operator.operands:
            if not _is_constant(flow, operand):
                continue
            if not (operand.overflows_in(operator.dtype) or (operand.nonfinite and birth.operator.kind == "mul")):
                continue
            value = operand.value if operand.value is not None else operand.stats.min if operand.stats else 0.0
            inside = operand.in_dtype(operator.dtype)
            becomes = f"is {inside:g} in {operator.dtype}" if inside is not None else f"leaves {operator.dtype}"
            meets = ", where it meets 0 (0 * inf is NaN)" if birth.operator.out and birth.operator.out.nan else ""
            return Cause(
                "mask-constant-overflows-fp16",
                f"The constant {value:g} of {operator.place} {becomes}{meets}.",
                "Build the mask in float32 and apply it with where/masked_fill instead of a product, with a constant "
                "that the format holds (-1e4, or np.finfo(np.float16).min).",
                operator,
            )
    return None


def _is_constant(flow: Flow, operand: Operand) -> bool:
    if operand.is_number:
        return True
    return operand.source == "constant" and operand.stats is not None


def _lost_epsilon(flow: Flow, birth: Birth) -> Cause | None:
    origin = birth.origin
    if origin.kind not in ("log", "div", "rsqrt", "sqrt", "reciprocal", "pow", "log2", "log10", "log1p", "mul"):
        return None
    if not any(o.stats.zeros for o in origin.tensors if o.stats is not None):
        return None
    lost = lost_constant(flow, origin)
    if lost is None:
        return None
    made, operand, inside = lost
    return Cause(
        "eps-1e-8-is-zero-in-fp16",
        f"The constant {operand.value:g} of {made.place} is {inside:g} in {made.dtype} (the smallest positive number "
        f"there is 5.96e-08), so {origin.place} gets a 0 and gives {counted(origin.out) if origin.out else 'inf'}.",
        f"Take a constant that the format holds (1e-4 to 1e-6 with sums that are not tiny), or {keep_wide(made)}; for "
        "log(p + eps) use the with-logits form of the loss.",
        made,
    )


def _empty_reduction(flow: Flow, birth: Birth) -> Cause | None:
    origin = birth.origin
    out = origin.out
    slug = "mean-over-zero-valid-labels"
    action = "Skip such a batch, or divide by maximum(count, 1)."
    # Before asking for NaN: the CPU kernel leaves such a mean uninitialised, which may be anything.
    if origin.kind == "mean" and any(o.stats.count == 0 for o in origin.tensors if o.stats is not None):
        return Cause(slug, f"{origin.place} is a mean over no element at all.", action, origin)
    if out is None or not out.nan:
        return None
    if "nllloss" in origin.kind or "crossentropy" in origin.kind:
        text = f"{origin.place} gives NaN from finite scores: no label is left to average over."
        return Cause(slug, text, action, origin)
    if origin.kind != "div" or len(origin.operands) < 2:
        return None
    top, bottom = origin.operands[0], origin.operands[1]
    zero_top = top.value == 0 or (top.stats is not None and top.stats.zeros > 0) or (top.low == 0 == top.high)
    zero_bottom = bottom.value == 0 or (bottom.stats is not None and bottom.stats.zeros > 0) or bottom.low == 0
    if not (zero_top and zero_bottom):
        return None
    if not (out.count == 1 or _counts(bottom)):
        return Cause(
            "division-of-zero-by-zero",
            f"{origin.place} divides 0 by 0 ({counted(out)}).",
            "Add an epsilon that the format holds to the divisor, or put the quotient where the divisor is not 0.",
            origin,
        )
    return Cause(
        slug,
        f"{origin.place} divides a sum of 0 by a count of 0: nothing in this batch is valid (all labels ignored or all "
        "positions masked), and 0/0 is NaN in any precision.",
        action,
        origin,
    )


def _counts(operand: Operand) -> bool:
    """Whole numbers from 0 on, as a sum over a mask gives them."""
    if operand.stats is None:
        return operand.low is not None
    stats = operand.stats
    whole = all(value == int(value) for value in (stats.min, stats.max, stats.mean * stats.finite) if stats.finite)
    return bool(stats.finite) and whole and stats.min >= 0


def _exponential(flow: Flow, birth: Birth) -> Cause | None:
    origin = birth.origin
    if origin.kind in ("sum", "cumsum", "add", "mul"):
        made = next((m for m in flow.before(origin, 2) if m.kind == "exp"), None)
        if made is None or any(m.kind in MATMUL for m in flow.before(origin, 1)):
            return None
    elif origin.kind != "exp":
        return None
    largest = max((o.stats.max for o in origin.tensors if o.stats is not None), default=0.0)
    limit = "11.09" if origin.dtype == "float16" else "88.7"
    return Cause(
        "handwritten-softmax-overflow",
        f"{origin.place} overflows {origin.dtype} (its operand reaches {largest:.4g}; exp ends at {limit} there): a "
        "softmax written by hand without subtracting the maximum, which no list of the level knows.",
        "Use ops.softmax / ops.log_softmax / ops.logsumexp, or subtract the row's maximum before exp; or "
        f"{keep_wide(origin)}.",
        origin,
    )


def _norm_square(flow: Flow, birth: Birth) -> Cause | None:
    origin = birth.origin
    squared = is_square(origin) or (origin.kind in REDUCTIONS and any(is_square(m) for m in flow.before(origin, 2)))
    if origin.kind not in _VARIANCES and not squared:
        return None
    if squared and not any(
        a.kind in (*_ROOTS, *_VARIANCES) for a in flow.after(origin, 6, lambda o: o.kind not in MATMUL)
    ):
        return None
    largest = max(
        (o.stats.absmax for m in (origin, *flow.before(origin, 1)) for o in m.tensors if o.stats), default=0.0
    )
    exact = flow.step.outcome
    silent = (
        "" if flow.output_nonfinite else " Nothing shows it downstream: 1/sqrt(inf) is 0, so the output is silently 0"
    )
    if silent and exact.exact_outputs:
        silent += f" (float32 gives absmax {exact.exact_outputs[0].absmax:.4g})"
    return Cause(
        "rmsnorm-square-overflow-output-zero",
        f"{origin.place} overflows {origin.dtype} inside a normalisation: values up to {largest:.4g} are squared, and "
        f"the square of anything above 256 is infinite there.{silent + '.' if silent else ''}",
        f"Square in float32: {keep_wide(origin)}.",
        origin,
    )


def _attention_scores(flow: Flow, birth: Birth) -> Cause | None:
    origin = birth.origin
    if origin.kind not in MATMUL or any(_is_weight(flow, o) for o in origin.operands):
        return None
    later = list(flow.after(origin, 8, passes_on))
    scale = next((s for o in later if (s := scale_of(o)) is not None), None)
    softmax = any(o.kind in (*SOFTMAX, "exp") for o in later)
    exact = origin.reference
    if scale is None and not softmax:
        return None
    largest = exact.absmax if exact is not None else float("nan")
    scaled = f", and {largest * scale:.4g} after the factor {scale:.4g} that comes later" if scale is not None else ""
    return Cause(
        "qk-matmul-overflow-before-scaling",
        f"The product of {origin.place} overflows {origin.dtype}: it reaches {largest:.4g} in float32{scaled}.",
        "Scale an operand before the product (q * d**-0.5), or take the product and the softmax in float32.",
        origin,
    )


def _is_weight(flow: Flow, operand: Operand) -> bool:
    for _ in range(6):
        if operand.source and operand.source != "constant" and not operand.source.startswith("input"):
            return True
        made = flow.producer(operand)
        if made is None or not made.operands or not (is_cast(made.name) or moves(made)):
            return False
        operand = made.operands[0]
    return False


def _reduction(flow: Flow, birth: Birth) -> Cause | None:
    origin = birth.origin
    source = next((o.stats for o in origin.tensors if o.stats is not None), None)
    if origin.kind not in REDUCTIONS or origin.out is None or source is None or source.nonfinite:
        return None
    terms = source.count // max(1, origin.out.count)
    if terms < 8 or source.absmax > 0.5 * FLOAT16_MAX:
        return None
    exact = origin.reference
    total = f"{exact.absmax:.4g}" if exact is not None and exact.finite else f"about {abs(source.mean) * terms:.4g}"
    for later in flow.after(origin, 4, passes_on):
        divides = later.kind == "div" and len(later.operands) > 1 and later.operands[1].nonfinite
        if divides and later.out is not None and later.out.zeros and not later.out.nonfinite:
            return Cause(
                "loss-denominator-overflow-loss-zero",
                f"The divisor of {later.place} is inf: {origin.place} adds {terms} numbers to {total}, which "
                f"{origin.dtype} does not hold, and a finite number divided by inf is 0. The result is exactly 0, and "
                "so are all gradients.",
                f"Count in int32 (mask.astype(ms.int32).sum()), or {keep_wide(origin)}.",
                origin,
            )
    return Cause(
        "reduce-sum-overflow-in-pooling",
        f"{origin.place} adds {terms} numbers of at most {source.absmax:.4g} to {total}: more than {origin.dtype} "
        "holds (65504), although each of them and their mean are small.",
        f"Use mean (it accumulates safely) or AdaptiveAvgPool instead of sum / count, or {keep_wide(origin)}.",
        origin,
    )


def _residual_stream(flow: Flow, birth: Birth) -> Cause | None:
    origin = birth.origin
    stream = [o for o in (origin, *flow.before(origin, 40)) if _is_residual(flow, o)]
    large = [o for o in stream if o is origin or _absmax(o) > 1000.0]
    if not large or (origin not in stream and len(stream) < 2):
        return None
    sizes = [_absmax(o) for o in sorted(stream, key=lambda o: o.index)]
    exact = origin.reference.absmax if origin.reference is not None and origin.reference.finite else None
    reaches = f" ({exact:.4g} in float32)" if exact else ""
    grown = ", ".join(f"{s:.4g}" for s in sizes[-5:])
    return Cause(
        "residual-stream-exceeds-fp16",
        f"The hidden state that each block adds to grows past 65504{reaches}: {origin.place} overflows; largest "
        f"values of the sums so far: {grown}.",
        "Keep the residual stream in float32 or bfloat16, or bring the growth down (normalise the branch, scale its "
        "last layer, smaller initialisation).",
        origin,
    )


def _absmax(operator: Operator) -> float:
    exact, out = operator.reference, operator.out
    stats = exact if exact is not None and exact.finite else out
    return stats.absmax if stats is not None and stats.finite else 0.0


def _is_residual(flow: Flow, operator: Operator) -> bool:
    if operator.kind != "add" or len(operator.operands) < 2:
        return False
    first, second = operator.operands[0], operator.operands[1]
    return (
        first.shape == second.shape
        and len(first.shape) >= 1
        and first.stats is not None
        and second.stats is not None
        and not _is_weight(flow, first)
        and not _is_weight(flow, second)
    )


_LOGARITHMS = ("log", "log2", "log10")


def _domain_left(flow: Flow, birth: Birth) -> Cause | None:
    """A root, logarithm, arc or quotient of a number that is only in 16 bits 0, negative or beyond 1."""
    origin = birth.origin
    out, kind = origin.out, origin.kind
    given = [o.stats for o in origin.tensors if o.stats is not None]
    if origin.dtype not in ("float16", "bfloat16") or out is None or not given or flow.exact_nonfinite is not False:
        return None
    operand = given[-1] if kind == "div" else given[0]
    apart = f"or {keep_wide(origin)}; what makes its operand must be in float32 too"
    if kind in ("sqrt", "rsqrt", "pow", *_LOGARITHMS) and operand.min < 0 and out.nan:
        value, how = (
            f"{operand.min:.4g}",
            "a difference of nearly equal numbers (a variance as E[x*x] - E[x]**2) rounds below 0",
        )
        action = f"Take a variance as the mean of (x - mean)**2, clip at 0 first, {apart}."
    elif kind in ("acos", "asin", "arccos", "arcsin", "atanh") and operand.absmax > 1 and out.nan:
        value, how = f"{operand.absmax:.4g}", "a cosine rounds beyond 1"
        action = f"Clip to -1..1 first, {apart}."
    elif kind in ("rsqrt", "reciprocal", "div", *_LOGARITHMS) and operand.zeros and out.nonfinite:
        value, how = f"0 ({operand.zeros} times)", f"a number close to 0 is 0 in {origin.dtype}"
        action = f"Use log_softmax or the with-logits form of the loss for log(softmax) or log(sigmoid), {apart}."
    else:
        return None
    return Cause(
        "domain-left-by-rounding",
        f"{origin.place} gets {value} and gives {counted(out)}; with every operator in float32 the result is finite: "
        f"{how}.",
        action,
        origin,
        "medium",
    )


def _cast(flow: Flow, birth: Birth) -> Cause | None:
    origin = birth.origin
    operand = next((o for o in origin.tensors if o.overflows_in(origin.dtype) and o.dtype != origin.dtype), None)
    if operand is None or operand.stats is None:
        return None
    name = flow.made_from_input(operand)
    what = f"the network's {name}" if name else f"a {operand.dtype} value"
    return Cause(
        "forward-overflow-scale-independent",
        f"{what[0].upper()}{what[1:]} of up to {operand.stats.absmax:.4g} is cast to {origin.dtype} in {origin.place} "
        "and becomes infinite.",
        "Normalise the data before the network." if name else f"Bring the values down, or {keep_wide(origin)}.",
        origin,
    )


def _any_precision(flow: Flow, birth: Birth) -> Cause | None:
    origin = birth.origin
    low = origin.dtype in ("float16", "bfloat16")
    exact = origin.reference
    if low and not (exact is not None and exact.nonfinite and flow.exact_nonfinite):
        return None
    return Cause(
        "nan-in-any-precision",
        f"{origin.place} gives {counted(origin.out) if origin.out else 'non-finite values'} from finite operands, and "
        "does so in float32 too.",
        "Look at the operands of this line: a logarithm or root of 0 or less, a division by 0, or values beyond 1e38.",
        origin,
    )


def _general(flow: Flow, birth: Birth) -> Cause:
    origin = birth.origin
    out = birth.operator.out
    assert out is not None
    exact = origin.reference
    gives = f"; float32 gives {counted(exact)}" if exact is not None and not exact.nonfinite else ""
    what = (
        f"{cell_of(origin)} makes {counted(origin.out or out)} in {origin.dtype} from finite operands "
        f"({origin.place}){gives}"
    )
    if not flow.output_nonfinite and not flow.poisoned:
        return Cause(
            "nan-input-hidden-by-relu",
            f"{what}. It is swallowed on the way, so that the output does not show it.",
            f"Do not take a finite output as proof; {keep_wide(origin)}.",
            origin,
            "medium",
        )
    return Cause(
        "forward-overflow-scale-independent",
        f"{what}: the forward pass overflows, whatever multiplies the loss.",
        f"Bring the values down, use bfloat16, or {keep_wide(origin)}.",
        origin,
    )


TESTS: tuple[Callable[[Flow, Birth], Cause | None], ...] = (
    _mask_constant,
    _lost_epsilon,
    _empty_reduction,
    _exponential,
    _norm_square,
    _attention_scores,
    _reduction,
    _residual_stream,
    _domain_left,
    _cast,
    _any_precision,
    _general,
)
"""Asked in this order; the first that fits names the birth, and the last always does."""
