"""``check_inference``: a trained network's outputs in 16 bits beside float32's, and whether that is good enough."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ampdebug._bisect import Criterion
from ampdebug._bisect_result import Unit, _finite
from ampdebug._diagnose import _wrap
from ampdebug._probe import ProbeName, cosine_distance, relative_error
from ampdebug._sites import OperatorSite, SiteScore
from ampdebug.report.table import plain_table

Array = npt.NDArray[Any]

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class OutputError:
    """One output of the network over all batches; errors are those of the elements that are finite in both.

    Attributes:
        index: Which of the outputs.
        elements: How many values.
        max_error: Largest absolute difference.
        mean_error: Mean absolute difference.
        relative_error: Norm of the difference over float32's norm.
        cosine: Of the angle between the two, all values as one vector.
        top1_agreement: Of an output [N, classes]: part of the rows with the same largest element; None for others.
        nonfinite: Values that are finite in float32 and not in 16 bits.
        nonfinite_float32: Values that are not finite in float32.
    """

    index: int
    elements: int
    max_error: float
    mean_error: float
    relative_error: float
    cosine: float
    top1_agreement: float | None
    nonfinite: int
    nonfinite_float32: int


def output_error(index: int, exact: Sequence[Array], low: Sequence[Array]) -> OutputError:
    """Compares an output's values, a pair of arrays for each batch, in float64.

    Args:
        index: Which output it is.
        exact: In float32.
        low: In 16 bits, widened; of the same shapes.
    """
    one = np.concatenate([np.asarray(a, np.float64).reshape(-1) for a in exact])
    other = np.concatenate([np.asarray(a, np.float64).reshape(-1) for a in low])
    assert one.size == other.size, "the same network has outputs of the same shapes"
    finite = np.isfinite(one)
    both = finite & np.isfinite(other)
    error = np.abs(other[both] - one[both])
    return OutputError(
        index,
        one.size,
        float(error.max(initial=0.0)),
        float(error.mean()) if error.size else math.nan,
        relative_error([one[both]], [other[both]]),
        1.0 - cosine_distance([one[both]], [other[both]]),
        _agreement(exact, low),
        int((finite & ~both).sum()),
        int((~finite).sum()),
    )


def _agreement(exact: Sequence[Array], low: Sequence[Array]) -> float | None:
    if not all(array.ndim == 2 and array.shape[1] > 1 for array in exact):
        return None
    same = rows = 0
    for one, other in zip(exact, low, strict=True):
        # A row with NaN has no largest element, whatever argmax says of it.
        known = ~np.isnan(one).any(1) & ~np.isnan(other).any(1)
        same += int(((one.argmax(1) == other.argmax(1)) & known).sum())
        rows += len(one)
    return same / rows if rows else None


@dataclass(frozen=True, slots=True)
class Layer:
    """A cell and what rounding in its own operators does to the outputs, to first order.

    Attributes:
        path: Cell path, ``""`` for the network itself.
        share: Part of the effect of all cells; where values overflow, those share alike and all others have 0.
        operator: The operator in it with the largest effect.
        line: ``"net.py:33"``, ``""`` where unknown.
        source: Text of that line.
        why: What rounding does there.
        overflows: Values leave the format in the cell.
    """

    path: str
    share: float
    operator: str
    line: str
    source: str
    why: str
    overflows: bool = False


def rank_layers(scores: Iterable[tuple[Unit, SiteScore]]) -> tuple[Layer, ...]:
    """Sums the scores of operators up by cell, the largest first.

    Args:
        scores: Each operator with its score.
    """
    groups: dict[str, list[tuple[Unit, SiteScore]]] = {}
    for unit, score in scores:
        groups.setdefault(unit.path, []).append((unit, score))
    totals = {path: math.fsum(score.score for _, score in group) for path, group in groups.items()}
    overflowing = sum(math.isinf(total) for total in totals.values())
    whole = math.fsum(total for total in totals.values() if math.isfinite(total))
    found = []
    for path, group in groups.items():
        unit, score = max(group, key=lambda pair: pair[1].score)
        total = totals[path]
        if overflowing:
            share = 1 / overflowing if math.isinf(total) else 0.0
        else:
            share = total / whole if whole else 0.0
        found.append(Layer(path, share, unit.operator, unit.line, unit.source, score.why, math.isinf(total)))
    return tuple(sorted(found, key=lambda layer: (-totals[layer.path], layer.path)))


@dataclass(frozen=True)
class InferenceReport:
    """What 16 bits do to a network's outputs. ``str()`` is the report.

    Attributes:
        name: Of the network.
        level: The AMP level.
        dtype: ``"float16"`` or ``"bfloat16"``.
        emulated: The format was played out by rounding, since this device has no kernels for it.
        checkpoint: Where the weights are from; ``""`` for those the network was made with.
        batches: How many were looked at.
        outputs: Each floating-point output.
        metric_float32, metric: The user's metric; NaN where there is none.
        criterion: What counts as good, in words.
        problems: Why the outputs are not good enough; empty where they are.
        layers: The cells, largest effect on the outputs first; empty where they could not be ranked.
        notes: What else to know.
    """

    name: str
    level: str
    dtype: str
    emulated: bool
    checkpoint: str
    batches: int
    outputs: tuple[OutputError, ...]
    metric_float32: float
    metric: float
    criterion: str
    problems: tuple[str, ...]
    layers: tuple[Layer, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """The outputs are within the tolerance."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; non-finite numbers as text."""
        plain: dict[str, Any] = json.loads(
            json.dumps(_finite({"verdict": "within" if self.ok else "outside", **asdict(self)}))
        )
        return plain

    def __str__(self) -> str:
        state = f" with {self.checkpoint}" if self.checkpoint else ""
        verdict = "within the tolerance" if self.ok else "NOT within the tolerance"
        lines = [f"Inference of {self.name}{state} at {self.level} in {self.dtype}: {verdict}."]
        lines.append(
            _wrap(f"Good is: {self.criterion}. {self.batches} batch{'es' if self.batches != 1 else ''}.", "  ")
        )
        lines += [_wrap(f"- {problem}.", "    ", "  ") for problem in self.problems]
        lines += ["", self._table()]
        if not math.isnan(self.metric_float32):
            lines += ["", f"metric: float32 {self.metric_float32:.6g}, {self.dtype} {self.metric:.6g}"]
        if self.layers:
            body = [
                [layer.path or "(network)", f"{layer.share:.0%}", layer.operator, layer.line, layer.why]
                for layer in self.layers[:_SHOWN]
            ]
            lines += ["", plain_table(["cell", "share", "mostly by", "at", "why"], body)]
            if len(self.layers) > _SHOWN:
                lines.append(f"… {len(self.layers) - _SHOWN} more cells (--json shows all)")
        lines += [_wrap(f"note: {note}", "      ", "") for note in self.notes]
        return "\n".join(lines)

    def _table(self) -> str:
        body = [
            [
                str(output.index),
                str(output.elements),
                f"{output.max_error:.3g}",
                f"{output.mean_error:.3g}",
                f"{output.relative_error:.2%}",
                f"{output.cosine:.6f}",
                "" if output.top1_agreement is None else f"{output.top1_agreement:.2%}",
                str(output.nonfinite),
            ]
            for output in self.outputs
        ]
        headers = ["output", "values", "max error", "mean", "relative", "cosine", "top-1 agreement", "not finite"]
        return plain_table(headers, body)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def judge_outputs(
    outputs: Sequence[OutputError],
    *,
    dtype: str,
    metrics: tuple[float, float] | None = None,
    better: Literal["higher", "lower"] = "higher",
    tolerance: float | None = None,
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """The verdict.

    Args:
        outputs: Of the network.
        dtype: The 16-bit format.
        metrics: The metric in float32 and in 16 bits; None to judge by the outputs.
        better: Which way the metric improves.
        tolerance: How much worse the metric may be, in its own unit; without a metric the largest relative error of an
            output. Without it 2 % of the metric, or 40 roundings (2 % in float16) as for bisect's probe ``output``.

    Returns:
        ``(what counts as good, what is wrong, notes)``.
    """
    problems, notes = [], []
    lost = sum(output.nonfinite for output in outputs)
    if lost:
        problems.append(f"{lost} output values are finite in float32 and not in {dtype}")
    before = sum(output.nonfinite_float32 for output in outputs)
    if before:
        notes.append(f"{before} output values are not finite in float32 either; they are left out")
    if metrics is not None:
        criterion = Criterion.beside(metrics[0], 0.0, tolerance, None, better, "metric")
        if not criterion.judge(metrics[1]).passed:
            problems.append(f"the metric is {metrics[1]:.6g} in {dtype}, and {metrics[0]:.6g} in float32")
    else:
        limit = tolerance if tolerance is not None else ProbeName("output").limits(dtype)[1]
        assert limit is not None, "the probe has a limit"
        criterion = Criterion(limit, "lower", f"relative error of each output <= {limit:.3g}")
        for output in outputs:
            if not criterion.judge(output.relative_error).passed:
                problems.append(f"output {output.index} is off by {output.relative_error:.3g} of its norm")
    return criterion.words, tuple(problems), tuple(notes)


def overflow_notes(layers: Iterable[Layer], outputs: Iterable[OutputError], dtype: str) -> tuple[str, ...]:
    """What the outputs do not show: an overflow that a later operator swallows, as ReLU and max-pooling do."""
    cells = [layer.path or "(network)" for layer in layers if layer.overflows]
    if not cells or any(output.nonfinite for output in outputs):
        return ()
    told = ", ".join(cells[:3]) + (", …" if len(cells) > 3 else "")
    return (f"values leave {dtype} in {told}, although the outputs are finite: other data may not be so lucky",)


def scored(units: Iterable[Unit], scores: dict[OperatorSite, SiteScore]) -> list[tuple[Unit, SiteScore]]:
    """Each unit with its score, those without left out."""
    return [(unit, scores[site]) for unit in units for site in unit.sites if site in scores]
