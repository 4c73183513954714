"""From a network that fails under a level to the operators that must stay in float32.

The framework's side is a :class:`PrecisionBackend`; this side asks it, judges what it measures, and searches. The
order: record what runs in what, check that the tools change nothing they should not, measure both ends twice, rank,
search.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ampdebug._bisect_result import DETERMINISTIC, BisectResult, BisectStatus, Check, Culprit, Origin, Unit
from ampdebug._errors import AmpdebugError, ArgumentError
from ampdebug._journal import Journal, Outcome
from ampdebug._search import Progress, SearchResult, find_minimal_set
from ampdebug._sites import OperatorSite, SiteScore

Better = Literal["higher", "lower"]

RELATIVE_TOLERANCE = 0.02
"""Without ``tolerance`` a value may be worse than the float32 one by this part of it."""


class PrecisionBackend(Protocol):
    """A network under a level, as a framework lets us run it.

    Every measurement starts from the same state and is what the user's ``evaluate`` returned: a number, or True for
    good.
    """

    level: str
    mode: Literal["real", "emulated"]

    def record(self) -> Sequence[Unit]:
        """One pass under the level; the units that could be kept in float32, in order of execution."""

    def notes(self) -> Sequence[str]:
        """What cannot be seen or reached, one sentence each; after ``record``."""

    def checks(self) -> Sequence[Check]:
        """That recording and protecting change what they should and nothing else; after ``record``."""

    def measure_reference(self) -> float | bool:
        """The network in float32, without the level."""

    def measure_plain(self) -> float | bool:
        """The network under the level, as the user runs it."""

    def measure(self, protected: frozenset[OperatorSite]) -> float | bool:
        """The network under the level with these sites in float32."""

    def rank(self) -> Mapping[OperatorSite, SiteScore]:
        """What the rounding of each site does, in the state in which the level fails; after ``measure_reference``."""

    def identity(self) -> Mapping[str, Any]:
        """What must be equal for an old measurement to hold."""


@dataclass(frozen=True, slots=True)
class Criterion:
    """What counts as good.

    Attributes:
        limit: A value passes up to here.
        better: Which side of it passes.
        words: The same for a reader.
    """

    limit: float
    better: Better
    words: str

    def judge(self, value: float | bool) -> Outcome:
        """Not a number never passes; True and False stand for themselves."""
        if isinstance(value, bool):
            return Outcome(value)
        if math.isnan(value):
            return Outcome(False, None, "not a number")
        margin = value - self.limit if self.better == "higher" else self.limit - value
        return Outcome(margin >= 0, margin)

    @staticmethod
    def beside(
        reference: float | bool,
        noise: float,
        tolerance: float | None,
        threshold: float | None,
        better: Better,
        what: str = "",
    ) -> Criterion:
        """From the user's choices and the float32 measurement; ``what`` is measured."""
        if isinstance(reference, bool):
            return Criterion(0.5, "higher", what or "evaluate returns True")
        sign = {"higher": ">=", "lower": "<="}[better]
        what = what or "evaluate"
        if threshold is not None:
            return Criterion(threshold, better, f"{what} {sign} {threshold:.6g}")
        given = tolerance is not None
        allowed = tolerance if tolerance is not None else max(3 * noise, RELATIVE_TOLERANCE * abs(reference))
        limit = reference - allowed if better == "higher" else reference + allowed
        origin = "tolerance" if given else f"the larger of 3 x noise and {RELATIVE_TOLERANCE:.0%} of it"
        return Criterion(limit, better, f"{what} {sign} {limit:.6g} (float32 {reference:.6g}, {origin} {allowed:.3g})")


@dataclass(frozen=True, slots=True)
class _Ends:
    reference: tuple[float | bool, float | bool]
    plain: tuple[float | bool, float | bool]

    @property
    def noise(self) -> float:
        spread = [abs(float(a) - float(b)) for a, b in (self.reference, self.plain)]
        return max((s for s in spread if math.isfinite(s)), default=0.0)


