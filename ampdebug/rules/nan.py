"""Rules about a loss that is NaN and stays so."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ampdebug.rules._facts import Facts
from ampdebug.rules._finding import Evidence, Finding, power, rows, show_mark
from ampdebug.rules._history import Mark, Record
from ampdebug.rules._story import applied_before_onset, fallen, nan_story, not_guarded

_WATCH = (
    "ampdebug.AMPMonitor in model.train, or ampdebug.watch around the loop: it names the cell that made the first NaN"
)
_EXPLAINS = (
    "forward-overflow-scale-independent",
    "scale-oscillates-window-too-short",
    "every-update-dropped",
    "overflow-at-every-scale-from-step-1",
    "scale-never-grows",
    "scale-below-one",
    "periodic-nan-same-batch",
    "loss-spike-recovered",
    "loss-nan-cause-unknown",
    "overflow-frequent",
    "updates-applied-on-overflow",
)


def _components(record: Record) -> str:
    """Which printed parts of the loss are NaN and which are not: the place to look."""
    text = record.text
    parts = re.findall(rb"\b(loss_\w+|l(?:box|obj|cls|kpt|dfl)): ([-+\w.]+)", text)
    bad = [name.decode() for name, value in parts if value.lower().lstrip(b"+-") in (b"nan", b"inf")]
    good = [name.decode() for name, value in parts if value.lower().lstrip(b"+-") not in (b"nan", b"inf")]
    return ", ".join(bad) if bad and good else ""


def _where(facts: Facts) -> str:
    onset = facts.onset
    if onset is None:
        return ""
    named = facts.history.parameter_norms
    if named:
        return named[0][0]
    birth = onset.step.forward_birth or onset.step.backward_birth
    if birth is not None:
        return birth.path
    return _components(onset)


def _saved_after(facts: Facts) -> list[Mark]:
    onset = facts.onset
    return [] if onset is None else [m for m in facts.marks("checkpoint") if m.line > onset.line > 0]


def _consequences(facts: Facts) -> tuple[str, ...]:
    result = []
    saved = _saved_after(facts)
    if saved:
        result.append(f"{len(saved)} checkpoint(s) were saved after it (first at line {saved[0].line}); they hold NaN.")
    return tuple(result)


def _ends(facts: Facts) -> tuple[int, int]:
    assert facts.onset is not None
    tail = [r for r in facts.tail if r.bad_loss]
    return facts.onset.step.step, tail[-1].step.step


def _precise(facts: Facts) -> str:
    """How finely the log tells when it began."""
    good, onset = facts.last_good, facts.onset
    if good is None or onset is None or facts.interval == 1 or facts.history.counts_lines:
        return ""
    return f" (somewhere after step {good.step.step}, the last logged one with a finite loss)"


def update_applied_on_overflow(facts: Facts) -> Iterator[Finding]:
    """A static scale, an overflow whose update was made, and NaN from then on."""
    if nan_story(facts) != "applied" or facts.onset is None:
        return
    applied = applied_before_onset(facts)
    first, last = applied[0].step.step, _ends(facts)[1]
    said = any(r.applied for r in applied)
    scale = applied[0].scale
    at = f", which stayed at {power(scale)}" if scale is not None and facts.static else ""
    yield Finding(
        "update-applied-on-overflow-static-scale",
        f"The step {first} overflowed and its update was applied all the same; the loss scale{at} does not adapt, and "
        f"from step {facts.onset.step.step} on every loss is NaN: inf or NaN gradients reached the weights.",
        "error",
        "high" if said else "medium",
        "the log itself says that the update was made on overflow"
        if said
        else "the overflow came with a finite loss, the scale did not move, and the losses after it are NaN",
        first,
        last,
        _where(facts),
        rows([facts.last_good, *applied[:2], facts.onset, facts.tail[-1]]),
        "Skip the update when gradients are not finite and let the scale adapt: DynamicLossScaler / "
        "DynamicLossScaleManager (mindyolo: ms_loss_scaler: dynamic, overflow_still_update: False), or clip gradients "
        f"before the update. Restart from a checkpoint written before step {first}.",
        "" if said else _WATCH,
        _consequences(facts),
        _EXPLAINS,
    )


def loss_nan_before_scale_moved(facts: Facts) -> Iterator[Finding]:
    """The loss is NaN in the same step as the first overflow, at a scale that had worked until then."""
    if nan_story(facts) != "before-scale" or facts.onset is None:
        return
    first, last = _ends(facts)
    good = facts.last_good
    scale = facts.scale_before(facts.onset) or facts.onset.scale
    norm = good.step.grad_norm if good is not None else None
    quiet = f" and the gradient norm was {norm:.4g} in the step before" if norm is not None else ""
    depth = fallen(facts)
    then = (
        f"; the scaler then halved it {depth:.0f} times without any effect"
        if depth >= 2 and depth != float("inf")
        else ""
    )
    yield Finding(
        "loss-nan-before-scale-moved",
        f"The unscaled loss itself is NaN at step {first}{_precise(facts)} while the loss scale was still "
        f"{power(scale) if scale is not None else 'unchanged'}{quiet}{then}: the forward pass or the parameters are at "
        "fault, not the scale.",
        "error",
        "high" if facts.interval == 1 and good is not None else "medium",
        "each step is logged, and the NaN loss is in the very step of the first overflow"
        if facts.interval == 1
        else f"only every {facts.interval}th step is logged, and the scale had not moved in the first NaN one",
        first,
        last,
        _where(facts),
        rows([good, facts.onset, *facts.tail[1:3], facts.tail[-1]]),
        "Find the first layer whose output is not finite at this step and keep it in float32 "
        "(cell.to_float(ms.float32), or custom_mixed_precision's black list); a model pretrained in bfloat16 needs "
        "bfloat16. Continue from a checkpoint before this step.",
        _WATCH,
        _consequences(facts),
        _EXPLAINS,
    )


def scale_collapse_loss_already_nan(facts: Facts) -> Iterator[Finding]:
    """The scale falls and falls because the loss is NaN."""
    if nan_story(facts) != "collapse" or facts.onset is None:
        return
    first, last = _ends(facts)
    end_marks = facts.marks("zero-division") + facts.marks("scale-floor")
    scales = [r.scale for r in facts.records[facts.place(facts.onset) :] if r.scale is not None]
    lowest = min(scales) if scales else None
    chain = facts.falling
    began = chain[0] if chain else facts.onset
    good = facts.last_good
    since = f" (the last finite one was logged at step {good.step.step})" if good is not None else ""
    to = f" down to {lowest:g}" if lowest is not None else ""
    end = ""
    if facts.marks("zero-division"):
        end = " The ZeroDivisionError is only the end of this chain: 1/scale with a scale of 0."
    elif end_marks:
        end = " The error about the minimum of the scale is only the end of this chain."
    yield Finding(
        "scale-collapse-loss-already-nan",
        f"The loss is NaN from step {first} on{since}, so every gradient overflows at every scale, and the scaler "
        f"halves its scale in every step{to} in vain.{end}",
        "error",
        "high" if lowest is not None and lowest <= 1 else "medium",
        "the loss printed is NaN in every step since, and no scale of many made a finite gradient",
        min(first, began.step.step),
        last,
        _where(facts),
        (
            *rows([good, began, facts.onset, facts.tail[-1]], 6),
            *(show_mark(mark) for mark in end_marks[:1]),
        ),
        "Look for the first NaN in the forward pass, not at the scaler: compute the part of the loss that is NaN in "
        "float32, and check inputs and learning rate at this step. Continue from a checkpoint before it.",
        _WATCH,
        _consequences(facts),
        _EXPLAINS,
    )


def nan_updates_not_skipped(facts: Facts) -> Iterator[Finding]:
    """NaN gradients or losses while the tool reports no overflow or goes on updating."""
    if nan_story(facts) != "not-guarded" or facts.onset is None:
        return
    first, last = _ends(facts)
    seen = not_guarded(facts)
    vanished = any(r.loss_missing for r in seen)
    norm = any(r.step.grad_norm is not None and r.bad_gradient for r in seen)
    what = "the grad norm is NaN" if norm else "the loss is NaN"
    if vanished:
        what += " and the loss field has vanished (this tool leaves it out when it is NaN)"
    scales = set(facts.scales)
    no_scaler = scales == {1.0} or not scales
    how = (
        "no step is reported as skipped"
        if any(r.step.overflow is False for r in seen)
        else "the optimizer's own step counter goes on"
    )
    tail = (
        "; the constant loss scale of 1 means that no scaler checks the gradients (bf16 or fp32)"
        if scales == {1.0}
        else ""
    )
    yield Finding(
        "nan-updates-not-skipped",
        f"From step {first} on {what}, yet {how}{tail}: the NaN updates were applied to the weights unguarded.",
        "error",
        "high" if len(seen) >= 3 else "medium",
        "NaN and the statement that nothing was skipped stand on the same line",
        first,
        last,
        _where(facts),
        rows([facts.last_good, *seen[:3], seen[-1]]),
        f"Resume from a checkpoint before step {first} and check the gradients before each update "
        "(amp.all_finite(grads), or grad norm finite), skipping the update or stopping when they are not"
        + ("." if no_scaler else "; make sure that the overflow check really runs on this device."),
        _WATCH,
        _consequences(facts),
        _EXPLAINS,
    )


def nan_from_first_step_after_resume(facts: Facts) -> Iterator[Finding]:
    """NaN in the first step after a checkpoint was loaded."""
    if nan_story(facts) != "resume" or facts.onset is None:
        yield from _only_overflow_after_resume(facts)
        return
    first, last = _ends(facts)
    source = facts.resume_before_onset
    evidence: tuple[Evidence, ...] = ()
    if isinstance(source, Mark):
        evidence = (show_mark(source),)
    earlier = facts.before or [r for r in facts.losses if r.segment < facts.onset.segment]
    yield Finding(
        "nan-from-first-step-after-resume",
        f"The very first loss after the checkpoint was loaded (step {first}) is NaN and all after it are: the "
        "checkpoint already holds non-finite values in weights, optimizer state or normalisation statistics.",
        "error",
        "high" if isinstance(source, Mark) else "medium",
        "the log shows the checkpoint being loaded, and not one finite loss after it"
        if isinstance(source, Mark)
        else "the step numbers show a restart, and not one loss after it is finite",
        first,
        last,
        _where(facts),
        evidence + rows([earlier[-1] if earlier else None, facts.onset, facts.tail[-1]], 5),
        "Check every tensor of the checkpoint for NaN and inf (np.isfinite over ms.load_checkpoint(path)), and go "
        "back to the last clean one. If it is clean, the optimizer state or the dtype it is loaded into is at fault.",
        "ampdebug.check(net, *inputs) with the checkpoint loaded: it lists the parameters that are not finite",
        (),
        _EXPLAINS,
    )


def _only_overflow_after_resume(facts: Facts) -> Iterator[Finding]:
    """No loss is printed after a resume, and every step overflows from the first on, down to the smallest scale."""
    chain = facts.falling
    if facts.onset is not None or facts.static or len(chain) < 8:
        return
    marks = [m for m in facts.marks("resume") if m.line <= chain[0].line]
    if not marks or any(r.line > marks[-1].line for r in (*facts.clean, *facts.losses)):
        return
    scales = [r.scale for r in chain if r.scale is not None]
    if not scales or (min(scales) > 1.0 and not facts.marks("scale-floor") and not facts.marks("zero-division")):
        return
    first, last = chain[0].step.step, chain[-1].step.step
    yield Finding(
        "nan-from-first-step-after-resume",
        f"From the first step after the checkpoint was loaded every step overflows, down to the scale {min(scales):g}, "
        "in a training that had worked before: the checkpoint most likely holds non-finite values in weights, "
        "optimizer state or normalisation statistics.",
        "error",
        "medium",
        f"{len(chain)} overflows and not one good step since the checkpoint was loaded; the loss is not printed",
        first,
        last,
        "",
        (show_mark(marks[-1]), *rows([*chain[:2], chain[-1]]), *(show_mark(m) for m in facts.marks("scale-floor")[:1])),
        "Check every tensor of the checkpoint for NaN and inf (np.isfinite over ms.load_checkpoint(path)), and go "
        "back to the last clean one. If it is clean, the forward pass overflows: find the first non-finite layer.",
        "ampdebug.check(net, *inputs) with the checkpoint loaded: it lists the parameters that are not finite",
        (),
        (*_EXPLAINS, "scaler-state-not-restored"),
    )


def nan_in_the_first_step(facts: Facts) -> Iterator[Finding]:
    """NaN from the first step of a fresh training, before any update could have done it."""
    if nan_story(facts) != "first-step" or facts.onset is None:
        return
    first, last = _ends(facts)
    level = facts.history.facts.get("level")
    off = level == "O0"
    yield Finding(
        "forward-overflow-scale-independent",
        "The unscaled loss is NaN from the first logged step on, before updates could have spoilt the weights: the "
        "forward pass makes it, whatever the scale.",
        "error",
        "medium" if facts.interval == 1 else "low",
        "no finite loss was ever logged"
        + ("" if facts.interval == 1 else f", but only every {facts.interval}th step is logged"),
        first,
        last,
        _where(facts),
        rows([facts.onset, *facts.tail[1:2], facts.tail[-1]]),
        "Run the first batch once in float32: if the loss is NaN there too, look at the data and the loss function; "
        "if not, find the first non-finite layer and keep it in float32."
        if not off
        else "Mixed precision is off, so look at the first batch and the loss function: a non-finite input, log(0), a "
        "label out of range, an empty mean.",
        "ampdebug.check(net, *inputs, loss_fn=...): one instrumented step names the operator",
        (),
        _EXPLAINS,
    )


def nan_permanent(facts: Facts) -> Iterator[Finding]:
    """The loss is NaN from some step to the end, and nothing in the record says why."""
    if nan_story(facts) != "permanent" or facts.onset is None:
        return
    first, last = _ends(facts)
    count = sum(r.bad_loss for r in facts.tail)
    good = facts.last_good
    unknown = "" if facts.history.totals.overflow_known else " The log says nothing about overflow or the loss scale."
    begin = (
        facts.overflows[0] if facts.overflows and facts.place(facts.overflows[0]) < facts.place(facts.onset) else None
    )
    yield Finding(
        "nan-permanent-params-corrupted",
        f"The loss is NaN from step {first}{_precise(facts)} to the end of the record, without any rise before it: NaN "
        f"has reached the parameters or the normalisation statistics, and no batch recovers from that.{unknown}"
        if count > 1
        else f"The loss is NaN at step {first}, without any rise before it, and that ended the program: NaN had "
        "reached the parameters or the normalisation statistics, or else the batch of this very step makes "
        f"it.{unknown}",
        "error",
        "medium" if count >= 5 else "low",
        f"{count} losses in a row are NaN over different batches; what made the first one is not in this log"
        if count > 1
        else "one NaN is too little to tell spoilt parameters from a bad batch",
        first,
        last,
        _where(facts),
        rows([good, begin, facts.onset, facts.tail[-1]]),
        f"Go back to a checkpoint before step {first}; make the loop skip updates with non-finite gradients "
        "(amp.all_finite) and watch the steps before it.",
        _WATCH,
        _consequences(facts),
        _EXPLAINS,
    )


def nan_in_some_steps(facts: Facts) -> Iterator[Finding]:
    """Losses that are not finite now and then, over the whole run, and recover each time."""
    bad = [r for r in facts.losses if r.bad_loss]
    if facts.onset is not None or len(bad) < 5 or facts.history.totals.bad_losses < 0.005 * facts.history.totals.losses:
        return
    count, total = facts.history.totals.bad_losses, facts.history.totals.losses
    yield Finding(
        "loss-nan-in-some-steps",
        f"{count} of {total} losses are not finite (first at step {bad[0].step.step}), and each time the next ones are "
        "normal again: some batches make the forward pass overflow or hold bad values; their updates do not reach the "
        "weights.",
        "warning",
        "medium",
        "the losses after them are finite, so the parameters are",
        bad[0].step.step,
        bad[-1].step.step,
        _components(bad[0]),
        rows([*bad[:4], bad[-1]]),
        "Look at the batches of these steps (np.isfinite, empty targets, extreme values), and at the layer that "
        "overflows.",
        _WATCH,
        (),
        ("loss-spike-recovered", "loss-nan-cause-unknown", "overflow-frequent"),
    )


def nan_unexplained(facts: Facts) -> Iterator[Finding]:
    """Non-finite losses that neither last nor recover visibly: too little record to say more."""
    if facts.onset is not None:
        return
    bad = [r for r in facts.losses if r.bad_loss]
    if not bad or facts.losses[-1] is not bad[-1]:
        return
    stopped = facts.marks("stopped-on-nan")
    yield Finding(
        "loss-nan-cause-unknown",
        f"The last logged loss (step {bad[-1].step.step}) is NaN"
        + (" and ended the program." if stopped else ".")
        + " One record is too little to tell a bad batch from spoilt parameters.",
        "warning",
        "low",
        "the record ends with the first NaN",
        bad[-1].step.step,
        bad[-1].step.step,
        _components(bad[-1]),
        rows([*facts.losses[-3:]]),
        "Run on past this step with non-finite updates skipped, or run this batch again alone.",
        _WATCH,
    )


def gradients_nan_stopped(facts: Facts) -> Iterator[Finding]:
    """A check of the gradients ended the program, and the losses up to then are finite."""
    marks = facts.marks("stopped-on-nan-gradient")
    if not marks or facts.onset is not None:
        return
    ended = next((r for r in facts.overflows if r.line == marks[0].line), None)
    losses = [r for r in facts.losses if not r.bad_loss]
    if ended is None or len(losses) < len(facts.losses):
        return
    operator = marks[0].detail.removeprefix("Function ").partition(" ")[0].strip("'")
    yield Finding(
        "gradients-nan-cause-unknown",
        f"The program ended after step {max(ended.step.step - 1, 0)} because gradients were NaN"
        + (f", first in the backward pass of {operator}" if operator else "")
        + "; the losses printed up to then are finite, so the backward pass or the loss of this very step made them.",
        "error",
        "medium",
        "the error says so, and nothing that was printed before it is out of the ordinary",
        ended.step.step,
        ended.step.step,
        operator,
        (*rows(losses[-2:]), show_mark(marks[0])),
        "Run this step again with its batch and look where the first non-finite gradient appears: sqrt, norm or pow at "
        "0, log or division by 0, or a masked entry whose gradient is 0 * inf.",
        _WATCH,
    )
