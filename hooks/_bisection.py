"""``ampdebug.bisect``: from a network that fails under a level to the operators that must stay in float32."""

from __future__ import annotations

import functools
import os
import pickle
import uuid
import warnings
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, Literal

import mindspore
from mindspore import Tensor, nn

from ampdebug._bisect import Better, Criterion, bisect_backend
from ampdebug._bisect_result import BisectResult
from ampdebug._bisect_store import RankingTaker, store_bisection
from ampdebug._errors import AmpdebugWarning, ArgumentError, ProbeError, StoreError
from ampdebug._lowering import LoweringResult
from ampdebug._probe import ProbeName
from ampdebug._search import Progress
from ampdebug._store_result import check_appendable
from ampdebug._target import executed, load_made
from ampdebug._workers import WorkerExecutor
from ampdebug._workload import Workload
from ampdebug.hooks._checkpoint import Checkpoint, kept_batch, kept_step
from ampdebug.hooks._fix import FixTask, fix_task
from ampdebug.hooks._goodness import (
    FailingStep,
    Source,
    TargetPart,
    WorkloadLoss,
    WorkloadNetwork,
    WorkloadProbe,
    as_workload,
    default_probe,
)
from ampdebug.hooks._remote import BackendSpec, RemotePredicate
from ampdebug.hooks._state import operator_by_operator


