"""Which operator site a call is: the stack of running cells, and the source line behind a call."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import mindspore

from ampdebug._sites import OperatorSite
from ampdebug.hooks._cells import cell_type

PathOf = Callable[[Any], "str | None"]

_FOREIGN = (os.path.dirname(mindspore.__file__) + os.sep, os.path.dirname(os.path.abspath(__file__)) + os.sep, "<")


# O1 runs code that it wrote anew into a file whose name and lines differ from run to run, and the user's lines are
# gone. A site in there is the k-th call of its operator in its cell.
_REWRITTEN_FOLDER = "rewritten_network"
REWRITTEN_LINE = "(rewritten by O1)"


class _Running:
    """One call of a cell that is going on."""

    __slots__ = ("cell", "counts", "path")

    def __init__(self, cell: Any, path: str | None) -> None:
        self.cell, self.path = cell, path
        self.counts: dict[object, int] = {}

    def next_index(self, what: object) -> int:
        index = self.counts.get(what, 0)
        self.counts[what] = index + 1
        return index


class SiteTracker:
    """Follows the calls of cells and names the operator calls inside them.

    Args:
        root: Sites exist inside calls of this cell only.
        path_of: Gives the path of a cell, None for a cell it does not know.
    """

    def __init__(self, root: Any, path_of: PathOf) -> None:
        self._root, self._path_of = root, path_of
        self._stack: list[_Running] = []
        self._root_frame: FrameType | None = None
        self._own: dict[CodeType, bool] = {}
        self._lines: dict[tuple[CodeType, int], tuple[str, str]] = {}
        self.root_calls = 0

    @property
    def cell(self) -> Any | None:
        """The innermost running cell of the network."""
        return self._stack[-1].cell if self._stack else None

    def run_cell(self, cell: Any, call: Callable[[], Any]) -> Any:
        """Makes the call of a cell, known as the innermost one while it lasts."""
        if self._stack:
            parent = self._stack[-1]
            path = self._path_of(cell)
            if path is None and cell is not self._root:
                name = cell_type(cell)
                path = f"{parent.path}.<{name}#{parent.next_index(name)}>".removeprefix(".")
        elif cell is self._root:
            path = self._path_of(cell) or ""
            self._root_frame = sys._getframe()
            self.root_calls += 1
        else:
            return call()
        self._stack.append(_Running(cell, path))
        try:
            return call()
        finally:
            self._stack.pop()
            if not self._stack:
                self._root_frame = None

    def site(self, operator: str) -> tuple[OperatorSite, str] | None:
        """The site of the operator call that is being made, and the full path of its source file.

        None outside the network.
        """
        if not self._stack:
            return None
        running = self._stack[-1]
        line, file = self._source_line(sys._getframe(1))
        index = running.next_index((operator, line))
        return OperatorSite(running.path or "", operator, line, index), file

    def _source_line(self, frame: FrameType | None) -> tuple[str, str]:
        # Frames outside the root's call belong to whoever runs the network, which is another one in another run.
        while frame is not None and frame is not self._root_frame:
            code = frame.f_code
            own = self._own.get(code)
            if own is None:
                own = self._own[code] = not code.co_filename.startswith(_FOREIGN)
            if own:
                place = (code, frame.f_lineno)
                known = self._lines.get(place)
                if known is None:
                    known = self._lines[place] = _label(os.path.abspath(code.co_filename), frame.f_lineno)
                return known
            frame = frame.f_back
        return "", ""


def _label(file: str, number: int) -> tuple[str, str]:
    folder, name = os.path.split(file)
    if os.path.basename(folder) == _REWRITTEN_FOLDER:
        return REWRITTEN_LINE, ""
    return f"{name}:{number}", file
