"""A record of a training loop that any framework can feed, and that ``diagnose`` reads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ampdebug._errors import ArgumentError
from ampdebug._records import Step
from ampdebug.rules._history import History, Mark, Record

if TYPE_CHECKING:
    from ampdebug._diagnose import Diagnosis


class Trace:
    """Collects the scalars of each training step; pure Python, no framework.

    Memory is bounded whatever the number of steps: remarkable steps are kept, plain ones thinned out.

    Args:
        name: For the report.

    Example:
        >>> trace = Trace("demo")
        >>> for step in range(40):
        ...     trace.step(loss=float("nan") if step > 30 else 2.0, loss_scale=65536.0, overflow=step > 30)
        >>> trace.diagnose().verdict
        'findings'
    """

    def __init__(self, name: str = "trace") -> None:
        self.history = History(name=name)
        self.history.prints_overflow = True
        self.history.scale_meaning = "used"
        self._next = 1

    def __len__(self) -> int:
        return self.history.totals.records

    def step(
        self,
        *,
        loss: Any = None,
        loss_scale: Any = None,
        overflow: Any = None,
        grad_norm: Any = None,
        learning_rate: Any = None,
        update_skipped: Any = None,
        epoch: int | None = None,
        step: int | None = None,
    ) -> None:
        """Record one step. What is left out is unknown, never zero.

        Args:
            loss: The unscaled loss. Anything ``float()`` takes, a 0-d tensor too.
            loss_scale: The scale used in this step (read it before ``scaler.update()``).
            overflow: Whether the loop found a non-finite gradient.
            grad_norm: Global L2 norm of the *unscaled* gradients.
            learning_rate: Of the first parameter group.
            update_skipped: Whether the parameters were left as they were.
            epoch: Counted from 1.
            step: Counted from 1 over the whole run; None takes the one after the last.

        Raises:
            ArgumentError: A value is no number, or ``step`` is below 1.
        """
        number = self._next if step is None else step
        if number < 1:
            raise ArgumentError(f"step={step!r}: steps are whole numbers from 1 on; leave it out to count by itself")
        if number < self._next - 1:
            self.history.restart()
        self._next = number + 1
        found = _flag("overflow", overflow)
        skipped = _flag("update_skipped", update_skipped)
        record = Step(
            number,
            epoch,
            None,
            _number("loss", loss),
            _number("loss_scale", loss_scale),
            None,
            found,
            None,
            skipped,
            None,
            _number("learning_rate", learning_rate),
            _number("grad_norm", grad_norm),
        )
        self.history.add(Record(record))

    def resumed(self, message: str = "resumed from a checkpoint") -> None:
        """Say that a checkpoint was loaded here."""
        self.history.restart()
        self.history.mark(Mark("resume", self._next - 1, 0, message.encode(), self.history.totals.records))

    def diagnose(self) -> Diagnosis:
        """The same as ``ampdebug.diagnose(trace)``."""
        from ampdebug._diagnose import diagnose

        return diagnose(self)


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"{name}={value!r} is no number; give something float() takes, such as {name}.item() of a 0-d tensor"
        ) from error


def _flag(name: str, value: Any) -> bool | None:
    if value is None:
        return None
    try:
        return bool(value)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{name}={value!r} is neither true nor false; give a bool") from error
