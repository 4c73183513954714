"""That no operator slips past the entry points: counted against the framework's own dispatch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from mindspore.graph.api import _pynative_executor
from mindspore.utils import MsDispatchMode

from ampdebug.hooks._interpose import Function, interpose

# The dispatch shows these, and they compute nothing that a precision could change.
_HARMLESS = frozenset({"Contiguous", "typeof", "make_range"})


def unseen_operators(run: Callable[[], Any]) -> Counter[str]:
    """Runs something and returns the operators that the dispatch saw outside of every entry point, with their number.

    The frontend pipeline is switched off meanwhile, since operators that run in its thread escape the dispatch. The
    backward pass is dispatched too and has no entry points, so ``run`` must be a forward pass.

    Args:
        run: A forward pass in PyNative mode.
    """
    inside = _Inside()
    dispatch = _Dispatch(inside)
    executor = _pynative_executor._executor
    executor.disable_frontend_and_bprop_pipeline()
    try:
        with interpose(inside), dispatch:
            run()
    finally:
        executor.enable_frontend_and_bprop_pipeline()
    return dispatch.unseen


class _Inside:
    """A watcher that knows whether an entry point's call is going on."""

    def __init__(self) -> None:
        self.depth = 0

    def on_cell(self, cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        return call()

    def on_compiled(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        self.depth += 1
        try:
            return call()
        finally:
            self.depth -= 1

    def on_operator(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            self.depth -= 1


class _Dispatch(MsDispatchMode):
    def __init__(self, inside: _Inside) -> None:
        super().__init__()
        self._inside = inside
        self.unseen: Counter[str] = Counter()

    def __ms_dispatch__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        if self._inside.depth == 0 and func.name not in _HARMLESS:
            self.unseen[func.name] += 1
        return func(*args)
