"""The tensors of one call of a cell in a compiled graph, and what a callback was handed of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ampdebug._recorder import Seen
from ampdebug.hooks._tensors import FLOATING, dtype_name, see_array

_FLOAT_NAMES = frozenset(dtype_name(dtype) for dtype in FLOATING)


class SlotOfCall(NamedTuple):
    """Where one tensor of a call goes.

    Attributes:
        output: It is an output, not an input.
        slot: Its place among them.
        blank: What is recorded where its values are not handed over.
        handed_over: Its values are.
    """

    output: bool
    slot: str
    blank: Seen
    handed_over: bool


class Layout:
    """The nested structure of one traced call, flattened: slots, dtypes and shapes of its tensors in order."""

    def __init__(self, inputs: Any, outputs: Any) -> None:
        self.entries: list[tuple[bool, str, str, tuple[int, ...]]] = []
        for part in _arguments(inputs):
            self._flatten(part, "", False)
        self._flatten(outputs, "", True)
        self.handed_over = [entry for entry in self.entries if observed(entry[2], entry[3])]
        """The tensors that a callback takes, in its order."""
        self.observed = len(self.handed_over)
        self.unknown = any(dtype in _FLOAT_NAMES and min(shape, default=1) < 0 for _, _, dtype, shape in self.entries)
        """Some lengths are known only when the graph runs (-1): what has them is not handed over."""

    def _flatten(self, node: Any, slot: str, output: bool) -> None:
        if node[0] == "tensor":
            self.entries.append((output, slot, dtype_name(node[2]), lengths(node[1])))
        elif node[0] == "tuple":
            for index, item in enumerate(node[1]):
                self._flatten(item, f"{slot}.{index}" if slot else str(index), output)
        elif node[0] == "dict":
            for key, item in zip(node[1], node[2], strict=True):
                self._flatten(item, f"{slot}.{key}" if slot else str(key), output)

    @functools.cached_property
    def places(self) -> list[SlotOfCall]:
        """All tensors, those that are not handed over by their dtype."""
        return [
            SlotOfCall(output, slot, Seen(_stand_in(dtype, shape), dtype, shape), observed(dtype, shape))
            for output, slot, dtype, shape in self.entries
        ]


def fill_arrays(places: Sequence[SlotOfCall], arrays: Sequence[Any], lasting: bool) -> tuple[list[Any], list[Any]]:
    """Pairs what a callback was handed with its slots.

    Args:
        places: The tensors of the call.
        arrays: One for each place that is handed over, in order.
        lasting: Whether they keep their values until a graph runs again.

    Returns:
        ``(inputs, outputs)`` as lists of ``(slot, Seen)``.
    """
    blanks = (place.blank for place in places if place.handed_over)
    return fill_seen(
        places,
        (
            see_array(array, blank.dtype, getattr(array, "shape", ()), lasting, blank.same)
            for array, blank in zip(arrays, blanks, strict=True)
        ),
    )


def fill_seen(places: Sequence[SlotOfCall], seen: Iterable[Seen]) -> tuple[list[Any], list[Any]]:
    """The same for what is converted already."""
    both: tuple[list[Any], list[Any]] = ([], [])
    rest = iter(seen)
    for output, slot, blank, handed_over in places:
        both[output].append((slot, next(rest) if handed_over else blank))
    return both


def _stand_in(dtype: str, shape: tuple[int, ...]) -> Any:
    """An empty floating-point tensor is measured, too, but never handed over."""
    if dtype not in _FLOAT_NAMES or 0 not in shape or min(shape) < 0:
        return None
    return np.zeros(shape, np.uint16 if dtype == "bfloat16" else dtype)


def lengths(shape: Iterable[int | None]) -> tuple[int, ...]:
    """A shape as a graph has it while it is traced, with -1 for a length that is known only when it runs."""
    return tuple(-1 if length is None else int(length) for length in shape)


def observed(dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor's values are looked at. A callback fails at an empty one, and at lengths that are not known."""
    return dtype in _FLOAT_NAMES and min(shape, default=1) > 0


def without_number(dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether a callback fails at a tensor: MindSpore hands a 0-d one over as a Python number, which a bfloat16 one has
    not."""
    return dtype == "bfloat16" and not shape


def _arguments(inputs: Any) -> Sequence[Any]:
    """The arguments come as ``(args, kwargs)``; a single positional argument is shown without an index."""
    args, kwargs = inputs[1]
    by_name = kwargs[0] == "dict" and bool(kwargs[1])
    return args[1] if len(args[1]) == 1 and not by_name else (args, kwargs)
