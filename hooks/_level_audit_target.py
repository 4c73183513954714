"""``ampdebug audit``: the audit of what the command line names, perhaps against another level or another network."""

from __future__ import annotations

from functools import partial

from ampdebug._audit import AuditReport
from ampdebug._audit_diff import AuditDiff
from ampdebug._audit_records import Mode
from ampdebug._errors import ArgumentError
from ampdebug._target import executed, load_target
from ampdebug.hooks._level_audit import audit
from ampdebug.hooks._preflight import LEVELS, Level


def audit_target(
    target: str, *, level: Level = "O2", against: str | None = None, mode: Mode = "pynative", backward: bool = True
) -> tuple[AuditReport, AuditDiff | None]:
    """Runs ``audit`` on what a name on the command line stands for.

    Args:
        target: ``"package.module:name"`` or ``"path/file.py:name"`` of a Workload, or of a function without arguments
            that returns one, ``(net, inputs)`` or ``(net, inputs, loss_fn)``.
        level: The AMP level.
        against: Another level, or another target at the same level; None for none.
        mode: ``"pynative"`` or ``"graph"``.
        backward: Make a backward pass too.

    Returns:
        The report, and what changes from ``against`` to it.

    Raises:
        ArgumentError: There is no such module, file or name, or it gives something else.
        AmpdebugError: The user's own code raised; its traceback went to stderr.
    """
    report = _audited(target, level, mode, backward)
    if against is None:
        return report, None
    if against in LEVELS:
        other = _audited(target, against, mode, backward)
    elif ":" in against:
        other = _audited(against, level, mode, backward)
    else:
        raise ArgumentError(f"--against {against}: must be a level ({', '.join(LEVELS)}) or MODULE:FACTORY")
    return report, other.diff(report)


def _audited(target: str, level: Level, mode: Mode, backward: bool) -> AuditReport:
    named = load_target(target)
    report: AuditReport = executed(partial(audit, named, level=level, mode=mode, backward=backward), target)
    return report
