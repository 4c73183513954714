"""Rules over a run that read the operators of a cell, settings seen before the first step, and faults without a NaN."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ampdebug._records import Cell, Event


def load(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


helpers = load("test_run_rules")
Recording, birth, slugs, small = helpers.Recording, helpers.birth, helpers.slugs, helpers.small
F16, F32 = np.float16, np.float32


def cells(operators: dict[str, str], *children: tuple[str, str], kind: str = "Net") -> list[Cell]:
    """A network whose own code ran these operators."""
    root = Cell(
        "",
        kind,
        tuple(path for path, _ in children),
        {},
        "float16",
        compute_dtypes=operators,
        compute_source="operators",
    )
    return [root, *(Cell(path, name) for path, name in children)]


def half(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "float16")


# --- births told by the operators ---


@pytest.mark.parametrize(("largest", "expected"), [(20.0, True), (8.0, False)])
def test_logsumexp_by_hand(tmp_path: Path, largest: float, expected: bool) -> None:
    scores = small(8, 10)
    scores[0, 0] = largest
    with np.errstate(all="ignore"):
        out = np.log(np.exp(scores).sum(-1, dtype=F16)).astype(F16)
    if not expected:
        out[0] = np.inf  # of some other origin
    assert np.isinf(out[0])
    run = Recording(tmp_path, cells(half("Exp", "SumExt", "Log"), ("p", "Dense")))
    run.step(
        ("output", "p", "Dense", scores), ("output", "", "Net", out),
        loss=math.inf, forward_birth=birth("", "Net", out, own_code=True),
    )  # fmt: skip
    assert (slugs(run.diagnose())[0] == "handwritten-softmax-overflow") is expected


def test_epsilon_beside_a_norm(tmp_path: Path) -> None:
    h = small(4, 8)
    h[1] = 0
    with np.errstate(all="ignore"):
        out = (h / (np.sqrt((h * h).sum(-1, keepdims=True)) + F16(1e-8))).astype(F16)
    assert np.isnan(out).sum() == 8
    run = Recording(
        tmp_path,
        cells(half("Tensor.__mul__", "Tensor.sum", "Sqrt", "Tensor.__add__", "Tensor.__truediv__"), ("f", "Dense")),
    )
    run.step(
        ("output", "f", "Dense", h), ("output", "", "Net", out),
        loss=math.nan, forward_birth=birth("", "Net", out, own_code=True),
    )  # fmt: skip
    assert slugs(run.diagnose()) == ["eps-1e-8-is-zero-in-fp16"]


def test_epsilon_beside_a_logarithm(tmp_path: Path) -> None:
    shares = np.array([[1, 0, 0, 0], [0.5, 0.5, 0, 0]], F16)
    loss = np.array(np.inf, F16)
    run = Recording(tmp_path, cells(half("Tensor.__add__", "Log", "Tensor.mean"), ("sm", "Softmax")))
    run.step(
        ("output", "sm", "Softmax", shares), ("output", "", "Net", loss),
        loss=math.inf, forward_birth=birth("", "Net", loss, own_code=True),
    )  # fmt: skip
    assert slugs(run.diagnose()) == ["eps-1e-8-is-zero-in-fp16"]


def test_a_logarithm_of_large_numbers_is_no_epsilon(tmp_path: Path) -> None:
    values = np.full((4, 8), 3e4, F16)
    loss = np.array(np.inf, F16)
    run = Recording(tmp_path, cells(half("Tensor.sum", "Log"), ("f", "Dense")))
    run.step(
        ("output", "f", "Dense", values), ("output", "", "Net", loss),
        loss=math.inf, forward_birth=birth("", "Net", loss, own_code=True),
    )  # fmt: skip
    assert "eps-1e-8-is-zero-in-fp16" not in slugs(run.diagnose())


def test_a_sum_over_positions(tmp_path: Path) -> None:
    h = np.abs(small(1, 20000, 8)) - F16(0.7)  # the code adds to it before it sums
    total = np.full((1, 8), np.inf, F16)
    run = Recording(tmp_path, cells(half("ReLU", "Tensor.__add__", "Tensor.sum"), ("p", "Dense"), ("f", "Dense")))
    run.step(
        ("output", "p", "Dense", h), ("input", "f", "Dense", total), ("output", "f", "Dense", total[:, :2]),
        loss=math.inf, forward_birth=birth("", "Net", total, "input", own_code=True, seen_at="f"),
    )  # fmt: skip
    assert slugs(run.diagnose()) == ["reduce-sum-overflow-in-pooling"]


def stream(sizes: list[float], branch: Any) -> tuple[list[Cell], list[Any]]:
    found = [
        Cell("", "Net", ("blocks",)),
        Cell("blocks", "CellList", tuple(f"blocks.{i}" for i in range(len(sizes) + 1))),
    ]
    seen = []
    for i in range(len(sizes) + 1):
        found.append(Cell(f"blocks.{i}", "Block", (f"blocks.{i}.f",), {}, None, half("Tensor.__add__"), "operators"))
        found.append(Cell(f"blocks.{i}.f", "Dense"))
        if i < len(sizes):
            seen.append(("output", f"blocks.{i}", "Block", (small(4, 16) / F16(4) * F16(sizes[i])).astype(F16)))
    seen.append(("output", f"blocks.{len(sizes)}.f", "Dense", branch))
    return found, seen


@pytest.mark.parametrize(("sizes", "expected"), [([3e3, 1e4, 3e4], True), ([2.0, 2.0, 2.0], False)])
def test_a_branch_that_leaves_the_format_with_its_stream(tmp_path: Path, sizes: list[float], expected: bool) -> None:
    branch = np.full((4, 16), 6e4, F16)
    branch[0] = np.inf
    found, seen = stream(sizes, branch)
    run = Recording(tmp_path, found, "O3")
    run.step(*seen, loss=math.nan, forward_birth=birth(f"blocks.{len(sizes)}.f", "Dense", branch))
    assert (slugs(run.diagnose())[0] == "residual-stream-exceeds-fp16") is expected


@pytest.mark.parametrize("clipped", [True, False])
def test_an_overflow_that_is_clipped(tmp_path: Path, clipped: bool) -> None:
    h = small(8, 16)
    h[0, :4] = np.inf
    kept = np.clip(h, -65504, 65504) if clipped else np.where(np.isinf(h), F16(0), h)
    out = small(8, 4).astype(F32)
    run = Recording(tmp_path, cells(half("ClampScalar"), ("f", "Dense"), ("g", "Dense")))
    run.step(
        ("output", "f", "Dense", h), ("input", "g", "Dense", kept), ("output", "g", "Dense", out.astype(F16)),
        ("output", "", "Net", out), loss=4.9, forward_birth=birth("f", "Dense", h),
    )  # fmt: skip
    assert (slugs(run.diagnose())[0] == "values-pinned-at-fp16-max") is clipped


@pytest.mark.parametrize("quiet", [True, False])
def test_a_mean_over_nothing_inside_the_network(tmp_path: Path, quiet: bool) -> None:
    loss = np.array(np.nan, F32)
    gradient = np.zeros((4, 4), F32) if quiet else np.full((4, 4), np.nan, F32)
    run = Recording(tmp_path, cells(half("Log", "Exp", "Tensor.sum", "Tensor.__truediv__"), ("n", "Dense")))
    run.step(
        ("output", "n", "Dense", small(8, 4)), ("output", "", "Net", loss), ("gradient", "n.weight", "", gradient),
        loss=math.nan, forward_birth=birth("", "Net", loss, own_code=True),
    )  # fmt: skip
    assert (slugs(run.diagnose())[0] == "mean-over-zero-valid-labels") is quiet


# --- parameters that were not finite ---


def test_a_birth_out_of_spoilt_parameters_is_a_consequence(tmp_path: Path) -> None:
    run = Recording(tmp_path, [Cell("", "Net", ("f",)), Cell("f", "Dense")], "O0")
    good, bad = small(4, 8).astype(F32), np.full((4, 8), np.nan, F32)
    back = birth("f", "Dense", bad, "output_gradient", phase="backward")
    run.step(
        ("parameter", "f.weight", "", good),
        ("output", "f", "Dense", good),
        loss=0.2,
        backward_birth=back,
        nonfinite_gradients=True,
    )
    for _ in range(5):
        run.step(
            ("parameter", "f.weight", "", bad),
            ("output", "f", "Dense", bad),
            loss=math.nan,
            forward_birth=birth("f", "Dense", bad),
        )
    assert slugs(run.diagnose())[0] == "backward-nan-from-noop-clamp"


def test_a_checkpoint_that_is_not_finite(tmp_path: Path) -> None:
    run = Recording(tmp_path, [Cell("", "Net", ("f",)), Cell("f", "Dense")], "O0")
    bad = np.full((4, 8), np.nan, F32)
    for _ in range(4):
        run.step(
            ("parameter", "f.weight", "", bad),
            ("output", "f", "Dense", bad),
            loss=math.nan,
            forward_birth=birth("f", "Dense", bad),
        )
    assert slugs(run.diagnose())[0] == "nan-from-first-step-after-resume"


# --- silent faults ---


def test_stray_numbers_of_a_fully_masked_row(tmp_path: Path) -> None:
    scores, out = small(4, 6).astype(F32), np.abs(small(4, 6)).astype(F32)
    scores[2] = -np.inf
    out /= out.sum(-1, keepdims=True)
    out[2] = 1.7
    run = Recording(tmp_path, [Cell("", "Net", ("sm",)), Cell("sm", "Softmax")], "O0")
    for _ in range(3):
        run.step(("input", "sm", "Softmax", scores), ("output", "sm", "Softmax", out), loss=1.0)
    assert slugs(run.diagnose()) == ["softmax-row-fully-masked"]


def test_a_causal_mask_is_silent(tmp_path: Path) -> None:
    scores, out = small(4, 6).astype(F32), np.full((4, 6), 1 / 6, F32)
    scores[2, 1:] = -np.inf
    out[2] = [1, 0, 0, 0, 0, 0]
    run = Recording(tmp_path, [Cell("", "Net", ("sm",)), Cell("sm", "Softmax")], "O2")
    for _ in range(3):
        run.step(("input", "sm", "Softmax", scores), ("output", "sm", "Softmax", out), loss=1.0)
    assert slugs(run.diagnose()) == []


@pytest.mark.parametrize(
    ("level", "loss", "scale", "zero", "expected"),
    [
        ("O2", 1e-7, None, True, ["gradients-flushed-to-zero-without-loss-scale"]),
        ("O2", 1e-7, 1024.0, True, []),
        ("O0", 1e-7, None, True, []),
        ("O2", 0.0, None, True, ["loss-denominator-overflow-loss-zero"]),
        ("O2", 1.0, None, False, []),
    ],
)
def test_gradients_of_nothing_but_zeros(
    tmp_path: Path, level: str, loss: float, scale: float | None, zero: bool, expected: list[str]
) -> None:
    run = Recording(tmp_path, [Cell("", "Net", ("f",)), Cell("f", "Dense")], level)
    gradient = np.zeros((4, 4), F32) if zero else small(4, 4).astype(F32)
    for _ in range(4):
        run.step(
            ("output", "f", "Dense", small(4, 4)), ("gradient", "f.weight", "", gradient), loss=loss, loss_scale=scale
        )
    assert slugs(run.diagnose()) == expected


@pytest.mark.parametrize(("outputs", "expected"), [(3.0, True), (6e4, False)])
def test_a_loss_function_that_makes_nan(tmp_path: Path, outputs: float, expected: bool) -> None:
    run = Recording(tmp_path, [Cell("", "Net", ("f",)), Cell("f", "Dense")], "O2")
    values = np.full((4, 4), outputs, F32)
    for loss in (2.0, 1.9, math.nan):
        run.step(("output", "", "Net", values), loss=loss)
    assert ("mean-over-zero-valid-labels" in slugs(run.diagnose())) is expected


def test_a_norm_by_another_name(tmp_path: Path) -> None:
    run = Recording(tmp_path, [Cell("", "Net", ("norm",)), Cell("norm", "RMS")], "O3")
    for _ in range(3):
        run.step(
            ("input", "norm", "RMS", small(4, 16) * F16(500)),
            ("output", "norm", "RMS", np.zeros((4, 16), F16)),
            loss=0.0,
        )
    assert slugs(run.diagnose())[0] == "rmsnorm-square-overflow-output-zero"


def test_a_norm_in_float16_under_o3_with_ordinary_inputs_is_silent(tmp_path: Path) -> None:
    found = [
        Cell("", "Net", ("n",)),
        Cell("n", "LayerNorm", (), {"n.gamma": "float32"}, "float16", half("LayerNorm"), "operators"),
    ]
    for scale, expected in ((30.0, []), (400.0, ["normalisation-forced-to-fp16"])):
        run = Recording(tmp_path / str(scale), found, "O3")
        for _ in range(3):
            run.step(
                ("input", "n", "LayerNorm", np.full((4, 16), scale, F16)),
                ("output", "n", "LayerNorm", small(4, 16)),
                loss=1.0,
            )
        assert slugs(run.diagnose()) == expected


def test_float32_products_in_a_cell_that_was_set_to_float16(tmp_path: Path) -> None:
    def network(dtype: str) -> list[Cell]:
        return [
            Cell("", "Net", ("a", "b")),
            Cell("a", "Dense", (), {}, "float16", {"MatMul": "float16"}, "operators"),
            Cell("b", "Block", (), {}, "float16", {"MatMulExt": dtype}, "operators"),
        ]

    for dtype, expected in (("float32", ["fp32-leak-keeps-chain-fp32"]), ("float16", [])):
        run = Recording(tmp_path / dtype, network(dtype), "O2")
        for _ in range(3):
            run.step(("input", "b", "Block", small(4, 4)), ("output", "b", "Block", small(4, 4)), loss=1.0)
        assert slugs(run.diagnose()) == expected


# --- seen before the first step ---


def settled(tmp_path: Path, *events: Event, level: str = "O2") -> list[str]:
    run = Recording(tmp_path, [Cell("", "Net", ("f",)), Cell("f", "Dense")], level)
    for event in events:
        run.writer.put_event(event)
    for _ in range(3):
        run.step(("output", "f", "Dense", small(4, 4)), loss=1.0)
    return slugs(run.diagnose())


def test_a_lost_pin(tmp_path: Path) -> None:
    data = {"path": "f", "cell_type": "Dense", "asked": "float16", "known_by": "record"}
    assert settled(tmp_path, Event(0, "float32-pin-lost", "said", data)) == ["to-float-pin-lost-by-later-amp-call"]


def test_an_epsilon_that_is_zero(tmp_path: Path) -> None:
    data = {"optimizer": "Adam", "epsilon": 1e-8, "parameters": ["f.weight"], "count": 1}
    assert settled(tmp_path, Event(0, "optimizer-epsilon-is-zero", "said", data)) == ["adam-eps-underflow-fp16-params"]


def test_a_scale_that_nobody_divides_by(tmp_path: Path) -> None:
    data = {"sens": 1024.0, "optimizer_loss_scale": 1.0}
    event = Event(0, "sens-differs-from-optimizer-loss-scale", "every update is 1024 times too large", data)
    assert settled(tmp_path, event) == ["optimizer-divides-by-another-scale"]


def test_nothing_said_is_nothing_found(tmp_path: Path) -> None:
    assert settled(tmp_path) == []
