"""Tensors and nested values, seen as arrays.

Everything that leaves MindSpore for numpy passes through here, so that the traps stand in one place: ``asnumpy()``
gives a *writable view* of live memory (never write to it), bfloat16 has no numpy type (its bits are handed over
instead), and a hook that used MindSpore operators would inherit the mixed precision of the cell it stands in.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from ampdebug._recorder import Seen

FLOATING = {mstype.float16, mstype.float32, mstype.float64, mstype.bfloat16}


@functools.cache
def dtype_name(dtype: Any) -> str:
    """Returns ``"float16"`` for ``mindspore.float16`` and so on, the same word for every place a dtype is shown."""
    return str(dtype).lower().removeprefix("mindspore.")


def see(tensor: Any) -> Seen:
    """Waits for a tensor to be computed and returns its values without copying them on the CPU.

    Args:
        tensor: A MindSpore Tensor or Parameter of any shape and dtype.

    Returns:
        The values and their dtype. Read only by agreement: on the CPU the array is live memory.
    """
    dtype = tensor.dtype
    if dtype not in FLOATING:
        return Seen(None, dtype_name(dtype), tuple(int(n) for n in tensor.shape))
    array = tensor.asnumpy()
    return see_array(array, dtype_name(dtype), array.shape)


def see_array(array: Any, name: str, shape: tuple[int, ...], lasting: bool = False, same: int | None = None) -> Seen:
    """The same for what a compiled graph hands to a Python callback: an array, or a Python float for 0-d."""
    if not isinstance(array, np.ndarray):
        array = np.asarray(array, dtype=np.float32 if name == "bfloat16" else name)
    if name == "bfloat16" and array.dtype.itemsize == 2:
        array = array.view(np.uint16)
    elif name == "bfloat16":  # a 0-d bfloat16 arrives as a Python float: its bits are the upper half of float32's
        array = (np.asarray(array, np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return Seen(array, name, shape, lasting, same)


def leaves(value: Any, slot: str = "") -> Iterator[tuple[str, Any]]:
    """Walks a nested value and yields its tensors with their place.

    Args:
        value: A tensor, or tuples, lists, dicts and named tuples of them; anything else is passed over.
        slot: The place of ``value`` itself.

    Yields:
        ``(slot, tensor)``: ``""`` for a lone tensor, else keys joined by dots (``"0"``, ``"1.mask"``).
    """
    if isinstance(value, Tensor):
        yield slot, value
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{slot}.{index}" if slot else str(index))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{slot}.{key}" if slot else str(key))


def call_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors among a call's arguments; a lone positional tensor has the slot ``""``."""
    if len(args) == 1 and not kwargs:
        yield from leaves(args[0])
    else:
        yield from leaves(args)
        yield from leaves(kwargs)


def scalar(value: Any) -> float | None:
    """A float from a Python number, a one-element array or a one-element tensor; None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float, np.floating, np.integer)):
        return float(value)
    if isinstance(value, Tensor):
        # item() is some twenty times faster than asnumpy(), and knows bfloat16.
        found = value.item() if value.size == 1 else None
        return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else None
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "fiu":
        return float(value.reshape(-1)[0])
    return None
