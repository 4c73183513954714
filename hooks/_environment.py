"""What a run was made with: versions, device, mode, level, ranks."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import mindspore as ms
import numpy as np

from ampdebug.hooks._cells import Place, asked_dtype, cell_type, find_root
from ampdebug.hooks._tensors import scalar


def mode_name() -> str:
    """``"PYNATIVE_MODE"`` or ``"GRAPH_MODE"``, as it is set now."""
    return "GRAPH_MODE" if ms.get_context("mode") == ms.GRAPH_MODE else "PYNATIVE_MODE"


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks; ``(0, 1)`` where no communication group was made."""
    from mindspore.communication import GlobalComm, get_group_size, get_rank

    if GlobalComm.INITED:
        return int(get_rank()), int(get_group_size())
    rank = os.environ.get("RANK_ID", "0")
    size = os.environ.get("RANK_SIZE", "1")
    return (int(rank), int(size)) if rank.isdigit() and size.isdigit() else (0, 1)


def epsilon_of(optimizer: Any) -> float | None:
    """The epsilon that an optimizer adds to its denominator; None where it has none."""
    for name in ("eps", "epsilon", "_eps"):
        value = scalar(getattr(optimizer, name, None))
        if value is not None:
            return value
    defaults = getattr(optimizer, "defaults", None)
    return scalar(defaults.get("eps")) if isinstance(defaults, dict) else None


def detect_level(target: Any, places: dict[str, Place]) -> str:
    """The AMP level that was applied, read off the network itself.

    Args:
        target: What is watched.
        places: Its cells.

    Returns:
        ``"O0"``, ``"O1"``, ``"O2"``, ``"O3"``, ``"auto"``; ``"O2 or O3"`` where the network has no cell on which the
        two differ; ``"manual"`` for cells pinned by ``to_float`` without a level.
    """
    root, _ = find_root(target)
    for candidate in (target, root, places[""].inner):
        level = getattr(candidate, "_amp_level", "")
        if level in ("O1", "O2", "O3", "auto"):
            return str(level)
    for place in places.values():
        if type(place.inner).__name__ != cell_type(place.inner):
            return "O1"
    if _under_auto(places[""].inner):
        return "auto"
    if asked_dtype(places[""].inner) in ("float16", "bfloat16"):
        if any(place.outer is not place.inner for path, place in places.items() if path):
            return "O2"
        kept = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LayerNorm")
        return "O3" if any(place.cell_type in kept for place in places.values()) else "O2 or O3"
    return "manual" if any(asked_dtype(place.inner) for place in places.values()) else "O0"


def _under_auto(cell: Any) -> bool:
    construct = cell.__dict__.get("construct")
    closure = getattr(getattr(construct, "__func__", construct), "__closure__", None) or ()
    cells = [c.cell_contents for c in closure if c is not None]
    # `auto` leaves a wrapper on the root that holds its lists of primitives.
    return hasattr(construct, "__wrapped__") and sum(isinstance(value, list) for value in cells) >= 2


def describe_run(target: Any, places: dict[str, Place], *, level: str | None) -> dict[str, Any]:
    """Plain JSON values for the run's meta data."""
    rank, size = rank_and_size()
    floats = {asked_dtype(place.inner) for place in places.values()} - {None, "float32"}
    return {
        "mindspore": ms.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": ms.get_context("device_target"),
        "mode": mode_name(),
        "amp_level": level or detect_level(target, places),
        "amp_dtype": "bfloat16" if "bfloat16" in floats else "float16",
        "seed": ms.get_seed(),
        "rank": rank,
        "world_size": size,
        "network": places[""].cell_type,
        "argv": list(sys.argv),
        "deterministic": ms.get_context("deterministic"),
        "parameters": [
            {
                "name": parameter.name,
                "shape": [int(n) for n in parameter.shape],
                "dtype": str(parameter.dtype).lower(),
                "requires_grad": bool(parameter.requires_grad),
            }
            for parameter in places[""].inner.get_parameters()
        ],
        "environment": {name: os.environ[name] for name in _TELLING if name in os.environ},
    }


# Environment variables that change numbers or execution.
_TELLING = (
    "MS_ASCEND_CHECK_OVERFLOW_MODE",
    "MS_DEV_RUNTIME_CONF",
    "MS_JIT",
    "MS_COMPILER_CACHE_ENABLE",
    "MS_ENABLE_GE",
    "HCCL_DETERMINISTIC",
    "OMP_NUM_THREADS",
)
