"""A MindSpore network under a level, as the bisection runs it."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import mindspore
import numpy as np
from mindspore import Tensor, amp, nn
from mindspore import dtype as mstype

from ampdebug._bisect_result import Check, Unit
from ampdebug._errors import ArgumentError, NoObservationsError
from ampdebug._sites import OperatorCall, OperatorSite, SiteScore, is_cast, is_transparent
from ampdebug.hooks._checkpoint import Checkpoint, load_checkpoint
from ampdebug.hooks._checks import Trial, run_checks
from ampdebug.hooks._emulate import EmulatedProtection, emulate, score_sites
from ampdebug.hooks._goodness import WorkloadProbe
from ampdebug.hooks._lowering import kept_in_float32, lowered
from ampdebug.hooks._operators import known_paths
from ampdebug.hooks._protect import LOW_DTYPES, Policy, Protection, protect
from ampdebug.hooks._recording import Recorded, Recording, align, record_evaluation, renamed
from ampdebug.hooks._shadow import balanced_mixed_precision
from ampdebug.hooks._state import NetworkState, made_by, seeded, to_numpy, without_recompute
from ampdebug.hooks._tensors import dtype_name

Evaluate = Callable[[nn.Cell], Any]

LEVELS = ("O1", "O2", "O3", "auto")


class MindSporeBackend:
    """See ``PrecisionBackend``.

    Args:
        network: The network at O0, or a function without arguments that makes it. A network is copied and stays as it
            is.
        evaluate: Takes a network, runs it in any way (training included) and returns a number, or True for good.
        level: ``"O1"``, ``"O2"``, ``"O3"`` or ``"auto"``.
        dtype: ``"float16"``, or ``"bfloat16"``, which is emulated where the device has no kernels.
        unit: ``"op"``: single operators. ``"cell"``: all operators of a cell's own construct together.
        direction: ``"up"``: the units are what the level rounds, and nothing is changed as long as none is protected.
            ``"down"``: the units are what the level leaves in float32, and all are rounded that are not protected; the
            level may be ``"O0"`` then. That is emulated always: an operator that the level keeps in float32 may have no
            16-bit kernel, and asking for one that is missing can end the process.
        loss: Takes a network and returns a scalar tensor for the ranking; without it a fixed random projection of what
            the network gives for its last input.
        seed: For every measurement, so that they differ by precision alone.
        checkpoint: The state to begin every measurement in, see ``load_checkpoint``; None for the one that ``network``
            has.

    Attributes:
        evaluate: What measures; a ready-made probe with what it knows of float32.
        alone: What ``measure_plain`` gave last, where the level itself ran; else None.

    Raises:
        ArgumentError: An argument breaks a rule.
        NoObservationsError: The mode is GRAPH_MODE.
    """

    def __init__(
        self,
        network: nn.Cell | Callable[[], nn.Cell],
        evaluate: Evaluate,
        *,
        level: str = "O2",
        dtype: str = "float16",
        unit: Literal["op", "cell"] = "op",
        direction: Literal["up", "down"] = "up",
        loss: Callable[[nn.Cell], Tensor] | None = None,
        seed: int = 0,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        if direction not in ("up", "down"):
            raise ArgumentError(f"direction={direction!r}: must be 'up' or 'down'")
        levels = ("O0", *LEVELS) if direction == "down" else LEVELS
        if level not in levels:
            raise ArgumentError(f"level={level!r}: must be one of {', '.join(map(repr, levels))}")
        if dtype not in LOW_DTYPES:
            raise ArgumentError(f"dtype={dtype!r}: must be 'float16' or 'bfloat16'")
        if unit not in ("op", "cell"):
            raise ArgumentError(f"unit={unit!r}: must be 'op' or 'cell'")
        if mindspore.get_context("mode") == mindspore.GRAPH_MODE:
            raise NoObservationsError(
                "operators can be steered in PyNative mode only, and the mode is GRAPH_MODE: a compiled network calls "
                "no Python. Call mindspore.set_context(mode=mindspore.PYNATIVE_MODE) first"
            )
        self.level, self._unit, self._loss, self._seed = level, unit, loss, seed
        self._down = direction == "down"
        self._checkpoint = checkpoint
        self._low = LOW_DTYPES[dtype]
        on_cpu = mindspore.get_context("device_target") == "CPU"
        no_kernels = on_cpu and dtype == "bfloat16"
        self.mode: Literal["real", "emulated"] = "emulated" if no_kernels or self._down else "real"
        self._reference = self._made(network)
        # The policy of a level is the same for both formats, and only float16 has the kernels to show it by.
        converted = amp.auto_mixed_precision(self._made(network), level, mstype.float16 if no_kernels else self._low)
        self._network = self._made(network) if level == "O0" else converted
        self._start, self._level_start = NetworkState(self._reference), NetworkState(self._network)
        self._values: dict[str, list[float | bool]] = {"reference": [], "plain": []}
        self._unknown: set[OperatorSite] = set()
        self.alone: float | bool | None = None
        self.evaluate = evaluate
        if isinstance(evaluate, WorkloadProbe):
            self.evaluate = evaluate.prepared(lambda call, seed: self._from_start(self._reference, call, seed))

    def _made(self, network: nn.Cell | Callable[[], nn.Cell]) -> nn.Cell:
        if isinstance(network, nn.Cell):
            made = copy.deepcopy(network)
        else:
            made = made_by(network, self._seed)
            if not isinstance(made, nn.Cell):
                raise ArgumentError(f"network() gave a {type(made).__name__}; it must return a mindspore.nn.Cell")
        if self._checkpoint is not None:
            load_checkpoint(made, self._checkpoint)
        self._recomputed = without_recompute(made)
        return made

    # --- measuring ---------------------------------------------------------------------------------------------------

    def _value(self, network: nn.Cell) -> float | bool:
        """One evaluation from the start state."""
        return _number(self._from_start(network, self.evaluate, self._seed))

    def _from_start(self, network: nn.Cell, call: Callable[[nn.Cell], Any], seed: int) -> Any:
        self._restore(network)
        with seeded(seed), balanced_mixed_precision():
            return call(network)

    def _recorded(self, network: nn.Cell, kind: str) -> Recording:
        with record_evaluation(network, known_paths(network)) as recording:
            value = self._value(network)
        self._values[kind].append(value)
        if not recording.root_calls:
            raise NoObservationsError(
                "evaluate did not call the network it was given: call it as evaluate's argument, net(x), not through "
                "another variable and not as net.construct(x)"
            )
        return recording

    def measure_reference(self) -> float | bool:
        return self._values["reference"].pop() if self._values["reference"] else self._value(self._reference)

    def measure_plain(self) -> float | bool:
        if self.mode == "emulated":
            return self.measure(frozenset())
        self.alone = self._values["plain"].pop() if self._values["plain"] else self._value(self._network)
        return self.alone

    def measure(self, protected: frozenset[OperatorSite]) -> float | bool:
        with self._protected(protected) as protection:
            value = self._value(self._probed)
        self._unknown |= protection.unknown
        return value

    @property
    def _probed(self) -> nn.Cell:
        return self._reference if self.mode == "emulated" else self._network

    def _protected(self, protected: frozenset[OperatorSite]) -> AbstractContextManager[Protection | EmulatedProtection]:
        network = self._probed
        if self.mode == "emulated":
            theirs = frozenset(self._names[site] for site in protected if site in self._names)
            return emulate(network, known_paths(network), self._reference_policy, self._low, theirs)
        return protect(network, known_paths(network), self._policy, protected)

    # --- recording ---------------------------------------------------------------------------------------------------

    def record(self) -> Sequence[Unit]:
        """Evaluates once in float32 and once under the level; both are kept as the first measurements."""
        self._reference_recording = self._recorded(self._reference, "reference")
        self._trained = NetworkState(self._reference)
        self._recording = self._recorded(self._network, "plain")
        if self.mode == "emulated":
            self._values["plain"].clear()  # that was float16
        reference = self._reference_recording.calls
        names = align(self._recording.calls, reference)
        ours = {theirs: site for site, theirs in names.items()}
        policy = Policy.of(self._recording.calls, renamed(reference, ours))
        reference_policy = Policy.of(renamed(self._recording.calls, names), reference)
        if self._down:
            kept = kept_in_float32(self._recording.calls, policy)
            self.units = self._grouped([call for call in kept if call.site in names])
            sites = {site for unit in self.units for site in unit.sites}
            policy = lowered(policy, sites, dtype_name(self._low))
            reference_policy = lowered(reference_policy, {names[site] for site in sites}, dtype_name(self._low))
        self.adopt(Recorded(names, policy, reference_policy))
        if not self._down:
            self.units = self._grouped(self._candidates())
        return self.units

    def adopt(self, recorded: Recorded) -> None:
        """Takes what another backend of the same make recorded, so that ``measure`` works without recording again."""
        self.recorded = recorded
        self._names, self._policy, self._reference_policy = recorded.names, recorded.policy, recorded.reference_policy

    def _candidates(self) -> list[OperatorCall]:
        """The calls that the level rounds: those that compute, and that 16 bits go into or come out of."""
        found: dict[OperatorSite, OperatorCall] = {}
        for call in self._recording.calls:
            site = call.site
            if site is None or call.compiled or is_cast(call.operator) or is_transparent(call.operator):
                continue
            if site not in self._policy.own_low and not LOW_DTYPES.keys().isdisjoint(call.inputs + call.outputs):
                found.setdefault(site, call)
        return list(found.values())

    def _grouped(self, calls: list[OperatorCall]) -> list[Unit]:
        if self._unit == "op":
            return [self._operator_unit(call) for call in calls]
        groups: dict[str, list[OperatorCall]] = {}
        for call in calls:
            groups.setdefault(call.path or "", []).append(call)
        return [
            Unit(path or "(root)", tuple(c.site for c in group if c.site is not None), group[0].cell_type, path)
            for path, group in groups.items()
        ]

    def _operator_unit(self, call: OperatorCall) -> Unit:
        site = call.site
        assert site is not None, "a candidate has a site"
        shown = call
        if not call.file and site in self._names:  # O1's rewritten code has no lines of the user's
            shown = next(c for c in self._reference_recording.calls if c.site == self._names[site])
        line = shown.site.line if shown.site is not None else ""
        label = self._recording.labels[site]
        return Unit(site.key, (site,), label, site.path, shown.file, line, shown.source())

    def notes(self) -> Sequence[str]:
        notes = [
            f"{name} is compiled (@ms.jit): what runs inside it was neither seen nor moved"
            for name in self._recording.compiled
        ]
        pathless = sorted({call.path for call in self._recording.calls if call.path and "<" in call.path})
        if self._down:
            kept = {call.site for call in kept_in_float32(self._recording.calls, self._policy)} - self._names.keys()
            if kept:
                notes.append(
                    f"{len(kept)} operators have no counterpart in the float32 network and were left as they are: "
                    f"{', '.join(sorted(site.key for site in kept if site is not None)[:3])}"
                )
        if pathless:
            notes.append(
                f"these cells hang in no attribute (a plain list?), so that the level did not convert them: "
                f"{', '.join(pathless)}"
            )
        if self._recomputed:
            notes.append(f"recompute is switched off here, which saves memory only: {', '.join(self._recomputed)}")
        if self._unknown:
            shown = ", ".join(sorted(site.key for site in self._unknown)[:3])
            notes.append(f"{len(self._unknown)} sites ran in probes and not when recording (another branch): {shown}")
        unmatched = [unit.name for unit in self.units if not any(site in self._names for site in unit.sites)]
        if unmatched:
            notes.append(
                f"{len(unmatched)} units have no counterpart in the float32 network and could not be ranked: "
                f"{', '.join(unmatched[:3])}"
            )
        return notes

    def checks(self) -> Sequence[Check]:
        recording = self._reference_recording
        assert recording.arguments is not None, "record() saw a call of the network"
        args, kwargs = recording.arguments
        trial = Trial(args, kwargs, recording.training, self._seed)
        everything = frozenset(site for site in self._policy.outputs)
        return run_checks(
            trial,
            reference=self._reference,
            plain=self._network,
            restore=self._restore,
            protected=self._protected,
            probed=self._probed,
            everything=everything,
            emulated=self.mode == "emulated",
        )

    def _restore(self, network: nn.Cell) -> None:
        (self._start if network is self._reference else self._level_start).restore(network)

    def rank(self) -> Mapping[OperatorSite, SiteScore]:
        """Scores in the state that the float32 evaluation left the network in, where a level that trains has failed."""
        recording = self._reference_recording
        assert recording.arguments is not None, "record() saw a call of the network"
        args, kwargs = recording.arguments
        self._trained.restore(self._reference)
        self._reference.set_train(recording.training)
        trial = Trial(args, kwargs, recording.training, self._seed)

        def loss() -> Tensor:
            with seeded(self._seed):
                return trial.loss(self._reference) if self._loss is None else self._loss(self._reference)

        paths, policy = known_paths(self._reference), self._reference_policy
        scores = score_sites(self._reference, paths, policy, self._low, loss, kernels=not self._down)
        self._start.restore(self._reference)
        return {site: scores[theirs] for site, theirs in self._names.items() if theirs in scores}

    def identity(self) -> Mapping[str, Any]:
        """Network, data, level and versions."""
        digest = hashlib.sha256()
        self._start.update_digest(digest)
        assert self._recording.arguments is not None, "record() saw a call of the network"
        for tensor in Trial(*self._recording.arguments, training=False, seed=0).tensors():
            digest.update(to_numpy(tensor).tobytes())
        return {
            "network": type(self._reference).__name__,
            "values_and_data": digest.hexdigest(),
            "level": self.level,
            "dtype": str(self._low),
            "mode": self.mode,
            "unit": self._unit,
            "direction": "down" if self._down else "up",
            "probe": str(self.evaluate.name) if isinstance(self.evaluate, WorkloadProbe) else "evaluate",
            "seed": self._seed,
            "mindspore": mindspore.__version__,
        }


def _number(value: Any) -> float | bool:
    if isinstance(value, Tensor):
        if value.size != 1:
            raise ArgumentError(f"evaluate returned a tensor of shape {value.shape}; it must return a number or a bool")
        value = value.asnumpy().item()
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, float, np.number)):
        return float(value)
    raise ArgumentError(f"evaluate returned a {type(value).__name__}; it must return a number or a bool")
