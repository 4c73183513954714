"""The rules over one step's operators, on steps that are computed here in numpy: no MindSpore."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ampdebug._stats import summarize
from ampdebug.rules._operator_records import (
    CellFacts,
    LabelFacts,
    NetworkInput,
    Operand,
    Operator,
    OptimizerFacts,
    Outcome,
    Result,
    Step,
    Variable,
)
from ampdebug.rules.operators import judge_step

Array = npt.NDArray[Any]
F16, F32 = np.float16, np.float32


class Tape:
    """Builds a step: each call computes in a dtype, and in float32 for the reference."""

    def __init__(self, level: str = "O2") -> None:
        self.level = level
        self.operators: list[Operator] = []
        self.made: dict[int, int] = {}
        self.alive: list[Array] = []
        self.names: dict[int, str] = {}

    def input(self, array: npt.ArrayLike, name: str = "input 0", dtype: Any = F32) -> Array:
        value = np.asarray(array, dtype)
        self.names[id(value)] = name
        self.alive.append(value)
        return value

    def call(
        self,
        name: str,
        function: Any,
        *given: Any,
        dtype: Any = F16,
        path: str = "cell",
        cell_type: str = "Cell",
        phase: str = "network",
        masked_rows: int = 0,
        gradient: Any = None,
    ) -> Array:
        operands = []
        for value in given:
            if isinstance(value, np.ndarray):
                single = float(value.reshape(-1)[0]) if value.size == 1 else None
                producer = self.made.get(id(value))
                source = self.names.get(id(value), "" if producer is not None else "constant")
                operands.append(Operand(value.dtype.name, value.shape, summarize(value), single, producer, source))
            else:
                operands.append(Operand("number", value=float(value)))
        if masked_rows:
            operands[0] = dataclasses.replace(operands[0], masked_rows=masked_rows)
        with np.errstate(all="ignore"):
            out = np.asarray(function(*(np.asarray(v).astype(dtype) for v in given))).astype(dtype)
            exact = np.asarray(function(*(np.asarray(v).astype(F32) for v in given)))
        index = len(self.operators)
        result = Result(
            out.dtype.name,
            out.shape,
            summarize(out),
            summarize(exact.astype(F32)) if dtype == F16 else None,
            gradient=None if gradient is None else summarize(np.asarray(gradient, dtype)),
        )
        self.operators.append(
            Operator(index, name, path, cell_type, f"net.py:{index + 1}", name, tuple(operands), (result,), phase)
        )
        self.made[id(out)] = index
        self.alive.append(out)
        return out

    def step(self, output: Array, exact: npt.ArrayLike, **more: Any) -> Step:
        right = np.asarray(exact, F32)
        with np.errstate(all="ignore"):
            good = np.isfinite(output) & np.isfinite(right)
            size = float(np.sqrt((right[good].astype(np.float64) ** 2).mean())) if good.any() else 0.0
            error = float(np.abs(output[good].astype(np.float64) - right[good]).max()) / size if size else None
        outcome = Outcome((summarize(output),), (summarize(right),), error, **more.pop("loss", {}))
        inputs = tuple(NetworkInput(name, summarize(a)) for a in self.alive if (name := self.names.get(id(a))))
        return Step(self.level, tuple(self.operators), inputs, outcome=outcome, **more)


def slugs(step: Step) -> list[str]:
    return [f.slug for f in judge_step(step) if f.severity != "note"]


def softmax(x: Array) -> Array:
    shifted = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(-1, keepdims=True))


# --- masks ------------------------------------------------------------------------------------------------------------


def masked(constant: float, dtype: Any = F16) -> Step:
    tape = Tape()
    scores = tape.input(np.linspace(-1, 1, 12).reshape(2, 6))
    gone = tape.input(np.repeat([[0, 0, 0, 0, 1, 1]], 2, 0), "input 1")
    term = tape.call("Tensor.__mul__", np.multiply, gone, constant, dtype=dtype)
    both = tape.call("Tensor.__add__", np.add, scores, term, dtype=dtype)
    out = tape.call("Softmax", softmax, both, dtype=dtype)
    return tape.step(out, softmax(scores + gone * constant))


def test_a_mask_constant_that_is_inf_and_meets_zero() -> None:
    found = judge_step(masked(-1e9), 3)
    assert [f.slug for f in found] == ["mask-constant-overflows-fp16"]
    assert found[0].first_step == 3
    assert found[0].where == "cell"
    assert "-1e+09" in found[0].sentence
    assert "-inf in float16" in found[0].sentence
    assert any("net.py:1" in row.text for row in found[0].evidence)


@pytest.mark.parametrize(("constant", "dtype"), [(-1e4, F16), (-6e4, F16), (-1e9, F32)])
def test_a_mask_constant_that_the_format_holds(constant: float, dtype: Any) -> None:
    assert slugs(masked(constant, dtype)) == []


def filled(rows: int, fill: float, dtype: Any = F16) -> Step:
    tape = Tape()
    scores = tape.input(np.linspace(-1, 1, 12).reshape(2, 6))
    mask = np.zeros((2, 6), bool)
    mask[:, 4:] = True
    mask[:rows] = True
    with np.errstate(over="ignore"):
        out = tape.call("Tensor.masked_fill", lambda x, v: np.where(mask, v, x), scores, fill, dtype=dtype)
    weights = tape.call("Softmax", softmax, out, dtype=dtype, masked_rows=int(np.isneginf(out).all(-1).sum()))
    with np.errstate(all="ignore"):
        exact = softmax(np.where(mask, np.float32(fill), scores))
    return tape.step(weights, exact)


@pytest.mark.parametrize("fill", [-np.inf, -1e9])
def test_a_row_without_a_finite_entry(fill: float) -> None:
    assert slugs(filled(1, fill)) == ["softmax-row-fully-masked"]


@pytest.mark.parametrize("fill", [-np.inf, -1e9, -65504.0])
def test_rows_with_a_finite_entry(fill: float) -> None:
    assert slugs(filled(0, fill)) == []


def test_a_harmless_mask_is_not_blamed_for_a_fault_behind_it() -> None:
    tape = Tape()
    scores = tape.input(np.linspace(-1, 1, 12).reshape(2, 6))
    mask = np.zeros((2, 6), bool)
    mask[:, 4:] = True
    with np.errstate(over="ignore"):
        out = tape.call("Tensor.masked_fill", lambda x, v: np.where(mask, v, x), scores, -1e9)
    weights = tape.call("Softmax", softmax, out)
    spread = tape.call("Tile", lambda a: np.tile(a * 1000, (1, 2000)), weights)
    total = tape.call("Tensor.sum", lambda a: a.astype(F32).sum(-1), spread, path="pool")
    (found,) = judge_step(tape.step(total, np.full(2, 2e6)))
    assert (found.slug, found.where) == ("reduce-sum-overflow-in-pooling", "pool")


def test_a_bound_that_rounds_to_one() -> None:
    tape = Tape()
    p = tape.call("Clamp", lambda a, b: np.minimum(a, b), tape.input([0.5, 1.0]), 1 - 1e-8)
    rest = tape.call("Tensor.__rsub__", lambda a: 1 - a, p)
    out = tape.call("Log", np.log, rest)
    assert slugs(tape.step(out, np.log([0.5, 1e-8]))) == ["eps-1e-8-is-zero-in-fp16"]


# --- overflows --------------------------------------------------------------------------------------------------------


def rms_norm(size: float, eps: float = 1e-6) -> Step:
    tape = Tape()
    x = tape.input(np.where(np.arange(32).reshape(4, 8) % 2, size, -size))
    square = tape.call("Tensor.__mul__", np.multiply, x, x)
    mean = tape.call("Tensor.mean", lambda a: a.mean(-1, keepdims=True), square)
    safe = tape.call("Tensor.__add__", np.add, mean, eps)
    root = tape.call("Rsqrt", lambda a: 1 / np.sqrt(a), safe)
    out = tape.call("Tensor.__mul__", np.multiply, x, root)
    with np.errstate(all="ignore"):
        exact = x / np.sqrt((x * x).mean(-1, keepdims=True) + F32(eps))
    return tape.step(out, exact)


def test_squares_that_overflow_in_a_norm_leave_zeros() -> None:
    (found,) = judge_step(rms_norm(450.0))
    assert found.slug == "rmsnorm-square-overflow-output-zero"
    assert "450" in found.sentence
    assert "silently 0" in found.sentence


@pytest.mark.parametrize("size", [1.0, 200.0])
def test_squares_in_range(size: float) -> None:
    assert slugs(rms_norm(size)) == []


def test_an_epsilon_that_is_zero_where_it_matters_and_where_not() -> None:
    assert slugs(rms_norm(0.0, 1e-8)) == ["eps-1e-8-is-zero-in-fp16"]
    assert slugs(rms_norm(1.0, 1e-8)) == []
    assert [f.severity for f in judge_step(rms_norm(1.0, 1e-8))] == ["note"]
    assert judge_step(rms_norm(1.0, 1e-6)) == ()


def product(size: float, scale: float | None) -> Step:
    tape = Tape()
    q = tape.call("Dense", lambda a: a, tape.input(np.full((4, 64), size)))
    k = tape.call("Dense", lambda a: a, tape.input(np.full((64, 4), size), "input 1"))
    scores = tape.call("MatMul", lambda a, b: a.astype(F32) @ b.astype(F32), q, k)
    if scale is not None:
        scores = tape.call("Tensor.__mul__", np.multiply, scores, scale)
    shifted = tape.call("Tensor.__sub__", lambda a: a - a.max(-1, keepdims=True), scores)
    return tape.step(shifted, np.zeros((4, 4)))


def test_a_product_that_overflows_before_its_scale() -> None:
    (found,) = judge_step(product(64.0, 0.125))
    assert found.slug == "qk-matmul-overflow-before-scaling"
    assert "2.621e+05" in found.sentence
    assert slugs(product(8.0, 0.125)) == []


def test_a_product_that_nothing_scales() -> None:
    assert slugs(product(64.0, None)) == ["forward-overflow-scale-independent"]


def pooled(size: float, *, square: bool = False) -> Step:
    tape = Tape()
    x = tape.input(np.full((2, 8192), size))
    if square:
        x = tape.call("Exp", np.exp, x)
    total = tape.call("Tensor.sum", lambda a: a.astype(F32).sum(-1), x)
    out = tape.call("Tensor.__truediv__", np.divide, total, 8192.0)
    exact = np.exp(size) if square else size
    return tape.step(out, np.full(2, exact))


def test_sums_over_positions() -> None:
    assert slugs(pooled(20.0)) == ["reduce-sum-overflow-in-pooling"]
    assert slugs(pooled(2.0)) == []
    assert slugs(pooled(4.0, square=True)) == ["handwritten-softmax-overflow"]


def divided(count: int) -> Step:
    tape = Tape()
    total = tape.input(np.array([3.0]))
    mask = tape.input(np.ones(count), "input 1", F16)
    number = tape.call("Tensor.sum", lambda a: np.atleast_1d(a.astype(F32).sum()), mask)
    out = tape.call("Tensor.__truediv__", np.divide, total, number)
    return tape.step(out, np.array([3.0 / count]))


def test_a_divisor_that_overflows_gives_zero() -> None:
    assert slugs(divided(70000)) == ["loss-denominator-overflow-loss-zero"]
    assert slugs(divided(7000)) == []


def stream(growth: float) -> Step:
    tape = Tape()
    x = tape.input(np.linspace(1, 2, 8).reshape(2, 4))
    exact = x.astype(np.float64)
    for layer in range(6):
        branch = tape.call("Dense", lambda a: a * growth, x, path=f"blocks.{layer}")
        x = tape.call("Tensor.__add__", np.add, x, branch, path=f"blocks.{layer}")
        exact = exact * (1 + growth)
    return tape.step(x, exact.astype(F32))


def test_a_hidden_state_that_grows_out_of_the_format() -> None:
    (found,) = [f for f in judge_step(stream(6.0)) if f.severity != "note"]
    assert found.slug == "residual-stream-exceeds-fp16"
    assert found.where.startswith("blocks.")
    assert slugs(stream(0.1)) == []


def clipped(size: float) -> Step:
    tape = Tape()
    x = tape.call("Tensor.__mul__", np.multiply, tape.input(np.full(8, size)), 100.0)
    out = tape.call("Clamp", lambda a: np.clip(a, -65504, 65504), x)
    return tape.step(out, np.full(8, size * 100))


def test_values_at_the_end_of_the_format() -> None:
    assert slugs(clipped(1000.0))[0] == "values-pinned-at-fp16-max"
    assert slugs(clipped(655.04)) == []
    assert slugs(clipped(1.0)) == []


# --- data -------------------------------------------------------------------------------------------------------------


def passed_on(values: list[float], *, swallow: bool) -> Step:
    tape = Tape()
    x = tape.input(values)
    h = tape.call("Conv2D", lambda a: a * 2, x, path="conv")
    out = tape.call("ReLU", lambda a: np.where(np.isnan(a), 0, np.maximum(a, 0)), h) if swallow else h
    return tape.step(out, out)


def test_an_input_that_is_not_finite() -> None:
    assert slugs(passed_on([1, np.nan], swallow=False)) == ["nan-in-input-batch"]
    (found,) = judge_step(passed_on([1, np.nan], swallow=True))
    assert found.slug == "nan-input-hidden-by-relu"
    assert "relu" in found.sentence
    assert slugs(passed_on([1, 2], swallow=True)) == []


def test_labels() -> None:
    step = passed_on([1, 2], swallow=True)
    bad = dataclasses.replace(step, labels=(LabelFacts("label 0", 0, 10, 10),))
    assert slugs(bad) == ["label-ge-num-classes"]
    assert slugs(dataclasses.replace(step, labels=(LabelFacts("label 0", 0, 9, 10),))) == []
    assert slugs(dataclasses.replace(step, labels=(LabelFacts("label 0", 0, 255, 10, 255),))) == []


def test_nothing_to_average_over() -> None:
    tape = Tape("O0")
    mask = tape.input(np.zeros(4), "input 1")
    top = tape.call("Tensor.sum", lambda a: np.atleast_1d(a.sum()), tape.input(np.zeros(4)), dtype=F32)
    bottom = tape.call("Tensor.sum", lambda a: np.atleast_1d(a.sum()), mask, dtype=F32)
    out = tape.call("Tensor.__truediv__", np.divide, top, bottom, dtype=F32)
    assert slugs(tape.step(out, out)) == ["mean-over-zero-valid-labels"]


# --- parameters, updates ---------------------------------------------------------------------------------------------


def variable(name: str = "w", dtype: str = "float32", **more: Any) -> Variable:
    value = summarize(np.linspace(1, 2, 16).astype(F32))
    return Variable(name, dtype, "cell", True, value, value, **more)


def test_parameters_and_statistics_that_are_broken_before() -> None:
    step = passed_on([1, 2], swallow=False)
    bad = summarize(np.array([np.nan, 1], F32))
    weight = dataclasses.replace(variable(), before=bad)
    assert slugs(dataclasses.replace(step, variables=(weight,))) == ["nan-from-first-step-after-resume"]
    moving = dataclasses.replace(variable("bn.moving_mean"), before=bad, after=bad, trainable=False)
    assert slugs(dataclasses.replace(step, variables=(moving, variable()))) == [
        "bn-moving-stats-nan-after-skipped-step"
    ]


def test_gradients_that_are_flushed() -> None:
    step = passed_on([1, 2], swallow=False)
    zero, small = summarize(np.zeros(16, F32)), summarize(np.full(16, 1e-9, F32))
    step = dataclasses.replace(step, outcome=dataclasses.replace(step.outcome, real_loss=True))
    lost = variable(gradient=zero, exact_gradient=small, flushed=16)
    assert slugs(dataclasses.replace(step, variables=(lost,))) == ["gradients-flushed-to-zero-without-loss-scale"]
    frozen = variable(gradient=zero, exact_gradient=zero)
    assert slugs(dataclasses.replace(step, variables=(frozen,))) == []


def test_updates() -> None:
    step = dataclasses.replace(passed_on([1, 2], swallow=False), optimizer=OptimizerFacts("Adam", 1e-8))
    some = summarize(np.ones(16, F32))
    stuck = variable(dtype="float16", gradient=some, exact_gradient=some, nonzero=16, unchanged=16)
    assert slugs(dataclasses.replace(step, variables=(stuck,))) == ["adam-eps-underflow-fp16-params"]
    sgd = dataclasses.replace(step, optimizer=OptimizerFacts("SGD", None), variables=(stuck,))
    assert slugs(sgd) == ["fp16-update-below-half-ulp"]
    wide = dataclasses.replace(step, variables=(dataclasses.replace(stuck, dtype="float32", unchanged=0),))
    assert slugs(wide) == []


def test_a_derivative_that_is_nan() -> None:
    tape = Tape("O0")
    x = tape.call("ReLU", lambda a: np.maximum(a, 0), tape.input([-1, 4]), dtype=F32, gradient=[np.nan, 0.25])
    root = tape.call("Sqrt", np.sqrt, x, dtype=F32, gradient=[0, 1])
    out = tape.call("Clamp", lambda a: np.maximum(a, 0.1), root, dtype=F32, gradient=[1, 1])
    weight = variable(gradient=summarize(np.array([np.nan], F32)))
    (found,) = judge_step(tape.step(out, out, variables=(weight,)))
    assert found.slug == "backward-nan-from-noop-clamp"
    assert "sqrt in cell at net.py:2" in found.sentence


# --- cells ------------------------------------------------------------------------------------------------------------


def test_a_pin_that_was_lost() -> None:
    step = passed_on([1, 2], swallow=False)
    cell = CellFacts("head", "Dense", pinned_then_lost=True, asked="float16")
    assert slugs(dataclasses.replace(step, cells=(cell,))) == ["to-float-pin-lost-by-later-amp-call"]
    assert slugs(dataclasses.replace(step, cells=(CellFacts("head", "Dense", asked="float16"),))) == []


@pytest.mark.parametrize(("in_source", "confidence"), [(False, "high"), (True, "medium")])
def test_a_lost_pin_that_was_only_read_in_the_source_is_less_sure(in_source: bool, confidence: str) -> None:
    cell = CellFacts("head", "Dense", pinned_then_lost=True, pin_in_source=in_source, asked="float16")
    (found,) = judge_step(dataclasses.replace(passed_on([1, 2], swallow=False), cells=(cell,)))
    assert found.confidence == confidence


@pytest.mark.parametrize(("level", "dtype", "expected"), [("O1", F32, True), ("O1", F16, False), ("O0", F32, False)])
def test_a_level_that_converted_nothing(level: str, dtype: Any, expected: bool) -> None:
    tape = Tape(level)
    x = tape.call("MatMul", lambda a: a @ a.T, tape.input(np.eye(4)), dtype=dtype)
    assert slugs(tape.step(x, x)) == (["o1-converted-nothing"] if expected else [])


def norm_cell(cell_type: str, error: float) -> Step:
    tape = Tape("O3")
    x = tape.call("LayerNorm", lambda a: a / 2, tape.input(np.eye(4)), path="norm", cell_type=cell_type)
    cell = CellFacts("norm", cell_type, asked="float16", error=error, input_absmax=1.0)
    return tape.step(x, x, cells=(cell,))


def test_a_norm_in_float16() -> None:
    assert slugs(norm_cell("LayerNorm", 0.3)) == ["normalisation-forced-to-fp16"]
    assert slugs(norm_cell("RMSNorm", 0.3)) == ["normalisation-forced-to-fp16"]
    assert slugs(norm_cell("LayerNorm", 0.001)) == []  # what O3 is asked for, off by an ulp or two
    assert [f.severity for f in judge_step(norm_cell("LayerNorm", 0.001))] == ["note"]
    assert slugs(norm_cell("RMSNorm", 0.001)) == []
    assert [f.severity for f in judge_step(norm_cell("RMSNorm", 0.001))] == ["note"]


def test_batch_norm_over_one_value() -> None:
    tape = Tape("O0")
    x = tape.call("BatchNorm", lambda a: a * 0, tape.input([[1.0, 2.0]]), dtype=F32, path="bn")
    moving = dataclasses.replace(
        variable("bn.moving_variance"), path="bn", trainable=False, after=summarize(np.array([np.nan, 1], F32))
    )
    assert slugs(tape.step(x, x, variables=(moving,))) == ["bn-variance-of-single-value"]
    same = dataclasses.replace(moving, after=moving.before)
    assert slugs(tape.step(x, x, variables=(same,))) == []  # not in training mode


def test_consequences_are_folded_under_their_cause() -> None:
    step = masked(-1e9)
    broken = variable(gradient=summarize(np.full(4, np.nan, F32)))
    found = judge_step(dataclasses.replace(step, variables=(broken,)))
    assert [f.slug for f in found] == ["mask-constant-overflows-fp16"]


# --- rounded out of the domain ----------------------------------------------------------------------------------------


def rounded_out(name: str, function: Any, value: float, exact: float, dtype: Any = F16) -> Step:
    tape = Tape()
    given = tape.input(np.asarray([0.5, value]), dtype=dtype)
    with np.errstate(all="ignore"):
        return tape.step(tape.call(name, function, given, dtype=dtype), function(np.asarray([0.5, exact])))


@pytest.mark.parametrize(
    ("name", "function", "value", "exact", "word"),
    [
        ("sqrt", np.sqrt, -0.25, 0.01, "below 0"),
        ("acos", np.arccos, 1.001, 1.0, "beyond 1"),
        ("log", np.log, 0.0, 1e-9, "is 0 in float16"),
    ],
)
def test_an_operand_that_rounding_took_out_of_the_domain(
    name: str, function: Any, value: float, exact: float, word: str
) -> None:
    found = judge_step(rounded_out(name, function, value, exact))
    assert [f.slug for f in found] == ["domain-left-by-rounding"]
    assert word in found[0].sentence
    # Out of the domain in float32 too, or in it: that is another matter.
    assert slugs(rounded_out(name, function, value, value)) == ["nan-in-any-precision"]
    assert slugs(rounded_out(name, function, 0.25, 0.25)) == []
