"""Which operators run inside which cell in PyNative mode, for as long as somebody listens.

Calls are seen at MindSpore's Python entry points (:mod:`ampdebug.hooks._interpose`), outside autograd and outside the
implicit casts, and are passed on as they are: no value and no gradient changes. The entry points are shared by the
whole process, and several sessions may listen over stretches that overlap without being nested. So they are replaced
once, with the first listener, and put back with the last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from mindspore import Tensor

from ampdebug.hooks._cells import Place
from ampdebug.hooks._interpose import Function, interpose
from ampdebug.hooks._tensors import dtype_name


class Listener(Protocol):
    """Who wants to know what ran."""

    def cell_ran(self, path: str) -> None:
        """A known cell is about to run."""

    def operator_ran(self, path: str, operator: str, dtype: str) -> None:
        """An operator ran inside a known cell.

        ``operator`` is its name as called (``"BiasAdd"``, ``"Tensor.sum"``, ``"mint.add"``), ``dtype`` that of its
        first floating-point output: the implicit casts act before the kernel, and nothing is cast back after it.
        """

    def failed(self, error: Exception) -> None:
        """Noting a call failed; the call itself was made."""


class _Ear:
    """One listener, and the stack of the known cells that are running."""

    def __init__(self, places: dict[str, Place], listener: Listener) -> None:
        self.listener = listener
        self.running: list[str] = []
        # The objects are kept with their paths, so that an id cannot come to mean another cell.
        self.paths = {id(cell): (cell, path) for path, place in places.items() for cell in (place.outer, place.inner)}


class _Switchboard:
    """The one watcher behind all listeners."""

    def __init__(self) -> None:
        self.ears: list[_Ear] = []
        self._undo: contextlib.ExitStack | None = None

    def open(self) -> None:
        if self._undo is None:
            undo = contextlib.ExitStack()
            undo.enter_context(interpose(self))
            self._undo = undo

    def close(self) -> None:
        if self._undo is not None:
            undo, self._undo = self._undo, None
            undo.close()

    def on_operator(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        for ear in self.ears:
            if ear.running:
                self._tell(ear, name, result)
        return result

    def on_cell(self, cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        entered = []
        for ear in self.ears:
            known = ear.paths.get(id(cell))
            if known is not None:  # an unknown cell (in a plain list, say) counts as its caller's own code
                ear.running.append(known[1])
                ear.listener.cell_ran(known[1])
                entered.append(ear)
        try:
            return call()
        finally:
            for ear in entered:
                ear.running.pop()

    def on_compiled(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        return call()  # what runs inside is read from the compiled graph

    def _tell(self, ear: _Ear, name: str, result: Any) -> None:
        try:
            dtype = _first_float(result)
            if dtype is not None:
                ear.listener.operator_ran(ear.running[-1], name, dtype)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is ours and must not reach the training
            ear.listener.failed(error)


_switchboard = _Switchboard()


def listen(listener: Listener, places: dict[str, Place]) -> None:
    """Lets ``listener`` hear the operators of these cells until :func:`ignore`. Takes some milliseconds."""
    _switchboard.open()
    _switchboard.ears.append(_Ear(places, listener))


def ignore(listener: Listener) -> None:
    """Ends :func:`listen`; with the last listener everything is put back. Unknown listeners are passed over."""
    _switchboard.ears = [ear for ear in _switchboard.ears if ear.listener is not listener]
    if not _switchboard.ears:
        _switchboard.close()


def _first_float(value: Any) -> str | None:
    if isinstance(value, Tensor):
        name = dtype_name(value.dtype)
        return name if name.startswith(("float", "bfloat")) else None
    if isinstance(value, (tuple, list)):
        for item in value:
            name = _first_float(item) or ""
            if name:
                return name
    return None
