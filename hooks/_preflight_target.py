"""``ampdebug check``: one instrumented step of what the command line names."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ampdebug._errors import ArgumentError
from ampdebug._target import executed, load_target
from ampdebug._workload import Workload
from ampdebug.hooks._preflight import Level, check

if TYPE_CHECKING:
    from ampdebug._diagnose import Diagnosis


def check_target(target: str, *, level: Level | None = None) -> Diagnosis:
    """Runs ``check`` on what a function makes.

    Args:
        target: ``"package.module:factory"`` or ``"path/file.py:factory"``. The function is called without arguments and
            returns ``(net, inputs)``, ``(net, inputs, loss_fn)`` or ``(net, inputs, loss_fn, optimizer)``; or a
            ``Workload``, or a function that returns one, of which the first batch is taken.
        level: The AMP level to convert the network to.

    Raises:
        ArgumentError: There is no such module, file or function, or it gives something else.
        AmpdebugError: The user's own code raised; its traceback went to stderr.
    """
    named = load_target(target)
    if not callable(named) and not isinstance(named, Workload):
        raise ArgumentError(f"{target} is a {type(named).__name__}; it must be a function or an ampdebug.Workload")
    found: Diagnosis = executed(partial(check, named, level=level), target)
    return found
