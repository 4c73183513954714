"""``compare``: every level beside O0, one variable at a time; from what the runs measured to a table and an advice."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ampdebug._bisect_result import _finite
from ampdebug._compare_advice import Advice, Verdict, advise, criterion_of, judge_run
from ampdebug._compare_noise import Gap, Noise, compile_time, late_skips, noise_of, step_time
from ampdebug._compare_records import Measured, Mode, TrainingRun
from ampdebug._diagnose import _wrap
from ampdebug.report.table import plain_table

_REPRODUCIBLE = {
    "bitwise": "two runs with one seed give the same losses, bit by bit",
    "closely": "two runs with one seed differ by up to {repeat:.1g} of the loss, far less than another seed does",
    "no": "NOT reproducible: two runs with one seed differ by up to {repeat:.2g} of the loss",
    "unknown": "it is not known whether a run repeats",
}


@dataclass(frozen=True, slots=True)
class LevelRow:
    """One level in one mode.

    Attributes:
        run: What was measured.
        gap: Its loss against O0's; None for O0 itself and where it did not run.
        verdict: Whether its numbers are good enough.
        step_seconds: Median time of a step; NaN where it did not run.
        compile_seconds: What the first pass and step took longer.
        late_skips: Updates left out for overflow after the first that was made.
    """

    run: TrainingRun
    gap: Gap | None
    verdict: Verdict
    step_seconds: float
    compile_seconds: float
    late_skips: int

    @property
    def overflow_rate(self) -> float:
        """Part of the steps whose update was left out; NaN where it did not run."""
        return len(self.run.skipped) / len(self.run.losses) if self.run.losses else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with non-finite numbers as they are."""
        run, share = self.run, self.run.share
        return {
            "mode": run.mode,
            "level": run.level,
            "status": run.status,
            "reason": run.reason,
            "fits": self.verdict.fits,
            "problems": "; ".join(self.verdict.problems),
            "cautions": "; ".join(self.verdict.cautions),
            "largest_gap": None if self.gap is None else self.gap.largest,
            "final_gap": None if self.gap is None else self.gap.final,
            "final_loss": None if self.gap is None else self.gap.final_loss,
            "metric": run.metric,
            "step_seconds": self.step_seconds,
            "compile_seconds": self.compile_seconds,
            "first_seconds": run.first_seconds,
            "warm_up_seconds": run.warm_up_seconds,
            "memory_bytes": None if run.memory is None else run.memory.used,
            "memory_source": None if run.memory is None else run.memory.source,
            "first_loss_scale": run.first_scale,
            "overflow_rate": self.overflow_rate,
            "late_skips": self.late_skips,
            "low_operators": None if share is None else share.low_operators,
            "low_bytes": None if share is None else share.low_bytes,
            "share_reason": run.share_reason,
        }


