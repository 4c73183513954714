"""What one instrumented training step saw, as plain values: the facts that the rules over operators read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from ampdebug._formats import round_through
from ampdebug._sites import _plain
from ampdebug._tensor_stats import TensorStats

LOW = ("float16", "bfloat16")
FLOAT16_MAX = 65504.0
FLOAT16_OVERFLOWS = 65520.0
"""From this magnitude on round-to-nearest gives inf in float16; below it, the largest number is correct rounding."""


@dataclass(frozen=True)
class Operand:
    """What went into an operator at one place.

    Attributes:
        dtype: As it was handed in, before any implicit cast; ``"number"`` for a Python number.
        shape: ``()`` for a number.
        stats: None for numbers and for integer tensors.
        value: The number, or the element of a one-element tensor.
        producer: Index of the operator that made this tensor; None for what came from outside.
        source: ``"input 0"``, a parameter's name, ``"constant"``; ``""`` where an operator made it.
        low, high: Smallest and largest element of an integer tensor.
        masked_rows: Rows along the reduced axis without a finite entry and with none but -inf; 0 where nobody asked.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    stats: TensorStats | None = None
    value: float | None = None
    producer: int | None = None
    source: str = ""
    low: int | None = None
    high: int | None = None
    masked_rows: int = 0

    @property
    def is_number(self) -> bool:
        """It was written into the source as a number."""
        return self.dtype == "number"

    @property
    def nonfinite(self) -> int:
        """Elements that are NaN or infinite as handed in."""
        if self.stats is not None:
            return self.stats.nonfinite
        return int(self.value is not None and self.value - self.value != 0)

    def in_dtype(self, dtype: str) -> float | None:
        """The single value after rounding to ``dtype``; None where there are several."""
        if self.value is None:
            return None
        return float(round_through([self.value], dtype)[0]) if dtype in LOW else self.value

    def overflows_in(self, dtype: str) -> bool:
        """Finite as handed in, and infinite in float16, which the operator computes in."""
        if dtype != "float16" or self.nonfinite:
            return False
        if self.stats is not None:
            return self.stats.absmax >= FLOAT16_OVERFLOWS
        return self.value is not None and abs(self.value) >= FLOAT16_OVERFLOWS


@dataclass(frozen=True)
class Result:
    """What came out of an operator at one place.

    Attributes:
        dtype: As it came out.
        shape: Its shape.
        stats: None for other than floats.
        reference: The same operator on the same inputs in float32; None where it was not asked for or not possible.
        error: Largest deviation from ``reference`` in units of the reference's root mean square.
        gradient: Of the loss with respect to it; None where none arrived.
    """

    dtype: str
    shape: tuple[int, ...]
    stats: TensorStats | None
    reference: TensorStats | None = None
    error: float | None = None
    gradient: TensorStats | None = None


@dataclass(frozen=True)
class Operator:
    """One operator call.

    Attributes:
        index: Its number in order of execution.
        name: As called: ``"Exp"``, ``"Tensor.__mul__"``, ``"mint.sum"``.
        path: Path of the innermost cell; ``"(loss)"`` outside the network.
        cell_type: That cell's class.
        line: ``"net.py:33"`` or ``""``.
        text: The source line.
        operands: In order.
        results: In order.
        phase: ``"network"``, ``"loss"`` or ``"update"``.
        ignore_index: The label that a loss operator leaves out.
    """

    index: int
    name: str
    path: str
    cell_type: str
    line: str
    text: str
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]
    phase: str = "network"
    ignore_index: int | None = None

    @cached_property
    def kind(self) -> str:
        """The name without how it was called: ``"mul"`` for ``"Tensor.__rmul__"``."""
        plain = _plain(self.name)
        return _SYNONYMS.get(plain, plain)

    @cached_property
    def dtype(self) -> str:
        """What it computed in, by its first floating-point result; ``""`` where there is none."""
        return next((r.dtype for r in self.results if r.stats is not None), "")

    @property
    def tensors(self) -> Iterator[Operand]:
        """The floating-point tensors among the operands."""
        return (o for o in self.operands if o.stats is not None)

    @property
    def out(self) -> TensorStats | None:
        """The first floating-point result."""
        return next((r.stats for r in self.results if r.stats is not None), None)

    @property
    def reference(self) -> TensorStats | None:
        """What float32 makes of the same inputs."""
        return next((r.reference for r in self.results if r.stats is not None), None)

    @property
    def place(self) -> str:
        """Cell path, operator and source line, for a reader."""
        where = self.path or "the network's own code"
        return f"{self.kind} in {where}" + (f" at {self.line}" if self.line else "")


