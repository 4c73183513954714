"""The last steps of a log by number: what a further line about one of them is compared with."""

from __future__ import annotations

from collections.abc import Callable

from ampdebug.logs._shape import Shape
from ampdebug.rules._history import Record

RECENT = 64
"""Steps back that a line may be about."""

SLACK = 256
"""Steps that may be held before the old ones are dropped: rarely, and many at a time."""


Counted = tuple[Shape, bytes, int, int, tuple[Shape, bytes] | None]
"""A plain line that was only counted: a record is made of it if it is asked for.

Its shape, its text, its number, its step, and ``(shape, text)`` of the last line that printed the same step once more.
"""


class Recent:
    """The last ``RECENT`` steps.

    Args:
        make: Makes the record of a line that was only counted.

    Attributes:
        steps: By number; whoever adds one calls ``trim`` now and then.
    """

    def __init__(self, make: Callable[[Counted], Record]) -> None:
        self._make = make
        self.steps: dict[int, Record | Counted] = {}

    def trim(self) -> None:
        """Forget all but the last ``RECENT``."""
        steps = self.steps
        for number in list(steps)[: max(0, len(steps) - RECENT)]:
            del steps[number]

    def behind(self, number: int) -> int:
        """How many of the steps have a higher number."""
        self.trim()
        return sum(1 for other in self.steps if other > number)

    def get(self, number: int) -> Record | None:
        """The record of a step, None where it is not one of the last."""
        step = self.steps.get(number)
        if isinstance(step, tuple):
            step = self.steps[number] = self._make(step)
        return step

    def again(self, number: int, shape: Shape, text: bytes) -> bool:
        """The step was printed once more; False where it has a record, which is to be changed."""
        step = self.steps.get(number)
        if not isinstance(step, tuple):
            return False
        self.steps[number] = (*step[:4], (shape, text))
        return True

    def clear(self) -> None:
        """Forget them: a new start."""
        self.steps.clear()
