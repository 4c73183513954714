"""``ampdebug.check`` on networks with one fault each, on healthy ones, and on the cases beside the checkout."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops

import ampdebug
from ampdebug import ArgumentError, check

pytestmark = pytest.mark.own_process

HERE = Path(__file__).resolve().parent
CASES = HERE.parent.parent.parent / "shared" / "cases"


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


nets = load(HERE / "check_nets.py", "check_nets")


@pytest.fixture(autouse=True)
def in_pynative_and_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
    ms.set_seed(1)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


def above_note(found: Any) -> list[str]:
    return [f"{f.slug}: {f.sentence}" for f in found.findings if f.severity != "note"]


# --- one fault each ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(nets.FAULTY))
def test_the_fault_comes_first(name: str) -> None:
    slug, make = nets.FAULTY[name]
    found = check(make)
    assert found.findings, str(found)
    assert found.findings[0].slug == slug, str(found)
    assert found.verdict == "findings"
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["findings"][0]["slug"] == slug
    assert len(above_note(found)) <= 2, str(found)
    assert found.findings[0].evidence
    assert found.findings[0].action


@pytest.mark.parametrize("name", sorted(nets.HEALTHY))
def test_nothing_is_said_of_a_healthy_network(name: str) -> None:
    found = check(nets.HEALTHY[name])
    assert found.ok, str(found)
    assert above_note(found) == []
    assert "nothing is wrong" in str(found)


# --- the cases beside the checkout ------------------------------------------------------------------------------------


def case_names() -> list[str]:
    return sorted(path.parent.name for path in CASES.glob("*/net.py")) if CASES.is_dir() else []


@pytest.mark.skipif(not case_names(), reason="the cases are not beside this checkout")
@pytest.mark.parametrize("case", case_names())
def test_case(case: str) -> None:
    expected = json.loads((CASES / case / "expected.json").read_text())
    module = load(CASES / case / "net.py", "case_" + case.replace("-", "_"))
    net = module.make_net()
    if case.startswith("24"):
        batches: list[tuple[Any, ...]] = [module.make_inputs(step) for step in range(4)]
    else:
        inputs = module.make_inputs()
        batches = [(batch,) for batch in inputs] if isinstance(inputs, list) else [inputs]
    for batch in batches:
        found = check(net, *batch)
        if not found.ok:
            break
    slug = expected["expected_diagnosis"]["slug"]
    said = (str(found) + json.dumps(found.to_dict())).lower()
    assert [words for words in expected["must_not_say"] if words.lower() in said] == []
    if expected["healthy"]:
        assert found.findings == ()
    else:
        assert found.findings[0].slug == slug, str(found)


# --- what it leaves behind --------------------------------------------------------------------------------------------


def snapshot(net: nn.Cell) -> dict[str, Any]:
    return {p.name: p.asnumpy().copy() for p in net.get_parameters()}


def test_the_network_and_the_optimizer_are_as_they_were() -> None:
    net = amp.auto_mixed_precision(nets.Conv(), "O2")
    optimizer = nn.Adam(net.trainable_params(), 1e-2)
    x, y = nets.normal(4, 3, 16, 16), nets.integers(4, 4)
    net.set_train(False)
    before, moments, output = snapshot(net), snapshot(optimizer), net(x).asnumpy().copy()
    found = check(net, x, y, loss_fn=ops.cross_entropy, optimizer=optimizer, steps=2)
    assert found.ok, str(found)
    assert "2 steps" in found.looked_at[0]
    for name, value in snapshot(net).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    for name, value in snapshot(optimizer).items():
        np.testing.assert_array_equal(value, moments[name], err_msg=name)
    assert not any(cell.training for _, cell in net.cells_and_names())
    np.testing.assert_array_equal(net(x).asnumpy(), output)


def test_a_level_is_tried_on_a_copy() -> None:
    net = nets.LayerNormByHand(200.0)
    x = nets.normal(4, 16)
    before = net(x).asnumpy().copy()
    assert check(net, x, level="O2").findings[0].slug == "rmsnorm-square-overflow-output-zero"
    np.testing.assert_array_equal(net(x).asnumpy(), before)
    assert check(net, x).ok
    assert check(net, x, level="O0").ok


def test_graph_mode_is_left_for_the_check_and_put_back() -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    assert check(nets.Mlp(), nets.normal(8, 16), level="O2").ok
    assert ms.get_context("mode") == ms.GRAPH_MODE


def test_the_operator_the_line_and_float32_are_the_evidence() -> None:
    found = check(*nets.scores_overflow()[:1], *nets.scores_overflow()[1])
    finding = found.findings[0]
    said = " ".join(str(row) for row in finding.evidence)
    assert "check_nets.py:" in said
    assert "ops.matmul(self.q(x)" in said
    assert "in float32" in said
    assert finding.first_step == finding.last_step == 1
    assert finding.confidence == "high"


def test_an_error_of_the_network_comes_through() -> None:
    with pytest.raises((ValueError, RuntimeError)):
        check(nets.Mlp(), nets.normal(8, 3))
    assert check(nets.Mlp(), nets.normal(8, 16), level="O2").ok


def test_numpy_arrays_are_taken() -> None:
    assert check(nets.Mlp(), np.ones((2, 16), np.float32)).ok


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: check(nets.Mlp()), "no inputs"),
        (lambda: check(nets.Mlp(), Tensor([1.0]), level="O4"), "level='O4': must be one of 'O0'"),
        (lambda: check(nets.Mlp(), Tensor([1.0]), steps=0), "steps=0: must be 1 or more"),
        (lambda: check(3, Tensor([1.0])), "net=3 is of type int"),
        (lambda: check(lambda: 3, Tensor([1.0])), "gave a int; it must give a Cell"),
        (lambda: check(lambda: (1, 2, 3, 4, 5)), "gave 5 values"),
        (lambda: check(nets.AddedMask(), Tensor([1.0])), "construct takes 2 or more"),
        (
            lambda: check((n := nets.Mlp()), Tensor([1.0]), level="O2", optimizer=nn.SGD(n.trainable_params(), 0.1)),
            "give a function that returns",
        ),
    ],
)
def test_wrong_arguments(call: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=None) as caught:
        call()
    assert words.lower() in str(caught.value).lower()


# --- the command ------------------------------------------------------------------------------------------------------


def run_command(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    from ampdebug._cli import main

    code = main(["check", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command(capsys: Any) -> None:
    path = str(HERE / "check_nets.py")
    code, out, _ = run_command(capsys, f"{path}:scores_overflow")
    assert code == 1
    assert "1. qk-matmul-overflow-before-scaling (error" in out
    code, out, _ = run_command(capsys, f"{path}:residual_cnn", "--json")
    assert code == 0
    assert json.loads(out)["verdict"] == "ok"
    code, out, err = run_command(capsys, f"{path}:nothing")
    assert (code, out) == (2, "")
    assert "has no function 'nothing'" in err


def test_the_command_takes_a_workload(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(
        "import ampdebug, numpy as np\n"
        "from mindspore import Tensor, nn\n"
        "batch = (Tensor(np.ones((4, 8), np.float32)), Tensor(np.zeros(4, np.int32)))\n"
        "task = ampdebug.Workload(network=lambda: nn.Dense(8, 3), data=[batch], loss=nn.CrossEntropyLoss(),\n"
        "    optimizer=lambda parameters: nn.SGD(parameters, 0.1))\n"
        "def make():\n    return task\n"
        "three = 3\n"
    )
    for name in ("task", "make"):
        code, out, _ = run_command(capsys, f"task.py:{name}", "--level", "O2")
        assert code == 0, out
    code, _, err = run_command(capsys, "task.py:three")
    assert code == 2
    assert "must be a function or an ampdebug.Workload" in err


def test_the_command_says_what_is_wrong_with_its_target(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "raising.py").write_text("def make():\n    raise KeyError('shape')\n")
    for target, words in (
        ("nocolon", "must be MODULE:FACTORY"),
        ("missing.py:make", "'missing.py' is not a file"),
        ("no_such_module_here:make", "there is no module"),
        ("broken.py:make", "broken.py raised ZeroDivisionError"),
        ("raising.py:make", "raised KeyError"),
    ):
        code, out, err = run_command(capsys, target)
        assert (code, out) == (2, ""), target
        assert words in err


def test_check_is_public() -> None:
    assert ampdebug.check is check
