"""Where the first non-finite value of a step was born, told from its rows when the step has ended."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ampdebug._records import Birth, Kind


class Ended(NamedTuple):
    """A call that has ended: rows ``first:middle`` are its inputs, ``middle:end`` its outputs."""

    path: str
    cell_type: str
    call: int
    first: int
    middle: int
    end: int


class Arrived(NamedTuple):
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


class StepJudgement:
    """What the rows of a step amount to.

    A tensor with only -inf in it is what an attention mask is by design. It counts only where something worse came
    of it: a NaN or +inf in a cell that was handed it, or a loss that is not finite while the last cell's output
    isn't either.

    Args:
        rows: The statistics, STATS_DTYPE [n].
        ended: The calls, in the order in which they ended.
        backward: The gradients, in the order in which they arrived.
        slot_and_dtype: Slot and name of the dtype of a row.
        parents: ``{cell path: path of the nearest watched cell around it}``.
        has_children: Paths of the cells whose children are watched too.

    Attributes:
        gradient_norm: Global L2 norm of the gradients as they arrived; NaN or inf where they are not finite.
        nonfinite_gradients: Some gradient of a parameter is not finite, before or after the reduction over ranks.
    """

    def __init__(
        self,
        rows: NDArray[Any],
        ended: Sequence[Ended],
        backward: Sequence[Arrived],
        slot_and_dtype: Callable[[int], tuple[str, str]],
        parents: Mapping[str, str],
        has_children: Collection[str],
    ) -> None:
        self.gradient_norm = 0.0
        self.nonfinite_gradients = False
        self._rows, self._slot_and_dtype = rows, slot_and_dtype
        self._parents, self._has_children = parents, has_children
        self._forward: list[_Bad] = []
        self._backward: list[_Bad] = []
        # {path: [(rows there were when a call ended, its inputs were finite), ...]}; empty where all is finite
        self._ended: dict[str, list[tuple[int, bool]]] = {}
        self._cell_types: dict[str, str] = {}
        self._last_outputs_finite = True
        bad = (rows["nan"] + rows["pos_inf"] + rows["neg_inf"]) > 0
        if bad.any():
            self._judge_forward(ended, bad)
        self._judge_backward(backward, bad)

    def births(self, loss: float | None) -> tuple[Birth | None, Birth | None]:
        """Of the forward and of the backward pass.

        Args:
            loss: The step's loss, None if unknown.
        """
        return self._forward_birth(loss), self._backward_birth()

    def _judge_forward(self, calls: Sequence[Ended], bad: NDArray[np.bool_]) -> None:
        for ended in calls:
            inputs_finite = not bad[ended.first : ended.middle].any()
            for row in range(ended.first, ended.end):
                if bad[row]:
                    slot, _ = self._slot_and_dtype(row)
                    made = row >= ended.middle
                    # An input is noted when all of the call's inputs are there, an output as it comes.
                    order = row + 1 if made else ended.middle
                    kind: Kind = "output" if made else "input"
                    known = inputs_finite if made else False
                    self._forward.append(_Bad(order, kind, ended.path, ended.cell_type, ended.call, slot, row, known))
            self._ended.setdefault(ended.path, []).append((ended.end, inputs_finite))
            self._cell_types[ended.path] = ended.cell_type
            self._last_outputs_finite = not bad[ended.middle : ended.end].any()

    def _judge_backward(self, gradients: Sequence[Arrived], bad: NDArray[np.bool_]) -> None:
        rows = self._rows
        rms, counts = rows["rms"].tolist(), rows["count"].tolist()
        total = 0.0
        # What went into a cell's backward pass are the gradients that arrived before; the first of all comes from the
        # loss scale itself.
        some_before = False
        output_finite: dict[str, bool] = {}
        for arrived in gradients:
            row = arrived.row
            is_bad = row is not None and bool(bad[row])
            if arrived.kind == "output_gradient":
                before = not self._backward if some_before else None
                output_finite[arrived.path] = output_finite.get(arrived.path, True) and not is_bad
            else:
                assert row is not None, "every gradient of a parameter has a row"
                self.nonfinite_gradients |= is_bad
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
                self._backward.append(_Bad(row + 1, *what, row, before))
        self.gradient_norm = float(np.sqrt(total))

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
        rows = self._rows
        masks = [bad for bad in self._forward if bad.mask_like(rows)]
        worse = next((bad for bad in self._forward if not bad.mask_like(rows)), None)
        if worse is None:
            if not masks or loss is None or np.isfinite(loss) or self._last_outputs_finite:
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
        if not self._backward:
            return None
        first = self._backward[0]
        birth = self._birth("backward", first, first.path, first.cell_type, False)
        # After a non-finite forward pass the gradients are its victims, whatever arrived first.
        rows = self._rows
        alarming = any(not bad.mask_like(rows) for bad in self._forward)
        return replace(birth, inputs_finite=False) if alarming else birth

    def _birth(
        self, phase: Literal["forward", "backward"], bad: _Bad, path: str, cell_type: str, own_code: bool
    ) -> Birth:
        stats = self._rows[bad.row]
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
            dtype=self._slot_and_dtype(bad.row)[1],
            seen_at=bad.path if bad.path != path else "",
        )
