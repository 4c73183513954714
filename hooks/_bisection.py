"""``ampdebug.bisect``: from a network that fails under a level to the operators that must stay in float32."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Literal

from mindspore import Tensor, nn

from ampdebug._bisect import Better, Criterion, bisect_backend
from ampdebug._bisect_result import BisectResult
from ampdebug._errors import ArgumentError, ProbeError
from ampdebug._search import Progress
from ampdebug._workers import WorkerExecutor
from ampdebug.hooks._remote import BackendSpec, RemotePredicate


def bisect(
    network: nn.Cell | Callable[[], nn.Cell],
    evaluate: Callable[[nn.Cell], Any],
    *,
    level: str = "O2",
    dtype: str = "float16",
    unit: Literal["op", "cell"] = "op",
    tolerance: float | None = None,
    threshold: float | None = None,
    better: Better = "higher",
    loss: Callable[[nn.Cell], Tensor] | None = None,
    max_probes: int | None = None,
    max_seconds: float | None = None,
    repeats: int | None = None,
    journal: str | os.PathLike[str] | None = None,
    executor: Executor | None = None,
    workers: int = 0,
    timeout: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    seed: int = 0,
) -> BisectResult:
    """Find the smallest set of operators that must stay in float32 for a network to be good under an AMP level.

    Args:
        network: The network at O0, or a function without arguments that makes it. A network is copied, never changed.
        evaluate: Takes a network, runs it in any way, training included, and returns a number or True for good. It is
            called once a probe, each time with the same start values and seed. It must call the network it is given.
        level: ``"O1"``, ``"O2"``, ``"O3"`` or ``"auto"``.
        dtype: ``"float16"``, or ``"bfloat16"``, which on a CPU is emulated by rounding.
        unit: ``"op"``: single operators. ``"cell"``: all operators of a cell's own construct together; fewer probes.
        tolerance: How much worse than float32 a good value may be, in the unit of ``evaluate``. Without it 2 % of the
            float32 value, or three times the noise if that is more.
        threshold: An absolute limit instead.
        better: ``"higher"`` or ``"lower"``: which way ``evaluate`` improves.
        loss: Takes a network and returns a scalar tensor, to rank the operators by; without it a fixed random
            projection of what the network gives for its last input in ``evaluate``.
        max_probes: Stop before the probe after this many, with the best answer so far.
        max_seconds: Begin no probe later than this after the search began.
        repeats: Odd; how often a measurement near the limit is repeated. Without it 3 where the ends did not repeat
            exactly, else 1.
        journal: A file that lets a killed search go on; one of another network, data, level or version is refused.
        executor: Probes run there, ``workers`` at a time (at least one): any executor of ``concurrent.futures`` kind.
        workers: How many worker processes of our own to run probes in, where no ``executor`` is given; 0 runs them in
            this process. In a worker a crash, a missing kernel or a timeout is a failed probe with its reason. For
            both, ``network`` must be a function, and it, ``evaluate`` and ``loss`` must be importable from their
            module.
        timeout: Seconds that a probe in a worker may take.
        progress: Called after each probe.
        seed: Of every measurement.

    Returns:
        The answer; ``print`` shows it as a table. That there is nothing to find, or that precision is not the cause, is
        an answer too.

    Raises:
        ArgumentError: An argument breaks a rule, or ``evaluate`` returned something else than a number or a bool.
        NoObservationsError: The mode is GRAPH_MODE, or ``evaluate`` did not call the network it was given.
        FormatError: The journal belongs to another search.
        AmpdebugError: A check failed, so that the search could not be trusted.

    Example::

        def evaluate(net):
            return accuracy(net, images, labels)

        print(ampdebug.bisect(make_net, evaluate, level="O2"))
    """
    spec = BackendSpec(network, evaluate, level, dtype, unit, loss, seed)
    backend = spec.build()
    search = functools.partial(
        bisect_backend,
        backend,
        tolerance=tolerance,
        threshold=threshold,
        better=better,
        max_probes=max_probes,
        max_seconds=max_seconds,
        repeats=repeats,
        journal=journal,
        progress=progress,
    )
    if executor is None and not workers:
        if timeout is not None:
            raise ArgumentError(f"timeout={timeout} needs a process that can be ended; give workers=1 as well")
        return search()
    if isinstance(network, nn.Cell):
        raise ArgumentError("network is a cell, which cannot be sent to workers; give a function that makes it")

    def remote(criterion: Criterion) -> RemotePredicate:
        return RemotePredicate(spec, backend.recorded, criterion)

    # A missing kernel is a RuntimeError, and MindSpore often crashes some calls after one.
    failures = (ProbeError, RuntimeError)
    if executor is not None:
        return search(executor=executor, workers=max(1, workers), failures=failures, predicate_of=remote)
    with WorkerExecutor(workers, timeout=timeout, replace_after=(RuntimeError,)) as own:
        return search(executor=own, workers=workers, failures=failures, predicate_of=remote)
