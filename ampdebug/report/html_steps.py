"""The scalars of the steps for the chart of the HTML page: thinned to a fixed number of bins, nothing hidden."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ampdebug._records import Step

BINS = 600

_COUNTS = ("steps", "loss_nonfinite", "overflow", "overflow_known", "nonfinite_gradients", "skipped", "marked")
_NUMBERS = ("loss_low", "loss_high", "loss_last", "scale_low", "scale_high", "scale_last")


def plain_number(value: float | None) -> float | str | None:
    """A float for strict JSON: a number that is not finite becomes the word ``nan``, ``inf`` or ``-inf``."""
    return value if value is None or math.isfinite(value) else str(float(value))


class StepBins:
    """Groups of equally many neighbouring recorded steps. It does not grow with the number of steps.

    A group keeps the smallest, the largest and the last of a number and counts what happened, so that no overflow and
    no spike gets lost however many steps share it.

    Args:
        steps: How many steps will come; more may (training goes on), each group then still takes as many.
        bins: At most this many groups for ``steps`` steps.
        columns: First steps of the columns of the map of exponent ranges, ascending: overflows are counted for each,
            from its first step up to the one before the next column's.
    """

    def __init__(self, steps: int, *, bins: int = BINS, columns: Sequence[int] | npt.NDArray[np.int64] = ()) -> None:
        self.per_bin = max(1, math.ceil(steps / bins))
        self._bins: list[dict[str, Any]] = []
        self._columns = np.asarray(columns, np.int64)
        self.column_overflows = [0] * len(self._columns)

    def add(self, step: Step) -> None:
        """Take the next step."""
        if not self._bins or self._bins[-1]["steps"] == self.per_bin:
            self._bins.append({"first": step.step, **dict.fromkeys(_COUNTS, 0), **dict.fromkeys(_NUMBERS)})
        group = self._bins[-1]
        group["last"] = step.step
        group["steps"] += 1
        _extend(group, "loss", step.loss)
        _extend(group, "scale", step.loss_scale)
        if step.loss is not None and not math.isfinite(step.loss):
            group["loss_nonfinite"] += 1
        if step.overflow is not None:
            group["overflow_known"] += 1
            group["overflow"] += step.overflow
        bad = bool(step.nonfinite_gradients) or step.backward_birth is not None  # as facts.gather_facts counts it
        group["nonfinite_gradients"] += bad
        group["skipped"] += bool(step.update_skipped)
        if bad or step.overflow:
            group["marked"] += 1
            if len(self._columns):
                self.column_overflows[max(0, int(np.searchsorted(self._columns, step.step, side="right")) - 1)] += 1

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: ``{field: [one value a group]}`` and ``per_bin``, the steps of a full group."""
        fields = ("first", "last", *_COUNTS)
        return {
            "per_bin": self.per_bin,
            **{name: [group[name] for group in self._bins] for name in fields},
            **{name: [plain_number(group[name]) for group in self._bins] for name in _NUMBERS},
        }


def _extend(group: dict[str, Any], name: str, value: float | None) -> None:
    if value is None:
        return
    group[f"{name}_last"] = value
    if math.isfinite(value):
        low, high = group[f"{name}_low"], group[f"{name}_high"]
        group[f"{name}_low"] = value if low is None else min(low, value)
        group[f"{name}_high"] = value if high is None else max(high, value)
