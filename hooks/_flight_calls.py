"""Where the batch of a functional loop is seen: in the calls of gradient functions and of compiled functions."""

from __future__ import annotations

import functools
from typing import Any, Protocol

from mindspore.graph import api
from mindspore.ops.composite import base

# Who says what the batch is; the more trusted wins, among equals the first in a step.
JIT_CALL, GRADIENT_CALL, TRAIN_STEP, BY_HAND = 1, 2, 3, 4


class Hearer(Protocol):
    """Who wants to know."""

    def saw(self, args: Any, kwargs: dict[str, Any], trust: int) -> None:
        """Something was called that may carry the batch. Never raises."""
        ...


_listening: list[Hearer] = []
_replaced: list[tuple[Any, str, Any, Any]] = []


def listen(hearer: Hearer) -> None:
    """Tells ``hearer`` of every such call until :func:`ignore`."""
    if not _replaced:
        _replace()
    _listening.append(hearer)


def ignore(hearer: Hearer) -> None:
    """Ends :func:`listen`; may be called again, and by who never listened.

    With the last hearer MindSpore's functions are put back, unless somebody has replaced ours meanwhile: he will put
    ours back, and a later call of this function MindSpore's.
    """
    if hearer in _listening:
        _listening.remove(hearer)
    if not _listening and all(getattr(owner, name) is ours for owner, name, _, ours in _replaced):
        for owner, name, found, _ in _replaced:
            setattr(owner, name, found)
        _replaced.clear()


def _replace() -> None:
    """Listens at the two functions that a functional step goes through: a gradient in PyNative, a compiled call."""
    forward = base._pynative_func_grad_forward
    call = api._JitExecutor.__call__

    @functools.wraps(forward)
    def gradient_forward(fn: Any, *args: Any, **kwargs: Any) -> Any:
        for hearer in list(_listening):
            hearer.saw(args, kwargs, GRADIENT_CALL)
        return forward(fn, *args, **kwargs)

    @functools.wraps(call)
    def jit_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[1:] if self.obj is not None else args  # a method's first argument is its cell
        for hearer in list(_listening):
            hearer.saw(given, kwargs, JIT_CALL)
        return call(self, *args, **kwargs)

    _replaced.append((base, "_pynative_func_grad_forward", forward, gradient_forward))
    _replaced.append((api._JitExecutor, "__call__", call, jit_call))
    for owner, name, _, ours in _replaced:
        setattr(owner, name, ours)
