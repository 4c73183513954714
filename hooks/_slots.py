"""Where probes sit: one slot for each watched cell and parameter, shared by all who watch it.

A cell can be watched by several sessions at once. It still gets only one stand-in for ``construct``, which is put in
with the first listener and taken out with the last: what was found there (usually nothing, under ``auto`` the level's
own wrapper) is then back, bit for bit.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ampdebug.hooks import _compiled
from ampdebug.hooks._environment import mode_name
from ampdebug.hooks._graph_probe import GraphProbe
from ampdebug.hooks._probes import GraphReader, Sink, python_gradient_hook, python_probe

_MISSING = object()


@dataclass(slots=True)
class _Listener:
    path: str
    cell_type: str
    sink: Sink
    graph_probe: GraphProbe


class CellSlot:
    """The stand-in for one cell's ``construct``."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell
        self.listeners: list[_Listener] = []
        self._found = cell.__dict__.get("construct", _MISSING)
        self._original = cell.construct
        self._recompute = cell.__dict__.get("_recompute_cell")

    def listen(self, listener: _Listener) -> None:
        """Adds a listener; the last one added is the outermost."""
        self.listeners.append(listener)
        self._watch()

    def ignore(self, sink: Sink) -> bool:
        """Removes a sink's listeners; returns whether the slot is empty now, and the cell as it was found."""
        self.listeners = [listener for listener in self.listeners if listener.sink is not sink]
        if self.listeners:
            self._watch()
        else:
            self._leave()
        return not self.listeners

    def _watch(self) -> None:
        self.cell.__dict__["construct"] = types.MethodType(self._python(self._original), self.cell)
        if self._recompute is not None:
            # A recomputed cell runs what `recompute()` stored, not `construct`.
            self.cell.__dict__["_recompute_cell"] = types.MethodType(self._python(self._recompute), self.cell)

    def _python(self, function: Callable[..., Any]) -> Callable[..., Any]:
        for listener in self.listeners:
            function = python_probe(function, listener.path, listener.cell_type, listener.sink)
            if listener is not self.listeners[-1]:
                function = types.MethodType(function, self.cell)
        return function

    def _leave(self) -> None:
        if self._found is _MISSING:
            self.cell.__dict__.pop("construct", None)
        else:
            self.cell.__dict__["construct"] = self._found
        if self._recompute is not None:
            self.cell.__dict__["_recompute_cell"] = self._recompute

    def before_compiling(self, owner: Any) -> None:
        """Puts compiled probes, or nothing, in place of the Python one."""
        self._leave()
        # A cell whose own `construct` is a jitted method is seen from outside, by the Python probe.
        if self.cell is owner and mode_name() != "GRAPH_MODE":
            return
        method = self._original
        for listener in self.listeners:
            if wanted(listener.sink):
                method = listener.graph_probe.construct(self.cell, method)
        if method is not self._original:
            self.cell.__dict__["construct"] = method

    def after_compiling(self) -> None:
        """Puts the Python probe back."""
        if self.listeners:
            self._watch()


class ParameterSlot:
    """The gradient hooks of one parameter."""

    def __init__(self, parameter: Any) -> None:
        self.parameter = parameter
        self.sinks: list[Sink] = []
        self._handles: list[Any] = []

    def listen(self, sink: Sink) -> None:
        """Adds a listener."""
        self.sinks.append(sink)
        self.after_compiling()

    def ignore(self, sink: Sink) -> bool:
        """Removes a sink; returns whether nobody is left."""
        self.sinks = [other for other in self.sinks if other is not sink]
        self.after_compiling()
        return not self.sinks

    def take_out(self) -> None:
        """Takes the hooks out until :meth:`after_compiling`."""
        self._set([])

    def before_compiling(self, owner: Any) -> None:
        """Puts compiled hooks in place of the Python ones."""
        self._set([sink.graph_gradient_hook(self.parameter) for sink in self.sinks if wanted(sink)])

    def after_compiling(self) -> None:
        """Puts the Python hooks back."""
        self._set([python_gradient_hook(self.parameter.name, sink) for sink in self.sinks])

    def _set(self, hooks: list[Any]) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._handles.extend(self.parameter.register_hook(hook) for hook in hooks)


