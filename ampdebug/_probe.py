"""What is good: the ready-made judgements of a network under a level, as numbers.

=================== ==================================================================================== ==============
name                value                                                                                passes up to
=================== ==================================================================================== ==============
``output``          error of the outputs on the first batch, ``|y - y32| / |y32|``, norms over all       40 roundings
                    elements
``grad``            the same of all gradients of the loss, as one vector (``grad:relative``)             100 roundings
``grad:cosine``     ``1 - cos`` of the angle between that vector and float32's                           0.01 (8°)
``grad:worst``      error of the parameter with the largest one                                          400 roundings
``finite``          True where outputs, loss and gradients are finite                                    True
``train:N``         how far the loss leaves the band of float32 runs with other seeds, in N steps        1
``overflow:N``      steps that the loss scaler would skip, of N                                          N / 20 more
``metric``          the workload's metric                                                                2 % worse
``metric:N``        the same after N training steps                                                      2 % worse
=================== ==================================================================================== ==============

*A rounding* is the largest relative error of one rounding to the 16-bit format: ``2**-11`` (float16) or ``2**-8``
(bfloat16). Errors of n independent roundings add up to about ``sqrt(n)`` of it, so that 40 of them (2 % in float16) are
what some 1600 operators in a row make of it, more than the depth of common networks; gradients pass twice as many
operators, and cancel more, hence 100 (5 %). One parameter alone may be all cancellation: 400 (20 %).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ampdebug._errors import ArgumentError
from ampdebug._formats import FORMATS

ProbeKind = Literal["output", "grad", "finite", "train", "overflow", "metric"]
GradientMeasure = Literal["relative", "cosine", "worst"]
Array = npt.NDArray[Any]

PROBES = "output, grad (grad:cosine, grad:worst), finite, train:N, overflow:N, metric, metric:N"

_KINDS: dict[str, ProbeKind] = {kind: kind for kind in get_args(ProbeKind)}
_MEASURES: dict[str, GradientMeasure] = {measure: measure for measure in get_args(GradientMeasure)}
_DEFAULT_STEPS: dict[ProbeKind, int] = {"train": 100, "overflow": 20, "metric": 0}
_ROUNDINGS = {"output": 40, "relative": 100, "worst": 400}
_COSINE = 0.01
_NEEDS: dict[ProbeKind, tuple[str, ...]] = {
    "output": (),
    "grad": ("loss",),
    "finite": ("loss",),
    "train": ("loss", "optimizer"),
    "overflow": ("loss", "optimizer"),
    "metric": ("metric",),
}


@dataclass(frozen=True, slots=True)
class ProbeName:
    """A ready-made probe, by name.

    Attributes:
        kind: What is judged.
        measure: Of ``grad``: how gradients are compared.
        steps: Training steps of ``train``, ``overflow`` and ``metric``.
    """

    kind: ProbeKind
    measure: GradientMeasure = "relative"
    steps: int = 0

    @staticmethod
    def parse(text: str) -> ProbeName:
        """From ``"grad:cosine"``, ``"train:200"`` and so on.

        Raises:
            ArgumentError: There is no such probe; the message lists them.
        """
        name, colon, rest = str(text).partition(":")
        kind, measure = _KINDS.get(name), _MEASURES.get(rest if colon else "relative")
        if kind == "grad" and measure is not None:
            return ProbeName(kind, measure)
        if kind in ("output", "finite") and not colon:
            return ProbeName(kind)
        if kind in _DEFAULT_STEPS and (not colon or (rest.isascii() and rest.isdigit())):
            steps = int(rest) if colon else _DEFAULT_STEPS[kind]
            if steps or kind == "metric":
                return ProbeName(kind, steps=steps)
        raise ArgumentError(f"probe={text!r}: must be one of {PROBES}, with N training steps")

    def __str__(self) -> str:
        if self.kind == "grad":
            return f"grad:{self.measure}"
        return f"{self.kind}:{self.steps}" if self.steps else self.kind

    @property
    def needs(self) -> tuple[str, ...]:
        """The parts of a workload that it uses beside network and data."""
        training = ("loss", "optimizer") if self.kind == "metric" and self.steps else ()
        return _NEEDS[self.kind] + training

    @property
    def words(self) -> str:
        """What the value is, for a reader."""
        return {
            "output": "output error",
            "grad": {
                "relative": "gradient error",
                "cosine": "1 - cosine of the gradients",
                "worst": "gradient error of the worst parameter",
            }[self.measure],
            "finite": "outputs, loss and gradients are finite",
            "train": f"loss in {self.steps} steps, in half-widths of float32's band,",
            "overflow": f"skipped steps of {self.steps}",
            "metric": f"metric after {self.steps} steps" if self.steps else "metric",
        }[self.kind]

    def limits(self, dtype: str) -> tuple[float | None, float | None]:
        """What counts as good where the user does not say.

        Args:
            dtype: The 16-bit format.

        Returns:
            ``(tolerance, threshold)`` as for ``bisect``; both None for its own default.
        """
        rounding = FORMATS[dtype].eps / 2
        if self.kind == "output":
            return None, _ROUNDINGS["output"] * rounding
        if self.kind == "grad":
            return None, _COSINE if self.measure == "cosine" else _ROUNDINGS[self.measure] * rounding
        if self.kind == "train":
            return None, 1.0
        if self.kind == "overflow":
            # A dynamic scaler probes its limit now and then by design: PyTorch's and MindSpore's windows of 1000 and
            # 2000 steps make that far fewer than one step in twenty.
            return float(self.steps // 20), None
        return None, None


def relative_error(exact: Sequence[Array], seen: Sequence[Array]) -> float:
    """``|seen - exact| / |exact|``, all arrays together as one vector, in float64.

    Returns:
        NaN where any value is not finite; infinity where ``exact`` is zero and ``seen`` is not.
    """
    return _ratio(*_norms(exact, seen))


def cosine_distance(exact: Sequence[Array], seen: Sequence[Array]) -> float:
    """``1 - cos`` of the angle between the two, all arrays together as one vector: 0 for one direction, 2 for opposite.

    Returns:
        NaN where any value is not finite; 1 where one of the two is zero, 0 where both are.
    """
    one, other = _flat(exact), _flat(seen)
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return math.nan
    lengths = float(np.linalg.norm(one)), float(np.linalg.norm(other))
    if 0.0 in lengths:
        return 0.0 if lengths[0] == lengths[1] else 1.0
    # Normalised first: the product of two large lengths may overflow. |a - b|**2 / 2 is 1 - cos without cancellation.
    return float(np.sum((one / lengths[0] - other / lengths[1]) ** 2)) / 2


def worst_error(exact: Sequence[Array], seen: Sequence[Array]) -> float:
    """The largest relative error of one array.

    A gradient that is zero but for rounding (of a bias before a normalisation, of the keys' bias in attention) has no
    relative error to speak of. So an array is measured against its own norm, but at least against a hundredth of what
    the root mean square of all elements would make its norm.
    """
    total = _flat(exact)
    if not (np.isfinite(total).all() and all(np.isfinite(array).all() for array in seen)):
        return math.nan
    mean_square = float(np.mean(total**2)) if total.size else 0.0
    worst = 0.0
    for one, other in zip(exact, seen, strict=True):
        difference, norm = _norms([one], [other])
        worst = max(worst, _ratio(difference, max(norm, 1e-2 * math.sqrt(mean_square * one.size))))
    return worst


def gradient_error(measure: GradientMeasure, exact: Sequence[Array], seen: Sequence[Array]) -> float:
    """The error of gradients in the given measure."""
    return {"relative": relative_error, "cosine": cosine_distance, "worst": worst_error}[measure](exact, seen)


def _flat(arrays: Sequence[Array]) -> Array:
    return np.concatenate([np.zeros(0), *(np.asarray(array, np.float64).reshape(-1) for array in arrays)])


def _norms(exact: Sequence[Array], seen: Sequence[Array]) -> tuple[float, float]:
    one, other = _flat(exact), _flat(seen)
    assert one.size == other.size, "the same network has outputs of the same shapes"
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return math.nan, math.nan
    return float(np.linalg.norm(other - one)), float(np.linalg.norm(one))


def _ratio(difference: float, norm: float) -> float:
    if norm == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / norm


@dataclass(frozen=True, slots=True)
class LossBand:
    """Where the loss of a float32 training goes, and how far other seeds take it from there.

    The steps are divided into at most five windows of equal length, and what is looked at is the mean loss of each. The
    band around the mean of the runs has half a width of three standard deviations of them, but at least 2 % of the loss
    in the first window: less than that no loss curve shows.

    Attributes:
        middle: Mean loss of each window.
        half_width: Half the width of the band there.
    """

    middle: tuple[float, ...]
    half_width: tuple[float, ...]

    @staticmethod
    def of(runs: Sequence[Sequence[float]]) -> LossBand:
        """From the losses of at least two runs of equally many steps; a band of NaN where one is not finite."""
        if not all(math.isfinite(loss) for run in runs for loss in run):
            return LossBand((math.nan,), (math.nan,))
        windows = np.array([_windows(run) for run in runs])
        assert len(windows) >= 2, "one run has no spread"
        middle = windows.mean(axis=0)
        least = 0.02 * abs(float(middle[0]))
        half = np.maximum(3 * windows.std(axis=0, ddof=1), least)
        return LossBand(tuple(middle.tolist()), tuple(half.tolist()))

    def excess(self, losses: Sequence[float]) -> float:
        """The most that the loss lies above the middle, in half-widths of the band: above 1 it leaves the band.

        A loss below the middle is not held against anyone. NaN where a loss is not finite.
        """
        if not all(map(math.isfinite, (*losses, *self.middle))):
            return math.nan
        windows = _windows(losses)
        above = [
            (loss - middle) / half if half else (0.0 if loss <= middle else math.inf)
            for loss, middle, half in zip(windows, self.middle, self.half_width, strict=True)
        ]
        return max(0.0, *above)


def _windows(losses: Sequence[float]) -> list[float]:
    parts = np.array_split(np.asarray(losses, np.float64), min(5, len(losses)))
    return [float(part.mean()) for part in parts]
