"""Ready-made probes by name, and the numbers they give, against references in plain Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ampdebug._errors import ArgumentError
from ampdebug._probe import LossBand, ProbeName, cosine_distance, gradient_error, relative_error, worst_error


@pytest.mark.parametrize(
    ("text", "name", "shown"),
    [
        ("output", ProbeName("output"), "output"),
        ("grad", ProbeName("grad", "relative"), "grad:relative"),
        ("grad:relative", ProbeName("grad", "relative"), "grad:relative"),
        ("grad:cosine", ProbeName("grad", "cosine"), "grad:cosine"),
        ("grad:worst", ProbeName("grad", "worst"), "grad:worst"),
        ("finite", ProbeName("finite"), "finite"),
        ("train:200", ProbeName("train", steps=200), "train:200"),
        ("train", ProbeName("train", steps=100), "train:100"),
        ("overflow", ProbeName("overflow", steps=20), "overflow:20"),
        ("metric", ProbeName("metric"), "metric"),
        ("metric:50", ProbeName("metric", steps=50), "metric:50"),
        ("metric:0", ProbeName("metric"), "metric"),
    ],
)
def test_names(text: str, name: ProbeName, shown: str) -> None:
    assert ProbeName.parse(text) == name
    assert str(name) == shown
    assert ProbeName.parse(str(name)) == name
    assert name.words


@pytest.mark.parametrize(
    "text", ["", "loss", "train:", "train:0", "train:-3", "train:x", "train:²", "output:3", "grad:l2"]
)
def test_other_names_are_refused_with_a_list(text: str) -> None:
    with pytest.raises(
        ArgumentError, match=r"must be one of output, grad \(grad:cosine, grad:worst\), finite, train:N"
    ):
        ProbeName.parse(text)


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ("output", set()),
        ("grad", {"loss"}),
        ("finite", {"loss"}),
        ("train:5", {"loss", "optimizer"}),
        ("overflow", {"loss", "optimizer"}),
        ("metric", {"metric"}),
        ("metric:5", {"metric", "loss", "optimizer"}),
    ],
)
def test_what_a_workload_must_have(text: str, needs: set[str]) -> None:
    assert set(ProbeName.parse(text).needs) == needs


def test_limits_follow_the_format() -> None:
    """Of errors that are made of roundings; those of training are as wide for every format."""
    assert ProbeName.parse("output").limits("float16") == (None, 40 * 2**-11)
    assert ProbeName.parse("output").limits("bfloat16") == (None, 40 * 2**-8)
    assert ProbeName.parse("grad").limits("float16") == (None, 100 * 2**-11)
    assert ProbeName.parse("grad:worst").limits("bfloat16") == (None, 400 * 2**-8)
    assert ProbeName.parse("grad:cosine").limits("bfloat16") == (None, 0.01)
    assert ProbeName.parse("train:9").limits("float16") == ProbeName.parse("train:9").limits("bfloat16") == (None, 1.0)
    assert ProbeName.parse("overflow:100").limits("float16") == (5.0, None)
    assert ProbeName.parse("metric").limits("float16") == (None, None)


# --- errors -----------------------------------------------------------------------------------------------------------


def by_hand(exact: list[Any], seen: list[Any]) -> tuple[float, float]:
    """Relative error and cosine distance with Python's exact sums."""
    one = [float(x) for array in exact for x in np.asarray(array, np.float64).reshape(-1)]
    other = [float(x) for array in seen for x in np.asarray(array, np.float64).reshape(-1)]
    norms = math.sqrt(math.fsum(x * x for x in one)), math.sqrt(math.fsum(x * x for x in other))
    error = math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(one, other, strict=True))) / norms[0]
    return error, 1 - math.fsum(a * b for a, b in zip(one, other, strict=True)) / norms[0] / norms[1]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_errors_against_exact_sums(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    exact = [rng.normal(size=shape).astype(np.float32) for shape in ((3, 5), (), (40,))]
    seen = [(array * (1 + 0.1 * rng.normal(size=array.shape))).astype(dtype) for array in exact]
    error, distance = by_hand(exact, seen)
    assert relative_error(exact, seen) == pytest.approx(error, rel=1e-12)
    assert cosine_distance(exact, seen) == pytest.approx(distance, rel=1e-9)
    assert gradient_error("relative", exact, seen) == relative_error(exact, seen)
    assert gradient_error("cosine", exact, seen) == cosine_distance(exact, seen)
    assert gradient_error("worst", exact, seen) == worst_error(exact, seen)


def test_sums_are_wide() -> None:
    large = [np.full(100_000, 300, np.float16)]
    assert relative_error(large, [np.full(100_000, 303, np.float16)]) == pytest.approx(0.01)
    huge = [np.array([3e38, -3e38], np.float32)]
    assert relative_error(huge, [-huge[0]]) == pytest.approx(2.0)
    assert cosine_distance(huge, [-huge[0]]) == pytest.approx(2.0)
    tiny = [np.array([1e-40, 2e-40], np.float32)]
    assert cosine_distance(tiny, tiny) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("measure", [relative_error, cosine_distance, worst_error])
def test_what_is_not_finite_is_no_number(bad: float, measure: Any) -> None:
    good, broken = [np.ones(3), np.ones(2)], [np.ones(3), np.array([1.0, bad])]
    assert math.isnan(measure(good, broken))
    assert math.isnan(measure(broken, good))


def test_zeros() -> None:
    zero, one = [np.zeros(3)], [np.array([1.0, 0.0, 0.0])]
    assert (relative_error(zero, zero), relative_error(zero, one), relative_error(one, zero)) == (0.0, math.inf, 1.0)
    assert (cosine_distance(zero, zero), cosine_distance(zero, one), cosine_distance(one, zero)) == (0.0, 1.0, 1.0)
    assert (worst_error(zero, zero), worst_error(zero, one)) == (0.0, math.inf)
    assert relative_error([], []) == cosine_distance([], []) == worst_error([], []) == 0.0


def test_the_cosine_sees_direction_alone_and_the_error_sees_scale() -> None:
    exact = [np.array([3.0, 4.0])]
    assert cosine_distance(exact, [2 * exact[0]]) == pytest.approx(0.0, abs=1e-15)
    assert relative_error(exact, [2 * exact[0]]) == pytest.approx(1.0)
    assert cosine_distance(exact, [np.array([-4.0, 3.0])]) == pytest.approx(1.0)


def test_the_worst_parameter_is_not_one_whose_gradient_is_rounding_alone() -> None:
    weight, bias = np.full(100, 1.0), np.full(4, 1e-9)
    assert worst_error([weight, bias], [weight * 1.1, bias]) == pytest.approx(0.1)
    noisy = worst_error([weight, bias], [weight, bias + 1e-4])
    # 2e-4 long, against a hundredth of the root mean square sqrt(100/104) on 4 elements
    assert noisy == pytest.approx(2e-4 / (0.01 * math.sqrt(100 / 104 * 4)))
    assert worst_error([weight, weight], [weight, weight * 0.5]) == pytest.approx(0.5)
    assert relative_error([weight, weight], [weight, weight * 0.5]) == pytest.approx(0.5 / math.sqrt(2))


# --- the band of losses -----------------------------------------------------------------------------------------------


def curve(noise: float = 0.0, floor: float = 0.1) -> list[float]:
    return [floor + math.exp(-step / 10) + noise for step in range(50)]


def test_the_band_is_that_of_the_seeds() -> None:
    band = LossBand.of([curve(0.03), curve(-0.03), curve(0.0)])
    windows = [np.mean(curve()[k : k + 10]) for k in range(0, 50, 10)]
    assert band.middle == pytest.approx(windows)
    assert band.half_width == pytest.approx([3 * 0.03] * 5), "three standard deviations of -0.03, 0, 0.03"
    assert band.excess(curve()) == pytest.approx(0.0)
    assert band.excess(curve(0.045)) == pytest.approx(0.5)
    assert band.excess(curve(0.18)) == pytest.approx(2.0)
    assert band.excess(curve(-5.0)) == 0.0, "a lower loss is no fault"
    late = curve()[:40] + [1.0] * 10
    assert band.excess(late) == pytest.approx((1.0 - windows[4]) / 0.09), "the worst window counts"


def test_seeds_that_agree_leave_two_percent_of_the_first_loss() -> None:
    band = LossBand.of([curve(), curve()])
    assert band.half_width == pytest.approx([0.02 * band.middle[0]] * 5)
    assert band.excess(curve(0.019 * band.middle[0])) < 1 < band.excess(curve(0.021 * band.middle[0]))


def test_few_steps_and_no_number() -> None:
    band = LossBand.of([[1.0, 0.5], [1.1, 0.6]])
    assert len(band.middle) == 2
    assert math.isnan(band.excess([1.0, math.nan]))
    assert math.isnan(band.excess([math.inf])), "a training that was ended at once"
    lost = LossBand.of([[1.0, 0.5], [1.1, math.nan], [math.inf]])
    assert math.isnan(lost.excess([1.0, 0.5])), "float32 itself fails"
    flat = LossBand.of([[0.0, 0.0], [0.0, 0.0]])
    assert flat.excess([0.0, 0.0]) == 0.0
    assert flat.excess([0.0, 1e-9]) == math.inf


def test_a_name_must_be_text() -> None:
    with pytest.raises(ArgumentError, match="probe=5: must be one of"):
        ProbeName.parse(5)  # type: ignore[arg-type]
