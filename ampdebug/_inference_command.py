"""``ampdebug inference``: its options.

Exit codes: 0 the outputs are within the tolerance; 1 they are not; 2 it could not be run.
"""

from __future__ import annotations

import argparse
import json

from ampdebug._needs import needs_mindspore

DESCRIPTION = "Compare the outputs of a trained network in 16 bits with float32, on your data."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "target",
        metavar="MODULE:WORKLOAD",
        help="an ampdebug.Workload, or a function that returns one, in a module or a file.py",
    )
    parser.add_argument(
        "--checkpoint", metavar="FILE", help=".ckpt or .safetensors; without it the network as it is made"
    )
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16", help="default: %(default)s")
    parser.add_argument("--level", choices=("O1", "O2", "O3", "auto"), default="O3", help="default: %(default)s")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="T",
        help="how much worse the metric may be, in its own unit; without a metric the relative error of the outputs",
    )
    parser.add_argument("--batches", type=int, metavar="N", help="look at the first N batches (default: all)")
    parser.add_argument("--no-metric", action="store_true", help="judge by the outputs although there is a metric")
    parser.add_argument("--out", metavar="RUN", help="store the result with this run (made if missing)")
    parser.add_argument("--json", action="store_true", help="everything as JSON")


def run(arguments: argparse.Namespace) -> tuple[str, int]:
    """The command: what it prints, and its exit code.

    Raises:
        ArgumentError: An option breaks a rule.
        AmpdebugError: It could not be run.
    """
    instead = "`ampdebug checkpoint` looks into the file without"
    with needs_mindspore("`ampdebug inference` runs the network", instead):
        from ampdebug.hooks._inference import inference_target
    report = inference_target(
        arguments.target,
        arguments.checkpoint,
        dtype=arguments.dtype,
        level=arguments.level,
        tolerance=arguments.tolerance,
        batches=arguments.batches,
        use_metric=not arguments.no_metric,
        out=arguments.out,
    )
    text = json.dumps(report.to_dict(), indent=1, allow_nan=False) if arguments.json else str(report)
    return text, 0 if report.ok else 1
