"""The flight recorder keeps bad steps bit by bit and changes nothing; ``replay`` finds where they went wrong."""

from __future__ import annotations

import functools
import json
import random
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, nn
from mindspore.graph import api
from mindspore.ops.composite import base
from mindspore.train import Callback, Model

import ampdebug
from ampdebug import AmpdebugWarning, AMPMonitor, ArgumentError, StoreError, open_run, replay, watch
from ampdebug._cli import main
from ampdebug._flight_file import find_kept_steps, kept_step_file, read_kept_step
from ampdebug._replay_origins import origins_of
from ampdebug.hooks._preflight import cell_facts
from ampdebug.hooks._preflight_step import run_step
from ampdebug.rules._operator_flow import Flow

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode: test modules can't import each other by themselves
import nets
import replay_nets
from nets import MODES, Exact, Loop, exact, exact_loop, set_mode, weights
from replay_nets import HandSoftmax, Mse, Poisoned, RootOfSquare, at_level, batches

pytestmark = pytest.mark.own_process

HERE = Path(__file__).resolve().parent
LOOPS = ("model", "cell", "functional")
Batches = list[tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    set_mode("pynative")


class Before(Callback):
    """Notes the bits of all parameters before each step."""

    def __init__(self, net: nn.Cell) -> None:
        super().__init__()
        self.net, self.bits = net, {}
        self.step = 0

    def note(self) -> None:
        self.step += 1
        self.bits[self.step] = weights(self.net)

    def on_train_step_begin(self, run_context: Any) -> None:
        self.note()


def train(net: nn.Cell, data: Batches, out: str, loop: str, **options: Any) -> Before:
    """Trains with a recorder; ``model`` updates whatever comes, the others skip a step that overflows."""
    before = Before(net)
    optimizer = nn.SGD(net.trainable_params(), 0.01)
    if loop == "model":
        model = Model(net, Mse(), optimizer)
        model.train(1, nets.dataset(data), callbacks=[AMPMonitor(out, **options), before], dataset_sink_mode=False)
    elif loop == "cell":
        update = nn.DynamicLossScaleUpdateCell(1024.0, 2, 100)
        cell = nets.ScaleCell(nn.WithLossCell(net, Mse()), optimizer, update).set_train()
        with watch(cell, out=out, **options):
            for x, y in data:
                before.note()
                cell(x, y)
    else:
        scaler = amp.DynamicLossScaler(1024.0, 2, 100)
        own = Loop(net, scaler, loss_fn=Mse(), optimizer=optimizer)
        with watch(net, out=out, optimizer=optimizer, loss_scale=scaler, **options) as run:
            for x, y in data:
                before.note()
                loss, finite = own.step(x, y)
                run.step(loss=loss, finite=finite)
    return before


@functools.cache
def kept_run(folder: str, mode: str, loop: str, every: int = 1) -> tuple[str, Before]:
    """A run of the hand-written softmax at O2 whose third step of four overflows."""
    set_mode(mode)
    out = f"{folder}/{mode}-{loop}-{every}"
    before = train(at_level(HandSoftmax(), "O2"), batches(), out, loop, keep_bad_steps=1, keep_every=every)
    set_mode("pynative")
    return out, before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("runs"))


def events(out: Any, kind: str) -> list[str]:
    with open_run(out) as run:
        return [event.message for event in run.events if event.kind == kind]


# --- keeping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("mode", MODES)
def test_the_bad_step_is_kept_bit_by_bit(folder: str, mode: str, loop: str) -> None:
    out, before = kept_run(folder, mode, loop)
    assert list(find_kept_steps(out, 0)) == [3]
    kept = read_kept_step(find_kept_steps(out, 0)[3])
    for ours, theirs in zip(kept.batch, batches()[2], strict=True):
        assert ours.values.tobytes() == theirs.asnumpy().tobytes()
    assert kept.state_step == 3
    assert {name: array.values.tobytes() for name, array in kept.parameters.items()} == before.bits[3]
    assert kept.facts["mode"] == ("GRAPH_MODE" if mode == "graph" else "PYNATIVE_MODE")
    assert kept.facts["loss_scale"] == (1.0 if loop == "model" else 1024.0)
    # The statistics that the step poisoned are those from before it.
    assert np.isfinite(kept.parameters["bn.moving_mean"].values).all()
    assert not np.isfinite(_named(before.net, "bn.moving_mean")).all()
    assert any("step 3" in message.lower() for message in events(out, "bad-step-kept"))


