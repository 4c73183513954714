"""The other direction: what a level leaves in float32, rounded to 16 bits by force."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ampdebug._sites import OperatorCall, OperatorSite, is_cast, is_transparent
from ampdebug.hooks._emulate import KEEP_FLOAT32_OPERANDS
from ampdebug.hooks._protect import Policy


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
        count = 1 if site.operator in KEEP_FLOAT32_OPERANDS else 1_000_000
        outputs[site] = {narrow(i, count): narrow(o, count) for i, o in seen.items()} if site in sites else seen
    return Policy(outputs, policy.own_low)
