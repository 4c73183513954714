"""One step's observations, gathered in execution order.

This is the measuring side without the framework: the hooks hand over arrays, this keeps the rows. It holds no more than
one step; :meth:`StepRecorder.begin` starts the next.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ampdebug._background import WORTHWHILE, BackgroundStats
from ampdebug._births import Arrived, Ended, StepJudgement
from ampdebug._records import DTYPE_CODES, DTYPES, Birth, Kind, Site
from ampdebug._stats import StatsTable, UpdateStats, is_finite

_M = TypeVar("_M", bound=Callable[..., Any])


def _one_at_a_time(method: _M) -> _M:
    """A graph calls back from several threads, and the statistics let go of the GIL: a step's rows must not mix."""

    @functools.wraps(method)
    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked  # type: ignore[return-value] # the same signature


class Seen(NamedTuple):
    """A tensor as the recorder takes it.

    Attributes:
        array: The values, any shape; uint16 bits where ``dtype`` is ``"bfloat16"``; None for a tensor whose values are
            not looked at (integers, bools, complex).
        dtype: Name of the dtype in lower case (``"float16"``).
        shape: Its shape.
        lasting: The array keeps its values until :meth:`StepRecorder.settle`, so that it may be measured meanwhile.
        same: A number that one tensor has wherever it comes by. A place without the array gets the row of the one with
            it: the n-th time in a step of the n-th time, whichever comes first.
    """

    array: NDArray[Any] | None
    dtype: str
    shape: tuple[int, ...]
    lasting: bool = False
    same: int | None = None


class Update(NamedTuple):
    """What a step did to one parameter: its name, the comparison of before and after, and its dtype and shape."""

    name: str
    stats: UpdateStats
    dtype: str
    shape: tuple[int, ...]


