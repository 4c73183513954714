"""MindSpore's own threads, when they call Python."""

from __future__ import annotations

import ctypes
import sys
import threading

_known = threading.local()


def keep_thread_state() -> None:
    """Makes the running thread keep its Python thread state when it leaves Python. Acts at its first call in a thread.

    A thread that Python did not start needs a thread state to run Python code. MindSpore (pybind11) makes one for each
    call and deletes it afterwards, which takes longer than a short callback does: 45 us a callback of a graph, against
    17 us where the state is there already (two cores).

    The state is held by one reference of CPython's ``PyGILState_Ensure`` that is never given back, so it goes with the
    interpreter; a thread that ends before leaves some hundred bytes behind.
    """
    # What is kept in here goes with the thread's state: where that was deleted, it is held anew.
    if not hasattr(_known, "held"):
        _known.held = True
        if sys.implementation.name == "cpython":
            ctypes.pythonapi.PyGILState_Ensure()
