"""The probes: code that stands in ``construct`` and tells a sink what passed through.

Two kinds, one for each way MindSpore runs a cell:

* :func:`python_probe` runs as Python, in PyNative mode. It stands in the cell as long as the network is watched.
* :class:`GraphProbe` is *compiled*. It stands in the cell only while a graph is compiled (see ``_compiled``), and hands
  the values to a Python callback from inside the graph (``ops.Custom`` of type ``pyfunc``, CPU). The callback's result is
  tied to the cell's output by ``depend``: it changes no value and no gradient, and cannot be optimised away.

A sink never raises: an error of ours must not reach the training.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ampdebug._recorder import Seen
from ampdebug.hooks._tensors import dtype_name, see_array

_ZERO = np.zeros(1, np.float32)
_FLOATS = (ms.float16, ms.float32, ms.float64, ms.bfloat16)
_FLOAT_NAMES = tuple(dtype_name(dtype) for dtype in _FLOATS)


class Sink(Protocol):
    """Whoever listens to probes."""

    active: bool
    """Whether anything is to be observed now."""

    def graph_token(self) -> str:
        """Distinguishes graphs with this sink's probes; ``""`` where none are wanted now."""
        ...

    def guard(self, function: Callable[..., None] | Callable[..., int], *args: Any) -> None:
        """Calls ``function``; an exception in it ends the watching, not the training."""
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

    def gradient(self, name: str, value: Any, *, reduced: bool = False) -> None:
        """The gradient of a parameter arrived: a tensor, or an array from inside a graph."""
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


# -- compiled probes -------------------------------------------------------------------------------------------------
# These functions are parsed by MindSpore's graph compiler. They are dispatched by type, which works while tracing.

_leaves = ops.MultitypeFuncGraph("ampdebug_leaves")
_shape_of = ops.MultitypeFuncGraph("ampdebug_shape_of")


@_leaves.register("Tensor")
def _leaves_tensor(value):  # type: ignore[no-untyped-def]
    return (value,)


@_leaves.register("Tuple")
def _leaves_tuple(value):  # type: ignore[no-untyped-def]
    found = ()
    for item in value:
        found = found + _leaves(item)
    return found


@_leaves.register("List")
def _leaves_list(value):  # type: ignore[no-untyped-def]
    found = ()
    for item in value:
        found = found + _leaves(item)
    return found


@_leaves.register("Dictionary")
def _leaves_dict(value):  # type: ignore[no-untyped-def]
    found = ()
    for item in value.values():
        found = found + _leaves(item)
    return found


@_leaves.register("Number")
def _leaves_number(value):  # type: ignore[no-untyped-def]
    return ()


@_leaves.register("String")
def _leaves_string(value):  # type: ignore[no-untyped-def]
    return ()


@_leaves.register("None")
def _leaves_none(value):  # type: ignore[no-untyped-def]
    return ()


@_shape_of.register("Tensor")
def _shape_of_tensor(value):  # type: ignore[no-untyped-def]
    return ("tensor", value.shape, value.dtype)


@_shape_of.register("Tuple")
def _shape_of_tuple(value):  # type: ignore[no-untyped-def]
    found = ()
    for item in value:
        found = found + (_shape_of(item),)
    return ("tuple", found)


@_shape_of.register("List")
def _shape_of_list(value):  # type: ignore[no-untyped-def]
    found = ()
    for item in value:
        found = found + (_shape_of(item),)
    return ("tuple", found)


@_shape_of.register("Dictionary")
def _shape_of_dict(value):  # type: ignore[no-untyped-def]
    found = ()
    for item in value.values():
        found = found + (_shape_of(item),)
    return ("dict", tuple(value.keys()), found)


@_shape_of.register("Number")
def _shape_of_number(value):  # type: ignore[no-untyped-def]
    return ("none",)


@_shape_of.register("String")
def _shape_of_string(value):  # type: ignore[no-untyped-def]
    return ("none",)


@_shape_of.register("None")
def _shape_of_none(value):  # type: ignore[no-untyped-def]
    return ("none",)


@ops.constexpr
def _is_observed(shape: Any, dtype: Any) -> bool:
    # An empty tensor makes the callback fail inside MindSpore; there is nothing to see in it anyway.
    return dtype in _FLOATS and 0 not in shape