def _named(net: nn.Cell, name: str) -> Any:
    return next(p.asnumpy() for p in net.get_parameters() if p.name.endswith(name))


def test_a_skipped_step_is_exact_without_a_copy_of_its_own(folder: str) -> None:
    out, before = kept_run(folder, "pynative", "functional", 10)
    kept = read_kept_step(find_kept_steps(out, 0)[3])
    assert kept.state_step == 3
    assert {name: array.values.tobytes() for name, array in kept.parameters.items()} == before.bits[3]


def test_an_update_that_was_applied_falls_back_on_the_last_copy() -> None:
    data = batches(steps=5, bad=4)
    net = at_level(HandSoftmax(), "O2")
    before = train(net, data, "applied", "model", keep_bad_steps=1, keep_every=3)
    kept = read_kept_step(find_kept_steps("applied", 0)[4])
    assert kept.state_step == 4  # 1, 4, ...
    assert {name: array.values.tobytes() for name, array in kept.parameters.items()} == before.bits[4]
    before = train(at_level(HandSoftmax(), "O2"), data, "older", "model", keep_bad_steps=1, keep_every=10)
    kept = read_kept_step(find_kept_steps("older", 0)[4])
    assert kept.state_step == 1
    assert {name: array.values.tobytes() for name, array in kept.parameters.items()} == before.bits[1]
    found = replay("older", replay_nets.hand_softmax)
    assert found.reproduced
    assert any("before step 1, 3 steps before" in note for note in found.notes)


@pytest.mark.parametrize("mode", MODES)
def test_keeping_changes_nothing(mode: str) -> None:
    set_mode(mode)
    data = list(exact(4))
    data[2] = (Tensor(np.full((4, 5), np.inf, np.float32)), data[2][1])
    bare, kept = nets.build(Exact), nets.build(Exact)
    expected = exact_loop(bare).run(data)
    loop = exact_loop(kept)
    found = nets.Found(kept)
    with watch(kept, out="run", optimizer=loop.optimizer, loss_scale=loop.scaler, keep_bad_steps=2) as run:
        numbers = loop.run(data, run)
    assert nets.numbers_of(numbers) == nets.numbers_of(expected)
    assert weights(kept) == weights(bare)
    assert list(find_kept_steps("run", 0)) == [3]
    found.check()
    assert not events("run", "keep-bad-steps-off")


def test_it_listens_only_while_it_keeps() -> None:
    originals = base._pynative_func_grad_forward, api._JitExecutor.__call__

    def now() -> tuple[Any, Any]:
        return base._pynative_func_grad_forward, api._JitExecutor.__call__

    def step(run: Any) -> None:
        loss, _ = grad(*batches()[0])
        run.step(loss=loss)

    net = nn.Dense(5, 3)
    loss_fn = Mse()
    grad = ms.value_and_grad(lambda x, y: loss_fn(net(x), y), None, net.trainable_params())
    with watch(net, out="a") as run:
        assert now()[0] is originals[0]
        step(run)
    first, second = watch(net, out="b", keep_bad_steps=1), watch(net, out="c", keep_bad_steps=1)
    for run in (first, second):
        run.__enter__()
        step(run)
    assert now()[0] is not originals[0]
    first.__exit__(None, None, None)  # the first to come may be the first to go
    assert now()[0] is not originals[0]
    second.__exit__(ValueError, ValueError(), None)
    assert now() == originals


