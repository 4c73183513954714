"""The formats against numpy's own tables, and rounding against exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampdebug._errors import ArgumentError
from ampdebug._formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, FORMATS, Format, format_of, is_float, round_through

NUMPY_FORMATS = [FLOAT16, FLOAT32, FLOAT64]


@pytest.mark.parametrize("fmt", NUMPY_FORMATS, ids=lambda f: f.name)
def test_constants_equal_numpy_finfo(fmt: Format) -> None:
    info = np.finfo(fmt.name)
    assert fmt.max == float(info.max)
    assert fmt.smallest_normal == float(info.smallest_normal)
    assert fmt.smallest_subnormal == float(info.smallest_subnormal)
    assert fmt.eps == float(info.eps)
    assert fmt.mantissa_bits == info.nmant
    assert fmt.bits == info.bits
    assert fmt.min_exponent == info.minexp
    assert fmt.max_exponent == info.maxexp - 1


def test_bfloat16_constants() -> None:
    # From the bit patterns: bfloat16 is the upper half of a float32.
    def value(bits: int) -> float:
        return float(np.array([bits << 16], np.uint32).view(np.float32)[0])

    assert BFLOAT16.max == value(0x7F7F)
    assert BFLOAT16.smallest_normal == value(0x0080)
    assert BFLOAT16.smallest_subnormal == value(0x0001)
    assert BFLOAT16.eps == value(0x3F81) - 1.0
    assert BFLOAT16.bits == 16


def test_float16_limits_as_everyone_quotes_them() -> None:
    assert (FLOAT16.max, FLOAT16.overflow_limit, FLOAT16.flush_limit) == (65504.0, 65520.0, 2.0**-25)
    assert (FLOAT64.flush_limit, FLOAT64.overflow_limit) == (0.0, math.inf)


@pytest.mark.parametrize("fmt", [FLOAT16, BFLOAT16, FLOAT32], ids=lambda f: f.name)
def test_limits_are_where_rounding_flips(fmt: Format) -> None:
    below = np.nextafter(fmt.overflow_limit, 0.0)
    above = np.nextafter(fmt.flush_limit, 1.0)
    limits = [fmt.overflow_limit, below, -fmt.overflow_limit]
    assert round_through(limits, fmt).tolist() == [math.inf, fmt.max, -math.inf]
    assert round_through([fmt.flush_limit, above], fmt).tolist() == [0.0, fmt.smallest_subnormal]
    assert math.copysign(1.0, round_through([-fmt.flush_limit], fmt)[0]) == -1.0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("float16", FLOAT16),
        ("Float16", FLOAT16),
        ("fp16", FLOAT16),
        ("half", FLOAT16),
        ("BFloat16", BFLOAT16),
        ("bf16", BFLOAT16),
        ("float32", FLOAT32),
        ("single", FLOAT32),
        ("double", FLOAT64),
        ("fp64", FLOAT64),
    ],
)
def test_format_of_knows_the_usual_names(name: str, expected: Format) -> None:
    assert format_of(name) is expected
    assert is_float(name)


def test_format_of_passes_a_format_through() -> None:
    assert format_of(FLOAT16) is FLOAT16


def test_unknown_format_names_the_value_and_the_choices() -> None:
    assert not is_float("int32")
    with pytest.raises(ArgumentError) as caught:
        format_of("int32")
    message = str(caught.value)
    assert "name='int32'" in message
    for name in FORMATS:
        assert name in message


def exact_round(x: float, fmt: Format) -> float:
    """Round with rationals: the nearest multiple of the spacing, ties to the even multiple."""
    if not math.isfinite(x) or x == 0:
        return x
    exponent = max(math.frexp(x)[1] - 1, fmt.min_exponent)
    spacing = Fraction(2) ** (exponent - fmt.mantissa_bits)
    rounded = round(Fraction(x) / spacing) * spacing  # Fraction rounds half to even
    if abs(rounded) > Fraction(fmt.max):
        return math.copysign(math.inf, x)
    return math.copysign(float(rounded), x)


def near(fmt: Format) -> st.SearchStrategy[float]:
    """Values of the format, halfway points between them, and their float64 neighbours, where rounding is hard."""
    lowest = fmt.min_exponent - fmt.mantissa_bits - 2
    return st.builds(
        lambda n, e, nudge: math.nextafter(math.ldexp(n / 2, e), math.inf * nudge) if nudge else math.ldexp(n / 2, e),
        st.integers(-(2 ** (fmt.mantissa_bits + 2)), 2 ** (fmt.mantissa_bits + 2)),
        st.integers(lowest, fmt.max_exponent - fmt.mantissa_bits),
        st.sampled_from([-1, 0, 1]),
    )


@pytest.mark.parametrize("fmt", [FLOAT16, BFLOAT16, FLOAT32], ids=lambda f: f.name)
@given(data=st.data())
def test_round_through_float64_equals_rational_rounding(fmt: Format, data: st.DataObject) -> None:
    values = data.draw(st.lists(near(fmt) | st.floats(width=64), max_size=20))
    got = round_through(np.array(values, np.float64), fmt)
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got, [exact_round(v, fmt) for v in values])
    np.testing.assert_array_equal(np.signbit(got), np.signbit(np.array(values, np.float64)))


@pytest.mark.parametrize("fmt", [FLOAT16, BFLOAT16], ids=lambda f: f.name)
@given(data=st.data())
def test_round_through_float32_equals_rational_rounding(fmt: Format, data: st.DataObject) -> None:
    values = np.array(data.draw(st.lists(st.floats(width=32), max_size=20)), np.float32)
    got = round_through(values, fmt)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, np.array([exact_round(float(v), fmt) for v in values], np.float32))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_round_through_keeps_shape_and_never_aliases(fmt: Format) -> None:
    for dtype in (np.float32, np.float64):
        array = np.arange(6, dtype=dtype).reshape(2, 3)
        got = round_through(array, fmt)
        assert got.shape == (2, 3)
        assert not np.shares_memory(got, array)
        np.testing.assert_array_equal(got, array)
    assert round_through(np.float32(1.5), fmt).shape == ()
    assert round_through(np.empty((0, 3), np.float16), fmt).shape == (0, 3)


def test_round_through_takes_integers_and_half_as_documented() -> None:
    assert round_through([2049, 70000], FLOAT16).tolist() == [2048.0, math.inf]
    assert round_through(np.array([1.0009765625], np.float16), BFLOAT16).dtype == np.float32


@given(st.lists(st.floats(width=64, allow_infinity=True), min_size=1, max_size=20))
def test_ulp_equals_the_gap_to_the_next_value(values: list[float]) -> None:
    got = FLOAT64.ulp(values)
    for value, step in zip(values, got, strict=True):
        if math.isfinite(value):
            assert step == math.ulp(value)
        else:
            assert math.isnan(step)


def test_ulp_of_float16() -> None:
    values = [0.0, 2.0**-24, 2.0**-14, 1.0, 1.5, -2047.0, 2048.0, 65504.0, 1e6, math.nan]
    expected = [2.0**-24, 2.0**-24, 2.0**-24, 2.0**-10, 2.0**-10, 1.0, 2.0, 32.0, 512.0, math.nan]
    np.testing.assert_array_equal(FLOAT16.ulp(values), expected)
    assert FLOAT16.ulp(3.0).shape == ()
