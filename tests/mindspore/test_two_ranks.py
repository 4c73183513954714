"""Two ranks under msrun, data parallel, on the CPU: a file a rank, local and reduced gradients told apart."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ampdebug

ROOT = Path(__file__).resolve().parents[2]
MSRUN = Path(sys.executable).with_name("msrun")

SCRIPT = '''
import os, sys
import numpy as np
import mindspore as ms
import mindspore.dataset
from mindspore import Tensor, nn, ops
from mindspore.communication import get_rank, init
from mindspore.train import Model
import ampdebug

mode, out = sys.argv[1:]
ms.set_device("CPU")
ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
init()
rank = get_rank()
open(f"{out}/started-{rank}", "w").close()
ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True, device_num=2)
random = np.random.RandomState(10 + rank)
x = random.randn(16, 8).astype(np.float32)
y = random.randint(0, 4, 16).astype(np.int32)


def loss_cell():
    # Not CrossEntropyLoss: with two processes its last bit differs from one bare run to the next.
    return nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.first = nn.Dense(8, 16)
        self.act = nn.ReLU()
        self.second = nn.Dense(16, 4)

    def construct(self, x):
        return self.second(self.act(self.first(x)))


def values(net):
    return {p.name: p.asnumpy().copy() for p in net.get_parameters()}


def by_cell(watched):
    ms.set_seed(1)
    net = Net()
    cell = nn.TrainOneStepCell(nn.WithLossCell(net, loss_cell()), nn.SGD(net.trainable_params(), 0.1))
    cell.set_train()
    batches = [(Tensor(x[i : i + 4]), Tensor(y[i : i + 4])) for i in (0, 4, 8)]
    if not watched:
        return [float(cell(*batch).asnumpy()) for batch in batches], values(net)
    with ampdebug.watch(cell, out=f"{out}/cell"):
        return [float(cell(*batch).asnumpy()) for batch in batches], values(net)


def by_model(watched):
    ms.set_seed(1)
    net = Net()
    losses = []

    class Losses(ms.train.Callback):
        def on_train_step_end(self, run_context):
            losses.append(float(run_context.original_args().net_outputs.asnumpy()))

    model = Model(
        net,
        loss_cell(),
        nn.SGD(net.trainable_params(), 0.1, loss_scale=1024.0),
        amp_level="O2",
        loss_scale_manager=ms.FixedLossScaleManager(1024.0, drop_overflow_update=False),
    )
    data = ms.dataset.NumpySlicesDataset((x, y), ["x", "y"], shuffle=False).batch(4)
    model.train(1, data, callbacks=[*([ampdebug.AMPMonitor(f"{out}/model")] if watched else []), Losses()])
    return losses, values(net)


def local_gradients():
    """Of the first batch, by hand: what the record must say."""
    ms.set_seed(1)
    net = Net()
    gradient_function = ms.grad(nn.WithLossCell(net, loss_cell()), None, net.trainable_params())
    gradients = gradient_function(Tensor(x[:4]), Tensor(y[:4]))
    return {p.name: g.asnumpy().copy() for p, g in zip(net.trainable_params(), gradients)}


found = {f"gradient/{name}": value for name, value in local_gradients().items()}
for name, train in (("cell", by_cell), ("model", by_model)):
    for watched in (False, True):
        losses, parameters = train(watched)
        found[f"{name}/{watched}/losses"] = np.array(losses)
        found.update({f"{name}/{watched}/{key}": value for key, value in parameters.items()})
np.savez(f"{out}/found-{rank}.npz", **found)
'''


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module", params=["pynative", "graph"])
def two_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the runs ``cell`` and ``model`` of both ranks, and what the ranks found."""
    if not MSRUN.is_file():
        pytest.skip(f"msrun, which starts several ranks, is not beside {sys.executable}")
    out = tmp_path_factory.mktemp(request.param)
    (out / "train.py").write_text(SCRIPT)
    environment = dict(os.environ, GLOG_v="3", PYTHONPATH=str(ROOT))
    # msrun starts whatever `python` comes first on the path
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    done = subprocess.run(
        [
            *(MSRUN, "--worker_num=2", "--local_worker_num=2", f"--master_port={free_port()}", "--join=True"),
            *(f"--log_dir={out}/logs", "train.py", request.param, str(out)),
        ],
        cwd=out,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    logs = "\n".join(log.read_text(errors="replace")[-3000:] for log in sorted(out.glob("logs/worker_*.log")))
    if not any(out.glob("started-*")):
        pytest.skip(
            f"msrun cannot start two ranks here (exit code {done.returncode}): {done.stderr[-300:]}{logs[-600:]}"
        )
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-2000:]}{logs}"
    return out


