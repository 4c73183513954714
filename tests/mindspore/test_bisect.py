"""Bisection end to end on two networks with a known fault, trained on scikit-learn's handwritten digits.

Both are trained in float32 first; the level is then judged by the accuracy of the trained network, so that one probe is
one forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Constant

from ampdebug._bisect_result import BisectResult
from ampdebug._errors import ArgumentError, FormatError, NoObservationsError
from ampdebug.hooks._bisection import bisect

datasets = pytest.importorskip(
    "sklearn.datasets", reason="the digits come with scikit-learn: pip install 'ampdebug[demo]'"
)

pytestmark = pytest.mark.own_process


@pytest.fixture(autouse=True)
def pynative() -> None:
    ms.set_context(mode=ms.PYNATIVE_MODE)


class OffsetPooling(nn.Cell):
    """A large offset goes through a reshape into a mean: float16 keeps no digit of what varies."""

    def __init__(self) -> None:
        super().__init__()
        offset = Constant(16384.0)
        self.conv = nn.Conv2d(1, 16, 3, stride=2, pad_mode="same")
        self.bn = nn.BatchNorm2d(16, beta_init=offset)
        self.pool = ops.ReduceMean()
        self.norm = nn.BatchNorm1d(64, moving_mean_init=offset, momentum=0.7)
        self.fc = nn.Dense(64, 10)

    def construct(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x))
        x = ops.reshape(x, (x.shape[0], 64, 4))
        x = self.pool(x, 2)
        return self.fc(self.norm(x))


class HandSoftmax(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        e = ops.exp(x)
        return e / e.sum(-1, keepdims=True)


class Attention(nn.Cell):
    """A hand-written softmax that no list knows, on scores that grow with training."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        rng = np.random.default_rng(1)
        self.inlet = nn.Dense(8, width)
        self.position = Parameter(Tensor(rng.normal(size=(1, 8, width)).astype(np.float32) * 0.5), name="position")
        self.query, self.key, self.value = nn.Dense(width, width), nn.Dense(width, width), nn.Dense(width, width)
        self.softmax = HandSoftmax()
        self.norm = nn.LayerNorm((width,))
        self.fc = nn.Dense(8 * width, 10)

    def construct(self, x: Tensor) -> Tensor:
        x = self.inlet(x.reshape(x.shape[0], 8, 8)) + self.position
        scores = ops.matmul(self.query(x), self.key(x).swapaxes(-1, -2)) * 4.0
        x = self.norm(x + ops.matmul(self.softmax(scores), self.value(x)))
        return self.fc(x.reshape(x.shape[0], -1))


class OffsetBranch(OffsetPooling):
    """The same without its last layer."""

    def construct(self, x: Tensor) -> Tensor:
        x = ops.reshape(self.bn(self.conv(x)), (x.shape[0], 64, 4))
        return self.norm(self.pool(x, 2))


