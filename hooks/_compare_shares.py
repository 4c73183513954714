"""What the operators of a workload's network compute in at a level: the audit's answer, as shares."""

from __future__ import annotations

from collections import Counter

from ampdebug._audit_rows import in_loss, itemsize
from ampdebug._compare_records import Share
from ampdebug.hooks._compare_training import TrainingSpec, elsewhere
from ampdebug.hooks._level_audit import audit


def share_of(spec: TrainingSpec) -> Share:
    """Audits the forward pass on the first batch; the loss is left out, since it is given float32 at every level.

    Raises:
        AmpdebugError: The network cannot be audited at this level.
    """
    workload = spec.workload()
    batch = next(iter(workload.batches(1)))
    with elsewhere():
        report = audit(workload, *batch, level=spec.level, backward=False, mode=spec.mode)  # type: ignore[arg-type]
    rows = [row for row in report.operators if row.computes and not in_loss(row.path)]
    sizes: Counter[str] = Counter()
    for row in rows:
        sizes[row.dtype] += row.elements * itemsize(row.dtype)
    return Share(
        dict(sorted(Counter(row.dtype for row in rows).items())),
        dict(sorted(sizes.items())) if any(sizes.values()) else {},
        dict(Counter(row.kind for row in rows)),
    )
