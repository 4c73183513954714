"""``ampdebug run``: unmodified scripts, each in a process of its own as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ampdebug import open_run

ROOT = Path(__file__).resolve().parents[2]

NET = """
import mindspore.dataset
import numpy as np
from mindspore import Tensor, nn


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.first = nn.Dense(6, 8)
        self.act = nn.ReLU()
        self.second = nn.Dense(8, 3)

    def construct(self, x):
        return self.second(self.act(self.first(x)))


def batches(count=4):
    random = np.random.RandomState(0)
    return [(random.randn(4, 6).astype(np.float32), random.randint(0, 3, 4).astype(np.int32)) for _ in range(count)]


def dataset(count=4):
    return mindspore.dataset.GeneratorDataset([pair for pair in batches(count)], ["x", "y"], shuffle=False)


def train_cell(net):
    cell = nn.TrainOneStepCell(nn.WithLossCell(net, nn.CrossEntropyLoss()), nn.SGD(net.trainable_params(), 0.1))
    return cell.set_train()
"""

HEAD = """
import os, sys
import mindspore as ms
from mindspore import Tensor, nn
from mindspore.train import Model
from net import Net, batches, dataset, train_cell

ms.set_seed(0)
"""


def run(
    folder: Path, script: str, *arguments: str, out: str = "run", every: int = 1
) -> subprocess.CompletedProcess[str]:
    """Writes the script into ``folder/job``, beside the module it imports, and runs it from ``folder``."""
    (folder / "job").mkdir(exist_ok=True)
    (folder / "job" / "net.py").write_text(NET)
    (folder / "job" / "train.py").write_text(HEAD + script)
    return subprocess.run(
        [
            *(sys.executable, "-m", "ampdebug", "run", "--every", str(every), "--out", out),
            *("job/train.py", *arguments),
        ],
        cwd=folder,
        env=dict(os.environ, GLOG_v="3", PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


MODEL = """
ms.set_context(mode=ms.GRAPH_MODE if "--graph" in sys.argv else ms.PYNATIVE_MODE)
net = Net()
model = Model(net, nn.CrossEntropyLoss(), nn.SGD(net.trainable_params(), 0.1), amp_level="O3")
model.train(2, dataset())
print("arguments", sys.argv, __name__, __file__)
sys.exit(7)
"""


@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_model_train_with_arguments_and_an_exit_status(tmp_path: Path, mode: str) -> None:
    # `net` is imported from beside the script, although the current folder is another one
    done = run(tmp_path, MODEL, f"--{mode}", "-x", "a b", every=3)
    script = str(tmp_path / "job" / "train.py")
    assert f"arguments {[script, f'--{mode}', '-x', 'a b']} __main__ {script}" in done.stdout, done.stderr
    assert done.returncode == 7
    assert "ampdebug: recorded in run; to see it: ampdebug report run" in done.stderr
    with open_run(tmp_path / "run") as recorded:
        assert recorded.step_count == 8
        assert list(recorded.sampled_steps()) == [1, 4, 7]
        assert [step.epoch for step in recorded.steps()] == [1] * 4 + [2] * 4
        assert recorded.meta["amp_level"] == "O2 or O3"  # the same thing in a network without a norm
        assert recorded.meta["mode"] == f"{mode.upper()}_MODE"
        assert {"first", "act", "second", ""} <= {site.path for site in recorded.sites if site.kind == "output"}


DEFINED_HERE = """
class Own(nn.Cell):
    def __init__(self):
        super().__init__()
        self.inner = nn.Dense(6, 3)

    def construct(self, x):
        return self.inner(x) * 2


ms.set_context(mode=ms.GRAPH_MODE)
net = Own()
model = Model(net, nn.CrossEntropyLoss(), nn.SGD(net.trainable_params(), 0.1), amp_level=sys.argv[1])
model.fit(1, dataset(), valid_dataset=dataset(2), dataset_sink_mode=False) if sys.argv[2] == "fit" else model.train(
    1, dataset(), dataset_sink_mode=True
)
"""


@pytest.mark.parametrize(("level", "how"), [("O0", "train"), ("O1", "fit")])
def test_graph_mode_finds_the_source_of_cells_in_the_script(tmp_path: Path, level: str, how: str) -> None:
    script = DEFINED_HERE if how == "train" else DEFINED_HERE.replace("amp_level=", "metrics={'acc'}, amp_level=")
    done = run(tmp_path, script, level, how)
    assert done.returncode == 0, done.stderr
    with open_run(tmp_path / "run") as recorded:
        assert recorded.step_count == 4
        assert recorded.meta["network"] == "Own"
        assert recorded.meta["amp_level"] == level
        assert {"inner", ""} <= {site.path for site in recorded.sites if site.kind == "output"}


CELLS = """
ms.set_context(mode=ms.GRAPH_MODE if sys.argv[1] == "graph" else ms.PYNATIVE_MODE)
first, second = train_cell(Net()), train_cell(Net())
for x, y in batches():
    first(Tensor(x), Tensor(y))
