"""What a compiled graph computes in: its operators, the cells they came from, their dtypes.

After a compilation MindSpore's executor still holds the graph as it will run, implicit casts of the AMP levels
included, and hands it out in its exchange format. A node there carries the *scope* it was parsed in. MindSpore names
scopes after attributes and classes, wrappers of the levels included, and gives none to the cells of a ``@ms.jit``
function. So while a graph with probes is compiled, the cells bear scopes of ours (:func:`name_scopes`): then a scope
is a cell path, whatever is compiled and whatever wraps the network. Scopes name things and change no value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mindspore.train import mind_ir_pb2

from ampdebug.hooks._cells import Place

_PREFIX = "Default/ampdebug"
_RECOMPUTED = "recompute_"  # MindSpore marks the scope of a recomputed cell by it
_REFERENCE = "REF::"

_FLOATS = {
    mind_ir_pb2.TensorProto.FLOAT: "float32",
    mind_ir_pb2.TensorProto.FLOAT16: "float16",
    mind_ir_pb2.TensorProto.BFLOAT16: "bfloat16",
    mind_ir_pb2.TensorProto.DOUBLE: "float64",
    mind_ir_pb2.TensorProto.FLOAT64: "float64",
}
# Order of execution, tuples, control flow, and our own callbacks: nothing of it is an operator of the user.
_PLUMBING = frozenset(
    (
        "Assign",
        "Custom",
        "Depend",
        "ListGetItem",
        "Load",
        "MakeDict",
        "MakeList",
        "MakeTuple",
        "Partial",
        "Return",
        "Switch",
        "SwitchLayer",
        "TensorMove",
        "TupleGetItem",
        "UpdateState",
    )
)


def name_scopes(places: dict[str, Place], marker: str) -> tuple[dict[str, str], Callable[[], None]]:
    """Gives the cells scopes that say their path, for the time of one compilation.

    Args:
        places: The cells by path.
        marker: What tells the scopes of this network from those of another one in the same graph.

    Returns:
        ``({scope: cell path}, a function that puts back the scopes found)``. A cell that already bears a scope of
        ours, because someone else watches it too, keeps it and is known by it.
    """
    paths: dict[str, str] = {}
    found: list[tuple[Any, Any]] = []

    def undo() -> None:
        while found:
            cell, scope = found.pop()
            cell.__dict__["_scope"] = scope

    for path, place in places.items():
        for cell in (place.inner,) if place.inner is place.outer else (place.outer, place.inner):
            scope = cell.__dict__.get("_scope")
            if not (isinstance(scope, str) and scope.removeprefix(_RECOMPUTED).startswith(_PREFIX)):
                found.append((cell, scope))
                recomputed = _RECOMPUTED if isinstance(scope, str) and scope.startswith(_RECOMPUTED) else ""
                scope = f"{recomputed}{_PREFIX}/{marker}/{path.replace('.', '/')}".removesuffix("/")
                cell.__dict__["_scope"] = scope
            paths[scope] = path
    return paths, undo


class CompiledGraph:
    """A graph as MindSpore's executor will run it.

    Args:
        executor: MindSpore's executor that compiled it.
        phase: The key it was compiled under.

    Raises:
        ValueError: MindSpore holds no graph for that phase, or one in an unknown format.
    """

    def __init__(self, executor: Any, phase: str) -> None:
        self.model = mind_ir_pb2.ModelProto()
        self.model.ParseFromString(executor.get_func_graph_proto(phase, "mind_ir"))
        if not self.model.graph.node:
            raise ValueError(f"the graph of phase {phase[:200]!r} has no nodes")
        self.graphs = (self.model.graph, *self.model.functions)
        self._primitives = {f"{_REFERENCE}{primitive.name}": primitive for primitive in self.model.primitives}

    def operators(self, scopes: dict[str, str]) -> Iterator[tuple[str, str, str, tuple[int, ...]]]:
        """The operators that it runs in the forward pass of known cells.

        Args:
            scopes: ``{scope: cell path}`` as of :func:`name_scopes`.

        Yields:
            ``(cell path, operator, dtype, shape)`` in the graph's order, once a node. The operator is the primitive's
            name (``"MatMul"``); dtype and shape are those of its first floating-point output, with -1 for a length that
            only running shows: the casts of mixed precision are nodes of their own (``"Cast"``) before it.
        """
        known: dict[str, str | None] = {}
        for graph in self.graphs:
            for node in graph.node:
                primitive = self._primitives.get(node.op_type)  # None: a constant, or the call of a sub-graph
                if primitive is None or primitive.op_type in _PLUMBING:
                    continue
                scope = node.domain.rpartition("/")[0]
                if scope not in known:
                    known[scope] = _path_of(scope, scopes)
                path = known[scope]
                first = None if path is None else _first_float(node)
                if path is not None and first is not None:
                    yield path, primitive.op_type, *first

    def operator(self, node: Any) -> str | None:
        """The name of the primitive that a node runs; None for a constant and for the call of a sub-graph."""
        primitive = self._primitives.get(node.op_type)
        return None if primitive is None else str(primitive.op_type)

    def writes(self, node: Any) -> bool:
        """Whether a node may write to what it takes."""
        primitive = self._primitives.get(node.op_type)
        return primitive is not None and any(a.name == "side_effect_mem" for a in primitive.attribute)

    def function_of(self, node: Any) -> int | None:
        """The id of the Python function that a node calls; None for any other node."""
        primitive = self._primitives.get(node.op_type)
        if primitive is None or primitive.op_type != "Custom":
            return None
        return next((int(attribute.i) for attribute in primitive.attribute if attribute.name == "fn_id"), None)

    def callbacks(self) -> dict[int, bool]:
        """The Python callbacks in it.

        Returns:
            ``{id of the Python function: it is called exactly once a run}``: it stands at one place, outside of
            branches, loops and other sub-graphs.
        """
        once: dict[int, bool] = {}
        for graph in self.graphs:
            for node in graph.node:
                function = self.function_of(node)
                if function is not None:
                    once[function] = graph is self.model.graph and function not in once
        return once


def _path_of(scope: str, scopes: dict[str, str]) -> str | None:
    # The backward pass of a cell is scoped "Gradients/" + its scope: no key begins so, and no parent is a key either.
    while scope:
        if scope in scopes:
            return scopes[scope]
        scope = scope.rpartition("/")[0]
    return None


def _first_float(node: Any) -> tuple[str, tuple[int, ...]] | None:
    for attribute in node.attribute:
        if attribute.name == "shape":
            return _first_float_of(attribute)
    return None


def _first_float_of(attribute: Any) -> tuple[str, tuple[int, ...]] | None:
    for tensor in attribute.tensors:
        if tensor.data_type in _FLOATS:
            return _FLOATS[tensor.data_type], tuple(tensor.dims)
    for value in attribute.values:
        found = _first_float_of(value)
        if found is not None:
            return found
    return None
