"""How many probes the search for a minimal set needs, beside plain delta debugging.

    python benchmarks/search.py [--repetitions N]

Sets are planted among ``n`` items: ``k`` items that are needed ("single"), next to each other ("clustered"), ``k``
pairs of which either item will do ("either"). A ranking is *good* if the planted items score three standard deviations
above the others, *random* if it says nothing. Each cell is mean/largest number of calls of the predicate over all
draws, in brackets how many of them on average only verify the answer.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Sequence

from ampdebug._search import find_minimal_set

Predicate = Callable[[frozenset[int]], bool]


def planted(kind: str, n: int, k: int, rng: random.Random) -> list[frozenset[int]]:
    """Clauses: a set passes if it holds an item of each."""
    if kind == "clustered":
        first = rng.randrange(n - k + 1)
        return [frozenset({first + i}) for i in range(k)]
    if kind == "either":
        items = rng.sample(range(n), 2 * k)
        return [frozenset(items[2 * i : 2 * i + 2]) for i in range(k)]
    return [frozenset({item}) for item in rng.sample(range(n), k)]


def ranking(n: int, clauses: Sequence[frozenset[int]], good: bool, rng: random.Random) -> list[int]:
    """Items by a noisy score, highest first."""
    wanted = frozenset().union(*clauses) if good else frozenset()
    score = [rng.gauss(3.0 if item in wanted else 0.0, 1.0) for item in range(n)]
    return sorted(range(n), key=lambda item: -score[item])


def delta_debugging(n: int, holds: Predicate) -> int:
    """Zeller's ddmin with a cache, for comparison; returns how many calls it made."""
    seen: dict[frozenset[int], bool] = {}

    def test(items: Sequence[int]) -> bool:
        key = frozenset(items)
        if key not in seen:
            seen[key] = holds(key)
        return seen[key]

    items, parts = list(range(n)), 2
    while len(items) >= 2:
        size = -(-len(items) // parts)
        chunks = [items[i : i + size] for i in range(0, len(items), size)]
        chosen = next((chunk for chunk in chunks if test(chunk)), None)
        if chosen is not None:
            items, parts = chosen, 2
            continue
        rests = ([item for item in items if item not in frozenset(chunk)] for chunk in chunks)
        rest = next((rest for rest in rests if test(rest)), None) if parts > 2 else None
        if rest is not None:
            items, parts = rest, max(parts - 1, 2)
        elif parts >= len(items):
            break
        else:
            parts = min(len(items), 2 * parts)
    return len(seen)


def measure(kind: str, n: int, k: int, repetitions: int, *, good: bool) -> str:
    """One cell of the table for our search."""
    probes, verification = [], []
    for seed in range(repetitions):
        rng = random.Random(f"{kind} {n} {k} {seed}")
        clauses = planted(kind, n, k, rng)
        result = find_minimal_set(ranking(n, clauses, good, rng), lambda items, c=clauses: all(x & items for x in c))
        if not result.verified:
            raise SystemExit(f"{kind} n={n} k={k} seed={seed}: the answer is not verified")
        probes.append(result.probes)
        verification.append(result.verification_probes)
    return f"{statistics.mean(probes):.1f}/{max(probes)} ({statistics.mean(verification):.1f})"


def measure_delta_debugging(kind: str, n: int, k: int, repetitions: int) -> str:
    """One cell of the table for ddmin."""
    calls = []
    for seed in range(repetitions):
        clauses = planted(kind, n, k, random.Random(f"{kind} {n} {k} {seed}"))
        calls.append(delta_debugging(n, lambda items, c=clauses: all(x & items for x in c)))
    return f"{statistics.mean(calls):.1f}/{max(calls)}"


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=30, help="draws for each row (default 30)")
    repetitions = parser.parse_args().repetitions
    write = sys.stdout.write
    write(f"{'kind':<10} {'n':>5} {'k':>2}  {'good ranking':>16}  {'random ranking':>16}  {'ddmin':>12}\n")
    for kind in ("single", "clustered", "either"):
        for n, k in ((50, 1), (500, 1), (500, 3), (500, 5), (5000, 5)):
            good = measure(kind, n, k, repetitions, good=True)
            blind = measure(kind, n, k, repetitions, good=False)
            plain = measure_delta_debugging(kind, n, k, min(repetitions, 10))
            write(f"{kind:<10} {n:>5} {k:>2}  {good:>16}  {blind:>16}  {plain:>12}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
