"""``ampdebug compare``: its options.

Exit codes: 0 there is a comparison; 1 O0 itself does not train, so that nothing can be compared; 2 it could not be run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from ampdebug._compare_records import LEVELS, MODES
from ampdebug._needs import needs_mindspore
from ampdebug._terminal import StatusLine

DESCRIPTION = "Train a workload at every AMP level, one variable at a time, and recommend one."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "target",
        metavar="MODULE:WORKLOAD",
        help="an ampdebug.Workload, or a function that returns one, in a module or a file.py",
    )
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=LEVELS, help="default: all; O0 runs in any case")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="default: both")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="of each training (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="that O0 is run with (default: %(default)s)")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="T",
        help="how much worse than O0's the metric (without one: the final loss) may be, in its own unit",
    )
    parser.add_argument("--loss-scale", type=float, metavar="S", help="static, in place of the workload's")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds for each run (default: %(default)s)"
    )
    parser.add_argument("--no-kernels", action="store_true", help="do not measure whether float16 is accelerated here")
    parser.add_argument("--out", metavar="RUN", help="store the result with this run (made if missing)")
    parser.add_argument("--json", action="store_true", help="everything as JSON")


def run(arguments: argparse.Namespace) -> tuple[str, int]:
    """The command: what it prints, and its exit code.

    Raises:
        ArgumentError: An option breaks a rule.
        AmpdebugError: It could not be run.
    """
    instead = "`ampdebug report` shows a result that is stored in a run without"
    with needs_mindspore("`ampdebug compare` trains", instead):
        from ampdebug.hooks._compare import compare_target
    shown = StatusLine(sys.stderr) if sys.stderr.isatty() else None
    options: dict[str, Any] = {
        name: getattr(arguments, name) for name in ("steps", "seeds", "tolerance", "loss_scale", "timeout", "out")
    }
    try:
        report = compare_target(
            arguments.target,
            levels=_once(arguments.levels),
            modes=_once(arguments.modes),
            kernels=not arguments.no_kernels,
            progress=None if shown is None else shown.say,
            **options,
        )
    finally:
        if shown is not None:
            shown.clear()
    code = 1 if all(advice.level is None for advice in report.advice) else 0
    return (json.dumps(report.to_dict(), indent=1, allow_nan=False) if arguments.json else str(report)), code


def _once(given: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(given))