def ranks(out: Path) -> list[dict[str, np.ndarray]]:
    return [dict(np.load(out / f"found-{rank}.npz")) for rank in (0, 1)]


def rows(run: ampdebug.Run, step: int, kind: str) -> dict[str, np.void]:
    """The statistics of a step by path."""
    found = run.tensors(step)
    return {
        run.sites[i].path: row for i, row in zip(found.site_ids, found.rows, strict=True) if run.sites[i].kind == kind
    }


@pytest.mark.parametrize("how", ["cell", "model"])
def test_numbers_are_bitwise_those_without_the_monitor(two_ranks: Path, how: str) -> None:
    for rank, found in enumerate(ranks(two_ranks)):
        bare = {key.split("/", 2)[2]: value for key, value in found.items() if key.startswith(f"{how}/False/")}
        assert set(bare) == {"losses", "first.weight", "first.bias", "second.weight", "second.bias"}
        for key, value in bare.items():
            assert value.tobytes() == found[f"{how}/True/{key}"].tobytes(), f"rank {rank}, {key}"


@pytest.mark.parametrize("how", ["cell", "model"])
def test_a_file_a_rank_and_the_directory_opens_them(two_ranks: Path, how: str) -> None:
    assert {file.name for file in (two_ranks / how).iterdir()} == {"ampdebug-rank0.sqlite", "ampdebug-rank1.sqlite"}
    with ampdebug.open_run(two_ranks / how) as run:
        assert run.ranks == (0, 1)
        assert (run.meta["rank"], run.meta["world_size"]) == (0, 2)
        with run.rank(1) as other:
            assert (other.meta["rank"], other.meta["world_size"]) == (1, 2)
            losses = [[step.loss for step in one.steps()] for one in (run, other)]
    for rank, found in enumerate(ranks(two_ranks)):
        assert losses[rank] == list(found[f"{how}/True/losses"])
    assert losses[0] != losses[1]  # each rank has its own batches


def test_local_and_reduced_gradients_are_told_apart(two_ranks: Path) -> None:
    by_hand = [
        {k.split("/")[1]: v for k, v in found.items() if k.startswith("gradient/")} for found in ranks(two_ranks)
    ]
    mean = {name: (by_hand[0][name] + by_hand[1][name]) / 2 for name in by_hand[0]}
    with ampdebug.open_run(two_ranks / "cell") as run:
        for rank in (0, 1):
            with run.rank(rank) as one:
                local, reduced = rows(one, 1, "gradient"), rows(one, 1, "reduced_gradient")
            assert set(local) == set(reduced) == set(mean)
            for name in mean:
                for row, expected in ((local[name], by_hand[rank][name]), (reduced[name], mean[name])):
                    assert row["min"] == pytest.approx(expected.min(), rel=1e-5, abs=1e-8), (rank, name)
                    assert row["max"] == pytest.approx(expected.max(), rel=1e-5, abs=1e-8), (rank, name)
            assert any(local[name]["max"] != reduced[name]["max"] for name in mean)


@pytest.mark.parametrize("how", ["cell", "model"])
def test_the_report_of_each_rank(two_ranks: Path, how: str) -> None:
    with ampdebug.open_run(two_ranks / how) as run, run.rank(1) as other:
        assert not [cell for cell in run.cells if cell.path.startswith("(reducer")]
        assert "first.weight" in str(ampdebug.build_report(run, show_all=True))
        assert "first.weight" in str(ampdebug.build_report(other, show_all=True))
