"""``ampdebug doctor``: what this machine is, and what on it changes numbers. Works where MindSpore is not installed."""

from __future__ import annotations

import html
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampdebug._diagnose import _wrap
from ampdebug._doctor_rules import (
    Line,
    judge_environment,
    judge_kernels,
    judge_settings,
    judge_versions,
)
from ampdebug._errors import ArgumentError

_DISTRIBUTIONS = ("mindspore", "numpy", "protobuf", "tensorboardX", "tabulate", "numba")
_DTYPES = ("float32", "float16", "bfloat16")
_KERNELS = ("matmul", "conv")


@dataclass(frozen=True)
class DoctorReport:
    """What the doctor found. ``str()`` is the report.

    Attributes:
        lines: One for each thing looked at.
    """

    lines: tuple[Line, ...]

    @property
    def ok(self) -> bool:
        """Nothing to warn of."""
        return all(line.status == "ok" for line in self.lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"verdict": "ok" if self.ok else "warnings", "lines": [line.to_dict() for line in self.lines]}

    def __str__(self) -> str:
        width = max(len(line.subject) for line in self.lines)
        warnings = sum(line.status == "warn" for line in self.lines)
        told = [f"{warnings} warning{'s' if warnings != 1 else ''}." if warnings else "Everything fits."]
        for line in self.lines:
            told.append(f"{line.status:4}  {line.subject:{width}}  {line.found}")
            indent = " " * (6 + width + 2)
            if line.why:
                told.append(_wrap(f"Why: {line.why}.", indent + "     ", indent))
            if line.action:
                told.append(_wrap(f"Do: {line.action}.", indent + "    ", indent))
        return "\n".join(told)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def doctor(*, measure: bool = True, timeout: float = 60.0) -> DoctorReport:
    """Look at this machine: versions that fit, kernels, settings and environment variables that change numbers.

    Kernels are timed in child processes, since a missing one can take its process down.

    Args:
        measure: Time a matmul and a convolution in float32, float16 and bfloat16; takes some ten seconds.
        timeout: Seconds for each child process.

    Returns:
        The report; ``str()`` of it has one line for each thing.

    Raises:
        ArgumentError: ``timeout`` is not positive.

    Example:
        >>> print(ampdebug.doctor(measure=False))  # doctest: +SKIP
    """
    if not timeout > 0:
        raise ArgumentError(f"timeout={timeout!r}: must be a positive number of seconds")
    versions = {name: _version(name) for name in _DISTRIBUTIONS}
    requires = importlib.metadata.requires("mindspore") or [] if versions["mindspore"] is not None else []
    python = (sys.version_info.major, sys.version_info.minor)
    lines = [*judge_versions(versions, python, requires), *judge_environment(_environment())]
    if versions["mindspore"] is not None:
        lines += _settings(timeout)
        if measure:
            lines += judge_kernels(list(_kernels(timeout)))
    return DoctorReport(tuple(lines))


def _environment() -> dict[str, str]:
    found = dict(os.environ)
    if "mindspore" in sys.modules:
        # MindSpore sets it itself when it is imported; that is not the user's doing.
        found.pop("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", None)
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _settings(timeout: float) -> Iterator[Line]:
    if "mindspore" in sys.modules:
        from ampdebug.hooks._machine import settings

        yield from judge_settings({**settings(), "here": True})
        return
    answers, ended = ask(["settings"], timeout)
    known = next((answer["settings"] for answer in answers if "settings" in answer), None)
    if known is None:
        yield Line("mindspore import", "warn", ended, "MindSpore cannot be imported here", "see the versions above")
    else:
        yield from judge_settings({**known, "here": False})


def _kernels(timeout: float) -> Iterator[dict[str, Any]]:
    """The results of all kernels in all dtypes; float32's sizes are taken for the others."""
    sizes = dict.fromkeys(_KERNELS, 0)
    for dtype in _DTYPES:
        left = list(_KERNELS)
        while left:
            answers, ended = ask([f"{dtype}:{kernel}:{sizes[kernel]}" for kernel in left], timeout)
            done = [answer for answer in answers if "kernel" in answer]
            for answer in done:
                left.remove(answer["kernel"])
                if dtype == "float32" and "size" in answer:
                    sizes[answer["kernel"]] = answer["size"]
                yield answer
            if not any("failed" in answer for answer in done) and left:
                # It ended in the middle of one, by a crash or the clock; the others get a process of their own.
                yield {"kernel": left.pop(0), "dtype": dtype, "failed": ended}


def ask(questions: Sequence[str], timeout: float) -> tuple[list[dict[str, Any]], str]:
    """Lets a child process answer; see ``ampdebug.hooks._machine``.

    Returns:
        ``(the answers that came, how the process ended)``.
    """
    package = Path(__file__).resolve().parent.parent
    paths = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory(prefix="ampdebug-doctor-") as folder:  # MindSpore litters the current folder
        try:
            done = subprocess.run(
                [sys.executable, "-m", "ampdebug.hooks._machine", *questions],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": paths, "GLOG_v": "3"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout,
                check=False,
            )
            output, ended = done.stdout, f"the process ended with exit code {done.returncode}"
            if done.returncode > 0 and done.stderr.strip():
                ended = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1][:300]
        except subprocess.TimeoutExpired as error:
            output, ended = error.stdout or b"", f"no answer in {timeout:g} s"
    answers = []
    for line in output.decode("utf-8", "replace").splitlines():
        try:
            answer = json.loads(line)
        except ValueError:  # whatever else a library printed, or a line cut by a crash
            continue
        if isinstance(answer, dict):
            answers.append(answer)
    return answers, ended
