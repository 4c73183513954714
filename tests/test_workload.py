"""A training task as plain functions, and how a command line names one."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

import ampdebug
from ampdebug._errors import AmpdebugError, ArgumentError
from ampdebug._target import load_factory, load_made, load_target, load_workload
from ampdebug._workload import Workload


class Cell:
    """Looks like a network."""

    def construct(self, x: Any) -> Any:
        return x

    def __call__(self, x: Any) -> Any:
        return x


def batches() -> list[tuple[int, int]]:
    return [(1, 10), (2, 20), (3, 30)]


def test_it_is_public_and_can_be_sent() -> None:
    workload = ampdebug.Workload(network=Cell, data=batches)
    copied = pickle.loads(pickle.dumps(workload))  # noqa: S301 - our own bytes
    assert (copied.network, copied.data) == (Cell, batches)
    assert hash(ampdebug.Workload(network=Cell, data=batches())) != hash(workload), "whatever the batches are"
    assert (workload.better, workload.loss_scale, workload.name) == ("higher", None, "")


@pytest.mark.parametrize("data", [batches, batches(), lambda: iter(batches()), [list(batch) for batch in batches()]])
def test_batches_begin_again_at_every_call(data: Any) -> None:
    workload = Workload(network=Cell, data=data)
    for _ in range(2):
        assert list(workload.batches()) == batches()
        assert list(workload.batches(2)) == batches()[:2]
        assert list(workload.batches(7)) == (batches() * 3)[:7]
        assert list(workload.batches(0)) == []


def test_no_more_batches_are_made_than_were_asked_for() -> None:
    made: list[int] = []

    def data() -> Any:
        for i in range(10):
            made.append(i)
            yield i, i

    assert len(list(Workload(network=Cell, data=data).batches(3))) == 3
    assert made == [0, 1, 2]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "data gives no batch; it must give at least one"),
        ([(1,)], r"batch 0 of data is a tuple of 1; each batch must be a tuple \(inputs\.\.\., label\)"),
        ([(1, 2), {"x": 1}], r"batch 1 of data is a dict; each batch must be a tuple"),
        (lambda: 3, r"data\(\) gave a int; it must give batches"),
        ((lambda once: lambda: once)(iter([(1, 2)])), "data gives no batch after 1; called again it must begin again"),
    ],
)
def test_batches_that_are_none(data: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        list(Workload(network=Cell, data=data).batches(3))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"network": Cell()}, "network is a Cell; it must be a function without arguments that makes the network"),
        ({"network": 3}, "network is a int"),
        ({"data": iter([(1, 2)])}, "data is a list_iterator; it must be a list of batches or a function"),
        ({"data": "digits"}, "data is a str"),
        ({"data": type("Set", (), {"create_tuple_iterator": iter})()}, "data is a dataset; give a function"),
        ({"loss": 1.0}, r"loss is a float; it must be a cell or function loss\(output, label\)"),
        ({"optimizer": Cell()}, "optimizer is a Cell; it must be a function that takes the trainable parameters"),
        ({"metric": 0.9}, "metric is a float; it must be a function that takes a network"),
        ({"better": "more"}, "better='more': must be 'higher' or 'lower'"),
        ({"loss_scale": 0}, "loss_scale=0: must be a positive number"),
        ({"loss_scale": float("inf")}, "loss_scale=inf: must be a positive number"),
        ({"loss_scale": "1024"}, "loss_scale='1024': must be a positive number"),
        ({"loss_scale": True}, "loss_scale=True: must be a positive number"),
        ({"name": None}, "name=None: must be a text"),
    ],
)
def test_wrong_parts_are_named(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Workload(**{"network": Cell, "data": batches, **parts})


def test_what_is_missing_is_named_with_its_purpose() -> None:
    workload = Workload(network=Cell, data=batches, loss=Cell())
    workload.require("loss", purpose="the probe 'grad'")
    with pytest.raises(
        ArgumentError, match=r"'train' needs the workload's optimizer, which is not given: .*optimizer="
    ):
        workload.require("loss", "optimizer", purpose="the probe 'train'")
    with pytest.raises(ArgumentError, match="the workload's optimizer and metric, which are not given"):
        workload.require("optimizer", "metric", purpose="it")


# --- what the command line names --------------------------------------------------------------------------------------

SOURCE = """
from ampdebug import Workload

calls = []

class Net:
    pass

workload = Workload(network=Net, data=[(1, 2)], name="plain")

def make():
    calls.append(1)
    return Workload(network=Net, data=[(1, 2)], name="made")

def pair():
    return Net, len

def breaks():
    raise KeyError("width")

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    name = "ampdebug_" + "".join(c if c.isalnum() else "_" for c in request.node.name)
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    return name


@pytest.mark.parametrize("suffix", ["", ".py"])
def test_a_workload_by_name_is_loaded_once(module: str, suffix: str) -> None:
    assert load_workload(f"{module}{suffix}:workload").name == "plain"
    made = load_workload(f"{module}{suffix}:make")
    assert made.name == "made"
    assert load_workload(f"{module}{suffix}:make") is made
    assert load_target(f"{module}{suffix}:calls") == [1]
    network, evaluate = load_made(f"{module}{suffix}:pair")
    assert (network.__name__, evaluate) == ("Net", len)
    copied = pickle.loads(pickle.dumps(network))  # noqa: S301 - our own bytes
    assert copied is network, "a file is imported under a name that pickle finds"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "must be MODULE:WORKLOAD or FILE.py:WORKLOAD"),
        ("{}", "must be MODULE:WORKLOAD"),
        ("missing.py:x", "'missing.py' is not a file"),
        ("no_such_module_here:x", "there is no module 'no_such_module_here'"),
        ("{}:nothing", "has no such name 'nothing'; it has Net, workload, make, pair, breaks"),
        ("{}:worklaod", "has no such name 'worklaod'; it has workload, Net, make"),
        ("{}:number", "number gave a int; it must be an ampdebug.Workload or return one"),
        ("{}:pair", "pair gave a tuple; it must be an ampdebug.Workload"),
    ],
)
def test_names_of_nothing(module: str, name: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        load_workload(name.format(module))


def test_a_factory_must_be_a_function(module: str) -> None:
    assert load_factory(f"{module}.py:make").__name__ == "make"
    with pytest.raises(ArgumentError, match="number is a int; it must be a function"):
        load_factory(f"{module}.py:number")
    with pytest.raises(ArgumentError, match=f"{module}.py has no function 'nothing'"):
        load_factory(f"{module}.py:nothing")


def test_the_users_error_is_told_from_ours(module: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AmpdebugError, match=r"breaks\(\) raised KeyError: 'width'"):
        load_workload(f"{module}:breaks")
    assert "in breaks" in capfd.readouterr().err
    Path(f"{module}_x.py").write_text("1 / 0")
    for _ in range(2):
        with pytest.raises(AmpdebugError, match="raised ZeroDivisionError while it was imported"):
            load_workload(f"{module}_x.py:workload")


def test_a_file_named_like_a_module_in_use(module: str) -> None:
    Path("pickle.py").write_text(SOURCE)
    with pytest.raises(
        ArgumentError, match=r"'pickle\.py' cannot be imported as 'pickle', which is the name of another"
    ):
        load_workload("pickle.py:workload")
