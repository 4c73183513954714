"""What the probes say, turned into a step's observations.

:class:`Listener` is the sink that all probes of a session talk to (see ``_probes``). It tells a forward pass from its
recomputation, asks for the gradients of outputs in PyNative mode, and hands everything to the recorder.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

import mindspore as ms
from mindspore import nn
from mindspore.graph.api import _pynative_executor

from ampdebug._errors import ArgumentError
from ampdebug._recorder import Seen, StepRecorder
from ampdebug.hooks import _slots
from ampdebug.hooks._capture import Capture
from ampdebug.hooks._cells import Place, own_parameters
from ampdebug.hooks._graph_probe import GraphProbe, graph_gradient_hook
from ampdebug.hooks._later import Later
from ampdebug.hooks._parameters import ParameterWatch
from ampdebug.hooks._precision_seen import PrecisionSeen
from ampdebug.hooks._probes import Taker, output_gradient_hook
from ampdebug.hooks._slim import Slimmer
from ampdebug.hooks._slim_probe import SlimProbe
from ampdebug.hooks._tensors import FLOATING, call_leaves, dtype_name, leaves, see, see_array

_numbers = itertools.count(1)

REDUCER_PATH = "(reducer)"
"""Path under which the gradient reducer of a data-parallel train cell is watched; never shown as a cell."""


class Listener:
    """The listening half of a session; the other half, ``Session``, says when a step begins and ends.

    Args:
        places: All cells of the network.
        watched: Those that are watched.
        register: Gives a site its number.
        parameters: What is known of the parameters.
        train_cell: The train cell, or None.
        graph: See ``Session``.
    """

    def __init__(
        self,
        places: dict[str, Place],
        watched: dict[str, Place],
        register: Callable[..., int],
        parameters: ParameterWatch,
        train_cell: Any,
        graph: Literal["auto", "callback", "capture"],
    ) -> None:
        if graph not in ("auto", "callback", "capture"):
            raise ArgumentError(f"graph={graph!r}: must be 'auto', 'callback' (CPU only) or 'capture'")
        on_cpu = ms.get_context("device_target") == "CPU"
        self.active = False
        self.wants_output_gradients = False
        self.places = places
        self.watched = watched
        self.parameters = parameters
        self.train_cell = train_cell
        parents = _parents(watched)
        self.recorder = StepRecorder(register, parents, _with_watched_children(places, watched))
        self._inner = frozenset(parents)
        self._capture = Capture(self) if graph == "capture" or (graph == "auto" and not on_cpu) else None
        self._precision = PrecisionSeen(places, self._not_seen)
        self._token = f"ampdebug{next(_numbers)}"
        self._owners = {p.name: path for path, place in places.items() for p in own_parameters(place.inner)}
        self._reduced: list[Any] = list(getattr(train_cell, "weights", ()))
        self._recomputed = _recomputed(places)
        self._hooked: dict[int, weakref.ref[Any]] = {}
        self._tensor_handles: list[Any] = []
        self._wanted: list[tuple[Any, Callable[[Any], Any]]] = []
        self._later = Later()
        self._handed_over: list[tuple[Taker, tuple[Any, ...]]] = []
        self._reading = threading.RLock()
        self._calls: dict[str, int] = {}
        self._gradients_seen: set[str] = set()
        self._calls_seen = 0
        self._in_backward = False
        self._gradients_unscaled = False
        self._own = 0.0
        self._once: set[int] = set()
        self._left_out: dict[str, None] = {}
        self._slimmer = Slimmer()

    def guard(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls ``function``; an exception in it ends the watching, not the training."""
        raise NotImplementedError

    def fail(self, error: Exception) -> None:
        """Ends the watching and says why."""
        raise NotImplementedError

    def _not_seen(self, message: str) -> None:
        raise NotImplementedError

    def _listen(self, world_size: int) -> None:
        """Puts the probes in."""
        cells = {path: (place.outer, place.cell_type) for path, place in self.watched.items()}
        _slots.listen(cells, self.parameters.trained, self)
        reducer = getattr(self.train_cell, "grad_reducer", None)
        if world_size > 1 and isinstance(reducer, nn.DistributedGradReducer):
            _slots.listen({REDUCER_PATH: (reducer, type(reducer).__name__)}, [], self)

    def _ignore(self) -> None:
        """Takes the probes out."""
        self.active = False
        self._precision.end_step()
        self._later.drop()
        self._handed_over = []
        self._let_go()
        _slots.ignore(self)

    def _forget(self) -> None:
        """Nothing of the last step is left."""
        self._later.drop()
        self._handed_over = []
        self._wanted.clear()
        self.recorder.begin()
        self._calls.clear()
        self._gradients_seen.clear()
        self._calls_seen = 0
        self._in_backward = False
        self._gradients_unscaled = False

    def _let_go(self) -> None:
        """Takes the hooks off the step's tensors."""
        self._wanted.clear()
        self._hooked.clear()
        while self._tensor_handles:
            self._tensor_handles.pop().remove()

    def graph_token(self) -> str:
        """Graphs compiled or run in a recorded step carry the probes; all others are the user's own."""
        if not self.active:
            return ""
        if self._capture is not None:
            return f"{self._token}c{self._capture.version}"
        return f"{self._token}b" if self.wants_output_gradients else self._token

    def graph_probe(self, path: str, cell_type: str) -> GraphProbe:
        """A compiled probe for a cell."""
        if self._capture is not None:
            return self._capture.probe(path, cell_type)
        if path == REDUCER_PATH or self._recomputed:  # the one shows outputs only, the other calls cells again
            return GraphProbe(path, cell_type, self)
        probe = SlimProbe(path, cell_type, self)
        self._slimmer.watch(probe)
        return probe

    def graph_gradient_hook(self, parameter: Any) -> Callable[[Any], Any]:
        """A compiled hook for the gradient of a parameter."""
        if self._capture is None:
            return graph_gradient_hook(parameter, self)
        return self._capture.gradient_hook(parameter)

    def failed_to_compile(self, error: Exception) -> None:
        """The network compiled only without the probes."""
        self.fail(error)

    def compiling(self) -> Callable[[], None]:
        """A graph with this session's probes is about to be compiled; returns what to call afterwards."""
        return self._precision.compiling()

    def compiled(self, executor: Any, phase: str) -> bool:
        """It was compiled. Returns whether to throw it away and to compile a slimmer one."""
        graph = self._precision.compiled(executor, phase)
        for callback, once in () if graph is None else graph.callbacks().items():
            (self._once.add if once else self._once.discard)(callback)
        if self._capture is not None or self.wants_output_gradients:
            return False
        try:
            return self._slimmer.compiled(graph)
        except Exception as error:  # noqa: BLE001 - a graph in a form we do not know runs as it is
            self._precision.failed(error)
            return self._slimmer.stay_whole()

    def stay_whole(self) -> None:
        """The slimmer graph does not compile."""
        self._slimmer.stay_whole()

    def settled(self) -> None:
        """The graph that is going to run is compiled."""
        self._slimmer.settled()

    def running(self) -> None:
        """A graph is about to run: what the last one handed over is overwritten, and what ran before comes first."""
        self.guard(self._read_queued)
        self.guard(self.recorder.settle)

    def handed_over(self, take: Taker, arrays: tuple[Any, ...], callback: int) -> None:
        """A callback of a graph was handed arrays. Where they last they are looked at when the graph has run: the
        graph waits for its callbacks, and what they would do in between takes longer there than all at once."""
        if callback in self._once:
            self._handed_over.append((take, arrays))
        else:
            self.guard(self._take_handed_over, take, arrays)

    def _take_handed_over(self, take: Taker, arrays: tuple[Any, ...]) -> None:
        with self._reading:  # a graph calls back from several threads
            self._read_handed_over()
            started = time.perf_counter()
            take(arrays, False)
            self._own += time.perf_counter() - started

    def _read_handed_over(self) -> None:
        """Takes what graphs handed over; comes before whatever is taken from elsewhere."""
        if not self._handed_over:
            return
        with self._reading:
            started = time.perf_counter()
            waiting, self._handed_over = self._handed_over, []
            for take, arrays in waiting:
                take(arrays, True)
            self._own += time.perf_counter() - started

    def _read_queued(self) -> None:
        """Takes the values that were put off."""
        self._read_handed_over()
        self._later.wait()
        started = time.perf_counter()  # up to here it was the network's own time
        self._later.read()
        self.recorder.start_measuring()
        self._own += time.perf_counter() - started

    def _put_off(self, tensors: list[Any], record: Callable[[list[Seen]], None], unchanging: bool = False) -> None:
        """Takes tensors whose values are read later; see :meth:`Later.add`."""
        started = time.perf_counter()
        self._later.add(tensors, record, unchanging=unchanging)
        self._own += time.perf_counter() - started
        if self._later.full:
            self._read_queued()

    def left_out(self, path: str) -> None:
        """A cell has tensors of a shape that is known only when the graph runs."""
        self._left_out[path] = None

    def entering(self, path: str) -> None:
        """A new forward pass begins with the outermost cell."""
        self._precision.entering(path)
        if not path:
            self._in_backward = False

    def python_call(self, path: str, cell_type: str, args: Any, kwargs: Any, output: Any) -> None:
        """A watched cell ran as Python."""
        self.guard(self._python_call, path, cell_type, args, kwargs, output)

    def _python_call(self, path: str, cell_type: str, args: Any, kwargs: Any, output: Any) -> None:
        self._read_handed_over()
        if path == REDUCER_PATH:
            self._put_off([tensor for _, tensor in leaves(output)], self._take_reduced)
            return
        if self._in_backward and path in self._recomputed:
            return
        self._calls_seen += 1
        started = time.perf_counter()
        self._calls[path] = self._calls.get(path, 0) + 1
        tensors = [*call_leaves(args, kwargs)]
        inputs = len(tensors)
        tensors.extend(leaves(output))
        slots = [slot for slot, _ in tensors]
        if _pynative_executor.requires_grad():
            self._want_gradients(path, cell_type, tensors[:inputs], tensors[inputs:])
        self._own += time.perf_counter() - started
        record = functools.partial(self._record_call, path, cell_type, slots, inputs)
        self._put_off([tensor for _, tensor in tensors], record)
        if path not in self._inner:
            self._hook_wanted()

    def _record_call(self, path: str, cell_type: str, slots: list[str], inputs: int, seen: list[Seen]) -> None:
        pairs = list(zip(slots, seen, strict=True))
        self.recorder.cell_call(path, cell_type, pairs[:inputs], pairs[inputs:])

    def _want_gradients(self, path: str, cell_type: str, inputs: list[Any], outputs: list[Any]) -> None:
        """Notes a call's outputs, to ask for their gradients."""
        passed_on = {id(tensor) for _, tensor in inputs}
        call = self._calls[path] - 1
        for slot, tensor in outputs:
            if id(tensor) not in passed_on and not isinstance(tensor, ms.Parameter) and tensor.dtype in FLOATING:
                self._wanted.append((tensor, output_gradient_hook(path, cell_type, call, slot, self)))

    def _hook_wanted(self) -> None:
        """Asks for the gradients, when the outermost cell has ended: whether a tensor has one is known only when
        MindSpore has made its part of the backward pass, and to ask is to wait for that.

        A tensor that several cells hand on counts for the innermost, which ended first.
        """
        wanted, self._wanted = self._wanted, []
        trained = [(tensor, hook) for tensor, hook in wanted if tensor._requires_grad]  # no other takes a hook
        started = time.perf_counter()  # up to here it was mostly the network's own time
        for tensor, hook in trained:
            known = self._hooked.get(id(tensor))
            if known is not None and known() is tensor:
                continue
            self._hooked[id(tensor)] = weakref.ref(tensor)
            self._tensor_handles.append(tensor.register_hook(hook))
        self._own += time.perf_counter() - started

    def output_gradient(self, path: str, cell_type: str, call: int, slot: str, value: Any) -> None:
        """The gradient of a cell's output arrived."""
        self.guard(self._output_gradient, path, cell_type, call, slot, value)

    def _output_gradient(self, path: str, cell_type: str, call: int, slot: str, value: Any) -> None:
        self._read_handed_over()
        self._in_backward = True
        record = functools.partial(self._record_output_gradient, path, cell_type, call, slot)
        self._take(value, record, unchanging=True)

    def _record_output_gradient(self, path: str, cell_type: str, call: int, slot: str, seen: list[Seen]) -> None:
        self.recorder.output_gradient(path, cell_type, call, slot, seen[0])

    def _take(self, value: Any, record: Callable[[list[Seen]], None], unchanging: bool = False) -> None:
        """Takes a tensor, which is put off while the step goes on, or what a compiled graph hands to a callback."""
        if not isinstance(value, ms.Tensor):
            record([see_array(value, dtype_name(getattr(value, "dtype", "float32")), getattr(value, "shape", ()))])
        elif self.active:
            self._put_off([value], record, unchanging)
        else:
            record([see(value)])

    def _take_reduced(self, gradients: list[Seen]) -> None:
        """What came out of the reduction over ranks, in the order of the train cell's weights."""
        for parameter, seen in zip(self._reduced, gradients, strict=True):
            self.recorder.gradient(parameter.name, "", seen, reduced=True)

    def graph_call(self, path: str, cell_type: str, inputs: list[Any], outputs: list[Any]) -> None:
        """A watched cell ran in a graph."""
        if path == REDUCER_PATH:
            self._take_reduced([seen for _, seen in outputs])
        else:
            self._calls_seen += 1
            self._calls[path] = self._calls.get(path, 0) + 1
            self.recorder.cell_call(path, cell_type, inputs, outputs)

    def gradient(self, name: str, tensor: Any) -> None:
        """The gradient of a parameter arrived."""
        self.guard(self._gradient, name, tensor)

    def _gradient(self, name: str, tensor: Any) -> None:
        self._read_handed_over()
        owner = self._new_gradient(name)
        if owner is not None:
            self._take(tensor, functools.partial(self._record_gradient, name, owner))

    def _record_gradient(self, name: str, owner: str, seen: list[Seen]) -> None:
        self.recorder.gradient(name, owner, seen[0])

    def graph_gradient(self, name: str, seen: Seen) -> None:
        """The gradient of a parameter arrived, inside a graph."""
        owner = self._new_gradient(name)
        if owner is not None:
            self.recorder.gradient(name, owner, seen)

    def _new_gradient(self, name: str) -> str | None:
        """The cell that owns a parameter whose gradient arrived; None if it is to be passed over."""
        self._calls_seen += 1
        self._in_backward = True
        owner = self._owners.get(name, "")
        if owner in self._recomputed and name in self._gradients_seen:
            return None  # in a graph it arrives once more for each time the cell's code was copied
        self._gradients_seen.add(name)
        return owner

    def take_gradients(self, gradients: Any) -> None:
        """Takes gradients that the caller holds, where none were seen arriving. They are unscaled already."""
        self._read_handed_over()
        if not self.active or self._gradients_seen:
            return
        values = [tensor for _, tensor in leaves(gradients)]
        names = [p.name for p in self.parameters.in_order]
        if len(values) != len(names):
            raise ArgumentError(
                f"grads has {len(values)} tensors, the optimizer {len(names)} parameters: give one each"
            )
        for name, tensor in zip(names, values, strict=True):
            self._gradient(name, tensor)
        self._gradients_unscaled = True


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


def _recomputed(places: dict[str, Place]) -> set[str]:
    roots = [path for path, place in places.items() if place.inner._recompute_cell is not None or _flagged(place.inner)]
    return {path for path in places if any(path == root or path.startswith(f"{root}.") or not root for root in roots)}


def _flagged(cell: Any) -> bool:
    return bool(cell.get_flags().get("recompute", False)) if hasattr(cell, "get_flags") else False
