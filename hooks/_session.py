"""One watched run: attach, record step after step, detach. The callback, ``watch`` and ``ampdebug run`` all sit on
this.

The order of a step is :meth:`Session.begin`, the user's own step with the probes listening, :meth:`Session.end`.
Whatever goes wrong in here is reported once and ends the watching, never the training.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import mindspore as ms
from mindspore import nn
from mindspore.graph.api import _pynative_executor

from ampdebug._errors import AmpdebugError, AmpdebugWarning, ArgumentError, NoObservationsError
from ampdebug._recorder import Seen, StepRecorder
from ampdebug._records import Event, Step
from ampdebug._store import RunWriter
from ampdebug.hooks import _slots
from ampdebug.hooks._capture import Capture
from ampdebug.hooks._cells import Place, asked_dtype, describe, find_train_cell, own_parameters, places
from ampdebug.hooks._environment import describe_run, mode_name, rank_and_size
from ampdebug.hooks._graph_probe import GraphProbe, graph_gradient_hook
from ampdebug.hooks._lints import lint
from ampdebug.hooks._live import LiveTensorBoard
from ampdebug.hooks._loss_scale import read_learning_rate, read_scale, sort_outputs
from ampdebug.hooks._parameters import ParameterWatch
from ampdebug.hooks._precision_seen import PrecisionSeen
from ampdebug.hooks._probes import output_gradient_hook
from ampdebug.hooks._select import select
from ampdebug.hooks._tensors import FLOATING, call_leaves, leaves, see, see_array

# After a bad step the next ones are recorded whatever `every` says, at most so many in a row.
_BAD_STEPS_RECORDED = 10
_numbers = itertools.count(1)


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
        graph: How values leave a compiled graph: by a Python ``callback`` (CPU only), or by ``capture`` in buffers on
        the
            device; ``auto`` takes callbacks where they work.
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
        graph: Literal["auto", "callback", "capture"] = "auto",
        tensorboard: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(target, nn.Cell):
            raise ArgumentError(
                f"net={target!r}: must be a mindspore.nn.Cell (the network or the train cell that runs)"
            )
        if type(every) is not int or every < 1:
            raise ArgumentError(f"every={every!r}: must be a whole number of steps, 1 or more (1 records each step)")
        self.target = target
        self.train_cell = find_train_cell(target)
        self.optimizer = optimizer if optimizer is not None else getattr(self.train_cell, "optimizer", None)
        self.scale_source = loss_scale if loss_scale is not None else self.train_cell
        self.every = every
        self.out = out
        self.silence = silence
        self.active = False
        if graph not in ("auto", "callback", "capture"):
            raise ArgumentError(f"graph={graph!r}: must be 'auto', 'callback' (CPU only) or 'capture'")
        on_cpu = ms.get_context("device_target") == "CPU"
        self._capture = Capture(self) if graph == "capture" or (graph == "auto" and not on_cpu) else None
        self.wants_output_gradients = False
        self.off = False
        self.begun = False
        self.last: Step | None = None
        self.places = places(target)
        self.watched = select(self.places, cells)
        self.rank, self.world_size = rank_and_size()
        self.writer = RunWriter(out, rank=self.rank, append=append)
        self.step_number = self.writer.last_step  # an appended run goes on counting
        self.recorder = StepRecorder(
            self.writer.site_id, _parents(self.watched), _with_watched_children(self.places, self.watched)
        )
        self._live = None if tensorboard is None else LiveTensorBoard(tensorboard, rank=self.rank, append=append)
        self._level = amp_level
        self._owners = _owners(self.places, self.watched)
        self._recomputed = _recomputed(self.places)
        self._recomputed_calls: set[tuple[Any, ...]] = set()
        self._token = f"ampdebug{next(_numbers)}"
        self._precision = PrecisionSeen(self.places, self._not_seen)
        self._sampled = False
        self._bad_in_a_row = 0
        self._said_silent = False
        self._said_repeated = False
        self._cells_written = 0
        self._calls_seen = 0
        self._in_backward = False
        self._gradients_unscaled = False
        self._started = self._own = 0.0
        self._scale: float | None = None
        self._rate: float | None = None
        self._reduced: list[Any] = list(getattr(self.train_cell, "weights", ()))
        self._hooked: dict[int, weakref.ref[Any]] = {}
        self._tensor_handles: list[Any] = []

    # -- begin and end of watching -------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Puts the probes in and writes down what the run is. Everything is taken back if it fails."""
        formats: dict[str, str] = {}
        for place in self.places.values():
            for parameter in own_parameters(place.inner):
                formats[parameter.name] = asked_dtype(place.inner) or "float16"
        root = self.places[""].inner
        self.parameters = ParameterWatch(list(root.get_parameters()), self.optimizer, formats)
        meta = describe_run(self.target, self.places, level=self._level)
        self.writer.put_meta({**meta, "every": self.every, "graph": "capture" if self._capture else "callback"})
        self._put_cells()
        for event in lint(self.train_cell, self.optimizer, self.places, meta["amp_level"]):
            self.note(event.kind, event.message, **event.data)
        try:
            _slots.listen(
                {path: (place.outer, place.cell_type) for path, place in self.watched.items()},
                self.parameters.trained,
                self,
            )
            reducer = getattr(self.train_cell, "grad_reducer", None)
            if self.world_size > 1 and isinstance(reducer, nn.DistributedGradReducer):
                _slots.listen({REDUCER_PATH: (reducer, type(reducer).__name__)}, [], self)
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Takes everything out of the network again. May be called twice."""
        self.active = False
        self._precision.end_step()
        _slots.ignore(self)

    def close(self, status: Literal["finished", "failed"] = "finished") -> None:
        """Detaches and closes the file."""
        self.detach()
        if self._live is not None:
            self._live.close()
            self._live = None
        if not self.off:
            self.guard(self.writer.close, status)

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
        except (AmpdebugError, OSError) as second:  # mostly the store itself is what failed: that has been said
            self.last_error = second

    def guard(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls ``function``; an exception in it ends the watching, not the training."""
        try:
            return function(*args)
        except NoObservationsError:
            raise
        except Exception as error:  # noqa: BLE001 - the promise: nothing of ours stops the training
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
        self._recomputed_calls.clear()
        self._calls_seen = 0
        self._in_backward = False
        self._gradients_unscaled = False
        self._scale = read_scale(self.scale_source)
        self._rate = read_learning_rate(self.optimizer, evaluate=self._sampled)
        self.parameters.before(self.recorder if self._sampled else None)
        self._own = time.perf_counter() - self._started
        self.begun = True
        self.active = self._sampled
        if self._sampled:
            self._precision.begin_step()

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
        self._precision.end_step()
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
        self._hooked.clear()
        while self._tensor_handles:
            self._tensor_handles.pop().remove()
        return step if isinstance(step, Step) else None

    def _end(self, outputs: Any, known: dict[str, Any]) -> Step:
        started = time.perf_counter()
        sampled = self._sampled
        if sampled and self._capture is not None:
            self._collect(self._capture)
        after = read_scale(self.scale_source)
        rate = self._rate
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
            self._note_poisoned()
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

    def _collect(self, capture: Capture) -> None:
        capture.collect()
        if capture.left_out:
            names = ", ".join(sorted(set(capture.left_out))[:5])
            self.note(
                "capture-limit",
                f"not all watched tensors fit into the {capture.limit / 2**20:.0f} MiB of buffers on the device: "
                f"{names}, ... are not recorded in graph mode; narrow cells= to those you need",
            )
            capture.left_out.clear()
        if capture.repeated and not self._said_repeated:
            self._said_repeated = True
            names = ", ".join(sorted(capture.repeated)[:5])
            self.note(
                "capture-last-call",
                f"cells that run several times in a step are recorded in graph mode with their last call only: {names}",
            )

    def _note_poisoned(self) -> None:
        for name, (nan, pos_inf, neg_inf) in self.parameters.newly_poisoned().items():
            counts = {"nan": nan, "pos_inf": pos_inf, "neg_inf": neg_inf}
            words = ", ".join(f"{n} {word}" for n, word in ((nan, "NaN"), (pos_inf, "+inf"), (neg_inf, "-inf")) if n)
            message = f"Step {self.step_number} left {name} with {words}; an update that is skipped does not undo that."
            self.writer.put_event(Event(self.step_number, "buffer-not-finite", message, {"parameter": name, **counts}))

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
        # Gradients of cell outputs cost a graph a few percent: they are asked for once a backward pass has gone wrong
        # by itself. In PyNative mode they are always seen.
        self.wants_output_gradients = step.backward_birth is not None and step.forward_birth is None

    def _write(self, step: Step) -> None:
        if step.sampled and len(self.recorder):
            self.writer.put_step(step, self.recorder.site_ids, self.recorder.dtypes, self.recorder.table)
            if self._cells_written < 2 or self._precision.changed:
                self._put_cells()  # now it was seen what they compute in
        else:
            self.writer.put_step(step, None, None, None)
        if self._live is not None:
            self._show(step)

    def _show(self, step: Step) -> None:
        """Writes the live curves. They are a view: where they fail, recording goes on without them."""
        assert self._live is not None
        try:
            self._live.step(step, self.recorder)
        except (AmpdebugError, OSError) as error:
            self._live = None
            self.note("tensorboard-off", f"ampdebug stopped writing TensorBoard files: {error}. The recording goes on.")

    def _put_cells(self) -> None:
        self._cells_written += 1
        self._precision.changed = False
        traced = _slots.layouts(self)
        cells = []
        for path, place in self.places.items():
            dtypes, source = self._precision.of(path, traced.get(path, []))
            cell = describe(place, watched=path in self.watched)
            cells.append(replace(cell, compute_dtypes=dtypes, compute_source=source))
        self.writer.put_cells(cells)
        if self._live is not None:
            self._live.describe(cells)

    def _not_seen(self, message: str) -> None:
        event = Event(self.step_number, "compute-dtypes-not-seen", f"{message}; their dtypes are taken from the flags")
        self.guard(self.writer.put_event, event)

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
        if not self.active:
            return ""
        if self._capture is not None:
            return f"{self._token}c{self._capture.version}"
        return f"{self._token}b" if self.wants_output_gradients else self._token

    def graph_probe(self, path: str, cell_type: str) -> GraphProbe:
        """A compiled probe for a cell."""
        return GraphProbe(path, cell_type, self) if self._capture is None else self._capture.probe(path, cell_type)

    def graph_gradient_hook(self, parameter: Any) -> Callable[[Any], Any]:
        """A compiled hook for the gradient of a parameter."""
        if self._capture is None:
            return graph_gradient_hook(parameter.name, self)
        return self._capture.gradient_hook(parameter)

    def failed_to_compile(self, error: Exception) -> None:
        """The network compiled only without the probes."""
        self.fail(error)

    def compiling(self) -> Callable[[], None]:
        """A graph with this session's probes is about to be compiled; returns what to call afterwards."""
        return self._precision.compiling()

    def compiled(self, executor: Any, phase: str) -> None:
        """It was compiled."""
        self._precision.compiled(executor, phase)

    def entering(self, path: str) -> None:
        """A new forward pass begins with the outermost cell."""
        self._precision.entering(path)
        if not path:
            self._in_backward = False

    def python_call(self, path: str, cell_type: str, args: Any, kwargs: Any, output: Any) -> None:
        """A watched cell ran as Python."""
        self.guard(self._python_call, path, cell_type, args, kwargs, output)

    def _python_call(self, path: str, cell_type: str, args: Any, kwargs: Any, output: Any) -> None:
        if path == REDUCER_PATH:
            self._take_reduced([see(tensor) for _, tensor in leaves(output)])
            return
        if self._in_backward and path in self._recomputed:
            return
        self._calls_seen += 1
        tensors = [*call_leaves(args, kwargs)]
        inputs = len(tensors)
        tensors.extend(leaves(output))
        seen = [(slot, see(tensor)) for slot, tensor in tensors]
        started = time.perf_counter()  # PyNative is asynchronous: up to here it is the network's own time
        self.recorder.cell_call(path, cell_type, seen[:inputs], seen[inputs:])
        if _pynative_executor.requires_grad():
            self._hook_outputs(path, cell_type, tensors[:inputs], tensors[inputs:])
        self._own += time.perf_counter() - started

    def _hook_outputs(self, path: str, cell_type: str, inputs: list[Any], outputs: list[Any]) -> None:
        """Asks for the gradients of a call's outputs. A tensor that several cells hand on counts for the innermost."""
        passed_on = {id(tensor) for _, tensor in inputs}
        call = self.recorder.calls(path) - 1
        for slot, tensor in outputs:
            if id(tensor) in passed_on or isinstance(tensor, ms.Parameter) or tensor.dtype not in FLOATING:
                continue
            if not tensor._requires_grad:  # MindSpore refuses a hook on it
                continue
            known = self._hooked.get(id(tensor))
            if known is not None and known() is tensor:
                continue
            self._hooked[id(tensor)] = weakref.ref(tensor)
            hook = output_gradient_hook(path, cell_type, call, slot, self)
            self._tensor_handles.append(tensor.register_hook(hook))

    def output_gradient(self, path: str, cell_type: str, call: int, slot: str, value: Any) -> None:
        """The gradient of a cell's output arrived."""
        self.guard(self._output_gradient, path, cell_type, call, slot, value)

    def _output_gradient(self, path: str, cell_type: str, call: int, slot: str, value: Any) -> None:
        self._in_backward = True
        seen = _seen(value)
        started = time.perf_counter()
        self.recorder.output_gradient(path, cell_type, call, slot, seen)
        self._own += time.perf_counter() - started

    def _take_reduced(self, gradients: list[Seen]) -> None:
        """What came out of the reduction over ranks, in the order of the train cell's weights."""
        started = time.perf_counter()
        for parameter, seen in zip(self._reduced, gradients, strict=True):
            self.recorder.gradient(parameter.name, "", seen, reduced=True)
        self._own += time.perf_counter() - started

    def graph_call(self, path: str, cell_type: str, inputs: list[Any], outputs: list[Any]) -> None:
        """A watched cell ran in a graph."""
        if path == REDUCER_PATH:
            self._take_reduced([seen for _, seen in outputs])
            return
        started = time.perf_counter()
        self._calls_seen += 1
        if path in self._recomputed and self._repeats(path, [*inputs, *outputs]):
            return
        self.recorder.cell_call(path, cell_type, inputs, outputs)
        self._own += time.perf_counter() - started

    def _repeats(self, path: str, values: list[Any]) -> bool:
        """Whether a recomputed cell's call is the second one with the same values.

        A graph runs both whenever it likes, the backward pass may have begun before the first: only values tell.
        """
        contents = [(slot, hash(seen.array.tobytes())) for slot, seen in values if seen.array is not None]
        key = (path, *contents)
        known = key in self._recomputed_calls
        self._recomputed_calls.add(key)
        return known

    def gradient(self, name: str, value: Any, *, reduced: bool = False) -> None:
        """The gradient of a parameter arrived."""
        self.guard(self._gradient, name, value, reduced)

    def _gradient(self, name: str, value: Any, reduced: bool) -> None:
        self._calls_seen += 1
        self._in_backward = True
        owner = self._owners.get(name, "")
        if owner in self._recomputed and not reduced and name in self.recorder.gradients_seen:
            return  # in a graph it arrives once more for each time the cell's code was copied
        seen = _seen(value)
        started = time.perf_counter()
        self.recorder.gradient(name, owner, seen, reduced=reduced)
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
        sys.stderr.write(f"AmpdebugWarning: {warning}\n")


def _seen(value: Any) -> Seen:
    """A tensor, or what a compiled graph hands to a callback."""
    if isinstance(value, ms.Tensor):
        return see(value)
    return see_array(value, str(getattr(value, "dtype", "float32")), tuple(getattr(value, "shape", ())))


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
