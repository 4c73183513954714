"""Rule: BatchNorm's moving statistics are spoilt while the weights are well."""

from __future__ import annotations

from collections.abc import Iterator

from ampdebug.rules._facts import Facts
from ampdebug.rules._finding import Evidence, Finding
from ampdebug.rules._run import RunView, births

_BN_EXPLAINS = (
    "forward-overflow-scale-independent",
    "loss-spike-recovered",
    "overflow-frequent",
    "residual-stream-exceeds-fp16",
    "reduce-sum-overflow-in-pooling",
    "values-pinned-at-fp16-max",
)
_MOVING = ("moving_mean", "moving_variance", "running_mean", "running_var")


def bn_statistics(facts: Facts) -> Iterator[Finding]:
    """BatchNorm's moving statistics are not finite although the weights are."""
    view = facts.history.facts.get("run")
    if not isinstance(view, RunView):
        return
    single = dict(_single_rows(view))
    bad = [s for s in view.sites("parameter") if s.nonfinite and s.site.path.endswith(_MOVING)]
    weights = [s for s in view.sites("parameter") if s.nonfinite and not s.site.path.endswith(_MOVING)]
    if single:
        path, step = next(iter(single.items()))
        poisoned = [s.site.path for s in bad]
        yield Finding(
            "bn-variance-of-single-value",
            f"In step {step} {view.cells[path].cell_type} {path!r} gets a single value per channel: its unbiased "
            "variance divides by zero, so moving_variance becomes NaN while the training output stays finite, in any "
            "precision.",
            "error",
            "high",
            "the input of the cell has as many elements as it has channels",
            step,
            step,
            path,
            (
                Evidence(f"input of {path}: one row", step),
                *(Evidence(f"{s.site.path}: {s.nonfinite} non-finite values", s.first_nonfinite_step) for s in bad[:3]),
            ),
            "Drop the last incomplete batch (dataset.batch(n, drop_remainder=True)) or use batches of more than one "
            "row.",
            "",
            tuple(f"{name} is not finite." for name in poisoned),
            ("bn-moving-stats-nan-after-skipped-step",),
        )
        return
    if not bad or (weights and min(s.first_nonfinite_step or 0 for s in weights) <= (bad[0].first_nonfinite_step or 0)):
        return
    first = min(s.first_nonfinite_step or 0 for s in bad)
    blamed = [(r, b) for r, b in births(view, facts.history, "forward") if r.step.step <= first]
    births_seen = births(view, facts.history, "forward")
    if len(births_seen) >= 3 and len(births_seen) > 0.5 * facts.history.totals.logged:
        return  # the forward pass overflows step after step; what it does to the statistics follows from that
    cause = f" {blamed[-1][1].cell_type} {blamed[-1][1].path!r} made the first one." if blamed else ""
    skipped = [r for r in facts.records if r.step.step <= first and (r.step.update_skipped or r.step.overflow)]
    when = f"step {skipped[-1].step.step} was skipped" if skipped else "the weights stayed finite"
    yield Finding(
        "bn-moving-stats-nan-after-skipped-step",
        f"{', '.join(s.site.path for s in bad[:4])} hold non-finite values from step {first} on although {when}: the "
        "statistics are written in the forward pass, before anything can be skipped, so training looks well and every "
        f"evaluation fails.{cause}",
        "error",
        "high",
        "only the moving statistics are not finite",
        blamed[-1][0].step.step if blamed else first,
        max(s.last_step or first for s in bad),
        bad[0].site.path.rsplit(".", 1)[0],
        tuple(Evidence(f"{s.site.path}: {s.nonfinite} non-finite values", s.first_nonfinite_step) for s in bad[:6]),
        "Restore the moving statistics from a checkpoint before this step (or recompute them with some batches in "
        "training mode), and keep the input of this norm finite: the layer before it in float32, or clipped.",
        "",
        (),
        _BN_EXPLAINS,
    )


def _single_rows(view: RunView) -> Iterator[tuple[str, int]]:
    """BatchNorm1d cells that were handed one row, and the step."""
    channels = {}
    for path, cell in view.cells.items():
        if cell.cell_type in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"):
            name = next((n for n in cell.parameters if n.endswith(("moving_variance", "running_var", "gamma"))), None)
            shape = view.parameter_shape(name) if name is not None else None
            if shape:
                channels[path] = shape[0]
    if not channels:
        return
    wanted = {i: site.path for i, site in enumerate(view.run.sites) if site.kind == "input" and site.path in channels}
    if not wanted:
        return
    done: set[str] = set()
    for place, found in enumerate(view.run.iter_tensors(exponents=False, on_damage="skip")):
        if place >= 2000 or len(done) == len(channels):
            return
        for site, count in zip(found.site_ids.tolist(), found.rows["count"].tolist(), strict=True):
            where = wanted.get(site)
            if where is not None and where not in done and count == channels[where]:
                done.add(where)
                yield where, found.step
