"""Rules about a loss that is exactly zero."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from ampdebug.rules._facts import Facts
from ampdebug.rules._finding import Finding, rows
from ampdebug.rules._history import Record


def _unit(values: list[float]) -> float:
    """The last printed digit of numbers, as far as it can be told from them."""
    if len(set(values)) < 4:
        return 1e-6
    return next(
        (u for u in (0.1, 0.01, 1e-3, 1e-4, 1e-5) if all(abs(v / u - round(v / u)) < 1e-6 for v in values)), 1e-6
    )


def _away_from_zero(facts: Facts, series: list[Record]) -> bool:
    """The losses that are not 0 are far from it, as those of a hinge (triplet, margin) are not."""
    values = []
    for record, after in zip(series, [*series[1:], None], strict=True):
        # The last mean before the zeros may be one of which some of the losses were already left out.
        partly = facts.history.filters_nan_loss and after is not None and after.step.loss == 0.0
        if record.step.loss and not partly:
            values.append(abs(record.step.loss))
    return not values or min(values) >= 0.1 * statistics.median(values)


def _sudden_zeros(facts: Facts) -> tuple[list[Record], list[Record]]:
    """Losses printed as exactly 0 that the level around them does not explain, and the others before them."""
    series = [r for r in facts.losses if not r.bad_loss]
    zeros = [r for r in series if r.step.loss == 0.0]
    others = [r for r in series if r.step.loss != 0.0]
    if len(zeros) < 3 or len(others) < 3:
        return [], others
    first = facts.place(zeros[0])
    earlier = [abs(r.step.loss or 0.0) for r in others if facts.place(r) < first]
    near = earlier[-8:] if len(earlier) >= 3 else [abs(r.step.loss or 0.0) for r in others]
    decimals = facts.history.loss_decimals
    smallest = 10.0**-decimals if decimals is not None else _unit(near)
    # A loss that has come down to a few units of the last printed digit may round to 0 in good health.
    if statistics.median(near) < 50 * smallest:
        return [], others
    return (zeros, others) if _away_from_zero(facts, series) else ([], others)


def nan_filtered(facts: Facts) -> Iterator[Finding]:
    """The Trainer that leaves NaN losses out of its mean prints 0.0 when all of them were NaN."""
    zeros, others = _sudden_zeros(facts)
    if not zeros:
        return
    bad_norm = [r for r in zeros if r.step.grad_norm is not None and not math.isfinite(r.step.grad_norm)]
    finite_norm = [r for r in zeros if r.step.grad_norm is not None and math.isfinite(r.step.grad_norm)]
    if not bad_norm and (not facts.history.filters_nan_loss or finite_norm):
        return
    first, last = zeros[0].step.step, zeros[-1].step.step
    before = [r for r in others if facts.place(r) < facts.place(zeros[0])]
    rates = {r.step.learning_rate for r in zeros if r.step.learning_rate is not None}
    frozen = len(rates) == 1 and len(zeros) >= 3
    reason = (
        "the gradient norm beside the zero loss is NaN"
        if bad_norm
        else "this tool is known to leave NaN losses out of the mean"
        + (", and the learning rate stands still, as it does when every step is skipped" if frozen else "")
    )
    lines = "log line" if facts.history.counts_lines else "step"
    yield Finding(
        "loss-0-means-nan-filtered",
        f"From {lines} {first} on the printed loss is exactly 0.0, at once from "
        f"{before[-1].step.loss if before else 0:.4g}: the logger leaves NaN losses out of its mean "
        "(logging_nan_inf_filter), so the loss is NaN, not zero.",
        "error",
        "high" if bad_norm or frozen else "medium",
        reason,
        first,
        last,
        "",
        rows([*before[-2:], *zeros[:2], zeros[-1]]),
        "Set logging_nan_inf_filter=False to see the true loss, go back to a checkpoint before this point, and train "
        "in bf16 or with the first non-finite layer in float32.",
        "ampdebug.Trace fed with the unfiltered loss of each step, or ampdebug.watch",
        (),
        (
            "nan-permanent-params-corrupted",
            "loss-denominator-overflow-loss-zero",
            "loss-spike-recovered",
            "nan-updates-not-skipped",
            "forward-overflow-scale-independent",
            "overflow-at-every-scale-from-step-1",
            "every-update-dropped",
            "loss-nan-cause-unknown",
            "overflow-frequent",
        ),
    )


def denominator_overflow(facts: Facts) -> Iterator[Finding]:
    """Loss and gradients exactly zero: something finite was divided by infinity."""
    zeros, others = _sudden_zeros(facts)
    if not zeros:
        return
    norms = [r.step.grad_norm for r in zeros if r.step.grad_norm is not None]
    if any(n != 0.0 for n in norms) or (facts.history.filters_nan_loss and not norms):
        return
    first, last = zeros[0].step.step, zeros[-1].step.step
    before = [r for r in others if facts.place(r) < facts.place(zeros[0])]
    overflowed = any(r.step.overflow for r in zeros)
    if overflowed:
        return
    yield Finding(
        "loss-denominator-overflow-loss-zero",
        f"{len(zeros)} losses (first at step {first}) are exactly 0 "
        + ("with a gradient norm of exactly 0 " if norms else "")
        + "and no overflow is reported: a divisor of the loss (a token count, a sum of weights) has overflowed to inf "
        "in float16, "
        "and x/inf is 0.",
        "error",
        "high" if norms else "medium",
        "loss and gradient norm are exactly 0 in the same steps"
        if norms
        else "the loss is exactly 0 at once, not little by little",
        first,
        last,
        "",
        rows([*before[-2:], *zeros[:3], zeros[-1]]),
        "Compute the divisor in float32: mask.astype(ms.float32).sum() before loss.sum() / count, not a sum of a "
        "float16 mask (it is inf above 65504).",
        "ampdebug.check(net, *inputs, loss_fn=...): it shows the sum that is inf",
    )


def zero_from_start(facts: Facts) -> Iterator[Finding]:
    """The loss is exactly zero from the first step."""
    series = [r for r in facts.losses if not r.bad_loss]
    if len(series) < 5 or any(r.step.loss != 0.0 for r in series):
        return
    norms = [r.step.grad_norm for r in series if r.step.grad_norm is not None]
    bad = any(not math.isfinite(n) for n in norms)
    if not bad and any(n != 0.0 for n in norms):
        return  # gradients without a loss: that of GRPO is 0 by construction
    filtered = bad or (facts.history.filters_nan_loss and not norms)
    first, last = series[0].step.step, series[-1].step.step
    if filtered:
        yield Finding(
            "loss-0-means-nan-filtered",
            "Every printed loss is exactly 0.0: this logger leaves NaN losses out of its mean "
            "(logging_nan_inf_filter), so the loss was NaN from the start.",
            "error",
            "high" if bad else "medium",
            "the gradient norm beside it is NaN" if bad else "a loss of exactly 0 in every record is no training",
            first,
            last,
            "",
            rows([series[0], series[-1]]),
            "Set logging_nan_inf_filter=False to see the true loss and train in bf16 or with the first non-finite "
            "layer in float32.",
            "ampdebug.Trace fed with the unfiltered loss of each step",
            (),
            (
                "overflow-at-every-scale-from-step-1",
                "forward-overflow-scale-independent",
                "every-update-dropped",
                "overflow-frequent",
                "nan-updates-not-skipped",
            ),
        )
        return
    yield Finding(
        "loss-denominator-overflow-loss-zero",
        "Every loss is exactly 0"
        + (" with gradients of exactly 0" if norms else "")
        + ": most likely its divisor (a token count, a sum of weights) is inf in float16.",
        "error",
        "high" if norms else "low",
        "loss and gradient norm are exactly 0 throughout" if norms else "the gradient norm is not printed",
        first,
        last,
        "",
        rows([series[0], series[-1]]),
        "Compute the divisor of the loss in float32.",
        "ampdebug.check(net, *inputs, loss_fn=...)",
    )
