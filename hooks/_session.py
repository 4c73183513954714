"""One watched run: attach, record step after step, detach. The callback, ``watch`` and ``ampdebug run`` all sit on
this.

The order of a step is :meth:`Session.begin`, the user's own step with the probes listening, :meth:`Session.end`.
Whatever goes wrong in here is reported once and ends the watching, never the training.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import mindspore as ms
from mindspore import nn
from mindspore.graph.api import _pynative_executor

from ampdebug._errors import AmpdebugError, AmpdebugWarning, ArgumentError, NoObservationsError
from ampdebug._records import Event, Site, Step
from ampdebug._store import RunWriter
from ampdebug.hooks import _slots
from ampdebug.hooks._capture import Capture
from ampdebug.hooks._cells import Place, asked_dtype, describe, find_train_cell, own_parameters, places
from ampdebug.hooks._environment import describe_run, mode_name, rank_and_size
from ampdebug.hooks._flight import FlightRecorder, Keep
from ampdebug.hooks._lints import lint
from ampdebug.hooks._listener import Listener
from ampdebug.hooks._live import LiveTensorBoard
from ampdebug.hooks._loss_scale import read_learning_rate, read_scale, sort_outputs
from ampdebug.hooks._parameters import ParameterWatch
from ampdebug.hooks._select import select

# After a bad step the next ones are recorded whatever `every` says, at most so many in a row.
_BAD_STEPS_RECORDED = 10


class Session(Listener):
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
            the device; ``auto`` takes callbacks where they work.
        tensorboard: Directory for live TensorBoard files, or None.
        keep: What to keep of bad steps, or None.
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
        keep: Keep | None = None,
    ) -> None:
        if not isinstance(target, nn.Cell):
            raise ArgumentError(
                f"net={target!r}: must be a mindspore.nn.Cell (the network or the train cell that runs)"
            )
        if type(every) is not int or every < 1:
            raise ArgumentError(f"every={every!r}: must be a whole number of steps, 1 or more (1 records each step)")
        self.target = target
        train_cell = find_train_cell(target)
        self.optimizer = optimizer if optimizer is not None else getattr(train_cell, "optimizer", None)
        self.scale_source = loss_scale if loss_scale is not None else train_cell
        self.every = every
        self.out = out
        self.silence = silence
        self.off = False
        self.begun = False
        self.last: Step | None = None
        self.rank, self.world_size = rank_and_size()
        found = places(target)
        formats = {p.name: _format(place) for place in found.values() for p in own_parameters(place.inner)}
        parameters = ParameterWatch(list(found[""].inner.get_parameters()), self.optimizer, formats)
        super().__init__(found, select(found, cells), self._site_id, parameters, train_cell, graph)
        self.writer = RunWriter(out, rank=self.rank, append=append)
        self.step_number = self.writer.last_step  # an appended run goes on counting
        self.flight: FlightRecorder | None = None
        if keep is not None:
            self.flight = FlightRecorder(
                keep, found, out, self.rank, train_cell is None, self.note, self.writer.put_event
            )
        self._live: LiveTensorBoard | None = None
        self._tensorboard = tensorboard
        self._append = append
        self._level = amp_level
        self._sampled = False
        self._bad_in_a_row = 0
        self._said_silent = False
        self._said_repeated = False
        self._said_left_out = False
        self._cells_written = 0
        self._started = 0.0
        self._scale: float | None = None
        self._rate: float | None = None

    def _site_id(self, site: Site, shape: tuple[int, ...] | None) -> int:
        return self.writer.site_id(site, shape)

    # -- begin and end of watching -------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Puts the probes in and writes down what the run is. Everything is taken back if it fails."""
        try:
            if self._tensorboard is not None:
                self._live = LiveTensorBoard(self._tensorboard, rank=self.rank, append=self._append)
            meta = describe_run(self.target, self.places, level=self._level)
            self.writer.put_meta({**meta, "every": self.every, "graph": "capture" if self._capture else "callback"})
            self._put_cells()
            for event in lint(self.train_cell, self.optimizer, self.places, meta["amp_level"]):
                self.note(event.kind, event.message, **event.data)
            self._listen(self.world_size)
            if self.flight is not None:
                self.flight.attach()
        except BaseException:
            self.close("failed")
            raise

    def detach(self) -> None:
        """Takes everything out of the network again. May be called twice."""
        self._ignore()
        if self.flight is not None:
            self.flight.detach()

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
        # Mostly the store itself is what failed: that has been said, and a second failure of it says nothing new.
        with contextlib.suppress(AmpdebugError, OSError):
            self.writer.put_event(Event(self.step_number, "monitor-off", f"{type(error).__name__}: {error}"))
            self.writer.close("failed")

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
        self._wait_for_the_network()
        self.guard(self._begin)

    def _wait_for_the_network(self) -> None:
        # MindSpore computes behind Python's back, a whole graph at that: what it has not done yet belongs to the step.
        # If it fails that is the user's error, so this is not guarded.
        _pynative_executor.sync()

    def _begin(self) -> None:
        self._started = time.perf_counter()
        self.step_number += 1
        due = (self.step_number - 1) % self.every == 0
        self._sampled = due or 0 < self._bad_in_a_row <= _BAD_STEPS_RECORDED
        self._forget()
        self._scale = read_scale(self.scale_source)
        self._rate = read_learning_rate(self.optimizer, evaluate=self._sampled)
        self.parameters.before(self.recorder if self._sampled else None)
        if self.flight is not None:
            self.flight.begin(self.step_number)
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
        if self.begun and not self.off:
            self._wait_for_the_network()
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
        self._let_go()
        return step if isinstance(step, Step) else None

    def _end(self, outputs: Any, known: dict[str, Any]) -> Step:
        sampled = self._sampled
        if sampled:
            self._read_queued()
        started = time.perf_counter()
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
            self._judge_sampled(step)
        bad = bool(step.overflow or step.nonfinite_gradients)
        step.update_skipped = False if updated else (bad or None if updated is False else None)
        step.accumulating = False if updated or bad else (True if updated is False and sampled else None)
        loud = bad or (step.loss is not None and not _finite(step.loss))
        self._bad_in_a_row = self._bad_in_a_row + 1 if loud else 0
        if self._left_out and not self._said_left_out:
            self._say_left_out()
        if sampled and not self._calls_seen:
            self._say_silent()
        now = time.perf_counter()
        step.monitor_seconds = self._own + now - started
        step.seconds = now - self._started
        self._write(step)
        if self.flight is not None:
            self.flight.end(step)
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

    def _say_left_out(self) -> None:
        self._said_left_out = True
        names = [path or "the network itself" for path in self._left_out]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        self.note(
            "shape-known-at-run-time",
            "a compiled graph can't hand over tensors whose shape is known only when it runs: some of "
            f"{', '.join(names[:5])}{more} are recorded without values, or not at all. Run in PyNative mode, or with "
            "shapes that are known, to see them",
            cells=list(self._left_out),
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
            missing = [name for name in self.parameters.trained_names if name not in recorder.gradients_seen]
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


def _warn(message: str) -> None:
    try:
        warnings.warn(message, AmpdebugWarning, stacklevel=3)
    except AmpdebugWarning as warning:
        # The user made warnings into errors: the training still must not stop for one of ours.
        sys.stderr.write(f"AmpdebugWarning: {warning}\n")


def _finite(value: float) -> bool:
    return value - value == 0.0


def _format(place: Place) -> str:
    """The format that a cell's weights are rounded to when it computes; float16 where nothing says."""
    return asked_dtype(place.inner) or "float16"
