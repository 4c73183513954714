"""The flight recorder: keeps what is needed to run the first bad steps of a training again.

It reads and copies, and never changes a number. The batch is held by reference until the step has ended; parameters are
copied before a step, because after a bad one that was *not* skipped nobody can tell what they were.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter

from ampdebug._errors import ArgumentError
from ampdebug._flight_file import (
    PARTIAL,
    KeptArray,
    KeptStep,
    find_kept_steps,
    kept_step_file,
    write_kept_step,
)
from ampdebug._records import Event, Step
from ampdebug.hooks._cells import LOSS_PATH, Place
from ampdebug.hooks._environment import mode_name
from ampdebug.hooks._flight_calls import BY_HAND, ignore, listen
from ampdebug.hooks._flight_values import copy_into, kept_tensor, kept_value, random_state
from ampdebug.hooks._tensors import leaves

KEEP_BYTES = 2**30
# Buffers up to this size are copied before every step: BatchNorm changes its moving statistics in the forward pass,
# also in a step whose update is skipped. Larger ones are frozen weights and tables.
_BUFFER = 65_536


@dataclass(frozen=True, slots=True)
class Keep:
    """What to keep of bad steps.

    Attributes:
        bad_steps: How many.
        every: Parameters are copied before step 1, 1 + every, ...
        nbytes: Limit for all files of the run together, in bytes.
    """

    bad_steps: int
    every: int
    nbytes: int


def keep_options(keep_bad_steps: int, keep_every: int, keep_bytes: int) -> Keep | None:
    """Checks the three arguments as the user gave them; None where nothing is to be kept.

    Raises:
        ArgumentError: One of them is wrong.
    """
    if type(keep_bad_steps) is not int or keep_bad_steps < 0:
        raise ArgumentError(f"keep_bad_steps={keep_bad_steps!r}: must be a whole number, 0 (keep none) or more")
    if type(keep_every) is not int or keep_every < 1:
        raise ArgumentError(
            f"keep_every={keep_every!r}: must be a whole number of steps, 1 (copy the parameters before each) or more"
        )
    if type(keep_bytes) is not int or keep_bytes < 1:
        raise ArgumentError(f"keep_bytes={keep_bytes!r}: must be a whole number of bytes, 1 or more")
    return Keep(keep_bad_steps, keep_every, keep_bytes) if keep_bad_steps else None


class FlightRecorder:
    """Watches one run for bad steps. Nothing in here raises: what fails is said once, and ends the keeping only.

    Args:
        keep: What to keep.
        places: The cells of the network.
        directory: Where the run is written.
        rank: Of this process.
        functional: The loop is the user's own, so that the batch must be seen where gradients are taken.
        note: Writes an event and warns with it: ``note(kind, message, **data)``.
        put_event: Writes an event.
    """

    def __init__(
        self,
        keep: Keep,
        places: dict[str, Place],
        directory: Any,
        rank: int,
        functional: bool,
        note: Callable[..., None],
        put_event: Callable[[Event], None],
    ) -> None:
        self.paused = False
        self._keep, self._places, self._directory, self._rank = keep, places, Path(directory), rank
        self._functional, self._note, self._put_event = functional, note, put_event
        self._parameters = state_parameters(places)
        self._buffers = {n: p for n, p in self._parameters.items() if not p.requires_grad and p.size <= _BUFFER}
        self._state_bytes = sum(int(p.size) * int(p.itemsize) for p in self._parameters.values())
        self._kept: list[_Kept] = []
        self._copies: dict[str, KeptArray] = {}
        self._copied_at: int | None = None
        self._buffer_copies: dict[str, KeptArray] = {}
        self._random: dict[str, KeptArray] = {}
        self._batch: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._trust = 0
        self._said: set[str] = set()
        self._over = False

    def attach(self) -> None:
        """Counts what the directory holds already, clears half-written files away, and begins to listen."""
        self._guard(self._attach)

    def _attach(self) -> None:
        for path in find_kept_steps(self._directory, self._rank).values():
            self._kept.append(_Kept(path, path.stat().st_size, grave=True))
        for leftover in self._directory.glob(f"ampdebug-rank{self._rank}-step*.npz{PARTIAL}"):
            leftover.unlink()
        self._over = len(self._kept) >= self._keep.bad_steps
        if self._functional and not self._over:
            listen(self)

    def detach(self) -> None:
        """Stops listening and lets go of everything; may be called twice."""
        ignore(self)
        self._over = True
        self._batch = None
        self._copies, self._buffer_copies, self._random = {}, {}, {}

    def begin(self, step: int) -> None:
        """A step is about to start."""
        if not self._over:
            self._guard(self._begin, step)

    def saw(self, args: Any, kwargs: dict[str, Any], trust: int) -> None:
        """Something was called in this step, or said by the user, that may be its batch."""
        if not (self._over or self.paused or trust <= self._trust):
            self._guard(self._saw, args, kwargs, trust)

    def _saw(self, args: Any, kwargs: dict[str, Any], trust: int) -> None:
        given = tuple(args) if isinstance(args, (tuple, list)) else (args,)
        tensors = leaves([*given, *kwargs.values()])
        if trust < BY_HAND and all(isinstance(tensor, Parameter) for _, tensor in tensors):
            return  # without data: a loss scaler's own function
        self._batch, self._trust = (given, dict(kwargs)), trust

    def end(self, step: Step) -> None:
        """The step is done and recorded."""
        if not self._over:
            self._guard(self._end, step)
            self._batch, self._trust = None, 0

    def _guard(self, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001 - nothing in here may stop the training or the recording
            self.detach()
            self._note(
                "keep-bad-steps-off",
                f"ampdebug keeps no further bad steps: {type(error).__name__}: {error}. The recording goes on.",
            )

    # --- before a step ------------------------------------------------------------------------------------------------

    def _begin(self, step: int) -> None:
        self._batch, self._trust = None, 0
        self._random = random_state()
        if self._state_bytes > self._keep.nbytes:
            return  # they would never fit: no copy either
        if self._copied_at is None or step - self._copied_at >= self._keep.every:
            copy_into(self._parameters, self._copies)
            self._copied_at = step
        else:
            copy_into(self._buffers, self._buffer_copies)

    # --- after it -----------------------------------------------------------------------------------------------------

    def _end(self, step: Step) -> None:
        if not is_bad(step):
            return
        grave = is_grave(step)
        replaced = None
        if len(self._kept) >= self._keep.bad_steps:
            # An overflow that a loss scaler caught says less than a loss that is lost: it makes room.
            replaced = next((kept for kept in reversed(self._kept) if not kept.grave), None)
            if not grave or replaced is None:
                return
        if self._batch is None:
            self._say_once(
                "bad-step-without-batch",
                f"step {step.step} went wrong and could not be kept: its batch was not seen. In a functional loop hand "
                "it over: run.step(loss=..., batch=(x, y)). With dataset_sink_mode=True on a device the batch never "
                "comes to Python: train with dataset_sink_mode=False",
                step=step.step,
            )
            return
        used = sum(other.nbytes for other in self._kept if other is not replaced)
        kept = self._cut_to_size(self._made(step), self._keep.nbytes - used)
        if kept is None:
            return
        path = kept_step_file(self._directory, self._rank, step.step)
        size = write_kept_step(path, kept)
        self._kept.append(_Kept(path, size, grave))
        if replaced is not None:
            self._kept.remove(replaced)
            replaced.path.unlink(missing_ok=True)
        message = (
            f"Step {step.step} went wrong and was kept in {path.name} ({size / 2**20:.2f} MiB); to run it again: "
            f"ampdebug replay {self._directory} module:factory --step {step.step}"
        )
        if replaced is not None:  # only gradients had overflowed there
            message += f" (in place of {replaced.path.name}, where the forward pass was right)"
        self._put_event(Event(step.step, "bad-step-kept", message, {"file": path.name, "bytes": size}))
        if len(self._kept) >= self._keep.bad_steps and all(other.grave for other in self._kept):
            self.detach()

    def _made(self, step: Step) -> KeptStep:
        assert self._batch is not None
        args, kwargs = self._batch
        parameters, state_step = self._before(step)
        facts = {
            "loss": step.loss,
            "loss_scale": step.loss_scale,
            "overflow": step.overflow,
            "mode": mode_name(),
            "seed": ms.get_seed(),
            "not_training": [path for path, place in self._places.items() if not place.inner.training],
        }
        batch = (*args, *kwargs.values())
        return KeptStep(
            step.step,
            tuple(kept_value(value) for value in batch),
            tuple(kwargs),
            parameters,
            state_step,
            self._random,
            facts,
        )

    def _before(self, step: Step) -> tuple[dict[str, KeptArray], int | None]:
        """Parameters and buffers, and the step that these are the values before."""
        if self._state_bytes > self._keep.nbytes:
            return {}, None
        if step.update_skipped and self._copied_at != step.step:
            now = {name: kept_tensor(parameter) for name, parameter in self._parameters.items()}
            return {**now, **self._buffer_copies}, step.step
        return self._copies, self._copied_at

    def _cut_to_size(self, kept: KeptStep, room: int) -> KeptStep | None:
        if kept.parameters and kept.file_size <= room:
            return kept
        small = KeptStep(kept.step, kept.batch, kept.keywords, {}, None, kept.random, kept.facts)
        limit = f"keep_bytes={self._keep.nbytes} for all kept steps of the run together"
        if small.file_size > room:
            self._say_once(
                "bad-step-too-large",
                f"step {kept.step} went wrong and was not kept: its batch does not fit into {limit}",
                step=kept.step,
            )
            return None
        if self._parameters:
            self._say_once(
                "bad-step-without-parameters",
                f"step {kept.step} went wrong and was kept without its parameters ({self._state_bytes} "
                f"bytes), which do not fit into {limit}; a replay will take those that the factory makes or loads",
                step=kept.step,
            )
        return small

    def _say_once(self, kind: str, message: str, **data: Any) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._note(kind, message, **data)


@dataclass(frozen=True, slots=True)
class _Kept:
    path: Path
    nbytes: int
    grave: bool


def is_bad(step: Step) -> bool:
    """Something in the step was not finite that should have been (a mask of -inf is no birth in a record)."""
    return bool(step.overflow or step.nonfinite_gradients or step.backward_birth is not None) or is_grave(step)


def is_grave(step: Step) -> bool:
    """The forward pass itself went wrong, so that no loss scale helps."""
    lost = step.loss is not None and not np.isfinite(step.loss)
    return lost or step.forward_birth is not None


def state_parameters(places: dict[str, Place]) -> dict[str, Any]:
    """Parameters and buffers of the network and of a loss cell beside it, by name."""
    found = {p.name: p for p in places[""].inner.get_parameters()}
    if LOSS_PATH in places:
        found.update((p.name, p) for p in places[LOSS_PATH].inner.get_parameters())
    return found
