"""Two runs against each other: scale, overflow, gradients, headroom, and where their losses part."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from ampdebug.rules._facts import Facts, octaves
from ampdebug.rules._finding import Evidence, Finding, Severity, power, rows
from ampdebug.rules._history import History, Record
from ampdebug.rules._run import RunView


def compare(first: History, second: History) -> tuple[Finding, ...]:
    """Where two runs differ beyond rounding; notes, with a warning where one of them overflows far more.

    Args:
        first: The run that was asked about.
        second: The one it is held against.

    Returns:
        Findings with the slugs ``runs-part-at-step``, ``runs-differ-in-overflow-rate``, ``runs-differ-in-loss-scale``,
        ``runs-differ-in-gradients`` and ``runs-differ-in-dtypes``.
    """
    a, b = Facts(first), Facts(second)
    found = [part(a, b) for part in (_losses, _overflow, _scale, _gradients, _dtypes)]
    return tuple(finding for finding in found if finding is not None)


def _note(
    slug: str, sentence: str, evidence: tuple[Evidence, ...], step: int | None = None, severity: Severity = "note"
) -> Finding:
    return Finding(
        slug,
        sentence,
        severity,
        "high",
        "both runs recorded it",
        step,
        None,
        "",
        evidence,
        "Compare what was changed between the two runs (batch size, number of devices, level, versions) at this point.",
    )


def _by_step(facts: Facts, value: Callable[[Record], float | None]) -> dict[int, Record]:
    return {r.step.step: r for r in facts.logged if value(r) is not None}


def _losses(a: Facts, b: Facts) -> Finding | None:
    mine, theirs = (_by_step(f, lambda r: r.step.loss) for f in (a, b))
    common = sorted(mine.keys() & theirs.keys())
    if len(common) < 3:
        return None
    pairs = [(step, mine[step].step.loss or 0.0, theirs[step].step.loss or 0.0) for step in common]
    decimals = [f.history.loss_decimals for f in (a, b) if f.history.loss_decimals is not None]
    printed = 10.0 ** -min(decimals) if decimals else 0.0
    parted = next((p for p in pairs if not _close(p[1], p[2], printed)), None)
    if parted is None:
        return None
    step, x, y = parted
    ends = f"; at step {common[-1]} they are {pairs[-1][1]:.5g} and {pairs[-1][2]:.5g}"
    return _note(
        "runs-part-at-step",
        f"The losses part at step {step}: {x:.5g} here, {y:.5g} there (up to then they agree within rounding){ends}.",
        (*rows([mine[step], theirs[step]]),),
        step,
    )


def _close(x: float, y: float, printed: float) -> bool:
    if math.isfinite(x) != math.isfinite(y):
        return False
    # Float16 carries 11 bits: what differs by less than some of its units in the last place differs by rounding.
    return not math.isfinite(x) or abs(x - y) <= max(2.0**-7 * max(abs(x), abs(y)), 2 * printed)


def _rate(facts: Facts) -> float | None:
    totals = facts.history.totals
    if not totals.overflow_known and not facts.overflows:
        return None
    return facts.overflow_count / max(facts.span, 1)


def _overflow(a: Facts, b: Facts) -> Finding | None:
    x, y = _rate(a), _rate(b)
    if x is None or y is None:
        return None
    more, less = max(x, y), min(x, y)
    # By chance alone the counts vary by their square root.
    spread = 3 * math.sqrt(max(a.overflow_count, b.overflow_count, 1)) / max(min(a.span, b.span), 1)
    if more - less <= spread or more < 0.002:
        return None
    return _note(
        "runs-differ-in-overflow-rate",
        f"{100 * x:.2f} % of the steps overflow here ({a.overflow_count}), {100 * y:.2f} % there ({b.overflow_count}).",
        rows([*a.overflows[:2], *b.overflows[:2]]),
        a.overflows[0].step.step if a.overflows else None,
        "warning" if x > 2 * y and x > 0.02 else "note",
    )


def _scale(a: Facts, b: Facts) -> Finding | None:
    if not a.scales or not b.scales:
        return None
    x, y = (statistics.median(f.scales[len(f.scales) // 2 :]) for f in (a, b))
    if x <= 0 or y <= 0 or octaves(max(x, y), min(x, y)) < 2:
        return None
    return _note(
        "runs-differ-in-loss-scale",
        f"In its second half the loss scale is mostly {power(x)} here and {power(y)} there.",
        rows([a.scaled[-1], b.scaled[-1]]),
    )


def _gradients(a: Facts, b: Facts) -> Finding | None:
    values = []
    for facts in (a, b):
        norms = [r.step.grad_norm for r in facts.logged if r.step.grad_norm is not None]
        finite = [n for n in norms if math.isfinite(n) and n > 0]
        if len(finite) < 10:
            return None
        values.append(statistics.median(finite))
    x, y = values
    if abs(math.log2(x) - math.log2(y)) < 1.5:
        return None
    bits = math.log2(x) - math.log2(y)
    room = "less" if bits > 0 else "more"
    return _note(
        "runs-differ-in-gradients",
        f"The gradient norm is mostly {x:.4g} here and {y:.4g} there: {abs(bits):.1f} bits {room} headroom here at the "
        "same scale.",
        rows([a.logged[-1], b.logged[-1]]),
    )


def _dtypes(a: Facts, b: Facts) -> Finding | None:
    views = [f.history.facts.get("run") for f in (a, b)]
    if not all(isinstance(view, RunView) for view in views):
        return None
    seen: list[dict[str, tuple[str, ...]]] = []
    for view in views:
        assert isinstance(view, RunView)
        seen.append({s.site.path: s.dtypes for s in view.sites("output") if s.site.call == 0})
    changed = [path for path in seen[0] if path in seen[1] and seen[0][path] != seen[1][path]]
    if not changed:
        return None
    return _note(
        "runs-differ-in-dtypes",
        f"{len(changed)} cells put out another dtype, the first is {changed[0]!r}: {', '.join(seen[0][changed[0]])} "
        f"here, {', '.join(seen[1][changed[0]])} there.",
        tuple(
            Evidence(f"{path or 'the network'}: {', '.join(seen[0][path])} here, {', '.join(seen[1][path])} there")
            for path in changed[:8]
        ),
    )
