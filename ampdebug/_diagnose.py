"""From a recorded run or a training log to the cause, with evidence, or "nothing is wrong"."""

from __future__ import annotations

import html
import math
import os
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from ampdebug._errors import ArgumentError, FormatError
from ampdebug._ranks import RANKS, RankLog, RankLogs, describe, judge_ranks, read_directory, together
from ampdebug.logs import Coverage, read_log
from ampdebug.rules import Finding, History, judge
from ampdebug.rules._timeline import timeline

Progress = Callable[[int, int | None], None]


@dataclass(frozen=True)
class Diagnosis:
    """What happened to the numbers of a run, why, since when, and what to do.

    Attributes:
        source: What was looked at.
        findings: The most explaining one first; empty when nothing was found.
        looked_at: What was read, in sentences.
        unknown: What the source cannot say, in sentences.
        timeline: Loss, loss scale and overflows as text, one line each.
    """

    source: str
    findings: tuple[Finding, ...]
    looked_at: tuple[str, ...]
    unknown: tuple[str, ...] = ()
    timeline: tuple[str, ...] = field(default=(), repr=False)

    @property
    def verdict(self) -> Literal["ok", "findings"]:
        """``"ok"`` when there is no finding above severity ``"note"``."""
        return "findings" if any(f.severity != "note" for f in self.findings) else "ok"

    @property
    def ok(self) -> bool:
        """Nothing is wrong."""
        return self.verdict == "ok"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values (NaN never occurs among them)."""
        return {
            "verdict": self.verdict,
            "findings": [finding.to_dict() for finding in self.findings],
            "source": self.source,
            "looked_at": list(self.looked_at),
            "unknown": list(self.unknown),
        }

    def __str__(self) -> str:
        lines = [f"{self.source}: " + ("nothing is wrong." if self.ok else f"{_count(self.findings)}.")]
        lines += [f"  {line}" for line in self.timeline]
        for number, finding in enumerate(self.findings, 1):
            lines += ["", *_finding_lines(number, finding)]
        lines += ["", "Looked at:", *(_wrap(sentence, "  ") for sentence in self.looked_at)]
        if self.unknown:
            lines += ["Cannot be said from this source:", *(_wrap(sentence, "  ") for sentence in self.unknown)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        color = {"error": "#b00020", "warning": "#9a6700", "note": "#57606a"}
        parts = [
            f"<h3>{html.escape(self.source)}: "
            f"{'nothing is wrong' if self.ok else html.escape(_count(self.findings))}</h3>"
        ]
        if self.timeline:
            parts.append(f"<pre>{html.escape(chr(10).join(self.timeline))}</pre>")
        for f in self.findings:
            evidence = "".join(f"<li><code>{html.escape(str(row))}</code></li>" for row in f.evidence)
            more = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in f.consequences)
            parts.append(
                f"<div><b style='color:{color[f.severity]}'>{html.escape(f.slug)}</b> ({f.severity}, confidence "
                f"{f.confidence}: "
                f"{html.escape(f.confidence_reason)})<p>{html.escape(f.sentence)}</p><ul>{evidence}</ul><p><b>Do:</b> "
                f"{html.escape(f.action)}</p>"
                + (f"<p><b>To confirm:</b> {html.escape(f.confirm)}</p>" if f.confirm else "")
                + (f"<p>Follows from it:</p><ul>{more}</ul>" if more else "")
                + "</div>"
            )
        looked = "".join(f"<li>{html.escape(s)}</li>" for s in (*self.looked_at, *self.unknown))
        return "".join(parts) + f"<ul>{looked}</ul>"


def _count(findings: tuple[Finding, ...]) -> str:
    return "1 finding" if len(findings) == 1 else f"{len(findings)} findings"


def _wrap(text: str, indent: str, first: str | None = None) -> str:
    return textwrap.fill(
        text,
        110,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _finding_lines(number: int, finding: Finding) -> list[str]:
    steps = ""
    if finding.first_step is not None:
        steps = f", step {finding.first_step}"
        if finding.last_step is not None and finding.last_step != finding.first_step:
            steps = f", steps {finding.first_step}-{finding.last_step}"
    where = f", at {finding.where}" if finding.where else ""
    lines = [f"{number}. {finding.slug} ({finding.severity}{steps}{where})", _wrap(finding.sentence, "   ")]
    lines += [f"     {str(row)[:200]}" for row in finding.evidence]
    lines.append(_wrap(f"Do: {finding.action}", "       ", "   "))
    lines.append(_wrap(f"Confidence {finding.confidence}: {finding.confidence_reason}.", "       ", "   "))
    if finding.confirm:
        lines.append(_wrap(f"To confirm: {finding.confirm}.", "       ", "   "))
    lines += [_wrap(f"Follows from it: {sentence}", "       ", "   ") for sentence in finding.consequences]
    return lines


def diagnose(
    source: Any,
    *,
    format: str | None = None,
    pattern: str | None = None,
    against: Any = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Say what happened to the numbers of a run and why.

    Args:
        source: A training log (path, also .gz/.bz2/.xz; ``"-"`` for standard input; an open file), a directory with
            the logs of several ranks, the directory or file of a monitor's run, an ``ampdebug.Trace``, or an open run.
        format: For logs: read only this format of the table (``ampdebug.logs.BY_NAME``).
        pattern: For logs: a regular expression with the named groups step, loss, scale, overflow, grad_norm, lr, rank,
            epoch.
        against: A second source of any of these kinds: where and how the two part.
        progress: Called with (bytes read, size or None) while a log is read.

    Returns:
        The diagnosis; ``str()`` of it is the report.

    Raises:
        FormatError: The source cannot be read, or holds nothing that can be judged.
        ArgumentError: An argument is wrong.

    Example:
        >>> import io
        >>> losses = [b"2.%d" % (99 - i) if i < 20 else b"nan" for i in range(30)]
        >>> lines = [b"epoch: 1 step: %d, loss is %s" % (i, loss) for i, loss in enumerate(losses, 1)]
        >>> print(diagnose(io.BytesIO(b"\\n".join(lines))).findings[0].slug)
        nan-permanent-params-corrupted
    """
    with ExitStack() as opened:
        history, coverage = _open(source, opened, format=format, pattern=pattern, progress=progress)
        ranks = history.facts.get("ranks")
        findings = judge_ranks(ranks) if isinstance(ranks, RankLogs) else judge(history)
        # An error message alone may tell all; a line about a checkpoint does not mean that nothing is wrong.
        if not history.totals.records and not findings and "run" not in history.facts:
            raise FormatError(
                f"{history.name or 'the source'} holds no line of a training step that is known here"
                + (f" ({coverage.lines} lines were read)" if coverage is not None else "")
                + "; name its layout with pattern=r'... (?P<step>\\d+) ... (?P<loss>\\S+) ...', or feed "
                "ampdebug.Trace from the loop"
            )
        looked, unknown = _looked_at(history, coverage), _unknown(history, coverage)
        if isinstance(ranks, RankLogs):
            looked = (*describe(ranks), *looked)
        if against is not None:
            from ampdebug.rules.compare import compare

            other, _ = _open(against, opened, format=format, pattern=pattern, progress=progress)
            findings = (*findings, *compare(history, other))
            looked = (*looked, f"Compared with {other.name}: {other.totals.logged} steps.")
        name = ranks.name if isinstance(ranks, RankLogs) else history.name
        return Diagnosis(name, findings, looked, unknown, timeline(history))


