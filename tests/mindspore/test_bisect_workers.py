"""Bisection with probes in worker processes, where those that fail do so by dying, and one that is killed itself."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from ampdebug._errors import ArgumentError
from ampdebug.hooks._bisection import bisect

pytestmark = [pytest.mark.own_process, pytest.mark.slow]

MAIN_PROCESS = "AMPDEBUG_TEST_MAIN_PROCESS"
NOTES = "AMPDEBUG_TEST_NOTES"
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    monkeypatch.setenv(MAIN_PROCESS, str(os.getpid()))


class Net(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        y = ops.tanh(x) * 12.0
        e = ops.exp(y)
        return e / e.sum(-1, keepdims=True)


def evaluate(net: nn.Cell) -> float:
    if NOTES in os.environ:
        (Path(os.environ[NOTES]) / f"{os.getpid()}").touch()
    y = net(Tensor(np.linspace(-3, 3, 12).reshape(3, 4).astype(np.float32))).asnumpy()
    finite = bool(np.isfinite(y).all())
    if not finite and os.environ[MAIN_PROCESS] != str(os.getpid()):
        os.kill(os.getpid(), signal.SIGSEGV)
    return 1.0 if finite else 0.0


def test_probes_that_kill_their_process_are_failed_probes(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    result = bisect(Net, evaluate, level="O3", workers=1, timeout=300, journal=path)
    assert result.status == "found"
    # The sum may overflow: an unrounded number divided by infinity is finite, and more is not asked for here.
    assert {culprit.unit.operator for culprit in result.culprits} == {"Exp", "/"}
    failed = [probe.outcome for probe in result.history if not probe.outcome.passed]
    assert failed
    assert all("died with signal 11" in outcome.reason for outcome in failed)
    again = bisect(Net, evaluate, level="O3", workers=1, journal=path)
    assert (again.probes, again.reused) == (0, result.probes)
    assert again.culprits == result.culprits


@pytest.mark.skipif(
    importlib.util.find_spec("distributed") is None,
    reason="Dask's cluster is not installed: pip install 'dask[distributed]'",
)
def test_a_dask_cluster_runs_the_probes_and_survives_its_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dask
    from distributed import Client, LocalCluster

    monkeypatch.setenv(NOTES, str(tmp_path))
    # Dask would run a task whose worker died on the other ones too, and kill them all.
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, local_directory=str(tmp_path)
        ) as cluster,
        Client(cluster) as client,
    ):
        processes = set(client.run(os.getpid).values())
        assert len(processes) == 2
        result = bisect(Net, evaluate, level="O3", executor=client.get_executor(), workers=2)
    assert result.status == "found"
    assert {culprit.unit.operator for culprit in result.culprits} == {"Exp", "/"}
    assert all(culprit.needed == "verified" for culprit in result.culprits)
    failed = [probe.outcome.reason for probe in result.history if not probe.outcome.passed]
    assert failed
    assert all(reason.startswith("KilledWorker") for reason in failed)
    ran = {int(note.name) for note in tmp_path.iterdir() if note.name.isdigit()}
    assert processes <= ran, "both workers had probes"
    assert len(ran - {os.getpid()}) > 2, "dead ones were replaced"


KILLED = """
import json, os, signal, sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

import ampdebug

ms.set_context(mode=ms.PYNATIVE_MODE)
ms.runtime.launch_blocking()
folder, limit = Path(sys.argv[1]), int(sys.argv[2])


class Net(nn.Cell):
    def construct(self, x):
        e = ops.exp(ops.tanh(x) * 12.0)
        return e / e.sum(-1, keepdims=True)


x = Tensor(np.linspace(-3, 3, 12).reshape(3, 4).astype(np.float32))
exact = Net()(x).asnumpy()
calls = folder / "calls"


def evaluate(net):
    error = float(np.abs(net(x).asnumpy() - exact).max())
    done = len(calls.read_text()) if calls.exists() else 0
    if done == limit:
        os.kill(os.getpid(), signal.SIGKILL)  # a probe that ran and was not yet noted
    calls.write_text("." * (done + 1))
    return error


result = ampdebug.bisect(
    Net, evaluate, level="O3", better="lower", threshold=0.01, journal=folder / "journal", progress=lambda step: None
)
print(json.dumps([sorted(c.unit.operator for c in result.culprits), result.probes, result.reused, result.status]))
"""


def test_a_bisection_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    script = tmp_path / "task.py"
    script.write_text(KILLED)

    def run(name: str, limit: int) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "calls").unlink(missing_ok=True)
        return subprocess.run(
            [sys.executable, "-W", "ignore", str(script), str(folder), str(limit)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout=300,
            check=False,
        )

    whole = run("whole", 1000)
    operators, probes, reused, status = json.loads(whole.stdout.splitlines()[-1])
    assert (operators, reused, status) == (["/", "Exp", "sum"], 0, "found")
    ends = 3  # float32 twice, the level once: its passes repeat bitwise
    died = run("killed", ends + 3)
    assert died.returncode == -signal.SIGKILL, died.stderr[-2000:]
    noted = len((tmp_path / "killed" / "journal").read_text().splitlines()) - 1
    assert noted == 3
    resumed = run("killed", 1000)
    assert json.loads(resumed.stdout.splitlines()[-1]) == [operators, probes - noted, noted, "found"]
    # Each probe but the killed one was evaluated once in the two runs together.
    assert len((tmp_path / "killed" / "calls").read_text()) == ends + probes - noted


def test_a_cell_cannot_be_sent() -> None:
    with pytest.raises(ArgumentError, match="network is a cell, which cannot be sent to workers"):
        bisect(Net(), evaluate, workers=1)
    with pytest.raises(ArgumentError, match="timeout=3 needs a process that can be ended"):
        bisect(Net, evaluate, timeout=3)
