"""One watched run: attach, record step after step, detach. The callback, ``watch`` and ``ampdebug run`` all sit on this.

The order of a step is :meth:`Session.begin`, the user's own step with the probes listening, :meth:`Session.end`. Whatever
goes wrong in here is reported once and ends the watching, never the training.
"""

from __future__ import annotations

import itertools
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import mindspore as ms
from mindspore import nn

from ampdebug._errors import AmpdebugWarning, ArgumentError, NoObservationsError
from ampdebug._recorder import Seen, StepRecorder
from ampdebug._records import Event, Step
from ampdebug._store import RunWriter
from ampdebug.hooks import _slots
from ampdebug.hooks._cells import Place, asked_dtype, describe, find_train_cell, own_parameters, places
from ampdebug.hooks._environment import describe_run, mode_name, rank_and_size
from ampdebug.hooks._loss_scale import read_learning_rate, read_scale, sort_outputs
from ampdebug.hooks._parameters import ParameterWatch
from ampdebug.hooks._precision_seen import compute_dtypes
from ampdebug.hooks._select import select
from ampdebug.hooks._tensors import call_leaves, leaves, see, see_array

# After a bad step the next ones are recorded whatever `every` says, at most so many in a row.
_BAD_STEPS_RECORDED = 10
_numbers = itertools.count(1)

LiveSink = Callable[[Step, Any], None]


