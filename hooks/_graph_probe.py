"""The probes that are compiled into a graph.

A :class:`GraphProbe` stands in for ``construct`` only while MindSpore compiles a graph (see ``_compiled``). What it
leaves in the graph hands the values to a Python callback (``ops.Custom`` of type ``pyfunc``, CPU) whose result is
tied to the cell's output by ``depend``: it changes no value and no gradient, and cannot be optimised away.

Functions marked *traced* are parsed by MindSpore's graph compiler; they are kept to what it understands.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ampdebug.hooks._foreign_threads import keep_thread_state
from ampdebug.hooks._layout import Layout, fill_arrays, lengths, observed, without_number
from ampdebug.hooks._probes import Sink, Taker
from ampdebug.hooks._tensors import dtype_name, see_array

_ZERO = np.zeros(1, np.float32)
# Outputs of a tuple whose gradients are asked for, at most.
_MARKED = 6
# Tensors that one callback takes; calls with more hand them over one by one.
_MOST = 6


@ops.constexpr
def is_observed(shape: Any, dtype: Any) -> bool:
    return observed(dtype_name(dtype), lengths(shape))


@ops.constexpr
def is_without_number(shape: Any, dtype: Any) -> bool:
    return without_number(dtype_name(dtype), lengths(shape))


@ops.constexpr
def is_marked(shape: Any, dtype: Any) -> bool:
    name, known = dtype_name(dtype), lengths(shape)
    return observed(name, known) and not without_number(name, known)


def as_numbers(seen):  # type: ignore[no-untyped-def]
    """The tensors as a callback can take them. Traced."""
    found = ()
    for value in seen:
        if is_without_number(value.shape, value.dtype):
            value = ops.cast(value, ms.float32)
        found = found + (value,)  # type: ignore[assignment]
    return found


leaves = ops.MultitypeFuncGraph("ampdebug_leaves")
shape_of = ops.MultitypeFuncGraph("ampdebug_shape_of")


@leaves.register("Tensor")
def _leaves_tensor(value):  # type: ignore[no-untyped-def]
    if is_observed(value.shape, value.dtype):
        return (ops.stop_gradient(value),)
    return ()


@leaves.register("Tuple")
@leaves.register("List")
def _leaves_sequence(value):  # type: ignore[no-untyped-def]
    found = ()
    for item in value:
        found = found + leaves(item)
    return found


@leaves.register("Dictionary")
def _leaves_dict(value):  # type: ignore[no-untyped-def]
    found = ()
    for item in value.values():
        found = found + leaves(item)
    return found


@leaves.register("Number")
@leaves.register("String")
@leaves.register("None")
@leaves.register("Function")
@leaves.register("TypeType")
def _leaves_other(value):  # type: ignore[no-untyped-def]
    return ()


@shape_of.register("Tensor")
def _shape_of_tensor(value):  # type: ignore[no-untyped-def]
    return ("tensor", value.shape, value.dtype)


@shape_of.register("Tuple")
@shape_of.register("List")
def _shape_of_sequence(value):  # type: ignore[no-untyped-def]
    found = ()
    for item in value:
        found = found + (shape_of(item),)  # type: ignore[assignment]
    return ("tuple", found)


@shape_of.register("Dictionary")
def _shape_of_dict(value):  # type: ignore[no-untyped-def]
    found = ()
    for item in value.values():
        found = found + (shape_of(item),)  # type: ignore[assignment]
    return ("dict", tuple(value.keys()), found)


@shape_of.register("Number")
@shape_of.register("String")
@shape_of.register("None")
@shape_of.register("Function")
@shape_of.register("TypeType")
def _shape_of_other(value):  # type: ignore[no-untyped-def]
    return ("none",)


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


Made = dict[int, tuple[int, Callable[..., Any]]]
"""``{id of a callback's function: (how many tensors it takes, the function, so that the id stays its own)}``."""


def emitter(count: int, sink: Sink, take: Taker, made: Made | None = None) -> Any:
    """An operator that hands its inputs to ``take`` while ``sink`` is active; entered into ``made``."""

    def called(arrays: tuple[Any, ...]) -> Any:
        if sink.active:
            keep_thread_state()
            # MindSpore copies what it hands over into memory that belongs to this operator: nobody writes there before
            # the operator runs again.
            sink.handed_over(take, arrays, number)
        return _ZERO

    function = _fixed_arity(count, called)
    number = id(function)
    if made is not None:
        made[number] = (count, function)
    return ops.Custom(function, out_shape=(1,), out_dtype=ms.float32, func_type="pyfunc")


class GraphProbe:
    """What stands in for ``construct`` while a graph is compiled.

    One object for each watched cell; each compilation asks it for a fresh function.
    """

    def __init__(self, path: str, cell_type: str, sink: Sink) -> None:
        self.path = path
        self.cell_type = cell_type
        self.sink = sink
        self.layouts: list[Layout] = []
        self.uses: list[Layout] = []
        """Those of the graph compiled last."""
        self.callbacks: Made = {}
        """Its callbacks."""
        self._parts: dict[int, list[Any]] = {}

    def traced(self, inputs: Any, outputs: Any) -> int:
        """Called while tracing, once for each distinct use of the cell. Returns whether to call ``as_numbers``."""
        layout = Layout(inputs, outputs)
        if layout.unknown:
            self.sink.left_out(self.path)
        for known in (self.layouts, self.uses):
            if all(layout.entries != other.entries for other in known):
                known.append(layout)
        return int(any(without_number(dtype, shape) for _, _, dtype, shape in layout.handed_over))

    def _arrived(self, arrays: tuple[Any, ...], lasting: bool) -> None:
        layout = self._layout_of(arrays)
        if layout is None:
            inputs: list[Any] = []
            outputs = [(str(i), see_array(a, "float32", ())) for i, a in enumerate(arrays) if hasattr(a, "dtype")]
        else:
            inputs, outputs = fill_arrays(layout.places, arrays, lasting)
        self.sink.graph_call(self.path, self.cell_type, inputs, outputs)

    def _layout_of(self, arrays: tuple[Any, ...]) -> Layout | None:
        fitting = [layout for layout in self.layouts if layout.observed == len(arrays)]
        if len(fitting) <= 1:
            return fitting[0] if fitting else None
        shapes = [tuple(getattr(a, "shape", ())) for a in arrays]
        for layout in fitting:
            known = [shape for _, _, _, shape in layout.handed_over]
            if known == shapes:
                return layout
        return fitting[0]

    def _part_arrived(self, arrays: tuple[Any, ...], lasting: bool) -> None:
        # Calls with more tensors than one callback takes come one by one; MindSpore reuses the memory, so copy.
        array, (index, total) = arrays
        self._parts.setdefault(int(index), []).append(array.copy() if isinstance(array, np.ndarray) else array)
        if len(self._parts) == total and all(self._parts.values()):
            self._arrived(tuple(self._parts[key].pop(0) for key in sorted(self._parts)), True)

    def _marker(self, slot: str) -> Any:
        """An operator that hands its input on and sees the gradient that comes back."""

        def arrived(arrays: tuple[Any, ...], lasting: bool) -> None:
            self.sink.output_gradient(self.path, self.cell_type, 0, slot, arrays[0])

        emit = emitter(1, self.sink, arrived)

        def seen(gradient):  # type: ignore[no-untyped-def]
            return ops.depend(gradient, emit(ops.stop_gradient(gradient)))

        return ops.InsertGradientOf(seen)

    def construct(self, cell: Any, original: Callable[..., Any]) -> Any:
        """The method to put into ``cell`` in place of ``original``.

        The traced functions are as short as can be: each line of them is compiled once for each watched cell, and an
        ``if`` costs both of its branches.
        """
        made: Made = {}
        self.uses, self.callbacks = [], made
        emitters = (_nothing, *(emitter(count, self.sink, self._arrived, made) for count in range(1, _MOST + 1)))
        emit_part = emitter(2, self.sink, self._part_arrived, made)
        note = ops.constexpr(guarded_note(self.sink, self.traced))

        def emit_many(*seen):  # type: ignore[no-untyped-def]
            token = 0
            for index in range(len(seen)):
                token = ops.depend(emit_part(seen[index], Tensor([index, len(seen)], ms.int32)), token)
            return token

        def construct(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            output = original(*args, **kwargs)
            bare = note(("tuple", (shape_of(args), shape_of(kwargs))), shape_of(output))
            seen = leaves(args) + leaves(kwargs) + leaves(output)
            if bare:
                seen = as_numbers(seen)  # type: ignore[no-untyped-call]
            if len(seen) > _MOST:
                return ops.depend(output, emit_many(*seen))  # type: ignore[no-untyped-call]
            return ops.depend(output, emitters[len(seen)](*seen))

        method = types.MethodType(construct, cell)
        return self._marked(cell, method) if self.sink.wants_output_gradients else method

    def _marked(self, cell: Any, original: Callable[..., Any]) -> Any:
        """Adds what asks for the gradients of the outputs."""
        mark = tuple(self._marker(slot) for slot in ("", *(str(index) for index in range(1, _MARKED))))

        def construct(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            output = original(*args, **kwargs)
            if isinstance(output, Tensor):
                if is_marked(output.shape, output.dtype):
                    output = mark[0](output)
            elif isinstance(output, tuple):
                with_marks = ()
                for index in range(len(output)):
                    item = output[index]
                    if index < _MARKED and isinstance(item, Tensor) and is_marked(item.shape, item.dtype):
                        item = mark[index](item)
                    with_marks = with_marks + (item,)  # type: ignore[assignment]
                output = with_marks
            return output

        return types.MethodType(construct, cell)


def _nothing() -> int:
    """Stands for an emitter where a call has no tensor to show. Traced."""
    return 0


def guarded_note(sink: Sink, function: Callable[[Any, Any], int]) -> Callable[[Any, Any], int]:
    def note(inputs: Any, outputs: Any) -> int:
        return sink.guard(function, inputs, outputs) or 0

    return note


def graph_gradient_hook(parameter: Any, sink: Sink) -> Callable[[Any], Any]:
    """A hook for ``Parameter.register_hook`` in a graph: parsed by MindSpore's compiler."""
    name, dtype = parameter.name, parameter.dtype
    bare = without_number(dtype_name(dtype), parameter.shape)

    def arrived(arrays: tuple[Any, ...], lasting: bool) -> None:
        (array,) = arrays  # a Python float for a 0-d gradient
        seen = see_array(array, dtype_name(getattr(array, "dtype", dtype)), getattr(array, "shape", ()), lasting)
        sink.graph_gradient(name, seen)

    emit = emitter(1, sink, arrived)

    def hook(gradient):  # type: ignore[no-untyped-def]
        return ops.depend(gradient, emit(ops.stop_gradient(gradient)))

    def bare_hook(gradient):  # type: ignore[no-untyped-def]
        return ops.depend(gradient, emit(ops.cast(ops.stop_gradient(gradient), ms.float32)))

    return bare_hook if bare else hook
