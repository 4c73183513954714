"""The shared cases under the monitor: the record holds the evidence that each ``expected.json`` names.

A case is a ``net.py`` with ``make_net(level)`` and ``make_inputs()``. Every one of them is trained for some steps, with
its own labels where it has some; what the steps recorded is then asked for what must be seen in it. The cells that
swallow NaN on the CPU have a case each.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops

import ampdebug
from ampdebug.hooks._cells import places

pytestmark = pytest.mark.own_process

CASES = Path(os.environ.get("AMPDEBUG_CASES", Path(__file__).resolve().parents[3] / "shared" / "cases"))
NETS = sorted(path.parent.name for path in CASES.glob("*/net.py"))
EXPECTED = {name: json.loads((CASES / name / "expected.json").read_text()) for name in NETS}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # O1 writes the sources it rewrites into the current folder
    ms.set_context(mode=ms.PYNATIVE_MODE)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("case_" + name.replace("-", "_"), CASES / name / "net.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # O1 looks its source up by name
    spec.loader.exec_module(module)
    return module


def batches(case: ModuleType) -> list[tuple[Tensor, ...]]:
    """What the case trains on, step by step."""
    if inspect.signature(case.make_inputs).parameters:  # it asks for the number of the step
        return [case.make_inputs(step) for step in range(8)]
    made = case.make_inputs()
    if isinstance(made, list):
        return [(batch,) if isinstance(batch, Tensor) else tuple(batch) for batch in made]
    return [tuple(made)]


def train(net: Any, data: list[tuple[Tensor, ...]], out: Path) -> None:
    """Some steps of a loop with a dynamic loss scale; the loss is the net's own, by the labels, or the mean square."""
    arity = len(inspect.signature(places(net)[""].inner.construct).parameters)
    optimizer = nn.SGD(net.trainable_params(), 0.01)
    scaler = amp.DynamicLossScaler(1024, 2, 1000)
    net.set_train()

    def forward(*batch: Tensor) -> Tensor:
        output = net(*batch[:arity]).astype(ms.float32)
        if len(batch) > arity:
            return scaler.scale(ops.cross_entropy(output, batch[arity]))
        return scaler.scale(output if output.size == 1 else (output**2).mean())

    gradient_function = ms.value_and_grad(forward, None, optimizer.parameters)
    with ampdebug.watch(net, out=out, optimizer=optimizer, loss_scale=scaler) as run:
        for batch in data:
            loss, gradients = gradient_function(*batch)
            gradients = scaler.unscale(gradients)
            finite = amp.all_finite(gradients)
            if finite:
                optimizer(gradients)
            scaler.adjust(finite)
            run.step(loss=scaler.unscale(loss), finite=finite)


class Record:
    """A recorded run, asked for what a case needs to know."""

    def __init__(self, out: Path) -> None:
        self.run = ampdebug.open_run(out)
        self.steps = list(self.run.steps())
        self.report = ampdebug.build_report(self.run)

    def rows(self, step: int, kind: str, path: str | None = None) -> list[tuple[str, str, Any]]:
        """``(path, dtype, statistics)`` of a step."""
        found = self.run.tensors(step)
        named = zip(found.site_ids, found.dtypes, found.rows, strict=True)
        sites = ((self.run.sites[number], dtype, row) for number, dtype, row in named)
        return [(s.path, dtype, row) for s, dtype, row in sites if s.kind == kind and path in (None, s.path)]

    def row(self, step: int, kind: str, path: str) -> tuple[str, Any]:
        """``(dtype, statistics)`` of the only such row."""
        ((_, dtype, row),) = self.rows(step, kind, path)
        return dtype, row

    def cell(self, path: str) -> Any:
        (found,) = [cell for cell in self.run.cells if cell.path == path]
        return found

    def top(self) -> list[str]:
        """What the report's table shows first."""
        return [row.path for row in self.report.rows[:2]]


def nonfinite(row: Any) -> int:
    return int(row["nan"] + row["pos_inf"] + row["neg_inf"])


# --- what each kind must have left in the record ----------------------------------------------------------------------


def mask_constant(record: Record) -> None:
    # 0 * -inf in the cell's own code; q and k are finite; it is first seen as what goes into the softmax
    birth = record.steps[0].forward_birth
    assert birth is not None
    assert (birth.path, birth.cell_type, birth.seen_at, birth.own_code) == ("", "MaskedScores", "softmax", True)
    assert birth.inputs_finite is True
    assert (birth.nan > 0, birth.dtype) == (True, "float16")
    for path in ("q", "k"):
        assert nonfinite(record.row(1, "output", path)[1]) == 0
    assert record.cell("").asked_dtype == "float16"


