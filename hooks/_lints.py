"""Mistakes that can be seen before the first step; each is said once when watching begins."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import mindspore as ms
from mindspore import nn

from ampdebug._formats import round_through
from ampdebug._records import Event
from ampdebug.hooks._cells import Place, asked_dtype
from ampdebug.hooks._environment import epsilon_of, mode_name
from ampdebug.hooks._loss_scale import read_scale
from ampdebug.hooks._pins import lost_pins
from ampdebug.hooks._tensors import scalar


def lint(train_cell: Any, optimizer: Any, places: dict[str, Place], level: str) -> Iterator[Event]:
    """Looks at what is about to be trained.

    Args:
        train_cell: The train cell, None in a functional loop.
        optimizer: The optimizer, or None.
        places: The watched network's cells.
        level: The AMP level.

    Yields:
        One event for each mistake.
    """
    yield from _scale_that_nobody_divides_by(train_cell, optimizer)
    yield from _epsilon_that_is_zero(optimizer)
    yield from _pins_that_were_lost(places)
    if level == "O1":
        yield from _first_argument(places)
    if mode_name() == "GRAPH_MODE" and ms.get_context("device_target") != "CPU":
        yield Event(
            0,
            "graph-mode-captures",
            "In graph mode on this device the values are copied into buffers on the device and read after each "
            "recorded step: it costs memory as large as the watched tensors. Narrow cells= or raise every= where it is "
            "too much.",
        )


def _scale_that_nobody_divides_by(train_cell: Any, optimizer: Any) -> Iterator[Event]:
    divides_by = scalar(getattr(optimizer, "loss_scale", None))
    if divides_by is None:
        return
    if type(train_cell) is nn.TrainOneStepCell:
        scale = read_scale(train_cell)
        if scale is not None and scale != divides_by:
            yield Event(
                0,
                "sens-differs-from-optimizer-loss-scale",
                f"The loss is multiplied by {scale:g}, but the optimizer divides the gradients by {divides_by:g}: "
                f"every update is {scale / divides_by:g} times too large. Give the optimizer loss_scale={scale:g}.",
                {"sens": scale, "optimizer_loss_scale": divides_by},
            )
    elif isinstance(train_cell, nn.TrainOneStepWithLossScaleCell) and divides_by != 1.0:
        yield Event(
            0,
            "optimizer-divides-again",
            f"{type(train_cell).__name__} has divided the gradients by the loss scale already, and the optimizer "
            f"divides them by {divides_by:g} once more. Leave the optimizer's loss_scale at 1.",
            {"optimizer_loss_scale": divides_by},
        )


def _epsilon_that_is_zero(optimizer: Any) -> Iterator[Event]:
    """An optimizer that adds an epsilon to float16 numbers that can't hold it."""
    epsilon = epsilon_of(optimizer)
    if not epsilon or float(round_through([epsilon], "float16")[0]) != 0.0:
        return
    owned = getattr(optimizer, "parameters", None)
    low = [p.name for p in owned or () if getattr(p, "dtype", None) == ms.float16]
    if low:
        name = type(optimizer).__name__
        yield Event(
            0,
            "optimizer-epsilon-is-zero",
            f"{name}'s epsilon of {epsilon:g} is 0 in float16, which {len(low)} of its parameters are kept in "
            f"({', '.join(low[:3])}). Keep them in float32, or give an epsilon of 1e-4.",
            {"optimizer": name, "epsilon": epsilon, "parameters": low[:20], "count": len(low)},
        )


def _pins_that_were_lost(places: dict[str, Place]) -> Iterator[Event]:
    """Cells that ``to_float`` set to float32 and a later call set to 16 bits."""
    for path, known_by in lost_pins(places).items():
        place = places[path]
        asked = asked_dtype(place.inner)
        yield Event(
            0,
            "float32-pin-lost",
            f"{place.cell_type} {path!r} was set to float32 with to_float, and a later call set it to {asked} again.",
            {"path": path, "cell_type": place.cell_type, "asked": asked, "known_by": known_by},
        )


def _first_argument(places: dict[str, Place]) -> Iterator[Event]:
    for place in places.values():
        construct = getattr(type(place.inner), "construct", None)
        original = next((c for c in type(place.inner).__mro__ if c.__name__ == place.cell_type), None)
        construct = getattr(original, "construct", construct)
        if construct is None or not inspect.isfunction(construct):
            continue
        first = next(iter(inspect.signature(construct).parameters), "self")
        if first != "self":
            yield Event(
                0,
                "o1-converts-nothing",
                f"construct of {place.cell_type} ({place.path or 'the network'}) names its first argument {first!r}. "
                "O1 rewrites only methods that call it 'self', and converts nothing in this cell without saying so.",
                {"path": place.path, "argument": first},
            )