def bisect(
    network: nn.Cell | Callable[[], nn.Cell] | Workload | str,
    evaluate: Callable[[nn.Cell], Any] | None = None,
    *,
    level: str | None = None,
    dtype: str = "float16",
    unit: Literal["op", "cell"] = "op",
    direction: Literal["up", "down"] = "up",
    probe: str | None = None,
    tolerance: float | None = None,
    threshold: float | None = None,
    better: Better | None = None,
    loss: Callable[[nn.Cell], Tensor] | None = None,
    checkpoint: Checkpoint | None = None,
    run: str | os.PathLike[str] | None = None,
    max_probes: int | None = None,
    max_seconds: float | None = None,
    repeats: int | None = None,
    journal: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    executor: Executor | None = None,
    workers: int = 0,
    timeout: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    seed: int = 0,
) -> BisectResult:
    """Find the smallest set of operators that must stay in float32 for a network to be good under an AMP level.

    Args:
        network: The network at O0, or a function without arguments that makes it. A network is copied, never changed.
            Or a workload, or the name of one or of a pair ``(network, evaluate)``: ``"train.py:workload"``.
        evaluate: Takes a network, runs it in any way, training included, and returns a number or True for good. It is
            called once a probe, each time with the same start values and seed. It must call the network it is given. A
            workload needs none.
        level: ``"O1"``, ``"O2"``, ``"O3"`` or ``"auto"``. Without it ``"O2"``, or ``"O0"`` with ``direction="down"``.
        dtype: ``"float16"``, or ``"bfloat16"``, which on a CPU is emulated by rounding.
        unit: ``"op"``: single operators. ``"cell"``: all operators of a cell's own construct together; fewer probes. An
            answer that is made of whole cells is measured once more with these pinned by MindSpore's own flags.
        direction: ``"up"``: which operators that the level rounds must stay in float32? ``"down"``: which operators
            that the level leaves in float32 (``"O0"``: all) must stay there, and which may go to 16 bits? The answer is
            a ``LoweringResult`` then; its probes are emulated.
        probe: Of a workload without ``evaluate``, what is good: ``"output"``, ``"grad"`` (or ``"grad:cosine"``,
            ``"grad:worst"``), ``"finite"``, ``"train:N"``, ``"overflow:N"``, ``"metric"`` or ``"metric:N"``; see
            docs/bisect.md. Without it ``"grad"``, or ``"output"`` where the workload has no loss.
        tolerance: How much worse than float32 a good value may be, in the unit of ``evaluate``. Without it 2 % of the
            float32 value, or three times the noise if that is more; a ready-made probe has a limit of its own.
        threshold: An absolute limit instead.
        better: ``"higher"`` (if nothing is said) or ``"lower"``: which way ``evaluate`` improves.
        loss: Takes a network and returns a scalar tensor, to rank the operators by; without it a fixed random
            projection of what the network gives for its last input in ``evaluate``, or the workload's loss.
        checkpoint: The state that every measurement begins in: a ``.ckpt`` or ``.safetensors`` file, or ``{name:
            tensor or array}``. A fault that training brings about does not show in fresh parameters.
        run: A recorded run that kept a bad step (``AMPMonitor(..., keep_bad_steps=1)``), or the file of one: its state
            before the first of them is the checkpoint, and its batch the first one of a workload.
        max_probes: Stop before the probe after this many, with the best answer so far.
        max_seconds: Begin no probe later than this after the search began.
        repeats: Odd; how often a measurement near the limit is repeated. Without it 3 where the ends did not repeat
            exactly, else 1.
        journal: A file that lets a killed search go on; one of another network, data, level or version is refused.
        out: Directory of a run, a recorded one or a new one, that the result is added to, for ``ampdebug report`` and
            TensorBoard. Where that fails in the end, there is a warning and the result all the same.
        executor: Probes run there, ``workers`` at a time (at least one): any executor of ``concurrent.futures`` kind.
        workers: How many worker processes of our own to run probes in, where no ``executor`` is given; 0 runs them in
            this process. In a worker a crash, a missing kernel or a timeout is a failed probe with its reason. For
            both, ``network`` must be a function, and it, ``evaluate`` and ``loss`` must be importable from their
            module; or everything is given by name.
        timeout: Seconds that a probe in a worker may take.
        progress: Called after each probe.
        seed: Of every measurement.

    Returns:
        The answer; ``print`` shows it as a table. That there is nothing to find, or that precision is not the cause, is
        an answer too.

    Raises:
        ArgumentError: An argument breaks a rule, or ``evaluate`` returned something else than a number or a bool.
        NoObservationsError: The mode is GRAPH_MODE, or ``evaluate`` did not call the network it was given.
        FormatError: The journal belongs to another search, or ``out`` holds something that is no run.
        StoreError: ``out`` cannot be written, or a training that is still going on holds it.
        AmpdebugError: A check failed, so that the search could not be trusted.

    Example::

        def evaluate(net):
            return accuracy(net, images, labels)

        print(ampdebug.bisect(make_net, evaluate, level="O2"))
        print(ampdebug.bisect(workload, probe="grad", level="O3"))
    """
    step = None if run is None else kept_step(run)
    if step is not None:
        if checkpoint is not None:
            raise ArgumentError(f"run={os.fspath(run or '')!r} and checkpoint contradict each other; give one")
        checkpoint = step[0]
    task = _task(network, evaluate, probe, loss, seed)
    source = task.evaluate.source if isinstance(task.evaluate, WorkloadProbe) else None
    if step is not None and source is not None and kept_batch(step[1]) is not None:
        task = _of_workload(FailingStep(source, step[0]), probe, loss, seed)
    measured = task.evaluate
    what = ""
    if isinstance(measured, WorkloadProbe):
        what = measured.name.words
        better = measured.better
        if tolerance is None and threshold is None:
            tolerance, threshold = measured.name.limits(dtype)
    if level is None:
        level = "O0" if direction == "down" else "O2"
    spec = BackendSpec(task.network, measured, level, dtype, unit, task.loss, seed, checkpoint, direction)
    if out is not None:
        check_appendable(out)
    backend = spec.build()
    ranking = RankingTaker()
    search = functools.partial(
        bisect_backend,
        backend,
        tolerance=tolerance,
        threshold=threshold,
        better=better or "higher",
        what=what,
        max_probes=max_probes,
        max_seconds=max_seconds,
        repeats=repeats,
        journal=journal,
        progress=progress,
        ranked=ranking,
        origin=None if direction == "down" else functools.partial(fix_task, backend, spec),
    )

    def stored(result: BisectResult) -> BisectResult:
        if direction == "down":
            result = LoweringResult.of(result, backend.units, dtype)
        elif isinstance(result.origin, FixTask) and (unit == "cell" or result.origin.filled):
            # The search moved operators one by one. Where they are all that a cell does, MindSpore's own flags can do
            # the same, and whether they do is known only by measuring it.
            result = result.confirm(mode="pynative")
        if out is not None:
            try:
                store_bisection(out, result, ranking, _name(network))
            except StoreError as error:  # hours of search must not end in a full disk
                warnings.warn(AmpdebugWarning(f"the result was not stored: {error}"), stacklevel=3)
        return result

    if executor is None and not workers:
        if timeout is not None:
            raise ArgumentError(f"timeout={timeout} needs a process that can be ended; give workers=1 as well")
        return stored(search())
    if isinstance(network, nn.Cell):
        raise ArgumentError("network is a cell, which cannot be sent to workers; give a function that makes it")
    sent = backend.evaluate
    spec = replace(spec, evaluate=sent.light() if isinstance(sent, WorkloadProbe) else sent)
    name = uuid.uuid4().hex

    def remote(criterion: Criterion) -> RemotePredicate:
        return RemotePredicate(name, spec, backend.recorded, criterion)

    # A missing kernel is a RuntimeError, and MindSpore often crashes some calls after one.
    failures = (ProbeError, RuntimeError)
    if executor is not None:
        return stored(search(executor=executor, workers=max(1, workers), failures=failures, predicate_of=remote))
    try:
        pickle.dumps(spec)
    except Exception as error:  # the user's objects may raise anything when pickled
        raise ArgumentError(
            f"workers={workers}: the task cannot be sent to another process ({error}). Define its functions at the top "
            "of a module, or give the whole by name, as 'train.py:workload'"
        ) from error
    with WorkerExecutor(
        workers, timeout=timeout, replace_after=(RuntimeError,), initializer=operator_by_operator
    ) as own:
        return stored(search(executor=own, workers=workers, failures=failures, predicate_of=remote))


