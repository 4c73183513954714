"""``check``: one instrumented training step, judged at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import mindspore
import numpy as np
from mindspore import Tensor, nn

from ampdebug._errors import ArgumentError
from ampdebug._workload import Workload
from ampdebug.hooks._cells import asked_dtype, places
from ampdebug.hooks._environment import detect_level
from ampdebug.hooks._pins import lost_pins
from ampdebug.hooks._preflight_step import run_step
from ampdebug.hooks._state import NetworkState, seeded
from ampdebug.rules._operator_records import CellFacts, Step
from ampdebug.rules.operators import judge_step

if TYPE_CHECKING:
    from ampdebug._diagnose import Diagnosis

Level = Literal["O0", "O1", "O2", "O3", "auto"]
LEVELS: tuple[Level, ...] = ("O0", "O1", "O2", "O3", "auto")
_SEED = 20250101  # of a workload's network


def check(
    net: Any,
    *inputs: Any,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = None,
    level: Level | None = None,
    steps: int = 1,
) -> Diagnosis:
    """Run one instrumented training step and say what is wrong with its numbers: a look before the real training.

    Every operator call of the forward pass is measured (non-finite values, range, zeros, constants that become 0 or inf
    in its dtype), and the gradients that come back to it. The same step is then run with every operator in float32, so
    that "overflows in float16, finite in float32" is seen and not guessed. The network runs in PyNative mode and in
    training mode; afterwards parameters, moving statistics, optimizer state and modes are as they were.

    Args:
        net: The network, as it is trained: already converted to an AMP level or not. A function without arguments that
            makes one is taken too; it may return ``(net, inputs)``, ``(net, inputs, loss_fn)`` or
            ``(net, inputs, loss_fn, optimizer)``. Or a ``Workload``, or a function that returns one: its first batch.
        *inputs: One batch, tensors or numpy arrays. What the network does not take goes to ``loss_fn`` as labels.
        loss_fn: Called with the output and the labels; gives a scalar, times the loss scale where there is one. Without
            it a scalar output is the loss; for any other output its mean stands in, to see the backward pass.
        optimizer: Called with the gradients of its parameters, if they are finite.
        level: Converts the network to this level first: a copy of it, unless ``net`` is a function.
        steps: How many steps to run on this batch; it ends with the first one that has a finding.

    Returns:
        The diagnosis; ``str()`` of it is the report.

    Raises:
        ArgumentError: An argument is wrong.

    Example:
        >>> print(ampdebug.check(net, x, y, loss_fn=ops.cross_entropy, level="O2"))  # doctest: +SKIP
    """
    from ampdebug._diagnose import Diagnosis

    if level is not None and str(level) not in LEVELS:
        raise ArgumentError(
            f"level={level!r}: must be one of {', '.join(map(repr, LEVELS))}, or None to take the net as is"
        )
    if type(steps) is not int or steps < 1:
        raise ArgumentError(f"steps={steps!r}: must be 1 or more")
    made = not isinstance(net, nn.Cell)
    net, inputs, loss_fn, optimizer = _made(net, inputs, loss_fn, optimizer)
    if not inputs:
        raise ArgumentError(
            "no inputs: check runs the network on one batch; give it as check(net, x, ...), or let the function return "
            "(net, inputs)"
        )
    batch = tuple(_tensor(value, f"input {i}") for i, value in enumerate(inputs))
    if level is not None:
        net, optimizer = _converted(net, level, optimizer, made)
    with _pynative(), _put_back(net, optimizer):
        step, number = None, 0
        findings: tuple[Any, ...] = ()
        for number in range(1, steps + 1):
            step = run_step(net, batch, loss_fn, optimizer, level or _level(net), cell_facts(net))
            findings = judge_step(step, number)
            if any(finding.severity != "note" for finding in findings):
                break
    assert step is not None
    return Diagnosis(_name(net), findings, _looked_at(step, loss_fn, optimizer, number), _unknown(step))


def _made(
    net: Any, inputs: tuple[Any, ...], loss_fn: Any, optimizer: Any, *, updates: bool = True
) -> tuple[nn.Cell, tuple[Any, ...], Any, Any]:
    """Network, batch, loss and optimizer, from the ways in which they may be given; of a workload no optimizer unless
    there are ``updates`` to make."""
    if isinstance(net, nn.Cell):
        return net, inputs, loss_fn, optimizer
    if not callable(net) and not isinstance(net, Workload):
        raise ArgumentError(f"net={net!r} is of type {type(net).__name__}; give a Cell or a function that makes one")
    found = net if isinstance(net, Workload) else net()
    if isinstance(found, Workload):
        found = _of_workload(found, loss_fn, updates)
    if isinstance(found, (tuple, list)):
        if not 1 <= len(found) <= 4:
            raise ArgumentError(
                f"{getattr(net, '__name__', net)}() gave {len(found)} values; it may give net, (net, inputs), "
                "(net, inputs, loss_fn) or (net, inputs, loss_fn, optimizer)"
            )
        parts = list(found)
        found = parts[0]
        if len(parts) > 1 and not inputs:
            given = parts[1]
            inputs = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        loss_fn = loss_fn if loss_fn is not None or len(parts) < 3 else parts[2]
        optimizer = optimizer if optimizer is not None or len(parts) < 4 else parts[3]
    if not isinstance(found, nn.Cell):
        raise ArgumentError(f"{getattr(net, '__name__', net)}() gave a {type(found).__name__}; it must give a Cell")
    return found, inputs, loss_fn, optimizer


def _of_workload(workload: Workload, loss_fn: Any, updates: bool) -> tuple[Any, ...]:
    """What a factory would return."""
    batch = next(iter(workload.batches(1)))
    with seeded(_SEED):
        net = workload.network()
    loss = loss_fn if loss_fn is not None else workload.loss
    if loss is None:
        return net, batch[:-1]  # without a loss the last of the batch is nobody's
    if not updates or workload.optimizer is None:
        return net, batch, loss
    return net, batch, loss, workload.optimizer(net.trainable_params())


def _tensor(value: Any, name: str) -> Any:
    if isinstance(value, np.ndarray):
        return Tensor(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_tensor(item, name) for item in value)
    return value


def _converted(net: nn.Cell, level: Level, optimizer: Any, made: bool) -> tuple[nn.Cell, Any]:
    if level == "O0":
        return net, optimizer
    if not made:
        # A level changes the cells themselves, and the user's are not ours to change.
        if optimizer is not None:
            raise ArgumentError(
                f"level={level!r} with an optimizer: the level is tried on a copy, whose parameters this optimizer "
                "does not hold. Give a function that returns (net, inputs, loss_fn, optimizer) with the level applied"
            )
        net = copy.deepcopy(net)
    return mindspore.amp.auto_mixed_precision(net, level), optimizer


@contextmanager
def _pynative() -> Iterator[None]:
    before = mindspore.get_context("mode")
    if before == mindspore.PYNATIVE_MODE:
        yield
        return
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    try:
        yield
    finally:
        mindspore.set_context(mode=before)


@contextmanager
def _put_back(net: nn.Cell, optimizer: Any) -> Iterator[None]:
    state = NetworkState(net)
    kept = NetworkState(optimizer) if isinstance(optimizer, nn.Cell) else None
    # set_train() also leaves a flag and a phase behind, which graphs are made by.
    modes = [(cell, cell._phase, cell.get_flags().get("training")) for _, cell in net.cells_and_names()]
    net.set_train(True)
    try:
        yield
    finally:
        state.restore(net)
        for cell, phase, flag in modes:
            cell._phase = phase
            if flag is None:
                cell._func_graph_flags.pop("training", None)
            else:
                cell._func_graph_flags["training"] = flag
        if kept is not None:
            kept.restore(optimizer)


def _level(net: nn.Cell) -> str:
    return detect_level(net, places(net))


def cell_facts(net: nn.Cell) -> tuple[CellFacts, ...]:
    """What the precision flags of the cells tell, by path."""
    found = places(net)
    lost = lost_pins(found)
    return tuple(
        CellFacts(
            path,
            place.cell_type,
            pinned_then_lost=path in lost,
            pin_in_source=lost.get(path) == "source",
            asked=asked_dtype(place.inner),
        )
        for path, place in found.items()
    )


def _name(net: nn.Cell) -> str:
    return f"check of {places(net)[''].cell_type}"


def _looked_at(step: Step, loss_fn: Any, optimizer: Any, number: int) -> tuple[str, ...]:
    low = sum(operator.dtype in ("float16", "bfloat16") for operator in step.operators)
    floats = sum(bool(operator.dtype) for operator in step.operators)
    measured = sum(r.gradient is not None for operator in step.operators for r in operator.results)
    result = [
        f"{number} step{'s' if number > 1 else ''} at level {step.level}: {len(step.operators)} operator calls, {low} "
        f"of {floats} with floating-point results in 16 bits.",
        f"{sum(v.gradient is not None for v in step.variables)} parameter gradients and the gradients of {measured} "
        "operator results.",
    ]
    outcome = step.outcome
    if outcome.loss is not None:
        what = "Loss" if outcome.real_loss else "Mean of the outputs, in place of a loss"
        exact = "" if outcome.exact_loss is None else f"; {outcome.exact_loss:.6g} with every operator in float32"
        result.append(f"{what}: {outcome.loss:.6g}{exact}.")
    if optimizer is not None:
        result.append(f"One update by {type(optimizer).__name__}; parameters were put back afterwards.")
    return tuple(result)


def _unknown(step: Step) -> tuple[str, ...]:
    result = []
    if not step.outcome.exact_outputs:
        result.append("The float32 run of the same step could not be made, so nothing is said about differences to it.")
    if not step.outcome.real_loss and not step.failure:
        result.append("No loss was given, so sizes of gradients are not judged.")
    return tuple(result)
