"""Parameters around a step: their values before it, what the update did, and whether there was one.

"Update skipped" is not taken from anybody's word: it is seen in the parameters. On a sampled step all of them are
compared with a copy; on the others the optimizer's count of its updates is enough where it keeps one, and else a few
small ones are compared, which costs next to nothing.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore.graph.api import _pynative_executor
from numpy.typing import NDArray

from ampdebug._recorder import Seen, StepRecorder, Update
from ampdebug._stats import measure_update, nonfinite_counts
from ampdebug.hooks._tensors import scalar, see

_SMALL = 4096
_FEW = 4
# Buffers up to this size are looked at again after the step: the statistics of norms, not copies of whole weights.
_BUFFER = 65_536


class ParameterReader:
    """Reads the values of the same parameters again and again.

    On the CPU ``asnumpy()`` is a view of the parameter's memory, and making it takes longer than all that is done with
    a small one. So the view is kept as long as the parameter stays where it is.
    """

    def __init__(self) -> None:
        self._on_cpu = ms.get_context("device_target") == "CPU"
        self._views: dict[int, tuple[int, Any, Seen]] = {}

    def wait(self) -> None:
        """Waits for what is still being computed; to be called before :meth:`see`."""
        _pynative_executor.sync()

    def see(self, parameter: Any) -> Seen:
        """What ``_tensors.see`` returns for the parameter as it is now."""
        view = self._views.get(id(parameter))
        if view is not None:
            address, dtype, seen = view
            if parameter.data_ptr() == address and parameter.dtype == dtype and parameter.shape == seen.shape:
                return seen
        seen = see(parameter)
        if self._on_cpu and seen.array is not None:
            address = seen.array.__array_interface__["data"][0]
            if address == parameter.data_ptr():
                self._views[id(parameter)] = address, parameter.dtype, seen
        return seen


class ParameterWatch:
    """Watches the parameters of a network over one step after another.

    Args:
        parameters: All parameters of the network, buffers (``requires_grad=False``) included.
        optimizer: The optimizer, or None. Only its parameters are compared; without one, all trainable ones are.
        formats: ``{parameter name: name of the format the computation rounds it to}``.
    """

    def __init__(self, parameters: list[Any], optimizer: Any, formats: dict[str, str]) -> None:
        self.optimizer = optimizer
        self._reader = ParameterReader()
        self.formats = formats
        optimized = _optimizer_parameters(optimizer) if optimizer is not None else []
        names = {p.name for p in optimized} or None
        self.trained = [p for p in parameters if p.requires_grad and (names is None or p.name in names)]
        self.trained_names = [p.name for p in self.trained]
        self.in_order = optimized or self.trained
        self._few = sorted(self.trained, key=lambda p: int(p.size))[:_FEW]
        self._few = [p for p in self._few if p.size <= _SMALL]
        self._copies: dict[str, NDArray[Any]] = {}
        self._few_copies: dict[str, NDArray[Any]] = {}
        self._global_step: float | None = None
        self._counts = False  # the optimizer was seen to count its updates
        trained = {id(p) for p in self.trained}
        self._named = [(p, p.name, id(p) in trained) for p in parameters]
        self._buffers = [p for p in parameters if id(p) not in trained and p.size <= _BUFFER]
        self._poisoned: set[str] | None = None

    def before(self, recorder: StepRecorder | None) -> None:
        """Takes the values before the step; ``recorder`` is given on a sampled step."""
        self._reader.wait()
        self._global_step = scalar(getattr(self.optimizer, "global_step", None))
        if self._poisoned is None:
            self._poisoned = set(self._nonfinite_buffers())
        if recorder is None:
            self._few_copies = {} if self._counts else {p.name: _copy(self._reader.see(p)) for p in self._few}
            return
        for parameter, name, trained in self._named:
            seen = self._reader.see(parameter)
            recorder.parameter(name, seen)
            if trained and seen.array is not None:
                self._keep(name, seen.array)

    def _keep(self, name: str, array: NDArray[Any]) -> None:
        copy = self._copies.get(name)
        if copy is None or copy.shape != array.shape or copy.dtype != array.dtype:
            self._copies[name] = np.array(array)
        else:
            np.copyto(copy, array)

    def after(self, recorder: StepRecorder | None) -> bool | None:
        """Compares with the values before the step.

        Returns:
            Whether the parameters were updated; None where it cannot be known.
        """
        self._reader.wait()
        step = scalar(getattr(self.optimizer, "global_step", None))
        counted = step is not None and self._global_step is not None and step > self._global_step
        if recorder is None and self._counts:
            return counted
        self._counts = self._counts or counted
        moved = self._moved(recorder)
        return True if counted else moved

    def newly_poisoned(self) -> dict[str, tuple[int, int, int]]:
        """Buffers that this step left with a value that is not finite, for the first time.

        BatchNorm writes its moving statistics in the forward pass: a skipped update does not undo that, and the values
        before the *next* step, where there is one, would be the first to show it.

        Returns:
            ``{name: (NaN, +inf, -inf)}``, how many of each.
        """
        assert self._poisoned is not None
        found = {name: counts for name, counts in self._nonfinite_buffers().items() if name not in self._poisoned}
        self._poisoned.update(found)
        return found

    def _nonfinite_buffers(self) -> dict[str, tuple[int, int, int]]:
        found = {}
        for parameter in self._buffers:
            seen = self._reader.see(parameter)
            if seen.array is not None:
                counts = nonfinite_counts(seen.array, bfloat16_bits=seen.dtype == "bfloat16")
                if any(counts):
                    found[parameter.name] = counts
        return found

    def _moved(self, recorder: StepRecorder | None) -> bool | None:
        if recorder is None:
            if not self._few:
                return None
            return any(not _same(self._few_copies[p.name], self._reader.see(p)) for p in self._few)
        changed = False
        updates = []
        for parameter, name in zip(self.trained, self.trained_names, strict=True):
            copy = self._copies.get(name)
            seen = self._reader.see(parameter)
            if copy is None or seen.array is None or copy.dtype.itemsize > 4:
                continue
            format = self.formats.get(name, seen.dtype)
            stats = measure_update(copy, seen.array, format, bfloat16_bits=seen.dtype == "bfloat16")
            updates.append(Update(name, stats, seen.dtype, seen.shape))
            changed = changed or bool(stats.changed) or not _same(copy, seen)
        recorder.updates(updates)
        return changed if self.trained else None


def _copy(seen: Seen) -> NDArray[Any]:
    return np.array(seen.array)


def _same(copy: NDArray[Any], seen: Seen) -> bool:
    # Bits, not values: NaN must equal NaN.
    now = seen.array
    if now is None or now.shape != copy.shape:
        return False
    return copy.tobytes() == np.ascontiguousarray(now).tobytes()


def _optimizer_parameters(optimizer: Any) -> list[Any]:
    parameters = getattr(optimizer, "parameters", None)
    if parameters is None or callable(parameters):
        groups = getattr(optimizer, "param_groups", None) or []
        return [p for group in groups for p in group.get("params", [])]
    return list(parameters)
