"""``ampdebug check``: one instrumented step of what the command line names."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ampdebug._target import executed, load_factory
from ampdebug.hooks._preflight import Level, check

if TYPE_CHECKING:
    from ampdebug._diagnose import Diagnosis


def check_target(target: str, *, level: Level | None = None) -> Diagnosis:
    """Runs ``check`` on what a function makes.

    Args:
        target: ``"package.module:factory"`` or ``"path/file.py:factory"``. The function is called without arguments and
            returns ``(net, inputs)``, ``(net, inputs, loss_fn)`` or ``(net, inputs, loss_fn, optimizer)``.
        level: The AMP level to convert the network to.

    Raises:
        ArgumentError: There is no such module, file or function, or it gives something else.
        AmpdebugError: The user's own code raised; its traceback went to stderr.
    """
    found: Diagnosis = executed(partial(check, load_factory(target), level=level), target)
    return found
