"""Probes in another process: what is sent there, and the backend that is made there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import mindspore
from mindspore import Tensor, nn

from ampdebug._bisect import Criterion
from ampdebug._bisect_result import Unit
from ampdebug._journal import Outcome
from ampdebug.hooks._backend import MindSporeBackend
from ampdebug.hooks._checkpoint import Checkpoint
from ampdebug.hooks._recording import Recorded


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """The arguments of a backend, which can be sent where the backend itself cannot."""

    network: nn.Cell | Callable[[], nn.Cell]
    evaluate: Callable[[nn.Cell], Any]
    level: str
    dtype: str
    unit: Literal["op", "cell"]
    loss: Callable[[nn.Cell], Tensor] | None
    seed: int
    checkpoint: Checkpoint | None = None
    direction: Literal["up", "down"] = "up"

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
            checkpoint=self.checkpoint,
            direction=self.direction,
        )


@dataclass(frozen=True, slots=True)
class RemotePredicate:
    """Measures and judges a set of units in whatever process it is called in.

    Attributes:
        search: What no other search in the world has: a process keeps the backend of the search it works for.
        spec: How to make the backend there.
        recorded: What was recorded here.
        criterion: What counts as good.
    """

    search: str
    spec: BackendSpec
    recorded: Recorded
    criterion: Criterion

    def __call__(self, units: frozenset[Unit]) -> Outcome:
        sites = frozenset(site for unit in units for site in unit.sites)
        backend = _backend(self.search, self.spec)
        backend.adopt(self.recorded)
        return self.criterion.judge(backend.measure(sites))


_kept: dict[str, MindSporeBackend] = {}


def _backend(search: str, spec: BackendSpec) -> MindSporeBackend:
    """The backend of this process.

    What a spec holds was made anew when it was unpickled, so that it cannot be told from the one before by comparing.
    """
    if search not in _kept:
        _kept.clear()
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)  # the user's module may have said otherwise
        _kept[search] = spec.build()
    return _kept[search]
