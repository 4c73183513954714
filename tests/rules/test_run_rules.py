"""Rules that need a monitor's run, over runs written with real float16 arithmetic, and near misses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampdebug._diagnose import Diagnosis, diagnose
from ampdebug._recorder import Seen as Tensor
from ampdebug._recorder import StepRecorder
from ampdebug._records import DTYPE_CODES, Birth, Cell, Event, Kind, Site, Step
from ampdebug._run import open_run
from ampdebug._stats import StatsTable
from ampdebug._store import RunWriter

Seen = tuple[Kind, str, str, Any]
"""Kind, path, cell type, array."""


class Recording:
    """Writes a run: ``step`` takes what was seen, in execution order."""

    def __init__(self, path: Path, cells: Sequence[Cell], level: str = "O2", **meta: Any) -> None:
        self.path = path
        self.writer = RunWriter(path)
        self.writer.put_meta({"amp_level": level, "amp_dtype": "float16", **meta})
        self.writer.put_cells(cells)
        self.number = 0

    def step(self, *seen: Seen, **scalars: Any) -> None:
        self.number += 1
        table = StatsTable()
        sites, dtypes = [], []
        for kind, path, cell_type, array in seen:
            table.add(array)
            sites.append(self.writer.site_id(Site(kind, path, cell_type=cell_type), array.shape))
            dtypes.append(DTYPE_CODES[array.dtype.name])
        step = Step(self.number, sampled=bool(seen), **scalars)
        self.writer.put_step(step, np.array(sites, np.int32), np.array(dtypes, np.uint8), table)

    def diagnose(self) -> Diagnosis:
        self.writer.close()
        return diagnose(self.path)


def birth(path: str, cell_type: str, array: Any, kind: Kind = "output", **more: Any) -> Birth:
    values = {
        "phase": "forward",
        "path": path,
        "cell_type": cell_type,
        "kind": kind,
        "call": 0,
        "slot": "",
        "inputs_finite": True,
        "own_code": False,
        "nan": int(np.isnan(array).sum()),
        "pos_inf": int(np.isposinf(array).sum()),
        "neg_inf": int(np.isneginf(array).sum()),
        "count": array.size,
        "dtype": array.dtype.name,
    }
    return Birth(**{**values, **more})  # type: ignore[arg-type]


def slugs(found: Diagnosis) -> list[str]:
    return [f.slug for f in found.findings if f.severity != "note"]


RNG = np.random.default_rng(0)
F16 = np.float16


def small(*shape: int) -> Any:
    return RNG.normal(0, 1, shape).astype(F16)


# --- births ---


def net(*children: tuple[str, str]) -> list[Cell]:
    return [
        Cell("", "Net", children=tuple(path for path, _ in children)),
        *(Cell(path, kind, ()) for path, kind in children),
    ]


def test_nan_in_the_input(tmp_path: Path) -> None:
    run = Recording(tmp_path, net(("conv", "Conv2d")))
    x = small(4, 8)
    x[2] = np.nan
    y = np.full((4, 2), np.nan, F16)
    run.step(
        ("input", "", "Net", x), ("output", "conv", "Conv2d", y), ("output", "", "Net", y),
        loss=math.nan, forward_birth=birth("", "Net", x, "input", inputs_finite=None),
    )  # fmt: skip
    assert slugs(run.diagnose()) == ["nan-in-input-batch"]


def test_nan_input_that_relu_swallows(tmp_path: Path) -> None:
    run = Recording(tmp_path, net(("conv", "Conv2d"), ("relu", "ReLU")))
    x = small(4, 8)
    x[1] = np.nan
    y = np.where(np.isnan(x), F16(0), x)
    run.step(
        ("input", "", "Net", x), ("output", "conv", "Conv2d", x), ("input", "relu", "ReLU", x),
        ("output", "relu", "ReLU", y), ("output", "", "Net", y),
        loss=0.75, forward_birth=birth("", "Net", x, "input", inputs_finite=None),
    )  # fmt: skip
    found = run.diagnose()
    assert slugs(found) == ["nan-input-hidden-by-relu"]
    assert found.findings[0].where == "relu"


def masked_scores(keep: Any, constant: float) -> tuple[Any, Any, Any]:
    q, k = small(2, 8, 32), small(2, 8, 32)
    with np.errstate(all="ignore"):
        bias = (F16(1) - keep.astype(F16))[:, None, :] * F16(constant)
        return q, k, (q @ k.swapaxes(-1, -2) * F16(0.17) + bias).astype(F16)


def test_mask_constant(tmp_path: Path) -> None:
    keep = np.ones((2, 8), np.float32)
    keep[0, 6:] = 0
    q, k, scores = masked_scores(keep, -1e9)
    assert np.isnan(scores).any()
    run = Recording(tmp_path, net(("q", "Dense"), ("k", "Dense"), ("softmax", "Softmax")))
    run.step(
        ("input", "", "Net", keep), ("output", "q", "Dense", q), ("output", "k", "Dense", k),
        ("input", "softmax", "Softmax", scores), ("output", "softmax", "Softmax", scores),
        forward_birth=birth("", "Net", scores, "input", own_code=True, seen_at="softmax"),
    )  # fmt: skip
    assert slugs(run.diagnose()) == ["mask-constant-overflows-fp16"]


def test_without_a_mask_among_the_inputs_it_is_no_mask_constant(tmp_path: Path) -> None:
    keep = np.ones((2, 8), np.float32)
    q, k, scores = masked_scores(keep, -1e9)
    run = Recording(tmp_path, net(("q", "Dense"), ("k", "Dense"), ("softmax", "Softmax")))
    run.step(
        ("input", "", "Net", small(2, 8)), ("output", "q", "Dense", q), ("output", "k", "Dense", k),
        ("input", "softmax", "Softmax", scores),
        forward_birth=birth("", "Net", scores, "input", own_code=True, seen_at="softmax"),
    )  # fmt: skip
    assert "mask-constant-overflows-fp16" not in slugs(run.diagnose())


def test_fully_masked_row(tmp_path: Path) -> None:
    scores = small(4, 6)
    scores[2] = -np.inf
    with np.errstate(all="ignore"):
        e = np.exp(scores - scores.max(-1, keepdims=True))
        out = (e / e.sum(-1, keepdims=True)).astype(F16)
    assert np.isnan(out[2]).all()
    run = Recording(tmp_path, net(("softmax", "Softmax")))
    run.step(
        ("input", "softmax", "Softmax", scores), ("output", "softmax", "Softmax", out),
        forward_birth=birth("softmax", "Softmax", out, inputs_finite=False),
    )  # fmt: skip
    assert slugs(run.diagnose()) == ["softmax-row-fully-masked"]


def pooled(values: Any) -> tuple[Any, Any]:
    with np.errstate(over="ignore"):
        return values, values.astype(np.float64).sum((2, 3)).astype(F16)


@pytest.mark.parametrize(("level", "expected"), [(20.0, True), (0.5, False)])
def test_sum_in_pooling(tmp_path: Path, level: float, expected: bool) -> None:
    h, total = pooled(np.abs(RNG.normal(level, 1, (1, 8, 128, 128))).astype(F16))
    assert np.isinf(total).all() == expected
    if not expected:
        total[:] = np.inf  # something else made it: the sum of these values can't have
    run = Recording(tmp_path, net(("conv", "Conv2d"), ("fc", "Dense")))
    run.step(
        ("output", "conv", "Conv2d", h), ("input", "fc", "Dense", total),
        forward_birth=birth("", "Net", total, "input", own_code=True, seen_at="fc"),
    )  # fmt: skip
    assert (slugs(run.diagnose()) == ["reduce-sum-overflow-in-pooling"]) == expected


def test_residual_stream(tmp_path: Path) -> None:
    x, branch = (small(2, 8, 16) * F16(9000) for _ in range(2))
    x[0, 0, 0], branch[0, 0, 0] = 40000, 40000
    with np.errstate(over="ignore"):
        y = x + branch
    assert np.isinf(y).any()
    run = Recording(tmp_path, net(("block", "Block"), ("block.mlp", "Dense")))
    run.step(
        ("input", "block", "Block", x), ("output", "block.mlp", "Dense", branch), ("output", "block", "Block", y),
        forward_birth=birth("block", "Block", y, own_code=True),
    )  # fmt: skip
    assert slugs(run.diagnose()) == ["residual-stream-exceeds-fp16"]


def test_product_before_its_scale(tmp_path: Path) -> None:
    q, k = (small(2, 8, 64) * F16(90) for _ in range(2))
    with np.errstate(over="ignore"):
        scores = (q.astype(np.float64) @ k.swapaxes(-1, -2).astype(np.float64)).astype(F16)
    assert np.isinf(scores).any()
    run = Recording(tmp_path, net(("q", "Dense"), ("k", "Dense"), ("softmax", "Softmax")))
    run.step(
        ("output", "q", "Dense", q), ("output", "k", "Dense", k), ("input", "softmax", "Softmax", scores),
        forward_birth=birth("", "Net", scores, "input", own_code=True, seen_at="softmax"),
    )  # fmt: skip
    assert slugs(run.diagnose()) == ["qk-matmul-overflow-before-scaling"]


@pytest.mark.parametrize(("size", "cell_type"), [(20.0, "MySoftmax"), (5.0, "MySoftmax"), (20.0, "Softmax")])
def test_exp_without_its_maximum(tmp_path: Path, size: float, cell_type: str) -> None:
    x = (RNG.uniform(-1, 1, (4, 16)) * size).astype(F16)
    x[1] = np.abs(x[1]).clip(0.5 * size)
    with np.errstate(all="ignore"):
        e = np.exp(x)
        y = (e / e.sum(-1, keepdims=True, dtype=F16)).astype(F16)
    y[3, 0] = np.nan  # there is a birth to be named in every case
    net = Watched(tmp_path, "Net", ("softmax", cell_type))
    net.call("softmax", [x], y)
    net.call("", [x], y.astype(np.float32))
    overflows = size > 11 and cell_type != "Softmax"
    expected = "handwritten-softmax-overflow" if overflows else "forward-overflow-scale-independent"
    assert slugs(net.diagnose()) == [expected]


def test_epsilon_in_a_loss(tmp_path: Path) -> None:
    logits = np.array([[16.0], [-24.0], [0.5]], F16)
    loss = np.array(np.inf, F16)
    run = Recording(tmp_path, net(("fc", "Dense")), "O3")
    run.step(
        ("output", "fc", "Dense", logits), ("output", "", "BCE", loss),
        forward_birth=birth("", "BCE", loss, own_code=True),
    )  # fmt: skip
    assert slugs(run.diagnose()) == ["eps-1e-8-is-zero-in-fp16"]


def test_any_other_birth_is_named_by_its_place(tmp_path: Path) -> None:
    out = small(4, 4)
    out[0, 0] = np.inf
    run = Recording(tmp_path, net(("fc", "Dense")))
    for step in range(4):
        run.step(
            ("input", "fc", "Dense", small(4, 4)), ("output", "fc", "Dense", out),
            loss=math.nan, overflow=True, loss_scale=1024.0 / 2**step, forward_birth=birth("fc", "Dense", out),
        )  # fmt: skip
    found = run.diagnose()
    assert slugs(found) == ["forward-overflow-scale-independent"]
    assert found.findings[0].where == "fc"
    assert (found.findings[0].first_step, found.findings[0].last_step) == (1, 4)
    assert "1 +inf of 16 elements in float16 out of finite inputs" in found.findings[0].sentence


def test_the_first_place_is_the_cause_of_the_later_ones(tmp_path: Path) -> None:
    bad = np.full((4, 4), np.nan, F16)
    run = Recording(tmp_path, net(("a", "Dense"), ("b", "Dense")))
    run.step(("output", "b", "Dense", bad), loss=math.nan, forward_birth=birth("b", "Dense", bad))
    for _ in range(5):
        run.step(("output", "a", "Dense", bad), loss=math.nan, forward_birth=birth("a", "Dense", bad))
    assert [f.where for f in run.diagnose().findings] == ["b"]


# --- births as the recorder itself finds them ---


class Watched:
    """A network of one level, its calls handed to the real recorder; numbers are float16 arithmetic of NumPy."""

    def __init__(self, path: Path, root: str, *children: tuple[str, str], level: str = "O2") -> None:
        self.run = Recording(
            path, [Cell("", root, children=tuple(p for p, _ in children)), *(Cell(p, t) for p, t in children)], level
        )
        self.kinds = {"": root, **dict(children)}
        self.recorder = StepRecorder(self.run.writer.site_id, {p: "" for p, _ in children}, [""])
        self.recorder.begin()

    def call(self, path: str, inputs: Sequence[Any], output: Any) -> None:
        slots = [(str(i) if len(inputs) > 1 else "", Tensor(x, x.dtype.name, x.shape)) for i, x in enumerate(inputs)]
        self.recorder.cell_call(path, self.kinds[path], slots, [("", Tensor(output, output.dtype.name, output.shape))])

    def diagnose(self, loss: float | None = None) -> Diagnosis:
        forward, backward = self.recorder.births(loss)
        step = Step(1, loss=loss, sampled=True, forward_birth=forward, backward_birth=backward)
        self.run.writer.put_step(step, self.recorder.site_ids, self.recorder.dtypes, self.recorder.table)
        return self.run.diagnose()


def softmax(x: Any) -> Any:
    with np.errstate(all="ignore"):
        e = np.exp(x - x.max(-1, keepdims=True))
        return (e / e.sum(-1, keepdims=True)).astype(x.dtype)


def test_recorded_mask_constant(tmp_path: Path) -> None:
    keep = np.ones((2, 8), np.float32)
    keep[0, 6:] = 0
    x = small(2, 8, 32).astype(np.float32)
    q, k, scores = masked_scores(keep, -1e9)
    net = Watched(tmp_path, "MaskedScores", ("q", "Dense"), ("k", "Dense"), ("softmax", "Softmax"))
    net.call("q", [x], q)
    net.call("k", [x], k)
    net.call("softmax", [scores], softmax(scores))
    net.call("", [x, keep], softmax(scores).astype(np.float32))
    assert slugs(net.diagnose()) == ["mask-constant-overflows-fp16"]


def test_recorded_pooling_sum(tmp_path: Path) -> None:
    h, total = pooled(np.abs(RNG.normal(20, 4, (1, 8, 64, 64))).astype(F16))
    x = RNG.uniform(0, 3, (1, 3, 64, 64)).astype(np.float32)
    net = Watched(tmp_path, "Net", ("conv", "Conv2d"), ("fc", "Dense"))
    net.call("conv", [x], h)
    net.call("fc", [total], np.full((1, 4), np.inf, F16))
    net.call("", [x], np.full((1, 4), np.inf, np.float32))
    assert slugs(net.diagnose()) == ["reduce-sum-overflow-in-pooling"]


def test_recorded_input_nan_and_the_relu_that_hides_it(tmp_path: Path) -> None:
    x = RNG.normal(0, 1, (4, 8)).astype(np.float32)
    x[1] = np.nan
    for name, hidden in (("a", False), ("b", True)):
        h = x.astype(F16)
        y = np.where(np.isnan(h), F16(0), h) if hidden else h
        net = Watched(tmp_path / name, "Net", ("conv", "Conv2d"), ("relu", "ReLU"))
        net.call("conv", [x], h)
        net.call("relu", [h], y)
        net.call("", [x], y.astype(np.float32))
        found = net.diagnose(0.7 if hidden else math.nan)
        assert slugs(found) == ["nan-input-hidden-by-relu" if hidden else "nan-in-input-batch"]


def test_recorded_causal_mask_is_no_birth(tmp_path: Path) -> None:
    x = small(2, 6, 16)
    scores = (x @ x.swapaxes(-1, -2)).astype(F16)
    scores[:, np.triu(np.ones((6, 6), bool), 1)] = -np.inf
    net = Watched(tmp_path, "Attn", ("qkv", "Dense"), ("softmax", "Softmax"))
    net.call("qkv", [x], x)
    net.call("softmax", [scores], softmax(scores))
    net.call("", [x], (softmax(scores) @ x).astype(np.float32))
    assert net.diagnose().findings == ()


def test_recorded_epsilon(tmp_path: Path) -> None:
    x = RNG.normal(0, 1, (8, 16)).astype(np.float32)
    logits = np.array([[0.1], [16.0], [-0.2], [0.3], [-24.0], [0.1], [0.0], [0.2]], F16)
    with np.errstate(all="ignore"):
        p = (1 / (1 + np.exp(-logits.astype(np.float32)))).astype(F16)
        loss = (-(np.log(p + F16(1e-8)) + np.log(F16(1) - p + F16(1e-8)))).mean().astype(np.float32)
    assert np.isinf(loss)
    net = Watched(tmp_path, "BCE", ("fc", "Dense"), level="O3")
    net.call("fc", [x], logits)
    net.call("", [x, np.ones(8, np.float32)], np.array(loss, np.float32))
    assert slugs(net.diagnose()) == ["eps-1e-8-is-zero-in-fp16"]


def test_recorded_rms_norm(tmp_path: Path) -> None:
    x = np.sign(RNG.normal(0, 1, (4, 64))).astype(np.float32) * 1.5
    h = (x * 300).astype(F16)
    net = Watched(tmp_path, "Net", ("proj", "Dense"), ("norm", "RMSNorm"), ("head", "Dense"))
    net.call("proj", [x], h)
    net.call("norm", [h], rms_norm(h))
    net.call("head", [rms_norm(h)], np.zeros((4, 8), F16))
    net.call("", [x], np.zeros((4, 8), np.float32))
    assert slugs(net.diagnose()) == ["rmsnorm-square-overflow-output-zero"]


# --- silent faults ---


def rms_norm(x: Any) -> Any:
    with np.errstate(over="ignore"):
        var = (x * x).mean(-1, keepdims=True, dtype=F16)
        return (x / np.sqrt(var + F16(1e-6))).astype(F16)


@pytest.mark.parametrize(("size", "expected"), [(450.0, True), (3.0, False)])
def test_norm_that_puts_out_zero(tmp_path: Path, size: float, expected: bool) -> None:
    x = (np.sign(RNG.normal(0, 1, (4, 64))) * size).astype(F16)
    y = rms_norm(x)
    assert (y == 0).all() == expected
    run = Recording(tmp_path, [*net(("norm", "RMSNorm"))])
    run.step(("input", "norm", "RMSNorm", x), ("output", "norm", "RMSNorm", y))
    assert slugs(run.diagnose()) == (["rmsnorm-square-overflow-output-zero"] if expected else [])


def test_zeros_of_other_origin_are_no_finding(tmp_path: Path) -> None:
    run = Recording(tmp_path, net(("norm", "LayerNorm"), ("relu", "ReLU")))
    zero = np.zeros((4, 8), F16)
    run.step(
        ("input", "norm", "LayerNorm", zero), ("output", "norm", "LayerNorm", zero),
        ("input", "relu", "ReLU", np.full((4, 8), -900, F16)), ("output", "relu", "ReLU", zero), loss=1.0,
    )  # fmt: skip
    assert slugs(run.diagnose()) == []


def batch_norm(tmp_path: Path) -> Recording:
    cells = [
        Cell("", "Net", children=("bn",)),
        Cell("bn", "BatchNorm1d", parameters={"bn.moving_variance": "float32", "bn.gamma": "float32"}),
    ]
    return Recording(tmp_path, cells, parameters=[{"name": "bn.moving_variance", "shape": [8], "dtype": "float32"}])


def test_batch_norm_statistics_poisoned_in_a_skipped_step(tmp_path: Path) -> None:
    run = batch_norm(tmp_path)
    good, bad = np.ones(8, np.float32), np.full(8, np.nan, np.float32)
    hot = small(4, 8)
    hot[0, 0] = np.inf
    for step in range(1, 9):
        seen: list[Seen] = [
            ("input", "bn", "BatchNorm1d", hot if step == 3 else small(4, 8)),
            ("parameter", "bn.moving_variance", "", bad if step > 3 else good),
            ("parameter", "fc.weight", "", good),
        ]
        run.step(
            *seen,
            loss=math.nan if step == 3 else 0.9,
            overflow=step == 3,
            update_skipped=step == 3,
            forward_birth=birth("conv", "Conv2d", hot) if step == 3 else None,
        )
    found = run.diagnose()
    assert slugs(found) == ["bn-moving-stats-nan-after-skipped-step"]
    assert found.findings[0].where == "bn"
    assert found.findings[0].first_step == 3


def test_batch_norm_with_a_single_row(tmp_path: Path) -> None:
    run = batch_norm(tmp_path)
    for step in range(3):
        run.step(("input", "bn", "BatchNorm1d", small(1 if step == 2 else 4, 8)), loss=1.0)
    found = run.diagnose()
    assert slugs(found) == ["bn-variance-of-single-value"]
    assert found.findings[0].first_step == 3


def test_batch_norm_in_good_health(tmp_path: Path) -> None:
    run = batch_norm(tmp_path)
    for _ in range(3):
        run.step(
            ("input", "bn", "BatchNorm1d", small(4, 8)),
            ("parameter", "bn.moving_variance", "", np.ones(8, np.float32)),
            loss=1.0,
        )
    assert run.diagnose().findings == ()


@pytest.mark.parametrize(
    ("level", "narrow", "expected"), [("O1", False, True), ("O1", True, False), ("O0", False, False)]
)
def test_level_that_converted_nothing(tmp_path: Path, level: str, narrow: bool, expected: bool) -> None:
    out = RNG.normal(0, 1, (4, 64)).astype(np.float32)
    if narrow:
        out = out.astype(F16).astype(np.float32)  # what O1 hands on: float16 values in a float32 tensor
    run = Recording(tmp_path, net(("a", "Dense")), level)
    run.step(("output", "a", "Dense", out), ("output", "", "Net", out * np.float32(1.1)), loss=1.0)
    assert slugs(run.diagnose()) == (["o1-converted-nothing"] if expected else [])


def test_saturation(tmp_path: Path) -> None:
    out = small(4, 8)
    out[0, :4] = 65504
    run = Recording(tmp_path, net(("a", "Dense")))
    run.step(("output", "a", "Dense", out), loss=1.0)
    assert slugs(run.diagnose()) == ["values-pinned-at-fp16-max"]
    run = Recording(tmp_path / "large", net(("a", "Dense")))
    run.step(("output", "a", "Dense", np.linspace(-65000, 65000, 32).astype(F16)), loss=1.0)
    assert slugs(run.diagnose()) == []


def test_nan_in_the_backward_pass_only(tmp_path: Path) -> None:
    gradient = np.full(8, np.nan, np.float32)
    run = Recording(tmp_path, net(("a", "Dense")))
    for _ in range(5):
        born = birth("a.weight", "", gradient, "gradient", phase="backward", inputs_finite=None)
        run.step(("gradient", "a.weight", "", gradient), loss=1.0, overflow=True, loss_scale=1.0, backward_birth=born)
    assert slugs(run.diagnose())[0] == "backward-nan-from-noop-clamp"


@pytest.mark.parametrize(("loss", "said"), [(5000.0, False), (100.0, True)])
def test_nan_in_the_backward_pass_while_the_scale_is_searched(tmp_path: Path, loss: float, said: bool) -> None:
    """A scaled gradient that overflows inside a product is NaN without an infinity that anyone sees."""
    gradient = np.full(8, np.nan, np.float32)
    run = Recording(tmp_path, net(("a", "Dense")))
    for scale in (1024.0, 512.0):
        run.step(("gradient", "a.weight", "", gradient), loss=300.0, overflow=True, loss_scale=scale)
    run.step(("gradient", "a.weight", "", small(8)), loss=300.0, overflow=False, loss_scale=256.0)
    for scale in (256.0, 128.0, 64.0):
        born = birth("a.weight", "", gradient, "gradient", phase="backward", inputs_finite=None)
        run.step(
            ("gradient", "a.weight", "", gradient), loss=loss, overflow=True, loss_scale=scale, backward_birth=born
        )
    assert ("backward-nan-from-noop-clamp" in slugs(run.diagnose())) is said


def test_inf_in_the_backward_pass_is_the_scalers_business(tmp_path: Path) -> None:
    gradient = np.full(8, np.inf, np.float32)
    run = Recording(tmp_path, net(("a", "Dense")))
    for step in range(40):
        born = birth("a.weight", "", gradient, "gradient", phase="backward", inputs_finite=None) if step < 3 else None
        run.step(loss=1.0, overflow=step < 3, loss_scale=2.0 ** (16 - min(step, 3)), backward_birth=born)
    assert slugs(run.diagnose()) == []


def flushed(tmp_path: Path, size: float, scale: float) -> Diagnosis:
    run = Recording(tmp_path, net(("a", "Dense"), ("b", "Dense")))
    for _ in range(3):
        gradients = [RNG.normal(0, size * scale, (16, 16)).astype(F16).astype(np.float32) for _ in range(2)]
        run.step(
            ("gradient", "a.weight", "", gradients[0]), ("gradient", "b.weight", "", gradients[1]),
            loss=1.0, loss_scale=scale,
        )  # fmt: skip
    return run.diagnose()


def test_gradients_at_the_bottom_of_the_format(tmp_path: Path) -> None:
    assert slugs(flushed(tmp_path / "a", 1e-6, 1.0)) == ["gradients-flushed-to-zero-without-loss-scale"]
    assert slugs(flushed(tmp_path / "b", 1e-6, 8.0)) == ["scale-too-low-headroom"]
    assert slugs(flushed(tmp_path / "c", 1e-6, 65536.0)) == []
    assert slugs(flushed(tmp_path / "d", 1e-2, 1.0)) == []


def test_gradients_that_are_zero_by_design(tmp_path: Path) -> None:
    run = Recording(tmp_path, net(("backbone", "Dense"), ("head", "Dense")))
    zero, some = np.zeros((8, 8), F16), small(8, 8)
    for step in range(20):
        run.step(
            ("gradient", "head.weight", "", some.astype(np.float32)), ("gradient", "head.bias", "", some[0]),
            ("gradient", "backbone.weight", "", zero.astype(np.float32)),
            loss=1.4 - step / 100, loss_scale=65536.0, overflow=False,
        )  # fmt: skip
    assert run.diagnose().findings == ()


def test_updates_that_round_away(tmp_path: Path) -> None:
    def recorded(path: Path, rate: float, dtype: str) -> Diagnosis:
        run = Recording(path, net(("a", "Dense")), parameters=[{"name": "a.weight", "shape": [64], "dtype": dtype}])
        weight = np.full(64, 1.0, dtype)
        for _ in range(5):
            gradient = RNG.normal(0, 1, 64).astype(np.float32)
            new = (weight - (rate * gradient).astype(dtype)).astype(dtype)
            change = (new.astype(np.float64) - weight.astype(np.float64)).astype(np.float32)
            run.step(("gradient", "a.weight", "", gradient), ("update", "a.weight", "", change), loss=1.0)
            weight = new
        return run.diagnose()

    assert slugs(recorded(tmp_path / "a", 1e-6, "float16")) == ["fp16-update-below-half-ulp"]
    assert slugs(recorded(tmp_path / "b", 0.1, "float16")) == []
    assert slugs(recorded(tmp_path / "c", 1e-6, "float32")) == []


def test_norm_kept_in_float16(tmp_path: Path) -> None:
    cells = [Cell("", "Net", children=("ln",)), Cell("ln", "LayerNorm", parameters={"ln.gamma": "float16"})]
    run = Recording(tmp_path / "a", cells)
    run.step(("output", "ln", "LayerNorm", small(4, 8)), loss=1.0)
    assert slugs(run.diagnose()) == ["normalisation-forced-to-fp16"]
    cells[1] = Cell("ln", "LayerNorm", parameters={"ln.gamma": "float32"}, compute_dtypes={"": "float32"})
    run = Recording(tmp_path / "b", cells)
    run.step(("output", "ln", "LayerNorm", small(4, 8)), loss=1.0)
    assert slugs(run.diagnose()) == []


# --- ranks, comparison, and runs with little in them ---


def test_ranks_with_different_scales(tmp_path: Path) -> None:
    for rank in (0, 1):
        writer = RunWriter(tmp_path, rank=rank)
        for step in range(1, 31):
            scale = 1024.0 * (2 if rank and step > 10 else 1)
            writer.put_step(Step(step, loss=1.0, loss_scale=scale, overflow=False), None, None, None)
        writer.close()
    assert slugs(diagnose(tmp_path)) == ["loss-scale-not-synchronised"]


def test_a_run_without_steps_is_no_error(tmp_path: Path) -> None:
    run = Recording(tmp_path, net(("a", "Dense")))
    found = run.diagnose()
    assert found.ok
    assert "2 cells at level O2, 0 measured places, statistics of 0 steps." in found.looked_at


def test_an_open_run_is_taken_and_left_open(tmp_path: Path) -> None:
    run = Recording(tmp_path, net(("a", "Dense")))
    run.step(("output", "a", "Dense", small(4, 4)), loss=1.0)
    run.writer.put_event(Event(1, "some-lint", "Something is odd."))
    run.writer.close()
    with open_run(tmp_path) as opened:
        found = diagnose(opened)
        assert opened.step_count == 1
    assert "The monitor said at step 1: Something is odd." in found.looked_at


def trained(path: Path, *, part_at: int = 10**6, factor: float = 1.0, dtype: Any = F16) -> Path:
    run = Recording(path, net(("a", "Dense")))
    for step in range(1, 61):
        loss = 2.0 - step / 100 + (0.5 if step >= part_at else 0.0)
        run.step(
            ("output", "a", "Dense", RNG.normal(0, 1, (4, 4)).astype(dtype)), loss=loss, loss_scale=1024.0,
            overflow=False, grad_norm=factor * (1 + step % 3 / 10),
        )  # fmt: skip
    run.writer.close()
    return path


def test_comparison(tmp_path: Path) -> None:
    base = trained(tmp_path / "base")
    same = diagnose(trained(tmp_path / "same"), against=base)
    assert same.findings == ()
    other = diagnose(trained(tmp_path / "other", part_at=30, factor=8.0, dtype=np.float32), against=base)
    found = {f.slug: f for f in other.findings}
    assert set(found) == {"runs-part-at-step", "runs-differ-in-gradients", "runs-differ-in-dtypes"}
    assert found["runs-part-at-step"].first_step == 30
    assert "3.0 bits less headroom" in found["runs-differ-in-gradients"].sentence
    assert other.ok
