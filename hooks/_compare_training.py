"""One training of a comparison, in a process of its own: at one level, in one mode, measured."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, amp, nn, ops, value_and_grad
from mindspore import dtype as mstype
from mindspore.ops import functional as F

from ampdebug._compare_records import Mode, TrainingRun
from ampdebug._errors import ArgumentError
from ampdebug._scale_policies import ScalePolicy, StaticScale
from ampdebug._target import load_workload
from ampdebug._workload import Workload
from ampdebug.hooks._backend import _number
from ampdebug.hooks._compare_memory import MemoryMeter
from ampdebug.hooks._state import seeded, to_numpy
from ampdebug.hooks._training import _divided, _widened, _widened_in_graph, scale_policy, tensors

_WARM_UP = 5  # MindSpore's CPU kernels try out how to divide their work in their first runs, and so sum in other orders


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    """What to train; can be sent to another process.

    Attributes:
        source: The workload, or what the command line calls it; by name it is loaded in that process.
        level: The AMP level.
        mode: How to run.
        steps: How many.
        seed: Of the weights and of everything that is drawn. 0 takes the batches as they come, others another order.
        loss_scale: In place of the workload's; None to leave that.
    """

    source: Workload | str
    level: str
    mode: Mode
    steps: int
    seed: int = 0
    loss_scale: float | None = None

    def workload(self) -> Workload:
        """The workload, with the loss scale of this comparison."""
        made = load_workload(self.source) if isinstance(self.source, str) else self.source
        return made if self.loss_scale is None else replace(made, loss_scale=self.loss_scale)


def run_training(spec: TrainingSpec) -> TrainingRun:
    """Trains, and measures losses, times, memory and the metric.

    Raises:
        ArgumentError: The workload breaks a rule; whatever else goes wrong is in the result.
    """
    run = TrainingRun(spec.level, spec.mode, spec.seed)
    doing = ["reading the data"]
    mindspore.set_context(mode=mindspore.GRAPH_MODE if spec.mode == "graph" else mindspore.PYNATIVE_MODE)
    try:
        return _trained(spec, run, doing)
    except ArgumentError:
        raise
    except Exception as error:  # noqa: BLE001 - a level that does not work here is a row of the table, with its reason
        return replace(run, status="failed", reason=f"{doing[0]} raised {_told(error)}")


def _trained(spec: TrainingSpec, run: TrainingRun, doing: list[str]) -> TrainingRun:
    workload = spec.workload()
    # The mode is the comparison's business, whatever the workload's module says when it is imported.
    mindspore.set_context(mode=mindspore.GRAPH_MODE if spec.mode == "graph" else mindspore.PYNATIVE_MODE)
    batches = [tensors(batch) for batch in workload.batches(spec.steps)]
    if spec.seed:
        np.random.default_rng(spec.seed).shuffle(batches)
    meter = MemoryMeter()
    doing[0] = "making the network"
    with seeded(spec.seed):
        network = workload.network()
    policy: ScalePolicy = StaticScale(1.0) if spec.level == "O0" else scale_policy(workload)
    here = os.getcwd()
    with elsewhere():
        if spec.level != "O0":
            doing[0] = f"converting the network to {spec.level}"
            network = amp.auto_mixed_precision(network, spec.level)
        network.set_train(True)
        step = _Step(network, workload, compiled=spec.mode == "graph")
        doing[0] = "the first pass"
        first, warm_up, scale = _warmed_up(step, batches[0], policy, spec.seed)
        run = replace(run, first_seconds=first, warm_up_seconds=warm_up, first_scale=scale)
        with seeded(spec.seed):
            run = _steps(step, batches, policy, run, doing)
        run = replace(run, memory=meter.read())
        if workload.metric is not None:
            # The metric may read files by their relative names; the source that O1 wrote must still be there.
            os.chdir(here)
            with seeded(spec.seed):
                run = _with_metric(run, network, workload.metric)
    return run


class _Step:
    """A training step whose gradient function is made once, so that a graph is compiled once.

    Args:
        network: The converted network, in training mode.
        workload: Loss and optimizer.
        compiled: The mode is GRAPH_MODE.
    """

    def __init__(self, network: nn.Cell, workload: Workload, *, compiled: bool) -> None:
        self.network = network
        parameters = network.trainable_params()
        if not parameters:
            raise ArgumentError("the network has no trainable parameters, so there is nothing to train")
        assert workload.optimizer is not None, "compare() requires it"
        self._optimizer = workload.optimizer(parameters)
        self._parameters = parameters
        loss_fn, widened = workload.loss, _widened_in_graph if compiled else _widened

        def scaled(scale: Any, label: Any, *inputs: Any) -> Any:
            loss = loss_fn(widened(network(*inputs)), label)
            return loss * scale, loss

        gradient = value_and_grad(scaled, None, parameters, has_aux=True)

        def whole(scale: Any, label: Any, *inputs: Any) -> Any:
            (_, loss), gradients = gradient(scale, label, *inputs)
            finite = amp.all_finite(gradients)
            divided = ()
            for one in gradients:
                divided = divided + (F.cast(F.cast(one, mstype.float32) / scale, one.dtype),)  # type: ignore[assignment]  # noqa: RUF005 - the graph parser knows no (*a, b)
            return loss, finite, divided

        self._gradient = mindspore.jit(whole) if compiled else gradient
        self._compiled = compiled

    def __call__(self, batch: Sequence[Any], scale: float) -> tuple[float, bool, tuple[Tensor, ...]]:
        """Loss, whether all gradients are finite, and these without the scale."""
        *inputs, label = batch
        # As a tensor: a number would be a constant of the graph, which each new scale would compile anew.
        given = Tensor(scale, mstype.float32)
        if self._compiled:
            loss, finite, gradients = self._gradient(given, label, *inputs)
            return float(to_numpy(loss)), bool(finite), gradients
        (_, loss), gradients = self._gradient(given, label, *inputs)
        on_device = mindspore.get_context("device_target") != "CPU"
        # all_finite is compiled, which takes longer than looking where the values are in reach of numpy.
        finite = amp.all_finite(gradients) if on_device else _finite(gradients)
        return float(to_numpy(loss)), bool(finite), tuple(_divided(one, scale) for one in gradients)

    def update(self, gradients: tuple[Tensor, ...]) -> None:
        """Makes the update."""
        self._optimizer(gradients)

    def finish(self) -> None:
        """Waits for what still runs."""
        to_numpy(self._parameters[0])


def _finite(gradients: Sequence[Tensor]) -> bool:
    return all(np.isfinite(to_numpy(gradient)).all() for gradient in gradients)


def _warmed_up(step: _Step, batch: Sequence[Any], policy: ScalePolicy, seed: int) -> tuple[float, float, float]:
    """Passes without an update, after which the network is as before.

    A dynamic loss scale comes down meanwhile to what the first batch bears: the updates it would skip on the way there
    would leave the level behind O0 by so many steps, which is no matter of precision.

    Returns:
        ``(seconds of the first pass, seconds of the others, loss scale to begin with)``.
    """
    before = [(parameter, to_numpy(parameter)) for parameter in step.network.get_parameters()]
    scale, passes, settled = policy.first(), 0, False
    begin = time.perf_counter()
    first = math.nan
    while passes < _WARM_UP or not settled:
        with seeded(seed):
            loss, finite, _ = step(batch, scale)
        passes += 1
        if passes == 1:
            first = time.perf_counter() - begin
        following = policy.next(scale, overflow=True)
        settled = settled or finite or not math.isfinite(loss) or following == scale
        scale = scale if settled else following
    # Not set_data: a compiled graph would go on with the tensor it was compiled with, and never see an update again.
    for parameter, value in before:
        ops.assign(parameter, Tensor(value, parameter.dtype))
    return first, time.perf_counter() - begin - first, scale


def _steps(
    step: _Step, batches: Sequence[Sequence[Any]], policy: ScalePolicy, run: TrainingRun, doing: list[str]
) -> TrainingRun:
    losses: list[float] = []
    times: list[float] = []
    skipped: list[int] = []
    policy.first()
    scale = run.first_scale
    for number, batch in enumerate(batches):
        doing[0] = f"training step {number}"
        begin = time.perf_counter()
        loss, finite, gradients = step(batch, scale)
        losses.append(loss)
        if finite:
            step.update(gradients)
        else:
            skipped.append(number)
        scale = policy.next(scale, overflow=not finite)
        if number == len(batches) - 1:
            step.finish()
        times.append(time.perf_counter() - begin)
    return replace(run, losses=tuple(losses), step_seconds=tuple(times), skipped=tuple(skipped))


def _with_metric(run: TrainingRun, network: nn.Cell, metric: Callable[[nn.Cell], Any]) -> TrainingRun:
    network.set_train(False)
    try:
        return replace(run, metric=float(_number(metric(network))))
    except Exception as error:  # noqa: BLE001 - the user's function on a network that may give NaN
        return replace(run, metric_reason=f"it raised {_told(error)}")


@contextmanager
def elsewhere() -> Iterator[None]:
    """In an empty folder: MindSpore litters the current one, and O1 takes packages below it for the user's code."""
    here = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="ampdebug-compare-") as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)


def _told(error: Exception) -> str:
    """The first line with words of a message; MindSpore frames its own in dashes."""
    lines = [line.strip() for line in str(error).splitlines() if any(c.isalnum() for c in line)]
    said = next((line for line in lines if not line.startswith("-")), "")
    return f"{type(error).__name__}: {said[:200]}" if said else type(error).__name__
