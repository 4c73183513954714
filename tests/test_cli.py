"""The command line, run as a user runs it: a process of its own."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ampdebug
from ampdebug import Run, Site, Step

ROOT = Path(__file__).resolve().parent.parent
Result = subprocess.CompletedProcess[str]


def ampdebug_command(*arguments: str, **options: Any) -> Result:
    """Runs ``python -m ampdebug …`` in the current folder."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", **options.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-m", "ampdebug", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=env,
        check=False,
        timeout=120,
        **options,
    )


@pytest.fixture
def run(record: Callable[..., Run]) -> Run:
    sites = (Site("output", "conv", cell_type="Conv2d"), Site("output", "fc", cell_type="Dense"))
    steps = [
        (Step(k, loss=1 / k), [(sites[0], np.full(4, k, np.float32)), (sites[1], np.full(2, np.nan, np.float32))])
        for k in range(1, 41)
    ]
    return record(steps)


def expect(result: Result, code: int) -> str:
    """The exit code and, for an error, one clear line and no traceback."""
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    if code:
        assert result.stdout == ""
        return result.stderr
    assert result.stderr == ""
    return result.stdout


# --- report -----------------------------------------------------------------------------------------------------------


def test_report_prints_the_report(run: Run) -> None:
    assert expect(ampdebug_command("report", "run"), 0) == str(ampdebug.build_report(run)) + "\n"


def test_report_hands_its_options_on(run: Run) -> None:
    shown = ampdebug_command("report", "run/ampdebug-rank0.sqlite", "--cell", "c*", "--step", "3", "--sort", "name")
    assert expect(shown, 0) == str(ampdebug.build_report(run, cells="c*", step=3, sort="name")) + "\n"
    everything = ampdebug_command("report", "run", "--all")
    assert expect(everything, 0) == str(ampdebug.build_report(run, show_all=True)) + "\n"


def test_report_of_a_rank(record: Callable[..., Run], run: Run) -> None:
    record([(Step(1, loss=7.0), ())], rank=1)
    assert "loss  7" in expect(ampdebug_command("report", "run", "--rank", "1"), 0)
    assert "rank 0 of 2" in expect(ampdebug_command("report", "run"), 0)
    assert "rank=5 has no file in run" in expect(ampdebug_command("report", "run", "--rank", "5"), 2)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["report", "nowhere"], 1, ["ampdebug report: nowhere does not exist"]),
        (["report", "run", "--step", "99"], 2, ["step=99 is not recorded", "40 steps from 1 to 40"]),
        (["report", "run", "--cell", "x*"], 2, ["cells='x*' matches no measured cell", "such as 'conv', 'fc'"]),
        (["report", "run", "--cell", ""], 2, ["argument --cell: the pattern is empty"]),
        (["report", "run", "--sort", "size"], 2, ["invalid choice: 'size'"]),
        (["report", "run", "--step", "two"], 2, ["invalid int value: 'two'"]),
        (["export", "run"], 2, ["--format"]),
        (["export", "run", "--format", "csv", "-o", "no/such/folder/f.csv"], 1, ["no/such/folder"]),
        (["tensorboard", "run"], 2, ["LOGDIR"]),
        (["run", "missing.py"], 2, ["'missing.py' is not a file", "ampdebug run train.py"]),
        (["run", "--every", "0", "train.py"], 2, ["--every 0 must be 1"]),
        (["unknown"], 2, ["invalid choice: 'unknown'"]),
        ([], 2, ["COMMAND"]),
    ],
)
def test_errors_are_one_clear_line(run: Run, arguments: list[str], code: int, words: list[str]) -> None:
    said = expect(ampdebug_command(*arguments), code)
    for word in words:
        assert word in said


def test_a_truncated_file_is_named(run: Run, tmp_path: Path) -> None:
    shutil.copytree("run", "cut")
    file = Path("cut/ampdebug-rank0.sqlite")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    said = expect(ampdebug_command("report", "cut"), 1)
    assert "cut/ampdebug-rank0.sqlite" in said


