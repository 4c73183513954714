"""Compiled probes that may leave out tensors which other probes hand over."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mindspore import ops

from ampdebug.hooks._graph_probe import GraphProbe, as_numbers, emitter, guarded_note, leaves, shape_of
from ampdebug.hooks._layout import Layout, SlotOfCall, fill_arrays


@dataclass
class SlimCall:
    """A call that hands over some of its tensors only; the others are handed over elsewhere, too.

    Attributes:
        layout: Its tensors.
        shared: For each tensor that a whole call hands over: the number that it has in common with the other places
            where the same one comes by, None for one that comes by here only.
        kept: Which of them are handed over, as indices, ascending. Without any there is no callback.
        followers: Probes and calls without a callback of their own, which end when this one does.
    """

    layout: Layout
    shared: tuple[int | None, ...]
    kept: tuple[int, ...]
    followers: list[tuple[SlimProbe, SlimCall]] = field(default_factory=list)

    @property
    def saved(self) -> int:
        """How many elements are not handed over."""
        sizes = [math.prod(shape) for _, _, _, shape in self.layout.handed_over]
        return sum(sizes) - sum(sizes[index] for index in self.kept)

    @functools.cached_property
    def places(self) -> list[SlotOfCall]:
        """All tensors of the call; those that are handed over elsewhere have their number only."""
        numbers = iter(enumerate(self.shared))
        places = []
        for place in self.layout.places:
            if place.handed_over:
                index, number = next(numbers)
                place = place._replace(blank=place.blank._replace(same=number), handed_over=index in self.kept)
            places.append(place)
        return places


class SlimProbe(GraphProbe):
    """A compiled probe that hands over less where :attr:`slim` says so when a graph is compiled."""

    slim: SlimCall | None = None

    def only_use(self, once: dict[int, bool]) -> tuple[int, Layout] | None:
        """The callback and the tensors of the cell's only call in the graph compiled last.

        Args:
            once: That graph's callbacks, see ``CompiledGraph.callbacks``.

        Returns:
            None where it is called several times or never, and where the tensors are too many for one callback.
        """
        called = [function for function in self.callbacks if function in once]
        if len(called) != 1 or not once[called[0]] or len(self.uses) != 1:
            return None
        (layout,) = self.uses
        if layout.observed != self.callbacks[called[0]][0]:
            return None
        return called[0], layout

    def as_planned(self, once: dict[int, bool]) -> bool:
        """Whether the graph compiled last has the slim callback at exactly one place, for the tensors planned."""
        slim = self.slim
        assert slim is not None, "it was planned"
        if any(layout.entries != slim.layout.entries for layout in self.uses):
            return False
        return [once.get(function) for function in self.callbacks] == ([True] if slim.kept else [])

    def construct(self, cell: Any, original: Callable[..., Any]) -> Any:
        """The method to put into ``cell`` in place of ``original``."""
        return super().construct(cell, original) if self.slim is None else self._slim(self.slim, cell, original)

    def _slim(self, call: SlimCall, cell: Any, original: Callable[..., Any]) -> Any:
        self.uses, self.callbacks = [], {}
        if not call.kept:
            return original
        kept = call.kept
        emit = emitter(len(kept), self.sink, functools.partial(self._arrived_slim, call), self.callbacks)
        note = ops.constexpr(guarded_note(self.sink, self.traced))

        def construct(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            output = original(*args, **kwargs)
            bare = note(("tuple", (shape_of(args), shape_of(kwargs))), shape_of(output))
            seen = leaves(args) + leaves(kwargs) + leaves(output)
            if bare:
                seen = as_numbers(seen)  # type: ignore[no-untyped-call]
            handed_over = ()
            for index in kept:
                handed_over = handed_over + seen[index : index + 1]
            return ops.depend(output, emit(*handed_over))

        return types.MethodType(construct, cell)

    def _arrived_slim(self, call: SlimCall, arrays: tuple[Any, ...], lasting: bool) -> None:
        self.sink.graph_call(self.path, self.cell_type, *fill_arrays(call.places, arrays, lasting))
        for probe, follower in call.followers:
            probe._arrived_slim(follower, (), False)
