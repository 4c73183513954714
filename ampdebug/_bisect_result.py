"""The answer of a bisection."""

from __future__ import annotations

import html
import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ampdebug._search import Probe
from ampdebug._sites import OperatorSite, SiteScore

BisectStatus = Literal[
    "found", "nothing-to-find", "precision-innocent", "not-found", "max-probes", "max-seconds", "interrupted"
]

_SENTENCES: dict[BisectStatus, str] = {
    "found": "Kept in float32, these are enough, and each of them is needed.",
    "nothing-to-find": "The network passes under the level as it is: there is nothing to find.",
    "precision-innocent": "The network fails in float32 too: precision is not the cause.",
    "not-found": "Not even all known operators kept in float32 are enough; the notes say what could not be reached.",
    "max-probes": "Stopped at max_probes: this is the smallest set seen to pass; what is marked so is known of it.",
    "max-seconds": "Stopped at max_seconds: this is the smallest set seen to pass; what is marked so is known of it.",
    "interrupted": "Interrupted: this is the smallest set seen to pass; what is marked so is known of it.",
}


@dataclass(frozen=True, slots=True)
class Unit:
    """What the search moves between 16 bits and float32 as one: an operator, or all those of one cell.

    Attributes:
        name: Different for different units and the same in every run.
        sites: Its operator sites.
        operator: ``"Exp"``, or with the reshapes before it ``"Reshape → ReduceMean"``; the cell type for a cell.
        path: Cell path.
        file: Full path of the source file, ``""`` where unknown.
        line: ``"net.py:33"``, ``""`` where unknown.
        source: Text of that line.
    """

    name: str
    sites: tuple[OperatorSite, ...]
    operator: str
    path: str
    file: str = ""
    line: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was made sure of before the search.

    Attributes:
        name: What.
        passed: It holds. None: it could not be checked here, and ``detail`` says why.
        detail: What was seen, with numbers.
    """

    name: str
    passed: bool | None
    detail: str


@dataclass(frozen=True, slots=True)
class Culprit:
    """One unit of the answer.

    Attributes:
        unit: The unit.
        rank: Its place in the ranking, from 1.
        score: What its rounding does, where the ranking saw it.
        share: Its part of the ranking's total score, from 0 to 1; None where a score is infinite or unknown.
        needed: ``"verified"``: without it the rest was probed and failed. ``"implied"``: follows if more float32 never
            hurts. ``"unknown"``: the search was stopped before.
    """

    unit: Unit
    rank: int
    score: SiteScore | None
    share: float | None
    needed: Literal["verified", "implied", "unknown"]


@dataclass(frozen=True, slots=True)
class BisectResult:
    """The smallest set of units that must stay in float32. ``str()`` is the report.

    Attributes:
        status: What kind of answer it is.
        culprits: The units, in ranking order.
        sufficient: With them in float32 the network was probed and passed.
        level: The level that was searched.
        mode: ``"real"``: probes ran the level's own kernels. ``"emulated"``: they ran the float32 network with the
            level's rounding.
        criterion: What counts as good, in words with numbers.
        reference: What float32 measured.
        low: What the level measured.
        noise: The largest difference between repetitions of the same measurement.
        units: How many units there were to choose from.
        probes: Measurements the search made.
        bound: The most it would make for so many culprits if more float32 never hurts.
        reused: Answers taken from the journal.
        seconds: Wall time of the search in seconds.
        checks: What was made sure of before.
        notes: What could not be reached or seen.
        history: Every probe.
    """

    status: BisectStatus
    culprits: tuple[Culprit, ...]
    sufficient: bool
    level: str
    mode: Literal["real", "emulated"]
    criterion: str
    reference: float
    low: float
    noise: float
    units: int
    probes: int
    bound: int
    reused: int
    seconds: float
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    history: tuple[Probe[Unit], ...]

    @property
    def sites(self) -> tuple[OperatorSite, ...]:
        """All operator sites of the answer."""
        return tuple(site for culprit in self.culprits for site in culprit.unit.sites)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; non-finite numbers as text."""
        data = {name: getattr(self, name) for name in self.__slots__ if name not in ("culprits", "history", "checks")}
        data["culprits"] = [
            {**asdict(c), "why": "" if c.score is None else c.score.why, "unit": asdict(c.unit)} for c in self.culprits
        ]
        data["checks"] = [asdict(check) for check in self.checks]
        data["history"] = [
            {
                "units": sorted(unit.name for unit in probe.items),
                "phase": probe.phase,
                **asdict(probe.outcome),
                "seconds": probe.seconds,
                "reused": probe.reused,
            }
            for probe in self.history
        ]
        plain: dict[str, Any] = json.loads(json.dumps(_finite(data)))
        return plain

    def __str__(self) -> str:
        lines = [f"{self.level}: {_SENTENCES[self.status]}"]
        if self.culprits:
            lines += ["", *_table(self._rows())]
        lines += ["", f"good: {self.criterion}"]
        lines.append(f"float32 {self.reference:.6g}, {self.level} {self.low:.6g}, noise {self.noise:.2g}")
        if self.bound:
            reused = f" and {self.reused} from the journal" if self.reused else ""
            lines.append(
                f"{self.probes} probes{reused} (at most {self.bound}) over {self.units} units in {self.seconds:.1f} s, "
                f"{self.mode} arithmetic"
            )
        word = {True: "ok", False: "FAILED", None: "not checked"}
        lines += [f"check {check.name}: {word[check.passed]} ({check.detail})" for check in self.checks]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("rank", "operator", "cell", "at", "source", "why", "share", "needed")]
        for culprit in self.culprits:
            unit, score = culprit.unit, culprit.score
            share = "" if culprit.share is None else f"{culprit.share:.0%}"
            what = (str(culprit.rank), unit.operator, unit.path or "(root)", unit.line, unit.source)
            rows.append((*what, "" if score is None else score.why, share, culprit.needed))
        return rows


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
