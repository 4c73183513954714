"""Measuring every operator call of one step, and running a network with every operator in float32."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor
from mindspore.graph.api import _no_grad

from ampdebug._sites import is_cast, is_transparent
from ampdebug._tensor_stats import TensorStats
from ampdebug.hooks._cells import cell_type
from ampdebug.hooks._interpose import Function
from ampdebug.hooks._preflight_float32 import (
    CALL_ERRORS as CALL_ERRORS,
)
from ampdebug.hooks._preflight_float32 import (
    deviation,
    follow_gradient,
    in_float32,
    stats_of,
    values_of,
    widened,
)
from ampdebug.hooks._preflight_guard import balanced_precision
from ampdebug.hooks._protect import _is_in_place
from ampdebug.hooks._shadow import flat_tensors, full_precision, map_tensors
from ampdebug.hooks._sites import PathOf, SiteTracker
from ampdebug.hooks._tensors import FLOATING, dtype_name
from ampdebug.rules._operator_records import CellFacts, LabelFacts, Operand, Operator, Result

# Kinds whose result along an axis depends on a row having a finite entry.
_ROW_KINDS = ("softmax", "logsoftmax", "max", "logsumexp", "softmaxext", "logsoftmaxext")
_NORM_KINDS = ("batchnorm", "layernorm", "groupnorm", "instancenorm", "rmsnorm")
_RANDOM = ("dropout", "random", "bernoulli", "uniform", "normal", "multinomial")


class OperatorRecorder:
    """A watcher that measures what goes into and comes out of every operator call.

    Attributes:
        calls: The operators so far.
        labels: Class labels that were met.
        tracker: Knows the running cells.
        phase: Noted with each call.
        recording: Off: calls are passed on unseen.
        norms: What was measured of normalisation cells.
        random: A random operator ran.
        gradients: ``{(operator, result): statistics}`` of the gradients that arrived so far.
    """

    def __init__(self, root: object, path_of: PathOf) -> None:
        self._path_of = path_of
        self.tracker = SiteTracker(root, path_of)
        self.calls: list[Operator] = []
        self.labels: list[LabelFacts] = []
        self.norms: dict[str, CellFacts] = {}
        self.phase = "network"
        self.recording = True
        self.random = False
        self._widen = False
        self.gradients: dict[tuple[int, int], TensorStats] = {}
        self._sources: dict[int, str] = {}
        self._producers: dict[int, int] = {}
        self._known: dict[int, TensorStats | None] = {}
        self._handles: list[Any] = []
        self._alive: list[Any] = []  # an id is only good for as long as its object lives

    def name_input(self, tensor: Any, name: str) -> None:
        """Makes a tensor known as the network's input."""
        self._sources[id(tensor)] = name
        self._alive.append(tensor)

    def release(self) -> None:
        """Takes the hooks out and lets go of the tensors; what was measured stays."""
        while self._handles:
            self._handles.pop().remove()
        self._known.clear()
        self._alive.clear()

    def on_cell(self, cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        measured = self.recording and "norm" in cell_type(cell).lower() and not cell.name_cells()
        result = self.tracker.run_cell(cell, call)
        if measured:
            self._measure_norm(cell, args, call, result)
        return result

    def on_compiled(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        return self.on_operator(name, lambda *_, **__: call(), args, kwargs)

    def on_operator(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._widen:
            return in_float32(name, function, args, kwargs)
        if not self.recording:
            return function(*args, **kwargs)
        located = self.tracker.site(name)
        cell = self.tracker.cell
        index = len(self.calls)
        plain = name.lower()
        self.random = self.random or any(word in plain for word in _RANDOM)
        given = tuple(self._operands(name, args, kwargs))
        site, file = located if located is not None else (None, "")
        line = site.line if site is not None else ""
        text = linecache.getline(file, int(line.rpartition(":")[2])).strip() if file and line else ""
        made = Operator(
            index,
            name,
            site.path if site is not None else "",
            cell_type(cell) if hasattr(cell, "name_cells") else "",
            line,
            text,
            tuple(operand for operand, _ in given),
            (),
            "network" if site is not None and site.path != "(loss)" and self.phase == "loss" else self.phase,
        )
        made = replace(made, operands=_with_masked_rows(made, [tensor for _, tensor in given]))
        self._note_labels(made)
        self.calls.append(made)  # before the call: what it raises ends the step, and this is where
        before = [o.stats for o in made.operands] if _is_in_place(name) else None
        result = function(*args, **kwargs)
        results = self._results(made, function, args, kwargs, result)
        if before is not None:
            for _, tensor in given:
                self._known.pop(id(tensor), None)
        self.calls[index] = replace(made, results=results)
        return result

    # --- what went in -------------------------------------------------------------------------------------------------

    def _operands(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[Operand, Any | None]]:
        for value in _flat_arguments(args, kwargs):
            if isinstance(value, Tensor):
                yield self._tensor_operand(value), value
            else:
                yield Operand("number", value=float(value)), None

    def _tensor_operand(self, tensor: Any) -> Operand:
        key = id(tensor)
        producer = self._producers.get(key)
        source = self._sources.get(key, "")
        if producer is None and not source:
            source = tensor.name if isinstance(tensor, Parameter) else "constant"
        shape = tuple(int(n) for n in tensor.shape)
        dtype = dtype_name(tensor.dtype)
        if tensor.dtype in FLOATING:
            stats = self._stats(tensor)
            value = None
            if stats is not None and stats.count == 1:
                value = stats.min if stats.finite else float("nan") if stats.nan else float("inf")
            return Operand(dtype, shape, stats, value, producer, source)
        low = high = None
        if dtype.startswith(("int", "uint")) and tensor.size:
            array = tensor.asnumpy()
            low, high = int(array.min()), int(array.max())
        return Operand(dtype, shape, None, None, producer, source, low, high)

    def _stats(self, tensor: Any) -> TensorStats | None:
        key = id(tensor)
        if key not in self._known:
            self._known[key] = stats_of(tensor)
            self._alive.append(tensor)
        return self._known[key]

    # --- what came out ------------------------------------------------------------------------------------------------

    def _results(
        self, made: Operator, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> tuple[Result, ...]:
        found: list[Result] = []
        tensors = flat_tensors(result)
        for slot, tensor in enumerate(tensors):
            self._known.pop(id(tensor), None)  # in-place operators hand on the tensor that they changed
            self._producers[id(tensor)] = made.index
            stats = self._stats(tensor)
            self._alive.append(tensor)
            shape = tuple(int(n) for n in tensor.shape)
            found.append(Result(dtype_name(tensor.dtype), shape, stats))
            if stats is not None and self.phase != "update":
                handle = follow_gradient(tensor, partial(self.gradients.__setitem__, (made.index, slot)))
                if handle is not None:
                    self._handles.append(handle)
        if self._wants_reference(made, found):
            exact = self._in_float32(function, args, kwargs)
            for slot, (seen, low, high) in enumerate(zip(found, tensors, exact, strict=False)):
                if seen.stats is not None and tuple(high.shape) == seen.shape and high.dtype in FLOATING:
                    found[slot] = replace(seen, reference=stats_of(high), error=deviation(low, high))
        return tuple(found)

    def _wants_reference(self, made: Operator, results: list[Result]) -> bool:
        first = next((r for r in results if r.stats is not None), None)
        if first is None or first.stats is None or first.dtype not in ("float16", "bfloat16"):
            return False
        if is_cast(made.name) or is_transparent(made.name) or _is_in_place(made.name):
            return False
        if any(word in made.name.lower() for word in _RANDOM):
            return False
        out = first.stats
        silent = out.zeros > 0.9 * out.count and any(o.stats.absmax > 0 for o in made.tensors if o.stats is not None)
        return bool(out.nonfinite or out.saturated or silent or made.kind in _NORM_KINDS)

    def _in_float32(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        try:
            with balanced_precision(), _no_grad(), full_precision():
                wide_args, wide_kwargs = map_tensors(widened, (args, kwargs))
                return flat_tensors(function(*wide_args, **wide_kwargs))
        except CALL_ERRORS:
            return []

    def _measure_norm(self, cell: Any, args: tuple[Any, ...], call: Callable[[], Any], result: Any) -> None:
        """Compares a normalisation without state with itself in float32."""
        outputs = flat_tensors(result)
        if not outputs or not any(t.dtype in FLOATING for t in flat_tensors(args)):
            return
        path = self._path_of(cell) or ""
        absmax = max((s.absmax for t in flat_tensors(args) if (s := self._stats(t)) is not None), default=0.0)
        error = None
        if not any(not p.requires_grad or "moving" in p.name or "running" in p.name for p in cell.get_parameters()):
            self._widen = True
            try:
                with balanced_precision(), _no_grad(), unseen(self):
                    exact = flat_tensors(call())
                if exact and tuple(exact[0].shape) == tuple(outputs[0].shape):
                    error = deviation(outputs[0], exact[0])
            except CALL_ERRORS:
                error = None
            finally:
                self._widen = False
        known = self.norms.get(path)
        if known is not None:
            error = max((e for e in (error, known.error) if e is not None), default=None)
            absmax = max(absmax, known.input_absmax or 0.0)
        self.norms[path] = CellFacts(path, cell_type(cell), error=error, input_absmax=absmax)

    # --- labels -------------------------------------------------------------------------------------------------------

    def _note_labels(self, made: Operator) -> None:
        kind = made.kind
        scores = next((o for o in made.operands if o.stats is not None and len(o.shape) >= 2), None)
        labels = next((o for o in made.operands if o.low is not None and o.shape), None)
        if labels is None or labels.low is None or labels.high is None:
            return
        numbers = [int(o.value) for o in made.operands if o.is_number and o.value is not None]
        ignored = None
        if "crossentropy" in kind or "nllloss" in kind:
            if scores is None:
                return
            classes = scores.shape[1] if "nll" in kind else scores.shape[-1]
            ignored = numbers[-1] if "nll" in kind and numbers else None
        elif kind == "onehot" and numbers and self._from_input(labels):
            classes = numbers[0]
        elif kind in ("gatherd", "gatherelements", "gatherdgradv2") and scores is not None and self._from_input(labels):
            axis = numbers[0] if numbers else -1
            classes = scores.shape[axis]
        else:
            return
        if classes > 1:
            self.labels.append(LabelFacts(made.place, labels.low, labels.high, classes, ignored))

    def _from_input(self, operand: Operand) -> bool:
        for _ in range(8):
            if operand.source.startswith("input"):
                return True
            if operand.producer is None:
                return False
            made = self.calls[operand.producer]
            if not (is_cast(made.name) or is_transparent(made.name)) or not made.operands:
                return False
            operand = made.operands[0]
        return False


def _with_masked_rows(made: Operator, tensors: list[Any | None]) -> tuple[Operand, ...]:
    if made.kind not in _ROW_KINDS or not made.operands or made.operands[0].stats is None:
        return made.operands
    first = made.operands[0]
    if first.stats is None or not first.stats.neg_inf or not first.shape or tensors[0] is None:
        return made.operands
    array = values_of(tensors[0])
    assert array is not None
    numbers = [int(o.value) for o in made.operands if o.is_number and o.value is not None]
    axis = numbers[0] if numbers and -array.ndim <= numbers[0] < array.ndim else -1
    rows = int(np.all(np.isneginf(array), axis=axis).sum())
    return (replace(first, masked_rows=rows), *made.operands[1:])


def _flat_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Tensors at any depth and numbers that stand as arguments of their own, in order."""
    for value in (*args, *kwargs.values()):
        yield from _flat_argument(value, 2)


def _flat_argument(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        if depth:
            yield value
    elif isinstance(value, (tuple, list)):
        # A primitive gets its arguments as one list; numbers deeper than that are shapes and axes.
        for item in value:
            yield from _flat_argument(item, depth - 1 if depth else 0)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _flat_argument(item, 0)


@contextmanager
def unseen(recorder: OperatorRecorder) -> Iterator[None]:
    """Makes operator calls that are ours and not the user's."""
    before = recorder.recording
    recorder.recording = False
    try:
        yield
    finally:
        recorder.recording = before
