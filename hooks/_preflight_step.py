"""Running one training step under the operator recorder, then again in float32, and gathering what was seen."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ampdebug._errors import ArgumentError
from ampdebug._records import parameter_name
from ampdebug._stats import summarize
from ampdebug._tensor_stats import TensorStats
from ampdebug.hooks._cells import places, unwrap
from ampdebug.hooks._interpose import interpose
from ampdebug.hooks._operators import known_paths
from ampdebug.hooks._preflight_float32 import Array, Float32Run, deviation, stats_of, values_of
from ampdebug.hooks._preflight_guard import cleared_after_failure
from ampdebug.hooks._preflight_labels import label_facts, score_shape, shape_labels
from ampdebug.hooks._preflight_recorder import OperatorRecorder, unseen
from ampdebug.hooks._shadow import flat_tensors
from ampdebug.hooks._state import NetworkState, seeded
from ampdebug.hooks._tensors import FLOATING, dtype_name, scalar
from ampdebug.rules._operator_records import (
    CellFacts,
    NetworkInput,
    Operator,
    OptimizerFacts,
    Outcome,
    Step,
    Variable,
)

Randomness = Callable[[], AbstractContextManager[None]]

LOSS_PATH = "(loss)"
_SEED = 20250101


@dataclass
class _Pass:
    """One forward and backward pass."""

    output: Any = None
    loss: Any = None
    gradients: dict[str, Array] = field(default_factory=dict)
    raw: tuple[Any, ...] = ()
    real_loss: bool = False


def run_step(
    net: nn.Cell,
    batch: tuple[Any, ...],
    loss_fn: Callable[..., Any] | None,
    optimizer: Any,
    level: str,
    cells: tuple[CellFacts, ...],
    *,
    loss_scale: float = 1.0,
    randomness: Randomness | None = None,
    exact_gradients: dict[tuple[int, int], TensorStats] | None = None,
) -> Step:
    """Runs the step and gives what was seen.

    Args:
        net: The network, in training mode.
        batch: Its inputs and then the labels.
        loss_fn: See ``check``.
        optimizer: See ``check``.
        level: For the record.
        cells: Facts known beforehand.
        loss_scale: What the loss is multiplied with before the backward pass; the gradients come out scaled.
        randomness: Makes a context in which the random generators stand where they are to start; a fixed seed without.
        exact_gradients: Is filled with the gradients of the operators' results in the float32 run, by number of the
            operator and of the result.
    """
    randomness = randomness or partial(seeded, _SEED)
    taken = _taken(net, batch, loss_fn)
    given, labels = batch[:taken], batch[taken:]
    weights = _weights(net, optimizer)
    before = NetworkState(net)
    earlier = {p.name: _copy(p) for p in net.get_parameters()}
    root = object()
    by_cell = known_paths(net)
    recorder = OperatorRecorder(root, lambda cell: LOSS_PATH if cell is root else by_cell(cell))
    for number, tensor in enumerate(flat_tensors(batch)):
        recorder.name_input(tensor, f"input {number}")
    done, failure = _Pass(), ""
    found_labels = list(label_facts(labels))
    run = partial(_pass, net, given, labels, loss_fn, weights, loss_scale=loss_scale)
    with randomness(), interpose(recorder):
        try:
            with cleared_after_failure():
                recorder.tracker.run_cell(root, lambda: run(done, recorder))
            output_error = None
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            output_error = error
        if output_error is None and optimizer is not None and _finite(done.gradients):
            recorder.phase = "update"
            recorder.tracker.run_cell(root, lambda: optimizer(done.raw))
            recorder.phase = "network"
    recorder.release()
    operators = tuple(_with_gradients(operator, recorder) for operator in recorder.calls)
    if output_error is not None:
        # The scores may never have come out of the network: whatever had their shape last will do.
        last = [r.shape for call in recorder.calls for r in call.results if r.stats is not None]
        last += [o.shape for o in recorder.calls[-1].operands if o.stats is not None] if recorder.calls else []
        scores = next((s for s in reversed(last) if len(s) >= 2), ())
        found_labels += shape_labels(batch, scores, error=str(output_error))
        if not any(label.high >= label.classes for label in (*found_labels, *recorder.labels)):
            raise output_error
        failure = f"{type(output_error).__name__}: {str(output_error).strip().splitlines()[0]}"
    found_labels += recorder.labels
    if loss_fn is None and not failure:
        found_labels += shape_labels(labels, score_shape(done.output))
    watcher = Float32Run(follow=exact_gradients is not None)
    exact = _Pass() if failure else _exact(net, run, watcher, randomness, before)
    if exact_gradients is not None:
        exact_gradients.update(watcher.gradients_as_in([operator.name for operator in operators]))
    return Step(
        level=level,
        operators=operators,
        inputs=tuple(_inputs(batch, taken)),
        variables=tuple(_variables(net, earlier, done, exact)),
        cells=_joined(cells, recorder.norms),
        labels=tuple(found_labels),
        outcome=_outcome(done, exact, recorder.random),
        optimizer=_optimizer_facts(optimizer),
        failure=failure,
    )


def _taken(net: nn.Cell, batch: tuple[Any, ...], loss_fn: Callable[..., Any] | None) -> int:
    """How many of the batch go to the network."""
    inner = unwrap(net)
    smallest, largest = _positional(inner.construct)
    if loss_fn is not None:
        needed, _ = _positional(getattr(loss_fn, "construct", loss_fn))
        wanted = len(batch) - max(0, needed - 1)
        if smallest <= wanted <= largest:
            return wanted
    if len(batch) < smallest:
        raise ArgumentError(
            f"{len(batch)} inputs were given, and {type(inner).__name__}.construct takes {smallest} or more"
        )
    return min(len(batch), largest)


def _positional(function: Callable[..., Any]) -> tuple[int, int]:
    """How many positional arguments a function needs and how many it takes at most."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 0, 1 << 30
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return sum(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters), 1 << 30
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in positional), len(positional)