class TwoBranches(nn.Cell):
    """Two ways to the same answer, each of which float16 breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = OffsetBranch(), OffsetBranch()

    def construct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


@functools.cache
def digits() -> tuple[Any, Any]:
    images, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    return (images[order] / 16).astype(np.float32).reshape(-1, 1, 8, 8), labels[order].astype(np.int32)


@functools.cache
def trained(kind: type[nn.Cell], steps: int = 50) -> nn.Cell:
    images, labels = digits()
    ms.set_seed(0)
    net = kind()
    net.set_train()
    loss_fn, optimizer = nn.CrossEntropyLoss(), nn.Adam(net.trainable_params(), 1e-2)
    step = ms.value_and_grad(lambda x, y: loss_fn(net(x), y), None, net.trainable_params())
    rng = np.random.default_rng(0)
    for _ in range(steps):
        chosen = rng.integers(0, 1400, 64)
        _, gradients = step(Tensor(images[chosen]), Tensor(labels[chosen]))
        optimizer(gradients)
    net.set_train(False)
    return net


def accuracy(net: nn.Cell) -> float:
    images, labels = digits()
    logits = net(Tensor(images[1400:1600])).asnumpy().astype(np.float32)
    return float((logits.argmax(1) == labels[1400:1600]).mean()) if np.isfinite(logits).all() else float("nan")


def names(result: BisectResult) -> set[tuple[str, str]]:
    return {(culprit.unit.path, culprit.unit.operator) for culprit in result.culprits}


SOFTMAX = {("softmax", "Exp"), ("softmax", "sum"), ("softmax", "/")}


@pytest.mark.parametrize(
    ("kind", "level", "culprits"),
    [
        (OffsetPooling, "O2", {("", "Reshape → ReduceMean")}),
        (OffsetPooling, "O3", {("bn", "BatchNorm"), ("", "Reshape → ReduceMean"), ("norm", "Reshape → BatchNorm")}),
        (Attention, "O2", SOFTMAX),
        (Attention, "O3", SOFTMAX),
    ],
)
def test_the_planted_fault_is_found(kind: type[nn.Cell], level: str, culprits: set[tuple[str, str]]) -> None:
    net = trained(kind)
    before = [parameter.asnumpy().copy() for parameter in net.get_parameters()]
    result = bisect(net, accuracy, level=level)
    assert result.status == "found"
    assert names(result) == culprits
    assert all(culprit.needed == "verified" for culprit in result.culprits)
    assert max(culprit.rank for culprit in result.culprits) <= len(culprits) + 1, "the ranking puts them first"
    assert result.probes <= 13
    assert {check.name: check.passed for check in result.checks} == {
        "deterministic": True,
        "recording changes nothing": True,
        "protecting nothing changes nothing": True,
        "protecting everything gives float32": True,
        "every operator is seen": True,
    }
    for parameter, value in zip(net.get_parameters(), before, strict=True):
        np.testing.assert_array_equal(parameter.asnumpy(), value)
    assert accuracy(net) == result.reference


def test_each_culprit_has_its_source_line_and_a_reason() -> None:
    result = bisect(trained(Attention), accuracy, level="O3")
    by_operator = {culprit.unit.operator: culprit for culprit in result.culprits}
    exp, division = by_operator["Exp"].unit, by_operator["/"].unit
    assert exp.source == "e = ops.exp(x)"
    assert division.source == "return e / e.sum(-1, keepdims=True)"
    assert exp.file == __file__
    assert exp.line.startswith("test_bisect.py:")
    assert by_operator["Exp"].score is not None
    assert by_operator["Exp"].score.why.startswith("overflow")
    assert "e = ops.exp(x)" in str(result)


def test_whole_cells() -> None:
    result = bisect(trained(Attention), accuracy, level="O3", unit="cell")
    assert names(result) == {("softmax", "HandSoftmax")}
    assert {site.operator for site in result.sites} == {"Exp", "Tensor.sum", "Tensor.__truediv__"}
    assert result.probes <= 3


def test_bfloat16_is_emulated_and_says_so() -> None:
    result = bisect(trained(OffsetPooling), accuracy, level="O3", dtype="bfloat16")
    assert result.mode == "emulated"
    assert ("", "Reshape → ReduceMean") in names(result)
    assert bisect(trained(Attention), accuracy, level="O3", dtype="bfloat16").status == "nothing-to-find"


def test_under_o1_lines_are_those_of_the_user() -> None:
    def gap(net: nn.Cell) -> float:
        exact = trained(Attention)(Tensor(digits()[0][:40])).asnumpy()
        return float(np.abs(net(Tensor(digits()[0][:40])).asnumpy() - exact).max())

    result = bisect(trained(Attention), gap, level="O1", tolerance=1e-4, better="lower", max_probes=9)
    assert result.sufficient
    assert any(culprit.unit.line.startswith("test_bisect.py:") for culprit in result.culprits)
    assert all(culprit.unit.source for culprit in result.culprits)


def test_nothing_wrong() -> None:
    assert bisect(trained(Attention), accuracy, level="auto", tolerance=1.0).status in ("nothing-to-find", "found")
    result = bisect(trained(Attention), lambda net: bool(net(Tensor(digits()[0][:8])).shape == (8, 10)), level="O3")
    assert result.status == "nothing-to-find"


def test_either_of_two_is_enough_and_one_of_them_is_named() -> None:
    """Good is that one of the branches is right, so that the smallest set is one pooling, whichever."""
    ms.set_seed(0)
    net = TwoBranches()
    net.set_train(False)
    x = Tensor(digits()[0][:64])
    exact = [out.asnumpy().astype(np.float64) for out in net(x)]

    def errors(net: nn.Cell) -> list[float]:
        given = [out.asnumpy().astype(np.float64) for out in net(x)]
        return [float(np.linalg.norm(g - e) / np.linalg.norm(e)) for g, e in zip(given, exact, strict=True)]

    result = bisect(net, lambda net: min(errors(net)), level="O2", threshold=0.1, better="lower")
    assert result.low > 0.3
    assert (result.status, len(result.culprits)) == ("found", 1)
    assert names(result) <= {("left", "Reshape → ReduceMean"), ("right", "Reshape → ReduceMean")}
    assert result.culprits[0].needed == "verified"
    both = bisect(net, lambda net: max(errors(net)), level="O2", threshold=0.1, better="lower")
    assert names(both) == {("left", "Reshape → ReduceMean"), ("right", "Reshape → ReduceMean")}


def test_precision_is_innocent_of_wrong_labels() -> None:
    def shifted(net: nn.Cell) -> float:
        images, labels = digits()
        logits = net(Tensor(images[1400:1600])).asnumpy()
        return float((logits.argmax(1) == (labels[1400:1600] + 1) % 10).mean())

    result = bisect(trained(Attention), shifted, level="O3", threshold=0.8)
    assert result.status == "precision-innocent"
    assert result.culprits == ()


def test_a_search_that_trains_in_every_probe() -> None:
    images, labels = digits()

    def train(net: nn.Cell) -> float:
        net.set_train()
        loss_fn, optimizer = nn.CrossEntropyLoss(), nn.SGD(net.trainable_params(), 0.05)
        step = ms.value_and_grad(lambda x, y: loss_fn(net(x).astype(ms.float32), y), None, net.trainable_params())
        for i in range(3):
            loss, gradients = step(Tensor(images[i * 16 : i * 16 + 16]), Tensor(labels[i * 16 : i * 16 + 16]))
            optimizer(gradients)
        return float(loss.asnumpy())

    net = trained(Attention)
    result = bisect(net, train, level="O3", better="lower", tolerance=0.5)
    assert result.sufficient
    assert np.isnan(result.low)
    assert {("softmax", "Exp")} < names(result) <= SOFTMAX
    again = bisect(net, train, level="O3", better="lower", tolerance=0.5, max_probes=0)
    assert again.reference == result.reference, "every measurement starts from the same state"


def test_a_journal_resumes_and_knows_its_data(tmp_path: Path) -> None:
    path, net = tmp_path / "journal.jsonl", trained(Attention)
    cut = bisect(net, accuracy, level="O3", journal=path, max_probes=2)
    assert (cut.status, cut.probes) == ("max-probes", 2)
    whole = bisect(net, accuracy, level="O3", journal=path)
    assert (whole.reused, names(whole)) == (2, SOFTMAX)
    with pytest.raises(FormatError, match="belongs to another search"):
        bisect(trained(Attention, 20), accuracy, level="O3", journal=path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": "O4"}, "level='O4': must be one of 'O1', 'O2', 'O3', 'auto'"),
        ({"dtype": "float8"}, "dtype='float8': must be 'float16' or 'bfloat16'"),
        ({"unit": "layer"}, "unit='layer': must be 'op' or 'cell'"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        bisect(HandSoftmax(), accuracy, **arguments)


@pytest.mark.parametrize("value", ["good", None, Tensor(np.ones(3, np.float32))])
def test_evaluate_must_return_a_number(value: Any) -> None:
    def evaluate(net: nn.Cell) -> Any:
        net(Tensor(np.ones((1, 4), np.float32)))
        return value

    with pytest.raises(ArgumentError, match=r"evaluate returned a .*must return a number or a bool"):
        bisect(HandSoftmax(), evaluate)


def test_evaluate_must_call_its_network() -> None:
    other = HandSoftmax()
    with pytest.raises(NoObservationsError, match="did not call the network it was given"):
        bisect(HandSoftmax(), lambda net: float(other(Tensor(np.ones((1, 4), np.float32))).sum().asnumpy()))


def test_graph_mode_is_refused_by_name() -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    with pytest.raises(NoObservationsError, match="GRAPH_MODE"):
        bisect(HandSoftmax(), accuracy)


def test_an_exception_in_evaluate_leaves_nothing_behind() -> None:
    class Outer(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Failing()

        def construct(self, x: Tensor) -> Tensor:
            return self.inner(x)

    class Failing(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            if ops.exp(x).dtype == ms.float16:
                raise ZeroDivisionError
            return ops.exp(x)

    call: Callable[..., Any] = nn.Cell.__call__
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            bisect(Outer(), lambda net: float(net(Tensor(np.ones((2, 3), np.float32))).sum().asnumpy()), level="O3")
        # A leaked entry of the cells that raised would make this float16.
        assert ops.exp(Tensor(np.ones((1, 4), np.float32))).dtype == ms.float32
        assert HandSoftmax()(Tensor(np.ones((1, 4), np.float32))).dtype == ms.float32
    assert nn.Cell.__call__ is call
