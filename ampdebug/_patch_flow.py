"""How values flow through one function: which assignment a name comes from, and what is a tensor at all."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from ampdebug._patch_match import called
from ampdebug._patch_module import ModuleSource, assigned_names, dotted, evaluation_order, self_attribute
from ampdebug._sites import is_movement, is_transparent

_NUMBERS = frozenset({"len", "int", "float", "bool", "str", "range", "enumerate", "isinstance", "size", "ndim", "dim"})
_FACTS = frozenset({"shape", "dtype", "ndim", "size", "device"})
_PLAIN_TYPES = frozenset({"int", "float", "bool", "str", "tuple", "list", "Sequence"})


class Flow:
    """What one function does with its values, in the order of the text.

    Branches and loops are read as if each assignment were seen by all that follows it. That is right for the straight
    code of most ``construct`` methods; elsewhere a value may stay in float32 for longer than needed, or be rounded
    once too often, which the verification of the patch then shows.

    Args:
        source: The file.
        function: The function.
    """

    def __init__(self, source: ModuleSource, function: cst.FunctionDef) -> None:
        self.source, self.function = source, function
        self.attributes = source.attributes(source.class_of(function))
        self._definitions: dict[str, list[tuple[cst.CSTNode, cst.CSTNode | None]]] = {}
        for node in evaluation_order(function.body):
            names = assigned_names(node)
            for name in names:
                value: cst.CSTNode | None = None
                if isinstance(node, cst.AugAssign):
                    value = node
                elif isinstance(node, (cst.Assign, cst.AnnAssign)) and _is_whole_target(node, name):
                    value = node.value
                self._definitions.setdefault(name.value, []).append((node, value))
        self._parameters = {
            parameter.name.value: parameter
            for parameter in (*function.params.params, *function.params.kwonly_params, *function.params.posonly_params)
        }
        self._numeric: dict[str, bool] = {}

    def names(self) -> set[str]:
        """All names that occur in the function, so that a new one can be different."""
        return {node.value for node in evaluation_order(self.function) if isinstance(node, cst.Name)}

    def definition(self, name: cst.Name) -> tuple[cst.CSTNode, cst.CSTNode | None] | None:
        """The assignment that a use of a name reads, and the value it assigns; None where there is none."""
        place = self.source.order[name]
        before = [d for d in self._definitions.get(name.value, ()) if self.source.order[d[0]] < place]
        return before[-1] if before else None

    def carried(self, name: cst.Name) -> cst.CSTNode | None:
        """The value that a use in a loop reads from the round before; None where there is none."""
        place = self.source.order[name]
        for loop in self.source.ancestors(name):
            if isinstance(loop, (cst.For, cst.While)):
                inside = {id(node) for node in evaluation_order(loop)}
                later = [
                    value
                    for node, value in self._definitions.get(name.value, ())
                    if id(node) in inside and node is not loop and self.source.order[node] > place
                ]
                if later and later[-1] is not None:
                    return later[-1]
        return None

    def uses(self) -> Iterator[cst.Name]:
        """The names that are read."""
        for node in evaluation_order(self.function.body):
            if isinstance(node, cst.Name) and self.is_use(node):
                yield node

    def assigned_between(self, name: str, first: cst.CSTNode, last: cst.CSTNode) -> bool:
        """A name is bound anew by the statement ``first`` or after it, before the statement ``last`` begins."""
        low = min(self.source.order[node] for node in evaluation_order(first))
        high = min(self.source.order[node] for node in evaluation_order(last))
        return any(low <= self.source.order[node] < high for node, _ in self._definitions.get(name, ()))

    def begins_in(self, name: str, loop: cst.CSTNode) -> bool:
        """The first assignment of a name stands in a loop, and it is no parameter."""
        if name in self._parameters:
            return False
        found = self._definitions.get(name, [])
        return bool(found) and any(found[0][0] is node for node in evaluation_order(loop))

    def is_use(self, node: cst.Name) -> bool:
        """The name is read there, not bound, and no attribute or keyword."""
        parent = self.source.parents[node]
        if isinstance(parent, cst.Attribute):
            return parent.attr is not node
        if isinstance(parent, cst.Arg):
            return parent.keyword is not node
        if isinstance(parent, (cst.Param, cst.AssignTarget, cst.FunctionDef, cst.NameItem)):
            return False
        if isinstance(parent, (cst.For, cst.CompFor, cst.AnnAssign, cst.AugAssign)):
            return parent.target is not node
        if isinstance(parent, cst.Element):
            return not any(isinstance(a, cst.AssignTarget) for a in self.source.ancestors(parent))
        return True

    # --- movements ---------------------------------------------------------------------------------------------------

    def moved(self, node: cst.CSTNode) -> list[cst.BaseExpression] | None:
        """What an expression hands on as it is: the operand of a reshape, the parts of a concat; None for others."""
        if isinstance(node, cst.Subscript) and not self._is_fact(node.value):
            return [node.value]
        if isinstance(node, cst.Attribute) and node.attr.value in ("T", "mT"):
            return [node.value]
        if not isinstance(node, cst.Call) or not is_transparent(called(node, self.attributes)):
            return None
        if self.is_method(node):
            assert isinstance(node.func, cst.Attribute), "methods are called on something"
            return [node.func.value]
        if not node.args:
            return None
        first = node.args[0].value
        if is_movement(called(node, self.attributes)):
            return [first]
        if isinstance(first, (cst.Tuple, cst.List)):
            return [element.value for element in first.elements]
        return [first]

    def is_method(self, node: cst.Call) -> bool:
        """``x.sum(-1)``, not ``ops.sum(x)`` or ``self.sum(x)``."""
        if not isinstance(node.func, cst.Attribute):
            return False
        root = node.func.value
        if isinstance(root, cst.Name) and root.value == "self":
            return False
        name = dotted(root).split(".")[0]
        local = name in self._definitions or name in self._parameters
        return not name or name == "self" or local or name not in self.source.top_names

    def operands(self, node: cst.CSTNode) -> list[cst.BaseExpression]:
        """The tensors that go into an operator, as written."""
        if isinstance(node, cst.BinaryOperation):
            found: list[cst.BaseExpression] = [node.left, node.right]
        elif isinstance(node, cst.AugAssign):
            found = [node.target, node.value]
        elif isinstance(node, cst.UnaryOperation):
            found = [node.expression]
        else:
            assert isinstance(node, cst.Call), "operators are calls and operations"
            found = [arg.value for arg in node.args]
            if self.is_method(node):
                assert isinstance(node.func, cst.Attribute), "methods are called on something"
                found.insert(0, node.func.value)
        flat: list[cst.BaseExpression] = []
        for operand in found:
            if isinstance(operand, (cst.Tuple, cst.List)):
                flat += [element.value for element in operand.elements]
            else:
                flat.append(operand)
        return [operand for operand in flat if self.is_tensor(operand)]

    # --- tensors -----------------------------------------------------------------------------------------------------

    def is_tensor(self, node: cst.CSTNode) -> bool:
        """An expression gives a tensor, as far as the text tells."""
        if isinstance(node, cst.Name):
            return node.value not in ("True", "False", "None") and self._is_tensor_name(node)
        if isinstance(node, cst.Attribute):
            name = self_attribute(node)
            if name is not None:
                made = self.attributes.get(name)
                while isinstance(made, cst.Call) and isinstance(made.func, cst.Attribute):
                    if not isinstance(made.func.value, cst.Call):
                        break
                    made = made.func.value
                return isinstance(made, cst.Call) and dotted(made.func).rpartition(".")[2] in ("Parameter", "Tensor")
            if node.attr.value in _FACTS:
                return False
            root = dotted(node).split(".")[0]
            return root not in self.source.top_names and self.is_tensor(node.value)
        if isinstance(node, cst.Subscript):
            return not self._is_fact(node.value) and self.is_tensor(node.value)
        if isinstance(node, cst.Call):
            return called(node, self.attributes).rpartition(".")[2] not in _NUMBERS
        if isinstance(node, cst.BinaryOperation):
            return self.is_tensor(node.left) or self.is_tensor(node.right)
        if isinstance(node, cst.UnaryOperation):
            return self.is_tensor(node.expression)
        if isinstance(node, cst.IfExp):
            return self.is_tensor(node.body)
        if isinstance(node, (cst.ListComp, cst.GeneratorExp)):
            return self.is_tensor(node.elt)
        if isinstance(node, (cst.Tuple, cst.List)):
            return any(self.is_tensor(element.value) for element in node.elements)
        if isinstance(node, cst.AugAssign):
            return self.is_tensor(node.value) or self.is_tensor(node.target)
        return False

    def _is_fact(self, node: cst.CSTNode) -> bool:
        return isinstance(node, cst.Attribute) and node.attr.value in _FACTS

    def _is_tensor_name(self, node: cst.Name) -> bool:
        key = node.value
        if key in self._numeric:
            return not self._numeric[key]
        self._numeric[key] = False  # while it is being found out: `n = n + 1` says nothing new
        definitions = self._definitions.get(key, [])
        if definitions:
            numeric = all(self._is_number_binding(statement, value) for statement, value in definitions)
        elif key in self._parameters:
            numeric = _is_plain_parameter(self._parameters[key])
        else:
            numeric = key in self.source.top_names or key == "self"
        self._numeric[key] = numeric
        return not numeric

    def _is_number_binding(self, statement: cst.CSTNode, value: cst.CSTNode | None) -> bool:
        if value is not None:
            return not self.is_tensor(value)
        given: cst.CSTNode | None = getattr(statement, "iter", None) or getattr(statement, "value", None)
        if isinstance(given, cst.Call) and dotted(given.func) in ("range",):
            return True
        return given is not None and not self.is_tensor(given) and not isinstance(given, cst.Call)


def _is_whole_target(node: cst.CSTNode, name: cst.Name) -> bool:
    if isinstance(node, cst.Assign):
        return any(target.target is name for target in node.targets)
    return getattr(node, "target", None) is name


def _is_plain_parameter(parameter: cst.Param) -> bool:
    if parameter.annotation is not None:
        annotation = parameter.annotation.annotation
        name = dotted(annotation.value if isinstance(annotation, cst.Subscript) else annotation)
        if name:
            return name in _PLAIN_TYPES
    default = parameter.default
    if isinstance(default, cst.Name):
        return default.value in ("True", "False")
    return isinstance(default, (cst.Integer, cst.Float, cst.SimpleString, cst.UnaryOperation, cst.Tuple))
