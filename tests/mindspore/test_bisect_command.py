"""``ampdebug bisect`` from the command line to the exit code, the run store and the journal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mindspore as ms
import pytest

from ampdebug import open_run
from ampdebug._cli import main
from ampdebug.hooks._state import made_by

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode: test modules can't import each other by themselves

pytestmark = pytest.mark.own_process

FILE = str(Path(__file__).parent / "bisect_tasks.py")
CULPRITS = {"Square", "/"}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ms.set_context(mode=ms.PYNATIVE_MODE)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["bisect", *arguments])
    seen = capsys.readouterr()
    return code, seen.out, seen.err


def test_the_whole_path(capsys: pytest.CaptureFixture[str]) -> None:
    task = (f"{FILE}:overflowing", "--level", "O3", "--probe", "finite", "--workers", "0", "--out", "run")
    code, out, err = run(capsys, *task, "--max-probes", "1", "--expect", "expected.json", "--update-expect")
    assert code == 1, err
    assert "expected.json was not written: the answer is not complete (max-probes)" in out
    assert not Path("expected.json").exists()
    ms.set_context(mode=ms.GRAPH_MODE)  # as a training script may do at its top
    code, out, err = run(capsys, *task, "--resume", "--expect", "expected.json", "--update-expect")
    assert code == 0, err
    assert "bisect_tasks.py:" in out
    assert "energy = ops.square(x)" in out
    assert "1 from the journal" in out
    assert "the answer is in expected.json" in out
    code, out, err = run(capsys, *task, "--resume", "--expect", "expected.json", "--json")
    assert code == 0, err
    data: dict[str, Any] = json.loads(out)
    assert {culprit["unit"]["operator"] for culprit in data["culprits"]} == CULPRITS
    assert (data["probes"], data["as_expected"]) == (0, True)
    expected = json.loads(Path("expected.json").read_text())
    expected["sensitive"] = expected["sensitive"][:1]
    Path("expected.json").write_text(json.dumps(expected))
    code, out, err = run(capsys, *task, "--resume", "--expect", "expected.json")
    assert code == 1
    assert "the sensitive set changed" in out
    assert main(["report", "run"]) == 0
    said = capsys.readouterr().out
    assert "keep in float32" in said
    assert "Square" in said
    with open_run("run") as opened:
        assert len(opened.results("bisect")) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py:task"], "'missing.py' is not a file"),
        ([f"{FILE}:nothing"], "has no such name 'nothing'"),
        ([f"{FILE}:number"], "number gave a int; it must be an ampdebug.Workload, a pair"),
        ([f"{FILE}:overflowing", "--probe", "loss"], "probe='loss': must be one of"),
        ([f"{FILE}:pair", "--probe", "grad"], "is a pair"),
        ([f"{FILE}:overflowing", "--checkpoint", "no.ckpt"], "is not a file"),
        ([f"{FILE}:overflowing", "--patch", "no/fix.diff"], "--patch no/fix.diff: there is no directory 'no'"),
        (["raises.py:make"], "raises.py:make() raised KeyError: 'width'"),
    ],
)
def test_what_cannot_be_run(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("raises.py").write_text("def make():\n    raise KeyError('width')\n")
    code, out, err = run(capsys, *arguments, "--workers", "0")
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]


@pytest.mark.slow
def test_a_killed_search_goes_on_without_repeating_a_probe(capsys: pytest.CaptureFixture[str]) -> None:
    task = [f"{FILE}:slow_pair", "--level", "O3", "--workers", "0"]
    command = [sys.executable, "-m", "ampdebug", "bisect", *task, "--out", "run"]
    journal = Path("run/bisect-journal.jsonl")
    search = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        deadline = time.monotonic() + 200
        while not (journal.exists() and journal.read_bytes().count(b"\n") >= 3):  # the header and two probes
            assert search.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        search.kill()
        search.wait()
    before = journal.read_bytes().count(b"\n") - 1
    code, out, err = run(capsys, *task, "--out", "run", "--resume", "--json")
    assert code == 0, err
    resumed = json.loads(out)
    asked = [tuple(json.loads(line)["set"]) for line in journal.read_text().splitlines()[1:]]
    assert len(asked) == len(set(asked)) == before + resumed["probes"]
    assert resumed["reused"] == before
    code, out, err = run(capsys, *task, "--json")
    whole = json.loads(out)
    assert whole["culprits"] == resumed["culprits"]
    assert whole["probes"] == len(asked)


@pytest.mark.slow
def test_in_a_process_of_its_own_with_the_patch(capsys: pytest.CaptureFixture[str]) -> None:
    """By name even a workload with lambdas can be sent; the patch is verified before it is shown."""
    pytest.importorskip("libcst", reason="patches are written with libcst: pip install 'ampdebug[fix]'")
    code, out, err = run(capsys, f"{FILE}:overflowing", "--level", "O3", "--probe", "grad", "--patch", "fix.diff")
    assert code == 0, err
    assert "patch in fix.diff: verified" in out
    assert "+" in Path("fix.diff").read_text()


GRAPH_MODE_AT_ITS_TOP = f"""
import sys

import mindspore as ms

sys.path.insert(0, {str(Path(FILE).parent)!r})
from bisect_tasks import overflowing

ms.set_context(mode=ms.GRAPH_MODE)
"""


@pytest.mark.slow
def test_a_module_that_sets_graph_mode_is_searched_in_pynative_mode_in_workers_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A worker imports the module with the first network that it makes."""
    Path("graph_mode_task.py").write_text(GRAPH_MODE_AT_ITS_TOP)
    code, out, err = run(
        capsys, "graph_mode_task.py:overflowing", "--level", "O3", "--probe", "finite", "--json", "--workers", "1"
    )
    assert code == 0, err
    assert {culprit["unit"]["operator"] for culprit in json.loads(out)["culprits"]} == CULPRITS


def test_a_function_that_sets_a_mode_makes_networks_in_the_mode_that_was_set() -> None:
    def make() -> str:
        ms.set_context(mode=ms.GRAPH_MODE)
        return "net"

    assert made_by(make, 0) == "net"
    assert ms.get_context("mode") == ms.PYNATIVE_MODE


def test_where_there_is_nothing_to_change_there_is_no_patch(capsys: pytest.CaptureFixture[str]) -> None:
    task = (f"{FILE}:healthy", "--level", "O2", "--probe", "finite", "--workers", "0")
    code, out, err = run(capsys, *task, "--patch")
    assert code == 0, err
    assert "no patch: there is nothing to change (nothing-to-find)" in out
