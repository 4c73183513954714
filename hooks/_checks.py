"""What is made sure of before a bisection: the tools change what they should, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import Tensor, nn, value_and_grad
from mindspore import dtype as mstype

from ampdebug._bisect_result import DETERMINISTIC, Check
from ampdebug._sites import OperatorSite
from ampdebug.hooks._audit import unseen_operators
from ampdebug.hooks._operators import known_paths, record_operators
from ampdebug.hooks._shadow import flat_tensors
from ampdebug.hooks._state import seeded

# CPU kernels try out thread numbers in their first launches, and each number adds in another order: a pass that differs
# from one before is repeated up to so often. Few passes are, since the evaluation has launched most kernels already.
_WARM_UP = 5
# O1's rewritten code may run independent operators in another order, and gradients are then added in another order.
_REORDERED = 1e-5

Array = Any
Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Trial:
    """One forward and backward pass that can be repeated.

    Attributes:
        args: What the network is called with.
        kwargs: The same by name.
        training: In training mode or not.
        seed: For dropout.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    training: bool
    seed: int

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return flat_tensors((self.args, self.kwargs))

    def outputs(self, network: nn.Cell) -> list[Tensor]:
        """The floating-point outputs, widened to float32."""
        result = network(*self.args, **self.kwargs)
        return [tensor.astype(mstype.float32) for tensor in flat_tensors(result) if "loat" in str(tensor.dtype)]

    def loss(self, network: nn.Cell) -> Tensor:
        """A fixed random projection of the outputs: every output element counts with +1 or -1."""
        return self._project(self.outputs(network))

    def _project(self, outputs: list[Tensor]) -> Tensor:
        signs = np.random.default_rng(0)
        parts = [(out * Tensor(signs.choice([-1.0, 1.0], out.shape).astype(np.float32))).sum() for out in outputs]
        return sum(parts[1:], parts[0]) if parts else Tensor(0.0, mstype.float32)

    def fingerprint(self, network: nn.Cell) -> list[Array]:
        """Outputs, then the gradients of all trainable parameters."""
        network.set_train(self.training)
        parameters = network.trainable_params()
        kept: list[Tensor] = []

        def forward() -> Tensor:
            kept[:] = self.outputs(network)
            return self._project(kept)

        with seeded(self.seed):
            if not parameters:
                forward()
                gradients: tuple[Tensor, ...] = ()
            else:
                _, gradients = value_and_grad(forward, None, parameters)()
        return [tensor.asnumpy().copy() for tensor in (*kept, *gradients)]


def run_checks(
    trial: Trial,
    *,
    reference: nn.Cell,
    plain: nn.Cell,
    restore: Callable[[nn.Cell], None],
    protected: Callable[[frozenset[OperatorSite]], AbstractContextManager[Any]],
    probed: nn.Cell,
    everything: frozenset[OperatorSite],
    emulated: bool,
) -> list[Check]:
    """All checks on one input.

    Args:
        trial: The pass to repeat.
        reference: The network at O0.
        plain: The network under the level.
        restore: Puts either of them back to its start.
        protected: Keeps sites in float32 while its context lasts.
        probed: The network that probes run.
        everything: All sites.
        emulated: ``probed`` is the float32 network with the level's rounding.
    """

    def seen(network: nn.Cell, context: Context = nullcontext) -> list[Array]:
        restore(network)
        with context():
            return trial.fingerprint(network)

    exact, exact_spread = _settled(lambda: seen(reference))
    low, low_spread = _settled(lambda: seen(plain))
    steady = max(exact_spread, low_spread)

    def equal(name: str, allowed: float, base: list[Array], network: nn.Cell, context: Context) -> Check:
        wanted = reference if base is exact else plain
        other = seen(network, context)
        for _ in range(_WARM_UP if steady == 0 else 0):
            if difference(base, other) == 0:
                break
            again, other_again = seen(wanted), seen(network, context)
            settled = difference(base, again) == 0 and difference(other, other_again) == 0
            base, other = again, other_again
            if settled:
                break
        return _equal(name, base, other, allowed)

    def recording() -> AbstractContextManager[Any]:
        return record_operators(plain, known_paths(plain))

    checks = [
        Check(
            DETERMINISTIC,
            True if steady == 0 else None,
            "outputs and gradients repeat bitwise" if steady == 0 else f"repetitions differ by {steady:.2g} relative",
        ),
        equal("recording changes nothing", steady, low, plain, recording),
    ]
    name = "protecting nothing changes nothing"
    if emulated:
        checks.append(Check(name, None, "the level itself cannot run here"))
    else:
        checks.append(equal(name, steady, low, probed, lambda: protected(frozenset())))
    name = "protecting everything gives float32"
    checks.append(equal(name, max(steady, _REORDERED), exact, probed, lambda: protected(everything)))
    restore(plain)
    plain.set_train(trial.training)
    with seeded(trial.seed):
        unseen = unseen_operators(lambda: trial.outputs(plain))
    restore(plain)
    detail = ", ".join(f"{count} x {name}" for name, count in unseen.items())
    checks.append(
        Check(
            "every operator is seen", not unseen, f"ran outside all entry points: {detail}" if unseen else "by dispatch"
        )
    )
    return checks


def _settled(run: Callable[[], list[Array]]) -> tuple[list[Array], float]:
    """Runs until two passes are equal, or often enough; the last one, and how far it is from the one before."""
    last = run()
    for _ in range(_WARM_UP + 1):
        before, last = last, run()
        spread = difference(before, last)
        if spread == 0:
            break
    return last, spread


def _equal(name: str, wanted: Collection[Array], seen: Collection[Array], allowed: float) -> Check:
    worst = difference(wanted, seen)
    if worst == 0:
        return Check(name, True, "outputs and gradients are bitwise equal")
    return Check(name, worst <= allowed, f"outputs or gradients differ by {worst:.2g} relative, allowed {allowed:.2g}")


def difference(wanted: Collection[Array], seen: Collection[Array]) -> float:
    """The largest difference between two fingerprints, relative to the largest value of the array it is in.

    Equal values, NaN included, differ by 0; a non-finite value against another one by infinity.
    """
    if len(wanted) != len(seen):
        return float("inf")
    worst = 0.0
    for one, other in zip(wanted, seen, strict=True):
        same = (one == other) | (np.isnan(one) & np.isnan(other))
        if same.all():
            continue
        left, right = one[~same].astype(np.float64), other[~same].astype(np.float64)
        if not (np.isfinite(left).all() and np.isfinite(right).all()):
            return float("inf")
        scale = float(np.abs(one[np.isfinite(one)], dtype=np.float64).max(initial=0.0)) or 1.0
        worst = max(worst, float(np.abs(left - right).max()) / scale)
    return worst
