"""The bisection with a backend of a few lines in place of a framework."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from ampdebug._bisect import Criterion, bisect_backend
from ampdebug._bisect_result import DETERMINISTIC, Check, Unit
from ampdebug._errors import AmpdebugError, ArgumentError, FormatError
from ampdebug._journal import Outcome
from ampdebug._search import Progress
from ampdebug._sites import OperatorSite, SiteScore

NAMES = ["Conv2D", "BatchNorm", "Exp", "ReduceSum", "Div", "MatMul", "BiasAdd", "Softmax"]


def site(name: str) -> OperatorSite:
    return OperatorSite("head", name, f"net.py:{NAMES.index(name) + 10}", 0)


def score(value: float, **numbers: Any) -> SiteScore:
    plain: dict[str, Any] = {
        "elements": 100,
        "overflowed": 0,
        "flushed": 0,
        "absmax": 2.0,
        "spread": 1.0,
        "error": 0.01,
    }
    return SiteScore(value, **{**plain, **numbers})


@dataclass
class FakeBackend:
    """0.9 in float32; every culprit that runs in 16 bits takes its part away."""

    costs: dict[str, float]
    wobble: Sequence[float] = (0.0,)
    reference: float | bool = 0.9
    broken: bool | None = True
    level: str = "O2"
    mode: Literal["real", "emulated"] = "real"
    network: str = "net-1"
    asked: list[frozenset[str]] = field(default_factory=list)
    calls: int = 0
    repeats: bool | None = None

    def record(self) -> Sequence[Unit]:
        return [
            Unit(site(name).key, (site(name),), name, "head", "/src/net.py", site(name).line, f"x = {name.lower()}(x)")
            for name in NAMES
        ]

    def notes(self) -> Sequence[str]:
        return ["tail is compiled"]

    def checks(self) -> Sequence[Check]:
        return [
            Check(DETERMINISTIC, self.repeats, "outputs and gradients repeat bitwise"),
            Check("protecting nothing changes nothing", self.broken, "1e-3 relative"),
        ]

    def value(self, kept: frozenset[str]) -> float | bool:
        self.calls += 1
        if isinstance(self.reference, bool):
            return self.reference and not (self.costs.keys() - kept)
        lost = sum(cost for name, cost in self.costs.items() if name not in kept)
        return self.reference - lost + self.wobble[self.calls % len(self.wobble)]

    def measure_reference(self) -> float | bool:
        return self.value(frozenset(NAMES) | self.costs.keys())

    def measure_plain(self) -> float | bool:
        return self.value(frozenset())

    def measure(self, protected: frozenset[OperatorSite]) -> float | bool:
        self.asked.append(frozenset(s.operator for s in protected))
        return self.value(self.asked[-1])

    def rank(self) -> Mapping[OperatorSite, SiteScore]:
        """Softmax has no counterpart in the float32 network: nobody knows its score."""
        scores = {name: score(0.01) for name in NAMES[:-1]}
        for name in self.costs.keys() & scores.keys():
            cost = self.costs[name]
            scores[name] = score(cost) if math.isfinite(cost) else score(math.inf, overflowed=7, absmax=7e4)
        return {site(name): value for name, value in scores.items()}

    def identity(self) -> Mapping[str, Any]:
        return {"network": self.network}


def test_the_culprits_are_found_in_ranking_order_and_verified() -> None:
    result = bisect_backend(FakeBackend({"Exp": 0.3, "Div": 0.1}))
    assert result.status == "found"
    assert [c.unit.operator for c in result.culprits] == ["Exp", "Div"]
    assert [c.rank for c in result.culprits] == [1, 2]
    assert {c.needed for c in result.culprits} == {"verified"}
    assert result.sufficient
    assert result.sites == (site("Exp"), site("Div"))
    assert result.culprits[0].share == pytest.approx(0.3 / (0.3 + 0.1 + 5 * 0.01))
    assert result.low == pytest.approx(0.5)
    assert (result.reference, result.noise) == (0.9, 0.0)
    assert result.probes <= result.bound


@pytest.mark.parametrize(
    ("repeats", "wobble", "reference", "ends"),
    [
        (True, (0.0,), 0.9, 3),
        (True, (0.0, 1e-9), 0.9, 4),  # the evaluation draws something of its own
        (None, (0.0,), 0.9, 4),
        (True, (0.0,), True, 4),  # two times True shows little
    ],
)
def test_the_level_is_measured_once_where_nothing_can_differ(
    repeats: bool | None, wobble: tuple[float, ...], reference: float | bool, ends: int
) -> None:
    backend = FakeBackend({"Exp": 0.3}, wobble=wobble, reference=reference, repeats=repeats)
    result = bisect_backend(backend, repeats=1)
    assert result.status == "found"
    assert backend.calls == ends + result.probes


def test_what_does_not_matter_within_the_tolerance_stays_low() -> None:
    costs = {"Exp": 0.3, "Div": 0.015}
    assert [c.unit.operator for c in bisect_backend(FakeBackend(costs)).culprits] == ["Exp"]
    strict = bisect_backend(FakeBackend(costs), tolerance=0.001)
    assert [c.unit.operator for c in strict.culprits] == ["Exp", "Div"]
    assert "tolerance 0.001" in strict.criterion


def test_a_level_that_passes_is_an_answer() -> None:
    backend = FakeBackend({"Exp": 0.001})
    result = bisect_backend(backend)
    assert (result.status, result.culprits, result.probes) == ("nothing-to-find", (), 0)
    assert backend.asked == []
    assert "nothing to find" in str(result)


def test_a_float32_that_fails_is_an_answer() -> None:
    result = bisect_backend(FakeBackend({"Exp": 0.3}, reference=0.4), threshold=0.8)
    assert (result.status, result.culprits) == ("precision-innocent", ())
    assert "precision is not the cause" in str(result)
    assert bisect_backend(FakeBackend({"Exp": 1.0}, reference=False)).status == "precision-innocent"


def test_not_even_everything_may_be_enough() -> None:
    backend = FakeBackend({"Exp": 0.3, "outside": 0.2})
    result = bisect_backend(backend)
    assert (result.status, result.culprits, result.sufficient) == ("not-found", (), False)
    assert "tail is compiled" in str(result)


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_a_level_that_gives_no_number_fails(lost: float) -> None:
    result = bisect_backend(FakeBackend({"Exp": lost}))
    assert [c.unit.operator for c in result.culprits] == ["Exp"]
    assert result.culprits[0].score is not None
    assert result.culprits[0].share is None
    assert result.noise == 0.0


def test_good_and_bad_without_numbers() -> None:
    result = bisect_backend(FakeBackend({"Softmax": 1.0}, reference=True))
    assert [c.unit.operator for c in result.culprits] == ["Softmax"]
    assert result.culprits[0].score is None, "the ranking does not know it"
    assert result.criterion == "evaluate returns True"


def test_lower_may_be_better() -> None:
    backend = FakeBackend({"Exp": -0.5}, reference=0.1)
    assert [c.unit.operator for c in bisect_backend(backend, better="lower").culprits] == ["Exp"]


def test_noise_widens_the_tolerance_and_repeats_what_is_near() -> None:
    quiet = bisect_backend(FakeBackend({"Exp": 0.3}))
    backend = FakeBackend({"Exp": 0.3}, wobble=(0.0, 0.012, 0.004))
    noisy = bisect_backend(backend)
    assert noisy.noise > 0
    assert [c.unit.operator for c in noisy.culprits] == ["Exp"]
    assert len(backend.asked) > len(set(backend.asked)), "near the limit it should ask again"
    assert noisy.probes > quiet.probes


def test_a_failed_check_stops_everything() -> None:
    with pytest.raises(AmpdebugError, match=r"protecting nothing changes nothing \(1e-3 relative\)"):
        bisect_backend(FakeBackend({"Exp": 0.3}, broken=False))
    assert bisect_backend(FakeBackend({"Exp": 0.3}, broken=None)).status == "found"


def test_stopped_early() -> None:
    costs = {"Exp": 0.3, "Softmax": 0.3}
    whole = bisect_backend(FakeBackend(costs))
    assert {c.unit.operator for c in whole.culprits} == set(costs)
    for limit in range(whole.probes):
        cut = bisect_backend(FakeBackend(costs), max_probes=limit)
        assert cut.status == "max-probes"
        assert cut.probes == limit
        assert bool(cut.culprits) == cut.sufficient
        if cut.sufficient:
            assert {c.unit.operator for c in cut.culprits} >= set(costs)
        assert "Stopped at max_probes" in str(cut)
    assert {c.needed for c in cut.culprits} != {"verified"}, "the last probe is what proves it"


def test_a_journal_saves_the_probes_and_knows_its_network(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    costs = {"Exp": 0.3, "Div": 0.1}
    first = FakeBackend(costs)
    whole = bisect_backend(first, journal=path)
    again = FakeBackend(costs)
    resumed = bisect_backend(again, journal=path)
    assert again.asked == []
    assert resumed.culprits == whole.culprits
    assert resumed.reused == whole.probes
    assert f"0 probes and {whole.probes} from the journal" in str(resumed)
    with pytest.raises(FormatError, match="network was 'net-1' and is 'net-2'"):
        bisect_backend(FakeBackend(costs, network="net-2"), journal=path)
    with pytest.raises(FormatError, match="criterion was"):
        bisect_backend(FakeBackend(costs), tolerance=0.2, journal=path)


def test_another_measurer_may_stand_in_for_the_backend() -> None:
    backend = FakeBackend({"Exp": 0.3})

    def predicate_of(criterion: Criterion) -> Callable[[frozenset[Unit]], Outcome]:
        assert criterion.limit == pytest.approx(0.9 * 0.98)
        return lambda units: Outcome("Exp" in {unit.operator for unit in units})

    result = bisect_backend(backend, predicate_of=predicate_of)
    assert [c.unit.operator for c in result.culprits] == ["Exp"]
    assert backend.asked == []


def test_progress_is_passed_on() -> None:
    seen: list[Progress] = []
    result = bisect_backend(FakeBackend({"Exp": 0.3}), progress=seen.append)
    assert [step.probes for step in seen] == list(range(1, result.probes + 1))


def test_the_report_is_a_table() -> None:
    text = str(bisect_backend(FakeBackend({"Exp": math.inf, "Div": 0.1})))
    lines = text.splitlines()
    assert lines[0] == "O2: Kept in float32, these are enough, and each of them is needed."
    assert lines[2].split() == ["rank", "operator", "cell", "at", "source", "why", "share", "needed"]
    assert lines[3].split()[:4] == ["1", "Exp", "head", "net.py:12"]
    assert "x = exp(x)" in lines[3]
    assert "overflow: 7 of 100 leave the format, float32 absmax 7e+04" in lines[3]
    assert lines[3].endswith("verified")
    assert "check protecting nothing changes nothing: ok (1e-3 relative)" in lines
    assert "note: tail is compiled" in lines


def test_to_dict_is_plain_json() -> None:
    result = bisect_backend(FakeBackend({"Exp": math.nan}))
    data = result.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["low"] == "nan"
    assert data["culprits"][0]["unit"]["operator"] == "Exp"
    assert data["culprits"][0]["why"].startswith("overflow")
    assert data["history"][0]["units"] == [site("Exp").key]
    assert data["status"] == "found"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tolerance": 0.1, "threshold": 0.5}, "contradict each other"),
        ({"tolerance": -0.1}, "tolerance=-0.1: must be at least 0"),
        ({"tolerance": math.nan}, "tolerance=nan: must be at least 0"),
        ({"better": "more"}, "better='more': must be 'higher' or 'lower'"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        bisect_backend(FakeBackend({}), **arguments)


def test_the_criterion_says_how_far_a_value_is_from_the_limit() -> None:
    higher = Criterion.beside(0.9, 0.0, 0.1, None, "higher")
    assert higher.judge(0.85).margin == pytest.approx(0.05)
    assert higher.judge(0.7).margin == pytest.approx(-0.1)
    lower = Criterion.beside(0.9, 0.0, 0.1, None, "lower")
    assert lower.judge(0.85).passed
    assert lower.judge(1.1).margin == pytest.approx(-0.1)
    assert higher.judge(math.nan).reason == "not a number"


@pytest.mark.parametrize(
    ("numbers", "kind", "words"),
    [
        ({"overflowed": 3, "absmax": 1e5}, "overflow", "overflow: 3 of 100 leave the format, float32 absmax 1e+05"),
        ({"flushed": 10}, "flush", "flush: 10 of 100 become 0"),
        ({"flushed": 9, "error": 2.0}, "rounding", "rounding: off by up to 2 where values spread by 1"),
    ],
)
def test_why_an_operator_is_a_culprit(numbers: dict[str, Any], kind: str, words: str) -> None:
    seen = score(1.0, **numbers)
    assert seen.kind == kind
    assert seen.why.startswith(words)
    twice = seen.joined(seen)
    assert (twice.elements, twice.overflowed, twice.score) == (200, 2 * seen.overflowed, math.sqrt(2))
