"""Every statistic against an independent reference: Python integers, math.frexp and math.fsum, element by element."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
import threading
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ampdebug._errors import ArgumentError
from ampdebug._formats import BFLOAT16, FLOAT16, FLOAT32, Format
from ampdebug._stats import (
    STATS_DTYPE,
    KernelName,
    StatsTable,
    TensorStats,
    UpdateStats,
    is_finite,
    kernel_name,
    kernel_reason,
    measure_update,
    nonfinite_counts,
    summarize,
)

Array = npt.NDArray[Any]

HAS_NUMBA = importlib.util.find_spec("numba") is not None
NUMBA = pytest.param("numba", marks=pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed"))
KERNELS = ["numpy", NUMBA]
DTYPES = ["float16", "bfloat16", "float32", "float64"]
BITS: dict[str, Any] = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.uint32, "float64": np.uint64}
EXACT = [n for n in STATS_DTYPE.names or () if n not in ("mean", "rms")]


def of_bits(bits: Array, dtype: str) -> Array:
    """Return bits as the array that is measured: bfloat16 stays bits."""
    return bits if dtype == "bfloat16" else bits.view(dtype)


def as_floats(bits: Array, dtype: str) -> list[float]:
    """Return the values as Python floats, exactly."""
    if dtype == "bfloat16":
        return [float(v) for v in (bits.ravel().astype(np.uint32) << 16).view(np.float32)]
    return [float(v) for v in bits.ravel().view(dtype)]


def mantissa_bits_used(x: float, min_exponent: int) -> int:
    mantissa, exponent = math.frexp(abs(x))
    whole = int(mantissa * 2**53)
    lowest = exponent - 53 + (whole & -whole).bit_length() - 1
    return max(0, max(exponent - 1, min_exponent) - lowest)


def reference(values: list[float], dtype: str) -> dict[str, Any]:
    finite = [v for v in values if math.isfinite(v)]
    sizes = [abs(v) for v in finite if v != 0]
    exponents = Counter(min(max(math.frexp(s)[1] - 1 + 127, 0), 255) for s in sizes)
    n = len(finite)
    square_sum = sum((Fraction(v) ** 2 for v in finite), Fraction(0))
    if n:
        # The root of a rational that may be far outside float64: scale by an even power of two.
        shift = max(-1000, min(1000, (square_sum.numerator.bit_length() - square_sum.denominator.bit_length()) // 2))
        rms = math.ldexp(math.sqrt(square_sum / n / Fraction(4) ** shift), shift)
        mean = float(sum((Fraction(v) for v in finite), Fraction(0)) / n)
    else:
        rms = mean = math.nan
    return {
        "count": len(values),
        "zeros": sum(v == 0 for v in values),
        "nan": sum(math.isnan(v) for v in values),
        "pos_inf": values.count(math.inf),
        "neg_inf": values.count(-math.inf),
        "subnormal": sum(2**-25 < s < 2**-14 for s in sizes),
        "flushed": sum(s <= 2**-25 for s in sizes),
        "exceeding": sum(s > 65504 for s in sizes),
        "saturated": sum(s == 65504 for s in sizes),
        "mantissa_bits": max((mantissa_bits_used(s, -1022 if dtype == "float64" else -126) for s in sizes), default=0),
        "min": min(finite, default=math.nan) + 0.0,
        "max": max(finite, default=math.nan) + 0.0,
        "mean": mean,
        "rms": rms,
        "abs_mean": float(sum(map(Fraction, sizes), Fraction(0)) / n) if n else 0.0,
        "exponents": [exponents[i] for i in range(256)],
    }


def check(got: TensorStats, want: dict[str, Any]) -> None:
    for name in EXACT:
        np.testing.assert_equal(getattr(got, name), want[name], err_msg=name)
    assert list(got.exponents) == want["exponents"]
    np.testing.assert_allclose(got.rms, want["rms"], rtol=1e-13, atol=5e-324, err_msg="rms")
    # The rounding of a sum is relative to the sum of magnitudes.
    np.testing.assert_allclose(got.mean, want["mean"], rtol=0, atol=1e-13 * want["abs_mean"] + 5e-324, err_msg="mean")
    assert math.copysign(1.0, got.min) == 1.0 or got.min != 0
    assert sum(got.exponents) == got.finite - got.zeros


def wide_name(dtype: str) -> str:
    return "float32" if dtype == "bfloat16" else dtype


def half(values: list[float]) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        return np.array(values, np.float64).astype(np.float16)


def special(dtype: str) -> list[float]:
    edges = [0.0, 2.0**-24, 2.0**-25, 2.0**-14, 65504.0, 65520.0, 65536.0, 1.0, 1.5, math.inf, math.nan]
    if dtype != "float16":
        edges += [2.0**-126, 2.0**-133, 2.0**127]
    if dtype in ("float32", "float64"):
        edges += [2.0**-149, math.nextafter(2.0**-25, 1) if dtype == "float64" else 2.0**-25 * (1 + 2.0**-23)]
        edges += [2.0**-25 * (1 - 2.0**-24), 65503.99609375, 65504.00390625, 2.0**-14 * (1 - 2.0**-24)]
    if dtype == "float64":
        edges += [5e-324, 1e200, 1e-200, 1.7976931348623157e308, 2.0**128, 2.0**-1022, 2.0**-150, 65504 + 1e-11]
    return edges


def bit_patterns(dtype: str) -> st.SearchStrategy[int]:
    """All patterns, with the boundaries of float16 (and both zeros, NaN of any payload and sign) over-represented."""
    unsigned = np.dtype(BITS[dtype])
    top = 2 ** (8 * unsigned.itemsize)
    values = half(special(dtype)) if dtype == "float16" else np.array(special(dtype), wide_name(dtype))
    patterns = [int(p) for p in values.view(np.uint32 if dtype == "bfloat16" else unsigned)]
    if dtype == "bfloat16":
        patterns = [p >> 16 for p in patterns]
    infinity = int(patterns[special(dtype).index(math.inf)])
    return st.one_of(
        st.integers(0, top - 1),
        st.sampled_from(patterns).flatmap(lambda p: st.sampled_from([p, p | (top // 2)])),
        st.integers(infinity + 1, top // 2 - 1).flatmap(lambda p: st.sampled_from([p, p | (top // 2)])),
    )


@st.composite
def bit_arrays(draw: st.DrawFn, dtype: str) -> Array:
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6))
    return draw(hnp.arrays(BITS[dtype], shape, elements=bit_patterns(dtype), fill=st.nothing()))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_generated_arrays_equal_the_reference(data: st.DataObject, dtype: str, kernel: KernelName) -> None:
    bits = data.draw(bit_arrays(dtype))
    got = summarize(of_bits(bits, dtype), bfloat16_bits=dtype == "bfloat16", kernel=kernel)
    check(got, reference(as_floats(bits, dtype), dtype))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_special_value_alone_and_all_together(dtype: str, kernel: KernelName) -> None:
    values = [s * v for v in special(dtype) for s in (1.0, -1.0)]
    for group in [[v] for v in values] + [values]:
        wide = half(group) if dtype == "float16" else np.array(group, wide_name(dtype))
        bits = (wide.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else wide.view(BITS[dtype])
        got = summarize(of_bits(bits, dtype), bfloat16_bits=dtype == "bfloat16", kernel=kernel)
        check(got, reference(as_floats(bits, dtype), dtype))


def mixture(n: int, dtype: str, style: str, seed: int = 0) -> Array:
    """Bits of n values of a kind that takes a particular way through the compiled code."""
    rng = np.random.default_rng(seed)
    wide: Array
    if style == "normal":
        wide = rng.standard_normal(n)
    elif style == "relu":
        wide = np.maximum(rng.standard_normal(n), 0)
    elif style == "gradient":  # many zeros, subnormals and flushed values, and a scale that drifts
        wide = rng.standard_normal(n) * 2.0 ** np.linspace(-30, -10, n) * (rng.random(n) < 0.7)
    elif style == "wild":  # all exponents
        limit = {"float16": (-30, 16), "bfloat16": (-140, 127), "float32": (-155, 127), "float64": (-1080, 1020)}[dtype]
        wide = rng.standard_normal(n) * np.exp2(rng.uniform(*limit, n))
    elif style == "jumping":  # the scale changes by more than any window, in lengths unrelated to any block
        low, high = (-12, 12) if dtype == "float16" else (-60, 60)
        wide = rng.standard_normal(n) * np.exp2(np.where(np.arange(n) // 777 % 2, low, high))
    elif style == "poisoned":
        wide = rng.standard_normal(n)
        wide[rng.random(n) < 0.001] = np.nan
        wide[rng.random(n) < 0.001] = np.inf
        wide[rng.random(n) < 0.001] = -np.inf
        wide[rng.random(n) < 0.01] = 65504
        wide[rng.random(n) < 0.01] = -65504 * 1.5
        wide[n // 2 : n // 2 + 5000] = np.nan
    elif style == "constant":
        wide = np.full(n, -3.25)
    elif style == "dead":
        wide = np.full(n, -0.0)
    else:
        assert style == "nan"
        wide = np.full(n, np.nan)
    with np.errstate(over="ignore", under="ignore"):
        if dtype == "bfloat16":
            return (wide.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return wide.astype(dtype).view(BITS[dtype])


STYLES = ["normal", "relu", "gradient", "wild", "jumping", "poisoned", "constant", "dead", "nan"]


def reference_large(bits: Array, dtype: str) -> dict[str, Any]:
    """The reference again, in long doubles and whole-array comparisons, fit for 100,000 elements."""
    wide = np.array(as_floats(bits, dtype), np.longdouble)
    finite = wide[np.isfinite(wide)]
    size = np.abs(finite[finite != 0])
    _, exponent = np.frexp(size)
    n = finite.size
    distinct = np.unique(size.astype(np.float64)).tolist()
    min_exponent = -1022 if dtype == "float64" else -126
    return {
        "count": wide.size,
        "zeros": int((wide == 0).sum()),
        "nan": int(np.isnan(wide).sum()),
        "pos_inf": int(np.isposinf(wide).sum()),
        "neg_inf": int(np.isneginf(wide).sum()),
        "subnormal": int(((size > 2**-25) & (size < 2**-14)).sum()),
        "flushed": int((size <= 2**-25).sum()),
        "exceeding": int((size > 65504).sum()),
        "saturated": int((size == 65504).sum()),
        "mantissa_bits": max((mantissa_bits_used(s, min_exponent) for s in distinct), default=0),
        "min": float(finite.min()) + 0.0 if n else math.nan,
        "max": float(finite.max()) + 0.0 if n else math.nan,
        "mean": float(finite.mean()) if n else math.nan,
        "rms": float(np.sqrt((finite * finite).mean())) if n else math.nan,
        "abs_mean": float(np.abs(finite).mean()) if n else 0.0,
        "exponents": np.bincount(np.clip(exponent + 126, 0, 255), minlength=256).tolist(),
    }


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("style", STYLES)
def test_sizes_across_block_borders(style: str, dtype: str, kernel: KernelName) -> None:
    table = StatsTable(kernel=kernel)
    bits = mixture(100_003, dtype, style)
    sizes = [1, 2, 3, 7, 63, 64, 255, 511, 1023, 1025, 2047, 2048, 2049, 4095, 4096, 4097, 32769, 100_003]
    for n in sizes:
        table.add(of_bits(bits[-n:], dtype), bfloat16_bits=dtype == "bfloat16")
    assert len(table) == len(sizes)
    for row, n in enumerate(sizes):
        got = TensorStats.from_row(table.rows[row], table.exponents[row])
        check(got, reference_large(bits[-n:], dtype))


def test_the_two_references_agree() -> None:
    for dtype in DTYPES:
        for style in STYLES:
            bits = mixture(997, dtype, style, seed=3)
            one, two = reference(as_floats(bits, dtype), dtype), reference_large(bits, dtype)
            for name, value in one.items():
                np.testing.assert_allclose(two[name], value, rtol=1e-14, atol=1e-16 * one["abs_mean"], err_msg=name)


@pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("style", STYLES)
def test_numba_and_numpy_agree_bit_for_bit_where_exact(style: str, dtype: str) -> None:
    tables = [StatsTable(kernel="numba"), StatsTable(kernel="numpy")]
    for seed, n in enumerate([5, 1000, 9999, 70_001]):
        for table in tables:
            table.add(of_bits(mixture(n, dtype, style, seed), dtype), bfloat16_bits=dtype == "bfloat16")
    one, two = tables
    np.testing.assert_array_equal(one.exponents, two.exponents)
    for name in EXACT:
        np.testing.assert_array_equal(one.rows[name], two.rows[name], err_msg=name)
        # assert_array_equal takes -0 for 0
        np.testing.assert_array_equal(np.signbit(one.rows[name]), np.signbit(two.rows[name]), err_msg=name)
    np.testing.assert_allclose(one.rows["rms"], two.rows["rms"], rtol=1e-13)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_every_memory_layout_gives_the_same_numbers(dtype: str, kernel: KernelName) -> None:
    base = mixture(6 * 35 * 8, dtype, "poisoned", seed=1).view(dtype).reshape(6, 35, 8)
    read_only = base.copy()
    read_only.flags.writeable = False
    unaligned = np.frombuffer(b"x" + base.tobytes(), np.uint8)[1:].view(dtype)
    assert not unaligned.flags.aligned
    layouts = {
        "fortran": np.asfortranarray(base),
        "transposed": base.transpose(2, 0, 1),
        "reversed": base[::-1, :, ::-1],
        "big-endian": base.astype(base.dtype.newbyteorder(">")),
        "read-only": read_only,
        "read-only fortran": read_only.T,
        "unaligned": unaligned,
        "broadcast": np.broadcast_to(base, (1, *base.shape)),
        "subclass": base.view(np.memmap),
        "flat": base.reshape(-1),
        "flat reversed": base.reshape(-1)[::-1],
        "every other": np.repeat(base.reshape(-1), 2)[::2],
    }
    want = reference_large(base.view(BITS[dtype]).ravel(), dtype)
    check(summarize(base, kernel=kernel), want)
    for name, array in layouts.items():
        before = array.tobytes()
        check(summarize(array, kernel=kernel), want)
        assert array.tobytes() == before, name
    strided = base[:, ::2, 1::3]
    check(summarize(strided, kernel=kernel), reference_large(strided.copy().view(BITS[dtype]).ravel(), dtype))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_empty_and_zero_dimensional(dtype: str, kernel: KernelName) -> None:
    for shape in [(0,), (3, 0, 2)]:
        got = summarize(np.empty(shape, dtype), kernel=kernel)
        check(got, reference([], dtype))
        assert math.isnan(got.absmax)
        assert got.norm == 0.0
    check(summarize(np.array(-1.5, dtype), kernel=kernel), reference([-1.5], dtype))
    check(summarize(np.dtype(dtype).type(2.5), kernel=kernel), reference([2.5], dtype))


@pytest.mark.parametrize("kernel", KERNELS)
def test_float64_rms_neither_overflows_nor_underflows(kernel: KernelName) -> None:
    for size in (1e200, 1e308, 1e-200, 5e-324, 2.0**-1022):
        got = summarize(np.full(1000, size), kernel=kernel)
        np.testing.assert_allclose(got.rms, size, rtol=1e-13)
        np.testing.assert_allclose(got.mean, size, rtol=1e-13)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("dtype", "flagged"),
    [
        ("int32", False),
        ("bool", False),
        ("complex64", False),
        ("uint16", False),
        ("longdouble", False),
        ("float32", True),
    ],
)
def test_other_dtypes_are_refused_and_leave_the_table_as_it_was(dtype: str, flagged: bool, kernel: KernelName) -> None:
    bits = np.zeros(3, dtype)
    table = StatsTable(kernel=kernel)
    table.add(np.ones(3, np.float32))
    with pytest.raises(TypeError) as caught:
        table.add(bits, bfloat16_bits=flagged)
    assert str(bits.dtype) in str(caught.value)
    assert len(table) == 1
    with pytest.raises(TypeError):
        nonfinite_counts(bits, bfloat16_bits=flagged, kernel=kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_table_grows_clears_and_reuses_rows(kernel: KernelName) -> None:
    table = StatsTable(kernel=kernel)
    for n in range(300):
        assert table.add(np.full(n, 2.0, np.float32)) == n
    assert table.rows.dtype == STATS_DTYPE
    assert table.rows.shape == (300,)
    assert table.exponents.shape == (300, 256)
    assert table.rows["count"].tolist() == list(range(300))
    assert table.exponents[:, 128].tolist() == list(range(300))
    assert table.exponents.sum() == sum(range(300))
    table.clear()
    assert len(table) == 0
    assert table.rows.shape == (0,)
    # A row that held other numbers before.
    table.add(np.empty(0, np.float16))
    check(TensorStats.from_row(table.rows[0], table.exponents[0]), reference([], "float16"))


@pytest.mark.parametrize("kernel", KERNELS)
def test_tables_in_several_threads_do_not_disturb_each_other(kernel: KernelName) -> None:
    arrays = [mixture(30_001, "float32", style).view(np.float32) for style in STYLES[:6]]
    want = [summarize(a, kernel=kernel) for a in arrays]
    wrong: list[str] = []

    def work(which: int) -> None:
        table = StatsTable(kernel=kernel)
        for turn in range(8):
            row = table.add(arrays[which])
            if TensorStats.from_row(table.rows[row], table.exponents[row]) != want[which]:
                wrong.append(f"array {which} in turn {turn}")

    threads = [threading.Thread(target=work, args=(i % 6,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None)
@given(data=st.data())
def test_nonfinite_counts_equal_the_reference(data: st.DataObject, dtype: str, kernel: KernelName) -> None:
    bits = data.draw(bit_arrays(dtype))
    want = reference(as_floats(bits, dtype), dtype)
    array, flag = of_bits(bits, dtype), dtype == "bfloat16"
    got = nonfinite_counts(array, bfloat16_bits=flag, kernel=kernel)
    assert got == (want["nan"], want["pos_inf"], want["neg_inf"])
    assert is_finite(array, bfloat16_bits=flag, kernel=kernel) is (sum(got) == 0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_nonfinite_element_is_found_wherever_it_is(dtype: str, kernel: KernelName) -> None:
    bits = mixture(40_001, dtype, "normal")
    unsigned = BITS[dtype]
    infinity = unsigned({"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F8 << 20, "float64": 0x7FF << 52}[dtype])
    sign = unsigned(1 << (8 * np.dtype(unsigned).itemsize - 1))
    for place in (0, 1, 4095, 4096, 32767, 32768, 39_999, 40_000):
        for pattern, want in ((infinity, (0, 1, 0)), (infinity | sign, (0, 0, 1)), (infinity | unsigned(1), (1, 0, 0))):
            changed = bits.copy()
            changed[place] = pattern
            array, flag = of_bits(changed, dtype), dtype == "bfloat16"
            assert nonfinite_counts(array, bfloat16_bits=flag, kernel=kernel) == want
            assert not is_finite(array, bfloat16_bits=flag, kernel=kernel)


def test_derived_numbers_and_dict() -> None:
    got = summarize(np.array([3.0, -4.0, np.nan, np.inf, 0.0], np.float32))
    assert (got.finite, got.nonfinite, got.absmax) == (3, 2, 4.0)
    assert got.norm == pytest.approx(5.0, rel=1e-15)
    plain = got.to_dict()
    assert plain["exponents"] == {1: 1, 2: 1}
    assert plain["norm"] == got.norm
    assert json.loads(json.dumps(plain))["nan"] == 1
    assert set(STATS_DTYPE.names or ()) <= set(plain)


def update_reference(before: list[float], after: list[float], fmt: Format) -> UpdateStats:
    pairs = [(b, a) for b, a in zip(before, after, strict=True) if math.isfinite(b) and math.isfinite(a)]
    changes = [Fraction(a - b) for b, a in pairs]  # the difference is defined as the float64 one
    lost = 0
    for (b, _), change in zip(pairs, changes, strict=True):
        exponent = max(math.frexp(b)[1] - 1, fmt.min_exponent) if b else fmt.min_exponent
        lost += 0 < abs(change) < Fraction(2) ** (exponent - fmt.mantissa_bits - 1)
    return UpdateStats(
        fmt.name,
        count=len(before),
        nonfinite=len(before) - len(pairs),
        changed=sum(c != 0 for c in changes),
        below_half_ulp=lost,
        update_norm=math.sqrt(sum(c * c for c in changes)),
        weight_norm=math.sqrt(sum(Fraction(b) ** 2 for b, _ in pairs)),
    )


def check_update(got: UpdateStats, want: UpdateStats) -> None:
    for name in ("format", "count", "nonfinite", "changed", "below_half_ulp"):
        assert getattr(got, name) == getattr(want, name), name
    np.testing.assert_allclose(got.update_norm, want.update_norm, rtol=1e-13)
    np.testing.assert_allclose(got.weight_norm, want.weight_norm, rtol=1e-13)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("fmt", [FLOAT16, BFLOAT16, FLOAT32], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@settings(deadline=None)
@given(data=st.data())
def test_update_equals_the_reference(data: st.DataObject, dtype: str, fmt: Format, kernel: KernelName) -> None:
    before = data.draw(hnp.arrays(BITS[dtype], st.integers(0, 30), elements=bit_patterns(dtype), fill=st.nothing()))
    # Mostly neighbours, a few bits away: the interesting cases lie around half an ulp.
    step = data.draw(hnp.arrays(BITS[dtype], before.shape, elements=st.integers(0, 20), fill=st.nothing()))
    shift = data.draw(st.integers(0, 13))
    after = before ^ (step << BITS[dtype](shift))
    flag = dtype == "bfloat16"
    got = measure_update(of_bits(before, dtype), of_bits(after, dtype), fmt, bfloat16_bits=flag, kernel=kernel)
    check_update(got, update_reference(as_floats(before, dtype), as_floats(after, dtype), fmt))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_update_of_large_arrays(dtype: str, kernel: KernelName) -> None:
    for style, n in (("normal", 4097), ("gradient", 20_003), ("poisoned", 20_003)):
        before = mixture(n, dtype, style)
        after = before.copy()
        after[::3] ^= BITS[dtype](5)
        flag = dtype == "bfloat16"
        arrays = of_bits(before, dtype), of_bits(after, dtype)
        got = measure_update(*arrays, "float16", bfloat16_bits=flag, kernel=kernel)
        check_update(got, update_reference(as_floats(before, dtype), as_floats(after, dtype), FLOAT16))


@pytest.mark.parametrize("kernel", KERNELS)
def test_update_around_half_an_ulp(kernel: KernelName) -> None:
    half_ulp = 2.0**-11
    before = np.ones(4, np.float32)
    after = before + np.array([0, half_ulp / 2, half_ulp, -half_ulp / 2], np.float32)
    got = measure_update(before, after, "fp16", kernel=kernel)
    assert (got.changed, got.below_half_ulp) == (3, 2)
    assert got.ratio == pytest.approx(got.update_norm / 2.0)
    assert measure_update(before, after, "float32", kernel=kernel).below_half_ulp == 0
    assert measure_update(before, after, "bfloat16", kernel=kernel).below_half_ulp == 3
    zeros = np.zeros(2, np.float32)
    assert math.isnan(measure_update(zeros, zeros, "fp16", kernel=kernel).ratio)
    assert measure_update(zeros, zeros + 1, "fp16", kernel=kernel).ratio == math.inf
    # Zero's unit in the last place is the smallest subnormal.
    tiny = np.array([2.0**-26, 2.0**-25], np.float32)
    assert measure_update(zeros, tiny, "fp16", kernel=kernel).below_half_ulp == 1


@pytest.mark.parametrize("kernel", KERNELS)
def test_update_pairs_elements_whatever_the_layout(kernel: KernelName) -> None:
    rng = np.random.default_rng(0)
    before = rng.standard_normal((17, 33)).astype(np.float32)
    after = (before * 1.001).astype(np.float32)
    want = measure_update(before, after, FLOAT16, kernel=kernel)
    fortran = np.asfortranarray(before)
    for b, a in [(fortran, after), (before[::-1], after[::-1]), (fortran.T, after.T)]:
        got = measure_update(b, a, FLOAT16, kernel=kernel)
        assert (got.changed, got.below_half_ulp) == (want.changed, want.below_half_ulp)
        assert got.update_norm == pytest.approx(want.update_norm, rel=1e-12)
    assert want.to_dict()["ratio"] == want.ratio == pytest.approx(0.001, rel=1e-3)


def test_update_refuses_what_it_cannot_compare() -> None:
    ones = np.ones(3, np.float32)
    with pytest.raises(ArgumentError) as caught:
        measure_update(ones, np.ones(4, np.float32), "float16")
    assert "(4,)" in str(caught.value)
    assert "(3,)" in str(caught.value)
    with pytest.raises(TypeError) as mixed:
        measure_update(ones, np.ones(3, np.float16), "float16")
    assert "float16" in str(mixed.value)
    with pytest.raises(TypeError):
        measure_update(np.ones(3), np.ones(3), "float16")
    with pytest.raises(TypeError):
        measure_update(np.ones(3, np.int32), np.ones(3, np.int32), "float16")
    with pytest.raises(ArgumentError):
        measure_update(ones, ones, "float64")
    with pytest.raises(ArgumentError):
        measure_update(ones, ones, "int8")


def test_an_unknown_kernel_is_refused_with_the_choices() -> None:
    with pytest.raises(ArgumentError) as caught:
        StatsTable(kernel="cuda")  # type: ignore[arg-type]
    assert "'cuda'" in str(caught.value)
    assert "'numba'" in str(caught.value)


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_reading_does_not_import_numba_and_measuring_does_where_it_is() -> None:
    code = "import sys, numpy, ampdebug._stats as s; s.TensorStats; print('numba' in sys.modules); "
    assert run_python(code).split() == ["False"]
    if HAS_NUMBA:
        assert run_python(code + "s.StatsTable(); print('numba' in sys.modules)").split() == ["False", "True"]


def test_kernel_name_and_reason_say_what_is_used() -> None:
    assert kernel_name() == ("numba" if HAS_NUMBA else "numpy")
    assert "numba" in kernel_reason()
    assert StatsTable().kernel == kernel_name()


def test_without_numba_numpy_computes_and_says_how_to_get_it() -> None:
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "import numpy as np, ampdebug._stats as s\n"
        "print(s.kernel_name(), '|', s.kernel_reason(), '|', s.summarize(np.ones(3, np.float16)).norm)\n"
    )
    name, reason, norm = run_python(code).split("|")
    assert name.strip() == "numpy"
    assert "pip install 'ampdebug[fast]'" in reason
    assert float(norm) == pytest.approx(math.sqrt(3))
