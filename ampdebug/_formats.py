"""The floating-point formats of mixed-precision training, and rounding through them.

A :class:`Format` says what a format can hold; :func:`round_through` says what it makes of given values, to the nearest,
ties to even, as hardware casts do. numpy has no bfloat16, so that one is rounded arithmetically.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ampdebug._errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Format:
    """A binary interchange format of IEEE 754 shape: sign, exponent, explicit mantissa bits, subnormals, infinities.

    Attributes:
        name: ``"float16"``, ``"bfloat16"``, ``"float32"`` or ``"float64"``.
        bits: Size of one value, in bits.
        mantissa_bits: Explicit mantissa bits (10 for float16); the significand has one more.
        min_exponent: ``floor(log2(smallest_normal))``, -14 for float16.
        max_exponent: ``floor(log2(max))``, 15 for float16.
        max: Largest finite value.
        smallest_normal: Below it the format keeps fewer significant bits.
        smallest_subnormal: Smallest value above zero.
        eps: Distance from 1 to the next larger value.
        flush_limit: ``smallest_subnormal / 2``: a magnitude up to and including it rounds to zero (a tie goes to even).
            For float64, half of the smallest subnormal is not a float64, so that its limit is 0.
        overflow_limit: A magnitude from here on rounds to infinity: ``max`` plus half a unit in the last place. For
            float64 that is no float64 either, and stands as infinity.
    """

    name: str
    bits: int
    mantissa_bits: int
    min_exponent: int
    max_exponent: int
    max: float = field(init=False)
    smallest_normal: float = field(init=False)
    smallest_subnormal: float = field(init=False)
    eps: float = field(init=False)
    flush_limit: float = field(init=False)
    overflow_limit: float = field(init=False)

    def __post_init__(self) -> None:
        top = 2.0**self.max_exponent
        eps = 2.0**-self.mantissa_bits
        smallest_subnormal = 2.0 ** (self.min_exponent - self.mantissa_bits)
        for name, value in (
            ("max", top * (2.0 - eps)),
            ("smallest_normal", 2.0**self.min_exponent),
            ("smallest_subnormal", smallest_subnormal),
            ("eps", eps),
            ("flush_limit", smallest_subnormal / 2),
            ("overflow_limit", top * (2.0 - eps / 2)),
        ):
            object.__setattr__(self, name, value)
        # For float64, 2 - eps/2 ties to 2 and the product becomes inf, and half of the smallest subnormal ties to 0:
        # both are the documented values.

    def ulp(self, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the distance between neighbours of the format at each value's binade, as float64 of the same shape.

        ``2**(max(floor(log2|x|), min_exponent) - mantissa_bits)``; at zero that is the smallest subnormal. NaN where
        the value is not finite. Values past the format's range get the distance it would have with more exponents.
        """
        wide = np.asarray(values, dtype=np.float64)
        finite = np.isfinite(wide)
        _, exponent = np.frexp(np.where(finite, wide, 0.0))
        exponent = np.where(wide == 0, self.min_exponent, exponent - 1)
        step = np.ldexp(1.0, np.maximum(exponent, self.min_exponent) - self.mantissa_bits)
        return np.asarray(np.where(finite, step, np.nan), dtype=np.float64)


FLOAT16 = Format("float16", bits=16, mantissa_bits=10, min_exponent=-14, max_exponent=15)
BFLOAT16 = Format("bfloat16", bits=16, mantissa_bits=7, min_exponent=-126, max_exponent=127)
FLOAT32 = Format("float32", bits=32, mantissa_bits=23, min_exponent=-126, max_exponent=127)
FLOAT64 = Format("float64", bits=64, mantissa_bits=52, min_exponent=-1022, max_exponent=1023)

FORMATS: dict[str, Format] = {f.name: f for f in (FLOAT16, BFLOAT16, FLOAT32, FLOAT64)}

_ALIASES = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "single": "float32",
    "fp64": "float64",
    "double": "float64",
}


def format_of(name: str | Format) -> Format:
    """Return the format of that name.

    Args:
        name: ``"float16"``, ``"bfloat16"``, ``"float32"``, ``"float64"`` or a usual short form (``"fp16"``, ``"bf16"``,
            ``"half"``, …), in any case, as MindSpore (``"Float16"``) and numpy write them. A :class:`Format` is
            returned as it is.

    Raises:
        ArgumentError: for any other name; use :func:`is_float` where integer dtypes may come.
    """
    if isinstance(name, Format):
        return name
    lower = str(name).lower()
    found = FORMATS.get(_ALIASES.get(lower, lower))
    if found is None:
        raise ArgumentError(f"name={name!r} is not a floating-point format; choose one of {', '.join(FORMATS)}")
    return found


def is_float(name: str) -> bool:
    """Return whether :func:`format_of` knows this dtype name."""
    lower = str(name).lower()
    return _ALIASES.get(lower, lower) in FORMATS


def round_through(array: npt.ArrayLike, format: str | Format) -> npt.NDArray[Any]:
    """Return what is left of the values after a cast to the format and back.

    Rounds to the nearest, ties to even; overflow gives infinities, underflow subnormals and zeros of the same sign;
    NaN stays NaN. The values are rounded once, whatever their own precision.

    Args:
        array: Float values of any shape; integers and Python floats are taken as float64.
        format: A format or its name.

    Returns:
        A new array of the same shape: float64 where the input was float64 (or not a float), else float32.

    Raises:
        ArgumentError: for an unknown format name.
    """
    target = format_of(format)
    given = np.asarray(array)
    wide = given if given.dtype.kind == "f" and given.dtype.itemsize <= 4 else given.astype(np.float64)
    wide = wide.astype(np.float32) if wide.dtype.itemsize <= 4 else wide.astype(np.float64)
    if target.bits >= wide.dtype.itemsize * 8:
        return np.array(wide)
    if target is not BFLOAT16:
        with np.errstate(over="ignore", under="ignore"):
            return np.asarray(wide.astype(target.name).astype(wide.dtype))
    # In units of bfloat16's own spacing the values are at most 2**8 in size, so rint rounds them as the format does.
    # float64 holds both the quotient and the product exactly: the spacing is a power of two, from 2**-133 on.
    exact = wide.astype(np.float64)
    step = np.where(np.isfinite(exact), BFLOAT16.ulp(exact), 1.0)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        rounded = np.rint(exact / step) * step
    rounded = np.where(np.abs(rounded) > BFLOAT16.max, np.copysign(np.inf, rounded), rounded)
    return np.asarray(rounded.astype(wide.dtype))
