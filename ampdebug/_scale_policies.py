"""The loss-scale policies of the frameworks, to be replayed by ``simulate_scale``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from ampdebug._errors import ArgumentError


def _check(name: str, value: float, above: float) -> None:
    if not value > above or not math.isfinite(value):
        raise ArgumentError(f"{name}={value!r} must be a finite number above {above:g}")


class ScalePolicy(Protocol):
    """How a loss scale moves. ``first`` is the scale to start with; ``next`` the one after a step."""

    @property
    def name(self) -> str:
        """For the table."""

    def first(self) -> float:
        """Begin anew and return the first scale."""

    def next(self, scale: float, *, overflow: bool) -> float:
        """The scale after a step at ``scale`` that did or did not overflow."""


@dataclass
class StaticScale:
    """A scale that never moves (MindSpore FixedLossScaleManager, StaticLossScaler).

    Attributes:
        scale: The factor.
    """

    scale: float

    @property
    def name(self) -> str:
        """For the table."""
        return f"static {self.scale:g}"

    def first(self) -> float:
        """The scale."""
        return self.scale

    def next(self, scale: float, *, overflow: bool) -> float:
        """The same."""
        return scale


@dataclass
class DynamicScale:
    """MindSpore's DynamicLossScaler: divide on overflow, not below ``minimum``; multiply after ``window`` clean steps.

    Attributes:
        init: First scale.
        factor: Divisor and multiplier.
        window: Clean steps in a row before the scale grows.
        minimum: It never falls below this.
    """

    init: float = 65536.0
    factor: float = 2.0
    window: int = 1000
    minimum: float = 1.0
    _clean: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        _check("init", self.init, 0.0)
        _check("factor", self.factor, 1.0)
        if self.window < 1:
            raise ArgumentError(f"window={self.window!r} must be at least 1 step")

    @property
    def name(self) -> str:
        """For the table."""
        return f"dynamic init {self.init:g}, window {self.window}"

    def first(self) -> float:
        """The first scale; the count of clean steps is reset."""
        self._clean = 0
        return self.init

    def next(self, scale: float, *, overflow: bool) -> float:
        """The scale after a step."""
        if overflow:
            self._clean = 0
            return max(scale / self.factor, self.minimum)
        self._clean += 1
        if self._clean >= self.window:
            self._clean = 0
            return scale * self.factor
        return scale


@dataclass
class TorchScale:
    """PyTorch's GradScaler: no lower bound, growth after ``interval`` clean steps in a row.

    Attributes:
        init: ``init_scale``.
        growth: ``growth_factor``.
        backoff: ``backoff_factor``.
        interval: ``growth_interval``.
    """

    init: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    _clean: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        _check("init", self.init, 0.0)
        _check("growth", self.growth, 1.0)
        if not 0 < self.backoff < 1:
            raise ArgumentError(f"backoff={self.backoff!r} must lie between 0 and 1")
        if self.interval < 1:
            raise ArgumentError(f"interval={self.interval!r} must be at least 1 step")

    @property
    def name(self) -> str:
        """For the table."""
        return f"torch init {self.init:g}, interval {self.interval}"

    def first(self) -> float:
        """The first scale; the count of clean steps is reset."""
        self._clean = 0
        return self.init

    def next(self, scale: float, *, overflow: bool) -> float:
        """The scale after a step. As there, growth to infinity is not done."""
        if overflow:
            self._clean = 0
            return scale * self.backoff
        self._clean += 1
        if self._clean == self.interval:
            self._clean = 0
            grown = scale * self.growth
            return grown if grown < 3.4028235e38 else scale
        return scale


@dataclass
class DeepSpeedScale:
    """DeepSpeed's DynamicLossScaler: ``hysteresis - 1`` overflows pass before the scale is halved.

    Attributes:
        power: The first scale is 2**power (``initial_scale_power``).
        window: ``loss_scale_window``: steps since the last overflow, of which every multiple grows the scale.
        hysteresis: Overflows that it takes to halve.
        minimum: ``min_loss_scale``.
        consecutive: ``consecutive_hysteresis``: a clean step refills the hysteresis, not only a growth.
    """

    power: int = 16
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    consecutive: bool = False
    _left: int = field(default=0, init=False, repr=False)
    _step: int = field(default=0, init=False, repr=False)
    _last: int = field(default=-1, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ArgumentError(f"window={self.window!r} must be at least 1 step")
        if self.hysteresis < 1:
            raise ArgumentError(f"hysteresis={self.hysteresis!r} must be at least 1 overflow")

    @property
    def name(self) -> str:
        """For the table."""
        return f"deepspeed init 2**{self.power}, window {self.window}, hysteresis {self.hysteresis}"

    def first(self) -> float:
        """The first scale; all counts are reset."""
        self._left, self._step, self._last = self.hysteresis, 0, -1
        return 2.0**self.power

    def next(self, scale: float, *, overflow: bool) -> float:
        """The scale after a step."""
        if overflow:
            if self._left == 1:
                scale = max(scale / 2.0, self.minimum)
            else:
                self._left -= 1
            self._last = self._step
        else:
            if self.consecutive:
                self._left = self.hysteresis
            if (self._step - self._last) % self.window == 0:
                if not self.consecutive:
                    self._left = self.hysteresis
                scale *= 2.0
        self._step += 1
        return scale
