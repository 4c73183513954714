"""``replay``: a kept step, run again operator by operator."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from mindspore import Tensor, nn
from mindspore import dtype as mstype

from ampdebug._errors import AmpdebugError, ArgumentError, StoreError
from ampdebug._flight_file import KeptArray, KeptStep, find_kept_steps, read_kept_step
from ampdebug._records import parameter_name
from ampdebug._replay import Replay, judge_replay
from ampdebug._run import Run, open_run
from ampdebug._target import executed, load_target
from ampdebug._tensor_stats import TensorStats
from ampdebug._workload import Workload
from ampdebug.hooks._cells import places, unwrap
from ampdebug.hooks._environment import detect_level
from ampdebug.hooks._flight_values import set_random_state
from ampdebug.hooks._preflight import LEVELS, Level, _converted, _put_back, _pynative, cell_facts
from ampdebug.hooks._preflight_step import run_step
from ampdebug.hooks._state import seeded


def replay(
    run: str | os.PathLike[str] | Run,
    factory: Callable[[], Any] | Workload,
    *,
    step: int | None = None,
    level: Level | None = None,
    rank: int | None = None,
) -> Replay:
    """Run a step again that ``keep_bad_steps`` kept, and name the operator at which it went wrong.

    The network gets the parameters, buffers and batch of the recording and runs in PyNative mode, whatever mode the
    training ran in, one operator after the other; then once more with every operator in float32. The factory's network
    is only used up: nothing else is changed.

    Args:
        run: Directory of the run, its file, or an open run.
        factory: As for ``ampdebug.check``: a function without arguments that returns the network, or ``(net, inputs)``,
            ``(net, inputs, loss_fn)`` or ``(net, inputs, loss_fn, optimizer)``, with or without the ``inputs``, which
            come from the recording; or a ``Workload``, or a function that returns one. It must be the network that was
            trained: its parameters are matched by name.
        step: Which of the kept steps; None for the first.
        level: The AMP level to convert the network to. None takes it as the factory makes it, or, where that has no
            level, at the level of the run.
        rank: Which rank of a run with several; None for the lowest.

    Returns:
        What came of it; ``str()`` of it is the report.

    Raises:
        ArgumentError: An argument is wrong, no such step was kept, or the network is another one.
        StoreError: The run or the recording can't be read (FormatError: it is damaged).
        AmpdebugError: The network raised.

    Example:
        >>> print(ampdebug.replay("runs/exp1", make_net))        # doctest: +SKIP
    """
    if level is not None and level not in LEVELS:
        raise ArgumentError(f"level={level!r}: must be one of {', '.join(map(repr, LEVELS))}, or None")
    if isinstance(run, Run):
        opened = run if rank is None else run.rank(rank)
        return _replayed(opened, factory, step, level)
    with open_run(run) as opened:
        if rank is None or rank == opened.this_rank:
            return _replayed(opened, factory, step, level)
        with opened.rank(rank) as other:
            return _replayed(other, factory, step, level)


def replay_target(
    run: str, target: str, *, step: int | None = None, level: Level | None = None, rank: int | None = None
) -> Replay:
    """The same for what a command line names: ``module:factory`` or ``file.py:factory``."""
    factory = load_target(target)
    if not callable(factory) and not isinstance(factory, Workload):
        raise ArgumentError(f"{target} is a {type(factory).__name__}; it must be a function or a Workload")
    found: Replay = executed(partial(replay, run, factory, step=step, level=level, rank=rank), target)
    return found


def _replayed(run: Run, factory: Any, step: int | None, level: Level | None) -> Replay:
    kept = _kept_step(run, step)
    recorded = run.step(kept.step)
    meta = run.meta
    net, loss_fn = _made(factory)
    notes: list[str] = []
    net = _at_level(net, level, meta.get("amp_level"), notes)
    batch = _ordered(net, tuple(_tensor(value) for value in kept.batch), kept.keywords)
    scale = recorded.loss_scale if recorded.loss_scale is not None else 1.0
    if recorded.loss_scale is None:
        notes.append("The loss scale of the step is not known; it was run without one.")
    with _pynative(), _put_back(net, None):
        _give_state(net, loss_fn, kept, notes)
        _stop_training(net, kept)
        exact: dict[tuple[int, int], TensorStats] = {}
        try:
            seen = run_step(
                net,
                batch,
                loss_fn,
                None,
                detect_level(net, places(net)),
                cell_facts(net),
                loss_scale=scale,
                randomness=partial(_as_recorded, kept),
                exact_gradients=exact,
            )
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if isinstance(error, AmpdebugError):
                raise
            raise AmpdebugError(
                f"step {kept.step} could not be run again: the network or its loss raised {type(error).__name__}: "
                f"{str(error).strip().splitlines()[0] if str(error).strip() else ''}. The batch is "
                f"{_shapes(kept.batch)}; the first of it go to the network, the rest to loss_fn"
            ) from error
    graph = kept.facts.get("mode", meta.get("mode")) == "GRAPH_MODE"
    return judge_replay(str(run.path.parent), recorded, seen, exact, notes, loss_scale=scale, graph=graph)


def _kept_step(run: Run, step: int | None) -> KeptStep:
    found = find_kept_steps(run.path.parent, run.this_rank)
    if not found:
        raise StoreError(
            f"{run.path.parent} holds no kept step of rank {run.this_rank}. Steps that go wrong are kept where the run "
            "is recorded with keep_bad_steps=2 (AMPMonitor, watch) or `ampdebug run --keep-bad-steps 2`"
        )
    if step is not None and step not in found:
        raise ArgumentError(f"step={step!r} was not kept; kept are {', '.join(map(str, found))}")
    return read_kept_step(found[next(iter(found)) if step is None else step])


# --- the network ------------------------------------------------------------------------------------------------------


def _made(factory: Any) -> tuple[nn.Cell, Any]:
    """The network and its loss."""
    found = factory
    name = getattr(factory, "__name__", type(factory).__name__)
    if not isinstance(factory, (Workload, nn.Cell)):
        if not callable(factory):
            raise ArgumentError(
                f"factory={factory!r} is of type {type(factory).__name__}; give a function or a Workload"
            )
        found = factory()
    if isinstance(found, Workload):
        return found.network(), found.loss
    parts = list(found) if isinstance(found, (tuple, list)) else [found]
    if not parts or not isinstance(parts[0], nn.Cell):
        got = type(parts[0]).__name__ if parts else "nothing"
        raise ArgumentError(f"{name}() gave {got}; it must give a Cell, or a tuple that begins with one")
    # What is no batch is the loss: with inputs it stands third, without them second.
    rest = parts[1:] if len(parts) > 1 and _is_function(parts[1]) else parts[2:]
    loss_fn = rest[0] if rest else None
    if loss_fn is not None and not _is_function(loss_fn):
        raise ArgumentError(f"{name}() gave a {type(loss_fn).__name__} where the loss function belongs")
    return parts[0], loss_fn


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, (Tensor, nn.Optimizer))


def _at_level(net: nn.Cell, level: Level | None, recorded: Any, notes: list[str]) -> nn.Cell:
    own = detect_level(net, places(net))
    wanted: Any = level
    if level is None and own == "O0" and recorded not in (None, "O0"):
        wanted = str(recorded).partition(" ")[0]  # "O2 or O3": the two convert this network alike
        if wanted not in LEVELS:
            notes.append(
                f"The training ran at level {recorded!r}, and the factory's network computes in float32: let the "
                "factory set the same cells to 16 bits."
            )
            return net
        notes.append(f"The factory's network has no level; it was converted to {wanted}, that of the run.")
    elif own != "O0" or level is not None:
        now = level or own
        if recorded is not None and now not in str(recorded) and str(recorded) not in now:
            notes.append(f"The training ran at level {recorded}, the replay at {now}.")
    if wanted is None or own != "O0":
        return net
    converted, _ = _converted(net, wanted, None, True)
    return converted


def _give_state(net: nn.Cell, loss_fn: Any, kept: KeptStep, notes: list[str]) -> None:
    if not kept.parameters:
        notes.append("Parameters were not kept (they did not fit): those that the factory makes were taken.")
        return
    own = {parameter_name(p.name): p for p in net.get_parameters()}
    optional = {parameter_name(p.name): p for p in loss_fn.get_parameters()} if isinstance(loss_fn, nn.Cell) else {}
    given = _aligned({parameter_name(name): value for name, value in kept.parameters.items()}, own)
    present = {**optional, **own}
    unknown = [name for name in given if name not in present]
    missing = [name for name in own if name not in given]
    if unknown or missing:
        raise ArgumentError(
            "the factory's network is not the one that was trained. Parameters that were recorded and are not in it: "
            f"{_names(unknown)}; in it and not recorded: {_names(missing)}. Give the factory of the run's network"
        )
    for name, value in given.items():
        parameter = present[name]
        if tuple(parameter.shape) != value.values.shape:
            raise ArgumentError(
                f"parameter {name!r} has shape {tuple(parameter.shape)} in the factory's network and "
                f"{value.values.shape} in the recording: it is another network"
            )
        parameter.set_data(_tensor(value))
    if kept.state_step is not None and kept.state_step != kept.step:
        behind = kept.step - kept.state_step
        notes.append(
            f"The parameters are those before step {kept.state_step}, {behind} step{'s' if behind > 1 else ''} before "
            "the batch's: its update was not skipped, and a copy was not made at every step. keep_every=1 makes one."
        )


def _aligned(given: dict[str, KeptArray], own: Mapping[str, Any]) -> dict[str, KeptArray]:
    """Takes a prefix off, or puts one on, where all names differ by the same one (a cell around the network)."""
    if not given or given.keys() & own.keys():
        return given
    first = next(iter(given))
    for name in own:
        if first.endswith(f".{name}"):
            prefix = first[: -len(name)]
            if all(other.startswith(prefix) for other in given):
                return {other[len(prefix) :]: value for other, value in given.items()}
        if name.endswith(f".{first}"):
            prefix = name[: -len(first)]
            if all(other.startswith(prefix) for other in own):
                return {prefix + other: value for other, value in given.items()}
    return given


def _names(names: list[str]) -> str:
    if len(names) <= 5:
        return ", ".join(names) or "none"
    return f"{', '.join(names[:5])} and {len(names) - 5} more"


def _stop_training(net: nn.Cell, kept: KeptStep) -> None:
    found = places(net)
    paths = kept.facts.get("not_training")
    for path in paths if isinstance(paths, list) else []:
        if path in found:
            found[path].inner.training = False


@contextmanager
def _as_recorded(kept: KeptStep) -> Iterator[None]:
    seed = kept.facts.get("seed")
    with seeded(seed if type(seed) is int else 0):
        if kept.random:
            try:
                set_random_state(dict(kept.random))
            except ValueError as error:
                raise StoreError(f"the recording of step {kept.step}: {error}") from error
        yield


# --- the batch --------------------------------------------------------------------------------------------------------


def _tensor(value: Any) -> Any:
    if isinstance(value, KeptArray):
        if value.dtype == "bfloat16":
            return Tensor(value.widened(), mstype.bfloat16)
        return Tensor(np.array(value.values))
    if isinstance(value, (tuple, list)):
        return type(value)(_tensor(item) for item in value)
    if isinstance(value, dict):
        return {key: _tensor(item) for key, item in value.items()}
    return value


def _ordered(net: nn.Cell, batch: tuple[Any, ...], keywords: tuple[str, ...]) -> tuple[Any, ...]:
    """Arguments by name at the places that the network's ``construct`` has them."""
    if not keywords:
        return batch
    count = len(batch) - len(keywords)
    given, named = list(batch[:count]), dict(zip(keywords, batch[count:], strict=True))
    names = [name for name in inspect.signature(unwrap(net).construct).parameters if name != "self"]
    for name in names[count:]:
        if name not in named:
            break
        given.append(named.pop(name))
    return (*given, *named.values())


def _shapes(batch: tuple[Any, ...]) -> str:
    return ", ".join(
        f"{value.dtype}{list(value.values.shape)}" if isinstance(value, KeptArray) else type(value).__name__
        for value in batch
    )
