"""``watch``: the context manager for functional loops and train cells."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal

import numpy as np
from mindspore import Tensor, nn

from ampdebug._errors import ArgumentError, NoObservationsError
from ampdebug._recorder import Seen
from ampdebug._records import Event, Step
from ampdebug.hooks import _slots
from ampdebug.hooks._environment import mode_name
from ampdebug.hooks._flight import KEEP_BYTES, keep_options
from ampdebug.hooks._flight_calls import BY_HAND, TRAIN_STEP
from ampdebug.hooks._graph_probe import GraphProbe
from ampdebug.hooks._probes import Taker
from ampdebug.hooks._session import Session
from ampdebug.hooks._tensors import scalar


class Watch:
    """A network under observation; made by :func:`watch`.

    Attributes:
        directory: Where the run is written.
        last: The last recorded step, None before the first.
    """

    def __init__(
        self, net: nn.Cell, out: str | os.PathLike[str], *, silence: Literal["raise", "warn"] = "raise", **options: Any
    ) -> None:
        self.directory = out
        self._session = Session(net, out, silence=silence, **options)
        self._calls = _TrainCellCalls(self._session) if self._session.train_cell is not None else None

    @property
    def last(self) -> Step | None:
        """The last recorded step."""
        return self._session.last

    def __enter__(self) -> Watch:
        # What the user asked for was checked before: an error in here is ours, and the training goes on without us.
        self._session.guard(self._session.attach)
        if self._session.off:
            self._session.detach()
        elif self._calls is not None:
            self._session.guard(self._calls.attach)
        else:
            self._session.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        session = self._session
        if self._calls is not None:
            self._calls.detach()
        if isinstance(error, Exception) and not session.off:
            said = f"{type(error).__name__}: {str(error)[:2000]}"
            session.guard(session.writer.put_event, Event(session.step_number, "training-raised", said))
        session.close("finished" if error is None else "failed")
        if error is None and session.last is None and not session.off and session.silence == "raise":
            what = "the train cell was not called" if self._calls is not None else "run.step(...) was not called"
            raise NoObservationsError(
                f"no step was recorded in {mode_name()}: {what} inside `with ampdebug.watch(...)`. "
                "Run the training loop inside it, and in a functional loop end each step with run.step(loss=...)"
            )

    def step(
        self,
        loss: Any = None,
        *,
        loss_scale: Any = None,
        overflow: Any = None,
        finite: Any = None,
        grads: Any = None,
        learning_rate: float | None = None,
        epoch: int | None = None,
        batch: Any = None,
        **extra: float,
    ) -> Step | None:
        """Ends a step of a functional loop.

        Args:
            loss: The unscaled loss: a number or a one-element tensor.
            loss_scale: What holds the loss scale (``amp.DynamicLossScaler``), or the scale used in this step. Not
            needed
                where ``watch`` was given the scaler.
            overflow: Whether the step overflowed: a bool or a bool tensor.
            finite: The opposite, as ``amp.all_finite`` returns it; give one of the two.
            grads: The unscaled gradients in the optimizer's order. Needed only where they can't be seen by themselves.
            learning_rate: The rate used.
            epoch: Counted from 1.
            batch: What the step was run on, for ``keep_bad_steps``: a tuple of the network's inputs and labels. Needed
                only where it can't be seen in the call of the gradient function or of the compiled step.
            extra: Further numbers to keep with the step, by name.

        Returns:
            The step as recorded; None where the monitor has switched itself off.

        Raises:
            ArgumentError: Called for a train cell, whose calls are the steps; or both of ``overflow`` and ``finite``.
            NoObservationsError: The step was to be recorded and yielded nothing.
        """
        session = self._session
        if self._calls is not None:
            raise ArgumentError(
                f"run.step() is for functional loops: each call of the watched {type(session.train_cell).__name__} is "
                "recorded as a step by itself; leave run.step() out"
            )
        if overflow is not None and finite is not None:
            raise ArgumentError("overflow and finite say the same: give one of them")
        for name, value in extra.items():
            if scalar(value) is None:
                raise ArgumentError(f"{name}={value!r}: further values of a step must be numbers")
        known: dict[str, Any] = {"epoch": epoch, "learning_rate": learning_rate}
        known["loss"] = _mean(loss)
        known["overflow"] = _flag(overflow, finite)
        if scalar(loss_scale) is not None:
            known["loss_scale"] = scalar(loss_scale)
        elif loss_scale is not None and session.scale_source is None:
            session.scale_source = loss_scale
        if grads is not None:
            session.guard(session.take_gradients, grads)
        if extra:
            known["extra"] = {name: scalar(value) for name, value in extra.items()}
        if batch is not None and session.flight is not None:
            session.flight.saw(batch, {}, BY_HAND)
        step = session.end(**known)
        session.begin()
        return step

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is observed inside, for an evaluation in the middle of the loop."""
        before, flight = self._session.active, self._session.flight
        self._session.active = False
        if flight is not None:
            flight.paused = True
        try:
            yield
        finally:
            if flight is not None:
                flight.paused = False
            self._session.active = before and not self._session.off


