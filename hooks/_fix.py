"""Measuring the fix of a bisection: cells pinned by MindSpore's flags, and changed source, without our hand in it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import mindspore
from mindspore import amp, nn

from ampdebug._bisect import Criterion
from ampdebug._bisect_result import Check, RunMode
from ampdebug._errors import AmpdebugError, ArgumentError, ProbeError
from ampdebug._patch import PatchSite
from ampdebug._sites import OperatorSite
from ampdebug._workers import WorkerExecutor
from ampdebug.hooks._apply import Edge, keep_cells, unrounded_edges
from ampdebug.hooks._backend import MindSporeBackend
from ampdebug.hooks._backend import _number as as_number
from ampdebug.hooks._cells import places
from ampdebug.hooks._checkpoint import load_checkpoint
from ampdebug.hooks._checks import Trial
from ampdebug.hooks._patched import patched_sources
from ampdebug.hooks._protect import LOW_DTYPES
from ampdebug.hooks._remote import BackendSpec
from ampdebug.hooks._shadow import balanced_mixed_precision
from ampdebug.hooks._state import made_by, seeded


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a measurement of a fix gave: passed or not, None where it could not be made; and the numbers."""

    passed: bool | None
    detail: str


class Change(Protocol):
    """A way to make the network that is measured."""

    def made(self, task: FixTask) -> AbstractContextManager[nn.Cell]:
        """The network under the level; the change lasts as long as the context."""


_MODES = {"pynative": mindspore.PYNATIVE_MODE, "graph": mindspore.GRAPH_MODE}


@dataclass(frozen=True, slots=True)
class FixTask:
    """See ``Origin``.

    Attributes:
        spec: How the network was made and measured.
        criterion: What counts as good.
        sites: The operators of the answer, as they are called under the level.
        own_sites: The same as the user's own code has them.
        edges: Which values between cells must stay unrounded.
        filled: Paths of cells of which every operator is in the answer.
        emulated: The level's own kernels are missing here.
        alone: What the search measured of the level alone, in PyNative mode; None where it did not.
    """

    spec: BackendSpec
    criterion: Criterion
    sites: tuple[OperatorSite, ...]
    own_sites: tuple[PatchSite, ...]
    edges: tuple[Edge, ...]
    filled: tuple[str, ...]
    emulated: bool
    alone: float | bool | None = None

    def patch_sites(self) -> tuple[PatchSite, ...]:
        """The operators by the user's own lines."""
        return self.own_sites

    def apply(self, network: Any) -> nn.Cell:
        """See ``keep_cells``."""
        spec = self.spec
        return keep_cells(network, self.sites, level=spec.level, dtype=spec.dtype, edges=self.edges)

    def confirm(self, mode: RunMode, timeout: float | None) -> Check:
        """See ``BisectResult.confirm``."""
        name = f"in {_checked_mode(mode)} mode with whole cells in float32"
        if self.filled:
            shown = ", ".join(path or "(root)" for path in self.filled)
            name += f" (the answer is all of {shown})"
        if self.emulated:
            return Check(name, None, self._no_kernels)
        outcome = self._somewhere(mode, timeout, _Pinned())
        return Check(name, outcome.passed, outcome.detail)

    def verify(
        self, before: Mapping[str, str], after: Mapping[str, str], mode: RunMode, timeout: float | None
    ) -> tuple[bool | None, str]:
        """See ``Origin``."""
        _checked_mode(mode)
        if self.emulated:
            return None, self._no_kernels
        outcome = self._somewhere(mode, timeout, _Changed(dict(before), dict(after)))
        return outcome.passed, outcome.detail

    @property
    def _no_kernels(self) -> str:
        return f"{self.spec.dtype} was emulated: this device lacks kernels to run the network itself with"

    def _somewhere(self, mode: RunMode, timeout: float | None, change: Change) -> Outcome:
        """Compiled networks run in a process of their own where they can be sent there: compiling may end one."""
        if mode == "pynative":
            return self.measured(mode, change)
        try:
            sent = pickle.dumps((self, change))
        except Exception:  # noqa: BLE001 - whatever the user's objects raise: they stay here
            outcome = self.measured(mode, change)
            return replace(outcome, detail=outcome.detail + "; in this process, since the network cannot be sent")
        with WorkerExecutor(1, timeout=timeout) as executor:
            try:
                result: Outcome = executor.submit(_measure_sent, sent, mode).result()
            except (ProbeError, AmpdebugError) as error:
                return Outcome(None, f"the process in {mode} mode gave no answer: {error}")
        return result

    def measured(self, mode: RunMode, change: Change) -> Outcome:
        """Measures a changed network and, to compare, the level alone, in this process."""
        before = mindspore.get_context("mode")
        mindspore.set_context(mode=_MODES[mode])
        try:
            try:
                fixed = self._value(change)
            except AmpdebugError as error:
                return Outcome(None, f"it could not be run: {error}")
            except Exception as error:  # noqa: BLE001 - a network that does not compile any more is an answer
                return Outcome(False, f"in {mode} mode it fails: {type(error).__name__}: {_first_line(error)}")
            passed = self.criterion.judge(fixed).passed
            detail = f"{_shown(fixed)} in {mode} mode, {self.spec.level} alone {self._plain_words(mode)}"
            return Outcome(passed, f"{detail}; good: {self.criterion.words}")
        finally:
            mindspore.set_context(mode=before)

    def _plain_words(self, mode: RunMode) -> str:
        if mode == "pynative" and self.alone is not None:
            return _shown(self.alone)
        try:
            return _shown(self._value(_Nothing()))
        except Exception as error:  # noqa: BLE001 - it is for comparison only
            return f"fails: {type(error).__name__}"

    def _value(self, change: Change) -> float | bool:
        with change.made(self) as network, seeded(self.spec.seed), balanced_mixed_precision():
            return as_number(self.spec.evaluate(network))

    def fresh(self) -> nn.Cell:
        """The network at O0, as every measurement of the search began."""
        made = self.spec.network
        if isinstance(made, nn.Cell):
            network = copy.deepcopy(made)
        else:
            network = made_by(made, self.spec.seed)
        if self.spec.checkpoint is not None:
            load_checkpoint(network, self.spec.checkpoint)
        return network

    def converted(self, network: nn.Cell) -> nn.Cell:
        """The network under the level."""
        return amp.auto_mixed_precision(network, self.spec.level, LOW_DTYPES[self.spec.dtype])


