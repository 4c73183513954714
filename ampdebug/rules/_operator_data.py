"""Rules about what the network was given: inputs, labels, parameters."""

from __future__ import annotations

from collections.abc import Iterator

from ampdebug.rules._finding import Finding
from ampdebug.rules._operator_finding import FORWARD_CONSEQUENCES, counted, finding
from ampdebug.rules._operator_flow import Flow, moves, statistics
from ampdebug.rules._operator_records import Operand, Operator

_EXPLAINS = (
    *FORWARD_CONSEQUENCES,
    "mask-constant-overflows-fp16",
    "mean-over-zero-valid-labels",
    "division-of-zero-by-zero",
    "handwritten-softmax-overflow",
    "residual-stream-exceeds-fp16",
)


def bad_inputs(flow: Flow) -> Iterator[Finding]:
    """An input of the network is not finite before the first operator."""
    for given in flow.step.inputs:
        stats = given.stats
        if stats is None or not stats.nonfinite:
            continue
        uses = [o for o in flow.step.operators if any(p.source == given.name for p in o.operands)]
        if not (stats.nan or stats.pos_inf) and (not flow.harmed or all(map(flow.is_mask, uses))):
            continue  # a mask of -inf
        samples = f" (sample {', '.join(map(str, given.samples))})" if given.samples else ""
        rows = [f"{given.name}: {counted(stats)}{samples}"]
        swallower = _swallower(flow, given.name)
        hidden = not flow.output_nonfinite
        if hidden and not uses and "label" not in given.name:
            continue
        if hidden and swallower is not None:
            rows.append(f"{swallower.place} gets a non-finite value and gives a finite one")
            spoiled = [v.name for v in flow.step.variables if v.gradient is not None and v.gradient.nonfinite]
            if spoiled:
                rows.append(f"not finite in the backward pass: gradient of {', '.join(spoiled[:5])}")
            yield finding(
                flow,
                "nan-input-hidden-by-relu",
                f"{given.name} already holds {counted(stats)}{samples}; the layers pass it on until {swallower.place} "
                "turns it into a number, so that output and loss do not show it.",
                severity="error",
                reason="the input is not finite and the output is",
                evidence=rows,
                action="Fix the data pipeline (check np.isfinite over the loader's output); do not take a finite "
                "output as proof: ReLU, maximum, clip and max-pooling map NaN to a number on this backend.",
                where=swallower.path,
                explains=_EXPLAINS,
            )
            return
        same = " Every precision fails the same way." if flow.exact_nonfinite else ""
        yield finding(
            flow,
            "nan-in-input-batch",
            f"{given.name} already holds {counted(stats)}{samples} before the first layer; the network only passes it "
            "on."
            f"{same}",
            severity="error",
            reason="it was measured before the first operator",
            evidence=rows,
            action="Fix the data pipeline: look for 0/0 in a min-max or standard-deviation normalisation, the "
            "logarithm of 0, missing values; check np.isfinite over the loader's output.",
            explains=_EXPLAINS,
        )
        return


def _swallower(flow: Flow, name: str) -> Operator | None:
    for operator in flow.step.operators:
        out = operator.out
        if out is None or out.nonfinite or moves(operator):
            continue
        if any(o.nonfinite and _comes_from(flow, o, name) for o in operator.operands):
            return operator
    return None


def _comes_from(flow: Flow, operand: Operand, name: str) -> bool:
    front, seen = [operand], set()
    while front:
        current = front.pop()
        if current.source == name:
            return True
        made = flow.producer(current)
        if made is not None and made.index not in seen:
            seen.add(made.index)
            front.extend(o for o in made.operands if o.nonfinite)
    return False


def bad_parameters(flow: Flow) -> Iterator[Finding]:
    """A parameter or moving statistic was not finite before the step."""
    names = set(statistics(flow.step))
    bad = [v for v in flow.step.variables if v.before.nonfinite]
    if not bad:
        return
    only_statistics = all(v.name in names for v in bad)
    rows = [f"{v.name} ({v.dtype}): {counted(v.before)}" for v in bad]
    listed = ", ".join(v.name for v in bad[:4])
    if only_statistics:
        yield finding(
            flow,
            "bn-moving-stats-nan-after-skipped-step",
            f"{listed} hold non-finite values before this step, while every trainable parameter is finite: an earlier "
            "forward pass wrote them, which skipping the update does not undo. Training looks well; every evaluation "
            "fails.",
            severity="error",
            reason="only the moving statistics are not finite",
            evidence=rows,
            action="Restore the moving statistics from a checkpoint before that step (or recompute them with some "
            "batches in training mode), and keep the input of this norm finite.",
            where=bad[0].path,
            explains=_EXPLAINS,
        )
        return
    yield finding(
        flow,
        "nan-from-first-step-after-resume",
        f"{listed} hold non-finite values before the first step: what was loaded is broken already.",
        severity="error",
        reason="the parameters were measured before the first operator",
        evidence=rows,
        action="Load an older checkpoint in which every parameter is finite.",
        where=bad[0].path,
        explains=(*_EXPLAINS, "nan-in-input-batch"),
    )


def bad_labels(flow: Flow) -> Iterator[Finding]:
    """Labels that name no class, or none that counts."""
    for labels in flow.step.labels:
        if labels.classes <= labels.high != labels.ignore_index:
            rows = [f"{labels.name}: labels from {labels.low} to {labels.high}, {labels.classes} classes"]
            yield finding(
                flow,
                "label-ge-num-classes",
                f"A label is {labels.high}, and there are only {labels.classes} classes (0 to {labels.classes - 1}): "
                f"seen at {labels.name}."
                + (f" The step ended there: {flow.step.failure}." if flow.step.failure else ""),
                severity="error",
                reason="labels and scores were measured",
                evidence=rows,
                action="Fix the labels (counted from 1? an ignore value that the loss does not know?) or the size of "
                "the last layer.",
                explains=(*_EXPLAINS, "nan-in-input-batch"),
            )
            return
    for labels in flow.step.labels:
        if labels.all_ignored and (flow.output_nonfinite or not flow.step.outcome.real_loss):
            seen = flow.step.outcome.real_loss
            yield finding(
                flow,
                "mean-over-zero-valid-labels",
                f"Every label of {labels.name} is negative ({labels.low} to {labels.high}): none is valid, and a mean "
                "over "
                "no label is 0/0.",
                severity="error" if seen else "warning",
                confidence="high" if seen else "medium",
                reason="labels and loss were measured" if seen else "the labels were measured; no loss was given",
                evidence=[f"{labels.name}: labels from {labels.low} to {labels.high}"],
                action="Skip such a batch, or divide by maximum(count, 1).",
                explains=_EXPLAINS,
            )
            return
