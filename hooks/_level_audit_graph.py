"""The same audit of a compiled graph: the dtype that each of its operators got."""

from __future__ import annotations

import itertools
from typing import Any

import mindspore
from mindspore import nn
from mindspore.graph.api import _cell_graph_executor

from ampdebug._audit_records import AuditedStep
from ampdebug.hooks._cells import places
from ampdebug.hooks._graph_operators import CompiledGraph, name_scopes
from ampdebug.hooks._level_audit_cells import Asked, audited_cells, source_lints
from ampdebug.hooks._preflight import cell_facts
from ampdebug.rules._operator_records import Operator, Result, Step

_numbers = itertools.count(1)


def compiled_step(net: nn.Cell, given: tuple[Any, ...], level: str) -> AuditedStep:
    """Compiles the forward pass, without running it, and reads its operators.

    Args:
        net: The converted network.
        given: Its inputs.
        level: The level that was applied.
    """
    found = places(net)
    asked = Asked(found, level)
    before = mindspore.get_context("mode")
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    scopes, undo = name_scopes(found, f"audit{next(_numbers)}")
    try:
        phase = _cell_graph_executor.compile(net, *given)[0]
        read = list(CompiledGraph(_cell_graph_executor._graph_executor, phase).operators(scopes))
    finally:
        undo()
        mindspore.set_context(mode=before)
        net.compile_cache.clear()
    operators = tuple(
        Operator(index, name, path, found[path].cell_type, "", "", (), (Result(dtype, shape, None),))
        for index, (path, name, dtype, shape) in enumerate(read)
    )
    return AuditedStep(
        found[""].cell_type,
        level,
        "graph",
        Step(level, operators, cells=cell_facts(net)),
        tuple(asked.of_path(operator.path) for operator in operators),
        audited_cells(found, asked),
        lints=source_lints(found, level),
    )
