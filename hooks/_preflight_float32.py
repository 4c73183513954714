"""Values of tensors as arrays, and operator calls in float32."""

from __future__ import annotations

from collections.abc import Callable
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


class Float32Run:
    """A watcher under which every operator computes in float32, whatever the level says."""

    def on_cell(self, cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        return call()

    def on_compiled(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        with full_precision():
            return call()

    def on_operator(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return in_float32(name, function, args, kwargs)


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