def test_what_fails_in_the_middle_of_a_step_leaves_nothing_behind() -> None:
    originals = base._pynative_func_grad_forward, api._JitExecutor.__call__
    endless: list[Any] = []
    endless.append(endless)
    net = nn.Dense(5, 3)
    loss_fn = Mse()
    grad = ms.value_and_grad(lambda x, y: loss_fn(net(x), y), None, net.trainable_params())
    with watch(net, out="run", keep_bad_steps=1) as run:
        grad(*batches()[0])
        flight = run._session.flight
        assert flight is not None
        with pytest.warns(AmpdebugWarning, match="RecursionError"):
            flight.saw(endless, {}, 3)
        run.step(loss=float("nan"))
        grad(*batches()[0])
        run.step(loss=1.0)
    assert (base._pynative_func_grad_forward, api._JitExecutor.__call__) == originals
    with open_run("run") as seen:
        assert len(list(seen.steps())) == 2
    assert find_kept_steps("run", 0) == {}


# --- limits and failures ----------------------------------------------------------------------------------------------


def functional(net: nn.Cell, data: Batches, out: Any, scale: float = 1024.0, **options: Any) -> None:
    loop = Loop(
        net, amp.DynamicLossScaler(scale, 2, 100), loss_fn=Mse(), optimizer=nn.SGD(net.trainable_params(), 0.01)
    )
    with watch(net, out=out, optimizer=loop.optimizer, loss_scale=loop.scaler, **options) as run:
        loop.run(data, run)


def test_what_does_not_fit_is_left_out_and_said() -> None:
    net = at_level(HandSoftmax(), "O2")
    with pytest.warns(AmpdebugWarning, match="without its parameters"):
        functional(net, batches(), "small", keep_bad_steps=2, keep_bytes=12_000)
    kept = read_kept_step(find_kept_steps("small", 0)[3])
    assert kept.parameters == {}
    assert kept.state_step is None
    assert kept.batch[0].values.shape == (4, 5)
    assert find_kept_steps("small", 0)[3].stat().st_size <= 12_000
    assert not replay("small", replay_nets.hand_softmax).reproduced
    found = replay("small", lambda: (HandSoftmax(), Mse()))
    assert found.reproduced  # the batch and the first weights do it
    assert any("Parameters were not kept" in note for note in found.notes)
    with pytest.warns(AmpdebugWarning, match="keep_bytes=2000") as caught:
        functional(net, batches(), "tiny", keep_bad_steps=2, keep_bytes=2000)
    assert len(caught) == 1
    assert find_kept_steps("tiny", 0) == {}
    assert len(events("tiny", "bad-step-too-large")) == 1


def test_the_limit_is_for_all_steps_together() -> None:
    net = at_level(HandSoftmax(), "O2")
    data = [batches()[2]] * 4
    with pytest.warns(AmpdebugWarning, match="without its parameters|does not fit"):
        functional(net, data, "run", keep_bad_steps=4, keep_bytes=24_000)
    found = find_kept_steps("run", 0)
    assert 1 <= len(found) < 4
    assert sum(path.stat().st_size for path in found.values()) <= 24_000


def test_a_file_that_cannot_be_written_ends_the_keeping_and_nothing_else() -> None:
    Path("run/ampdebug-rank0-step000003.npz").mkdir(parents=True)
    (Path("run/ampdebug-rank0-step000003.npz") / "in the way").touch()
    net, bare = at_level(HandSoftmax(), "O2"), at_level(HandSoftmax(), "O2")
    with pytest.warns(AmpdebugWarning, match="keeps no further bad steps.*StoreError") as caught:
        functional(net, batches(steps=5), "run", keep_bad_steps=3)
    assert len(caught) == 1
    functional(bare, batches(steps=5), "bare")
    with open_run("run") as run, open_run("bare") as other:
        assert [repr(s.loss) for s in run.steps()] == [repr(s.loss) for s in other.steps()]
        assert [s.sampled for s in run.steps()] == [True] * 5
    assert not list(Path("run").glob("*.partial"))


def test_half_a_file_of_a_killed_run_is_cleared_away_and_kept_steps_count_when_a_run_goes_on() -> None:
    net = at_level(HandSoftmax(), "O2")
    functional(net, batches(), "run", keep_bad_steps=2)
    leftover = Path("run/ampdebug-rank0-step000009.npz.partial")
    leftover.write_bytes(b"half")
    functional(at_level(HandSoftmax(), "O2"), [batches()[2]] * 3, "run", keep_bad_steps=2, append=True)
    assert list(find_kept_steps("run", 0)) == [3, 5]
    assert not leftover.exists()


