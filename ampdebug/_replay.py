"""What came of running a kept step again: did the fault come back, and at which operator was it born."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ampdebug._records import Birth
from ampdebug._records import Step as RecordedStep
from ampdebug._replay_origins import Origin, origins_of
from ampdebug._tensor_stats import TensorStats
from ampdebug.rules import Finding
from ampdebug.rules._operator_flow import Flow
from ampdebug.rules._operator_forward import _harmful
from ampdebug.rules._operator_records import Step
from ampdebug.rules.operators import judge_step

Verdict = Literal["reproduced", "different", "not reproduced"]


@dataclass(frozen=True, slots=True)
class Replay:
    """A kept step of a run, run again operator by operator; ``str()`` of it is the report.

    Attributes:
        run: Where it was kept.
        step: Its number.
        verdict: ``"reproduced"``: what the training saw came back. ``"different"``: something is not finite, but not
            where the training saw it (in the backward pass only, or already in the forward pass). ``"not reproduced"``:
            everything is finite.
        origins: Where values were born that are not finite, and where values were pinned to the largest number of their
            dtype or flushed to zero: the first of each, the non-finite one first.
        seen: What the training recorded and what the replay saw, in sentences.
        notes: In what the replay differs from the training, in sentences.
        findings: What the rules of ``ampdebug.check`` say about the step, causes before consequences.
    """

    run: str
    step: int
    verdict: Verdict
    origins: tuple[Origin, ...]
    seen: tuple[str, ...]
    notes: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def reproduced(self) -> bool:
        """What the training saw came back."""
        return self.verdict == "reproduced"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values (NaN never occurs among them)."""
        return {
            "run": self.run,
            "step": self.step,
            "verdict": self.verdict,
            "origins": [origin.to_dict() for origin in self.origins],
            "seen": list(self.seen),
            "notes": list(self.notes),
            "findings": [finding.to_dict() for finding in self.findings],
        }

    def __str__(self) -> str:
        lines = [f"Step {self.step} of {self.run}, run again operator by operator: {_VERDICTS[self.verdict]}."]
        lines += [_wrap(sentence) for sentence in self.seen]
        for origin in self.origins:
            lines += ["", *origin.lines()]
        loud = [finding for finding in self.findings if finding.severity != "note"]
        if loud:
            lines += ["", "Cause, by the rules of `ampdebug check`:"]
            for finding in loud:
                lines.append(_wrap(f"{finding.slug} ({finding.severity}): {finding.sentence}"))
                lines.append(_wrap(f"Do: {finding.action}", "    "))
        if self.notes:
            lines += ["", "Not as in the training:", *(_wrap(sentence) for sentence in self.notes)]
        return "\n".join(lines)


_VERDICTS = {
    "reproduced": "the fault came back",
    "different": "another fault than the training's",
    "not reproduced": "the fault did not come back",
}


