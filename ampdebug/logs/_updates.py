"""The optimizer's own counter: where it stands still, the update was skipped."""

from __future__ import annotations

from ampdebug._records import Step


class Updates:
    """Compares the counter of updates with the step numbers."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None
        self._pace = 0.0  # updates a step, at most; below 1 where gradients accumulate

    def restart(self) -> None:
        """The next counter belongs to a new start of the program."""
        self._last = None

    def made(self, number: int, updates: int) -> float | None:
        """Updates a step since the line before, None where that is unknown."""
        last = self._last
        return None if last is None or number <= last[0] else (updates - last[1]) / (number - last[0])

    def go_on(self, number: int, updates: int) -> bool:
        """Certainly no update was skipped since the line before."""
        made = self.made(number, updates)
        return made is not None and made > 0 and made >= self._pace

    def pass_by(self, number: int, updates: int) -> None:
        """Take in the counter of a line for which ``go_on`` holds."""
        self._pace = self.made(number, updates) or self._pace
        self._last = (number, updates)

    def take(self, number: int, updates: int, step: Step) -> None:
        """Take in the counter of a line, and say in its step whether the update was skipped.

        Where only some of the updates since the last line were made, this step's own may be of either kind.
        """
        made = self.made(number, updates)
        if made is not None:
            self._pace = max(self._pace, made)
        self._last = (number, updates)
        step.extra = {"optimizer_step": updates}
        if made is not None:
            step.update_skipped = True if made == 0 else False if made >= self._pace else None
