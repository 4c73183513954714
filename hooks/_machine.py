"""What the doctor asks MindSpore itself: settings of a process, and how long a matmul and a convolution take.

Run as ``python -m ampdebug.hooks._machine`` it answers in lines of JSON, one as soon as it is known, so that whoever
started it keeps what was said when a kernel that does not exist takes the process down.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, ops

from ampdebug.hooks._environment import mode_name

_SIZES = (256, 512, 1024, 2048, 4096)
_LONG_ENOUGH = 0.004  # seconds; below that the launch is measured and not the kernel
_REPEATS = 7
# How far the result may be off, in units of the root mean square: both formats' rounding stays well below.
_TOLERANCE = {"float32": 1e-2, "float16": 3e-2, "bfloat16": 1e-1}


def settings() -> dict[str, Any]:
    """Settings of this process that change numbers, as plain JSON values."""
    return {
        "mindspore": mindspore.__version__,
        "device": str(mindspore.get_context("device_target")),
        "mode": mode_name(),
        "deterministic": str(mindspore.get_context("deterministic")),
        "seed": mindspore.get_seed(),
    }


def measure(kernel: str, dtype: str, size: int) -> dict[str, Any]:
    """Times one kernel, in turn with its float32 version, and looks whether its result is right.

    Args:
        kernel: ``"matmul"`` or ``"conv"``.
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        size: Of the square matrices; the convolution takes about as long. 0: the first that takes long enough.

    Returns:
        ``{"kernel", "dtype", "size", "seconds", "float32_seconds", "error", "right"}``: the best of the calls of each,
        and the deviation of one element from float64 in units of the result's root mean square.
    """
    for chosen in _SIZES if size == 0 else (size,):
        call, expected = _call(kernel, dtype, chosen)
        base, _ = _call(kernel, "float32", chosen)
        output = _finished(call)  # warms up, as the next does
        _finished(base)
        times: list[float] = []
        base_times: list[float] = []
        for _ in range(_REPEATS):  # in turn, so that whatever else the machine does slows both
            times.append(_seconds(call))
            base_times.append(_seconds(base))
        if min(base_times) >= _LONG_ENOUGH:
            break
    flat = output.astype(np.float64).reshape(-1)
    error = abs(float(flat[0]) - expected) / float(np.sqrt(np.mean(flat**2)))
    return {
        "kernel": kernel,
        "dtype": dtype,
        "size": chosen,
        "seconds": min(times),
        "float32_seconds": min(base_times),
        "error": error if np.isfinite(error) else None,
        "right": bool(error < _TOLERANCE[dtype]),
    }


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    _finished(call)
    return time.perf_counter() - begin


def _call(kernel: str, dtype: str, size: int) -> tuple[Callable[[], Any], float]:
    """The call, and the first element of what it should give."""
    random = np.random.RandomState(0)  # the same numbers in every process
    if kernel == "matmul":
        a, b = random.randn(size, size) / size**0.5, random.randn(size, size)
        x, y = _tensor(a, dtype), _tensor(b, dtype)
        return (lambda: ops.matmul(x, y)), float(a[0] @ b[:, 0])
    channels = max(8, size // 16)
    image, weight = random.randn(8, channels, 28, 28), random.randn(channels, channels, 3, 3) / (9 * channels) ** 0.5
    x, y = _tensor(image, dtype), _tensor(weight, dtype)
    return (lambda: ops.conv2d(x, y)), float((image[0, :, :3, :3] * weight[0]).sum())


def _tensor(values: Any, dtype: str) -> Any:
    tensor = Tensor(values.astype(np.float32))
    return tensor if dtype == "float32" else ops.cast(tensor, getattr(mindspore, dtype))


def _finished(call: Callable[[], Any]) -> Any:
    result = call()
    # The copy waits for the kernel. numpy has no bfloat16.
    return (ops.cast(result, mindspore.float32) if result.dtype == mindspore.bfloat16 else result).asnumpy()


def main(arguments: list[str]) -> int:
    """``settings``, or ``DTYPE:KERNEL:SIZE``, each answered by a line."""
    for argument in arguments:
        if argument == "settings":
            _say({"settings": settings()})
            continue
        dtype, kernel, size = argument.split(":")
        _say({"begins": argument})
        try:
            _say(measure(kernel, dtype, int(size)))
        except (RuntimeError, TypeError, ValueError) as error:
            # MindSpore frames its messages in dashes.
            lines = [line.strip() for line in str(error).splitlines() if any(c.isalpha() for c in line)]
            said = next((line for line in lines if not line.startswith("-")), "")
            _say({"kernel": kernel, "dtype": dtype, "failed": f"{type(error).__name__}: {said[:200]}"})
            return 0  # after a missing kernel the process may die at any later call: the next begins anew
    return 0


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
