"""What a source file says of itself: its imports, functions and classes, and how it spells MindSpore's names.

All ``_patch_*`` modules work on libcst's nodes, which keep every space and comment. libcst is optional and imported by
them alone; :func:`ampdebug._patch.build_patch` says so where it is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

from ampdebug._errors import FormatError


@dataclass(slots=True)
class ModuleSource:
    """A parsed source file.

    Attributes:
        module: Its tree.
        parents: ``{node: the node around it}``.
        spans: ``{node: (first line, last line)}``, parentheses around an expression not counted.
        imported: Names that the top level imports, and what each stands for: ``{"ms": "mindspore"}``.
        top_names: All names bound at the top level.
    """

    module: cst.Module
    parents: dict[cst.CSTNode, cst.CSTNode]
    spans: dict[cst.CSTNode, tuple[int, int]]
    order: dict[cst.CSTNode, int] = field(default_factory=dict)
    imported: dict[str, str] = field(default_factory=dict)
    top_names: set[str] = field(default_factory=set)

    @staticmethod
    def parse(source: str) -> ModuleSource:
        """Parses a file's text.

        Raises:
            FormatError: It is not Python that libcst reads.
        """
        try:
            wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
        except cst.ParserSyntaxError as error:
            raise FormatError(f"the source cannot be parsed: {error}") from error
        parents = wrapper.resolve(ParentNodeProvider)
        spans = {node: (span.start.line, span.end.line) for node, span in wrapper.resolve(PositionProvider).items()}
        found = ModuleSource(wrapper.module, dict(parents), spans)
        found.order = {node: place for place, node in enumerate(evaluation_order(wrapper.module))}
        for statement in found.top_statements():
            found._read(statement)
        return found

    def top_statements(self) -> Iterator[cst.BaseStatement]:
        """The statements of the top level, those in ``if`` and ``try`` blocks too."""
        pending: list[cst.CSTNode] = list(self.module.body)
        while pending:
            node = pending.pop(0)
            if isinstance(node, (cst.If, cst.Try, cst.With, cst.Else, cst.ExceptHandler, cst.IndentedBlock)):
                pending[:0] = [child for child in node.children if not isinstance(child, cst.BaseExpression)]
            elif isinstance(node, cst.BaseStatement):
                yield node

    def _read(self, statement: cst.BaseStatement) -> None:
        if isinstance(statement, (cst.FunctionDef, cst.ClassDef)):
            self.top_names.add(statement.name.value)
        if not isinstance(statement, cst.SimpleStatementLine):
            return
        for small in statement.body:
            if isinstance(small, cst.Import):
                for alias in small.names:
                    full = dotted(alias.name)
                    name = bound_name(alias) or full.split(".")[0]
                    self._bind(name, full if alias.asname else full.split(".")[0])
            elif isinstance(small, cst.ImportFrom) and not isinstance(small.names, cst.ImportStar):
                start = "." * len(small.relative) + (dotted(small.module) if small.module else "")
                for alias in small.names:
                    self._bind(bound_name(alias) or dotted(alias.name), f"{start}.{dotted(alias.name)}")
            elif isinstance(small, (cst.Assign, cst.AnnAssign)):
                self.top_names |= {name.value for name in assigned_names(small)}

    def _bind(self, name: str, full: str) -> None:
        self.imported[name] = full
        self.top_names.add(name)

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The nodes around a node, from the inside."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def function_at(self, line: int) -> cst.FunctionDef | None:
        """The innermost function whose body holds a line."""
        best: cst.FunctionDef | None = None
        for node, (first, last) in self.spans.items():
            if (
                isinstance(node, cst.FunctionDef)
                and first <= line <= last
                and (best is None or first >= self.spans[best][0])
            ):
                best = node
        return best

    def class_of(self, node: cst.CSTNode) -> cst.ClassDef | None:
        """The class a node stands in."""
        return next((a for a in self.ancestors(node) if isinstance(a, cst.ClassDef)), None)

    def statement_of(self, node: cst.CSTNode) -> cst.CSTNode:
        """The statement a node stands in: one whole line, or the compound statement whose head holds it."""
        return next(
            a
            for a in (node, *self.ancestors(node))
            if isinstance(a, (cst.SimpleStatementLine, cst.BaseCompoundStatement))
        )

    def attributes(self, owner: cst.ClassDef | None) -> dict[str, cst.BaseExpression]:
        """What a class and its bases in the same file assign to attributes: ``{"bn": nn.BatchNorm2d(16)}``."""
        found: dict[str, cst.BaseExpression] = {}
        seen: set[str] = set()
        while owner is not None and owner.name.value not in seen:
            seen.add(owner.name.value)
            for node in evaluation_order(owner):
                if isinstance(node, cst.Assign):
                    for target in node.targets:
                        name = self_attribute(target.target)
                        if name is not None:
                            found.setdefault(name, node.value)
                elif isinstance(node, cst.AnnAssign) and node.value is not None:
                    name = self_attribute(node.target)
                    if name is not None:
                        found.setdefault(name, node.value)
            bases = {dotted(base.value) for base in owner.bases}
            owner = next((s for s in self.module.body if isinstance(s, cst.ClassDef) and s.name.value in bases), None)
        return found

    def is_cell(self, made: cst.BaseExpression | None) -> bool:
        """What an attribute was made by looks like a cell: ``nn.Dense(8, 8)``, not ``ops.ReduceMean()``."""
        made = without_to_float(made)
        if not isinstance(made, cst.Call):
            return False
        parts = self.meaning(made.func).split(".")
        if not _NO_CELLS.isdisjoint(parts[:-1]):
            return False
        return parts[-1][:1].isupper() and parts[-1] not in _TENSORS

    def meaning(self, node: cst.CSTNode) -> str:
        """A dotted name with the import behind it: ``"mindspore.nn.Dense"`` for ``nn.Dense``."""
        root, dot, rest = dotted(node).partition(".")
        return self.imported.get(root, root) + dot + rest

    def spelled(self, full: str) -> str | None:
        """A MindSpore name as this file can write it: ``spelled("mindspore.float32")`` is ``"ms.float32"``."""
        found: list[tuple[int, str]] = []
        for name, stands_for in self.imported.items():
            # dtypes stand in mindspore itself, in mindspore.dtype and in mindspore.common.dtype
            plain = stands_for.replace("mindspore.common.dtype", "mindspore.dtype")
            for meaning in {plain, plain.replace("mindspore.dtype", "mindspore")}:
                if full == meaning:
                    found.append((len(full), name))
                elif full.startswith(meaning + ".") and (meaning == plain or "nn" not in full):
                    found.append((len(meaning), name + full[len(meaning) :]))
        if found:
            return max(found, key=lambda item: item[0])[1]
        return None


_NO_CELLS = frozenset({"ops", "operations", "numpy", "mint", "auto_generate"})
_TENSORS = frozenset({"Parameter", "Tensor", "ParameterTuple"})


def without_to_float(made: cst.BaseExpression | None) -> cst.BaseExpression | None:
    """``nn.Dense(8, 8)`` for ``nn.Dense(8, 8).to_float(ms.float16)``."""
    while isinstance(made, cst.Call) and isinstance(made.func, cst.Attribute) and made.func.attr.value == "to_float":
        made = made.func.value
    return made


def evaluation_order(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """All nodes below and including this one: operands before the expression they belong to, left to right."""
    for child in node.children:
        yield from evaluation_order(child)
    yield node


def dotted(node: cst.CSTNode | None) -> str:
    """``a.b.c`` as text; ``""`` for what is no dotted name."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        start = dotted(node.value)
        return f"{start}.{node.attr.value}" if start else ""
    return ""


