"""What the runs of a comparison gave, as plain values; the judge reads them, the hooks make them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["pynative", "graph"]
Status = Literal["ok", "failed", "crashed", "timeout"]

LEVELS = ("O0", "O1", "O2", "O3", "auto")
MODES: tuple[Mode, ...] = ("pynative", "graph")


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one training.

    Attributes:
        before: Bytes in use before the network was made.
        peak: The most bytes in use from then on.
        source: ``"device"``: what MindSpore allocated there; ``"process"``: resident memory of the process.
    """

    before: int
    peak: int
    source: Literal["device", "process"]

    @property
    def used(self) -> int:
        """What the training took, in bytes."""
        return max(0, self.peak - self.before)


@dataclass(frozen=True, slots=True)
class Share:
    """What the operators of one forward pass compute in.

    Attributes:
        operators: ``{dtype: number of operators}`` of those that compute floats.
        bytes: ``{dtype: bytes of their results}``; empty where the sizes are not known.
        kinds: ``{operator: how often}`` inside the network, such as ``{"conv2d": 2, "matmul": 1}``.
    """

    operators: Mapping[str, int]
    bytes: Mapping[str, int]
    kinds: Mapping[str, int] = field(default_factory=dict)

    @property
    def low_operators(self) -> float:
        """Share of the operators that compute in 16 bits."""
        return _low(self.operators)

    @property
    def low_bytes(self) -> float:
        """Share of the bytes that are results in 16 bits; NaN where the sizes are not known."""
        return _low(self.bytes) if self.bytes else math.nan


def _low(counts: Mapping[str, int]) -> float:
    total = sum(counts.values())
    return sum(n for dtype, n in counts.items() if dtype in ("float16", "bfloat16")) / total if total else 0.0


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One training at a level, in a mode, with a seed.

    Attributes:
        level: The AMP level.
        mode: How the network ran.
        seed: 0 for the run that is compared; others begin with other weights and take the batches in another order.
        status: ``"ok"``: it went to its end, whatever its numbers are; ``"failed"``: MindSpore or the user's code
            raised; ``"crashed"``: its process died; ``"timeout"``: it was ended.
        reason: Why it is not ``"ok"``.
        losses: Of every step, without the loss scale.
        metric: The user's metric after the last step; NaN where there is none.
        metric_reason: Why there is none although the workload has one.
        first_scale: The loss scale of the first step.
        skipped: Numbers of the steps whose update was left out, from 0.
        step_seconds: Of every step.
        first_seconds: The first pass, which compiles.
        warm_up_seconds: The passes after it, before the first step.
        memory: None where it was not measured.
        share: None where it is not known.
        share_reason: Why it is not.
    """

    level: str
    mode: Mode
    seed: int = 0
    status: Status = "ok"
    reason: str = ""
    losses: tuple[float, ...] = ()
    metric: float = math.nan
    metric_reason: str = ""
    first_scale: float = 1.0
    skipped: tuple[int, ...] = ()
    step_seconds: tuple[float, ...] = ()
    first_seconds: float = math.nan
    warm_up_seconds: float = math.nan
    memory: Memory | None = None
    share: Share | None = None
    share_reason: str = ""

    @property
    def usable(self) -> bool:
        """It went to its end and every loss is finite."""
        return self.status == "ok" and all(map(math.isfinite, self.losses))


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel in float16 beside float32, as ``ampdebug doctor`` measures it.

    Attributes:
        name: ``"matmul"`` or ``"conv"``.
        ratio: Time in float16 over time in float32; NaN where it does not work.
        problem: What is wrong with it; ``""`` for nothing.
    """

    name: str
    ratio: float
    problem: str = ""

    @property
    def accelerated(self) -> bool:
        """It takes less than nine tenths of float32's time."""
        return self.ratio < ACCELERATED


ACCELERATED = 0.9  # as the doctor has it


@dataclass(frozen=True, slots=True)
class BaselineRuns:
    """The trainings at O0 in one mode.

    Attributes:
        run: The one that levels are compared with.
        repeat: The same once more, in another process.
        seeds: With other seeds.
    """

    run: TrainingRun
    repeat: TrainingRun
    seeds: tuple[TrainingRun, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything that a comparison measured.

    Attributes:
        name: Of the workload.
        steps: Training steps of each run.
        better: Which way the metric improves.
        has_metric: The workload has one.
        baselines: One for each mode.
        runs: The levels beside O0, in the order in which they ran.
        kernels: float16 on this device; empty where it was not measured.
        device: MindSpore's name of it.
        tolerance: What the user allows the metric (or the final loss) to be worse by; None for the default.
        load: The highest load average seen before a run, per processor; 0 where it is not known.
    """

    name: str
    steps: int
    better: Literal["higher", "lower"]
    has_metric: bool
    baselines: Mapping[Mode, BaselineRuns]
    runs: tuple[TrainingRun, ...]
    kernels: tuple[Kernel, ...] = ()
    device: str = "CPU"
    tolerance: float | None = None
    load: float = 0.0
