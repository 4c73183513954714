"""Rules over the operators of one instrumented step: what ``ampdebug.check`` says.

Each rule is silent unless its own condition holds. :func:`judge_step` orders the findings and folds consequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ampdebug.rules import fold
from ampdebug.rules._finding import Finding
from ampdebug.rules._operator_backward import backward_nan, gradients_flushed, update_epsilon, update_rounds_away
from ampdebug.rules._operator_cells import (
    batch_statistics,
    float32_leak,
    level_converted_nothing,
    norm_in_float16,
    pin_lost,
)
from ampdebug.rules._operator_data import bad_inputs, bad_labels, bad_parameters
from ampdebug.rules._operator_flow import Flow
from ampdebug.rules._operator_forward import forward_births, latent_epsilon, masked_rows, pinned, silent_norm
from ampdebug.rules._operator_records import Step

Rule = Callable[[Flow], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    bad_labels,
    bad_parameters,
    bad_inputs,
    batch_statistics,
    pinned,
    masked_rows,
    forward_births,
    silent_norm,
    update_epsilon,
    backward_nan,
    update_rounds_away,
    gradients_flushed,
    pin_lost,
    level_converted_nothing,
    norm_in_float16,
    float32_leak,
    latent_epsilon,
)
"""In the order in which equally severe findings are reported: what explains more comes first."""

_SEVERITY = {"error": 0, "warning": 1, "note": 2}


def judge_step(step: Step, number: int = 1) -> tuple[Finding, ...]:
    """Ask every rule about one step.

    Args:
        step: What was seen.
        number: Its number, from 1.

    Returns:
        Findings, the most explaining first; empty when nothing is wrong.
    """
    flow = Flow(step, number)
    found = [(place, finding) for place, rule in enumerate(RULES) for finding in rule(flow)]
    found.sort(key=lambda item: (_SEVERITY[item[1].severity], item[0]))
    loud = {finding.slug for _, finding in found if finding.severity != "note"}
    found = [item for item in found if item[1].severity != "note" or item[1].slug not in loud]
    return fold(tuple(finding for _, finding in found))
