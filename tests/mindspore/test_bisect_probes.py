"""Workloads, ready-made probes, the state to begin in, and the other direction, on networks of a few operators."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from ampdebug import LoweringResult, Workload, bisect, open_run
from ampdebug._bisect import Criterion
from ampdebug._errors import AmpdebugError, ArgumentError, StoreError
from ampdebug._flight_file import KeptArray, KeptStep, kept_step_file, write_kept_step
from ampdebug._probe import PROBES, ProbeName
from ampdebug._store import RunWriter
from ampdebug.hooks._checkpoint import load_checkpoint
from ampdebug.hooks._goodness import WorkloadProbe, default_probe
from ampdebug.hooks._state import NetworkState, seeded
from ampdebug.hooks._training import forward_and_backward, settled_pass, train

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode: test modules can't import each other by themselves
import bisect_tasks as tasks

pytestmark = pytest.mark.own_process

CULPRITS = {"Square", "/"}


@pytest.fixture(autouse=True)
def pynative() -> None:
    ms.set_context(mode=ms.PYNATIVE_MODE)


def names(result: Any) -> set[str]:
    return {culprit.unit.operator for culprit in result.culprits}


# --- probes -----------------------------------------------------------------------------------------------------------


def measured(workload: Workload, probe: str, level: str = "O3") -> tuple[float | bool, float | bool]:
    """What a probe says of the network in float32 and under a level."""
    nets = [workload.network(), ms.amp.auto_mixed_precision(workload.network(), level)]
    start = NetworkState(nets[0])

    def on(net: nn.Cell, call: Any, seed: int = 0) -> Any:
        start.restore(net)
        with seeded(seed):
            return call(net)

    made = WorkloadProbe(ProbeName.parse(probe), workload)
    prepared = made.prepared(lambda call, seed: on(nets[0], call, seed))
    exact, low = on(nets[0], prepared), on(nets[1], prepared)
    return exact, low


def passes(probe: str, value: float | bool, reference: float | bool, better: Any = "lower") -> bool:
    tolerance, threshold = ProbeName.parse(probe).limits("float16")
    return Criterion.beside(reference, 0.0, tolerance, threshold, better).judge(value).passed


ALL = ["output", "grad", "grad:cosine", "grad:worst", "finite", "train:4", "overflow:4", "metric", "metric:2"]


@pytest.mark.parametrize("probe", ALL)
def test_a_faulty_network_fails_and_a_healthy_one_passes(probe: str) -> None:
    better = "higher" if probe.startswith("metric") else "lower"
    exact, low = measured(tasks.healthy, probe)
    assert passes(probe, exact, exact, better)
    assert passes(probe, low, exact, better)
    exact, low = measured(tasks.overflowing, probe)
    assert passes(probe, exact, exact, better)
    assert not passes(probe, low, exact, better)


@pytest.mark.parametrize("probe", ["grad", *(pytest.param(p, marks=pytest.mark.slow) for p in ALL if p != "grad")])
def test_every_probe_finds_the_fault(probe: str) -> None:
    result = bisect(tasks.overflowing, probe=probe, level="O3")
    assert result.status == "found"
    assert names(result) == CULPRITS
    assert all(culprit.needed == "verified" for culprit in result.culprits)
    assert result.criterion.startswith(ProbeName.parse(probe).words)
    assert result.culprits[0].unit.source == "energy = ops.square(x)"


def test_skipped_steps_are_counted_beside_those_that_settle_the_scale() -> None:
    """2**16 is too large for this loss, which a dynamic scale finds out in some steps; that is no fault."""
    steep = tasks.workload(tasks.Healthy, loss=Steep(), optimizer=lambda parameters: nn.SGD(parameters, 1e-4))
    assert measured(steep, "overflow:4") == (0.0, 0.0)
    net = ms.amp.auto_mixed_precision(tasks.Healthy(), "O3")
    assert train(net, steep, steep.batches(4)).skipped > 0
    assert measured(tasks.overflowing, "overflow:4") == (0.0, 4.0)


class Steep(nn.Cell):
    def construct(self, logits: Tensor, label: Tensor) -> Tensor:
        return (logits * 100.0).mean()


def test_the_values_are_those_of_a_hand_written_comparison() -> None:
    x, y = next(tasks.data())
    found = []
    for net in (tasks.Healthy(), ms.amp.auto_mixed_precision(tasks.Healthy(), "O3")):
        net.set_train()
        loss = nn.CrossEntropyLoss()
        grads = ms.value_and_grad(
            lambda net=net, loss=loss: loss(net(Tensor(x)).astype(ms.float32), Tensor(y)) * 1024.0,
            None,
            net.trainable_params(),
        )()[1]
        found.append((net(Tensor(x)).asnumpy(), np.concatenate([g.asnumpy().reshape(-1) / 1024.0 for g in grads])))
    (out32, grad32), (out16, grad16) = found
    scaled = tasks.workload(tasks.Healthy, loss_scale=1024.0)
    for probe, one, other in (("output", out32, out16), ("grad", grad32, grad16)):
        one, other = one.astype(np.float64), other.astype(np.float64)
        exact, low = measured(scaled, probe)
        assert low == pytest.approx(np.linalg.norm(other - one) / np.linalg.norm(one), rel=1e-3)
        assert exact == pytest.approx(0.0, abs=1e-6)


def test_the_scale_does_not_enter_the_loss() -> None:
    batch = next(iter(tasks.healthy.batches(1)))
    net = tasks.Healthy()
    plain = forward_and_backward(net, tasks.healthy, batch, scale=1.0)
    scaled = forward_and_backward(net, tasks.healthy, batch, scale=4096.0)
    assert scaled.loss == plain.loss
    for one, other in zip(plain.unscaled(), scaled.unscaled(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert settled_pass(net, tasks.healthy, batch, 0).scale == 65536.0
    broken = ms.amp.auto_mixed_precision(tasks.Overflowing(), "O3")
    assert settled_pass(broken, tasks.overflowing, batch, 0).scale == 65536.0, "no scale helps a forward pass"


def test_a_user_limit_is_kept() -> None:
    result = bisect(tasks.healthy, probe="output", level="O3", tolerance=1e-9, max_probes=0)
    assert result.status == "max-probes"
    assert "tolerance 1e-09" in result.criterion


def test_a_metric_that_falls_is_better_lower() -> None:
    def error(net: nn.Cell) -> float:
        return 1.0 - tasks.accuracy(net)

    result = bisect(tasks.workload(metric=error, better="lower"), probe="metric", level="O3", max_probes=0)
    assert result.criterion.startswith("metric <=")
    assert result.status == "max-probes"


def test_training_in_other_orders_makes_the_band() -> None:
    probe = WorkloadProbe(ProbeName.parse("train:4"), tasks.healthy)
    net = tasks.Healthy()
    start = [parameter.asnumpy().copy() for parameter in net.get_parameters()]
    seeds: list[int] = []

    def on_reference(call: Any, seed: int) -> Any:
        seeds.append(seed)
        for parameter, value in zip(net.get_parameters(), start, strict=True):
            parameter.set_data(Tensor(value.copy()))
        with seeded(seed):
            return call(net)

    prepared = probe.prepared(on_reference)
    assert seeds == [0, 1, 2, 3]
    assert prepared.band is not None
    assert prepared.prepared(on_reference) is prepared, "a band that is known is not measured again"
    assert len(seeds) == 4
    assert max(prepared.band.half_width) > 0.02 * prepared.band.middle[0], "the order of the batches matters"


def test_gradients_need_parameters() -> None:
    with pytest.raises(ArgumentError, match="has no trainable parameters"):
        bisect(tasks.workload(nn.Softmax), probe="grad", level="O3")


def test_whole_cells_are_measured_once_more_with_real_flags() -> None:
    result = bisect(tasks.overflowing, probe="finite", level="O3", unit="cell")
    assert [culprit.unit.path for culprit in result.culprits] == [""]
    (check,) = result.confirmations
    assert check.passed, check.detail
    assert "pynative mode with whole cells in float32" in check.name
    assert "O3 alone False" in check.detail


@pytest.mark.slow
@pytest.mark.parametrize("probe", ["grad", "train:3"])
def test_the_fix_is_confirmed_in_graph_mode_by_the_same_probe(probe: str) -> None:
    result = bisect("bisect_tasks:nested", probe=probe, level="O3")
    (here,) = result.confirmations
    assert here.passed, "an answer that fills a cell is confirmed by itself"
    (_, check) = result.confirm(mode="graph").confirmations
    assert check.passed, check.detail
    assert "graph mode" in check.detail
    assert "cannot be sent" not in check.detail


# --- how a task is given ----------------------------------------------------------------------------------------------


def test_without_a_probe_the_gradients_are_compared() -> None:
    assert default_probe(tasks.healthy) == "grad"
    bare = Workload(network=tasks.Healthy, data=tasks.data)
    assert "output error" in bisect(bare, level="O3").criterion


def test_a_workload_with_an_evaluate_of_its_own() -> None:
    result = bisect(tasks.overflowing, tasks.evaluate, level="O3")
    assert names(result) >= {"Square"}
    assert result.criterion == "evaluate returns True"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((tasks.overflowing, tasks.evaluate, "grad"), "evaluate and probe='grad' contradict each other"),
        ((tasks.Overflowing, None, "grad"), "probe='grad' needs a workload"),
        ((tasks.Overflowing, None, None), "evaluate is missing"),
        ((tasks.overflowing, None, "loss"), f"probe='loss': must be one of {PROBES[:20]}"),
        ((Workload(network=tasks.Healthy, data=tasks.data), None, "grad"), "'grad:relative' needs the workload's loss"),
        ((tasks.workload(optimizer=None), None, "train:3"), "'train:3' needs the workload's optimizer"),
        (("bisect_tasks:number", None, None), "gave a int; it must be an ampdebug.Workload, a pair of functions"),
        (("bisect_tasks:pair", None, "grad"), "is a pair"),
    ],
)
def test_what_does_not_go_together(arguments: Any, message: str) -> None:
    network, evaluate, probe = arguments
    with pytest.raises(ArgumentError, match=message.replace("(", r"\(")):
        bisect(network, evaluate, probe=probe)


def test_by_name() -> None:
    assert names(bisect("bisect_tasks:pair", level="O3")) >= {"Square"}


def test_what_cannot_be_sent_to_workers_is_said_before_the_search() -> None:
    with pytest.raises(ArgumentError, match=r"workers=1: the task cannot be sent.*give the whole by name"):
        bisect(tasks.workload(metric=lambda net: 0.0), probe="output", level="O3", workers=1)


# --- the state to begin in --------------------------------------------------------------------------------------------


def learned() -> nn.Cell:
    net = tasks.Sleeping()
    net.learned.set_data(Tensor(300.0))
    return net


def test_a_checkpoint_brings_the_fault_out(tmp_path: Path) -> None:
    assert bisect(tasks.sleeping, probe="finite", level="O3").status == "nothing-to-find"
    path = tmp_path / "late.ckpt"
    ms.save_checkpoint(learned(), str(path))
    result = bisect(tasks.sleeping, probe="finite", level="O3", checkpoint=path)
    assert result.status == "found"
    assert "Square" in names(result)


@pytest.mark.parametrize("kind", ["ckpt", "safetensors", "dict", "npz"])
def test_kinds_of_checkpoints(kind: str, tmp_path: Path) -> None:
    values = {parameter.name: parameter.asnumpy().copy() for parameter in learned().get_parameters()}
    checkpoint: Any = values
    if kind == "npz":
        checkpoint = kept_step_file(tmp_path, 0, 3)
        arrays = {name: KeptArray(value, "float32") for name, value in values.items()}
        write_kept_step(checkpoint, KeptStep(3, (), (), arrays, 3))
    elif kind != "dict":
        checkpoint = tmp_path / f"late.{kind}"
        ms.save_checkpoint(learned(), str(checkpoint), format=kind)
    net = tasks.Sleeping()
    load_checkpoint(net, checkpoint)
    for parameter in net.get_parameters():
        np.testing.assert_array_equal(parameter.asnumpy(), values[parameter.name])


def test_names_of_wrappers_do_not_matter_and_what_lacks_is_named(tmp_path: Path) -> None:
    values = {parameter.name: parameter.asnumpy().copy() for parameter in learned().get_parameters()}
    net = tasks.Sleeping()
    load_checkpoint(net, {f"network._backbone.{name}": value.astype(np.float16) for name, value in values.items()})
    assert float(net.learned.asnumpy()) == 300.0
    assert net.learned.dtype == ms.float32
    with pytest.raises(ArgumentError, match="checkpoint lacks 1 of 5 parameters of the network, such as 'learned'"):
        load_checkpoint(net, {name: value for name, value in values.items() if name != "learned"})
    with pytest.raises(ArgumentError, match=r"has 'fc.bias' in shape \(4,\), and the network in \(3,\)"):
        load_checkpoint(net, {**values, "fc.bias": np.zeros(4, np.float32)})
    with pytest.raises(ArgumentError, match="is not a file"):
        load_checkpoint(net, tmp_path / "missing.ckpt")
    (tmp_path / "other.pth").write_bytes(b"x")
    with pytest.raises(ArgumentError, match=r"must be a \.ckpt, \.safetensors or \.npz file"):
        load_checkpoint(net, tmp_path / "other.pth")
    (tmp_path / "broken.ckpt").write_bytes(b"\x0a\xff\xff")
    with pytest.raises(AmpdebugError, match=r"MindSpore cannot read .*broken\.ckpt"):
        load_checkpoint(net, tmp_path / "broken.ckpt")


def test_a_recorded_bad_step_is_state_and_batch(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="kept no bad step: record it with AMPMonitor"):
        bisect(tasks.sleeping, probe="finite", run=tmp_path)
    x, y = next(tasks.data())
    parameters = {p.name: KeptArray(p.asnumpy().copy(), "float32") for p in learned().get_parameters()}
    batch = (KeptArray(x * 0.5, "float32"), KeptArray(y, "int32"))
    for step in (9, 7):
        write_kept_step(kept_step_file(tmp_path, 0, step), KeptStep(step, batch, (), parameters, step))
    seen: list[Any] = []

    class Watching(tasks.Sleeping):
        def construct(self, x: Tensor) -> Tensor:
            seen.append(x.asnumpy().copy())
            return super().construct(x)

    result = bisect(tasks.workload(Watching), probe="finite", level="O3", run=tmp_path)
    assert "Square" in names(result)
    assert all((array == x * 0.5).all() for array in seen), "the batch of the step, not the first of the data"
    with pytest.raises(ArgumentError, match=r"run=.* and checkpoint contradict each other"):
        bisect(tasks.sleeping, run=tmp_path, checkpoint={})


# --- down -------------------------------------------------------------------------------------------------------------


def test_how_much_more_may_go_down() -> None:
    result = bisect(tasks.overflowing, probe="output", direction="down")
    assert isinstance(result, LoweringResult)
    assert (result.status, result.mode, result.level) == ("found", "emulated", "O0")
    assert names(result) == CULPRITS
    down = [unit.operator for unit in result.lowered]
    assert not CULPRITS & set(down)
    assert len(down) + len(result.culprits) == result.units
    assert {"Tanh", "MatMul", "BiasAdd"} <= {name.rpartition(" → ")[2] for name in down}
    text = str(result)
    assert text.startswith(f"O0, down: {len(down)} of {result.units} units in float32 may go to float16")
    assert "these must stay, each of them" in text
    assert "Tanh in (root) at bisect_tasks.py" in text
    data = result.to_dict()
    assert (data["direction"], [unit["operator"] for unit in data["lowered"]]) == ("down", down)


@pytest.mark.slow
def test_everything_may_go_down() -> None:
    result = bisect(tasks.healthy, probe="output", direction="down")
    assert isinstance(result, LoweringResult)
    assert result.status == "nothing-to-find"
    assert len(result.lowered) == result.units > 4
    assert f"All {result.units} units in float32 may go to float16" in str(result)


def test_down_from_a_level_moves_only_what_that_left_in_float32() -> None:
    class Normed(tasks.Healthy):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def construct(self, x: Tensor) -> Tensor:
            return super().construct(self.norm(x))

    result = bisect(tasks.workload(Normed), probe="output", direction="down", level="O2")
    assert isinstance(result, LoweringResult)
    assert {unit.path for unit in result.lowered} == {"norm"}


@pytest.mark.slow
def test_a_level_that_fails_as_it_is_cannot_go_down() -> None:
    fails = bisect(tasks.workload(tasks.Overflowing), probe="output", direction="down", level="O3")
    assert fails.status == "not-found"
    assert "bisect it with direction='up' first" in str(fails)


def test_directions_and_levels() -> None:
    with pytest.raises(ArgumentError, match="direction='left': must be 'up' or 'down'"):
        bisect(tasks.healthy, direction="left")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="level='O0': must be one of 'O1'"):
        bisect(tasks.healthy, level="O0")


# --- the run store ----------------------------------------------------------------------------------------------------


def test_the_result_goes_into_a_run_with_the_ranking(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run"), pytest.raises(StoreError, match="is being written by another monitor"):
        bisect(tasks.overflowing, probe="finite", level="O3", out=tmp_path / "run")
    result = bisect(tasks.overflowing, probe="finite", level="O3", out=tmp_path / "run")
    with open_run(tmp_path / "run") as run:
        (stored,) = run.results("bisect")
    assert {key: stored[key] for key in result.to_dict()} == result.to_dict()
    assert stored["task"] == "Overflowing"
    first = stored["ranking"][0]
    assert (first["rank"], first["operator"], first["score"], first["kind"]) == (1, "Square", "inf", "overflow")
    assert len(stored["ranking"]) == result.units