_SYNONYMS = {
    **dict.fromkeys(("rmul", "imul", "muls", "multiply", "mul"), "mul"),
    **dict.fromkeys(("radd", "iadd", "adds", "addext", "addscalar", "addn", "tensoradd"), "add"),
    **dict.fromkeys(("rsub", "isub", "subext", "subtract", "subscalar"), "sub"),
    **dict.fromkeys(("truediv", "rtruediv", "itruediv", "realdiv", "divmod", "divs", "divide", "divnonan"), "div"),
    **dict.fromkeys(("rpow", "powtensorscalar", "powscalartensor", "power"), "pow"),
    **dict.fromkeys(("matmulext", "batchmatmul", "batchmatmulext", "bmm", "mm", "rmatmul", "matmulv2"), "matmul"),
    **dict.fromkeys(("dense", "linear", "addmm", "baddbmm"), "dense"),
    **dict.fromkeys(("reducesum", "sumext", "nansum"), "sum"),
    **dict.fromkeys(("reducemean", "meanext"), "mean"),
    **dict.fromkeys(("reducemax", "amax", "argmaxwithvalue", "maxdim"), "max"),
    **dict.fromkeys(("rsqrt", "inplacersqrt"), "rsqrt"),
    **dict.fromkeys(("inv", "reciprocal"), "reciprocal"),
    **dict.fromkeys(("select", "selectv2", "where"), "where"),
    **dict.fromkeys(("clamp", "clampscalar", "clamptensor", "clip", "clipbyvalue", "hardtanh"), "clip"),
    **dict.fromkeys(("square", "squaresumall"), "square"),
    **dict.fromkeys(("neg", "negative"), "neg"),
    **dict.fromkeys(("batchnorm", "batchnormext", "syncbatchnorm"), "batchnorm"),
    **dict.fromkeys(("layernorm", "layernormext", "layernormv3"), "layernorm"),
}


@dataclass(frozen=True)
class Variable:
    """A parameter or buffer.

    Attributes:
        name: Its name.
        dtype: Its dtype.
        path: Path of its cell.
        trainable: It has a gradient.
        before, after: Around the step, the update included.
        gradient: None where there was none.
        exact_gradient: In the float32 run.
        flushed: Elements whose gradient is zero here and not in the float32 run.
        unchanged: Elements that the update left as they were although their gradient is not zero.
        nonzero: Elements whose gradient is not zero.
    """

    name: str
    dtype: str
    path: str
    trainable: bool
    before: TensorStats
    after: TensorStats
    gradient: TensorStats | None = None
    exact_gradient: TensorStats | None = None
    flushed: int = 0
    unchanged: int = 0
    nonzero: int = 0


@dataclass(frozen=True)
class NetworkInput:
    """One tensor that was handed to the network.

    Attributes:
        name: ``"input 0"``.
        stats: None for other than floats.
        samples: Indices along the first axis that hold something non-finite, at most eight.
    """

    name: str
    stats: TensorStats | None
    samples: tuple[int, ...] = ()


@dataclass(frozen=True)
class CellFacts:
    """What is known of one cell.

    Attributes:
        path: Its path.
        cell_type: Its class.
        pinned_then_lost: It was set to float32 by ``to_float`` and to 16 bits later.
        pin_in_source: That is not on the cell's own record but read in the source.
        asked: The dtype its flags ask for now.
        error: For normalisations: largest deviation of its output from the same cell on the same inputs in float32, in
            units of the root mean square.
        input_absmax: Largest input of a normalisation.
    """

    path: str
    cell_type: str
    pinned_then_lost: bool = False
    pin_in_source: bool = False
    asked: str | None = None
    error: float | None = None
    input_absmax: float | None = None


@dataclass(frozen=True)
class LabelFacts:
    """Class labels that went into the network or the loss.

    Attributes:
        name: ``"input 1"``, or the operator that got them.
        low, high: Smallest and largest label.
        classes: How many classes the scores have.
        ignore_index: The label that is left out.
        all_ignored: No label is left.
    """

    name: str
    low: int
    high: int
    classes: int
    ignore_index: int | None = None
    all_ignored: bool = False


@dataclass(frozen=True)
class OptimizerFacts:
    """What is known of the optimizer.

    Attributes:
        name: Its class.
        epsilon: The number that is added to the denominator; None where it has none.
    """

    name: str
    epsilon: float | None


@dataclass(frozen=True)
class Outcome:
    """What the step ended with.

    Attributes:
        outputs: Of the network.
        exact_outputs: Of the float32 run; empty where it could not be made.
        error: Largest deviation between the two in units of the float32 run's root mean square.
        loss, exact_loss: The scalar that was differentiated.
        real_loss: The loss is the user's own and not the mean that stands in for one.
        random: Random operators ran, so that the two runs need not agree.
    """

    outputs: tuple[TensorStats, ...] = ()
    exact_outputs: tuple[TensorStats, ...] = ()
    error: float | None = None
    loss: float | None = None
    exact_loss: float | None = None
    real_loss: bool = False
    random: bool = False


@dataclass(frozen=True)
class Step:
    """One instrumented step.

    Attributes:
        level: The AMP level, as ``"O2"``.
        operators: In order of execution.
        inputs: Of the network.
        variables: Parameters and buffers.
        cells: Of the network.
        labels: Seen on the way.
        outcome: What came out.
        optimizer: None where there was none.
        failure: The exception that ended the step, "" otherwise.
    """

    level: str
    operators: tuple[Operator, ...]
    inputs: tuple[NetworkInput, ...] = ()
    variables: tuple[Variable, ...] = ()
    cells: tuple[CellFacts, ...] = ()
    labels: tuple[LabelFacts, ...] = ()
    outcome: Outcome = field(default_factory=Outcome)
    optimizer: OptimizerFacts | None = None
    failure: str = ""