def norm_square(record: Record) -> None:
    # nothing is ever non-finite: what goes into the norm is up to 450, what comes out is all zero
    assert record.steps[0].forward_birth is None
    _, went_in = record.row(1, "input", "norm")
    dtype, came_out = record.row(1, "output", "norm")
    assert went_in["max"] == 450
    assert went_in["zeros"] == nonfinite(went_in) == 0
    assert (dtype, came_out["zeros"], nonfinite(came_out)) == ("float16", came_out["count"], 0)
    assert "norm" in record.top()


def log_of_zero(record: Record) -> None:
    # sigmoid and log are the cell's own code: its only child is finite
    birth = record.steps[0].forward_birth
    assert birth is not None
    assert (birth.path, birth.cell_type, birth.kind, birth.own_code) == ("", "BCE", "output", True)
    assert birth.inputs_finite is True
    assert nonfinite(record.row(1, "output", "fc")[1]) == 0
    assert not np.isfinite(record.steps[0].loss)


def sum_overflow(record: Record) -> None:
    birth = record.steps[0].forward_birth
    assert birth is not None
    assert (birth.path, birth.cell_type, birth.seen_at, birth.own_code) == ("", "Net", "fc", True)
    assert (birth.inputs_finite, birth.pos_inf > 0) == (True, True)
    _, feature = record.row(1, "output", "conv")
    assert nonfinite(feature) == 0
    assert 25 < feature["max"] < 35


def poisoned_statistics(record: Record) -> None:
    assert [step.step for step in record.steps if step.forward_birth] == [4]  # step 3 of the case, counted from 0
    assert [step.step for step in record.steps if not np.isfinite(step.loss)] == [4]
    assert [step.step for step in record.steps if step.update_skipped] == [4]
    birth = record.steps[3].forward_birth
    assert (birth.path, birth.inputs_finite, birth.dtype) == ("conv", True, "float16")
    bad = {path for path, _, row in record.rows(8, "parameter") if nonfinite(row)}
    assert bad == {"bn.moving_mean", "bn.moving_variance"}
    said = [event for event in record.run.events if event.kind == "buffer-not-finite"]
    assert {(event.step, event.data["parameter"]) for event in said} == {(4, name) for name in bad}


def batch_of_one(record: Record) -> None:
    # The poisoning step is the last one: no step after it shows the statistics of the norm.
    assert all(step.forward_birth is None and np.isfinite(step.loss) for step in record.steps)
    said = [event for event in record.run.events if event.kind == "buffer-not-finite"]
    assert [(event.step, event.data["parameter"]) for event in said] == [(3, "bn.moving_variance")]
    number, shape = next(
        (number, record.run.shapes[number])
        for number, site in enumerate(record.run.sites)
        if site.kind == "input" and site.path == "bn"
    )
    assert shape == (4, 8)
    counts = [row["count"] for found in record.run.iter_tensors() for row in found.rows[found.site_ids == number]]
    assert counts == [32, 32, 8]
    assert record.cell("bn").asked_dtype is None


def level_without_effect(record: Record) -> None:
    # O1 was asked for, and everything that computes does so in float32
    dtypes = {dtype for cell in record.run.cells for dtype in cell.compute_dtypes.values()}
    assert dtypes == {"float32"}
    for path in ("a", "b"):
        dtype, row = record.row(1, "output", path)
        assert dtype == "float32"
        assert row["mantissa_bits"] > 10  # no value went through float16
    assert all(dtype == "float32" for _, dtype, _ in record.rows(1, "gradient"))


def bad_input(record: Record) -> None:
    birth = record.steps[0].forward_birth
    assert birth is not None
    assert (birth.kind, birth.path, birth.inputs_finite, birth.own_code) == ("input", "", False, False)
    assert nonfinite(record.row(1, "input", "")[1]) == 64


def swallowed(record: Record) -> None:
    bad_input(record)
    assert nonfinite(record.row(1, "output", "conv")[1]) == 256
    assert nonfinite(record.row(1, "output", "relu")[1]) == 0
    assert np.isfinite(record.steps[0].loss)
    assert record.row(1, "gradient", "conv.weight")[1]["nan"] == 36
    assert record.steps[0].nonfinite_gradients is True


