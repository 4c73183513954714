"""``ampdebug bisect`` as far as it goes without MindSpore: its options, its journal, its line of progress."""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import pytest

from ampdebug import _bisect_command
from ampdebug._bisect_command import progress_line
from ampdebug._cli import main
from ampdebug._errors import ArgumentError
from ampdebug._search import Progress


def parsed(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    _bisect_command.add_arguments(parser)
    return parser.parse_args(["net.py:task", *options])


def test_the_journal_lies_in_the_run_and_is_never_written_over(tmp_path: Path) -> None:
    assert _bisect_command._journal(parsed()) is None
    journal = tmp_path / "bisect-journal.jsonl"
    options = parsed("--out", str(tmp_path))
    assert _bisect_command._journal(options) == journal
    journal.write_text("hours of work")
    assert _bisect_command._journal(options) == journal
    assert not journal.exists()
    assert (tmp_path / "bisect-journal.jsonl.old").read_text() == "hours of work"
    journal.write_text("more hours")
    assert _bisect_command._journal(options) == journal
    assert (tmp_path / "bisect-journal.jsonl.old").read_text() == "hours of work"
    assert (tmp_path / "bisect-journal.jsonl.old1").read_text() == "more hours"
    with pytest.raises(ArgumentError, match="--resume: there is no journal"):
        _bisect_command._journal(parsed("--out", str(tmp_path), "--resume"))
    journal.write_text("more")
    assert _bisect_command._journal(parsed("--out", str(tmp_path), "--resume")) == journal
    assert journal.read_text() == "more"
    other = tmp_path / "elsewhere.jsonl"
    assert _bisect_command._journal(parsed("--out", str(tmp_path), "--journal", str(other))) == other
    with pytest.raises(ArgumentError, match="--resume needs the journal of the search"):
        _bisect_command._journal(parsed("--resume"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--update-expect"], "--update-expect needs the file to write"),
        (["--expect", "no-such-file.json"], "no-such-file.json"),
        (["--direction", "down", "--patch"], "--patch and --confirm keep operators in float32"),
        (["--direction", "down", "--confirm", "graph"], "--patch and --confirm keep operators in float32"),
        (["--resume"], "--resume needs the journal"),
    ],
)
def test_options_that_contradict_each_other_are_said_before_anything_runs(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bisect", "no_such_module:task", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--level", "O4"], ["--unit", "layer"], ["--workers", "many"], ["--nothing"]])
def test_options_there_are_not(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bisect", "net.py:task", *option])
    assert ended.value.code == 2
    assert option[0] in capsys.readouterr().err


def test_by_default_one_process_of_its_own_runs_the_probes() -> None:
    options = parsed()
    assert (options.workers, options.level, options.unit, options.direction) == (1, None, "op", "up")


def test_the_line_is_written_over_and_leaves_no_trace() -> None:
    terminal = io.StringIO()
    shown = _bisect_command._Shown(terminal)
    shown.say("recording")
    for probes in range(5):
        shown(Progress(probes, 20, None, 1.0, 30.0, "prefix"))
    shown.clear()
    written = terminal.getvalue()
    assert written.count("probes") == 1, "ten times a second at most"
    assert "\n" not in written
    assert written.endswith("\r\x1b[K")


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ((0, 20, None, 0.0, 0.0), "[....................] 0 of at most 20 probes, no set passed yet, at most 0 s left"),
        (
            (5, 20, 3, 9.0, 59.4),
            "[#####...............] 5 of at most 20 probes, smallest set so far 3, at most 59 s left",
        ),
        (
            (20, 20, 2, 9.0, 80.0),
            "[####################] 20 of at most 20 probes, smallest set so far 2, at most 1 min 20",
        ),
    ],
)
def test_the_line_of_progress(fields: Any, line: str) -> None:
    assert progress_line(Progress(*fields, "verify")).startswith(line)