for x, y in batches(2):
    second(Tensor(x), Tensor(y))
first(Tensor(x), Tensor(y))
"""


@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_train_cells_each_get_a_directory(tmp_path: Path, mode: str) -> None:
    done = run(tmp_path, CELLS, mode)
    assert done.returncode == 0, done.stderr
    for name, steps in (("run", 5), ("run-2", 2)):
        assert f"recorded in {name};" in done.stderr
        with open_run(tmp_path / name) as recorded:
            assert [step.step for step in recorded.steps() if step.loss is not None] == list(range(1, steps + 1))
            assert recorded.segments[-1].status == "finished"
            assert {"gradient", "output", "update"} <= {site.kind for site in recorded.sites}
    assert not (tmp_path / "run-3").exists()


TWICE = """
net = Net()
for part in range(2):  # a warm-up, then the training proper: the same network
    model = Model(net, nn.CrossEntropyLoss(), nn.SGD(net.trainable_params(), 0.1))
    model.train(1, dataset())
other = Net()
Model(other, nn.CrossEntropyLoss(), nn.SGD(other.trainable_params(), 0.1)).train(1, dataset(3))
"""


def test_a_script_that_trains_twice(tmp_path: Path) -> None:
    done = run(tmp_path, TWICE)
    assert done.returncode == 0, done.stderr
    with open_run(tmp_path / "run") as recorded:
        assert [step.step for step in recorded.steps()] == list(range(1, 9))
        assert [segment.first_step for segment in recorded.segments] == [1, 5]
    with open_run(tmp_path / "run-2") as recorded:
        assert recorded.step_count == 3
    # once more into the same directory: refused before the script starts
    again = run(tmp_path, "print('started')\n")
    assert again.returncode == 1
    assert "started" not in again.stdout
    assert "--out DIR" in again.stderr
    assert again.stderr.count("\n") == 1


FAILS = """
def broken(cell):
    for number, (x, y) in enumerate(batches()):
        if number == 2:
            open("no such file")
        cell(Tensor(x), Tensor(y))


broken(train_cell(Net()))
"""


def test_an_exception_shows_as_in_python_and_the_steps_before_it_stay(tmp_path: Path) -> None:
    done = run(tmp_path, FAILS)
    assert done.returncode == 1
    script = tmp_path / "job" / "train.py"
    traceback = done.stderr[done.stderr.index("Traceback") :]
    assert traceback.startswith(f'Traceback (most recent call last):\n  File "{script}", line ')
    assert 'open("no such file")' in traceback
    assert "FileNotFoundError: [Errno 2] No such file or directory: 'no such file'\n" in traceback
    assert "runpy" not in traceback
    with open_run(tmp_path / "run") as recorded:
        assert recorded.step_count == 2
        assert recorded.segments[-1].status == "failed"


FUNCTIONAL = """
net, loss = Net(), nn.CrossEntropyLoss()
gradient = ms.value_and_grad(lambda x, y: loss(net(x), y), None, net.trainable_params())
for x, y in batches(1):
    gradient(Tensor(x), Tensor(y))
"""


def test_a_functional_script_is_told_what_to_do(tmp_path: Path) -> None:
    done = run(tmp_path, FUNCTIONAL)
    assert done.returncode == 1
    assert done.stderr.startswith("ampdebug run: job/train.py ran, but neither Model.train, Model.fit nor a train cell")
    assert "with ampdebug.watch(net, out=..., optimizer=...) as run:" in done.stderr
    assert "run.step(loss=loss)" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        ("sys.exit('out of data')", 1, "out of data\n"),
        ("sys.exit()", 0, ""),
        ("raise KeyboardInterrupt", 130, "Keyboard"),
    ],
)
def test_how_a_script_ends(tmp_path: Path, ending: str, status: int, said: str) -> None:
    done = run(tmp_path, f"cell = train_cell(Net())\nfor x, y in batches(1): cell(Tensor(x), Tensor(y))\n{ending}\n")
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    with open_run(tmp_path / "run") as recorded:
        assert recorded.step_count == 1


def test_numbers_are_those_of_the_plain_script(tmp_path: Path) -> None:
    script = """
net = Net()
cell = train_cell(net)
losses = [float(cell(Tensor(x), Tensor(y)).asnumpy()) for x, y in batches()]
print("result", [loss.hex() for loss in losses], [p.asnumpy().tobytes().hex() for p in net.get_parameters()])
"""
    watched = run(tmp_path, script)
    plain = subprocess.run(
        [sys.executable, "job/train.py"],
        cwd=tmp_path,
        env=dict(os.environ, GLOG_v="3"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert watched.returncode == plain.returncode == 0, plain.stderr
    assert plain.stdout.startswith("result")
    assert watched.stdout == plain.stdout


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ampdebug", "run", "nowhere.py"],
        cwd=tmp_path,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "'nowhere.py'" in done.stderr