def frozen_backbone(record: Record) -> None:
    for path, _, row in record.rows(1, "gradient"):
        assert (row["zeros"] == row["count"]) == path.startswith("backbone"), path


def causal_mask(record: Record) -> None:
    # the mask is there to be seen, and nobody cries about it
    assert record.row(1, "input", "softmax")[1]["neg_inf"] == 30
    assert nonfinite(record.row(1, "output", "softmax")[1]) == 0


EVIDENCE: dict[str, Callable[[Record], None]] = {
    "attention-mask-constant-overflow": mask_constant,
    "norm-square-overflow-silent": norm_square,
    "eps-underflow-log": log_of_zero,
    "reduce-sum-overflow": sum_overflow,
    "bn-running-stats-poisoned": poisoned_statistics,
    "bn-batch-size-1": batch_of_one,
    "amp-level-no-effect": level_without_effect,
    "nonfinite-input": bad_input,
    "nan-swallowed": swallowed,
    "healthy-frozen-zero-grads": frozen_backbone,
    "healthy-inf-mask": causal_mask,
}


def recorded(name: str, out: Path) -> Record:
    case = load(name)
    train(case.make_net(), batches(case), out)
    return Record(out)


NONE = pytest.param("", marks=pytest.mark.skip(f"no cases with a net.py in {CASES}: AMPDEBUG_CASES=DIR names another"))


@pytest.mark.parametrize("name", NETS or [NONE])
def test_the_record_holds_the_evidence(name: str, tmp_path: Path) -> None:
    expected = EXPECTED[name]
    record = recorded(name, tmp_path / "run")
    assert record.steps
    assert all(record.rows(step.step, "output") for step in record.steps)
    if expected["healthy"]:
        assert all(step.forward_birth is None and step.backward_birth is None for step in record.steps)
        assert not any(step.nonfinite_gradients or step.update_skipped for step in record.steps)
        assert not [row.path for row in record.report.rows if row.alarm]
        assert not record.run.events
    if expected["kind"] in EVIDENCE:
        EVIDENCE[expected["kind"]](record)
    elif not expected["healthy"]:
        pytest.skip(f"what a case of the kind {expected['kind']!r} must leave is not written down here")


def test_a_silent_zero_is_not_silent_at_o0(tmp_path: Path) -> None:
    # the control of `norm_square`: at O0 the same check must fail
    name = next((n for n in NETS if EXPECTED[n]["kind"] == "norm-square-overflow-silent"), None)
    if name is None:
        pytest.skip("the case is not there")
    case = load(name)
    train(case.make_net("O0"), batches(case), tmp_path / "run")
    with pytest.raises(AssertionError):
        norm_square(Record(tmp_path / "run"))


# --- cells that make a number out of NaN on the CPU -------------------------------------------------------------------


class Relu(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        return ops.relu(x)


class Clip(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        return ops.clip_by_value(x, -10.0, 10.0)


class Maximum(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        return ops.maximum(x, Tensor(np.float32(-5.0)))


class Swallower(nn.Cell):
    """``sqrt`` of a negative number is born in ``root``; the cell after it hides it."""

    def __init__(self, hides: nn.Cell) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1, weight_init="ones")
        self.root = Root()
        self.hides = hides
        self.head = nn.Dense(2, 2)

    def construct(self, x: Tensor) -> Tensor:
        return self.head(self.hides(self.root(self.conv(x))).mean((2, 3)))


class Root(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        return ops.sqrt(x)


SWALLOWERS: dict[str, Callable[[], nn.Cell]] = {
    "ReLU": nn.ReLU,
    "relu": Relu,
    "max-pool": lambda: nn.MaxPool2d(2, 2),
    "clip": Clip,
    "maximum": Maximum,
}


@pytest.mark.parametrize("name", SWALLOWERS)
@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_a_swallowed_nan_has_its_birthplace_in_the_record(name: str, mode: str, tmp_path: Path) -> None:
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    net = Swallower(SWALLOWERS[name]())
    x = np.ones((2, 1, 4, 4), np.float32)
    x[0, 0, 0, 0] = -1
    train(net, [(Tensor(x), Tensor([0, 1], ms.int32))], tmp_path / "run")
    record = Record(tmp_path / "run")
    birth = record.steps[0].forward_birth
    assert birth is not None
    assert (birth.path, birth.inputs_finite, birth.nan) == ("root", True, 2)
    assert nonfinite(record.row(1, "output", "hides")[1]) == 0
    assert np.isfinite(record.steps[0].loss)
    assert record.top()[0] == "root"