def _name(network: nn.Cell | Callable[[], nn.Cell] | Workload | str) -> str:
    """What the task is called in reports."""
    if isinstance(network, str):
        return network
    if isinstance(network, Workload):
        return network.name or _name(network.network)
    return type(network).__name__ if isinstance(network, nn.Cell) else getattr(network, "__name__", repr(network))


def bisect_target(target: str, **options: Any) -> BisectResult:
    """``bisect`` for the command line: in PyNative mode, whatever the module that is named says.

    Raises:
        AmpdebugError: As ``bisect``, and also where the user's own code raised; its traceback went to stderr.
    """
    operator_by_operator()
    load_made(target)
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    found: BisectResult = executed(functools.partial(bisect, target, **options), target)
    return found


@dataclass(frozen=True, slots=True)
class _Task:
    network: nn.Cell | Callable[[], nn.Cell]
    evaluate: Callable[[nn.Cell], Any]
    loss: Callable[[nn.Cell], Tensor] | None


def _task(
    network: nn.Cell | Callable[[], nn.Cell] | Workload | str,
    evaluate: Callable[[nn.Cell], Any] | None,
    probe: str | None,
    loss: Callable[[nn.Cell], Tensor] | None,
    seed: int,
) -> _Task:
    """What is searched, from the ways in which it may be given."""
    if evaluate is not None and probe is not None:
        raise ArgumentError(f"evaluate and probe={probe!r} contradict each other; give one")
    made = load_made(network) if isinstance(network, str) else network
    if isinstance(made, Workload):
        source: Source = network if isinstance(network, str) else made
        if evaluate is None:
            return _of_workload(source, probe, loss, seed)
        if loss is None and made.loss is not None:
            loss = WorkloadLoss(source)
        return _Task(WorkloadNetwork(source), evaluate, loss)
    if isinstance(network, str):
        if not (isinstance(made, tuple) and len(made) == 2 and all(map(callable, made))):
            raise ArgumentError(
                f"{network} gave a {type(made).__name__}; it must be an ampdebug.Workload, a pair of functions "
                "(network, evaluate), or return one of these"
            )
        if probe is not None:
            raise ArgumentError(f"probe={probe!r} needs a workload, and {network} is a pair (network, evaluate)")
        return _Task(TargetPart(network, 0), evaluate or TargetPart(network, 1), loss)
    if probe is not None:
        raise ArgumentError(f"probe={probe!r} needs a workload: bisect(Workload(network=..., data=...), probe=...)")
    if evaluate is None:
        raise ArgumentError("evaluate is missing: give a function that tells good from bad, or a workload")
    return _Task(network, evaluate, loss)


def _of_workload(source: Source, probe: str | None, loss: Callable[[nn.Cell], Tensor] | None, seed: int) -> _Task:
    workload = as_workload(source)
    name = ProbeName.parse(probe or default_probe(workload))
    workload.require(*name.needs, purpose=f"the probe {str(name)!r}")
    if loss is None and workload.loss is not None and name.kind != "output":
        loss = WorkloadLoss(source)
    return _Task(WorkloadNetwork(source), WorkloadProbe(name, source, seed), loss)
