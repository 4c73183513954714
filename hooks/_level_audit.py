"""``audit``: one instrumented forward and backward pass tells what every cell and operator really runs in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import mindspore
from mindspore import nn

from ampdebug._audit import AuditReport, judge_audit
from ampdebug._audit_records import AuditedStep, Mode
from ampdebug._errors import AmpdebugError, ArgumentError
from ampdebug.hooks._cells import places
from ampdebug.hooks._interpose import interpose
from ampdebug.hooks._level_audit_cells import Asked, audited_cells, source_lints
from ampdebug.hooks._level_audit_graph import compiled_step
from ampdebug.hooks._level_audit_recorder import LevelRecorder
from ampdebug.hooks._operators import known_paths
from ampdebug.hooks._preflight import LEVELS, Level, _level, _made, _put_back, _pynative, _tensor, cell_facts
from ampdebug.hooks._preflight_guard import cleared_after_failure
from ampdebug.hooks._preflight_step import LOSS_PATH, _joined, _Pass, _pass, _taken
from ampdebug.hooks._shadow import flat_tensors
from ampdebug.hooks._state import seeded
from ampdebug.rules._operator_records import Step

_SEED = 20250101
MODES: tuple[Mode, ...] = ("pynative", "graph")


def audit(
    net: Any,
    *inputs: Any,
    level: Level | None = "O2",
    loss_fn: Callable[..., Any] | None = None,
    backward: bool = True,
    mode: Literal["pynative", "graph"] = "pynative",
) -> AuditReport:
    """Say what every cell and operator of a network really runs in at an AMP level, who asked for it, and what is odd.

    The network is converted, and run once in training mode under a recorder that sees every operator call with its
    cell, its source line and the dtypes of its operands. Parameters, moving statistics and modes are put back.

    Args:
        net: The network at O0; a function without arguments that makes one, or ``(net, inputs)`` or ``(net, inputs,
            loss_fn)``; or a ``Workload``, of which the first batch is taken. A network that is handed over is copied
            before it is converted.
        *inputs: One batch, tensors or numpy arrays. What the network does not take goes to ``loss_fn`` as labels.
        level: ``"O0"``, ``"O1"``, ``"O2"``, ``"O3"``, ``"auto"``; None takes the network as it is.
        loss_fn: Called with the output and the labels; audited too. Without it the mean of the outputs is
            differentiated.
        backward: Make a backward pass too, so that the report tells the dtypes in which gradients arrive.
        mode: ``"graph"`` compiles the network and reads the dtypes off the compiled graph. Levels can convert
            differently there. A graph tells no operands, so that casts, leaks and constants are not looked at, and
            only the forward pass is compiled.

    Returns:
        The report; ``str()`` of it is a table with findings.

    Raises:
        ArgumentError: An argument is wrong.
        AmpdebugError: MindSpore cannot convert this network to the level.

    Example:
        >>> print(ampdebug.audit(net, x, y, level="O2", loss_fn=ops.cross_entropy))  # doctest: +SKIP
    """
    if level is not None and str(level) not in LEVELS:
        raise ArgumentError(
            f"level={level!r}: must be one of {', '.join(map(repr, LEVELS))}, or None to take the net as is"
        )
    if mode not in MODES:
        raise ArgumentError(f"mode={mode!r}: must be one of {', '.join(map(repr, MODES))}")
    made = not isinstance(net, nn.Cell)
    net, inputs, loss_fn, _ = _made(net, inputs, loss_fn, None, updates=False)
    if not inputs:
        raise ArgumentError(
            "no inputs: audit runs the network on one batch; give it as audit(net, x, ...), or let the function return "
            "(net, inputs)"
        )
    batch = tuple(_tensor(value, f"input {i}") for i, value in enumerate(inputs))
    taken = _taken(net, batch, loss_fn)  # before the conversion, whose wrappers take anything
    if level is not None:
        net = _converted(net, level, copied=not made)
    applied = level if level is not None else _level(net)
    with _put_back(net, None):
        if mode == "graph":
            seen = compiled_step(net, batch[:taken], applied)
        else:
            seen = _recorded(net, batch[:taken], batch[taken:], loss_fn, applied, backward)
    return judge_audit(seen)


def _converted(net: nn.Cell, level: Level, *, copied: bool) -> nn.Cell:
    if level == "O0":
        return net
    if copied:  # a level changes the cells themselves, and the user's are not ours to change
        net = copy.deepcopy(net)
    try:
        return mindspore.amp.auto_mixed_precision(net, level)
    except Exception as error:
        # O1's rewriting fails on many a network; that is an answer, too.
        first = (str(error).strip().splitlines() or [""])[0]
        raise AmpdebugError(
            f"MindSpore cannot convert {type(net).__name__} to level {level}: {type(error).__name__}: {first}"
        ) from error


def _recorded(
    net: nn.Cell,
    given: tuple[Any, ...],
    labels: tuple[Any, ...],
    loss_fn: Callable[..., Any] | None,
    level: str,
    backward: bool,
) -> AuditedStep:
    found = places(net)
    asked = Asked(found, level)
    root = object()
    by_cell = known_paths(net)
    recorder = LevelRecorder(root, lambda cell: LOSS_PATH if cell is root else by_cell(cell), asked)
    for number, tensor in enumerate(flat_tensors((given, labels))):
        recorder.name_input(tensor, f"input {number}")
    weights = list(net.trainable_params()) if backward else []
    done = _Pass()
    with _pynative(), seeded(_SEED), interpose(recorder), cleared_after_failure():
        try:
            recorder.tracker.run_cell(root, lambda: _pass(net, given, labels, loss_fn, weights, done, recorder))
        finally:
            recorder.release()
    return AuditedStep(
        found[""].cell_type,
        level,
        "pynative",
        Step(level, tuple(recorder.calls), cells=_joined(cell_facts(net), recorder.norms)),
        tuple(recorder.requests),
        audited_cells(found, asked),
        tuple(sorted(recorder.gradient_dtypes.items())),
        backward=bool(weights),
        lints=source_lints(found, level),
    )
