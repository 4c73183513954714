"""One step's observations, gathered in execution order, and where its first non-finite value was born.

This is the measuring side without the framework: the hooks hand over arrays, this keeps the rows. It holds no more than
one step; :meth:`StepRecorder.begin` starts the next.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ampdebug._background import WORTHWHILE, BackgroundStats
from ampdebug._records import DTYPE_CODES, DTYPES, Birth, Kind, Site
from ampdebug._stats import StatsTable, UpdateStats, is_finite

_NOTHING = np.zeros(0, np.float32)

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
    """

    array: NDArray[Any] | None
    dtype: str
    shape: tuple[int, ...]
    lasting: bool = False


class _Ended(NamedTuple):
    """A call that has ended: rows ``first:middle`` are its inputs, ``middle:end`` its outputs."""

    path: str
    cell_type: str
    call: int
    first: int
    middle: int
    end: int


class _Arrived(NamedTuple):
    """A gradient that arrived; ``row`` is None for a finite one of a cell's output."""

    kind: Kind
    path: str
    owner: str
    cell_type: str
    call: int
    slot: str
    row: int | None


@dataclass(slots=True)
class _Bad:
    """A non-finite row, with what is needed to say where it came from."""

    order: int
    kind: Kind
    path: str
    cell_type: str
    call: int
    slot: str
    row: int
    inputs_finite: bool | None

    def made(self) -> bool:
        """A cell made it of finite inputs."""
        return self.kind == "output" and bool(self.inputs_finite)

    def mask_like(self, rows: NDArray[Any]) -> bool:
        """Only -inf, as an attention mask is by design."""
        return not rows["nan"][self.row] and not rows["pos_inf"][self.row]