class Session:
    """Watches one network over one run.

    Args:
        target: A network, an AMP-converted network or a train cell.
        out: Directory of the run.
        every: Statistics are taken in step 1, 1 + every, ... and after a bad step.
        cells: Which cells are watched; see :func:`ampdebug.hooks._select.select`.
        optimizer: The optimizer, where the target does not hold it.
        loss_scale: Whatever holds the loss scale, where the target does not.
        append: Go on in a directory that holds a run.
        amp_level: What to note as the level instead of what is seen.
        silence: What to do when a recorded step yields nothing.
    """

    def __init__(
        self,
        target: nn.Cell,
        out: Any,
        *,
        every: int = 1,
        cells: Any = None,
        optimizer: Any = None,
        loss_scale: Any = None,
        append: bool = False,
        amp_level: str | None = None,
        silence: Literal["raise", "warn"] = "warn",
        live: tuple[LiveSink, ...] = (),
    ) -> None:
        if not isinstance(target, nn.Cell):
            raise ArgumentError(
                f"net={target!r}: must be a mindspore.nn.Cell (the network or the train cell that runs)"
            )
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ArgumentError(f"every={every!r}: must be a whole number of steps, 1 or more (1 records each step)")
        self.target = target
        self.train_cell = find_train_cell(target)
        self.optimizer = optimizer if optimizer is not None else getattr(self.train_cell, "optimizer", None)
        self.scale_source = loss_scale if loss_scale is not None else self.train_cell
        self.every = every
        self.out = out
        self.silence = silence
        self.active = False
        self.off = False
        self.begun = False
        self.step_number = 0
        self.last: Step | None = None
        self.places = places(target)
        self.watched = select(self.places, cells)
        self.rank, self.world_size = rank_and_size()
        self.writer = RunWriter(out, rank=self.rank, append=append)
        self.recorder = StepRecorder(
            self.writer.site_id, _parents(self.watched), _with_watched_children(self.places, self.watched)
        )
        self._live = live
        self._level = amp_level
        self._owners = _owners(self.places, self.watched)
        self._recomputed = _recomputed(self.places)
        self._token = f"ampdebug{next(_numbers)}"
        self._sampled = False
        self._bad_in_a_row = 0
        self._said_silent = False
        self._cells_written = 0
        self._calls_seen = 0
        self._in_backward = False
        self._gradients_unscaled = False
        self._started = self._own = 0.0
        self._scale: float | None = None
        self._measured: dict[int, tuple[weakref.ref[Any], int, int]] = {}

    # -- begin and end of watching -------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Puts the probes in and writes down what the run is. Everything is taken back if it fails."""
        formats: dict[str, str] = {}
        for place in self.places.values():
            for parameter in own_parameters(place.inner):
                formats[parameter.name] = asked_dtype(place.inner) or "float16"
        root = self.places[""].inner
        self.parameters = ParameterWatch(list(root.get_parameters()), self.optimizer, formats)
        self.writer.put_meta({**describe_run(self.target, self.places, level=self._level), "every": self.every})
        self._put_cells()
        try:
            _slots.listen(
                {path: (place.outer, place.cell_type) for path, place in self.watched.items()},
                self.parameters.trained,
                self,
            )
            if self.world_size > 1 and self.train_cell is not None:
                _slots.listen({REDUCER_PATH: (self.train_cell.grad_reducer, "DistributedGradReducer")}, [], self)
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Takes everything out of the network again. May be called twice."""
        self.active = False
        _slots.ignore(self)

    def close(self, status: Literal["finished", "failed"] = "finished") -> None:
        """Detaches and closes the file."""
        self.detach()
        if not self.off:
            self.writer.close(status)

    def fail(self, error: Exception) -> None:
        """Switches the watching off and says why, once. The probes are taken out at the next step's border."""
        if self.off:
            return
        self.off = True
        self.active = False
        _warn(
            f"ampdebug switched itself off in step {self.step_number}: {type(error).__name__}: {error}. The training "
            f"goes on unchanged; the steps before it are in {self.out}."
        )
        try:
            self.writer.put_event(Event(self.step_number, "monitor-off", f"{type(error).__name__}: {error}"))
            self.writer.close("failed")
        except Exception as second:  # the store itself may be what failed; it has been said
            self.last_error = second

    def guard(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls ``function``; an exception in it ends the watching, not the training."""
        try:
            return function(*args)
        except NoObservationsError:
            raise
        except Exception as error:
            self.fail(error)
            return None

    def note(self, kind: str, message: str, **data: Any) -> None:
        """Writes an event and warns once with it."""
        self.writer.put_event(Event(self.step_number, kind, message, data))
        _warn(message)

    # -- one step ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The user's step is about to start."""
        if self.off:
            self.detach()
            return
        self.guard(self._begin)

    def _begin(self) -> None:
        self._started = time.perf_counter()
        self.step_number += 1
        due = (self.step_number - 1) % self.every == 0
        self._sampled = due or 0 < self._bad_in_a_row <= _BAD_STEPS_RECORDED
        self.recorder.begin()
        self._measured.clear()
        self._calls_seen = 0
        self._in_backward = False
        self._gradients_unscaled = False
        self._scale = read_scale(self.scale_source)
        self.parameters.before(self.recorder if self._sampled else None)
        self._own = time.perf_counter() - self._started
        self.begun = True
        self.active = self._sampled

    def end(self, outputs: Any = None, **known: Any) -> Step | None:
        """The user's step is done.

        Args:
            outputs: What the step returned; sorted by type and dtype.
            known: Fields of :class:`Step` that the caller knows better (``loss``, ``overflow``, ``epoch``, ...).

        Returns:
            The step as recorded; None where the watching is off.

        Raises:
            NoObservationsError: A step to be recorded yielded nothing and ``silence="raise"``.
        """
        self.active = False
        if self.off:
            self.detach()
            return None
        if not self.begun:
            return None
        step = self.guard(self._end, outputs, known)
        if self.off:
            self.detach()
            return None
        self.begun = False
        self._measured.clear()
        return step if isinstance(step, Step) else None

    def _end(self, outputs: Any, known: dict[str, Any]) -> Step:
        started = time.perf_counter()
        sampled = self._sampled
        after = read_scale(self.scale_source)
        rate = read_learning_rate(self.optimizer)
        sorted_outputs = sort_outputs(outputs, scales=(self._scale, after), learning_rate=rate)
        step = Step(
            self.step_number,
            loss=sorted_outputs.loss,
            loss_scale=self._scale,
            loss_scale_after=after if after is not None else sorted_outputs.scale,
            overflow=sorted_outputs.overflow,
            learning_rate=rate,
            sampled=sampled,
            extra=dict(sorted_outputs.extra),
        )
        if step.loss_scale is None and self.last is not None:
            step.loss_scale = self.last.loss_scale_after
        for name, value in known.items():
            if value is not None:
                setattr(step, name, value)
        updated = self.parameters.after(self.recorder if sampled else None)
        if sampled:
            self._judge_sampled(step)
        bad = bool(step.overflow or step.nonfinite_gradients)
        step.update_skipped = False if updated else (bad or None if updated is False else None)
        step.accumulating = False if updated or bad else (True if updated is False and sampled else None)
        loud = bad or (step.loss is not None and not _finite(step.loss))
        self._bad_in_a_row = self._bad_in_a_row + 1 if loud else 0
        if sampled and not self._calls_seen:
            self._say_silent()
        now = time.perf_counter()
        step.monitor_seconds = self._own + now - started
        step.seconds = now - self._started
        self._write(step)
        self.last = step
        return step

    def _judge_sampled(self, step: Step) -> None:
        recorder = self.recorder
        if recorder.gradients_seen:
            step.nonfinite_gradients = recorder.nonfinite_gradients
            step.grad_norm_scaled = recorder.gradient_norm
            scale = step.loss_scale or 1.0
            if self._gradients_unscaled:
                step.extra["gradients_unscaled"] = True
                step.grad_norm_scaled, step.grad_norm = None, recorder.gradient_norm
            else:
                step.grad_norm = recorder.gradient_norm / scale
            trained = [p.name for p in self.parameters.trained]
            missing = [name for name in trained if name not in recorder.gradients_seen]
            step.parameters_without_gradient = len(missing)
            if missing:
                step.extra["without_gradient"] = missing[:100]
        step.forward_birth, step.backward_birth = recorder.births(step.loss)

    def _write(self, step: Step) -> None:
        if step.sampled and len(self.recorder):
            self.writer.put_step(step, self.recorder.site_ids, self.recorder.dtypes, self.recorder.table)
            if self._cells_written < 2:
                self._put_cells()  # now it was seen what they compute in
        else:
            self.writer.put_step(step, None, None, None)
        for sink in self._live:
            sink(step, self)

    def _put_cells(self) -> None:
        self._cells_written += 1
        traced = _slots.layouts(self)
        cells = []
        for path, place in self.places.items():
            dtypes, source = compute_dtypes(path, self.places, traced.get(path, []))
            cell = describe(place, watched=path in self.watched)
            cells.append(replace(cell, compute_dtypes=dtypes, compute_source=source))
        self.writer.put_cells(cells)

    def _say_silent(self) -> None:
        message = (
            f"step {self.step_number} of the watched network yielded no observation in {mode_name()} on "
            f"{ms.get_context('device_target')}: none of its {len(self.watched)} watched cells ran and no gradient "
            "arrived. Watch the object that really runs (auto_mixed_precision at O1 returns a new network), call it "
            "inside the watched step, and with a compile cache on disk (MS_COMPILER_CACHE_ENABLE) switch it off"
        )
        if self.silence == "raise":
            raise NoObservationsError(message)
        if not self._said_silent:
            self._said_silent = True
            self.note("no-observation", message)

    # -- what the probes say -------------------------------------------------------------------------------------------

    def graph_token(self) -> str:
        """Graphs compiled or run in a recorded step carry the probes; all others are the user's own."""
        return self._token if self.active and ms.get_context("device_target") == "CPU" else ""

    def entering(self, path: str) -> None:
        """A new forward pass begins with the outermost cell."""
        if not path:
            self._in_backward = False

    def python_call(self, path: str, cell_type: str, args: Any, kwargs: Any, output: Any) -> None:
        """A watched cell ran as Python."""
        self.guard(self._python_call, path, cell_type, args, kwargs, output)

    def _python_call(self, path: str, cell_type: str, args: Any, kwargs: Any, output: Any) -> None:
        if self._in_backward and path in self._recomputed:
            return
        started = time.perf_counter()
        self._calls_seen += 1
        tensors = [*call_leaves(args, kwargs)]
        inputs = len(tensors)
        tensors.extend(leaves(output))
        seen = [(slot, self._see(tensor)) for slot, tensor in tensors]
        rows = self.recorder.cell_call(path, cell_type, seen[:inputs], seen[inputs:])
        for (_, tensor), row in zip(tensors, rows, strict=True):
            self._measured[id(tensor)] = (weakref.ref(tensor), tensor._version, row)
        self._own += time.perf_counter() - started

    def _see(self, tensor: Any) -> Seen | int:
        # A cell's input is mostly the last one's output: the same object, not changed in place since.
        known = self._measured.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            return known[2]
        return see(tensor)

    def graph_call(self, path: str, cell_type: str, inputs: list[Any], outputs: list[Any]) -> None:
        """A watched cell ran in a graph."""
        if path == REDUCER_PATH:
            for parameter, (_, seen) in zip(self.train_cell.weights, outputs, strict=False):
                self.recorder.gradient(parameter.name, "", seen, reduced=True)
            return
        if self._in_backward and path in self._recomputed:
            return
        started = time.perf_counter()
        self._calls_seen += 1
        self.recorder.cell_call(path, cell_type, inputs, outputs)
        self._own += time.perf_counter() - started

    def gradient(self, name: str, value: Any, *, reduced: bool = False) -> None:
        """The gradient of a parameter arrived."""
        self.guard(self._gradient, name, value, reduced)

    def _gradient(self, name: str, value: Any, reduced: bool) -> None:
        started = time.perf_counter()
        self._calls_seen += 1
        self._in_backward = True
        if isinstance(value, ms.Tensor):
            seen = see(value)
        else:
            dtype = str(getattr(value, "dtype", "float32"))
            seen = see_array(value, dtype, tuple(getattr(value, "shape", ())))
        self.recorder.gradient(name, self._owners.get(name, ""), seen, reduced=reduced)
        self._own += time.perf_counter() - started

    def take_gradients(self, gradients: Any) -> None:
        """Takes gradients that the caller holds, where none were seen arriving. They are unscaled already."""
        if not self._sampled or self.recorder.gradients_seen:
            return
        values = [tensor for _, tensor in leaves(gradients)]
        names = [p.name for p in self.parameters.in_order]
        if len(values) != len(names):
            raise ArgumentError(
                f"grads has {len(values)} tensors, the optimizer {len(names)} parameters: give one each"
            )
        for name, tensor in zip(names, values, strict=True):
            self._gradient(name, tensor, False)
        self._gradients_unscaled = True


REDUCER_PATH = "(reducer)"
"""Path under which the gradient reducer of a data-parallel train cell is watched; never shown as a cell."""


def _warn(message: str) -> None:
    try:
        warnings.warn(message, AmpdebugWarning, stacklevel=3)
    except AmpdebugWarning as warning:
        # The user made warnings into errors: the training still must not stop for one of ours.
        print(f"AmpdebugWarning: {warning}", file=sys.stderr)


def _finite(value: float) -> bool:
    return value - value == 0.0


def _parents(watched: dict[str, Place]) -> dict[str, str]:
    parents: dict[str, str] = {}
    for path in watched:
        for above in _above(path):
            if above in watched:
                parents[path] = above
                break
    return parents


def _above(path: str) -> Iterator[str]:
    while path and not path.startswith("("):
        path = path.rpartition(".")[0]
        yield path


def _with_watched_children(places: dict[str, Place], watched: dict[str, Place]) -> list[str]:
    return [path for path in watched if any(child in watched for child in places[path].children)]


def _owners(places: dict[str, Place], watched: dict[str, Place]) -> dict[str, str]:
    return {p.name: path for path, place in places.items() for p in own_parameters(place.inner)}


def _recomputed(places: dict[str, Place]) -> set[str]:
    roots = [path for path, place in places.items() if place.inner._recompute_cell is not None or _flagged(place.inner)]
    return {path for path in places if any(path == root or path.startswith(f"{root}.") or not root for root in roots)}


def _flagged(cell: Any) -> bool:
    return bool(cell.get_flags().get("recompute", False)) if hasattr(cell, "get_flags") else False
