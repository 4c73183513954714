"""A PyTorch-like loop that feeds ``ampdebug.Trace`` and asks what went wrong: pure Python, no framework.

``Scaler`` behaves as ``torch.cuda.amp.GradScaler`` does, so the loop below reads line by line like one with PyTorch.
The model is made of two numbers; from step 300 on its forward pass overflows.

Run ``python examples/trace_loop.py``.
"""

from __future__ import annotations

import math
import random

import ampdebug

FLOAT16_MAX = 65504.0


class Scaler:
    """The loss scale of PyTorch's GradScaler: halved on overflow, doubled after 100 clean steps (there 2000)."""

    def __init__(self, scale: float = 2.0**16, interval: int = 100) -> None:
        self.scale, self.interval, self.clean, self.found_inf = scale, interval, 0, False

    def get_scale(self) -> float:
        return self.scale

    def step(self, weights: list[float], gradients: list[float], rate: float) -> None:
        self.found_inf = not all(math.isfinite(g) for g in gradients)
        if not self.found_inf:
            for place, gradient in enumerate(gradients):
                weights[place] -= rate * gradient

    def update(self) -> None:
        self.clean = 0 if self.found_inf else self.clean + 1
        if self.found_inf:
            self.scale *= 0.5
        elif self.clean == self.interval:
            self.scale, self.clean = self.scale * 2.0, 0


def half(value: float) -> float:
    """What float16 makes of a number that is too large for it."""
    return value if abs(value) <= FLOAT16_MAX else math.copysign(math.inf, value)


def forward_backward(weights: list[float], x: float, y: float, scale: float) -> tuple[float, list[float]]:
    """Mean square error of ``w0 * x + w1``; gradients times the loss scale, in float16."""
    hidden = half(weights[0] * x)
    error = hidden + weights[1] - y
    loss = error * error if math.isfinite(error) else math.nan
    return loss, [half(2 * error * x * scale), half(2 * error * scale)]


def main(steps: int = 400, broken_from: int = 300) -> ampdebug.Diagnosis:
    """Train, and return the diagnosis."""
    rng = random.Random(0)
    weights, scaler, rate = [0.0, 0.0], Scaler(), 0.05
    trace = ampdebug.Trace("trace_loop")
    for step in range(1, steps + 1):
        x = rng.uniform(-1, 1)
        y = 3 * x + 1 + rng.gauss(0, 0.3)
        if step >= broken_from:
            x = 1e5  # a feature that was not normalised: no loss scale can help
        scale = scaler.get_scale()  # before update()
        loss, gradients = forward_backward(weights, x, y, scale)
        gradients = [gradient / scale for gradient in gradients]  # scaler.unscale_(optimizer)
        norm = math.hypot(*gradients)
        scaler.step(weights, gradients, rate)
        scaler.update()
        trace.step(
            loss=loss,
            loss_scale=scale,
            overflow=scaler.get_scale() < scale,
            grad_norm=norm,
            learning_rate=rate,
        )
    return trace.diagnose()


if __name__ == "__main__":
    print(main())
