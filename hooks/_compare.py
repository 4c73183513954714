"""``ampdebug.compare``: trains a workload at every level, each run in a process of its own."""

from __future__ import annotations

import math
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mindspore

from ampdebug._compare import ComparisonReport, judge_comparison
from ampdebug._compare_records import LEVELS, MODES, BaselineRuns, Kernel, Measured, Mode, TrainingRun
from ampdebug._doctor import ask
from ampdebug._errors import AmpdebugError, ArgumentError, ProbeError
from ampdebug._store_result import append_result
from ampdebug._target import executed, load_workload
from ampdebug._workers import WorkerExecutor
from ampdebug._workload import Workload
from ampdebug.hooks._compare_shares import share_of
from ampdebug.hooks._compare_training import TrainingSpec, run_training

_KERNELS = ("matmul", "conv")
_KERNEL_SECONDS = 120.0


def compare(
    workload: Workload | str,
    *,
    levels: Sequence[str] = LEVELS,
    modes: Sequence[Mode] = MODES,
    steps: int = 60,
    seeds: int = 3,
    tolerance: float | None = None,
    loss_scale: float | None = None,
    timeout: float = 600.0,
    kernels: bool = True,
    out: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> ComparisonReport:
    """Train a workload at every AMP level, one variable at a time, and recommend one.

    All runs have the same weights, the same order of the data and the same seed. In each mode O0 comes first: twice, to
    see whether it is reproducible, and with other seeds, to see what a seed does; the gaps of the levels are given in
    units of that. Each run has a process of its own, one after the other: a level that crashes, hangs or does not
    compile is a row with its reason. The rules of the recommendation are in docs/compare.md.

    Args:
        workload: With loss and optimizer, and with a metric if there is one. Or its name, ``"train.py:workload"``.
        levels: Of ``"O0"``, ``"O1"``, ``"O2"``, ``"O3"``, ``"auto"``; O0 runs in any case.
        modes: Of ``"pynative"`` and ``"graph"``. Levels can do different things in the two.
        steps: Of each training, at least 2. Data that end begin again.
        seeds: How many seeds O0 is run with, at least 2.
        tolerance: How much worse the metric (without one: the final loss) may be than O0's, in its own unit. Without
            it 2 % of O0's, or three times its noise if that is more.
        loss_scale: Static loss scale at the 16-bit levels, in place of the workload's.
        timeout: Seconds that one run may take, its imports apart.
        kernels: Measure whether float16 is accelerated on this device; takes some ten seconds.
        out: Directory of a run, recorded or new, that the result is added to.
        progress: Called with what begins.

    Returns:
        The report; ``print`` shows it as a table with the recommendation.

    Raises:
        ArgumentError: An argument breaks a rule, or the workload does.
        StoreError: The result cannot be stored.

    Example::

        print(ampdebug.compare("train.py:workload", levels=("O0", "O2", "auto"), steps=200, tolerance=0.005))
    """
    _check(levels, modes, steps, seeds, tolerance, timeout)
    made = load_workload(workload) if isinstance(workload, str) else workload
    if not isinstance(made, Workload):
        raise ArgumentError(f"workload is a {type(made).__name__}; it must be an ampdebug.Workload or the name of one")
    made.require("loss", "optimizer", purpose="compare")
    if loss_scale is not None:
        replace(made, loss_scale=loss_scale)  # for its check
    if not isinstance(workload, str):
        _check_sendable(workload)
    say = progress or (lambda text: None)
    measured = _Measurements(workload, steps, loss_scale, timeout, say)
    baselines = {mode: measured.baseline(mode, seeds) for mode in modes}
    runs = tuple(measured.level(level, mode) for mode in modes for level in levels if level != "O0")
    if kernels:
        say("float16 kernels of this device")
    report = judge_comparison(
        Measured(
            _name(workload, made),
            steps,
            made.better,
            made.metric is not None,
            baselines,
            runs,
            _kernels() if kernels else (),
            str(mindspore.get_context("device_target")),
            tolerance,
            measured.load,
        )
    )
    if out is not None:
        append_result(out, "compare", report.to_dict())
    return report


def compare_target(target: str, **options: Any) -> ComparisonReport:
    """``compare`` for the command line.

    Raises:
        AmpdebugError: As ``compare``, and also where the user's own code raised; its traceback went to stderr.
    """
    report: ComparisonReport = executed(lambda: compare(target, **options), target)
    return report


class _Measurements:
    """The runs, each in a process of its own.

    Args:
        source: The workload or its name.
        steps: Of each training.
        loss_scale: In place of the workload's.
        timeout: Seconds for each run.
        say: Called with what begins.

    Attributes:
        load: The highest load average of the machine before a run, per processor.
    """

    def __init__(
        self,
        source: Workload | str,
        steps: int,
        loss_scale: float | None,
        timeout: float,
        say: Callable[[str], None],
    ) -> None:
        self._source, self._steps, self._loss_scale, self._timeout = source, steps, loss_scale, timeout
        self._say = say
        self.load = 0.0

    def baseline(self, mode: Mode, seeds: int) -> BaselineRuns:
        """O0 in a mode."""
        run = self.level("O0", mode)
        # The repetition has a fresh process too, as the levels have; the other seeds are not timed and can share it.
        with self._worker() as worker:
            repeat = self._train(worker, self._spec("O0", mode, 0))
            others = tuple(self._train(worker, self._spec("O0", mode, seed)) for seed in range(1, seeds))
        return BaselineRuns(run, repeat, others)

    def level(self, level: str, mode: Mode) -> TrainingRun:
        """One level, and what its operators compute in."""
        spec = self._spec(level, mode, 0)
        with self._worker() as worker:
            run = self._train(worker, spec)
            if run.status != "ok":
                return run
            # In the same process, after everything was measured: what it needs counts for nothing.
            try:
                return replace(run, share=worker.submit(share_of, spec).result())
            except (AmpdebugError, RuntimeError, ValueError, TypeError) as error:
                return replace(run, share_reason=_first_line(error))

    @contextmanager
    def _worker(self) -> Iterator[WorkerExecutor]:
        # A worker that dies leaves its temporary files behind: they lie in a folder of ours.
        with (
            tempfile.TemporaryDirectory(prefix="ampdebug-compare-", ignore_cleanup_errors=True) as folder,
            WorkerExecutor(1, timeout=self._timeout) as worker,
        ):
            worker.submit(_set_up, folder).result()
            yield worker

    def _spec(self, level: str, mode: Mode, seed: int) -> TrainingSpec:
        return TrainingSpec(self._source, level, mode, self._steps, seed, self._loss_scale)

    def _train(self, worker: WorkerExecutor, spec: TrainingSpec) -> TrainingRun:
        self._say(f"{spec.level} in {spec.mode}" + (f", seed {spec.seed}" if spec.seed else ""))
        self.load = max(self.load, _load())
        run = TrainingRun(spec.level, spec.mode, spec.seed)
        begun = worker.submit(run_training, spec)
        try:
            done: TrainingRun = begun.result()
        except ProbeError as error:
            late = "took longer" in str(error)
            if late:
                return replace(run, status="timeout", reason=f"it took longer than {self._timeout:g} s and was ended")
            return replace(run, status="crashed", reason=_first_line(error))
        return done


def _load() -> float:
    """Load average of the last minute per processor; 0 where the system does not tell."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return 0.0


def _set_up(folder: str) -> None:
    """In a worker: temporary files go into ``folder``, and what the user's code prints must not come into the report,
    which may be JSON."""
    tempfile.tempdir = folder
    os.dup2(2, 1)


def _kernels() -> tuple[Kernel, ...]:
    """float16 beside float32, each kernel by itself as the doctor does, in a process of its own."""
    found = []
    for name in _KERNELS:
        answers, ended = ask([f"float16:{name}:0"], _KERNEL_SECONDS)
        failed: dict[str, Any] = {"failed": ended}
        answer = next((answer for answer in answers if answer.get("kernel") == name), failed)
        if "failed" in answer:
            found.append(Kernel(name, math.nan, f"does not work: {answer['failed']}"))
        elif not answer["right"]:
            found.append(Kernel(name, math.nan, "gives wrong results"))
        else:
            found.append(Kernel(name, answer["seconds"] / answer["float32_seconds"]))
    return tuple(found)


def _name(workload: Workload | str, made: Workload) -> str:
    if made.name:
        return made.name
    return workload if isinstance(workload, str) else getattr(made.network, "__name__", "the workload")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _check(
    levels: Sequence[str], modes: Sequence[str], steps: int, seeds: int, tolerance: float | None, timeout: float
) -> None:
    for name, given, known in (("levels", levels, LEVELS), ("modes", modes, MODES)):
        wrong = [item for item in given if item not in known] if not isinstance(given, str) else [given]
        if wrong:
            raise ArgumentError(
                f"{name}={given!r}: must be a tuple of {', '.join(map(repr, known))}; {wrong[0]!r} is not"
            )
        if len(set(given)) != len(given):
            raise ArgumentError(f"{name}={tuple(given)!r} names one twice")
    if not modes:
        raise ArgumentError(f"modes is empty: give one or both of {', '.join(map(repr, MODES))}")
    if steps < 2:
        raise ArgumentError(f"steps={steps}: must be at least 2, since the first step of a training is never timed")
    if seeds < 2:
        raise ArgumentError(f"seeds={seeds}: must be at least 2, to learn what a seed does")
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise ArgumentError(f"tolerance={tolerance!r}: must be a number of at least 0, in the unit of the metric")
    if not timeout > 0:
        raise ArgumentError(f"timeout={timeout!r}: must be a positive number of seconds")


def _check_sendable(workload: Workload) -> None:
    try:
        pickle.dumps(workload)
    except Exception as error:  # the user's objects may raise anything when pickled
        raise ArgumentError(
            f"the workload cannot be sent to another process ({_first_line(error)}). Define its functions at the top "
            "of a module, or give it by name, as 'train.py:workload'"
        ) from error
