"""The fix that a bisection hands over, run: patched source and pinned cells, in PyNative and in graph mode.

What the search proved is known from its own protection of single operators, which other tests compare with networks
written by hand. So a patch must measure what that protection measures.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import amp, nn

pytest.importorskip("libcst", reason="patches are written with libcst: pip install 'ampdebug[fix]'")
sys.path.insert(0, str(Path(__file__).parent))  # importlib mode: test modules can't import each other by themselves

import fix_nets
from fix_nets import Attention, Augmented, Calls, Cells, Helpers, Loops, Methods, Primitives, evaluate

from ampdebug._bisect import Criterion
from ampdebug._bisect_result import Unit
from ampdebug._errors import ArgumentError
from ampdebug._patch import build_patch
from ampdebug.hooks._backend import MindSporeBackend
from ampdebug.hooks._bisection import bisect
from ampdebug.hooks._fix import FixTask, _Changed, _Pinned, fix_task
from ampdebug.hooks._remote import BackendSpec

pytestmark = pytest.mark.own_process

GOOD = Criterion(-1e9, "higher", "anything")


@pytest.fixture(autouse=True)
def pynative() -> Any:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


@functools.cache
def searched(kind: type[nn.Cell], level: str) -> MindSporeBackend:
    backend = MindSporeBackend(kind, evaluate, level=level)
    backend.record()
    return backend


def task_of(backend: MindSporeBackend, kind: type[nn.Cell], units: list[Unit], level: str) -> FixTask:
    spec = BackendSpec(kind, evaluate, level, "float16", "op", None, 0)
    return fix_task(backend, spec, GOOD, tuple(site for unit in units for site in unit.sites))


def chosen(backend: MindSporeBackend, operators: set[str]) -> list[Unit]:
    found = [unit for unit in backend.units if {unit.operator, f"{unit.path}: {unit.operator}"} & operators]
    names = {unit.operator for unit in found} | {f"{unit.path}: {unit.operator}" for unit in found}
    assert operators <= names, (operators, sorted(f"{unit.path}: {unit.operator}" for unit in backend.units))
    return found


CASES = [
    (Calls, {"Exp", "Log"}),
    (Calls, {"Exp"}),
    (Methods, {"exp", "sum", "/"}),
    (Methods, {"/", "Transpose → @"}),
    (Augmented, {"*", "*=", "/="}),
    (Augmented, {"/=", "sum"}),
    (Primitives, {"*", "Reshape → ReduceMean"}),
    (Helpers, {"Exp", "sum", "Log"}),
    (Attention, {"Exp", "sum", "/"}),
    (Attention, {"Exp", "sum"}),
    (Attention, {"*", "Exp", "sum", "/"}),
    (Attention, {"Exp", "/"}),
]
# Whole cells stand for their operators, and values are not followed through lists.
NEAR = [
    (Loops, {"Exp", "*"}),
    (Cells, {"fc: BiasAdd", "*"}),
    (Cells, {"head.1: BiasAdd", "layers.0: BiasAdd"}),
]


def ids(value: Any) -> str | None:
    return value.__name__ if isinstance(value, type) else None


@pytest.mark.parametrize(
    ("kind", "operators", "level"),
    [(*case, "O2") for case in CASES + NEAR] + [(*case, "O3") for case in (CASES[0], CASES[8], NEAR[-1])],
    ids=ids,
)
def test_a_patch_computes_what_the_search_measured(kind: type[nn.Cell], operators: set[str], level: str) -> None:
    backend = searched(kind, level)
    task = task_of(backend, kind, chosen(backend, operators), level)
    wanted = backend.measure(frozenset(task.sites))
    assert np.isfinite(wanted), "otherwise nothing could differ"
    assert wanted not in (backend.measure_plain(), backend.measure_reference()), "the set makes a difference"
    measured = []

    def verify(before: Any, after: Any) -> tuple[bool, str]:
        measured.append(task._value(_Changed(dict(before), dict(after))))
        return measured[-1] == wanted, f"{measured[-1]}"

    patch = build_patch(task.patch_sites(), level=level, verify=verify)
    assert patch.left_out == ()
    if (kind, operators) in NEAR:
        np.testing.assert_allclose(measured[0], wanted, rtol=5e-3, err_msg=str(patch))
    else:
        assert patch.verified, f"{wanted} wanted\n{patch}"


GRAPHS = [CASES[2], CASES[7], CASES[10], CASES[11], NEAR[0], NEAR[-1]]


@pytest.mark.parametrize(("kind", "operators"), GRAPHS, ids=ids)
def test_a_patch_compiles(kind: type[nn.Cell], operators: set[str]) -> None:
    """The same source in graph mode, where casts happen at other places: near what the level gives there."""
    backend = searched(kind, "O2")
    task = task_of(backend, kind, chosen(backend, operators), "O2")
    patch = build_patch(task.patch_sites(), level="O2", verify=None)
    outcome = task.measured("graph", _Changed(dict(patch.before), dict(patch.files)))
    assert outcome.passed, outcome.detail
    fixed, alone = float(outcome.detail.split()[0]), float(outcome.detail.split(" alone ")[1].split(";")[0])
    # A graph leaves decorators out, so that it is compared with a graph.
    np.testing.assert_allclose(fixed, alone, rtol=1e-2, err_msg=str(patch))
    assert fixed != alone
    assert ms.get_context("mode") == ms.PYNATIVE_MODE


# --- pinned cells -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "mode"), [("O2", "graph"), ("O3", "pynative"), ("auto", "graph")])
def test_pinned_cells_are_near_what_the_search_measured(level: str, mode: Any) -> None:
    backend = searched(Attention, level)
    task = task_of(backend, Attention, chosen(backend, {"Exp", "/"} if level != "auto" else {"*"}), level)
    outcome = task.measured(mode, _Pinned())
    assert outcome.passed, outcome.detail
    got = float(outcome.detail.split()[0])
    np.testing.assert_allclose(got, backend.measure(frozenset(task.sites)), rtol=1e-2)


def overflow_task(level: str) -> FixTask:
    backend = MindSporeBackend(fix_nets.overflowing, fix_nets.finite, level=level)
    backend.record()
    spec = BackendSpec(fix_nets.overflowing, fix_nets.finite, level, "float16", "op", None, 0)
    units = chosen(backend, {"Exp", "sum", "/"})
    sites = tuple(site for unit in units for site in unit.sites)
    return fix_task(backend, spec, Criterion(0.5, "higher", "finite"), sites)


@pytest.mark.parametrize(("level", "mode"), [("O2", "pynative"), ("O2", "graph"), ("O3", "graph")])
def test_a_network_that_overflows_is_fixed_both_ways(level: str, mode: Any) -> None:
    task = overflow_task(level)
    assert task.filled == ("softmax",)
    patch = build_patch(task.patch_sites(), level=level, verify=None)
    for change in (_Pinned(), _Changed(dict(patch.before), dict(patch.files))):
        outcome = task.measured(mode, change)
        assert outcome.passed, outcome.detail
        assert outcome.detail == f"True in {mode} mode, {level} alone False; good: finite"


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_a_pinned_parent_computes_on_what_its_children_give_in_float32(level: str, mode: Any) -> None:
    backend = MindSporeBackend(fix_nets.pooled, fix_nets.finite, level=level)
    backend.record()
    sites = tuple(site for unit in backend.units if unit.path == "" for site in unit.sites)
    spec = BackendSpec(fix_nets.pooled, fix_nets.finite, level, "float16", "op", None, 0)
    task = fix_task(backend, spec, Criterion(0.5, "higher", "finite"), sites)
    outcome = task.measured(mode, _Pinned())
    assert outcome.detail == f"True in {mode} mode, {level} alone False; good: finite"
    net = task.apply(fix_nets.pooled())
    names = {parameter.name for parameter in fix_nets.pooled().get_parameters()}
    assert {parameter.name.removeprefix("_backbone.") for parameter in net.get_parameters()} == names
    assert task.apply(net) is net  # a second time changes nothing more
    wrapped = [cell for _, cell in net.cells_and_names() if type(cell).__name__ == "_OutputTo16"]
    assert len(wrapped) == 3


def test_a_network_that_was_converted_before_is_pinned_too() -> None:
    task = overflow_task("O2")
    net = amp.auto_mixed_precision(fix_nets.overflowing(), "O2")
    names = [parameter.name for parameter in net.get_parameters()]
    assert not fix_nets.finite(net)
    fixed = task.apply(net)
    assert fixed is net
    assert fix_nets.finite(fixed)
    assert [parameter.name for parameter in fixed.get_parameters()] == names
    fresh = fix_nets.overflowing()
    assert [parameter.name for parameter in task.apply(fresh).get_parameters()] == names
    for wrong, message in (
        (
            amp.auto_mixed_precision(fix_nets.overflowing(), "O3"),
            "net is under O3 already, and the search was under O2",
        ),
        (Calls(), "net has no cell at 'softmax'"),
        (None, "net is a NoneType"),
    ):
        with pytest.raises(ArgumentError, match=message):
            task.apply(wrong)


def test_values_between_cells_stay_unrounded_where_the_search_kept_them() -> None:
    backend = searched(Cells, "O2")
    units = chosen(backend, {"fc: BiasAdd", "*"})
    task = task_of(backend, Cells, units, "O2")
    assert ("fc", "") in task.edges
    net = task.apply(Cells())
    # fc is read by the root's own product unrounded, and BatchNorm is not: fc's product is not protected.
    inner = net._backbone
    assert type(inner._cells["fc"]).__name__ == "Dense"
    assert inner._cells["bn"].dtype == ms.float32, "the root reads it as float32 ..."
    assert inner._cells["bn"]._backbone.dtype == ms.float16, "... after it was rounded"
    task = task_of(backend, Cells, chosen(backend, {"head.0: BiasAdd", "layers.0: BiasAdd"}), "O2")
    inner = task.apply(Cells())._backbone
    assert [type(cell).__name__ for cell in inner.head.cell_list] == ["_OutputTo16", "Dense", "Tanh"]
    assert inner.head.cell_list[0]._backbone.fp32


# --- the whole way ----------------------------------------------------------------------------------------------------


def test_a_result_hands_over_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = bisect(fix_nets.overflowing, fix_nets.finite, level="O3")
    assert result.status == "found"
    source = Path(fix_nets.__file__).read_bytes()
    patch = result.patch()
    assert patch.verified, str(patch)
    assert str(patch).startswith("verified: True in pynative mode, O3 alone False; good: evaluate returns True\n")
    assert "+        e = _float32(lambda: ops.exp(x.astype(ms.float32)))\n" in patch.diff
    assert Path(fix_nets.__file__).read_bytes() == source
    assert not hasattr(fix_nets, "_float32"), "the changed code is gone"
    assert not fix_nets.finite(amp.auto_mixed_precision(fix_nets.overflowing(), "O3"))
    assert fix_nets.finite(result.apply(fix_nets.overflowing()))
    confirmed = result.confirm(mode="pynative")
    assert [check.passed for check in confirmed.confirmations] == [True]
    assert "confirmed in pynative mode with whole cells in float32: ok (True in pynative mode" in str(confirmed)
    assert "origin" not in confirmed.to_dict()
    with pytest.raises(ArgumentError, match="mode='eager': must be 'pynative' or 'graph'"):
        result.confirm(mode="eager")  # type: ignore[arg-type]


def test_the_level_alone_is_not_measured_again_where_the_search_did() -> None:
    calls: list[nn.Cell] = []

    def counted(net: nn.Cell) -> bool:
        calls.append(net)
        return fix_nets.finite(net)

    result = bisect(fix_nets.overflowing, counted, level="O3")
    before = len(calls)
    confirmed = result.confirm(mode="pynative")
    assert len(calls) == before + 1
    assert "O3 alone False" in confirmed.confirmations[-1].detail
    assert result.patch().verified
    assert len(calls) == before + 2


@pytest.mark.parametrize("mode", ["pynative", pytest.param("graph", marks=pytest.mark.slow)])
def test_a_patch_under_o1_which_rewrites_the_source(mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = bisect(fix_nets.LargeDense, fix_nets.large_is_finite, level="O1")
    assert [(site.path, site.operator) for site in result.sites] == [("fc", "MatMul")]
    patch = result.patch(mode=mode)
    assert patch.verified, str(patch)
    assert patch.reason == f"True in {mode} mode, O1 alone False; good: evaluate returns True"
    assert "+        self.fc = nn.Dense(64, 64).to_float(ms.float32)\n" in patch.diff


def test_graph_mode_is_confirmed_in_a_process_of_its_own() -> None:
    task = overflow_task("O2")
    patch = build_patch(task.patch_sites(), level="O2", verify=lambda b, a: task.verify(b, a, "graph", 300.0))
    assert patch.verified, str(patch)
    assert patch.reason == "True in graph mode, O2 alone False; good: finite"


def test_a_wrong_patch_is_not_verified() -> None:
    task = overflow_task("O3")
    site = next(item for item in task.patch_sites() if item.site.operator == "Tensor.__truediv__")
    patch = build_patch([site], level="O3", verify=lambda b, a: task.verify(b, a, "pynative", None))
    assert patch.verified is False
    assert patch.reason.startswith("False in pynative mode")


def test_a_file_that_changed_since_it_was_imported_is_not_run() -> None:
    task = overflow_task("O3")
    patch = build_patch(task.patch_sites(), level="O3", verify=None)
    path, text = next(iter(patch.before.items()))
    moved = {path: text.replace("class Softmax", "# a new line\nclass Softmax")}
    passed, reason = task.verify(moved, dict(patch.files), "pynative", None)
    assert passed is None
    assert "has changed since it was imported" in reason


def test_a_network_without_culprits_has_nothing_to_fix() -> None:
    result = bisect(fix_nets.overflowing, lambda net: bool(net(fix_nets.data()).shape == (6, 4)), level="O3")
    assert result.status == "nothing-to-find"
    for action in (lambda: result.patch(), lambda: result.apply(None), lambda: result.confirm()):
        with pytest.raises(ArgumentError, match="this result has no culprits"):
            action()


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("name", ["OffsetPooling", "Attention"])
def test_digits_are_read_again(name: str, level: str) -> None:
    """The two networks with a known fault: accuracy is float32's within 0.02, in both modes, with either fix."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install 'ampdebug[demo]'")
    import test_bisect

    result = bisect(test_bisect.trained(getattr(test_bisect, name)), test_bisect.accuracy, level=level, tolerance=0.02)
    for mode in ("pynative", "graph"):
        patch = result.patch(mode=mode)
        assert patch.verified, str(patch)
        assert patch.left_out == ()
        assert result.confirm(mode=mode).confirmations[-1].passed


def test_the_written_file_stands_by_itself(tmp_path: Path) -> None:
    """A new process that knows nothing of ampdebug runs the patched file under the level."""
    task = overflow_task("O3")
    patch = build_patch(task.patch_sites(), level="O3", verify=None)
    (text,) = patch.files.values()
    (tmp_path / "patched_nets.py").write_text(text, encoding="utf-8")
    program = (
        "import sys; from mindspore import amp; import patched_nets as n; "
        "ok = n.finite(amp.auto_mixed_precision(n.overflowing(), 'O3')); "
        "sys.exit(0 if ok and 'ampdebug' not in sys.modules else 3)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
