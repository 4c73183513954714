"""Cell paths that stay the same whatever wraps the network.

``auto_mixed_precision``, ``Model`` and the train cells put cells of their own around and into a network:
``_OutputTo32`` around the root, ``_OutputTo16`` around a kept BatchNorm, a loss cell, a train cell, and O1 replaces
classes by rewritten ones. A path here is the attribute path in the *user's* network, so that ``blocks.0.norm`` is the
same cell at O0, O1, O2, O3 and auto, alone, under ``Model`` and under a train cell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mindspore import nn

from ampdebug._records import Cell
from ampdebug.hooks._tensors import dtype_name

LOSS_PATH = "(loss)"
"""Path of the loss cell that ``Model`` or ``build_train_network`` was given beside the network."""

# Cells that a level puts around another one and that mean nothing to the user: class name -> attribute of the wrapped.
_AMP_WRAPPERS = {"_OutputTo32": "_backbone", "_OutputTo16": "_backbone"}
# Cells that pair a network with its loss: class name -> (attribute of the network, attribute of the loss).
_LOSS_WRAPPERS = {
    "WithLossCell": ("_backbone", "_loss_fn"),
    "_WithLossCell": ("_backbone", "_loss_fn"),
    "WithEvalCell": ("_network", "_loss_fn"),
}
# Cells that run the network on data of a queue, or hold it otherwise.
_PASS_THROUGH = {"DatasetHelper": "network", "_DataWrapper": "network", "VirtualDatasetCellTriple": "_backbone"}
_REWRITTEN = re.compile(r"(.+?)Opt(?:_\d+)?$")


@dataclass(slots=True)
class Place:
    """One cell of the user's network and where it hangs.

    Attributes:
        path: Its path; ``""`` is the network itself.
        outer: The object to observe: the outermost wrapper a level put around it, whose output is what the next cell
            gets.
        inner: The user's own cell inside.
        cell_type: Class name of ``inner`` without what O1's rewrite adds.
        aliases: Further paths of the same object.
        children: Paths of the direct children.
    """

    path: str
    outer: Any
    inner: Any
    cell_type: str
    aliases: list[str] = field(default_factory=list)
    children: list[str] = field(default_factory=list)


def cell_type(cell: Any) -> str:
    """Class name of a cell; O1's rewritten ``NetOpt`` and ``DenseOpt_1`` give the name they were made from."""
    cls = type(cell)
    match = _REWRITTEN.match(cls.__name__)
    # O1 derives the rewritten class from the original, so the original's name stands among the bases.
    if match and any(base.__name__ == match[1] for base in cls.__mro__[1:]):
        return match[1]
    return cls.__name__


def unwrap(cell: Any) -> Any:
    """Takes the wrappers of the AMP levels off one cell."""
    while type(cell).__name__ in _AMP_WRAPPERS:
        cell = getattr(cell, _AMP_WRAPPERS[type(cell).__name__])
    return cell


def is_train_cell(cell: Any) -> bool:
    """True for a cell that computes gradients and updates: it holds an optimizer and a network."""
    return (
        isinstance(cell, nn.Cell)
        and isinstance(getattr(cell, "optimizer", None), nn.Cell)
        and isinstance(getattr(cell, "network", None), nn.Cell)
    )


def find_train_cell(cell: Any) -> Any | None:
    """The train cell at or below ``cell`` (a data-sink wrapper holds it as ``network``), None if there is none."""
    seen = 0
    while isinstance(cell, nn.Cell) and seen < 8:
        if is_train_cell(cell):
            return cell
        cell = getattr(cell, "network", None)
        seen += 1
    return None


def find_root(cell: Any) -> tuple[Any, Any | None]:
    """Goes down from whatever the user watches to the network as the user wrote it.

    Args:
        cell: A network, an AMP-converted network, a loss wrapper or a train cell.

    Returns:
        ``(outermost AMP wrapper of the network, or the network; the loss cell beside it or None)``.
    """
    loss = None
    while True:
        name = type(cell).__name__
        if name in _LOSS_WRAPPERS:
            network, loss_name = _LOSS_WRAPPERS[name]
            loss = getattr(cell, loss_name, None) or loss
            cell = getattr(cell, network)
        elif is_train_cell(cell):
            cell = cell.network
        elif name in _PASS_THROUGH:
            cell = getattr(cell, _PASS_THROUGH[name])
        elif name in _AMP_WRAPPERS and _holds_loss_wrapper(cell):
            cell = getattr(cell, _AMP_WRAPPERS[name])
        else:
            return cell, loss if isinstance(loss, nn.Cell) else None


def _holds_loss_wrapper(cell: Any) -> bool:
    inner = unwrap(cell)
    return type(inner).__name__ in _LOSS_WRAPPERS or is_train_cell(inner)


def places(cell: Any) -> dict[str, Place]:
    """All cells of the user's network by path, parents before children, each object once.

    Args:
        cell: See :func:`find_root`.

    Returns:
        ``{path: place}``; the loss cell, where there is one, stands last under ``"(loss)"``.
    """
    root, loss = find_root(cell)
    found: dict[str, Place] = {}
    by_id: dict[int, Place] = {}
    _walk(root, "", found, by_id)
    if loss is not None and id(unwrap(loss)) not in by_id:
        _walk(loss, LOSS_PATH, found, by_id)
    return found


def _walk(outer: Any, path: str, found: dict[str, Place], by_id: dict[int, Place]) -> None:
    inner = unwrap(outer)
    known = by_id.get(id(inner))
    if known is not None:
        if path != known.path:
            known.aliases.append(path)
        return
    place = Place(path, outer, inner, cell_type(inner))
    found[path] = by_id[id(inner)] = place
    for name, child in inner._cells.items():  # name_cells() leaves out the second name of a shared child
        if child is None:
            continue
        child_path = f"{path}.{name}" if path else name
        place.children.append(child_path)
        _walk(child, child_path, found, by_id)


def asked_dtype(cell: Any) -> str | None:
    """The dtype that ``to_float`` or a level set on this cell; None where nothing did."""
    for flag, name in (("fp16", "float16"), ("fp32", "float32"), ("bf16", "bfloat16")):
        if getattr(cell, flag, False):
            return name
    return None


def own_parameters(cell: Any) -> Iterator[Any]:
    """The parameters that belong to this very cell, not to a child."""
    yield from (parameter for parameter in cell._params.values() if parameter is not None)


def describe(place: Place, *, watched: bool = True, note: str = "") -> Cell:
    """The record of one cell; what it computes in is added when it was seen."""
    return Cell(
        path=place.path,
        cell_type=place.cell_type,
        children=tuple(place.children),
        parameters={p.name: dtype_name(p.dtype) for p in own_parameters(place.inner)},
        asked_dtype=asked_dtype(place.inner),
        aliases=tuple(place.aliases),
        watched=watched,
        note=note,
    )
