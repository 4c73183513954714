"""The dtype a cell really computes in.

The boundary misleads: under O2 in PyNative mode a cell takes float32 and casts inside, under O1 and auto the output is
cast back. In a graph the dtypes inside ``construct`` are known from tracing it; in PyNative mode from the precision flag
in force, which MindSpore applies to every operator the cell runs; under O1 and auto single operators are converted, which
only the operators themselves show.
"""

from __future__ import annotations

from typing import Any

from ampdebug.hooks._cells import Place, asked_dtype

_FLOATS = ("float16", "bfloat16", "float32", "float64")


def compute_dtypes(path: str, places: dict[str, Place], traced: list[Any]) -> tuple[dict[str, str], str]:
    """What a cell's own operators compute in.

    Args:
        path: Its path.
        places: All cells.
        traced: Layouts of its traced calls, empty where it never ran in a graph.

    Returns:
        ``({"": dtype}, source)`` as in :class:`ampdebug._records.Cell`; empty where it is not known.
    """
    inside = [dtype for layout in traced for output, _, dtype, _ in layout.entries if not output and dtype in _FLOATS]
    if inside and not places[path].children:
        widest = max(inside, key=_FLOATS.index)
        return {"": widest}, "trace"
    flag = _flag_in_force(path, places)
    if flag is not None:
        return {"": flag}, "flags"
    return {}, ""


def _flag_in_force(path: str, places: dict[str, Place]) -> str | None:
    while True:
        place = places.get(path)
        if place is not None:
            asked = asked_dtype(place.inner)
            if asked is not None:
                return asked
        if not path or path.startswith("("):
            return None
        path = path.rpartition(".")[0]
