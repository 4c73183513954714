"""The dtype a cell really computes in.

The boundary misleads: under O2 in PyNative mode a cell takes float32 and casts inside, a kept BatchNorm hands on
float16 and computes in float32, under O1 and auto the output is cast back. Only the operators show it:

* in a graph, the operators of the compiled graph (:mod:`ampdebug.hooks._graph_operators`), read once a compilation;
* in PyNative mode, the operators that ran (:mod:`ampdebug.hooks._dispatch`), listened to in the first recorded step,
  and in a later one when a cell ran that had not run before;
* where neither worked, the dtypes inside the traced ``construct``, and last the precision flag in force.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms

from ampdebug._sites import is_cast, is_movement
from ampdebug.hooks import _dispatch
from ampdebug.hooks._cells import Place, asked_dtype
from ampdebug.hooks._graph_operators import CompiledGraph, name_scopes

_FLOATS = ("float16", "bfloat16", "float32", "float64")
# Listening costs some microseconds an operator. Networks that choose other cells in each step must not pay it forever.
_STEPS_LISTENED = 4
_numbers = itertools.count(1)
# They make tensors of a dtype of their own, or hand one on as it is, and say nothing about what the cell computes in.
_CREATING = frozenset(
    (
        *("zeros", "zeroslike", "ones", "oneslike", "full", "fulllike", "fill", "fillscalar", "filltensor", "fillv2"),
        *("empty", "emptylike", "eye", "arange", "range", "linspace", "dropoutgenmask", "assign", "assignvalue"),
        *("clone", "copy", "identity", "stopgradient", "depend", "load", "tensormove", "detach"),
    )
)


def _computes_nothing(operator: str) -> bool:
    return operator.rpartition(".")[2].replace("_", "").lower().removesuffix("ext") in _CREATING


class PrecisionSeen:
    """What the cells of one network were seen to compute in.

    Args:
        places: Its cells.
        report: Called with one sentence where the operators cannot be seen; the weaker sources take over.
    """

    def __init__(self, places: dict[str, Place], report: Callable[[str], None]) -> None:
        self.changed = False
        self._places = places
        self._report = report
        self._reported: set[str] = set()
        self._computed: dict[str, dict[str, str]] = {}
        self._moved: dict[str, str] = {}
        self._ran: set[str] = set()
        self._marker = str(next(_numbers))
        self._scopes: dict[str, str] = {}
        self._listening = False
        self._wanted = True
        self._steps = 0

    # -- PyNative mode -------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A step to be recorded is about to start: listens, where there is something left to hear."""
        self.end_step()
        if not self._wanted or self._steps >= _STEPS_LISTENED or ms.get_context("mode") == ms.GRAPH_MODE:
            return
        self._wanted = False
        self._steps += 1
        try:
            _dispatch.listen(self, self._places)
        except Exception as error:  # noqa: BLE001 - another MindSpore than we know: the flags must do
            self.failed(error)
        else:
            self._listening = True

    def end_step(self) -> None:
        """The step is done, or watching ends. May be called at any time."""
        if self._listening:
            self._listening = False
            _dispatch.ignore(self)

    def entering(self, path: str) -> None:
        """A watched cell is about to run as Python."""
        if path not in self._ran:
            self._wanted = True

    def cell_ran(self, path: str) -> None:
        """See :class:`ampdebug.hooks._dispatch.Listener`."""
        if path not in self._ran:
            self._ran.add(path)
            self.changed = True

    def operator_ran(self, path: str, operator: str, dtype: str) -> None:
        """See :class:`ampdebug.hooks._dispatch.Listener`."""
        if is_cast(operator) or _computes_nothing(operator):
            return
        if is_movement(operator):
            self._moved.setdefault(path, dtype)
            return
        known = self._computed.setdefault(path, {})
        first = known.setdefault(operator, dtype)
        if first != dtype:  # the same operator at two precisions, in a hand-written norm say: both are shown
            known.setdefault(f"{operator} ({dtype})", dtype)

    def failed(self, error: Exception) -> None:
        """The operators cannot be seen. Told once for each kind of error."""
        kind = type(error).__name__
        if kind not in self._reported:
            self._reported.add(kind)
            self._report(f"the operators of the network could not be seen ({kind}: {str(error)[:300]})")

    # -- graphs --------------------------------------------------------------------------------------------------------

    def compiling(self) -> Callable[[], None]:
        """A graph with probes is about to be compiled. Returns what to call when that is over."""
        try:
            self._scopes, undo = name_scopes(self._places, self._marker)
        except Exception as error:  # noqa: BLE001 - the compilation goes on, under MindSpore's own scopes
            self._scopes = {}
            self.failed(error)
            return lambda: None
        return undo

    def compiled(self, executor: Any, phase: str) -> CompiledGraph | None:
        """A graph with probes was compiled. Returns it, None where it cannot be read."""
        self.changed = True
        try:
            graph = CompiledGraph(executor, phase)
            for path, operator, dtype, _ in graph.operators(self._scopes):
                self.operator_ran(path, operator, dtype)
                for above in _with_those_above(path):
                    self.cell_ran(above)
        except Exception as error:  # noqa: BLE001 - a graph in a form we do not know: the trace must do
            self.failed(error)
            return None
        return graph

    # -- the answer ----------------------------------------------------------------------------------------------------

    def of(self, path: str, traced: list[Any]) -> tuple[dict[str, str], str]:
        """What a cell's own operators compute in.

        Args:
            path: Its path.
            traced: Layouts of its traced calls, empty where it never ran in a graph.

        Returns:
            ``({operator: dtype}, source)`` as in :class:`ampdebug._records.Cell`. The key ``""`` stands for a cell that
            only moves values, and where single operators are not known. An operator that ran at several precisions has
            further keys with the dtype added: ``"Mul (float16)"``. ``({}, "operators")`` is a cell that ran and has no
            operators of its own, like a container; ``({}, "")`` is not known.
        """
        if path in self._computed:
            return dict(self._computed[path]), "operators"
        if path in self._moved:
            return {"": self._moved[path]}, "operators"
        if path in self._ran:
            return {}, "operators"
        inside = _inside(traced)
        if inside is not None and not self._places[path].children:
            return {"": inside}, "trace"
        flag = flag_in_force(path, self._places)
        return ({}, "") if flag is None else ({"": flag}, "flags")


def flag_in_force(path: str, places: dict[str, Place]) -> str | None:
    """The dtype that the precision flags ask for: the cell's own, else that of the nearest cell above that has one."""
    for above in _with_those_above(path):
        if above in places:
            asked = asked_dtype(places[above].inner)
            if asked is not None:
                return asked
    return None


def _with_those_above(path: str) -> Iterator[str]:
    yield path
    while path and not path.startswith("("):
        path = path.rpartition(".")[0]
        yield path


def _inside(traced: list[Any]) -> str | None:
    """The widest dtype among the inputs inside the traced ``construct``, which come after the implicit casts."""
    dtypes = [dtype for layout in traced for output, _, dtype, _ in layout.entries if not output and dtype in _FLOATS]
    return max(dtypes, key=_FLOATS.index) if dtypes else None
