"""A level's rounding played out on the float32 network: for formats without kernels, and for ranking.

The CPU has no bfloat16 kernels, and some operators have no float16 one. There the float32 network is run, and wherever
the recorded policy computes in 16 bits, what goes in and what comes out is cast down and up again, gradients through
the same casts. That is within one or two units in the last place of a real kernel, which accumulates in float32 too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops, value_and_grad
from mindspore import dtype as mstype

from ampdebug._sites import OperatorSite, SiteScore, is_cast, is_transparent
from ampdebug.hooks._interpose import Function, interpose
from ampdebug.hooks._operators import dtypes
from ampdebug.hooks._protect import LOW_DTYPES, Policy
from ampdebug.hooks._shadow import Mark, flat_tensors, map_tensors, mark_of, set_mark
from ampdebug.hooks._sites import PathOf, SiteTracker

_cast = ops.Cast()

# Their statistics and parameters stay in float32 although what is normalised does not.
KEEP_FLOAT32_OPERANDS = frozenset({"BatchNorm", "BatchNormExt"})


class _Rounding:
    """How the level rounds at one site.

    Args:
        inputs: Dtypes that go in under the level, in the order of the tensors.
        outputs: Dtypes that come out.
        operator: Its name.
        low: The 16-bit format.
    """

    __slots__ = ("_computes_low", "_inputs", "_low", "_operator", "_outputs")

    def __init__(self, inputs: tuple[str, ...], outputs: tuple[str, ...], operator: str, low: Any) -> None:
        self._inputs, self._outputs, self._operator, self._low = inputs, outputs, operator, low
        self._computes_low = any(name in LOW_DTYPES for name in outputs)

    @property
    def any(self) -> bool:
        """The level rounds something here."""
        return self._computes_low or any(name in LOW_DTYPES for name in self._inputs)

    def rounds_input(self, index: int, tensor: Tensor) -> bool:
        """Whether the level's operator sees this operand rounded."""
        arrives_low = index < len(self._inputs) and self._inputs[index] in LOW_DTYPES
        if self._computes_low:
            return arrives_low or self._operator not in KEEP_FLOAT32_OPERANDS
        mark = mark_of(tensor)
        return arrives_low and not (mark is not None and mark.strong)

    def through(self, tensor: Tensor) -> Tensor:
        """The tensor rounded through the format, in float32 again."""
        return _cast(_cast(tensor, self._low), mstype.float32)

    def run(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], *, kernel: bool) -> Any:
        """The operator as the level runs it; with ``kernel`` by the 16-bit kernel where it computes in 16 bits."""
        index = -1

        def operand(tensor: Tensor) -> Tensor:
            nonlocal index
            index += 1
            if tensor.dtype != mstype.float32 or not self.rounds_input(index, tensor):
                return tensor
            return _cast(tensor, self._low) if kernel and self._computes_low else self.through(tensor)

        args, kwargs = map_tensors(operand, (args, kwargs))
        result = function(*args, **kwargs)
        place = -1

        def output(tensor: Tensor) -> Tensor:
            nonlocal place
            place += 1
            if tensor.dtype == self._low:
                return _cast(tensor, mstype.float32)
            narrow = place < len(self._outputs) and self._outputs[place] in LOW_DTYPES
            return self.through(tensor) if narrow and tensor.dtype == mstype.float32 else tensor

        return map_tensors(output, result)


