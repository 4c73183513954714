"""Overflow messages that every process prints: how many processes there are, and what is left when each counts once."""

from __future__ import annotations

import math

from ampdebug.rules._history import History, Record


class Copies:
    """Watches the lengths of runs of equal messages.

    Messages that every one of N processes prints come in runs of N. A growth of the scale between two overflows also
    makes equal neighbours, but then the lengths of the runs have no common divisor.
    """

    def __init__(self) -> None:
        self._last: tuple[object, ...] | None = None
        self._length = 0
        self._runs = 0
        self._divisor = 0

    def see(self, message: tuple[object, ...]) -> None:
        """Take in what identifies the next message."""
        if message == self._last:
            self._length += 1
        else:
            self._end()
            self._last, self._length = message, 1

    def _end(self) -> None:
        if self._length:
            self._runs += 1
            self._divisor = math.gcd(self._divisor, self._length)
            self._length = 0

    def drop(self, history: History) -> None:
        """Keep one of each N equal messages, where there are N processes."""
        self._end()
        copies = self._divisor
        if copies < 2 or self._runs < 3:
            return
        kept: list[Record] = []
        turn = 0
        for record in history.records:
            if record.between:
                turn += 1
                if turn % copies != 1:
                    continue
            kept.append(record)
        history.totals.overflows //= copies
        history.records = kept
        history.facts["processes"] = copies
