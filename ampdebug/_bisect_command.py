"""``ampdebug bisect``: its options, what it shows while it searches, and what its exit code says.

Exit codes: 0 there is an answer (also: nothing to find; precision is not the cause); 1 no set of operators was seen to
be enough, the set is another one than ``--expect`` says, or ``--update-expect`` was to keep one that is not complete; 2
it could not be run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ampdebug._errors import ArgumentError
from ampdebug._needs import needs_mindspore
from ampdebug._terminal import StatusLine

if TYPE_CHECKING:  # numpy is not for those who ask for --help
    from ampdebug._bisect_result import BisectResult
    from ampdebug._patch import Patch
    from ampdebug._search import Progress

DESCRIPTION = "Find the smallest set of operators that must stay in float32, with their source lines."
JOURNAL = "bisect-journal.jsonl"
"""The journal in the directory of ``--out``."""

_HANDED_ON = (
    *("level", "dtype", "unit", "direction", "probe", "tolerance", "threshold", "better", "checkpoint", "run"),
    *("max_probes", "max_seconds", "workers", "timeout", "seed", "out"),
)
_ANSWERS = ("found", "nothing-to-find", "precision-innocent")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "target",
        metavar="MODULE:WORKLOAD",
        help="an ampdebug.Workload, a pair (network, evaluate), or a function that returns one; in a module or file.py",
    )
    parser.add_argument(
        "--level", choices=("O0", "O1", "O2", "O3", "auto"), help="default: O2; with --direction down O0"
    )
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16", help="default: %(default)s")
    parser.add_argument("--unit", choices=("op", "cell"), default="op", help="what is moved as one (default: op)")
    parser.add_argument(
        "--probe",
        metavar="NAME",
        help="what is good: output, grad (or grad:cosine, grad:worst), finite, train:N, overflow:N, metric or "
        "metric:N, with N training steps (default: grad)",
    )
    parser.add_argument("--tolerance", type=float, metavar="X", help="how much worse than float32 is good enough")
    parser.add_argument("--threshold", type=float, metavar="X", help="an absolute limit instead")
    parser.add_argument("--better", choices=("higher", "lower"), help="of a pair: which way evaluate improves")
    parser.add_argument(
        "--direction",
        choices=("up", "down"),
        default="up",
        help="up: what must stay in float32 for the level to work (default); down: what of the level's float32 may go "
        "to 16 bits",
    )
    parser.add_argument("--checkpoint", metavar="FILE", help="begin in this state: .ckpt, .safetensors")
    parser.add_argument("--run", metavar="RUN", help="begin before the first bad step that this recorded run kept")
    parser.add_argument("--max-probes", type=int, metavar="N", help="stop after so many, with the best answer so far")
    parser.add_argument("--max-seconds", type=float, metavar="S", help="begin no probe later than this")
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes for probes; 0: in this one (default: 1)"
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="a probe that takes longer has failed")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of every measurement (default: 0)")
    parser.add_argument("--out", metavar="DIR", help="add the result to this run, a recorded one or a new one")
    parser.add_argument("--journal", metavar="FILE", help=f"where probes are written (default: {JOURNAL} in --out)")
    parser.add_argument("--resume", action="store_true", help="go on with the journal, repeating no probe")
    parser.add_argument(
        "--confirm",
        choices=("pynative", "graph"),
        help="measure the network once more in this mode, with the culprits' cells in float32 by MindSpore's own flags",
    )
    parser.add_argument(
        "--patch",
        nargs="?",
        const="-",
        metavar="FILE",
        help="the change to your source as a unified diff, into a file or after the table, run before it is shown (in "
        "the mode of --confirm, else pynative)",
    )
    parser.add_argument("--expect", metavar="FILE", help="exit with 1 if the answer is not the one kept in this file")
    parser.add_argument(
        "--update-expect", action="store_true", help="write the answer, if it is complete, to the file of --expect"
    )
    parser.add_argument("--json", action="store_true", help="the result as JSON")


def run(arguments: argparse.Namespace) -> tuple[str, int]:
    """The command: what it prints, and its exit code.

    Raises:
        ArgumentError: Options contradict each other.
        AmpdebugError: It could not be run.
    """
    _check(arguments)
    journal = _journal(arguments)
    shown = _Shown(sys.stderr) if sys.stderr.isatty() else None
    try:
        result = _search(arguments, journal, shown)
        if result.origin is not None and arguments.confirm is not None:
            result = result.confirm(mode=arguments.confirm)
        patch = None
        if result.origin is not None and arguments.patch is not None:
            patch = result.patch(mode=arguments.confirm or "pynative")
            if arguments.patch != "-":
                Path(arguments.patch).write_text(patch.diff, encoding="utf-8")
    finally:
        if shown is not None:
            shown.clear()
    from ampdebug._expect import Expectation, compare_expected

    complete = result.status in _ANSWERS
    answered = result.sufficient or complete
    comparison, kept = None, ""
    if arguments.update_expect:
        if complete:
            Expectation.of(result).write(arguments.expect)
            kept = f"the answer is in {arguments.expect}"
        else:  # a gate made of it would ask every later search to stop at the same place
            answered = False
            kept = f"{arguments.expect} was not written: the answer is not complete ({result.status})"
    elif arguments.expect is not None:
        comparison = compare_expected(result, arguments.expect)
    code = 0 if answered and (comparison is None or comparison.same) else 1
    if arguments.json:
        data = result.to_dict()
        if patch is not None:
            data["patch"] = {"verified": patch.verified, "reason": patch.reason, "diff": patch.diff}
        if comparison is not None:
            data["as_expected"] = comparison.same
        if arguments.update_expect:
            data["expectation_written"] = complete
        return json.dumps(data, indent=1, allow_nan=False), code
    parts = [str(result)]
    if patch is not None:
        parts.append(str(patch) if arguments.patch == "-" else f"patch in {arguments.patch}: {_first_line(patch)}")
    elif arguments.patch is not None:
        parts.append(f"no patch: there is nothing to change ({result.status})")
    if comparison is not None:
        parts.append(str(comparison))
    if kept:
        parts.append(kept)
    return "\n\n".join(parts), code


def _first_line(patch: Patch) -> str:
    return str(patch).split("\n", 1)[0]


def _check(arguments: argparse.Namespace) -> None:
    if arguments.update_expect and arguments.expect is None:
        raise ArgumentError("--update-expect needs the file to write: --expect FILE")
    if arguments.expect is not None and not arguments.update_expect:
        from ampdebug._expect import Expectation

        Expectation.read(arguments.expect)  # an hour of search must not end in a misspelt name
    if arguments.patch not in (None, "-") and not Path(arguments.patch).resolve().parent.is_dir():
        raise ArgumentError(f"--patch {arguments.patch}: there is no directory {str(Path(arguments.patch).parent)!r}")
    if arguments.direction == "down" and (arguments.patch is not None or arguments.confirm is not None):
        raise ArgumentError("--patch and --confirm keep operators in float32; with --direction down leave them out")


def _journal(arguments: argparse.Namespace) -> Path | None:
    """The journal's file. Without ``--resume`` an old one is put aside, never written over: it may be hours of work."""
    if arguments.journal is None and arguments.out is None:
        if arguments.resume:
            raise ArgumentError("--resume needs the journal of the search to go on with: give --out or --journal")
        return None
    path = Path(arguments.journal) if arguments.journal is not None else Path(arguments.out) / JOURNAL
    if arguments.resume:
        if not path.exists():
            raise ArgumentError(f"--resume: there is no journal {str(path)!r}; leave --resume out to begin a search")
    elif path.exists():
        names = (path.with_name(f"{path.name}.old{number or ''}") for number in itertools.count())
        os.rename(path, next(name for name in names if not name.exists()))
    return path


