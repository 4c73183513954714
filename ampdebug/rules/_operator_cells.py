"""Rules about cells: normalisation, moving statistics, and whether the level did what was asked."""

from __future__ import annotations

from collections.abc import Iterator

from ampdebug._sites import is_cast
from ampdebug.rules._finding import Finding
from ampdebug.rules._operator_finding import counted, finding, told
from ampdebug.rules._operator_flow import MATMUL, Flow, moves
from ampdebug.rules._operator_records import LOW, Operator

_HEAVY = (*MATMUL, "conv2d", "conv2dext", "conv3d", "conv1d", "conv2dtranspose", "convolution")
_LISTED = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LayerNorm")
# Of the output's size: float16's own rounding gives 0.0007 to 0.0016 for inputs of ordinary size (measured).
_WRONG = 1 / 100


def batch_statistics(flow: Flow) -> Iterator[Finding]:
    """Batch normalisation over a single value, or with statistics that this step spoiled."""
    single = [o for o in flow.step.operators if o.kind == "batchnorm" and _values_per_channel(o) == 1]
    spoiled = [v for v in flow.step.variables if v.name in flow.poisoned]
    if single and (spoiled or _trains(flow, single[0])):
        operator = single[0]
        names = ", ".join(v.name for v in spoiled) or "the moving statistics"
        yield finding(
            flow,
            "bn-variance-of-single-value",
            f"{operator.place} normalises over one value a channel (input shape {operator.operands[0].shape}): the "
            "unbiased "
            f"variance divides by 0, and {names} become NaN while the output stays finite. Every precision does that.",
            severity="error" if spoiled else "warning",
            reason="the shape was seen" + (" and the statistics measured" if spoiled else ""),
            evidence=[f"input of {operator.place}: shape {operator.operands[0].shape}"]
            + [f"{v.name} after the step: {counted(v.after)}" for v in spoiled],
            action="Drop the last incomplete batch (dataset.batch(n, drop_remainder=True)), use more than one row, or "
            "a normalisation that does not look at the batch.",
            where=operator.path,
            explains=("bn-moving-stats-nan-after-skipped-step",),
        )
    elif spoiled and not any(v.before.nonfinite for v in flow.step.variables):
        if any(g.stats is not None and g.stats.nonfinite for g in flow.step.inputs):
            return  # the data is the cause
        births = [b for b in flow.births if b.operator.index < _writer(flow, spoiled[0].path)]
        made = f" {births[0].origin.place} made the first non-finite value." if births else ""
        yield finding(
            flow,
            "bn-moving-stats-nan-after-skipped-step",
            f"The forward pass wrote non-finite values into {', '.join(v.name for v in spoiled)}: skipping the update "
            f"does not undo that, so training goes on and every evaluation fails.{made}",
            severity="error",
            reason="the statistics were finite before the step and are not after it",
            evidence=[f"{v.name} after the step: {counted(v.after)}" for v in spoiled]
            + (told(births[0].origin) if births else []),
            action="Keep the input of this norm finite (the layer before it in float32, or clipped), and restore the "
            "moving statistics from a checkpoint before such a step.",
            where=spoiled[0].path,
            explains=("forward-overflow-scale-independent", "backward-nan-from-noop-clamp", "nan-input-hidden-by-relu",
                      "residual-stream-exceeds-fp16"),
        )  # fmt: skip


def _values_per_channel(operator: Operator) -> int:
    shape = operator.operands[0].shape if operator.operands else ()
    if len(shape) < 2 or not shape[1]:
        return 0
    count = 1
    for place, size in enumerate(shape):
        count *= 1 if place == 1 else size
    return count


def _trains(flow: Flow, operator: Operator) -> bool:
    """The moving statistics of this cell changed."""
    return any(
        v.path == operator.path and not v.trainable and (v.after.min, v.after.max) != (v.before.min, v.before.max)
        for v in flow.step.variables
    )


