"""Probes in another process: what is sent there, and the backend that is made there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from mindspore import Tensor, nn

from ampdebug._bisect import Criterion
from ampdebug._bisect_result import Unit
from ampdebug._journal import Outcome
from ampdebug.hooks._backend import MindSporeBackend
from ampdebug.hooks._recording import Recorded


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """The arguments of a backend, which can be sent where the backend itself cannot.

    Two specs are equal if their functions are the same objects; importable functions are that within a process.
    """

    network: nn.Cell | Callable[[], nn.Cell]
    evaluate: Callable[[nn.Cell], Any]
    level: str
    dtype: str
    unit: Literal["op", "cell"]
    loss: Callable[[nn.Cell], Tensor] | None
    seed: int

    def build(self) -> MindSporeBackend:
        """Makes the backend."""
        return MindSporeBackend(
            self.network,
            self.evaluate,
            level=self.level,
            dtype=self.dtype,
            unit=self.unit,
            loss=self.loss,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True)
class RemotePredicate:
    """Measures and judges a set of units in whatever process it is called in.

    Attributes:
        spec: How to make the backend there.
        recorded: What was recorded here.
        criterion: What counts as good.
    """

    spec: BackendSpec
    recorded: Recorded
    criterion: Criterion

    def __call__(self, units: frozenset[Unit]) -> Outcome:
        sites = frozenset(site for unit in units for site in unit.sites)
        backend = _backend(self.spec)
        backend.adopt(self.recorded)
        return self.criterion.judge(backend.measure(sites))


@functools.lru_cache(maxsize=1)
def _backend(spec: BackendSpec) -> MindSporeBackend:
    """The backend of this process."""
    return spec.build()