def _search(arguments: argparse.Namespace, journal: Path | None, shown: _Shown | None) -> BisectResult:
    instead = "`ampdebug report` shows a result that is stored in a run without"
    with needs_mindspore("`ampdebug bisect` runs the network", instead):
        from ampdebug.hooks._bisection import bisect_target
    options: dict[str, Any] = {name: getattr(arguments, name) for name in _HANDED_ON}
    if shown is not None:
        shown.say("recording and checking the network")
    return bisect_target(arguments.target, journal=journal, progress=shown, **options)


class _Shown(StatusLine):
    """How far the search is."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._last = 0.0

    def __call__(self, progress: Progress) -> None:
        """Shows the state after a probe, at most ten times a second."""
        now = time.monotonic()
        if now - self._last < 0.1 and progress.probes < progress.bound:
            return
        self._last = now
        self.say(progress_line(progress))


_BAR = 20


def progress_line(progress: Progress) -> str:
    """``[#####...............] 5 of at most 23 probes, smallest set so far 3, 1 min 20 s left``."""
    share = min(1.0, progress.probes / max(1, progress.bound))
    bar = "#" * round(_BAR * share)
    size = "no set passed yet" if progress.size is None else f"smallest set so far {progress.size}"
    seconds = round(progress.seconds_left)
    left = f"{seconds} s" if seconds < 60 else f"{seconds // 60} min {seconds % 60} s"
    return f"[{bar:.<{_BAR}}] {progress.probes} of at most {progress.bound} probes, {size}, at most {left} left"
