"""Values of tensors as arrays, and operator calls in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype
from mindspore.graph.api import _no_grad

from ampdebug._sites import is_cast
from ampdebug._stats import summarize
from ampdebug._tensor_stats import TensorStats
from ampdebug.hooks._interpose import Function
from ampdebug.hooks._protect import _is_in_place
from ampdebug.hooks._shadow import LOW, _cast, flat_tensors, full_precision, map_tensors
from ampdebug.hooks._tensors import FLOATING

Array = np.ndarray[Any, Any]
# What a call that cannot be made in float32, or followed, raises; the step goes on without it.
CALL_ERRORS = (RuntimeError, TypeError, ValueError, NotImplementedError)


def values_of(tensor: Any) -> Array | None:
    """The elements of a floating-point tensor as float32 (float64 where it has them), None for others."""
    if tensor.dtype not in FLOATING:
        return None
    if tensor.dtype == mstype.bfloat16:
        with _no_grad(), full_precision():
            tensor = _cast(tensor, mstype.float32)
    array: Array = tensor.asnumpy()
    return array


def stats_of(tensor: Any) -> TensorStats | None:
    """Statistics of a floating-point tensor, None for others."""
    array = values_of(tensor)
    return None if array is None else summarize(array)


def widened(tensor: Any) -> Any:
    """The tensor in float32 where it has 16 bits."""
    return _cast(tensor, mstype.float32) if tensor.dtype in LOW else tensor


def deviation(low: Any, high: Any) -> float | None:
    """Largest deviation among the elements that are finite in both, in units of the root mean square of ``high``."""
    ours, exact = values_of(low), values_of(high)
    if ours is None or exact is None or ours.shape != exact.shape:
        return None
    wide, reference = ours.astype(np.float64), exact.astype(np.float64)
    good = np.isfinite(wide) & np.isfinite(reference)
    if not good.any():
        return None
    spread = float(np.sqrt(np.mean(reference[good] ** 2)))
    return float(np.abs(wide[good] - reference[good]).max()) / spread if spread else None


def follow_gradient(tensor: Any, arrived: Callable[[TensorStats], None]) -> Any | None:
    """Asks for the gradient of a tensor; gives the handle of the hook, None where no gradient can come."""

    def hook(gradient: Any) -> None:
        stats = None if gradient is None else stats_of(gradient)  # None: no gradient reaches this result
        if stats is not None:
            arrived(stats)

    try:
        return tensor.register_hook(hook)
    except CALL_ERRORS:
        return None  # a tensor outside of any gradient, or a view: its gradient stays unknown


class Float32Run:
    """A watcher under which every operator computes in float32, whatever the level says.

    Args:
        follow: Measure the gradients of the operators' results.

    Attributes:
        names: Of the operators that were called, in order.
        gradients: ``{(operator, result): statistics}`` where they are followed.
    """

    def __init__(self, *, follow: bool = False) -> None:
        self.names: list[str] = []
        self.gradients: dict[tuple[int, int], TensorStats] = {}
        self._follow = follow
        self._handles: list[Any] = []

    def release(self) -> None:
        """Takes the hooks out; what was measured stays."""
        while self._handles:
            self._handles.pop().remove()

    def on_cell(self, cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        return call()

    def on_compiled(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        with full_precision():
            return self._seen(name, call())

    def on_operator(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._seen(name, in_float32(name, function, args, kwargs))

    def gradients_as_in(self, names: list[str]) -> dict[tuple[int, int], TensorStats]:
        """The gradients by the numbers that operators have in another run of the network, given the names of those."""
        # A level's own casts are left out where there is nothing to cast.
        there = [index for index, name in enumerate(self.names) if not is_cast(name)]
        here = [index for index, name in enumerate(names) if not is_cast(name)]
        # A network that takes another way in float32 has other operators: their numbers would mean something else.
        if [self.names[index] for index in there[: len(here)]] != [names[index] for index in here]:
            return {}
        number = dict(zip(there, here, strict=False))
        return {(number[i], slot): stats for (i, slot), stats in self.gradients.items() if i in number}

    def _seen(self, name: str, result: Any) -> Any:
        index = len(self.names)
        self.names.append(name)
        if self._follow:
            for slot, tensor in enumerate(flat_tensors(result)):
                if tensor.dtype in FLOATING:
                    handle = follow_gradient(tensor, partial(self.gradients.__setitem__, (index, slot)))
                    if handle is not None:
                        self._handles.append(handle)
        return result


def in_float32(name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes an operator call in float32; a cast to 16 bits hands on what it was given."""
    if _is_in_place(name):
        with full_precision():
            return function(*args, **kwargs)  # it must change the very tensor it was given
    if is_cast(name):
        result = function(*args, **kwargs)
        given = flat_tensors(args)
        narrows = isinstance(result, Tensor) and result.dtype in LOW and given and given[0].dtype in FLOATING
        return widened(given[0]) if narrows else result
    with full_precision():
        wide_args, wide_kwargs = map_tensors(widened, (args, kwargs))
        return function(*wide_args, **wide_kwargs)
