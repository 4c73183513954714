"""The most memory that a training has in use: on the device where MindSpore tells, else in the process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Literal

import mindspore

from ampdebug._compare_records import Memory

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class MemoryMeter:
    """Counts from where it is made; everything up to there is not the training's.

    Of a process, Linux tells the high-water mark of its resident size (``VmHWM`` of proc(5)), and sets it back on
    request. ``getrusage`` has one too, but a child inherits its parent's in it: asked only where there is no /proc.
    """

    def __init__(self) -> None:
        self._source: Literal["device", "process"] = "process"
        if mindspore.get_context("device_target") != "CPU":
            self._source = "device"
            mindspore.runtime.reset_peak_memory_stats()
            self._before = int(mindspore.runtime.memory_allocated())
            return
        try:
            _CLEAR.write_text("5", encoding="ascii")
        except OSError:
            pass  # not Linux, or not allowed here: the mark then counts from the start of the process
        self._before = _resident()

    def read(self) -> Memory:
        """What was in use at the beginning, and the most since then."""
        if self._source == "device":
            return Memory(self._before, int(mindspore.runtime.max_memory_allocated()), "device")
        return Memory(self._before, max(self._before, _highest()), "process")


def _resident() -> int:
    return _of_status("VmRSS") or _highest()


def _highest() -> int:
    mark = _of_status("VmHWM")
    if mark is not None:
        return mark
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else 1024 * highest


def _of_status(name: str) -> int | None:
    """A line of ``/proc/self/status`` in bytes; None where there is no such thing."""
    try:
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    line = next((line for line in lines if line.startswith(f"{name}:")), None)
    return None if line is None else 1024 * int(line.split()[1])
