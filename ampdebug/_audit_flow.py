"""What only shows between operators: casts back and forth, chains that stay in float32, softmax and norms by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ampdebug._audit_records import AuditedStep
from ampdebug._audit_rows import elements_of, floats, hands_on, implicit_casts, in_loss, itemsize
from ampdebug._formats import is_float
from ampdebug._sites import is_cast
from ampdebug.rules._operator_flow import Flow, is_square
from ampdebug.rules._operator_records import LOW, Operand, Operator

_SIZES = ("sum", "mean", "var", "std", "norm")
_ROOTS = ("sqrt", "rsqrt", "pow", "std")


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """A value that is cast to another dtype and back on its way from one operator to the next.

    Attributes:
        producer: Who made it, for a reader: an operator's place, or the name of a parameter or an input.
        consumer: Place of the operator that takes it.
        path: Cell of the consumer.
        dtypes: On the way, in order: ``("float16", "float32", "float16")``.
        bytes: What the casts read and write; a cast that several consumers share is counted with the first.
        widened_at: Source line of the user's own cast to a wider dtype on the way; ``""`` for none.
        undone: The last cast, back to 16 bits, was made on the C++ side.
    """

    producer: str
    consumer: str
    path: str
    dtypes: tuple[str, ...]
    bytes: int
    widened_at: str = ""
    undone: bool = False

    @property
    def loses(self) -> bool:
        """Bits are lost on the way: it was wider before and after than in between."""
        return any(
            itemsize(a) > itemsize(b) < itemsize(c)
            for a, b, c in zip(self.dtypes, self.dtypes[1:], self.dtypes[2:], strict=False)
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "producer": self.producer,
            "consumer": self.consumer,
            "cell": self.path,
            "dtypes": list(self.dtypes),
            "bytes": self.bytes,
            "loses_bits": self.loses,
            "widened_at": self.widened_at,
            "undone": self.undone,
        }


@dataclass(frozen=True, slots=True)
class Leak:
    """A chain of operators that run in float32 because of what its first one was given.

    Attributes:
        place: Of the first operator.
        path: Its cell.
        cell_type: That cell's class.
        operand: The float32 operand: an input, a parameter, a constant, or the operator that made it.
        operators: How many operators follow in float32, the first included.
        cells: Their cells in order.
        heavy: Matrix products and convolutions are among them.
    """

    place: str
    path: str
    cell_type: str
    operand: str
    operators: int
    cells: tuple[str, ...]
    heavy: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "place": self.place,
            "cell": self.path,
            "cell_type": self.cell_type,
            "operand": self.operand,
            "operators": self.operators,
            "cells": list(self.cells),
            "heavy": self.heavy,
        }


def is_matrix_product(kind: str) -> bool:
    """Matrix products and convolutions: what 16 bits are for."""
    return kind in ("matmul", "dense") or kind.startswith("conv")


def round_trips(seen: AuditedStep, flow: Flow) -> tuple[RoundTrip, ...]:
    """All of them, those that move most bytes first."""
    found = []
    counted: set[int] = set()
    for operator in flow.step.operators:
        if operator.phase == "update" or is_cast(operator.name) or hands_on(operator.name, operator.kind):
            continue
        implicit = {cast.operand: cast for cast in implicit_casts(operator)}
        for place, operand in floats(operator):
            dtypes = [operand.dtype]
            moved = 0
            if place in implicit:
                dtypes.append(implicit[place].after)
                moved += implicit[place].bytes
            origin, explicit = _way_back(flow, operand, dtypes)
            if not any(a == c for a, c in zip(dtypes, dtypes[2:], strict=False)):
                continue
            for cast, size in explicit:
                if cast.index not in counted:
                    counted.add(cast.index)
                    moved += size
            own = [cast.line for cast, _ in explicit if cast.dtype not in LOW and _is_users(seen, cast)]
            undone = place in implicit and implicit[place].after in LOW
            found.append(
                RoundTrip(origin, operator.place, operator.path, tuple(dtypes), moved, own[0] if own else "", undone)
            )
    return tuple(sorted(found, key=lambda trip: -trip.bytes))


def _is_users(seen: AuditedStep, cast: Operator) -> bool:
    request = seen.request(cast)
    return not request.inserted and not request.library


def _way_back(flow: Flow, operand: Operand, dtypes: list[str]) -> tuple[str, list[tuple[Operator, int]]]:
    """Follows casts and movements back to who made the value; puts earlier dtypes in front."""
    explicit: list[tuple[Operator, int]] = []
    while True:
        made = flow.producer(operand)
        if made is None:
            return operand.source or "a constant", explicit
        if not (is_cast(made.name) or hands_on(made.name, made.kind)) or not made.operands:
            return made.place, explicit
        before = made.operands[0]
        if not is_float(before.dtype):
            return made.place, explicit
        if before.dtype != dtypes[0]:
            size = elements_of(before.shape) * (itemsize(before.dtype) + itemsize(dtypes[0]))
            explicit.append((made, size))
            dtypes.insert(0, before.dtype)
        operand = before


def leaks(seen: AuditedStep, flow: Flow) -> tuple[Leak, ...]:
    """Every chain, in order of execution; those who asked for float32 have none."""
    found = []
    covered: set[int] = set()

    def wide(operator: Operator) -> bool:
        return operator.dtype == "float32" and seen.request(operator).in_force != "float32"

    for operator in flow.step.operators:
        if operator.index in covered or operator.phase != "network" or not wide(operator):
            continue
        if in_loss(operator.path):
            continue
        if is_cast(operator.name) or hands_on(operator.name, operator.kind):
            continue
        request = seen.request(operator)
        operands = [operand for _, operand in floats(operator)]
        cause = next((o for o in operands if o.dtype == "float32"), None)
        met = any(o.dtype in LOW and o.shape for o in operands)
        if cause is None or not (met or request.in_force in LOW):
            continue
        # "auto" promotes by its own rules, and casts down again where it multiplies.
        if request.automatic and (operator.kind == "biasadd" or not cause.source):
            continue
        chain = [operator]
        for later in flow.after(operator, 200, wide):
            if wide(later) and not is_cast(later.name) and later.phase == "network":
                covered.add(later.index)
                if not hands_on(later.name, later.kind):
                    chain.append(later)
        made = flow.producer(cause)
        found.append(
            Leak(
                operator.place,
                operator.path,
                operator.cell_type,
                cause.source or (made.place if made is not None else "a constant"),
                len(chain),
                tuple(dict.fromkeys(o.path for o in chain)),
                any(is_matrix_product(o.kind) for o in chain),
            )
        )
    return tuple(found)


def softmax_by_hand(flow: Flow) -> Iterator[Operator]:
    """The quotients of an exponential by a sum of itself, in 16 bits."""
    for operator in flow.step.operators:
        if operator.kind != "div" or operator.dtype not in LOW or len(operator.operands) < 2:
            continue
        top = _origin(flow, operator.operands[0])
        if top is None or top.kind != "exp":
            continue
        below = flow.producer(operator.operands[1])
        around = [] if below is None else [below, *flow.before(below, 5)]
        sums = [made for made in around if made.kind == "sum"]
        if any(top.index == made.index for total in sums for made in flow.before(total, 3)):
            yield operator


def norm_by_hand(flow: Flow) -> Iterator[Operator]:
    """The roots over a mean of squares or a variance that a tensor is divided by, in 16 bits."""
    told: set[tuple[str, str]] = set()
    for operator in flow.step.operators:
        if operator.kind not in ("div", "mul") or operator.dtype not in LOW or operator.phase == "update":
            continue
        for root in flow.before(operator, 2):
            if root.kind not in _ROOTS or root.dtype not in LOW or (root.path, root.line) in told:
                continue
            if root.kind == "pow" and not any(o.value in (0.5, -0.5) for o in root.operands[1:]):
                continue
            if root.kind == "std" or any(_is_size(flow, made) for made in flow.before(root, 4)):
                told.add((root.path, root.line))
                yield root


def _is_size(flow: Flow, operator: Operator) -> bool:
    if operator.kind == "var":
        return True
    if operator.kind not in _SIZES:
        return False
    return operator.kind == "norm" or any(is_square(made) for made in flow.before(operator, 2))


def loss_by_hand(flow: Flow) -> Iterator[Operator]:
    """The logarithms of a softmax, in 16 bits."""
    for operator in flow.step.operators:
        if operator.kind != "log" or operator.dtype not in LOW or operator.phase == "update":
            continue
        if any(made.kind in ("softmax", "softmaxext", "exp", "sigmoid") for made in flow.before(operator, 4)):
            yield operator


def _origin(flow: Flow, operand: Operand) -> Operator | None:
    """The operator that made a value, past casts and movements."""
    made = flow.producer(operand)
    while made is not None and (is_cast(made.name) or hands_on(made.name, made.kind)) and made.operands:
        made = flow.producer(made.operands[0])
    return made
