"""ampdebug: see what mixed precision does to every layer of a MindSpore training run.

Measure while training (this needs MindSpore)::

    monitor = ampdebug.AMPMonitor("runs/exp1")              # a mindspore Callback
    model.train(3, data, callbacks=[monitor])

    with ampdebug.watch(net, optimizer=opt, out="runs/exp2") as run:    # a functional loop
        ...

Read afterwards, anywhere::

    run = ampdebug.open_run("runs/exp1")
    print(run)                                              # the cells that deserve a look, then a summary
    ampdebug.write_tensorboard(run, "runs/tb")

Ask what is wrong::

    print(ampdebug.check(net, x, y, loss_fn=loss_fn))       # one instrumented step, before the real training
    print(ampdebug.diagnose("runs/exp1"))                   # a recorded run, or a log of any common framework

This page is the whole public interface; modules whose name starts with an underscore may change.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ampdebug._errors import (
    AmpdebugError,
    AmpdebugWarning,
    ArgumentError,
    FormatError,
    NoObservationsError,
    RunExistsError,
    StoreError,
)
from ampdebug._records import Birth, Cell, Event, Site, Step

__version__ = "0.1.0"

__all__ = [
    "AMPMonitor",
    "AmpdebugError",
    "AmpdebugWarning",
    "ArgumentError",
    "Birth",
    "BisectResult",
    "Cell",
    "DeepSpeedScale",
    "Diagnosis",
    "DynamicScale",
    "Event",
    "Evidence",
    "Finding",
    "FormatError",
    "NoObservationsError",
    "Report",
    "Run",
    "RunExistsError",
    "ScaleSimulation",
    "Site",
    "StaticScale",
    "Step",
    "StoreError",
    "TensorBoardSink",
    "TensorStats",
    "TorchScale",
    "Trace",
    "__version__",
    "bisect",
    "build_report",
    "check",
    "diagnose",
    "export",
    "open_run",
    "simulate_scale",
    "summarize",
    "watch",
    "write_tensorboard",
]

if TYPE_CHECKING:
    from ampdebug._bisect_result import BisectResult
    from ampdebug._diagnose import Diagnosis, diagnose
    from ampdebug._export import export
    from ampdebug._run import Run, open_run
    from ampdebug._scale import (
        DeepSpeedScale,
        DynamicScale,
        ScaleSimulation,
        StaticScale,
        TorchScale,
        simulate_scale,
    )
    from ampdebug._stats import TensorStats, summarize
    from ampdebug._trace import Trace
    from ampdebug.hooks import AMPMonitor, watch
    from ampdebug.hooks._bisection import bisect
    from ampdebug.hooks._preflight import check
    from ampdebug.report import Report, TensorBoardSink, build_report, write_tensorboard
    from ampdebug.rules import Evidence, Finding
else:
    # Loaded at first use, so that the command line starts quickly and MindSpore is imported only by who measures.
    # Hidden from type checkers: a visible __getattr__ makes them accept any misspelt name.
    _LAZY = {
        "AMPMonitor": "ampdebug.hooks",
        "BisectResult": "ampdebug._bisect_result",
        "DeepSpeedScale": "ampdebug._scale",
        "Diagnosis": "ampdebug._diagnose",
        "DynamicScale": "ampdebug._scale",
        "Evidence": "ampdebug.rules",
        "Finding": "ampdebug.rules",
        "Report": "ampdebug.report",
        "Run": "ampdebug._run",
        "ScaleSimulation": "ampdebug._scale",
        "StaticScale": "ampdebug._scale",
        "TensorBoardSink": "ampdebug.report",
        "TensorStats": "ampdebug._stats",
        "TorchScale": "ampdebug._scale",
        "Trace": "ampdebug._trace",
        "bisect": "ampdebug.hooks._bisection",
        "build_report": "ampdebug.report",
        "check": "ampdebug.hooks._preflight",
        "diagnose": "ampdebug._diagnose",
        "export": "ampdebug._export",
        "open_run": "ampdebug._run",
        "simulate_scale": "ampdebug._scale",
        "summarize": "ampdebug._stats",
        "watch": "ampdebug.hooks",
        "write_tensorboard": "ampdebug.report",
    }

    def __getattr__(name):
        if name not in _LAZY:
            raise AttributeError(f"module 'ampdebug' has no attribute {name!r}")
        try:
            module = importlib.import_module(_LAZY[name])
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != "mindspore":
                raise
            raise ModuleNotFoundError(
                f"ampdebug.{name} measures a MindSpore training run and needs MindSpore, which is not installed here: "
                "pip install 'mindspore>=2.10'. Reading a recorded run (ampdebug.open_run, ampdebug report) works "
                "without.",
                name="mindspore",
            ) from error
        value = getattr(module, name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__} - {"annotations", "importlib", "TYPE_CHECKING"})