def bisect_backend(
    backend: PrecisionBackend,
    *,
    tolerance: float | None = None,
    threshold: float | None = None,
    better: Better = "higher",
    what: str = "",
    max_probes: int | None = None,
    max_seconds: float | None = None,
    repeats: int | None = None,
    journal: str | os.PathLike[str] | None = None,
    executor: Executor | None = None,
    workers: int = 1,
    failures: tuple[type[BaseException], ...] = (),
    predicate_of: Callable[[Criterion], Callable[[frozenset[Unit]], Outcome]] | None = None,
    progress: Callable[[Progress], None] | None = None,
    ranked: Callable[[Sequence[Unit], Mapping[OperatorSite, SiteScore]], None] | None = None,
    origin: Callable[[Criterion, tuple[OperatorSite, ...]], Origin] | None = None,
) -> BisectResult:
    """Find the smallest set of units that must stay in float32.

    Args:
        backend: The network under its level.
        tolerance: How much worse than float32 a good value may be, in the unit of ``evaluate``. Without it 2 % of the
            float32 value, or three times the noise if that is more.
        threshold: An absolute limit instead.
        better: Which way ``evaluate`` improves.
        what: What is measured, for the report; ``""`` for a function of the user's.
        max_probes, max_seconds, executor, workers, failures, progress: See ``find_minimal_set``.
        repeats: Measure what lies within the noise of the limit up to so often and take the majority. Without it 3
            where the ends differed between their two measurements, else 1.
        journal: A file that lets a killed search go on.
        predicate_of: Makes what measures and judges a set; with an executor something that can be sent there. Without
            it the backend itself measures.
        ranked: Is given the ranking before the search.
        origin: Given what counts as good and the sites of the answer, makes what the result's fix is measured with.

    Raises:
        ArgumentError: An argument breaks a rule.
        AmpdebugError: A check failed, so that the search could not be trusted; the message says which.
    """
    if tolerance is not None and threshold is not None:
        raise ArgumentError(f"tolerance={tolerance} and threshold={threshold} contradict each other; give one")
    if tolerance is not None and not tolerance >= 0:
        raise ArgumentError(f"tolerance={tolerance}: must be at least 0")
    if better not in ("higher", "lower"):
        raise ArgumentError(f"better={better!r}: must be 'higher' or 'lower'")
    units = list(backend.record())
    checks = tuple(backend.checks())
    broken = next((check for check in checks if check.passed is False), None)
    if broken is not None:
        raise AmpdebugError(f"the search could not be trusted, since a check failed: {broken.name} ({broken.detail})")
    ends = _measured(backend, checks)
    criterion = Criterion.beside(ends.reference[0], ends.noise, tolerance, threshold, better, what)

    def answer(status: BisectStatus, search: SearchResult[Unit] | None, culprits: tuple[Culprit, ...]) -> BisectResult:
        return BisectResult(
            status=status,
            culprits=culprits,
            sufficient=search is not None and search.sufficient,
            level=backend.level,
            mode=backend.mode,
            criterion=criterion.words,
            reference=float(ends.reference[0]),
            low=float(ends.plain[0]),
            noise=ends.noise,
            units=len(units),
            probes=search.probes if search else 0,
            bound=search.bound if search else 0,
            reused=search.reused if search else 0,
            seconds=search.seconds if search else 0.0,
            checks=checks,
            notes=tuple(backend.notes()),
            history=search.history if search else (),
            origin=origin(criterion, _sites(culprits)) if origin is not None and culprits else None,
        )

    if not any(criterion.judge(value).passed for value in ends.reference):
        return answer("precision-innocent", None, ())
    if all(criterion.judge(value).passed for value in ends.plain):
        return answer("nothing-to-find", None, ())
    scores = backend.rank()
    ranking = sorted(units, key=lambda unit: -_total(unit, scores))  # stable: equals stay in order of execution
    if ranked is not None:
        ranked(ranking, scores)
    identity = {**backend.identity(), "criterion": criterion.words}
    names = [unit.name for unit in units]
    log = None if journal is None else Journal(journal, identity=identity, keys=names)
    steady = ends.noise == 0.0 and ends.reference[0] == ends.reference[1]
    try:
        search = find_minimal_set(
            ranking,
            _Predicate(backend, criterion) if predicate_of is None else predicate_of(criterion),
            max_probes=max_probes,
            max_seconds=max_seconds,
            repeats=repeats if repeats is not None else 1 if steady else 3,
            noise=None if isinstance(ends.reference[0], bool) else 3 * ends.noise,
            known={frozenset(): False},
            journal=log,
            key=lambda unit: unit.name,
            executor=executor,
            workers=workers,
            failures=failures,
            progress=progress,
        )
    finally:
        if log is not None:
            log.close()
    return answer(_status(search), search, _culprits(search, ranking, scores))


def _measured(backend: PrecisionBackend, checks: Sequence[Check]) -> _Ends:
    """Measures both ends twice.

    Where a pass under the level repeats bitwise and the float32 evaluation gave the same number twice, nothing is left
    that could make the evaluation under the level another one: one measurement of it is enough. True and False are too
    coarse to show that.
    """
    first, second = backend.measure_reference(), backend.measure_reference()
    plain = backend.measure_plain()
    repeats = any(check.name == DETERMINISTIC and check.passed for check in checks)
    once = repeats and first == second and not isinstance(first, bool)
    return _Ends((first, second), (plain, plain if once else backend.measure_plain()))


@dataclass(frozen=True, slots=True)
class _Predicate:
    backend: PrecisionBackend
    criterion: Criterion

    def __call__(self, units: frozenset[Unit]) -> Outcome:
        return self.criterion.judge(self.backend.measure(frozenset(site for unit in units for site in unit.sites)))


def _sites(culprits: tuple[Culprit, ...]) -> tuple[OperatorSite, ...]:
    return tuple(site for culprit in culprits for site in culprit.unit.sites)


def _status(search: SearchResult[Unit]) -> BisectStatus:
    if search.status in ("nothing-sufficient", "nothing-needed"):
        return "not-found"
    return "found" if search.status == "complete" else search.status  # type: ignore[return-value] # the rest are equal


def _total(unit: Unit, scores: Mapping[OperatorSite, SiteScore]) -> float:
    return max((scores[site].score for site in unit.sites if site in scores), default=0.0)


def _culprits(
    search: SearchResult[Unit], ranking: Sequence[Unit], scores: Mapping[OperatorSite, SiteScore]
) -> tuple[Culprit, ...]:
    if not search.sufficient:
        return ()
    total = sum(score.score for score in scores.values())
    found = []
    for rank, unit in enumerate(ranking, start=1):
        if unit in search.items:
            own = [scores[site] for site in unit.sites if site in scores]
            worst = max(own, key=lambda score: score.score, default=None)
            share = sum(score.score for score in own) / total if own and 0 < total < math.inf else None
            needed: Literal["verified", "implied", "unknown"] = (
                "verified" if unit in search.needed else "implied" if unit in search.implied else "unknown"
            )
            found.append(Culprit(unit, rank, worst, share, needed))
    return tuple(found)
