"""How values went from operator to operator in one step: who made what, who took it, where it stopped being finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ampdebug._sites import is_cast, is_transparent
from ampdebug.rules._operator_records import LOW, Operand, Operator, Step

SOFTMAX = ("softmax", "logsoftmax", "softmaxext", "logsoftmaxext")
MATMUL = ("matmul", "dense")
REDUCTIONS = ("sum", "mean", "cumsum", "avgpool", "avgpool2d", "adaptiveavgpool2d", "adaptiveavgpool1d", "avgpool1d")
# They take -inf for "nothing here" and give a finite number.
_TAKES_MINUS_INF = (
    *SOFTMAX,
    *("exp", "sigmoid", "logsumexp", "max", "maximum", "argmax", "isfinite", "isinf", "isneginf", "where"),
    *("maskedfill", "topkext", "topk", "clip", "relu", "equal", "gt", "lt", "ge", "le"),
)


@dataclass(frozen=True)
class Birth:
    """The first non-finite values on one way through the network.

    Attributes:
        operator: Whose result holds them.
        origin: The operator in which finite operands first gave something non-finite; the same, unless NaN came of
            infinities.
        operand: What was non-finite when it came in from outside: a constant, a parameter.
    """

    operator: Operator
    origin: Operator
    operand: Operand | None = None


class Flow:
    """One step with its ways.

    Args:
        step: What was seen.
        number: Its number, for the findings.
    """

    def __init__(self, step: Step, number: int) -> None:
        self.step, self.number = step, number
        self.consumers: dict[int, list[Operator]] = {}
        for operator in step.operators:
            for producer in {o.producer for o in operator.operands if o.producer is not None}:
                self.consumers.setdefault(producer, []).append(operator)

    def producer(self, operand: Operand) -> Operator | None:
        """The operator that made an operand."""
        return None if operand.producer is None else self.step.operators[operand.producer]

    def after(self, operator: Operator, hops: int, through: Callable[[Operator], bool]) -> Iterator[Operator]:
        """What takes an operator's result, nearest first; goes on where ``through`` lets it."""
        seen, front = {operator.index}, [operator]
        for _ in range(hops):
            following = []
            for current in front:
                for consumer in self.consumers.get(current.index, ()):
                    if consumer.index not in seen:
                        seen.add(consumer.index)
                        yield consumer
                        if through(consumer):
                            following.append(consumer)
            front = following

    def before(self, operator: Operator, hops: int) -> Iterator[Operator]:
        """What made an operator's operands, nearest first."""
        seen, front = {operator.index}, [operator]
        for _ in range(hops):
            following = []
            for current in front:
                for operand in current.operands:
                    made = self.producer(operand)
                    if made is not None and made.index not in seen:
                        seen.add(made.index)
                        following.append(made)
                        yield made
            front = following

    def descends(self, operator: Operator, ancestors: set[int]) -> bool:
        """Whether any of these operators had a part in this one's operands."""
        seen: set[int] = set()
        front = [operator]
        while front:
            for operand in front.pop().operands:
                if operand.producer is None or operand.producer in seen:
                    continue
                if operand.producer in ancestors:
                    return True
                seen.add(operand.producer)
                front.append(self.step.operators[operand.producer])
        return False

    def made_from_input(self, operand: Operand) -> str | None:
        """The network input that an operand is, perhaps cast or reshaped."""
        for _ in range(12):
            if operand.source:
                return operand.source if operand.source.startswith("input") else None
            made = self.producer(operand)
            if made is None or not (is_cast(made.name) or is_transparent(made.name)) or not made.operands:
                return None
            operand = made.operands[0]
        return None

    # --- births -------------------------------------------------------------------------------------------------------

    @cached_property
    def births(self) -> tuple[Birth, ...]:
        """Of the forward pass, in order of execution."""
        found = []
        for operator in self.step.operators:
            out = operator.out
            if operator.phase == "update" or out is None or not out.nonfinite:
                continue
            given = [o for o in operator.operands if o.nonfinite]
            if not given:
                found.append(Birth(operator, operator))
            elif out.nan and not any(o.stats is not None and o.stats.nan for o in given):
                found.append(self._traced(operator))
        return tuple(found)

    def _traced(self, operator: Operator) -> Birth:
        current = operator
        for _ in range(len(self.step.operators)):
            bad = next((o for o in current.operands if o.nonfinite), None)
            if bad is None:
                return Birth(operator, current)
            made = self.producer(bad)
            if made is None:
                return Birth(operator, current, bad)
            current = made
        return Birth(operator, current)

    def spread(self, operator: Operator) -> list[Operator]:
        """The operators that the non-finite values of this one's result reach, and those that swallow them, last."""
        reached, swallowed = [operator], []
        seen = {operator.index}
        for current in reached:
            for consumer in self.consumers.get(current.index, ()):
                if consumer.index in seen:
                    continue
                seen.add(consumer.index)
                out = consumer.out
                if out is not None and out.nonfinite:
                    reached.append(consumer)
                else:
                    swallowed.append(consumer)
        return reached + swallowed

    def guarded(self, operator: Operator) -> bool:
        """What is non-finite there is put aside by a ``where`` that does not ask for it: meant, as far as it goes."""
        spread = self.spread(operator)
        ends = [r for r in spread if r.out is not None and not r.out.nonfinite]
        last = [r for r in spread if r.out is not None and r.out.nonfinite and not self.consumers.get(r.index)]
        return bool(ends) and not last and all(self._chooses(end) for end in ends)

    def _chooses(self, operator: Operator) -> bool:
        if operator.kind not in ("where", "maskedfill"):
            return False
        asked = {m.kind for o in operator.operands if o.dtype == "bool" and (m := self.producer(o)) is not None}
        return not asked & {"isnan", "isinf", "isfinite", "ne", "logicalnot"}

    def is_mask(self, operator: Operator) -> bool:
        """Only -inf, and whoever gets it takes it for "nothing here": no NaN comes of it."""
        out = operator.out
        if out is None or out.nan or out.pos_inf:
            return False
        for reached in self.spread(operator):
            result = reached.out
            if result is None:
                continue
            if result.nan or result.pos_inf:
                return False
            if not result.nonfinite and reached.kind not in _TAKES_MINUS_INF and not moves(reached):
                return False
        return not self._reaches_the_end(operator)

    def _reaches_the_end(self, operator: Operator) -> bool:
        return any(
            r.out is not None and r.out.nonfinite and not self.consumers.get(r.index) for r in self.spread(operator)
        )

    # --- what the step came to ----------------------------------------------------------------------------------------

    @cached_property
    def output_nonfinite(self) -> bool:
        """The network's output or the loss is NaN or infinite."""
        outcome = self.step.outcome
        loss = outcome.loss
        return any(s.nonfinite for s in outcome.outputs) or (loss is not None and not math.isfinite(loss))

    @cached_property
    def exact_nonfinite(self) -> bool | None:
        """The same of the float32 run; None where there is none."""
        outcome = self.step.outcome
        if not outcome.exact_outputs:
            return None
        loss = outcome.exact_loss
        return any(s.nonfinite for s in outcome.exact_outputs) or (loss is not None and not math.isfinite(loss))

    @cached_property
    def harmed(self) -> bool:
        """What came out is non-finite, or far from what float32 gives."""
        outcome = self.step.outcome
        if (
            self.output_nonfinite
            or self.poisoned
            or any(v.gradient and v.gradient.nonfinite for v in self.step.variables)
        ):
            return True
        if outcome.random or outcome.error is None:
            return False
        # The mean that stands in for a loss may be 0 within rounding, and says nothing then.
        loss, exact = (outcome.loss, outcome.exact_loss) if outcome.real_loss else (None, None)
        wrong = loss is not None and exact is not None and abs(loss - exact) > 0.5 * abs(exact)
        return outcome.error > 0.5 or wrong

    @cached_property
    def poisoned(self) -> tuple[str, ...]:
        """Buffers that were finite before the step and are not after it."""
        return tuple(
            v.name
            for v in self.step.variables
            if not v.trainable and v.after.nonfinite and not v.before.nonfinite and _is_statistic(v.name)
        )


