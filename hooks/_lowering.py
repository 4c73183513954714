"""The other direction: what a level leaves in float32, rounded to 16 bits by force."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, value_and_grad

from ampdebug._sites import OperatorCall, OperatorSite, SiteScore, is_cast, is_transparent
from ampdebug.hooks._emulate import _KEEP_FLOAT32_OPERANDS, _Scoring
from ampdebug.hooks._interpose import interpose
from ampdebug.hooks._protect import Policy
from ampdebug.hooks._sites import PathOf, SiteTracker


def kept_in_float32(calls: Iterable[OperatorCall], policy: Policy) -> list[OperatorCall]:
    """One call of each site that computes in float32 under the level, in order of execution."""
    found: dict[OperatorSite, OperatorCall] = {}
    for call in calls:
        site = call.site
        if site is None or call.compiled or is_cast(call.operator) or is_transparent(call.operator):
            continue
        if site not in policy.own_low and policy.computes_in_float32(site, call.inputs):
            found.setdefault(site, call)
    return list(found.values())


def lowered(policy: Policy, sites: Collection[OperatorSite], low: str) -> Policy:
    """A policy that runs these sites in 16 bits too, inputs and outputs, and the others as it was.

    Args:
        policy: What the level does.
        sites: Sites that it leaves in float32.
        low: ``"float16"`` or ``"bfloat16"``.
    """

    def narrow(dtypes: tuple[str, ...], how_many: int) -> tuple[str, ...]:
        return tuple(low if name == "float32" and k < how_many else name for k, name in enumerate(dtypes))

    outputs = {}
    for site, seen in policy.outputs.items():
        # A normalisation's statistics and parameters are float32 in every format: only what is normalised is rounded.
        count = 1 if site.operator in _KEEP_FLOAT32_OPERANDS else 1_000_000
        outputs[site] = {narrow(i, count): narrow(o, count) for i, o in seen.items()} if site in sites else seen
    return Policy(outputs, policy.own_low)


class _EmulatedScoring(_Scoring):
    """Rounds around float32 kernels: an operator that a level keeps in float32 may have no other."""

    def __init__(self, tracker: SiteTracker, policy: Policy, low: Any, alphas: list[Parameter] | None) -> None:
        super().__init__(tracker, policy, low, alphas)
        self._kernel = False


def score_lowered_sites(
    network: nn.Cell, path_of: PathOf, policy: Policy, low: Any, loss: Callable[[], Tensor]
) -> dict[OperatorSite, SiteScore]:
    """``score_sites`` without 16-bit kernels."""
    dry = _EmulatedScoring(SiteTracker(network, path_of), policy, low, None)
    with interpose(dry):
        loss()
    alphas = [
        Parameter(Tensor(np.zeros(shape, np.float32)), name=f"ampdebug_alpha_{i}") for i, shape in enumerate(dry.shapes)
    ]
    scores = dict(dry.seen)
    if alphas:
        scoring = _EmulatedScoring(SiteTracker(network, path_of), policy, low, alphas)
        with interpose(scoring):
            _, gradients = value_and_grad(loss, None, ParameterTuple(alphas))()
        for site, gradient in zip(scoring.sites, gradients, strict=True):
            added = float(np.linalg.norm(gradient.asnumpy().astype(np.float64)))
            scores[site] = replace(scores[site], score=math.hypot(scores[site].score, added))
    return scores
