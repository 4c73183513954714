"""Ready-made probes: what a workload's network under a level is worth, measured beside float32.

``_probe.py`` says what each of them measures and why its limit is where it is; here they are run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from mindspore import Tensor, nn

from ampdebug._bisect import Better
from ampdebug._probe import LossBand, ProbeName, gradient_error, relative_error
from ampdebug._target import load_made, load_workload
from ampdebug._workload import Workload
from ampdebug.hooks._checkpoint import kept_batch, kept_step
from ampdebug.hooks._training import forward, settled_pass, tensors, train

Array = npt.NDArray[Any]

_OTHER_SEEDS = 3


@dataclass(frozen=True)
class FailingStep:
    """A workload with the batch of a recorded step in place of its data.

    Attributes:
        source: The workload.
        file: The kept step.
    """

    source: Source
    file: Path


Source: TypeAlias = "Workload | str | FailingStep"


@dataclass(frozen=True)
class WorkloadProbe:
    """An ``evaluate`` for ``bisect``, made of a workload; it can be sent to other processes.

    Attributes:
        name: Which probe.
        source: The workload, or what it is called on the command line; by name it is loaded in each process.
        seed: Of every measurement.
        band: Of ``train``: the band that float32 keeps to.
        exact: Of ``output`` and ``grad``: what float32 gave.
    """

    name: ProbeName
    source: Source
    seed: int = 0
    band: LossBand | None = None
    exact: tuple[Array, ...] | None = field(default=None, compare=False, repr=False)

    @property
    def workload(self) -> Workload:
        """The workload."""
        return as_workload(self.source)

    @property
    def better(self) -> Better:
        """Which way the value improves."""
        kind = self.name.kind
        return self.workload.better if kind == "metric" else "higher" if kind == "finite" else "lower"

    def prepared(self, on_reference: Callable[[Callable[[nn.Cell], Any], int], Any]) -> WorkloadProbe:
        """The same probe with what it needs to know of float32.

        Args:
            on_reference: Calls a function with the float32 network in its start state, with all generators at a seed.
        """
        self.workload.require(*self.name.needs, purpose=f"the probe {str(self.name)!r}")
        if self.name.kind == "output":
            return replace(self, exact=tuple(on_reference(self._outputs, self.seed)))
        if self.name.kind == "grad":
            return replace(self, exact=tuple(on_reference(self._gradients, self.seed)))
        if self.name.kind == "train" and self.band is None:
            runs = [
                on_reference(functools.partial(self._losses, order=order), self.seed + order)
                for order in range(_OTHER_SEEDS + 1)
            ]
            return replace(self, band=LossBand.of(runs))
        return self

    def light(self) -> WorkloadProbe:
        """The same probe without arrays, to be sent with every question to processes that prepare it themselves.

        Gradients are as large as the network, and a pass is quick. A band of losses is small, and takes long to make.
        """
        return replace(self, exact=None)

    def __call__(self, network: nn.Cell) -> float | bool:
        """The value, of a network in its start state."""
        return _MEASURES[self.name.kind](self, network)

    # --- what is measured ---------------------------------------------------------------------------------------------

    def _outputs(self, network: nn.Cell) -> Sequence[Array]:
        network.set_train(True)
        return forward(network, self._first_batch()).outputs

    def _gradients(self, network: nn.Cell) -> Sequence[Array]:
        network.set_train(True)
        return settled_pass(network, self.workload, self._first_batch(), self.seed).unscaled()

    def _losses(self, network: nn.Cell, order: int = 0) -> list[float]:
        """Of the training steps; ``order`` 0 takes the batches as they come, others another order each."""
        batches = self.workload.batches(self.name.steps)
        if order:
            shuffled = list(batches)
            np.random.default_rng(self.seed + order).shuffle(shuffled)
            batches = iter(shuffled)
        return train(network, self.workload, batches, stop_at_nonfinite_loss=True).losses

    def _output_error(self, network: nn.Cell) -> float:
        assert self.exact is not None, "prepared() comes first"
        return relative_error(self.exact, self._outputs(network))

    def _gradient_error(self, network: nn.Cell) -> float:
        assert self.exact is not None, "prepared() comes first"
        return gradient_error(self.name.measure, self.exact, self._gradients(network))

    def _is_finite(self, network: nn.Cell) -> bool:
        network.set_train(True)
        done = settled_pass(network, self.workload, self._first_batch(), self.seed)
        return done.finite_forward and done.finite_gradients()

    def _excess(self, network: nn.Cell) -> float:
        assert self.band is not None, "prepared() comes first"
        return self.band.excess(self._losses(network))

    def _skipped(self, network: nn.Cell) -> float:
        """Beside the steps that a dynamic scale takes to come down to what the first batch allows."""
        network.set_train(True)
        first = settled_pass(network, self.workload, self._first_batch(), self.seed)
        batches = self.workload.batches(self.name.steps)
        return float(train(network, self.workload, batches, first_scale=first.scale).skipped)

    def _metric(self, network: nn.Cell) -> float:
        if self.name.steps:
            train(network, self.workload, self.workload.batches(self.name.steps))
        network.set_train(False)
        metric = self.workload.metric
        assert metric is not None, "prepared() requires it"
        return metric(network)

    def _first_batch(self) -> Sequence[Any]:
        return next(iter(self.workload.batches(1)))


_MEASURES: dict[str, Callable[[WorkloadProbe, nn.Cell], float | bool]] = {
    "output": WorkloadProbe._output_error,
    "grad": WorkloadProbe._gradient_error,
    "finite": WorkloadProbe._is_finite,
    "train": WorkloadProbe._excess,
    "overflow": WorkloadProbe._skipped,
    "metric": WorkloadProbe._metric,
}


@dataclass(frozen=True)
class WorkloadNetwork:
    """Makes the workload's network; can be sent to other processes."""

    source: Source

    def __call__(self) -> nn.Cell:
        return as_workload(self.source).network()


@dataclass(frozen=True)
class WorkloadLoss:
    """The workload's loss on its first batch, to rank operators by; can be sent to other processes."""

    source: Source

    def __call__(self, network: nn.Cell) -> Tensor:
        workload = as_workload(self.source)
        *inputs, label = tensors(next(iter(workload.batches(1))))
        loss: Tensor = workload.loss(network(*inputs), label)
        return loss


@dataclass(frozen=True)
class TargetPart:
    """One part of a pair ``(network, evaluate)`` that the command line names; can be sent to other processes."""

    target: str
    index: int

    def __call__(self, *args: Any) -> Any:
        return load_made(self.target)[self.index](*args)


@functools.lru_cache(maxsize=8)
def as_workload(source: Source) -> Workload:
    """The workload, loaded where it is given by name; the same object for the same source within a process."""
    if isinstance(source, FailingStep):
        batch = kept_batch(kept_step(source.file)[1])
        assert batch is not None, "the caller looked"
        return replace(as_workload(source.source), data=[batch])
    return load_workload(source) if isinstance(source, str) else source


def default_probe(workload: Workload) -> str:
    """What is judged where nothing is said: the gradients, which mean something in any state; else the outputs."""
    return "grad" if workload.loss is not None else "output"
