"""``ampdebug.audit`` on real networks: what MindSpore does at each level, and that nothing is left changed."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import ampdebug
from ampdebug._cli import main

pytestmark = pytest.mark.own_process

F32 = ms.float32


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU()
        self.gn = nn.GroupNorm(2, 4)
        self.fc = nn.Dense(4, 6)
        self.ln = nn.LayerNorm((6,))

    def construct(self, x: Any) -> Any:
        x = self.gn(self.relu(self.bn(self.conv(x)))).mean((2, 3))
        return self.ln(self.fc(x))


class ByHand(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Dense(6, 6)

    def construct(self, x: Any) -> Any:
        x = self.proj(x)
        x = x / ops.sqrt((x * x).mean(-1, keep_dims=True) + 1e-8)
        weights = ops.exp(x.astype(F32))
        return weights / weights.sum(-1, keepdims=True)


class SpecialDense(nn.Dense):
    pass


class Partly(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.plain, self.special = nn.Dense(6, 6), SpecialDense(6, 6)

    def construct(self, x: Any) -> Any:
        return self.special(self.plain(x))


class NothingForO1(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Dense(6, 6)

    def construct(this, x: Any) -> Any:
        return this.fc(x)


def image() -> Any:
    return Tensor(np.random.RandomState(0).randn(2, 3, 8, 8).astype(np.float32))


def rows() -> Any:
    return Tensor(np.random.RandomState(0).randn(4, 6).astype(np.float32))


def ran(report: ampdebug.AuditReport) -> dict[str, dict[str, int]]:
    return {cell.path: dict(cell.ran) for cell in report.cells if cell.ran}


def slugs(report: ampdebug.AuditReport) -> set[str]:
    return {finding.slug for finding in report.findings}


def cell(report: ampdebug.AuditReport, path: str) -> Any:
    return next(c for c in report.cells if c.path == path)


EXPECTED = {
    "O0": {"conv": "float32", "bn": "float32", "relu": "float32", "gn": "float32", "ln": "float32"},
    "O1": {"conv": "float16", "bn": "float32", "relu": "float16", "gn": "float32", "ln": "float32"},
    "O2": {"conv": "float16", "bn": "float32", "relu": "float16", "gn": "float16", "ln": "float32"},
    "O3": {"conv": "float16", "bn": "float16", "relu": "float16", "gn": "float16", "ln": "float16"},
    "auto": {"conv": "float16", "bn": "float32", "relu": "float32", "gn": "float32", "ln": "float32"},
}
REASONS = {
    "O0": ("inputs", "inputs"),
    "O1": ("level list", "inputs"),
    "O2": ("level", "level list"),
    "O3": ("level", "level"),
    "auto": ("level list", "level list"),
}


@pytest.mark.parametrize("level", EXPECTED)
def test_what_each_level_runs_in_and_who_asked(level: Any) -> None:
    report = ampdebug.audit(Net(), image(), level=level)
    found = ran(report)
    assert {path: next(iter(found[path])) for path in EXPECTED[level]} == EXPECTED[level]
    assert (cell(report, "conv").reasons[0], cell(report, "bn").reasons[0]) == REASONS[level]
    assert ("normalisation-forced-to-fp16" in slugs(report)) == (level in ("O2", "O3"))
    assert cell(report, "conv").gradients[:1] == (EXPECTED[level]["conv"],)
    assert ("listed-parameters-rounded" in slugs(report)) == (level == "O2")


def test_casts_of_a_convolution_are_counted_to_the_byte() -> None:
    report = ampdebug.audit(Net(), image(), level="O2", backward=False)
    conv = next(row for row in report.operators if row.path == "conv")
    assert [(c.source, c.bytes) for c in conv.casts] == [
        ("input 0", 2 * 3 * 8 * 8 * 6),
        ("conv.weight", 4 * 3 * 3 * 3 * 6),
    ]
    assert not report.backward
    assert not any(row.gradient for row in report.operators)


@pytest.mark.parametrize("level", ["O2", "auto"])
def test_the_compiled_graph_agrees_here(level: Any) -> None:
    report = ampdebug.audit(Net(), image(), level=level, mode="graph")
    found = ran(report)
    assert {path: next(iter(found[path])) for path in EXPECTED[level]} == EXPECTED[level]
    assert report.mode == "graph"
    assert ms.get_context("mode") == ms.PYNATIVE_MODE


def test_what_is_written_by_hand() -> None:
    report = ampdebug.audit(ByHand(), rows(), level="O2")
    assert {"norm-by-hand-in-float16", "softmax-by-hand-in-float16", "explicit-cast-undone"} <= slugs(report)
    told = next(f for f in report.findings if f.slug == "eps-1e-8-is-zero-in-fp16")
    assert "1e-08 becomes 0" in told.evidence[0].text
    assert "test_level_audit.py:" in told.evidence[0].text
    # with everything in float32 nothing of it is wrong
    assert ampdebug.audit(ByHand(), rows(), level="O0").findings == ()


def test_the_undone_cast_is_real() -> None:
    """O2 takes an explicit cast back: the exponential overflows although its operand was cast to float32."""

    class Exponential(nn.Cell):
        def construct(self, x: Any) -> Any:
            return ops.exp(x.astype(F32))

    net = ms.amp.auto_mixed_precision(Exponential(), "O2")
    assert np.isinf(net(Tensor([12.0], ms.float16)).asnumpy()).all()
    report = ampdebug.audit(Exponential(), Tensor([12.0], ms.float16), level="O2")
    assert "explicit-cast-undone" in slugs(report)


def test_o1_converts_some_and_not_others() -> None:
    report = ampdebug.audit(Partly(), rows(), level="O1")
    told = next(f for f in report.findings if f.slug == "cells-not-converted")
    assert told.where == "special"
    assert ran(report)["plain"] == {"float16": 2}


def test_o1_converts_nothing_and_says_why() -> None:
    report = ampdebug.audit(NothingForO1(), rows(), level="O1")
    assert {"o1-converted-nothing", "o1-needs-self"} <= slugs(report)
    assert not report.ok


def test_a_pin_is_lost_by_o2_and_kept_by_o1() -> None:
    def pinned() -> Any:
        net = Partly()
        net.plain.to_float(F32)
        return net

    assert "to-float-pin-lost-by-later-amp-call" in slugs(ampdebug.audit(pinned(), rows(), level="O2"))
    kept = ampdebug.audit(pinned(), rows(), level="O1")
    assert ran(kept)["plain"] == {"float32": 2}
    assert cell(kept, "plain").asked_by == "to_float"
    assert cell(kept, "plain").reasons == ("to_float",)


def test_a_pin_set_after_the_level_is_the_users() -> None:
    net = Partly()
    converted = ms.amp.auto_mixed_precision(net, "O2")
    net.plain.to_float(F32)
    report = ampdebug.audit(converted, rows(), level=None)
    assert report.level.startswith("O2")
    assert cell(report, "plain").reasons == ("to_float",)
    assert cell(report, "special").reasons == ("level",)


def test_the_loss_function_is_audited() -> None:
    report = ampdebug.audit(Partly(), rows(), Tensor([0, 1, 2, 3], ms.int32), level="O3",
                            loss_fn=lambda out, label: ops.cross_entropy(out.astype(ms.float16), label))  # fmt: skip
    assert "loss-in-float16" in slugs(report)
    fine = ampdebug.audit(Partly(), rows(), Tensor([0, 1, 2, 3], ms.int32), level="O3", loss_fn=ops.cross_entropy)
    assert "loss-in-float16" not in slugs(fine)


def test_the_network_is_as_it_was() -> None:
    net = Net()
    net.set_train(False)
    before = {p.name: p.asnumpy().copy() for p in net.get_parameters()}
    output = net(image()).asnumpy()
    ampdebug.audit(net, image(), level="O2")
    ampdebug.audit(net, image(), level="O0")
    after = {p.name: p.asnumpy() for p in net.get_parameters()}
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert type(net) is Net
    assert not net.training
    assert np.array_equal(net(image()).asnumpy(), output)


def test_the_difference_of_two_levels() -> None:
    diff = ampdebug.audit(Net(), image(), level="O2").diff(ampdebug.audit(Net(), image(), level="O3"))
    assert {c.path for c in diff.cells} == {"bn", "ln"}
    assert "batchnorm float32 → float16" in str(diff)


def test_a_workload_is_taken() -> None:
    workload = ampdebug.Workload(
        network=Partly, data=[(rows(), Tensor([0, 1, 2, 3], ms.int32))], loss=nn.CrossEntropyLoss()
    )
    report = ampdebug.audit(workload, level="O3")
    assert report.name == "Partly"
    assert any(row.path.startswith("(loss)") for row in report.operators)


def test_a_level_that_mindspore_cannot_apply_is_an_answer() -> None:
    class Inside(nn.Cell):  # O1's rewriting looks classes up in their module and does not find this one
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Dense(6, 6)

        def construct(self, x: Any) -> Any:
            return self.fc(x)

    class Outside(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.inside = Inside()

        def construct(self, x: Any) -> Any:
            return self.inside(x)

    with pytest.raises(ampdebug.AmpdebugError, match="MindSpore cannot convert Outside to level O1: NameError"):
        ampdebug.audit(Outside(), rows(), level="O1")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"level": "O4"}, "level='O4': must be one of 'O0'"), ({"mode": "jit"}, "mode='jit': must be one of 'pynative'")],
)
def test_wrong_arguments(wrong: Any, message: str) -> None:
    with pytest.raises(ampdebug.ArgumentError, match=message):
        ampdebug.audit(Partly(), rows(), **wrong)
    with pytest.raises(ampdebug.ArgumentError, match="no inputs"):
        ampdebug.audit(Partly())


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "audited_net.py").write_text(
        textwrap.dedent("""
            import numpy as np
            from mindspore import Tensor, nn

            class Net(nn.Cell):
                def __init__(self):
                    super().__init__()
                    self.fc = nn.Dense(6, 6)
                    self.out = nn.Dense(6, 2)
                def construct(self, x):
                    return self.out(self.fc(x))

            class Wide(Net):
                def construct(self, x):
                    return super().construct(x) * 2

            def make():
                return Net(), (Tensor(np.ones((2, 6), np.float32)),)

            def make_wide():
                return Wide(), (Tensor(np.ones((2, 6), np.float32)),)
        """)
    )
    assert main(["audit", "audited_net.py:make", "--level", "O2", "--json", "--out", "run"]) == 0
    data = json.loads(capfd.readouterr().out)
    assert data["level"] == "O2"
    assert data["against"] is None
    with ampdebug.open_run("run") as run:
        (stored,) = run.results("audit")
    assert stored["operators"] == data["operators"]
    assert main(["audit", "audited_net.py:make", "--against", "O0"]) == 0
    assert "From Net at O0 to Net at O2: 2 cells differ" in capfd.readouterr().out
    assert main(["audit", "audited_net.py:make_wide", "--against", "audited_net.py:make"]) == 0
    assert "From Net at O2 to Wide at O2: 1 cell differs" in capfd.readouterr().out
    assert main(["audit", "audited_net.py:make", "--cells", "f*"]) == 0
    assert "MatMul" in capfd.readouterr().out
    assert main(["audit", "audited_net.py:make", "--against", "O9"]) == 2
    assert "must be a level (O0, O1, O2, O3, auto) or MODULE:FACTORY" in capfd.readouterr().err
    assert main(["audit", "audited_net.py:make", "--against", "O0", "--cells", "f*"]) == 2
    assert main(["audit", "audited_net.py:make", "--graph"]) == 0
    assert "Audit of Net at O2 (graph): no finding." in capfd.readouterr().out


def test_auto_holds_inside_the_network_only() -> None:
    """An exponential is on auto's list for float32; in the loss no list is asked."""

    class Exponential(nn.Cell):
        def construct(self, out: Any, label: Any = None) -> Any:
            return ops.exp(out.astype(ms.float16)).mean()

    def exp_of(report: ampdebug.AuditReport) -> Any:
        return next(row for row in report.operators if row.kind == "exp")

    inside = exp_of(ampdebug.audit(Exponential(), rows(), level="auto"))
    assert (inside.dtype, inside.asked_by) == ("float32", "level list")
    labels = Tensor([0, 1, 2, 3], ms.int32)
    outside = exp_of(ampdebug.audit(Partly(), rows(), labels, level="auto", loss_fn=Exponential()))
    assert (outside.dtype, outside.asked_by) == ("float16", "inputs")
