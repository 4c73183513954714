"""Recording the operators of a network while it runs, in PyNative mode.

::

    @contextmanager
    def record_operators(root_cell: nn.Cell, path_of: Callable[[nn.Cell], str | None]) -> Iterator[list[OperatorCall]]

    with record_operators(net, path_of) as calls:
        step(x, y)                    # anything that calls net, training included
    calls[0].path, calls[0].operator, calls[0].inputs, calls[0].outputs, calls[0].compute_dtype

``path_of`` gives the cell path of a cell, or None for one it does not know (``known_paths`` makes one from a network).
The list grows while the context lasts, one entry a call in order of execution; only the forward pass is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mindspore
from mindspore import Tensor, nn

from ampdebug._errors import NoObservationsError
from ampdebug._sites import OperatorCall
from ampdebug.hooks._cells import cell_type, places
from ampdebug.hooks._interpose import Function, interpose
from ampdebug.hooks._sites import PathOf, SiteTracker
from ampdebug.hooks._tensors import dtype_name


def known_paths(network: nn.Cell) -> PathOf:
    """The cell paths of a network as a function; wrappers that an AMP level put around a cell bear its path."""
    paths: dict[int, str] = {}
    for path, place in places(network).items():
        paths[id(place.outer)] = paths[id(place.inner)] = path
    return lambda cell: paths.get(id(cell))


@contextmanager
def record_operators(root_cell: nn.Cell, path_of: PathOf) -> Iterator[list[OperatorCall]]:
    """Records every operator call that this thread makes inside the context, in PyNative mode.

    Nothing is changed: the calls are passed on as they are, so all numbers stay bitwise the same. Entering takes some
    milliseconds, a recorded call some microseconds. Afterwards everything is put back, after an exception too.

    Args:
        root_cell: The network. Calls outside of it (the loss function, the optimizer) are recorded without a site.
        path_of: Gives the cell path of a cell, None for one it does not know.

    Yields:
        The calls so far. A compiled part (``@ms.jit``) is one entry with ``compiled=True``.

    Raises:
        NoObservationsError: In graph mode, where no Python runs and nothing would be seen.
    """
    if mindspore.get_context("mode") == mindspore.GRAPH_MODE:
        raise NoObservationsError(
            "operators can be recorded in PyNative mode only, and the mode is GRAPH_MODE: a compiled network calls no "
            "Python. Record a step after mindspore.set_context(mode=mindspore.PYNATIVE_MODE)"
        )
    recorder = _Recorder(SiteTracker(root_cell, path_of))
    with interpose(recorder):
        yield recorder.calls


class _Recorder:
    """A watcher that notes each call and passes it on."""

    def __init__(self, tracker: SiteTracker) -> None:
        self._tracker = tracker
        self.calls: list[OperatorCall] = []

    def on_operator(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The site first: its index counts calls as they begin, one that raises too.
        located = self._tracker.site(name)
        result = function(*args, **kwargs)
        self._note(located, name, args, kwargs, result, compiled=False)
        return result

    def on_cell(self, cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        return self._tracker.run_cell(cell, call)

    def on_compiled(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        located = self._tracker.site(name)
        result = call()
        self._note(located, name, args, kwargs, result, compiled=True)
        return result

    def _note(
        self,
        located: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        *,
        compiled: bool,
    ) -> None:
        site, file = (None, "") if located is None else located
        cell = self._tracker.cell
        inputs = dtypes((args, kwargs) if kwargs else args)
        kind = "" if cell is None else cell_type(cell)
        self.calls.append(OperatorCall(site, name, file, kind, inputs, dtypes(result), compiled))


def dtypes(value: Any) -> tuple[str, ...]:
    """Dtypes of the tensors in a nested value, in order."""
    found: list[str] = []
    _collect(value, found)
    return tuple(found)


_NAMES: dict[Any, str] = {}


def _collect(value: Any, found: list[str]) -> None:
    if isinstance(value, Tensor):
        dtype = value.dtype
        name = _NAMES.get(dtype)
        if name is None:
            name = _NAMES[dtype] = dtype_name(dtype)
        found.append(name)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)