def test_an_overflow_that_the_scaler_caught_makes_room_for_a_lost_loss() -> None:
    net = at_level(nn.Dense(5, 3), "O2")
    data = batches(steps=6, bad=5, value=float("nan"))
    # At this scale the gradients overflow float16, and the loss, in float32, is fine.
    functional(net, data, "run", scale=2.0**24, keep_bad_steps=1)
    with open_run("run") as run:
        steps = list(run.steps())
    assert steps[0].overflow
    assert np.isfinite([step.loss for step in steps[:4]]).all()
    assert list(find_kept_steps("run", 0)) == [5]


def test_the_batch_by_hand_wins_and_an_evaluation_is_not_taken_for_one() -> None:
    net = at_level(HandSoftmax(), "O2")
    loss_fn = Mse()
    grad = ms.value_and_grad(lambda x, y: loss_fn(net(x), y), None, net.trainable_params())
    bad, other = batches()[2], batches()[0]
    with watch(net, out="seen", keep_bad_steps=1) as run:
        with run.paused():
            grad(*other)
        loss, _ = grad(*bad)
        run.step(loss=loss, overflow=True)
    with watch(net, out="given", keep_bad_steps=1) as run:
        loss, _ = grad(*bad)
        run.step(loss=loss, overflow=True, batch=other)
    for out, (x, _) in (("seen", bad), ("given", other)):
        kept = read_kept_step(find_kept_steps(out, 0)[1])
        np.testing.assert_array_equal(kept.batch[0].values, x.asnumpy())


def test_a_step_whose_batch_is_not_seen_is_said_once() -> None:
    net = nn.Dense(5, 3)
    run = watch(net, out="run", keep_bad_steps=1)
    with run:
        net(batches()[0][0])
        with pytest.warns(AmpdebugWarning, match="batch="):
            run.step(loss=float("nan"))
        net(batches()[0][0])
        run.step(loss=float("nan"))  # a second warning would be an error
    assert len(events("run", "bad-step-without-batch")) == 1


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"keep_bad_steps": -1}, "0"),
        ({"keep_bad_steps": 1, "keep_every": 0}, "keep_every=0"),
        ({"keep_bytes": 1.5}, "1.5"),
    ],
)
def test_wrong_options_are_refused_at_once(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ArgumentError, match=word):
        AMPMonitor("run", **options)
    with pytest.raises(ArgumentError, match=word):
        watch(nn.Dense(5, 3), out="run", **options)


# --- replaying --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "loop"), [("graph", "functional"), ("graph", "cell"), ("pynative", "model")])
def test_a_fault_of_the_forward_pass_is_found(folder: str, mode: str, loop: str) -> None:
    out, _ = kept_run(folder, mode, loop)
    found = replay(out, replay_nets.hand_softmax)
    assert found.reproduced
    origin = found.origins[0]
    assert (origin.kind, origin.phase, origin.operator, origin.path) == ("non-finite", "forward", "exp", "")
    line = _line_of("e = ops.exp")
    assert origin.line == f"replay_nets.py:{line}"
    assert origin.text == "e = ops.exp(self.fc(x))"
    assert origin.dtype == "float16"
    assert "30" in origin.inputs[0]
    assert "+inf" in origin.result
    given, exact = (float(text.partition(" to ")[2].partition(",")[0]) for text in (origin.inputs[0], origin.float32))
    np.testing.assert_allclose(exact, np.exp(given), rtol=1e-3)
    assert "inf" not in origin.float32
    assert "handwritten-softmax-overflow" in [finding.slug for finding in found.findings]
    assert any("converted to O2" in note for note in found.notes)
    text = str(found)
    assert "the fault came back" in text
    assert origin.line in text
    json.dumps(found.to_dict(), allow_nan=False)


