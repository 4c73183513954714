"""Faults that can be planted in a network, each beside the same operators with explicit casts, written by hand.

A fault is a cell that takes the place of one of the network's own and runs it, with a few operators behind it or, where
that one is a normalisation, before it. In float32 they change nothing that matters; in float16 they lose what they are
given. ``culprits`` are the operators of which each one is needed in float32, and which together are enough.

``write_by_hand`` puts explicit casts in the place of the plain operators, so that "needed" and "enough" can be found
out without the engine that is to find them. The rule of the casts is the one of docs/bisect.md: a value stays unrounded
between two operators if both are kept in float32.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore._c_expression import MixedPrecisionType
from mindspore.graph.api import _pynative_executor

Function = Callable[..., Any]


class Value(NamedTuple):
    """A value on its way: ``exact`` if the operator that made it runs in float32."""

    tensor: Tensor
    exact: bool


class Steps:
    """Runs operators one after the other with explicit casts.

    Args:
        kept: Which of them run in float32, by number.
    """

    def __init__(self, kept: Collection[int]) -> None:
        self._kept, self._number = kept, -1

    def __call__(self, function: Function, *values: Value) -> Value:
        """The next operator."""
        self._number += 1
        kept = self._number in self._kept
        return Value(function(*(_between(value, kept) for value in values)), kept)


def _between(value: Value, consumer_exact: bool) -> Tensor:
    tensor = value.tensor
    if not (value.exact and consumer_exact):
        tensor = ops.cast(tensor, mstype.float16)
    return ops.cast(tensor, mstype.float32) if consumer_exact else tensor


class Fault(nn.Cell):
    """See the module; subclasses hold ``construct`` as a user writes it and ``steps`` with the casts."""

    kind = ""
    culprits: tuple[str, ...] = ()
    before_norm = False

    def __init__(self, inner: nn.Cell) -> None:
        super().__init__()
        self.inner = inner

    def steps(self, step: Steps, x: Value) -> Value:
        """The operators of ``construct``, those of the network left out."""
        raise NotImplementedError


def write_by_hand(fault: Fault, kept: Collection[int], *, level: bool) -> None:
    """Replaces a fault's ``construct``, in a network that is already under its level or in float32.

    Args:
        fault: The cell.
        kept: Numbers of the culprits that run in float32.
        level: The network around is under O2 or O3; else it is in float32. A normalisation behind the fault is in
            float32 in both (at O3 it is not, and faults before one are planted at O2 only).
    """

    def construct(self: Fault, x: Tensor) -> Tensor:
        # The implicit casts of the level would undo the explicit ones.
        _pynative_executor.set_mixed_precision_type(MixedPrecisionType.NOTSET)
        try:
            if self.before_norm:
                return self.inner(_between(self.steps(Steps(kept), Value(x, not level)), True))
            x = self.inner(x)
            return _between(self.steps(Steps(kept), Value(x, not level)), not level)
        finally:
            _pynative_executor.set_mixed_precision_type(MixedPrecisionType.NOTSET, False)

    fault.construct = types.MethodType(construct, fault)


# --- one culprit: what is before a normalisation, which O2 leaves in float32 and which takes scale and offset away ----


class ScaledUpBeforeNorm(Fault):
    kind, culprits, before_norm = "overflow", ("Tensor.__mul__",), True

    def construct(self, x: Tensor) -> Tensor:
        return self.inner(x * 300000.0)

    def steps(self, step: Steps, x: Value) -> Value:
        return step(lambda a: a * 300000.0, x)


class ShiftedBeforeNorm(Fault):
    kind, culprits, before_norm = "rounding", ("Tensor.__add__",), True

    def construct(self, x: Tensor) -> Tensor:
        return self.inner(x + 3000.0)

    def steps(self, step: Steps, x: Value) -> Value:
        return step(lambda a: a + 3000.0, x)


class ScaledDownBeforeNorm(Fault):
    """The normalisation's epsilon is changed to one that suits so small numbers."""

    kind, culprits, before_norm = "flush", ("Tensor.__mul__",), True

    def __init__(self, inner: nn.Cell) -> None:
        super().__init__(inner)
        if isinstance(inner, nn.LayerNorm):
            self.inner = nn.LayerNorm(inner.normalized_shape, epsilon=1e-20)
        else:
            self.inner = type(inner)(inner.num_features, eps=1e-20)

    def construct(self, x: Tensor) -> Tensor:
        return self.inner(x * 1e-8)

    def steps(self, step: Steps, x: Value) -> Value:
        return step(lambda a: a * 1e-8, x)


# --- two: neither alone helps -----------------------------------------------------------------------------------------


class ScaledUpAndDown(Fault):
    kind, culprits = "overflow", ("Tensor.__mul__", "Tensor.__truediv__")

    def construct(self, x: Tensor) -> Tensor:
        y = self.inner(x) * 60000.0
        return y / 60000.0

    def steps(self, step: Steps, x: Value) -> Value:
        return step(lambda a: a / 60000.0, step(lambda a: a * 60000.0, x))


