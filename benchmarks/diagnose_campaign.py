"""The whole campaign: 200 healthy runs, 200 faulty ones, 10,000 damaged logs; writes docs/diagnose-campaign.md.

Run ``python benchmarks/diagnose_campaign.py [healthy] [faulty] [damaged]`` (numbers of runs) from the checkout. The
tests run a small sample of the same. Seeds from 100,000 on are used here, which no rule has been looked at with.
"""

from __future__ import annotations

import collections
import io
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import mutate  # noqa: E402
import simulate  # noqa: E402

from ampdebug._diagnose import diagnose  # noqa: E402
from ampdebug._errors import AmpdebugError  # noqa: E402
from ampdebug.logs import read_log  # noqa: E402

SEED = 100_000


def healthy(count: int) -> list[str]:
    """Rows of the table and the false alarms."""
    formats: collections.Counter[str] = collections.Counter()
    alarms: collections.Counter[str] = collections.Counter()
    wrong = []
    for seed in range(SEED, SEED + count):
        run = simulate.healthy(seed)
        formats[run.style] += 1
        found = diagnose(io.BytesIO(run.text))
        if not found.ok:
            alarms[run.style] += 1
            wrong.append(f"seed {seed}, {run.style}, every {run.interval}: `{found.findings[0].slug}`")
    lines = [
        f"## Healthy runs\n\n{count} runs, {sum(alarms.values())} with a finding above note.\n",
        "| format | runs | alarms |",
    ]
    lines.append("|---|---|---|")
    lines += [f"| {name} | {runs} | {alarms[name]} |" for name, runs in sorted(formats.items())]
    return lines + ([""] + [f"- {text}" for text in wrong] if wrong else []) + [""]


def faulty(count: int) -> list[str]:
    """Rows of the table and the misses."""
    runs: collections.Counter[str] = collections.Counter()
    hits: collections.Counter[str] = collections.Counter()
    wrong = []
    for seed in range(SEED, SEED + count):
        run = simulate.faulty(seed)
        runs[run.fault] += 1
        findings = diagnose(io.BytesIO(run.text)).findings
        if findings and findings[0].slug in run.expected:
            hits[run.fault] += 1
        else:
            got = findings[0].slug if findings else "nothing"
            wrong.append(f"seed {seed}, {run.fault}, {run.style}, every {run.interval}: `{got}`")
    total = sum(hits.values())
    lines = [
        f"## Faulty runs\n\n{count} runs, the cause is the first finding in {total} ({100 * total / count:.1f} %).\n"
    ]
    lines += ["| fault | runs | cause first |", "|---|---|---|"]
    lines += [f"| {name} | {n} | {hits[name]} |" for name, n in sorted(runs.items())]
    return lines + ([""] + [f"- {text}" for text in wrong] if wrong else []) + [""]


def damaged(count: int) -> list[str]:
    """Crashes (anything but an AmpdebugError) and the slowest log, in CPU seconds a megabyte of text."""
    crashes = []
    refused = 0
    slowest = 0.0
    for seed in range(SEED, SEED + count):
        data = mutate.mutated(seed)
        begin = time.process_time()
        try:
            str(diagnose(io.BytesIO(data)))
        except AmpdebugError:
            refused += 1
        except Exception as error:  # noqa: BLE001 - a crash of any kind is what is counted
            crashes.append(f"seed {seed}: {type(error).__name__}: {error}")
        seconds = time.process_time() - begin
        if seconds > 1.0:
            # A compressed log is judged by what it holds, and a small one as if it were a megabyte.
            seconds /= max(read_log(io.BytesIO(data))[1].bytes / 1e6, 1.0)
        slowest = max(slowest, seconds)
    lines = [
        "## Damaged logs\n",
        f"{count} logs with flipped bytes, cut, swapped, repeated and dropped lines, odd numbers, endless lines, deep "
        f"nesting, control codes, other encodings, broken compression: {len(crashes)} crashes, {refused} refused with "
        f"a sentence, slowest {slowest:.2f} s a megabyte of text.",
    ]
    return lines + [f"- {text}" for text in crashes] + [""]


def main() -> None:
    """Run it and write the table."""
    counts = [int(text) for text in sys.argv[1:]] + [200, 200, 10_000][len(sys.argv) - 1 :]
    lines = [
        "# Diagnose campaign\n",
        "Written by `benchmarks/diagnose_campaign.py`; the runs come from `tests/simulate.py`.\n",
    ]
    lines += healthy(counts[0]) + faulty(counts[1]) + damaged(counts[2])
    (ROOT / "docs" / "diagnose-campaign.md").write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