class _Nothing:
    @contextmanager
    def made(self, task: FixTask) -> Iterator[nn.Cell]:
        yield task.converted(task.fresh())


class _Pinned:
    @contextmanager
    def made(self, task: FixTask) -> Iterator[nn.Cell]:
        yield task.apply(task.fresh())


@dataclass(frozen=True, slots=True)
class _Changed:
    before: dict[str, str]
    after: dict[str, str]

    @contextmanager
    def made(self, task: FixTask) -> Iterator[nn.Cell]:
        ready_made = isinstance(task.spec.network, nn.Cell)
        if not ready_made:
            task.fresh()  # imports whatever it imports, so that there is something to exchange
        with patched_sources(self.before, self.after) as added:
            network = task.fresh()
            if ready_made:
                classes = [value for space in added.values() for value in space.values() if isinstance(value, type)]
                _make_anew(network, task.sites, classes, task.spec.level)
            yield task.converted(network)


def _make_anew(network: nn.Cell, sites: tuple[OperatorSite, ...], classes: list[type], level: str) -> None:
    """Does to a network that exists what the changed ``__init__`` would have done to its library cells."""
    at = places(network)
    for path in sorted({site.path for site in sites}):
        cell = at[path].inner
        if not type(cell).__module__.startswith("mindspore."):
            continue
        if level in ("O1", "auto"):
            cell.to_float(mindspore.float32)
        kept = [new for new in classes if issubclass(new, type(cell)) and new is not type(cell)]
        if kept:
            cell.__class__ = kept[0]


def _measure_sent(sent: bytes, mode: RunMode) -> Outcome:
    """In another process."""
    task, change = pickle.loads(sent)  # noqa: S301 - from the process that started this one
    outcome: Outcome = task.measured(mode, change)
    return outcome


def fix_task(
    backend: MindSporeBackend, spec: BackendSpec, criterion: Criterion, sites: tuple[OperatorSite, ...]
) -> FixTask:
    """What a result needs to have its fix measured; runs the float32 network forward once.

    Args:
        backend: The network that was searched.
        spec: How it was made.
        criterion: What counts as good.
        sites: The operators of the answer.
    """
    calls = {call.site: call for call in backend._reference_recording.calls if call.site is not None}
    level_files = {call.site: call.file for call in backend._recording.calls if call.site is not None}
    own = []
    for site in sites:
        theirs = backend._names.get(site)
        if theirs is not None and calls[theirs].file:
            own.append(PatchSite(theirs, calls[theirs].file))
        else:
            own.append(PatchSite(site, level_files.get(site, "")))
    protected = frozenset(sites)
    covered: dict[str, bool] = {}
    for unit in backend.units:
        for site in unit.sites:
            covered[site.path] = covered.get(site.path, True) and site in protected
    return FixTask(
        spec=replace(spec, evaluate=backend.evaluate),
        criterion=criterion,
        sites=sites,
        own_sites=tuple(own),
        edges=_edges(backend, protected),
        filled=tuple(sorted(path for path, whole in covered.items() if whole)),
        emulated=backend.mode == "emulated",
        alone=backend.alone,
    )


def _edges(backend: MindSporeBackend, protected: frozenset[OperatorSite]) -> tuple[Edge, ...]:
    names, policy, recording = backend._names, backend._policy, backend._reference_recording
    assert recording.arguments is not None, "the network was called"
    args, kwargs = recording.arguments
    network = backend._reference
    anyway = [
        theirs
        for site, theirs in names.items()
        if any("float32" in out and not LOW_DTYPES.keys() & set(out) for out in policy.outputs.get(site, {}).values())
    ]
    backend._restore(network)
    trial = Trial(args, kwargs, recording.training, backend._seed)
    network.set_train(recording.training)

    def run() -> None:
        with seeded(trial.seed):
            network(*trial.args, **trial.kwargs)

    edges = unrounded_edges(network, run, [names[site] for site in protected if site in names], anyway)
    backend._restore(network)
    return edges


def _checked_mode(mode: str) -> str:
    if mode not in _MODES:
        raise ArgumentError(f"mode={mode!r}: must be 'pynative' or 'graph'")
    return mode


def _shown(value: float | bool) -> str:
    return str(value) if isinstance(value, bool) else f"{value:.6g}"


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else "(no message)"
