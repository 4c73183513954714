"""Rules over the cells and statistics of a monitor's run that are not about a birth: silent faults and settings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampdebug.rules._facts import Facts
from ampdebug.rules._finding import Evidence, Finding
from ampdebug.rules._history import Record
from ampdebug.rules._run import RunView, births

if TYPE_CHECKING:
    from ampdebug._summary import SiteSummary


def _view(facts: Facts) -> RunView | None:
    view = facts.history.facts.get("run")
    return view if isinstance(view, RunView) else None


def norm_output_zero(facts: Facts) -> Iterator[Finding]:
    """A norm whose output is exactly zero while its input is large: the squares overflowed, and x * rsqrt(inf) is 0."""
    view = _view(facts)
    if view is None:
        return
    inputs: dict[tuple[str, int], SiteSummary] = {(s.site.path, s.site.call): s for s in view.sites("input")}
    for out in view.sites("output"):
        given = inputs.get((out.site.path, out.site.call))
        cell = view.cells.get(out.site.path)
        if given is None or cell is None or cell.children:
            continue
        named = f"{cell.cell_type} {cell.path.rpartition('.')[2]}".lower()
        norm = "norm" in named or "rms" in named
        # Squares of more than 256 leave float16; a zero of other origin has a zero or a small input.
        if not norm or out.zeros != out.count or out.nonfinite or given.nonfinite or not given.absmax > 256.0:
            continue
        if "float16" not in (*out.dtypes, *given.dtypes):
            continue
        yield Finding(
            "rmsnorm-square-overflow-output-zero",
            f"The output of {cell.cell_type} {cell.path!r} is exactly 0 in all {out.count} elements although its input "
            f"reaches {given.absmax:.4g}: squares above 256 overflow float16, and x * rsqrt(inf) is 0, with no NaN "
            "anywhere.",
            "error",
            "high",
            "the input is large and finite, the output exactly zero, in float16",
            out.first_step,
            out.last_step,
            cell.path,
            (
                Evidence(
                    f"input of {cell.path}: largest {given.absmax:.5g}, {', '.join(given.dtypes)}", given.absmax_step
                ),
                Evidence(f"output of {cell.path}: {out.zeros} zeros of {out.count}", out.first_step),
            ),
            f"Compute the norm in float32: net.{cell.path}.to_float(ms.float32) after the level is applied. (A cast "
            "inside a cell that O2 or O3 converted is taken back in PyNative mode.)",
            "",
            (),
            (
                "gradients-flushed-to-zero-without-loss-scale",
                "loss-denominator-overflow-loss-zero",
                "backward-nan-from-noop-clamp",
                "normalisation-forced-to-fp16",
            ),
        )


def level_converted_nothing(facts: Facts) -> Iterator[Finding]:
    """An AMP level was asked for and no value ever went through a narrow format."""
    view = _view(facts)
    if view is None or view.level not in ("O1", "O2", "O3", "AUTO"):
        return
    outputs = [s for s in view.sites("output") if s.count and math.isfinite(s.absmax) and s.absmax > 0]
    if not outputs or any(set(s.dtypes) & {"float16", "bfloat16"} for s in view.summary if s.rows):
        return
    # A value that went through float16 has at most 10 explicit mantissa bits; one such site is proof of a conversion.
    if any(s.mantissa_bits <= 10 for s in outputs):
        return
    computed = [c for c in view.cells.values() if c.compute_dtypes]
    if any(d in ("float16", "bfloat16") for c in computed for d in c.compute_dtypes.values()):
        return
    seen = bool(computed) and all(c.compute_source in ("operators", "trace") for c in computed)
    if view.level != "O1" and not seen:
        return
    kinds = sorted({s.site.cell_type for s in outputs if s.site.path})
    yield Finding(
        "o1-converted-nothing",
        f"Level {view.level} was applied, yet nothing runs in a narrow format: every output of "
        f"{', '.join(kinds[:6]) or 'the network'} uses more mantissa bits than float16 has, as in float32.",
        "warning",
        "high",
        "no value shows a rounding to float16, and no cell computes in it",
        outputs[0].first_step,
        outputs[0].last_step,
        "",
        tuple(
            Evidence(
                f"output of {s.site.path or 'the network'}: {s.mantissa_bits} mantissa bits, {', '.join(s.dtypes)}",
                s.first_step,
            )
            for s in outputs[:5]
        ),
        "O1 only rewrites nn cells and primitives of its white list: not subclasses of nn.Dense, mint.nn.Linear, "
        "ops.matmul or @. Use nn.Dense / ops.MatMul cells, amp.custom_mixed_precision with your own list, or level "
        "auto or O2.",
    )


_PRODUCTS = ("MatMul", "BatchMatMul", "MatMulExt", "Conv2D", "BatchMatMulExt", "Dense", "matmul")


def float32_leak(facts: Facts) -> Iterator[Finding]:
    """Cells that a level set to 16 bits and whose matrix products run in float32 all the same."""
    view = _view(facts)
    if view is None or view.level not in ("O1", "O2", "O3", "AUTO", "O2 OR O3", "MANUAL"):
        return
    inputs: dict[str, SiteSummary] = {s.site.path: s for s in view.sites("input")}
    wide, narrow = [], False
    for cell in view.cells.values():
        if cell.compute_source not in ("operators", "trace"):
            continue
        products = {n: d for n, d in cell.compute_dtypes.items() if n.rsplit(".", 1)[-1].strip("_") in _PRODUCTS}
        narrow = narrow or any(dtype in ("float16", "bfloat16") for dtype in products.values())
        given = inputs.get(cell.path)
        if (
            cell.asked_dtype in ("float16", "bfloat16")
            and products
            and set(products.values()) == {"float32"}
            and given is not None
        ):
            wide.append((cell, products))
    if not wide or not narrow:
        return
    cell, products = wide[0]
    yield Finding(
        "fp32-leak-keeps-chain-fp32",
        f"{cell.cell_type} {cell.path!r} was set to {cell.asked_dtype}, but its {', '.join(products)} run in float32"
        + (f", as in {len(wide) - 1} more cells" if len(wide) > 1 else "")
        + ": a float32 tensor (a constant, a buffer, a parameter) meets the 16-bit one and promotes what follows.",
        "warning",
        "medium",
        "the dtypes of the operators were seen",
        None,
        None,
        cell.path,
        tuple(Evidence(f"{c.cell_type} {c.path}: {p}", None) for c, p in wide[:6]),
        "Cast the float32 tensor to the other's dtype before (t.astype(x.dtype)), or make the constant in it.",
        "ampdebug.check(net, *inputs): it names the operator at which the two meet",
    )


def saturated(facts: Facts) -> Iterator[Finding]:
    """Outputs that sit exactly on float16's largest number."""
    view = _view(facts)
    if view is None:
        return
    pinned = [s for s in view.sites("output") if s.saturated >= 3 and "float16" in s.dtypes]
    if not pinned:
        return
    worst = max(pinned, key=lambda s: s.saturated / s.count)
    yield Finding(
        "values-pinned-at-fp16-max",
        f"{worst.saturated} of {worst.count} elements of the output of {worst.site.cell_type} {worst.site.path!r} are "
        "exactly 65504: an overflow is clipped or saturated there and does not show as inf.",
        "warning",
        "medium",
        "no ordinary value hits the largest number of the format again and again",
        worst.first_step,
        worst.last_step,
        worst.site.path,
        tuple(
            Evidence(f"output of {s.site.path}: {s.saturated} of {s.count} at 65504", s.absmax_step) for s in pinned[:5]
        ),
        "Keep this layer in float32 or bring its values down; on Ascend MS_ASCEND_CHECK_OVERFLOW_MODE=INFNAN_MODE "
        "shows the overflow.",
    )


