"""A source file with some of its operators moved to float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import libcst as cst

from ampdebug._patch_match import Match, Matcher, Target
from ampdebug._patch_module import ModuleSource, dotted, is_container
from ampdebug._patch_plan import Plan, Planner

TO_FLOAT_LEVELS = ("O2", "O3")
"""Levels that cast inside a cell whatever its code says, and discard an earlier ``to_float``."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A changed file.

    Attributes:
        code: Its new text.
        done: Targets that it protects.
        missed: The others, each with the reason.
        notes: What a reader should know.
    """

    code: str
    done: tuple[Target, ...]
    missed: tuple[tuple[Target, str], ...]
    notes: tuple[str, ...]


def rewrite_source(source: str, targets: Sequence[Target], *, level: str, round_borders: bool = True) -> Rewritten:
    """Writes float32 around operators of a source file; every other space and comment stays.

    Args:
        source: The file's text.
        targets: The operators.
        level: The AMP level the network runs under. O2 and O3 cast inside their cells whatever the code says (in
            PyNative mode), so that the operators need a cell of their own there.
        round_borders: Cast back what a function returns or hands to another cell, too. Without it a value may pass
            from a protected operator in one function to one in another as it is.

    Raises:
        FormatError: The text is not Python that libcst reads.
    """
    module = ModuleSource.parse(source)
    matcher, plan = Matcher(module), Plan()
    done, missed = [], []
    functions: dict[cst.FunctionDef, list[Match]] = {}
    roots: set[cst.FunctionDef] = set()
    for target in targets:
        match = matcher.find(target)
        function = module.function_at(target.line)
        if isinstance(match, str) or function is None:
            missed.append((target, str(match)))
            continue
        problem = _cell_problem(module, function, match)
        if problem:
            missed.append((target, problem))
            continue
        done.append(target)
        if not target.path:
            roots.add(function)
        if all(match.node is not known.node for known in functions.setdefault(function, [])):
            functions[function].append(match)
    for function, matches in functions.items():
        # O2 and O3 cast what the network itself returns to float32, so that it need not be rounded before.
        outermost = level in TO_FLOAT_LEVELS and function.name.value == "construct" and function in roots
        rounds = round_borders and not outermost
        Planner(
            module, function, matches, level=level, round_returns=rounds, round_calls=round_borders, plan=plan
        ).run()
    if not done:
        return Rewritten(source, (), tuple(missed), ())
    code = _Writer(module, plan, level).write()
    return Rewritten(code, tuple(done), tuple(missed), tuple(dict.fromkeys(plan.notes)))


def _cell_problem(module: ModuleSource, function: cst.FunctionDef, match: Match) -> str:
    if not match.cell:
        return ""
    made = _constructor(module, module.class_of(function), match.cell)
    name = ".".join(match.cell)
    if made is None:
        return f"the line that makes self.{name} was not found in this file"
    if not dotted(made.func) or dotted(made.func).split(".")[0] not in module.top_names:
        return f"self.{name} is not made by a class that this file imports"
    return ""


def _constructor(module: ModuleSource, owner: cst.ClassDef | None, chain: tuple[str, ...]) -> cst.Call | None:
    """The call in ``__init__`` that makes ``self.head[2]``."""
    made: cst.CSTNode | None = module.attributes(owner).get(chain[0])
    for place in chain[1:]:
        if not isinstance(made, cst.Call) or not place.isdigit() or not is_container(made):
            return None
        elements = [arg.value for arg in made.args]
        if len(elements) == 1 and isinstance(elements[0], (cst.List, cst.Tuple)):
            elements = [element.value for element in elements[0].elements]
        elif len(elements) == 1 and isinstance(elements[0], cst.ListComp):
            elements = [elements[0].elt] * (int(place) + 1)
        made = elements[int(place)] if int(place) < len(elements) else None
    return made if isinstance(made, cst.Call) and not is_container(made) else None


class _Writer(cst.CSTTransformer):
    """Carries a plan out. Children are changed first, so that changes inside one another add up."""

    def __init__(self, module: ModuleSource, plan: Plan, level: str) -> None:
        super().__init__()
        self._module, self._plan, self._level = module, plan, level
        self._float32 = self._new_top_name("_float32")
        self._float32_class = self._new_top_name("_Float32")
        self._unrounded = self._new_top_name("_unrounded")
        self._keep = self._new_top_name("_KeepFloat32")
        self._needs_import = module.spelled("mindspore.float32") is None
        self._ms = "ms" if "ms" not in module.top_names else "mindspore"
        self._kept_classes: dict[str, str] = {}
        self._constructors: dict[cst.CSTNode, str] = {}
        for owner, chain in plan.kept_cells:
            made = _constructor(module, owner, chain)
            assert made is not None, "targets without one were left out"
            text = dotted(made.func)
            name = self._kept_classes.get(text) or self._new_top_name(f"_Float32{text.rpartition('.')[2]}")
            self._kept_classes[text] = self._constructors[made] = name
        self._before: dict[cst.CSTNode, list[cst.BaseStatement]] = {}
        self._definitions: dict[cst.CSTNode, list[cst.BaseStatement]] = {}

    def _new_top_name(self, stem: str) -> str:
        taken = {node.value for node in self._module.order if isinstance(node, cst.Name)}
        name, count = stem, 1
        while name in taken:
            count += 1
            name = f"{stem}_{count}"
        return name

    def _spelled(self, name: str) -> str:
        return self._module.spelled(f"mindspore.{name}") or f"{self._ms}.{name}"

    def write(self) -> str:
        """The new text."""
        changed = self._module.module.visit(self)
        body: list[Any] = list(changed.body)
        place = _after_imports(body)
        added = self._helpers()
        if self._needs_import:
            line = f"import mindspore as {self._ms}" if self._ms != "mindspore" else "import mindspore"
            body.insert(place, cst.parse_statement(line + "\n"))
            place += 1
        if added and place < len(body):
            body[place] = _with_blank_lines(body[place], 2)
        return changed.with_changes(body=[*body[:place], *added, *body[place:]]).code

    # --- single nodes ------------------------------------------------------------------------------------------------

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # type: ignore[override]
        """See libcst; one method for all kinds of node, since the plan is by node."""
        plan, node = self._plan, updated_node
        if isinstance(original_node, cst.AugAssign) and original_node in plan.regions:
            return self._assignment(original_node, updated_node)
        if original_node in plan.unwrapped:
            assert isinstance(node, cst.Call), "cells are called"
            node = node.with_changes(func=_call(self._unrounded, node.func))
        if original_node in self._constructors:
            node = self._kept_constructor(original_node, node)
        if original_node in plan.regions:
            node = self._region(original_node, node)
        if original_node in plan.hoisted:
            name = plan.hoisted[original_node]
            value = _bare(node)
            line = cst.SimpleStatementLine([cst.Assign([cst.AssignTarget(cst.Name(name))], value)])
            self._before.setdefault(self._module.statement_of(original_node), []).append(line)
            node = cst.Name(name)
        if original_node in plan.widened:
            node = _method(node, "astype", cst.parse_expression(self._spelled("float32")))
        if original_node in plan.casts:
            node = _method(node, "astype", cst.parse_expression(plan.casts[original_node]))
        if isinstance(original_node, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
            return self._statement(original_node, node)
        return super().on_leave(original_node, node)  # type: ignore[return-value]

    def _region(self, original: cst.CSTNode, node: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(node, cst.BaseExpression), "regions are expressions"
        if self._level == "O1":
            # O1 casts what its list names and nothing else, and its rewriting knows no cell at module level.
            return node
        body = _bare(node)
        if not self._plan.regions[original]:
            bare = cst.Lambda(cst.Parameters(), body, whitespace_after_lambda=cst.MaybeSentinel.DEFAULT)
            call = _call(self._float32, bare)
        else:
            statement = self._module.statement_of(original)
            count = len(self._definitions.get(statement, ()))
            name = "in_float32" if not count else f"in_float32_{count + 1}"
            text = cst.Module([]).code_for_node(body)
            inner = f"({text})" if "\n" in text and not body.lpar else text
            function = cst.parse_statement(f"def {name}():\n    return {inner}\n")
            self._definitions.setdefault(statement, []).append(function)
            call = _call(self._float32, cst.Name(name))
        return call

    def _assignment(self, original: cst.AugAssign, updated: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(updated, cst.AugAssign), "a node keeps its kind"
        operator = _BINARY[type(updated.operator)]()
        # What is read may be cast, what is assigned to must not.
        value: cst.CSTNode = cst.BinaryOperation(_operand(updated.target), operator, _operand(updated.value))
        value = self._region(original, value)
        if original in self._plan.casts:
            value = _method(value, "astype", cst.parse_expression(self._plan.casts[original]))
        return cst.Assign([cst.AssignTarget(original.target)], value)  # type: ignore[arg-type]

    def _kept_constructor(self, original: cst.CSTNode, node: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(node, cst.Call), "constructors are calls"
        if self._level in TO_FLOAT_LEVELS:
            return node.with_changes(func=cst.Name(self._constructors[original]))
        return _method(node, "to_float", cst.parse_expression(self._spelled("float32")))

    def _statement(self, original: cst.CSTNode, node: cst.CSTNode) -> cst.CSTNode:
        added: list[Any] = [cst.parse_statement(f"{line}\n") for line in self._plan.before.get(original, ())]
        added += self._before.get(original, [])
        added += self._definitions.get(original, [])
        if not added:
            return node
        # Comments above the statement stay above all that belongs to it.
        leading = node.leading_lines  # type: ignore[attr-defined]
        added[0] = added[0].with_changes(leading_lines=leading)
        between = [cst.EmptyLine(indent=False)] if original in self._definitions else []
        return cst.FlattenSentinel([*added, node.with_changes(leading_lines=between)])  # type: ignore[return-value]

    # --- what goes to the top of the file ----------------------------------------------------------------------------

    def _helpers(self) -> list[cst.BaseStatement]:
        cell, float32 = self._spelled("nn.Cell"), self._spelled("float32")
        found = []
        if self._plan.regions and self._level != "O1":
            found.append(
                f"class {self._float32_class}({cell}):\n"
                f'    """Runs a function in float32; AMP levels convert the cells of a network, and this is none."""\n'
                f"\n"
                f"    def construct(self, compute):\n"
                f"        return compute()\n"
            )
            found.append(f"{self._float32} = {self._float32_class}().to_float({float32})\n")
        if self._plan.unwrapped:
            found.append(
                f"def {self._unrounded}(cell):\n"
                f'    """O2 puts a cell around BatchNorm and LayerNorm that rounds their float32 output."""\n'
                f'    return getattr(cell, "_backbone", cell)\n'
            )
        if self._kept_classes and self._level in TO_FLOAT_LEVELS:
            found.append(
                f"class {self._keep}:\n"
                f'    """Beside the class of a cell: AMP levels leave it in float32."""\n'
                f"\n"
                f"    def add_flags_recursive(self, **flags):\n"
                f'        if flags.get("fp16") or flags.get("bf16"):\n'
                f'            flags = {{**flags, "fp16": False, "bf16": False, "fp32": True}}\n'
                f"        return super().add_flags_recursive(**flags)\n"
            )
            found += [f"class {name}({self._keep}, {base}):\n    pass\n" for base, name in self._kept_classes.items()]
        return [_with_blank_lines(cst.parse_statement(text), 2) for text in found]


_BINARY: dict[type[cst.BaseAugOp], Callable[[], cst.BaseBinaryOp]] = {
    cst.AddAssign: cst.Add,
    cst.SubtractAssign: cst.Subtract,
    cst.MultiplyAssign: cst.Multiply,
    cst.DivideAssign: cst.Divide,
    cst.FloorDivideAssign: cst.FloorDivide,
    cst.MatrixMultiplyAssign: cst.MatrixMultiply,
    cst.PowerAssign: cst.Power,
}


def _bare(node: cst.CSTNode) -> cst.BaseExpression:
    """An expression without parentheses of its own, unless they hold several lines together."""
    assert isinstance(node, cst.BaseExpression), "only expressions have parentheses"
    if "\n" in cst.Module([]).code_for_node(node):
        return node
    changed: cst.BaseExpression = node.with_changes(lpar=(), rpar=())
    return changed


def _operand(node: cst.BaseExpression) -> cst.BaseExpression:
    if node.lpar or isinstance(node, (cst.Name, cst.Attribute, cst.Call, cst.Subscript, cst.BaseNumber)):
        return node
    parenthesized: cst.BaseExpression = node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return parenthesized


def _method(node: cst.CSTNode, name: str, argument: cst.BaseExpression) -> cst.Call:
    assert isinstance(node, cst.BaseExpression), "methods are called on expressions"
    return cst.Call(cst.Attribute(_operand(node), cst.Name(name)), [cst.Arg(argument)])


def _call(function: str, argument: cst.BaseExpression) -> cst.Call:
    return cst.Call(cst.Name(function), [cst.Arg(argument)])


def _after_imports(body: Sequence[cst.BaseStatement]) -> int:
    """Index of the first statement after the imports at the top."""
    last = 0
    for place, statement in enumerate(body):
        if isinstance(statement, (cst.FunctionDef, cst.ClassDef)):
            break
        small = statement.body if isinstance(statement, cst.SimpleStatementLine) else ()
        docstring = place == 0 and any(isinstance(s, cst.Expr) for s in small)
        if docstring or any(isinstance(s, (cst.Import, cst.ImportFrom)) for s in small):
            last = place + 1
    return last


def _with_blank_lines(statement: cst.BaseStatement, count: int) -> cst.BaseStatement:
    lines = list(statement.leading_lines)  # type: ignore[attr-defined]
    while lines and lines[0].comment is None:
        lines.pop(0)
    blank = [cst.EmptyLine(indent=False) for _ in range(count)]
    changed: cst.BaseStatement = statement.with_changes(leading_lines=[*blank, *lines])
    return changed
