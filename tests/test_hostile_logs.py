"""Damaged and malicious logs: no crash, no hang, nothing executed.

benchmarks/diagnose_campaign.py runs 10,000 of them.
"""

from __future__ import annotations

import importlib.util
import io
import random
import re
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from ampdebug._diagnose import diagnose
from ampdebug._errors import AmpdebugError
from ampdebug.logs import FORMATS, GENERIC
from ampdebug.logs._keyed import GENERIC_LIMIT
from ampdebug.logs._markers import MARKERS
from ampdebug.logs._source import LINE_LIMIT


def load(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


mutate = load("mutate")


@pytest.mark.parametrize("seed", range(120))
def test_mutated_log(seed: int) -> None:
    data = mutate.mutated(seed)
    begin = time.process_time()
    try:
        found = diagnose(io.BytesIO(data))
    except AmpdebugError:
        return  # a refusal in one sentence is a fine answer
    text = str(found) + found._repr_html_()
    assert all(c.isprintable() or c == "\n" for c in str(found)), seed
    assert text
    assert time.process_time() - begin < 2.0 + len(data) / 1e6, seed


# Lines that make a backtracking matcher work hardest: long runs of what each part of a pattern repeats.
# A log may consist of nothing else, so a line of 8 KB may take 8 ms at the promised megabyte a second; 50 ms allow for
# a busy machine and still catch anything that is quadratic in the length of the line (that took 300 ms and more).
RUNS = (
    b" ",
    b"a",
    b"1",
    b".",
    b"[",
    b"loss: ",
    b"1.",
    b"'a': ",
    b"=1 ",
    b"| ",
    b"a: 1 ",
    b"step 1 ",
    b"eta: ",
    b"\t",
    b"- ",
)


@pytest.mark.parametrize("row", [*FORMATS, GENERIC], ids=lambda row: row.name)
def test_no_format_backtracks(row: object) -> None:
    sample = row.sample[0].encode()  # type: ignore[attr-defined]
    limit = GENERIC_LIMIT if row is GENERIC else LINE_LIMIT
    worst = 0.0
    for run in (*RUNS, row.trigger, row.trigger + b" "):  # type: ignore[attr-defined]
        filler = run * (limit // len(run))
        for cut in range(0, len(sample) + 1, max(1, len(sample) // 12)):
            line = (sample[:cut] + filler)[:limit]
            begin = time.process_time()
            row.read(line)  # type: ignore[attr-defined]
            worst = max(worst, (time.process_time() - begin) * LINE_LIMIT / limit)
    assert worst < 0.05, worst


@pytest.mark.parametrize("marker", MARKERS, ids=lambda m: f"{m.kind}-{m.trigger.decode()}")
def test_no_marker_backtracks(marker: object) -> None:
    sample = marker.samples[0].encode()  # type: ignore[attr-defined]
    worst = 0.0
    for run in (*RUNS, marker.trigger, marker.trigger + b" "):  # type: ignore[attr-defined]
        line = (sample[: len(sample) // 2] + run * (LINE_LIMIT // len(run)))[:LINE_LIMIT]
        begin = time.process_time()
        marker.read(line)  # type: ignore[attr-defined]
        worst = max(worst, time.process_time() - begin)
    assert worst < 0.05, worst


def test_huge_numbers() -> None:
    lines = [
        "epoch: 1 step: " + "9" * 5000 + ", loss is 1.0",
        "epoch: 1 step: 3, loss is " + "9" * 5000,
        "epoch: " + "8" * 400 + " step: 4, loss is 1e999999",
        "Epoch:[  1/  2], step:[   12/" + "7" * 3000 + "], loss: 1.0",
    ]
    try:
        str(diagnose(io.BytesIO("\n".join(lines).encode())))
    except AmpdebugError:
        pass


def test_nothing_is_executed(tmp_path: Path) -> None:
    target = tmp_path / "made"
    evil = f"__import__('pathlib').Path({str(target)!r}).touch()"
    lines = [
        f"{{'loss': {evil}, 'learning_rate': 1e-05, 'epoch': 0.1}}",
        f"{{'loss': 1.0, 'grad_norm': {evil}, 'learning_rate': 1e-05, 'epoch': 0.1}}",
        f"epoch: 0, current epoch percent: 0.003, step: 12, outputs are ({evil})",
        f"epoch: 1 step: 1, loss is {evil}",
        f"<%= {evil} %> $({evil}) `{evil}` {{{{ {evil} }}}}",
    ]
    diagnose(io.BytesIO("\n".join(lines * 5).encode()))
    assert not target.exists()


def test_sources_hold_no_way_to_execute() -> None:
    root = Path(__file__).resolve().parents[1] / "ampdebug"
    files = [*(root / "logs").glob("*.py"), *(root / "rules").glob("*.py"), root / "_diagnose.py", root / "_trace.py"]
    assert len(files) > 15
    found = [
        f.name
        for f in files
        if re.search(r"\b(?:eval|exec|pickle|marshal|subprocess|__import__)\b\s*[(.]", f.read_text())
    ]
    assert found == []


def test_random_bytes() -> None:
    rng = random.Random(0)
    for _ in range(20):
        with pytest.raises(AmpdebugError):
            diagnose(io.BytesIO(rng.randbytes(200_000)))