def backward_nan(facts: Facts) -> Iterator[Finding]:
    """A finite forward pass, and NaN (not inf) in the backward one at the same place again and again."""
    view = _view(facts)
    if view is None:
        return
    found = [
        (r, b)
        for r, b in births(view, facts.history, "backward")
        if b.nan
        and not (b.pos_inf or b.neg_inf)
        and r.step.forward_birth is None
        and b.inputs_finite is not False
        and not r.bad_loss
    ]
    if not found:
        return
    record, birth = found[0]
    same = [r for r, b in found if b.path == birth.path]
    later = [s for s in view.sites("parameter") if (s.first_nonfinite_step or 0) > record.step.step]
    if len(same) < 2 and facts.history.totals.logged > 3 and not later:
        return
    if _scale_may_do_it(facts, same):
        return
    yield Finding(
        "backward-nan-from-noop-clamp",
        f"The forward pass is finite, but the gradient at {birth.path!r} is NaN ({birth.nan} of {birth.count} "
        f"elements) in {len(same)} steps: a derivative that is inf times 0 (sqrt, norm or log at 0 behind a clamp, "
        "maximum or where), not an overflow of the scale.",
        "error",
        "medium",
        "the gradient is NaN without any infinity, at the same place each time",
        record.step.step,
        same[-1].step.step,
        birth.path,
        (Evidence(f"{birth.kind} at {birth.path}: {birth.nan} NaN of {birth.count}, {birth.dtype}", record.step.step),),
        "Make the argument safe before the function, not its result after it: sqrt(maximum(x, eps)) instead of "
        "maximum(sqrt(x), eps), where(mask, x, 1) inside the log.",
        "ampdebug replay of this step: it names the operator",
        (),
        (
            "forward-overflow-scale-independent",
            "overflow-at-every-scale-from-step-1",
            "every-update-dropped",
            "overflow-frequent",
            "nan-permanent-params-corrupted",
            "nan-updates-not-skipped",
            "loss-nan-cause-unknown",
        ),
    )


