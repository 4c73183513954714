"""Which cells are watched: ``cells=``."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from mindspore import nn

from ampdebug._errors import ArgumentError
from ampdebug.hooks._cells import Place


def select(places: dict[str, Place], cells: Any) -> dict[str, Place]:
    """Picks the watched cells.

    Args:
        places: All cells by path.
        cells: None for all; a path glob (``"blocks.*.attn"``), a class name (``"Softmax"``), a cell class
            (``nn.Softmax``), or several of these.

    Returns:
        The picked ones, in the order of ``places``.

    Raises:
        ArgumentError: A pattern is of another type, or picks nothing.
    """
    if cells is None:
        return dict(places)
    if not isinstance(cells, Iterable) and not isinstance(cells, type):
        raise ArgumentError(f"cells={cells!r}: must be a path glob, a cell class, or a list of these; None watches all")
    patterns = [cells] if isinstance(cells, (str, type)) else list(cells)
    if not patterns:
        raise ArgumentError(f"cells={cells!r} picks no cell; None watches all")
    picked: set[str] = set()
    for pattern in patterns:
        found = {path for path, place in places.items() if _matches(pattern, place)}
        if not found:
            known = ", ".join(repr(path) for path in list(places)[:8])
            raise ArgumentError(
                f"cells={pattern!r} picks no cell of this network; its paths are {known}"
                f"{', ...' if len(places) > 8 else ''} ('' is the network itself)"
            )
        picked |= found
    return {path: place for path, place in places.items() if path in picked}


def _matches(pattern: Any, place: Place) -> bool:
    if isinstance(pattern, str):
        return place.cell_type == pattern or any(fnmatchcase(path, pattern) for path in (place.path, *place.aliases))
    if isinstance(pattern, type) and issubclass(pattern, nn.Cell):
        if isinstance(place.inner, pattern):
            return True
        # O1 derives its rewritten classes from copies of the originals: the same name, another object.
        rewritten = place.cell_type != type(place.inner).__name__
        return rewritten and any(base.__name__ == pattern.__name__ for base in type(place.inner).__mro__)
    raise ArgumentError(
        f"cells={pattern!r}: must be a path glob such as 'blocks.*.attn', a class name or a class such as nn.Softmax"
    )
