"""Which arguments of the Python callbacks in a compiled graph are one and the same tensor.

Most tensors of a network come by twice or more: what one cell puts out the next takes in, three projections share their
input, a container hands on what its last child made. In a compiled graph these are one node, and that can be read off.
The answer here errs on one side only: two arguments that are said to be the same hold the same values at any time.
"""

from __future__ import annotations

from typing import NamedTuple

from ampdebug.hooks._graph_operators import CompiledGraph

# They hand on their first input as it is, in its own memory or in a copy: what overwrites one may overwrite the other.
_VIEWS = frozenset(
    (
        *("Depend", "Load", "Reshape", "View", "ExpandDims", "ExpandDimsView", "Squeeze", "Flatten", "FlattenExt"),
        *("Transpose", "TransposeView", "TransposeExtView", "BroadcastTo", "BroadcastToView", "Split", "SplitTensor"),
        *("SplitTensorView", "Chunk", "ChunkView", "Slice", "SliceExt", "SliceExtView", "StridedSlice"),
        *("StridedSliceView", "Narrow", "NarrowView", "SelectExtView", "Diagonal", "DiagonalView", "UnstackExtView"),
        *("AsStrided", "ExpandAs", "Contiguous", "Identity", "TupleGetItem", "ListGetItem", "StopGradient"),
        *("Cast", "Unstack", "Expand"),
    )
)
_TUPLES = frozenset(("MakeTuple", "MakeList"))
# They write to the first of what they take, as the whole family named "Inplace..." does.
_WRITE_FIRST = frozenset(("Assign", "AssignAdd", "AssignSub"))
# It writes to its running statistics, which are parameters, never to what it normalises.
_WRITE_PARAMETERS = frozenset(("BatchNorm",))


class Callback(NamedTuple):
    """A callback that a graph calls exactly once a run.

    Attributes:
        function: The id of its Python function.
        arguments: For each argument the name of the node it is; None for one that nothing is known about.
    """

    function: int
    arguments: tuple[str | None, ...]


def callbacks_with_arguments(graph: CompiledGraph) -> list[Callback]:
    """The callbacks that are called exactly once a run, in the graph's order.

    Arguments with the same name are the same tensor. Only ``Depend``, which adds an order and hands on the same
    tensor, is looked through. Nothing is known about parameters, about what is not computed in the main graph, and
    about tensors that something may write to: they could be two values at two times.
    """
    memory = _Memory(graph)
    written = memory.written()
    if written is None:
        return []
    if written & memory.inputs:
        written = written | memory.inputs  # the same tensor may have been given twice
    once = graph.callbacks()
    found = []
    for node in graph.model.graph.node:
        function = graph.function_of(node)
        if function is not None and once[function]:
            arguments = []
            for argument in node.input:
                name = memory.without_order(argument)
                roots = memory.roots(name)
                computed = all(root in memory.computed or root in memory.inputs for root in roots)
                arguments.append(name if computed and not roots & written else None)
            found.append(Callback(function, tuple(arguments)))
    return found


class _Memory:
    """Which nodes of a graph may share their memory."""

    def __init__(self, graph: CompiledGraph) -> None:
        self._graph = graph
        self._nodes = {node.output[0]: node for each in graph.graphs for node in each.node if node.output}
        self._parameters = {value.name for value in graph.model.graph.parameter}
        self._passed = self._arguments()
        self.inputs = frozenset(value.name for value in graph.model.graph.input)
        """The main graph's inputs."""
        self.computed = frozenset(node.output[0] for node in graph.model.graph.node if node.output)
        """The main graph's nodes."""

    def without_order(self, name: str) -> str:
        """Looks through ``Depend``."""
        while name in self._nodes and self._graph.operator(self._nodes[name]) == "Depend":
            name = self._nodes[name].input[0]
        return name

    def roots(self, name: str) -> set[str]:
        """The nodes, inputs and parameters in whose memory a tensor may lie; what is unknown stands for itself."""
        found: set[str] = set()
        seen: set[str] = set()
        pending = [name]
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            node = self._nodes.get(name)
            operator = None if node is None else self._graph.operator(node)
            if node is not None and operator in _TUPLES:
                pending.extend(node.input)
            elif node is not None and operator in _VIEWS:
                pending.append(node.input[0])
            elif name in self._passed:
                pending.extend(self._passed[name])
            else:
                found.add(name)
        return found

    def written(self) -> set[str] | None:
        """What something may write to, parameters aside; None where that cannot be told.

        Optimizers and whatever else has an effect on memory may write to all that they take.
        """
        written: set[str] = set()
        for each in self._graph.graphs:
            for node in each.node:
                operator = self._graph.operator(node) or ""
                if not self._graph.writes(node) or operator in _WRITE_PARAMETERS:
                    continue
                in_place = operator in _WRITE_FIRST or operator.startswith("Inplace")
                roots = {root for name in (node.input[:1] if in_place else node.input) for root in self.roots(name)}
                roots -= self._parameters
                if in_place and roots:
                    return None  # a tensor in the middle of the network, which may share its memory with any other
                written |= roots
        return written

    def _arguments(self) -> dict[str, list[str]]:
        """What the inputs of the sub-graphs are given."""
        functions = {function.name: function for function in self._graph.model.functions}
        passed: dict[str, list[str]] = {}
        for node in self._nodes.values():
            if self._graph.operator(node) == "Partial" and node.input[0] in functions:
                target, given = functions[node.input[0]], node.input[1:]
            elif node.op_type in functions:
                target, given = functions[node.op_type], node.input
            else:
                continue
            for value, argument in zip(target.input, given, strict=False):
                passed.setdefault(value.name, []).append(argument)
        return passed
