"""A run for the tests of the HTML page: all kinds of places, overflow, NaN, zeros, names that only an enemy gives."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from ampdebug import Birth, Cell, Event, Site, Step
from ampdebug._records import DTYPE_CODES
from ampdebug._stats import StatsTable
from ampdebug._store import RunWriter

F16, F32 = np.float16, np.float32
HOSTILE = '</script><script>window.hit=1</script><img src=x onerror="window.hit=2">{{data}}${1}\u2028&lt;'
STEPS = 60
BAD = 50  # from this step on the softmax overflows

CELLS = (
    Cell("", "Net", ("attn", "head", HOSTILE)),
    Cell("attn", "Attention", ("attn.softmax",), asked_dtype="float16"),
    Cell("attn.softmax", "MySoftmax", asked_dtype="float16", compute_dtypes={"Exp": "float16"}),
    Cell("head", "Dense", parameters={"head.weight": "float32"}, asked_dtype="float16", note="tied"),
    Cell(HOSTILE, HOSTILE, note=HOSTILE),
)

BISECT: dict[str, Any] = {
    "status": "found",
    "culprits": [
        {
            "unit": {"name": "a", "operator": "Exp", "path": "attn.softmax", "line": "net.py:33", "source": HOSTILE},
            "rank": 1,
            "why": "12 of 64 values beyond 65504",
            "share": 0.93,
            "needed": "verified",
        }
    ],
    "level": "O2",
    "mode": "real",
    "criterion": "loss within 0.01",
    "reference": 0.25,
    "low": "nan",
    "noise": 0.0003,
    "units": 58,
    "probes": 12,
    "bound": 14,
    "reused": 0,
    "seconds": 41.25,
    "checks": [{"name": "float32 passes", "passed": True, "detail": "0.25"}],
    "notes": [HOSTILE],
    "task": "train.py:workload",
    "confirmations": [{"name": "graph mode", "passed": None, "detail": "could not be compiled here"}],
    "ranking": [
        {"rank": k, "name": "a", "operator": "Exp", "path": HOSTILE, "line": "", "score": 1 / k, "kind": "", "why": "w"}
        for k in range(1, 4)
    ],
    "history": [
        {"units": ["a"] * k, "phase": "search", "passed": k % 2 == 0, "value": k / 8, "seconds": 3.5, "reused": False}
        for k in range(12)
    ],
}
FINDING = {
    "slug": "pin-lost",
    "sentence": HOSTILE,
    "severity": "warning",
    "confidence": "high",
    "confidence_reason": "it was seen",
    "first_step": None,
    "last_step": None,
    "where": HOSTILE,
    "evidence": [{"step": 4, "line": None, "text": HOSTILE}],
    "action": "Pin it after O2.",
    "confirm": "",
    "consequences": ["Its children are in float16."],
}
AUDIT = {
    "level": "O2",
    "findings": [FINDING],
    "rows": [
        {"path": f"blocks.{k}", "bytes": size, "dtype": "float16" if k % 2 else "float32"}
        for k, size in enumerate((300, 20, 1000, 4, 50, 600, 7, 8000, 90))
    ],
    "nested": {HOSTILE: {"deeper": [1, 2, {"x": "inf"}]}},
}


def rows_of(step: int) -> list[tuple[Site, np.ndarray]]:
    """What was measured in a step."""
    rng = np.random.default_rng(step)
    scores = (rng.standard_normal(64) * 2.0 ** (min(step, STEPS) / 20)).astype(F16)
    softmax = np.exp(scores.astype(F32)).clip(0, 60000).astype(F16)
    head = (rng.standard_normal(10) * 1e-4).astype(F16)
    if step >= BAD:
        softmax[:3], head[:] = np.inf, np.nan
    gradient = (rng.standard_normal(30) * 1e-6).astype(F32)
    if step in (3, 7) or step >= BAD:
        gradient[0] = -np.inf
    # Once it is large, so that counts of several bytes and shares next to nothing occur.
    parameter = rng.standard_normal(30_000 if step == STEPS else 30).astype(F32)
    parameter[:5] = 0
    return [
        (Site("input", "attn.softmax", 0, "", "MySoftmax"), scores),
        (Site("output", "attn.softmax", 0, "", "MySoftmax"), softmax),
        (Site("output", "attn.softmax", 1, "", "MySoftmax"), softmax * F16(0.5)),
        (Site("output", "attn", 0, "0", "Attention"), softmax),
        (Site("output", "head", 0, "", "Dense"), head),
        (Site("output", HOSTILE, 0, HOSTILE, HOSTILE), np.zeros(8, F16)),
        (Site("output", "", 0, "", "Net"), head.astype(F32)),
        (Site("gradient", "head.weight"), gradient),
        (Site("parameter", "head.weight"), parameter),
    ]


def step_of(step: int) -> Step:
    """The scalars of a step."""
    bad = step >= BAD
    made = Step(step, loss=math.nan if bad else 4 / step, loss_scale=2.0 ** max(0, 16 - max(0, step - BAD)))
    made.overflow = made.update_skipped = made.nonfinite_gradients = bad or step in (3, 7)
    if bad:
        made.forward_birth = Birth(
            "forward", "attn.softmax", "MySoftmax", "output", 0, "", True, False, 0, 3, 0, 64, "float16"
        )
    return made


def write_run(out: Path, *, steps: int = STEPS, every: int = 1, results: bool = True, copies: int = 1) -> Path:
    """Write the run; statistics in every ``every``-th step, of ``copies`` networks under one root."""
    with RunWriter(out) as writer:
        writer.put_meta({"amp_level": "O2", "mode": "PYNATIVE_MODE", "device": "CPU", "odd": "\ud800 " + HOSTILE})
        writer.put_cells(CELLS)
        writer.put_event(Event(0, "sens-differs", HOSTILE))
        for step in range(1, steps + 1):
            if (step - 1) % every:
                writer.put_step(step_of(step))
                continue
            table = StatsTable(kernel="numpy")
            measured = [
                (site if not copy else dataclasses.replace(site, path=f"copy{copy}.{site.path}"), array)
                for copy in range(copies)
                for site, array in rows_of(step)
            ]
            for _, array in measured:
                table.add(array)
            ids = np.array([writer.site_id(site, array.shape) for site, array in measured], np.int32)
            dtypes = np.array([DTYPE_CODES[str(array.dtype)] for _, array in measured], np.uint8)
            writer.put_step(dataclasses.replace(step_of(step), sampled=True), ids, dtypes, table)
        if results:
            writer.put_result("bisect", BISECT)
            writer.put_result("audit", AUDIT)
            writer.put_result("bisect", {"status": "of another version"})
    return out