def bound_name(alias: cst.ImportAlias) -> str | None:
    """The name after ``as``."""
    return alias.asname.name.value if alias.asname and isinstance(alias.asname.name, cst.Name) else None


def self_attribute(node: cst.CSTNode) -> str | None:
    """``"bn"`` for ``self.bn``."""
    if isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name) and node.value.value == "self":
        return node.attr.value
    return None


def assigned_names(node: cst.CSTNode) -> list[cst.Name]:
    """The plain names that an assignment, a loop or a ``with`` binds, tuples taken apart."""
    if isinstance(node, cst.Assign):
        targets: list[cst.CSTNode] = [target.target for target in node.targets]
    elif isinstance(node, (cst.AnnAssign, cst.AugAssign, cst.For, cst.CompFor)):
        targets = [node.target]
    else:
        return []
    names = []
    while targets:
        target = targets.pop()
        if isinstance(target, cst.Name):
            names.append(target)
        elif isinstance(target, (cst.Tuple, cst.List)):
            targets += [element.value for element in target.elements]
    return names


def self_chain(node: cst.CSTNode) -> tuple[str, ...]:
    """``("head", "2")`` for ``self.head[2]``; empty for what does not start at ``self``."""
    name = self_attribute(node)
    if name is not None:
        return (name,)
    if isinstance(node, cst.Attribute):
        start = self_chain(node.value)
        return (*start, node.attr.value) if start else ()
    if isinstance(node, cst.Subscript) and len(node.slice) == 1:
        index = node.slice[0].slice
        if isinstance(index, cst.Index) and isinstance(index.value, cst.Integer):
            start = self_chain(node.value)
            return (*start, index.value.value) if start else ()
    return ()


_CONTAINERS = ("SequentialCell", "CellList", "CellDict")


def is_container(made: cst.BaseExpression | None) -> bool:
    """An attribute is one of the library's containers of cells."""
    return isinstance(made, cst.Call) and dotted(made.func).rpartition(".")[2] in _CONTAINERS