def test_a_reader_that_has_seen_enough_is_no_error(run: Run) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ampdebug", "export", "run", "--format", "jsonl"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.read(10)
    child.stdout.close()
    said = child.stderr.read()
    child.stderr.close()
    assert child.wait(60) in (0, 141)  # 0 where all of it fitted into the pipe before it was closed
    assert said == b""


# --- export, tensorboard ----------------------------------------------------------------------------------------------


def test_export_writes_to_a_file_or_to_standard_output(run: Run) -> None:
    printed = expect(ampdebug_command("export", "run", "--format", "csv"), 0)
    assert expect(ampdebug_command("export", "run", "--format", "csv", "-o", "rows.csv"), 0) == ""
    assert Path("rows.csv").read_text() == printed
    rows = list(csv.DictReader(printed.splitlines()))
    assert len(rows) == 80
    assert (rows[4]["step"], rows[4]["path"], float(rows[4]["absmax"])) == ("3", "conv", 3.0)
    steps = list(
        csv.DictReader(expect(ampdebug_command("export", "run", "--format", "csv", "--table", "steps"), 0).splitlines())
    )
    assert [float(row["loss"]) for row in steps] == [1 / k for k in range(1, 41)]


def test_export_jsonl(run: Run) -> None:
    lines = expect(ampdebug_command("export", "run", "--format", "jsonl"), 0).splitlines()
    kinds = [json.loads(line)["type"] for line in lines]
    assert kinds.count("step") == 40
    assert kinds.count("tensor") == 80


def test_tensorboard_writes_and_names_the_file(run: Run) -> None:
    (path,) = expect(ampdebug_command("tensorboard", "run", "logs"), 0).split()
    assert Path(path).parent == Path("logs")
    assert Path(path).stat().st_size > 1000
    assert "already holds event files" in expect(ampdebug_command("tensorboard", "run", "logs"), 2)


# --- diagnose, check ------------------------------------------------------------------------------------------------

DIVERGING = "".join(f"epoch: 1 step: {i}, loss is {2.0 - i / 100 if i < 20 else math.nan}\n" for i in range(1, 31))
HEALTHY = "".join(f"epoch: 1 step: {i}, loss is {2.0 - i / 100}\n" for i in range(1, 101))


def test_diagnose_says_what_is_wrong_and_exits_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.log").write_text(DIVERGING)
    found = ampdebug.diagnose("train.log")
    shown = ampdebug_command("diagnose", "train.log")
    assert (shown.returncode, shown.stdout, shown.stderr) == (1, f"{found}\n", "")
    as_json = ampdebug_command("diagnose", "train.log", "--json")
    assert as_json.returncode == 1
    data = json.loads(as_json.stdout)
    assert data == found.to_dict()
    assert data["verdict"] == "findings"
    assert set(data["findings"][0]) >= {
        *("slug", "sentence", "severity", "confidence", "first_step", "last_step", "where", "evidence", "action")
    }


def test_diagnose_of_a_healthy_log_exits_with_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.log").write_text(HEALTHY)
    assert "nothing is wrong" in expect(ampdebug_command("diagnose", "train.log"), 0)
    assert json.loads(expect(ampdebug_command("diagnose", "train.log", "--json"), 0))["verdict"] == "ok"
    both = ampdebug_command("diagnose", "train.log", "--against", "train.log")
    assert "Compared with" in expect(both, 0)