def watch(
    net: nn.Cell,
    *,
    out: str | os.PathLike[str],
    optimizer: Any = None,
    loss_scale: Any = None,
    every: int = 1,
    cells: Any = None,
    append: bool = False,
    amp_level: str | None = None,
    graph: Literal["auto", "callback", "capture"] = "auto",
    tensorboard: str | os.PathLike[str] | None = None,
    keep_bad_steps: int = 0,
    keep_every: int = 1,
    keep_bytes: int = KEEP_BYTES,
) -> Watch:
    """Watches a network while it trains, in a functional loop or in a train cell, in PyNative and graph mode.

    Args:
        net: The network that runs (what ``auto_mixed_precision`` returned, not what it was given), or the train cell.
        out: Directory of the run; made if need be. One file a rank.
        optimizer: The optimizer of a functional loop: tells skipped updates and gives the learning rate.
        loss_scale: What holds the loss scale in a functional loop, for instance an ``amp.DynamicLossScaler``.
        every: Statistics are taken in step 1, 1 + every, ...; the scalars in each.
        cells: Which cells: path globs, class names, cell classes, or a list of these. None watches all.
        append: Go on in a directory that already holds a run instead of refusing.
        amp_level: What to note as the AMP level; None reads it off the network.
        graph: How values leave a compiled graph: by a Python ``"callback"`` (CPU only) or by ``"capture"`` in buffers
            on the device, which costs its memory; ``"auto"`` takes callbacks where they work.
        tensorboard: Directory for live TensorBoard files, None for none.
        keep_bad_steps: How many of the first bad steps to keep, so that ``ampdebug.replay`` can run them again: batch,
            parameters before the step, loss scale; ``.npz`` files beside the run. 0 keeps none and costs nothing.
        keep_every: Parameters are copied to the host before step 1, 1 + keep_every, ...: one copy of their memory, and
            the time of copying it. With more than 1 a bad step that was not skipped has parameters that are older.
        keep_bytes: Limit for these files together, in bytes.

    Returns:
        A context manager; inside it, each call of a train cell, or each :meth:`Watch.step`, is a step.

    Raises:
        ArgumentError: An argument is wrong.
        RunExistsError: ``out`` holds a run already.

    Example:
        >>> with ampdebug.watch(net, out="runs/a", optimizer=opt, loss_scale=scaler) as run:   # doctest: +SKIP
        ...     for x, y in data:
        ...         loss, grads = grad_fn(x, y)
        ...         grads = scaler.unscale(grads)
        ...         finite = amp.all_finite(grads)
        ...         if finite:
        ...             opt(grads)
        ...         scaler.adjust(finite)
        ...         run.step(loss=scaler.unscale(loss), finite=finite)
    """
    return Watch(
        net,
        out,
        optimizer=optimizer,
        loss_scale=loss_scale,
        every=every,
        cells=cells,
        append=append,
        amp_level=amp_level,
        graph=graph,
        tensorboard=tensorboard,
        keep=keep_options(keep_bad_steps, keep_every, keep_bytes),
    )


class _TrainCellCalls:
    """Makes each call of a train cell a step of the session, in both modes."""

    active = True
    wants_output_gradients = False

    def __init__(self, session: Session) -> None:
        self._session = session
        self._cell: Any = session.train_cell

    def attach(self) -> None:
        _slots.listen({"(step)": (self._cell, type(self._cell).__name__)}, [], self)
        run_graph = self._cell.compile_and_run

        def compile_and_run(*args: Any, **kwargs: Any) -> Any:
            self._begin()
            self._saw(args, kwargs)
            outputs = run_graph(*args, **kwargs)
            self._end(outputs)
            return outputs

        self._cell.__dict__["compile_and_run"] = compile_and_run

    def detach(self) -> None:
        _slots.ignore(self)
        self._cell.__dict__.pop("compile_and_run", None)

    def graph_token(self) -> str:
        return ""

    def graph_probe(self, path: str, cell_type: str) -> Any:
        return GraphProbe(path, cell_type, self)

    def graph_gradient_hook(self, parameter: Any) -> Callable[[Any], Any]:
        raise AssertionError("a train cell's calls have no gradient of their own")

    def failed_to_compile(self, error: Exception) -> None:
        raise AssertionError("a train cell carries no compiled probe") from error

    def handed_over(self, take: Taker, arrays: tuple[Any, ...], callback: int) -> None:
        raise AssertionError("a train cell carries no compiled probe")

    def left_out(self, path: str) -> None:
        raise AssertionError("a train cell carries no compiled probe")

    def guard(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._session.guard(function, *args)

    def entering(self, path: str) -> None:
        self._begin()

    def python_call(self, path: str, cell_type: str, args: Any, kwargs: Any, output: Any) -> None:
        self._saw(args, kwargs)
        self._end(output)

    def _saw(self, args: Any, kwargs: Any) -> None:
        if self._session.flight is not None:
            self._session.flight.saw(args, kwargs, TRAIN_STEP)

    def _begin(self) -> None:
        self._session.begin()
        self._leave_if_off()

    def _end(self, outputs: Any) -> None:
        self._session.end(outputs)
        self._leave_if_off()

    def _leave_if_off(self) -> None:
        if self._session.off:
            self.detach()

    def graph_call(self, path: str, cell_type: str, inputs: list[Any], outputs: list[Any]) -> None:
        raise AssertionError("a train cell carries no compiled probe")

    def output_gradient(self, path: str, cell_type: str, call: int, slot: str, value: Any) -> None:
        raise AssertionError("a train cell's outputs are not differentiated")

    def gradient(self, name: str, tensor: Any) -> None:
        raise AssertionError("a train cell's calls have no gradient of their own")

    def graph_gradient(self, name: str, seen: Seen) -> None:
        raise AssertionError("a train cell carries no compiled probe")


def _mean(loss: Any) -> float | None:
    if loss is None:
        return None
    value = scalar(loss)
    if value is not None:
        return value
    if isinstance(loss, Tensor):
        return float(np.mean(loss.asnumpy(), dtype=np.float64))
    raise ArgumentError(f"loss={loss!r}: must be a number or a tensor")


def _flag(overflow: Any, finite: Any) -> bool | None:
    value = overflow if overflow is not None else finite
    if value is None:
        return None
    flag = bool(value.asnumpy().all()) if isinstance(value, Tensor) else bool(value)
    return flag if overflow is not None else not flag
