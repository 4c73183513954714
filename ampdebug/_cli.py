"""The command line: every command is a few lines over the public interface.

Exit codes: 0 done; 1 it could not be done (no such run, a damaged file, a full disk, the script failed); 2 the command
line is wrong. Errors are one line on stderr. For scripts, ``diagnose`` and ``check`` return 0 nothing is wrong; 1 there
are findings; 2 it could not be read or run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

import ampdebug
from ampdebug import _bisect_command, _compare_command, _inference_command
from ampdebug._errors import AmpdebugError, ArgumentError
from ampdebug._needs import needs_mindspore

_SORTS = ("weight", "order", "name", "absmax", "nonfinite", "flushed", "zeros")


def _report(arguments: argparse.Namespace) -> int:
    with ampdebug.open_run(arguments.run) as opened, _rank(opened, arguments.rank) as run:
        if arguments.html is not None:
            return _page(run, arguments)
        report = ampdebug.build_report(
            run,
            show_all=arguments.all,
            cells=arguments.cell,
            step=arguments.step,
            sort=arguments.sort,
            progress=_progress("reading steps"),
        )
        print(report)
    return 0


def _page(run: ampdebug.Run, arguments: argparse.Namespace) -> int:
    for option, given in (("--cell", arguments.cell), ("--step", arguments.step)):
        if given is not None:
            raise ArgumentError(f"{option} {given} does not go with --html, which shows the whole run; leave one out")
    print(ampdebug.write_html(run, arguments.html, progress=_progress("reading steps")))
    for problem in run.problems:
        print(f"ampdebug: left out: {problem}", file=sys.stderr)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    with ampdebug.open_run(arguments.run) as opened, _rank(opened, arguments.rank) as run:
        target = sys.stdout if arguments.output in (None, "-") else arguments.output
        ampdebug.export(run, arguments.format, target, table=arguments.table, progress=_progress("writing steps"))
        for problem in run.problems:
            print(f"ampdebug: left out: {problem}", file=sys.stderr)
    return 0


def _tensorboard(arguments: argparse.Namespace) -> int:
    with ampdebug.open_run(arguments.run) as run:
        for path in ampdebug.write_tensorboard(run, arguments.logdir, progress=_progress("writing steps")):
            print(path)
        for problem in run.problems:
            print(f"ampdebug: left out: {problem}", file=sys.stderr)
    return 0


def _run(arguments: argparse.Namespace) -> int:
    if arguments.every < 1:
        raise ArgumentError(f"--every {arguments.every} must be 1 (statistics in every step) or more")
    if arguments.keep_bad_steps < 0:
        raise ArgumentError(f"--keep-bad-steps {arguments.keep_bad_steps} must be 0 (none are kept) or more")
    if not os.path.isfile(arguments.script):
        raise ArgumentError(
            f"{arguments.script!r} is not a file; give the training script: ampdebug run train.py ARGS…"
        )
    with needs_mindspore("`ampdebug run` trains", "Reading a recorded run works without"):
        from ampdebug.hooks._script import run_script
    return run_script(
        arguments.script,
        arguments.arguments,
        out=arguments.out,
        every=arguments.every,
        keep_bad_steps=arguments.keep_bad_steps,
    )


def _diagnose(arguments: argparse.Namespace) -> int:
    found = ampdebug.diagnose(
        arguments.path,
        format=arguments.format,
        pattern=arguments.pattern,
        against=arguments.against,
        progress=_progress("reading", share=True),
    )
    return _answer(found, as_json=arguments.json)


def _check(arguments: argparse.Namespace) -> int:
    with needs_mindspore("`ampdebug check` runs the network", "`ampdebug diagnose` works without"):
        from ampdebug.hooks._preflight_target import check_target
    return _answer(check_target(arguments.target, level=arguments.level), as_json=arguments.json)


def _audit(arguments: argparse.Namespace) -> int:
    with needs_mindspore("`ampdebug audit` runs the network", "`ampdebug checkpoint` works without"):
        from ampdebug.hooks._level_audit_target import audit_target
    if arguments.against is not None and arguments.cells is not None:
        raise ArgumentError("--cells does not go with --against, which shows every cell that changes; leave one out")
    report, changes = audit_target(
        arguments.target,
        level=arguments.level,
        against=arguments.against,
        mode="graph" if arguments.graph else "pynative",
        backward=not arguments.no_backward,
    )
    if arguments.out is not None:
        from ampdebug._store_result import append_result

        append_result(arguments.out, "audit", report.to_dict())
    shown = report if arguments.cells is None else report.only(arguments.cells)
    if arguments.json:
        both = {**shown.to_dict(), "against": None if changes is None else changes.to_dict()}
        print(json.dumps(both, indent=1, allow_nan=False))
    else:
        print(shown if changes is None else changes)
    return 0 if report.ok else 1


def _replay(arguments: argparse.Namespace) -> int:
    instead = "`ampdebug report` and `ampdebug diagnose` read the run without"
    with needs_mindspore("`ampdebug replay` runs the network", instead):
        from ampdebug.hooks._replay import replay_target
    found = replay_target(
        arguments.run, arguments.target, step=arguments.step, level=arguments.level, rank=arguments.rank
    )
    print(json.dumps(found.to_dict(), indent=1, allow_nan=False) if arguments.json else found)
    return 0 if found.verdict == "not reproduced" else 1


def _checkpoint(arguments: argparse.Namespace) -> int:
    report = ampdebug.audit_checkpoint(
        arguments.file, against=arguments.against, progress=_progress("reading", share=True)
    )
    print(json.dumps(report.to_dict(), indent=1, allow_nan=False) if arguments.json else report)
    return 0 if report.ok else 1


def _bisect(arguments: argparse.Namespace) -> int:
    text, code = _bisect_command.run(arguments)
    print(text)
    return code


def _compare(arguments: argparse.Namespace) -> int:
    text, code = _compare_command.run(arguments)
    print(text)
    return code


def _inference(arguments: argparse.Namespace) -> int:
    text, code = _inference_command.run(arguments)
    print(text)
    return code


def _doctor(arguments: argparse.Namespace) -> int:
    report = ampdebug.doctor(measure=not arguments.quick, timeout=arguments.timeout)
    print(json.dumps(report.to_dict(), indent=1) if arguments.json else report)
    return 0 if report.ok else 1


def _answer(found: ampdebug.Diagnosis, *, as_json: bool) -> int:
    print(json.dumps(found.to_dict(), indent=1, allow_nan=False) if as_json else found)
    return 0 if found.ok else 1


def _rank(run: ampdebug.Run, rank: int | None) -> ampdebug.Run:
    return run if rank is None else run.rank(rank)


def _progress(what: str, *, share: bool = False) -> Callable[[int, int | None], None] | None:
    """A line on a terminal's stderr that counts, once it has taken a second; nothing where nobody looks.

    Args:
        what: Comes before the count.
        share: What is counted is bytes: show the share of all, or megabytes where their number is unknown.
    """
    if not sys.stderr.isatty():
        return None
    start = time.monotonic()
    shown = [0.0]

    def show(done: int, total: int | None) -> None:
        now = time.monotonic()
        if total is not None and done >= total:
            if shown[0]:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        elif now - start > 1 and now - shown[0] > 0.1:
            shown[0] = now
            count = f"{done} of {total}"
            if share:
                count = f"{done / 1e6:.0f} MB" if total is None else f"{100 * done // max(1, total)} %"
            print(f"\r{what}: {count}", end="", file=sys.stderr, flush=True)

    return show


def _glob(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the pattern is empty; '*' matches everything, '(network)' the network itself")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ampdebug",
        description="Numerical-precision debugging for MindSpore mixed-precision training.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ampdebug {ampdebug.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, function: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        made.set_defaults(function=function, unreadable=1)
        return made

    def reads_run(made: argparse.ArgumentParser, *, rank: bool = True) -> None:
        made.add_argument("run", metavar="RUN", help="directory of a recorded run, or its .sqlite file")
        if rank:
            made.add_argument("--rank", type=int, help="which rank of a run with several (default: the lowest)")

    made = command("report", _report, "Show the cells that deserve a look, then loss, loss scale and overflows.")
    reads_run(made)
    made.add_argument("--all", action="store_true", help="every cell and parameter, and no limit of lines")
    made.add_argument(
        "--cell", metavar="GLOB", type=_glob, help="only paths and parameter names that match, each tensor"
    )
    made.add_argument("--step", type=int, metavar="N", help="one step only")
    made.add_argument("--sort", choices=_SORTS, default="weight", help="default: what explains most comes first")
    made.add_argument("--html", metavar="FILE", help="write all of it as one page of HTML that needs no network")

    made = command("export", _export, "Hand the rows of a run to other tools.")
    reads_run(made)
    made.add_argument("--format", choices=("csv", "jsonl"), required=True)
    made.add_argument("--table", choices=("tensors", "steps"), help="which table, for csv into one file")
    made.add_argument("-o", "--output", metavar="FILE", help="default: standard output")

    made = command("tensorboard", _tensorboard, "Write TensorBoard event files.")
    reads_run(made, rank=False)
    made.add_argument("logdir", metavar="LOGDIR", help="a directory without event files; made if missing")

    made = command("diagnose", _diagnose, "Say what happened to the numbers of a run and why.")
    made.add_argument(
        "path", metavar="PATH", help="a training log (also .gz, .bz2, .xz), a recorded run, or - for stdin"
    )
    made.add_argument("--json", action="store_true", help="the findings as JSON")
    made.add_argument("--format", metavar="NAME", help="read this log format only (default: recognised by itself)")
    made.add_argument(
        "--pattern", metavar="REGEX", help="a log format of your own: named groups step, loss, scale, ..."
    )
    made.add_argument("--against", metavar="PATH", help="a second run or log: where and how the two part")
    made.set_defaults(unreadable=2)

    made = command("check", _check, "Run one instrumented training step of a network and say what is wrong with it.")
    made.add_argument(
        "target",
        metavar="MODULE:FACTORY",
        help="a function that returns (net, inputs[, loss_fn[, optimizer]]), in a module or a file.py",
    )
    made.add_argument("--level", choices=("O0", "O1", "O2", "O3", "auto"), help="convert the network to it first")
    made.add_argument("--json", action="store_true", help="the findings as JSON")
    made.set_defaults(unreadable=2)

    made = command("audit", _audit, "Say what every cell and operator of a network really runs in at an AMP level.")
    made.add_argument(
        "target",
        metavar="MODULE:FACTORY",
        help="a function that returns (net, inputs[, loss_fn]), or a Workload, in a module or a file.py",
    )
    made.add_argument("--level", choices=("O0", "O1", "O2", "O3", "auto"), default="O2", help="default: %(default)s")
    made.add_argument("--against", metavar="LEVEL|MODULE:FACTORY", help="show what changes from there to here")
    made.add_argument("--cells", metavar="GLOB", type=_glob, help="every operator of the cells that match")
    made.add_argument("--graph", action="store_true", help="compile it and read the dtypes off the graph")
    made.add_argument("--no-backward", action="store_true", help="the forward pass only")
    made.add_argument("--out", metavar="RUN", help="store the result with this run (made if missing)")
    made.add_argument("--json", action="store_true", help="everything as JSON")
    made.set_defaults(unreadable=2)

    made = command("replay", _replay, "Run a step again that went wrong and was kept, operator by operator.")
    reads_run(made)
    made.add_argument(
        "target",
        metavar="MODULE:FACTORY",
        help="a function that returns (net[, inputs][, loss_fn]), or a Workload, in a module or a file.py",
    )
    made.add_argument("--step", type=int, metavar="K", help="which of the kept steps (default: the first)")
    made.add_argument("--level", choices=("O0", "O1", "O2", "O3", "auto"), help="default: the level of the run")
    made.add_argument("--json", action="store_true", help="the answer as JSON")
    made.set_defaults(unreadable=2)

    made = command("bisect", _bisect, _bisect_command.DESCRIPTION)
    _bisect_command.add_arguments(made)
    made.set_defaults(unreadable=2)

    made = command("compare", _compare, _compare_command.DESCRIPTION)
    _compare_command.add_arguments(made)
    made.set_defaults(unreadable=2)

    made = command("inference", _inference, _inference_command.DESCRIPTION)
    _inference_command.add_arguments(made)
    made.set_defaults(unreadable=2)

    made = command("checkpoint", _checkpoint, "Say what a checkpoint file holds: dtypes, non-finite values, float16.")
    made.add_argument("file", metavar="FILE", help="a .ckpt or .safetensors file")
    made.add_argument("--against", metavar="FILE", help="compare it with another one, parameter by parameter")
    made.add_argument("--json", action="store_true", help="every parameter as JSON")
    made.set_defaults(unreadable=2)

    made = command("doctor", _doctor, "Look at this machine: versions, kernels, and settings that change numbers.")
    made.add_argument("--quick", action="store_true", help="do not time kernels")
    made.add_argument("--timeout", type=float, default=60.0, metavar="S", help="for each kernel (default: %(default)s)")
    made.add_argument("--json", action="store_true", help="every line as JSON")
    made.set_defaults(unreadable=2)

    made = command("run", _run, "Run a training script as it is, with the monitor on.")
    made.usage = "ampdebug run [-h] [--every N] [--out DIR] [--keep-bad-steps N] train.py ARGS…"
    made.add_argument("--every", type=int, default=1, metavar="N", help="statistics in every N-th step (default: 1)")
    made.add_argument("--out", default="runs/ampdebug", metavar="DIR", help="where the run goes (default: %(default)s)")
    made.add_argument(
        "--keep-bad-steps",
        type=int,
        default=0,
        metavar="N",
        help="keep what `ampdebug replay` needs of the first N steps that go wrong (default: %(default)s)",
    )
    made.add_argument("script", metavar="train.py")
    made.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS…", help="handed to the script untouched")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        arguments: Without the program's name; None takes those of the process.
    """
    parsed = _parser().parse_args(arguments)
    try:
        code: int = parsed.function(parsed)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read our output has seen enough (`| head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE if hasattr(signal, "SIGPIPE") else 1
    except ArgumentError as error:
        print(f"ampdebug {parsed.command}: {error}", file=sys.stderr)
        return 2
    except (AmpdebugError, OSError) as error:
        print(f"ampdebug {parsed.command}: {error}", file=sys.stderr)
        unreadable: int = parsed.unreadable
        return unreadable
