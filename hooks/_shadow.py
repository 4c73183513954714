"""Shadows: the unrounded value that a 16-bit tensor stands for, carried along with it.

"Keep this operator in float32" must mean something for the values on its edges, or nothing would be gained: between two
float32 operators of a float16 network the value would still be rounded on the way. The rule here is: *a value stays
unrounded on its way from a producer to a consumer iff one of the two is protected and the other one is protected or
computes in float32 anyway*. Casts, reshapes and other operators that compute nothing belong to the way.

So a protected operator hands on the rounded tensor, as everybody in the network expects it, with a *mark* that leads to
the unrounded one. A mark is *strong* where the producer is protected; then every float32 consumer reads through it. It
is *weak* where the producer merely computes in float32; then only protected consumers do. With nothing protected there
is no strong mark and no reader of weak ones, so that the network computes what it computes without us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore._c_expression import MixedPrecisionType
from mindspore.graph.api import _pynative_executor

_KEY = "ampdebug_shadow"
_cast = ops.Cast()

LOW = (mstype.float16, mstype.bfloat16)


class Mark:
    """What a tensor stands for.

    Args:
        read: Given ``strong_only``, the unrounded float32 tensor; with ``strong_only`` values whose producer is not
            protected are rounded as in the plain network. None: the tensor itself is the unrounded one.
        strong: The producer is protected.
    """

    __slots__ = ("_known", "_read", "strong")

    def __init__(self, read: Callable[[bool], Tensor] | None, *, strong: bool) -> None:
        self._read, self.strong = read, strong
        self._known: dict[bool, Tensor] = {}

    def value(self, tensor: Tensor, strong_only: bool) -> Tensor:
        """The unrounded value of the tensor that bears this mark."""
        if self._read is None:
            return tensor
        known = self._known.get(strong_only)
        if known is None:
            # Reads are put off until somebody wants them: most reshapes of marked tensors are never looked at.
            known = self._known[strong_only] = self._read(strong_only)
        return known


def mark_of(tensor: Tensor) -> Mark | None:
    """The mark a tensor bears."""
    mark: Mark | None = tensor._get_user_data(_KEY)
    return mark


def set_mark(tensor: Tensor, mark: Mark | None) -> None:
    """Marks a tensor, or takes its mark away."""
    tensor._set_user_data(_KEY, mark)


def unrounded(tensor: Tensor, *, strong_only: bool, widen: bool) -> Tensor:
    """What a float32 consumer reads instead of a tensor.

    Args:
        tensor: What it was handed.
        strong_only: The consumer is not protected.
        widen: Cast what is still 16 bits wide to float32.
    """
    mark = mark_of(tensor)
    if mark is not None and (mark.strong or not strong_only):
        tensor = mark.value(tensor, strong_only)
    return _cast(tensor, mstype.float32) if widen and tensor.dtype in LOW else tensor


def rounded(tensor: Tensor, dtype: Any) -> Tensor:
    """The tensor in a 16-bit format, strongly marked with itself; itself too, since a cast may hand it back."""
    low = _cast(tensor, dtype)
    set_mark(tensor, Mark(None, strong=True))
    set_mark(low, Mark(lambda _: tensor, strong=True))
    return low


@contextmanager
def full_precision() -> Iterator[None]:
    """Switches all implicit casts off: those of ``to_float`` and those of ``auto``."""
    _pynative_executor.set_mixed_precision_type(MixedPrecisionType.FP32)
    try:
        yield
    finally:
        _pynative_executor.set_mixed_precision_type(MixedPrecisionType.NOTSET, False)


@contextmanager
def balanced_mixed_precision() -> Iterator[None]:
    """Takes the entries of cells that raise off the stack of mixed precision.

    An exception inside a cell that has ``to_float`` leaves the cell's entry there, and later networks of the process
    would run in 16 bits. One too many taken off corrupts memory, so each cell that raises takes off its own.
    """
    original = nn.Cell._complex_call

    def _complex_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            if self.mixed_precision_type is not None:
                _pynative_executor.set_mixed_precision_type(MixedPrecisionType.NOTSET, False)
            raise

    nn.Cell._complex_call = _complex_call
    try:
        yield
    finally:
        nn.Cell._complex_call = original


def map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    """A nested value with ``function`` applied to its tensors; tuples, lists, dicts and named tuples."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(function, item) for item in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items) if type(value) in (tuple, list) else value
    if type(value) is dict:
        return {key: map_tensors(function, item) for key, item in value.items()}
    return value


def flat_tensors(value: Any) -> list[Any]:
    """The tensors of a nested value in the order in which :func:`map_tensors` visits them."""
    found: list[Any] = []
    map_tensors(found.append, value)
    return found