def _scale_may_do_it(facts: Facts, found: list[Record]) -> bool:
    """The scale overflows in this run, and in these steps too the backward pass began with more than ever went well.

    A scaled gradient that overflows inside a product is NaN at once, so that NaN alone does not exclude the scale.
    """
    known = {id(record) for record in found}
    if not any(id(record) not in known for record in facts.overflows):
        return False

    def start(records: list[Record]) -> list[float]:
        return [abs(r.step.loss) * r.scale for r in records if r.step.loss is not None and r.scale]

    good, bad = start([r for r in facts.clean if r.step.overflow is False]), start(found)
    return bool(good and bad) and min(bad) > 2 * max(good)


def updates_round_away(facts: Facts) -> Iterator[Finding]:
    """Float16 parameters that do not change although they have gradients."""
    view = _view(facts)
    if view is None:
        return
    gradients = {s.site.path: s for s in (*view.sites("gradient"), *view.sites("reduced_gradient"))}
    stuck = []
    for update in view.sites("update"):
        gradient = gradients.get(update.site.path)
        if gradient is None or gradient.nonfinite or not gradient.absmax > 0 or update.steps < 3:
            continue
        moving = gradient.count - gradient.zeros
        if view.parameter_dtype(update.site.path) == "float16" and moving > 0.5 * gradient.count:
            unchanged = update.zeros / max(update.count, 1)
            if unchanged > 0.9:
                stuck.append((unchanged, update))
    if not stuck:
        return
    share, worst = max(stuck, key=lambda item: item[0])
    yield Finding(
        "fp16-update-below-half-ulp",
        f"{100 * share:.0f} % of the elements of {worst.site.path!r} never change although their gradients are not "
        "zero: the parameter is float16, and an update of less than half a unit in its last place rounds away.",
        "warning",
        "high",
        "gradients and updates of the same steps were measured",
        worst.first_step,
        worst.last_step,
        worst.site.path,
        tuple(Evidence(f"update of {u.site.path}: {100 * s:.1f} % unchanged", u.first_step) for s, u in stuck[:5]),
        "Keep the parameters in float32 (the levels O1-O3 do; do not cast the network with .to_float or parameters to "
        "float16) so that they serve as master weights.",
        "",
        (),
        ("gradients-flushed-to-zero-without-loss-scale",),
    )


