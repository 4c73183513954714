"""The judges: each rule a plain function from facts to findings, and how findings are put in order.

A rule is silent unless its own condition holds; it never looks at what other rules said. Which finding is the cause of
which is said by ``Finding.explains``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from ampdebug.rules import (
    batchnorm,
    births,
    cells,
    divergence,
    gradnorm,
    labels,
    nan,
    overflow,
    periodic,
    scale,
    settings,
    silent,
    state,
    zero,
)
from ampdebug.rules._facts import Facts
from ampdebug.rules._finding import Confidence, Evidence, Finding, Severity
from ampdebug.rules._history import History, Mark, Record

Rule = Callable[[Facts], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    labels.out_of_range,
    settings.scale_not_divided,
    settings.adam_epsilon,
    batchnorm.bn_statistics,
    cells.norm_output_zero,
    silent.masked_row,
    births.born_in_the_forward,
    cells.backward_nan,
    cells.updates_round_away,
    cells.gradients_flushed,
    silent.gradients_all_zero,
    silent.loss_not_from_the_network,
    settings.pin_lost,
    cells.level_converted_nothing,
    cells.float32_leak,
    nan.nan_from_first_step_after_resume,
    silent.loss_pinned,
    divergence.divergence,
    nan.update_applied_on_overflow,
    nan.nan_updates_not_skipped,
    nan.loss_nan_before_scale_moved,
    nan.scale_collapse_loss_already_nan,
    zero.nan_filtered,
    zero.zero_from_start,
    zero.denominator_overflow,
    overflow.overflow_at_every_scale,
    overflow.every_update_dropped,
    nan.nan_in_the_first_step,
    nan.nan_permanent,
    periodic.same_batch,
    overflow.overflow_at_any_scale,
    state.ranks_differ,
    gradnorm.proportional,
    state.not_restored,
    overflow.scale_oscillates,
    overflow.static_overflow_frequent,
    overflow.applied_without_harm,
    scale.never_grows,
    scale.headroom,
    scale.below_one,
    cells.saturated,
    cells.norm_in_float16,
    nan.nan_in_some_steps,
    nan.nan_unexplained,
    nan.gradients_nan_stopped,
    divergence.spike_recovered,
)
"""In the order in which equally severe findings are reported: what explains more comes first."""

_SEVERITY = {"error": 0, "warning": 1, "note": 2}


def judge(history: History, rules: tuple[Rule, ...] = RULES) -> tuple[Finding, ...]:
    """Ask every rule, put the findings in order and fold consequences under their causes.

    Args:
        history: What happened, finished.
        rules: The rules to ask, the more explaining ones first.

    Returns:
        Findings, the most explaining first.
    """
    facts = Facts(history)
    found: list[tuple[int, Finding]] = []
    for place, rule in enumerate(rules):
        found.extend((place, finding) for finding in rule(facts))
    found.sort(key=lambda item: (_SEVERITY[item[1].severity], item[0]))
    return fold(tuple(finding for _, finding in found))


def fold(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Turn findings that another one explains into a sentence of that one.

    Args:
        findings: Ordered, causes before consequences of the same severity.
    """
    kept: list[Finding] = []
    for finding in findings:
        cause = next((i for i, other in enumerate(kept) if finding.slug in other.explains), None)
        if cause is None:
            kept.append(finding)
            continue
        if finding.severity == "note":
            continue
        other = kept[cause]
        kept[cause] = dataclasses.replace(
            other, consequences=(*other.consequences, f"{finding.slug}: {finding.sentence}")
        )
    return tuple(kept)


__all__ = [
    "RULES",
    "Confidence",
    "Evidence",
    "Facts",
    "Finding",
    "History",
    "Mark",
    "Record",
    "Rule",
    "Severity",
    "fold",
    "judge",
]
