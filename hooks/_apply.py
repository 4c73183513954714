"""The answer of a bisection carried out on a network: cells that stay in float32 under a level, in both modes.

What the search proved is about single operators. A network that trains for days must not be steered from Python, and a
compiled one cannot be, so here whole cells are pinned by MindSpore's own flags: every culprit's cell computes its *own*
operators in float32, and its children keep the precision that the level gave them. That protects more than the search
asked for, never less, if the values between protected operators stay unrounded too; where they pass from one cell to
the next, :func:`unrounded_edges` has seen it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from mindspore import amp, nn
from mindspore import dtype as mstype
from mindspore.ops import functional as F

from ampdebug._errors import ArgumentError
from ampdebug._sites import OperatorSite, is_cast, is_transparent
from ampdebug.hooks._cells import Place, places
from ampdebug.hooks._interpose import Function, interpose
from ampdebug.hooks._operators import known_paths
from ampdebug.hooks._protect import LOW_DTYPES
from ampdebug.hooks._shadow import flat_tensors
from ampdebug.hooks._sites import SiteTracker

Edge = tuple[str, str]
"""Cell paths of a producer and of a consumer of a value that must stay unrounded between them."""

_FROM = "ampdebug_from"


class _OutputTo16(nn.Cell):
    """Casts what a cell gives: of a float32 one back to the format of the level, or of another one to float32.

    Named as MindSpore's own, which O2 puts around BatchNorm and LayerNorm, so that all code that looks through that one
    looks through this one; unlike it, it takes cells with several outputs, and shows the attributes of its cell.
    """

    def __init__(self, backbone: nn.Cell, dtype: Any) -> None:
        super().__init__(auto_prefix=False)
        self._backbone = backbone
        self.dtype = dtype
        self._get_attr_from_cell(backbone)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_backbone":  # while it is being made
                raise
            return getattr(self._backbone, name)

    def construct(self, *args, **kwargs):  # type: ignore[no-untyped-def] # compiled by MindSpore
        return F.mixed_precision_cast(self.dtype, self._backbone(*args, **kwargs))


def keep_cells(
    network: nn.Cell, sites: Collection[OperatorSite], *, level: str, dtype: str, edges: Collection[Edge] = ()
) -> nn.Cell:
    """A network under a level, with the cells of some operators in float32.

    Args:
        network: The network at O0, which is converted here, in place as MindSpore does it; or one that
            ``amp.auto_mixed_precision`` has converted at this level and that has not been compiled yet.
        sites: The operators.
        level: ``"O1"``, ``"O2"``, ``"O3"`` or ``"auto"``.
        dtype: ``"float16"`` or ``"bfloat16"``.
        edges: Values between cells that must stay unrounded.

    Returns:
        The network to train; under O1, O2 and O3 another object than the one given.

    Raises:
        ArgumentError: The network is under another level, was converted at O1 (which rewrites its code, so that
            nothing can be pinned afterwards), or has no cell at the path of a site.
    """
    if not isinstance(network, nn.Cell):
        raise ArgumentError(f"net is a {type(network).__name__}; it must be a mindspore.nn.Cell")
    found = _level_of(network) or "O0"
    if found not in ("O0", level):
        raise ArgumentError(f"net is under {found} already, and the search was under {level}; give a network at O0")
    if found == "O1":
        raise ArgumentError(
            "net has been converted at O1, which writes its code anew; give the network at O0, it is converted here"
        )
    low = LOW_DTYPES[dtype]
    paths = sorted({site.path for site in sites})
    if level in ("O1", "auto"):  # they keep what was pinned before, and give nothing 16 bits that was not so already
        at = _checked(network, paths)
        for path in paths:
            _pin(at[path].inner)
        return network if found == level else amp.auto_mixed_precision(network, level, low)
    converted = network if found == level else amp.auto_mixed_precision(network, level, low)
    at = _checked(converted, paths)
    for path in paths:
        _pin(at[path].inner)
    for producer, consumer in edges:
        if _left_by(producer, producer, consumer) and type(at[producer].outer).__name__ == "_OutputTo16":
            at[producer].outer.dtype = mstype.float32
    for path in paths:
        if path and not any(_left_by(path, *edge) for edge in edges):
            _round_output(converted, at, path, low)
    for path in paths:
        _widen_children(at[path].inner, {id(at[other].inner) for other in paths})
    return converted


def _level_of(network: nn.Cell) -> str:
    """The level a network was converted at, ``""`` for none."""
    found: str = getattr(network, "_amp_level", "") or ""
    return found


def _checked(network: nn.Cell, paths: Collection[str]) -> Mapping[str, Place]:
    at = places(network)
    missing = [path for path in paths if path not in at]
    if missing:
        raise ArgumentError(
            f"net has no cell at {', '.join(map(repr, missing))}: it must be made as the network that was searched "
            "(cells in a plain Python list have no path: put them into a CellList)"
        )
    return at


def _pin(cell: Any) -> None:
    """This cell's own operators in float32; ``to_float`` would take its children along."""
    cell.add_flags(fp32=True, fp16=False, bf16=False)


