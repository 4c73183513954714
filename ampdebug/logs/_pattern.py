"""A user's own pattern (``--pattern``), with guards against regular expressions that never end.

Three guards: patterns whose repeats are nested are refused before anything is read; a line is looked at no further than
``PATTERN_LINE_LIMIT`` bytes; and where the platform has interval timers and this is the main thread, a match that takes
longer than ``PATTERN_SECONDS`` is stopped and reported. (Python's matcher checks for signals while it works.)
"""

from __future__ import annotations

import re
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ampdebug._errors import ArgumentError
from ampdebug.logs._format import LogFormat

with warnings.catch_warnings():
    # The parser of regular expressions has no public name; its tree is the only sound way to see nested repeats.
    warnings.simplefilter("ignore", DeprecationWarning)
    try:
        from re import _parser as _sre  # type: ignore[attr-defined]
    except ImportError:  # Python 3.10
        import sre_parse as _sre

PATTERN_LINE_LIMIT = 2048
PATTERN_SECONDS = 1.0
GROUPS = ("step", "loss", "scale", "overflow", "grad_norm", "lr", "rank", "epoch")


def user_format(pattern: str) -> LogFormat:
    """A row of the format table made from a user's pattern.

    Args:
        pattern: A regular expression with named groups out of ``GROUPS``; at least ``loss``, ``scale`` or ``overflow``.

    Raises:
        ArgumentError: It does not compile, has unknown or no useful groups, or nests unbounded repeats.
    """
    try:
        compiled = re.compile(pattern.encode())
        tree = _sre.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ArgumentError(f"pattern={pattern!r} is not a regular expression: {error}") from error
    names = set(compiled.groupindex)
    unknown = sorted(names - set(GROUPS))
    if unknown:
        raise ArgumentError(
            f"pattern={pattern!r} has the named groups {unknown}, which mean nothing here; use {', '.join(GROUPS)}"
        )
    if not names & {"loss", "scale", "overflow", "grad_norm"}:
        raise ArgumentError(
            f"pattern={pattern!r} reads nothing that can be judged; name a group loss, scale, overflow or grad_norm, "
            r"as in (?P<loss>\S+)"
        )
    if _nested(tree, inside=False):
        raise ArgumentError(
            f"pattern={pattern!r} repeats something that is itself repeated without bound, which can take for ever; "
            "write it without the inner or the outer repeat"
        )
    return LogFormat(
        "pattern", "your own pattern", b"", compiled, sample=(), traps=("Read by your own pattern.",), strict=False
    )


def _nested(tree: Any, *, inside: bool) -> bool:
    """Whether an unbounded (or long) repeat stands inside another one."""
    for op, argument in tree:
        name = str(op)
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            _, high, body = argument
            unbounded = int(high) > 64
            if unbounded and inside:
                return True
            if _nested(body, inside=inside or unbounded):
                return True
        elif name == "BRANCH":
            # Branches under a repeat may match the same text in two ways, which multiplies just like nested repeats.
            if inside:
                return True
            if any(_nested(branch, inside=inside) for branch in argument[1]):
                return True
        elif name == "SUBPATTERN":
            if _nested(argument[-1], inside=inside):
                return True
        elif name in ("ASSERT", "ASSERT_NOT"):
            if _nested(argument[1], inside=inside):
                return True
        elif name in ("ATOMIC_GROUP",):
            if _nested(argument, inside=inside):
                return True
        elif name == "GROUPREF_EXISTS" and any(
            part is not None and _nested(part, inside=inside) for part in argument[1:]
        ):
            return True
    return False


class _TooLong(Exception):
    pass


class Deadline:
    """Stops single matches that take too long; see the module's docstring."""

    def __init__(self) -> None:
        self.active = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
        self.slow_lines = 0
        self._spent = 0.0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While reading: the alarm of this process is ours; what was there before is put back."""
        if not self.active:
            yield
            return

        def stop(signum: int, frame: Any) -> None:
            raise _TooLong

        before = signal.signal(signal.SIGALRM, stop)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)

    def read(self, row: LogFormat, line: bytes) -> dict[str, Any] | None:
        """``row.read(line)``, or None when it took too long.

        Raises:
            ArgumentError: Three lines took too long, or single lines take so long that reading makes no sense.
        """
        line = line[:PATTERN_LINE_LIMIT]
        begin = time.perf_counter()
        if self.active:
            signal.setitimer(signal.ITIMER_REAL, PATTERN_SECONDS)
        try:
            return row.read(line)
        except _TooLong:
            self.slow_lines += 1
        finally:
            if self.active:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
            if time.perf_counter() - begin > PATTERN_SECONDS:
                self._spent += 1.0
        if self.slow_lines >= 3 or self._spent >= 3.0:
            raise ArgumentError(
                f"pattern={row.pattern.pattern.decode()!r} took over {PATTERN_SECONDS:g} s on three lines; make it "
                "start with fixed text and use fewer .* in a row"
            )
        return None
