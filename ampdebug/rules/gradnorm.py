"""Rule: the gradient norm follows the loss scale, so it is the norm of scaled gradients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from itertools import pairwise

from ampdebug.rules._facts import Facts
from ampdebug.rules._finding import Finding, power, rows
from ampdebug.rules._history import Record

_AROUND = 20


def proportional(facts: Facts) -> Iterator[Finding]:
    """At each change of the scale the norm changes by the same factor, and between changes it does not."""
    series = [
        r
        for r in facts.logged
        if r.scale
        and r.step.grad_norm is not None
        and math.isfinite(r.step.grad_norm)
        and r.step.grad_norm > 0
        and not r.bad_gradient
    ]
    if len(series) < 12:
        return
    groups: list[list[Record]] = []
    for record in series:
        if groups and groups[-1][-1].scale == record.scale and groups[-1][-1].segment == record.segment:
            groups[-1].append(record)
        else:
            groups.append([record])
    tests = followed = 0
    shown: list[Record] = []
    weight = 0
    for left, right in pairwise(groups):
        a, b = left[-_AROUND:], right[:_AROUND]
        if left[-1].segment != right[0].segment or len(a) < 3 or len(b) < 3:
            continue
        scale_ratio = math.log2(b[0].scale or 1.0) - math.log2(a[0].scale or 1.0)
        norms_a = [math.log2(r.step.grad_norm or 1.0) for r in a]
        norms_b = [math.log2(r.step.grad_norm or 1.0) for r in b]
        change = statistics.median(norms_b) - statistics.median(norms_a)
        tests += 1
        weight += min(len(a), len(b))
        # Nearer to "follows" than to "stays", with room for drift and noise.
        if abs(change - scale_ratio) < 0.45 * abs(scale_ratio):
            followed += 1
            shown += [a[-1], b[0]]
    if tests == 0 or followed < max(1, math.ceil(0.7 * tests)):
        return
    ratios = [math.log2(r.step.grad_norm or 1.0) - math.log2(r.scale or 1.0) for r in series]
    norms = [math.log2(r.step.grad_norm or 1.0) for r in series]
    scales = [math.log2(r.scale or 1.0) for r in series]
    # Dividing by the scale must make the norms more alike, not less.
    calmer = statistics.pstdev(ratios) < 0.75 * statistics.pstdev(norms)
    if not calmer or statistics.pstdev(scales) == 0:
        return
    if tests == 1 and (weight < 8 or statistics.pstdev(norms) < 2 * statistics.pstdev(ratios)):
        return
    factor = 2.0 ** statistics.median(ratios)
    values = [r.step.grad_norm or 0.0 for r in series]
    seen = sorted({r.scale for r in series if r.scale})
    # A lone halving together with a falling norm is weak; several scales are not.
    yield Finding(
        "grad-norm-proportional-to-loss-scale",
        f"The gradient norm is about {factor:.3g} times the loss scale and changes with it ({min(values):.4g} to "
        f"{max(values):.4g} at scales {power(seen[0])} to {power(seen[-1])}): it is taken on gradients that are still "
        "scaled, and a clip by norm that uses it shrinks every update to almost nothing.",
        "warning",
        "high" if tests >= 2 else "medium",
        f"it follows the scale at {followed} of {tests} changes",
        series[0].step.step,
        series[-1].step.step,
        "",
        rows([*shown[:4], series[-1]]),
        "Unscale the gradients before the norm is taken and clipped: grads = loss_scaler.unscale(grads), then "
        "ops.clip_by_global_norm(grads, max_norm); in PyTorch scaler.unscale_(optimizer) before clip_grad_norm_.",
    )
