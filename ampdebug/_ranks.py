"""A directory with the logs (or recorded runs) of several ranks: which file is whose, and what they say together."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ampdebug._errors import FormatError
from ampdebug.logs import Coverage, read_log
from ampdebug.rules import Evidence, Finding, History, judge
from ampdebug.rules._facts import Facts
from ampdebug.rules._finding import show
from ampdebug.rules._history import Record

Progress = Callable[[int, int | None], None]

FILES = 20_000
"""Files looked at in a directory; beyond, the rest is passed over."""

RANKS = 4096
_DEPTH = 5
_SCALES = 10_000
# Where a launcher puts the rank: msrun worker_3.log, log_3.txt, rank_3/info.log, torchrun attempt_0/3/stdout.log,
# train_parallel3/log, device3/log3.txt, LOG3, std_rank3.out, stdout.3, slurm's log-3.out.
_RANK_NAMES = (
    re.compile(r"(?i)(?:^|[^a-z])rank[_-]?(\d{1,5})(?!\d)"),
    re.compile(
        r"(?i)(?:^|[^a-z])(?:worker|train_parallel|device|process|proc|gpu|npu|stdout|stderr|log)[_.-]?(\d{1,5})"
        r"(?!\d|[-_]\d\d)"
    ),
    re.compile(r"^(\d{1,5})$"),
)
# train_0.log, train_1.log may be ranks, or attempts: ranks begin at 0.
_WEAK_NAME = re.compile(r"[_.-](\d{1,4})\.(?:log|txt|out|err)(?:\.gz|\.bz2|\.xz)?$")
_TEXT = re.compile(
    r"(?i)(?:\.(?:log|txt|out|err|stdout|stderr|jsonl?|csv|tsv)(?:\.\d+)?(?:\.gz|\.bz2|\.xz)?|^[\w-]*log[\w-]*"
    r"|^std(?:out|err)(?:\.\d+)?)$"
)


@dataclass(frozen=True)
class RankLog:
    """What one rank left.

    Attributes:
        rank: Its number.
        name: Its file, relative to the directory.
        history: What it says.
        coverage: What was read of it, None for a recorded run.
    """

    rank: int
    name: str
    history: History
    coverage: Coverage | None


@dataclass(frozen=True)
class RankLogs:
    """The logs of a directory.

    Attributes:
        name: The directory.
        logs: One a rank, in order of rank.
        passed_over: Files that are no log of a training or a second one of a rank.
        main: The one that is judged: the first to go wrong, else the lowest rank that prints a loss.
    """

    name: str
    logs: tuple[RankLog, ...]
    passed_over: int
    main: RankLog


def rank_of(path: Path) -> int | None:
    """The rank that a relative path names, None where it names none: ``worker_3.log``, ``attempt_0/3/stdout.log``."""
    for pattern in _RANK_NAMES:
        for part in reversed(path.parts):
            match = pattern.search(part)
            if match is not None:
                return int(match.group(1))
    return None


def _files(directory: Path) -> Iterator[Path]:
    count = 0
    for folder, folders, names in os.walk(directory, onerror=None):
        here = Path(folder)
        depth = len(here.relative_to(directory).parts)
        folders[:] = sorted(f for f in folders if not f.startswith(".")) if depth < _DEPTH else []
        for name in sorted(names):
            count += 1
            if count > FILES:
                return
            yield here / name


def read_directory(
    directory: Path, *, format: str | None = None, pattern: str | None = None, progress: Progress | None = None
) -> RankLogs:
    """Read the logs in a directory, one a rank.

    Args:
        directory: Where they are, also in folders of their own.
        format, pattern, progress: As for ``ampdebug.diagnose``.

    Raises:
        FormatError: No file in it is the log of a training.
    """
    named: list[RankLog] = []
    unnamed: list[RankLog] = []
    passed_over = 0
    for path in _files(directory):
        relative = path.relative_to(directory)
        if not _TEXT.search(path.name) or not path.is_file() or len(named) >= 2 * RANKS:
            passed_over += 1
            continue
        try:
            history, coverage = read_log(path, format=format, pattern=pattern, progress=progress)
        except FormatError:
            passed_over += 1
            continue
        if not history.totals.records:
            passed_over += 1
            continue
        rank = rank_of(relative)
        (unnamed if rank is None else named).append(
            RankLog(-1 if rank is None else rank, relative.as_posix(), history, coverage)
        )
    if not named and len(unnamed) > 1:
        named, unnamed = _weakly_named(unnamed)
    if not named and unnamed:
        # No name tells a rank, so there are no ranks to compare: the fullest log is read.
        unnamed.sort(key=lambda log: -log.history.totals.logged)
        named, unnamed = [dataclasses.replace(unnamed[0], rank=0)], unnamed[1:]
    passed_over += len(unnamed)
    found, doubles = _one_each(named)
    passed_over += doubles
    if not found:
        raise FormatError(
            f"{os.fspath(directory)!r} holds neither a recorded run (ampdebug-rank*.sqlite) nor a log of a training: "
            f"{passed_over} files were looked at; give the log file itself, with pattern=... for a private layout"
        )
    return together(os.fspath(directory), (found[rank] for rank in sorted(found)), passed_over)


def _weakly_named(logs: list[RankLog]) -> tuple[list[RankLog], list[RankLog]]:
    numbers = {log.name: int(m.group(1)) for log in logs if (m := _WEAK_NAME.search(log.name)) is not None}
    if len(numbers) < 2 or min(numbers.values()) != 0:
        return [], logs
    named = [dataclasses.replace(log, rank=numbers[log.name]) for log in logs if log.name in numbers]
    return named, [log for log in logs if log.name not in numbers]


def _one_each(named: list[RankLog]) -> tuple[dict[int, RankLog], int]:
    """One log a rank (the fullest), and how many were left out; the same file name in two folders is two nodes."""
    bases: dict[tuple[int, str], int] = {}
    for log in named:
        key = (log.rank, log.name.rpartition("/")[2])
        bases[key] = bases.get(key, 0) + 1
    if any(count > 1 for count in bases.values()) and not any("rank" in log.name.lower() for log in named):
        return {place: dataclasses.replace(log, rank=place) for place, log in enumerate(named[:RANKS])}, 0
    found: dict[int, RankLog] = {}
    for log in named:
        if log.rank not in found or log.history.totals.logged > found[log.rank].history.totals.logged:
            found[log.rank] = log
    return found, len(named) - len(found)


def together(name: str, logs: Iterable[RankLog], passed_over: int = 0) -> RankLogs:
    """Ranks of one training; their loss scales are handed to the rules of the one that is judged."""
    every = tuple(logs)
    begins = {log.rank: _first_bad(log.history) for log in every}
    main = min(
        every,
        key=lambda log: (
            begins[log.rank] if begins[log.rank] is not None else math.inf,
            not log.history.totals.losses,
            log.rank,
        ),
    )
    if len(every) > 1:
        main.history.rank_scales = {log.rank: _scales(log.history) for log in every}
        main.history.scale_disagreements = 0
    return RankLogs(name, every, passed_over, main)


def _first_bad(history: History) -> int | None:
    """Step at which the loss begins to be non-finite for good, None where it does not."""
    onset = Facts(history).onset
    return None if onset is None else onset.step.step


def _scales(history: History) -> list[tuple[int, float]]:
    known = [r for r in history.records if r.scale is not None]
    own = [r for r in known if not r.between]
    if own:
        return [(r.step.step, r.scale or 0.0) for r in own[:_SCALES]]
    return [(place, r.scale or 0.0) for place, r in enumerate(known[:_SCALES])]


def judge_ranks(ranks: RankLogs) -> tuple[Finding, ...]:
    """What the rank that is judged shows, with its file named, and what differs between ranks."""
    main = ranks.main
    findings = [_in_file(finding, main) for finding in judge(main.history)]
    if len(ranks.logs) < 2:
        return tuple(findings)
    findings = [_synchronised(f, ranks) if f.slug == "loss-scale-not-synchronised" else f for f in findings]
    also: dict[str, list[RankLog]] = {}
    extra: dict[str, tuple[Finding, RankLog]] = {}
    known = {finding.slug for finding in findings} | {s for finding in findings for s in finding.explains}
    for log in ranks.logs:
        if log is main:
            continue
        for finding in judge(log.history):
            if finding.severity != "note":
                also.setdefault(finding.slug, []).append(log)
                if finding.slug not in known and finding.slug not in extra:
                    extra[finding.slug] = (finding, log)
    findings = [
        dataclasses.replace(f, consequences=(*f.consequences, f"The same in the logs of {_ranks(also[f.slug])}."))
        if f.slug in also
        else f
        for f in findings
    ]
    spread = _one_rank_first(ranks)
    # The story that begins with one rank's NaN is told once; what the others say about their own end follows from it.
    if spread is None:
        findings += [
            dataclasses.replace(
                _in_file(f, log), sentence=f"In the log of {_ranks(also[slug])}: {f.sentence}", confidence="medium"
            )
            for slug, (f, log) in extra.items()
        ]
    else:
        findings.append(spread)
    order = {"error": 0, "warning": 1, "note": 2}
    findings.sort(key=lambda f: (order[f.severity], f.slug != "loss-scale-not-synchronised"))
    return tuple(findings)


def _in_file(finding: Finding, log: RankLog) -> Finding:
    return dataclasses.replace(
        finding,
        evidence=tuple(dataclasses.replace(e, file=log.name) if e.line is not None else e for e in finding.evidence),
    )


def _ranks(logs: list[RankLog]) -> str:
    numbers = ", ".join(str(log.rank) for log in logs[:8]) + (", ..." if len(logs) > 8 else "")
    return f"rank {numbers}" if len(logs) == 1 else f"ranks {numbers}"


def _shown(log: RankLog, record: Record) -> Evidence:
    return dataclasses.replace(show(record), file=log.name)


def _synchronised(finding: Finding, ranks: RankLogs) -> Finding:
    """The lines of the ranks that print different scales for a step."""
    at = {log.rank: {r.step.step: r for r in log.history.records if r.scale is not None} for log in ranks.logs}
    first = ranks.logs[0]
    for step, record in sorted(at[first.rank].items()):
        other = next((o for o in ranks.logs[1:] if step in at[o.rank] and at[o.rank][step].scale != record.scale), None)
        if other is not None:
            evidence = (_shown(first, record), _shown(other, at[other.rank][step]))
            return dataclasses.replace(finding, first_step=step, evidence=(*finding.evidence[:1], *evidence))
    return finding


def _one_rank_first(ranks: RankLogs) -> Finding | None:
    """NaN that begins on some ranks while others are still, or stay, finite."""
    begins = {log.rank: _first_bad(log.history) for log in ranks.logs if log.history.totals.losses}
    steps = [step for step in begins.values() if step is not None]
    if not steps or len(begins) < 2:
        return None
    first = min(steps)
    early = [log for log in ranks.logs if begins.get(log.rank) == first]
    late = [log for log in ranks.logs if log.rank in begins and begins[log.rank] != first]
    last = max(log.history.totals.last_step or 0 for log in ranks.logs)
    # A rank whose log ends before says nothing.
    late = [log for log in late if (log.history.totals.last_step or 0) > first]
    interval = Facts(early[0].history).interval
    if not late or len(early) > len(late):
        return None
    later = [step for log in late if (step := begins[log.rank]) is not None]
    finite = [log for log in late if begins[log.rank] is None]
    if not finite and later and min(later) - first < interval:
        return None
    fate = (
        f"{_ranks(finite)} stayed finite to step {last}: the replicas have parted"
        if finite
        else f"the others followed at step {min(later)}"
    )
    evidence = []
    for log in (*early[:2], *late[:2]):
        record = next((r for r in log.history.records if r.step.step == first and not r.between), None)
        if record is not None:
            evidence.append(_shown(log, record))
    return Finding(
        "nan-begins-on-one-rank",
        f"The loss is NaN on {_ranks(early)} first, at step {first}; {fate}. What is special to that rank is its share "
        "of the data, or its device.",
        "error" if finite else "warning",
        "high" if interval == 1 else "medium",
        "each rank's log was read, and the others' losses were finite in this step",
        first,
        last,
        _ranks(early),
        tuple(evidence),
        "Look at the batch of that rank in that step (np.isfinite, labels, empty targets), and at the device's health "
        "log. Check for overflow after the gradients are reduced, so that all ranks skip the same updates.",
        "the flight recorder on that rank (keep_bad_steps=2), then ampdebug replay",
    )


def describe(ranks: RankLogs) -> tuple[str, ...]:
    """What was read, in sentences."""
    names = ", ".join(log.name for log in ranks.logs[:4]) + (", ..." if len(ranks.logs) > 4 else "")
    result = [
        f"{len(ranks.logs)} {'rank' if len(ranks.logs) == 1 else 'ranks'} ({names})"
        + (f"; {ranks.passed_over} other files passed over." if ranks.passed_over else ".")
    ]
    if len(ranks.logs) > 1:
        result.append(f"Judged by rank {ranks.main.rank}; the others are compared with it.")
        last = max(log.history.totals.last_step or 0 for log in ranks.logs)
        short = [log for log in ranks.logs if (log.history.totals.last_step or 0) < 0.9 * last]
        if short:
            result.append(f"The logs of {_ranks(short)} end early, at step {short[0].history.totals.last_step}.")
    return tuple(result)
