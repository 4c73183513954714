"""Rules over a monitor's run about faults that leave every number finite, or that begin in the loss function."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampdebug.rules._birth_kinds import FLOAT16_MAX
from ampdebug.rules._birth_operators import own_operators
from ampdebug.rules._facts import Facts
from ampdebug.rules._finding import Evidence, Finding, rows
from ampdebug.rules._run import RunView

if TYPE_CHECKING:
    from ampdebug._summary import SiteSummary

_CONFIRM = "ampdebug.check(net, *inputs, loss_fn=...): one instrumented step names the operator"


def _view(facts: Facts) -> RunView | None:
    view = facts.history.facts.get("run")
    return view if isinstance(view, RunView) else None


def masked_row(facts: Facts) -> Iterator[Finding]:
    """A softmax over -inf alone that gives no NaN but numbers that no softmax gives (MindSpore's CPU kernel does)."""
    view = _view(facts)
    if view is None:
        return
    inputs = {(s.site.path, s.site.call): s for s in view.sites("input")}
    for out in view.sites("output"):
        given = inputs.get((out.site.path, out.site.call))
        if out.site.cell_type != "Softmax" or given is None or not given.neg_inf or given.nan or given.pos_inf:
            continue
        if out.nonfinite or not out.absmax > 1.001:
            continue
        yield Finding(
            "softmax-row-fully-masked",
            f"Softmax {out.site.path!r} puts out values of up to {out.absmax:.4g}, which is no share: a row of its "
            "input is -inf throughout, softmax over nothing is 0/0, and this kernel leaves stray numbers there.",
            "error",
            "high",
            "the input holds -inf and the output lies outside 0 to 1",
            out.first_step,
            out.last_step,
            out.site.path,
            (
                Evidence(f"input of {given.site.path}: {given.neg_inf} -inf of {given.count}", given.first_step),
                Evidence(f"output of {out.site.path}: largest {out.absmax:.5g}", out.absmax_step),
            ),
            "Keep at least one entry of each row, or mask with a large finite number that the format holds (-1e4 in "
            "float16), or put zeros where the whole row is masked.",
        )
        return


def loss_pinned(facts: Facts) -> Iterator[Finding]:
    """The loss is exactly the largest number of float16, again and again: a device that saturates instead of inf."""
    pinned = [r for r in facts.losses if r.step.loss is not None and abs(r.step.loss) == FLOAT16_MAX]
    if len(pinned) < 3:
        return
    before = [r for r in facts.losses if not r.bad_loss and facts.place(r) < facts.place(pinned[0])]
    first, last = pinned[0].step.step, pinned[-1].step.step
    yield Finding(
        "values-pinned-at-fp16-max",
        f"{len(pinned)} losses (first at step {first}) are exactly 65504, the largest number of float16: an overflow "
        "is clipped to it and does not show as inf.",
        "error",
        "high",
        "no loss comes out as this very number again and again by chance",
        first,
        last,
        "",
        rows([*before[-1:], *pinned[:2], pinned[-1]]),
        "Compute the loss in float32 (cast what goes into the loss function), and find the layer whose values grow. On "
        "Ascend MS_ASCEND_CHECK_OVERFLOW_MODE=INFNAN_MODE makes such overflows inf, so that the scaler sees them.",
        "ampdebug.AMPMonitor or ampdebug.watch over these steps: it counts saturated values for each cell",
        (),
        ("divergence-learning-rate", "loss-spike-recovered", "forward-overflow-scale-independent"),
    )


def _gradients(view: RunView) -> list[SiteSummary]:
    return [s for s in (*view.sites("gradient"),) if s.count]


def gradients_all_zero(facts: Facts) -> Iterator[Finding]:
    """Every gradient of every step is exactly zero: a loss that is 0, or gradients below what float16 holds."""
    view = _view(facts)
    if view is None or facts.onset is not None:
        return
    found = _gradients(view)
    if not found or any(s.zeros != s.count for s in found):
        return
    losses = [r for r in facts.losses if not r.bad_loss]
    if not losses:
        return
    evidence = (
        *rows([losses[0], losses[-1]], 2),
        *(Evidence(f"gradient of {s.site.path}: all {s.count} elements 0", s.first_step) for s in found[:4]),
    )
    first, last = losses[0].step.step, losses[-1].step.step
    if all(r.step.loss == 0.0 for r in losses):
        own = own_operators(view, "")
        inside = f" The network's own code divides in 16 bits ({', '.join(sorted(own))[:120]})." if own else ""
        yield Finding(
            "loss-denominator-overflow-loss-zero",
            f"The loss and every gradient are exactly 0 in all {len(losses)} steps: most likely the loss's divisor (a "
            f"token count, a sum of weights) is inf in float16, and x / inf is 0.{inside}",
            "error",
            "medium",
            "loss and gradients are exactly 0 although nothing in the network is",
            first,
            last,
            "",
            evidence,
            "Compute the divisor of the loss in float32 (mask.astype(ms.float32).sum()): a float16 sum is inf above "
            "65504.",
            _CONFIRM,
            (),
            ("loss-denominator-overflow-loss-zero",),  # the loss alone says the same
        )
        return
    scale = facts.scales[-1] if facts.scales else 1.0
    if view.level in ("", "O0") or scale > 1.0 or facts.history.facts.get("bfloat16"):
        return
    yield Finding(
        "gradients-flushed-to-zero-without-loss-scale",
        f"Every gradient of all {len(found)} parameters is exactly 0 while the loss is not "
        f"({losses[-1].step.loss:.4g}): under {view.level} what comes back is float16, where magnitudes below 3e-8 "
        "are 0, and no loss scale lifts them.",
        "warning",
        "medium",
        "not one element of one gradient was different from 0",
        first,
        last,
        "",
        evidence,
        "Use a dynamic loss scale (amp.DynamicLossScaler(2**16, 2, 1000)).",
        _CONFIRM,
    )


def loss_not_from_the_network(facts: Facts) -> Iterator[Finding]:
    """The network's outputs are finite and small, and the loss is NaN: the loss function divides nothing by nothing."""
    view = _view(facts)
    if view is None:
        return
    bad = [
        r
        for r in facts.losses
        if r.step.loss is not None
        and math.isnan(r.step.loss)
        and r.step.forward_birth is None
        and _small_outputs(view, r.step.step)
    ]
    if not bad:
        return
    first = bad[0].step.step
    if any(s.nonfinite and (s.first_nonfinite_step or 0) <= first for s in view.sites("parameter")):
        return
    good = [r for r in facts.losses if not r.bad_loss]
    yield Finding(
        "mean-over-zero-valid-labels",
        f"In step {first} everything that the network puts out is finite and small, and the loss is NaN: the loss "
        "function makes it, most likely as a mean over no valid label or an empty mask (0 / 0).",
        "error",
        "medium" if good else "low",
        "the outputs were measured, and they can't overflow" + ("; other batches give finite losses" if good else ""),
        first,
        bad[-1].step.step,
        "the loss function",
        (
            *rows([good[-1] if good else None, bad[0]], 2),
            *(
                Evidence(f"output of the network: largest {row.absmax:.5g}, all finite", first)
                for row in view.rows(first)
                if row.site.kind == "output" and not row.site.path
            ),
        )[:6],
        "Look at the labels and masks of this batch: all equal to ignore_index, all out of range, all masked. Divide "
        "by maximum(valid.sum(), 1), or skip such batches.",
        _CONFIRM,
        (),
        (
            "loss-nan-cause-unknown",
            "nan-permanent-params-corrupted",
            "loss-nan-before-scale-moved",
            "nan-updates-not-skipped",
            "forward-overflow-scale-independent",
            "overflow-at-every-scale-from-step-1",
            "every-update-dropped",
            "loss-nan-in-some-steps",
            "loss-spike-recovered",
            "overflow-frequent",
            "scale-collapse-loss-already-nan",
        ),
    )


def _small_outputs(view: RunView, step: int) -> bool:
    outputs = [r for r in view.rows(step) if r.site.kind == "output" and not r.site.path]
    return bool(outputs) and all(not r.nonfinite and not r.absmax > 1e4 for r in outputs)
