"""Rules over what was seen before the first step of a monitor's run: lost pins, optimizers, scales that do not fit."""

from __future__ import annotations

from collections.abc import Iterator

from ampdebug._records import Event
from ampdebug.rules._facts import Facts
from ampdebug.rules._finding import Evidence, Finding
from ampdebug.rules._run import RunView


def _said(facts: Facts, kind: str) -> list[Event]:
    return [event for event in facts.history.events if event.kind == kind]


def pin_lost(facts: Facts) -> Iterator[Finding]:
    """Cells that were set to float32 and whose pin a later call took away."""
    found = _said(facts, "float32-pin-lost")
    if not found:
        return
    cells = [str(event.data.get("path", "")) for event in found]
    now = found[0].data.get("asked", "float16")
    by_source = found[0].data.get("known_by") == "source"
    yield Finding(
        "to-float-pin-lost-by-later-amp-call",
        f"{', '.join(repr(path) for path in cells[:4])}{' and others' if len(cells) > 4 else ''} was set to float32 "
        f"with to_float, and a later call set it to {now} again: O2, O3 and to_float on the network set every cell "
        "anew.",
        "warning",
        "medium" if by_source else "high",
        "the source pins it before it applies the level" if by_source else "both calls are on the cell's record",
        None,
        None,
        cells[0],
        tuple(Evidence(event.message, None) for event in found[:6]),
        f"Call net.{cells[0]}.to_float(ms.float32) after auto_mixed_precision, or use O1 or auto, which keep it.",
        "",
        (),
        ("normalisation-forced-to-fp16",),
    )


def adam_epsilon(facts: Facts) -> Iterator[Finding]:
    """An optimizer whose epsilon is 0 in the dtype of the parameters."""
    found = _said(facts, "optimizer-epsilon-is-zero")
    view = facts.history.facts.get("run")
    if not found or not isinstance(view, RunView):
        return
    told = found[0].data
    optimizer, epsilon = str(told.get("optimizer", "The optimizer")), float(told.get("epsilon", 0.0))
    low = [str(name) for name in told.get("parameters") or ()] or [""]
    count = int(told.get("count", len(low)))
    bad = [s for s in view.sites("parameter") if s.nonfinite and s.site.path in low]
    became = f"; {', '.join(s.site.path for s in bad[:3])} became NaN or infinite" if bad else ""
    first = min((s.first_nonfinite_step or 1 for s in bad), default=None)
    yield Finding(
        "adam-eps-underflow-fp16-params",
        f"{optimizer} adds {epsilon:g} to its denominator, and that is 0 in float16, "
        f"which {count} parameters are kept in ({', '.join(low[:3])}{', ...' if count > 3 else ''}){became}. "
        "Where the second moment is 0 it divides by 0.",
        "error" if bad else "warning",
        "high",
        "the optimizer's epsilon and the dtypes of the parameters were recorded",
        first,
        facts.history.totals.last_step,
        low[0],
        (
            Evidence(f"{optimizer} with epsilon {epsilon:g}; {low[0]} is float16", None),
            *(Evidence(f"{s.site.path}: {s.nonfinite} non-finite values", s.first_nonfinite_step) for s in bad[:4]),
        ),
        "Keep the parameters and the optimizer's moments in float32, or give an epsilon that float16 holds (1e-4).",
        "",
        (),
        (
            "fp16-update-below-half-ulp",
            "forward-overflow-scale-independent",
            "nan-permanent-params-corrupted",
            "loss-nan-cause-unknown",
            "loss-nan-before-scale-moved",
            "nan-updates-not-skipped",
            "overflow-at-every-scale-from-step-1",
        ),
    )


_SCALES = {
    "sens-differs-from-optimizer-loss-scale": "Give the optimizer loss_scale equal to the train cell's sens.",
    "optimizer-divides-again": "Leave the optimizer's loss_scale at 1; the train cell divides already.",
}


def scale_not_divided(facts: Facts) -> Iterator[Finding]:
    """The loss is multiplied by one scale and the gradients divided by another."""
    for kind, action in _SCALES.items():
        for event in _said(facts, kind)[:1]:
            yield Finding(
                "optimizer-divides-by-another-scale",
                event.message,
                "error",
                "high",
                "both scales were read before the first step",
                None,
                None,
                "",
                (Evidence(", ".join(f"{name} = {value}" for name, value in event.data.items()), None),),
                action,
                "",
                (),
                ("divergence-learning-rate",),
            )
