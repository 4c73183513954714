"""Leaving MindSpore as it was after an exception too: the stack of mixed precision, the gradient graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mindspore._c_expression import MixedPrecisionType
from mindspore.graph.api import _pynative_executor


@contextmanager
def balanced_precision() -> Iterator[None]:
    """Takes off the entries that were pushed inside and never popped.

    An exception inside a cell that has ``to_float`` leaves its entry on the stack, and later networks of the process
    would run in 16 bits. Exactly these entries are taken off: popping more than there are crashes a later call.
    """
    original = _pynative_executor.set_mixed_precision_type
    depth = 0

    def counted(kind: Any, is_push: bool = True) -> Any:
        nonlocal depth
        depth += 1 if is_push else -1
        return original(kind, is_push)

    _pynative_executor.set_mixed_precision_type = counted
    try:
        yield
    finally:
        # Back to what stood there: the method of the class, or the counter of a context around this one.
        if getattr(original, "__self__", None) is _pynative_executor:
            del _pynative_executor.__dict__["set_mixed_precision_type"]
        else:
            _pynative_executor.set_mixed_precision_type = original
        for _ in range(depth):
            original(MixedPrecisionType.NOTSET, False)


@contextmanager
def cleared_after_failure() -> Iterator[None]:
    """Throws the half-built gradient graph away that a forward pass leaves behind when it raises.

    Without that the next gradient of some operators fails ("For LayerNormGrad, the index 7 is out of range").
    """
    try:
        # The stack is balanced first: clearing empties it, and taking entries off an empty one crashes a later call.
        with balanced_precision():
            yield
    except BaseException:
        _pynative_executor.set_grad_flag(False)
        _pynative_executor.clear_res()
        raise
