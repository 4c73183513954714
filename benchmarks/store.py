"""How much a recorded run costs on disk, in time and in memory.

    python benchmarks/store.py             # 1,000 cells x 1,000 recorded steps
    python benchmarks/store.py --full      # 1,000 cells x 10,000 recorded steps

Statistics of random tensors are computed once and then recorded again and again with other numbers, so that the time is
that of the store. Writing, summary, map and export each run in a process of their own, whose peak memory is reported
beside that of a process that only imports the library. The first line repeats what one step of 250 rows takes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ampdebug._export import export
from ampdebug._records import DTYPE_CODES, Site, Step
from ampdebug._run import open_run
from ampdebug._stats import StatsTable
from ampdebug._store import RunWriter, run_file

CELLS = 1000
ROWS = 1200
POOL = 8


class Recorded:
    """A finished table."""

    def __init__(self, rows: np.ndarray, exponents: np.ndarray) -> None:
        self.rows = rows
        self.exponents = exponents


def pool(rows: int) -> list[Recorded]:
    """Tables of real statistics that differ from each other as steps do."""
    source = np.random.default_rng(0)
    shapes = [(int(source.integers(64, 60_000)), 2.0 ** int(source.integers(-14, 6))) for _ in range(rows)]
    tables = []
    for _ in range(POOL):
        table = StatsTable()
        for size, scale in shapes:
            values = source.standard_normal(size) * scale
            if source.random() < 0.3:
                values = np.maximum(values, 0)  # as after a ReLU
            table.add(values.astype(np.float16))
        tables.append(Recorded(table.rows.copy(), table.exponents.copy()))
    return tables


def peak_memory() -> float:
    """Highest resident memory of this process so far, in MB."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    import resource  # elsewhere than on Linux; not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 / 1024


def write(out: Path, steps: int, rows: int) -> dict[str, Any]:
    tables = pool(rows)
    with RunWriter(out) as writer:
        kinds = ("output", "gradient")
        ids = [writer.site_id(Site(kinds[i >= CELLS], f"blocks.{i % CELLS}"), (64,)) for i in range(rows)]
        sites, dtypes = np.array(ids, np.int32), np.full(rows, DTYPE_CODES["float16"], np.uint8)
        writer.put_step(Step(1, sampled=True), sites, dtypes, tables[0])
        before = peak_memory()
        durations = np.empty(steps - 1)
        cpu = time.process_time()
        for step in range(2, steps + 1):
            begin = time.perf_counter()
            writer.put_step(
                Step(step, loss=1 / step, loss_scale=1024.0, sampled=True), sites, dtypes, tables[step % POOL]
            )
            durations[step - 2] = time.perf_counter() - begin
        cpu = time.process_time() - cpu
        grown = peak_memory() - before
    size = run_file(out, 0).stat().st_size
    return {
        "CPU a step, ms": cpu / (steps - 1) * 1e3,
        "time a step, median, ms": float(np.median(durations)) * 1e3,
        "time a step, 99 %, ms": float(np.quantile(durations, 0.99)) * 1e3,
        "time a step, longest, ms": float(durations.max()) * 1e3,
        "memory grown while writing, MB": grown,
        "size, MB": size / 1e6,
        "bytes a row": size / rows / steps,
    }


def timed(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def opening(out: Path, steps: int) -> dict[str, Any]:
    result = {"open, ms": timed(lambda: open_run(out).close()) * 1e3}
    with open_run(out) as run:
        assert run.step_count == steps
    return result


def summary(out: Path, steps: int) -> dict[str, Any]:
    with open_run(out) as run:
        begin = time.perf_counter()
        assert run.summary().steps == steps
        return {"summary, s": time.perf_counter() - begin}


def heatmap(out: Path) -> dict[str, Any]:
    with open_run(out) as run:
        return {"map of exponent ranges, s": timed(run.heatmap)}


def series(out: Path) -> dict[str, Any]:
    with open_run(out) as run:
        return {"one site's absmax over all steps, s": timed(lambda: run.series(3, "absmax"))}


def every_row(out: Path) -> dict[str, Any]:
    with open_run(out) as run:
        return {
            "every step with histograms, s": timed(lambda: sum(len(found.exponents) for found in run.iter_tensors()))
        }


def csv(out: Path, steps: int) -> dict[str, Any]:
    last = min(steps, 100)
    with open_run(out) as run, open(os.devnull, "w") as file:
        return {f"csv of {last} steps, s": timed(lambda: export(run, "csv", file, last=last))}


PARTS = ("write", "nothing", "opening", "summary", "heatmap", "series", "every_row", "csv")


def part(name: str, out: Path, steps: int, rows: int) -> dict[str, Any]:
    """One measurement, in this process."""
    work: dict[str, Callable[[], dict[str, Any]]] = {
        "write": lambda: write(out, steps, rows),
        "nothing": dict,
        "opening": lambda: opening(out, steps),
        "summary": lambda: summary(out, steps),
        "heatmap": lambda: heatmap(out),
        "series": lambda: series(out),
        "every_row": lambda: every_row(out),
        "csv": lambda: csv(out, steps),
    }
    result = work[name]()
    if name != "write":
        result["peak memory, MB"] = peak_memory()
    return result


def in_own_process(name: str, out: Path, steps: int, rows: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--part", name, "--out", str(out), "--steps", str(steps), "--rows", str(rows)]
    result: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="10,000 steps in place of 1,000")
    parser.add_argument("--steps", type=int, help="another number of steps")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows a step (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="where the run is written (default: a temporary directory)")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    steps = options.steps or (10_000 if options.full else 1_000)
    if options.part:
        print(json.dumps(part(options.part, options.out, steps, options.rows)))
        return
    place = Path(tempfile.mkdtemp(prefix="ampdebug-store-", dir=options.out))
    try:
        small = in_own_process("write", place / "small", 500, 250)
        print(
            f"250 rows a step: {small['CPU a step, ms']:.2f} ms CPU, {small['time a step, median, ms']:.2f} ms (median)"
        )
        print(f"{CELLS:,} cells, {options.rows:,} rows a step, {steps:,} recorded steps:")
        for name in PARTS:
            for what, value in in_own_process(name, place / "run", steps, options.rows).items():
                print(f"  {name:10} {what:38} {value:10.2f}", flush=True)
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
