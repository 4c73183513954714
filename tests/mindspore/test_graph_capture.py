"""Graph mode without Python callbacks, and networks that do not compile with probes in them."""

from __future__ import annotations

import types
import warnings
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops

import ampdebug
from ampdebug.hooks import _capture, _graph_probe

pytestmark = pytest.mark.own_process


class Net(nn.Cell):
    """Tuples, a cell called twice, a norm, an integer input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.twice = nn.Dense(16, 16)
        self.norm = nn.LayerNorm((16,))
        self.split = Split()
        self.head = nn.Dense(8, 4)

    def construct(self, x):
        x = self.norm(self.twice(self.twice(self.embed(x).mean(1))))
        left, right = self.split(x)
        return self.head(left + right)


class Split(nn.Cell):
    """Gives a tuple."""

    def construct(self, x):
        return x[:, :8], x[:, 8:] * 2


def train(level: str, mode: int, out: Path | None, *, steps: int = 3, **options: Any) -> tuple[list[float], list[Any]]:
    """Some steps of a jitted functional loop; losses and parameters."""
    ms.set_context(mode=mode)
    ms.set_seed(1)
    np.random.seed(1)  # noqa: NPY002 - MindSpore's initialisers draw from it
    net = amp.auto_mixed_precision(Net(), level)
    loss_fn = nn.CrossEntropyLoss()
    optimizer = nn.Momentum(net.trainable_params(), 0.05, 0.9)

    def forward(x, y):
        return loss_fn(net(x), y)

    gradients = ms.value_and_grad(forward, None, optimizer.parameters)

    @ms.jit
    def step(x, y):
        loss, grads = gradients(x, y)
        return ops.depend(loss, optimizer(grads))

    random = np.random.RandomState(0)
    losses = []
    batches = [
        (Tensor(random.randint(0, 11, (6, 5)).astype(np.int32)), Tensor(random.randint(0, 4, 6).astype(np.int32)))
        for _ in range(steps)
    ]
    if out is None:
        losses = [float(step(x, y).asnumpy()) for x, y in batches]
    else:
        with ampdebug.watch(net, out=out, optimizer=optimizer, **options) as run:
            for x, y in batches:
                loss = step(x, y)
                losses.append(float(loss.asnumpy()))
                run.step(loss=loss)
    return losses, [p.asnumpy().copy() for p in net.get_parameters()]


def rows_of(out: Path, step: int) -> dict[tuple[str, str, str], Any]:
    """The last row of each site of a step: a cell called twice is captured with its last call."""
    run = ampdebug.open_run(out)
    seen = run.tensors(step)
    return {
        (run.sites[site].kind, run.sites[site].path, run.sites[site].slot): row
        for site, row in zip(seen.site_ids, seen.rows, strict=True)
    }


@pytest.mark.parametrize("mode", [ms.GRAPH_MODE, ms.PYNATIVE_MODE], ids=["graph", "pynative-jit"])
@pytest.mark.parametrize("level", ["O0", "O2", "auto"])
def test_capture_changes_nothing_and_records_what_callbacks_record(tmp_path: Path, level: str, mode: int) -> None:
    plain = train(level, mode, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampdebug.AmpdebugWarning)  # says that only last calls are kept
        captured = train(level, mode, tmp_path / "capture", graph="capture")
    called = train(level, mode, tmp_path / "callback", graph="callback")
    assert captured[0] == plain[0] == called[0]
    for mine, other in zip(captured[1], plain[1], strict=True):
        assert np.array_equal(mine, other)
    for number in (1, 3):
        first, second = rows_of(tmp_path / "capture", number), rows_of(tmp_path / "callback", number)
        assert first.keys() == second.keys()
        for key, row in first.items():
            assert row.tobytes() == second[key].tobytes(), key


def test_a_cell_called_twice_is_said(tmp_path: Path) -> None:
    with pytest.warns(ampdebug.AmpdebugWarning, match="last call only: .*twice"):
        train("O0", ms.GRAPH_MODE, tmp_path, graph="capture")
    assert [event.kind for event in ampdebug.open_run(tmp_path).events] == ["capture-last-call"]


@pytest.mark.filterwarnings("ignore:cells that run several times")
def test_what_does_not_fit_into_the_buffers_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_capture, "LIMIT", 6000)
    plain = train("O0", ms.GRAPH_MODE, None)
    with pytest.warns(ampdebug.AmpdebugWarning, match="not all watched tensors fit"):
        watched = train("O0", ms.GRAPH_MODE, tmp_path, graph="capture")
    assert watched[0] == plain[0]
    kinds = [event.kind for event in ampdebug.open_run(tmp_path).events]
    assert kinds.count("capture-limit") == 1
    assert 0 < len(ampdebug.open_run(tmp_path).tensors(1).rows) < 40


def test_graph_option_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ampdebug.ArgumentError, match=r"graph='buffers'.*'capture'"):
        train("O0", ms.GRAPH_MODE, tmp_path, graph="buffers")


@pytest.mark.parametrize("mode", [ms.GRAPH_MODE, ms.PYNATIVE_MODE], ids=["graph", "pynative-jit"])
def test_network_that_compiles_only_without_probes_trains_on(
    tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train("O2", mode, None)

    def broken(self: Any, cell: Any, original: Any) -> Any:
        def construct(self, *args, **kwargs):
            raise ValueError("this probe does not compile")

        return types.MethodType(construct, cell)

    monkeypatch.setattr(_graph_probe.GraphProbe, "construct", broken)
    with pytest.warns(ampdebug.AmpdebugWarning, match="switched itself off in step 1.*does not compile") as said:
        watched = train("O2", mode, tmp_path)
    assert len(said) == 1
    assert watched[0] == plain[0]
    for mine, other in zip(watched[1], plain[1], strict=True):
        assert np.array_equal(mine, other)


def test_error_of_the_users_own_network_reaches_the_user(tmp_path: Path) -> None:
    ms.set_context(mode=ms.GRAPH_MODE)

    class Wrong(nn.Cell):
        def construct(self, x):
            return ops.matmul(x, x)

    net = Wrong()
    with (
        pytest.raises((RuntimeError, ValueError), match=r"(?i)matmul"),
        ampdebug.watch(net, out=tmp_path),
    ):
        net(Tensor(np.ones((2, 3), np.float32)))
    assert "construct" not in net.__dict__
