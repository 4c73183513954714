"""Compiled probes that hand over each tensor once.

A tensor that leaves one cell and enters another comes by at both; in a graph without probes it is one node. Copying it
to a callback and measuring it costs the same each time. So a graph is compiled twice where that pays: the first one is
read (:mod:`ampdebug.hooks._slim_graph`) and thrown away, in the second each tensor goes to one callback only, and the
other places get a copy of its row (:class:`ampdebug._recorder.StepRecorder`). Both compilations come before the first
run: MindSpore tunes a graph in its first runs, so a graph that has run is not replaced.
"""

from __future__ import annotations

import itertools

from ampdebug.hooks._graph_operators import CompiledGraph
from ampdebug.hooks._layout import Layout
from ampdebug.hooks._slim_graph import callbacks_with_arguments
from ampdebug.hooks._slim_probe import SlimCall, SlimProbe

WORTHWHILE = 5000
"""Elements saved a step, for each node of the graph, from which compiling twice pays.

A node takes some 4 ms to compile, an element 0.7 ns to hand over and to measure: at this number the second compilation
is paid back after some 1200 recorded steps.
"""

_numbers = itertools.count(1)


class Slimmer:
    """Says, for the probes of one session, which tensors the graph that is compiled next leaves out."""

    def __init__(self) -> None:
        self.saved = 0
        """Elements that the graph compiled last leaves out."""
        self._probes: list[SlimProbe] = []
        self._planned: list[SlimProbe] = []
        self._whole = False

    def watch(self, probe: SlimProbe) -> None:
        """Adds a probe of the session."""
        self._probes.append(probe)

    def compiled(self, graph: CompiledGraph | None) -> bool:
        """A graph was compiled with the probes as they are.

        Args:
            graph: The graph; None where it could not be read.

        Returns:
            It is to be thrown away and compiled again, with the probes as they are now.
        """
        if self._planned:
            if graph is not None and self._as_planned(graph):
                return False
            return self.stay_whole()
        self.saved = 0
        if self._whole or graph is None:
            return False
        plan = _plan(graph, self._probes)
        saved = sum(call.saved for call in plan.values())
        if not saved or saved < WORTHWHILE * len(graph.model.graph.node):
            return False
        self.saved = saved
        for probe, call in plan.items():
            probe.slim = call
            self._planned.append(probe)
        return True

    def stay_whole(self) -> bool:
        """The graph compiled next leaves out nothing. Returns whether one that leaves out something was asked for."""
        asked = bool(self._planned)
        self._forget()
        self.saved = 0
        self._whole = True
        return asked

    def settled(self) -> None:
        """The graph that will run is compiled: the next one is another network's, or has other shapes."""
        self._forget()
        self._whole = False

    def _forget(self) -> None:
        while self._planned:
            self._planned.pop().slim = None

    def _as_planned(self, graph: CompiledGraph) -> bool:
        once = graph.callbacks()
        return all(probe.as_planned(once) for probe in self._planned)


def _plan(graph: CompiledGraph, probes: list[SlimProbe]) -> dict[SlimProbe, SlimCall]:
    """Which of the probes hand over less, and what."""
    once = graph.callbacks()
    owners: dict[int, tuple[SlimProbe, Layout]] = {}
    for probe in probes:
        use = probe.only_use(once)
        if use is not None:
            owners[use[0]] = (probe, use[1])
    places: dict[str, list[tuple[SlimProbe, int, bool]]] = {}
    calls: dict[SlimProbe, tuple[Layout, tuple[str | None, ...]]] = {}
    for function, arguments in callbacks_with_arguments(graph):
        if function in owners and len(arguments) == owners[function][1].observed:
            probe, layout = owners[function]
            calls[probe] = (layout, arguments)
            for index, (name, (is_output, *_)) in enumerate(zip(arguments, layout.handed_over, strict=True)):
                if name is not None:
                    places.setdefault(name, []).append((probe, index, is_output))
    keeps: dict[str, tuple[SlimProbe, int]] = {}
    for name, found in places.items():
        if len(found) > 1:
            # Where a tensor comes from it is seen first, and the call of a container ends with its last child's.
            probe, index, _ = next((place for place in found if place[2]), found[0])
            keeps[name] = (probe, index)
    numbers = {name: next(_numbers) for name in keeps}
    plan: dict[SlimProbe, SlimCall] = {}
    for probe, (layout, arguments) in calls.items():
        shared = tuple(None if name is None else numbers.get(name) for name in arguments)
        kept = tuple(
            index
            for index, name in enumerate(arguments)
            if name is None or name not in keeps or keeps[name] == (probe, index)
        )
        if any(number is not None for number in shared):
            plan[probe] = SlimCall(layout, shared, kept)
    for probe, call in plan.items():
        if not call.kept:
            last = calls[probe][1][-1]
            assert last is not None, "what is left out is known"
            plan[keeps[last][0]].followers.append((probe, call))
    return plan
