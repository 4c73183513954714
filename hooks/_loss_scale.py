"""Loss, loss scale and overflow of whatever train cell, manager or scaler the user has.

Some 190 different train cells are in use; they return ``loss``, ``(loss, overflow)``, ``(loss, overflow, scale)``,
five- and seven-tuples, gradients among them, in any order. So nothing is taken by position: a bool is an overflow
flag, a scalar that equals the scale in force is the scale, what is left is the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore import dtype as mstype

from ampdebug.hooks._tensors import scalar, see

# Where a train cell keeps its scale, in order of trust. Many projects keep an own `.loss_scale` and leave
# `.scale_sense` at its first value.
_SCALE_ATTRIBUTES = (
    "loss_scale",
    "scale_sense",
    "loss_scaler",
    "scaler",
    "scale_value",
    "sens",
    "scale",
    "loss_scaling_manager",
)


def read_scale(holder: Any, *, depth: int = 0) -> float | None:
    """Reads the loss scale in force, now.

    Args:
        holder: A number, a tensor, a loss scaler, a loss scale manager or a train cell.

    Returns:
        The scale, None where ``holder`` has none.
    """
    value = scalar(holder)
    if value is not None:
        return value
    if holder is None or isinstance(holder, (str, bytes, tuple, list, dict)) or depth > 3:
        return None
    for name in _SCALE_ATTRIBUTES:
        inner = getattr(holder, name, None)
        if inner is None or (callable(inner) and not isinstance(inner, nn.Cell)):
            continue
        value = read_scale(inner, depth=depth + 1)
        if value is not None:
            return value
    get = getattr(holder, "get_loss_scale", None)
    if callable(get) and not isinstance(holder, nn.Cell):
        return scalar(get())
    if isinstance(holder, nn.Cell):
        value = scalar(getattr(holder, "loss_scale_value", None))
        network = getattr(holder, "network", None)
        return value if value is not None or network is None else read_scale(network, depth=depth + 1)
    return None


@dataclass(slots=True)
class Outputs:
    """What a train step gave back, sorted by what it is.

    Attributes:
        loss: The loss as a float, the mean where it was not reduced; None if there is none.
        overflow: What the step said about overflow, None if it said nothing.
        scale: The loss scale among the outputs (most cells give the one *after* the update).
        extra: Other scalars by place (``"output.3"``).
    """

    loss: float | None = None
    overflow: bool | None = None
    scale: float | None = None
    extra: dict[str, float] = field(default_factory=dict)


def sort_outputs(outputs: Any, *, scales: tuple[float | None, ...] = (), learning_rate: float | None = None) -> Outputs:
    """Tells loss, overflow and scale apart by type, dtype and value.

    Args:
        outputs: What the train cell or step function returned.
        scales: Values the loss scale is known to have (before, after the step).
        learning_rate: The rate in force, if known, so that it isn't taken for a loss.
    """
    found = Outputs()
    candidates: list[tuple[str, float, bool]] = []
    known = {value for value in scales if value is not None}
    for place, item in _flat(outputs):
        if isinstance(item, (bool, np.bool_)) or _is_bool_tensor(item):
            flag = bool(item) if isinstance(item, (bool, np.bool_)) else bool(item.asnumpy().any())
            found.overflow = flag or bool(found.overflow)
            continue
        value = _float_scalar(item)
        if value is not None:
            candidates.append((place, value, isinstance(item, Parameter)))
    for place, value, is_state in _without_scale(candidates, known, found):
        rate = learning_rate is not None and math.isclose(value, learning_rate, rel_tol=1e-6)
        if found.loss is None and not is_state and not (rate and len(candidates) > 1):
            found.loss = value
        else:
            found.extra[place] = value
    if found.loss is None and isinstance(outputs, Tensor) and outputs.size > 1:
        array = see(outputs).array
        if array is not None:
            wide = outputs.astype(mstype.float32).asnumpy() if outputs.dtype == mstype.bfloat16 else array
            found.loss = float(np.mean(wide, dtype=np.float64))
    return found


def _without_scale(
    candidates: list[tuple[str, float, bool]], known: set[float], found: Outputs
) -> list[tuple[str, float, bool]]:
    """Takes the scale out: a live Parameter, a value known to be the scale, else the one power of two among others."""
    if len(candidates) < 2:
        return candidates
    by_state = [c for c in candidates if c[2]]
    by_value = [c for c in candidates if c[1] in known and c[1] != 1.0] or [c for c in candidates[1:] if c[1] in known]
    by_shape = [c for c in candidates if c[1] >= 2.0 and math.frexp(c[1])[0] == 0.5]
    for group in (by_state, by_value, by_shape if len(by_shape) == 1 else []):
        if group and len(group) < len(candidates):
            found.scale = group[0][1]
            return [c for c in candidates if c is not group[0]]
    return candidates


def _flat(value: Any, place: str = "output") -> Iterator[tuple[str, Any]]:
    """Scalars of a tuple, list or dict; tuples of tensors inside it (gradients) are passed over."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat_item(item, f"{place}.{key}")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _flat_item(item, f"{place}.{index}")
    else:
        yield place, value


def _flat_item(item: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(item, (tuple, list, dict)):
        values = item.values() if isinstance(item, dict) else item
        if all(not isinstance(v, Tensor) or v.size == 1 for v in values):
            yield from _flat(item, place)
    else:
        yield place, item


def _is_bool_tensor(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype == mstype.bool_ and item.size == 1


def _float_scalar(item: Any) -> float | None:
    if isinstance(item, int):
        return None
    if isinstance(item, Tensor) and item.dtype not in (mstype.float16, mstype.float32, mstype.float64, mstype.bfloat16):
        return None
    return scalar(item)


def read_learning_rate(optimizer: Any, *, evaluate: bool = False) -> float | None:
    """The learning rate that the next update of the first parameter group will use.

    Args:
        optimizer: Of ``mindspore.nn`` or ``mindspore.experimental.optim``.
        evaluate: Also run a schedule cell (a few scalar operators); else its rate is unknown.
    """
    groups = getattr(optimizer, "param_groups", None)
    if isinstance(groups, (list, tuple)) and groups and isinstance(groups[0], dict) and "lr" in groups[0]:
        return scalar(groups[0]["lr"])
    rate: Any = getattr(optimizer, "learning_rate", None)
    if isinstance(rate, (tuple, list)) or type(rate).__name__ in ("ParameterTuple", "CellList"):
        rate = rate[0] if len(rate) else None
    value = scalar(rate)
    if value is not None:
        return value
    table = getattr(rate, "learning_rate", None)
    step = scalar(getattr(optimizer, "global_step", None))
    if isinstance(table, Tensor) and table.size > 1 and step is not None:
        values = table.asnumpy().reshape(-1)
        return float(values[min(int(step), values.size - 1)])
    if evaluate and isinstance(rate, nn.Cell) and table is None and step is not None:
        return scalar(rate(Tensor(int(step), mstype.int32)))
    return None
