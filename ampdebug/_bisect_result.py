"""The answer of a bisection."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ampdebug._errors import ArgumentError
from ampdebug._search import Probe
from ampdebug._sites import OperatorSite, SiteScore

if TYPE_CHECKING:
    from ampdebug._patch import Patch, PatchSite

BisectStatus = Literal[
    "found", "nothing-to-find", "precision-innocent", "not-found", "max-probes", "max-seconds", "interrupted"
]

SENTENCES: dict[BisectStatus, str] = {
    "found": "Kept in float32, these are enough, and each of them is needed.",
    "nothing-to-find": "The network passes under the level as it is: there is nothing to find.",
    "precision-innocent": "The network fails in float32 too: precision is not the cause.",
    "not-found": "Not even all known operators kept in float32 are enough; notes, if any, say what was not reached.",
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


DETERMINISTIC = "deterministic"
"""Name of the check that one forward and backward pass, in float32 and under the level, repeats bitwise."""


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


RunMode = Literal["pynative", "graph"]


class Origin(Protocol):
    """How a result was measured, so that its fix can be measured in the same way."""

    def patch_sites(self) -> tuple[PatchSite, ...]:
        """The operators of the answer, by the user's own lines."""

    def apply(self, network: Any) -> Any:
        """See ``BisectResult.apply``."""

    def confirm(self, mode: RunMode, timeout: float | None) -> Check:
        """Measures a fresh network with the cells pinned."""

    def verify(
        self, before: Mapping[str, str], after: Mapping[str, str], mode: RunMode, timeout: float | None
    ) -> tuple[bool | None, str]:
        """Measures the network made from changed sources."""


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
        confirmations: What :meth:`confirm` measured.
        origin: How it was measured; None in a result that was made without a network. Not part of ``to_dict``.
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
    confirmations: tuple[Check, ...] = ()
    origin: Origin | None = field(default=None, repr=False, compare=False)

    @property
    def sites(self) -> tuple[OperatorSite, ...]:
        """All operator sites of the answer."""
        return tuple(site for culprit in self.culprits for site in culprit.unit.sites)

    # --- the fix -----------------------------------------------------------------------------------------------------

    def apply(self, net: Any) -> Any:
        """A network under the level with the cells of the culprits in float32, to train or to run in either mode.

        The search moves single operators, which takes Python around each of them; this pins whole cells by MindSpore's
        own flags, which compiles. It protects what the search found and whatever else those cells compute themselves,
        not their children.

        Args:
            net: A fresh network at O0, made as the one that was searched: it is converted here, in place, as
                ``amp.auto_mixed_precision`` does. Or one converted at the same level (not O1, whose rewritten code
                takes no pins) that has not run yet. A pin set before O2 or O3 converts is lost, so a network is never
                pinned first.

        Returns:
            The network to use in its place.

        Raises:
            ArgumentError: There is no answer to apply, the network is under another level, or has no such cells.
        """
        return self._needed("apply").apply(net)

    def patch(self, *, verify: bool = True, mode: RunMode = "pynative", timeout: float | None = None) -> Patch:
        """The change to your own source that keeps exactly the culprits in float32.

        Args:
            verify: Run the changed source under the level, without ampdebug's hand in it, by the search's own
                ``evaluate``. Your files are not touched.
            mode: Run it in ``"pynative"`` or ``"graph"`` mode: give the one you train in.
            timeout: Seconds for a run in a process of its own (graph mode).

        Returns:
            The patch; ``print`` shows it, ``patch.write()`` changes the files.

        Raises:
            ArgumentError: There is no answer to patch.
            AmpdebugError: libcst is missing.
        """
        from ampdebug._patch import build_patch

        origin = self._needed("patch")

        def run(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[bool | None, str]:
            return origin.verify(before, after, mode, timeout)

        return build_patch(origin.patch_sites(), level=self.level, verify=run if verify else None)

    def confirm(self, *, mode: RunMode = "graph", timeout: float | None = None) -> BisectResult:
        """This result with one more line: a fresh network with :meth:`apply`, measured without ampdebug's hand in it.

        The search runs in PyNative mode, and AMP casts differ between the modes: what was found there is claimed of
        graph mode only after this.

        Args:
            mode: ``"graph"``: compiled, in a process of its own where the network and ``evaluate`` can be sent there.
                ``"pynative"``: in this process.
            timeout: Seconds for a process of its own.

        Raises:
            ArgumentError: There is no answer to confirm.
        """
        check = self._needed("confirm").confirm(mode, timeout)
        return replace(self, confirmations=(*self.confirmations, check))

    def _needed(self, what: str) -> Origin:
        if not self.culprits:
            raise ArgumentError(f"{what}: this result has no culprits ({self.status}), so there is nothing to fix")
        if self.origin is None:
            raise ArgumentError(
                f"{what}: this result does not know its network, or was searched with direction='down'; use one that "
                "bisect(direction='up') returned"
            )
        return self.origin

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; non-finite numbers as text."""
        apart = ("culprits", "history", "checks", "confirmations", "origin")
        data = {name: getattr(self, name) for name in self.__slots__ if name not in apart}
        data["culprits"] = [
            {**asdict(c), "why": "" if c.score is None else c.score.why, "unit": asdict(c.unit)} for c in self.culprits
        ]
        data["checks"] = [asdict(check) for check in self.checks]
        data["confirmations"] = [asdict(check) for check in self.confirmations]
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
        lines = [f"{self.level}: {SENTENCES[self.status]}"]
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
        lines += [f"confirmed {check.name}: {word[check.passed]} ({check.detail})" for check in self.confirmations]
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