def _writer(flow: Flow, path: str) -> int:
    return next((o.index for o in flow.step.operators if o.path == path), len(flow.step.operators))


def norm_in_float16(flow: Flow) -> Iterator[Finding]:
    """A normalisation that keeps its parameters or statistics in float16, or computes in it with a visible error."""
    kept = [v for v in flow.step.variables if v.dtype == "float16" and _is_norm(flow, v.path)]
    seen = {o.path for o in flow.step.operators if o.dtype == "float16" and not is_cast(o.name)}
    low = [c for c in flow.step.cells if c.path in seen and "norm" in c.cell_type.lower() and not _mixed(flow, c.path)]
    if not kept and not low:
        return
    errors = {c.path: _error(flow, c.path, c.error) for c in low}
    wrong = [c for c in low if errors[c.path] > _WRONG or (c.input_absmax or 0.0) > 256.0]
    cell = (wrong or low or [next(c for c in flow.step.cells if c.path == kept[0].path)])[0]
    error = errors.get(cell.path, 0.0)
    off = f"; its output is off by up to {100 * error:.2g} % of its size" if error else ""
    what = f"keeps {', '.join(v.name for v in kept[:4])} in float16" if kept else f"computes in float16{off}"
    listed = " although O2's list names it" if cell.cell_type in _LISTED and flow.step.level == "O2" else ""
    yield finding(
        flow,
        "normalisation-forced-to-fp16",
        f"{cell.cell_type} {cell.path!r} {what}{listed}: mean and variance lose bits there, and squares beyond 256 "
        "overflow.",
        # Under O3 a norm in float16 is what was asked for: without a visible error it is worth a note.
        severity="warning" if kept or wrong or (cell.cell_type in _LISTED and flow.step.level == "O2") else "note",
        confidence="high" if kept or wrong else "medium",
        reason="seen at its operators" + (", and compared with the same cell in float32" if error else ""),
        evidence=[
            f"{c.cell_type} {c.path}: float16, inputs up to {c.input_absmax or 0.0:.4g}, error {errors[c.path]:.3g}"
            for c in (wrong or low)
        ]
        + [f"{v.name}: {v.dtype}" for v in kept],
        action=f"Keep normalisations in float32: net.{cell.path}.to_float(ms.float32) after the level was applied, or "
        "level O2, "
        "whose list holds nn.BatchNorm1d/2d/3d and nn.LayerNorm (not GroupNorm, RMSNorm, mint.nn norms or subclasses).",
        where=cell.path,
    )


def _is_norm(flow: Flow, path: str) -> bool:
    return any(c.path == path and "norm" in c.cell_type.lower() for c in flow.step.cells)


def _mixed(flow: Flow, path: str) -> bool:
    """Something in the cell runs in float32: it takes care of itself."""
    return any(o.path == path and o.dtype == "float32" and not is_cast(o.name) for o in flow.step.operators)


def _error(flow: Flow, path: str, error: float | None) -> float:
    own = [r.error for o in flow.step.operators if o.path == path for r in o.results[:1] if r.error is not None]
    return max([*own, error or 0.0])


def pin_lost(flow: Flow) -> Iterator[Finding]:
    """A cell that was set to float32 and runs in 16 bits all the same."""
    lost = [c for c in flow.step.cells if c.pinned_then_lost]
    if not lost:
        return
    listed = ", ".join(f"{c.cell_type} {c.path!r}" for c in lost[:4])
    read = all(c.pin_in_source for c in lost)
    yield finding(
        flow,
        "to-float-pin-lost-by-later-amp-call",
        f"{listed} was set to float32 with to_float, and a later call (level {flow.step.level}) set it to "
        f"{lost[0].asked} again: O2 and O3 set every cell anew.",
        severity="warning",
        confidence="medium" if read else "high",
        reason="to_float(float32) stands in the source before the level is applied"
        if read
        else "its to_float(float32) is on the cell's record, and so is the later call",
        evidence=[f"{c.cell_type} {c.path}: to_float(float32) first, now {c.asked}" for c in lost],
        action=f"Call net.{lost[0].path}.to_float(ms.float32) after auto_mixed_precision, or use O1 or auto, which "
        "keep it.",
        where=lost[0].path,
        explains=("normalisation-forced-to-fp16",),
    )


