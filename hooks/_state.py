"""Putting a network back to where it was before it was trained, and running with a fixed seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore import dtype as mstype

from ampdebug._records import parameter_name


class NetworkState:
    """The values of all parameters of a network, moving statistics included, and which cells are in training mode.

    Args:
        network: Where they are taken from; no reference to it is kept.
    """

    def __init__(self, network: nn.Cell) -> None:
        self._values = {name: (to_numpy(parameter), parameter.dtype) for name, parameter in _parameters(network)}
        self._training = [bool(cell.training) for cell in _cells(network)]

    def restore(self, network: nn.Cell) -> None:
        """Gives the values to this network, or to another one made the same way, under whatever level."""
        parameters = _parameters(network)
        assert {name for name, _ in parameters} == set(self._values), "not the network that the state was taken from"
        for name, parameter in parameters:
            value, dtype = self._values[name]
            parameter.set_data(Tensor(value.copy(), dtype))
        cells = _cells(network)
        if len(cells) == len(self._training):
            for cell, training in zip(cells, self._training, strict=True):
                cell.training = training
        else:
            network.set_train(self._training[0])

    def update_digest(self, digest: Any) -> None:
        """Feeds names and values to a hash object of ``hashlib``."""
        for name, (value, _) in self._values.items():
            digest.update(name.encode())
            digest.update(value.tobytes())


def _parameters(network: nn.Cell) -> list[tuple[str, Parameter]]:
    return [(parameter_name(parameter.name), parameter) for parameter in network.get_parameters()]


def _cells(network: nn.Cell) -> list[nn.Cell]:
    return [cell for _, cell in network.cells_and_names()]


def to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A copy of the values; bfloat16 is widened to float32."""
    # asnumpy() gives a view of live memory, and raises on bfloat16
    value = tensor.astype(mstype.float32) if tensor.dtype == mstype.bfloat16 else tensor
    copy: np.ndarray[Any, Any] = value.asnumpy().copy()
    return copy


def without_recompute(network: nn.Cell) -> list[str]:
    """Switches recomputation in the backward pass off, for good, and returns the paths of the cells that had it.

    It runs a cell on detached inputs, so that what a tensor carries beside its values loses its gradient there.
    """
    found = []
    for path, cell in network.cells_and_names():
        if cell._recompute_cell is not None:
            cell._recompute_cell = None
            found.append(path or "(root)")
    return found


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Runs with all random generators at ``seed``, and puts those of Python and numpy back afterwards."""
    python, numpy_state, before = random.getstate(), np.random.get_state(), mindspore.get_seed()  # noqa: NPY002
    mindspore.set_seed(seed)  # numpy's global generator too
    random.seed(seed)
    try:
        yield
    finally:
        if before is not None:
            mindspore.set_seed(before)
        random.setstate(python)
        np.random.set_state(numpy_state)  # noqa: NPY002 - the global generator is what user code may draw from


def made_by(make: Callable[[], Any], seed: int) -> Any:
    """What the user's function makes with all random generators at ``seed``, in the mode that was set before.

    A function that is given by name imports its module when it is first called, in a worker process here, and the
    module of a training often sets a mode at its top.
    """
    mode = mindspore.get_context("mode")
    try:
        with seeded(seed):
            return make()
    finally:
        mindspore.set_context(mode=mode)


def operator_by_operator() -> None:
    """Lets a process of ours run PyNative operators one after the other, where that is the CPU's work anyway.

    MindSpore's threads wait for each other by spinning: where cores are few and busy, small operators take many times
    as long in its queues as without them. The numbers are the same. It can't be undone, and must come before the first
    operator.
    """
    if mindspore.get_context("device_target") == "CPU":
        mindspore.runtime.launch_blocking()
