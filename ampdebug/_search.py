"""The smallest set of items under which a predicate holds, in few calls of the predicate.

This module knows items and a predicate and nothing else: no nets, no operators. One call of the predicate is one
*probe* and is taken to be expensive (a training run), so everything here is about not making a call.

The order of questions is in ``_search_plan``; here they are asked: once each, within a budget, several at a time where
an executor is given, written to a journal, and with an answer whenever it is stopped. What is claimed of an answer
comes from probes alone: it is *sufficient* if it was seen to pass, and an item is *needed* if the rest was seen to
fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal

from ampdebug._errors import AmpdebugError, ArgumentError
from ampdebug._journal import Journal, Outcome
from ampdebug._search_ledger import Ledger
from ampdebug._search_plan import Phase, Question, T, minimal_set_plan, probe_bound

# What executors of other packages raise from a probe whose worker died: Dask's and Ray's. By name, since importing a
# package only to name its exception would make everybody wait for it.
_DEAD_WORKER = frozenset({"KilledWorker", "WorkerCrashedError"})

Status = Literal["complete", "nothing-needed", "nothing-sufficient", "max-probes", "max-seconds", "interrupted"]


@dataclass(frozen=True, slots=True)
class Probe(Generic[T]):
    """One call of the predicate, or one answer taken from the journal.

    Attributes:
        items: The set that was asked about.
        phase: The stage that asked; what was asked ahead by a concurrent search bears the stage it was meant for.
        outcome: What came back.
        seconds: How long it took, in seconds; of a journal's answer, what it took then.
        reused: The answer came from the journal.
    """

    items: frozenset[T]
    phase: Phase
    outcome: Outcome
    seconds: float
    reused: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known after a probe.

    Attributes:
        probes: Calls of the predicate so far (the journal's answers not counted).
        bound: Upper bound for a monotone predicate with as many needed items as are known so far; it grows with them.
        size: Items in the smallest set that passed so far; None before the first.
        seconds: Since the search began.
        seconds_left: ``(bound - probes)`` times the mean time of a probe, at most what ``max_seconds`` leaves.
        phase: The present stage.
    """

    probes: int
    bound: int
    size: int | None
    seconds: float
    seconds_left: float
    phase: Phase


@dataclass(frozen=True, slots=True)
class SearchResult(Generic[T]):
    """The answer of a search, also of one that was stopped.

    Attributes:
        items: The smallest set seen to pass, in ranking order. All items where none was seen to pass.
        status: ``"complete"``: the stages ran to their end. ``"nothing-needed"``: the empty set passes.
            ``"nothing-sufficient"``: not even all items pass. Else why it stopped early.
        sufficient: ``items`` was probed and passed.
        needed: Those of ``items`` without which the rest was probed and failed.
        implied: Those whose need only follows if the predicate is monotone: a larger set without them failed.
        probes: Calls of the predicate.
        verification_probes: How many of them the verify stage made.
        reused: Answers taken from the journal.
        bound: Upper bound of ``probes`` for a monotone, steady predicate with ``len(items)`` needed items.
        seconds: Wall time of the search in seconds.
        history: Every probe in the order in which they were answered, the journal's first.
    """

    items: tuple[T, ...]
    status: Status
    sufficient: bool
    needed: tuple[T, ...]
    implied: tuple[T, ...]
    probes: int
    verification_probes: int
    reused: int
    bound: int
    seconds: float
    history: tuple[Probe[T], ...]

    @property
    def verified(self) -> bool:
        """The set was seen to pass, and to fail without any one of its items."""
        return self.sufficient and len(self.needed) == len(self.items)