def _left_by(path: str, producer: str, consumer: str) -> bool:
    """The edge leads out of the cell at ``path``."""
    return _is_within(producer, path) and not _is_within(consumer, path)


def _is_within(path: str, outer: str) -> bool:
    return path == outer or not outer or path.startswith(outer + ".")


def _round_output(network: nn.Cell, at: Mapping[str, Place], path: str, low: Any) -> None:
    place = at[path]
    if type(place.outer).__name__ == "_OutputTo16":
        return  # O2 rounds it already
    rounded = _OutputTo16(place.inner, low)
    for holder in {id(cell): cell for _, cell in network.cells_and_names()}.values():
        for name, child in holder._cells.items():
            if child is place.inner and holder is not rounded:
                holder._cells[name] = rounded
                if isinstance(holder, nn.SequentialCell):
                    holder.cell_list = list(holder._cells.values())  # what it runs, as O2 does it


def _widen_children(cell: Any, pinned: Collection[int]) -> None:
    """Hands a pinned cell float32 from its children: a graph casts at a cell's border and nowhere else in it."""
    for name, child in cell._cells.items():
        if isinstance(child, (nn.CellList, nn.CellDict)):  # they are not called, what they hold is
            _widen_children(child, pinned)
        elif child is not None and id(child) not in pinned and not _gives_float32(child):
            cell._cells[name] = _OutputTo16(child, mstype.float32)


def _gives_float32(cell: Any) -> bool:
    return type(cell) is _OutputTo16 and bool(cell.dtype == mstype.float32)


# --- edges ------------------------------------------------------------------------------------------------------------


def unrounded_edges(
    network: nn.Cell,
    run: Callable[[], Any],
    protected: Collection[OperatorSite],
    in_float32: Collection[OperatorSite],
) -> tuple[Edge, ...]:
    """Which values must stay unrounded on their way from one cell to another.

    Args:
        network: The network at O0.
        run: Calls it once.
        protected: Sites that the search keeps in float32, as they are called in this network.
        in_float32: Sites that the level leaves in float32 by itself.

    Returns:
        Pairs of different cells: one of the two operators is protected, and the other one too or in float32 anyway.
    """
    watcher = _EdgeWatcher(SiteTracker(network, known_paths(network)), frozenset(protected), frozenset(in_float32))
    with interpose(watcher):
        run()
    return tuple(sorted(watcher.edges))


class _EdgeWatcher:
    """Notes on every tensor which operator computed it."""

    def __init__(
        self, tracker: SiteTracker, protected: frozenset[OperatorSite], in_float32: frozenset[OperatorSite]
    ) -> None:
        self._tracker, self._protected, self._in_float32 = tracker, protected, in_float32
        self.edges: set[Edge] = set()

    def on_cell(self, cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        return self._tracker.run_cell(cell, call)

    def on_compiled(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: Callable[[], Any]) -> Any:
        return call()

    def on_operator(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        located = self._tracker.site(name)
        site = None if located is None else located[0]
        given = flat_tensors((args, kwargs))
        origins = [origin for tensor in given for origin in tensor._get_user_data(_FROM) or ()]
        result = function(*args, **kwargs)
        if is_cast(name) or is_transparent(name):
            passed = tuple(dict.fromkeys(origins))
        else:
            passed = () if site is None else (site,)
            for origin in origins:
                if site is not None and origin.path != site.path and self._stays(origin, site):
                    self.edges.add((origin.path, site.path))
        for tensor in flat_tensors(result):
            if not any(tensor is other for other in given):
                tensor._set_user_data(_FROM, passed)
        return result

    def _stays(self, producer: OperatorSite, consumer: OperatorSite) -> bool:
        either = producer in self._protected or consumer in self._protected
        return either and all(site in self._protected or site in self._in_float32 for site in (producer, consumer))
