"""Who asked a cell for its dtype: the level, the level's list, or the user's ``to_float``."""

from __future__ import annotations

from typing import Any

from mindspore import nn
from mindspore.train import amp

from ampdebug._audit_records import NOTHING_ASKED, AuditedCell, By, Request
from ampdebug.hooks._cells import Place, asked_dtype, own_parameters
from ampdebug.hooks._lints import _first_argument
from ampdebug.hooks._tensors import dtype_name

_SETS_ALL = ("O2", "O3", "O2 or O3")
_LOW = ("float16", "bfloat16")


class Asked:
    """The precision flags of a network's cells, and whose they are.

    Args:
        places: The cells.
        level: The level that was applied.
    """

    def __init__(self, places: dict[str, Place], level: str) -> None:
        self._places = places
        self._level = level
        self._requests: dict[int, Request] = {}
        for path, place in places.items():
            request = Request(asked_dtype(place.inner), self.by(path), path, automatic=level == "auto")
            self._requests[id(place.inner)] = request
        root = places[""]
        self._roots = (root.outer, root.inner)

    def is_network(self, cell: Any) -> bool:
        """It is the network itself, not a part of it and not the loss."""
        return any(cell is root for root in self._roots)

    @property
    def level(self) -> str:
        """The level."""
        return self._level

    def of_cell(self, cell: Any) -> Request | None:
        """The request that a cell makes when it is called; None where it has no flag, so that the outer one stays."""
        known = self._requests.get(id(cell))
        if known is None:  # a cell in a plain list: no level reaches it
            dtype = asked_dtype(cell) if isinstance(cell, nn.Cell) else None
            return None if dtype is None else Request(dtype, "to_float", automatic=self._level == "auto")
        return known if known.in_force is not None else None

    def of_path(self, path: str) -> Request:
        """The request in force in a cell: its own, else that of the nearest cell above that makes one."""
        while True:
            place = self._places.get(path)
            if place is not None:
                request = self._requests[id(place.inner)]
                if request.in_force is not None:
                    return request
            if not path:
                return Request(automatic=True) if self._level == "auto" else NOTHING_ASKED
            path = path.rpartition(".")[0]

    def by(self, path: str) -> By:
        """Who set the flag of the cell at ``path``."""
        dtype = asked_dtype(self._places[path].inner)
        if dtype is None:
            return ""
        if self._level not in _SETS_ALL:
            return "to_float"
        if dtype in _LOW:
            return "level"
        return "level list" if self.listed(path) else "to_float"

    def listed(self, path: str) -> bool:
        """The level's list keeps this cell, or one above it, in float32: O2 wraps such a cell."""
        if self._level not in _SETS_ALL:
            return False
        while path:
            place = self._places.get(path)
            if place is not None and place.outer is not place.inner:
                return True
            path = path.rpartition(".")[0]
        return False

    def promised(self, path: str) -> bool:
        """The level's rule converts this cell."""
        place = self._places[path]
        if self._level == "O1":
            white = tuple(item for item in amp.AMP_WHITE_LIST if isinstance(item, type) and issubclass(item, nn.Cell))
            return isinstance(place.inner, white)
        return self._level in _SETS_ALL and not self.listed(path) and self.by(path) != "to_float"


def audited_cells(places: dict[str, Place], asked: Asked) -> tuple[AuditedCell, ...]:
    """The records of all cells, in the network's order."""
    return tuple(
        AuditedCell(
            path,
            place.cell_type,
            asked_dtype(place.inner),
            asked.by(path),
            asked.promised(path),
            asked.listed(path) and place.outer is not place.inner,
            tuple((p.name, dtype_name(p.dtype)) for p in own_parameters(place.inner)),
        )
        for path, place in places.items()
    )


def source_lints(places: dict[str, Place], level: str) -> tuple[tuple[str, str], ...]:
    """``(cell path, sentence)`` of what O1 cannot rewrite."""
    if level != "O1":
        return ()
    return tuple((str(event.data["path"]), event.message) for event in _first_argument(places))