def level_converted_nothing(flow: Flow) -> Iterator[Finding]:
    """A level was asked for, and every operator ran in float32."""
    step = flow.step
    if step.level not in ("O1", "O2", "O3", "auto", "O2 or O3"):
        return
    heavy = [o for o in step.operators if o.kind in _HEAVY and o.phase == "network"]
    if not heavy or any(o.dtype in LOW for o in heavy):
        return
    low = [o for o in step.operators if o.dtype in LOW or any(p.dtype in LOW for p in o.operands)]
    # The other levels do not go by the class of a cell: where something is converted there, the rest was asked for.
    if low and step.level != "O1":
        return
    names = ", ".join(dict.fromkeys(f"{o.kind} in {o.cell_type} {o.path!r}" for o in heavy))
    changed = (
        f"changed none of the {len(heavy)} matrix products and convolutions ({names}), only "
        f"{', '.join(dict.fromkeys(o.kind for o in low if not is_cast(o.name)))}"
        if low
        else f"changed no operator: {names} and all others computed in {heavy[0].dtype}, as without it"
    )
    yield finding(
        flow,
        "o1-converted-nothing",
        f"Level {step.level} {changed}.",
        severity="warning",
        reason="the dtype of every operator was seen",
        evidence=[f"{o.place}: {o.text} [{o.dtype}]" for o in heavy],
        action="O1 rewrites only nn cells and primitives of its white list: not subclasses of nn.Dense, "
        "mint.nn.Linear, "
        "ops.matmul or @. Use nn.Dense / ops.MatMul cells, amp.custom_mixed_precision with your own list, or level "
        "auto or O2; and use the network that auto_mixed_precision returns.",
        where=heavy[0].path,
    )


def float32_leak(flow: Flow) -> Iterator[Finding]:
    """A float32 tensor that met a 16-bit one, and the float32 operators that follow from it."""
    automatic = flow.step.level == "auto"  # promotes by its own lists, and casts down again where it multiplies
    heavy = [o for o in flow.step.operators if o.kind in _HEAVY and o.phase == "network"]
    for operator in flow.step.operators:
        if operator.phase != "network" or operator.dtype != "float32" or is_cast(operator.name):
            continue
        dtypes = {o.dtype for o in operator.tensors if o.shape}
        if not ({"float32"} <= {o.dtype for o in operator.tensors} and dtypes & set(LOW)):
            continue
        wide = next(o for o in operator.tensors if o.dtype == "float32")
        later = [o for o in flow.after(operator, 60, lambda o: o.dtype == "float32") if o.dtype == "float32"]
        computed = [o for o in later if not is_cast(o.name) and not moves(o) and o.phase == "network"]
        multiplied = [o for o in computed if o.kind in _HEAVY]
        if not computed or (automatic and (operator.kind == "biasadd" or not wide.source)):
            continue
        if heavy and not multiplied and len(computed) < 2:
            continue
        origin = wide.source or "an earlier operator"
        yield finding(
            flow,
            "fp32-leak-keeps-chain-fp32",
            f"{operator.place} takes a 16-bit tensor and a float32 one ({origin}), so its result is float32, and so "
            f"are the {len(computed)} operators after it ({', '.join(dict.fromkeys(o.kind for o in computed[:6]))}).",
            severity="warning" if multiplied else "note",
            confidence="high" if multiplied else "medium",
            reason="the dtypes of all operands were seen",
            evidence=[*told(operator), *(f"then {o.place} [{o.dtype}]" for o in computed[:4])],
            action="Cast the float32 tensor to the other's dtype before (t.astype(x.dtype)), or make the constant in "
            "it.",
            where=operator.path,
        )
        return