def gradients_flushed(facts: Facts) -> Iterator[Finding]:
    """Gradients, as they arrived, at the bottom of float16, and no loss scale that lifts them.

    Parameters are float32 and so are the gradients handed to them, but under a level they come out of float16 products:
    what arrives below 2**-14 has lost bits there, and what would be below 2**-25 is zero.
    """
    view = _view(facts)
    if view is None or view.level == "O0" or facts.history.facts.get("bfloat16"):
        return
    scale = facts.scales[-1] if facts.scales else 1.0
    low = [s for s in view.sites("gradient") if s.count > s.zeros]
    unscaled_rows = any(r.step.extra.get("gradients_unscaled") for r in facts.records) and scale > 1.0
    if not view.level or len(low) < 2 or unscaled_rows or facts.onset is not None:
        return
    weak = [s for s in low if s.subnormal + s.flushed > 0.5 * (s.count - s.zeros)]
    if len(weak) < 0.5 * len(low):
        return
    unscaled = scale <= 1.0
    worst = max(weak, key=lambda s: (s.subnormal + s.flushed) / (s.count - s.zeros))
    share = (worst.subnormal + worst.flushed) / (worst.count - worst.zeros)
    yield Finding(
        "gradients-flushed-to-zero-without-loss-scale" if unscaled else "scale-too-low-headroom",
        f"The gradients of {len(weak)} of {len(low)} parameters are mostly below 2**-14, where float16 loses bits and "
        f"then flushes to zero (worst: {worst.site.path!r}, {100 * share:.0f} %), "
        + ("and no loss scale lifts them." if unscaled else f"at a loss scale of {scale:g}."),
        "warning",
        "medium",
        "counted over all steps with statistics",
        worst.first_step,
        worst.last_step,
        worst.site.path,
        tuple(
            Evidence(
                f"{s.site.path}: {s.subnormal + s.flushed} of {s.count - s.zeros} below 2**-14, largest {s.absmax:.4g}",
                s.first_step,
            )
            for s in weak[:5]
        ),
        "Use a dynamic loss scale (amp.DynamicLossScaler(2**16, 2, 1000))"
        if unscaled
        else "Raise the loss scale, or let it grow.",
        "ampdebug.simulate_scale with the recorded gradients: it counts what each scale would flush",
    )


def norm_in_float16(facts: Facts) -> Iterator[Finding]:
    """A normalisation that keeps its parameters or statistics in float16, or computes large values in it."""
    view = _view(facts)
    if view is None:
        return
    inputs: dict[str, SiteSummary] = {s.site.path: s for s in view.sites("input")}
    bad = []
    for cell in view.cells.values():
        if "norm" not in cell.cell_type.lower() or cell.children:
            continue
        kept = [name for name, dtype in cell.parameters.items() if dtype == "float16"]
        seen = cell.compute_source in ("operators", "trace") and "float16" in cell.compute_dtypes.values()
        given = inputs.get(cell.path)
        # Squares of more than 256 leave float16. Below that a norm in float16 is what O3 is asked for, and it is off by
        # an ulp or two.
        large = given is not None and given.absmax > 256.0
        if kept or (seen and large):
            bad.append((cell, kept, given))
    if not bad:
        return
    cell, kept, given = bad[0]
    what = f"keeps {', '.join(kept)} in float16" if kept else "computes in float16"
    size = f", with inputs up to {given.absmax:.4g}" if given is not None and not kept else ""
    yield Finding(
        "normalisation-forced-to-fp16",
        f"{cell.cell_type} {cell.path!r} {what}{size}: mean and variance lose bits there or overflow.",
        "warning",
        "medium",
        "seen in the dtypes of the cell",
        None,
        None,
        cell.path,
        tuple(Evidence(f"{c.cell_type} {c.path}: {', '.join(k) or c.compute_dtypes}", None) for c, k, _ in bad[:6]),
        f"Keep normalisations in float32: net.{cell.path}.to_float(ms.float32) after the level was applied, or level "
        "O2, whose black list holds nn.BatchNorm and nn.LayerNorm (not GroupNorm, RMSNorm or subclasses).",
    )
