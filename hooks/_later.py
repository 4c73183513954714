"""Values of a PyNative step that are looked at later, without making the network wait.

PyNative is asynchronous: Python runs ahead of the device, and to ask for a value is to wait for everything before it.
One such wait a cell costs more than all statistics. So a probe only has each tensor copied, by an operator that stands
in the queue behind the one that computes it and before whatever comes after: the copy holds the values of that moment,
also where an in-place operator changes the tensor a line later. The copies are read together.

The gradients of cells' outputs need no copy: they go from one operator of the backward pass to the next, which write
to none of what they are given.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore import dtype as mstype
from mindspore._c_expression import MixedPrecisionType
from mindspore.graph.api import _pynative_executor
from mindspore.ops.auto_generate.gen_ops_prim import pyboost_concat, pyboost_reshape

from ampdebug._recorder import Seen
from ampdebug.hooks._tensors import FLOATING, see

LIMIT = 128 << 20
"""Bytes of copies that are held at a time: beyond, they are read before the step is over."""

_CONCAT, _RESHAPE = ops.Concat(0), ops.Reshape()
# Not tried out where there is no kernel: MindSpore may crash some calls after it missed one.
_COPIED = {
    "CPU": (mstype.float16, mstype.float32, mstype.float64),
    "GPU": (mstype.float16, mstype.float32, mstype.float64),
    "Ascend": (mstype.float16, mstype.float32, mstype.bfloat16),
}

Record = Callable[[list[Seen]], None]


class _Held(NamedTuple):
    """A tensor's values, computed or still to be: the part of ``tensor`` from index ``first`` of its first axis on that
    makes up ``shape``."""

    tensor: Tensor
    shape: tuple[int, ...]
    first: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(self.tensor.itemsize)

    def read(self) -> Seen:
        # The array keeps the memory, which nobody writes to any more: it may be measured at any time.
        whole = see(self.tensor)
        assert whole.array is not None, "only floating-point tensors are held"
        array = whole.array
        if whole.shape != self.shape:
            array = array[self.first : self.first + (self.shape[0] if self.shape else 1)].reshape(self.shape)
        return Seen(array, whole.dtype, self.shape, lasting=True)


class Later:
    """A queue of tensors and of what is to be done with their values."""

    def __init__(self) -> None:
        self._queue: list[tuple[list[_Held | Seen], Record]] = []
        self._bytes = 0

    @property
    def full(self) -> bool:
        """There is more in it than ``LIMIT``: it should be read."""
        return self._bytes > LIMIT

    def add(self, tensors: Sequence[Tensor], record: Record, *, unchanging: bool = False) -> None:
        """Queues one call of ``record`` with the values that the tensors have now.

        Args:
            tensors: Of any shape and dtype.
            record: Is given one :class:`Seen` a tensor, in order.
            unchanging: Nobody can change them before they are read, so they need not be copied.
        """
        put_off = FLOATING.__contains__ if unchanging else _can_copy
        waiting = [i for i, tensor in enumerate(tensors) if put_off(tensor.dtype) and 0 not in tensor.shape]
        with _unnoticed():
            kept = dict(zip(waiting, (_kept if unchanging else _copied)([tensors[i] for i in waiting]), strict=True))
            held = [kept[i] if i in kept else see(tensor) for i, tensor in enumerate(tensors)]
        self._queue.append((held, record))
        self._bytes += sum(item.nbytes for item in kept.values())

    def wait(self) -> None:
        """Waits until the network has computed what is queued."""
        last = next((item for held, _ in reversed(self._queue) for item in held if isinstance(item, _Held)), None)
        if last is not None:
            last.tensor.asnumpy()

    def read(self) -> None:
        """Makes the calls that are queued, in the order in which they were."""
        queue, self._queue, self._bytes = self._queue, [], 0
        for held, record in queue:
            record([item.read() if isinstance(item, _Held) else item for item in held])

    def drop(self) -> None:
        """Forgets what is queued."""
        self._queue = []
        self._bytes = 0


@contextmanager
def _unnoticed() -> Iterator[None]:
    """Operators inside are no part of anybody's gradient, and no mixed precision casts what goes into them."""
    recording = _pynative_executor.enable_grad()
    _pynative_executor.set_enable_grad(False)
    _pynative_executor.set_mixed_precision_type(MixedPrecisionType.NOTSET)
    try:
        yield
    finally:
        _pynative_executor.set_mixed_precision_type(MixedPrecisionType.NOTSET, False)
        _pynative_executor.set_enable_grad(recording)


def _kept(tensors: Sequence[Tensor]) -> list[_Held]:
    return [_Held(tensor, tuple(tensor.shape)) for tensor in tensors]


def _copied(tensors: Sequence[Tensor]) -> list[_Held]:
    """Queues the copies of tensors with at least one element each, as few operators as can be.

    The functions are called past every entry point that somebody may have put a watcher at.
    """
    # A concatenation is a copy, bit for bit, of whatever layout; also of a single tensor.
    together: dict[tuple[Any, tuple[int, ...]], list[int]] = {}
    shapes = [tuple(tensor.shape) for tensor in tensors]
    for index, tensor in enumerate(tensors):
        together.setdefault((tensor.dtype, shapes[index][1:]), []).append(index)
    held: dict[int, _Held] = {}
    for indices in together.values():
        parts = [tensors[i] if shapes[i] else pyboost_reshape(_RESHAPE, [tensors[i], (1,)]) for i in indices]
        copy = pyboost_concat(_CONCAT, [tuple(parts), 0])
        first = 0
        for index in indices:
            held[index] = _Held(copy, shapes[index], first)
            first += shapes[index][0] if shapes[index] else 1
    return [held[index] for index in range(len(tensors))]


@functools.cache
def _can_copy(dtype: Any) -> bool:
    """Whether tensors of a dtype can be copied on this device; found out once."""
    if dtype not in FLOATING or dtype not in _COPIED.get(ms.get_context("device_target"), ()):
        return False
    try:
        with _unnoticed():  # the first tensor of a dtype may come by inside a cell that casts
            values = np.array([-0.0, 1.5, np.nan, 3e-8], np.float32), 1.5
            return all(_is_copied(Tensor(value, dtype)) for value in values)
    except Exception:  # noqa: BLE001 - another MindSpore than we know: then values are waited for
        return False


def _is_copied(tensor: Tensor) -> bool:
    (copy,) = _copied([tensor])
    seen, wanted = copy.read(), see(tensor)
    assert seen.array is not None, "it is a floating-point tensor"
    assert wanted.array is not None, "it is a floating-point tensor"
    apart = copy.tensor.data_ptr() != tensor.data_ptr()
    return apart and seen.shape == wanted.shape and seen.array.tobytes() == wanted.array.tobytes()