class _Emulation(ABC):
    """A watcher on the float32 network; subclasses say what to do where the level rounds."""

    def __init__(self, tracker: SiteTracker, policy: Policy, low: Any) -> None:
        self.tracker, self._policy, self._low = tracker, policy, low
        self.unknown: set[OperatorSite] = set()

    def on_cell(self, cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        return self.tracker.run_cell(cell, call)

    def on_compiled(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: Callable[[], Any]) -> Any:
        return call()

    def on_operator(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        located = self.tracker.site(name)
        if located is None or is_cast(name) or is_transparent(name):
            result = function(*args, **kwargs)
            if any(_is_strong(tensor) for tensor in flat_tensors(args)):
                _mark_strong(result)
            return result
        site = located[0]
        if site in self._policy.own_low:
            return function(*args, **kwargs)
        if site not in self._policy.outputs:
            self.unknown.add(site)
            return function(*args, **kwargs)
        inputs = self._policy.inputs_of(site, dtypes((args, kwargs) if kwargs else args))
        rounding = _Rounding(inputs, self._policy.outputs_of(site, inputs), name, self._low)
        return self.at(site, rounding, function, args, kwargs)

    @abstractmethod
    def at(
        self, site: OperatorSite, rounding: _Rounding, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Makes the call at a site that the policy knows."""


def _is_strong(tensor: Tensor) -> bool:
    mark = mark_of(tensor)
    return mark is not None and mark.strong


def _mark_strong(value: Any) -> None:
    for tensor in flat_tensors(value):
        if tensor.dtype == mstype.float32:
            set_mark(tensor, Mark(None, strong=True))


class EmulatedProtection(_Emulation):
    """The level's rounding everywhere but at protected sites.

    Attributes:
        reached: Protected sites that ran.
    """

    def __init__(self, tracker: SiteTracker, policy: Policy, low: Any, protected: frozenset[OperatorSite]) -> None:
        super().__init__(tracker, policy, low)
        self._protected = protected
        self.reached: set[OperatorSite] = set()

    def at(
        self, site: OperatorSite, rounding: _Rounding, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if site in self._protected:
            self.reached.add(site)
            result = function(*args, **kwargs)
            _mark_strong(result)
            return result
        return rounding.run(function, args, kwargs, kernel=False) if rounding.any else function(*args, **kwargs)


@contextmanager
def emulate(
    network: nn.Cell, path_of: PathOf, policy: Policy, low: Any, protected: frozenset[OperatorSite]
) -> Iterator[EmulatedProtection]:
    """Runs a float32 network, while the context lasts, with the rounding of a level except at ``protected`` sites.

    Args:
        network: The network at O0.
        path_of: As for ``record_operators``.
        policy: What the level runs in, its sites named as in this network.
        low: The 16-bit dtype to round through.
        protected: The sites left in float32.
    """
    emulation = EmulatedProtection(SiteTracker(network, path_of), policy, low, protected)
    with interpose(emulation):
        yield emulation


class _Scoring(_Emulation):
    """Adds ``alpha * (rounded - exact)`` to the first output of every site, with ``alpha = 0``.

    Nothing changes, and the gradient with respect to ``alpha`` says, element by element and to first order, what the
    rounding at that site does to the loss. Where the rounded value is not finite, no gradient is needed.
    """

    def __init__(
        self, tracker: SiteTracker, policy: Policy, low: Any, alphas: list[Parameter] | None, kernels: bool
    ) -> None:
        super().__init__(tracker, policy, low)
        self._alphas, self.shapes = alphas, list[tuple[int, ...]]()
        self.sites: list[OperatorSite] = []
        self.seen: dict[OperatorSite, SiteScore] = {}
        self._kernel = kernels and low == mstype.float16

    def at(
        self, site: OperatorSite, rounding: _Rounding, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        exact = function(*args, **kwargs)
        outputs = flat_tensors(exact)
        if not rounding.any or not outputs or outputs[0].dtype != mstype.float32:
            return exact
        detached = map_tensors(ops.stop_gradient, (args, kwargs))
        rounded = flat_tensors(rounding.run(function, *detached, kernel=self._kernel))[0]
        difference = ops.stop_gradient(rounded - outputs[0])
        local = local_score(outputs[0].asnumpy(), rounded.asnumpy())
        self.seen[site] = local.joined(self.seen[site]) if site in self.seen else local
        if local.overflowed:
            difference = ops.zeros_like(difference)
        self.sites.append(site)
        self.shapes.append(tuple(outputs[0].shape))
        if self._alphas is None:
            return exact
        first = outputs[0] + self._alphas[len(self.sites) - 1] * difference
        rest = iter([first, *outputs[1:]])
        return map_tensors(lambda _: next(rest), exact)


def local_score(exact: Any, rounded: Any) -> SiteScore:
    """What rounding did to one output, by itself.

    Args:
        exact: The float32 values, any shape.
        rounded: The same as the level has them, widened to float32.
    """
    wide, narrow = exact.astype(np.float64), rounded.astype(np.float64)
    finite = np.isfinite(wide)
    lost = finite & ~np.isfinite(narrow)
    both = finite & ~lost
    error = np.abs(narrow[both] - wide[both])
    return SiteScore(
        score=float("inf") if lost.any() else 0.0,
        elements=wide.size,
        overflowed=int(lost.sum()),
        flushed=int(((wide != 0) & (narrow == 0) & both).sum()),
        absmax=float(np.abs(wide[finite]).max(initial=0.0)),
        spread=float(wide[finite].std()) if finite.any() else 0.0,
        error=float(error.max(initial=0.0)),
    )


def score_sites(
    network: nn.Cell, path_of: PathOf, policy: Policy, low: Any, loss: Callable[[], Tensor], *, kernels: bool = True
) -> dict[OperatorSite, SiteScore]:
    """Scores every site by what its rounding does to a loss, in one forward and one backward pass.

    Args:
        network: The network at O0, in the state in which the level fails.
        path_of: As for ``record_operators``.
        policy: What the level runs in, its sites named as in this network.
        low: The 16-bit dtype.
        loss: Runs the network and returns a scalar.
        kernels: Run float16 kernels where there are some. False rounds around float32 ones: an operator that a level
            keeps in float32 may have no other.

    Returns:
        ``score`` is the root of the sum of ``(dloss/dalpha)**2`` over the elements of a site, infinite where a 16-bit
        value is not finite although the float32 one is. Rounding errors of different elements have nothing to do with
        each other, so that their effects add up like this; adding absolute values would put every site with many
        elements before the few numbers that the network gives.
    """
    dry = _Scoring(SiteTracker(network, path_of), policy, low, None, kernels)
    with interpose(dry):
        loss()
    alphas = [
        Parameter(Tensor(np.zeros(shape, np.float32)), name=f"ampdebug_alpha_{i}") for i, shape in enumerate(dry.shapes)
    ]
    scores = dict(dry.seen)
    if alphas:
        scoring = _Scoring(SiteTracker(network, path_of), policy, low, alphas, kernels)
        with interpose(scoring):
            _, gradients = value_and_grad(loss, None, ParameterTuple(alphas))()
        for site, gradient in zip(scoring.sites, gradients, strict=True):
            added = float(np.linalg.norm(gradient.asnumpy().astype(np.float64)))
            scores[site] = replace(scores[site], score=math.hypot(scores[site].score, added))
    return scores
