"""The judge of an inference check, against arithmetic written out here."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ampdebug._bisect_result import Unit
from ampdebug._inference import (
    InferenceReport,
    Layer,
    judge_outputs,
    output_error,
    overflow_notes,
    rank_layers,
    scored,
)
from ampdebug._sites import OperatorSite, SiteScore

FLOATS = hnp.arrays(np.float32, hnp.array_shapes(max_dims=3), elements=st.floats(-1000, 1000, width=32))


@given(st.lists(FLOATS, min_size=1, max_size=3), st.integers(0, 2**31))
def test_errors_are_those_of_float64(batches: list[Any], seed: int) -> None:
    random = np.random.default_rng(seed)
    low = [batch + random.normal(size=batch.shape).astype(np.float32) for batch in batches]
    found = output_error(0, batches, low)
    pairs = [
        (float(a), float(b))
        for one, two in zip(batches, low, strict=True)
        for a, b in zip(one.flat, two.flat, strict=True)
    ]
    differences = [abs(b - a) for a, b in pairs]
    assert found.elements == len(pairs)
    assert found.max_error == max(differences)
    assert found.mean_error == pytest.approx(math.fsum(differences) / len(pairs))
    norms = [math.sqrt(math.fsum(p[k] ** 2 for p in pairs)) for k in (0, 1)]
    if norms[0] > 1e-3:
        error = math.sqrt(math.fsum(d * d for d in differences))
        assert found.relative_error == pytest.approx(error / norms[0])
        dot = math.fsum(a * b for a, b in pairs)
        assert found.cosine == pytest.approx(dot / (norms[0] * norms[1]), abs=1e-9)


def test_values_that_are_not_finite_are_counted_and_left_out() -> None:
    exact = np.array([1.0, 2.0, np.inf, 4.0], np.float32)
    low = np.array([1.5, np.nan, np.inf, 4.0], np.float32)
    found = output_error(0, [exact], [low])
    assert (found.nonfinite, found.nonfinite_float32) == (1, 1)
    assert (found.max_error, found.mean_error) == (0.5, 0.25)


def test_top_1_agreement_counts_rows() -> None:
    exact = [np.array([[0, 1, 2], [5, 1, 0], [0, 3, 1]], np.float32), np.array([[1, 0, 0]], np.float32)]
    low = [np.array([[0, 1, 2], [1, 5, 0], [0, np.nan, 1]], np.float32), np.array([[2, 0, 0]], np.float32)]
    assert output_error(0, exact, low).top1_agreement == 0.5
    assert output_error(0, [np.zeros((2, 3, 4))], [np.zeros((2, 3, 4))]).top1_agreement is None
    assert output_error(0, [np.zeros((2, 1))], [np.zeros((2, 1))]).top1_agreement is None


def error_of(relative: float) -> Any:
    return output_error(0, [np.array([100.0])], [np.array([100.0 * (1 + relative)])])


@pytest.mark.parametrize(
    ("dtype", "tolerance", "relative", "good"),
    [
        ("float16", None, 0.019, True),  # 40 roundings of 2**-11
        ("float16", None, 0.020, False),
        ("bfloat16", None, 0.15, True),
        ("bfloat16", None, 0.16, False),
        ("float16", 0.001, 0.002, False),
        ("float16", 0.1, 0.05, True),
    ],
)
def test_without_a_metric_the_outputs_are_judged(dtype: str, tolerance: float, relative: float, good: bool) -> None:
    _, problems, _ = judge_outputs([error_of(relative)], dtype=dtype, tolerance=tolerance)
    assert (not problems) is good


@pytest.mark.parametrize(
    ("better", "tolerance", "metric", "good"),
    [
        ("higher", None, 0.89, True),  # 2 % of 0.9 is 0.018
        ("higher", None, 0.88, False),
        ("higher", 0.005, 0.89, False),
        ("lower", 0.005, 0.904, True),
        ("lower", 0.005, 0.906, False),
        ("higher", 1.0, math.nan, False),
    ],
)
def test_a_metric_is_judged_in_its_own_unit(better: Any, tolerance: float, metric: float, good: bool) -> None:
    _, problems, _ = judge_outputs(
        [error_of(0.5)], dtype="float16", metrics=(0.9, metric), better=better, tolerance=tolerance
    )
    assert (not problems) is good


def test_lost_values_are_never_good() -> None:
    lost = output_error(0, [np.ones(3), np.full(1, np.inf)], [np.array([1, 1, np.inf]), np.full(1, np.inf)])
    words, problems, notes = judge_outputs([lost], dtype="float16", metrics=(0.9, 0.9))
    assert problems == ("1 output values are finite in float32 and not in float16",)
    assert notes == ("1 output values are not finite in float32 either; they are left out",)
    assert words.startswith("metric >= 0.882")


def unit(path: str, name: str, line: str = "net.py:3") -> Unit:
    return Unit(f"{path}/{name}", (OperatorSite(path, name, line, 0),), name, path, "net.py", line, "y = f(x)")


def score(value: float, overflowed: int = 0) -> SiteScore:
    return SiteScore(value, 10, overflowed, 0, 7e4 if overflowed else 1.0, 0.5, 0.01)


def test_layers_sum_their_operators_up() -> None:
    units = [unit("a", "Conv2D"), unit("b", "MatMul"), unit("a", "Exp"), unit("", "Add")]
    scores = {u.sites[0]: score(s) for u, s in zip(units, (1.0, 5.0, 3.0, 1.0), strict=True)}
    layers = rank_layers(scored([*units, unit("c", "Tanh")], scores))
    assert [(layer.path, layer.share, layer.operator) for layer in layers] == [
        ("b", 0.5, "MatMul"),
        ("a", 0.4, "Exp"),
        ("", 0.1, "Add"),
    ]


def test_layers_that_overflow_come_first() -> None:
    layers = rank_layers([(unit("a", "Conv2D"), score(9.0)), (unit("b", "Exp"), score(math.inf, 3))])
    assert [(layer.path, layer.share, layer.overflows) for layer in layers] == [("b", 1.0, True), ("a", 0.0, False)]
    assert "overflow: 3 of 10" in layers[0].why
    assert overflow_notes(layers, [error_of(0.0)], "float16") == (
        "values leave float16 in b, although the outputs are finite: other data may not be so lucky",
    )
    assert overflow_notes(layers[1:], [error_of(0.0)], "float16") == ()


def test_layers_without_any_effect() -> None:
    assert rank_layers([(unit("a", "ReLU"), score(0.0))])[0].share == 0.0
    assert rank_layers([]) == ()


def test_the_report() -> None:
    layers = tuple(Layer(f"cell{k}", 0.1, "Conv2D", "net.py:3", "", "rounding") for k in range(9))
    report = InferenceReport(
        "Net", "O3", "float16", False, "net.ckpt", 2, (error_of(0.5),), 0.9, 0.5, "metric >= 0.88",
        ("the metric is 0.5",), layers, ("a note",),
    )  # fmt: skip
    text = str(report)
    for part in ("Net with net.ckpt at O3 in float16: NOT within", "50.00%", "… 1 more cells", "note: a note", "0.9"):
        assert part in text
    assert not report.ok
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["verdict"] == "outside"
    assert len(data["layers"]) == 9
    assert report._repr_html_().startswith("<pre>")