def _weights(net: nn.Cell, optimizer: Any) -> list[Any]:
    owned = getattr(optimizer, "parameters", None)
    if owned is not None and not callable(owned):
        return list(owned)
    return list(net.trainable_params())


def _pass(
    net: nn.Cell,
    given: tuple[Any, ...],
    labels: tuple[Any, ...],
    loss_fn: Callable[..., Any] | None,
    weights: list[Any],
    done: _Pass,
    recorder: OperatorRecorder | None,
    loss_scale: float = 1.0,
) -> None:
    def forward(*values: Any) -> Any:
        if recorder is not None:
            recorder.phase = "loss"
        output = net(*given)
        done.output = output
        if loss_fn is not None:
            loss = loss_fn(output, *labels)
            loss = loss[0] if isinstance(loss, (tuple, list)) else loss
            done.real_loss = True
        else:
            floats = [t for t in flat_tensors(output) if t.dtype in FLOATING]
            if len(floats) == 1 and floats[0].size == 1:
                loss = floats[0]
                done.real_loss = True
            elif not floats:
                loss = None
            elif recorder is None:
                loss = _stand_in(floats)
            else:
                with unseen(recorder):
                    loss = _stand_in(floats)
        done.loss = loss
        if loss_scale != 1.0 and loss is not None:
            with unseen(recorder) if recorder is not None else nullcontext():
                return loss * loss_scale  # in the loss's own dtype, as the train cells and scalers of MindSpore do
        return loss

    if not weights:
        forward()
        return
    if recorder is not None:
        recorder.phase = "network"
    _, gradients = mindspore.value_and_grad(forward, None, weights)(*given)
    done.raw = gradients
    for parameter, gradient in zip(weights, gradients, strict=False):
        if isinstance(gradient, Tensor):
            values = values_of(gradient)
            if values is not None:
                done.gradients[parameter.name] = values.copy()


def _stand_in(outputs: list[Any]) -> Any:
    return sum(
        (ops.cast(output, mstype.float32).mean() for output in outputs[1:]), ops.cast(outputs[0], mstype.float32).mean()
    )


def _exact(
    net: nn.Cell,
    run: Callable[[_Pass, None], None],
    watcher: Float32Run,
    randomness: Randomness,
    before: NetworkState,
) -> _Pass:
    """The same step with every operator in float32; the network's state comes out as it went in."""
    after = NetworkState(net)
    before.restore(net)
    done = _Pass()
    try:
        with randomness(), cleared_after_failure(), interpose(watcher):
            run(done, None)
            for tensor in flat_tensors(done.output):
                values_of(tensor)  # waits for it: an error comes out here and not in the next run
    except (RuntimeError, ValueError, TypeError, IndexError):
        done = _Pass()
        watcher.gradients.clear()
    finally:
        watcher.release()
        after.restore(net)
    return done


