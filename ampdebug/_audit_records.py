"""What an audited forward (and backward) pass saw, as plain values; the judge reads them, the hooks make them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ampdebug.rules._operator_records import Operator, Step

Mode = Literal["pynative", "graph"]
By = Literal["", "level", "level list", "to_float"]


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked of one operator call before it ran.

    Attributes:
        in_force: The dtype that the innermost cell with a precision flag asks for; None where no cell around has one.
        by: Who set that flag: the level, its list of cells that stay in float32, or the user's ``to_float``.
        at: Path of the cell that bears it.
        inserted: The level itself put the call there: O1's casts, the casts of the wrappers of O2 and O3.
        library: The innermost cell is one of MindSpore's own classes, so its calls are not the user's.
        automatic: Level "auto" decides by the operator's name here.
    """

    in_force: str | None = None
    by: By = ""
    at: str = ""
    inserted: bool = False
    library: bool = False
    automatic: bool = False


NOTHING_ASKED = Request()


@dataclass(frozen=True, slots=True)
class AuditedCell:
    """One cell of the network.

    Attributes:
        path: Its path.
        cell_type: Its class.
        asked: The dtype its flags ask for.
        asked_by: Who set them.
        promised: The level's rule converts cells of this class, a subclass included.
        listed: The level's list keeps it in float32.
        parameters: ``{name: dtype}`` of its own parameters.
    """

    path: str
    cell_type: str
    asked: str | None = None
    asked_by: By = ""
    promised: bool = False
    listed: bool = False
    parameters: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class AuditedStep:
    """All of it.

    Attributes:
        name: Class of the network.
        level: The AMP level, as ``"O2"``.
        mode: How it ran: as Python, or compiled. A compiled graph tells dtypes only: its operators have no operands.
        step: The operators with their operands, and the cells.
        requests: One for each operator.
        cells: In the network's order.
        gradients: ``{operator index: dtype}`` in which the gradient of its first result arrived.
        backward: A backward pass was made.
        lints: ``(cell path, sentence)`` of what the level cannot convert by how the source is written.
    """

    name: str
    level: str
    mode: Mode
    step: Step
    requests: tuple[Request, ...]
    cells: tuple[AuditedCell, ...]
    gradients: tuple[tuple[int, str], ...] = ()
    backward: bool = False
    lints: tuple[tuple[str, str], ...] = ()

    def request(self, operator: Operator) -> Request:
        """What was asked of it."""
        return self.requests[operator.index]
