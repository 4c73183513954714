"""Values for the flight recorder: copies of tensors, batches and the states of random generators."""

from __future__ import annotations

import random
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ampdebug._flight_file import KeptArray
from ampdebug.hooks._tensors import FLOATING, dtype_name, see


def _view(tensor: Any) -> tuple[Any, str]:
    """Live memory on the CPU: only to be read, and only at once."""
    array = see(tensor).array if tensor.dtype in FLOATING else tensor.asnumpy()
    return array, dtype_name(tensor.dtype)


def kept_tensor(tensor: Any) -> KeptArray:
    """A copy of a tensor's values."""
    array, dtype = _view(tensor)
    return KeptArray(np.array(array), dtype)


def copy_into(tensors: dict[str, Any], copies: dict[str, KeptArray]) -> None:
    """Copies the values of all tensors into ``copies``, whose memory is used again."""
    for name, tensor in tensors.items():
        array, dtype = _view(tensor)
        copy = copies.get(name)
        if copy is None or copy.values.shape != array.shape or copy.values.dtype != array.dtype:
            copies[name] = KeptArray(np.array(array), dtype)
        else:
            np.copyto(copy.values, array)


def kept_value(value: Any) -> Any:
    """A batch with its tensors and arrays copied; what is neither is handed on."""
    if isinstance(value, Tensor):
        return kept_tensor(value)
    if isinstance(value, np.ndarray):
        return KeptArray(value, str(value.dtype))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (tuple, list)):
        items = [kept_value(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {key: kept_value(item) for key, item in value.items()}
    return value


def random_state() -> dict[str, KeptArray]:
    """The states of the random generators that can be read. Those inside MindSpore's CPU kernels can't."""
    _, keys, *rest = np.random.get_state()  # noqa: NPY002 - the global generator is what user code may draw from
    _, python, gauss = random.getstate()
    return {
        "mindspore": KeptArray(np.array(ms.get_rng_state().asnumpy()), "uint8"),
        "numpy.keys": KeptArray(np.array(keys, np.uint32), "uint32"),
        "numpy.rest": KeptArray(np.array(rest, np.float64), "float64"),
        "python.keys": KeptArray(np.array(python, np.uint32), "uint32"),
        "python.gauss": KeptArray(np.array([] if gauss is None else [gauss], np.float64), "float64"),
    }


def set_random_state(state: dict[str, KeptArray]) -> None:
    """Puts the generators where :func:`random_state` found them.

    Raises:
        ValueError: It is not such a state.
    """
    try:
        pos, has_gauss, cached = state["numpy.rest"].values.tolist()
        np.random.set_state(("MT19937", state["numpy.keys"].values, int(pos), int(has_gauss), cached))  # noqa: NPY002
        gauss = state["python.gauss"].values.tolist()
        random.setstate((3, tuple(int(k) for k in state["python.keys"].values), gauss[0] if gauss else None))
        ms.set_rng_state(Tensor(state["mindspore"].values.copy()))
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"the state of the random generators can't be restored: {error}") from error
