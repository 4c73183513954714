"""Which nodes of one function a patch changes, and how: the meaning of "stays in float32" told in source.

The rule is the search's own: a value stays unrounded on its way from one protected operator to the next, through
assignments and movements. So what two of them share is kept in float32, and is cast back for everybody else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from ampdebug._patch_flow import Flow
from ampdebug._patch_match import Match
from ampdebug._patch_module import ModuleSource, dotted, evaluation_order, self_attribute, self_chain

_BLACK_LISTED = frozenset({"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LayerNorm"})
"""Cells that O2 leaves in float32, and whose output it rounds."""


@dataclass(slots=True)
class Plan:
    """What happens to which node.

    Attributes:
        regions: Expressions to compute in float32, outermost operators only; the value is True inside a loop, where
            MindSpore compiles no lambda.
        casts: Expressions whose result is cast back, and the dtype to write.
        widened: Operands to be cast to float32.
        unwrapped: Calls of cells whose output O2 rounds, to be called without that.
        hoisted: Operands that get a statement and a name of their own before the statement they stand in.
        before: ``{statement: lines to put before it}``.
        kept_cells: Attribute chains of library cells that must stay in float32, by class.
        notes: What a reader should know.
    """

    regions: dict[cst.CSTNode, bool] = field(default_factory=dict)
    casts: dict[cst.CSTNode, str] = field(default_factory=dict)
    widened: set[cst.CSTNode] = field(default_factory=set)
    unwrapped: set[cst.CSTNode] = field(default_factory=set)
    hoisted: dict[cst.CSTNode, str] = field(default_factory=dict)
    before: dict[cst.CSTNode, list[str]] = field(default_factory=dict)
    kept_cells: list[tuple[cst.ClassDef, tuple[str, ...]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Planner:
    """Plans the changes of one function.

    Args:
        source: The file.
        function: The function.
        matches: The protected operators and cells in it.
        level: The AMP level.
        round_returns: Cast back what the function returns. Without it a value may leave the function in float32, for
            a protected operator elsewhere.
        round_calls: The same for what it hands to other cells by name.
        plan: Gets the changes.
    """

    def __init__(
        self,
        source: ModuleSource,
        function: cst.FunctionDef,
        matches: list[Match],
        *,
        level: str,
        round_returns: bool,
        round_calls: bool,
        plan: Plan,
    ) -> None:
        self._source, self._level, self._plan = source, level, plan
        self._round_returns, self._round_calls = round_returns, round_calls
        self._flow = Flow(source, function)
        self._cells = {match.node: match.cell for match in matches if match.cell and not match.inner}
        self._inner_cells = [match.cell for match in matches if match.inner]
        self._operators = {match.node for match in matches if not match.cell}
        self._kept: set[cst.CSTNode] = set()
        self._kept_uses: set[cst.CSTNode] = set()
        self._used_names = self._flow.names() | source.top_names

    def run(self) -> None:
        """Fills the plan."""
        for consumer in (*self._operators, *self._cells):
            for operand in self._flow.operands(consumer):
                self._demand(operand, unwrap=True)
        for call in self._float32_calls():
            for operand in self._flow.operands(call):
                self._demand(operand, unwrap=False)
        if not self._round_calls:
            self._keep_what_cells_take()
        owner = self._source.class_of(self._flow.function)
        for chain in (*self._cells.values(), *self._inner_cells):
            if owner is not None and (owner, chain) not in self._plan.kept_cells:
                self._plan.kept_cells.append((owner, chain))
        for node in self._operators:
            if not self._is_inside_region(node):
                self._plan.regions[node] = self._in_loop(node)
            for operand in self._flow.operands(node):
                self._widen(operand)
        # The order of the text, so that names are numbered as a reader meets them.
        for node in sorted((*self._plan_roots(), *self._cells), key=self._source.order.__getitem__):
            if node not in self._kept and self._wants_cast(node):
                self._cast_back(node, self._donor(node, node))
        self._cast_other_uses()

    def _plan_roots(self) -> list[cst.CSTNode]:
        return [node for node in self._operators if node in self._plan.regions]

    # --- what stays in float32 ---------------------------------------------------------------------------------------

    def _origin(self, node: cst.CSTNode) -> cst.CSTNode:
        """The operator or cell call that a value comes from, back through names and movements of one operand."""
        seen: set[cst.CSTNode] = set()
        while node not in seen:
            seen.add(node)
            if node in self._operators or node in self._cells:
                return node
            moved = self._flow.moved(node)
            if moved is not None and len(moved) == 1:
                node = moved[0]
            elif isinstance(node, cst.Name):
                found = self._flow.definition(node)
                if found is None or found[1] is None:
                    return node
                node = found[1]
        return node

    def _is_rounded_by_o2(self, node: cst.CSTNode) -> bool:
        if self._level != "O2" or not isinstance(node, cst.Call):
            return False
        name = self_attribute(node.func)
        made = None if name is None else self._flow.attributes.get(name)
        return isinstance(made, cst.Call) and dotted(made.func).rpartition(".")[2] in _BLACK_LISTED

    def _keep_what_cells_take(self) -> None:
        for use in self._flow.uses():
            consumer, origin = self._consumer(use), self._origin(use)
            if origin in self._operators and isinstance(consumer, cst.Call) and self._is_cell_call(consumer):
                self._kept.add(origin)

    def _float32_calls(self) -> list[cst.Call]:
        """Calls of cells that O2 leaves in float32."""
        calls = [node for node in evaluation_order(self._flow.function.body) if isinstance(node, cst.Call)]
        return [call for call in calls if self._is_rounded_by_o2(call) and call not in self._cells]

    def _demand(self, operand: cst.CSTNode, *, unwrap: bool) -> None:
        """A consumer in float32 reads this operand: what a protected producer gave stays as it is on the way.

        Args:
            operand: An operand of the consumer.
            unwrap: The consumer is protected itself, and so takes what O2's own float32 cells give unrounded too.
        """
        moved = self._flow.moved(operand)
        if moved is not None and operand not in self._operators:
            for part in moved:
                self._demand(part, unwrap=unwrap)
            return
        carried = self._flow.carried(operand) if isinstance(operand, cst.Name) else None
        if carried is not None:
            self._demand(carried, unwrap=unwrap)
        origin = self._origin(operand)
        if self._is_rounded_by_o2(origin) and origin not in self._cells:
            if not unwrap:
                return
            self._plan.unwrapped.add(origin)
            self._kept.add(origin)
        elif origin in self._operators or origin in self._cells:
            self._kept.add(origin)
        else:
            return
        if isinstance(operand, cst.Name):
            self._kept_uses.add(operand)

    def _is_kept(self, node: cst.CSTNode) -> bool:
        return self._origin(node) in self._kept

    def _is_inside_region(self, node: cst.CSTNode) -> bool:
        """Its result goes straight into another protected operator, so that one region holds both."""
        child = node
        for parent in self._source.ancestors(node):
            if parent in self._operators:
                return True
            if isinstance(parent, cst.BaseStatement) or parent in self._cells:
                return False
            if isinstance(parent, (cst.Call, cst.Subscript)):
                moved = self._flow.moved(parent)
                inside = moved is not None and any(child is m or child in self._below(m) for m in moved)
                if not inside:
                    return False
            elif isinstance(parent, (cst.BinaryOperation, cst.UnaryOperation, cst.BooleanOperation, cst.IfExp)):
                return False
            child = parent
        return False

    @staticmethod
    def _below(node: cst.CSTNode) -> set[cst.CSTNode]:
        return {node, *node.children}

    def _in_loop(self, node: cst.CSTNode) -> bool:
        for parent in self._source.ancestors(node):
            if parent is self._flow.function:
                return False
            if isinstance(parent, (cst.For, cst.While)):
                return True
        return False

    # --- operands ----------------------------------------------------------------------------------------------------

    def _widen(self, operand: cst.CSTNode) -> None:
        if operand in self._operators or operand in self._cells:
            return
        moved = self._flow.moved(operand)
        if moved is not None and not isinstance(operand, cst.Subscript):  # what is indexed may be a list
            for part in moved:
                self._widen(part)
            return
        if self._is_kept(operand) or not self._flow.is_tensor(operand):
            return
        computed = isinstance(operand, (cst.BinaryOperation, cst.UnaryOperation, cst.Call))
        # Inside the region it would be computed in float32 too.
        if computed and not self._is_cell_call(operand) and self._hoist(operand) is None:
            line = self._source.spans[operand][0]
            text = cst.Module([]).code_for_node(operand)
            self._plan.notes.append(f"line {line}: {text} is computed in float32 too, since it cannot stand apart")
        self._plan.widened.add(operand)

    def _is_cell_call(self, node: cst.CSTNode) -> bool:
        """The call has its own precision, whatever stands around it."""
        if not isinstance(node, cst.Call):
            return False
        chain = self_chain(node.func)
        return bool(chain) and self._source.is_cell(self._flow.attributes.get(chain[0]))

    def _hoist(self, node: cst.CSTNode) -> str | None:
        if node in self._plan.hoisted:
            return self._plan.hoisted[node]
        for parent in self._source.ancestors(node):
            if isinstance(parent, (cst.IfExp, cst.BooleanOperation, cst.Lambda, cst.CompFor, cst.BaseComp)):
                return None  # what does not always run, or more than once, must stay where it is
            if isinstance(parent, cst.BaseStatement):
                if not isinstance(parent, cst.SimpleStatementLine):
                    return None
                break
        self._plan.hoisted[node] = name = self._new_name("operand")
        return name

    def _new_name(self, stem: str) -> str:
        name, count = stem, 1
        while name in self._used_names:
            count += 1
            name = f"{stem}_{count}"
        self._used_names.add(name)
        return name

    # --- casting back ------------------------------------------------------------------------------------------------

    def _consumer(self, node: cst.CSTNode) -> cst.CSTNode:
        """What takes the value of an expression: the first node around it that is no movement."""
        child = node
        for parent in self._source.ancestors(node):
            if isinstance(parent, cst.Arg) or (
                isinstance(parent, (cst.Call, cst.Subscript, cst.Attribute)) and self._moves(parent, child)
            ):
                child = parent
                continue
            return parent
        raise AssertionError("every expression stands in a statement")

    def _moves(self, parent: cst.CSTNode, child: cst.CSTNode) -> bool:
        if isinstance(parent, cst.Attribute):
            call = self._source.parents[parent]
            return isinstance(call, cst.Call) and self._flow.moved(call) is not None and parent.value is child
        moved = self._flow.moved(parent)
        inner = child.value if isinstance(child, (cst.Arg, cst.Attribute)) else child
        return moved is not None and inner in moved

    def _wants_cast(self, node: cst.CSTNode) -> bool:
        consumer = self._consumer(node)
        if isinstance(consumer, cst.Call) and self._is_cell_call(consumer):
            return False  # a cell casts what it is given
        return not isinstance(consumer, cst.Return) or self._round_returns

    def _cast_back(self, node: cst.CSTNode, dtype: str | None) -> None:
        if dtype is not None:
            self._plan.casts[node] = dtype
        else:
            line = self._source.spans[node][0]
            self._plan.notes.append(f"line {line}: the result stays in float32, since no operand tells its dtype")

    def _donor(self, node: cst.CSTNode, at: cst.CSTNode) -> str | None:
        """The dtype that a protected result had, as an expression that can be written at ``at``."""
        pending = list(self._flow.operands(node)) if not isinstance(node, cst.Name) else [node]
        fallback: cst.CSTNode | None = None
        kept: list[cst.CSTNode] = []
        arguments: list[str] = []
        while pending:
            operand = pending.pop(0)
            moved = self._flow.moved(operand)
            if operand in self._operators or operand in self._cells:
                if self._source.statement_of(operand) is self._source.statement_of(node):
                    pending += self._flow.operands(operand)
            elif isinstance(operand, cst.Subscript) and not self._is_kept(operand):
                if self._source.statement_of(operand) is self._source.statement_of(at):
                    return f"{cst.Module([]).code_for_node(operand)}.dtype"
            elif moved is not None:
                pending += moved
            elif self._is_kept(operand):
                kept.append(self._origin(operand))
            elif operand in self._plan.hoisted:
                return self._readable(self._plan.hoisted[operand], node, at, fresh=True)
            elif isinstance(operand, cst.Name) and self._flow.is_tensor(operand):
                if self._flow.definition(operand) is not None:
                    return self._readable(operand.value, node, at, fresh=False)
                arguments.append(operand.value)  # a network's own input may be float32 and what comes out 16 bits
            elif isinstance(operand, (cst.Call, cst.BinaryOperation)) and fallback is None:
                fallback = operand
        for origin in kept:
            found = self._donor(origin, at)
            if found is not None:
                return found
        if arguments:
            return self._readable(arguments[0], node, at, fresh=False)
        if fallback is not None and self._source.statement_of(fallback) is self._source.statement_of(node):
            name = self._hoist(fallback)
            if name is not None:
                return self._readable(name, node, at, fresh=True)
        if fallback is not None:
            # Where nothing can be put before it: most likely that of the first tensor in it.
            for inner in evaluation_order(fallback):
                if isinstance(inner, cst.Name) and self._flow.is_use(inner) and self._flow.is_tensor(inner):
                    return self._readable(inner.value, node, at, fresh=False)
        return None

    def _readable(self, name: str, node: cst.CSTNode, at: cst.CSTNode, *, fresh: bool) -> str:
        """``name.dtype``, or a name for it where ``name`` means something else by then."""
        here, there = self._source.statement_of(node), self._source.statement_of(at)
        if fresh or here is there or not self._flow.assigned_between(name, here, there):
            return f"{name}.dtype"
        here = self._outside_loops(here, name)
        for line in self._plan.before.get(here, []):
            if line.endswith(f" = {name}.dtype"):
                return line.split(" = ")[0]
        dtype = self._new_name("dtype")
        self._plan.before.setdefault(here, []).append(f"{dtype} = {name}.dtype")
        return dtype

    def _outside_loops(self, statement: cst.CSTNode, name: str) -> cst.CSTNode:
        """The statement itself, or the loop around it where the name has its first value from before the loop."""
        for parent in self._source.ancestors(statement):
            if parent is self._flow.function:
                break
            if isinstance(parent, (cst.For, cst.While)) and not self._flow.begins_in(name, parent):
                statement = parent
        return statement

    def _cast_other_uses(self) -> None:
        """Everybody else sees a kept value rounded, as before."""
        for use in self._flow.uses():
            origin = self._origin(use)
            if use in self._kept_uses or origin not in self._kept or origin is use:
                continue
            consumer = self._consumer(use)
            parent = self._source.parents[use]
            if isinstance(parent, cst.Attribute) and not self._moves(parent, use):
                call = self._source.parents[parent]
                if not (isinstance(call, cst.Call) and call.func is parent):
                    continue  # x.shape
            if isinstance(consumer, (cst.Assign, cst.AnnAssign, cst.AssignTarget)):
                continue  # the same value by another name
            if self._leads_to_region(use) or (isinstance(consumer, cst.Call) and self._is_cell_call(consumer)):
                continue
            if isinstance(consumer, cst.Return) and not self._round_returns:
                continue
            dtype = self._donor(origin, use)
            if dtype is not None:
                self._plan.casts[use] = dtype

    def _leads_to_region(self, use: cst.CSTNode) -> bool:
        """The value goes into a protected operator's own expression; what was hoisted out of it stands outside."""
        for parent in (use, *self._source.ancestors(use)):
            if parent in self._plan.hoisted or isinstance(parent, cst.BaseStatement):
                return False
            if parent is not use and (parent in self._operators or parent in self._cells):
                return True
        return False