class _Registry:
    """All slots in use; takes part in every compilation while there are any."""

    def __init__(self) -> None:
        self.cells: dict[int, CellSlot] = {}
        self.parameters: dict[int, ParameterSlot] = {}

    def __len__(self) -> int:
        return len(self.cells) + len(self.parameters)

    def sinks(self) -> list[Sink]:
        found: dict[int, Sink] = {}
        for cell in self.cells.values():
            found.update((id(listener.sink), listener.sink) for listener in cell.listeners)
        for parameter in self.parameters.values():
            found.update((id(sink), sink) for sink in parameter.sinks)
        return list(found.values())

    def graph_token(self) -> str:
        return ".".join(token for token in (wanted(sink) for sink in self._known_sinks) if token)

    _known_sinks: tuple[Sink, ...] = ()
    _readers: tuple[GraphReader, ...] = ()
    silent = False

    def changed(self) -> None:
        self._known_sinks = tuple(self.sinks())
        self._readers = tuple(sink for sink in self._known_sinks if isinstance(sink, GraphReader))

    def install(self, owner: Any) -> Callable[[], None]:
        slots: list[CellSlot | ParameterSlot] = [*self.cells.values(), *self.parameters.values()]
        done: list[Callable[[], None]] = []

        def undo() -> None:
            while done:
                done.pop()()

        try:
            for slot in slots:
                done.append(slot.after_compiling)
                slot.before_compiling(owner)
            done.extend(reader.compiling() for reader in self._graph_readers())
        except BaseException:
            undo()
            raise
        return undo

    def take_hooks_out(self) -> Callable[[], None]:
        held = list(self.parameters.values())
        for slot in held:
            slot.take_out()

        def put_back() -> None:
            for slot in held:
                slot.after_compiling()

        return put_back

    def running(self) -> None:
        for reader in self._readers:
            reader.running()

    def compiled(self, executor: Any, phase: str) -> bool:
        wanted = [reader.compiled(executor, phase) for reader in self._graph_readers()]  # each wants to be told
        return any(wanted)

    def stay_whole(self) -> None:
        for reader in self._readers:
            reader.stay_whole()

    def settled(self) -> None:
        for reader in self._readers:
            reader.settled()

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        self.silent = True
        try:
            yield
        finally:
            self.silent = False

    def failed_to_compile(self, error: Exception) -> None:
        for sink in self._known_sinks:
            if wanted(sink):
                sink.failed_to_compile(error)

    def _graph_readers(self) -> list[GraphReader]:
        return [reader for reader in self._readers if wanted(reader)]


_registry = _Registry()


def wanted(sink: Sink) -> str:
    """The sink's token, ``""`` while no probes are to be in any graph."""
    return "" if _registry.silent else sink.graph_token()


def listen(cells: dict[str, tuple[Any, str]], parameters: list[Any], sink: Sink) -> None:
    """Puts a sink's probes into cells and parameters.

    Args:
        cells: ``{path: (cell object, class name to report)}``.
        parameters: Parameters whose gradients are wanted.
        sink: The listener. :func:`ignore` takes everything of it out again.
    """
    if not len(_registry):
        _compiled.attach(_registry)
    for path, (cell, cell_type) in cells.items():
        slot = _registry.cells.get(id(cell))
        if slot is None:
            slot = _registry.cells[id(cell)] = CellSlot(cell)
        slot.listen(_Listener(path, cell_type, sink, sink.graph_probe(path, cell_type)))
    for parameter in parameters:
        held = _registry.parameters.get(id(parameter))
        if held is None:
            held = _registry.parameters[id(parameter)] = ParameterSlot(parameter)
        held.listen(sink)
    _registry.changed()


def ignore(sink: Sink) -> None:
    """Takes out everything of a sink; harmless if there is nothing."""
    for key, slot in list(_registry.cells.items()):
        if slot.ignore(sink):
            del _registry.cells[key]
    for key, held in list(_registry.parameters.items()):
        if held.ignore(sink):
            del _registry.parameters[key]
    _registry.changed()
    if not len(_registry):
        _compiled.detach(_registry)


def layouts(sink: Sink) -> dict[str, list[Any]]:
    """What the compiled probes of a sink saw while they were traced: ``{path: layouts}``."""
    found: dict[str, list[Any]] = {}
    for slot in _registry.cells.values():
        for listener in slot.listeners:
            if listener.sink is sink:
                found[listener.path] = listener.graph_probe.layouts
    return found
