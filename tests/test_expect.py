"""The answer of a bisection beside the one of the last release."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ampdebug._bisect_result import BisectResult, Culprit, Unit
from ampdebug._errors import ArgumentError, FormatError
from ampdebug._expect import Expectation, Sensitive, compare_expected


def culprit(operator: str, line: str = "net.py:18", source: str = "e = ops.exp(x)", rank: int = 1) -> Culprit:
    unit = Unit(f"softmax|{operator}|{line}|0", (), operator, "softmax", "/home/me/net.py", line, source)
    return Culprit(unit, rank, None, None, "verified")


def result(*culprits: Culprit, level: str = "O2", status: Any = "found") -> BisectResult:
    return BisectResult(
        status=status, culprits=culprits, sufficient=True, level=level, mode="real", criterion="", reference=1.0,
        low=0.0, noise=0.0, units=9, probes=3, bound=9, reused=0, seconds=1.0, checks=(), notes=(), history=(),
    )  # fmt: skip


def test_the_file_holds_what_stays_the_same(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "expected.json"
    Expectation.of(result(culprit("sum", "net.py:19", "return e / e.sum(-1)"), culprit("Exp"))).write(path)
    assert json.loads(path.read_text(encoding="utf-8")) == {
        "format": "ampdebug-expect-1",
        "level": "O2",
        "status": "found",
        "sensitive": [
            {"path": "softmax", "operator": "Exp", "file": "net.py", "source": "e = ops.exp(x)"},
            {"path": "softmax", "operator": "sum", "file": "net.py", "source": "return e / e.sum(-1)"},
        ],
    }
    assert [item.name for item in path.parent.iterdir()] == ["expected.json"]
    assert Expectation.read(path).sensitive[0] == Sensitive("softmax", "Exp", "net.py", "e = ops.exp(x)")


def test_moved_lines_and_other_ranks_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "expected.json"
    Expectation.of(result(culprit("Exp"), culprit("sum", rank=2))).write(path)
    moved = [culprit("sum", "net.py:90"), culprit("Exp", "net.py:88", rank=5)]
    moved = [dataclasses.replace(c, unit=dataclasses.replace(c.unit, file="/ci/job/net.py")) for c in moved]
    comparison = compare_expected(result(*moved), path)
    assert comparison.same
    assert str(comparison) == "the sensitive set is as expected"


def test_what_changed_is_said_in_words(tmp_path: Path) -> None:
    path = tmp_path / "expected.json"
    Expectation.of(result(culprit("Exp"), culprit("Exp"), culprit("sum"))).write(path)
    comparison = compare_expected(result(culprit("Exp"), culprit("/", source="return e / s"), level="O3"), path)
    assert not comparison.same
    assert str(comparison).splitlines() == [
        "the sensitive set changed:",
        "  the level is O3, and the file is of O2",
        "  added, must stay in float32 now: / of softmax in net.py: return e / s",
        "  removed, no longer needed: Exp of softmax in net.py: e = ops.exp(x)",
        "  removed, no longer needed: sum of softmax in net.py: e = ops.exp(x)",
    ]


def test_an_answer_of_another_kind_is_a_change(tmp_path: Path) -> None:
    path = tmp_path / "expected.json"
    Expectation.of(result(status="nothing-to-find")).write(path)
    comparison = compare_expected(result(status="precision-innocent"), path)
    assert not comparison.same
    assert "the answer is 'precision-innocent', and was 'nothing-to-find'" in str(comparison)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "is not JSON"),
        ("[]", 'lacks \'"format": "ampdebug-expect-1"\''),
        ('{"format": "ampdebug-expect-1", "level": 2}', "'level' and 'status' must be text"),
        (
            '{"format": "ampdebug-expect-1", "level": "O2", "status": "found", "sensitive": [{"path": ""}]}',
            "an entry of 'sensitive' must have the texts path, operator, file, source",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "expected.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FormatError, match=message):
        compare_expected(result(), path)


def test_a_missing_file_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="there is no such file; --update-expect writes it"):
        compare_expected(result(), tmp_path / "none.json")


def test_a_result_without_a_network_says_so() -> None:
    made = result(culprit("Exp"))
    for action in (lambda: made.patch(), lambda: made.apply(None), lambda: made.confirm()):
        with pytest.raises(ArgumentError, match="this result does not know its network"):
            action()
    assert "origin" not in made.to_dict()
    assert made.to_dict()["confirmations"] == []
