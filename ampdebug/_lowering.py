"""The answer to "how much more can go to 16 bits?"."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ampdebug._bisect_result import BisectResult, Unit

_SHOWN = 40


@dataclass(frozen=True)
class LoweringResult(BisectResult):
    """Which of the operators that a level leaves in float32 may go to 16 bits, and which must stay.

    The fields of ``BisectResult`` read the other way round: ``culprits`` are what must stay in float32, ``units`` is
    how many units the level leaves there, and ``low`` is what was measured with all of them in 16 bits. The set that
    may go down is a largest one in the sense that was proven: with any single culprit in 16 bits as well, the network
    fails. There may be another one that is larger.

    Attributes:
        dtype: The 16-bit format.
        lowered: What may go down, all of it together, in order of execution; empty where nothing was seen to.
    """

    dtype: str = "float16"
    lowered: tuple[Unit, ...] = ()

    @staticmethod
    def of(result: BisectResult, units: Sequence[Unit], dtype: str) -> LoweringResult:
        """From the result of a search over ``units``."""
        stay = {culprit.unit for culprit in result.culprits}
        passed = result.sufficient or result.status == "nothing-to-find"
        values = {field.name: getattr(result, field.name) for field in fields(BisectResult)}
        return LoweringResult(
            **values, dtype=dtype, lowered=tuple(unit for unit in units if unit not in stay) if passed else ()
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; non-finite numbers as text."""
        lowered = json.loads(json.dumps([asdict(unit) for unit in self.lowered]))
        return {**super().to_dict(), "direction": "down", "dtype": self.dtype, "lowered": lowered}

    def _sentence(self) -> str:
        if self.status == "found":
            return (
                f"{len(self.lowered)} of {self.units} units in float32 may go to {self.dtype}, all together; these "
                "must stay, each of them:"
            )
        if self.status == "nothing-to-find":
            return f"All {self.units} units in float32 may go to {self.dtype}; none of them is needed."
        if self.status == "precision-innocent":
            return "The network fails in float32 already: precision is not the cause."
        if self.status == "not-found":
            return "The level fails as it is, with nothing more in 16 bits: bisect it with direction='up' first."
        seen = f"{len(self.lowered)} of {self.units} units in float32 were seen to be fine in {self.dtype}"
        return f"Stopped early ({self.status}): so far {seen}; more may be."

    def __str__(self) -> str:
        # The line of the measurements means the network with all units down, not the level as it is.
        ends = f", {self.level} {self.low:.6g},", f", all in {self.dtype} {self.low:.6g},"
        lines = super().__str__().replace(*ends, 1).split("\n")
        lines[0] = f"{self.level}, down: {self._sentence()}"
        if self.lowered:
            lines += ["", f"may go to {self.dtype}:"]
            lines += [f"  {_shown(unit)}" for unit in self.lowered[:_SHOWN]]
            if len(self.lowered) > _SHOWN:
                lines.append(f"  … and {len(self.lowered) - _SHOWN} more: result.lowered")
        return "\n".join(lines)


def _shown(unit: Unit) -> str:
    place = f" at {unit.line}" if unit.line else ""
    return f"{unit.operator} in {unit.path or '(root)'}{place}" + (f": {unit.source}" if unit.source else "")
