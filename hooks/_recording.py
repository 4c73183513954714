"""Recording a whole evaluation of a network: which sites ran in what, what it was last called with, and how it went."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from mindspore import nn

from ampdebug._sites import OperatorCall, OperatorSite, is_transparent, short_name
from ampdebug.hooks._cells import cell_type
from ampdebug.hooks._interpose import Function, interpose
from ampdebug.hooks._operators import dtypes
from ampdebug.hooks._protect import Policy
from ampdebug.hooks._shadow import flat_tensors
from ampdebug.hooks._sites import PathOf, SiteTracker

_MOVED = "ampdebug_moved_by"


@dataclass(slots=True)
class Recording:
    """What was seen.

    Attributes:
        calls: One call for each site and combination of dtypes, in order of first execution.
        labels: ``{site: "Reshape → ReduceMean"}``: its operator with the movements that its first operand came through.
        arguments: What the network was last called with, positional and by name; None before the first call.
        training: Whether it was in training mode then.
        root_calls: How many calls of the network there were.
    """

    calls: list[OperatorCall] = field(default_factory=list)
    labels: dict[OperatorSite, str] = field(default_factory=dict)
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    training: bool = False
    root_calls: int = 0

    @property
    def compiled(self) -> list[str]:
        """Names of the compiled parts inside the network."""
        return list(dict.fromkeys(call.operator for call in self.calls if call.compiled and call.site is not None))


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a recording says about running the network; plain data that can be sent to another process.

    Attributes:
        names: ``{site under the level: the same site in the float32 network}``.
        policy: What the level runs in, by its own sites.
        reference_policy: The same by the sites of the float32 network.
    """

    names: dict[OperatorSite, OperatorSite]
    policy: Policy
    reference_policy: Policy


@contextmanager
def record_evaluation(network: nn.Cell, path_of: PathOf) -> Iterator[Recording]:
    """Records what runs inside the network while the context lasts, however often it is called.

    Args:
        network: The network.
        path_of: As for ``record_operators``.
    """
    watcher = _Watcher(network, SiteTracker(network, path_of))
    with interpose(watcher):
        yield watcher.recording


class _Watcher:
    def __init__(self, network: nn.Cell, tracker: SiteTracker) -> None:
        self._network, self._tracker = network, tracker
        self._seen: set[tuple[OperatorSite, tuple[str, ...]]] = set()
        self.recording = Recording()

    def on_cell(self, cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        if cell is self._network:
            self.recording.arguments = (args, kwargs)
            self.recording.training = bool(cell.training)
            self.recording.root_calls += 1
        return self._tracker.run_cell(cell, call)

    def on_compiled(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: Callable[[], Any]) -> Any:
        located = self._tracker.site(name)
        result = call()
        if located is not None:
            self._note(located, name, dtypes((args, kwargs)), result, compiled=True)
        return result

    def on_operator(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        located = self._tracker.site(name)
        result = function(*args, **kwargs)
        if located is None:
            return result
        chain = next(filter(None, (tensor._get_user_data(_MOVED) for tensor in flat_tensors(args))), ())
        if is_transparent(name):
            for tensor in flat_tensors(result):
                tensor._set_user_data(_MOVED, (*chain, name))
        self._note(located, name, dtypes((args, kwargs) if kwargs else args), result, compiled=False)
        self.recording.labels.setdefault(located[0], " → ".join(map(short_name, (*chain, name))))
        return result

    def _note(
        self, located: tuple[OperatorSite, str], name: str, inputs: tuple[str, ...], result: Any, *, compiled: bool
    ) -> None:
        site, file = located
        if (site, inputs) not in self._seen:
            self._seen.add((site, inputs))
            kind = "" if self._tracker.cell is None else cell_type(self._tracker.cell)
            self.recording.calls.append(OperatorCall(site, name, file, kind, inputs, dtypes(result), compiled))


def align(level: Iterable[OperatorCall], reference: Iterable[OperatorCall]) -> dict[OperatorSite, OperatorSite]:
    """Which site under the level is which site of the float32 network.

    The same one, unless O1 rewrote the code: then the k-th call of an operator in a cell is taken for the k-th, where
    both have equally many.

    Returns:
        ``{site under the level: site of the float32 network}`` without those that have no counterpart.
    """
    theirs = list(dict.fromkeys(call.site for call in reference if call.site is not None))
    known = set(theirs)
    ours = list(dict.fromkeys(call.site for call in level if call.site is not None))
    found = {site: site for site in ours if site in known}
    groups: dict[tuple[str, str], tuple[list[OperatorSite], list[OperatorSite]]] = {}
    for side, sites in enumerate((ours, theirs)):
        for site in sites:
            groups.setdefault((site.path, site.operator), ([], []))[side].append(site)
    for mine, others in groups.values():
        if len(mine) == len(others):
            found.update({site: other for site, other in zip(mine, others, strict=True) if site not in found})
    return found


def renamed(calls: Iterable[OperatorCall], names: Mapping[OperatorSite, OperatorSite]) -> list[OperatorCall]:
    """The calls at sites that have another name, under that name; the others are left out."""
    return [replace(call, site=names[call.site]) for call in calls if call.site is not None and call.site in names]