def _open(
    source: Any, opened: ExitStack, *, format: str | None, pattern: str | None, progress: Progress | None
) -> tuple[History, Coverage | None]:
    if isinstance(source, History):
        source.finish()
        return source, None
    history = getattr(source, "history", None)
    if isinstance(history, History):
        history.finish()
        return history, None
    if hasattr(source, "steps") and hasattr(source, "sites"):
        from ampdebug.rules._run import history_of_run

        return history_of_run(source), None
    if isinstance(source, str | os.PathLike) and os.fspath(source) != "-":
        path = Path(source)
        if _is_run(path):
            from ampdebug._run import open_run

            run = opened.enter_context(open_run(path))
            return _with_other_ranks(run, path, opened), None
        if path.is_dir():
            ranks = read_directory(path, format=format, pattern=pattern, progress=progress)
            ranks.main.history.facts["ranks"] = ranks
            return ranks.main.history, ranks.main.coverage
    elif not isinstance(source, str) and not hasattr(source, "read"):
        raise ArgumentError(
            f"source={source!r} is of type {type(source).__name__}; give a path, '-', an open file, a Trace or a run"
        )
    log: str | os.PathLike[str] | IO[Any] = source
    return read_log(log, format=format, pattern=pattern, progress=progress)


def _with_other_ranks(run: Any, path: Path, opened: ExitStack) -> History:
    """The history of a run; where the directory holds other ranks' runs, what they say is compared with it."""
    from ampdebug._run import open_run
    from ampdebug.rules._run import history_of_run

    files = sorted(path.glob("ampdebug-rank*.sqlite")) if path.is_dir() else []
    if len(files) < 2:
        return history_of_run(run)
    logs = []
    for file in files[:RANKS]:
        other = opened.enter_context(open_run(file))
        logs.append(RankLog(int(file.stem.removeprefix("ampdebug-rank")), file.name, history_of_run(other), None))
    ranks = together(os.fspath(path), sorted(logs, key=lambda log: log.rank))
    ranks.main.history.facts["ranks"] = ranks
    return ranks.main.history


