"""What listens to the network: the sink, and the probes that run as Python.

A probe stands in for ``construct`` and tells a sink what passed through. There are two kinds, one for each way
MindSpore runs a cell: :func:`python_probe` runs as Python, in PyNative mode, and stands in the cell as long as the
network is watched; the compiled one is in ``_graph_probe``. A sink never raises: an error of ours must not reach the
training.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from ampdebug._recorder import Seen

Taker = Callable[[tuple[Any, ...], bool], None]
"""Takes what a callback was handed, and whether it lasts until a graph runs again."""


class Sink(Protocol):
    """Whoever listens to probes."""

    active: bool
    """Whether anything is to be observed now."""

    wants_output_gradients: bool
    """Whether compiled probes are to ask for the gradients of cell outputs, too."""

    def graph_token(self) -> str:
        """Distinguishes graphs with this sink's probes; ``""`` where none are wanted now."""
        ...

    def graph_probe(self, path: str, cell_type: str) -> Any:
        """A compiled probe for a cell (a ``GraphProbe``)."""
        ...

    def graph_gradient_hook(self, parameter: Any) -> Callable[[Any], Any]:
        """A compiled hook for the gradient of a parameter."""
        ...

    def failed_to_compile(self, error: Exception) -> None:
        """A graph compiled only without this sink's probes."""
        ...

    def guard(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls ``function`` and returns its result; an exception in it ends the watching, not the training: None."""
        ...

    def handed_over(self, take: Taker, arrays: tuple[Any, ...], callback: int) -> None:
        """The Python function of this id was handed arrays by a graph: ``take`` is to be called with them, at once or,
        where the graph calls the function at most once a run, before the graph runs again. Never raises."""
        ...

    def left_out(self, path: str) -> None:
        """A cell has tensors that a compiled graph can't hand over: their shape is known only when it runs."""
        ...

    def entering(self, path: str) -> None:
        """A watched cell is about to run (PyNative only)."""
        ...

    def python_call(self, path: str, cell_type: str, args: Any, kwargs: Any, output: Any) -> None:
        """A watched cell ran as Python."""
        ...

    def graph_call(self, path: str, cell_type: str, inputs: list[Any], outputs: list[Any]) -> None:
        """A watched cell ran in a graph; lists of ``(slot, Seen)``."""
        ...

    def output_gradient(self, path: str, cell_type: str, call: int, slot: str, value: Any) -> None:
        """The gradient of a cell's output arrived: a tensor, or an array from inside a graph."""
        ...

    def gradient(self, name: str, tensor: Any) -> None:
        """The gradient of a parameter arrived."""
        ...

    def graph_gradient(self, name: str, seen: Seen) -> None:
        """The same from inside a graph."""
        ...


@runtime_checkable
class GraphReader(Sink, Protocol):
    """A sink that also wants to read the graphs with its probes."""

    def compiling(self) -> Callable[[], None]:
        """A graph with this sink's probes is about to be compiled; returns what to call afterwards. Never raises."""
        ...

    def running(self) -> None:
        """A graph is about to run, which overwrites what callbacks were handed in its last run. Never raises."""
        ...

    def compiled(self, executor: Any, phase: str) -> bool:
        """It was compiled; MindSpore's executor holds it under ``phase``. Never raises.

        Returns:
            Whether to throw it away and compile it anew: the probes would now hand over less.
        """
        ...

    def stay_whole(self) -> None:
        """That did not work out: the graph is compiled once more, with all that there is to hand over. Never raises."""
        ...

    def settled(self) -> None:
        """Compiling is over; the graph that is going to run is there, or none is. Never raises."""
        ...


def python_probe(original: Callable[..., Any], path: str, cell_type: str, sink: Sink) -> Callable[..., Any]:
    """What stands in for ``construct`` in PyNative mode: calls ``original`` and tells the sink."""

    def construct(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not sink.active:
            return original(*args, **kwargs)
        sink.entering(path)
        output = original(*args, **kwargs)
        sink.python_call(path, cell_type, args, kwargs, output)
        return output

    _show_signature(construct, original)
    return construct


def _show_signature(probe: Any, original: Callable[..., Any]) -> None:
    # MindSpore binds keyword arguments by the signature of `construct` and keeps it: it must see the user's.
    signature = inspect.signature(original)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
    if rest and rest[0].kind is inspect.Parameter.POSITIONAL_ONLY:
        own = own.replace(kind=inspect.Parameter.POSITIONAL_ONLY)
    probe.__signature__ = signature.replace(parameters=[own, *rest])


def python_gradient_hook(name: str, sink: Sink) -> Callable[[Any], Any]:
    """A hook for ``Parameter.register_hook`` in PyNative mode; hands the gradient on as it is."""

    def hook(gradient: Any) -> Any:
        if sink.active:
            sink.gradient(name, gradient)
        return gradient

    return hook


def output_gradient_hook(path: str, cell_type: str, call: int, slot: str, sink: Sink) -> Callable[[Any], Any]:
    """A hook for ``Tensor.register_hook`` on a cell's output, in PyNative mode."""

    def hook(gradient: Any) -> Any:
        if sink.active:
            sink.output_gradient(path, cell_type, call, slot, gradient)
        return gradient

    return hook