def _fixed_arity(count: int, function: Callable[[tuple[Any, ...]], Any]) -> Callable[..., Any]:
    """``pyfunc`` refuses ``*args``: one signature for each number of tensors."""
    by_count: dict[int, Callable[..., Any]] = {
        1: lambda a: function((a,)),
        2: lambda a, b: function((a, b)),
        3: lambda a, b, c: function((a, b, c)),
        4: lambda a, b, c, d: function((a, b, c, d)),
        5: lambda a, b, c, d, e: function((a, b, c, d, e)),
        6: lambda a, b, c, d, e, f: function((a, b, c, d, e, f)),
    }
    return by_count[count]


def _emitter(count: int, function: Callable[[tuple[Any, ...]], None]) -> Any:
    def called(arrays: tuple[Any, ...]) -> Any:
        function(arrays)
        return _ZERO

    return ops.Custom(_fixed_arity(count, called), out_shape=(1,), out_dtype=ms.float32, func_type="pyfunc")


class Layout:
    """The nested structure of one traced call, flattened: slots, dtypes and shapes of its tensors in order."""

    def __init__(self, inputs: Any, outputs: Any) -> None:
        self.entries: list[tuple[bool, str, str, tuple[int, ...]]] = []
        lone = _lone_tensor(inputs)
        self._flatten(inputs if lone is None else lone, "", False)
        self._flatten(outputs, "", True)
        self.observed = sum(1 for _, _, dtype, shape in self.entries if _observed(dtype, shape))

    def _flatten(self, node: Any, slot: str, output: bool) -> None:
        if node[0] == "tensor":
            self.entries.append((output, slot, dtype_name(node[2]), tuple(int(n) for n in node[1])))
        elif node[0] == "tuple":
            for index, item in enumerate(node[1]):
                self._flatten(item, f"{slot}.{index}" if slot else str(index), output)
        elif node[0] == "dict":
            for key, item in zip(node[1], node[2], strict=True):
                self._flatten(item, f"{slot}.{key}" if slot else str(key), output)

    def fill(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Pairs the arrays of one call with their slots: ``(inputs, outputs)`` as lists of ``(slot, Seen)``."""
        both: tuple[list[Any], list[Any]] = ([], [])
        rest = iter(arrays)
        for output, slot, dtype, shape in self.entries:
            if _observed(dtype, shape):
                array = next(rest)
                seen = see_array(array, dtype, tuple(getattr(array, "shape", ())))
            elif dtype in _FLOAT_NAMES:
                seen = Seen(np.zeros(shape, np.uint16 if dtype == "bfloat16" else dtype), dtype, shape)
            else:
                seen = Seen(None, dtype, shape)
            both[output].append((slot, seen))
        return both


def _observed(dtype: str, shape: tuple[int, ...]) -> bool:
    return dtype in _FLOAT_NAMES and 0 not in shape


def _lone_tensor(inputs: Any) -> Any | None:
    """The arguments come as ``(args, kwargs)``; a single positional argument is shown without an index."""
    args, kwargs = inputs[1]
    if kwargs[0] == "dict" and not kwargs[1]:
        return args[1][0] if len(args[1]) == 1 else args
    if not args[1]:
        return kwargs
    return None


class GraphProbe:
    """What stands in for ``construct`` while a graph is compiled.

    One object for each watched cell; each compilation asks it for a fresh function.
    """

    def __init__(self, path: str, cell_type: str, sink: Sink) -> None:
        self.path = path
        self.cell_type = cell_type
        self.sink = sink
        self.layouts: list[Layout] = []
        self._parts: dict[int, list[Any]] = {}

    def traced(self, inputs: Any, outputs: Any) -> int:
        """Called while tracing, once for each distinct use of the cell."""
        layout = Layout(inputs, outputs)
        if all(layout.entries != known.entries for known in self.layouts):
            self.layouts.append(layout)
        return 0

    def _arrived(self, arrays: tuple[Any, ...]) -> None:
        layout = self._layout_of(arrays)
        if layout is None:
            inputs: list[Any] = []
            outputs = [(str(i), see_array(a, "float32", ())) for i, a in enumerate(arrays) if hasattr(a, "dtype")]
        else:
            inputs, outputs = layout.fill(arrays)
        self.sink.graph_call(self.path, self.cell_type, inputs, outputs)

    def _layout_of(self, arrays: tuple[Any, ...]) -> Layout | None:
        fitting = [layout for layout in self.layouts if layout.observed == len(arrays)]
        if len(fitting) <= 1:
            return fitting[0] if fitting else None
        shapes = [tuple(getattr(a, "shape", ())) for a in arrays]
        for layout in fitting:
            known = [shape for _, _, dtype, shape in layout.entries if _observed(dtype, shape)]
            if known == shapes:
                return layout
        return fitting[0]

    def _part_arrived(self, arrays: tuple[Any, ...]) -> None:
        # Calls with more tensors than one callback takes come one by one; MindSpore reuses the memory, so copy.
        array, (index, total) = arrays
        self._parts.setdefault(int(index), []).append(array.copy() if isinstance(array, np.ndarray) else array)
        if len(self._parts) == total and all(self._parts.values()):
            self._arrived(tuple(self._parts[key].pop(0) for key in sorted(self._parts)))

    def construct(self, cell: Any, original: Callable[..., Any]) -> Any:
        """The method to put into ``cell`` in place of ``original``."""
        sink = self.sink
        guarded = _guarded(sink, self._arrived)
        emit1 = _emitter(1, guarded)
        emit2 = _emitter(2, guarded)
        emit3 = _emitter(3, guarded)
        emit4 = _emitter(4, guarded)
        emit5 = _emitter(5, guarded)
        emit6 = _emitter(6, guarded)
        emit_part = _emitter(2, _guarded(sink, self._part_arrived))
        note = ops.constexpr(_guarded_note(sink, self.traced))

        def construct(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            output = original(*args, **kwargs)
            note(("tuple", (_shape_of(args), _shape_of(kwargs))), _shape_of(output))
            seen = ()
            for leaf in _leaves(args) + _leaves(kwargs) + _leaves(output):
                if _is_observed(leaf.shape, leaf.dtype):
                    seen = seen + (ops.stop_gradient(leaf),)
            if len(seen) == 1:
                output = ops.depend(output, emit1(seen[0]))
            elif len(seen) == 2:
                output = ops.depend(output, emit2(seen[0], seen[1]))
            elif len(seen) == 3:
                output = ops.depend(output, emit3(seen[0], seen[1], seen[2]))
            elif len(seen) == 4:
                output = ops.depend(output, emit4(seen[0], seen[1], seen[2], seen[3]))
            elif len(seen) == 5:
                output = ops.depend(output, emit5(seen[0], seen[1], seen[2], seen[3], seen[4]))
            elif len(seen) == 6:
                output = ops.depend(output, emit6(seen[0], seen[1], seen[2], seen[3], seen[4], seen[5]))
            else:
                total = len(seen)
                for index in range(total):
                    place = Tensor([index, total], ms.int32)
                    output = ops.depend(output, emit_part(seen[index], place))
            return output

        return types.MethodType(construct, cell)


def _guarded(sink: Sink, function: Callable[[tuple[Any, ...]], None]) -> Callable[[tuple[Any, ...]], None]:
    def called(arrays: tuple[Any, ...]) -> None:
        if sink.active:
            sink.guard(function, arrays)

    return called


def _guarded_note(sink: Sink, function: Callable[[Any, Any], int]) -> Callable[[Any, Any], int]:
    def note(inputs: Any, outputs: Any) -> int:
        sink.guard(function, inputs, outputs)
        return 0

    return note


def python_gradient_hook(name: str, sink: Sink) -> Callable[[Any], Any]:
    """A hook for ``Parameter.register_hook`` in PyNative mode; hands the gradient on as it is."""

    def hook(gradient: Any) -> Any:
        if sink.active:
            sink.gradient(name, gradient)
        return gradient

    return hook


def graph_gradient_hook(name: str, sink: Sink) -> Callable[[Any], Any]:
    """The same for a graph: parsed by MindSpore's compiler."""

    def arrived(arrays: tuple[Any, ...]) -> None:
        if sink.active:
            sink.gradient(name, arrays[0])

    emit = _emitter(1, arrived)

    def hook(gradient):  # type: ignore[no-untyped-def]
        return ops.depend(gradient, emit(ops.stop_gradient(gradient)))

    return hook