def _finite(gradients: dict[str, Array]) -> bool:
    return all(bool(np.isfinite(values).all()) for values in gradients.values())


def _copy(parameter: Any) -> Array:
    values = values_of(parameter)
    return np.zeros(0, np.float32) if values is None else values.copy()


def _with_gradients(operator: Operator, recorder: OperatorRecorder) -> Operator:
    results = tuple(
        replace(result, gradient=recorder.gradients.get((operator.index, slot)))
        for slot, result in enumerate(operator.results)
    )
    return replace(operator, results=results)


def _inputs(batch: tuple[Any, ...], taken: int) -> list[NetworkInput]:
    found = []
    inside = len(flat_tensors(batch[:taken]))
    for number, tensor in enumerate(flat_tensors(batch)):
        name = f"input {number}" + ("" if number < inside else " (label)")
        values = values_of(tensor)
        samples: tuple[int, ...] = ()
        if values is not None and values.ndim and not np.isfinite(values).all():
            rows = ~np.isfinite(values).reshape(values.shape[0], -1).all(axis=1)
            samples = tuple(int(i) for i in np.flatnonzero(rows)[:8])
        found.append(NetworkInput(name, None if values is None else summarize(values), samples))
    return found


def _variables(net: nn.Cell, earlier: dict[str, Array], done: _Pass, exact: _Pass) -> list[Variable]:
    owners = {id(p): path for path, place in places(net).items() for p in place.inner._params.values()}
    found = []
    for parameter in net.get_parameters():
        after = values_of(parameter)
        if after is None:
            continue
        before = earlier[parameter.name]
        gradient = done.gradients.get(parameter.name)
        true = exact.gradients.get(parameter.name)
        flushed = unchanged = nonzero = 0
        if gradient is not None:
            nonzero = int(np.count_nonzero(gradient))
            if true is not None and true.shape == gradient.shape:
                flushed = int(((gradient == 0) & (true != 0) & np.isfinite(true)).sum())
            unchanged = int(((gradient != 0) & (before == after)).sum())
        found.append(
            Variable(
                parameter_name(parameter.name),
                dtype_name(parameter.dtype),
                owners.get(id(parameter), ""),
                bool(parameter.requires_grad),
                summarize(before),
                summarize(after),
                None if gradient is None else summarize(gradient),
                None if true is None else summarize(true),
                flushed,
                unchanged,
                nonzero,
            )
        )
    return found


def _outcome(done: _Pass, exact: _Pass, random: bool) -> Outcome:
    ours = [t for t in flat_tensors(done.output) if t.dtype in FLOATING]
    theirs = [t for t in flat_tensors(exact.output) if t.dtype in FLOATING]
    errors = [e for a, b in zip(ours, theirs, strict=False) if (e := deviation(a, b)) is not None]
    return Outcome(
        tuple(s for t in ours if (s := stats_of(t)) is not None),
        tuple(s for t in theirs if (s := stats_of(t)) is not None),
        max(errors, default=None),
        scalar(done.loss),
        scalar(exact.loss),
        done.real_loss,
        random,
    )


def _joined(cells: tuple[CellFacts, ...], norms: dict[str, CellFacts]) -> tuple[CellFacts, ...]:
    return tuple(
        replace(cell, error=norms[cell.path].error, input_absmax=norms[cell.path].input_absmax)
        if cell.path in norms
        else cell
        for cell in cells
    )


def _optimizer_facts(optimizer: Any) -> OptimizerFacts | None:
    if optimizer is None:
        return None
    for name in ("eps", "epsilon"):
        value = scalar(getattr(optimizer, name, None))
        if value is not None and math.isfinite(value):
            return OptimizerFacts(type(optimizer).__name__, value)
    defaults = getattr(optimizer, "defaults", None)
    value = scalar(defaults.get("eps")) if isinstance(defaults, dict) else None
    return OptimizerFacts(type(optimizer).__name__, value)
