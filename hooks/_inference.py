"""``ampdebug.check_inference``: runs a trained network in float32 and in 16 bits on the user's data."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import mindspore
import numpy as np
from mindspore import Tensor, nn

from ampdebug._errors import AmpdebugError, ArgumentError
from ampdebug._inference import (
    InferenceReport,
    Layer,
    judge_outputs,
    output_error,
    overflow_notes,
    rank_layers,
    scored,
)
from ampdebug._store_result import append_result
from ampdebug._target import executed, load_workload
from ampdebug._workload import Workload
from ampdebug.hooks._backend import MindSporeBackend, _number
from ampdebug.hooks._checkpoint import Checkpoint
from ampdebug.hooks._preflight_step import _taken
from ampdebug.hooks._training import Array, _arrays, tensors

Data = Any


def check_inference(
    net: nn.Cell | Callable[[], nn.Cell] | Workload | str,
    checkpoint: Checkpoint | None = None,
    data: Data = None,
    *,
    dtype: Literal["float16", "bfloat16"] = "float16",
    level: str = "O3",
    metric: Callable[[nn.Cell], float] | None = None,
    better: Literal["higher", "lower"] = "higher",
    tolerance: float | None = None,
    batches: int | None = None,
    rank: bool = True,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
) -> InferenceReport:
    """Compare the outputs of a network in 16 bits with float32 on your data, and say which layer contributes most.

    The network is run twice on every batch, in evaluation mode: as it is, and at the level. bfloat16 has no kernels on
    a CPU; there it is emulated by rounding what goes into and comes out of every operator, and the report says so.

    Args:
        net: The network at O0, or a function without arguments that makes it; it is copied, never changed. Or a
            workload, or its name, which brings data, metric and ``better`` along.
        checkpoint: The weights: a ``.ckpt`` or ``.safetensors`` file, or ``{name: tensor or array}``; None for those
            that the network has.
        data: Batches, or a function that gives them: each a tensor or array, or a tuple of them, of which the network
            gets as many as its ``construct`` takes. A single tensor or array is one batch.
        dtype: ``"float16"`` or ``"bfloat16"``.
        level: ``"O3"``: everything in 16 bits, ``"O2"`` (norms in float32), ``"auto"`` or ``"O1"``.
        metric: Takes a network and returns a number; called with the float32 network and with the other.
        better: Which way the metric improves.
        tolerance: How much worse the metric may be, in its own unit; without it 2 % of float32's. Without a metric the
            largest relative error of an output; without it 0.0195 for float16 and 0.156 for bfloat16.
        batches: Look at so many batches only.
        rank: Find out which cells contribute most, by one forward and one backward pass on the last batch.
        seed: For a network that draws random numbers in evaluation too.
        out: Directory of a run, recorded or new, that the result is added to.

    Returns:
        The report; ``print`` shows it.

    Raises:
        ArgumentError: An argument breaks a rule.
        NoObservationsError: The mode is GRAPH_MODE.
        AmpdebugError: MindSpore cannot run the network at this level.

    Example::

        print(ampdebug.check_inference(Net, "net.ckpt", images, metric=accuracy, tolerance=0.002))
    """
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise ArgumentError(f"tolerance={tolerance!r}: must be a number of at least 0")
    if batches is not None and batches < 1:
        raise ArgumentError(f"batches={batches}: must be at least 1, or None for all")
    if better not in ("higher", "lower"):
        raise ArgumentError(f"better={better!r}: must be 'higher' or 'lower'")
    name = _name(net)
    if isinstance(net, str):
        net = load_workload(net)
    given: Sequence[tuple[Any, ...]]
    if isinstance(net, Workload):
        metric, better = metric or net.metric, net.better
        given = _batches(data, batches) if data is not None else [b[:-1] for b in net.batches(batches)]
        net = net.network
    elif data is None:
        raise ArgumentError("data is missing: give a batch, a list of batches, or a workload in place of the network")
    else:
        given = _batches(data, batches)
    collector = _Collector(given, metric)
    try:
        backend = MindSporeBackend(net, collector, level=level, dtype=dtype, seed=seed, checkpoint=checkpoint)
        units = backend.record()
        if backend.mode == "emulated":
            backend.measure(frozenset())
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        if isinstance(error, AmpdebugError):
            raise
        lines = [line.strip() for line in str(error).splitlines() if any(c.isalnum() for c in line)]
        said = next((line for line in lines if not line.startswith("-")), "")
        raise AmpdebugError(f"MindSpore cannot run {name} at {level}: {type(error).__name__}: {said}") from error
    exact, low = collector.outputs[0], collector.outputs[-1]
    errors = tuple(
        output_error(index, [batch[index] for batch in exact], [batch[index] for batch in low])
        for index in range(len(exact[0]))
    )
    pair = None if metric is None else (collector.metrics[0], collector.metrics[-1])
    criterion, problems, notes = judge_outputs(errors, dtype=dtype, metrics=pair, better=better, tolerance=tolerance)
    layers: tuple[Layer, ...] = ()
    if rank:
        layers, told = _ranked(backend, units)
        notes += told + overflow_notes(layers, errors, dtype)
    if backend.mode == "emulated":
        notes += (f"{dtype} has no kernels on this device: it was emulated by rounding around float32 kernels",)
    report = InferenceReport(
        name, level, dtype, backend.mode == "emulated", _shown(checkpoint), len(given), errors,
        math.nan if pair is None else pair[0], math.nan if pair is None else pair[1], criterion, problems, layers,
        notes,
    )  # fmt: skip
    if out is not None:
        append_result(out, "inference", report.to_dict())
    return report


def inference_target(
    target: str, checkpoint: str | None, *, use_metric: bool = True, **options: Any
) -> InferenceReport:
    """``check_inference`` for the command line: in PyNative mode, whatever the module that is named says.

    Raises:
        AmpdebugError: As ``check_inference``, and also where the user's own code raised; its traceback went to stderr.
    """
    workload = load_workload(target)
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    if not use_metric:
        workload = dataclasses.replace(workload, metric=None)
    if not workload.name:
        workload = dataclasses.replace(workload, name=target)
    report: InferenceReport = executed(functools.partial(check_inference, workload, checkpoint, **options), target)
    return report


class _Collector:
    """An ``evaluate`` that keeps what the network gives.

    Args:
        batches: Inputs.
        metric: Called after them.

    Attributes:
        outputs: For each call the outputs of each batch.
        metrics: For each call the metric.
    """

    def __init__(self, batches: Sequence[tuple[Any, ...]], metric: Callable[[nn.Cell], Any] | None) -> None:
        self._batches, self._metric = batches, metric
        self._taken: int | None = None
        self.outputs: list[list[list[Array]]] = []
        self.metrics: list[float] = []

    def __call__(self, network: nn.Cell) -> float:
        network.set_train(False)
        if self._taken is None:  # of the float32 network; the levels' wrappers take anything
            self._taken = _taken(network, self._batches[0], None)
        found = [_arrays(network(*tensors(batch)[: self._taken])) for batch in self._batches]
        if not found[0]:
            raise ArgumentError("the network gives no floating-point output, so there is nothing to compare")
        self.outputs.append(found)
        if self._metric is not None:
            self.metrics.append(float(_number(self._metric(network))))
        return 0.0


def _ranked(backend: MindSporeBackend, units: Sequence[Any]) -> tuple[tuple[Layer, ...], tuple[str, ...]]:
    try:
        scores: Mapping[Any, Any] = backend.rank()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        first = (str(error).strip().splitlines() or [""])[0][:200]
        return (), (f"the cells could not be ranked, which needs a gradient: {type(error).__name__}: {first}",)
    return rank_layers(scored(units, dict(scores))), ()


def _batches(data: Data, limit: int | None) -> list[tuple[Any, ...]]:
    if isinstance(data, (Tensor, np.ndarray)):
        return [(data,)]
    given = data() if callable(data) else data
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise ArgumentError(
            f"data is a {type(given).__name__}; it must be a tensor or array, a list of batches, or a function that "
            "gives them"
        )
    found: list[tuple[Any, ...]] = []
    for batch in given:
        if limit is not None and len(found) == limit:
            break
        if not isinstance(batch, (Tensor, np.ndarray, tuple, list)):
            raise ArgumentError(
                f"batch {len(found)} of data is a {type(batch).__name__}; each must be a tensor or array, or a tuple "
                "of them"
            )
        found.append(tuple(batch) if isinstance(batch, (tuple, list)) else (batch,))
    if not found:
        raise ArgumentError("data gives no batch; it must give at least one")
    return found


def _name(net: Any) -> str:
    if isinstance(net, str):
        return net
    if isinstance(net, Workload):
        return net.name or _name(net.network)
    return type(net).__name__ if isinstance(net, nn.Cell) else getattr(net, "__name__", repr(net))


def _shown(checkpoint: Checkpoint | None) -> str:
    if checkpoint is None:
        return ""
    return "given values" if isinstance(checkpoint, Mapping) else os.fspath(checkpoint)
