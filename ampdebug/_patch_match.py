"""Finding the expression in a source file that an operator site stands for."""

from __future__ import annotations

import re
from dataclasses import dataclass

import libcst as cst

from ampdebug._patch_module import (
    ModuleSource,
    dotted,
    evaluation_order,
    is_container,
    self_attribute,
    self_chain,
)
from ampdebug._sites import is_cast, is_transparent

_OPERATORS = {
    cst.Add: "add", cst.Subtract: "sub", cst.Multiply: "mul", cst.Divide: "truediv", cst.FloorDivide: "floordiv",
    cst.MatrixMultiply: "matmul", cst.Power: "pow", cst.Modulo: "mod",
    cst.AddAssign: "add", cst.SubtractAssign: "sub", cst.MultiplyAssign: "mul", cst.DivideAssign: "truediv",
    cst.MatrixMultiplyAssign: "matmul", cst.PowerAssign: "pow", cst.FloorDivideAssign: "floordiv",
}  # fmt: skip
_ALIASES = {
    "bmm": "matmul", "batchmatmul": "matmul", "realdiv": "truediv", "div": "truediv", "divide": "truediv",
    "divs": "truediv", "multiply": "mul", "muls": "mul", "subtract": "sub", "subs": "sub", "adds": "add",
    "negative": "neg", "power": "pow", "powtensorscalar": "pow", "powscalartensor": "pow", "tensorpow": "pow",
}  # fmt: skip
_DECORATION = re.compile(r"^(?:inplace|reduce)(?=\w)|(?:ext|v[2-4])$")


@dataclass(frozen=True, slots=True)
class Target:
    """An operator site in one file.

    Attributes:
        line: Its line number.
        operator: As in ``OperatorSite``.
        index: As there.
        path: As there.
    """

    line: int
    operator: str
    index: int
    path: str


@dataclass(frozen=True, slots=True)
class Match:
    """What a target is in the source.

    Attributes:
        node: A call, an operator expression, or an augmented assignment.
        cell: The attribute of ``self`` that holds the library's cell it is a call of, with the places inside a
            container after it (``("head", "2")``); empty for an operator.
        inner: The call is that of a ``SequentialCell`` around it, so that only the cell itself can be changed.
    """

    node: cst.CSTNode
    cell: tuple[str, ...] = ()
    inner: bool = False


def plain_name(name: str) -> str:
    """One name for the spellings of an operator: ``ops.exp``, ``Exp``; ``ReduceMean``, ``mean``, ``MeanExt``."""
    name = name.rpartition(".")[2]
    if name.startswith("__"):
        name = name.strip("_")
        if name[:1] in ("r", "i") and name[1:] in _OPERATORS.values():
            name = name[1:]
    name = name.replace("_", "").lower()
    name = _ALIASES.get(name, name)
    shorter = _DECORATION.sub("", name)
    return _ALIASES.get(shorter, shorter or name)


class Matcher:
    """Finds targets in a file.

    Args:
        source: The file.
    """

    def __init__(self, source: ModuleSource) -> None:
        self._source = source

    def find(self, target: Target) -> Match | str:
        """The expression of a target, or why there is none."""
        function = self._source.function_at(target.line)
        if target.operator.endswith("__setitem__"):
            return f"line {target.line} assigns into a tensor, which no cast around an expression reaches"
        if function is None:
            return f"line {target.line} stands in no function"
        owner = self._source.class_of(function)
        attributes = self._source.attributes(owner)
        here: list[cst.CSTNode] = [
            node
            for node in evaluation_order(function.body)
            if isinstance(node, (cst.Call, cst.BinaryOperation, cst.UnaryOperation, cst.AugAssign))
            and target.line in self._lines(node)
        ]
        cell = self._cell_call(here, target.path, attributes)
        if cell is not None:
            return cell
        wanted = plain_name(target.operator)
        same = [node for node in here if self._name(node, attributes) == wanted]
        if same:
            return Match(same[min(target.index, len(same) - 1)])
        # A function of the library may call several operators of other names.
        calls = [node for node in here if isinstance(node, cst.Call) and self._is_composite(node, attributes)]
        if len(calls) == 1:
            return Match(calls[0])
        what = "none" if not calls else f"{len(calls)} calls"
        return f"{what} on line {target.line} could be {target.operator}"

    def _lines(self, node: cst.CSTNode) -> set[int]:
        lines = {self._source.spans[node][0]}
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            lines.add(self._source.spans[node.func.attr][0])  # where Python 3.11 sees a call in a chain
        if isinstance(node, (cst.BinaryOperation, cst.UnaryOperation)):
            lines.add(self._source.spans[node.operator][0])
        if isinstance(node, cst.AugAssign):
            lines.add(self._source.spans[self._source.statement_of(node)][0])
        return lines

    def _name(self, node: cst.CSTNode, attributes: dict[str, cst.BaseExpression]) -> str:
        if isinstance(node, (cst.BinaryOperation, cst.AugAssign)):
            return _OPERATORS.get(type(node.operator), "")
        if isinstance(node, cst.UnaryOperation):
            return "neg" if isinstance(node.operator, cst.Minus) else ""
        assert isinstance(node, cst.Call), "the other kinds were handled"
        return plain_name(called(node, attributes))

    def _cell_call(
        self, nodes: list[cst.CSTNode], path: str, attributes: dict[str, cst.BaseExpression]
    ) -> Match | None:
        """The call of the library's cell at ``path``; in a loop over a container the loop variable's."""
        parts = path.split(".")
        for node in nodes:
            if not isinstance(node, cst.Call):
                continue
            chain = self_chain(node.func)
            if chain and tuple(parts[-len(chain) :]) == chain and self._source.is_cell(attributes.get(chain[0])):
                return Match(node, chain)
        for node in nodes:
            if isinstance(node, cst.Call) and isinstance(node.func, cst.Name):
                for place, part in enumerate(parts):
                    # for layer in self.layers: x = layer(x)
                    if place + 1 < len(parts) and is_container(attributes.get(part)) and parts[place + 1].isdigit():
                        return Match(node, tuple(parts[place:]))
        for node in nodes:
            name = self_attribute(node.func) if isinstance(node, cst.Call) else None
            if name in parts and is_container(attributes.get(name or "")):
                place = parts.index(name or "")
                if place + 1 < len(parts) and parts[place + 1].isdigit():
                    return Match(node, tuple(parts[place:]), inner=True)
        return None

    def _is_composite(self, node: cst.Call, attributes: dict[str, cst.BaseExpression]) -> bool:
        chain = self_chain(node.func)
        if chain and self._source.is_cell(attributes.get(chain[0])):
            return False
        name = called(node, attributes)
        if isinstance(node.func, cst.Name) and name[:1].islower() and name in ("len", "int", "float", "range", "tuple"):
            return False
        return bool(name) and not is_transparent(name) and not is_cast(name)


def called(node: cst.Call, attributes: dict[str, cst.BaseExpression]) -> str:
    """Name of what is called: ``"ops.exp"``, ``"sum"`` for a method, the primitive's class for ``self.pool(x)``."""
    name = self_attribute(node.func)
    if name is not None and name in attributes:
        made = attributes[name]
        if isinstance(made, cst.Call):
            return dotted(made.func) or name
        return dotted(made) or name
    if isinstance(node.func, cst.Attribute):
        return node.func.attr.value
    return dotted(node.func)
