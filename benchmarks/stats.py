"""How long the statistics of one array take: naive numpy reductions, ampdebug's numpy version, its compiled version.

    python benchmarks/stats.py [--quick]

The contestants take turns within one run, so that a busy machine slows all of them; the best time of each counts.
The naive one computes only 8 numbers, as a hook written in a hurry does, and widens nothing but its sums; ampdebug's
compute 14 and the histogram of 256 exponents.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tabulate import tabulate

from ampdebug._stats import StatsTable, kernel_name, kernel_reason, measure_update, nonfinite_counts


def naive(array: Any) -> tuple[Any, ...]:
    """The usual eight: min, max, absmax, non-finite, small, zeros, sum, sum of squares."""
    size, finite = np.abs(array), np.isfinite(array)
    small = ((size < 6.1035e-5) & (size > 0)).sum()
    wide = array.astype(np.float32)
    return array.min(), array.max(), size.max(), (~finite).sum(), small, (array == 0).sum(), wide.sum(), (wide**2).sum()


def interleaved(contestants: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Best time of each in seconds; short ones are called several times a turn, lest we measure the clock."""
    calls = {}
    for name, call in contestants.items():
        call()
        begin = time.perf_counter()
        call()
        calls[name] = max(1, int(50e-6 / (time.perf_counter() - begin)))
    best = dict.fromkeys(contestants, float("inf"))
    stop = time.perf_counter() + seconds
    turns = 0
    while turns < 5 or time.perf_counter() < stop:
        turns += 1
        for name, call in contestants.items():
            begin = time.perf_counter()
            for _ in range(calls[name]):
                call()
            best[name] = min(best[name], (time.perf_counter() - begin) / calls[name])
    return best


def adder(array: Any, bfloat16: bool, kernel: Any) -> Callable[[], Any]:
    table = StatsTable(kernel=kernel)

    def add() -> None:
        table.clear()
        table.add(array, bfloat16_bits=bfloat16)

    return add


def arrays(size: int) -> dict[str, Any]:
    """Normal values, as activations are; and the ways in which an array can be more work."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(size).astype(np.float32)
    wide = (normal * np.exp2(rng.uniform(-60, 60, size))).astype(np.float32)
    poisoned = normal.copy()
    poisoned[::100] = np.nan
    return {
        "float16": normal.astype(np.float16),
        "bfloat16": (normal.view(np.uint32) >> np.uint32(16)).astype(np.uint16),
        "float32": normal,
        "float64": normal.astype(np.float64),
        "float16, gradients of 1e-6": (normal * np.float32(1e-6)).astype(np.float16),
        "float32, gradients of 1e-7": normal * np.float32(1e-7),
        "float32, after ReLU": np.maximum(normal, 0),
        "float32, 120 binades": wide,
        "float32, 1 % NaN": poisoned,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the time, less steady numbers")
    seconds = 0.05 if parser.parse_args().quick else 0.5
    print(f"compiled version: {kernel_name()} ({kernel_reason()})\n")
    kernels = ["numpy", "numba"] if kernel_name() == "numba" else ["numpy"]
    lines = []
    for size in (100, 10_000, 524_288):
        for name, array in arrays(size).items():
            bfloat16 = name == "bfloat16"
            contestants: dict[str, Callable[[], Any]] = {k: adder(array, bfloat16, k) for k in kernels}
            if not bfloat16:  # numpy has none
                contestants["naive"] = lambda array=array: naive(array)  # type: ignore[misc]
            with np.errstate(all="ignore"):
                best = interleaved(contestants, seconds)
            fastest = best[kernels[-1]]
            times = [f"{best[k] * 1e6:,.1f}" if k in best else "–" for k in ("naive", "numpy", "numba")]
            ratios = [f"{best[k] / fastest:,.1f} ×" if k in best else "–" for k in ("naive", "numpy")]
            lines.append([f"{size:,}", name, *times, *ratios, f"{fastest / size * 1e9:.2f}"])
    head = ["elements", "array", "naive µs", "numpy µs", "numba µs", "naive / best", "numpy / best", "best ns/element"]
    print(tabulate(lines, head, disable_numparse=True, colalign=("right", "left", *["right"] * 6)))

    print("\nThe smaller questions, 524,288 elements, µs:")
    lines = []
    for name, array in arrays(524_288).items():
        if name in ("float16", "bfloat16", "float32"):
            flag = name == "bfloat16"
            best = interleaved(
                {
                    f"{question} {kernel}": call
                    for kernel in kernels
                    for question, call in (
                        (
                            "non-finite",
                            lambda a=array, f=flag, k=kernel: nonfinite_counts(a, bfloat16_bits=f, kernel=k),
                        ),
                        (
                            "update",
                            lambda a=array, f=flag, k=kernel: measure_update(a, a, "fp16", bfloat16_bits=f, kernel=k),
                        ),
                    )
                },
                seconds,
            )
            head = ["array", *best]
            lines.append([name, *(f"{t * 1e6:,.1f}" for t in best.values())])
    print(tabulate(lines, head, disable_numparse=True, colalign=("left", *["right"] * (len(head) - 1))))


if __name__ == "__main__":
    main()