def _wrap(text: str, indent: str = "  ") -> str:
    return textwrap.fill(
        text, 118, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def judge_replay(
    run: str,
    recorded: RecordedStep,
    replayed: Step,
    exact_gradients: Mapping[tuple[int, int], TensorStats],
    notes: Iterable[str],
    *,
    loss_scale: float = 1.0,
    graph: bool = False,
) -> Replay:
    """Compares what the training recorded with what the replay saw.

    Args:
        run: Where the step was kept, for the report.
        recorded: The step as the training recorded it.
        replayed: The same, operator by operator.
        exact_gradients: Gradients of the operators' results with every operator in float32, by number of the operator
            and of the result; empty where they are not known.
        notes: In what the replay is known to differ.
        loss_scale: What the loss was multiplied with.
        graph: The training ran in graph mode.
    """
    flow = Flow(replayed, recorded.step)
    forward = _forward_bad(flow)
    backward = any(v.gradient is not None and v.gradient.nonfinite for v in replayed.variables)
    was_forward = recorded.forward_birth is not None or not _finite(recorded.loss)
    verdict: Verdict = "not reproduced"
    if forward or backward:
        verdict = "reproduced" if forward == was_forward else "different"
    origins = tuple(origins_of(flow, exact_gradients, loss_scale))
    further = list(notes)
    if replayed.outcome.random:
        further.append(
            "Random operators (dropout) ran: MindSpore's kernels keep their state, so they drew other numbers."
        )
    seen = [_training_saw(recorded), _replay_saw(replayed, forward, backward)]
    if verdict == "not reproduced":
        further += _why_not(graph)
    elif verdict == "reproduced" and origins:
        seen += _agreement(recorded.forward_birth or recorded.backward_birth, origins[0])
    return Replay(
        run, recorded.step, verdict, origins, tuple(seen), tuple(further), judge_step(replayed, recorded.step)
    )


def _finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def _forward_bad(flow: Flow) -> bool:
    step = flow.step
    inputs = any(i.stats is not None and i.stats.nonfinite for i in step.inputs)
    before = any(v.before.nonfinite for v in step.variables)
    return flow.output_nonfinite or inputs or before or any(_harmful(flow, birth) for birth in flow.births)


def _training_saw(step: RecordedStep) -> str:
    parts = []
    if step.loss is not None:
        parts.append(f"loss {step.loss:.6g}")
    if step.loss_scale is not None:
        parts.append(f"loss scale {step.loss_scale:g}")
    if step.overflow is not None:
        parts.append("overflow" if step.overflow else "no overflow")
    if step.nonfinite_gradients is not None:
        parts.append("gradients not finite" if step.nonfinite_gradients else "gradients finite")
    birth = step.forward_birth or step.backward_birth
    if birth is not None:
        parts.append(f"first non-finite value in the {birth.phase} pass, {_place(birth)}")
    elif not step.sampled:
        parts.append("statistics were not taken in this step")
    return f"The training: {', '.join(parts)}."


def _place(birth: Birth) -> str:
    if birth.phase == "backward" and not birth.cell_type:
        return f"gradient of {birth.path}"
    return f"{birth.cell_type or 'cell'} {birth.path!r}" if birth.path else f"{birth.cell_type or 'the network'} itself"


def _replay_saw(step: Step, forward: bool, backward: bool) -> str:
    outcome = step.outcome
    parts = []
    if outcome.loss is not None:
        what = "loss" if outcome.real_loss else "mean of the outputs (no loss was given)"
        exact = "" if outcome.exact_loss is None else f" ({outcome.exact_loss:.6g} with every operator in float32)"
        parts.append(f"{what} {outcome.loss:.6g}{exact}")
    parts.append("forward pass not finite" if forward else "forward pass finite")
    parts.append("gradients not finite" if backward else "gradients finite")
    if step.failure:
        parts.append(f"it ended with {step.failure}")
    return f"The replay: {', '.join(parts)}; {len(step.operators)} operator calls at level {step.level}."


def _agreement(birth: Birth | None, origin: Origin) -> Iterator[str]:
    if birth is None or not origin.operator or birth.phase != origin.phase or origin.came_from:
        return
    if birth.phase == "backward":
        return  # the record names a parameter or an output, the replay an operator between two of them
    inside = origin.path.startswith(f"{birth.path}.") or birth.path.startswith(f"{origin.path}.")
    if birth.path and origin.path and birth.path != origin.path and not inside:
        yield f"The training saw it first at another place ({_place(birth)}) than the replay: look at both."


def _why_not(graph: bool) -> Iterator[str]:
    if graph:
        yield (
            "The training ran in graph mode and the replay in PyNative mode. A graph fuses operators, and a level "
            "converts some cells otherwise there (LayerNorm at O2, implicit casts): a value near the limit of its "
            "dtype can overflow in one and not in the other. Train in PyNative mode to see whether it does there."
        )
    yield (
        "Only the network, the loss and the loss scale are run again. What a train cell or loop does besides is not: "
        "clipping, accumulation, other ranks, the optimizer, a loss of its own."
    )


__all__ = ["Origin", "Replay", "judge_replay"]
