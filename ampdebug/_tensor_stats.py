"""What is known about one tensor: the layout of a row of statistics, and the same as an object.

Plain data: readers of a recorded run use these without the code that measures. :mod:`ampdebug._stats` fills them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

STATS_DTYPE = np.dtype(
    [
        (name, "<i8")
        for name in (
            "count",
            "zeros",
            "nan",
            "pos_inf",
            "neg_inf",
            "subnormal",
            "flushed",
            "exceeding",
            "saturated",
            "mantissa_bits",
        )
    ]
    + [(name, "<f8") for name in ("min", "max", "mean", "rms")]
)
"""One row of statistics; the fields are those of :class:`TensorStats`."""

EXPONENT_BIAS = 127
"""Exponent counts are indexed by ``floor(log2|x|) + 127``."""


@dataclass(frozen=True, slots=True)
class TensorStats:
    """The statistics of one tensor.

    Attributes:
        count: Elements.
        zeros: Elements that are +0 or -0.
        nan: NaN elements, whatever their payload and sign.
        pos_inf: Elements that are +inf.
        neg_inf: Elements that are -inf.
        subnormal: ``2**-25 < |x| < 2**-14``: float16 keeps them, with fewer significant bits.
        flushed: ``0 < |x| <= 2**-25``: float16 rounds them to zero.
        exceeding: Finite with ``|x| > 65504``, float16's largest.
        saturated: ``|x| == 65504``.
        mantissa_bits: Leading explicit mantissa bits (of 23; of 52 for float64) in use by any finite element, after
            widening to float32. At most 10: every significand fits float16; at most 7: bfloat16. Shows what precision
            the values went through.
        min: Smallest finite element; NaN where there is none, as for the next three.
        max: Largest finite element.
        mean: Mean of the finite elements.
        rms: Root of the mean square of the finite elements.
        exponents: 256 counts of the finite nonzero elements by ``floor(log2|x|) + 127``. Index 0 takes all below
            ``2**-126``; index 255 all from ``2**128`` on (float64 only).
    """

    count: int
    zeros: int
    nan: int
    pos_inf: int
    neg_inf: int
    subnormal: int
    flushed: int
    exceeding: int
    saturated: int
    mantissa_bits: int
    min: float
    max: float
    mean: float
    rms: float
    exponents: tuple[int, ...]

    @classmethod
    def from_row(cls, row: Any, exponents: npt.ArrayLike) -> TensorStats:
        """Build it from one element of a STATS_DTYPE array and its 256 exponent counts."""
        values: dict[str, Any] = dict(zip(STATS_DTYPE.names or (), row.item(), strict=True))
        return cls(**values, exponents=tuple(np.asarray(exponents).tolist()))

    @property
    def nonfinite(self) -> int:
        """How many elements are NaN or infinite."""
        return self.nan + self.pos_inf + self.neg_inf

    @property
    def finite(self) -> int:
        """How many elements are finite."""
        return self.count - self.nonfinite

    @property
    def absmax(self) -> float:
        """Largest finite magnitude; NaN where there is none."""
        return max(abs(self.min), abs(self.max))

    @property
    def norm(self) -> float:
        """L2 norm of the finite elements; 0.0 where there is none."""
        return self.rms * math.sqrt(self.finite) if self.finite else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and derived numbers as plain Python values.

        ``exponents`` becomes ``{floor(log2|x|): count}`` of the bins that are not empty; the two open bins are keyed by
        their index's exponent, -127 and 128.
        """
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "exponents"}
        for name in ("absmax", "norm", "finite", "nonfinite"):
            values[name] = getattr(self, name)
        values["exponents"] = {i - EXPONENT_BIAS: n for i, n in enumerate(self.exponents) if n}
        return values


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """What an optimizer step did to one parameter, seen in the format the computation rounds weights to.

    Attributes:
        format: Name of that format.
        count: Elements.
        nonfinite: Elements that are NaN or infinite before or after; they enter none of the numbers below.
        changed: Elements whose value changed.
        below_half_ulp: Of these, how many changed by less than half a unit in the last place of ``before`` in the
            format: where ``before`` is a value of the format, the rounded weight can't follow.
        update_norm: L2 norm of ``after - before``.
        weight_norm: L2 norm of ``before``.
    """

    format: str
    count: int
    nonfinite: int
    changed: int
    below_half_ulp: int
    update_norm: float
    weight_norm: float

    @property
    def ratio(self) -> float:
        """``update_norm / weight_norm``; where the weights are all zero, inf, or NaN if they stayed so."""
        if self.weight_norm:
            return self.update_norm / self.weight_norm
        return math.inf if self.update_norm else math.nan

    @property
    def update_rms(self) -> float:
        """Root mean square of ``after - before`` over the finite elements; NaN where there is none."""
        finite = self.count - self.nonfinite
        return self.update_norm / math.sqrt(finite) if finite else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and the ratio as plain Python values."""
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "ratio": self.ratio}