@dataclass(slots=True)
class _Judgement:
    """What the rows of a step amount to.

    Attributes:
        bad_forward: Non-finite inputs and outputs, in order.
        bad_backward: Non-finite gradients, in order.
        ended: ``{path: [(rows there were when a call ended, its inputs were finite), ...]}``.
        cell_types: ``{path: class name}`` of the cells that ran. As ``ended`` left empty where all is finite.
        last_outputs_finite: Of the call that ended last.
        nonfinite_gradients: Of a parameter.
        gradient_norm: See :attr:`StepRecorder.gradient_norm`.
    """

    bad_forward: list[_Bad] = field(default_factory=list)
    bad_backward: list[_Bad] = field(default_factory=list)
    ended: dict[str, list[tuple[int, bool]]] = field(default_factory=dict)
    cell_types: dict[str, str] = field(default_factory=dict)
    last_outputs_finite: bool = True
    nonfinite_gradients: bool = False
    gradient_norm: float = 0.0

    def inputs_finite(self, path: str, order: int) -> bool | None:
        """Whether the inputs were finite in the call of a cell that a row lies in; None where the call did not end."""
        return next((finite for end, finite in self.ended.get(path, ()) if end >= order), None)


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
        self._calls: dict[str, int] = {}
        self._ended: list[_Ended] = []
        self._backward: list[_Arrived] = []
        self._outputs_with_gradient = False
        self._judged: _Judgement | None = None
        self.gradients_seen: set[str] = set()

    @_one_at_a_time
    def begin(self) -> None:
        """Forgets the last step."""
        self._background.settle()
        self._table.clear()
        self._sites.clear()
        self._dtypes.clear()
        self._calls.clear()
        self._ended.clear()
        self._backward.clear()
        self._outputs_with_gradient = False
        self._judged = None
        self.gradients_seen.clear()

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
        return bool(self.gradients_seen or self._outputs_with_gradient)

    @property
    def gradient_norm(self) -> float:
        """Global L2 norm of the gradients as they arrived; NaN or inf where they are not finite."""
        return self._judge().gradient_norm

    @property
    def nonfinite_gradients(self) -> bool:
        """Some gradient of a parameter is not finite, before or after the reduction over ranks."""
        return self._judge().nonfinite_gradients

    def calls(self, path: str) -> int:
        """How many calls of a cell have ended in this step."""
        return self._calls.get(path, 0)

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
        self._ended.append(_Ended(path, cell_type, call, first, first + len(inputs), len(self._sites)))
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
        self._outputs_with_gradient = True
        self._backward.append(_Arrived("output_gradient", path, path, cell_type, call, slot, row))
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
        self._backward.append(_Arrived(kind, name, owner, "", 0, "", row))
        if not reduced:
            self.gradients_seen.add(name)
        self._judged = None

    @_one_at_a_time
    def parameter(self, name: str, seen: Seen) -> None:
        """Takes the values of a parameter or buffer as they are before the update."""
        self._add("parameter", name, "", 0, "", seen)

    @_one_at_a_time
    def update(self, name: str, stats: UpdateStats, dtype: str, shape: tuple[int, ...]) -> None:
        """Takes what the step did to a parameter.

        A row of kind ``update`` reads: ``count`` elements, ``zeros`` of them unchanged, ``flushed`` changed by less
        than half an ulp of the compute format, ``nan`` not finite before or after, ``rms`` of the change. Extremes
        and mean are not taken (NaN).
        """
        row = self._add("update", name, "", 0, "", Seen(_NOTHING, dtype, shape))
        target = self.table.rows
        target["count"][row] = stats.count
        target["nan"][row] = stats.nonfinite
        target["zeros"][row] = stats.count - stats.nonfinite - stats.changed
        target["flushed"][row] = stats.below_half_ulp
        finite = stats.count - stats.nonfinite
        target["rms"][row] = stats.update_norm / np.sqrt(finite) if finite else np.nan

    @_one_at_a_time
    def births(self, loss: float | None) -> tuple[Birth | None, Birth | None]:
        """Where the first non-finite value of the forward and of the backward pass was born.

        A tensor with only -inf in it is what an attention mask is by design. It counts only where something worse came
        of it: a NaN or +inf in a cell that was handed it, or a loss that is not finite while the last cell's output
        isn't either.

        Args:
            loss: The step's loss, None if unknown.
        """
        judged = self._judge()
        if not judged.bad_forward and not judged.bad_backward:
            return None, None
        return self._forward_birth(judged, loss), self._backward_birth(judged)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _add(self, kind: Kind, path: str, cell_type: str, call: int, slot: str, seen: Seen) -> int:
        array = seen.array
        if array is None:
            row = self._table.reserve()
        elif seen.lasting and array.size >= WORTHWHILE:
            row = self._table.reserve()
            self._background.submit(array, row, bfloat16_bits=seen.dtype == "bfloat16")
        else:
            row = self._table.add(array, bfloat16_bits=seen.dtype == "bfloat16")
        key = (kind, path, call, slot)
        site = self._ids.get(key)
        if site is None:
            described = Site(kind, path, call, slot, cell_type)
            site = self._ids[key] = self._register(described, seen.shape)
            self._site_of[site] = described
        self._sites.append(site)
        self._dtypes.append(DTYPE_CODES.get(seen.dtype, 0))
        return row

    @_one_at_a_time
    def _judge(self) -> _Judgement:
        """Goes through the step's rows, once they are measured."""
        if self._judged is None:
            rows = self.table.rows
            bad = (rows["nan"] + rows["pos_inf"] + rows["neg_inf"]) > 0
            self._judged = _Judgement()
            self._judge_forward(self._judged, bad)
            self._judge_backward(self._judged, bad, rows)
        return self._judged

    def _judge_forward(self, judged: _Judgement, bad: NDArray[np.bool_]) -> None:
        if not bad.any():
            return
        for ended in self._ended:
            inputs_finite = not bad[ended.first : ended.middle].any()
            for row in range(ended.first, ended.end):
                if bad[row]:
                    slot = self._site_of[self._sites[row]].slot
                    made = row >= ended.middle
                    # An input is noted when all of the call's inputs are there, an output as it comes.
                    order = row + 1 if made else ended.middle
                    kind: Kind = "output" if made else "input"
                    known = inputs_finite if made else False
                    judged.bad_forward.append(
                        _Bad(order, kind, ended.path, ended.cell_type, ended.call, slot, row, known)
                    )
            judged.ended.setdefault(ended.path, []).append((ended.end, inputs_finite))
            judged.cell_types[ended.path] = ended.cell_type
            judged.last_outputs_finite = not bad[ended.middle : ended.end].any()

    def _judge_backward(self, judged: _Judgement, bad: NDArray[np.bool_], rows: NDArray[Any]) -> None:
        rms, counts = rows["rms"].tolist(), rows["count"].tolist()
        total = 0.0
        # What went into a cell's backward pass are the gradients that arrived before; the first of all comes from the
        # loss scale itself.
        some_before = False
        output_finite: dict[str, bool] = {}
        for arrived in self._backward:
            row = arrived.row
            is_bad = row is not None and bool(bad[row])
            if arrived.kind == "output_gradient":
                before = not judged.bad_backward if some_before else None
                output_finite[arrived.path] = output_finite.get(arrived.path, True) and not is_bad
            else:
                assert row is not None, "every gradient of a parameter has a row"
                judged.nonfinite_gradients |= is_bad
                if arrived.kind == "reduced_gradient":
                    continue
                before = output_finite.get(arrived.owner)
                if is_bad:
                    total += np.nan if rows["nan"][row] else np.inf
                elif counts[row]:
                    total += rms[row] * rms[row] * counts[row]
            some_before = True
            if is_bad:
                assert row is not None, "what is bad has a row"
                what = (arrived.kind, arrived.path, arrived.cell_type, arrived.call, arrived.slot)
                judged.bad_backward.append(_Bad(row + 1, *what, row, before))
        judged.gradient_norm = float(np.sqrt(total))

    def _forward_birth(self, judged: _Judgement, loss: float | None) -> Birth | None:
        first = self._first_bad(judged, loss)
        if first is None:
            return None
        if first.kind == "output":
            return self._birth("forward", first, first.path, first.cell_type, first.path in self._has_children)
        # A non-finite input that no watched cell put out: the nearest cell around it with finite inputs made it.
        path = first.path
        while path in self._parents:
            path = self._parents[path]
            known = judged.inputs_finite(path, first.order)
            if known is not False:
                birth = self._birth("forward", first, path, judged.cell_types.get(path, ""), True)
                return replace(birth, inputs_finite=known)
        return self._birth("forward", first, path, judged.cell_types.get(path, first.cell_type), False)

    def _first_bad(self, judged: _Judgement, loss: float | None) -> _Bad | None:
        rows = self.table.rows
        masks = [bad for bad in judged.bad_forward if bad.mask_like(rows)]
        worse = next((bad for bad in judged.bad_forward if not bad.mask_like(rows)), None)
        if worse is None:
            if not masks or loss is None or np.isfinite(loss) or judged.last_outputs_finite:
                return None
            return next((bad for bad in masks if bad.made()), masks[0])
        if worse.made():
            return worse
        # It may come of a -inf that a cell made of finite values, as log(0) is; a mask elsewhere has no part in it.
        parent = self._parents.get(worse.path)
        for bad in reversed(masks):
            near = worse.kind == "output" or self._parents.get(bad.path) == parent
            if bad.order < worse.order and bad.made() and near:
                return bad
        return worse

    def _backward_birth(self, judged: _Judgement) -> Birth | None:
        if not judged.bad_backward:
            return None
        first = judged.bad_backward[0]
        birth = self._birth("backward", first, first.path, first.cell_type, False)
        # After a non-finite forward pass the gradients are its victims, whatever arrived first.
        rows = self.table.rows
        alarming = any(not bad.mask_like(rows) for bad in judged.bad_forward)
        return replace(birth, inputs_finite=False) if alarming else birth

    def _birth(self, phase: Any, bad: _Bad, path: str, cell_type: str, own_code: bool) -> Birth:
        stats = self.table.rows[bad.row]
        return Birth(
            phase=phase,
            path=path,
            cell_type=cell_type,
            kind=bad.kind,
            call=bad.call,
            slot=bad.slot,
            inputs_finite=bad.inputs_finite,
            own_code=own_code,
            nan=int(stats["nan"]),
            pos_inf=int(stats["pos_inf"]),
            neg_inf=int(stats["neg_inf"]),
            count=int(stats["count"]),
            dtype=DTYPES[self._dtypes[bad.row]],
            seen_at=bad.path if bad.path != path else "",
        )