def _is_run(path: Path) -> bool:
    try:
        if path.is_dir():
            return any(path.glob("ampdebug-rank*.sqlite"))
        with open(path, "rb") as file:
            return file.read(16) == b"SQLite format 3\x00"
    except OSError:
        return False  # reading it as a log gives the error with its reason


def _looked_at(history: History, coverage: Coverage | None) -> tuple[str, ...]:
    totals = history.totals
    result = []
    if coverage is not None:
        formats = ", ".join(
            f"{name} ({count})" for name, count in sorted(coverage.formats.items(), key=lambda i: -i[1])
        )
        result.append(
            f"{coverage.lines} lines, {coverage.matched} of them about training steps"
            + (f"; formats: {formats}." if formats else ".")
        )
        if coverage.cut_lines:
            result.append(f"{coverage.cut_lines} over-long lines were only read at their beginning.")
        if coverage.damage:
            result.append(f"Only the part before a damage was read: {coverage.damage}.")
        if coverage.slow_lines:
            result.append(f"Your pattern was stopped on {coverage.slow_lines} lines for taking too long.")
    view = history.facts.get("run")
    if view is not None:
        result.append(view.describe())
        result += [f"The monitor said at step {e.step}: {e.message.splitlines()[0]}" for e in history.events[:5]]
    if totals.first_step is not None:
        unit = "records" if history.counts_lines else "steps"
        result.append(f"{totals.logged} logged {unit}, {totals.first_step} to {totals.last_step}.")
    finite = [r.step.loss for r in history.records if r.step.loss is not None and math.isfinite(r.step.loss)]
    if finite:
        every = (
            "every one finite"
            if not totals.bad_losses
            else f"{totals.losses - totals.bad_losses} of {totals.losses} finite"
        )
        result.append(f"Loss from {finite[0]:.4g} to {finite[-1]:.4g}, {every}.")
    if totals.overflows:
        places = [r.step.step for r in history.records if r.step.overflow][:12]
        more = ", ..." if totals.overflows > len(places) else ""
        result.append(f"{totals.overflows} overflowed steps ({', '.join(map(str, places))}{more}).")
    scales = [r.scale for r in history.records if r.scale is not None]
    if scales and (len(set(scales)) > 1 or scales[0] != 1.0):
        result.append(f"Scale from {scales[0]:g} to {scales[-1]:g}, lowest {min(scales):g}, highest {max(scales):g}.")
    if not history.exact:
        result.append(
            "The plain steps of this long record were thinned out; remarkable ones and all counts are complete."
        )
    return tuple(result)


def _unknown(history: History, coverage: Coverage | None) -> tuple[str, ...]:
    totals = history.totals
    if not totals.records:
        return ()
    missing = [
        name
        for name, known in (
            ("the loss", totals.losses),
            ("which steps were skipped", totals.overflow_known),
            ("the scaler's state", totals.scales),
            ("the gradient norm", totals.norms),
        )
        if not known
    ]
    result = []
    if missing:
        result.append(f"Never printed, so unknown: {', '.join(missing)}.")
    if coverage is not None:
        from ampdebug.logs import BY_NAME

        for name in coverage.formats:
            row = BY_NAME.get(name)
            if row is not None and row.loss_is == "mean":
                result.append(f"{name} prints the mean of the loss since the last line, not each value.")
    if history.counts_lines:
        result.append("There are no step numbers; steps are counted in logged lines.")
    return tuple(result)
