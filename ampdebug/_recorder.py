"""One step's observations, gathered in execution order, and where its first non-finite value was born.

This is the measuring side without the framework: the hooks hand over arrays, this keeps the rows. It holds no more than
one step; :meth:`StepRecorder.begin` starts the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ampdebug._records import DTYPE_CODES, DTYPES, Birth, Kind, Site
from ampdebug._stats import StatsTable, UpdateStats, is_finite

_NOTHING = np.zeros(0, np.float32)


class Seen(NamedTuple):
    """A tensor as the recorder takes it.

    Attributes:
        array: The values, any shape; uint16 bits where ``dtype`` is ``"bfloat16"``; None for a tensor whose values are
            not looked at (integers, bools, complex).
        dtype: Name of the dtype in lower case (``"float16"``).
        shape: Its shape.
    """

    array: NDArray[Any] | None
    dtype: str
    shape: tuple[int, ...]


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
        self._register = register
        self._parents = dict(parents or {})
        self._has_children = frozenset(has_children)
        self._ids: dict[tuple[Kind, str, int, str], int] = {}
        self._site_of: dict[int, Site] = {}
        self.table = StatsTable()
        self._sites: list[int] = []
        self._dtypes: list[int] = []
        self._calls: dict[str, int] = {}
        self._bad_forward: list[_Bad] = []
        self._bad_backward: list[_Bad] = []
        self._cell_types: dict[str, str] = {}
        # {path: [(rows there were when the call ended, its inputs were finite), ...]}
        self._ended: dict[str, list[tuple[int, bool]]] = {}
        self._last_outputs_finite = True
        self._output_gradient_finite: dict[str, bool] = {}
        self._gradient_squares = 0.0
        self.gradients_seen: set[str] = set()
        self.nonfinite_gradients = False

    def begin(self) -> None:
        """Forgets the last step."""
        self.table.clear()
        self._sites.clear()
        self._dtypes.clear()
        self._calls.clear()
        self._bad_forward.clear()
        self._bad_backward.clear()
        self._ended.clear()
        self._last_outputs_finite = True
        self._output_gradient_finite.clear()
        self.gradients_seen.clear()
        self._gradient_squares = 0.0
        self.nonfinite_gradients = False

    def __len__(self) -> int:
        return len(self._sites)

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
        return bool(self.gradients_seen or self._output_gradient_finite)

    @property
    def gradient_norm(self) -> float:
        """Global L2 norm of the gradients as they arrived; NaN or inf where they are not finite."""
        return float(np.sqrt(self._gradient_squares))

    def calls(self, path: str) -> int:
        """How many calls of a cell have ended in this step."""
        return self._calls.get(path, 0)

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
        self._cell_types[path] = cell_type
        rows = [self._add("input", path, cell_type, call, slot, seen) for slot, seen in inputs]
        finite = True
        for (slot, _), row in zip(inputs, rows, strict=True):
            if self._nonfinite(row):
                finite = False
                self._note(self._bad_forward, "input", path, cell_type, call, slot, row, False)
        self._last_outputs_finite = True
        for slot, seen in outputs:
            row = self._add("output", path, cell_type, call, slot, seen)
            if self._nonfinite(row):
                self._last_outputs_finite = False
                self._note(self._bad_forward, "output", path, cell_type, call, slot, row, finite)
        self._ended.setdefault(path, []).append((len(self._sites), finite))

    def output_gradient(self, path: str, cell_type: str, call: int, slot: str, seen: Seen) -> None:
        """Takes the gradient with respect to a cell's output, as it arrives in the backward pass.

        It is only looked at for NaN and infinities; a row is kept of a tensor that has some.
        """
        if seen.array is None:
            return
        # What went into it are the gradients that arrived before; the first of all comes from the loss scale itself.
        before = not self._bad_backward if self._output_gradient_finite or self.gradients_seen else None
        bad = not is_finite(seen.array, bfloat16_bits=seen.dtype == "bfloat16")
        self._output_gradient_finite[path] = self._output_gradient_finite.get(path, True) and not bad
        if bad:
            row = self._add("output_gradient", path, cell_type, call, slot, seen)
            self._note(self._bad_backward, "output_gradient", path, cell_type, call, slot, row, before)

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
        bad = self._nonfinite(row)
        if bad:
            self.nonfinite_gradients = True
        if reduced:
            return
        self.gradients_seen.add(name)
        stats = self.table.rows[row]
        if bad:
            self._gradient_squares = float("nan") if stats["nan"] else self._gradient_squares + float("inf")
            self._note(self._bad_backward, kind, name, "", 0, "", row, self._output_gradient_finite.get(owner))
        elif stats["count"]:
            self._gradient_squares += float(stats["rms"]) ** 2 * int(stats["count"])

    def parameter(self, name: str, seen: Seen) -> None:
        """Takes the values of a parameter or buffer as they are before the update."""
        self._add("parameter", name, "", 0, "", seen)

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

    def births(self, loss: float | None) -> tuple[Birth | None, Birth | None]:
        """Where the first non-finite value of the forward and of the backward pass was born.

        A tensor with only -inf in it is what an attention mask is by design. It counts only where something worse came
        of it: a NaN or +inf in a cell that was handed it, or a loss that is not finite while the last cell's output
        isn't either.

        Args:
            loss: The step's loss, None if unknown.
        """
        return self._forward_birth(loss), self._backward_birth()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _add(self, kind: Kind, path: str, cell_type: str, call: int, slot: str, seen: Seen) -> int:
        array = _NOTHING if seen.array is None else seen.array
        row = self.table.add(array, bfloat16_bits=seen.array is not None and seen.dtype == "bfloat16")
        key = (kind, path, call, slot)
        site = self._ids.get(key)
        if site is None:
            described = Site(kind, path, call, slot, cell_type)
            site = self._ids[key] = self._register(described, seen.shape)
            self._site_of[site] = described
        self._sites.append(site)
        self._dtypes.append(DTYPE_CODES.get(seen.dtype, 0))
        return row

    def _nonfinite(self, row: int) -> bool:
        stats = self.table.rows[row]
        return bool(stats["nan"] or stats["pos_inf"] or stats["neg_inf"])

    def _note(
        self,
        bad: list[_Bad],
        kind: Kind,
        path: str,
        cell_type: str,
        call: int,
        slot: str,
        row: int,
        inputs_finite: bool | None,
    ) -> None:
        bad.append(_Bad(len(self._sites), kind, path, cell_type, call, slot, row, inputs_finite))

    def _forward_birth(self, loss: float | None) -> Birth | None:
        first = self._first_bad(loss)
        if first is None:
            return None
        if first.kind == "output":
            return self._birth("forward", first, first.path, first.cell_type, first.path in self._has_children)
        # A non-finite input that no watched cell put out: the nearest cell around it with finite inputs made it.
        path = first.path
        while path in self._parents:
            path = self._parents[path]
            known = self._inputs_finite(path, first.order)
            if known is not False:
                birth = self._birth("forward", first, path, self._cell_types.get(path, ""), True)
                return replace(birth, inputs_finite=known)
        return self._birth("forward", first, path, self._cell_types.get(path, first.cell_type), False)

    def _first_bad(self, loss: float | None) -> _Bad | None:
        rows = self.table.rows
        masks = [bad for bad in self._bad_forward if bad.mask_like(rows)]
        worse = next((bad for bad in self._bad_forward if not bad.mask_like(rows)), None)
        if worse is None:
            if loss is None or np.isfinite(loss) or self._last_outputs_finite:
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

    def _inputs_finite(self, path: str, order: int) -> bool | None:
        """Whether the inputs were finite in the call of a cell that a row lies in; None where the call did not end."""
        return next((finite for end, finite in self._ended.get(path, ()) if end >= order), None)

    def _backward_birth(self) -> Birth | None:
        if not self._bad_backward:
            return None
        first = self._bad_backward[0]
        birth = self._birth("backward", first, first.path, first.cell_type, False)
        # After a non-finite forward pass the gradients are its victims, whatever arrived first.
        return replace(birth, inputs_finite=False) if self._bad_forward_alarming() else birth

    def _bad_forward_alarming(self) -> bool:
        rows = self.table.rows
        return any(not bad.mask_like(rows) for bad in self._bad_forward)

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