class LogOfLargeExp(Fault):
    kind, culprits = "overflow", ("Exp", "Log")

    def construct(self, x: Tensor) -> Tensor:
        y = ops.exp(self.inner(x) + 12.0)
        return ops.log(y) - 12.0

    def steps(self, step: Steps, x: Value) -> Value:
        # The shifts are no culprits: 0.004 is all that is rounded off there.
        shifted = Value(x.tensor + 12.0, x.exact)
        y = step(ops.log, step(ops.exp, shifted))
        return Value(_between(y, x.exact) - 12.0, x.exact)


class ScaledDownAndUp(Fault):
    kind, culprits = "flush", ("Tensor.__mul__", "Tensor.__truediv__")

    def construct(self, x: Tensor) -> Tensor:
        y = self.inner(x) * 1e-9
        return y / 1e-9

    def steps(self, step: Steps, x: Value) -> Value:
        return step(lambda a: a / 1e-9, step(lambda a: a * 1e-9, x))


class LogOfSmallExp(Fault):
    kind, culprits = "flush", ("Exp", "Log")

    def construct(self, x: Tensor) -> Tensor:
        y = ops.exp(self.inner(x) - 24.0)
        return ops.log(y) + 24.0

    def steps(self, step: Steps, x: Value) -> Value:
        shifted = Value(x.tensor - 24.0, x.exact)
        y = step(ops.log, step(ops.exp, shifted))
        return Value(_between(y, x.exact) + 24.0, x.exact)


class ThereAndBack(Fault):
    kind, culprits = "rounding", ("Tensor.__add__", "Tensor.__sub__")

    def construct(self, x: Tensor) -> Tensor:
        y = self.inner(x) + 4000.0
        return y - 4000.0

    def steps(self, step: Steps, x: Value) -> Value:
        return step(lambda a: a - 4000.0, step(lambda a: a + 4000.0, x))


class LogNearOne(Fault):
    kind, culprits = "rounding", ("Tensor.__add__", "Log")

    def construct(self, x: Tensor) -> Tensor:
        y = 0.001 * self.inner(x)
        return ops.log(y + 1.0) * 1000.0

    def steps(self, step: Steps, x: Value) -> Value:
        small = Value(0.001 * x.tensor, x.exact)
        y = step(ops.log, step(lambda a: a + 1.0, small))
        return Value(_between(y, x.exact) * 1000.0, x.exact)


# --- three --------------------------------------------------------------------------------------------------------


class ShiftedSoftmax(Fault):
    """A softmax by hand; the shift changes nothing in it but its range."""

    kind, culprits = "overflow", ("Exp", "Tensor.sum", "Tensor.__truediv__")

    def construct(self, x: Tensor) -> Tensor:
        e = ops.exp(self.inner(x) + 12.0)
        return e / e.sum(-1, keepdims=True)

    def steps(self, step: Steps, x: Value) -> Value:
        e = step(ops.exp, Value(x.tensor + 12.0, x.exact))
        return step(lambda a, b: a / b, e, step(lambda a: a.sum(-1, keepdims=True), e))


class SmallRootMeanSquare(Fault):
    """An RMS normalisation by hand, of numbers whose squares are below float16's smallest."""

    kind, culprits = "flush", ("Square", "Tensor.mean", "Rsqrt")

    def construct(self, x: Tensor) -> Tensor:
        x = self.inner(x) * 0.0001
        m = ops.square(x).mean(-1, keep_dims=True)
        return x * ops.rsqrt(m)

    def steps(self, step: Steps, x: Value) -> Value:
        small = Value(x.tensor * 0.0001, x.exact)
        m = step(lambda a: a.mean(-1, keep_dims=True), step(ops.square, small))
        r = step(ops.rsqrt, m)
        return Value(small.tensor * _between(r, x.exact), x.exact)


class ThereAndBackInTwoSteps(Fault):
    kind, culprits = "rounding", ("Tensor.__add__", "Tensor.__sub__", "Tensor.__sub__")

    def construct(self, x: Tensor) -> Tensor:
        y = self.inner(x) + 6000.0
        y = y - 3000.0
        return y - 3000.0

    def steps(self, step: Steps, x: Value) -> Value:
        y = step(lambda a: a + 6000.0, x)
        return step(lambda a: a - 3000.0, step(lambda a: a - 3000.0, y))


SINGLES = (ScaledUpBeforeNorm, ScaledDownBeforeNorm, ShiftedBeforeNorm)
PAIRS = (ScaledUpAndDown, LogOfLargeExp, ScaledDownAndUp, LogOfSmallExp, ThereAndBack, LogNearOne)
TRIPLES = (ShiftedSoftmax, SmallRootMeanSquare, ThereAndBackInTwoSteps)