def _line_of(text: str) -> int:
    lines = (HERE / "replay_nets.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_a_fault_of_the_backward_pass_is_found() -> None:
    set_mode("graph")
    functional(at_level(RootOfSquare(), "O2"), batches(value=0.0, bad=1), "run", keep_bad_steps=1)
    found = replay("run", replay_nets.root_of_square)
    assert ms.get_context("mode") == ms.GRAPH_MODE  # put back
    assert found.reproduced
    origin = found.origins[0]
    assert (origin.kind, origin.phase, origin.operator) == ("non-finite", "backward", "sqrt")
    assert origin.line == f"replay_nets.py:{_line_of('return ops.sqrt(h * h)')}"
    assert origin.inputs[0].startswith("gradient that arrived")
    assert "NaN" in origin.result or "inf" in origin.result
    assert "NaN" in origin.float32 or "inf" in origin.float32  # float32 does not help there
    with open_run("run") as run:
        loss = run.step(1).loss
    again = float(found.seen[1].partition("loss ")[2].partition(" ")[0])
    np.testing.assert_allclose(again, loss, rtol=1e-3)
    assert "derivative of sqrt" in str(found)


def test_a_loss_scale_beyond_the_loss_is_found() -> None:
    net = replay_nets.Halves().set_train()
    scaler = amp.DynamicLossScaler(2.0**17, 2, 100)
    optimizer = nn.SGD(net.trainable_params(), 0.01)
    grad = ms.value_and_grad(lambda x, y: scaler.scale(net(x, y)), None, optimizer.parameters)
    with watch(net, out="run", optimizer=optimizer, loss_scale=scaler, keep_bad_steps=1) as run:
        _, grads = grad(*batches()[0])
        run.step(loss=0.5, finite=amp.all_finite(grads))
    found = replay("run", replay_nets.Halves)
    assert found.reproduced
    origin = found.origins[0]
    assert (origin.kind, origin.phase) == ("non-finite", "backward")
    assert origin.came_from == "the loss scale 131072"
    assert "float16" in origin.result
    assert origin.float32
    assert "inf" not in origin.float32


def test_a_flushed_value_before_the_fault_is_named_too() -> None:
    net = at_level(replay_nets.LostEpsilon(), "O3")
    functional(net, batches(value=0.0, bad=2), "run", keep_bad_steps=1)
    found = replay("run", lambda: (replay_nets.LostEpsilon(), Mse()))
    assert found.reproduced
    by_kind = {origin.kind: origin for origin in found.origins}
    assert by_kind["non-finite"].operator == "div"
    assert by_kind["flushed"].operator == "mul"
    assert by_kind["flushed"].line == f"replay_nets.py:{_line_of('squares = small * small')}"
    assert not by_kind["flushed"].float32.startswith("0 to 0")


def test_a_gradient_that_is_flushed_is_located() -> None:
    net = at_level(nn.SequentialCell(nn.Dense(5, 3), nn.Dense(3, 3)), "O3")
    tiny = Tensor(np.full((3, 3), 2.0**-14, np.float32))
    next(p for p in net.get_parameters() if p.name.endswith("1.weight")).set_data(tiny)
    exact_gradients: dict[tuple[int, int], Any] = {}
    loss = functools.partial(lambda o, y: (o.astype(ms.float32) * 2.0**-12).mean())
    seen = run_step(net, batches()[0], loss, None, "O3", cell_facts(net), exact_gradients=exact_gradients)
    found = list(origins_of(Flow(seen, 1), exact_gradients, 1.0))
    assert [(o.kind, o.phase) for o in found] == [("flushed", "backward")]
    assert found[0].path == "1"
    assert "0 to 0" in found[0].result
    assert "0 to 0" not in found[0].float32


@pytest.mark.parametrize("mode", MODES)
def test_what_does_not_come_back_is_said(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    set_mode(mode)
    net = at_level(Poisoned(), "O2")
    net._backbone.factor = float("inf")
    functional(net, batches()[:1], "run", keep_bad_steps=1)
    found = replay("run", lambda: (Poisoned(), Mse()))
    assert found.verdict == "not reproduced"
    assert found.origins == ()
    text = str(found)
    assert "did not come back" in text
    assert "forward pass finite, gradients finite" in text
    assert ("graph mode" in text) == (mode == "graph")
    assert "Only the network, the loss and the loss scale are run again" in text


@pytest.mark.parametrize("seed", [1, 2])
def test_python_and_numpy_draw_what_they_drew(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    functional(replay_nets.Dice().set_train(), batches()[:1] * 16, "run", keep_bad_steps=2)
    random.seed(seed + 100)
    drawn = []

    def make() -> Any:
        made = replay_nets.Dice(), Mse()  # draws its weights
        drawn.append(np.random.get_state()[1].tolist())  # noqa: NPY002
        return made

    for step in find_kept_steps("run", 0):
        assert replay("run", make, step=step).reproduced
        assert np.random.get_state()[1].tolist() == drawn[-1]  # noqa: NPY002 - put back
    assert len(find_kept_steps("run", 0)) == 2


def test_the_network_must_be_the_one_that_was_trained(folder: str) -> None:
    out, _ = kept_run(folder, "pynative", "functional")
    with pytest.raises(ArgumentError, match=r"not in it: .*fc\.weight.*not recorded: weight, bias"):
        replay(out, replay_nets.dense)
    with pytest.raises(ArgumentError, match=r"'fc\.weight' has shape \(7, 5\)"):
        replay(out, replay_nets.other_shapes)
    with pytest.raises(ArgumentError, match="step=7 was not kept; kept are 3"):
        replay(out, replay_nets.hand_softmax, step=7)
    with pytest.raises(ArgumentError, match="must give a Cell"):
        replay(out, lambda: 5)
    with pytest.raises(ArgumentError, match="level='O9'"):
        replay(out, replay_nets.hand_softmax, level="O9")  # type: ignore[arg-type]
    functional(nn.Dense(5, 3), batches()[:1], "none")
    with pytest.raises(StoreError, match="keep_bad_steps"):
        replay("none", replay_nets.dense)


def test_replaying_leaves_the_network_as_it_was(folder: str) -> None:
    out, _ = kept_run(folder, "pynative", "functional")
    net = at_level(HandSoftmax(), "O2")
    net.set_train(False)
    earlier, found = weights(net), nets.Found(net)
    assert replay(out, lambda: (net, Mse())).reproduced
    assert weights(net) == earlier
    assert not any(cell.training for _, cell in net.cells_and_names())
    found.check()


def test_a_workload_is_replayed(folder: str) -> None:
    out, _ = kept_run(folder, "graph", "functional")
    workload = ampdebug.Workload(network=HandSoftmax, data=batches, loss=Mse())
    assert replay(out, workload).reproduced
    assert replay(out, lambda: workload, level="O3").reproduced


def test_on_the_command_line(folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out, _ = kept_run(folder, "graph", "functional")
    target = f"{HERE / 'replay_nets.py'}:hand_softmax"
    assert main(["replay", out, target, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "reproduced"
    assert found["origins"][0]["operator"] == "exp"
    assert main(["replay", out, target, "--step", "2"]) == 2
    assert "kept are 3" in capsys.readouterr().err


SCRIPT = """
import sys
sys.path.insert(0, {here!r})
from mindspore import nn
from replay_nets import HandSoftmax, Mse, at_level, batches
net = at_level(HandSoftmax(), "O2")
cell = nn.TrainOneStepCell(nn.WithLossCell(net, Mse()), nn.SGD(net.trainable_params(), 0.01)).set_train()
for x, y in batches():
    cell(x, y)
"""


def test_a_script_is_recorded_with_its_bad_steps(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(SCRIPT.format(here=str(HERE)))
    assert main(["run", "--out", "run", "--keep-bad-steps", "1", "train.py"]) == 0
    assert list(find_kept_steps("run", 0)) == [3]
    assert main(["run", "--out", "other", "--keep-bad-steps", "-1", "train.py"]) == 2
    assert "--keep-bad-steps -1" in capfd.readouterr().err
    assert kept_step_file("run", 0, 3).exists()