def find_minimal_set(
    ranking: Sequence[T],
    predicate: Callable[[frozenset[T]], Outcome | bool],
    *,
    max_probes: int | None = None,
    max_seconds: float | None = None,
    repeats: int = 1,
    noise: float | None = None,
    known: Mapping[frozenset[T], bool] | None = None,
    journal: Journal | None = None,
    key: Callable[[T], str] = str,
    executor: Executor | None = None,
    workers: int = 1,
    failures: tuple[type[BaseException], ...] = (),
    stop: Callable[[], bool] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> SearchResult[T]:
    """Find a smallest set of items under which ``predicate`` holds.

    The answer is 1-minimal: no single item can be left out. The same set is never asked about twice, except for the
    repetitions that ``repeats`` asks for.

    Args:
        ranking: The items, each once, the most suspicious first. A good order saves probes; a bad one costs some, but
            never changes what is proven of the answer.
        predicate: Takes a frozenset of items; True, or an :class:`Outcome` that passed, where they are enough.
        max_probes: Stop before the probe after this many.
        max_seconds: Do not begin a probe later than this after the start. A running probe is not cut short.
        repeats: Odd. Above 1 a verdict is the majority of up to so many calls, and calls end once it is settled.
        noise: Half-width of the measuring noise, in the unit of ``Outcome.margin``. With it only outcomes whose margin
            is at most that far from 0 are repeated; without it, or where an outcome bears no margin, all are.
        known: Verdicts that are known already, which then cost nothing.
        journal: Where probes are written as they come in and taken from on resume.
        key: The name of an item in the journal; the same in every process, and different for different items.
        executor: Probes run there, up to ``workers`` at a time: beside the one the search waits for, those it would
            ask next whichever way the answer falls. It is not shut down. Without it they run in this thread.
        workers: How many probes to keep in flight on ``executor``.
        failures: Exceptions of a probe that count as a failed probe, with their text as the reason. Others propagate.
            With any given, what an executor raises when one worker died under a probe counts too.
        stop: Asked before each probe; True ends the search with the best answer so far. A KeyboardInterrupt does too.
        progress: Called after each probe.

    Raises:
        ArgumentError: An argument breaks a rule, or two items have the same key.
        FormatError: The journal belongs to another search.
        AmpdebugError: The executor broke: the standard library's pools end for good with the first worker that dies.

    Example:
        >>> result = find_minimal_set(range(100), lambda items: {7, 40} <= items)
        >>> result.items, result.verified
        ((7, 40), True)
    """
    if len(set(ranking)) != len(ranking):
        raise ArgumentError("ranking holds an item twice; give each item once")
    if repeats < 1 or repeats % 2 == 0:
        raise ArgumentError(f"repeats={repeats}: must be odd and at least 1, so that a majority exists")
    if max_probes is not None and max_probes < 0:
        raise ArgumentError(f"max_probes={max_probes}: must be at least 0; leave it out for no limit")
    if workers < 1:
        raise ArgumentError(f"workers={workers}: must be at least 1")
    if workers > 1 and executor is None:
        raise ArgumentError(f"workers={workers} needs an executor; give one, e.g. a ProcessPoolExecutor")
    keys = {item: key(item) for item in ranking}
    if len(set(keys.values())) != len(keys):
        raise ArgumentError("key gives two items the same name; the journal could not tell them apart")
    search = _Search(tuple(ranking), predicate, Ledger(repeats, noise, known or {}), journal, keys, failures)
    budget = _Budget(max_probes, max_seconds, stop)
    try:
        return search.run(budget, executor, workers, progress)
    except KeyboardInterrupt:
        return search.result("interrupted", None)


@dataclass(frozen=True, slots=True)
class _Budget:
    max_probes: int | None
    max_seconds: float | None
    stop: Callable[[], bool] | None

    def spent(self, probes: int, seconds: float) -> Status | None:
        if self.stop is not None and self.stop():
            return "interrupted"
        if self.max_probes is not None and probes >= self.max_probes:
            return "max-probes"
        if self.max_seconds is not None and seconds >= self.max_seconds:
            return "max-seconds"
        return None


class _Search(Generic[T]):
    """One running search: the ledger of answers, and the loop that fills it."""

    def __init__(
        self,
        ranking: tuple[T, ...],
        predicate: Callable[[frozenset[T]], Outcome | bool],
        ledger: Ledger[T],
        journal: Journal | None,
        keys: dict[T, str],
        failures: tuple[type[BaseException], ...],
    ) -> None:
        self._ranking, self._predicate, self._ledger = ranking, predicate, ledger
        self._journal, self._keys, self._failures = journal, keys, failures
        self._history: list[Probe[T]] = []
        self._probes = 0
        self._start = time.monotonic()
        if journal is not None:
            items = {name: item for item, name in keys.items()}
            for entry in journal.entries:
                old = frozenset(items[name] for name in entry.keys)
                ledger.add(old, entry.outcome)
                self._history.append(Probe(old, "ends", entry.outcome, entry.seconds, reused=True))

    def result(self, status: Status, answer: tuple[T, ...] | None) -> SearchResult[T]:
        """The answer of the plan, or the best one so far where it was stopped."""
        best = self._ledger.best() if answer is None else frozenset(answer)
        items = frozenset(self._ranking) if best is None else best
        probed, implied = (frozenset[T](), frozenset[T]()) if best is None else self._ledger.needed(items)
        return SearchResult(
            items=tuple(item for item in self._ranking if item in items),
            status=status,
            sufficient=self._ledger.verdict(items) is True,
            needed=tuple(item for item in self._ranking if item in probed),
            implied=tuple(item for item in self._ranking if item in implied),
            probes=self._probes,
            verification_probes=sum(probe.phase == "verify" and not probe.reused for probe in self._history),
            reused=sum(probe.reused for probe in self._history),
            bound=probe_bound(len(self._ranking), len(items)),
            seconds=time.monotonic() - self._start,
            history=tuple(self._history),
        )

    def _progress(self, phase: Phase, budget: _Budget) -> Progress:
        best = self._ledger.best()
        needed = sum(map(len, self._ledger.needed(best))) if best else 0
        bound = max(probe_bound(len(self._ranking), max(1, needed)), self._probes)
        seconds = time.monotonic() - self._start
        left = (bound - self._probes) * seconds / max(1, self._probes)
        if budget.max_seconds is not None:
            left = min(left, max(0.0, budget.max_seconds - seconds))
        return Progress(self._probes, bound, None if best is None else len(best), seconds, left, phase)

    def run(
        self,
        budget: _Budget,
        executor: Executor | None,
        workers: int,
        progress: Callable[[Progress], None] | None,
    ) -> SearchResult[T]:
        plan = minimal_set_plan(self._ranking)
        running: dict[Future[tuple[Outcome | bool, float]], Question[T]] = {}
        question = next(plan)
        try:
            while True:
                verdict = self._ledger.verdict(question.items)
                if verdict is not None:
                    try:
                        question = plan.send(verdict)
                    except StopIteration as end:
                        return self._end(end.value)
                    continue
                stopped = budget.spent(self._probes + len(running), time.monotonic() - self._start)
                if stopped is not None and not running:
                    return self.result(stopped, None)
                if executor is None:
                    self._note(question, *self._failed_or(partial(_timed, self._predicate, question.items)))
                else:
                    if stopped is None:
                        self._submit(executor, workers, running, budget)
                    self._collect(running)
                if progress is not None:
                    progress(self._progress(question.phase, budget))
        finally:
            for future in running:
                future.cancel()

    def _end(self, answer: tuple[T, ...] | None) -> SearchResult[T]:
        if answer is None:
            return self.result("nothing-sufficient", None)
        return self.result("complete" if answer else "nothing-needed", answer)

    def _submit(
        self,
        executor: Executor,
        workers: int,
        running: dict[Future[tuple[Outcome | bool, float]], Question[T]],
        budget: _Budget,
    ) -> None:
        """Fill the free workers: the question the search waits for, then those that may follow, likeliest first."""
        busy = [question.items for question in running.values()]
        for question in self._ahead(workers):
            while busy.count(question.items) < self._ledger.calls_missing(question.items):
                spent = budget.spent(self._probes + len(running), time.monotonic() - self._start)
                if len(running) >= workers or spent is not None:
                    return
                try:
                    future = executor.submit(_timed, self._predicate, question.items)
                except BrokenExecutor as error:
                    raise self._broken(error) from error
                running[future] = question
                busy.append(question.items)

    def _ahead(self, count: int) -> list[Question[T]]:
        """The open question, then the ones after it for either answer, breadth first, ``count`` at most.

        The plan has no state but the verdicts, so an assumed future is just a replay with some verdicts assumed.
        """
        found: dict[frozenset[T], Question[T]] = {}
        futures: list[dict[frozenset[T], bool]] = [{}]
        while futures and len(found) < count:
            assumed = futures.pop(0)
            question = self._replay(assumed)
            if question is not None:
                found.setdefault(question.items, question)
                futures += [{**assumed, question.items: passed} for passed in (False, True)]
        return list(found.values())

    def _replay(self, assumed: Mapping[frozenset[T], bool]) -> Question[T] | None:
        plan = minimal_set_plan(self._ranking)
        try:
            question = next(plan)
            while True:
                verdict = self._ledger.verdict(question.items)
                if verdict is None:
                    verdict = assumed.get(question.items)
                if verdict is None:
                    return question
                question = plan.send(verdict)
        except StopIteration:
            return None

    def _collect(self, running: dict[Future[tuple[Outcome | bool, float]], Question[T]]) -> None:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            self._note(running.pop(future), *self._failed_or(future.result))

    def _failed_or(self, get: Callable[[], tuple[Outcome | bool, float]]) -> tuple[Outcome | bool, float]:
        begin = time.monotonic()
        try:
            return get()
        except Exception as error:
            if isinstance(error, BrokenExecutor):
                raise self._broken(error) from error
            if isinstance(error, self._failures) or (self._failures and type(error).__name__ in _DEAD_WORKER):
                return Outcome(False, None, f"{type(error).__name__}: {error}"), time.monotonic() - begin
            raise

    def _broken(self, error: BrokenExecutor) -> AmpdebugError:
        """Which probe it died of cannot be told from the others that ran, so that none of them is a failed probe."""
        kept = "" if self._journal is None else f"; the {self._probes} answers so far are in {self._journal.path}"
        return AmpdebugError(
            f"the executor broke after {self._probes} probes and takes no more: {error} A pool that replaces a worker "
            f"that died is what workers= makes{kept}"
        )

    def _note(self, question: Question[T], answer: Outcome | bool, seconds: float) -> None:
        outcome = answer if isinstance(answer, Outcome) else Outcome(bool(answer))
        self._probes += 1
        self._ledger.add(question.items, outcome)
        self._history.append(Probe(question.items, question.phase, outcome, seconds, reused=False))
        if self._journal is not None:
            self._journal.append([self._keys[item] for item in question.items], outcome, seconds)


def _timed(predicate: Callable[[frozenset[T]], Outcome | bool], items: frozenset[T]) -> tuple[Outcome | bool, float]:
    """Module-level, so that a process pool can pickle it."""
    begin = time.monotonic()
    answer = predicate(items)
    return answer, time.monotonic() - begin