@dataclass(frozen=True)
class ComparisonReport:
    """What the levels do to a training. ``str()`` is the report.

    Attributes:
        measured: Everything that was measured.
        noise: What O0 does by itself, for each mode.
        rows: One for each mode and level, O0 first.
        advice: A recommendation for each mode.
    """

    measured: Measured
    noise: dict[Mode, Noise]
    rows: tuple[LevelRow, ...]
    advice: tuple[Advice, ...]

    def row(self, level: str, mode: Mode = "pynative") -> LevelRow:
        """The row of a level.

        Raises:
            KeyError: It was not compared.
        """
        for row in self.rows:
            if (row.run.level, row.run.mode) == (level, mode):
                return row
        raise KeyError((level, mode))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; non-finite numbers as text."""
        measured = self.measured
        data = {
            "name": measured.name,
            "steps": measured.steps,
            "device": measured.device,
            "tolerance": measured.tolerance,
            "load": measured.load,
            "better": measured.better if measured.has_metric else None,
            "recommendation": [advice.to_dict() for advice in self.advice],
            "rows": [row.to_dict() for row in self.rows],
            "noise": [
                {"mode": mode, **asdict(noise), "criterion": self._criterion(mode)}
                for mode, noise in self.noise.items()
            ],
            "float16_kernels": [asdict(kernel) for kernel in measured.kernels],
            "shares": [
                {"mode": run.mode, "level": run.level, "dtype": dtype, "operators": number,
                 "bytes": run.share.bytes.get(dtype)}
                for run in (row.run for row in self.rows) if run.share is not None
                for dtype, number in run.share.operators.items()
            ],
            "losses": {f"{row.run.mode} {row.run.level}": list(row.run.losses) for row in self.rows},
            "seed_losses": {
                f"{mode} seed {run.seed}": list(run.losses)
                for mode, baseline in measured.baselines.items()
                for run in (baseline.repeat, *baseline.seeds)
            },
        }  # fmt: skip
        plain: dict[str, Any] = json.loads(json.dumps(_finite(data)))
        return plain

    def _criterion(self, mode: Mode) -> str | None:
        usable = self.measured.baselines[mode].run.usable
        return criterion_of(self.measured, mode, self.noise[mode]).words if usable else None

    def __str__(self) -> str:
        measured = self.measured
        lines = [f"Levels of {measured.name} on {measured.device}, {measured.steps} steps each.", ""]
        for mode, noise in self.noise.items():
            said = _REPRODUCIBLE[noise.reproducible].format(repeat=noise.repeat)
            units = f"{noise.loss[0]:.2g} to {noise.loss[-1]:.2g}" if len(noise.loss) > 1 else f"{noise.loss[0]:.2g}"
            told = f"O0 in {mode}: {said}; {noise.seeds} seeds, noise of the loss {units}"
            if math.isfinite(noise.metric):
                told += f", of the metric {noise.metric:.2g}"
            lines.append(_wrap(told + ".", "  "))
        lines += ["", self._table(), ""]
        lines.append(_wrap(self._legend(), ""))
        for row in self.rows:
            if row.verdict.problems and row.run.level != "O0":
                lines.append(_wrap(f"{row.run.mode} {row.run.level}: {'; '.join(row.verdict.problems)}.", "  "))
        for advice in self.advice:
            lines += ["", f"Recommended in {advice.mode}: {advice.level or 'nothing'}"]
            lines += [_wrap(f"- {reason}", "    ", "  ") for reason in advice.reasons]
        return "\n".join(lines)

    def _table(self) -> str:
        headers = ["mode", "level", "result", "largest gap", "final gap"]
        if self.measured.has_metric:
            headers.append("metric")
        headers += ["step", "compile", "memory", "skipped", "16-bit ops/bytes"]
        return plain_table(headers, [self._cells(row) for row in self.rows])

    def _cells(self, row: LevelRow) -> list[str]:
        run, share = row.run, row.run.share
        base = self.measured.baselines[run.mode].run
        word = "baseline" if run.level == "O0" else "fits" if row.verdict.fits else "does not fit"
        cells = [run.mode, run.level, word if run.status == "ok" else run.status]
        cells += ["", ""] if row.gap is None else [_units(row.gap.largest), _units(row.gap.final)]
        if self.measured.has_metric:
            cells.append("" if math.isnan(run.metric) else f"{run.metric:.4g}")
        cells.append(_times(row.step_seconds, step_time(base), _seconds))
        cells.append("" if math.isnan(row.compile_seconds) else _seconds(row.compile_seconds))
        used = math.nan if run.memory is None else float(run.memory.used)
        cells.append(_times(used, math.nan if base.memory is None else float(base.memory.used), _megabytes))
        cells.append(f"{len(run.skipped)} of {len(run.losses)}" if run.losses else "")
        cells.append("" if share is None else f"{share.low_operators:.0%} / {_percent(share.low_bytes)}")
        return cells

    def _legend(self) -> str:
        sources = {row.run.memory.source for row in self.rows if row.run.memory is not None}
        memory = {
            frozenset(
                {"process"}
            ): "memory is what the process's resident size grew by at most, and compiling is in it",
            frozenset({"device"}): "memory is the most that was allocated on the device",
        }.get(frozenset(sources), "")
        told = "Gaps of the loss are in units of O0's seed noise, positive is worse; step times are medians"
        return told + (f"; {memory}." if memory else ".")

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _units(value: float) -> str:
    return "not finite" if math.isnan(value) else f"{value:+.2g}"


def _percent(value: float) -> str:
    return "?" if math.isnan(value) else f"{value:.0%}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def _megabytes(value: float) -> str:
    return f"{value / 1e6:.4g} MB"


def _times(value: float, base: float, show: Callable[[float], str]) -> str:
    """``"12.3 ms (0.8x)"``."""
    if math.isnan(value):
        return ""
    return show(value) + (f" ({value / base:.2f}×)" if base > 0 and value != base else "")


def judge_comparison(measured: Measured) -> ComparisonReport:
    """Makes the report from what was measured."""
    noise = {mode: noise_of(baseline) for mode, baseline in measured.baselines.items()}
    rows = []
    for mode, baseline in measured.baselines.items():
        base = baseline.run
        fits = Verdict(base.usable, () if base.usable else (base.reason or "the loss is not finite",))
        rows.append(LevelRow(base, None, fits, step_time(base), compile_time(base), late_skips(base)))
        for run in measured.runs:
            if run.mode == mode:
                gap = noise[mode].gap(run.losses) if run.status == "ok" else None
                verdict = judge_run(run, measured, noise[mode])
                rows.append(LevelRow(run, gap, verdict, step_time(run), compile_time(run), late_skips(run)))
    advice = tuple(advise(measured, mode, noise[mode]) for mode in measured.baselines)
    return ComparisonReport(measured, noise, tuple(rows), advice)