def _is_statistic(name: str) -> bool:
    return name.endswith(("moving_mean", "moving_variance", "running_mean", "running_var"))


def statistics(step: Step) -> Iterable[str]:
    """Names of the moving statistics among the variables."""
    return (v.name for v in step.variables if _is_statistic(v.name))


def lost_constant(flow: Flow, operator: Operator, hops: int = 5) -> tuple[Operator, Operand, float] | None:
    """A small constant on the way into an operator that is 0 in the dtype it was used in, or a bound that became 1."""
    for made in (operator, *flow.before(operator, hops)):
        if made.dtype not in LOW or made.kind not in ("add", "sub", "clip", "maximum", "minimum", "max", "div", "pow"):
            continue
        for operand in made.operands:
            value, inside = operand.value, operand.in_dtype(made.dtype)
            if value is None or inside is None or not (operand.is_number or operand.source):
                continue
            bound = made.kind in ("clip", "minimum") and value != 1.0 and inside == 1.0
            if (value != 0.0 and inside == 0.0) or bound:
                return made, operand, inside
    return None


def is_square(operator: Operator) -> bool:
    """It multiplies a tensor with itself."""
    if operator.kind == "square":
        return True
    if operator.kind == "pow":
        return any(o.value == 2.0 for o in operator.operands[1:])
    if operator.kind != "mul":
        return False
    tensors = [o for o in operator.operands if o.stats is not None]
    if len(tensors) != 2:
        return False
    first, second = tensors
    return first.producer == second.producer and first.source == second.source and first.stats == second.stats


def scale_of(operator: Operator) -> float | None:
    """The number that a multiplication or division shrinks its tensor by."""
    if operator.kind not in ("mul", "div") or len(operator.operands) < 2:
        return None
    values = [o.value for o in operator.operands if o.value is not None]
    if not values or not values[-1]:
        return None
    factor = abs(values[-1]) if operator.kind == "mul" else 1 / abs(values[-1])
    return factor if 0 < factor < 1 else None


def moves(operator: Operator) -> bool:
    """It hands on every value as it is. (``Select`` is the name of a view and of ``where``; here it is the latter.)"""
    return is_transparent(operator.name) and operator.kind != "where"


def passes_on(operator: Operator) -> bool:
    """Scores keep their meaning through it: casts, movements, masks, scales."""
    return (
        is_cast(operator.name)
        or moves(operator)
        or operator.kind in ("add", "sub", "mul", "div", "maskedfill", "where")
    )