def test_diagnose_reads_standard_input_and_layouts_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "ampdebug", "diagnose", "-"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    piped = subprocess.run(command, input=DIVERGING, capture_output=True, text=True, env=env, check=False, timeout=120)
    assert piped.returncode == 1
    Path("own.log").write_text("".join(f"it={i} L={2.0 if i < 20 else math.nan}\n" for i in range(1, 31)))
    own = ampdebug_command("diagnose", "own.log", "--pattern", r"it=(?P<step>\d+) L=(?P<loss>\S+)")
    assert own.returncode == 1
    assert "nan" in own.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.log"], "nowhere.log"),
        (["empty.log"], "holds no line of a training step"),
        (["empty.log", "--format", "no-such"], "no-such"),
        (["empty.log", "--pattern", "("], "pattern"),
        ([], "PATH"),
    ],
)
def test_diagnose_exits_with_2_where_it_cannot_read(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.log").write_text("nothing here\n")
    assert words in expect(ampdebug_command("diagnose", *arguments), 2)


def test_check_without_mindspore_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hidden = tmp_path / "hidden" / "mindspore"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError('hidden', name='mindspore')")
    path = os.pathsep.join([str(hidden.parent), str(ROOT)])
    said = expect(ampdebug_command("check", "net.py:make", env={"PYTHONPATH": path}), 2)
    assert "`ampdebug check` runs the network with MindSpore, which is not installed here: pip install" in said
    assert "invalid choice: 'O5'" in expect(ampdebug_command("check", "net.py:make", "--level", "O5"), 2)


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_version_and_help() -> None:
    assert expect(ampdebug_command("--version"), 0) == f"ampdebug {ampdebug.__version__}\n"
    shown = expect(ampdebug_command("--help"), 0)
    for name in ("report", "export", "tensorboard", "diagnose", "check", "run"):
        assert f"\n    {name}" in shown
        assert "usage: ampdebug" in expect(ampdebug_command(name, "--help"), 0)


def test_start_up_is_quick_and_without_mindspore(run: Run) -> None:
    code = (
        "import sys, ampdebug._cli as cli\n"
        "assert cli.main(['report', 'run']) == 0\n"
        "loud = {'mindspore', 'tensorboardX', 'numba', 'google.protobuf'} & set(sys.modules)\n"
        "print(sorted(loud), file=sys.stderr)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


def cpu_seconds(arguments: list[str]) -> float:
    """CPU time of a Python process, the best of five: a busy machine must not fail the test below."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    taken = []
    for _ in range(5):
        before = os.times()
        subprocess.run([sys.executable, *arguments], env=env, stdout=subprocess.DEVNULL, check=True)
        after = os.times()
        taken.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return min(taken)


@pytest.mark.skipif(os.name == "nt", reason="os.times() does not count child processes on Windows")
@pytest.mark.parametrize("arguments", [["--version"], ["report", "run"], ["diagnose", "run"]])
def test_start_up_takes_less_than_six_times_what_importing_numpy_takes(run: Run, arguments: list[str]) -> None:
    """A heavy import must fail it: numba takes over five times as long as numpy, MindSpore sixteen times."""
    numpy = cpu_seconds(["-c", "import numpy"])
    taken = cpu_seconds(["-m", "ampdebug", *arguments])
    assert taken < 6 * numpy, f"ampdebug {' '.join(arguments)} takes {taken:.2f} s, importing numpy {numpy:.2f} s"


def test_run_without_mindspore_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise AssertionError('ran')")
    hidden = tmp_path / "hidden" / "mindspore"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError('hidden', name='mindspore')")
    path = os.pathsep.join([str(hidden.parent), str(ROOT)])
    said = expect(ampdebug_command("run", "train.py", env={"PYTHONPATH": path}), 1)
    assert "`ampdebug run` trains with MindSpore, which is not installed here: pip install" in said


def test_progress_is_shown_on_a_terminal_only_when_it_takes_long(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from ampdebug import _cli

    assert _cli._progress("reading steps") is None  # captured output is no terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    clock = [100.0]
    monkeypatch.setattr(_cli.time, "monotonic", lambda: clock[0])
    show = _cli._progress("reading steps")
    assert show is not None
    show(1, 100)
    assert capsys.readouterr().err == ""
    clock[0] += 1.5
    show(50, 100)
    assert capsys.readouterr().err == "\rreading steps: 50 of 100"
    show(100, 100)
    assert capsys.readouterr().err == "\r\x1b[K"
    show = _cli._progress("reading", share=True)
    assert show is not None
    clock[0] += 1.5
    show(5_000_000, 20_000_000)
    clock[0] += 1.5
    show(7_000_000, None)
    assert capsys.readouterr().err == "\rreading: 25 %\rreading: 7 MB"


def test_a_nan_loss_is_printed(record: Callable[..., Run]) -> None:
    record([(Step(1, loss=math.nan), ())])
    assert "loss  nan" in expect(ampdebug_command("report", "run"), 0)