class StepRecorder:
    """Gathers the observations of one step after another.

    Args:
        register: Gives a site its number, once: ``register(site, shape)``.
        parents: ``{cell path: path of the nearest watched cell around it}``; a cell that is not in it is the outermost.
        has_children: Paths of the cells whose children are watched too.
    """

    def __init__(
        self,
        register: Callable[[Site, tuple[int, ...] | None], int],
        parents: dict[str, str] | None = None,
        has_children: Iterable[str] = (),
    ) -> None:
        self._lock = threading.RLock()
        self._register = register
        self._parents = dict(parents or {})
        self._has_children = frozenset(has_children)
        self._ids: dict[tuple[Kind, str, int, str], int] = {}
        self._site_of: dict[int, Site] = {}
        self._table = StatsTable()
        self._background = BackgroundStats(self._table)
        self._sites: list[int] = []
        self._dtypes: list[int] = []
        self._measured: dict[int, list[int]] = {}
        self._copies: dict[tuple[Kind, str, str], list[tuple[int, int]]] = {}
        self._copied = 0
        self._calls: dict[str, int] = {}
        self._ended: list[Ended] = []
        self._backward: list[Arrived] = []
        self._judged: StepJudgement | None = None
        self.gradients_seen: set[str] = set()

    @_one_at_a_time
    def begin(self) -> None:
        """Forgets the last step."""
        self._background.settle()
        self._table.clear()
        self._sites.clear()
        self._dtypes.clear()
        self._measured.clear()
        self._copies.clear()
        self._copied = 0
        self._calls.clear()
        self._ended.clear()
        self._backward.clear()
        self._judged = None
        self.gradients_seen.clear()

    @_one_at_a_time
    def start_measuring(self) -> None:
        """Has the arrays handed over so far measured from now on, while the caller does something else."""
        self._background.start()

    @_one_at_a_time
    def settle(self) -> None:
        """Waits until the arrays handed over so far are measured: from now on they may change."""
        self._background.settle()

    def __len__(self) -> int:
        return len(self._sites)

    @property
    @_one_at_a_time
    def table(self) -> StatsTable:
        """The statistics of every row, in execution order. Waits until they are measured."""
        self._background.settle()
        self._copy_rows()
        return self._table

    @property
    def sites(self) -> list[Site]:
        """Site of every row, in execution order."""
        return [self._site_of[number] for number in self._sites]

    @property
    def site_ids(self) -> NDArray[np.int32]:
        """Site number of every row, int32 [n], in execution order."""
        return np.asarray(self._sites, np.int32)

    @property
    def dtypes(self) -> NDArray[np.uint8]:
        """Dtype code of every row, uint8 [n]."""
        return np.asarray(self._dtypes, np.uint8)

    @property
    def backward_began(self) -> bool:
        """Some gradient of this step has arrived."""
        return any(arrived.kind != "reduced_gradient" for arrived in self._backward)

    @property
    def gradient_norm(self) -> float:
        """Global L2 norm of the gradients as they arrived; NaN or inf where they are not finite."""
        return self._judge().gradient_norm

    @property
    def nonfinite_gradients(self) -> bool:
        """Some gradient of a parameter is not finite, before or after the reduction over ranks."""
        return self._judge().nonfinite_gradients

    @_one_at_a_time
    def cell_call(
        self,
        path: str,
        cell_type: str,
        inputs: Sequence[tuple[str, Seen]],
        outputs: Sequence[tuple[str, Seen]],
    ) -> None:
        """Takes what went into and came out of one call of a cell, when the call has ended.

        Args:
            path: Cell path.
            cell_type: Its class name.
            inputs: ``(slot, tensor)``.
            outputs: The same.
        """
        call = self._calls.get(path, 0)
        self._calls[path] = call + 1
        first = len(self._sites)
        for slot, seen in inputs:
            self._add("input", path, cell_type, call, slot, seen)
        for slot, seen in outputs:
            self._add("output", path, cell_type, call, slot, seen)
        self._ended.append(Ended(path, cell_type, call, first, first + len(inputs), len(self._sites)))
        self._judged = None

    @_one_at_a_time
    def output_gradient(self, path: str, cell_type: str, call: int, slot: str, seen: Seen) -> None:
        """Takes the gradient with respect to a cell's output, as it arrives in the backward pass.

        It is only looked at for NaN and infinities; a row is kept of a tensor that has some.
        """
        if seen.array is None:
            return
        finite = is_finite(seen.array, bfloat16_bits=seen.dtype == "bfloat16")
        row = None if finite else self._add("output_gradient", path, cell_type, call, slot, seen)
        self._backward.append(Arrived("output_gradient", path, path, cell_type, call, slot, row))
        self._judged = None

    @_one_at_a_time
    def gradient(self, name: str, owner: str, seen: Seen, *, reduced: bool = False) -> None:
        """Takes the gradient of a parameter.

        Args:
            name: Parameter name.
            owner: Path of the cell that owns it.
            seen: Its values.
            reduced: It is the gradient after the reduction over ranks, not this rank's own.
        """
        kind: Kind = "reduced_gradient" if reduced else "gradient"
        row = self._add(kind, name, "", 0, "", seen)
        self._backward.append(Arrived(kind, name, owner, "", 0, "", row))
        if not reduced:
            self.gradients_seen.add(name)
        self._judged = None

    @_one_at_a_time
    def parameter(self, name: str, seen: Seen) -> None:
        """Takes the values of a parameter or buffer as they are before the update."""
        self._add("parameter", name, "", 0, "", seen)

    @_one_at_a_time
    def updates(self, updates: Sequence[Update]) -> None:
        """Takes what the step did to parameters.

        A row of kind ``update`` reads: ``count`` elements, ``zeros`` of them unchanged, ``flushed`` changed by less
        than half an ulp of the compute format, ``nan`` not finite before or after, ``rms`` of the change. Extremes
        and mean are not taken (NaN).
        """
        if not updates:
            return
        rows = [self._add("update", u.name, "", 0, "", Seen(None, u.dtype, u.shape)) for u in updates]
        target = self._table.rows  # no need to wait for those that are still being measured
        target["count"][rows] = [u.stats.count for u in updates]
        target["nan"][rows] = [u.stats.nonfinite for u in updates]
        target["zeros"][rows] = [u.stats.count - u.stats.nonfinite - u.stats.changed for u in updates]
        target["flushed"][rows] = [u.stats.below_half_ulp for u in updates]
        target["rms"][rows] = [u.stats.update_rms for u in updates]

    @_one_at_a_time
    def births(self, loss: float | None) -> tuple[Birth | None, Birth | None]:
        """Where the first non-finite value of the forward and of the backward pass was born.

        Args:
            loss: The step's loss, None if unknown.
        """
        return self._judge().births(loss)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _add(self, kind: Kind, path: str, cell_type: str, call: int, slot: str, seen: Seen) -> int:
        array = seen.array
        if array is None:
            row = self._table.reserve()
            if seen.same is not None:
                self._copies.setdefault((kind, path, slot), []).append((row, seen.same))
        elif seen.lasting and array.size >= WORTHWHILE:
            row = self._table.reserve()
            self._background.submit(array, row, bfloat16_bits=seen.dtype == "bfloat16")
        else:
            row = self._table.add(array, bfloat16_bits=seen.dtype == "bfloat16")
        if array is not None and seen.same is not None:
            self._measured.setdefault(seen.same, []).append(row)
        key = (kind, path, call, slot)
        site = self._ids.get(key)
        if site is None:
            described = Site(kind, path, call, slot, cell_type)
            site = self._ids[key] = self._register(described, seen.shape)
            self._site_of[site] = described
        self._sites.append(site)
        self._dtypes.append(DTYPE_CODES.get(seen.dtype, 0))
        return row

    def _copy_rows(self) -> None:
        """Gives the places without an array the rows of the tensors that they are."""
        if not self._copies or self._copied == len(self._sites):
            return
        self._copied = len(self._sites)
        rows, sources = [], []
        for copies in self._copies.values():
            times: dict[int, int] = {}
            for row, same in copies:
                time = times[same] = times.get(same, 0) + 1
                measured = self._measured.get(same, ())
                if time <= len(measured):
                    rows.append(row)
                    sources.append(measured[time - 1])
        self._table.copy(np.asarray(rows, np.intp), np.asarray(sources, np.intp))

    @_one_at_a_time
    def _judge(self) -> StepJudgement:
        """Goes through the step's rows, once they are measured."""
        if self._judged is None:
            self._judged = StepJudgement(
                self.table.rows, self._ended, self._backward, self._slot_and_dtype, self._parents, self._has_children
            )
        return self._judged

    def _slot_and_dtype(self, row: int) -> tuple[str, str]:
        return self._site_of[self._sites[row]].slot, DTYPES[self._dtypes[row]]
