"""From an audited step to rows: an operator with its dtype, who asked for it and what casts cost; a cell summed up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ampdebug._audit_records import AuditedCell, AuditedStep
from ampdebug._formats import format_of, is_float
from ampdebug._sites import is_cast, is_movement
from ampdebug.rules._operator_records import LOW, Operand, Operator


@dataclass(frozen=True, slots=True)
class ImplicitCast:
    """A cast that MindSpore's C++ side made on an operand; no line of Python shows it.

    Attributes:
        operand: Which one, from 0.
        source: Name of the parameter, input or constant; ``""`` for the result of another operator.
        before, after: Dtypes.
        elements: How many.
    """

    operand: int
    source: str
    before: str
    after: str
    elements: int

    @property
    def bytes(self) -> int:
        """Read and written."""
        return self.elements * (itemsize(self.before) + itemsize(self.after))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "operand": self.operand,
            "source": self.source,
            "from": self.before,
            "to": self.after,
            "elements": self.elements,
            "bytes": self.bytes,
        }


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """One operator call.

    Attributes:
        index: In order of execution.
        path: Cell path; ``"(loss)"`` outside the network.
        cell_type: Class of that cell.
        operator: Its name as called.
        kind: Its name without how it was called.
        line: ``"net.py:33"``.
        text: That line.
        inputs: Dtypes of the floating-point tensors as handed in.
        dtype: What it ran in; ``""`` for no floats.
        asked_by: Who asked for that: ``"level"``, ``"level list"`` (also a list of primitives), ``"to_float"``,
            ``"explicit cast"``, ``"cast in LayerNorm"``, ``"level cast"``, ``"promoted by a float32 input"``,
            ``"inputs"`` (it follows what it was given), ``"not converted"`` (16 bits were asked for), ``"made here"``.
        gradient: The dtype in which the gradient of its result arrived; ``""`` where none did.
        casts: Casts of operands on the C++ side.
        elements: In its first result; 0 where only running would tell.
        moved: Bytes that an explicit cast reads and writes.
    """

    index: int
    path: str
    cell_type: str
    operator: str
    kind: str
    line: str
    text: str
    inputs: tuple[str, ...]
    dtype: str
    asked_by: str
    gradient: str
    casts: tuple[ImplicitCast, ...]
    elements: int
    moved: int

    @property
    def cast_bytes(self) -> int:
        """Bytes that casts read and write here, implicit and explicit."""
        return self.moved + sum(cast.bytes for cast in self.casts)

    @property
    def computes(self) -> bool:
        """It is neither a cast nor a movement, and has a floating-point result."""
        return bool(self.dtype) and not is_cast(self.operator) and not hands_on(self.operator, self.kind)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "index": self.index,
            "cell": self.path,
            "cell_type": self.cell_type,
            "operator": self.operator,
            "line": self.line,
            "text": self.text,
            "inputs": list(self.inputs),
            "dtype": self.dtype,
            "asked_by": self.asked_by,
            "gradient": self.gradient,
            "implicit_casts": [cast.to_dict() for cast in self.casts],
            "cast_bytes": self.cast_bytes,
        }


@dataclass(frozen=True, slots=True)
class CellRow:
    """One cell with what its own operators ran in.

    Attributes:
        path: Its path.
        cell_type: Its class.
        asked: The dtype its flags ask for, ``""`` for none.
        asked_by: Who set them.
        ran: ``{dtype: number of operators}`` of those that compute.
        reasons: Who asked for these dtypes, by number of operators, most first.
        gradients: Dtypes in which gradients of its operators' results arrived.
        parameters: ``{dtype: number of own parameters}``.
        cast_bytes: Bytes that casts in it read and write in one forward pass.
    """

    path: str
    cell_type: str
    asked: str
    asked_by: str
    ran: tuple[tuple[str, int], ...]
    reasons: tuple[str, ...]
    gradients: tuple[str, ...]
    parameters: tuple[tuple[str, int], ...]
    cast_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "cell": self.path,
            "cell_type": self.cell_type,
            "asked": self.asked,
            "asked_by": self.asked_by,
            "ran": dict(self.ran),
            "reasons": list(self.reasons),
            "gradients": list(self.gradients),
            "parameters": dict(self.parameters),
            "cast_bytes": self.cast_bytes,
        }


def itemsize(dtype: str) -> int:
    """Bytes an element."""
    return format_of(dtype).bits // 8


def in_loss(path: str) -> bool:
    """It ran in the loss function, or in a cell that this calls, and not in the network."""
    return path == "(loss)" or path.startswith("(loss).")


def elements_of(shape: tuple[int, ...]) -> int:
    """How many elements a shape has."""
    return math.prod(shape)


def hands_on(operator: str, kind: str) -> bool:
    """It moves values and neither computes nor casts. (``Select`` names a view and ``where``; here it is ``where``.)"""
    return is_movement(operator) and kind != "where"


def floats(operator: Operator) -> Iterator[tuple[int, Operand]]:
    """The floating-point tensors among the operands whose dtype the operator has to settle on.

    The kernel of batch normalisation takes parameters and statistics in float32 beside an input in float16.
    """
    for place, operand in enumerate(operator.operands):
        if not operand.is_number and is_float(operand.dtype):
            yield place, operand
            if operator.kind == "batchnorm":
                return


def operator_rows(seen: AuditedStep) -> tuple[OperatorRow, ...]:
    """One row for each operator call, in order."""
    gradients = dict(seen.gradients)
    return tuple(_row(operator, seen, gradients) for operator in seen.step.operators)


def _row(operator: Operator, seen: AuditedStep, gradients: dict[int, str]) -> OperatorRow:
    given = tuple(operand.dtype for _, operand in floats(operator))
    dtype = _dtype(operator)
    first = next((r for r in operator.results if r.dtype == dtype), None)
    moved = 0
    if is_cast(operator.name) and given and dtype and given[0] != dtype and first is not None:
        moved = elements_of(first.shape) * (itemsize(given[0]) + itemsize(dtype))
    return OperatorRow(
        operator.index,
        operator.path,
        operator.cell_type,
        operator.name,
        operator.kind,
        operator.line,
        operator.text,
        given,
        dtype,
        asked_by(operator, seen),
        gradients.get(operator.index, ""),
        tuple(implicit_casts(operator)),
        max(elements_of(first.shape), 0) if first is not None else 0,
        moved,
    )


def _dtype(operator: Operator) -> str:
    """As ``Operator.dtype``, without needing the values."""
    return next((r.dtype for r in operator.results if is_float(r.dtype)), "")


def implicit_casts(operator: Operator) -> Iterator[ImplicitCast]:
    """The operands that had another dtype than the operator ran in."""
    dtype = _dtype(operator)
    if not dtype or is_cast(operator.name) or hands_on(operator.name, operator.kind):
        return
    for place, operand in floats(operator):
        if operand.dtype != dtype:
            yield ImplicitCast(place, operand.source, operand.dtype, dtype, elements_of(operand.shape))


def asked_by(operator: Operator, seen: AuditedStep) -> str:
    """Who asked for the dtype of an operator; see :class:`OperatorRow`."""
    request = seen.request(operator)
    if seen.mode == "graph":  # no operands there: the flag in force is all there is to go by
        return request.by if request.in_force == _dtype(operator) else "cast" if is_cast(operator.name) else ""
    if is_cast(operator.name):
        if request.inserted:
            return "level cast"
        return f"cast in {operator.cell_type}" if request.library else "explicit cast"
    dtype = _dtype(operator)
    if not dtype:
        return ""
    if hands_on(operator.name, operator.kind):
        return "inputs"
    tensors = [operand for _, operand in floats(operator)]
    given = {operand.dtype for operand in tensors}
    if not tensors:
        return "made here"
    if request.in_force == dtype:
        return request.by
    mixed = len(given) > 1
    if request.automatic and (dtype not in given or (mixed and dtype in LOW)):
        return "level list"
    if dtype in LOW and any(_inserted(operand, seen) for operand in tensors):
        return "level list"  # O1 casts the operands of what its list names
    if mixed and dtype == "float32":
        return "promoted by a float32 input"
    if request.in_force in LOW and dtype not in LOW:
        return "not converted"
    return "inputs" if given == {dtype} else "implicit cast"


def _inserted(operand: Operand, seen: AuditedStep) -> bool:
    if operand.producer is None:
        return False
    made = seen.step.operators[operand.producer]
    return is_cast(made.name) and seen.request(made).inserted


def cell_rows(cells: Iterable[AuditedCell], operators: Iterable[OperatorRow]) -> tuple[CellRow, ...]:
    """One row for each cell that has operators or parameters of its own, in the network's order; then the rest."""
    by_path: dict[str, list[OperatorRow]] = {}
    for row in operators:
        by_path.setdefault(row.path, []).append(row)
    known = {cell.path: cell for cell in cells}
    for path, rows in by_path.items():  # cells in a plain Python list, and the loss
        known.setdefault(path, AuditedCell(path, rows[0].cell_type))
    return tuple(
        _cell_row(cell, by_path.get(path, [])) for path, cell in known.items() if path in by_path or cell.parameters
    )


def _cell_row(cell: AuditedCell, rows: list[OperatorRow]) -> CellRow:
    computing = [row for row in rows if row.computes]
    return CellRow(
        cell.path,
        cell.cell_type,
        cell.asked or "",
        cell.asked_by,
        tuple(sorted(Counter(row.dtype for row in computing).items())),
        tuple(reason for reason, _ in Counter(row.asked_by for row in computing).most_common()),
        tuple(sorted({row.gradient for row in rows if row.gradient})),
        tuple(sorted(Counter(dtype for _, dtype in cell.parameters).items())),
        sum(row.cast_bytes for row in rows),
    )
