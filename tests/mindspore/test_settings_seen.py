"""Mistakes seen before the first step: lost pins (from the record and from the source), an epsilon that float16 lacks.

The networks stand in a module written by the test, as a user's do, since their source is read.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops
from mindspore._c_expression import MixedPrecisionType
from mindspore.graph.api import _pynative_executor

import ampdebug
from ampdebug.hooks._cells import places
from ampdebug.hooks._lints import lint
from ampdebug.hooks._pins import lost_pins
from ampdebug.hooks._preflight_guard import cleared_after_failure

pytestmark = pytest.mark.own_process

SOURCE = """
import mindspore as ms
from mindspore import amp, nn

F32 = ms.float32
convert = amp.auto_mixed_precision


class Norm(nn.Cell):
    def construct(self, x):
        return x - x.mean(-1, keep_dims=True)


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.ln, self.head = nn.Dense(8, 8), Norm(), nn.LayerNorm((8,)), nn.Dense(8, 2)

    def construct(self, x):
        return self.head(self.ln(self.norm(self.fc(x))))


class Inside(Net):
    def __init__(self):
        super().__init__()
        self.norm = Norm().to_float(ms.float32)


class Kinds(Net):
    pass


class Free(Net):
    pass


class Alone(Net):
    pass


def elsewhere(net, level="O2"):
    return convert(net, level)


def pinned_before(level="O2"):
    net = Net()
    net.norm.to_float(F32)
    net.head.to_float(ms.float32)
    return convert(net, level)


def pinned_after():
    net = Net()
    result = amp.auto_mixed_precision(net, "O2")
    net.norm.to_float(F32)
    net.head.to_float(F32)
    return result


def pinned_inside():
    return amp.auto_mixed_precision(Inside(), "O3")


def pinned_by_kind():
    net = Kinds()
    for _, cell in net.cells_and_names():
        if isinstance(cell, (nn.LayerNorm, nn.BatchNorm2d)):
            cell.to_float(F32)
    return amp.auto_mixed_precision(net, "O3")


def sometimes():
    net = Free()
    net.norm.to_float(F32)
    return amp.auto_mixed_precision(net, "O3")


def alone():
    return elsewhere(Alone())


def never():
    return amp.auto_mixed_precision(Free(), "O3")
"""


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    path = tmp_path_factory.mktemp("user") / "user_nets.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("user_nets", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["user_nets"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        ("pinned_before", {"head": "record", "norm": "source"}),
        ("pinned_after", {}),
        ("pinned_inside", {"norm": "source"}),
        ("pinned_by_kind", {"ln": "source"}),
        ("alone", {}),  # other functions pin other networks
        ("never", {}),  # another function that makes this network pins it, so the source settles nothing
    ],
)
def test_pins_that_were_lost(nets: ModuleType, make: str, expected: dict[str, str]) -> None:
    assert lost_pins(places(getattr(nets, make)())) == expected


def test_a_lost_pin_comes_first_in_check(nets: ModuleType) -> None:
    x = Tensor(np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32))
    found = ampdebug.check(nets.pinned_inside(), x)
    assert found.findings[0].slug == "to-float-pin-lost-by-later-amp-call", str(found)
    assert ampdebug.check(nets.pinned_after(), x).ok


def half(net: nn.Cell) -> nn.Cell:
    net.to_float(ms.float16)
    for parameter in net.get_parameters():
        parameter.set_dtype(ms.float16)
    return net


@pytest.mark.parametrize(
    ("dtype", "optimizer", "expected"),
    [
        ("float16", lambda p: nn.Adam(p, 1e-3), True),
        ("float16", lambda p: nn.Adam(p, 1e-3, eps=1e-4), False),
        ("float16", lambda p: nn.SGD(p, 1e-3), False),
        ("float32", lambda p: nn.Adam(p, 1e-3), False),
    ],
)
def test_an_epsilon_that_is_zero(dtype: str, optimizer: Any, expected: bool) -> None:
    net = half(nn.Dense(4, 2)) if dtype == "float16" else nn.Dense(4, 2)
    events = list(lint(None, optimizer(net.trainable_params()), places(net), "O0"))
    found = [event for event in events if event.kind == "optimizer-epsilon-is-zero"]
    assert bool(found) is expected
    if expected:
        assert found[0].data["count"] == 2
        assert found[0].data["epsilon"] == pytest.approx(1e-8)


def test_the_precision_stack_after_a_failure_in_a_cell() -> None:
    class Failing(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            raise RuntimeError("on purpose")

    net = amp.auto_mixed_precision(nn.SequentialCell(nn.Dense(4, 4), Failing()), "O2")
    x = Tensor(np.ones((4, 4), np.float32))
    with pytest.raises(RuntimeError, match="on purpose"), cleared_after_failure():
        ms.value_and_grad(net, None, net.trainable_params())(x)
    # One entry too many taken off would swap what is pushed and what is popped from here on, or crash.
    for _ in range(5):
        assert ops.matmul(x, x).dtype == ms.float32
        _pynative_executor.set_mixed_precision_type(MixedPrecisionType.FP16, True)
        assert ops.matmul(x, x).dtype == ms.float16
        _pynative_executor.set_mixed_precision_type(MixedPrecisionType.NOTSET, False)


def test_a_label_out_of_range_that_ends_a_watched_loop_is_told(tmp_path: Path) -> None:
    net = nn.Dense(4, 3)
    x, y = Tensor(np.ones((2, 4), np.float32)), Tensor(np.array([0, 3], np.int32))
    gradient = ms.value_and_grad(lambda a, b: ops.cross_entropy(net(a), b), None, net.trainable_params())
    message = "For 'NLLLoss', the label value must be in [0, 3), but got: 3"

    def loop() -> None:
        with ampdebug.watch(net, out=tmp_path / "run") as run:
            loss, _ = gradient(x, ops.minimum(y, 2))
            run.step(loss=loss)
            raise RuntimeError(message)  # which operator raises, and whether at all, depends on the device

    with pytest.raises(RuntimeError):
        loop()
    found = ampdebug.diagnose(tmp_path / "run")
    assert [finding.slug for finding in found.findings] == ["label-ge-num-classes"]
    assert message in found.findings[0].evidence[0].text
