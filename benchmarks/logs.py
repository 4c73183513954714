"""How fast logs are read: matching lines a second, and megabytes a second of a log that mostly does not match.

Run ``python benchmarks/logs.py [lines] [megabytes]``. Each rate is the best of three, in CPU seconds of this process
(and of ``grep -c`` over the same files, for the ratio), so that other work on the machine counts little.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ampdebug.logs import read_log


def matching(lines: int) -> bytes:
    """A MindFormers log, one step a line, a skipped step now and then."""
    rng = random.Random(1)
    out = []
    for step in range(1, lines + 1):
        overflow = step % 1000 == 0
        out.append(
            "2024-08-19 14:03:22,118 - mindformers[mindformers/core/callback/callback.py:485] - INFO - { Epoch:[  "
            f"1/  2], step:[{step:5d}/{lines}], loss: {7 - 5 * step / lines + rng.gauss(0, 0.05):.3f}, per_step_time: "
            f"2510ms, lr: 9.5e-06, overflow cond: {overflow}, loss_scale: 65536.0, global_norm: "
            f"[{1 + rng.random():.4f}]\n"
        )
    return "".join(out).encode()


def foreign(megabytes: int) -> bytes:
    """Lines of other origin with a step line every 2,000 of them."""
    rng = random.Random(2)
    words = ["tensor", "shape", "worker", "kernel", "compile", "graph", "cache", "dataset", "queue", "host", "device"]
    block = []
    size = 0
    while size < megabytes << 20:
        if len(block) % 2000 == 0:
            line = f"epoch: 1 step: {len(block) + 1}, loss is 2.{rng.randrange(1000, 9999)}\n"
        else:
            line = (
                f"[INFO] 2024-01-01 10:00:00 [{rng.choice(words)}.cc:{rng.randrange(999)}] "
                + " ".join(rng.choices(words, k=14))
                + "\n"
            )
        block.append(line)
        size += len(line)
    return "".join(block).encode()


def megatron(lines: int) -> bytes:
    """A Megatron-LM log: its fields are found by key, not by place."""
    rng = random.Random(3)
    out = []
    for step in range(1, lines + 1):
        out.append(
            f" [2025-01-02 03:04:05.678901] iteration {step:8d}/ 9000000 | consumed samples: {64 * step:12d} | elapsed "
            f"time per iteration (ms): 812.4 | learning rate: 6.680000E-06 | global batch size:    64 | lm loss: "
            f"{7 - 5 * step / lines + rng.gauss(0, 0.05):.6E} | loss scale: 65536.0 | grad norm: "
            f"{1 + rng.random():.3f} | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
        )
    return "".join(out).encode()


def best(path: Path, repeat: int = 3) -> float:
    """CPU seconds to read a log, the best of some."""
    times = []
    for _ in range(repeat):
        begin = time.process_time()
        read_log(path)
        times.append(time.process_time() - begin)
    return min(times)


def grep(path: Path) -> float:
    """CPU seconds that ``grep -c loss`` takes, or NaN where there is no grep."""
    if shutil.which("grep") is None:
        return float("nan")
    times = []
    for _ in range(3):
        before = os.times()
        subprocess.run(["grep", "-c", "loss", str(path)], check=False, capture_output=True)
        after = os.times()
        spent = after.children_user + after.children_system - before.children_user - before.children_system
        times.append(max(spent, 0.01))  # the clock's own step
    return min(times)


def main() -> None:
    """Print the table."""
    lines = int(sys.argv[1]) if len(sys.argv) > 1 else 300_000
    megabytes = int(sys.argv[2]) if len(sys.argv) > 2 else 200
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "match.log")
        for name, make in (("mindformers", matching), ("megatron", megatron)):
            path.write_bytes(make(lines))
            seconds, reference = best(path), grep(path)
            print(f"{name:15} {lines / seconds:12,.0f} lines/s  {seconds / reference:8.1f} x the CPU time of grep -c")
        path.write_bytes(foreign(megabytes))
        size = path.stat().st_size / 1e6
        seconds, reference = best(path), grep(path)
        print(f"foreign lines   {size / seconds:12,.0f} MB/s     {seconds / reference:8.1f} x the CPU time of grep -c")


if __name__ == "__main__":
    main()
