"""The operator recorder of ``check``, with what was asked of each call and the dtypes in which gradients arrive."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mindspore import nn

from ampdebug._audit_records import NOTHING_ASKED, Request
from ampdebug.hooks._interpose import Function
from ampdebug.hooks._level_audit_cells import Asked
from ampdebug.hooks._preflight_recorder import CALL_ERRORS, OperatorRecorder
from ampdebug.hooks._shadow import flat_tensors
from ampdebug.hooks._sites import PathOf
from ampdebug.hooks._tensors import FLOATING, dtype_name

# The cells that a level puts around others; what they call, the level asked for.
_WRAPPERS = ("_OutputTo16", "_OutputTo32")
# The function whose calls O1 writes into the user's code.
_INSERTED = "amp_cast"


class LevelRecorder(OperatorRecorder):
    """Records operator calls and the requests in force.

    Attributes:
        requests: One for each call in ``calls``.
        gradient_dtypes: ``{operator index: dtype}`` of the gradients that arrived so far.
    """

    def __init__(self, root: object, path_of: PathOf, asked: Asked) -> None:
        super().__init__(root, path_of)
        self._asked = asked
        self._in_force: list[Request] = []
        self._inside_network = 0  # "auto" holds while the network's construct runs, and not in the loss
        self.requests: list[Request] = []
        self.gradient_dtypes: dict[int, str] = {}
        self._listening: list[Any] = []

    def on_cell(self, cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        request = self._asked.of_cell(cell)
        if request is not None:
            self._in_force.append(request)
        inside = self._asked.is_network(cell)
        self._inside_network += inside
        try:
            return super().on_cell(cell, args, kwargs, call)
        finally:
            self._inside_network -= inside
            if request is not None:
                self._in_force.pop()

    def on_operator(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = len(self.calls)
        if self.recording:
            request = self._request()
        result = super().on_operator(name, function, args, kwargs)
        if len(self.calls) > index:
            self.requests.append(request)
            assert len(self.requests) == len(self.calls)
            self._await_gradient(index, result)
        return result

    def release(self) -> None:
        while self._listening:
            self._listening.pop().remove()
        super().release()

    def _request(self) -> Request:
        automatic = self._asked.level == "auto" and self._inside_network > 0
        request = self._in_force[-1] if self._in_force else NOTHING_ASKED
        cell = self.tracker.cell
        if not isinstance(cell, nn.Cell):
            return replace(request, automatic=automatic)
        kind = type(cell)
        # O1's rewritten classes live in a module of their own and derive from the class they were made from.
        library = any(base is not nn.Cell and base.__module__.startswith("mindspore.") for base in kind.__mro__[:2])
        inserted = kind.__name__ in _WRAPPERS or _called_by(_INSERTED)
        return replace(request, automatic=automatic, library=library, inserted=inserted)

    def _await_gradient(self, index: int, result: Any) -> None:
        tensor = next((t for t in flat_tensors(result) if t.dtype in FLOATING), None)
        if tensor is None:
            return

        def arrived(gradient: Any) -> None:
            if gradient is not None:
                self.gradient_dtypes[index] = dtype_name(gradient.dtype)

        try:
            self._listening.append(tensor.register_hook(arrived))
        except CALL_ERRORS:
            return  # a tensor outside of any gradient, or a view: how its gradient comes stays unknown


def _called_by(name: str) -> bool:
    """A function of this name is among the nearest callers."""
    frame = sys._getframe(3)
    for _ in range(8):
        if frame.f_code.co_name == name:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
