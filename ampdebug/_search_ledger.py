"""What a search knows: every outcome by set, the verdicts that follow, and what they prove of the best set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic

from ampdebug._journal import Outcome
from ampdebug._search_plan import T


class Ledger(Generic[T]):
    """Outcomes by set. A verdict is one outcome, or the majority of ``repeats``, or known beforehand.

    Args:
        repeats: Odd; how many outcomes a verdict is at most taken from.
        noise: An outcome whose margin is farther from 0 than this settles the verdict alone; None: none does.
        known: Verdicts given beforehand.
    """

    def __init__(self, repeats: int, noise: float | None, known: Mapping[frozenset[T], bool]) -> None:
        self._repeats, self._noise, self._known = repeats, noise, dict(known)
        self._outcomes: dict[frozenset[T], list[Outcome]] = {}

    def add(self, items: frozenset[T], outcome: Outcome) -> None:
        """Note one more outcome for a set."""
        self._outcomes.setdefault(items, []).append(outcome)

    def verdict(self, items: frozenset[T]) -> bool | None:
        """The settled answer for a set, None where another call is needed."""
        if items in self._known:
            return self._known[items]
        outcomes = self._outcomes.get(items, [])
        if not outcomes:
            return None
        first = outcomes[0]
        clear = self._noise is not None and first.margin is not None and abs(first.margin) > self._noise
        if self._repeats == 1 or clear:
            return first.passed
        passes = sum(outcome.passed for outcome in outcomes)
        majority = self._repeats // 2 + 1
        if passes >= majority:
            return True
        return False if len(outcomes) - passes >= majority else None

    def calls_missing(self, items: frozenset[T]) -> int:
        """How many calls are certainly needed until the verdict on an unsettled set can be settled."""
        outcomes = self._outcomes.get(items, [])
        if self._noise is not None and not outcomes:
            return 1  # the first margin decides whether there is a second call
        passes = sum(outcome.passed for outcome in outcomes)
        return self._repeats // 2 + 1 - max(passes, len(outcomes) - passes)

    def best(self) -> frozenset[T] | None:
        """The smallest set seen to pass."""
        return min((items for items, passed in self._verdicts() if passed), key=len, default=None)

    def needed(self, best: frozenset[T]) -> tuple[frozenset[T], frozenset[T]]:
        """Items of ``best`` that are needed: as probed one by one, and as follows if the predicate is monotone."""
        probed: set[T] = set()
        implied: set[T] = set()
        for items, passed in self._verdicts():
            left_out = best - items
            if not passed and len(left_out) == 1:
                (probed if items < best else implied).update(left_out)
        return frozenset(probed), frozenset(implied - probed)

    def _verdicts(self) -> Iterator[tuple[frozenset[T], bool]]:
        for items in {**self._known, **self._outcomes}:
            verdict = self.verdict(items)
            if verdict is not None:
                yield items, verdict
